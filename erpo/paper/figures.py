"""Figures: panels of data (`erpo.paper.panels`) drawn in one house style, as PDF, PNG, CSV of the plotted data and a sidecar.

Lines differ in colour (safe for the colour-blind), dash and marker, so that a grey print still tells them apart. A run keeps its
look in every figure of every study: it comes from its name.
"""

from __future__ import annotations

import io
import math
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
from erpo.config import FigureStyle, load_style
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

_SALT = 1188572  # chosen so that runs drawn together in the shipped studies differ in colour and in grey

_COLUMNS = {1: 1, 2: 2, 4: 2}
_MOST_COLUMNS = 3
"""Fill the width of a page."""
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


def settings(style: FigureStyle) -> dict[str, Any]:
    """The style in matplotlib's terms."""
    return {
        "font.family": style.font,
        "font.size": style.font_size,
        "axes.titlesize": style.title_size,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": style.grid_colour,
        "grid.linewidth": 0.6,
        "axes.axisbelow": True,
        "lines.linewidth": style.line_width,
        "lines.markersize": style.marker_size,
        "legend.frameon": False,
        "pdf.fonttype": 42,  # text stays text
        "svg.hashsalt": "erpo",
        "figure.facecolor": "white",
    }


def looks(runs: Sequence[str], style: FigureStyle | None = None) -> dict[str, Look]:
    """A look for each run from its name; where two names meet in one, the later takes the next free."""
    style = style or load_style()
    slots = max(math.lcm(len(style.colours), len(style.dashes)), len(runs))  # so many differ in colour or dash
    taken: dict[int, str] = {}
    for run in runs:
        slot = zlib.crc32(f"{_SALT}/{style.same_look.get(run, run)}".encode()) % slots
        while slot in taken:
            slot = (slot + 1) % slots
        taken[slot] = run
    return {run: _look(slot, style) for slot, run in taken.items()}


def _look(slot: int, style: FigureStyle) -> Look:
    dash = style.dashes[slot % len(style.dashes)]
    return Look(style.colours[slot % len(style.colours)], (0, dash) if dash else "-", style.markers[slot % len(style.markers)])


def make_figure(
    *,
    spec: dict[str, Any],
    scores: Sequence[Path],
    markers: Sequence[Path],
    out_stem: Path,
    references: Sequence[Path] = (),
    style: FigureStyle | None = None,
    counts: Path | None = None,
) -> Picture:
    """Draw one figure and write it as .pdf, .png, .csv and .json (sidecar).

    Args:
        spec: `config.drawn_spec` of the figure.
        scores: scores files of its checkpoints.
        markers: training markers of its checkpoints.
        out_stem: path of the outputs without ending.
        references: markers of reference caches, for the distribution of query weights.
        style: how it looks; by default the style all figures share.
        counts: folder that keeps counts of samples by content (`erpo.paper.counting`); speed only.

    Raises:
        ValueError: scores or logs that are damaged or do not belong together.
    """
    sources, present, training = panels.read_sources(spec, scores, markers, references, counts)
    picture = KINDS[spec["artefact"]["kind"]](sources)
    paths = {ending: out_stem.with_name(f"{out_stem.name}.{ending}") for ending in ("pdf", "png", "csv", "json")}
    write_atomic(paths["csv"], picture.frame().to_csv(index=False, lineterminator="\n").encode())
    style = style or load_style()
    with mpl.rc_context(settings(style)):
        figure = draw(picture, spec["runs"], style)
        write_atomic(paths["pdf"], _rendered(figure, "pdf", style, {"CreationDate": None, "Producer": None, "Creator": None}))
        write_atomic(paths["png"], _rendered(figure, "png", style, {"Software": None}))
    inputs = describe_inputs(present, training)
    caption = spec["artefact"]["caption"] or f"Figure {spec['name']}."
    notes = [*picture.notes, *mixture_notes(inputs)]
    outputs = [paths[ending] for ending in ("csv", "pdf", "png")]
    write_json(paths["json"], sidecar(spec=spec, inputs=inputs, caption=caption, notes=notes, outputs=outputs))
    return picture


def _rendered(figure: Figure, kind: str, style: FigureStyle, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=style.png_dpi, metadata=metadata)
    return buffer.getvalue()


# --- drawing -----------------------------------------------------------------------------------------------------------


def draw(picture: Picture, runs: Sequence[str], style: FigureStyle | None = None) -> Figure:
    """Lay the panels out on a grid, with one legend: in a free place of the grid, or below."""
    style = style or load_style()
    count = len(picture.panels)
    columns = _COLUMNS.get(count, _MOST_COLUMNS)
    rows = -(-count // columns)
    look = looks(runs, style)
    shown = [run for run in runs if any(line.run == run and line.is_drawn for panel in picture.panels for line in panel.lines)]
    width = columns * style.panel_size[0] if columns > 1 else style.single_width
    figure = Figure(figsize=(width, rows * style.panel_size[1] + 0.3), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06, hspace=0.06)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, panel in zip(axes, picture.panels, strict=False):
        _draw_panel(axis, panel, look, style.band_opacity)
    free = axes[count:]
    for axis in free:
        axis.set_axis_off()
    handles = [_handle(run, look[run]) for run in shown]
    if len(free):
        free[0].legend(handles=handles, loc="center left", handlelength=3)
    elif handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), columns * 2), handlelength=3)
    return figure


def _handle(run: str, look: Look) -> Line2D:
    return Line2D([], [], color=look.colour, linestyle=look.dash, marker=look.marker, label=run)


def _draw_panel(axis: Axes, panel: Panel, looks: dict[str, Look], opacity: float) -> None:
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
        dodge = _DODGE * width * (points.index(line) if line in points else 0)
        _draw_line(axis, line, looks[line.run], number, dodge, opacity)
    if panel.is_empty:
        axis.text(0.5, 0.5, "no data", transform=axis.transAxes, ha="center", va="center", color="#777777")
    elif panel.names:
        axis.set_xticks(range(len(panel.names)), panel.names)
        axis.set_xlim(-0.6, len(panel.names) - 0.4)
    _scale(axis, panel)


def _draw_line(axis: Axes, line: Line, look: Look, number: int, dodge: float, opacity: float) -> None:
    has_band = bool(np.any(line.high > line.low))
    colour = {"color": look.colour}
    if line.style == "points":
        reach = np.abs(np.stack([line.y - line.low, line.high - line.y]))
        axis.errorbar(line.x + dodge, line.y, yerr=reach, fmt=look.marker, capsize=3, markersize=5.5, **colour)
    elif line.style == "level":
        axis.axhspan(line.low[0], line.high[0], alpha=opacity, linewidth=0, **colour)
        axis.axhline(line.y[0], linestyle=look.dash, **colour)
    elif line.style == "steps":
        axis.plot(line.x, line.y, drawstyle="steps-mid", linestyle=look.dash, **colour)
    else:
        every = max(1, len(line.x) // _MARKS)
        axis.plot(line.x, line.y, linestyle=look.dash, marker=look.marker, markevery=(number * every // 3 % every, every), **colour)
        if has_band:
            axis.fill_between(line.x, line.low, line.high, alpha=opacity, linewidth=0, **colour)
    lacking = ~line.is_complete
    if lacking.any() and line.style != "level":
        at = line.x[lacking] + (dodge if line.style == "points" else 0.0)
        axis.plot(at, line.y[lacking], linestyle="none", marker=look.marker, markerfacecolor="white", zorder=4, **colour)


def _scale(axis: Axes, panel: Panel) -> None:
    """A logarithmic axis where runs of a positive quantity end orders apart; steps are whole numbers."""
    drawn = [line for line in panel.lines if line.is_drawn]
    ends = [line.y[-1] for line in drawn if line.style == "line" and np.isfinite(line.y[-1])]
    positive = len(ends) > 1 and min(ends) > 0 and all(np.nanmin(line.y) >= 0 for line in drawn)
    is_share = "percent" in panel.y_label
    if positive and panel.x_label == "step" and not is_share and max(ends) / min(ends) > _LOG_RATIO:
        axis.set_yscale("log")
        axis.set_ylim(bottom=min(ends) / _LOG_RATIO)
    elif drawn and not panel.names and all(np.nanmin([line.low, line.y]) >= 0 for line in drawn):
        axis.set_ylim(bottom=0)
    if panel.x_label == "temperature":
        axis.xaxis.set_major_locator(MultipleLocator(0.5))
    if panel.x_label == "step":
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
