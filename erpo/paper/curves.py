"""Training logs as curves over steps, and the statements of the paper as predicates on curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from erpo.checkpoint import read_json
from erpo.metrics import read_log


class Band(NamedTuple):
    """A curve over seeds: mean, smallest and largest value at every step where it was measured."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


def read_markers(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Training markers with their own path under `path`; markers of starting models (step 0 or none) are left out."""
    markers = [{**read_json(path), "path": path} for path in paths]
    return [marker for marker in markers if marker.get("step", 0) > 0 and "metrics" in marker]


def read_curves(markers: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row per run, seed and step with every logged metric; a run's log is read once and cut at its last marker's step."""
    last: dict[tuple[str, int], dict[str, Any]] = {}
    for marker in markers:
        key = (marker["run"], marker["seed"])
        if key not in last or marker["step"] > last[key]["step"]:
            last[key] = marker
    frames = []
    for (run, seed), marker in sorted(last.items()):
        rows = read_log(marker["path"].parent / marker["metrics"])
        frames.append(pd.DataFrame([row for row in rows if row["step"] <= marker["step"]]).assign(run=run, seed=seed))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame({"run": [], "seed": [], "step": []})


def seed_values(curves: pd.DataFrame, run: str, step: int, key: str, seeds: Iterable[int]) -> dict[int, float]:
    """Value logged at a step, by seed; a seed that did not measure it there is absent."""
    if key not in curves:
        return {}
    rows = curves[(curves["run"] == run) & (curves["step"] == step) & curves["seed"].isin(list(seeds)) & curves[key].notna()]
    return {int(seed): float(value) for seed, value in zip(rows["seed"], rows[key], strict=True)}


def longest(curves: pd.DataFrame, run: str) -> pd.DataFrame:
    """A run's rows of those seeds that were trained furthest: what a statement on a long run is checked on."""
    rows = curves[curves["run"] == run]
    reached = rows.groupby("seed")["step"].max()
    return rows[rows["seed"].isin(reached.index[reached == reached.max()])]


def band(curves: pd.DataFrame, run: str, key: str, last_step: int | None = None) -> Band:
    """A run's curve of one metric over its seeds, at the steps that every seed measured (no seed drops out half-way)."""
    rows = curves[curves["run"] == run]
    rows = rows[rows["step"] <= last_step] if last_step is not None else rows
    seeds = int(rows["seed"].nunique())
    if key not in rows or seeds == 0:
        return Band(np.empty(0), np.empty(0), np.empty(0), np.empty(0), seeds)
    by_step = rows[rows[key].notna()].groupby("step")[key].agg(["mean", "min", "max", "count"])
    by_step = by_step[by_step["count"] == seeds]
    columns = [by_step[name].to_numpy(dtype=float) for name in ("mean", "min", "max")]
    return Band(by_step.index.to_numpy(), *columns, seeds)


def smooth(curve: Band, window: int) -> Band:
    """Centred running mean over `window` measured steps (fewer at the ends)."""
    if window <= 1 or len(curve.steps) == 0:
        return curve
    parts = [pd.Series(part).rolling(window, center=True, min_periods=1).mean().to_numpy() for part in curve[1:4]]
    return Band(curve.steps, *parts, curve.seeds)


# --- statements on curves ----------------------------------------------------------------------------------------------


def first_drop(steps: Sequence[int], values: Sequence[float], relative: float = 0.2) -> int | None:
    """First step at which a curve is at least `relative` below the best it had reached before; None if it never is."""
    best = -np.inf
    for step, value in zip(steps, values, strict=True):
        if best > 0 and value <= best * (1 - relative):
            return int(step)
        best = max(best, value)
    return None


def drops_first(steps: Sequence[int], high_band: Sequence[float], low_band: Sequence[float], relative: float = 0.2) -> bool:
    """Whether the high band drops, and the low band does so later or not at all."""
    high, low = first_drop(steps, high_band, relative), first_drop(steps, low_band, relative)
    return high is not None and (low is None or high < low)


def explodes_after(steps: Sequence[int], values: Sequence[float], step: int, factor: float = 10.0) -> bool:
    """Whether a curve rises after `step` above `factor` times the largest value it had up to there."""
    steps, values = np.asarray(steps), np.asarray(values, dtype=float)
    before, after = values[steps <= step], values[steps > step]
    return bool(len(before) and len(after) and np.nanmax(after) > factor * np.nanmax(before))


def holds_until(steps: Sequence[int], values: Sequence[float], step: int, relative: float = 0.1) -> bool:
    """Whether a curve up to and including `step` never falls `relative` below the best it had reached before."""
    chosen = [(at, value) for at, value in zip(steps, values, strict=True) if at <= step]
    return bool(chosen) and first_drop(*zip(*chosen, strict=True), relative=relative) is None
