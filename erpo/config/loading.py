"""The one loader of study files: safe YAML, inheritance, and every fault as one readable sentence."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from erpo.config.run import RunConfig
from erpo.config.study import Evaluation, Figure, Study, Table


class StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice (plain YAML keeps the last one in silence)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node.

        Raises:
            ValueError: a key is given twice.
        """
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"line {node.start_mark.line + 1}: the key {key!r} is given twice")
        return super().construct_mapping(node, deep=deep)


def study_path(name: str, root: Path = Path(".")) -> Path:
    """Path of the study `name` (config/NAME.yaml) or of a study file given by path.

    Raises:
        ValueError: no such study; the sentence lists those there are.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else root / "config" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(entry.stem for entry in (root / "config").glob("*.yaml"))
        raise ValueError(f"study {name!r} not found ({path}); there are: {', '.join(known) or 'none'}")
    return path


def load_study(name: str, root: Path = Path(".")) -> Study:
    """Read, resolve (`defaults`, `like`) and check a study.

    Raises:
        ValueError: one readable sentence per fault: where, what, and what to do.
    """
    path = study_path(name, root)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: a study is a mapping with models, runs, tables; found {type(raw).__name__}")
    raw = dict(raw)
    defaults = raw.pop("defaults", {}) or {}
    try:
        raw["runs"] = resolve_runs(raw.get("runs") or {}, defaults)
        return Study(name=path.stem, **raw)
    except ValidationError as error:
        sentences = dict.fromkeys(_at_defaults(sentence, raw["runs"], defaults) for sentence in fault_sentences(error))
        raise ValueError("; ".join(f"{path}: {sentence}" for sentence in sentences)) from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def resolve_runs(runs: dict[str, Any], defaults: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of every run after inheritance: own keys, then those of `like` (recursively), then `defaults`.

    Raises:
        ValueError: an unknown `like`, a circle, or an entry that is not a mapping.
    """

    def settings(name: str, trail: tuple[str, ...]) -> dict[str, Any]:
        if name in trail:
            raise ValueError(f"runs.{trail[0]}: `like` goes round in a circle ({' -> '.join((*trail, name))})")
        own = runs[name] if runs[name] is not None else {}
        if not isinstance(own, dict):
            raise ValueError(f"runs.{name}: expected settings such as {{kl_on: query}}, found {own!r}")
        parent = own.get("like")
        if parent is not None and parent not in runs:
            raise ValueError(f"runs.{name}.like: {parent!r} is not a run; there are: {', '.join(runs)}")
        inherited = settings(parent, (*trail, name)) if parent is not None else defaults
        return {**inherited, **{key: value for key, value in own.items() if key != "like"}}

    return {name: settings(name, ()) for name in runs}


def _at_defaults(sentence: str, runs: dict[str, dict[str, Any]], defaults: dict[str, Any]) -> str:
    """A fault that a run has from `defaults`, told of `defaults`: once, and where it has to be mended."""
    for run, settings in runs.items():
        for key in defaults:
            for start in (f"runs.{run}.{key}: ", f"runs.{run}: {key}: "):
                if sentence.startswith(start) and settings.get(key) is defaults[key]:
                    return f"defaults.{key}: {sentence.removeprefix(start)}"
    return sentence


_KINDS = ("synthetic", "file", "pretrained")
"""What pydantic puts behind the name of a model or of data: which kind it checked against."""


def fault_sentences(error: ValidationError) -> list[str]:
    """What pydantic found, a sentence each: the key, what is allowed, what is there."""
    sentences = []
    for fault in error.errors():
        place, message = fault["loc"], fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "missing":
            message, place = f"the key {str(place[-1])!r} is missing", place[:-1]
        where = ".".join(str(part) for index, part in enumerate(place) if index != 2 or part not in _KINDS)
        if fault["type"] == "extra_forbidden":
            message = f"unknown key {str(place[-1])!r}{_did_you_mean(str(place[-1]))}"
        elif fault["type"] not in ("missing", "value_error") and not (where and message.startswith(where)):
            message = f"{message} (found {fault['input']!r})"
        sentences.append(f"{where}: {message}" if where and not message.startswith(where) else message)
    return sentences


def _did_you_mean(key: str) -> str:
    known = [*RunConfig.model_fields, *Study.model_fields, *Table.model_fields, *Figure.model_fields, *Evaluation.model_fields]
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; config/README.md lists all keys"


_NOT_TRAINING = {"steps", "seeds", "model", "train_set"}
