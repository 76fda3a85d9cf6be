"""Four corrections to the pinned Slurm executor of Snakemake, made in memory when a workflow starts.

- A job is named after its rule and wildcards, so that `squeue` can be read (the plugin gives every job the same random name).
- A job is never forgotten: while neither squeue nor sacct answers, the plugin drops all running jobs and waits for ever.
- Ctrl-C cancels every job: the plugin cancels none if it happens to be looking at the queue, and then the jobs run on.
- A cluster whose accounting is off is not asked through sacct: with the controller away, the plugin falls back to it in vain.
"""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

CORRECTED_VERSION = "2.8.0"

_MOST_NAME_CHARACTERS = 120
_OLDEST_JOB_DAYS = 14


def correct() -> bool:
    """Correct the plugin in this process; False for another version, which is left as it is."""
    from importlib.metadata import version

    import snakemake_executor_plugin_slurm as plugin

    if version("snakemake-executor-plugin-slurm") != CORRECTED_VERSION:
        return False
    if not hasattr(plugin.Executor, "is_corrected"):
        plugin.Executor.is_corrected = True
        plugin.get_submit_command = _with_readable_name(plugin.get_submit_command)
        plugin.query_job_status_squeue = _query_squeue
        plugin.query_job_status_sacct = _query_sacct
        _remember_min_job_age(plugin)
        _forget_no_job(plugin.Executor)
        _cancel_every_job(plugin.Executor)
    return True


def job_name(rule: str, wildcards: Any) -> str:
    """Name of a job in the queue: rule and wildcards, in characters that no shell and no Slurm minds."""
    text = "-".join([rule, *(str(value) for value in wildcards)])
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:_MOST_NAME_CHARACTERS]


def _with_readable_name(submit_command: Any) -> Any:
    def get_submit_command(job: Any, params: dict[str, Any], *rest: Any, **named: Any) -> str:
        name = job_name(job.name, () if job.is_group() else job.wildcards)
        return submit_command(job, {**params, "run_uuid": name}, *rest, **named)

    return get_submit_command


def _query_squeue(run_id: str) -> str:
    """Ask by user, for the name is no longer the run's; the plugin picks its own jobs by their ids."""
    return shlex.join(["squeue", "--format=%i|%T", "--states=all", "--noheader", f"--user={getpass.getuser()}"])


def _query_sacct(run_id: str) -> str:
    start = datetime.now() - timedelta(days=_OLDEST_JOB_DAYS)
    columns = ["-X", "--parsable2", "--noheader", "--format=JobIdRaw,State", f"--user={getpass.getuser()}"]
    return shlex.join(["sacct", *columns, "--clusters", "all", "--starttime", f"{start:%Y-%m-%dT%H:00}", "--endtime", "now"])


def _remember_min_job_age(plugin: Any) -> None:
    """Keep the controller's first answer: without one the plugin turns to sacct, accounting or not."""
    ask = plugin.get_min_job_age
    answers: list[Any] = []

    def get_min_job_age() -> Any:
        if not answers:
            age = ask()
            if age is None:
                return None
            answers.append(age)
        return answers[0]

    plugin.get_min_job_age = get_min_job_age


def _forget_no_job(executor: Any) -> None:
    """Whatever a look at the queue neither reports as ended nor hands back as running is still running."""
    check, success, error = executor.check_active_jobs, executor.report_job_success, executor.report_job_error

    def report_job_success(self: Any, job: Any, *rest: Any, **named: Any) -> None:
        self.__dict__.setdefault("_ended", set()).add(job.external_jobid)
        success(self, job, *rest, **named)

    def report_job_error(self: Any, job: Any, *rest: Any, **named: Any) -> None:
        self.__dict__.setdefault("_ended", set()).add(job.external_jobid)
        error(self, job, *rest, **named)

    async def check_active_jobs(self: Any, active_jobs: list[Any]) -> AsyncIterator[Any]:
        known = set()
        async for job in check(self, active_jobs):
            known.add(job.external_jobid)
            yield job
        for job in active_jobs:
            if job.external_jobid not in known | self.__dict__.get("_ended", set()):
                yield job

    executor.report_job_success, executor.report_job_error = report_job_success, report_job_error
    executor.check_active_jobs = check_active_jobs


def _cancel_every_job(executor: Any) -> None:
    """Whatever was submitted and has not ended is cancelled. During a look at the queue the list that is handed in is empty."""
    submission, cancel = executor.report_job_submission, executor.cancel_jobs

    def report_job_submission(self: Any, job: Any, *rest: Any, **named: Any) -> None:
        self.__dict__.setdefault("_submitted", {})[job.external_jobid] = job
        submission(self, job, *rest, **named)

    def cancel_jobs(self: Any, active_jobs: list[Any]) -> None:
        known = {**self.__dict__.get("_submitted", {}), **{job.external_jobid: job for job in active_jobs}}
        ended = self.__dict__.get("_ended", set())
        cancel(self, [job for number, job in known.items() if number not in ended])

    executor.report_job_submission, executor.cancel_jobs = report_job_submission, cancel_jobs
