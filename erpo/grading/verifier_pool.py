"""Killable worker processes for `erpo.grading.verifier`: hard limits, replacement, no orphans.

Workers are plain subprocesses that speak over pipes: no multiprocessing, no signal and no main thread is needed on this
side, so the pool works from any thread, any executor and inside process-pool workers, under fork and spawn alike.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

logger = logging.getLogger(__name__)

CPU_SECONDS = 3.0
"""CPU time for one pair. CPU, not wall time: a busy machine must not change a verdict."""
WALL_SECONDS = 60.0
"""Wall-clock limit for one pair, whatever the CPU did; after it the worker is killed."""
START_SECONDS = 120.0
"""Wall-clock limit for the start of a worker (about 1.5 s on an idle machine)."""
PAIRS_A_START = 64
"""A further worker is started for this many waiting pairs: its start costs as much as deciding them."""
PATIENCE_SECONDS = 2.0
"""... or when a pair takes longer than this, so that an endless one holds up nothing else."""
ATTEMPTS = 2
"""A pair whose worker died for no reason of its own is tried this often, then it is a grader error."""


class Pair(NamedTuple):
    """A gold answer and the answer to compare with it."""

    gold: str
    answer: str


class Decision(NamedTuple):
    """What became of a pair; `equal` is None when the grader failed."""

    equal: bool | None
    reason: str


class _Worker:
    """One process and the pair it works on."""

    def __init__(self) -> None:
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "erpo.grading.verifier", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.is_ready = False
        self.pair: Pair | None = None
        self._cpu_at_start = self._sent = 0.0
        self.deadline = time.monotonic() + START_SECONDS
        self._received = b""

    def send(self, pair: Pair) -> None:
        """Start work on a pair; a pipe that is already broken shows at the next read."""
        self.pair, self._sent = pair, time.monotonic()
        self.deadline = self._sent + WALL_SECONDS
        self._cpu_at_start = self._cpu()
        try:
            self.stdin.write(json.dumps([*pair, CPU_SECONDS]).encode() + b"\n")
            self.stdin.flush()
        except BrokenPipeError:
            logger.debug("a verifier died before it got its pair")

    def receive(self) -> str | None:
        """The next complete line, an empty text where there is none yet, None at the end of the stream."""
        chunk = os.read(self.stdout.fileno(), 1 << 16)
        if not chunk:
            return None
        self._received += chunk
        line, found, rest = self._received.partition(b"\n")
        if not found:
            return ""
        self._received = rest
        return line.decode()

    def _cpu(self) -> float:
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system

    def is_held_up(self) -> bool:
        """Whether the pair takes longer than ordinary ones do."""
        return self.pair is not None and time.monotonic() - self._sent > PATIENCE_SECONDS

    def has_used_its_time(self) -> bool:
        """Whether the pair had all its CPU time, so that waiting longer on a busy machine changes nothing."""
        return self._cpu() - self._cpu_at_start >= CPU_SECONDS

    def stop(self) -> int:
        """Kill, reap, close; the exit status (negative: the signal)."""
        self.process.kill()
        status = self.process.wait()
        for pipe in (self.stdin, self.stdout):
            try:
                pipe.close()
            except BrokenPipeError:
                logger.debug("a verifier left unread input behind")
        return status


class VerifierPool:
    """Decides pairs in up to `workers` processes, started when needed.

    Args:
        workers: most processes at a time; None: one a core this process may use, at most 8.
    """

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"workers is {workers}: a grader needs at least 1 worker process, or None for one per core")
        self.size = workers or min(8, len(os.sched_getaffinity(0)))
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._owner = os.getpid()

    def decide(self, pairs: Sequence[Pair], on_done: Callable[[Pair, Decision], None]) -> None:
        """Decide every pair, calling `on_done` as decisions come in (in any order).

        Raises:
            RuntimeError: workers cannot start.
        """
        self._forget_after_fork()
        with self._lock:
            try:
                _Shift(self._workers, self.size, pairs, on_done).run()
            except BaseException:
                self._stop_all()
                raise

    def close(self) -> None:
        """Stop all workers; the pool can be used again afterwards."""
        self._forget_after_fork()
        with self._lock:
            self._stop_all()

    def _stop_all(self) -> None:
        while self._workers:
            self._workers.pop().stop()

    def _forget_after_fork(self) -> None:
        """A forked child has copies of pipes and lock that belong to its parent: it starts afresh."""
        if self._owner != os.getpid():
            self._workers, self._lock, self._owner = [], threading.Lock(), os.getpid()


class _Shift:
    """One call of `decide`: hands pairs to idle workers until all are decided."""

    def __init__(self, workers: list[_Worker], size: int, pairs: Sequence[Pair], on_done: Callable[[Pair, Decision], None]) -> None:
        self.workers, self.size, self.on_done = workers, size, on_done
        # Parsing the longer text is what costs, and workers remember what they parsed: neighbours share it, and workers
        # come from both ends.
        self.queue = deque(sorted(pairs, key=lambda pair: (max(pair, key=len), pair)))
        self.attempts: dict[Pair, int] = {}
        self.selector = selectors.DefaultSelector()
        for worker in workers:
            self.selector.register(worker.stdout, selectors.EVENT_READ, worker)

    def run(self) -> None:
        """Until nothing is queued and nobody works."""
        with self.selector:
            while self.queue or any(worker.pair for worker in self.workers):
                self._hand_out()
                self._wait()

    def _hand_out(self) -> None:
        for index, worker in enumerate(self.workers):
            if self.queue and worker.is_ready and worker.pair is None:
                worker.send(self.queue.pop() if index % 2 else self.queue.popleft())
        while self.queue and len(self.workers) < self._wanted():
            worker = _Worker()
            self.workers.append(worker)
            self.selector.register(worker.stdout, selectors.EVENT_READ, worker)

    def _wanted(self) -> int:
        """Workers for the pairs that wait, one besides for every pair that holds its worker up."""
        held_up = sum(worker.is_held_up() for worker in self.workers)
        return min(self.size, held_up + -(-len(self.queue) // PAIRS_A_START))

    def _wait(self) -> None:
        active = [worker for worker in self.workers if worker.pair or not worker.is_ready]
        until = min((worker.deadline for worker in active), default=0.0)
        if self.queue and len(self.workers) < self.size:
            until = min(until, time.monotonic() + PATIENCE_SECONDS)
        timeout = max(0.0, until - time.monotonic())
        for key, _ in self.selector.select(timeout):
            self._hear(key.data)
        for worker in [w for w in active if w in self.workers and time.monotonic() > w.deadline]:
            self._bury(worker, overdue=True)

    def _hear(self, worker: _Worker) -> None:
        line = worker.receive()
        if line is None:
            self._bury(worker, overdue=False)
        elif line and not worker.is_ready:
            worker.is_ready = True
        elif line:
            reply = json.loads(line)
            pair, worker.pair = worker.pair, None
            assert pair is not None
            self.on_done(pair, Decision(reply["equal"], reply["reason"]))
            if reply["retire"]:
                self._dismiss(worker)

    def _dismiss(self, worker: _Worker) -> int:
        self.selector.unregister(worker.stdout)
        self.workers.remove(worker)
        return worker.stop()

    def _bury(self, worker: _Worker, *, overdue: bool) -> None:
        """A worker died or was too slow: what becomes of its pair."""
        is_out_of_time = overdue and worker.has_used_its_time()
        status = self._dismiss(worker)
        is_out_of_time |= not overdue and status == -signal.SIGXCPU
        if not worker.is_ready:
            raise RuntimeError(
                f"a grading process did not start (exit status {status}, overdue: {overdue}); "
                f"run `{sys.executable} -m erpo.grading.verifier 0` to see why"
            )
        if worker.pair is None:
            return
        if is_out_of_time:
            self.on_done(worker.pair, Decision(False, "time limit"))
            return
        self.attempts[worker.pair] = self.attempts.get(worker.pair, 0) + 1
        if self.attempts[worker.pair] < ATTEMPTS:
            self.queue.append(worker.pair)
            return
        cause = f"no decision within {WALL_SECONDS:g} s" if overdue else f"grading process ended with status {status}"
        logger.warning("grader error: %s on %r", cause, worker.pair)
        self.on_done(worker.pair, Decision(None, cause))
