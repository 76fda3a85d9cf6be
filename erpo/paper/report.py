"""One self-contained HTML page: the answer in words, tables, figures, runs with curves and samples, cost and provenance."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from erpo import __version__
from erpo.checkpoint import read_json, write_atomic
from erpo.config import RunConfig
from erpo.paper.aggregate import read_facts
from erpo.paper.answer import Answer, answer
from erpo.paper.curves import read_curves, read_markers
from erpo.paper.provenance import used_versions
from erpo.paper.typeset import Sheet
from erpo.paper.wording import percent, plain, points

TEMPLATE = "report.html.j2"
_CURVES = {
    "reward/accuracy": "training accuracy",
    "kl/query": "Query-KL",
    "kl/response": "Policy-KL",
    "policy/entropy": "entropy",
    "response/length": "response length",
    "grad/norm": "gradient norm",
}
_SAMPLES = 6
"""Samples shown per run, from the last step that kept any."""
_SAMPLE_CHARACTERS = 4000
_CSS_PIXELS = 0.65
"""Size on the page of a pixel of a figure (200 dpi, shown a little larger than in print)."""
_HOUR = 3600.0
_CHART = (220.0, 90.0)
"""Width and height of a small chart."""


def make_report(
    *,
    study_spec: dict[str, Any],
    tables: Sequence[Path],
    figures: Sequence[Path],
    markers: Sequence[Path],
    scores: Sequence[Path],
    out: Path,
    counts: Path | None = None,
) -> None:
    """Write the report.

    Args:
        study_spec: `config.report_spec`.
        tables: stems of tables.
        figures: stems of figures.
        markers: training markers.
        scores: scores files.
        out: the HTML page.
        counts: folder that keeps counts of samples by content (`erpo.paper.counting`).

    Raises:
        ValueError: a table or figure that does not exist, or damaged inputs.
    """
    training = read_markers(path for path in markers if path.is_file())
    shown_tables = [_table(stem, out) for stem in tables]
    shown_figures = [_figure(stem, out) for stem in figures]
    present = [path for path in scores if path.is_file()]
    curves = read_curves(training)
    page = (
        _environment()
        .get_template(TEMPLATE)
        .render(
            study=study_spec,
            version=__version__,
            answers=_answers(shown_tables, present, counts),
            beside_paper=_beside_paper(shown_tables),
            tables=shown_tables,
            figures=shown_figures,
            runs=[_run(name, settings, training, curves) for name, settings in study_spec["runs"].items()],
            costs=_costs(training, curves),
            dag=_dag(study_spec, training, present),
            provenance=_provenance([*shown_tables, *shown_figures]),
        )
    )
    write_atomic(out, page.encode())


def _environment() -> jinja2.Environment:
    """Templates that escape whatever is put into them: responses of a model are text, never markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, plain=plain, points=points, duration=duration)
    return environment


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


# --- tables and figures ------------------------------------------------------------------------------------------------


def _table(stem: Path, out: Path) -> dict[str, Any]:
    sidecar = read_json(stem.with_name(f"{stem.name}.json"))
    files = [(ending, _link(stem, ending, out)) for ending in ("csv", "parquet", "md", "tex", "json")]
    return {"name": stem.name, "sheet": Sheet.from_json(sidecar), "sidecar": sidecar, "files": files}


def _figure(stem: Path, out: Path) -> dict[str, Any]:
    png = stem.with_name(f"{stem.name}.png").read_bytes()
    width = round(int.from_bytes(png[16:20], "big") * _CSS_PIXELS)  # the header's width
    files = [(ending, _link(stem, ending, out)) for ending in ("pdf", "png", "csv", "json")]
    return {
        "name": stem.name,
        "image": base64.b64encode(png).decode(),
        "width": width,
        "sidecar": read_json(stem.with_name(f"{stem.name}.json")),
        "files": files,
    }


def _link(stem: Path, ending: str, out: Path) -> str:
    """Relative address of a file beside the report; the page itself never loads it."""
    path = stem.with_name(f"{stem.name}.{ending}")
    return path.relative_to(out.parent).as_posix() if path.is_relative_to(out.parent) else path.as_posix()


def _beside_paper(tables: Sequence[dict[str, Any]]) -> dict[str, str] | None:
    """What the comparison with the paper comes to, and where it stands."""
    found = next((table for table in tables if table["sidecar"]["spec"]["artefact"]["columns"] == "reported"), None)
    return {"name": found["name"], "summary": found["sheet"].notes[0]} if found else None


def _answers(tables: Sequence[dict[str, Any]], scores: Sequence[Path], counts: Path | None) -> list[Answer]:
    """The comparison of the first table that names a baseline (else of the first one with scores), and of further tables of the
    same kind whose runs are all others: another model.
    """
    specs = [table["sidecar"]["spec"] for table in tables]
    scored = [spec for spec in specs if spec["artefact"]["columns"] != "reported" and _has_scores(spec)]
    named = [spec for spec in scored if isinstance(spec["artefact"]["baseline"], str)]
    if not scored:
        return [Answer(sentences=["The study has no table of scores, so there is nothing to compare."])]
    chosen = [(named or scored)[0]]
    for spec in named:
        alike = all(spec[key] == chosen[0][key] for key in ("temperatures", "benchmarks"))
        if alike and not {run for other in chosen for run in other["runs"]} & set(spec["runs"]):
            chosen.append(spec)
    known = {_cell(read_facts(path)): path for path in scores}
    return [answer(spec, [known[tuple(cell)] for cell in spec["cells"] if tuple(cell) in known], counts) for spec in chosen]


def _has_scores(spec: dict[str, Any]) -> bool:
    return any("/" not in metric for metric in spec["artefact"]["metrics"])


def _cell(facts: dict[str, Any]) -> tuple[str, int, int]:
    return facts["run"], facts["seed"], facts["step"]


# --- runs --------------------------------------------------------------------------------------------------------------


def _run(name: str, settings: dict[str, Any], training: Sequence[dict[str, Any]], curves: pd.DataFrame) -> dict[str, Any]:
    mine = [marker for marker in training if marker["run"] == name]
    fields = RunConfig.model_fields
    described = [
        {"key": key, "value": json.dumps(value), "meaning": fields[key].description or ""}
        for key, value in sorted(settings.items())
    ]
    charts = [chart for key, title in _CURVES.items() if (chart := _chart(curves, name, key, title))]
    return {"name": name, "settings": described, "markers": mine, "charts": charts, "samples": _samples(mine)}


def _chart(curves: pd.DataFrame, run: str, key: str, title: str) -> dict[str, Any] | None:
    """A small line chart as points of polylines, one per seed; None without data."""
    if key not in curves:
        return None
    rows = curves[(curves["run"] == run) & curves[key].notna()]
    if len(rows) < 2 or rows["step"].min() == rows["step"].max():
        return None
    width, height = _CHART
    first, last = float(rows["step"].min()), float(rows["step"].max())
    low, high = float(rows[key].min()), float(rows[key].max())
    reach = (high - low) or 1.0
    lines = []
    for seed, part in rows.groupby("seed"):
        at = [
            f"{width * (step - first) / (last - first):.1f},{height * (high - value) / reach:.1f}"
            for step, value in zip(part["step"], part[key], strict=True)
        ]
        lines.append({"seed": int(seed), "points": " ".join(at)})
    return {
        "title": title,
        "lines": lines,
        "low": low,
        "high": high,
        "first": int(first),
        "last": int(last),
        "width": width,
        "height": height,
    }


def _samples(markers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest samples that the run's first seed kept."""
    if not markers or "samples" not in markers[0]:
        return []
    newest = max((marker for marker in markers if marker["seed"] == markers[0]["seed"]), key=lambda marker: marker["step"])
    path = newest["path"].parent / newest["samples"]
    rows = [row for line in path.read_text(encoding="utf-8").splitlines() if (row := _parsed(line))] if path.is_file() else []
    rows = [row for row in rows if row["step"] <= newest["step"]]
    last = [row for row in rows if row["step"] == rows[-1]["step"]][:_SAMPLES]
    return [{**row, "response": _cut(str(row["response"]))} for row in last]


def _parsed(line: str) -> dict[str, Any] | None:
    """A row of the sample table; None for a line cut by a kill."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _cut(text: str) -> str:
    left = len(text) - _SAMPLE_CHARACTERS
    return text if left <= 0 else f"{text[:_SAMPLE_CHARACTERS]} [{left} more characters]"


# --- cost and provenance -----------------------------------------------------------------------------------------------


def _costs(training: Sequence[dict[str, Any]], curves: pd.DataFrame) -> dict[str, Any]:
    """Seconds of training by run and seed, as the logs add up."""
    rows = []
    for run, seed in sorted({(marker["run"], marker["seed"]) for marker in training}):
        part = curves[(curves["run"] == run) & (curves["seed"] == seed)]
        seconds = {name: _total(part, f"time/{name}") for name in ("total", "rollout", "grade", "update")}
        steps, peak = int(part["step"].max()), float(part["memory/peak_gib"].max()) if "memory/peak_gib" in part else math.nan
        gpus = max(marker.get("gpus", 0) for marker in training if (marker["run"], marker["seed"]) == (run, seed))
        gpu_hours = gpus * seconds["total"] / _HOUR
        rows.append({"run": run, "seed": seed, "steps": steps, "peak": peak, "gpus": gpus, "gpu_hours": gpu_hours, **seconds})
    return {"rows": rows, **{name: sum(row[name] for row in rows) for name in ("total", "gpu_hours")}}


def _total(part: pd.DataFrame, key: str) -> float:
    return float(part[key].sum()) if key in part else 0.0


_STAGES = {  # column, row; and what feeds what
    "models": (0, 1),
    "queries": (1, 0),
    "reference caches": (2, 0),
    "benchmarks": (1, 2),
    "training": (3, 0),
    "evaluation": (4, 1),
    "tables": (5, 0),
    "figures": (5, 2),
    "report": (6, 1),
}
_FLOW = (
    ("models", "queries"),
    ("models", "benchmarks"),
    ("queries", "reference caches"),
    ("reference caches", "training"),
    ("training", "evaluation"),
    ("benchmarks", "evaluation"),
    ("evaluation", "tables"),
    ("evaluation", "figures"),
    ("tables", "report"),
    ("figures", "report"),
)
_BOX, _APART, _DOWN = (130, 46), 165, 80
"""Size of a box of the diagram and the distances between corners, pixels."""
_TIP = 8
"""Length of the head of an arrow, pixels."""


def _dag(spec: dict[str, Any], training: Sequence[dict[str, Any]], scores: Sequence[Path]) -> dict[str, Any]:
    """The stages as boxes and arrows, with how many jobs of each this report rests on."""
    trained = {(marker["run"], marker["seed"]) for marker in training}
    sets = {(settings.get("model"), settings.get("train_set")) for settings in spec["runs"].values()}
    counts = {
        "models": str(len({model for model, _ in sets})),
        "queries": f"{len(sets)} training sets",
        "reference caches": str(len(sets)),
        "benchmarks": f"in the prompts of {len({model for model, _ in sets})}",
        "training": f"{len(trained)} trainings",
        "evaluation": f"{len(scores)} checkpoints",
        "tables": str(len(spec["tables"])),
        "figures": str(len(spec["figures"])),
        "report": "this page",
    }
    places = {name: (column * _APART, 10 + row * _DOWN) for name, (column, row) in _STAGES.items()}
    boxes = [{"name": name, "what": counts[name], "x": x, "y": y} for name, (x, y) in places.items()]
    return {"boxes": boxes, "lines": [_arrow(places[one], places[other]) for one, other in _FLOW]}


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """From the right side of one box to the left side of another."""
    (x, y), (u, v) = (start[0] + _BOX[0], start[1] + _BOX[1] // 2), (end[0], end[1] + _BOX[1] // 2)
    return f"M{x} {y}L{u} {v}M{u - _TIP} {v - _TIP / 2:g}L{u} {v}L{u - _TIP} {v + _TIP / 2:g}"


def _provenance(artefacts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Distinct inputs, commits and tools of everything shown."""
    inputs = {entry["path"]: entry for artefact in artefacts for entry in artefact["sidecar"]["inputs"]}
    commits = sorted({commit for artefact in artefacts for commit in artefact["sidecar"]["commits"]})
    tools = {name: number for artefact in artefacts for name, number in artefact["sidecar"]["made_by"].items()}
    hardware = sorted({name for artefact in artefacts for name in artefact["sidecar"]["hardware"]})
    return {
        "inputs": [inputs[path] for path in sorted(inputs)],
        "commits": commits,
        "tools": tools,
        "hardware": hardware,
        "versions": used_versions(list(inputs.values())),
    }
