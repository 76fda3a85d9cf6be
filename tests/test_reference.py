"""The reference cache: what is scored, what it refuses, what it verifies."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from erpo.config import RunConfig
from erpo.data.problems import vocabulary
from erpo.records import Query, write_queries
from erpo.reference import build_cache, hash_queries, load_cache, score_prompts, static_weights, verify_cache
from erpo.templates import build_tokenizer, fingerprint

SPEC = {"model": "tiny"}


class Bigram(nn.Module):
    """A model of four tokens whose next token depends on the last one alone: P(1|0) = 1/2, P(2|1) = 1/4, P(3|2) = 1/16."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.tensor(
            [
                [1 / 6, 1 / 2, 1 / 6, 1 / 6],
                [1 / 4, 1 / 4, 1 / 4, 1 / 4],
                [5 / 16, 5 / 16, 5 / 16, 1 / 16],
                [1 / 4, 1 / 4, 1 / 4, 1 / 4],
            ]
        )
        self.table = nn.Parameter(rows.log() + 3.0)  # logits need not be normalised

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def small_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
        config = Qwen2Config(vocab_size=200, **sizes, initializer_range=0.2, tie_word_embeddings=True)
        return Qwen2ForCausalLM(config).to(dtype).eval()


def some_queries(count: int = 30, seed: int = 0) -> list[Query]:
    rng = np.random.default_rng(seed)
    lengths = [1, 2, *rng.integers(3, 20, count - 2).tolist()]
    return [Query(f"id{i}", f"problem {i}", "1", tuple(rng.integers(0, 180, n).tolist())) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model folder, its queries and the cache made of them."""
    root = tmp_path_factory.mktemp("reference")
    tokenizer = build_tokenizer(vocabulary())
    small_model().save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    queries = some_queries()
    write_queries(root / "queries.parquet", queries)
    paths = {"out": root / "reference" / "cache.parquet", "marker": root / "markers" / "cache.json"}
    build_cache(root / "model", root / "queries.parquet", **paths, spec=SPEC, batch_tokens=64)
    return SimpleNamespace(root=root, queries=queries, tokenizer=tokenizer, **paths)


def copy_marker(made, tmp_path, **changes):
    """The marker beside a changed cache file or with changed facts."""
    facts = {**json.loads(made.marker.read_text()), "cache": str(made.out), **changes}
    path = tmp_path / "marker.json"
    path.write_text(json.dumps(facts))
    return path


# --- what is scored ----------------------------------------------------------------------------------------------------


def test_the_first_token_is_never_scored_and_nothing_is_shifted():
    (alone,) = score_prompts(Bigram(), [(0, 1, 2)], batch_tokens=100)
    np.testing.assert_allclose(alone, [-math.log(2), -math.log(4)], atol=1e-6)
    assert -alone.sum() == pytest.approx(math.log(8), abs=1e-6)  # 2.0794; 4.852 would be one token too many
    (with_response,) = score_prompts(Bigram(), [(0, 1, 2, 3)], batch_tokens=100)
    assert with_response[2:].sum() == pytest.approx(-math.log(16), abs=1e-6)


@pytest.mark.parametrize("batch_tokens", [1, 7, 1000])
def test_batches_padding_and_order_change_nothing(batch_tokens):
    prompts = [(0, 1, 2), (0, 1, 2, 3, 3, 0, 1), (2,), (0, 1, 2), (1, 2)]
    scored = score_prompts(Bigram(), prompts, batch_tokens)
    backwards = score_prompts(Bigram(), prompts[::-1], batch_tokens)[::-1]
    assert [len(values) for values in scored] == [2, 6, 0, 2, 1]
    for values, again in zip(scored, backwards, strict=True):
        np.testing.assert_allclose(values, again, atol=1e-6)
    np.testing.assert_allclose(scored[0], [-math.log(2), -math.log(4)], atol=1e-6)
    np.testing.assert_allclose(scored[3], scored[0], atol=1e-6)
    np.testing.assert_allclose(scored[4], [-math.log(4)], atol=1e-6)


def test_a_real_model_is_scored_as_by_a_forward_of_each_query(made):
    model, cache = small_model(), load_cache(made.marker, made.queries)
    for query in made.queries:
        ids = torch.tensor([query.prompt_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), -1)
        expected = logprobs.gather(-1, ids[0, 1:, None]).squeeze(-1).numpy()
        np.testing.assert_allclose(cache.logprobs(query.query_id), expected, atol=1e-5)
        assert cache.logprobs(query.query_id).dtype == np.float32


def test_counts_and_sums(made):
    cache = load_cache(made.marker, made.queries)
    assert cache.num_tokens.tolist() == [len(query.prompt_ids) - 1 for query in made.queries]
    assert cache.nll[0] == 0  # one token: nothing predicted
    np.testing.assert_allclose(cache.nll, [-cache.logprobs(query.query_id).sum() for query in made.queries], rtol=1e-6)
    table = pq.read_table(made.out)
    assert table["num_tokens"].to_pylist() == cache.num_tokens.tolist()
    np.testing.assert_allclose(table["nll"].to_numpy(), cache.nll, rtol=1e-12)
    assert [tuple(ids) for ids in table["prompt_ids"].to_pylist()] == [query.prompt_ids for query in made.queries]


def test_scoring_leaves_mode_and_gradients_alone():
    model = small_model().train()
    score_prompts(model, [(1, 2, 3)], 100)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


# --- what it was made of -----------------------------------------------------------------------------------------------


def test_the_identity_names_model_tokenizer_template_and_data(made):
    facts = json.loads(made.marker.read_text())
    assert facts["identity"] == {**facts["identity"], **fingerprint(made.tokenizer), "data": hash_queries(made.queries)}
    assert json.loads(pq.read_schema(made.out).metadata[b"erpo"]) == facts["identity"]
    assert facts["spec"] == SPEC
    assert facts["num_queries"] == 30
    load_cache(made.marker, made.queries, model_hash=facts["identity"]["model"], tokenizer=made.tokenizer)


def test_made_again_it_is_kept_and_only_the_marker_is_written(made, monkeypatch):
    before = made.out.stat().st_mtime_ns, made.marker.read_text()
    made.marker.unlink()
    monkeypatch.setattr("erpo.reference.score_prompts", None)  # scoring again would fail
    build_cache(made.root / "model", made.root / "queries.parquet", out=made.out, marker=made.marker, spec=SPEC)
    again = json.loads(made.marker.read_text())
    assert made.out.stat().st_mtime_ns == before[0]
    assert {**again, "seconds": 0} == {**json.loads(before[1]), "seconds": 0}


def test_another_model_is_scored_anew(made, tmp_path):
    small_model(seed=1).save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    out, marker = tmp_path / "cache.parquet", tmp_path / "cache.json"
    out.write_bytes(made.out.read_bytes())
    build_cache(tmp_path / "model", made.root / "queries.parquet", out=out, marker=marker, spec=SPEC)
    first, second = load_cache(made.marker, made.queries), load_cache(marker, made.queries)
    assert abs(first.nll - second.nll).max() > 0.1


def test_queries_may_come_in_another_order(made):
    backwards = load_cache(made.marker, made.queries[::-1])
    assert backwards.num_tokens.tolist() == [len(query.prompt_ids) - 1 for query in made.queries[::-1]]


# --- refusals ----------------------------------------------------------------------------------------------------------


def test_another_model_is_refused(made):
    with pytest.raises(ValueError, match=r"made with another model .* instead of 0123"):
        load_cache(made.marker, made.queries, model_hash="0123")


def test_another_tokenizer_and_another_template_are_told_apart(made):
    other = build_tokenizer([*vocabulary(), "further words"])
    with pytest.raises(ValueError, match="another tokenizer") as refusal:
        load_cache(made.marker, made.queries, tokenizer=other)
    assert "template" not in str(refusal.value)
    same = build_tokenizer(vocabulary())
    same.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match="another chat template") as refusal:
        load_cache(made.marker, made.queries, tokenizer=same)
    assert "another tokenizer" not in str(refusal.value)


def test_other_queries_are_refused_and_named(made):
    changed = [*made.queries[:5], Query("id5", "problem 5", "1", (9, 9, 9)), *made.queries[6:]]
    with pytest.raises(ValueError, match=r"other queries.*1 with other token ids \(first: id5\)"):
        load_cache(made.marker, changed)
    with pytest.raises(ValueError, match=r"30 queries in it, 31 asked for, 1 missing \(first: new\)"):
        load_cache(made.marker, [*made.queries, Query("new", "problem", "1", (1, 2))])
    with pytest.raises(ValueError, match="30 queries in it, 29 asked for"):
        load_cache(made.marker, made.queries[1:])


def test_an_older_format_is_refused(made, tmp_path, monkeypatch):
    monkeypatch.setattr("erpo.reference.CACHE_VERSION", 2)
    with pytest.raises(ValueError, match="format 1 and this version writes 2"):
        load_cache(made.marker, made.queries)


def test_a_missing_or_altered_file_is_refused(made, tmp_path):
    with pytest.raises(ValueError, match="is missing although"):
        load_cache(copy_marker(made, tmp_path, cache=str(tmp_path / "none.parquet")), made.queries)
    data = bytearray(made.out.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "altered.parquet").write_bytes(data)
    with pytest.raises(ValueError, match="does not match its checksum"):
        load_cache(copy_marker(made, tmp_path, cache=str(tmp_path / "altered.parquet")), made.queries)


def test_no_queries_and_a_broken_model_are_refused(made, tmp_path):
    write_queries(tmp_path / "none.parquet", [])
    paths = {"out": tmp_path / "cache.parquet", "marker": tmp_path / "cache.json"}
    with pytest.raises(ValueError, match="holds no queries"):
        build_cache(made.root / "model", tmp_path / "none.parquet", **paths, spec=SPEC)
    model = small_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    model.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"29 queries \(id1, id2, id3, \.\.\.\) have a likelihood that is not finite"):
        build_cache(tmp_path / "model", made.root / "queries.parquet", **paths, spec=SPEC)
    assert not paths["out"].exists()


# --- verification before training --------------------------------------------------------------------------------------


def test_the_policy_before_its_first_update_is_accepted(made):
    cache = load_cache(made.marker, made.queries)
    assert verify_cache(cache, small_model(), made.queries) < 1e-6
    assert verify_cache(cache, small_model(dtype=torch.bfloat16), made.queries) > 0


def test_another_policy_is_refused(made):
    with pytest.raises(ValueError, match=r"does not describe this policy: over 4 queries.*cache_reference"):
        verify_cache(load_cache(made.marker, made.queries), small_model(seed=1), made.queries)


def test_a_slightly_moved_policy_is_refused(made):
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    with pytest.raises(ValueError, match="does not describe this policy"):
        verify_cache(load_cache(made.marker, made.queries), model, made.queries, fraction=1.0)


def test_the_sample_is_seeded_and_of_the_asked_size(made, monkeypatch):
    seen: list[list[tuple[int, ...]]] = []

    def recorded(model, prompts, batch_tokens):
        seen.append(list(prompts))
        return score_prompts(model, prompts, batch_tokens)

    monkeypatch.setattr("erpo.reference.score_prompts", recorded)
    cache = load_cache(made.marker, made.queries)
    for arguments in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"fraction": 0.5}, {"at_least": 400}):
        verify_cache(cache, small_model(), made.queries, **arguments)
    assert [len(prompts) for prompts in seen] == [4, 4, 4, 15, 30]
    assert seen[0] == seen[1]
    assert seen[0] != seen[2]


# --- weights -----------------------------------------------------------------------------------------------------------


def test_static_weights_follow_the_reference_and_the_settings(made):
    cache = load_cache(made.marker, made.queries)

    def weights(**settings):
        return static_weights(cache, made.queries, RunConfig(kl_on="query", **settings))

    assert weights() == {}
    assert weights(query_weight="online_inverse_nll") == {}
    likelihood = np.exp(-cache.nll[1:] / cache.num_tokens[1:])
    expected = np.minimum(likelihood / likelihood.mean(), 2.0)
    found = weights(query_weight="reference_likelihood")
    np.testing.assert_allclose([found[query.query_id] for query in made.queries[1:]], expected, rtol=1e-6)
    assert found["id0"] == 1.0  # no predicted token, no opinion
    inverse = weights(query_weight="reference_inverse_nll", query_weight_cap=None)
    np.testing.assert_allclose([inverse[q.query_id] for q in made.queries[1:]], cache.nll[1:].mean() / cache.nll[1:], rtol=1e-6)
    np.testing.assert_allclose(
        np.mean(list(weights(query_weight="reference_likelihood", renormalise_query_weights=True).values())), 1.0
    )
