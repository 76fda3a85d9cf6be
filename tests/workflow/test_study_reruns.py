"""The shipped studies, finished by a stand-in, then edited: cosmetic edits plan no GPU job, real ones exactly what they touch."""

import re
import shutil

import pytest

from erpo.config import load_study
from erpo.dryrun import read_jobs, why
from tests.conftest import ROOT
from tests.workflow.conftest import Project, copy_workflow

EXPENSIVE = {"prepare_model", "fetch_model", "cache_reference", "train", "train_across_nodes", "generate"}
STUDIES = ("quickstart", pytest.param("paper", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def _done(tmp_path_factory) -> dict[str, Project]:
    return {}


@pytest.fixture
def done(_done, request, tmp_path, tmp_path_factory):
    """A function that gives a copy of a clone in which a study is finished."""

    def finished(study: str) -> Project:
        if study not in _done:
            project = copy_workflow(tmp_path_factory.mktemp(study) / "erpo")
            plainly = ("--set-resources", "train:launcher=python -m")  # the stand-in needs no GPU, and resources plan nothing
            made = project.run("--cores", "2", "all", *plainly, "--config", f"study={study}", ERPO_DATA=str(data(project, study)))
            assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
            _done[study] = project
        shutil.copytree(_done[study].folder, tmp_path / study, symlinks=True)
        return Project(tmp_path / study)

    return finished


def data(project: Project, study: str):
    """A folder in which every data file of a study lies, empty."""
    folder = project.path("some data")
    folder.mkdir(exist_ok=True)
    entries = load_study(study, ROOT)
    for entry in (*entries.train_sets.values(), *entries.benchmarks.values()):
        if entry.kind == "file":
            (folder / entry.file).touch()
    return folder


def planned(project: Project, study: str, *settings: str, profile: str | None = None) -> list:
    """Jobs that a dry run of everything plans."""
    chosen = ["--profile", profile] if profile else []
    said = project.run("-n", "all", *chosen, "--config", f"study={study}", *settings)
    assert said.returncode == 0, said.stdout[-2000:] + said.stderr[-2000:]
    return read_jobs(said.stdout)


def summary(jobs: list) -> dict[str, set[str]]:
    """Runs that are trained, runs that are sampled, tables that are drawn."""
    found: dict[str, set[str]] = {"train": set(), "generate": set()}
    for job in jobs:
        if job.rule in EXPENSIVE:
            found.setdefault(job.rule, set()).add(job.wildcards.get("run") or job.wildcards["model"])
    return found


@pytest.mark.parametrize("study", STUDIES)
def test_ten_cosmetic_edits_plan_no_gpu_job(done, study):
    project = done(study)
    text = project.path(f"config/{study}.yaml").read_text()
    edits = [
        (f"config/{study}.yaml", "\nruns:", "\n# a remark\nruns:"),
        (f"config/{study}.yaml", re.search(r"save_every: \d+", text).group(), "save_every: 3"),
        (f"config/{study}.yaml", re.search(r"title: .*", text).group(), "title: Another title"),
        (f"config/{study}.yaml", "query_weight: reference_likelihood", "query_weight: 'reference_likelihood'"),
        (f"config/{study}.yaml", re.search(r"caption: .*", text).group(), "caption: Another caption."),
        ("workflow/rules/training.smk", '"{resources.launcher} erpo', '"nice {resources.launcher} erpo'),
        ("workflow/rules/common.smk", '"micro_batch_tokens": 16384', '"micro_batch_tokens": 4096'),
        ("workflow/rules/evaluation.smk", "# Samples live", "# The samples live"),
        ("profiles/slurm/site.yaml", "partition: null", "partition: gpu"),
        ("profiles/slurm/config.yaml", "retries: 3", "retries: 9"),
    ]
    for relative, old, new in edits:
        project.edit(relative, old, new)
    project.path("erpo/trainer.py").write_text("# the package's code is no input\n")
    for profile in (None, "slurm"):
        jobs = planned(project, study, *(["account=me", "nodes={small: 2, medium: 2}"] if profile else []), profile=profile)
        assert {job.rule for job in jobs} & EXPENSIVE == set()
        assert {job.rule for job in jobs} <= {"table", "figure", "report"}, "captions and the title are drawn again"


ALL = {name for name in load_study("quickstart", ROOT).runs}
TRAINED = ALL - {"base"}
NEXT = "\ntables:"
QUICKSTART_EDITS = {
    "a learning rate": ("no-kl: {kl_on: none,", "no-kl: {kl_on: none, learning_rate: 1.0e-4,", {"no-kl"}, {"no-kl"}),
    "a coefficient, inherited": (
        "grpo: {kl_on: response, kl_coef: 0.1}",
        "grpo: {kl_on: response, kl_coef: 0.2}",
        *[{"grpo", "grpo-query-weight"}] * 2,
    ),
    "a seed": ("no-kl: {kl_on: none, seeds: [0, 1]}", "no-kl: {kl_on: none, seeds: [0, 1, 2]}", {"no-kl"}, {"no-kl"}),
    "a run": (NEXT, "  wide: {like: erpo, clip_high: 0.4}\n" + NEXT, {"wide"}, {"wide"}),
    "more samples": ("  samples: 4", "  samples: 8", set(), ALL),
    "a higher temperature": ("1.4, 1.5]", "1.4, 1.5, 1.6]", set(), ALL),
    "another benchmark": (
        "\nevaluation:",
        "  more: {kind: synthetic, families: [chain], size: 8, seed: 9}\n\nevaluation:",
        set(),
        ALL,
    ),
    "longer training": ("  steps: 32", "  steps: 40", TRAINED, TRAINED),
    "a longer limit in training": (
        "  updates_per_step: 1\n  max_response_tokens: 64",
        "  updates_per_step: 1\n  max_response_tokens: 63",
        TRAINED,
        TRAINED,
    ),
    "the starting model": ("hasty_share: 0.4", "hasty_share: 0.3", TRAINED, ALL),
}


@pytest.mark.parametrize("edit", QUICKSTART_EDITS)
def test_ten_real_edits_plan_exactly_what_they_touch(done, edit):
    old, new, trained, sampled = QUICKSTART_EDITS[edit]
    project = done("quickstart")
    project.edit("config/quickstart.yaml", old, new)
    jobs = planned(project, "quickstart")
    found = summary(jobs)
    assert (found["train"], found["generate"]) == (trained, sampled)
    assert ("prepare_model" in found) == (edit == "the starting model")
    if edit == "a higher temperature":
        assert {job.wildcards["shard"] for job in jobs if job.rule == "generate"} == {"upto3"}, (
            "only the new temperature is sampled"
        )
    if edit == "more samples":
        assert {why(job) for job in jobs if job.rule == "generate"} == {"changed: samples: 4 -> 8"}
    if edit == "a learning rate":
        assert {why(job) for job in jobs if job.rule == "train"} == {"changed: run.learning_rate: 0.0003 -> 0.0001"}


PAPER = set(load_study("paper", ROOT).runs)
LARGE = {"base-32b", "grpo-32b", "erpo-32b"}
PAPER_EDITS = {
    "a learning rate": (
        "rloo: {advantage: leave_one_out}",
        "rloo: {advantage: leave_one_out, learning_rate: 2.0e-6}",
        *[{"rloo", "rloo-erpo"}] * 2,
    ),
    "a clip": ("dapo: {clip_high: 0.28,", "dapo: {clip_high: 0.3,", *[{"dapo", "dapo-erpo"}] * 2),
    "a run of the sweep": (
        "  # --- readings",
        "  erpo-alpha2e-2: {like: erpo, kl_coef: 2.0e-2, seeds: [0]}\n  # --- readings",
        *[{"erpo-alpha2e-2"}] * 2,
    ),
    "three seeds": ("no-kl: {kl_on: none}", "no-kl: {kl_on: none, seeds: [0, 1, 2]}", {"no-kl"}, {"no-kl"}),
    "samples": ("  samples: 32", "  samples: 64", set(), PAPER),
    "temperatures": ("1.4, 1.5]", "1.4, 1.5, 1.6, 1.7]", set(), PAPER),
    "a revision": ("1818d35814b8319459f4bd55ed1ac8709630f003", "f" * 40, LARGE - {"base-32b"}, LARGE),
    "a benchmark": ("  minerva:\n    kind: file", "  minerva:\n    kind: file\n    levels: [1]", None, PAPER),
    "a longer long run": ("800, 1000]", "800, 1000, 1200]", {"grpo", "erpo"}, {"grpo", "erpo"}),
    "the prompt": ("save_every: 10", 'save_every: 10\nprompt_suffix: " Think."', PAPER - {"base", "base-32b"}, PAPER),
}


@pytest.mark.slow
@pytest.mark.parametrize("edit", PAPER_EDITS)
def test_ten_real_edits_of_the_paper_study(done, edit):
    old, new, trained, sampled = PAPER_EDITS[edit]
    project = done("paper")
    project.edit("config/paper.yaml", old, new)
    jobs = planned(project, "paper")
    found = summary(jobs)
    assert found["generate"] == sampled
    if trained is not None:
        assert found["train"] == trained
    if edit == "a longer long run":
        assert {job.wildcards["step"] for job in jobs if job.rule == "train"} == {"1200"}
    if edit == "temperatures":
        assert {job.wildcards["shard"] for job in jobs if job.rule == "generate"} == {"upto2"}
