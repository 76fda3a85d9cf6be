"""What a person and a queue want to know of a running training: progress lines, metrics log, signals, wall time."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from erpo.checkpoint import disk_error, read_json, write_json

logger = logging.getLogger(__name__)

RESUBMIT_EXIT_CODE = 75
"""Left with when a signal or the time limit ended the job early after a save: run the same command again."""

_LINE_SECONDS = 5.0
_BAR_WIDTH = 20


class Resubmit(SystemExit):
    """The job stopped early and cleanly; the same command continues it."""

    def __init__(self) -> None:
        super().__init__(RESUBMIT_EXIT_CODE)


class StopSignal:
    """Remembers SIGTERM and SIGUSR1 instead of dying of them, so that the step in flight is finished and saved."""

    def __init__(self) -> None:
        self.received: str | None = None

    @contextmanager
    def listening(self) -> Iterator[StopSignal]:
        """Handle the signals inside the block; a second one changes nothing."""
        old = {number: signal.signal(number, self._remember) for number in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name


def end_of_job(limit_minutes: float | None = None) -> float | None:
    """When this job must be gone, in epoch seconds: ERPO_END_TIME or Slurm's end time, and so many minutes after our start.

    Raises:
        ValueError: a variable that is no number.
    """
    name = "ERPO_END_TIME" if os.environ.get("ERPO_END_TIME") else "SLURM_JOB_END_TIME"
    given = os.environ.get(name)
    try:
        ends = [float(given)] if given else []
    except ValueError as error:
        raise ValueError(f"{name} is {given!r}, but it must be seconds since 1970; unset it, or set ERPO_END_TIME") from error
    if limit_minutes is not None:
        ends.append(psutil.Process().create_time() + 60 * limit_minutes)
    return min(ends, default=None)


class Walltime:
    """Whether one more step and a save still fit before the job's end.

    Args:
        end: epoch seconds; None: no end.
        first_save: seconds that a save is thought to take until one was made.
        margin: seconds for leaving.
    """

    def __init__(self, end: float | None, first_save: float = 0.0, margin: float = 30.0) -> None:
        self.end, self.margin = end, margin
        self.longest_step, self.longest_save, self._is_guess = 0.0, first_save, True

    def saw_step(self, seconds: float) -> None:
        """A step took so long."""
        self.longest_step = max(self.longest_step, seconds)

    def saw_save(self, seconds: float) -> None:
        """A save took so long."""
        self.longest_save = seconds if self._is_guess else max(self.longest_save, seconds)
        self._is_guess = False

    def is_short(self, now: float) -> bool:
        """True when at `now` (epoch seconds) another step and its save would end too late."""
        return self.end is not None and now + self.longest_step + self.longest_save + self.margin > self.end


class RunLog:
    """metrics.jsonl and samples.jsonl of a run: one JSON object a line, appended; the latest attempt at a step wins."""

    def __init__(self, work: Path, enabled: bool = True) -> None:
        self.work, self.enabled = work, enabled
        self.attempt = 1
        if enabled:
            work.mkdir(parents=True, exist_ok=True)
            self.attempt = self._end_torn_line() + 1

    def _end_torn_line(self) -> int:
        """Close a line cut by a kill, and return the last attempt's number."""
        path, last = self.work / "metrics.jsonl", 0
        if not path.is_file():
            return last
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            with path.open("ab") as handle:
                handle.write(b"\n")
        for line in data.splitlines():
            try:
                last = max(last, json.loads(line).get("attempt", 0))
            except ValueError:
                continue
        return last

    def metrics(self, step: int, row: dict[str, float]) -> None:
        """Append the numbers of a step."""
        self._append("metrics.jsonl", {"step": step, "attempt": self.attempt, **row})

    def samples(self, rows: list[dict[str, Any]]) -> None:
        """Append rows of the sample table."""
        for row in rows:
            self._append("samples.jsonl", row)

    def past(self, up_to: int) -> list[tuple[int, dict[str, float]]]:
        """(step, metrics) of the steps up to `up_to`, the latest attempt of each, in order."""
        path, found = self.work / "metrics.jsonl", {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:  # cut by a kill
                continue
            if row["step"] <= up_to:
                found[row["step"]] = row
        return sorted(found.items())

    def _append(self, name: str, row: dict[str, Any]) -> None:
        if not self.enabled:
            return
        path = self.work / name
        try:
            with path.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(row) + "\n")
        except OSError as error:
            raise disk_error(error, path) from error


class Progress:
    """A line with bar, rate and ETA now and then on standard error, and progress.json for `python -m erpo status`."""

    def __init__(self, title: str, start: int, total: int, path: Path | None = None) -> None:
        self.title, self.start, self.total, self.path = title, start, total, path
        self.begun = time.monotonic()
        self._printed = 0.0

    def update(
        self, done: int, facts: dict[str, float] | None = None, last_save: int | None = None, warning: str | None = None
    ) -> None:
        """Report that `done` of the total are done, with the last save and the last thing that looked wrong."""
        now = time.monotonic()
        rate = (done - self.start) / max(now - self.begun, 1e-9)
        eta = (self.total - done) / rate if rate > 0 else float("inf")
        if self.path is not None:
            write_json(
                self.path,
                {
                    "title": self.title,
                    "step": done,
                    "total": self.total,
                    "steps_per_second": rate,
                    "eta_seconds": None if eta == float("inf") else eta,
                    "last_save": last_save,
                    "warning": warning,
                    "time": time.time(),
                },
            )
        if done < self.total and now - self._printed < _LINE_SECONDS:
            return
        self._printed = now
        self._line(done, eta, facts or {})

    def _line(self, done: int, eta: float, facts: dict[str, float]) -> None:
        filled = int(_BAR_WIDTH * done / max(self.total, 1))
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in facts.items())
        text = f"{self.title}  [{bar}] {done}/{self.total}  ETA {_clock(eta)}  {shown}".rstrip()
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
        logger.info("%s", text)


def _clock(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def describe_status(results: Path) -> list[str]:
    """One line per training run under `results`: step, rate, ETA, last save, and how old the news is."""
    lines = []
    for path in sorted(results.glob("**/work/progress.json")):
        try:
            lines.append(_describe_run(read_json(path)))
        except (OSError, ValueError, KeyError, TypeError):
            lines.append(f"{path}: not readable; the next step of the run writes it anew")
    return lines or [f"no training run under {results}"]


def _describe_run(facts: dict[str, Any]) -> str:
    age = time.time() - facts["time"]
    eta = "done" if facts["step"] >= facts["total"] else f"ETA {_clock(facts['eta_seconds'] or float('inf'))}"
    saved = facts["last_save"] if facts["last_save"] is not None else "none"
    warning = f"; warning: {facts['warning']}" if facts.get("warning") else ""
    return (
        f"{facts['title']}: step {facts['step']}/{facts['total']}, {facts['steps_per_second']:.2f} steps/s, {eta}, "
        f"last save {saved}, {_clock(age)} ago{warning}"
    )
