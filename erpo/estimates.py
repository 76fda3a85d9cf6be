"""What jobs of a dry run cost: the model of erpo.rates, with measured rates in its place where results here hold some."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from erpo import rates
from erpo.config import Site, Study, milestones, shards
from erpo.dryrun import Job, changed_specs, differences

TRAINING_RULES = ("train", "train_across_nodes")
_LOCAL_SECONDS = 10.0
"""A table, a figure, a prepared data file: seconds on the machine that runs Snakemake."""
_QUERIES_OF_A_FILE = 8523
"""Training queries of a file: those of the paper."""
_BYTES_PER_LOGPROB = 4


@dataclass(frozen=True)
class Cost:
    """What a job takes. Seconds are wall time."""

    seconds: float
    gpu_hours: float
    disk_bytes: float = 0.0


class Estimator:
    """Costs of the jobs of one study on one cluster."""

    def __init__(self, study: Study, site: Site, results: Path, retrained: Iterable[str] = ()) -> None:
        self.study, self.site, self.results = study, site, results
        self.measured = measure(study, results)
        self.milestones, self.shards = milestones(study), shards(study)
        self.retrained = set(retrained)

    def cost(self, job: Job) -> Cost:
        """Wall time, GPU-hours and disk of a job."""
        kind = {**dict.fromkeys(TRAINING_RULES, "train"), "prepare_model": "model", "fetch_model": "model"}.get(job.rule, job.rule)
        known = {
            "train": self._train,
            "generate": self._generate,
            "cache_reference": self._reference,
            "score": self._score,
            "model": self._model,
        }
        seconds, disk = known[kind](job) if kind in known else (_LOCAL_SECONDS, 0.0)
        return Cost(seconds, seconds * job.gpus / rates.HOUR_SECONDS, disk)

    def _train(self, job: Job) -> tuple[float, float]:
        run, step = job.wildcards["run"], int(job.wildcards["step"])
        done = self._steps_done(job, run, step)
        parameters = rates.billions(self.study, self.study.runs[run].model) * 1e9
        kept = 1 + (rates.KEPT_STATES if step == self.milestones[run][0] else 0)
        disk = parameters * (rates.POLICY_BYTES + kept * rates.STATE_BYTES)
        return rates.training_seconds(self.study, run, step - done, job.gpus, self.site.gpu_type, self.measured), disk

    def _steps_done(self, job: Job, run: str, step: int) -> int:
        """Steps that need not be trained: up to the milestone before, or up to the newest saved state of an interrupted job."""
        earlier = [milestone for milestone in self.milestones[run] if milestone < step]
        states = self.results / "runs" / run / f"seed{job.wildcards['seed']}" / "work" / "states"
        saved = [int(path.name.removeprefix("step")) for path in states.glob("step*") if path.name[4:].isdigit()]
        usable = saved if changed_specs(job.reason) is None else []
        return max([0, *earlier, *(state for state in usable if state <= step)])

    def _generate(self, job: Job) -> tuple[float, float]:
        run, temperatures = job.wildcards["run"], self.shards[job.wildcards["shard"]]
        share = 1.0 if set(job.inputs) & self.retrained else missing_share(job, len(temperatures), self.study.evaluation.samples)
        gpus = min(job.gpus, int(job.resources.get("tensor_parallel", job.gpus)))  # one engine; a workstation's job holds all GPUs
        seconds = rates.generation_seconds(self.study, run, len(temperatures), max(gpus, 1), self.site.gpu_type, self.measured)
        start = rates.START_SECONDS[rates.size_of(self.study, self.study.runs[run].model)]
        responses = share * rates.num_problems(self.study) * len(temperatures) * self.study.evaluation.samples
        tokens = responses * rates.RESPONSE_SHARE * self.study.evaluation.max_response_tokens
        return start + share * (seconds - start), tokens * rates.SAMPLE_BYTES_PER_TOKEN

    def _reference(self, job: Job) -> tuple[float, float]:
        train_set = self.study.train_sets[job.wildcards["train_set"]]
        queries = int(getattr(train_set, "size", _QUERIES_OF_A_FILE))
        seconds = rates.reference_seconds(self.study, job.wildcards["model"], queries, max(job.gpus, 1), self.site.gpu_type)
        return seconds, queries * rates.QUERY_TOKENS * _BYTES_PER_LOGPROB

    def _score(self, job: Job) -> tuple[float, float]:
        return rates.scoring_seconds(self.study, job.threads), 0.0

    def _model(self, job: Job) -> tuple[float, float]:
        parameters = rates.billions(self.study, job.wildcards["model"]) * 1e9
        seconds = rates.WARM_START_SECONDS if job.rule == "prepare_model" else parameters * 2 / rates.DOWNLOAD_BYTES_PER_SECOND
        return seconds, parameters * rates.POLICY_BYTES


def missing_share(job: Job, temperatures: int, samples: int) -> float:
    """Share of a sampling job's responses that are not in the store: asked for more samples, only the difference is drawn."""
    specs = changed_specs(job.reason)
    if specs is None:
        return 1.0
    before, now = specs
    keys = {text.split(":")[0].split(".")[0] for text in differences(before, now)}
    if not keys <= {"samples", "temperatures"}:
        return 1.0
    old_samples, old_temperatures = before.get("samples", samples), set(before.get("temperatures", ()))
    if not old_temperatures:
        kept = temperatures * min(old_samples, samples)  # only the number of samples was given: the temperatures are the same
    else:
        kept = len(old_temperatures & set(now.get("temperatures", old_temperatures))) * min(old_samples, samples)
    return 1.0 - kept / (temperatures * samples)


def measure(study: Study, results: Path) -> rates.Measured:
    """Rates found in finished work of this study: medians over steps and over sampling jobs."""
    steps: dict[tuple[str, int], list[float]] = defaultdict(list)
    sampled: dict[str, list[float]] = defaultdict(list)
    for name, run in study.runs.items():
        for path in results.glob(f"runs/{name}/seed*/work/metrics.jsonl"):
            steps[run.model, rates.responses_per_step(run)] += _step_times(path)
        for path in results.glob(f"timings/generate/{name}/seed*/step*/*.tsv"):
            asked = rates.num_problems(study) * len(shards(study).get(path.stem, ())) * study.evaluation.samples
            seconds = _benchmark_seconds(path) - rates.START_SECONDS[rates.size_of(study, run.model)] / 2
            if asked and seconds > 0:
                sampled[run.model].append(asked / seconds)
    return rates.Measured(
        {key: statistics.median(values) for key, values in steps.items() if values},
        {key: statistics.median(values) for key, values in sampled.items()},
    )


def _step_times(path: Path) -> list[float]:
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(float(json.loads(line)["time/total"]))
        except (ValueError, KeyError):
            continue  # a line that a kill cut short
    return found


def _benchmark_seconds(path: Path) -> float:
    return float(path.read_text(encoding="utf-8").splitlines()[-1].split("\t")[0])


def longest_chain(jobs: Sequence[Job], costs: Sequence[Cost]) -> float:
    """Wall time in seconds if every job started as soon as its inputs are there."""
    maker = {path: index for index, job in enumerate(jobs) for path in job.outputs}
    known: dict[int, float] = {}

    def end(index: int) -> float:
        if index not in known:
            known[index] = 0.0  # a cycle cannot be
            before = [end(maker[path]) for path in jobs[index].inputs if path in maker]
            known[index] = max(before, default=0.0) + costs[index].seconds
        return known[index]

    return max((end(index) for index in range(len(jobs))), default=0.0)
