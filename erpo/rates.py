"""How long jobs take and how much disk they fill: a small model of rates, each with its source. No torch, no measuring here.

GPU rates are data-sheet peaks times an assumed efficiency; nobody measured them with this package. `erpo plan` puts measured rates
in their place as soon as the results of this machine hold some (erpo.plan).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from erpo.config import PretrainedModel, RunConfig, Study

SIXTEEN_BILLION = 16.0
"""Models up to this size count as medium."""

PEAKS = {  # dense bf16 TFLOP/s, memory GB/s: vendors' data sheets, SXM or OAM variants
    "v100": (125.0, 900.0),
    "a100": (312.0, 2039.0),
    "l40s": (362.0, 864.0),
    "h100": (989.0, 3350.0),
    "h200": (989.0, 4800.0),
    "mi300x": (1307.0, 5300.0),
    "b200": (2250.0, 8000.0),
}
DEFAULT_GPU = "a100"
"""Taken where the site file names no type or one without an entry."""

TRAINING_EFFICIENCY = 0.35
"""Share of the peak in forward and backward with recomputation: assumed, usual for ZeRO on one node."""
SAMPLING_EFFICIENCY = 0.35
"""Share of the memory bandwidth in decoding large batches: assumed."""
SAMPLING_ROWS = 256
"""Responses decoded at once: vLLM's default."""
CACHE_BYTES_PER_TOKEN_AND_BILLION = 8_000.0
"""Key-value cache in bytes per token and billion parameters: Qwen2.5 7B has 57 kB, 32B 262 kB."""
RESPONSE_SHARE = 0.3
"""Mean response length as a share of the limit: assumed; measured seconds and responses stand in place of what follows from it."""
QUERY_TOKENS = 150.0
"""Mean query length with instruction and template on MATH: 130 to 170."""

CPU_TRAINING_TOKENS = 6_000.0
"""Tokens a second and core in training the quickstart model: measured on a 2-core x86-64 VM, no GPU."""
CPU_SAMPLING_TOKENS = 6_000.0
"""The same in sampling it."""
WARM_START_SECONDS = 90.0
"""Making the quickstart model there."""
GRADED_PER_SECOND = 200.0
"""Responses that one core grades in a second: assumed; of long ones it is fewer."""

START_SECONDS = {"small": 20.0, "medium": 180.0, "large": 600.0}
"""From the start of a job to its first token: imports, loading, engine start. Assumed for GPUs."""

DOWNLOAD_BYTES_PER_SECOND = 50e6
"""From the hub: assumed."""

HOUR_SECONDS = 3600.0
_LIMIT_MARGIN = 1.5
_LONGEST_LIMIT_MINUTES = 24 * 60
_MINUTES = 60

STATE_BYTES = 12
"""Bytes per parameter of a training state: weights and two moments in float32."""
POLICY_BYTES = 2
"""Bytes per parameter of an exported policy in bfloat16."""
SAMPLE_BYTES_PER_TOKEN = 3.0
"""Sample store: text and ids, compressed."""
KEPT_STATES = 2
"""Newest states kept by default, besides one per milestone."""


@dataclass(frozen=True)
class Measured:
    """Rates found in results of this machine, by model: seconds per training step of a run, responses per second of sampling."""

    step_seconds: dict[tuple[str, int], float]
    """By model and responses per step."""
    responses_per_second: dict[str, float]


NOTHING_MEASURED = Measured({}, {})


def size_of(study: Study, model: str) -> str:
    """small: synthetic; medium: up to 16 billion parameters; large: above."""
    entry = study.models[model]
    if not isinstance(entry, PretrainedModel):
        return "small"
    return "large" if (entry.parameters_billions or 0.0) > SIXTEEN_BILLION else "medium"


def billions(study: Study, model: str) -> float:
    """Parameters of a model in billions; of a pretrained one without a figure, 7."""
    entry = study.models[model]
    if isinstance(entry, PretrainedModel):
        return entry.parameters_billions or 7.0
    return 12 * entry.num_layers * entry.hidden_size**2 / 1e9


def known_gpu(gpu_type: str | None) -> str:
    """The entry of PEAKS that a GPU type means; a name such as a100_80gb or nvidia_h100 is recognised."""
    names = sorted(PEAKS, key=len, reverse=True)
    return next((name for name in names if gpu_type and name in gpu_type.lower()), DEFAULT_GPU)


def peaks(gpu_type: str | None) -> tuple[float, float]:
    """TFLOP/s and GB/s of a GPU type."""
    return PEAKS[known_gpu(gpu_type)]


def responses_per_step(run: RunConfig) -> int:
    """Responses sampled in one training step."""
    return run.queries_per_step * run.responses_per_query


def training_seconds(
    study: Study, name: str, steps: int, gpus: int, gpu_type: str | None = None, measured: Measured = NOTHING_MEASURED
) -> float:
    """Wall time of a training job of some steps."""
    run = study.runs[name]
    start = START_SECONDS[size_of(study, run.model)]
    known = measured.step_seconds.get((run.model, responses_per_step(run)))
    return start + steps * (known if known is not None else _step_seconds(study, run, gpus, gpu_type))


def _step_seconds(study: Study, run: RunConfig, gpus: int, gpu_type: str | None) -> float:
    responses = responses_per_step(run)
    sampled = responses * RESPONSE_SHARE * run.max_response_tokens
    if size_of(study, run.model) == "small":
        query_tokens = min(QUERY_TOKENS, float(study.max_query_tokens)) / 2
        return (sampled + responses * query_tokens) / CPU_TRAINING_TOKENS + sampled / CPU_SAMPLING_TOKENS
    tokens = sampled + responses * QUERY_TOKENS
    passes = 8 + (2 if run.kl_on == "response" or run.advantage == "gae" else 0)  # forward, backward, recomputed forward; reference
    if run.refill_constant_groups:
        sampled *= 1.5
    flops = passes * billions(study, run.model) * 1e9 * tokens
    return flops / (gpus * peaks(gpu_type)[0] * 1e12 * TRAINING_EFFICIENCY) + sampled / (
        gpus * _sampling_tokens(billions(study, run.model), run.max_response_tokens, gpu_type)
    )


def _sampling_tokens(size: float, limit: int, gpu_type: str | None) -> float:
    """Tokens a second and GPU: each decoding step reads the weights once and the cache of every row."""
    context = QUERY_TOKENS + RESPONSE_SHARE * limit / 2
    read = 2e9 * size + SAMPLING_ROWS * context * CACHE_BYTES_PER_TOKEN_AND_BILLION * size
    return SAMPLING_EFFICIENCY * SAMPLING_ROWS * peaks(gpu_type)[1] * 1e9 / read


def generation_seconds(
    study: Study,
    name: str,
    temperatures: int,
    gpus: int,
    gpu_type: str | None = None,
    measured: Measured = NOTHING_MEASURED,
    problems: int | None = None,
) -> float:
    """Wall time of sampling one checkpoint at some temperatures."""
    model = study.runs[name].model
    size = size_of(study, model)
    responses = (problems or num_problems(study)) * temperatures * study.evaluation.samples
    if model in measured.responses_per_second:
        return START_SECONDS[size] + responses / measured.responses_per_second[model]
    tokens = responses * RESPONSE_SHARE * study.evaluation.max_response_tokens
    if size == "small":
        return START_SECONDS[size] + tokens / CPU_SAMPLING_TOKENS
    rate = gpus * _sampling_tokens(billions(study, model), study.evaluation.max_response_tokens, gpu_type)
    return START_SECONDS[size] + tokens / rate


def reference_seconds(study: Study, model: str, queries: int, gpus: int, gpu_type: str | None = None) -> float:
    """Wall time of scoring every training query once."""
    size = size_of(study, model)
    if size == "small":
        return START_SECONDS[size] + queries * QUERY_TOKENS / CPU_TRAINING_TOKENS / 4
    flops = 2 * billions(study, model) * 1e9 * queries * QUERY_TOKENS
    return START_SECONDS[size] + flops / (gpus * peaks(gpu_type)[0] * 1e12 * TRAINING_EFFICIENCY)


def scoring_seconds(study: Study, threads: int) -> float:
    """Wall time of grading one checkpoint."""
    responses = num_problems(study) * len(study.evaluation.temperatures) * study.evaluation.samples
    return START_SECONDS["small"] + responses / (GRADED_PER_SECOND * max(threads, 1))


def num_problems(study: Study) -> int:
    """Problems of all benchmarks; a file of problems counts as 265, the mean of the paper's six."""
    return sum(getattr(entry, "size", _MEAN_PROBLEMS) for entry in study.benchmarks.values())


_MEAN_PROBLEMS = 265  # AIME24 30, AIME25 30, AMC 83, MATH500 500, Minerva 272, OlympiadBench 675


def limit_minutes(seconds: float) -> int:
    """A time limit for a job of this length: half as much again, in whole hours, a day at most (longer jobs resume)."""
    hours = math.ceil(seconds * _LIMIT_MARGIN / HOUR_SECONDS)
    return min(max(hours, 1) * _MINUTES, _LONGEST_LIMIT_MINUTES)
