"""A real small study, killed five times and started again by the same command, ends in the numbers of an undisturbed one."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.workflow.conftest import ROOT, Project, copy_workflow

pytestmark = pytest.mark.slow

SMALL = """
models: {tiny: {kind: synthetic, warm_start_steps: 60, warm_start_batch: 8}}
train_sets: {train: {kind: synthetic, families: [chain], levels: [1], size: 64}}
benchmarks:
  easy: {kind: synthetic, families: [chain], levels: [1], size: 8}
  other: {kind: synthetic, families: [story], levels: [1], size: 8}
evaluation: {temperatures: [0.5, 1.0], samples: 4, max_response_tokens: 32}
prompt_suffix: ""
save_every: 2
defaults: {model: tiny, dtype: float32, steps: 6, queries_per_step: 4, responses_per_query: 4, max_response_tokens: 32}
runs:
  base: {steps: 0}
  grpo: {kl_on: response, kl_coef: 0.1}
  erpo: {kl_on: query, kl_coef: 0.1, query_weight: reference_likelihood}
tables:
  main: {runs: [base, grpo, erpo]}
figures:
  drift: {kind: drift, runs: [grpo, erpo]}
"""

KILLS = 5


@pytest.fixture
def projects(tmp_path) -> tuple[Project, Project]:
    """Two clones with the whole package and the small study."""
    made = []
    for name in ("calm", "killed"):
        project = copy_workflow(tmp_path / name)
        shutil.rmtree(project.path("erpo"))
        shutil.copytree(ROOT / "erpo", project.path("erpo"), ignore=shutil.ignore_patterns("__pycache__"))
        project.path("config/small.yaml").write_text(SMALL)
        made.append(project)
    return made[0], made[1]


def start(project: Project, study: str) -> subprocess.Popen[bytes]:
    """Snakemake in a process group of its own."""
    command = [sys.executable, "-m", "snakemake", "--cores", "2", "--config", f"study={study}", "--", "all"]
    environment = {**os.environ, "PYTHONPATH": str(project.folder)}
    with project.path("snakemake.txt").open("ab") as log:
        return subprocess.Popen(
            command, cwd=project.folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def finish(project: Project, study: str) -> float:
    """Run to the end; seconds."""
    begun = time.monotonic()
    process = start(project, study)
    assert process.wait(timeout=1800) == 0, project.path("snakemake.txt").read_text()[-3000:]
    return time.monotonic() - begun


def jobs_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Python processes of the verbs that this Snakemake started, training first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            group, words = os.getpgid(int(folder.name)), (folder / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if group == process.pid and "erpo" in words[:4] and "-m" in words[:3]:
            found.append(("train" not in words, int(folder.name)))
    return [pid for _, pid in sorted(found)]


def kill_at_work(process: subprocess.Popen[bytes], what: str) -> None:
    """Wait until one of its verbs is at work, then send SIGKILL to Snakemake or to that job."""
    for _ in range(1200):
        jobs = jobs_of(process)
        if jobs:
            break
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.05)
    os.kill(process.pid if what == "snakemake" else jobs[0], signal.SIGKILL)


def disturb(project: Project, study: str, seconds: float, seed: int) -> None:
    """Start, wait a random time, kill, five times. An attempt lasts a seventh of the study at most, so none ends unhit."""
    draws = random.Random(seed)
    for attempt in range(KILLS):
        process = start(project, study)
        time.sleep(draws.uniform(0, seconds / (KILLS + 2)))
        kill_at_work(process, "job" if attempt % 2 else "snakemake")
        process.wait(timeout=600)


def numbers(project: Project, study: str) -> dict[str, bytes]:
    """Contents of every table, of every figure's data and of all scores, by name."""
    results = project.path(f"results/{study}")
    found = {
        str(path.relative_to(results)): path.read_bytes()
        for pattern in ("tables/*.csv", "tables/*.md", "tables/*.tex", "figures/*.csv")
        for path in sorted(results.glob(pattern))
    }
    assert found
    return found


def metrics_of(project: Project, study: str) -> dict[str, list[dict]]:
    """Curves of every training, without times and memory."""
    from erpo.metrics import read_log

    unstable = re.compile(r"^(time/|memory/|tokens_per_second/|attempt$|time$)")
    return {
        str(path.parents[2].name): [{key: value for key, value in row.items() if not unstable.match(key)} for row in read_log(path)]
        for path in sorted(project.path(f"results/{study}/runs").glob("*/*/work/metrics.jsonl"))
    }


@pytest.mark.parametrize("seed", [0])
def test_five_kills_change_no_number(projects, seed):
    calm, killed = projects
    seconds = finish(calm, "small")
    disturb(killed, "small", seconds, seed)
    finish(killed, "small")
    assert numbers(killed, "small") == numbers(calm, "small")
    assert metrics_of(killed, "small") == metrics_of(calm, "small")
