"""The sampler: exact in distribution, exact log-probs, every sample a function of its own seed, any architecture."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from erpo.draw import draw, uniforms
from erpo.generation import PolicySampler, Request, Sampling

VOCABULARY = 40
STOPS = (1, 2)
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
FAMILIES = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, tie_word_embeddings=True)),
    "qwen2 grouped heads, untied": lambda: Qwen2ForCausalLM(
        Qwen2Config(**{**SMALL, "num_key_value_heads": 2}, tie_word_embeddings=False)
    ),
    "qwen2 sliding": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**{**SMALL, "num_key_value_heads": 2}, head_dim=8)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_key_value_heads": 1})),
    "gemma3 sliding": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SMALL, head_dim=8, sliding_window=5, query_pre_attn_scalar=8, layer_types=["sliding_attention", "full_attention"]
        )
    ),
    "gpt2 learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    ),
}


def build(family: str, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return FAMILIES[family]().eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("qwen2")


def requests(count: int = 5, samples: int = 3, longest: int = 13, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    lengths = [1, longest, *rng.integers(2, longest, count - 2).tolist()]
    return [
        Request(f"q{i}", tuple(rng.integers(3, VOCABULARY, length).tolist()), tuple(range(1000 * i, 1000 * i + samples)))
        for i, length in enumerate(lengths)
    ]


def sampling(temperature: float = 1.0, top_p: float = 1.0, max_tokens: int = 16, stop_ids: tuple[int, ...] = STOPS) -> Sampling:
    return Sampling(temperature, top_p, max_tokens, stop_ids)


@torch.no_grad()
def forward_logprobs(model: nn.Module, prompt: tuple[int, ...], response: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs of the response by one plain forward over the whole text."""
    ids = torch.tensor([[*prompt, *response.tolist()]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double() / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).numpy()


def same(first: list, second: list) -> bool:
    return all(
        np.array_equal(a.response_ids, b.response_ids) and np.allclose(a.logprobs, b.logprobs, atol=1e-5)
        for x, y in zip(first, second, strict=True)
        for a, b in zip(x, y, strict=True)
    )


# --- what comes back ---------------------------------------------------------------------------------------------------


def test_rollouts_carry_ids_reason_index_and_version(model):
    sampler = PolicySampler(model)
    sampler.update_weights((), version=7)
    asked = [Request("a", (5, 6), (11, 12, 13), first_index=4)]
    (group,) = sampler.generate(asked, sampling(max_tokens=9))
    assert [rollout.sample_index for rollout in group] == [4, 5, 6]
    assert {(rollout.query_id, rollout.weights_version) for rollout in group} == {("a", 7)}
    for rollout in group:
        assert rollout.response_ids.dtype == np.int32
        assert rollout.logprobs.dtype == np.float32
        assert len(rollout.response_ids) == len(rollout.logprobs) <= 9
        ends = int(rollout.response_ids[-1]) in STOPS
        assert rollout.finish_reason == ("stop" if ends else "length")
        assert ends or len(rollout.response_ids) == 9
        assert not set(rollout.response_ids[:-1].tolist()) & set(STOPS)


def test_every_stop_id_ends_a_response_and_none_runs_on(model):
    everything = [r for group in PolicySampler(model).generate(requests(8, 40), sampling(max_tokens=60)) for r in group]
    last = {int(r.response_ids[-1]) for r in everything if r.finish_reason == "stop"}
    assert last == set(STOPS)
    without = [r for group in PolicySampler(model).generate(requests(2, 4), sampling(max_tokens=60, stop_ids=())) for r in group]
    assert {len(r.response_ids) for r in without} == {60}
    assert {r.finish_reason for r in without} == {"length"}


def test_an_end_token_at_the_limit_is_a_stop_not_a_truncation(model):
    drawn = [r for group in PolicySampler(model).generate(requests(4, 200), sampling(max_tokens=1)) for r in group]
    assert {len(r.response_ids) for r in drawn} == {1}
    assert {r.finish_reason for r in drawn if int(r.response_ids[0]) in STOPS} == {"stop"}
    assert {r.finish_reason for r in drawn if int(r.response_ids[0]) not in STOPS} == {"length"}


def test_no_requests_and_no_seeds_give_empty_lists(model):
    assert PolicySampler(model).generate([], sampling()) == []
    assert PolicySampler(model).generate([Request("a", (5,), ())], sampling()) == [[]]


def test_progress_counts_finished_responses_up_to_all_of_them(model):
    told: list[int] = []
    PolicySampler(model, batch_rows=5).generate(requests(6, 4), sampling(), progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 24


# --- exactness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_logprobs_equal_a_full_forward(family, temperature):
    model, asked = build(family), requests()
    groups = PolicySampler(model, batch_rows=9).generate(asked, sampling(temperature))
    for request, group in zip(asked, groups, strict=True):
        for rollout in group:
            expected = forward_logprobs(model, request.prompt_ids, rollout.response_ids, temperature)
            np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(family):
    model, asked = build(family), requests(samples=1)
    groups = PolicySampler(model).generate(asked, sampling(temperature=0.0))
    for request, (rollout,) in zip(asked, groups, strict=True):
        ids = torch.tensor([request.prompt_ids])
        neutral = GenerationConfig(do_sample=False, max_new_tokens=16, eos_token_id=list(STOPS), pad_token_id=0)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=neutral)
        assert rollout.response_ids.tolist() == output[0, len(request.prompt_ids) :].tolist()
        np.testing.assert_allclose(
            rollout.logprobs, forward_logprobs(model, request.prompt_ids, rollout.response_ids, 1.0), atol=1e-5
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sample_does_not_depend_on_batch_size_order_or_company(family):
    model, asked = build(family), requests()
    whole = PolicySampler(model).generate(asked, sampling())
    assert same(whole, PolicySampler(model, batch_rows=5).generate(asked, sampling()))
    assert same(whole, PolicySampler(model, batch_rows=3).generate(asked[::-1], sampling())[::-1])
    alone = [PolicySampler(model, batch_rows=1).generate([request], sampling())[0] for request in asked]
    assert same(whole, alone)


def test_a_long_run_with_refills_and_moving_buffers_stays_exact(model):
    asked = [Request(f"q{i}", (3 + i % 30, *range(3, 3 + i % 7)), tuple(range(50 * i, 50 * i + 3))) for i in range(40)]
    groups = PolicySampler(model, batch_rows=8).generate(asked, sampling(max_tokens=80))
    lengths = [len(r.response_ids) for group in groups for r in group]
    assert max(lengths) > 40
    for request, group in zip(asked, groups, strict=True):
        for rollout in group:
            expected = forward_logprobs(model, request.prompt_ids, rollout.response_ids, 1.0)
            np.testing.assert_allclose(rollout.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_exact_in_distribution(model, temperature):
    prompt, n = (7, 8, 9), 20_000
    asked = [Request("a", prompt, tuple(range(n)))]
    (group,) = PolicySampler(model, batch_rows=4000).generate(asked, sampling(temperature, max_tokens=2, stop_ids=()))
    drawn = np.array([rollout.response_ids for rollout in group])
    assert p_value(model, prompt, drawn[:, 0], temperature) > 1e-3
    first = np.bincount(drawn[:, 0]).argmax()
    second = drawn[drawn[:, 0] == first, 1]
    assert p_value(model, (*prompt, int(first)), second, temperature) > 1e-3


@torch.no_grad()
def p_value(model: nn.Module, prompt: tuple[int, ...], drawn: np.ndarray, temperature: float) -> float:
    """Chi-square of drawn tokens against the model's distribution; rare tokens pooled."""
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1].double() / temperature
    expected = torch.softmax(logits, -1).numpy() * len(drawn)
    counts = np.bincount(drawn, minlength=VOCABULARY).astype(float)
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        counts = np.append(counts[~rare], counts[rare].sum())
    return chi_square(counts, expected)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of counts against expected counts."""
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), len(counts) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), torch.tensor(statistic / 2)))


# --- the draw ----------------------------------------------------------------------------------------------------------


def test_logprob_of_tempered_logits_by_hand():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    _, logprobs = draw(logits, torch.tensor([0.1], dtype=torch.float64), 0.5, 1.0)
    assert logprobs.item() == pytest.approx(-0.14293163, abs=1e-6)  # e^4 / (e^4 + e^2 + 1)
    _, logprobs = draw(logits, torch.tensor([0.1], dtype=torch.float64), 1.0, 1.0)
    assert logprobs.item() == pytest.approx(-0.40760596, abs=1e-6)


def test_the_cumulative_distribution_is_inverted_at_the_uniform_number():
    logits = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2])).repeat(6, 1)
    uniform = torch.tensor([1e-12, 0.4999, 0.5001, 0.7999, 0.8001, 1 - 1e-12], dtype=torch.float64)
    tokens, _ = draw(logits, uniform, 1.0, 1.0)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]


def test_a_nucleus_keeps_the_fewest_likely_tokens_and_renormalises():
    logits = torch.log(torch.tensor([0.2, 0.5, 0.3])).repeat(3, 1)
    tokens, logprobs = draw(logits, torch.tensor([0.1, 0.9, 0.999], dtype=torch.float64), 1.0, 0.75)
    assert tokens.tolist() == [1, 2, 2]
    np.testing.assert_allclose(logprobs.exp(), [0.5 / 0.8, 0.3 / 0.8, 0.3 / 0.8], rtol=1e-6)
    tokens, logprobs = draw(logits, torch.tensor([0.1, 0.9, 0.999], dtype=torch.float64), 1.0, 0.5)
    assert tokens.tolist() == [1, 1, 1]
    np.testing.assert_allclose(logprobs, 0.0, atol=1e-6)


def test_large_vocabularies_are_drawn_in_parts_with_the_same_result(monkeypatch):
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    uniform = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = draw(logits, uniform, 1.0, 1.0)
    monkeypatch.setattr("erpo.draw._DRAW_ELEMENTS", 1000)
    parts = draw(logits, uniform, 1.0, 1.0)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_uniform_numbers_are_uniform_and_independent_of_each_other():
    seeds = np.arange(400, dtype=np.uint64)
    grid = uniforms(np.repeat(seeds, 250), np.tile(np.arange(250), 400)).reshape(400, 250)
    assert grid.min() > 0
    assert grid.max() < 1
    counts, _ = np.histogram(grid, bins=64, range=(0, 1))
    assert chi_square(counts, np.full(64, grid.size / 64)) > 1e-3
    for axis in (0, 1):  # neighbouring seeds, neighbouring positions
        a, b = np.take(grid, range(0, 200), axis).ravel(), np.take(grid, range(1, 201), axis).ravel()
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(a.size)
    assert np.array_equal(grid[3, 5:7], uniforms(np.array([3, 3], np.uint64), np.array([5, 6])))


# --- nothing leaks in, nothing leaks out --------------------------------------------------------------------------------


def test_the_checkpoints_generation_config_has_no_say(model, tmp_path):
    plain = PolicySampler(model).generate(requests(), sampling())
    model.save_pretrained(tmp_path)
    biased = {"repetition_penalty": 1.5, "top_k": 2, "top_p": 0.3, "temperature": 0.7, "do_sample": True, "max_new_tokens": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps({**biased, "eos_token_id": 5}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.top_k == 2
    assert same(plain, PolicySampler(loaded).generate(requests(), sampling()))


def test_global_random_state_and_training_mode_are_left_alone(model):
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    model.train()
    first = PolicySampler(model).generate(requests(), sampling())
    assert model.training
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    torch.manual_seed(4)
    assert same(first, PolicySampler(model.eval()).generate(requests(), sampling()))


def test_dropout_is_off_while_sampling():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(Qwen2Config(**SMALL, attention_dropout=0.5)).train()
    first = PolicySampler(model).generate(requests(), sampling())
    assert same(first, PolicySampler(model).generate(requests(), sampling()))


def test_no_graph_is_kept(model):
    PolicySampler(model).generate(requests(), sampling())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_updated_weights_are_the_ones_that_sample(model):
    other, copy = build("qwen2", seed=5), build("qwen2", seed=0)
    sampler = PolicySampler(copy)
    before = sampler.generate(requests(), sampling())
    sampler.update_weights(other.named_parameters(), version=3)
    after = sampler.generate(requests(), sampling())
    assert not same(before, after)
    assert same(after, PolicySampler(other).generate(requests(), sampling()))
    assert after[0][0].weights_version == 3


# --- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ((-0.1, 1.0, 5, ()), "temperature"),
        ((1.0, 0.0, 5, ()), "top_p"),
        ((1.0, 1.1, 5, ()), "top_p"),
        ((1.0, 1.0, 0, ()), "max_tokens"),
    ],
)
def test_impossible_sampling_parameters_are_refused(values, key):
    with pytest.raises(ValueError, match=key):
        Sampling(*values)


def test_an_empty_prompt_is_refused(model):
    with pytest.raises(ValueError, match="query a has an empty prompt"):
        PolicySampler(model).generate([Request("a", (), (1,))], sampling())


def test_unknown_weights_are_refused(model):
    with pytest.raises(ValueError, match=r"no parameter 'head\.weight'"):
        PolicySampler(model).update_weights([("head.weight", torch.zeros(1))], version=1)


def test_damaged_weights_are_refused():
    model = build("qwen2")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        PolicySampler(model).generate(requests(), sampling())


def test_models_with_a_recurrent_state_are_refused():
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="recurrent state"):
        PolicySampler(model).generate(requests(), sampling())
