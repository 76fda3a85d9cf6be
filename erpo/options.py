"""What the command line says: settings in JSON (`--spec`), and options that stand for Machine settings. Checked before any work."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

_SHOWN = 60
"""Characters of a wrong text that its sentence repeats."""


def json_option(text: str, option: str, *keys: str) -> dict[str, Any]:
    """A JSON object given as text.

    Args:
        text: what was given.
        option: how the command line calls it.
        keys: what it must have.

    Raises:
        ValueError: not JSON, not an object, or without one of `keys`.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f'{option} must be JSON text such as {{"key": 1}}, found {text[:_SHOWN]!r} ({error})') from error
    if not isinstance(found, dict):
        raise ValueError(f'{option} must be a JSON object such as {{"key": 1}}, found {text[:_SHOWN]!r}')
    missing = [key for key in keys if key not in found]
    if missing:
        raise ValueError(f"{option} lacks {', '.join(missing)}; it has {', '.join(found) or 'nothing'}")
    return found


def settings_of(kind: Any, value: Any, where: str) -> Any:
    """`value` as settings of a kind (a model of erpo.config, or a union of several).

    Raises:
        ValueError: one line that names place, key, what is allowed and what was found.
    """
    from pydantic import TypeAdapter, ValidationError

    from erpo.config import fault_sentences

    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError("; ".join(f"{where}: {sentence}" for sentence in fault_sentences(error))) from error


def machine_of(args: argparse.Namespace) -> Any:
    """The Machine of the options given, of ERPO_MACHINE, and of defaults, in this order.

    Raises:
        ValueError: a setting that does not exist or cannot be.
    """
    from erpo.config import Machine

    given = {key: getattr(args, key) for key in Machine.model_fields if getattr(args, key) is not None}
    return settings_of(Machine, {**_machine_of_environment(Machine.model_fields), **given}, "machine settings")


def _machine_of_environment(known: Iterable[str]) -> dict[str, Any]:
    """Settings of ERPO_MACHINE ("trackers=tensorboard collapse_watch=stop"), for jobs whose command a workflow writes."""
    found = {}
    for part in os.environ.get("ERPO_MACHINE", "").split():
        key, sign, value = part.partition("=")
        if not sign or key not in known:
            raise ValueError(f"ERPO_MACHINE: {part!r} is not KEY=VALUE with one of {', '.join(known)}")
        try:
            found[key] = MACHINE_OPTIONS[key](value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"ERPO_MACHINE: {part!r}: {error}") from error
    return found


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """One option per Machine setting, values checked by the model itself."""
    for key, kind in MACHINE_OPTIONS.items():
        parser.add_argument(f"--{key.replace('_', '-')}", type=kind, default=None)


def flag(text: str) -> bool:
    """true or false, as a command line says it."""
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, found {text!r}")
    return text.lower() == "true"


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


MACHINE_OPTIONS: dict[str, Callable[[str], Any]] = {
    "zero_stage": int,
    "micro_batch_tokens": int,
    "offload_optimizer": flag,
    "offload_parameters": flag,
    "share_queries": str,
    "activation_checkpointing": flag,
    "generator": str,
    "tensor_parallel": int,
    "rollout_gpus": int,
    "engine_memory": float,
    "rollout_rows": int,
    "save_every": int,
    "keep_states": int,
    "keep_milestone_states": flag,
    "keep_best_state": flag,
    "time_limit_minutes": float,
    "samples_every": int,
    "max_logprob_gap": float,
    "max_grader_error_share": float,
    "max_skipped_updates": int,
    "collapse_watch": str,
    "collapse_window": int,
    "min_entropy_share": float,
    "min_reward_share": float,
    "max_length_factor": float,
    "max_query_kl": float,
    "trackers": _names,
    "deterministic": flag,
    "grading_workers": int,
}
