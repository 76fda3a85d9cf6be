"""A small study through a real Slurm: the same numbers as a local run, resources honoured, names and logs that a person can use."""

import json
import time

import pytest

from tests.slurm.conftest import ACCOUNTING, Clone, make_clone

TARGET = ["all", "--config", "study=trial"]
SHORT = ["main", "drift", "--config", "study=trial"]
NO_ACCOUNT = "account 'me'" + (" is not yours; there are: lab" if ACCOUNTING else ": this cluster keeps no accounts; leave it out")


@pytest.fixture(scope="module")
def run_through_slurm(tmp_path_factory, cluster, undisturbed) -> Clone:
    """A fresh clone in which the study was run through the queue; training asks for two fake GPUs on the GPU partition."""
    clone = make_clone(tmp_path_factory.mktemp("through slurm") / "erpo", cluster)
    extra = ["--set-resources", "train:gpu=2", "train:gpu_model=a100", "train:slurm_partition=gpu", "train:runtime=7"]
    assert clone.run(*SHORT, *extra) == 0, clone.said()[-3000:]
    return clone


def test_the_tables_are_those_of_a_local_run(run_through_slurm, undisturbed):
    assert run_through_slurm.tables()["main.csv"] == undisturbed.tables()["main.csv"]
    marker = "results/trial/runs/erpo/seed0/step4.json"
    hashes = [json.loads(clone.path(marker).read_text())["policy_hash"] for clone in (run_through_slurm, undisturbed)]
    assert hashes[0] == hashes[1]


def test_the_queue_shows_names_and_resources(run_through_slurm, cluster):
    folder = str(run_through_slurm.folder)
    jobs = {job["name"]: job for job in cluster.jobs() if job["state"] == "COMPLETED" and job["workdir"] == folder}
    assert {"prepare_model-tiny", "cache_reference-tiny-train", "train-erpo-0-4", "score-erpo-0-4"} <= set(jobs)
    train, score = jobs["train-erpo-0-4"], jobs["score-erpo-0-4"]
    assert (train["partition"], train["memory"], train["cpus"], train["limit"]) == ("gpu", "3000M", "1", "7:00")
    assert (score["partition"], score["memory"], score["limit"]) == ("cpu", "2000M", "1:00:00")
    assert "TresPerJob=gres:gpu:a100:2" in cluster.client("scontrol", "show", "job", train["id"])


def test_logs_of_the_queue_are_kept(run_through_slurm):
    logs = sorted(run_through_slurm.path("logs/slurm").glob("rule_train/*/*.log"))
    assert len(logs) == 1
    assert "train erpo seed 0" in logs[0].read_text()


def test_nothing_is_left_to_do(run_through_slurm):
    assert run_through_slurm.run("-n", *SHORT) == 0
    assert "Nothing to be done" in run_through_slurm.said()


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("partition=gpus", "partition 'gpus' does not exist; there are: cpu, gpu, short"),
        ("account=me", NO_ACCOUNT),
        ("constraint=nvlink", "constraint 'nvlink' is no feature of a node; there are: none"),
        ("partition=short", "partition short allows 5 minutes, asked are 120; --set-resources prepare_model:runtime=5"),
    ],
)
def test_what_the_cluster_does_not_have_is_said_before_submission(clone, setting, sentence):
    assert clone.run(*TARGET, setting) != 0
    assert sentence in clone.said()
    assert "Traceback" not in clone.said()
    assert [job for job in clone.cluster.jobs() if job["workdir"] == str(clone.folder)] == []


def test_a_gpu_type_that_no_node_has_is_said_before_submission(clone):
    extra = ["--set-resources", "train:gpu=1", "train:gpu_model=h100"]
    assert clone.run(*TARGET, *extra) != 0
    assert "gpu_type 'h100' does not exist; there are: a100" in clone.said()


def test_doctor_compares_the_site_file_with_the_cluster(clone):
    fine = clone.erpo("doctor", "--config", "study=trial", "partition=cpu")
    assert fine.returncode == 0, fine.stdout
    assert "Slurm answers; partitions: cpu, gpu, short" in fine.stdout
    wrong = clone.erpo("doctor", "--config", "study=trial", "partition=gpus", "account=me", "--on-node")
    assert wrong.returncode == 1
    assert "FAULT  partition 'gpus' does not exist; there are: cpu, gpu, short" in wrong.stdout
    assert f"FAULT  {NO_ACCOUNT}" in wrong.stdout
    assert "FAULT  no start on a compute node: srun" in wrong.stdout
    paper = clone.erpo("doctor", "--config", "gpu_type=h100", "gpus_per_node=4", "--on-node")
    assert "FAULT  gpu_type 'h100' does not exist; there are: a100" in paper.stdout


def test_doctor_starts_the_engine_on_a_node(clone):
    """The GPUs of this cluster are no real ones, and it says so."""
    found = clone.erpo("doctor", "--config", "study=trial", "gpu_type=a100", "--on-node")
    assert "FAULT  a compute node starts torch but sees no GPU" in found.stdout


def test_a_failing_job_shows_its_log(clone):
    clone.path("erpo/warm_start.py").write_text("raise RuntimeError('on purpose')\n")
    assert clone.run("data", "--config", "study=trial", "--retries", "1") != 0
    assert clone.said().count("on purpose") >= 2
    assert "SLURM status is: 'FAILED'" in clone.said()
    jobs = [job for job in clone.cluster.jobs() if job["workdir"] == str(clone.folder)]
    assert [(job["name"], job["state"]) for job in jobs] == [("prepare_model-tiny", "FAILED")] * 2, "each attempt is a job"


@pytest.mark.slow
@pytest.mark.skipif(not ACCOUNTING, reason="needs accounting: ERPO_SLURM_ACCOUNTING=1 (packages slurmdbd, mariadb-server)")
def test_accounting_knows_the_jobs_and_outlives_the_controller(clone):
    """Followed with sacct, under an account, while the controller is away for three quarters of a minute."""
    before = max((int(job["id"]) for job in clone.cluster.jobs()), default=0)  # of other tests
    head = clone.start(*SHORT, "account=lab", "--slurm-status-command", "sacct")
    clone.await_job("prepare_model", "R,CD", after=before)
    clone.cluster.stop("slurmctld")
    time.sleep(45)
    clone.cluster.start_controller()
    assert clone.finish(head, 400) == 0, clone.said()[-3000:]
    columns = "JobName,Account,State,ReqTRES"
    lines = clone.cluster.client("sacct", "-X", "-n", "-P", f"--format={columns}").splitlines()
    train = [line.split("|") for line in lines if line.startswith("train-erpo-0-4|")][-1]
    assert train[1:3] == ["lab", "COMPLETED"]
    assert "cpu=1,mem=3000M" in train[3]
