"""What Snakemake's dry run says, read: jobs, what they ask for, and why they are due."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from erpo.slurm import parse_gres

_TIMEOUT_SECONDS = 300.0
_MANY_CORES = "100000"  # or the plan would show every job with the cores of this machine
_SHOWN_CHANGES = 4
_LONGEST_VALUE = 40


@dataclass
class Job:
    """One job of a dry run."""

    rule: str
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    reason: str = ""
    wildcards: dict[str, str] = field(default_factory=dict)
    resources: dict[str, str] = field(default_factory=dict)
    threads: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all its nodes."""
        on_node = sum(parse_gres(self.resources.get("gres", "")).values())
        return on_node * int(self.resources.get("nodes", 1)) or int(self.resources.get("gpu", 0))


# --- the dry run ----------------------------------------------------------------------------------------------------------


def dry_run(targets: Sequence[str], settings: Sequence[str], profile: str | None) -> str:
    """What `snakemake -n` says.

    Raises:
        ValueError: it refuses; with its own words.
    """
    command = [sys.executable, "-m", "snakemake", "-n", "--cores", _MANY_CORES, *targets]
    command += ["--profile", profile] if profile else []
    command += ["--config", *settings] if settings else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    if done.returncode != 0:
        raise ValueError(_refusal(done.stdout, done.stderr))
    return done.stdout


def _refusal(stdout: str, stderr: str) -> str:
    """Snakemake's own words for why it plans nothing: what it writes last, without its greeting and without Python's frames."""
    said = stdout.split("Building DAG of jobs...")[-1] if "Building DAG of jobs..." in stdout else ""
    for text in (stderr, said, stdout):
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("Using ", " ", "Traceback"))]
        if lines:
            return " ".join(lines[-3:])
    return "snakemake -n failed and said nothing; try it by hand"


def read_jobs(text: str) -> list[Job]:
    """Jobs of a dry run's text, in its order; the collecting rules without a file are left out."""
    jobs: list[Job] = []
    current: Job | None = None
    for line in text.splitlines():
        start = re.fullmatch(r"(?:local)?(?:rule|checkpoint) (\S+):", line)
        if start:
            current = Job(start.group(1))
            jobs.append(current)
        elif current is not None and line.startswith("    "):
            key, _, value = line.strip().partition(": ")
            _read_field(current, key, value)
        else:
            current = None
    return [job for job in jobs if job.outputs]


def _read_field(job: Job, key: str, value: str) -> None:
    if key in ("input", "output"):
        setattr(job, f"{key}s", value.split(", "))
    elif key == "reason":
        job.reason = value
    elif key == "threads":
        job.threads = int(value)
    elif key in ("wildcards", "resources"):
        setattr(job, key, dict(pair.split("=", 1) for pair in value.split(", ") if "=" in pair))


# --- reasons ----------------------------------------------------------------------------------------------------------------


def changed_specs(reason: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The specs before and now, if settings are the reason."""
    found = re.search(r"across all output: before: (.*) now: (.*?)(?:; [A-Z]|\s*$)", reason)
    if found is None:
        return None
    specs = []
    for part in found.groups():
        try:
            texts = [
                text for text in ast.literal_eval(f"({part.strip().removesuffix('<nothing exclusive>')},)") if isinstance(text, str)
            ]
            specs.append(next(parsed for parsed in map(_as_spec, texts) if parsed is not None))
        except (SyntaxError, ValueError, StopIteration):
            return None
    return specs[0], specs[1]


def _as_spec(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> list[str]:
    """Keys in which two specs differ, each as `key: old -> new`."""
    found = []
    for key in sorted({*before, *now}):
        old, new, name = before.get(key), now.get(key), f"{path}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{name}.")
        elif (
            isinstance(old, list) and isinstance(new, list) and "..." in _short(old) + _short(new) and (words := _changes(old, new))
        ):
            found.append(f"{name}: {words}")
        elif old != new:
            found.append(f"{name}: {_short(old)} -> {_short(new)}")
    return found


def _changes(old: list[Any], new: list[Any]) -> str:
    """What was put into a list and taken out of it: two long lists, cut short, may look the same."""
    sides = {"added": [value for value in new if value not in old], "removed": [value for value in old if value not in new]}
    return ", ".join(f"{_short(values)} {word}" for word, values in sides.items() if values)


def _short(value: Any) -> str:
    if value is None:
        return "unset"
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def why(job: Job) -> str:
    """The reason of a job in a few words: changed settings, missing files, or another job."""
    specs = changed_specs(job.reason)
    if specs is not None:
        found = differences(*specs)
        more = f" and {len(found) - _SHOWN_CHANGES} more" if len(found) > _SHOWN_CHANGES else ""
        return "changed: " + "; ".join(found[:_SHOWN_CHANGES]) + more
    if "Params have changed" in job.reason:
        return "changed settings"
    if "Missing output files" in job.reason:
        return "new"
    if "Updated input files" in job.reason or "updated by another job" not in job.reason:
        return "changed input" if "nput" in job.reason else job.reason.split(";")[0].split(":")[0].lower()
    return "follows another job"
