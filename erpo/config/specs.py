"""Specs: everything that decides the numbers of one job. What a job sees and what retriggers it are the same text."""

from __future__ import annotations

from typing import Any

from erpo.config.cells import Cell, cells, needs_scores
from erpo.config.run import non_default, run_settings
from erpo.config.study import Figure, FileData, Study, SyntheticModel, runs_of, temperatures_of

RESULTS_VERSION = 1
"""Part of every spec. Raise it when a correction changes numbers: everything is then computed again."""


_OF_EVALUATION = {"temperatures", "benchmarks", "samples", "low_band", "high_band"}
_NOT_TRAINING = {"steps", "seeds", "model", "train_set"}


def run_spec(study: Study, name: str) -> dict[str, Any]:
    """Everything that decides the weights of a run besides seed and step: what its job sees and what retriggers it."""
    run = study.runs[name]
    settings = {key: value for key, value in non_default(run).items() if key not in _NOT_TRAINING}
    return {
        "results_version": RESULTS_VERSION,
        "run": settings,
        "model": model_spec(study, run.model),
        "train_set": train_set_spec(study, run.train_set),
    }


def model_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a starting checkpoint; a synthetic one is warm-started on its train set's generator."""
    entry = study.models[name]
    spec: dict[str, Any] = {"results_version": RESULTS_VERSION, "entry": non_default(entry), "prompt_suffix": study.prompt_suffix}
    if isinstance(entry, SyntheticModel):
        spec["texts"] = non_default(study.train_sets[entry.train_set])
    return spec


def train_set_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a training set, with the benchmarks whose problems are kept out of it."""
    entry = study.train_sets[name]
    spec = {
        "results_version": RESULTS_VERSION,
        "entry": non_default(entry),
        "prompt_suffix": study.prompt_suffix,
        "max_query_tokens": study.max_query_tokens,
    }
    if isinstance(entry, FileData) and entry.without:
        spec["without"] = {benchmark: non_default(study.benchmarks[benchmark]) for benchmark in entry.without}
    return spec


def benchmark_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a benchmark."""
    return {"results_version": RESULTS_VERSION, "entry": non_default(study.benchmarks[name]), "prompt_suffix": study.prompt_suffix}


def artefact_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a table or figure: its selection, resolved to runs, temperatures and bands."""
    artefact = study.tables.get(name) or study.figures[name]
    evaluation = study.evaluation
    return {
        "name": name,
        "study": study.name,
        "artefact": artefact.model_dump(mode="json"),
        "runs": list(runs_of(study, artefact)),
        "temperatures": list(temperatures_of(study, artefact.temperatures)),
        "benchmarks": list(artefact.benchmarks or study.benchmarks),
        "samples": evaluation.samples,
        "low_band": list(evaluation.low_band),
        "high_band": list(evaluation.high_band),
    }


def queries_spec(study: Study, model: str, train_set: str) -> dict[str, Any]:
    """Spec of prepared training queries: the problems, and the tokenizer. Benchmarks have no say in what is trained on."""
    return {**train_set_spec(study, train_set), "model": model_spec(study, model)}


def overlap_spec(study: Study) -> dict[str, Any]:
    """Spec of the overlap report of a training set with the benchmarks."""
    benchmarks = {name: non_default(entry) for name, entry in study.benchmarks.items()}
    return {"results_version": RESULTS_VERSION, "benchmarks": benchmarks}


def prepared_benchmark_spec(study: Study, model: str, benchmark: str) -> dict[str, Any]:
    """Spec of a benchmark in the prompts of one model."""
    return {**benchmark_spec(study, benchmark), "model": model_spec(study, model)}


def reference_spec(study: Study, model: str, train_set: str) -> dict[str, Any]:
    """Spec of a reference cache."""
    return {"results_version": RESULTS_VERSION, "model": model_spec(study, model), "train_set": train_set_spec(study, train_set)}


def generation_spec(study: Study, cell: Cell, temperatures: tuple[float, ...]) -> dict[str, Any]:
    """Spec of the samples of one checkpoint at some temperatures. The policy itself is known by its marker."""
    evaluation = study.evaluation
    spec: dict[str, Any] = {
        "results_version": RESULTS_VERSION,
        **cell._asdict(),
        "temperatures": list(temperatures),
        "samples": evaluation.samples,
        "top_p": evaluation.top_p,
        "max_response_tokens": evaluation.max_response_tokens,
        "prompt_suffix": study.prompt_suffix,
        "benchmarks": {name: non_default(entry) for name, entry in study.benchmarks.items()},
    }
    return spec if evaluation.keep_token_ids else {**spec, "keep_token_ids": False}


def scores_spec(study: Study, cell: Cell) -> dict[str, Any]:
    """Spec of the graded samples of one checkpoint, and their provenance."""
    evaluation = study.evaluation
    return {
        "results_version": RESULTS_VERSION,
        "study": study.name,
        **cell._asdict(),
        "temperatures": list(evaluation.temperatures),
        "samples": evaluation.samples,
        "sampling": {"top_p": evaluation.top_p, "max_response_tokens": evaluation.max_response_tokens},
        "prompt_suffix": study.prompt_suffix,
        "benchmarks": {name: non_default(entry) for name, entry in study.benchmarks.items()},
    }


def drawn_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a table or figure with the checkpoints it is made of. A figure of training alone knows nothing of the evaluation."""
    artefact = study.tables.get(name) or study.figures[name]
    spec = {**artefact_spec(study, name), "cells": [list(cell) for cell in cells(study, artefact)]}
    if isinstance(artefact, Figure) and not needs_scores(artefact):
        spec = {key: value for key, value in spec.items() if key not in _OF_EVALUATION}
    return spec


def report_spec(study: Study) -> dict[str, Any]:
    """Spec of the report: what it shows, and the settings of the runs it shows."""
    artefacts = {**study.tables, **study.figures}
    shown = {name: None for artefact in artefacts.values() for name in runs_of(study, artefact)}
    return {
        "study": study.name,
        "title": study.title,
        "tables": list(study.tables),
        "figures": list(study.figures),
        "runs": {name: run_settings(study.runs[name]) for name in shown},
        "evaluation": study.evaluation.model_dump(mode="json"),
    }
