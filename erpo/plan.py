"""What a target would cost before anything is spent: jobs and their reasons, GPU-hours, wall time, disk."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from erpo import rates
from erpo.config import load_study
from erpo.dryrun import Job, dry_run, read_jobs, why
from erpo.estimates import TRAINING_RULES, Cost, Estimator, longest_chain
from erpo.profiles import read_choice

_GIB = 2**30
_SHOWN_RUNS = 6


def make_plan(
    targets: Sequence[str] = (),
    settings: Sequence[str] = (),
    *,
    profile: str | None = "slurm",
    gpus: int | None = None,
    budget_gpu_hours: float | None = None,
    confirmed: bool = False,
    each_job: bool = False,
) -> tuple[list[str], str | None]:
    """Lines that say what a target would do and cost.

    Args:
        targets: as for Snakemake; none: everything.
        settings: `key=value` as for Snakemake's --config.
        profile: Snakemake profile whose study and resources count; None: none.
        gpus: GPUs that may be used at once, for the wall time.
        budget_gpu_hours: refuse above it, unless confirmed.
        confirmed: the user said yes.
        each_job: name every job, not only the groups.

    Returns:
        The lines, and a sentence that refuses what is above the budget, if it is.

    Raises:
        ValueError: a profile, setting or study that cannot be, or Snakemake refuses the targets.
    """
    choice = read_choice(profile, settings)
    study = load_study(choice.study)
    jobs = read_jobs(dry_run(targets, settings, profile))
    if not jobs:
        return ["nothing to do: every result is there"], None
    results = Path("results") / study.name
    retrained = {path for job in jobs if job.rule in TRAINING_RULES for path in job.outputs}
    estimator = Estimator(study, choice.site, results, retrained)
    costs = [estimator.cost(job) for job in jobs]
    lines = [*_groups(jobs, costs), "", *_totals(jobs, costs, gpus), "", *_sources(estimator, jobs)]
    if each_job:
        lines += ["", *(f"{job.outputs[0]}: {why(job)}" for job in jobs)]
    total = sum(cost.gpu_hours for cost in costs)
    if budget_gpu_hours is None or total <= budget_gpu_hours or confirmed:
        return lines, None
    over = f"{total:,.0f} GPU-hours planned, above the budget of {budget_gpu_hours:,.0f}"
    return lines, f"{over}; name fewer targets, or confirm with --yes"


def _groups(jobs: Sequence[Job], costs: Sequence[Cost]) -> list[str]:
    """One line per rule and reason."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, job in enumerate(jobs):
        groups[job.rule, why(job)].append(index)
    lines = [f"{'jobs':>5}  {'rule':<20}{'each':>10}{'GPU-hours':>12}  why"]
    for (rule, reason), members in groups.items():
        seconds = statistics.median(costs[index].seconds for index in members)
        gpu_hours = sum(costs[index].gpu_hours for index in members)
        names = sorted({jobs[index].wildcards["run"] for index in members if "run" in jobs[index].wildcards})
        which = f" ({', '.join(names[:_SHOWN_RUNS])}{', ...' if len(names) > _SHOWN_RUNS else ''})" if names else ""
        numbers = f"{len(members):>5}  {rule:<20}{clock(seconds):>10}{gpu_hours:>12,.1f}"
        lines.append(f"{numbers}  {reason}{which}")
    return lines


def _totals(jobs: Sequence[Job], costs: Sequence[Cost], gpus: int | None) -> list[str]:
    gpu_hours = sum(cost.gpu_hours for cost in costs)
    chain = longest_chain(jobs, costs)
    lines = [f"{len(jobs)} jobs, {gpu_hours:,.0f} GPU-hours; the longest chain of jobs takes {clock(chain)}"]
    if gpus:
        seconds = max(chain, gpu_hours * rates.HOUR_SECONDS / gpus)
        lines.append(f"on {gpus} GPUs at once: about {clock(seconds)}, waiting in the queue not counted")
    lines.append(f"disk: about {sum(cost.disk_bytes for cost in costs) / _GIB:,.1f} GiB more")
    return lines


def _sources(estimator: Estimator, jobs: Sequence[Job]) -> list[str]:
    """Where the rates come from."""
    lines = []
    for (model, responses), seconds in sorted(estimator.measured.step_seconds.items()):
        lines.append(f"measured here: {model}, {responses} responses a step: {seconds:.2f} s a step")
    for model, rate in sorted(estimator.measured.responses_per_second.items()):
        lines.append(f"measured here: {model}: {rate:,.0f} responses a second and sampling job")
    if any(job.gpus for job in jobs):
        kind = rates.known_gpu(estimator.site.gpu_type)
        flops, bandwidth = rates.peaks(kind)
        if estimator.site.gpu_type and kind == rates.DEFAULT_GPU and kind not in estimator.site.gpu_type.lower():
            kind = f"{estimator.site.gpu_type}, unknown here and taken for {kind}"
        lines.append(
            f"assumed, not measured: {kind}: {rates.TRAINING_EFFICIENCY:.0%} of {flops:.0f} TFLOP/s in training, "
            f"{rates.SAMPLING_EFFICIENCY:.0%} of {bandwidth:,.0f} GB/s in sampling (data sheets), "
            f"responses of {rates.RESPONSE_SHARE:.0%} of the limit"
        )
        medium, large = (f"{rates.START_SECONDS[size]:.0f} s" for size in ("medium", "large"))
        lines.append(
            f"assumed: {medium} before a GPU job's first token ({large} above {rates.SIXTEEN_BILLION:.0f} billion parameters), "
            f"{rates.GRADED_PER_SECOND:.0f} responses graded a second and core, "
            f"downloads of {rates.DOWNLOAD_BYTES_PER_SECOND / 1e6:.0f} MB/s (erpo/rates.py)"
        )
    elif not lines:
        lines.append("rates of a 2-core x86-64 VM without GPU (erpo/rates.py)")
    return lines


def clock(seconds: float) -> str:
    """A duration as people say it: 45 s, 12 min, 3.5 h, 2.1 d."""
    minute, hour, day = 60.0, 3600.0, 86400.0
    if seconds < 2 * minute:
        return f"{seconds:.0f} s"
    if seconds < 2 * hour:
        return f"{seconds / minute:.0f} min"
    return f"{seconds / hour:.1f} h" if seconds < 3 * day else f"{seconds / day:.1f} d"
