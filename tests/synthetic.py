"""Results of a study that never ran: scores and training logs with known numbers, in the real formats."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa

from erpo.scores import SCHEMA, write_scores


def scores_table(rows):
    """Rows of dictionaries (benchmark, query_id, temperature, sample_index, verdict, ...) as a scores table."""
    defaults = {"format_ok": True, "length": 10, "truncated": False, "answer": "1", "flagged": False, "level": 1}
    full = [{**defaults, "text_hash": 0, "second_opinion": -1, "correct": row["verdict"] == "correct", **row} for row in rows]
    return pa.table({name: pa.array([row[name] for row in full]).cast(SCHEMA.field(name).type) for name in SCHEMA.names})


def write_cell(folder, table, run, seed, step, samples, benchmarks, temperatures, **facts):
    """One scores file where the workflow would put it."""
    path = Path(folder) / f"scores/{run}/seed{seed}/step{step}.parquet"
    given = {"run": run, "seed": seed, "step": step, "study": "quickstart", "samples": samples, "temperatures": list(temperatures)}
    settings = {"top_p": 1.0, "max_tokens": 64, "stop_ids": [2]}
    write_scores(path, table, {**given, "benchmarks": benchmarks, "sampling": settings, "policy_hash": f"{run}{seed}", **facts})
    return path


def simulate_scores(rng, rates, sizes, temperatures, samples, truncated=0.02, no_answer=0.05):
    """A whole scores table by columns; `rates(benchmark, temperature)` is the mean accuracy."""
    names = list(sizes)
    queries = [f"{name}-{index}" for name in names for index in range(sizes[name])]
    owner = np.repeat(np.arange(len(names)), [sizes[name] for name in names])
    hardness = np.random.default_rng(7).normal(0, 0.25, len(queries))  # the same problems for every run
    count, shape = len(queries), (len(queries), len(temperatures), samples)
    mean = np.array([[rates(names[o], t) for t in temperatures] for o in owner])
    correct = rng.random(shape) < np.clip(mean + hardness[:, None] * np.minimum(mean, 1 - mean) * 3, 0, 1)[:, :, None]
    cut = ~correct & (rng.random(shape) < truncated)
    silent = ~correct & ~cut & (rng.random(shape) < no_answer)
    verdict = np.select([correct, cut, silent], [0, 1, 2], 3).ravel()
    size = verdict.size
    query = np.repeat(np.arange(count), len(temperatures) * samples)

    def names_of(codes, values):
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), values)

    columns = {
        "benchmark": names_of(owner[query], names),
        "query_id": pa.array(np.array(queries, dtype=object)[query], pa.string()),
        "temperature": np.tile(np.repeat(temperatures, samples), count),
        "sample_index": pa.array(np.tile(np.arange(samples), count * len(temperatures)), pa.int32()),
        "verdict": names_of(verdict, ["correct", "truncated", "no_answer", "wrong"]),
        "correct": pa.array(correct.ravel()),
        "format_ok": pa.array(np.ones(size, bool)),
        "length": pa.array(np.full(size, 20), pa.int32()),
        "truncated": pa.array(cut.ravel()),
        "answer": pa.array(np.where(correct.ravel(), "1", "2").astype(object), pa.string()),
        "flagged": pa.array(query % 20 == 0),
        "level": pa.array(1 + query % 5, pa.int8()),
        "text_hash": pa.array(np.arange(size), pa.int64()),
        "second_opinion": pa.array(np.full(size, -1), pa.int8()),
    }
    return pa.table(columns, schema=SCHEMA)


def write_training(folder, run, seed, step, rows, settings=None, **facts):
    """A training marker and its log where the workflow would put them."""
    base = Path(folder) / f"runs/{run}/seed{seed}"
    (base / "work").mkdir(parents=True, exist_ok=True)
    (base / "work/metrics.jsonl").write_text("".join(json.dumps({"attempt": 1, **row}) + "\n" for row in rows))
    sample = {"step": 1, "query": "1 + 1 <b>?", "response": "<script>alert(1)</script> \\boxed{2}", "gold": "2", "answer": "2"}
    (base / "work/samples.jsonl").write_text(json.dumps({**sample, "verdict": "correct", "reason": "equal", "reward": 1.0}) + "\n")
    marker = base / f"step{step}.json"
    paths = {"policy": f"work/policies/step{step}", "metrics": "work/metrics.jsonl", "samples": "work/samples.jsonl"}
    content = {
        "run": run,
        "seed": seed,
        "step": step,
        "spec": {"run": settings or {}},
        "spec_hash": "0",
        "policy_hash": f"{run}{seed}",
    }
    marker.write_text(json.dumps({**content, **paths, "seconds": 12.0, **facts}))
    return marker
