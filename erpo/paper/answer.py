"""Which method wins at which temperature, and how sure that is: the comparisons of one table, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from erpo.config import temperature_label
from erpo.paper.aggregate import Scores, metric_label, problem_values, read_scores
from erpo.paper.summaries import ALPHA, Place, Summary, corrected, difference, seeds_by_checkpoint, summarise
from erpo.paper.wording import comparison, is_sure, listed, ranges

METRIC = "avg@n"


@dataclass
class Answer:
    """What the scores say."""

    sentences: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    baseline: str = ""
    metric: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One per temperature or band: label, values by run, and comparisons by run."""
    cautions: list[str] = field(default_factory=list)
    title: str = ""
    """Caption of the table whose runs are compared."""


def answer(spec: dict[str, Any], paths: Sequence[Path], counts: Path | None = None) -> Answer:
    """Compare the runs of a table with its baseline at every temperature, in each band and over the sweep.

    Args:
        spec: `config.drawn_spec` of a table with a baseline.
        paths: scores files; those of other checkpoints are left out by the caller.
        counts: folder that keeps counts of samples by content (`erpo.paper.counting`).
    """
    baseline = spec["artefact"]["baseline"]
    title = spec["artefact"]["caption"] or spec["name"]
    found = Answer(runs=list(spec["runs"]), baseline=baseline or "", metric=metric_label(METRIC, spec["samples"]), title=title)
    if not paths:
        found.sentences.append("There are no scores yet, so there is no answer yet.")
        return found
    scores = read_scores(paths, spec["samples"], cache=counts)
    values = problem_values(scores, METRIC)
    found.rows = [_row(spec, scores, values, *part) for part in _parts(spec)]
    if baseline is None:
        found.sentences.append("No table names a baseline, so nothing is tested; the values stand below.")
        return found
    _correct(found.rows, len(found.runs))
    found.sentences += _highest([row for row in found.rows if row["is_temperature"]])
    trained = {run for run, _, step in spec["cells"] if step > 0}
    for run in sorted(found.runs, key=lambda run: run not in trained):  # what was trained first
        if run != baseline:
            found.sentences += _about(run, baseline, found.rows)
    found.cautions = _cautions(spec, found)
    return found


def _parts(spec: dict[str, Any]) -> list[tuple[str, str, tuple[float, ...], bool]]:
    """Label, words, temperatures, and whether it is a single temperature."""
    temperatures = tuple(spec["temperatures"])
    parts = [("all", "Over the whole sweep", temperatures, False)]
    for name in ("low", "high"):
        low, high = spec[f"{name}_band"]
        inside = tuple(value for value in temperatures if low - 1e-9 <= value <= high + 1e-9)
        if inside and inside != temperatures:
            parts.append(
                (
                    f"{name} band",
                    f"In the {name} band (T = {temperature_label(inside[0])} to {temperature_label(inside[-1])})",
                    inside,
                    False,
                )
            )
    single = [(f"T={temperature_label(value)}", f"At T={temperature_label(value)}", (value,), True) for value in temperatures]
    return parts + single if len(temperatures) > 1 else single


def _row(
    spec: dict[str, Any], scores: Scores, values: np.ndarray, label: str, words: str, temperatures: tuple[float, ...], single: bool
) -> dict[str, Any]:
    seeds, places = seeds_by_checkpoint(spec["cells"]), {}
    for (run, step), chosen in seeds.items():
        places[run] = Place(run, step, chosen, tuple(spec["benchmarks"]), temperatures)  # the last step of several
    cells = {run: summarise(scores, values, place) for run, place in places.items()}
    baseline = spec["artefact"]["baseline"]
    compared = {}
    for run, place in places.items():
        change = difference(scores, values, place, places[baseline]) if baseline in places and run != baseline else None
        if change is not None:
            compared[run] = {
                "run": run,
                "baseline": baseline,
                "difference": change.value,
                "difference_low": change.low,
                "difference_high": change.high,
                "p_value": change.p_value,
                "seeds_compared": len(change.by_seed),
                "seeds_agreeing": change.seeds_agreeing,
                "complete": cells[run].is_complete and cells[baseline].is_complete,
            }
    return {
        "leaders": _leaders(scores, values, places, cells, sum(part[-1] == single for part in _parts(spec))),
        "label": label,
        "words": words,
        "is_temperature": single,
        "temperatures": temperatures,
        "cells": cells,
        "compared": compared,
    }


def _leaders(scores: Scores, values: np.ndarray, places: dict[str, Place], cells: dict[str, Summary], rows: int) -> list[str]:
    """The run with the highest value and those not shown to be below it."""
    known = {run: cell.value for run, cell in cells.items() if cell.is_complete}
    if len(known) < len(cells) or len(known) < 2:
        return []
    best = max(known, key=lambda run: known[run])
    planned = _planned(rows, len(known))
    level = []
    for run, place in places.items():
        change = difference(scores, values, places[best], place) if run != best else None
        sure = change is not None and change.seeds_agreeing == len(change.by_seed) and change.value > 0
        if run != best and not (sure and change is not None and corrected(change.p_value, planned) < ALPHA):
            level.append(run)
    return [best, *level]


def _highest(rows: list[dict[str, Any]]) -> list[str]:
    """Who is highest at which temperature, and with whom it is not told apart."""
    known = [row["temperatures"][0] for row in rows]
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(sorted(row["leaders"])), []).append(row["temperatures"][0])
    said = []
    for leaders, at in groups.items():
        where = ranges(at, known)
        if len(leaders) == 1:
            said.append(f"{leaders[0]} is highest at {where}, above every other run here")
        elif leaders:
            said.append(f"{listed(leaders)} lead at {where} and are not told apart")
        else:
            said.append(f"at {where} samples are missing")
    return [f"Highest by temperature: {'; '.join(said)}."] if said else []


def _planned(rows: int, runs: int) -> int:
    """Comparisons that p-values are corrected for: all pairs of runs in every row of a kind (single temperatures, or ranges).

    One number for the leaders and for the comparisons with the baseline, so that no two sentences contradict each other.
    """
    return rows * runs * (runs - 1) // 2


def _correct(rows: list[dict[str, Any]], runs: int) -> None:
    for row in rows:
        planned = _planned(sum(other["is_temperature"] == row["is_temperature"] for other in rows), runs)
        for line in row["compared"].values():
            line["p_adjusted"] = corrected(line["p_value"], planned)
            line["significant"] = bool(line["complete"] and line["p_adjusted"] < ALPHA)


def _about(run: str, baseline: str, rows: list[dict[str, Any]]) -> list[str]:
    """Sentences on one run: the sweep, the bands, and the temperatures at which it is shown to differ."""
    wide = [row for row in rows if not row["is_temperature"] and run in row["compared"]]
    sentences = [comparison(row["compared"][run], row["words"]) for row in wide]
    single = [row for row in rows if row["is_temperature"] and run in row["compared"]]
    if not single:
        return sentences
    known = [row["temperatures"][0] for row in single]
    said, rest = [], list(known)
    for word, sign in (("above", 1), ("below", -1)):
        lines = [(row["temperatures"][0], row["compared"][run]) for row in single]
        at = [value for value, line in lines if is_sure(line) and np.sign(line["difference"]) == sign]
        said += [f"{word} {baseline} at {ranges(at, known)}"] if at else []
        rest = [value for value in rest if value not in at]
    if not said:
        return [*sentences, f"At no single temperature is {run} shown to differ from {baseline}."]
    none = f"; no difference is shown at {ranges(rest, known)}" if rest else ""
    return [*sentences, f"Temperature by temperature: {run} is {' and '.join(said)}{none}."]


def _cautions(spec: dict[str, Any], found: Answer) -> list[str]:
    counts = {len(seeds) for seeds in seeds_by_checkpoint(spec["cells"]).values()}
    fewest = min(counts)
    cautions = [
        f"Tests are paired over problems: they say whether these trained policies differ on problems of this kind. With "
        f"{fewest} seed{'s' if fewest > 1 else ''} a run, how much another training would differ is "
        + ("not measured." if fewest < 2 else "measured roughly at best: look at the sign in every seed."),
        "P-values are Bonferroni-corrected for all pairs of runs at all temperatures (or in all ranges of them); a claim needs "
        f"p < {ALPHA:g} and the same sign in every seed.",
    ]
    if any(not cell.is_complete for row in found.rows for cell in row["cells"].values()):
        cautions.append("Some samples are missing: values marked † rest on what is there, and nothing is claimed from them.")
    return cautions
