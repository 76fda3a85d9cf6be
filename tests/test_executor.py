"""The corrections to the pinned Slurm executor, on the plugin's own class."""

import asyncio
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from erpo import executor

plugin = pytest.importorskip("snakemake_executor_plugin_slurm")
RemoteExecutor = pytest.importorskip("snakemake_interface_executor_plugins.executors.remote").RemoteExecutor


@dataclass
class Job:
    external_jobid: str
    job: object = None
    aux: dict = field(default_factory=dict)


def test_names_can_be_read_and_typed():
    assert executor.job_name("train", ["erpo-alpha5e-2", "0", "240"]) == "train-erpo-alpha5e-2-0-240"
    assert executor.job_name("report", ()) == "report"
    assert executor.job_name("a", ["x y'z/$"]) == "a-x_y_z__"
    assert len(executor.job_name("r", ["x" * 500])) == 120


def test_the_plugin_is_the_version_that_is_corrected_and_only_once():
    assert executor.correct()
    first = plugin.get_submit_command
    assert executor.correct()
    assert plugin.get_submit_command is first


def test_a_submission_carries_the_readable_name():
    executor.correct()
    resources = {"mem_mb": 100, "runtime": 5}
    job = SimpleNamespace(name="train", wildcards=["erpo", "0"], is_group=lambda: False, resources=Resources(resources), threads=1)
    params = {
        "run_uuid": "random",
        "slurm_logfile": "log",
        "comment_str": "rule_train",
        "account": "",
        "partition": "",
        "workdir": None,
    }
    command = plugin.get_submit_command(job, params)
    assert "--job-name train-erpo-0 " in command
    assert "random" not in command


class Resources(dict):
    """Resources as the plugin reads them: by key and by attribute."""

    __getattr__ = dict.get


def test_jobs_are_asked_for_by_user_not_by_name():
    executor.correct()
    assert plugin.query_job_status_squeue("run").startswith("squeue '--format=%i|%T' --states=all")
    assert "--name" not in plugin.query_job_status_squeue("run") + plugin.query_job_status_sacct("run")
    assert "--user=" in plugin.query_job_status_sacct("run")


def look(check) -> tuple[list[str], set[str]]:
    """Jobs handed back as running by one look at the queue, and jobs reported as ended."""
    ended = set()

    class Executor:
        check_active_jobs = check

        def report_job_success(self, job):
            ended.add(job.external_jobid)

        def report_job_error(self, job, msg=None):
            ended.add(job.external_jobid)

    executor._forget_no_job(Executor)

    async def ask():
        return [job.external_jobid async for job in Executor().check_active_jobs([Job("1"), Job("2"), Job("3")])]

    return asyncio.run(ask()), ended


def test_no_job_is_forgotten_when_the_queue_does_not_answer():
    async def silent(self, jobs):
        return
        yield

    assert look(silent) == (["1", "2", "3"], set())


def test_ended_jobs_are_not_handed_back():
    async def answered(self, jobs):
        self.report_job_success(jobs[0])
        yield jobs[1]
        self.report_job_error(jobs[2], msg="no")

    assert look(answered) == (["2"], {"1", "3"})


class Remote(RemoteExecutor):
    """Snakemake's executor without a queue: a look at it takes as long as `look` says; cancelled jobs are remembered."""

    def __init__(self, looking: threading.Event, go_on: threading.Event) -> None:
        self.lock, self.active_jobs, self.wait = threading.Lock(), [], True
        self.looking, self.go_on, self.cancelled = looking, go_on, []
        self.workflow = SimpleNamespace(
            executor_plugin=SimpleNamespace(common_settings=SimpleNamespace(init_seconds_before_status_checks=0)),
            remote_execution_settings=SimpleNamespace(immediate_submit=True),
            scheduler=None,
        )
        self.wait_thread = threading.Thread(target=self._wait_thread, daemon=True)

    def report_job_submission(self, job):
        with self.lock:
            self.active_jobs.append(job)

    def report_job_success(self, job):
        """Nobody is told."""

    def report_job_error(self, job, msg=None):
        """Nobody is told."""

    def run_job(self, job):
        """Jobs are handed over submitted."""

    async def sleep(self):
        await asyncio.sleep(0.01)

    async def check_active_jobs(self, active_jobs):
        if active_jobs:
            self.report_job_success(active_jobs[0])
            self.looking.set()
            self.go_on.wait(10)
        for job in active_jobs[1:]:
            yield job

    def cancel_jobs(self, active_jobs):
        self.cancelled += [job.external_jobid for job in active_jobs]
        self.go_on.set()


@pytest.mark.parametrize("corrected", [False, True])
def test_an_interruption_during_a_look_at_the_queue_cancels_every_job_that_runs(corrected):
    """Uncorrected none is cancelled: when Snakemake mends it, the first case fails and the correction can go."""
    chosen = type("Chosen", (Remote,), dict(vars(Remote)))
    if corrected:
        executor._forget_no_job(chosen)
        executor._cancel_every_job(chosen)
    looking = threading.Event()
    remote = chosen(looking, threading.Event())
    for number in "123":
        remote.report_job_submission(Job(number))
    remote.wait_thread.start()
    assert looking.wait(10)
    remote.cancel()
    assert remote.cancelled == (["2", "3"] if corrected else [])


def test_the_controllers_first_answer_is_kept():
    answers = [None, 300, None]
    source = SimpleNamespace(get_min_job_age=lambda: answers.pop(0))
    executor._remember_min_job_age(source)
    assert [source.get_min_job_age() for _ in range(3)] == [None, 300, 300]
    assert answers == [None]


def test_the_module_is_light():
    code = "import erpo.executor, sys; sys.exit('snakemake' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
