"""`erpo doctor`: in seconds, everything that would stop a study later, each with its fix. Nothing is changed or downloaded."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from erpo import rates, slurm
from erpo.config import FileData, PretrainedModel, Site, Study, cells, load_study, milestones, scored_cells, seeds_of
from erpo.profiles import read_choice

_GIB = 2**30
_REACH_SECONDS = 3.0
_NODE_SECONDS = 300.0
_LOCAL_FILE_SYSTEMS = {"tmpfs", "ramfs", "overlay"}
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "panfs", "wekafs", "virtiofs"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at."""

    state: Literal["ok", "note", "fault"]
    what: str
    fix: str = ""

    def line(self) -> str:
        """As the user reads it."""
        mark = {"ok": "ok   ", "note": "note ", "fault": "FAULT"}[self.state]
        return f"{mark}  {self.what}" + (f"\n       fix: {self.fix}" if self.fix else "")


def examine(study: Study, site: Site, *, results: Path, data_dir: Path, on_slurm: bool) -> list[Finding]:
    """All findings, faults of every part included; none of the looks depends on another.

    Args:
        study: what is to be run.
        site: the cluster's names.
        results: folder of the study's results.
        data_dir: folder of the data files.
        on_slurm: whether the study is to run through Slurm.
    """
    looks: list[Callable[[], Iterator[Finding]]] = [
        _versions,
        lambda: _queue(study, site) if on_slurm else iter(()),
        lambda: _storage(study, results, on_slurm),
        lambda: _models(study, site),
        lambda: _data(study, data_dir),
        lambda: _engine(study),
    ]
    with ThreadPoolExecutor(len(looks)) as pool:
        return [finding for found in pool.map(lambda look: list(look()), looks) for finding in found]


def _versions() -> Iterator[Finding]:
    names = ("torch", "transformers", "deepspeed", "math-verify", "snakemake", "snakemake-executor-plugin-slurm")
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        yield Finding("fault", f"not installed: {', '.join(missing)}", "pip install -e . in the environment that runs Snakemake")
    yield Finding("ok", ", ".join(found))


# --- Slurm -----------------------------------------------------------------------------------------------------------------


def requests_of(study: Study, site: Site) -> list[slurm.Request]:
    """What the study's jobs ask by name: partitions, account, GPU type. Shapes are compared job by job before submission."""
    names = {"account": site.account, "qos": site.qos, "constraint": site.constraint}
    found = [slurm.Request("score", partition=site.partition, **names)]
    if any(rates.size_of(study, run.model) != "small" for run in study.runs.values()):
        sizes = {rates.size_of(study, run.model) for run in study.runs.values()}
        nodes = max(getattr(site.nodes, size) for size in sizes)
        place = site.partition_for(site.gpus_per_node)
        found.append(slurm.Request("train", partition=place, **names, gpu_type=site.gpu_type, gpus=site.gpus_per_node, nodes=nodes))
    return found


def _queue(study: Study, site: Site) -> Iterator[Finding]:
    if not slurm.is_installed():
        yield Finding("fault", "Slurm's commands are not on this machine", "run on a login node, or without --profile slurm")
        return
    try:
        cluster = slurm.read_cluster()
    except slurm.UnreachableError as error:
        yield Finding("fault", f"Slurm does not answer: {error}", "scontrol ping; ask who runs the cluster")
        return
    yield Finding("ok", f"Slurm answers; partitions: {', '.join(cluster.partitions)}")
    faults = slurm.faults(requests_of(study, site), cluster)
    for sentence in faults:
        yield Finding("fault", sentence, "the profile's site.yaml (profiles/slurm), or --config key=value")
    if not faults:
        yield Finding("ok", "partition, account, QOS, constraint and GPU type exist")
    if cluster.accounts is None:
        yield Finding("note", "no accounting: jobs are followed with squeue (the profile's setting); sacct would wait for ever")


# --- storage, models, data -------------------------------------------------------------------------------------------------


def _storage(study: Study, results: Path, on_slurm: bool) -> Iterator[Finding]:
    if results.is_symlink() and not results.exists():
        target = os.readlink(results)
        yield Finding("fault", f"{results} is a link to {target}, which is not there", f"mkdir -p {target}")
    folder = next(path for path in (results, *results.absolute().parents) if path.exists())
    kind = file_system(folder)
    if on_slurm and kind in _LOCAL_FILE_SYSTEMS:
        yield Finding(
            "fault",
            f"{folder.resolve()} is on {kind}, which other nodes do not see",
            "ln -s /a/shared/folder results, before the first run",
        )
    elif on_slurm and kind not in _NETWORK_FILE_SYSTEMS:
        yield Finding(
            "note", f"{folder.resolve()} is on {kind}; every node must see it", "on a cluster: ln -s /a/shared/folder results"
        )
    else:
        yield Finding("ok", f"results are on {kind or 'an unknown file system'}")
    needed, free = study_bytes(study), shutil.disk_usage(folder).free
    text = f"{free / _GIB:,.0f} GiB free; the whole study takes about {needed / _GIB:,.1f} GiB"
    if free < needed:
        yield Finding(
            "fault", text, "free space, or link results to a larger file system; `erpo plan TARGET` says what a part takes"
        )
    else:
        yield Finding("ok", text)
    if not os.access(folder, os.W_OK):
        yield Finding("fault", f"{folder} cannot be written", "chmod, or link results to a folder of yours")


def file_system(folder: Path) -> str | None:
    """Type of the file system under a folder (Linux; None elsewhere)."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return None
    place, best = folder.resolve(), ("", None)
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if place.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def study_bytes(study: Study) -> float:
    """Disk of a whole study: models, states, policies, samples."""
    total = sum(rates.billions(study, name) * 1e9 * rates.POLICY_BYTES for name in {run.model for run in study.runs.values()})
    scored = scored_cells(study)
    shown = [cell for artefact in (*study.tables.values(), *study.figures.values()) for cell in cells(study, artefact)]
    responses = rates.num_problems(study) * len(study.evaluation.temperatures) * study.evaluation.samples
    tokens = rates.RESPONSE_SHARE * study.evaluation.max_response_tokens
    for name, steps in milestones(study).items():
        parameters = rates.billions(study, study.runs[name].model) * 1e9
        for seed in seeds_of(study, name):
            last = max(cell.step for cell in (*scored[name], *shown) if (cell.run, cell.seed) == (name, seed))
            left = sum(step <= last for step in steps)  # the seeds of a run need not go on equally long
            kept = left + rates.KEPT_STATES if left else 0
            total += parameters * (left * rates.POLICY_BYTES + kept * rates.STATE_BYTES)
        total += len(scored[name]) * responses * tokens * rates.SAMPLE_BYTES_PER_TOKEN
    return total


def _models(study: Study, site: Site) -> Iterator[Finding]:
    cache = Path(site.cache).expanduser() if site.cache else Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    for name in dict.fromkeys(run.model for run in study.runs.values()):
        entry = study.models[name]
        if not isinstance(entry, PretrainedModel) or Path(entry.source).expanduser().is_dir():
            yield Finding("ok", f"model {name}: " + ("made here" if not isinstance(entry, PretrainedModel) else entry.source))
            continue
        if list((cache / "hub" / f"models--{entry.source.replace('/', '--')}").glob("snapshots/*/config.json")):
            yield Finding("ok", f"model {name}: in {cache}")
        elif reaches("huggingface.co"):
            yield Finding(
                "note", f"model {name}: not here yet, to be fetched from the hub", "snakemake --profile slurm data (login node)"
            )
        else:
            yield Finding(
                "fault",
                f"model {name}: {entry.source} is not in {cache}, and the hub cannot be reached",
                "fetch it where there is a network and copy the folder; set cache: in the profile's site.yaml",
            )


def _data(study: Study, data_dir: Path) -> Iterator[Finding]:
    entries = {**study.train_sets, **study.benchmarks}
    files = {name: entry for name, entry in entries.items() if isinstance(entry, FileData)}
    missing = {name: entry for name, entry in files.items() if not (data_dir / entry.file).is_file()}
    if len(missing) < len(files) or not files:
        yield Finding("ok", f"data: {len(files) - len(missing)} files in {data_dir}/" if files else "data: made here")
    hosts = {urllib.parse.urlsplit(entry.url).hostname or "" for entry in missing.values() if entry.url}
    unreachable = {host for host in hosts if not reaches(host)}
    names = [entry.file for entry in missing.values() if not entry.url or urllib.parse.urlsplit(entry.url).hostname in unreachable]
    if names:
        yield Finding(
            "fault", f"data missing in {data_dir}/: {', '.join(names)}", "put them there, or set ERPO_DATA to their folder"
        )
    elif missing:
        yield Finding("note", f"data: {len(missing)} files to be fetched", "snakemake --profile slurm data (login node)")


def reaches(host: str) -> bool:
    """Whether a connection to port 443 opens within seconds."""
    try:
        with socket.create_connection((host, 443), timeout=_REACH_SECONDS):
            return True
    except OSError:
        return False


def _engine(study: Study) -> Iterator[Finding]:
    sizes = {rates.size_of(study, run.model) for run in study.runs.values()}
    if sizes == {"small"}:
        yield Finding("ok", "engine: the package's own sampler (CPU)")
        return
    if importlib.util.find_spec("vllm") is None:
        yield Finding("fault", "vllm is not installed, and this study samples with it", "pip install -e '.[gpu]'")
    else:
        yield Finding("ok", f"vllm {version('vllm')} is installed; whether it starts shows on a node: erpo doctor --on-node")


def start_on_node(site: Site, seconds: float) -> Finding:
    """Start Python with the engine's libraries on a compute node, through srun, and see its GPU."""
    place = site.partition_for(1)
    options = [
        *(["-p", place] if place else []),
        *(["-A", site.account] if site.account else []),
        *(["--qos", site.qos] if site.qos else []),
        *(["--constraint", site.constraint] if site.constraint else []),
    ]
    gpu = f"--gpus={site.gpu_type + ':' if site.gpu_type else ''}1"
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU')"
    command = ["srun", "-n1", "-t5", "--mem=4000", gpu, *options, sys.executable, "-c", code]
    try:
        answer = slurm.ask(*command, seconds=seconds).strip().splitlines()
    except slurm.UnreachableError as error:
        return Finding("fault", f"no start on a compute node: {error}", "squeue --me; try the same srun by hand")
    if answer and answer[-1] == "no GPU":
        return Finding(
            "fault", "a compute node starts torch but sees no GPU", "driver and CUDA build of torch; site.yaml: gpu_partition"
        )
    return Finding("ok", f"a compute node starts torch and sees: {' '.join(answer[-1:])}")


def check(settings: Sequence[str], *, profile: str = "slurm", on_node: bool = False) -> tuple[list[str], int]:
    """Lines of the report and the number of faults, for `key=value` settings as Snakemake takes them.

    Raises:
        ValueError: an unknown profile, key or study, or a site setting that cannot be.
    """
    choice = read_choice(None if profile == "none" else profile, settings)
    study = load_study(choice.study)
    data_dir = Path(os.environ.get("ERPO_DATA") or study.data_dir)
    findings = examine(study, choice.site, results=Path("results"), data_dir=data_dir, on_slurm=choice.on_slurm)
    if on_node and choice.on_slurm:
        findings.append(start_on_node(choice.site, _NODE_SECONDS))
    head = f"study {study.name}, jobs {'through Slurm' if choice.on_slurm else 'on this machine'}"
    return [head, *report(findings)], sum(finding.state == "fault" for finding in findings)


def report(findings: Sequence[Finding]) -> list[str]:
    """Lines of the report, faults last, and a verdict."""
    order = {"ok": 0, "note": 1, "fault": 2}
    lines = [finding.line() for finding in sorted(findings, key=lambda finding: order[finding.state])]
    faults = sum(finding.state == "fault" for finding in findings)
    return [*lines, "", f"{faults} faults" if faults else "nothing stands in the way"]
