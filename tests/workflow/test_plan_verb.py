"""`plan` and `doctor` as a user runs them, in a clone of the project."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.workflow.conftest import Project


def erpo(project: Project, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command line over a project whose workflow runs a stand-in."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from erpo.__main__ import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], cwd=project.folder, capture_output=True, text=True, check=False, timeout=120
    )


def groups(text: str) -> dict[tuple[str, str], int]:
    """Jobs of the printed table by rule and reason."""
    rows = re.findall(r"^ *(\d+)  (\S+) +[\d.,]+ (?:s|min|h|d) +[\d.,]+  (.*)$", text, re.M)
    return {(rule, why): int(count) for count, rule, why in rows}


def test_a_finished_study_has_nothing_to_plan(finished):
    done = erpo(finished, "plan", "all", "--profile", "none", "--config", "study=trial")
    assert (done.returncode, done.stdout) == (0, "nothing to do: every result is there\n"), done.stderr


def test_a_plan_names_what_changed_and_who_follows(finished):
    finished.edit("config/trial.yaml", "grpo: {}", "grpo: {learning_rate: 2.0e-6}")
    done = erpo(finished, "plan", "all", "--profile", "none", "--config", "study=trial")
    assert groups(done.stdout) == {
        ("train", "changed: run.learning_rate: unset -> 2e-06 (grpo)"): 1,
        ("generate", "follows another job (grpo)"): 2,
        ("score", "follows another job (grpo)"): 1,
        ("table", "follows another job"): 2,
        ("figure", "follows another job"): 1,
        ("report", "follows another job"): 1,
    }


def test_more_samples_are_named_and_cost_the_difference(finished):
    finished.edit("config/trial.yaml", "samples: 4", "samples: 16")
    done = erpo(finished, "plan", "all", "--profile", "none", "--config", "study=trial")
    assert groups(done.stdout)["generate", "changed: samples: 4 -> 16 (base, erpo, grpo)"] == 6
    assert ("train", "new (erpo, grpo)") not in groups(done.stdout)


def test_the_paper_is_planned_with_its_cost_and_refused_above_a_budget(fresh):
    done = erpo(fresh, "plan", "erpo", "--config", "gpu_type=h100", "--gpus", "16", "--budget-gpu-hours", "100")
    assert done.returncode == 2
    assert re.search(r"GPU-hours planned, above the budget of 100; name fewer targets, or confirm with --yes", done.stderr)
    assert groups(done.stdout)["generate", "new (erpo)"] == 24
    assert "assumed, not measured: h100: 35% of 989 TFLOP/s in training" in done.stdout
    assert "on 16 GPUs at once: about" in done.stdout
    assert erpo(fresh, "plan", "erpo", "--budget-gpu-hours", "100", "--yes").returncode == 0


def test_a_plan_passes_on_what_snakemake_refuses(fresh):
    done = erpo(fresh, "plan", "erpo", "--config", "study=papper")
    assert done.returncode == 2
    assert "study 'papper' not found" in done.stderr


def test_doctor_finds_what_is_missing_and_says_the_fix(fresh):
    done = erpo(fresh, "doctor", "--profile", "none", "--config", "study=paper")
    assert done.returncode == 1
    assert re.search(
        r"FAULT +data missing in data/: .*eval_aime_2024.jsonl.*\n +fix: put them there, or set ERPO_DATA", done.stdout
    )
    assert done.stdout.rstrip().endswith("faults")


def test_doctor_is_content_with_the_small_study(fresh):
    done = erpo(fresh, "doctor", "--profile", "none", "--config", "study=quickstart")
    assert done.returncode == 0, done.stdout
    assert done.stdout.rstrip().endswith("nothing stands in the way")


@pytest.mark.parametrize("setting", ["gpus_per_node=0", "nodes=two"])
def test_doctor_refuses_a_site_that_cannot_be(fresh, setting):
    done = erpo(fresh, "doctor", "--config", "study=quickstart", setting)
    assert done.returncode == 2
    assert "profiles/slurm/site.yaml: " in done.stderr
