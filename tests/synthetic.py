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
        "length": pa.array(20 + rng.integers(0, 400, size), pa.int32()),
        "truncated": pa.array(cut.ravel()),
        "answer": names_of(np.where(correct.ravel(), 0, 1 + rng.integers(0, 999, size)), [str(n) for n in range(1000)]).cast(
            pa.string()
        ),
        "flagged": pa.array(query % 20 == 0),
        "level": pa.array(1 + query % 5, pa.int8()),
        "text_hash": pa.array(rng.integers(0, 2**62, size), pa.int64()),
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


STUDY = """
seeds: [0, 1]
models: {tiny: {kind: synthetic}}
train_sets: {train: {kind: synthetic, families: [chain], size: 64}}
benchmarks:
  easy: {kind: synthetic, families: [chain], size: 20, seed: 1}
  hard: {kind: synthetic, families: [chain], size: 20, seed: 2}
evaluation: {temperatures: [0.5, 1.0, 1.3], samples: 4, max_response_tokens: 64}
defaults: {model: tiny, train_set: train, steps: 20}
runs:
  base: {steps: 0}
  grpo: {kl_on: response}
  erpo: {kl_on: query, query_weight: reference_likelihood}
"""
"""A small study file; tests add tables and figures to it."""


def log_rows(steps, query_kl, every=5):
    """A training log in which every number is known: Query-KL grows to `query_kl`, Policy-KL is measured every few steps."""
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "kl/query": query_kl * step / steps, "reward/accuracy": 0.4 + 0.2 * step / steps, "reward/mean": 0.5}
        row |= {"policy/entropy": 1.0 - 0.5 * step / steps, "response/length": 20.0, "time/total": 2.0, "grad/norm": 1.0 / step}
        row |= {"query_weight/mean": 1.0, "query_weight/ess": 0.9, "gradient/cosine": 0.01 * step}
        rows.append(row | ({"kl/response": 0.05 * step / steps} if step % every == 0 else {}))
    return rows


def make_results(folder, study, gain=0.0, keep=lambda cell: True):
    """Scores and training markers of every checkpoint of a study; erpo is better than grpo by `gain`. Returns two mappings."""
    from erpo.config import cells, run_spec, scored_cells

    evaluation = study.evaluation
    sizes = {name: entry.size for name, entry in study.benchmarks.items()}
    better = {"base": -0.1, "grpo": 0.0, "erpo": gain}
    wanted = {cell for found in scored_cells(study).values() for cell in found}
    wanted |= {cell for artefact in (*study.tables.values(), *study.figures.values()) for cell in cells(study, artefact)}
    scores, markers = {}, {}
    for cell in sorted(wanted):
        rng = np.random.default_rng([cell.seed, len(cell.run), cell.step, ord(cell.run[0])])
        table = simulate_scores(
            rng, lambda _, t, run=cell.run: 0.5 + better.get(run, 0.0) - 0.1 * t, sizes, evaluation.temperatures, evaluation.samples
        )
        if keep(cell):
            facts = {"commit": "c" * 40, "versions": {"math-verify": "0.9.0"}, "study": study.name}
            scores[cell] = write_cell(folder, table, *cell, evaluation.samples, sizes, evaluation.temperatures, **facts)
        if cell.step > 0:
            last = max(other.step for other in wanted if other.run == cell.run)
            rows = log_rows(last, 1.0 if cell.run == "grpo" else 0.1)
            machine = {"hardware": "2 x a GPU", "gpus": 2, "versions": {"torch": "2.13.0"}}
            markers[cell] = write_training(folder, *cell, rows, spec=run_spec(study, cell.run), **machine)
    return scores, markers


def study_with(folder, tables="", figures=""):
    """The small study with tables and figures given as YAML lines."""
    from erpo.config import load_study

    path = Path(folder) / "small.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STUDY + ("tables:\n" + tables if tables else "") + ("figures:\n" + figures if figures else ""))
    return load_study(str(path))


def inputs_of(study, name, scores, markers):
    """Keyword arguments for make_table and make_figure."""
    from erpo.config import cells, drawn_spec, needs_scores

    artefact = study.tables.get(name) or study.figures[name]
    asked = cells(study, artefact)
    return {
        "spec": drawn_spec(study, name),
        "scores": [scores[cell] for cell in asked if cell in scores] if needs_scores(artefact) else [],
        "markers": [markers[cell] for cell in asked if cell in markers],
    }
