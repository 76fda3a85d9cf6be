"""A cluster in a dozen settings: where jobs may run there. Read from profiles/slurm/site.yaml; nothing here is part of a spec."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from erpo.config.loading import StrictLoader
from erpo.config.run import PositiveInt

SITE_FILE = Path("profiles/slurm/site.yaml")
"""The site file of the Slurm profile, relative to the project."""

SIZES = ("small", "medium", "large")
"""Sizes of models as machines see them: synthetic, up to 16 billion parameters, larger."""

_WORD = r"^[A-Za-z0-9_.@:+-]+(,[A-Za-z0-9_.@:+-]+)*$"
_Name = Annotated[str, Field(pattern=_WORD)]


class Nodes(BaseModel):
    """Nodes of one training job, by size of the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    small: PositiveInt = 1
    """Synthetic models."""
    medium: PositiveInt = 1
    """Up to 16 billion parameters."""
    large: PositiveInt = 1
    """Larger models."""


class Site(BaseModel):
    """Names of this cluster's parts. Unset: the cluster's own default. An account may be made of digits alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    partition: _Name | None = None
    """Partition of jobs without GPUs."""
    gpu_partition: _Name | None = None
    """Partition of jobs with GPUs; unset: the same."""
    account: _Name | None = None
    """Account that pays."""
    qos: _Name | None = None
    """Quality of service."""
    constraint: Annotated[str, Field(pattern=r"^[^\s'\"`$\\;]+$")] | None = None
    """Node features a job needs (sbatch --constraint)."""
    gpu_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")] | None = None
    """Type of GPU as `sinfo -o %G` names it (gpu:TYPE:8)."""
    gpus_per_node: PositiveInt = 8
    """GPUs of a node that a training job takes."""
    nodes: Nodes = Nodes()
    """Nodes of one training job."""
    cache: str | None = None
    """Folder for downloaded models, seen by all nodes; set: compute nodes are told to stay offline."""

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_names(cls, values: Any) -> Any:
        """YAML and the command line read account 123456 as a number."""
        names = {"partition", "gpu_partition", "account", "qos", "constraint", "gpu_type"}
        return {key: str(value) if key in names and isinstance(value, int) else value for key, value in values.items()}

    def partition_for(self, gpus: int) -> str | None:
        """Partition of a job with this many GPUs; None: the cluster's default."""
        return (self.gpu_partition or self.partition) if gpus else self.partition


def parse_site(settings: Mapping[str, Any], origin: str = str(SITE_FILE), given: Collection[str] = ()) -> Site:
    """The site that these settings describe; other keys of a Snakemake configuration are left aside.

    Args:
        settings: key and value.
        origin: the file that the settings are from, for the words of a fault.
        given: keys that are from the command line instead.

    Raises:
        ValueError: one sentence that names key and value, and where it stands.
    """
    known = {key: value for key, value in settings.items() if key in Site.model_fields and value is not None}
    if isinstance(known.get("nodes"), dict):
        known["nodes"] = {size: int(count) if str(count).isdigit() else count for size, count in known["nodes"].items()}
    try:
        return Site(**known)
    except ValidationError as error:
        fault = error.errors()[0]
        where = "--config" if fault["loc"][0] in given else origin
        raise ValueError(f"{where}: {'.'.join(str(part) for part in fault['loc'])}: {_words(fault)}") from error


def _words(fault: Any) -> str:
    """What pydantic found, as someone says it who does not know pydantic."""
    if fault["type"] == "string_pattern_mismatch":
        return f"this cannot be a name of Slurm's (letters, digits and few signs, no blanks), found {fault['input']!r}"
    if fault["type"] == "extra_forbidden":
        return f"unknown; there are: {', '.join(SIZES)}"
    if fault["loc"] == ("nodes",):
        return f"must be numbers by size of model, such as {{medium: 1, large: 2}}, found {fault['input']!r}"
    return f"{fault['msg']}, found {fault['input']!r}"


def read_settings(path: Path) -> dict[str, Any]:
    """Settings of a site file.

    Raises:
        ValueError: the file is missing, no YAML, empty, or has an unknown or repeated key.
    """
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); take the one that came with the project") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected lines of the form key: value (one at least, such as study: paper)")
    unknown = set(settings) - set(Site.model_fields) - {"study", "supersede"}
    if unknown:
        raise ValueError(f"{path}: unknown key {min(map(str, unknown))}; there are: study, {', '.join(Site.model_fields)}")
    return settings


def load_site(path: Path = SITE_FILE, **changes: Any) -> Site:
    """The site of a file, with changes from the command line.

    Raises:
        ValueError: the file cannot be used, or a value.
    """
    return parse_site({**read_settings(path), **changes}, str(path), changes)
