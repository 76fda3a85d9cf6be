"""A finished table as readers see it: rows, columns and blocks of entries out of the frame of cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from erpo.paper import typeset, wording

MEAN = "mean"
"""Key of the column over everything; of the only column when there is one."""


class Row(NamedTuple):
    """A line of the table."""

    run: str
    step: int | None
    """None when the columns are steps."""
    label: str


class Column(NamedTuple):
    """A column of scores."""

    key: str
    label: str
    benchmarks: tuple[str, ...]
    temperatures: tuple[float, ...]
    step: int | None = None


@dataclass(frozen=True)
class Table:
    """A finished table: every cell, and how to lay them out."""

    spec: dict[str, Any]
    rows: list[Row]
    columns: list[Column]
    frame: pd.DataFrame
    """One line per cell."""
    notes: list[str]
    inputs: list[dict[str, Any]]

    @property
    def metrics(self) -> list[str]:
        """Metrics in the order of the blocks."""
        return list(self.spec["artefact"]["metrics"])


def baseline_of(spec: dict[str, Any], run: str) -> str | None:
    """The run that this one is compared with: the table's baseline, or its own where the table names one for each."""
    named = spec["artefact"]["baseline"]
    baseline = named.get(run) if isinstance(named, dict) else named
    return None if baseline == run else baseline


def lay_out(table: Table) -> typeset.Sheet:
    """The cells as readers see them: a block per metric, or one block of all metrics when there is one column of scores."""
    lines = {(line["run"], line["step"], line["column"], line["metric"]): line for line in table.frame.to_dict("records")}
    scored = [metric for metric in table.metrics if "/" not in metric]
    logged = [metric for metric in table.metrics if "/" in metric]
    by_step = table.spec["artefact"]["columns"] == "step"
    labels = {line["metric"]: line["label"] for line in lines.values()}
    beside = [(_logged_label(name), name, name) for name in logged]
    if by_step:
        sections = [[(column.label, column.key, metric) for column in _step_columns(table)] for metric in table.metrics]
    elif len(table.columns) < 2:
        sections = [[(labels[metric], table.columns[0].key, metric) for metric in scored] + beside]
    else:
        sections = [[(column.label, column.key, metric) for column in table.columns] for metric in scored]
        sections[0] += beside
    blocks = []
    for section in sections:
        rows = [(row.label, [_shown(lines, row, key, metric) for _, key, metric in section]) for row in table.rows]
        title = labels[section[0][2]] if len({metric for _, _, metric in section if "/" not in metric}) == 1 or by_step else ""
        blocks.append(typeset.Block(title, [label for label, _, _ in section], rows))
    if isinstance(table.spec["artefact"]["baseline"], dict):
        blocks += [_gains(table, lines, metric, labels[metric]) for metric in scored]
    caption = table.spec["artefact"]["caption"] or f"Table {table.spec['name']}."
    return typeset.Sheet(table.spec["name"], caption, blocks, table.notes)


def _logged_label(metric: str) -> str:
    label = wording.LOGGED.get(metric, metric)
    return f"{label}, percent" if metric in wording.SHARES else label


def _gains(table: Table, lines: dict[tuple, dict[str, Any]], metric: str, label: str) -> typeset.Block:
    """Each compared run minus its own baseline."""
    rows = []
    for row in table.rows:
        baseline = baseline_of(table.spec, row.run)
        found = [lines.get((row.run, row.step, column.key, metric)) for column in table.columns]
        if baseline is not None and any(found):
            rows.append((f"{row.label} minus {baseline}", [_gain(line) for line in found]))
    return typeset.Block(f"{label}: gain, percentage points", [column.label for column in table.columns], rows)


def _gain(line: dict[str, Any] | None) -> typeset.Entry:
    if line is None:
        return typeset.Entry("", np.nan)
    half = (line["difference_high"] - line["difference_low"]) / 2
    return typeset.Entry(
        wording.points(line["difference"]),
        line["difference"],
        half="" if np.isnan(half) else wording.percent(half),
        is_significant=line["significant"],
        is_incomplete=not (line["complete"] and line["baseline_complete"]),
    )


def _step_columns(table: Table) -> list[Column]:
    if table.columns:
        return table.columns
    steps = sorted(set(table.frame["step"].dropna()))
    return [Column(f"step{step}", f"step {step}", (), (), int(step)) for step in steps]


def _shown(lines: dict[tuple, dict[str, Any]], row: Row, key: str, metric: str) -> typeset.Entry:
    step = int(key.removeprefix("step")) if row.step is None else row.step
    line = lines.get((row.run, step, key, metric))
    if line is None:
        return typeset.Entry("", np.nan)
    if "/" in metric:
        text = wording.percent(line["value"]) if metric in wording.SHARES else wording.plain(line["value"])
        return typeset.Entry(text, line["value"], is_incomplete=not line["complete"])
    half = (line["high"] - line["low"]) / 2
    return typeset.Entry(
        wording.percent(line["value"]),
        line["value"],
        half="" if np.isnan(half) else wording.percent(half),
        is_best=line["best"],
        is_significant=line["significant"],
        is_incomplete=not line["complete"],
    )
