"""Case files: reading, the registry of adapters, comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Outputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One file: inputs of a reference function and what it returned."""

    name: str
    inputs: Inputs
    expected: Outputs
    expected_f64: Outputs | None
    tol: float

    @property
    def operation(self) -> str:
        """`family.framework.op`: the name without its variant."""
        return self.name.rsplit(".", 1)[0]


def read_case(path: Path) -> Case:
    content = json.loads(path.read_text(encoding="utf-8"))
    return Case(content["name"], content["inputs"], content["expected"], content.get("expected_f64"), content["tol"])


class FaultError(AssertionError):
    """Ours reproduces a fault that it must avoid."""


ADAPTERS: dict[str, Callable[[Inputs], Outputs]] = {}
"""operation -> inputs -> outputs under the names of the file."""
FAULTS: dict[str, Callable[[Inputs, Outputs], str]] = {}
"""operation -> (inputs, what the faulty reference returned) -> what was checked; raises FaultError."""
IN_REWARD = "KL inside the reward with an adaptive coefficient: here a KL is a loss term, or Future-KL in the advantage"
UNSUPPORTED: dict[str, str] = {
    "kl.easyr1.in_reward": IN_REWARD,
    "kl.verl.in_reward": IN_REWARD,
    "kl.roll.in_reward": IN_REWARD,
    "erpo.roll.sample_weights": "difficulty and length weights of responses, off in both released configurations of the paper",
    "eval.verl.bootstrap_best_maj": "best@k by resampling with replacement from the global generator; pass@k here is unbiased",
}


def adapter(*operations: str) -> Callable[[Callable[[Inputs], Outputs]], Callable[[Inputs], Outputs]]:
    def register(function: Callable[[Inputs], Outputs]) -> Callable[[Inputs], Outputs]:
        ADAPTERS.update(dict.fromkeys(operations, function))
        return function

    return register


def fault(operation: str) -> Callable[[Callable[[Inputs, Outputs], str]], Callable[[Inputs, Outputs], str]]:
    def register(function: Callable[[Inputs, Outputs], str]) -> Callable[[Inputs, Outputs], str]:
        FAULTS[operation] = function
        return function

    return register


# --- tensors ----------------------------------------------------------------------------------------------------------


def floats(values: Any) -> Tensor:
    """float64; the text "nan" is a missing number."""
    return torch.tensor(_numbers(values), dtype=torch.float64)


def _numbers(values: Any) -> Any:
    return [_numbers(v) for v in values] if isinstance(values, list) else math.nan if values in ("nan", None) else float(values)


def flat(values: Any) -> list[float]:
    """All numbers of ragged lists."""
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [values]


def bools(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64) > 0.5


def labels(values: list[Any]) -> Tensor:
    """Any labels as integers, by order of first sight."""
    seen: dict[Any, int] = {}
    return torch.tensor([seen.setdefault(value, len(seen)) for value in values])


def runs_of(size: int, count: int) -> Tensor:
    """Labels of consecutive groups."""
    return torch.arange(count) // size


# --- comparison -------------------------------------------------------------------------------------------------------


def worst_error(got: Any, want: Any, where: str = "") -> tuple[float, str]:
    """Largest |got - want| / (1 + |want|) and where it is; inf for another shape, a missing name or unequal text."""
    if isinstance(want, dict):
        if not isinstance(got, dict):
            return math.inf, where
        parts = [
            worst_error(got[k], v, f"{where}/{k}") if k in got else (math.inf, f"{where}/{k} missing") for k, v in want.items()
        ]
        return max(parts, default=(0.0, where))
    if isinstance(got, Tensor):
        got = got.detach().tolist()
    if isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            return math.inf, f"{where} shape"
        return max((worst_error(g, w, where) for g, w in zip(got, want, strict=True)), default=(0.0, where))
    if isinstance(want, str) and want != "nan":
        return (0.0 if got == want else math.inf), where
    return _scalar_error(float(got), math.nan if want == "nan" else float(want)), where


def _scalar_error(got: float, want: float) -> float:
    if math.isnan(want) or math.isnan(got):
        return 0.0 if math.isnan(want) and math.isnan(got) else math.inf
    if math.isinf(want) or math.isinf(got):
        return 0.0 if want == got else math.inf
    return abs(got - want) / (1 + abs(want))
