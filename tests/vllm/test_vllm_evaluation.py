"""Evaluation through vLLM: one engine for all benchmarks and temperatures; the store, its keys and the scores are the sampler's."""

import json

import pyarrow.parquet as pq
import pytest

from erpo import evaluation
from erpo.samples import part_facts


@pytest.fixture(scope="module")
def sampled(place):
    """Two benchmarks at three temperatures, and the number of engines that took."""
    opened = []
    open_vllm = evaluation._open_vllm

    def counted(*arguments):
        opened.append(arguments)
        return open_vllm(*arguments)

    root = place.root / "evaluation"
    root.mkdir()
    first, second = root / "first.parquet", root / "second.parquet"
    table = pq.read_table(place.queries)
    pq.write_table(table.slice(0, 6), first)
    pq.write_table(table.slice(6), second)
    arguments = {
        "policy_marker": place.model,
        "benchmarks": {"first": first, "second": second},
        "temperatures": (0.0, 0.6, 1.0),
        "samples": 3,
        "top_p": 0.95,
        "max_response_tokens": 12,
        "seed": 2,
        "store": root / "store",
        "marker": root / "shard.json",
        "generator": "vllm",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "_open_vllm", counted)
        evaluation.generate_samples(**arguments)
        evaluation.generate_samples(**arguments)  # nothing is missing: no engine is started
    return root, arguments, opened


def test_one_engine_serves_all_temperatures_and_benchmarks(sampled):
    root, _, opened = sampled
    assert len(opened) == 1
    counts = {label: held["counts"] for label, held in json.loads((root / "shard.json").read_text())["holdings"].items()}
    assert counts == {label: {"first": 18, "second": 12} for label in ("0.0", "0.6", "1.0")}


def test_the_parts_say_which_engine_drew_them(sampled):
    root, _, _ = sampled
    (facts, *rest) = [part_facts(path) for path in sorted((root / "store").rglob("part-*.parquet"))]
    assert facts["engine"]["name"] == "vllm"
    assert facts["engine"]["vllm"].startswith("0.32.")
    assert len(rest) == 2


def test_its_samples_are_scored_like_any_others(sampled):
    root, arguments, _ = sampled
    evaluation.score_samples(
        markers=[root / "shard.json"],
        benchmarks=arguments["benchmarks"],
        store=root / "store",
        out=root / "scores.parquet",
        provenance={"run": "r", "seed": 2, "step": 0, "samples": 3, "temperatures": [0.0, 0.6, 1.0]},
        workers=1,
    )
    scores = pq.read_table(root / "scores.parquet").to_pydict()
    assert len(scores["correct"]) == 3 * 3 * 10
    greedy = {}
    for query, temperature, text in zip(scores["query_id"], scores["temperature"], scores["text_hash"], strict=True):
        if temperature == 0:
            greedy.setdefault(query, set()).add(text)
    assert {len(texts) for texts in greedy.values()} == {1}
