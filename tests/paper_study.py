"""Results of a study of the paper's shape that never ran: seeded scores, training logs and reference caches of every checkpoint.

The accuracies follow stated curves, so that tables, figures and statements have something to show: the base model is low, GRPO
gains at low temperatures and loses the high band first in the long run, ERPO keeps it. They are made up: no result of anybody.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from erpo.config import Cell, FigureStyle, Study, cells, drawn_spec, needs_scores, reference_spec, run_spec, scored_cells
from erpo.paper.figures import make_figure
from erpo.paper.panels import Picture
from erpo.paper.tables import make_table
from tests.synthetic import simulate_scores, write_cell, write_training

SIZES = {"aime24": 30, "aime25": 30, "amc": 83, "math500": 500, "minerva": 272, "olympiadbench": 675}
"""Problems of the paper's benchmarks: 1,590 x 15 temperatures x 32 samples = 763,200 rows a checkpoint."""
QUERIES = 8509
EASE = {"aime24": -0.25, "aime25": -0.32, "amc": 0.0, "math500": 0.25, "minerva": -0.15, "olympiadbench": -0.08}
_VERSIONS = {"erpo": "0.1.0", "math-verify": "0.9.0", "pyarrow": "23.0.0"}
_MACHINE = {"hardware": "8 x NVIDIA H100 80GB", "gpus": 8, "ranks": 8, "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"}}
_COMMIT = "0123456789ab"


def cells_of(study: Study) -> list[Cell]:
    """Every checkpoint that a table, a figure or the comparison needs."""
    wanted = {cell for found in scored_cells(study).values() for cell in found}
    for artefact in (*study.tables.values(), *study.figures.values()):
        wanted.update(cells(study, artefact))
    return sorted(wanted)


def write_results(folder: Path, study: Study, sizes: dict[str, int] | None = None, seed: int = 0) -> dict[Cell, Path]:
    """Write scores, markers, logs and reference caches under `folder` as the workflow would; scores files by checkpoint.

    Args:
        folder: results of the study (`results/{study}`).
        study: decides runs, seeds, steps, temperatures and samples.
        sizes: problems by benchmark; the paper's by default.
        seed: of everything.
    """
    sizes = sizes or {name: SIZES[name] for name in study.benchmarks}
    wanted = cells_of(study)
    scores = {cell: _write_scores(folder, study, cell, sizes, seed) for cell in wanted}
    for cell in wanted:
        if cell.step > 0:
            last = max(other.step for other in wanted if other.run == cell.run)
            _write_training(folder, study, cell, last, seed)
    _write_references(folder, study, seed)
    return scores


def draw_everything(folder: Path, study: Study, out: Path, style: FigureStyle | None = None) -> dict[str, Picture]:
    """Every table and figure of a study into one folder, in this process; the figures by name."""
    pictures = {}
    for name, artefact in {**study.tables, **study.figures}.items():
        asked = cells(study, artefact)
        scores = [folder / f"scores/{cell.run}/seed{cell.seed}/step{cell.step}.parquet" for cell in asked]
        inputs = {
            "spec": drawn_spec(study, name),
            "scores": scores if needs_scores(artefact) else [],
            "markers": [folder / f"runs/{cell.run}/seed{cell.seed}/step{cell.step}.json" for cell in asked if cell.step > 0],
            "out_stem": out / name,
            "counts": folder / "counts",
        }
        if name in study.tables:
            make_table(**inputs)
        else:
            pictures[name] = make_figure(**inputs, references=sorted(folder.glob("reference/*/*.json")), style=style)
    return pictures


def accuracy(study: Study, cell: Cell, benchmark: str, temperature: float) -> float:
    """Mean accuracy by checkpoint, benchmark and temperature."""
    run = study.runs[cell.run]
    large = 0.12 if "32b" in run.model else 0.0
    if cell.step == 0:
        level, knee, slope = 0.3 + large, 1.0, 5.0
    elif run.kl_on == "query":
        level, knee, slope = 0.55 + large, 1.32 - 0.0001 * max(cell.step - 240, 0), 9.0
    else:
        level, knee, slope = 0.52 + large, 1.12 - 0.0009 * max(cell.step - 300, 0), 9.0
    level += (zlib.crc32(f"{cell.run}/{cell.seed}".encode()) % 100 - 50) / 4000
    value = (level + EASE.get(benchmark, 0.0)) / (1 + np.exp(slope * (temperature - knee)))
    return float(np.clip(value, 0.002, 0.98))


def _rng(seed: int, *names: object) -> np.random.Generator:
    return np.random.default_rng([seed, *(zlib.crc32(str(name).encode()) for name in names)])


def _write_scores(folder: Path, study: Study, cell: Cell, sizes: dict[str, int], seed: int) -> Path:
    evaluation = study.evaluation
    table = simulate_scores(
        _rng(seed, *cell),
        lambda benchmark, temperature: accuracy(study, cell, benchmark, temperature),
        sizes,
        evaluation.temperatures,
        evaluation.samples,
    )
    facts = {"study": study.name, "commit": _COMMIT, "versions": _VERSIONS, "spec_hash": f"{zlib.crc32(cell.run.encode()):08x}"}
    return write_cell(folder, table, *cell, evaluation.samples, sizes, evaluation.temperatures, **facts)


def _write_training(folder: Path, study: Study, cell: Cell, last: int, seed: int) -> None:
    run = study.runs[cell.run]
    rows = log_rows(last, run.kl_on, run.kl_coef, run.evaluate_every, _rng(seed, cell.run, cell.seed))
    facts = {**_MACHINE, "commit": _COMMIT, "seconds": 300.0 * cell.step, "spec": run_spec(study, cell.run)}
    facts["spec_hash"] = f"{zlib.crc32(json.dumps(facts['spec'], sort_keys=True).encode()):08x}"
    write_training(folder, *cell, rows, **facts)


def log_rows(steps: int, kl_on: str, kl_coef: float, evaluate_every: int, rng: np.random.Generator) -> list[dict[str, float]]:
    """A training log whose curves rise, drift and, without Query-KL, explode in the long run."""
    at = np.arange(1, steps + 1)
    tame = kl_on in ("query", "all")
    query_kl = np.where(tame, 0.08 * at / 240, 0.97 * at / 240) * (0.01 / max(kl_coef, 1e-3)) ** 0.5
    policy_kl = 0.07 * at / 240
    if not tame:
        query_kl, policy_kl = (curve * np.exp(np.maximum(at - 480, 0) / 90) for curve in (query_kl, policy_kl))
    noise = rng.normal(0, 1, (6, steps))
    accuracy = 0.35 + 0.4 * (1 - np.exp(-at / 60)) - (0 if tame else 0.3 / (1 + np.exp(-(at - 600) / 50))) + 0.02 * noise[0]
    columns = {
        "kl/query": query_kl * np.exp(0.1 * noise[1]),
        "kl/response": policy_kl * np.exp(0.1 * noise[2]),
        "policy/entropy": 0.3 * np.exp(-at / 200) + 0.05 + 0.01 * np.abs(noise[3]),
        "reward/accuracy": accuracy,
        "reward/mean": 0.9 * accuracy + 0.1 * (1 - np.exp(-at / 20)),
        "response/length": 900 + 300 * at / steps + 20 * noise[4],
        "grad/norm": 0.2 + 0.05 * np.abs(noise[5]),
        "query_weight/mean": np.full(steps, 1.0),
        "query_weight/ess": np.full(steps, 0.9),
        "time/total": np.full(steps, 300.0),
        "time/rollout": np.full(steps, 200.0),
        "time/grade": np.full(steps, 5.0),
        "time/update": np.full(steps, 95.0),
        "memory/peak_gib": np.full(steps, 61.0),
    }
    rows = [{"step": int(step), **{name: float(column[step - 1]) for name, column in columns.items()}} for step in at]
    for row in rows[19::20]:
        row["gradient/cosine"] = float(0.05 * rng.normal())
    for row in rows[evaluate_every - 1 :: evaluate_every] if evaluate_every else ():
        row["eval/accuracy"] = row["reward/accuracy"] - 0.15
    return rows


def _write_references(folder: Path, study: Study, seed: int) -> None:
    pairs: Iterable[tuple[str, str]] = dict.fromkeys((run.model, run.train_set) for run in study.runs.values() if run.steps > 0)
    for model, train_set in pairs:
        rng = _rng(seed, model, train_set)
        tokens = rng.integers(30, 400, QUERIES).astype(np.int32)
        nll = tokens * rng.gamma(20.0, 0.05, QUERIES)
        cache = folder / f"reference/{model}/{train_set}.parquet"
        cache.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"nll": nll, "num_tokens": tokens}), cache)
        marker = {"spec": reference_spec(study, model, train_set), "cache": cache.name}
        cache.with_suffix(".json").write_text(json.dumps(marker))
