"""A copy of the workflow with a small study, run once with a stand-in for the command line; tests edit copies of the result."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TRIAL = """
models: {tiny: {kind: synthetic}}
train_sets: {train: {kind: synthetic, families: [chain], size: 64}}
benchmarks:
  easy: {kind: synthetic, families: [chain], size: 8}
  hard: {kind: synthetic, families: [story], size: 8}
evaluation: {temperatures: [0.5, 1.0], samples: 4}
prompt_suffix: " it's \\"quoted\\" \\\\boxed{} $HOME"
defaults: {model: tiny, steps: 40}
runs:
  base: {steps: 0}
  grpo: {}
  erpo: {kl_on: query, query_weight: reference_likelihood}
tables:
  main: {runs: [base, grpo, erpo], caption: All of them.}
  only-grpo: {runs: [grpo]}
figures:
  drift: {kind: drift, runs: [grpo, erpo]}
  weights: {kind: query_weights, runs: [erpo]}
"""


@dataclass(frozen=True)
class Project:
    """A folder with the workflow."""

    folder: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run Snakemake here."""
        return subprocess.run(
            [sys.executable, "-m", "snakemake", *arguments],
            cwd=self.folder,
            env={**os.environ, "ERPO_DATA": "", "PYTHONDONTWRITEBYTECODE": "1", **environment},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def plan(self, *arguments: str, study: str = "trial", **environment: str) -> dict[str, int]:
        """Jobs per rule of a dry run."""
        done = self.run("-n", *arguments, "--config", f"study={study}", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
        if "Nothing to be done" in done.stdout + done.stderr:
            return {}
        return jobs_of(done.stdout)

    def path(self, relative: str) -> Path:
        """A file of the project."""
        return self.folder / relative

    def edit(self, relative: str, old: str, new: str) -> None:
        """Replace text that must be there."""
        path = self.path(relative)
        text = path.read_text()
        assert old in text, f"{old!r} is not in {relative}"
        path.write_text(text.replace(old, new))


def jobs_of(output: str) -> dict[str, int]:
    """The first `Job stats` table of Snakemake's output, without the total."""
    table = output.split("Job stats:", 1)[1]
    counts = {name: int(count) for name, count in re.findall(r"^(\S+) +(\d+)$", table.split("total", 1)[0], re.M)}
    assert counts, output
    return counts


def copy_workflow(folder: Path) -> Project:
    """The workflow's files, the real settings module, and the stand-in for the command line."""
    folder.mkdir(parents=True)
    shutil.copy2(ROOT / "Snakefile", folder)
    for name in ("workflow", "profiles", "config"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("slurm", "workstation"):
        (folder / name).symlink_to(os.readlink(ROOT / name))
    (folder / "erpo").mkdir()
    for name in ("__init__.py", "executor.py", "rates.py", "slurm.py"):
        shutil.copy2(ROOT / "erpo" / name, folder / "erpo")
    shutil.copytree(ROOT / "erpo" / "config", folder / "erpo" / "config")
    shutil.copy2(Path(__file__).with_name("stub_main.py"), folder / "erpo" / "__main__.py")
    (folder / "config" / "trial.yaml").write_text(TRIAL)
    return Project(folder)


@pytest.fixture
def fresh(tmp_path) -> Project:
    """A clone in which nothing was run."""
    return copy_workflow(tmp_path / "my runs" / "erpo's 1")


@pytest.fixture(scope="session")
def _finished(tmp_path_factory) -> Project:
    project = copy_workflow(tmp_path_factory.mktemp("finished") / "my runs" / "erpo's 1")
    done = project.run("--cores", "2", "all", "--config", "study=trial", ERPO_DATA="some data")
    assert done.returncode == 0, done.stdout + done.stderr
    return project


@pytest.fixture
def finished(_finished, tmp_path) -> Project:
    """A copy, in another place, of a clone in which the trial study was run."""
    shutil.copytree(_finished.folder, tmp_path / "moved" / "erpo", symlinks=True)
    return Project(tmp_path / "moved" / "erpo")
