"""The typed study and what the rules ask of it. Numbers are decided in `params.spec`, speed and memory in `resources`."""

import fcntl
import os
import re
import shlex
import sys
from pathlib import Path

from erpo import config as studies
from erpo import executor, rates, slurm

# --- the study --------------------------------------------------------------------------------------------------------


# For the words of a fault: keys of the command line, and the files that the others are from.
GIVEN = set(workflow.config_settings.config)
SITE_FILES = [Path(os.path.relpath(path)) for path in workflow.config_settings.configfiles]


def chosen_study():
    """The study of `--config study=NAME`; a fault in it ends the program with one sentence."""
    unknown = set(config) - {"study", "supersede", "archive", *studies.Site.model_fields}
    if unknown:
        sys.exit(
            f"--config {min(unknown)}=...: unknown; there are study=NAME (a file of config/), supersede=RUN, archive=true, "
            f"and for a cluster {', '.join(studies.Site.model_fields)}"
        )
    try:
        study = studies.load_study(str(config.get("study", "quickstart")))
    except ValueError as error:
        sys.exit(str(error))
    for name in SUPERSEDED:
        if name not in study.runs:
            sys.exit(f"--config supersede={name}: not a run of {study.name}; there are: {', '.join(study.runs)}")
    return study


def chosen_site():
    """Partitions, account and GPU type of the site file and of --config; a fault ends the program with one sentence."""
    try:
        for path in SITE_FILES:
            studies.read_settings(path)  # an unknown key, or one given twice, is said with its file
        return studies.parse_site(config, ", ".join(map(str, SITE_FILES)), GIVEN)
    except ValueError as error:
        sys.exit(str(error))


ARCHIVED = str(config.get("archive", "false")).lower() == "true"
"""Results came out of an archive: nothing is trained or evaluated here, and what the archive lacks stays marked as missing."""
SUPERSEDED = set(filter(None, str(config.get("supersede", "")).split(",")))
SITE = chosen_site()
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


def watched_benchmarks(wildcards):
    """Benchmarks of the evaluation during training. Nothing is trained on them: a new one is no reason to train again."""
    paths = benchmark_files(STUDY.runs[wildcards.run].model)
    if Path(policy_marker(wildcards.run, wildcards.seed, wildcards.step)).exists():
        paths = [path for path in paths if Path(path).exists()]
    return [ancient(path) for path in paths]


def training_inputs(wildcards):
    run = STUDY.runs[wildcards.run]
    return {
        "model": model_marker(run.model),
        "queries": f"{RESULTS}/data/{run.model}/{run.train_set}.parquet",
        "reference": f"{RESULTS}/reference/{run.model}/{run.train_set}.json",
        "probe": watched_benchmarks(wildcards) if run.evaluate_every else [],
        "previous": milestone_before(wildcards.run, wildcards.seed, int(wildcards.step)),
    }


def policy_of_cell(wildcards):
    return policy_marker(wildcards.run, wildcards.seed, wildcards.step)


def samples_of_cell(wildcards):
    folder = f"{RESULTS}/samples/{wildcards.run}/seed{wildcards.seed}/step{wildcards.step}"
    return [f"{folder}/{shard}.json" for shard in SHARDS]


def obtainable(paths):
    """All of them; of an archive, those that it held."""
    return [path for path in paths if Path(path).exists()] if ARCHIVED else list(paths)


def scores_of(name):
    if not studies.needs_scores(ARTEFACTS[name]):
        return []
    return obtainable(score_file(cell) for cell in studies.cells(STUDY, ARTEFACTS[name]))


def markers_of(name):
    """Training behind an artefact: what it shows, or at least its provenance and cost."""
    return obtainable(policy_marker(*cell) for cell in studies.cells(STUDY, ARTEFACTS[name]) if cell.step > 0)


def references_of(name):
    """Reference caches behind a figure of query weights."""
    if getattr(ARTEFACTS[name], "kind", None) != "query_weights":
        return []
    runs = [STUDY.runs[run] for run in studies.runs_of(STUDY, ARTEFACTS[name])]
    pairs = dict.fromkeys((run.model, run.train_set) for run in runs if run.steps > 0)
    return obtainable(f"{RESULTS}/reference/{model}/{train_set}.json" for model, train_set in pairs)


def report_markers():
    cells = {cell: None for artefact in ARTEFACTS.values() for cell in studies.cells(STUDY, artefact) if cell.step > 0}
    return obtainable(policy_marker(*cell) for cell in cells)


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

_HOUR = 60

# One process per visible GPU. The dashes end torchrun's own options: it would take the program's --log for one of them.
# Snakemake sets the job's cores as the threads of each process; torchrun, left alone, gives each of its processes one.
TORCHRUN = "env -u OMP_NUM_THREADS -u MKL_NUM_THREADS torchrun --standalone --nproc-per-node=gpu -m --"

MACHINES = {
    "small": {  # synthetic models: minutes on a CPU
        "train": {"threads": 1, "mem_mb": 3000, "gpu": 0, "notice": 60},
        "generate": {"threads": 1, "mem_mb": 3000, "gpu": 0},
        "reference": {"threads": 1, "mem_mb": 3000, "runtime": _HOUR, "gpu": 0},
        "score": {"threads": 1, "mem_mb": 2000, "runtime": _HOUR, "gpu": 0},
        "launcher": "python -m",
        "generator": "sampler",
        "tensor_parallel": 1,
        "rows": 512,
        "zero_stage": 1,
        "micro_batch_tokens": 2048,
        "activation_checkpointing": "false",
    },
    "medium": {  # up to 16 billion parameters: one node of 80 GB GPUs trains, one GPU generates
        "train": {"threads": 32, "mem_mb": 400000, "gpu": SITE.gpus_per_node, "notice": 300},
        "generate": {"threads": 8, "mem_mb": 64000, "gpu": 1},
        "reference": {"threads": 8, "mem_mb": 64000, "runtime": 2 * _HOUR, "gpu": 1},
        "score": {"threads": 16, "mem_mb": 32000, "runtime": 4 * _HOUR, "gpu": 0},
        "launcher": TORCHRUN,
        "generator": "vllm",
        "tensor_parallel": 1,
        "rows": 512,
        "zero_stage": 2,
        "micro_batch_tokens": 16384,
        "activation_checkpointing": "true",
    },
    "large": {  # above
        "train": {"threads": 64, "mem_mb": 1400000, "gpu": SITE.gpus_per_node, "notice": 600},
        "generate": {"threads": 16, "mem_mb": 200000, "gpu": min(4, SITE.gpus_per_node)},
        "reference": {"threads": 16, "mem_mb": 200000, "runtime": 4 * _HOUR, "gpu": min(4, SITE.gpus_per_node)},
        "score": {"threads": 16, "mem_mb": 32000, "runtime": 4 * _HOUR, "gpu": 0},
        "launcher": TORCHRUN,
        "generator": "vllm",
        "tensor_parallel": 4,
        "rows": 512,
        "zero_stage": 3,
        "micro_batch_tokens": 8192,
        "activation_checkpointing": "true",
    },
}


SIZES = {name: rates.size_of(STUDY, name) for name in MODELS}
SEVERAL_NODES = [name for name, run in STUDY.runs.items() if run.steps > 0 and getattr(SITE.nodes, SIZES[run.model]) > 1]
ONE_NODE = [name for name in STUDY.runs if name not in SEVERAL_NODES]


def by_model(value):
    """Resource: `value(size)` for the size of the job's model; one value where all sizes agree."""
    values = {model: value(size) for model, size in SIZES.items()}
    if len(set(values.values())) == 1:
        return values.popitem()[1]
    return lambda wildcards: values[wildcards.get("model") or STUDY.runs[wildcards.run].model]


def machine(*keys):
    """Resource: the entry of MACHINES under these keys."""

    def value(size):
        found = MACHINES[size]
        for key in keys:
            found = found[key]
        return found

    return by_model(value)


def placed(job):
    """Resources that say where a job runs on a cluster, as far as the site file says it; keys without a value are left out."""
    common = {"slurm_account": SITE.account, "qos": SITE.qos, "constraint": SITE.constraint}
    found = {key: value for key, value in common.items() if value is not None}
    gpus = [MACHINES[size][job]["gpu"] for size in SIZES.values()]
    if any(SITE.partition_for(count) for count in gpus):
        found["slurm_partition"] = by_model(lambda size: SITE.partition_for(MACHINES[size][job]["gpu"]) or "")
    if any(gpus):
        found["nodes"] = 1
        if SITE.gpu_type is not None and all(gpus):
            found["gpu_model"] = SITE.gpu_type
    return found


def spread():
    """Resources of a training job on several nodes: one task per GPU (per node without GPUs), started by srun."""

    def shape(size):
        train, nodes = MACHINES[size]["train"], getattr(SITE.nodes, size)
        tasks = max(train["gpu"], 1)
        return train, nodes, tasks, max(train["threads"] // tasks, 1)

    def launcher(size):
        _, nodes, tasks, cores = shape(size)
        asked = f"--nodes={nodes} --ntasks={nodes * tasks} --ntasks-per-node={tasks} --cpus-per-task={cores}"
        return f"srun {asked} --kill-on-bad-exit=1 python -m"

    found = {key: value for key, value in placed("train").items() if key not in ("nodes", "gpu_model")}
    found |= {"mpi": "srun", "nodes": by_model(lambda size: shape(size)[1]), "launcher": by_model(launcher)}
    found["cpus_per_task"] = by_model(lambda size: shape(size)[3])
    if any(MACHINES[size]["train"]["gpu"] for size in SIZES.values()):
        kind = f"gpu:{SITE.gpu_type}" if SITE.gpu_type else "gpu"
        return {**found, "gres": f"{kind}:{SITE.gpus_per_node}", "tasks_per_node": SITE.gpus_per_node}
    return {**found, "tasks": by_model(lambda size: shape(size)[1])}


# Before the time limit training is told to save and stop (--signal without B: reaches the program, not the batch shell).
NOTICE = by_model(lambda size: f"--signal=TERM@{MACHINES[size]['train']['notice']}")


def training_minutes(wildcards):
    """Time limit of a training job: what the rates say, with a margin."""
    run = STUDY.runs[wildcards.run]
    size = SIZES[run.model]
    earlier = [step for step in MILESTONES[wildcards.run] if step < int(wildcards.step)]
    gpus = MACHINES[size]["train"]["gpu"] * getattr(SITE.nodes, size)
    seconds = rates.training_seconds(STUDY, wildcards.run, int(wildcards.step) - max(earlier, default=0), gpus, SITE.gpu_type)
    return rates.limit_minutes(seconds)


def generation_minutes(wildcards):
    """Time limit of a sampling job."""
    size = SIZES[STUDY.runs[wildcards.run].model]
    gpus = MACHINES[size]["generate"]["gpu"]
    return rates.limit_minutes(rates.generation_seconds(STUDY, wildcards.run, len(SHARDS[wildcards.shard]), gpus, SITE.gpu_type))


def supersede(wildcards):
    return "true" if wildcards.run in SUPERSEDED else "false"


# How a run is trained, on one node or several: speed and memory, never numbers.
HOW_TRAINED = {
    "mem_mb": machine("train", "mem_mb"),
    "runtime": training_minutes,
    "generator": machine("generator"),
    "tensor_parallel": machine("tensor_parallel"),
    "rollout_gpus": 0,
    "engine_memory": "0.4",
    "zero_stage": machine("zero_stage"),
    "micro_batch_tokens": machine("micro_batch_tokens"),
    "activation_checkpointing": machine("activation_checkpointing"),
    "save_every": STUDY.save_every,
    "supersede": supersede,
    "slurm_extra": NOTICE,
}

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


def refuse_wrong_site():
    """Before a job is submitted to Slurm: end with a sentence for everything asked that this cluster does not have."""
    if getattr(workflow.executor_plugin, "name", None) != "slurm":
        return
    requests = {
        slurm.request_of(job.rule.name, job.resources, job.threads) for job in workflow.dag.needrun_jobs() if not job.is_local
    }
    try:
        found = slurm.faults(sorted(requests, key=str), slurm.read_cluster())
    except slurm.UnreachableError as error:
        sys.exit(f"Slurm does not answer ({error}); look with `scontrol ping`, or run without --profile slurm")
    if found:
        sys.exit(
            "\n".join(
                [*found, "set it in site.yaml (profiles/slurm) or with --config key=value; `python -m erpo doctor` checks it"]
            )
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
    if "snakemake_executor_plugin_slurm" in sys.modules:
        executor.correct()

if not workflow.deployment_settings.deployment_method:
    # Jobs run with the Python that runs Snakemake, activated or not.
    _bin = shlex.quote(str(Path(sys.executable).parent)).replace("{", "{{").replace("}", "}}")
    _home = shlex.quote(str(Path(workflow.basedir).resolve())).replace("{", "{{").replace("}", "}}")
    _prefix = f'set -euo pipefail; export PATH={_bin}:"$PATH" PYTHONPATH={_home}${{{{PYTHONPATH:+:$PYTHONPATH}}}}; '
    if SITE.cache:
        _cache = shlex.quote(str(Path(SITE.cache).expanduser().absolute())).replace("{", "{{").replace("}", "}}")
        _prefix += f"export HF_HOME={_cache} HF_HUB_OFFLINE={0 if workflow.is_main_process else 1}; "
    shell.prefix(_prefix)
