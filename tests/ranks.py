"""The command line on one or several ranks, for tests: forked from a server that has imported everything, so a start is quick."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OF_A_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")

os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["erpo.trainer", "transformers.models.qwen2.modeling_qwen2", "pandas", "pyarrow.dataset", "tests.ranks"]
)


def environment(**more: str) -> dict[str, str]:
    """This process's environment without the variables of its own process group."""
    return {**{key: value for key, value in os.environ.items() if key not in _OF_A_GROUP}, **more}


def free_port() -> str:
    """A port that nothing listens on now, below those that Linux gives to outgoing connections: it stays free until it is used."""
    for port in random.SystemRandom().sample(range(20000, 32000), 50):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return str(port)
    raise OSError("50 ports tried, all in use")


def group(ranks: int) -> list[dict[str, str]]:
    """What torchrun tells each of its processes."""
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def start(commands: Sequence[list[str]], log: Path, variables: Sequence[dict[str, str]] = ({},)) -> list:
    """Processes (one per entry of `variables`) that run `python -m erpo COMMAND` for each command in turn, until one fails."""
    found = []
    for rank, more in enumerate(variables):
        given = (list(commands), environment(**more), f"{log}.{rank}")
        found.append(_server.Process(target=_run, args=given))
        found[-1].start()
    return found


def finish(processes: list, seconds: float = 150) -> list[int]:
    """Exit codes; what still runs after the time limit is killed and counts as -9."""
    for process in processes:
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def run(commands: Sequence[list[str]], log: Path, ranks: int = 1) -> None:
    """Run commands on some ranks and insist on success."""
    codes = finish(start(commands, log, group(ranks) if ranks > 1 else ({},)))
    assert codes == [0] * ranks, (codes, *(Path(f"{log}.{rank}").read_text()[-3000:] for rank in range(ranks)))


def _run(commands: list[list[str]], variables: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(variables)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    from erpo.__main__ import main

    for command in commands:
        code = main(command)
        if code:
            sys.exit(code)
