"""The sidecar of a table or figure: what it was made of, by what, at what cost. No time of day: a rebuild is the same file."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from erpo import __version__
from erpo.checkpoint import file_hash
from erpo.metrics import read_log
from erpo.paper.aggregate import read_facts

_HOUR = 3600.0
_PACKAGES = ("numpy", "pandas", "pyarrow", "matplotlib")
_SCORE_FACTS = ("policy_hash", "spec_hash", "commit", "versions")
_MARKER_FACTS = ("policy_hash", "spec_hash", "commit", "versions", "hardware", "gpus", "ranks")


def describe_inputs(scores: Sequence[Path], markers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every input file with its checksum, the checkpoint it is about and what is known of its making.

    Args:
        scores: scores files.
        markers: training markers (`erpo.paper.curves.read_markers`).
    """
    inputs = []
    for path in scores:
        inputs.append({"kind": "scores", **_file(path), **_chosen(read_facts(path), _SCORE_FACTS)})
    for marker in markers:
        log = marker["path"].parent / marker["metrics"]
        about = {"log_sha256": file_hash(log), "trained_seconds": _trained_seconds(marker, log), "settings": settings_of(marker)}
        inputs.append({"kind": "training", **_file(marker["path"]), **about, **_chosen(marker, _MARKER_FACTS)})
    refuse_mixed_settings(inputs)
    refuse_foreign_scores(inputs)
    return sorted(inputs, key=lambda entry: (entry["kind"], entry["run"], entry["seed"], entry["step"]))


def _trained_seconds(marker: Mapping[str, Any], log: Path) -> float:
    """Seconds of all steps up to the marker's, as the log adds them up: restarts count, waiting in a queue does not."""
    return float(sum(row.get("time/total", 0.0) for row in read_log(log) if row["step"] <= marker["step"]))


def settings_of(marker: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run's weights besides seed and step."""
    return {key: value for key, value in marker.get("spec", {}).items() if key in ("run", "model", "train_set", "results_version")}


def refuse_mixed_settings(inputs: Sequence[Mapping[str, Any]]) -> None:
    """One name, one configuration: seeds and steps of a run that were trained under different settings make no row together.

    Raises:
        ValueError: with the two files and the settings that differ.
    """
    seen: dict[str, Mapping[str, Any]] = {}
    for entry in inputs:
        if entry["kind"] != "training":
            continue
        first = seen.setdefault(entry["run"], entry)
        here, there = _flat(entry["settings"]), _flat(first["settings"])
        unlike = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
        if unlike:
            raise ValueError(
                f"{first['path']} and {entry['path']} were trained under different settings ({', '.join(unlike)}); "
                "train both under the same ones before putting them into one row"
            )


def refuse_foreign_scores(inputs: Sequence[Mapping[str, Any]]) -> None:
    """Scores and log of one checkpoint are of the same weights, where both say which.

    Raises:
        ValueError: with the two files.
    """
    trained = {_checkpoint(entry): entry for entry in inputs if entry["kind"] == "training"}
    for entry in inputs:
        marker = trained.get(_checkpoint(entry), entry)
        ours, theirs = entry.get("policy_hash"), marker.get("policy_hash")
        if ours and theirs and ours != theirs:
            raise ValueError(
                f"{entry['path']} holds scores of other weights ({ours}) than {marker['path']} names ({theirs}); "
                f"evaluate that checkpoint again: delete {entry['path']} and run: snakemake {entry['path']}"
            )


def _checkpoint(entry: Mapping[str, Any]) -> tuple[str, int, int]:
    return entry["run"], entry["seed"], entry["step"]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _chosen(facts: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: facts[name] for name in ("run", "seed", "step", *names) if name in facts}


def _file(path: Path) -> dict[str, str]:
    return {"path": path.as_posix(), "sha256": file_hash(path)}


def sidecar(
    *, spec: dict[str, Any], inputs: Sequence[dict[str, Any]], caption: str, notes: Sequence[str], outputs: Sequence[Path]
) -> dict[str, Any]:
    """Provenance of one artefact as JSON: specification, inputs with checksums, commits, cost, tools, outputs with checksums."""
    return {
        "name": spec["name"],
        "study": spec["study"],
        "caption": caption,
        "notes": list(notes),
        "spec": spec,
        "inputs": list(inputs),
        "commits": distinct(inputs, "commit"),
        "seeds": seeds_used(spec),
        "configurations": {entry["run"]: entry["settings"] for entry in inputs if entry["kind"] == "training"},
        "hardware": distinct(inputs, "hardware"),
        "versions": used_versions(inputs),
        **training_cost(inputs),
        "made_by": {
            "erpo": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
        },
        "outputs": {path.name: file_hash(path) for path in outputs},
    }


def seeds_used(spec: Mapping[str, Any]) -> dict[str, list[int]]:
    """Seeds by run."""
    return {run: sorted({seed for name, seed, _ in spec["cells"] if name == run}) for run in spec["runs"]}


def used_versions(inputs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Versions of every package that made an input."""
    found: dict[str, set[str]] = {}
    for entry in inputs:
        for name, number in entry.get("versions", {}).items():
            found.setdefault(name, set()).add(str(number))
    return {name: sorted(numbers) for name, numbers in sorted(found.items())}


def training_cost(inputs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds and GPU-hours of the training behind the inputs; of several checkpoints of one training the last counts."""
    last: dict[tuple[str, int], Mapping[str, Any]] = {}
    for entry in inputs:
        if entry["kind"] == "training" and entry["step"] >= last.get((entry["run"], entry["seed"]), entry)["step"]:
            last[entry["run"], entry["seed"]] = entry
    seconds = sum(entry["trained_seconds"] for entry in last.values())
    on_gpus = sum(entry["trained_seconds"] * entry.get("gpus", 0) for entry in last.values())
    return {"training_seconds": seconds, "gpu_hours": on_gpus / _HOUR}


def distinct(inputs: Sequence[dict[str, Any]], key: str) -> list[str]:
    """Different values of one fact among the inputs that state it."""
    return sorted({str(entry[key]) for entry in inputs if entry.get(key)})


def mixture_notes(inputs: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on what differs between inputs that stand side by side."""
    notes = []
    commits = distinct(inputs, "commit")
    if len(commits) > 1:
        notes.append(f"The inputs were made by {len(commits)} commits of the project: {', '.join(name[:12] for name in commits)}.")
    graders = {str(sorted(entry["versions"].items())) for entry in inputs if entry["kind"] == "scores" and "versions" in entry}
    if len(graders) > 1:
        notes.append(f"The samples were graded by {len(graders)} different sets of package versions (see the sidecar).")
    return notes
