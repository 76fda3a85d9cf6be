"""What clusters do to a training job. The table at the end is that of an undisturbed run, at most one save interval is repeated."""

import json
import os
import shutil
import signal
import sys
import time
from collections import Counter

import pytest

from erpo.progress import RESUBMIT_EXIT_CODE
from tests.slurm.cluster import wait_until
from tests.slurm.conftest import LONG_STEPS, SAVE_EVERY, Clone

TARGET = ["training", "--config", "study=trial"]
METRICS = "results/trial/runs/long/seed0/work/metrics.jsonl"
MARKER = f"results/trial/runs/long/seed0/step{LONG_STEPS}.json"


def rows(clone: Clone) -> list[dict]:
    """Lines of the training log; a line that a kill cut short is left out."""
    path, found = clone.path(METRICS), []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def start_and_await_step(clone: Clone, step: int, *arguments: str) -> tuple:
    """Snakemake, and the job that is training, once it has done some steps."""
    head = clone.start(*TARGET, *arguments)
    job = clone.await_job("train")
    assert wait_until(lambda: any(row["step"] >= step for row in rows(clone)), 600), clone.said()[-3000:]
    return head, job


def state_of(clone: Clone, job: dict[str, str]) -> str:
    """What Slurm says of a job, also of one that has ended."""
    return next(known["state"] for known in clone.cluster.jobs() if known["id"] == job["id"])


def assert_same_as(undisturbed: Clone, clone: Clone, attempts: int, repeated: int) -> None:
    """The table and the weights of an undisturbed run, and how much work was done twice."""
    assert clone.tables()["training.csv"] == undisturbed.tables()["training.csv"]
    hashes = [json.loads(place.path(MARKER).read_text())["policy_hash"] for place in (clone, undisturbed)]
    assert hashes[0] == hashes[1]
    found = rows(clone)
    assert {row["attempt"] for row in found} == set(range(1, attempts + 1))
    counts = Counter(row["step"] for row in found)
    assert set(counts) == set(range(1, LONG_STEPS + 1))
    assert sum(count - 1 for count in counts.values()) <= repeated


def test_a_job_warned_of_its_time_limit_saves_and_is_resubmitted(prepared, undisturbed):
    head, job = start_and_await_step(prepared, 3)
    status = prepared.erpo("status").stdout
    assert "train long seed 0: step " in status
    assert f"{job['id']}: train-long-0-{LONG_STEPS}, running" in status
    prepared.cluster.client("scancel", "-s", "TERM", job["id"])  # what --signal=TERM@60 does a minute before the limit
    assert prepared.finish(head) == 0, prepared.said()[-3000:]
    assert "stopping after step" in "".join(path.read_text() for path in prepared.path("logs/slurm").rglob(f"{job['id']}.log"))
    assert f"returned non-zero exit status {RESUBMIT_EXIT_CODE}" in prepared.said() or "FAILED" in prepared.said()
    assert_same_as(undisturbed, prepared, attempts=2, repeated=0)


def test_a_cancelled_job_is_resubmitted(prepared, undisturbed):
    head, job = start_and_await_step(prepared, 3)
    prepared.cluster.client("scancel", job["id"])
    assert prepared.finish(head) == 0, prepared.said()[-3000:]
    assert "CANCELLED" in prepared.said()
    assert_same_as(undisturbed, prepared, attempts=2, repeated=SAVE_EVERY)


def test_the_controller_is_restarted(prepared, undisturbed):
    """Away long enough for several looks at the queue to fail: the job goes on, and Snakemake sees its end."""
    head, _ = start_and_await_step(prepared, 3)
    prepared.cluster.stop("slurmctld")
    time.sleep(12)
    prepared.cluster.start_controller()
    assert prepared.finish(head) == 0, prepared.said()[-3000:]
    assert_same_as(undisturbed, prepared, attempts=1, repeated=0)


def test_ctrl_c_cancels_and_the_same_command_goes_on(prepared, undisturbed):
    head, job = start_and_await_step(prepared, 3)
    head.send_signal(signal.SIGINT)
    assert prepared.finish(head, 120) != 0
    assert wait_until(lambda: state_of(prepared, job) == "CANCELLED", 30), state_of(prepared, job)
    assert not prepared.path(MARKER).exists(), "it ended by itself"
    assert prepared.run(*TARGET) == 0, prepared.said()[-3000:]
    assert_same_as(undisturbed, prepared, attempts=2, repeated=SAVE_EVERY)


@pytest.mark.slow
def test_a_drained_node_finishes_its_job_and_a_lost_one_loses_it(prepared, undisturbed):
    """Drained: the job ends there and the next starts elsewhere. Down: Slurm or Snakemake starts it again on another node."""
    head, job = start_and_await_step(prepared, 3)
    node = prepared.cluster.jobs("R")[0]["nodes"]
    cluster = prepared.cluster
    try:
        cluster.client("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
        time.sleep(2)
        assert [running["id"] for running in cluster.jobs("R")] == [job["id"]], "a drained node lets its job run"
        cluster.client("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        assert prepared.finish(head) == 0, prepared.said()[-3000:]
        last = [done for done in cluster.jobs() if done["name"] == f"train-long-0-{LONG_STEPS}"][-1]
        assert last["nodes"] != node
    finally:
        cluster.client("scontrol", "update", f"nodename={node}", "state=resume", check=False)
    assert_same_as(undisturbed, prepared, attempts=2, repeated=SAVE_EVERY)


@pytest.mark.slow
def test_the_time_limit_itself(prepared, tmp_path):
    """A limit of one minute for minutes of training: jobs that end themselves in time, one after another, reach the end."""
    steps = 20 * LONG_STEPS
    study = prepared.path("config/trial.yaml")
    study.write_text(
        study.read_text().replace(f"steps: {LONG_STEPS}", f"steps: {steps}").replace("save_every: 2", "save_every: 1000")
    )
    whole = Clone(tmp_path / "whole" / "erpo", prepared.cluster)
    shutil.copytree(prepared.folder, whole.folder, symlinks=True)
    local = [sys.executable, "-m", "snakemake", "--cores", "1", *TARGET]
    assert whole.finish(whole.start(command=local), 1200) == 0, whole.said()[-3000:]
    assert prepared.finish(prepared.start(*TARGET, "--set-resources", "train:runtime=1", "--retries", "20"), 1800) == 0
    found = rows(prepared)
    assert max(row["attempt"] for row in found) > 1, "the limit never came"
    assert len(found) == steps, "nothing was repeated"
    marker = MARKER.replace(f"step{LONG_STEPS}", f"step{steps}")
    assert prepared.tables()["training.csv"] == whole.tables()["training.csv"]
    assert len({json.loads(clone.path(marker).read_text())["policy_hash"] for clone in (prepared, whole)}) == 1


@pytest.mark.slow
def test_two_users_with_profiles_of_their_own_share_the_cluster(prepared, tmp_path, undisturbed):
    """Each from a clone of their own; the second with a profile in the home folder and another partition."""
    other = Clone(tmp_path / "other" / "erpo", prepared.cluster)
    shutil.copytree(prepared.folder, other.folder, symlinks=True)
    profile = tmp_path / "home" / "snakemake" / "mine"
    shutil.copytree(prepared.path("profiles/slurm"), profile)
    site = profile / "site.yaml"
    site.write_text(site.read_text().replace("study: paper", "study: trial").replace("\npartition: null", "\npartition: gpu"))
    first = prepared.start(*TARGET)
    command = [word if word != "slurm" else "mine" for word in other.command("training")]
    second = other.start(command=command, XDG_CONFIG_HOME=str(tmp_path / "home"))
    for clone, head in ((prepared, first), (other, second)):
        assert clone.finish(head) == 0, clone.said()[-3000:]
        assert_same_as(undisturbed, clone, attempts=1, repeated=0)
    partitions = {job["partition"] for job in prepared.cluster.jobs() if job["name"] == f"train-long-0-{LONG_STEPS}"}
    assert {"cpu", "gpu"} <= partitions


def test_two_nodes_train_to_the_numbers_of_two_processes_on_one(prepared, tmp_path):
    """srun starts one task on each node; they find each other through Slurm's variables."""
    one = Clone(tmp_path / "one" / "erpo", prepared.cluster)
    shutil.copytree(prepared.folder, one.folder, symlinks=True)
    both = "env -u OMP_NUM_THREADS -u MKL_NUM_THREADS torchrun --standalone --nproc-per-node=2 -m --"
    resolvable = {"MASTER_ADDR": "127.0.0.1"}  # the names of these nodes are known to Slurm alone
    assert prepared.run(*TARGET, "nodes={small: 2}", **resolvable) == 0, prepared.said()[-3000:]
    assert one.run(*TARGET, "--set-resources", f"train:launcher={both}", "--set-threads", "train=2") == 0, one.said()[-3000:]
    assert prepared.tables()["training.csv"] == one.tables()["training.csv"]
    markers = [json.loads(clone.path(MARKER).read_text()) for clone in (prepared, one)]
    assert markers[0]["policy_hash"] == markers[1]["policy_hash"]
    assert [marker["ranks"] for marker in markers] == [2, 2]
    (job,) = [job for job in prepared.cluster.jobs() if job["name"].startswith("train_across_nodes")][-1:]
    assert job["nodes"] == "n[1-2]"
    assert os.path.exists(prepared.path(METRICS))
