"""Which checkpoints, milestones and temperature shards a study needs."""

from __future__ import annotations

import math
from typing import NamedTuple

from erpo.config.study import Figure, Selection, Study, Table, runs_of


class Cell(NamedTuple):
    """One evaluated checkpoint of one artefact."""

    run: str
    seed: int
    step: int


def cells(study: Study, selection: Selection) -> list[Cell]:
    """Checkpoints a table or figure needs: runs x their seeds x steps. The untrained run has step 0 alone.

    The comparison with the paper needs every checkpoint that the study evaluates anyway.
    """
    if compares_with_paper(selection):
        return [cell for chosen in scored_cells(study).values() for cell in chosen]
    found = []
    for name in runs_of(study, selection):
        run = study.runs[name]
        steps = (0,) if run.steps == 0 else (selection.steps or (run.steps,))
        for seed in selection.seeds or seeds_of(study, name):
            found += [Cell(name, seed, step) for step in steps]
    return found


def compares_with_paper(selection: Selection) -> bool:
    """Whether it is the table of reported numbers beside ours."""
    return isinstance(selection, Table) and selection.columns == "reported"


def seeds_of(study: Study, name: str) -> tuple[int, ...]:
    """Seeds of a run: its own, or the study's."""
    return study.runs[name].seeds or study.seeds


def milestones(study: Study) -> dict[str, tuple[int, ...]]:
    """Steps at which each run leaves a policy: its last step and every one that a table or figure asks for."""
    steps = {name: {run.steps} for name, run in study.runs.items()}
    for artefact in (*study.tables.values(), *study.figures.values()):
        for name in runs_of(study, artefact):
            steps[name].update(artefact.steps or () if study.runs[name].steps > 0 else ())
    return {name: tuple(sorted(found - {0})) for name, found in steps.items()}


def shards(study: Study) -> dict[str, tuple[float, ...]]:
    """Temperatures of the sweep by shard label. A label names a fixed interval, so adding a temperature moves no other."""
    found: dict[str, list[float]] = {}
    width = study.evaluation.shard_width
    for value in study.evaluation.temperatures:
        index = max(math.ceil(value / width - 1e-9), 1)
        found.setdefault(f"upto{index * width:g}", []).append(value)
    return {label: tuple(values) for label, values in found.items()}


def temperature_label(value: float) -> str:
    """Canonical spelling in file names and tables: at least one decimal, no float residue."""
    text = f"{round(value, 4):g}"
    return text if "." in text else f"{text}.0"


_TRAINING_FIGURES = {"drift", "training_dynamics", "query_weights", "gradient_cosine"}
_SCORED_AND_TRAINING_FIGURES = {"train_eval_gap"}
_OF_EVALUATION = {"temperatures", "benchmarks", "samples", "low_band", "high_band"}


def needs_scores(artefact: Table | Figure) -> bool:
    """Whether it shows evaluation results (a metric without a slash is one)."""
    if isinstance(artefact, Figure):
        return artefact.kind not in _TRAINING_FIGURES
    return any("/" not in metric for metric in artefact.metrics)


def needs_training(artefact: Table | Figure) -> bool:
    """Whether it shows what was logged during training (metric keys have a slash)."""
    if isinstance(artefact, Figure):
        return artefact.kind in _TRAINING_FIGURES | _SCORED_AND_TRAINING_FIGURES
    return compares_with_paper(artefact) or any("/" in metric for metric in artefact.metrics)


def scored_cells(study: Study) -> dict[str, list[Cell]]:
    """Checkpoints to evaluate, by run: every run's last step for all its seeds, and what tables and figures ask besides."""
    found = {name: {Cell(name, seed, run.steps): None for seed in seeds_of(study, name)} for name, run in study.runs.items()}
    for artefact in (*study.tables.values(), *study.figures.values()):
        for cell in cells(study, artefact) if needs_scores(artefact) and not compares_with_paper(artefact) else ():
            found[cell.run][cell] = None
    return {name: sorted(chosen) for name, chosen in found.items()}
