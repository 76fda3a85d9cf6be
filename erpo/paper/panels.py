"""What a figure shows, as data: panels of lines with their uncertainty. This is the figure's CSV, and exactly this is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from erpo.config import Cell, temperature_label
from erpo.paper.aggregate import Scores, metric_label, problem_values, read_scores
from erpo.paper.curves import band, read_curves, read_markers, smooth
from erpo.paper.notes import checkpoint_rule, interval_rule, missing_cells, sampling_rule
from erpo.paper.summaries import Place, Summary, seeds_by_checkpoint, summarise
from erpo.paper.wording import LOGGED, listed

METRIC = "avg@n"
"""Accuracy shown by every figure of scores."""
_SMOOTHING = 30
"""A noisy curve is shown as a running mean over 1/30 of its length."""
_GAP_STEPS = 10
"""Training accuracy at a checkpoint is the mean over this many steps up to it."""


@dataclass(frozen=True, eq=False)
class Line:
    """One run in one panel. Without uncertainty `low` and `high` equal `y`."""

    run: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    style: Literal["line", "points", "level", "steps"] = "line"
    complete: np.ndarray | None = None
    """bool per point: whether all its samples are there; None: all."""

    @property
    def is_complete(self) -> np.ndarray:
        """bool per point."""
        return np.ones(len(self.x), bool) if self.complete is None else self.complete

    @property
    def is_drawn(self) -> bool:
        """Whether any point has a value."""
        return bool(np.isfinite(self.y).any())


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line] = field(default_factory=list)
    shaded: tuple[float, float] | None = None
    """Part of the x axis in grey."""
    level: float | None = None
    """A reference line across."""
    names: tuple[str, ...] = ()
    """Names of the x positions 0, 1, ..., where x is not a number."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(line.is_drawn for line in self.lines)


@dataclass(frozen=True)
class Picture:
    """All panels of a figure and the sentences under it."""

    panels: list[Panel]
    notes: list[str]
    scores: list[Path] = field(default_factory=list)
    markers: list[dict[str, Any]] = field(default_factory=list)

    def frame(self) -> pd.DataFrame:
        """The plotted data, one line per point."""
        parts = [
            pd.DataFrame({"x": line.x, "y": line.y, "low": line.low, "high": line.high}).assign(
                panel=panel.title, run=line.run, style=line.style, complete=line.is_complete
            )
            for panel in self.panels
            for line in panel.lines
            if len(line.x)
        ]
        columns = ["panel", "run", "style", "x", "y", "low", "high", "complete"]
        return pd.concat(parts, ignore_index=True)[columns] if parts else pd.DataFrame(columns=columns)


@dataclass(frozen=True)
class Sources:
    """Inputs of a figure, read."""

    spec: dict[str, Any]
    scores: Scores | None
    values: np.ndarray | None
    curves: pd.DataFrame
    seeds: dict[tuple[str, int], tuple[int, ...]]
    references: Sequence[Path]
    markers: Sequence[dict[str, Any]]

    def steps(self, run: str) -> list[int]:
        """Checkpoints of a run, ascending."""
        return sorted(step for name, step in self.seeds if name == run)

    def last_step(self, run: str) -> int:
        """The last of them."""
        return max(self.steps(run))


def read_sources(
    spec: dict[str, Any],
    scores: Sequence[Path],
    markers: Sequence[Path],
    references: Sequence[Path],
    counts: Path | None = None,
) -> tuple[Sources, list[Path], list[dict[str, Any]]]:
    """Read what there is of a figure's inputs; also the scores files and markers that were found."""
    present = [path for path in scores if path.is_file()] if "samples" in spec else []  # training figures know no evaluation
    training = read_markers(path for path in markers if path.is_file())
    found = read_scores(present, spec["samples"], cache=counts) if present else None
    values = problem_values(found, METRIC) if found else None
    sources = Sources(spec, found, values, read_curves(training), seeds_by_checkpoint(spec["cells"]), references, training)
    return sources, present, training


# --- training ----------------------------------------------------------------------------------------------------------

_CURVES = {
    "kl/query": (LOGGED["kl/query"], "nats per token"),
    "kl/response": (LOGGED["kl/response"], "nats per token"),
    "policy/entropy": (LOGGED["policy/entropy"], "nats per token"),
    "reward/mean": (LOGGED["reward/mean"], "mean reward"),
    "response/length": (LOGGED["response/length"], "tokens"),
    "reward/accuracy": (LOGGED["reward/accuracy"], "percent"),
    "eval/accuracy": ("Evaluation, T=1", "percent"),
}
_SMOOTHED = ("reward/mean", "reward/accuracy", "response/length", "policy/entropy")


def drift(sources: Sources) -> Picture:
    """Query-KL and Policy-KL over the steps of training."""
    panels = [_training_panel(sources, key, None) for key in ("kl/query", "kl/response")]
    return Picture(panels, [*_training_notes(sources, panels)])


def training_dynamics(sources: Sources) -> Picture:
    """Everything that tells how a training went; with several `steps`, one set of panels for each horizon."""
    horizons = sources.spec["artefact"]["steps"] or [None]
    panels = [_training_panel(sources, key, last, len(horizons) > 1) for last in horizons for key in _CURVES]
    shown = [panel for panel in panels if not panel.is_empty]
    return Picture(shown or panels[:1], [*_training_notes(sources, panels), *_absent(panels)])


def gradient_cosine(sources: Sources) -> Picture:
    """Cosine between the gradients of Query-KL and of the policy term."""
    lines = [_curve(sources, run, "gradient/cosine", None, 1.0) for run in sources.spec["runs"]]
    panels = [Panel("Gradient of Query-KL against policy gradient", "step", "cosine", lines, level=0.0)]
    return Picture(panels, [*_training_notes(sources, panels)])


def _training_panel(sources: Sources, key: str, last: int | None, with_horizon: bool = False) -> Panel:
    title, unit = _CURVES[key]
    scale = 100.0 if unit == "percent" else 1.0
    lines = [_curve(sources, run, key, last, scale) for run in sources.spec["runs"] if sources.last_step(run) > 0]
    return Panel(f"{title}, to {last}" if with_horizon else title, "step", unit, lines)


def _curve(sources: Sources, run: str, key: str, last: int | None, scale: float) -> Line:
    curve = band(sources.curves, run, key, last)
    curve = smooth(curve, _window(len(curve.steps))) if key in _SMOOTHED else curve
    return Line(run, curve.steps, scale * curve.mean, scale * curve.low, scale * curve.high)


def _window(length: int) -> int:
    return max(1, round(length / _SMOOTHING))


def _training_notes(sources: Sources, panels: Sequence[Panel]) -> list[str]:
    seeds = {run: set() for run in sources.spec["runs"]}
    for run, seed, step in sources.spec["cells"]:
        if step > 0:
            seeds[run].add(seed)
    single = [run for run, found in seeds.items() if len(found) == 1]
    notes = ["Line: mean over seeds; band: smallest to largest seed."]
    if single:
        notes.append(f"One seed, so no band: {listed(single)}.")
    if any(panel.title.startswith(_CURVES[key][0]) for panel in panels for key in _SMOOTHED):
        notes.append(f"{listed([_CURVES[key][0] for key in _SMOOTHED])}: running mean over 1/{_SMOOTHING} of the steps.")
    return notes


def _absent(panels: Sequence[Panel]) -> list[str]:
    empty = [panel.title for panel in panels if panel.is_empty]
    return [f"Not measured in these runs: {listed(empty)}."] if empty else []


# --- scores ------------------------------------------------------------------------------------------------------------


def temperature_sweep(sources: Sources) -> Picture:
    """Accuracy against sampling temperature, a panel per benchmark and one for their mean."""
    spec = sources.spec
    groups = {name: (name,) for name in spec["benchmarks"]}
    if len(groups) > 1:
        groups["mean"] = tuple(spec["benchmarks"])
    panels, holes = [], []
    for title, benchmarks in groups.items():
        lines = []
        for run in spec["runs"]:
            cells = [_cell(sources, run, sources.last_step(run), benchmarks, (value,)) for value in spec["temperatures"]]
            lines.append(_line(run, spec["temperatures"], cells))
            holes += [hole for cell in cells for hole in cell.missing]
        panels.append(Panel(title, "temperature", _accuracy(spec), lines, shaded=_high_band(spec)))
    grey = ["Grey: the high band."] if _high_band(spec) else []
    return Picture(panels, [*_score_notes(spec), *grey, *missing_cells(holes, spec["study"])])


def long_run(sources: Sources) -> Picture:
    """Accuracy by temperature band at the checkpoints of long runs; an untrained run is a level."""
    spec = sources.spec
    bands = {name: _within(spec["temperatures"], spec[f"{name}_band"]) for name in ("low", "high")}
    bands["all"] = tuple(spec["temperatures"])
    panels, holes = [], []
    for name, temperatures in bands.items():
        if not temperatures:
            continue
        lines = []
        for run in spec["runs"]:
            steps = sources.steps(run)
            cells = [_cell(sources, run, step, tuple(spec["benchmarks"]), temperatures) for step in steps]
            lines.append(_line(run, steps, cells, "level" if steps == [0] else "points" if len(steps) == 1 else "line"))
            holes += [hole for cell in cells for hole in cell.missing]
        ends = "-".join(dict.fromkeys(temperature_label(value) for value in (temperatures[0], temperatures[-1])))
        title = "all temperatures" if name == "all" else f"{name} band (T={ends})"
        panels.append(Panel(title, "step", _accuracy(spec), lines))
    return Picture(panels, [*_score_notes(spec), *missing_cells(holes, spec["study"])])


def train_eval_gap(sources: Sources) -> Picture:
    """Training accuracy over steps, benchmark accuracy at the checkpoints, and the gap between them."""
    spec, curve_lines, point_lines, gap_lines, holes = sources.spec, [], [], [], []
    for position, run in enumerate(spec["runs"]):
        steps = [step for step in sources.steps(run) if step > 0]
        cells = [_cell(sources, run, step, tuple(spec["benchmarks"]), tuple(spec["temperatures"])) for step in steps]
        holes += [hole for cell in cells for hole in cell.missing]
        if not steps:
            continue
        curve_lines.append(_curve(sources, run, "reward/accuracy", None, 100.0))
        point_lines.append(_line(run, steps, cells, "points"))
        gap_lines.append(_gap(sources, run, position, steps[-1], cells[-1]))
    where = f"T={listed([temperature_label(value) for value in spec['temperatures']])}"
    panels = [
        Panel("Accuracy", "step", "percent", curve_lines + point_lines),
        Panel("Gap to the benchmarks", "", "percentage points", gap_lines, level=0.0, names=tuple(spec["runs"])),
    ]
    notes = [
        f"Lines: training accuracy; points: benchmarks at {where}; gap: training minus benchmarks at the last checkpoint.",
        f"Training accuracy: batch means of the training queries at the rollout temperature, running mean over 1/{_SMOOTHING} of "
        f"the steps; in the gap the mean over the last {_GAP_STEPS} steps.",
        "Training and benchmark problems differ in difficulty, so the gap serves to compare runs; by itself it is no overfitting.",
    ]
    return Picture(panels, [*_score_notes(spec), *notes, *missing_cells(holes, spec["study"])])


def _gap(sources: Sources, run: str, position: int, step: int, cell: Summary) -> Line:
    curve = band(sources.curves, run, "reward/accuracy", step)
    recent = curve.mean[-_GAP_STEPS:]
    if len(recent) == 0 or not np.isfinite(cell.value):
        return Line(run, np.empty(0), np.empty(0), np.empty(0), np.empty(0), "points")
    gap, low, high = (100 * (recent.mean() - value) for value in (cell.value, cell.high, cell.low))
    at, values = np.array([position]), (np.array([gap]), np.array([low]), np.array([high]))
    return Line(run, at, *values, "points", np.array([cell.is_complete]))


def _cell(sources: Sources, run: str, step: int, benchmarks: tuple[str, ...], temperatures: tuple[float, ...]) -> Summary:
    seeds = sources.seeds[run, step]
    place = Place(run, step, seeds, benchmarks, temperatures)
    if sources.scores is None or sources.values is None:
        nothing, missing = float("nan"), tuple(Cell(run, seed, step) for seed in seeds)
        return Summary(nothing, nothing, nothing, {}, 0, 1, 0, 1, {}, missing)
    return summarise(sources.scores, sources.values, place)


def _line(run: str, x: Sequence[float], cells: Sequence[Summary], style: Literal["line", "points", "level"] = "line") -> Line:
    """Cells as a line in percent; a cell without a value leaves a gap."""
    columns = [100 * np.array([getattr(cell, name) for cell in cells], dtype=float) for name in ("value", "low", "high")]
    return Line(run, np.asarray(x, dtype=float), *columns, style, np.array([cell.is_complete for cell in cells], bool))


def _within(temperatures: Sequence[float], limits: Sequence[float]) -> tuple[float, ...]:
    return tuple(value for value in temperatures if limits[0] - 1e-9 <= value <= limits[1] + 1e-9)


def _high_band(spec: dict[str, Any]) -> tuple[float, float] | None:
    chosen = _within(spec["temperatures"], spec["high_band"])
    return (chosen[0], chosen[-1]) if len(chosen) > 1 else None


def _accuracy(spec: dict[str, Any]) -> str:
    return f"{metric_label(METRIC, spec['samples'])}, percent"


def _score_notes(spec: dict[str, Any]) -> list[str]:
    return [checkpoint_rule(spec), sampling_rule(spec), interval_rule("Band or bar:")]
