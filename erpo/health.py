"""Is a run still worth its machine? A watch over entropy, reward, length and Query-KL, and steps that teach nothing.

A collapse shows in means over a window of steps, never in one step. The thresholds are settings of the machine: they decide
whether a run goes on, not its numbers (docs/training.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from erpo.config import Machine, RunConfig
from erpo.rollouts import Experience

NO_SIGNAL = "group/no_signal"
"""Metric: 1 where the rewards of a step carry no policy gradient."""

_WATCHED = ("policy/entropy", "reward/mean", "response/length", "kl/query", NO_SIGNAL)
_NOISE = 3.0
"""A fall of the reward counts from so many standard errors on."""


class UnhealthyRunError(RuntimeError):
    """The run cannot go on; the message names step and metric. The last healthy state stands."""


def lack_of_signal(experience: Experience, run: RunConfig) -> str | None:
    """Why the step's rewards carry no policy gradient; None where they do."""
    scored = experience.rewards[~np.isnan(experience.rewards)]
    if not scored.size:
        return "the grader could judge no response"
    if scored.min() == scored.max():
        return f"every response earned {scored[0]:g}"
    if experience.is_constant.all() and run.advantage in ("group_normalized", "group_mean", "leave_one_out"):
        return "within each group all responses earned the same"
    return None


class Watch:
    """Compares the last steps of a run with its first ones and its best ones.

    Args:
        machine: thresholds, and the window in steps.
        past: (step, metrics) of the steps before a resumption, in order.
    """

    def __init__(self, machine: Machine, past: Iterable[tuple[int, Mapping[str, float]]] = ()) -> None:
        self.machine = machine
        self._rows: dict[str, list[float]] = {key: [] for key in _WATCHED}
        self._best_reward = -np.inf
        self._told: dict[str, int] = {}
        for _, row in past:
            self._remember(row)

    def look(self, step: int, row: Mapping[str, float]) -> list[str]:
        """Sentences about what is wrong after this step; each is repeated once a window at most."""
        if self.machine.collapse_watch == "off":
            return []
        self._remember(row)
        found = []
        for metric, sentence in self._alarms():
            if step >= self._told.get(metric, step):
                self._told[metric] = step + self.machine.collapse_window
                found.append(f"step {step}: {metric} {sentence}")
        return found

    def _remember(self, row: Mapping[str, float]) -> None:
        for key, values in self._rows.items():
            values.append(row.get(key, np.nan))
        recent = self._recent("reward/mean")
        if recent is not None:
            self._best_reward = max(self._best_reward, float(recent.mean()))

    def _recent(self, key: str) -> np.ndarray | None:
        """The last window of a metric; None before there is one, or where it was not measured throughout."""
        values = np.array(self._rows[key][-self.machine.collapse_window :])
        return values if len(values) == self.machine.collapse_window and np.isfinite(values).all() else None

    def _first(self, key: str) -> float:
        return float(np.nanmean(self._rows[key][: self.machine.collapse_window]))

    def _alarms(self) -> list[tuple[str, str]]:
        """(metric, what is wrong with it) for all that is wrong now."""
        machine, window = self.machine, self.machine.collapse_window
        over = f"over the last {window} steps"
        recent = {key: values for key in _WATCHED if (values := self._recent(key)) is not None}
        means = {key: float(values.mean()) for key, values in recent.items()}
        first = {key: self._first(key) for key in ("policy/entropy", "response/length") if key in means}
        found = []

        def alarm(metric: str, condition: bool, text: str) -> None:
            if condition:
                found.append((metric, text))

        entropy, start = means.get("policy/entropy", np.inf), first.get("policy/entropy", 0.0)
        below = f"is {entropy:.3g} {over}, below {machine.min_entropy_share:g} of its start ({start:.3g}): "
        alarm("policy/entropy", entropy < machine.min_entropy_share * start, below + "responses become all alike")
        length, start = means.get("response/length", 0.0), first.get("response/length", np.inf)
        for share, is_off in ((length / start, length > 0), (start / max(length, 1e-9), length > 0)):
            text = f"is {length:.0f} {over} and was {start:.0f}: more than a factor of {machine.max_length_factor:g}"
            alarm("response/length", is_off and share > machine.max_length_factor, text)
        reward = means.get("reward/mean", self._best_reward)
        noise = _NOISE * float(recent["reward/mean"].std()) / window**0.5 if "reward/mean" in recent else np.inf
        fell = self._best_reward > 0 and reward < machine.min_reward_share * self._best_reward
        text = f"is {reward:.3g} {over}, below {machine.min_reward_share:g} of its best ({self._best_reward:.3g})"
        alarm("reward/mean", fell and self._best_reward - reward > noise, text)
        drift = means.get("kl/query", 0.0)
        alarm("kl/query", drift > machine.max_query_kl, f"is {drift:.3g} {over}, above {machine.max_query_kl:g} per token")
        alarm(NO_SIGNAL, means.get(NO_SIGNAL) == 1.0, f"is 1 {over}: no reward differs, so nothing is learnt from rewards")
        return found
