"""What Slurm's own commands tell: partitions, accounts, jobs, a job's end. Only reads, never blocks longer than a few seconds."""

from __future__ import annotations

import getpass
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

_SECONDS = 8.0
_MINUTES_PER_DAY = 24 * 60
_LAST_COLUMN = 6

logger = logging.getLogger(__name__)


class UnreachableError(RuntimeError):
    """A Slurm command is missing, failed or did not answer."""


@dataclass(frozen=True)
class Queue:
    """Nodes of one shape in one partition."""

    partition: str
    is_default: bool
    is_up: bool
    max_minutes: int | None
    cpus: int
    memory_mb: int
    gpus: dict[str, int]
    """Number of GPUs of a node by type; the type is empty where the cluster names none."""
    features: frozenset[str]
    nodes: int


@dataclass(frozen=True)
class Request:
    """What one rule's jobs ask of a cluster. None and 0: nothing asked."""

    rule: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpu_type: str | None = None
    gpus: int = 0
    """On each node."""
    nodes: int = 1
    minutes: int = 0
    cpus: int = 0
    memory_mb: int = 0


@dataclass(frozen=True)
class Cluster:
    """What a cluster has, and what this user may use. `accounts` is None where no accounting says it."""

    queues: tuple[Queue, ...]
    accounts: frozenset[str] | None = None
    qos: frozenset[str] = field(default_factory=frozenset)

    @property
    def partitions(self) -> list[str]:
        """Names, in the cluster's order."""
        return list(dict.fromkeys(queue.partition for queue in self.queues))

    def of_partition(self, name: str | None) -> list[Queue]:
        """Shapes of nodes in a partition; None: the default one."""
        return [queue for queue in self.queues if (queue.partition == name if name else queue.is_default)]


def is_installed() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("sbatch") is not None and shutil.which("sinfo") is not None


def ask(*command: str, seconds: float = _SECONDS) -> str:
    """Output of a Slurm command.

    Raises:
        UnreachableError: it is missing, failed, or took longer than `seconds`.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise UnreachableError(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(f"{command[0]} did not answer within {seconds:.0f} s") from error
    if done.returncode != 0:
        raise UnreachableError(f"{command[0]}: {' '.join((done.stderr or done.stdout).split())[:200]}")
    return done.stdout


def read_cluster() -> Cluster:
    """Partitions with the shapes of their nodes, and this user's accounts.

    Raises:
        UnreachableError: the controller does not answer.
    """
    lines = ask("sinfo", "-h", "-a", "-o", "%P|%a|%l|%c|%m|%G|%f|%D").splitlines()
    accounts, qos = _associations()
    return Cluster(tuple(_queue(line) for line in lines), accounts, qos)


def _queue(line: str) -> Queue:
    name, state, limit, cpus, memory, gres, features, nodes = line.split("|")
    return Queue(
        partition=name.rstrip("*"),
        is_default=name.endswith("*"),
        is_up=state == "up",
        max_minutes=parse_limit(limit),
        cpus=_number(cpus),
        memory_mb=_number(memory),
        gpus=parse_gres(gres),
        features=frozenset() if features == "(null)" else frozenset(features.split(",")),
        nodes=_number(nodes),
    )


def _number(text: str) -> int:
    found = re.match(r"\d+", text)  # "64+": at least
    return int(found.group()) if found else 0


def parse_limit(text: str) -> int | None:
    """Minutes of a Slurm time such as 1-12:00:00, 5:00 (minutes:seconds) or infinite."""
    if not re.fullmatch(r"[\d:-]+", text):
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if days:
        parts += [0] * (3 - len(parts))
    hours, minutes, seconds = ([0] * (3 - len(parts)) + parts)[:3]
    return int(days or 0) * _MINUTES_PER_DAY + hours * 60 + minutes + (seconds + 59) // 60


def parse_gres(text: str) -> dict[str, int]:
    """GPUs of a node by type, of a text such as gpu:a100:4(S:0-1),gpu:h100:2 or gpu:8."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu:(?:([A-Za-z][\w.]*):)?(\d+)", text):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def _associations() -> tuple[frozenset[str] | None, frozenset[str]]:
    try:
        text = ask("sacctmgr", "-nP", "show", "assoc", f"user={getpass.getuser()}", "format=account,qos")
    except UnreachableError:
        return None, frozenset()
    rows = [line.split("|") for line in text.splitlines() if "|" in line]
    qos = {name for _, names in rows for name in names.split(",") if name}
    return frozenset(account for account, _ in rows if account), frozenset(qos)


def request_of(rule: str, resources: Mapping[str, Any], threads: int) -> Request:
    """What a job of a workflow will ask, read from its resources."""
    gres = parse_gres(str(resources.get("gres") or ""))
    kind, gpus = next(iter(gres.items()), (resources.get("gpu_model"), int(resources.get("gpu") or 0)))
    tasks = int(resources.get("tasks_per_node") or 1)
    return Request(
        rule=rule,
        partition=resources.get("slurm_partition") or None,
        account=resources.get("slurm_account"),
        qos=resources.get("qos"),
        constraint=resources.get("constraint"),
        gpu_type=kind or None,
        gpus=gpus,
        nodes=int(resources.get("nodes") or 1),
        minutes=int(resources.get("runtime") or 0),
        cpus=tasks * int(resources.get("cpus_per_task") or 0) or threads,
        memory_mb=int(resources.get("mem_mb") or 0),
    )


# --- what a cluster cannot do -------------------------------------------------------------------------------------------


def faults(requests: Iterable[Request], cluster: Cluster) -> list[str]:
    """One sentence for everything asked that this cluster does not have, with what it has instead."""
    found: dict[str, None] = {}
    for request in requests:
        for sentence in (*_name_faults(request, cluster), *_shape_faults(request, cluster)):
            found[sentence] = None
    return list(found)


def _name_faults(request: Request, cluster: Cluster) -> list[str]:
    sentences = []
    if request.partition and not set(request.partition.split(",")) <= set(cluster.partitions):
        sentences.append(f"partition {request.partition!r} does not exist; there are: {', '.join(cluster.partitions)}")
    if request.account and cluster.accounts is None:
        sentences.append(f"account {request.account!r}: this cluster keeps no accounts; leave it out")
    elif request.account and cluster.accounts and request.account.lower() not in {name.lower() for name in cluster.accounts}:
        sentences.append(f"account {request.account!r} is not yours; there are: {', '.join(sorted(cluster.accounts))}")
    if request.qos and cluster.qos and request.qos not in cluster.qos:
        sentences.append(f"qos {request.qos!r} is not yours; there are: {', '.join(sorted(cluster.qos))}")
    types = sorted({kind for queue in cluster.queues for kind in queue.gpus if kind})
    if request.gpus and request.gpu_type and request.gpu_type not in types:
        sentences.append(f"gpu_type {request.gpu_type!r} does not exist; there are: {', '.join(types) or 'no types, only gpu'}")
    features = sorted({feature for queue in cluster.queues for feature in queue.features})
    if request.constraint and re.fullmatch(r"[\w.-]+", request.constraint) and request.constraint not in features:
        sentences.append(f"constraint {request.constraint!r} is no feature of a node; there are: {', '.join(features) or 'none'}")
    return sentences


def _shape_faults(request: Request, cluster: Cluster) -> list[str]:
    queues = [queue for name in (request.partition or "").split(",") for queue in cluster.of_partition(name or None)]
    if not queues:
        return []  # an unknown partition is reported by its name; a cluster without a default one decides at submission
    place = f"{request.rule}: partition {queues[0].partition}"
    if not any(queue.is_up for queue in queues):
        return [f"{place} is down"]
    limits = [queue.max_minutes for queue in queues]
    longest = None if None in limits else max(limit for limit in limits if limit is not None)
    sentences = []
    if longest is not None and request.minutes > longest:
        sentences.append(
            f"{place} allows {longest} minutes, asked are {request.minutes}; --set-resources {request.rule}:runtime={longest}"
        )
    kind = request.gpu_type
    gpus = max((sum(queue.gpus.values()) if kind is None else queue.gpus.get(kind, 0)) for queue in queues)
    if request.gpus > gpus:
        sentences.append(f"{place} has at most {gpus} GPUs{f' of type {kind}' if kind else ''} on a node, asked are {request.gpus}")
    if request.cpus > max(queue.cpus for queue in queues):
        sentences.append(f"{place} has at most {max(queue.cpus for queue in queues)} cores on a node, asked are {request.cpus}")
    if request.memory_mb > max(queue.memory_mb for queue in queues):
        most = max(queue.memory_mb for queue in queues)
        sentences.append(f"{place} has at most {most} MB on a node, asked are {request.memory_mb}")
    if request.nodes > sum(queue.nodes for queue in queues):
        sentences.append(f"{place} has {sum(queue.nodes for queue in queues)} nodes, asked are {request.nodes}")
    return sentences


# --- jobs -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One job of this user that Snakemake submitted."""

    id: str
    state: str
    comment: str
    name: str
    """Rule and wildcards."""
    elapsed: str
    limit: str
    where: str
    """Nodes, or the reason for waiting."""


def own_jobs() -> list[Job]:
    """This user's jobs in the queue that belong to a workflow.

    Raises:
        UnreachableError: the controller does not answer.
    """
    lines = ask("squeue", "-h", "-u", getpass.getuser(), "-o", "%i|%T|%k|%j|%M|%l|%R").splitlines()
    jobs = [Job(*line.split("|", 6)) for line in lines if line.count("|") >= 5]
    return [job for job in jobs if job.comment.startswith(("rule_", "group_"))]


def job_end(job_id: str) -> float | None:
    """When Slurm will end a running job (epoch seconds); None where it has no end.

    Raises:
        UnreachableError: the controller does not answer.
    """
    text = ask("squeue", "-h", "-j", job_id, "-o", "%e").strip()
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def note_job_end() -> None:
    """Inside a Slurm job: tell the trainer when it ends (ERPO_END_TIME), where Slurm's own variable is too new or was dropped."""
    job = os.environ.get("SLURM_JOB_ID")
    if not job or os.environ.get("ERPO_END_TIME") or os.environ.get("SLURM_JOB_END_TIME"):
        return
    try:
        end = job_end(job)
    except UnreachableError as error:
        logger.warning("the job's end is unknown (%s): only the signal before the time limit will stop it in time", error)
        return
    if end is not None:
        os.environ["ERPO_END_TIME"] = str(end)


def describe_queue() -> list[str]:
    """One line per job of a workflow in the queue; nothing where there is no Slurm."""
    if not is_installed():
        return []
    try:
        jobs = own_jobs()
    except UnreachableError as error:
        return [f"the queue is unknown: {error}"]
    lines = [f"{job.id}: {job.name}, {job.state.lower()}, {job.elapsed} of {job.limit}, {job.where}" for job in jobs]
    return lines or ["no job in the queue"]
