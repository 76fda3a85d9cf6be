"""Verbs for people who run studies: what a target costs, whether everything is ready, how far it is."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def status(args: argparse.Namespace) -> None:
    """Training runs (step, rate, ETA, last save) and this user's jobs in the queue."""
    from erpo.progress import describe_status
    from erpo.slurm import describe_queue

    if args.results.exists() and not args.results.is_dir():
        raise ValueError(f"{args.results} is a file; name the folder of results, such as results/quickstart")
    say([*describe_status(args.results), *describe_queue()])


def plan(args: argparse.Namespace) -> None:
    """Jobs of a target with their reasons, GPU-hours, wall time and disk, before anything is spent."""
    from erpo.plan import make_plan

    lines, refusal = make_plan(
        args.targets,
        args.config,
        profile=None if args.profile == "none" else args.profile,
        gpus=args.gpus,
        budget_gpu_hours=args.budget_gpu_hours,
        confirmed=args.yes,
        each_job=args.jobs,
    )
    say(lines)
    if refusal:
        raise ValueError(refusal)


def doctor(args: argparse.Namespace) -> int:
    """Whether cluster, storage, models, data and libraries are ready for a study, and the fix for what is not."""
    from erpo.doctor import check

    lines, faults = check(args.config, profile=args.profile, on_node=args.on_node)
    say(lines)
    return 1 if faults else 0


def say(lines: Sequence[str]) -> None:
    """Print lines."""
    sys.stdout.write("\n".join(lines) + "\n")


VERBS: tuple[Callable[[argparse.Namespace], int | None], ...] = (status, plan, doctor)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, found {text!r}")
    return int(text)


def _hours(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of hours, 0 or more, found {text!r}")
    return value


def add_options(action: Callable[[argparse.Namespace], int | None], sub: argparse.ArgumentParser) -> None:
    """Arguments of one of the verbs here."""
    if action is status:
        sub.add_argument("results", type=Path, nargs="?", default=Path("results"))
        return
    sub.add_argument("--config", nargs="*", default=[], help="study=NAME and site settings, as for Snakemake")
    sub.add_argument("--profile", default="slurm", help="slurm, another profile, or none")
    if action is doctor:
        sub.add_argument("--on-node", action="store_true", help="start Python on a compute node too (through srun)")
        return
    sub.add_argument("targets", nargs="*", help="as for Snakemake; none: all")
    sub.add_argument("--gpus", type=_count, help="GPUs that may be used at once, for the wall time")
    sub.add_argument("--budget-gpu-hours", type=_hours, help="refuse above it")
    sub.add_argument("--yes", action="store_true", help="above the budget too")
    sub.add_argument("--jobs", action="store_true", help="every job with its reason")
