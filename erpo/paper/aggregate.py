"""Scores of checkpoints -> values with intervals: per-problem counts once, then every cell of every table and figure.

The order of means is fixed and the same everywhere: over the samples of a problem, over seeds, over the problems of a benchmark
at one temperature, over temperatures ("swept": a plain mean), over benchmarks (a plain mean). Intervals are a bootstrap over
problems of the seed-averaged values, within each benchmark; the spread over seeds is given beside them, never mixed in.

Nothing is padded: what is missing is counted as missing, a problem without enough samples has no pass@k, and a mean over
temperatures or benchmarks of which one has no value at all has no value either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from erpo.config import Cell, temperature_label
from erpo.metrics import pass_at_k
from erpo.paper.counting import COUNTS, Counted, count_samples

METADATA = b"erpo"
"""Key of the facts in a scores file's parquet metadata."""


@dataclass(frozen=True)
class Scores:
    """Counts of all checkpoints on one grid [C checkpoints, P problems, T temperatures]; what is missing counts 0 or is NaN."""

    checkpoints: tuple[Cell, ...]
    """C checkpoints (run, seed, step), one per file."""
    problems: pd.DataFrame
    """P rows: benchmark, query_id, flagged, level; sorted by benchmark and query_id."""
    temperatures: np.ndarray
    """T temperatures, ascending."""
    samples: int
    """n: samples asked for per problem and temperature."""
    sizes: dict[str, int]
    """Number of problems by benchmark, as the scores declare it."""
    counts: dict[str, np.ndarray]
    """int64 [C, P, T] by name (COUNTS)."""
    first: np.ndarray
    """float64 [C, P, T]: whether sample 0 is correct; NaN where it is missing or not scored."""
    majority: np.ndarray | None
    """float64 [C, P, T]: whether the most frequent answer is right; None unless answers were read."""
    facts: tuple[dict[str, Any], ...]
    """Metadata of the C files."""

    def rows(self, benchmark: str, clean: bool = False) -> np.ndarray:
        """Indices of a benchmark's problems; `clean` leaves out flagged ones."""
        chosen = self._owners == benchmark
        return np.flatnonzero(chosen & ~self._flagged if clean else chosen)

    @cached_property
    def _owners(self) -> np.ndarray:
        """Benchmark of every problem; taken out of the frame once, because every cell asks."""
        return self.problems["benchmark"].to_numpy(dtype=str)

    @cached_property
    def _flagged(self) -> np.ndarray:
        return self.problems["flagged"].to_numpy(dtype=bool)

    def columns(self, temperatures: Iterable[float]) -> np.ndarray:
        """Indices of temperatures; -1 for one that no file holds."""
        known = {temperature_label(value): index for index, value in enumerate(self.temperatures)}
        return np.array([known.get(temperature_label(value), -1) for value in temperatures])

    def of(self, run: str, step: int, seeds: Iterable[int]) -> dict[int, int]:
        """Index on the first axis by seed, for the seeds that have a file."""
        known = {cell: index for index, cell in enumerate(self.checkpoints)}
        return {seed: known[Cell(run, seed, step)] for seed in seeds if Cell(run, seed, step) in known}


# --- reading -----------------------------------------------------------------------------------------------------------


def read_facts(path: Path) -> dict[str, Any]:
    """What a scores file says of itself: run, seed, step, study, samples, temperatures, benchmarks, sampling, commit.

    Raises:
        ValueError: missing, damaged or foreign file.
    """
    try:
        metadata = pq.read_schema(path).metadata or {}
    except FileNotFoundError as error:
        raise ValueError(f"no scores at {path}; make them first: snakemake {path}") from error
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run: snakemake {path}") from error
    if METADATA not in metadata:
        raise ValueError(f"{path} is not a file of scores of this project (no {METADATA.decode()!r} metadata)")
    return json.loads(metadata[METADATA])


def read_scores(paths: Sequence[Path], samples: int, with_answers: bool = False, cache: Path | None = None) -> Scores:
    """Count the samples of every file by problem and temperature.

    Args:
        paths: scores files, one per checkpoint, in any order.
        samples: n; samples with a higher index are left out.
        with_answers: also find the most frequent answer of each problem (needs more time and memory).
        cache: folder that keeps counts by the content of the files; None: count anew.

    Raises:
        ValueError: no file, two files of one checkpoint, a sample twice, or checkpoints sampled under different settings.
    """
    if not paths:
        raise ValueError("no scores given; a table of scores needs at least one scores file")
    facts = [read_facts(path) for path in paths]
    order = sorted(range(len(paths)), key=lambda index: _cell(facts[index]))
    facts, paths = [facts[index] for index in order], [paths[index] for index in order]
    _refuse_mixed(paths, facts)
    parts = [count_samples(path, samples, with_answers, cache) for path in paths]
    return _grid(parts, facts, samples, with_answers)


def _cell(facts: Mapping[str, Any]) -> Cell:
    return Cell(facts["run"], facts["seed"], facts["step"])


def _refuse_mixed(paths: Sequence[Path], facts: Sequence[Mapping[str, Any]]) -> None:
    """Numbers from different sampling settings do not stand side by side."""
    seen: dict[Cell, Path] = {}
    for path, fact in zip(paths, facts, strict=True):
        if _cell(fact) in seen:
            raise ValueError(f"{seen[_cell(fact)]} and {path} both claim to be {_cell(fact)}; give one of them")
        seen[_cell(fact)] = path
        for key in ("sampling", "benchmarks", "prompt_suffix"):
            here, there = _comparable(fact.get(key)), _comparable(facts[0].get(key))
            if here != there:
                raise ValueError(
                    f"{paths[0]} and {path} were evaluated under different settings ({key}: {json.dumps(there)} against "
                    f"{json.dumps(here)}); evaluate both under the same ones before putting them into one table"
                )


def _comparable(settings: Any) -> Any:
    """Settings that must agree between checkpoints; the end tokens belong to the model."""
    return {key: value for key, value in settings.items() if key != "stop_ids"} if isinstance(settings, dict) else settings


def _grid(parts: list[Counted], facts: list[dict[str, Any]], samples: int, with_answers: bool) -> Scores:
    """Lay the counts of all files on one grid."""
    names = sorted({key for part in parts for key in zip(part.benchmark.tolist(), part.query_id.tolist(), strict=True)})
    row_of = {name: row for row, name in enumerate(names)}
    temperatures = np.unique(np.concatenate([part.temperatures for part in parts]))
    shape = (len(parts), len(names), len(temperatures))
    counts = {name: np.zeros(shape, np.int64) for name in COUNTS}
    first, majority = np.full(shape, np.nan), np.full(shape, np.nan)
    flagged, level = np.zeros(len(names), bool), np.zeros(len(names), np.int8)
    for index, part in enumerate(parts):
        rows = np.array([row_of[key] for key in zip(part.benchmark.tolist(), part.query_id.tolist(), strict=True)], int)
        at = np.ix_([index], rows, np.searchsorted(temperatures, part.temperatures))
        for number, name in enumerate(COUNTS):
            counts[name][at] = part.counts[number]
        first[at] = part.first
        majority[at] = part.majority if with_answers else np.nan
        flagged[rows] |= part.flagged
        level[rows] = np.maximum(level[rows], part.level)
    about = {
        "benchmark": [name for name, _ in names],
        "query_id": [query for _, query in names],
        "flagged": flagged,
        "level": level,
    }
    return Scores(
        checkpoints=tuple(_cell(fact) for fact in facts),
        problems=pd.DataFrame(about),
        temperatures=temperatures,
        samples=samples,
        sizes=dict(facts[0]["benchmarks"]),
        counts=counts,
        first=first,
        majority=majority if with_answers else None,
        facts=tuple(facts),
    )


# --- metrics of problems -----------------------------------------------------------------------------------------------


def metric_label(metric: str, samples: int) -> str:
    """Heading of a metric: avg@n -> Avg@32, pass@1 -> Pass@1 (estimator), pass@1:first -> Pass@1 (first sample)."""
    labels = {"pass@1": "Pass@1 (estimator)", "pass@1:first": "Pass@1 (first sample)"}
    return labels.get(metric, re.sub("@n$", f"@{samples}", metric).capitalize()) if "/" not in metric else metric


def needs_answers(metrics: Iterable[str]) -> bool:
    """Whether a metric is a vote over answers."""
    return any(metric.startswith("maj@") for metric in metrics)


def problem_values(scores: Scores, metric: str) -> np.ndarray:
    """Metric of every checkpoint, problem and temperature, float64 [C, P, T]; NaN where it is undefined.

    Raises:
        ValueError: an unknown metric, or a k above n.
    """
    scored, correct = scores.counts["scored"], scores.counts["correct"]
    match = re.fullmatch(r"(avg|pass|maj)@(n|[1-9]\d*)", metric)
    if metric == "pass@1:first":
        return scores.first
    if match is None:
        raise ValueError(f"unknown metric {metric!r}; there are avg@n, pass@n, pass@1, pass@1:first, pass@K, maj@n")
    kind, k = match[1], scores.samples if match[2] == "n" else int(match[2])
    if k > scores.samples or (kind != "pass" and k != scores.samples):
        allowed = f"K up to n = {scores.samples}" if kind == "pass" else f"{kind}@n (n = {scores.samples})"
        raise ValueError(f"metric {metric!r}: not possible with the samples there are; use {allowed}")
    if kind == "maj":
        assert scores.majority is not None, "answers were not read"
        return scores.majority
    if kind == "avg":
        return np.divide(correct, scored, out=np.full(scored.shape, np.nan), where=scored > 0)
    return _pass_at_k(scored, correct, k)


def _pass_at_k(scored: np.ndarray, correct: np.ndarray, k: int) -> np.ndarray:
    """One evaluation per distinct (n, c): there are few of them."""
    pairs, where = np.unique(scored.ravel() * (scored.max() + 1) + correct.ravel(), return_inverse=True)
    values = pass_at_k(pairs // (scored.max() + 1), pairs % (scored.max() + 1), k)
    return values[where].reshape(scored.shape)
