"""Figures: panels of data (`erpo.paper.panels`) drawn in one house style, as PDF, PNG, CSV of the plotted data and a sidecar.

Lines differ in colour (safe for the colour-blind), dash and marker, so that a grey print still tells them apart. A run keeps its
look in every figure of every study: it comes from its name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, MultipleLocator

from erpo.checkpoint import write_atomic, write_json
from erpo.paper import panels, weight_panels
from erpo.paper.panels import Line, Panel, Picture, Sources
from erpo.paper.provenance import describe_inputs, mixture_notes, sidecar

KINDS: dict[str, Callable[[Sources], Picture]] = {
    "drift": panels.drift,
    "temperature_sweep": panels.temperature_sweep,
    "training_dynamics": panels.training_dynamics,
    "long_run": panels.long_run,
    "query_weights": weight_panels.query_weights,
    "train_eval_gap": panels.train_eval_gap,
    "gradient_cosine": panels.gradient_cosine,
}

STYLE = {
    "font.family": "DejaVu Sans",  # ships with matplotlib: the same letters on every machine
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.hashsalt": "erpo",
    "figure.facecolor": "white",
}
_COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito, without yellow
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
_SLOTS = 28  # seven colours times four dashes: all different
_SALT = 1188572  # chosen so that runs drawn together in the shipped studies differ in colour and in grey

_PANEL_SIZE = (2.9, 2.25)
_SINGLE_WIDTH = 4.2
_COLUMNS = {1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 3, 7: 4, 8: 4}
_MOST_COLUMNS = 4
_PNG_DPI = 200
_LOG_RATIO = 30.0
"""A positive axis is logarithmic where the runs end further apart than this."""
_DODGE = 0.015
"""Points of several runs at one place stand side by side, this share of the axis apart."""
_MARKS = 8
"""Markers along a line."""


class Look(NamedTuple):
    """How a run is drawn."""

    colour: str
    dash: Any
    marker: str


def looks(runs: Sequence[str]) -> dict[str, Look]:
    """A look for each run from its name; where two names meet in one, the later takes the next free."""
    taken: dict[int, str] = {}
    for run in runs:
        slot = zlib.crc32(f"{_SALT}/{run}".encode()) % _SLOTS
        while slot in taken:
            slot = (slot + 1) % _SLOTS
        taken[slot] = run
    return {
        run: Look(_COLOURS[s % len(_COLOURS)], _DASHES[s % len(_DASHES)], _MARKERS[s % len(_MARKERS)]) for s, run in taken.items()
    }


def make_figure(
    *,
    spec: dict[str, Any],
    scores: Sequence[Path],
    markers: Sequence[Path],
    out_stem: Path,
    references: Sequence[Path] = (),
) -> Picture:
    """Draw one figure and write it as .pdf, .png, .csv and .json (sidecar).

    Args:
        spec: `config.drawn_spec` of the figure.
        scores: scores files of its checkpoints.
        markers: training markers of its checkpoints.
        out_stem: path of the outputs without ending.
        references: markers of reference caches, for the distribution of query weights.

    Raises:
        ValueError: scores or logs that are damaged or do not belong together.
    """
    sources, present, training = panels.read_sources(spec, scores, markers, references)
    picture = KINDS[spec["artefact"]["kind"]](sources)
    paths = {ending: out_stem.with_name(f"{out_stem.name}.{ending}") for ending in ("pdf", "png", "csv", "json")}
    write_atomic(paths["csv"], picture.frame().to_csv(index=False, lineterminator="\n").encode())
    with mpl.rc_context(STYLE):
        figure = draw(picture, spec["runs"])
        write_atomic(paths["pdf"], _rendered(figure, "pdf", {"CreationDate": None, "Producer": None, "Creator": None}))
        write_atomic(paths["png"], _rendered(figure, "png", {"Software": None}))
    inputs = describe_inputs(present, training)
    caption = spec["artefact"]["caption"] or f"Figure {spec['name']}."
    notes = [*picture.notes, *mixture_notes(inputs)]
    outputs = [paths[ending] for ending in ("csv", "pdf", "png")]
    write_json(paths["json"], sidecar(spec=spec, inputs=inputs, caption=caption, notes=notes, outputs=outputs))
    return picture


def _rendered(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    import io

    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=_PNG_DPI, metadata=metadata)
    return buffer.getvalue()


# --- drawing -----------------------------------------------------------------------------------------------------------


def draw(picture: Picture, runs: Sequence[str]) -> Figure:
    """Lay the panels out on a grid, with one legend: in a free place of the grid, or below."""
    count = len(picture.panels)
    columns = _COLUMNS.get(count, _MOST_COLUMNS)
    rows = -(-count // columns)
    style = looks(runs)
    shown = [run for run in runs if any(line.run == run and line.is_drawn for panel in picture.panels for line in panel.lines)]
    width = columns * _PANEL_SIZE[0] if columns > 1 else _SINGLE_WIDTH
    figure = Figure(figsize=(width, rows * _PANEL_SIZE[1] + 0.3), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06, hspace=0.06)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, picture.panels, strict=False):
        _draw_panel(axis, panel, style)
    free = axes[count:]
    for axis in free:
        axis.set_axis_off()
    handles = [_handle(run, style[run]) for run in shown]
    if len(free):
        free[0].legend(handles=handles, loc="center left", fontsize=9, handlelength=3)
    elif handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns * 2), handlelength=3)
    return figure


def _handle(run: str, look: Look) -> Line2D:
    return Line2D([], [], color=look.colour, linestyle=look.dash, marker=look.marker, label=run)


def _draw_panel(axis: Axes, panel: Panel, style: dict[str, Look]) -> None:
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    if panel.shaded:
        axis.axvspan(*panel.shaded, color="#eeeeee", zorder=0, linewidth=0)
    if panel.level is not None:
        axis.axhline(panel.level, color="#777777", linewidth=0.8, zorder=1)
    drawn = [line for line in panel.lines if line.is_drawn]
    points = [line for line in drawn if line.style == "points"]
    width = np.ptp(np.concatenate([line.x for line in drawn])) if drawn and not panel.names else 0.0
    for number, line in enumerate(drawn):
        _draw_line(axis, line, style[line.run], number, _DODGE * width * (points.index(line) if line in points else 0))
    if panel.is_empty:
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color="#777777")
    elif panel.names:
        axis.set_xticks(range(len(panel.names)), panel.names)
        axis.set_xlim(-0.6, len(panel.names) - 0.4)
    _scale(axis, panel)


def _draw_line(axis: Axes, line: Line, look: Look, number: int, dodge: float) -> None:
    has_band = bool(np.any(line.high > line.low))
    colour = {"color": look.colour}
    if line.style == "points":
        reach = np.abs(np.stack([line.y - line.low, line.high - line.y]))
        axis.errorbar(line.x + dodge, line.y, yerr=reach, fmt=look.marker, capsize=3, markersize=5.5, **colour)
    elif line.style == "level":
        axis.axhspan(line.low[0], line.high[0], alpha=0.12, linewidth=0, **colour)
        axis.axhline(line.y[0], linestyle=look.dash, **colour)
    elif line.style == "steps":
        axis.plot(line.x, line.y, drawstyle="steps-mid", linestyle=look.dash, **colour)
    else:
        every = max(1, len(line.x) // _MARKS)
        axis.plot(line.x, line.y, linestyle=look.dash, marker=look.marker, markevery=(number * every // 3 % every, every), **colour)
        if has_band:
            axis.fill_between(line.x, line.low, line.high, alpha=0.15, linewidth=0, **colour)


def _scale(axis: Axes, panel: Panel) -> None:
    """A logarithmic axis where runs of a positive quantity end orders apart; steps are whole numbers."""
    drawn = [line for line in panel.lines if line.is_drawn]
    ends = [line.y[-1] for line in drawn if line.style == "line" and np.isfinite(line.y[-1])]
    positive = len(ends) > 1 and min(ends) > 0 and all(np.nanmin(line.y) >= 0 for line in drawn)
    if positive and panel.x_label == "step" and max(ends) / min(ends) > _LOG_RATIO:
        axis.set_yscale("log")
        axis.set_ylim(bottom=min(ends) / 10)
    elif drawn and not panel.names and all(np.nanmin([line.low, line.y]) >= 0 for line in drawn):
        axis.set_ylim(bottom=0)
    if panel.x_label == "temperature":
        axis.xaxis.set_major_locator(MultipleLocator(0.5))
    if panel.x_label == "step":
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
