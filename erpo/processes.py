"""The processes of one job: a single one, those of torchrun, or those of srun, found and joined by the same command."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

T = TypeVar("T")

_PORTS = (20000, 12000)
"""First port and number of ports from which a Slurm job takes one by its number: two jobs on one node get two.

All lie below 32768, where Linux begins to give ports to outgoing connections: none of those can hold the job's."""


_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_OF_SRUN = ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NUM_TASKS")
"""Variables that are numbers where they are set."""


def join_processes(timeout_minutes: int = 30) -> tuple[int, int]:
    """Form the process group from torchrun's or Slurm's variables, or of this process alone. Returns (rank, world size)."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    os.environ.update(_process_variables())
    alone = os.environ["WORLD_SIZE"] == "1"
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl"
    # One process has nobody to meet: without a port, none can be taken by another program between choice and use.
    meeting = {"store": HashStore(), "rank": 0, "world_size": 1} if alone else {}
    dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes), **meeting)
    return dist.get_rank(), dist.get_world_size()


def _process_variables() -> dict[str, str]:
    """RANK and the rest as torchrun gives them, else from srun's variables, else those of a single process."""
    env = os.environ
    _check_numbers(env)
    if "WORLD_SIZE" in env and "RANK" in env:
        return {"LOCAL_SIZE": env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]), "LOCAL_RANK": env.get("LOCAL_RANK", "0")}
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        return slurm_variables(env)
    # DeepSpeed looks for MPI where an address is missing; nothing connects to this one.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    return {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def slurm_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would have set, from the variables srun gives each task of a step.

    Rank 0 runs on the step's first node, so that is where the others look for it. MASTER_ADDR and MASTER_PORT, where set, win:
    two steps of one job at the same time need two ports.
    """
    first, count = _PORTS
    nodes = env.get("SLURM_STEP_NODELIST", "")
    return {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_SIZE": str(_tasks_on_node(env)),
        "MASTER_ADDR": env.get("MASTER_ADDR") or (first_host(nodes) if nodes else env["SLURM_LAUNCH_NODE_IPADDR"]),
        "MASTER_PORT": env.get("MASTER_PORT") or str(first + int(env.get("SLURM_JOB_ID", "0")) % count),
    }


def _check_numbers(env: Mapping[str, str]) -> None:
    """Refuse what a launcher cannot have set.

    Raises:
        ValueError: the sentence names the variable.
    """
    for name in (*_OF_TORCHRUN, *_OF_SRUN):
        if not env.get(name, "0").isdecimal():
            raise ValueError(f"{name} is {env[name]!r}, but it must be a whole number; torchrun or srun sets it, else unset it")
    for name, of in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if name in env and of in env and int(env[name]) >= int(env[of]):
            raise ValueError(f"{name} is {env[name]}, but with {of} {env[of]} the last one is {int(env[of]) - 1}")


def first_host(nodes: str) -> str:
    """The first name of a Slurm node list such as `gpu[03-05,9],big1`: gpu03."""
    found = re.match(r"([^\[,]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", nodes)
    if found is None:
        raise ValueError(f"SLURM_STEP_NODELIST is {nodes!r}, which is no list of nodes; set MASTER_ADDR to the node of rank 0")
    return "".join(part or "" for part in found.groups())


def _tasks_on_node(env: Mapping[str, str]) -> int:
    """Tasks of this step on this node, from a list such as `8(x3),4`."""
    counts: list[int] = []
    for part in env.get("SLURM_STEP_TASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]).split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE has {part!r}, but it must be a list such as 8(x3),4; srun sets it")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[int(env.get("SLURM_NODEID", "0"))]


def gather_objects(value: Any) -> list[Any]:
    """Values of all ranks, in rank order, on every rank."""
    if dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def agree(flag: bool) -> bool:
    """Whether any rank says yes."""
    return any(gather_objects(bool(flag)))


@overload
def together(action: Callable[[], T]) -> T: ...


@overload
def together(action: Callable[[], T], only_rank: int) -> T | None: ...


def together(action: Callable[[], T], only_rank: int | None = None) -> T | None:
    """Run something that one rank alone may fail at: its error is raised on all, so that none waits for a rank that is gone.

    Args:
        action: raises ValueError, OSError or FloatingPointError when it fails; its collectives, if any, are done before it does.
        only_rank: the rank that runs it; None: all.
    """
    result, failure = None, None
    if only_rank is None or only_rank == dist.get_rank():
        try:
            result = action()
        except (ValueError, OSError, FloatingPointError) as error:
            failure = error
    failures = [error for error in gather_objects(failure) if error is not None]
    if failures:
        raise failure or failures[0]
    return result


def barrier() -> None:
    """Wait for all ranks."""
    if dist.get_world_size() > 1:
        dist.barrier()
