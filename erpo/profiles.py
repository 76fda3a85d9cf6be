"""What a user chose: a Snakemake profile with its site file, and words of the form key=value. Read as Snakemake reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from erpo.config import Site, parse_site, read_settings

_DEFAULT_STUDY = "quickstart"
_OTHER_KEYS = ("study", "supersede", "archive")


@dataclass(frozen=True)
class Choice:
    """A study and the cluster it is meant for."""

    study: str
    site: Site
    on_slurm: bool


def read_choice(profile: str | None, words: Sequence[str] = ()) -> Choice:
    """The study and the site that a profile and the words of --config mean. No profile: this machine, quickstart.

    Raises:
        ValueError: no such profile, a fault in it or in its site file, an unknown key, a value that cannot be.
    """
    given = read_words(words)
    files, on_slurm = _read_profile(profile) if profile else ([], False)
    settings: dict[str, Any] = {}
    for path in files:
        settings |= read_settings(path)
    site = parse_site({**settings, **given}, ", ".join(map(str, files)), given)
    study = given.get("study", settings.get("study"))
    return Choice(_DEFAULT_STUDY if study is None else str(study), site, on_slurm)


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Keys and values of --config.

    Raises:
        ValueError: not of the form key=value, or a key that no study knows.
    """
    for word in words:
        key = word.partition("=")[0]
        if "=" not in word:
            raise ValueError(f"--config {word}: expected key=value")
        if key not in (*_OTHER_KEYS, *Site.model_fields):
            raise ValueError(f"--config {key}=...: unknown; there are {', '.join((*_OTHER_KEYS, *Site.model_fields))}")
    return _snakemake().parse_config(list(words))


def _read_profile(name: str) -> tuple[list[Path], bool]:
    """Site files of a profile, and whether it runs jobs through Slurm."""
    place = _snakemake().get_profile_dir(name)
    if place is None:
        raise ValueError(f"profile {name!r} not found here or in ~/.config/snakemake; there are slurm, workstation, none")
    folder, file = place
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{file}: expected lines of the form key: value")
    named = settings.get("configfile") or []
    files = []
    for text in [named] if isinstance(named, str) else named:
        beside, here = folder / text, Path(text)
        files.append(here if here.exists() and not beside.exists() else beside)
    return files, settings.get("executor") == "slurm"


def _snakemake() -> Any:
    """Snakemake's command line, whose own code finds profiles and reads words. It takes a second, so it is imported late."""
    try:
        from snakemake import cli
    except ImportError as error:
        raise ValueError(f"{error}; activate the environment of this project, or pip install -e . in it") from error
    return cli
