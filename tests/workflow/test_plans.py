"""What plans what: job counts of the shipped studies, single targets, refusals; all by dry runs of the real workflow."""

import re
import shlex
import time

import pytest

from erpo.__main__ import _parser

DATA = {"prepare_benchmark": 2, "prepare_queries": 1, "prepare_model": 1}


def test_quickstart_plans_its_whole_chain(fresh):
    assert fresh.plan("all", study="quickstart") == {
        "prepare_model": 1,
        "prepare_benchmark": 6,
        "prepare_queries": 1,
        "check_overlap": 1,
        "cache_reference": 1,
        "train": 12,
        "generate": 15,
        "score": 15,
        "table": 5,
        "figure": 4,
        "report": 1,
        "all": 1,
    }


def test_the_paper_study_is_planned_fast_and_without_heavy_packages(fresh):
    blocked = fresh.folder / "blocked"
    blocked.mkdir()
    for package in ("torch", "transformers", "deepspeed", "vllm", "matplotlib", "math_verify"):
        (blocked / f"{package}.py").write_text(f"raise ImportError('{package} was imported')")
    started = time.monotonic()
    jobs = fresh.plan("all", study="paper", PYTHONPATH=str(blocked), HF_HUB_OFFLINE="1")
    assert time.monotonic() - started < 15
    assert jobs == {
        "fetch_model": 2,
        "prepare_benchmark": 12,
        "prepare_queries": 2,
        "check_overlap": 2,
        "cache_reference": 2,
        "train": 39,
        "generate": 129,
        "score": 43,
        "table": 16,
        "figure": 9,
        "report": 1,
        "all": 1,
    }


def test_the_command_line_understands_every_rule(fresh):
    done = fresh.run("-n", "-p", "all", "--config", "study=trial", ERPO_DATA="my data")
    commands = re.findall(r"(?:^|\s)python -m erpo (.*)$", done.stdout, re.M)
    parsed = [_parser().parse_args(shlex.split(command)) for command in commands]
    assert len(parsed) == 22
    by_verb = {arguments.verb: arguments for arguments in parsed}
    assert len(by_verb) == 11
    assert str(by_verb["prepare-queries"].data_dir) == "my data"
    assert by_verb["train"].supersede is False
    assert len(by_verb["score"].markers) == 2


def test_the_methods_study_trains_every_method(fresh):
    jobs = fresh.plan("all", study="methods")
    assert (jobs["train"], jobs["generate"], jobs["score"]) == (11, 12, 12)


def test_a_run_is_a_target(fresh):
    expected = {**DATA, "cache_reference": 1, "train": 1, "generate": 2, "score": 1, "erpo": 1}
    assert fresh.plan("erpo") == expected


def test_a_run_of_the_paper_is_a_target_of_its_own(fresh):
    jobs = fresh.plan("rloo-erpo", study="paper")
    assert jobs == {
        "fetch_model": 1,
        "prepare_benchmark": 6,
        "prepare_queries": 1,
        "cache_reference": 1,
        "train": 1,
        "generate": 3,
        "score": 1,
        "rloo-erpo": 1,
    }


def test_a_table_and_a_figure_are_targets(fresh):
    expected = {**DATA, "cache_reference": 1, "train": 1, "generate": 2, "score": 1, "table": 1, "only-grpo": 1}
    assert fresh.plan("only-grpo") == expected
    expected = {"prepare_model": 1, "prepare_queries": 1, "cache_reference": 1, "train": 2, "figure": 1, "drift": 1}
    assert fresh.plan("drift") == expected


def test_data_is_a_target_for_machines_with_a_network(fresh):
    assert fresh.plan("data") == {**DATA, "check_overlap": 1, "data": 1}


def test_the_slurm_profile_is_found_from_the_root_and_means_the_paper(fresh):
    done = fresh.run("--profile", "slurm", "-n", "all")
    assert done.returncode == 0, done.stderr
    assert "results/paper/report.html" in done.stdout
    assert "gpu=8" in done.stdout


def test_the_command_line_wins_over_the_study_of_the_profile(fresh):
    done = fresh.run("--profile", "slurm", "-n", "erpo", "--config", "study=quickstart")
    assert done.returncode == 0, done.stderr
    assert "results/quickstart/runs/erpo" in done.stdout
    assert "results/paper" not in done.stdout
    assert "gpu=8" not in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("\npartition: null", "\npartitoin: gpu", "slurm/site.yaml: unknown key partitoin; there are: study, partition"),
        ("\nqos: null", "\npartition: gpu", "the key 'partition' is given twice"),
        ("gpus_per_node: 8", "gpus_per_node: eight", "slurm/site.yaml: gpus_per_node: Input should be a valid integer"),
    ],
)
def test_a_fault_in_the_site_file_is_told_of_the_site_file(fresh, old, new, sentence):
    fresh.edit("profiles/slurm/site.yaml", old, new)
    done = fresh.run("--profile", "slurm", "-n", "main")
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line and not line.startswith("Using profiles slurm")]
    assert line.startswith("slurm/site.yaml: ")
    assert sentence in line


def test_a_long_run_is_a_chain_of_milestones(fresh):
    fresh.edit("config/trial.yaml", "only-grpo: {runs: [grpo]}", "only-grpo: {runs: [grpo], steps: [40, 80, 120]}")
    done = fresh.run("-n", "only-grpo", "--config", "study=trial")
    assert "input: results/trial/models/tiny.json" in done.stdout
    assert "results/trial/reference/tiny/train.json, results/trial/runs/grpo/seed0/step80.json\n" in done.stdout
    assert "output: results/trial/runs/grpo/seed0/step120.json" in done.stdout
    assert fresh.plan("only-grpo")["train"] == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "study=papper"], "study 'papper' not found (config/papper.yaml); there are: "),
        (["--config", "sutdy=paper"], "--config sutdy=...: unknown; there are study=NAME"),
        (["--config", "study=trial", "nodes=two"], "--config: nodes: must be numbers by size of model"),
        (["--config", "study=trial", "supersede=grop"], "--config supersede=grop: not a run of trial; there are: base, grpo, erpo"),
    ],
)
def test_a_wrong_choice_is_one_sentence(fresh, arguments, sentence):
    done = fresh.run("-n", "all", *arguments)
    assert done.returncode != 0
    assert_one_sentence(done.stderr, sentence)


def test_a_fault_in_a_study_is_one_sentence(fresh):
    fresh.edit("config/trial.yaml", "grpo: {}", "grpo: {learning_rate: 1e-6}")
    done = fresh.run("--cores", "1", "all", "--config", "study=trial")
    assert done.returncode != 0
    assert_one_sentence(done.stderr, "config/trial.yaml: runs.grpo: learning_rate: '1e-6' is text in YAML")
    assert not fresh.path("results").exists()


def test_missing_data_is_one_sentence_before_any_work_and_no_matter_for_plans(fresh):
    fresh.edit(
        "config/trial.yaml", "easy: {kind: synthetic, families: [chain], size: 8}", "easy: {kind: file, file: my easy.jsonl}"
    )
    assert fresh.plan("all")["prepare_benchmark"] == 2
    done = fresh.run("--cores", "1", "all", "--config", "study=trial")
    assert done.returncode != 0
    sentence = "data files missing in data/: my easy.jsonl; put them there, or set the environment variable ERPO_DATA"
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not fresh.path("results").exists()
    fresh.path("other data").mkdir()
    fresh.path("other data/my easy.jsonl").touch()
    done = fresh.run(
        "--cores", "1", "results/trial/data/tiny/benchmarks/easy.parquet", "--config", "study=trial", ERPO_DATA="other data"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", ["scores/erpo/seed00/step40", "scores/erp/seed0/step40"])
def test_other_spellings_of_a_target_are_errors(fresh, target):
    done = fresh.run("-n", f"results/trial/{target}.parquet", "--config", "study=trial")
    assert done.returncode != 0
    assert "MissingRuleException" in done.stdout + done.stderr


def assert_one_sentence(stderr: str, beginning: str) -> None:
    lines = [line for line in stderr.splitlines() if line and not line.startswith("Using workflow specific profile")]
    assert len(lines) == 1, stderr
    assert lines[0].startswith(beginning)
