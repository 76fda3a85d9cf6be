"""Numbers as people read them: percent, intervals, p-values, and sentences that claim no more than the numbers do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from erpo.config import temperature_label
from erpo.paper.summaries import ALPHA

LOGGED = {
    "kl/query": "Query-KL",
    "kl/response": "Policy-KL",
    "policy/entropy": "Entropy",
    "reward/mean": "Reward",
    "reward/accuracy": "Training accuracy",
    "eval/accuracy": "Evaluation in training",
    "response/length": "Response length",
    "query_weight/mean": "Mean query weight",
    "query_weight/ess": "Effective sample size",
}
"""What readers call the metrics of training logs."""
SHARES = ("reward/accuracy", "eval/accuracy", "query_weight/ess")
"""Those that are shares; shown in percent, as scores are."""

NOTHING = "-"
"""A value that does not exist."""


def percent(value: float, digits: int = 1) -> str:
    """A share as percent without the sign: 0.2741 -> 27.4."""
    return NOTHING if not math.isfinite(value) else f"{100 * value:.{digits}f}"


def points(value: float) -> str:
    """A difference of shares in percentage points, with its sign."""
    return NOTHING if not math.isfinite(value) else f"{100 * value:+.1f}"


def plain(value: float) -> str:
    """A number of any size in four digits."""
    return NOTHING if not math.isfinite(value) else f"{value:.4g}"


def p_text(p_value: float) -> str:
    """`p = 0.03`, or `p < 0.001`."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"


def span(values: Sequence[float]) -> str:
    """Temperatures as people name them: `0.1 to 1.5 (15 of them)`, `0.7`, `0.5 and 1`."""
    labels = [temperature_label(value) for value in values]
    if len(labels) <= 2:
        return " and ".join(labels)
    return f"{labels[0]} to {labels[-1]} ({len(labels)} of them)"


def ranges(values: Sequence[float], known: Sequence[float]) -> str:
    """Temperatures among the known ones, neighbours joined: `0.1 to 0.4 and 1.5`, or `all 15 temperatures`."""
    if len(values) == len(known) > 1:
        return f"all {len(known)} temperatures"
    places, groups = [known.index(value) for value in values], []
    for place in places:
        if groups and groups[-1][-1] == place - 1:
            groups[-1].append(place)
        else:
            groups.append([place])
    ends = [list(dict.fromkeys(temperature_label(known[place]) for place in (group[0], group[-1]))) for group in groups]
    return "T = " + listed([" to ".join(pair) for pair in ends])


def listed(names: Sequence[object]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    texts = [str(name) for name in names]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])) if texts else ""


def is_sure(row: Mapping[str, Any]) -> bool:
    """Whether a difference is significant after correction, complete, and of the same sign in every seed."""
    return bool(row["significant"]) and row["seeds_agreeing"] == row["seeds_compared"]


def comparison(row: Mapping[str, Any], where: str) -> str:
    """One sentence on a cell against the baseline.

    Args:
        row: a row of a table's frame with a difference.
        where: what the cell is a mean over, in words (`over the whole sweep`).
    """
    facts = (
        f"{points(row['difference'])} points [{points(row['difference_low'])}, {points(row['difference_high'])}], "
        f"{p_text(row['p_adjusted'])}, same sign in {int(row['seeds_agreeing'])} of {int(row['seeds_compared'])} seeds"
    )
    run, baseline = row["run"], row["baseline"]
    if not row["complete"]:
        return f"{where}: {run} against {baseline} rests on incomplete samples ({facts}): no verdict."
    if is_sure(row):
        return f"{where}: {run} is {'above' if row['difference'] > 0 else 'below'} {baseline} ({facts})."
    why = "the seeds disagree" if row["significant"] else f"p is not below {ALPHA:g}"
    return f"{where}: no difference shown between {run} and {baseline} ({facts}; {why})."


def metric_sentence(metric: str, samples: int) -> str:
    """Definition of a metric for the notes under a table."""
    fixed = {
        "avg@n": f"Avg@{samples}: mean correctness of {samples} samples a problem.",
        "pass@1": f"Pass@1 (estimator): expected correctness of one draw, from {samples} samples: by definition Avg@{samples}.",
        "pass@1:first": "Pass@1 (first sample): correctness of sample 0 alone.",
        "maj@n": f"Maj@{samples}: correctness of the most frequent of {samples} answers, ties to the one seen first.",
    }
    if metric in fixed:
        return fixed[metric]
    k = metric.removeprefix("pass@").replace("n", str(samples))
    return f"Pass@{k}: unbiased estimate of at least one correct answer in {k} draws; undefined for problems with fewer samples."
