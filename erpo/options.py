"""Options of the command line that stand for Machine settings: how a job runs here, never what its numbers are."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any


def machine_of(args: argparse.Namespace) -> Any:
    """The Machine of the options given, of ERPO_MACHINE, and of defaults, in this order.

    Raises:
        ValueError: a setting of ERPO_MACHINE that does not exist or cannot be.
    """
    from erpo.config import Machine

    given = {key: getattr(args, key) for key in Machine.model_fields if getattr(args, key) is not None}
    return Machine(**{**_machine_of_environment(Machine.model_fields), **given})


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
