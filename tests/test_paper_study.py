"""The paper study holds everything that the paper reports: each number's run, checkpoint, temperatures, benchmarks and metric."""

import re

import pytest
import yaml

from erpo.config import load_study, milestones, scored_cells, seeds_of
from erpo.paper.comparison import REPORTED
from tests.conftest import ROOT

STUDY = load_study("paper", ROOT)
REPORTED_BY_PAPER = yaml.safe_load(REPORTED.read_text())
CELLS = [entry for entry in REPORTED_BY_PAPER["entries"] if "metric" in entry]


@pytest.mark.parametrize("entry", CELLS, ids=lambda entry: entry["id"])
def test_every_reported_number_has_its_cell(entry):
    for name in filter(None, (entry.get("run", REPORTED_BY_PAPER["defaults"]["run"]), entry.get("minus"))):
        run = STUDY.runs[name]
        step = 0 if run.steps == 0 else entry.get("step", REPORTED_BY_PAPER["defaults"]["step"])
        assert step in (*milestones(STUDY)[name], run.steps)
        if "/" not in entry["metric"]:
            assert step in {cell.step for cell in scored_cells(STUDY)[name]}
    temperatures = entry.get("temperatures", "all")
    assert isinstance(temperatures, str) or set(temperatures) <= set(STUDY.evaluation.temperatures)
    assert set(entry.get("benchmarks", ())) <= set(STUDY.benchmarks)


def test_the_runs_that_the_study_promises():
    runs = {name: run for name, run in STUDY.runs.items()}
    parts = {"base", "grpo", "erpo", "grpo-query-weight", "query-kl-only", "no-kl", "erpo-alpha5e-2", "grpo-g16", "erpo-g16"}
    pairs = {f"{base}{end}" for base in ("dapo", "rloo", "ppo", "reinforce") for end in ("", "-erpo")}
    assert parts | pairs | {"base-32b", "grpo-32b", "erpo-32b", "erpo-online-weight"} <= set(runs)
    assert all(seeds_of(STUDY, name) == (0, 1, 2) for name in ("base", "grpo", "erpo"))
    assert milestones(STUDY)["grpo"][-1] == milestones(STUDY)["erpo"][-1] == 1000
    assert runs["erpo-g16"].responses_per_query == 16
    strengths = sorted(run.kl_coef for name, run in runs.items() if name.startswith("erpo-alpha"))
    assert strengths == [0.001, 0.003, 0.03, 0.05, 0.1]


def test_the_figures_of_the_paper():
    kinds = {figure.kind for figure in STUDY.figures.values()}
    assert {"drift", "temperature_sweep", "training_dynamics", "long_run"} <= kinds
    assert STUDY.figures["training-dynamics-long"].steps == (1000,)


def test_what_is_fetched_is_pinned():
    assert all(re.fullmatch(r"[0-9a-f]{40}", entry.revision) for entry in STUDY.models.values())
    for entry in (*STUDY.train_sets.values(), *STUDY.benchmarks.values()):
        assert entry.sha256
        assert re.search(r"/[0-9a-f]{40}/.*#sha256=[0-9a-f]{64}$", entry.url)
