"""Tables: scores and training logs -> one frame of cells, written as CSV, Parquet, Markdown, LaTeX and a provenance sidecar.

A row is a run (and a step), a column a benchmark, a temperature, a band or a step, a block a metric. The CSV holds one line per
cell with all that is known about it; Markdown and LaTeX show the same cells as people read them (`erpo.paper.typeset`).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from erpo.checkpoint import read_json, write_atomic, write_json
from erpo.config import Cell, temperature_label
from erpo.paper import typeset, wording
from erpo.paper.aggregate import Scores, metric_label, needs_answers, problem_values, read_scores
from erpo.paper.comparison import compare_with_paper
from erpo.paper.curves import read_curves, read_markers, seed_values
from erpo.paper.layout import MEAN, Column, Row, Table, baseline_of, lay_out
from erpo.paper.notes import table_notes
from erpo.paper.provenance import describe_inputs, mixture_notes, sidecar
from erpo.paper.summaries import ALPHA, Place, clean_value, corrected, difference, seeds_by_checkpoint, summarise


def make_table(
    *, spec: dict[str, Any], scores: Sequence[Path], markers: Sequence[Path], out_stem: Path, counts: Path | None = None
) -> None:
    """Build one table and write it as .csv, .parquet, .md, .tex and .json (sidecar).

    Args:
        spec: `config.drawn_spec` of the table.
        scores: scores files of its checkpoints; one that is absent makes cells incomplete, not the table fail.
        markers: training markers, for training metrics and provenance.
        out_stem: path of the outputs without ending.
        counts: folder that keeps counts of samples by content (`erpo.paper.counting`); speed only.

    Raises:
        ValueError: an unknown metric, a baseline outside the table, or scores that do not belong together.
    """
    if spec["artefact"]["columns"] == "reported":
        frame, sheet = compare_with_paper(spec, scores, markers, counts=counts)
        training = read_markers(path for path in markers if path.is_file())
        _write(spec, frame, sheet, describe_inputs([path for path in scores if path.is_file()], training), out_stem)
        return
    table = build_table(spec, scores, markers, counts)
    _write(spec, table.frame, lay_out(table), table.inputs, out_stem)


def _write(spec: dict[str, Any], frame: pd.DataFrame, sheet: typeset.Sheet, inputs: list[dict[str, Any]], stem: Path) -> None:
    """All formats, and the sidecar with their checksums."""
    parquet = io.BytesIO()
    frame.to_parquet(parquet, index=False, compression="zstd")
    contents = {
        "csv": frame.to_csv(index=False, lineterminator="\n").encode(),
        "md": typeset.markdown(sheet).encode(),
        "parquet": parquet.getvalue(),
        "tex": typeset.latex(sheet).encode(),
    }
    paths = {ending: stem.with_name(f"{stem.name}.{ending}") for ending in (*contents, "json")}
    for ending, content in contents.items():
        write_atomic(paths[ending], content)
    outputs = [paths[ending] for ending in contents]
    proof = sidecar(spec=spec, inputs=inputs, caption=sheet.caption, notes=sheet.notes, outputs=outputs)
    write_json(paths["json"], {**proof, "blocks": [block.as_json() for block in sheet.blocks]})


def build_table(spec: dict[str, Any], scores: Sequence[Path], markers: Sequence[Path], counts: Path | None = None) -> Table:
    """Compute every cell of a table."""
    artefact, seeds = spec["artefact"], seeds_by_checkpoint(spec["cells"])
    scored = [metric for metric in artefact["metrics"] if "/" not in metric]
    logged = [metric for metric in artefact["metrics"] if "/" in metric]
    _refuse_hidden_baseline(spec)
    present = [path for path in scores if path.is_file()]
    found = read_scores(present, spec["samples"], needs_answers(scored), counts) if scored else None
    training = read_markers(path for path in markers if path.is_file())
    rows, columns = _rows(spec, seeds), _columns(spec, seeds) if scored else []
    records = [line for metric in scored for line in _block(spec, found, metric, rows, columns, seeds)]
    curves = read_curves(training) if logged else pd.DataFrame()
    records += [_logged(curves, metric, row, step, seeds) for metric in logged for row, step in _checkpoints(rows, seeds)]
    frame = _frame(records)
    inputs = describe_inputs(present, training)
    return Table(spec, rows, columns, frame, [*table_notes(spec, frame), *mixture_notes(inputs)], inputs)


def _refuse_hidden_baseline(spec: dict[str, Any]) -> None:
    named = spec["artefact"]["baseline"]
    for name in [name for pair in named.items() for name in pair] if isinstance(named, dict) else filter(None, [named]):
        if name not in spec["runs"]:
            raise ValueError(
                f"tables.{spec['name']}.baseline: {name!r} is not one of the table's runs ({', '.join(spec['runs'])}); "
                "add it to runs, so that what is compared is also shown"
            )


# --- layout ------------------------------------------------------------------------------------------------------------


def _rows(spec: dict[str, Any], seeds: dict[tuple[str, int], tuple[int, ...]]) -> list[Row]:
    if spec["artefact"]["columns"] == "step":
        return [Row(run, None, run) for run in spec["runs"]]
    rows = []
    for run in spec["runs"]:
        steps = [step for name, step in seeds if name == run]
        rows += [Row(run, step, run if len(steps) == 1 else f"{run}, step {step}") for step in steps]
    return rows


def _columns(spec: dict[str, Any], seeds: dict[tuple[str, int], tuple[int, ...]]) -> list[Column]:
    """Columns by the artefact's `columns`, and the mean over everything unless the columns are steps."""
    kind, benchmarks, temperatures = spec["artefact"]["columns"], tuple(spec["benchmarks"]), tuple(spec["temperatures"])
    everything = Column(MEAN, "all" if kind in ("none", "band") else MEAN, benchmarks, temperatures)
    if kind == "step":
        steps = sorted({step for _, step in seeds})
        return [everything._replace(key=f"step{step}", label=f"step {step}", step=step) for step in steps]
    if kind == "benchmark":
        parts = [everything._replace(key=name, label=name, benchmarks=(name,)) for name in benchmarks]
    elif kind == "temperature":
        names = [(temperature_label(value), value) for value in temperatures]
        parts = [everything._replace(key=f"T={name}", label=f"T={name}", temperatures=(value,)) for name, value in names]
    elif kind == "band":
        bands = [(name, _in_band(temperatures, spec[f"{name}_band"])) for name in ("low", "high")]
        parts = [
            everything._replace(key=f"{name}_band", label=f"{name} band {_range(part)}", temperatures=part)
            for name, part in bands
            if part
        ]
    else:
        parts = []
    return [*parts, everything] if len(parts) != 1 else parts


def _range(temperatures: Sequence[float]) -> str:
    ends = [temperature_label(value) for value in (temperatures[0], temperatures[-1])]
    return "-".join(dict.fromkeys(ends))


def _in_band(temperatures: Iterable[float], limits: Sequence[float]) -> tuple[float, ...]:
    return tuple(value for value in temperatures if limits[0] - 1e-9 <= value <= limits[1] + 1e-9)


def _checkpoints(rows: Sequence[Row], seeds: dict[tuple[str, int], tuple[int, ...]]) -> list[tuple[Row, int]]:
    """Rows with the steps they stand for."""
    return [(row, step) for row in rows for name, step in seeds if name == row.run and row.step in (None, step)]


# --- cells -------------------------------------------------------------------------------------------------------------


def _block(
    spec: dict[str, Any], scores: Scores, metric: str, rows: Sequence[Row], columns: Sequence[Column], seeds: dict
) -> list[dict[str, Any]]:
    """All cells of one metric, with what only their neighbours decide: corrected p-values and the best of each column."""
    values = problem_values(scores, metric)
    placed = []
    for column in columns:  # a column at a time: its cells share their bootstrap resamples
        for number, row in enumerate(rows):
            step = column.step if row.step is None else row.step
            if (row.run, step) in seeds:
                place = Place(row.run, step, seeds[row.run, step], column.benchmarks, column.temperatures)
                placed.append((number, _line(spec, scores, values, metric, row, column, place, _baseline(spec, place, seeds))))
    lines = [line for _, line in sorted(placed, key=lambda pair: pair[0])]
    whole = {(line["run"], line["step"], line["column"]): line["complete"] for line in lines}
    planned = sum(line["baseline"] != "" for line in lines)
    for line in lines:
        line["p_adjusted"] = corrected(line["p_value"], planned)
        line["baseline_complete"] = whole.get((line["baseline"], line.pop("baseline_step"), line["column"]), False)
        line["significant"] = bool(line["complete"] and line["baseline_complete"] and line["p_adjusted"] < ALPHA)
    for column in columns:
        _mark_best([line for line in lines if line["column"] == column.key])
    return lines


def _baseline(spec: dict[str, Any], place: Place, seeds: dict[tuple[str, int], tuple[int, ...]]) -> Place | None:
    """The same cell of the baseline: at the same step where it was evaluated there, else at its only one."""
    run = baseline_of(spec, place.run)
    steps = [step for name, step in seeds if name == run]
    if run is None or not steps:
        return None
    step = place.step if place.step in steps else steps[0] if len(steps) == 1 else None
    return None if step is None else place._replace(run=run, step=step, seeds=seeds[run, step])


def _line(
    spec: dict[str, Any],
    scores: Scores,
    values: np.ndarray,
    metric: str,
    row: Row,
    column: Column,
    place: Place,
    baseline: Place | None,
) -> dict[str, Any]:
    cell = summarise(scores, values, place)
    change = difference(scores, values, place, baseline) if baseline else None
    clean, clean_problems = clean_value(scores, values, place)
    by_seed = [value for value in cell.by_seed.values() if np.isfinite(value)]
    return {
        "table": spec["name"],
        "run": row.run,
        "step": place.step,
        "column": column.key,
        "metric": metric,
        "label": metric_label(metric, spec["samples"]),
        "value": cell.value,
        "low": cell.low,
        "high": cell.high,
        "seeds": len(by_seed),
        "seeds_expected": len(place.seeds),
        "seed_sd": cell.seed_sd,
        "seed_min": min(by_seed, default=np.nan),
        "seed_max": max(by_seed, default=np.nan),
        "samples": cell.samples,
        "samples_expected": cell.samples_expected,
        "problems": cell.problems,
        "problems_expected": cell.problems_expected,
        **cell.rates,
        "complete": cell.is_complete,
        "missing": ";".join(_target(spec, lacking) for lacking in cell.missing),
        "value_clean": clean,
        "problems_clean": clean_problems,
        "baseline": baseline.run if baseline else "",
        "baseline_step": baseline.step if baseline else -1,
        "difference": change.value if change else np.nan,
        "difference_low": change.low if change else np.nan,
        "difference_high": change.high if change else np.nan,
        "p_value": change.p_value if change else np.nan,
        "seeds_compared": len(change.by_seed) if change else 0,
        "seeds_agreeing": change.seeds_agreeing if change else 0,
        "best": False,
    }


def _target(spec: dict[str, Any], cell: Cell) -> str:
    """What to ask the workflow for to fill a hole."""
    return f"results/{spec['study']}/scores/{cell.run}/seed{cell.seed}/step{cell.step}.parquet"


def _mark_best(lines: Sequence[dict[str, Any]]) -> None:
    """Mark the largest value of a column, if no incomplete cell might be larger; ties share the mark."""
    known = [line["value"] for line in lines if np.isfinite(line["value"])]
    if len(known) < 2 or len(known) < len(lines):
        return
    for line in lines:
        line["best"] = bool(line["complete"] and line["value"] == max(known))


def _logged(curves: pd.DataFrame, metric: str, row: Row, step: int, seeds: dict) -> dict[str, Any]:
    """Cell of a training metric: mean over seeds of the value logged at the step."""
    found = list(seed_values(curves, row.run, step, metric, seeds[row.run, step]).values()) if step > 0 else []
    return {
        "run": row.run,
        "step": step,
        "column": metric if row.step is not None else f"step{step}",
        "metric": metric,
        "label": wording.LOGGED.get(metric, metric),
        "value": float(np.mean(found)) if found else np.nan,
        "seeds": len(found),
        "seeds_expected": len(seeds[row.run, step]) if step > 0 else 0,
        "seed_sd": float(np.std(found, ddof=1)) if len(found) > 1 else np.nan,
        "seed_min": min(found, default=np.nan),
        "seed_max": max(found, default=np.nan),
        "complete": step == 0 or len(found) == len(seeds[row.run, step]),
    }


_FLAGS = ("complete", "baseline_complete", "significant", "best")
_WHOLE = ("step", "seeds", "seeds_expected", "samples", "samples_expected", "problems", "problems_expected", "problems_clean")


def _frame(records: list[dict[str, Any]]) -> pd.DataFrame:
    """All lines with the same columns and fixed types, whatever the metrics."""
    frame = pd.DataFrame.from_records(records)
    for name in _FLAGS:
        frame[name] = frame[name].fillna(False).astype(bool) if name in frame else False
    for name in (*_WHOLE, "seeds_compared", "seeds_agreeing"):
        frame[name] = frame[name].astype("Int64") if name in frame else pd.array([pd.NA] * len(frame), "Int64")
    for name in ("table", "missing", "baseline"):
        frame[name] = frame[name].fillna("") if name in frame else ""
    return frame


# --- for a terminal --------------------------------------------------------------------------------------------------


def headline(path: Path) -> str:
    """The first block of a finished table and what it says against its baseline, as text for a terminal.

    Args:
        path: the table's CSV.

    Raises:
        ValueError: the table does not exist.
    """
    sheet = typeset.Sheet.from_json(read_json(path.with_suffix(".json")))
    frame = pd.read_csv(path, keep_default_na=True)
    compared = frame[(frame["metric"] == frame["metric"].iloc[0]) & frame["difference"].notna()]
    chosen = compared[compared["column"] == MEAN] if (compared["column"] == MEAN).any() else compared
    lines = [wording.comparison(line, str(line["label"])) for line in chosen.to_dict("records")]
    legend = [note for note in sheet.notes if note.startswith(("±", "Bold", typeset.DAGGER))]
    return "\n".join([sheet.caption, "", *typeset.block_lines(sheet.blocks[0]), "", *legend, "", *lines])
