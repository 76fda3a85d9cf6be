"""`plan` and `doctor` as a user runs them, in a clone of the project."""

import re
import shutil
import subprocess
import sys

import pytest

from erpo.__main__ import main
from erpo.config import Nodes, Site, load_study
from erpo.doctor import study_bytes
from erpo.profiles import Choice, read_choice
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
    assert done.stdout.startswith("study quickstart, jobs on this machine\n")
    assert done.stdout.rstrip().endswith("nothing stands in the way")


@pytest.mark.parametrize("verb", ["doctor", "plan"])
@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("gpus_per_node=0", "--config: gpus_per_node: Input should be greater than 0, found 0"),
        ("nodes=two", "--config: nodes: must be numbers by size of model"),
        ("partitoin=gpu", "--config partitoin=...: unknown; there are study, supersede, archive, partition"),
        ("partition", "--config partition: expected key=value"),
    ],
)
def test_a_setting_that_cannot_be_is_one_sentence(fresh, verb, setting, sentence):
    done = erpo(fresh, verb, "--config", "study=quickstart", setting)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"erpo {verb}: {sentence}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", ["doctor", "plan"])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "slurm/site.yaml: cannot be read (No such file or directory)"),
        ("", "slurm/site.yaml: expected lines of the form key: value"),
        ("partition: [", "slurm/site.yaml: while parsing"),
        ("partitoin: gpu", "slurm/site.yaml: unknown key partitoin; there are: study, partition"),
    ],
)
def test_a_site_file_that_cannot_be_used_is_one_sentence(fresh, verb, text, sentence):
    site = fresh.path("profiles/slurm/site.yaml")
    site.unlink() if text is None else site.write_text(text)
    done = erpo(fresh, verb)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"erpo {verb}: {sentence}")
    assert done.stderr.count("\n") == 1


def test_a_profile_that_is_nowhere_is_one_sentence(fresh):
    done = erpo(fresh, "doctor", "--profile", "sulrm")
    assert (done.returncode, done.stderr) == (
        2,
        "erpo doctor: profile 'sulrm' not found here or in ~/.config/snakemake; there are slurm, workstation, none\n",
    )


def test_the_workstation_is_not_asked_for_a_queue(fresh):
    done = erpo(fresh, "doctor", "--profile", "workstation", "--config", "study=quickstart")
    assert done.returncode == 0, done.stdout
    assert "Slurm" not in done.stdout


def test_a_profile_in_the_home_folder_brings_its_own_site(fresh, monkeypatch, tmp_path):
    mine = tmp_path / "home" / "snakemake" / "mine"
    shutil.copytree(fresh.path("profiles/slurm"), mine)
    site = mine / "site.yaml"
    site.write_text(site.read_text().replace("gpu_type: null", "gpu_type: h200"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(fresh.folder)
    assert read_choice("mine") == Choice("paper", Site(gpu_type="h200"), on_slurm=True)
    assert read_choice("mine", ["gpu_type=", "nodes={large: 2}"]).site == Site(nodes=Nodes(large=2)), "as Snakemake reads words"
    assert read_choice("slurm").site == Site()
    assert read_choice("workstation", ["study=methods"]) == Choice("methods", Site(), on_slurm=False)
    assert read_choice(None) == Choice("quickstart", Site(), on_slurm=False)
    done = erpo(fresh, "plan", "erpo", "--profile", "mine")
    assert "assumed, not measured: h200: 35% of 989 TFLOP/s" in done.stdout, done.stderr


def test_more_nodes_are_planned(fresh):
    done = erpo(fresh, "plan", "erpo-32b", "--config", "nodes={large: 2}", "gpu_type=gb300")
    assert ("train_across_nodes", "new (erpo-32b)") in groups(done.stdout), done.stderr
    assert "gb300, unknown here and taken for a100: 35% of 312 TFLOP/s" in done.stdout


def test_a_target_that_is_nothing_is_said(fresh):
    done = erpo(fresh, "plan", "mian")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No rule to produce mian" in done.stderr


@pytest.mark.parametrize(
    "option", [("--gpus", "0"), ("--gpus", "many"), ("--budget-gpu-hours", "nan"), ("--budget-gpu-hours", "-1")]
)
def test_numbers_that_cannot_be_are_refused(fresh, option):
    done = erpo(fresh, "plan", "main", *option)
    assert done.returncode == 2
    assert re.search(rf"argument {option[0]}: must be a .*, found '{option[1]}'", done.stderr)


def test_the_disk_of_the_whole_study_is_that_of_its_plan(fresh):
    """Seeds that stop earlier than others take less: only one of three goes on to step 1000."""
    done = erpo(fresh, "plan", "all")
    planned = float(re.search(r"disk: about ([\d,.]+) GiB more", done.stdout).group(1).replace(",", ""))
    assert study_bytes(load_study("paper", ROOT)) / 2**30 == pytest.approx(planned, abs=0.1)


def test_without_snakemake_doctor_says_so(fresh, monkeypatch, capsys):
    monkeypatch.chdir(fresh.folder)
    monkeypatch.setitem(sys.modules, "snakemake", None)
    assert main(["doctor"]) == 2
    assert "activate the environment of this project" in capsys.readouterr().err


def test_a_link_to_nowhere_is_found(fresh, tmp_path):
    fresh.path("results").symlink_to(tmp_path / "scratch")
    done = erpo(fresh, "doctor", "--profile", "none", "--config", "study=quickstart")
    assert done.returncode == 1
    assert (
        f"FAULT  results is a link to {tmp_path}/scratch, which is not there\n       fix: mkdir -p {tmp_path}/scratch"
        in done.stdout
    )
