"""vLLM as a generator: the distribution asked for and no other, seeds that decide, weights that are really taken over."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from erpo.engine import join_processes
from erpo.generation import PolicySampler, Request, Sampling
from erpo.records import Rollout, derive_seed, read_queries
from erpo.templates import load_tokenizer, stop_ids
from erpo.vllm_engine import VllmGenerator
from tests.vllm.checks import jitter, largest_gap
from tests.vllm.conftest import SHAPE

MAX_LENGTH = 256
BLOCK = 128
"""Tokens of a block of vLLM's prefix cache on a CPU."""


@pytest.fixture(scope="module")
def folder(place) -> Path:
    return place.root / "models" / "tiny"


@pytest.fixture(scope="module")
def requests(place) -> list[Request]:
    queries = read_queries(place.queries)
    return [Request(q.query_id, q.prompt_ids, tuple(derive_seed(3, q.query_id, i) for i in range(4))) for q in queries]


@pytest.fixture(scope="module")
def stops(folder) -> tuple[int, ...]:
    return stop_ids(load_tokenizer(folder), folder)


@pytest.fixture(scope="module")
def vllm(folder) -> VllmGenerator:
    join_processes()
    return VllmGenerator(folder, dtype="float32", max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def model(folder) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def sampling(stops) -> Sampling:
    return Sampling(1.0, 1.0, 24, stops)


def ids_of(groups: list[list[Rollout]]) -> list[list[list[int]]]:
    return [[rollout.response_ids.tolist() for rollout in group] for group in groups]


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (1.0, 1.0), (1.5, 1.0), (1.0, 0.8), (0.7, 0.95)])
def test_logprobs_are_those_of_the_distribution_asked_for(vllm, model, requests, sampling, temperature, top_p):
    groups = vllm.generate(requests, replace(sampling, temperature=temperature, top_p=top_p))
    assert largest_gap(model, requests, groups, temperature, top_p) < 1e-4


def test_greedy_is_the_samplers_greedy_for_any_number_of_samples(vllm, model, requests, sampling):
    greedy = replace(sampling, temperature=0.0)
    ours, theirs = PolicySampler(model).generate(requests, greedy), vllm.generate(requests, greedy)
    assert ids_of(ours) == ids_of(theirs)
    assert all(len({tuple(ids) for ids in group}) == 1 for group in ids_of(theirs))
    for group, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(group[0].logprobs, other[0].logprobs, atol=1e-4)


def test_a_sample_depends_on_its_seed_and_on_nothing_around_it(vllm, requests, sampling):
    first = ids_of(vllm.generate(requests, sampling))
    assert ids_of(vllm.generate(requests, sampling)) == first
    assert ids_of(vllm.generate(requests[::-1], sampling))[::-1] == first
    assert ids_of(vllm.generate(requests[3:4], sampling)) == first[3:4]
    others = [replace(request, seeds=tuple(seed + 1 for seed in request.seeds)) for request in requests]
    assert ids_of(vllm.generate(others, sampling)) != first
    assert len({tuple(ids) for group in first for ids in group}) > len(requests)


def test_more_prompt_tokens_than_one_pass_takes(vllm, model, sampling):
    """No prompt is read in parts: on a CPU vLLM cannot step a seeded generator back."""
    rng = np.random.default_rng(0)
    long = [Request(f"q{i}", tuple(rng.integers(5, 40, 100).tolist()), (derive_seed(4, f"q{i}", 0),)) for i in range(90)]
    groups = vllm.generate(long, replace(sampling, max_tokens=2))
    assert largest_gap(model, long, groups, 1.0, 1.0) < 1e-4


def test_draws_follow_the_policy(vllm, model, requests, sampling):
    """2000 first tokens against the policy's probabilities: chi-squared of the tokens expected ten times or more."""
    request = replace(requests[0], seeds=tuple(range(2000)))
    (group,) = vllm.generate([request], replace(sampling, max_tokens=1))
    counts = np.bincount([rollout.response_ids[0] for rollout in group], minlength=model.config.vocab_size)
    with torch.no_grad():
        expected = 2000 * model(input_ids=torch.tensor([request.prompt_ids])).logits[0, -1].double().softmax(-1).numpy()
    common = expected >= 10
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum() + (
        (counts[~common].sum() - expected[~common].sum()) ** 2 / max(expected[~common].sum(), 1.0)
    )
    freedom = common.sum()
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_ends_are_the_stop_ids_and_the_limit(vllm, requests, sampling, stops):
    groups = vllm.generate(requests, sampling)
    rollouts = [rollout for group in groups for rollout in group]
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        ends = [position for position, token in enumerate(rollout.response_ids.tolist()) if token in stops]
        assert ends == ([len(rollout.response_ids) - 1] if rollout.finish_reason == "stop" else [])
        assert rollout.is_truncated == (rollout.finish_reason == "length")
        assert len(rollout.response_ids) <= sampling.max_tokens
    endless = vllm.generate(requests, replace(sampling, stop_ids=()))
    assert {len(rollout.response_ids) for group in endless for rollout in group} == {sampling.max_tokens}
    assert any(set(stops) & set(rollout.response_ids.tolist()) for group in endless for rollout in group)


def test_query_ids_and_sample_indices_are_kept(vllm, requests, sampling):
    asked = [replace(request, first_index=7) for request in requests[:2]]
    groups = vllm.generate(asked, sampling)
    assert [[rollout.sample_index for rollout in group] for group in groups] == [[7, 8, 9, 10]] * 2
    assert [group[0].query_id for group in groups] == [request.query_id for request in asked]
    told = []
    assert vllm.generate([], sampling, told.append) == []
    assert vllm.generate(asked, sampling, told.append)
    assert told == list(range(1, 9))


def test_an_empty_prompt_and_a_model_too_short_are_refused(vllm, folder, sampling):
    with pytest.raises(ValueError, match="query q has an empty prompt"):
        vllm.generate([Request("q", (), (1,))], sampling)
    limit = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(ValueError, match=f"{limit + 1} tokens, but .* holds {limit}"):
        VllmGenerator(folder, dtype="float32", max_length=limit + 1)


def test_nothing_is_sampled_between_sleep_and_the_next_weights(vllm, folder, requests, sampling):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = ids_of(vllm.generate(requests, sampling))
    vllm.sleep()
    vllm.sleep()
    with pytest.raises(RuntimeError, match="slept"):
        vllm.generate(requests, sampling)
    vllm.wake()
    with pytest.raises(RuntimeError, match="slept"):
        vllm.generate(requests, sampling)
    vllm.update_weights(model.named_parameters(), version=0)
    assert ids_of(vllm.generate(requests, sampling)) == before


# --- engines of their own: vLLM takes its process-wide state down with the first engine that goes, so the shared one is done


def test_the_checkpoints_generation_config_has_no_say(vllm, folder, tmp_path, requests, sampling):
    held = ids_of(vllm.generate(requests, sampling))
    copy = tmp_path / "loud"
    shutil.copytree(folder, copy)
    loud = {"temperature": 0.1, "top_k": 1, "top_p": 0.2, "repetition_penalty": 5.0, "max_new_tokens": 2, "eos_token_id": 5}
    (copy / "generation_config.json").write_text(json.dumps(loud))
    other = VllmGenerator(copy, dtype="float32", max_length=MAX_LENGTH)
    assert ids_of(other.generate(requests, sampling)) == held


@pytest.mark.parametrize("tied", [True, False])
def test_new_weights_are_taken_over_whole(tmp_path, folder, requests, sampling, tied):
    """Tied and untied output weights; prompts longer than a block of the prefix cache; the version is stamped."""
    from tests.tiny import make_place

    place = make_place(tmp_path, **SHAPE, tie_word_embeddings=tied)
    path = place.root / "models" / "tiny"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = VllmGenerator(path, dtype="float32", max_length=MAX_LENGTH)
    long = [replace(request, prompt_ids=(request.prompt_ids * BLOCK)[: BLOCK + 9]) for request in requests[:3]]
    asked = [*requests, *long]
    before = generator.generate(asked, sampling)
    assert largest_gap(model, asked, before) < 1e-4
    tensors = jitter(model, seed=1)
    generator.update_weights(iter(tensors), version=4)
    after = generator.generate(asked, sampling)
    assert largest_gap(model, asked, after) < 1e-4
    assert largest_gap(model, asked, before) > 0.1  # the weights did change
    assert {rollout.weights_version for group in after for rollout in group} == {4}
    held = ids_of(after)
    jitter(model, seed=2)  # the trainer goes on: the engine has its own copies
    assert ids_of(generator.generate(asked, sampling)) == held


def test_an_update_in_part_is_an_error(folder, requests, sampling):
    generator = VllmGenerator(folder, dtype="float32", max_length=MAX_LENGTH)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    some = [(name, tensor) for name, tensor in jitter(model, seed=3) if "layers.1." not in name]
    with pytest.raises(RuntimeError, match="did not take over all weights"):
        generator.update_weights(some, version=1)
    generator.update_weights(model.named_parameters(), version=2)
    assert largest_gap(model, requests, generator.generate(requests, sampling)) < 1e-4
