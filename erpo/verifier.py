"""A worker process that decides equivalence with math-verify, one pair a line, under limits of its own.

Started by `erpo.rewards` as `python -m erpo.verifier PARENT_PID`; nothing else imports it, so math-verify and sympy stay out
of the training process. A request is one JSON line `[gold, answer, cpu_seconds]`, a reply one JSON line
`{"equal": bool | null, "reason": str, "retire": bool}`.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from erpo.equality import compare

MEMORY_BYTES = 1 << 30
"""Address space of a worker (RLIMIT_AS)."""
RETIRE_BYTES = 640 << 20
"""A worker that has grown beyond this is replaced, so that the next pair never meets a nearly full process."""
KILL_AFTER_SECONDS = 2
"""CPU seconds beyond the limit after which the kernel ends a worker that cannot be interrupted (one long C call)."""
PARENT_POLL_SECONDS = 1.0


class _OutOfTimeError(BaseException):
    """Not an `Exception`: math-verify and sympy catch those."""


def _out_of_time(signum: int, frame: object) -> None:
    raise _OutOfTimeError


@lru_cache(maxsize=4096)
def _parse(latex: str) -> list[Any]:
    return parse(f"\\boxed{{{latex}}}", parsing_timeout=None)  # type: ignore[arg-type]


def equivalent(gold: str, answer: str) -> bool:
    """Whether math-verify takes both for the same, whichever is called gold."""
    left, right = _parse(gold), _parse(answer)
    options = {"allow_set_relation_comp": True, "timeout_seconds": None}
    return verify(left, right, **options) and verify(right, left, **options)


def judge(gold: str, answer: str, cpu_seconds: float) -> dict[str, Any]:
    """Decide one pair within `cpu_seconds` of CPU time; running out of time or memory is an answer too."""
    kill_at = int(time.process_time() + cpu_seconds) + KILL_AFTER_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (kill_at, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.5)
        try:
            equal, reason = compare(gold, answer, equivalent)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OutOfTimeError:
        return {"equal": False, "reason": "time limit", "retire": False}
    except MemoryError:
        return {"equal": False, "reason": "memory limit", "retire": True}
    return {"equal": equal, "reason": reason, "retire": _address_space() > RETIRE_BYTES}


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _leave_with(parent: int) -> None:
    """End this process when the one that started it is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a stray print of a library must not look like a reply
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _out_of_time)
    threading.Thread(target=_leave_with, args=(int(sys.argv[1]),), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(judge(*json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
