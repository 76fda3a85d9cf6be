"""Advantages: baseline, scale, discounting and whitening as separate functions; `compute_advantages` joins them by settings.

Rewards are flat [B] with a group index; nan marks a response the grader could not judge: it stays out of every statistic, gets
advantage 0 and is counted. Token tensors are [B, T], aligned with the predicted tokens; masks are bool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from erpo.config import RunConfig

Baseline = Literal["none", "group_mean", "leave_one_out", "batch_mean"]
Scale = Literal["none", "group", "batch"]
Single = Literal["zero", "raw", "refuse"]

WHITEN_EPS = 1e-8
"""Added to the variance, inside the root."""


@dataclass(frozen=True)
class Advantages:
    """What the advantages of a step are, and what was odd."""

    advantages: Tensor
    """float32 [B, T]; 0 off the response."""
    returns: Tensor | None
    """float32 [B, T]: the critic's target (GAE only)."""
    is_constant: Tensor
    """bool [B]: the row's group has equal rewards (as far as they are known), so it carries no signal."""
    num_missing: int
    """Rewards that were nan."""


_BASELINES: dict[str, tuple[Baseline, Scale]] = {
    "group_normalized": ("group_mean", "group"),
    "group_mean": ("group_mean", "none"),
    "leave_one_out": ("leave_one_out", "none"),
    "batch_mean": ("batch_mean", "none"),
}


def compute_advantages(
    rewards: Tensor,
    group: Tensor,
    response_mask: Tensor,
    run: RunConfig,
    *,
    values: Tensor | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
) -> Advantages:
    """Advantages of all responses of a step, by the run's settings.

    Args:
        rewards: one per response [B]; nan where ungraded.
        group: query of each response [B].
        response_mask: [B, T].
        run: settings.
        values: of the critic [B, T] (advantage: gae).
        old_logprobs: of the sampling policy [B, T] (kl_form: future).
        ref_logprobs: of the reference [B, T] (kl_form: future).

    Raises:
        ValueError: a tensor that the settings need is missing, or a group of one with a group baseline.
    """
    rewards = rewards.double()
    returns = None
    if run.advantage == "gae":
        if values is None:
            raise ValueError("advantage: gae needs the critic's values")
        per_token = place_on_last_token(rewards.nan_to_num(nan=0.0), response_mask)
        advantages, returns = generalized_advantages(per_token, values.double(), response_mask, run.gamma, run.gae_lambda)
        missing = rewards.isnan().unsqueeze(-1)
        advantages, returns = torch.where(missing, 0.0, advantages), torch.where(missing, values.double(), returns)
    else:
        baseline, scale = _BASELINES[run.advantage]
        per_response = outcome_advantages(rewards, group, baseline, scale, eps=run.advantage_eps)
        advantages = torch.where(response_mask, per_response.unsqueeze(-1), 0.0)
    graded = response_mask & ~rewards.isnan().unsqueeze(-1)
    if run.whiten_advantages:
        advantages = torch.where(graded, whiten(advantages, graded), 0.0)
    if run.kl_form == "future":
        if old_logprobs is None or ref_logprobs is None:
            raise ValueError("kl_form: future needs the log-probs of the sampling policy and of the reference on the responses")
        advantages = advantages - run.kl_coef * kl_to_go(old_logprobs.double(), ref_logprobs.double(), response_mask)
    return Advantages(
        advantages=torch.where(response_mask, advantages, 0.0).float(),
        returns=None if returns is None else returns.float(),
        is_constant=constant_groups(rewards, group),
        num_missing=int(rewards.isnan().sum()),
    )


# --- one number per response ------------------------------------------------------------------------------------------


def outcome_advantages(
    rewards: Tensor,
    group: Tensor,
    baseline: Baseline,
    scale: Scale = "none",
    *,
    eps: float = 1e-6,
    single: Single = "refuse",
) -> Tensor:
    """(reward - baseline) / (standard deviation + eps) [B]; 0 for missing rewards, exactly 0 for constant groups.

    Standard deviations are sample ones (ddof 1) of the raw rewards. GRPO (arXiv 2402.03300): group_mean, group.
    Dr.GRPO (2503.20783): group_mean, none. RLOO (2402.14740): leave_one_out, none.

    Args:
        rewards: [B], nan where missing.
        group: [B] labels, in any order.
        baseline: what is subtracted.
        scale: what divides.
        eps: added to the standard deviation, outside the root.
        single: a response alone in its group gets 0, its raw reward (statistics 0 and 1), or is refused.

    Raises:
        ValueError: single "refuse" and a group of one, with a group baseline or scale.
    """
    known = ~rewards.isnan()
    filled, labels = torch.where(known, rewards, 0.0), _dense(group)
    count, mean = _group_mean(filled, labels, known)
    is_grouped = baseline in ("group_mean", "leave_one_out") or scale == "group"
    alone = count < 2
    if is_grouped and single == "refuse" and bool((torch.bincount(labels)[labels] < 2).any()):
        raise ValueError("a group of one response has no siblings to compare with; use advantage: batch_mean or more responses")
    match baseline:
        case "none":
            centred = filled
        case "batch_mean":
            centred = filled - (filled.sum() / known.sum().clamp(min=1))
        case "group_mean":
            centred = filled - mean
        case "leave_one_out":
            centred = (filled - mean) * count / (count - 1).clamp(min=1)
        case _:
            raise ValueError(f"unknown baseline {baseline!r}")
    advantages = centred / (_spread(filled, labels, known, scale) + eps) if scale != "none" else centred
    if is_grouped:
        raw = filled / (1 + eps) if scale == "group" else filled
        advantages = torch.where(alone, raw if single == "raw" else torch.zeros_like(raw), advantages)
        flat = constant_groups(rewards, group) & ~alone
        advantages = torch.where(flat, 0.0, advantages)
    return torch.where(known, advantages, 0.0)


def _spread(filled: Tensor, labels: Tensor, known: Tensor, scale: Scale) -> Tensor:
    """Sample standard deviation of each row's group, or of the batch."""
    if scale == "batch":
        labels = torch.zeros_like(labels)
    count, mean = _group_mean(filled, labels, known)
    squares = torch.where(known, (filled - mean).square(), 0.0)
    sums = torch.zeros_like(filled).index_add(0, labels, squares)[labels]
    return (sums / (count - 1).clamp(min=1)).sqrt()


def _group_mean(filled: Tensor, labels: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Known members and their mean, of each row's group."""
    zeros = torch.zeros_like(filled)
    count = zeros.index_add(0, labels, known.to(filled.dtype))[labels]
    total = zeros.index_add(0, labels, filled)[labels]
    return count, total / count.clamp(min=1)


def _dense(group: Tensor) -> Tensor:
    return torch.unique(group, return_inverse=True)[1]


def constant_groups(rewards: Tensor, group: Tensor) -> Tensor:
    """Rows [B] whose group has no two unequal known rewards: largest and smallest are compared, not a rounded deviation with 0."""
    labels, known = _dense(group), ~rewards.isnan()
    size = len(rewards)
    infinity = float("inf")
    largest = rewards.new_full((size,), -infinity).scatter_reduce(0, labels, torch.where(known, rewards, -infinity), "amax")
    smallest = rewards.new_full((size,), infinity).scatter_reduce(0, labels, torch.where(known, rewards, infinity), "amin")
    return (largest <= smallest)[labels]


def keep_groups(
    rewards: Tensor,
    group: Tensor,
    *,
    drop_constant: bool = True,
    mean_above: float | None = None,
    mean_below: float | None = None,
    std_above: float | None = None,
) -> Tensor:
    """Rows [B] whose group is worth training on; all bounds are strict (dynamic sampling of DAPO: drop_constant).

    Args:
        rewards: [B], nan where missing.
        group: [B].
        drop_constant: drop groups of several responses whose known rewards are all equal.
        mean_above: keep groups whose mean is above this.
        mean_below: keep groups whose mean is below this.
        std_above: keep groups whose sample standard deviation is above this.
    """
    known, labels = ~rewards.isnan(), _dense(group)
    filled = torch.where(known, rewards, 0.0)
    count, mean = _group_mean(filled, labels, known)
    keep = torch.ones_like(known)
    if drop_constant:
        keep &= ~constant_groups(rewards, group) | (count == 1)
    if mean_above is not None:
        keep &= mean > mean_above
    if mean_below is not None:
        keep &= mean < mean_below
    if std_above is not None:
        keep &= _spread(filled, labels, known, "group") > std_above
    return keep


def best_of_group_advantages(rewards: Tensor, group: Tensor, scale: Scale = "group", *, eps: float = 1e-6) -> Tensor:
    """(best - second best) / (group std + eps) for each group's best response, 0 for the others (pass@k training) [B]."""
    labels, known = _dense(group), torch.ones_like(rewards, dtype=torch.bool)
    found = torch.zeros_like(rewards)
    for label in range(int(labels.max()) + 1):
        members = torch.nonzero(labels == label).flatten()
        top = rewards[members].topk(2)
        found[members[top.indices[0]]] = top.values[0] - top.values[1]
    return found / (_spread(rewards, labels, known, scale) + eps) if scale != "none" else found


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int, penalty: float = 1.0, *, floor: bool = True) -> Tensor:
    """DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13): 0 up to max - buffer, then linear to -penalty at max.

    Args:
        lengths: response tokens, any shape.
        max_tokens: length at which the penalty is full.
        buffer_tokens: tokens before it in which it grows.
        penalty: its size.
        floor: it stays at -penalty beyond max_tokens; otherwise it keeps growing.
    """
    over = (torch.as_tensor(lengths).double() - (max_tokens - buffer_tokens)) / buffer_tokens
    return -penalty * over.clamp(0.0, 1.0 if floor else None)


# --- one number per token ---------------------------------------------------------------------------------------------


def place_on_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards [B] on the last masked token of their rows, 0 elsewhere [B, T]; rows without tokens stay 0."""
    positions = torch.arange(1, mask.shape[-1] + 1, device=mask.device) * mask
    last = positions == positions.amax(-1, keepdim=True)
    return torch.where(last & mask, rewards.unsqueeze(-1), 0.0)


def rewards_to_go(
    token_rewards: Tensor, mask: Tensor, gamma: float = 1.0, *, at_hole: Literal["carry", "reset", "discount"] = "carry"
) -> Tensor:
    """Discounted sum of rewards from each token on [B, T].

    Args:
        token_rewards: [B, T].
        mask: tokens that count.
        gamma: discount per token.
        at_hole: at a masked token the running sum is carried over undiscounted, reset to 0, or treated like any other token.
    """
    running = torch.zeros_like(token_rewards[:, 0])
    found = torch.zeros_like(token_rewards)
    for t in reversed(range(token_rewards.shape[1])):
        stepped = token_rewards[:, t] + gamma * running
        here = mask[:, t]
        kept = {"carry": running, "reset": torch.zeros_like(running), "discount": stepped}[at_hole]
        found[:, t] = stepped
        running = torch.where(here, stepped, kept)
    return found


def generalized_advantages(
    token_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0, *, zero_off_mask: bool = True
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv 1506.02438) over the tokens of the mask; others are skipped, whatever their values. Not whitened.

    The episode ends at the last token of the mask: the value after it is 0.

    Args:
        token_rewards: [B, T].
        values: of the critic [B, T].
        mask: [B, T].
        gamma: discount.
        lam: lambda.
        zero_off_mask: results are 0 off the mask; otherwise the advantage carried over is left there.

    Returns:
        advantages and returns (advantages + values), both [B, T].
    """
    next_value = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(values[:, 0])
    found = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(here, delta + gamma * lam * running, running)
        next_value = torch.where(here, values[:, t], next_value)
        found[:, t] = running
    returns = found + values
    if not zero_off_mask:
        return found, returns
    return torch.where(mask, found, 0.0), torch.where(mask, returns, 0.0)


def whiten(
    values: Tensor, mask: Tensor, *, eps: float = WHITEN_EPS, ddof: int = 1, count_eps: float = 0.0, keep_mean: bool = False
) -> Tensor:
    """(values - mean) / sqrt(variance + eps) with statistics over the mask; given at every position [B, T].

    One token or none has no sample variance: the biased one (0) is used, so the result is finite.

    Args:
        values: [B, T]; nan off the mask is harmless.
        mask: tokens of the statistics.
        eps: added to the variance.
        ddof: 1: sample variance.
        count_eps: added to the counts of the means.
        keep_mean: scale only; the mean is added back.
    """
    inside = torch.where(mask, values, 0.0)
    count = mask.sum().to(values.dtype)
    mean = inside.sum() / (count + count_eps).clamp(min=1)
    variance = torch.where(mask, (values - mean).square(), 0.0).sum() / (count + count_eps).clamp(min=1)
    if ddof and count > ddof:
        variance = variance * (count / (count - ddof))
    whitened = (values - mean) * torch.rsqrt(variance + eps)
    return whitened + mean if keep_mean else whitened


def kl_to_go(old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sum of log pi_old - log pi_ref from each token on, over the mask [B, T] (Future-KL, FRPO, arXiv 2601.10201), detached."""
    terms = torch.where(mask, (old_logprobs - ref_logprobs).detach(), 0.0)
    return torch.where(mask, terms.flip(-1).cumsum(-1).flip(-1), 0.0)
