"""One cell of a table: its value, how sure it is, what it is made of, and how it differs from a baseline.

Means are taken in the order of `erpo.paper.aggregate`. An interval is a bootstrap over problems (within each benchmark) of the
seed-averaged values; a difference is paired over problems and uses only what both sides have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from erpo.config import Cell
from erpo.metrics import bootstrap_interval, paired_difference
from erpo.paper.aggregate import Scores

CONFIDENCE = 0.95
"""Coverage of every interval."""
SEED = 0
"""Of all resamples: equal inputs give equal intervals, on any machine."""
ALPHA = 0.05
"""A difference is marked below this p-value, after correction for the comparisons beside it."""

_RATES = ("truncated", "no_answer", "grader_error", "gold_unparsed")


class Place(NamedTuple):
    """What one cell is a mean over."""

    run: str
    step: int
    seeds: tuple[int, ...]
    benchmarks: tuple[str, ...]
    temperatures: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    """A value with everything needed to judge it. Rates are shares of the samples found."""

    value: float
    low: float
    high: float
    by_seed: dict[int, float]
    samples: int
    samples_expected: int
    problems: int
    problems_expected: int
    rates: dict[str, float]
    missing: tuple[Cell, ...]
    """Checkpoints whose samples are not all there."""

    @property
    def is_complete(self) -> bool:
        """Whether every sample asked for is there."""
        return self.samples == self.samples_expected

    @property
    def seed_sd(self) -> float:
        """Standard deviation over seeds (ddof 1); NaN below two seeds."""
        values = [value for value in self.by_seed.values() if np.isfinite(value)]
        return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


class Difference(NamedTuple):
    """Value minus the baseline's, paired over problems, on the seeds that both have."""

    value: float
    low: float
    high: float
    p_value: float
    by_seed: dict[int, float]

    @property
    def seeds_agreeing(self) -> int:
        """Seeds whose own difference has the sign of the whole."""
        return sum(np.sign(value) == np.sign(self.value) for value in self.by_seed.values() if np.isfinite(value))


def summarise(scores: Scores, values: np.ndarray, place: Place) -> Summary:
    """Value, interval, spread and contents of one cell.

    Args:
        scores: the counts.
        values: metric [C, P, T] (`problem_values`).
        place: what the cell is a mean over.
    """
    index = scores.of(place.run, place.step, place.seeds)
    groups = _groups(scores, values, list(index.values()), place)
    low, high = _interval(groups)
    return Summary(
        value=_mean(groups),
        low=low,
        high=high,
        by_seed={seed: _mean(_groups(scores, values, [at], place)) for seed, at in index.items()},
        problems=sum(len(group) for group in groups),
        problems_expected=_problems_expected(scores, place),
        **_contents(scores, place),
    )


def clean_value(scores: Scores, values: np.ndarray, place: Place) -> tuple[float, int]:
    """Value of a cell without flagged problems, and the number of problems left."""
    index = scores.of(place.run, place.step, place.seeds)
    groups = _groups(scores, values, list(index.values()), place, clean=True)
    return _mean(groups), sum(len(group) for group in groups)


def difference(scores: Scores, values: np.ndarray, place: Place, baseline: Place) -> Difference | None:
    """How a cell differs from the baseline's; None where no seed, problem and temperature is common to both."""
    ours, theirs = (scores.of(side.run, side.step, side.seeds) for side in (place, baseline))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        return None
    change = values[[ours[seed] for seed in common]] - values[[theirs[seed] for seed in common]]
    groups = _groups(scores, change, list(range(len(common))), place)
    if not np.isfinite(_mean(groups)):
        return None
    by_seed = {seed: _mean(_groups(scores, change, [at], place)) for at, seed in enumerate(common)}
    result = paired_difference(groups, [np.zeros_like(group) for group in groups], seed=SEED, confidence=CONFIDENCE)
    return Difference(result.mean, result.low, result.high, result.p_value, by_seed)


def corrected(p_value: float, planned: int) -> float:
    """A p-value corrected for being one of several (Bonferroni): times the number of comparisons planned, at most 1; NaN stays.

    A comparison without samples counts as planned. So what one cell lacks never moves another cell's p-value, which step-down
    corrections such as Holm's do not promise.
    """
    return float(min(1.0, planned * p_value)) if np.isfinite(p_value) else float("nan")


# --- parts -------------------------------------------------------------------------------------------------------------


def _groups(scores: Scores, values: np.ndarray, index: list[int], place: Place, clean: bool = False) -> list[np.ndarray]:
    """Per benchmark, one value per problem: over seeds, then over temperatures. Their mean is the benchmark's value."""
    columns = scores.columns(place.temperatures)
    if (columns < 0).any() or not index:
        return [np.empty(0) for _ in place.benchmarks]
    return [_fold(values[np.ix_(np.asarray(index), scores.rows(name, clean), columns)]) for name in place.benchmarks]


def _fold(grid: np.ndarray) -> np.ndarray:
    """[S seeds, P, T] -> one value per problem that has any; empty when a temperature has no value at all.

    A problem that lacks a value at some temperature gets the mean of the others there, so that the mean of the result is the
    plain mean over temperatures of the means over the problems that have one.
    """
    folded = _nanmean(grid, axis=0)
    at_temperature = _nanmean(folded, axis=0)
    if not np.isfinite(at_temperature).all():
        return np.empty(0)
    known = np.isfinite(folded)
    return np.where(known, folded, at_temperature)[known.any(axis=1)].mean(axis=1)


def _nanmean(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the finite entries; NaN (without a warning) where there is none."""
    known = np.isfinite(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0.0).sum(axis=axis)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)


def _mean(groups: Sequence[np.ndarray]) -> float:
    """Plain mean over benchmarks; NaN when one of them has no value."""
    if not groups or any(len(group) == 0 for group in groups):
        return float("nan")
    return float(np.mean([group.mean() for group in groups]))


def _interval(groups: Sequence[np.ndarray]) -> tuple[float, float]:
    if not np.isfinite(_mean(groups)):
        return float("nan"), float("nan")
    interval = bootstrap_interval(groups, seed=SEED, confidence=CONFIDENCE)
    return interval.low, interval.high


def _problems_expected(scores: Scores, place: Place) -> int:
    return sum(scores.sizes.get(name, 0) for name in place.benchmarks)


def _contents(scores: Scores, place: Place) -> dict[str, Any]:
    """Samples found and expected, rates, and the checkpoints that lack samples."""
    index = scores.of(place.run, place.step, place.seeds)
    columns = scores.columns(place.temperatures)
    columns = columns[columns >= 0]
    rows = np.concatenate([scores.rows(name) for name in place.benchmarks])
    expected = _problems_expected(scores, place) * len(place.temperatures) * scores.samples
    found = {seed: int(scores.counts["found"][np.ix_(np.array([at]), rows, columns)].sum()) for seed, at in index.items()}
    total = sum(found.values())
    rates = {
        name: float(scores.counts[name][np.ix_(np.array(list(index.values()), int), rows, columns)].sum()) / total
        if total
        else float("nan")
        for name in _RATES
    }
    missing = tuple(Cell(place.run, seed, place.step) for seed in place.seeds if found.get(seed, 0) < expected)
    return {"samples": total, "samples_expected": expected * len(place.seeds), "rates": rates, "missing": missing}


def seeds_by_checkpoint(cells: Sequence[Sequence]) -> Mapping[tuple[str, int], tuple[int, ...]]:
    """Seeds by (run, step) of a list of cells, in order."""
    found: dict[tuple[str, int], list[int]] = {}
    for run, seed, step in cells:
        found.setdefault((run, step), []).append(seed)
    return {key: tuple(seeds) for key, seeds in found.items()}
