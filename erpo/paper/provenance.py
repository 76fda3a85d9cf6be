"""The sidecar of a table or figure: what it was made of, by what, at what cost. No time of day: a rebuild is the same file."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from erpo import __version__
from erpo.checkpoint import file_hash
from erpo.paper.aggregate import read_facts

_HOUR = 3600.0
_PACKAGES = ("numpy", "pandas", "pyarrow", "matplotlib")
_SCORE_FACTS = ("policy_hash", "spec_hash", "commit", "versions")
_MARKER_FACTS = ("policy_hash", "spec_hash", "seconds", "commit", "versions", "hardware", "gpus", "ranks")


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
        inputs.append({"kind": "training", **_file(marker["path"]), "log_sha256": file_hash(log), **_chosen(marker, _MARKER_FACTS)})
    return sorted(inputs, key=lambda entry: (entry["kind"], entry["run"], entry["seed"], entry["step"]))


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
        "training_seconds": sum(entry.get("seconds", 0.0) for entry in inputs),
        "gpu_hours": sum(entry.get("seconds", 0.0) * entry.get("gpus", 0) for entry in inputs) / _HOUR,
        "made_by": {
            "erpo": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
        },
        "outputs": {path.name: file_hash(path) for path in outputs},
    }


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
