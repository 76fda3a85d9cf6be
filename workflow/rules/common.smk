"""The typed study and what the rules ask of it. Numbers are decided in `params.spec`, speed and memory in `resources`."""

import fcntl
import os
import re
import shlex
import sys
from pathlib import Path

from erpo import config as studies

# --- the study --------------------------------------------------------------------------------------------------------


def chosen_study():
    """The study of `--config study=NAME`; a fault in it ends the program with one sentence."""
    unknown = set(config) - {"study", "supersede"}
    if unknown:
        sys.exit(f"--config {sorted(unknown)[0]}=...: unknown; there are study=NAME (a file of config/) and supersede=RUN")
    try:
        study = studies.load_study(str(config.get("study", "quickstart")))
    except ValueError as error:
        sys.exit(str(error))
    for name in SUPERSEDED:
        if name not in study.runs:
            sys.exit(f"--config supersede={name}: not a run of {study.name}; there are: {', '.join(study.runs)}")
    return study


SUPERSEDED = set(filter(None, str(config.get("supersede", "")).split(",")))
STUDY = chosen_study()
RESULTS = f"results/{STUDY.name}"
COUNTS = f"{RESULTS}/counts"  # of samples, by content of the scores files
DATA_DIR = os.environ.get("ERPO_DATA") or STUDY.data_dir
SHARDS = studies.shards(STUDY)
MILESTONES = studies.milestones(STUDY)
SCORED = studies.scored_cells(STUDY)
ARTEFACTS = {**STUDY.tables, **STUDY.figures}
MODELS = dict.fromkeys(run.model for run in STUDY.runs.values())
TRAINED = dict.fromkeys((run.model, run.train_set) for run in STUDY.runs.values() if run.steps > 0)


def one_of(names):
    """Regular expression of exactly these names (of nothing, if there are none)."""
    return "|".join(re.escape(name) for name in names) or "(?!)"


WILDCARDS = {
    "model": one_of(MODELS),
    "train_set": one_of(STUDY.train_sets),
    "benchmark": one_of(STUDY.benchmarks),
    "run": one_of(STUDY.runs),
    "table": one_of(STUDY.tables),
    "figure": one_of(STUDY.figures),
    "shard": one_of(SHARDS),
    "seed": "0|[1-9][0-9]*",
    "step": "0|[1-9][0-9]*",
}

SYNTHETIC_MODELS = one_of(name for name in MODELS if STUDY.models[name].kind == "synthetic")
PRETRAINED_MODELS = one_of(name for name in MODELS if STUDY.models[name].kind == "pretrained")

# --- files --------------------------------------------------------------------------------------------------------------


def model_marker(model):
    return f"{RESULTS}/models/{model}.json"


def policy_marker(run, seed, step):
    """Marker of a checkpoint; step 0 is the model the run starts from."""
    if int(step) == 0:
        return model_marker(STUDY.runs[run].model)
    return f"{RESULTS}/runs/{run}/seed{seed}/step{step}.json"


def benchmark_files(model):
    return [f"{RESULTS}/data/{model}/benchmarks/{name}.parquet" for name in STUDY.benchmarks]


def score_file(cell):
    return f"{RESULTS}/scores/{cell.run}/seed{cell.seed}/step{cell.step}.parquet"


def artefact_files(name):
    folder, ending = ("tables", "csv") if name in STUDY.tables else ("figures", "png")
    return f"{RESULTS}/{folder}/{name}.{ending}"


def results_of(run):
    """Scores of all evaluated checkpoints of a run (its training is among what they need)."""
    return [score_file(cell) for cell in SCORED[run]]


def prepared_data():
    """What needs the network or the data folder: models, training queries, benchmarks; and the overlap of the two."""
    return [
        *(model_marker(model) for model in MODELS),
        *(f"{RESULTS}/data/{model}/{train_set}.{ending}" for model, train_set in TRAINED for ending in ("parquet", "overlap.json")),
        *(path for model in MODELS for path in benchmark_files(model)),
    ]


# --- inputs of rules ----------------------------------------------------------------------------------------------------


def benchmarks_of_model(wildcards):
    return benchmark_files(wildcards.model)


def excluded_benchmarks(wildcards):
    """Benchmarks whose problems the training set leaves out."""
    names = getattr(STUDY.train_sets[wildcards.train_set], "without", ())
    return [f"{RESULTS}/data/{wildcards.model}/benchmarks/{name}.parquet" for name in names]


def benchmarks_of_run(wildcards):
    return benchmark_files(STUDY.runs[wildcards.run].model)


def milestone_before(run, seed, step):
    """Marker of the milestone that training goes on from, if any.

    A milestone put in later, between two that are there, is no reason to touch the second: that one began from an earlier state.
    """
    before = [policy_marker(run, seed, milestone) for milestone in MILESTONES[run] if milestone < step]
    if Path(policy_marker(run, seed, step)).exists():
        before = [marker for marker in before if Path(marker).exists()]
    return before[-1:]


def training_inputs(wildcards):
    run = STUDY.runs[wildcards.run]
    return {
        "model": model_marker(run.model),
        "queries": f"{RESULTS}/data/{run.model}/{run.train_set}.parquet",
        "reference": f"{RESULTS}/reference/{run.model}/{run.train_set}.json",
        "probe": benchmark_files(run.model) if run.evaluate_every else [],
        "previous": milestone_before(wildcards.run, wildcards.seed, int(wildcards.step)),
    }


def policy_of_cell(wildcards):
    return policy_marker(wildcards.run, wildcards.seed, wildcards.step)


def samples_of_cell(wildcards):
    folder = f"{RESULTS}/samples/{wildcards.run}/seed{wildcards.seed}/step{wildcards.step}"
    return [f"{folder}/{shard}.json" for shard in SHARDS]


def scores_of(name):
    if not studies.needs_scores(ARTEFACTS[name]):
        return []
    return [score_file(cell) for cell in studies.cells(STUDY, ARTEFACTS[name])]


def markers_of(name):
    if not studies.needs_training(ARTEFACTS[name]):
        return []
    return [policy_marker(*cell) for cell in studies.cells(STUDY, ARTEFACTS[name]) if cell.step > 0]


def references_of(name):
    """Reference caches behind a figure of query weights."""
    if getattr(ARTEFACTS[name], "kind", None) != "query_weights":
        return []
    runs = [STUDY.runs[run] for run in studies.runs_of(STUDY, ARTEFACTS[name])]
    pairs = dict.fromkeys((run.model, run.train_set) for run in runs if run.steps > 0)
    return [f"{RESULTS}/reference/{model}/{train_set}.json" for model, train_set in pairs]


def report_markers():
    cells = {cell: None for artefact in ARTEFACTS.values() for cell in studies.cells(STUDY, artefact) if cell.step > 0}
    return [policy_marker(*cell) for cell in cells]


def report_scores():
    return list(dict.fromkeys(path for name in ARTEFACTS for path in scores_of(name)))


# --- params: the settings that decide a job's numbers, and nothing else ------------------------------------------------

RUN_SPECS = {name: studies.canonical_json(studies.run_spec(STUDY, name)) for name in STUDY.runs}


def model_spec(wildcards):
    return studies.canonical_json(studies.model_spec(STUDY, wildcards.model))


def queries_spec(wildcards):
    return studies.canonical_json(studies.queries_spec(STUDY, wildcards.model, wildcards.train_set))


def benchmark_spec(wildcards):
    return studies.canonical_json(studies.prepared_benchmark_spec(STUDY, wildcards.model, wildcards.benchmark))


def overlap_spec(wildcards):
    return studies.canonical_json(studies.overlap_spec(STUDY))


def reference_spec(wildcards):
    return studies.canonical_json(studies.reference_spec(STUDY, wildcards.model, wildcards.train_set))


def run_spec(wildcards):
    return RUN_SPECS[wildcards.run]


def cell_of(wildcards):
    return studies.Cell(wildcards.run, int(wildcards.seed), int(wildcards.step))


def generation_spec(wildcards):
    return studies.canonical_json(studies.generation_spec(STUDY, cell_of(wildcards), SHARDS[wildcards.shard]))


def scores_spec(wildcards):
    return studies.canonical_json(studies.scores_spec(STUDY, cell_of(wildcards)))


def table_spec(wildcards):
    return studies.canonical_json(studies.drawn_spec(STUDY, wildcards.table))


def figure_spec(wildcards):
    return studies.canonical_json(studies.drawn_spec(STUDY, wildcards.figure))


# --- resources: speed and memory, by size of model; profiles and --set-resources override each of them -----------------

_SIXTEEN_BILLION = 16.0
_HOUR = 60

MACHINES = {
    "small": {  # synthetic models: minutes on a CPU
        "train": {"threads": 1, "mem_mb": 3000, "runtime": 2 * _HOUR, "gpu": 0},
        "generate": {"threads": 1, "mem_mb": 3000, "runtime": _HOUR, "gpu": 0},
        "reference": {"threads": 1, "mem_mb": 3000, "runtime": _HOUR, "gpu": 0},
        "score": {"threads": 1, "mem_mb": 2000, "runtime": _HOUR},
        "launcher": "python",
        "generator": "sampler",
        "rows": 512,
        "zero_stage": 1,
        "micro_batch_tokens": 2048,
        "activation_checkpointing": "false",
    },
    "medium": {  # up to 16 billion parameters: one node of eight 80 GB GPUs trains, one GPU generates
        "train": {"threads": 32, "mem_mb": 400000, "runtime": 24 * _HOUR, "gpu": 8},
        "generate": {"threads": 8, "mem_mb": 64000, "runtime": 12 * _HOUR, "gpu": 1},
        "reference": {"threads": 8, "mem_mb": 64000, "runtime": 2 * _HOUR, "gpu": 1},
        "score": {"threads": 16, "mem_mb": 32000, "runtime": 4 * _HOUR},
        "launcher": "torchrun --standalone --nproc-per-node=gpu",
        "generator": "vllm",
        "rows": 512,
        "zero_stage": 2,
        "micro_batch_tokens": 16384,
        "activation_checkpointing": "true",
    },
    "large": {  # above
        "train": {"threads": 64, "mem_mb": 1400000, "runtime": 24 * _HOUR, "gpu": 8},
        "generate": {"threads": 16, "mem_mb": 200000, "runtime": 24 * _HOUR, "gpu": 4},
        "reference": {"threads": 16, "mem_mb": 200000, "runtime": 4 * _HOUR, "gpu": 4},
        "score": {"threads": 16, "mem_mb": 32000, "runtime": 4 * _HOUR},
        "launcher": "torchrun --standalone --nproc-per-node=gpu",
        "generator": "vllm",
        "rows": 512,
        "zero_stage": 3,
        "micro_batch_tokens": 8192,
        "activation_checkpointing": "true",
    },
}


def size_of(model):
    entry = STUDY.models[model]
    if entry.kind == "synthetic":
        return "small"
    return "large" if (entry.parameters_billions or 0) > _SIXTEEN_BILLION else "medium"


SIZES = {name: size_of(name) for name in MODELS}


def machine(*keys):
    """Resource: the entry of MACHINES under these keys for the size of the job's model; one value where all sizes agree."""
    values = {}
    for model, size in SIZES.items():
        values[model] = MACHINES[size]
        for key in keys:
            values[model] = values[model][key]
    if len(set(values.values())) == 1:
        return values.popitem()[1]
    return lambda wildcards: values[wildcards.get("model") or STUDY.runs[wildcards.run].model]


def supersede(wildcards):
    return "true" if wildcards.run in SUPERSEDED else "false"


# --- before any work ----------------------------------------------------------------------------------------------------


def refuse_missing_data():
    """End with one sentence when data files that are still needed are neither in the data folder nor downloadable."""
    needed = [(STUDY.train_sets[train_set], f"{RESULTS}/data/{model}/{train_set}.parquet") for model, train_set in TRAINED]
    needed += [(STUDY.benchmarks[Path(path).stem], path) for model in MODELS for path in benchmark_files(model)]
    missing = [
        entry.file
        for entry, prepared in needed
        if entry.kind == "file" and not entry.url and not Path(prepared).exists() and not Path(DATA_DIR, entry.file).is_file()
    ]
    if missing:
        sys.exit(
            f"data files missing in {DATA_DIR}/: {', '.join(dict.fromkeys(missing))}; "
            "put them there, or set the environment variable ERPO_DATA to their folder"
        )


def forget_dead_lock():
    """Take away the lock that a killed local Snakemake left behind, and hold one that dies with this process.

    Snakemake's own lock is a file that survives `kill -9`. Ours is held by the kernel, so whoever gets it alone knows that no
    other Snakemake works here. Locks of a cluster run are left alone: its jobs may still be in the queue (docs/cluster.md).
    """
    global _held
    locks = list(Path(".snakemake/locks").glob("*.lock"))
    Path(".snakemake").mkdir(exist_ok=True)
    _held = open(".snakemake/erpo.lock", "a+")
    try:
        fcntl.flock(_held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(_held, fcntl.LOCK_SH)  # another Snakemake is alive here: its locks are its own
        return
    except OSError:
        return  # a file system without such locks
    _held.seek(0)
    if locks and _held.read() == "local":
        for lock in locks:
            lock.unlink()
        locks = []
    if not locks:
        _held.truncate(0)
        _held.write("cluster" if workflow.resource_settings.nodes is not None else "local")
        _held.flush()
    fcntl.flock(_held, fcntl.LOCK_SH)


if workflow.is_main_process:
    forget_dead_lock()

if not workflow.deployment_settings.deployment_method:
    # Jobs run with the Python that runs Snakemake, activated or not.
    _bin = shlex.quote(str(Path(sys.executable).parent)).replace("{", "{{").replace("}", "}}")
    shell.prefix(f'set -euo pipefail; export PATH={_bin}:"$PATH"; ')
