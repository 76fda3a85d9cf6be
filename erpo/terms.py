"""Per-token terms of the objective and how they are added up: pure functions of tensors, no batch, no settings.

Conventions of other frameworks (eps, clamps, denominators, ratio level) are parameters; the defaults are ours (docs/method.md).
All tensors of one token axis have shape [B, T] and are aligned with the predicted tokens, `input_ids[:, 1:]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "abs", "k2", "k3"]
Normalizer = Literal["token", "sequence", "constant"]
Bounds = tuple[float | None, float | None]

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before exp: beyond it every clip or clamp has long decided, and float32 exp overflows at 88."""
_LARGE = 1e4
"""Log-ratio of a token that one side calls impossible."""
K3_BOUND = 10.0
"""Largest k3 of one token; a clamped token has no gradient."""


def upcast(values: Tensor) -> Tensor:
    """At least float32; float64 stays float64."""
    return values if values.dtype == torch.float64 else values.float()


# --- log-probs --------------------------------------------------------------------------------------------------------


def label_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs of `labels` [...] under `logits` [..., V], in float32 at least."""
    logits = upcast(logits)
    chosen = logits.gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last axis, in float32 at least."""
    logprobs = torch.log_softmax(upcast(logits), dim=-1)
    probs = logprobs.exp()
    return -torch.where(probs > 0, probs * logprobs, 0.0).sum(-1)  # 0 log 0 = 0 where a logit is -inf


def token_logprobs(
    logits: Tensor, input_ids: Tensor, response_mask: Tensor, temperature: float, *, entropy_gradient: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of the predicted tokens.

    Query tokens at temperature 1, response tokens at the sampling temperature. Position t - 1 predicts token t.

    Args:
        logits: [B, S, V], any float dtype; computed in float32 at least.
        input_ids: [B, S].
        response_mask: bool [B, S-1].
        temperature: sampling temperature, above 0.
        entropy_gradient: False: entropy only to be logged, which spares three tensors of the size of the logits.

    Returns:
        log-probs [B, S-1] and entropy [B, S-1] of the same distributions.

    Raises:
        ValueError: temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"log-probs at temperature {temperature} are undefined; training needs a temperature above 0")
    scaled = upcast(logits[:, :-1])
    if temperature != 1:
        scaled = scaled / torch.where(response_mask, temperature, 1.0).to(scaled.dtype).unsqueeze(-1)
    logprobs = label_logprobs(scaled, input_ids[:, 1:])
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        return logprobs, entropy(scaled)


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Exact KL(policy || reference) over the vocabulary [..., V] -> [...]."""
    logprobs = torch.log_softmax(upcast(logits), dim=-1)
    ref_logprobs = torch.log_softmax(upcast(ref_logits), dim=-1)
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


# --- KL ---------------------------------------------------------------------------------------------------------------


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: Estimator = "k3",
    *,
    log_ratio_clamp: float | None = LOG_RATIO_BOUND,
    k3_clamp: float | None = K3_BOUND,
    gradient_of: Estimator | None = None,
) -> Tensor:
    """Per-token penalty on d = ref_logprobs - logprobs (Schulman's estimators; docs/method.md: k3).

    k1 = -d, abs = |d|, k2 = d^2 / 2, k3 = exp(d) - d - 1. Float32 at least, finite with finite gradients for every input
    that is not nan.

    Args:
        logprobs: policy [B, T].
        ref_logprobs: reference [B, T].
        estimator: which penalty.
        log_ratio_clamp: d is clamped to ± this (no gradient beyond); None: not clamped.
        k3_clamp: largest k3 (no gradient above); None: not clamped.
        gradient_of: keep the value but take the gradient of another estimator ("straight through").
    """
    d = log_ratio(ref_logprobs, logprobs)
    if log_ratio_clamp is not None:
        d = d.clamp(-log_ratio_clamp, log_ratio_clamp)
    value = _penalty(d, estimator, k3_clamp)
    if gradient_of is None:
        return value
    carrier = _penalty(d, gradient_of, k3_clamp)
    return carrier - carrier.detach() + value.detach()


def _penalty(d: Tensor, estimator: Estimator, k3_clamp: float | None) -> Tensor:
    match estimator:
        case "k1":
            return -d
        case "abs":
            return d.abs()
        case "k2":
            return 0.5 * d.square()
        case "k3":
            k3 = torch.expm1(d) - d  # expm1 keeps the digits that exp(d) - 1 loses near 0
            return k3 if k3_clamp is None else k3.clamp(max=k3_clamp)
    raise ValueError(f"unknown KL estimator {estimator!r}; use k1, abs, k2 or k3")


def kl_is_clamped(logprobs: Tensor, ref_logprobs: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Tokens [B, T] whose penalty or log-ratio sits at a default clamp and therefore has no gradient."""
    d = log_ratio(ref_logprobs, logprobs).detach()
    beyond = d.abs() > LOG_RATIO_BOUND
    return beyond | (torch.expm1(d) - d > K3_BOUND) if estimator == "k3" else beyond


def log_ratio(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """logprobs - other_logprobs in float32 at least; 0 where both say impossible (-inf)."""
    logprobs, other_logprobs = upcast(logprobs), upcast(other_logprobs)
    both_impossible = torch.isneginf(logprobs) & torch.isneginf(other_logprobs)
    return torch.where(both_impossible, torch.zeros_like(logprobs), logprobs - other_logprobs)


# --- policy term ------------------------------------------------------------------------------------------------------


def importance_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    mask: Tensor,
    level: Literal["token", "sequence"] = "token",
    *,
    reduction: Literal["mean", "sum"] = "mean",
    token_gradient: bool = False,
    bounds: Bounds = (-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
    row_eps: float = 0.0,
) -> Tensor:
    """pi / pi_old [B, T]; 1 off the mask. With old_logprobs None it is exactly 1 and carries the gradient of logprobs.

    Args:
        logprobs: policy [B, T].
        old_logprobs: the policy that sampled [B, T], or None when it is the same policy.
        mask: response tokens [B, T].
        level: a ratio per token, or one per row (GSPO, arXiv 2507.18071: exp of the mean log-ratio).
        reduction: how a row's log-ratios are joined: mean, or sum (the plain ratio of sequence probabilities).
        token_gradient: row ratio detached, gradient through each token's own log-prob (GSPO-token).
        bounds: the log-ratio is clamped to these before exp.
        row_eps: added to a row's token count.
    """
    logprobs = upcast(logprobs)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    difference = torch.where(mask, log_ratio(logprobs, old), 0.0)
    if level == "sequence":
        num_tokens = mask.sum(-1, keepdim=True).to(difference.dtype)
        joined = difference.clamp(-_LARGE, _LARGE).sum(-1, keepdim=True)  # two impossible tokens must not make nan
        if reduction == "mean":
            joined = joined / (num_tokens + row_eps if row_eps else num_tokens.clamp(min=1))
        if token_gradient:
            own = torch.where(mask, logprobs, 0.0)
            joined = own - own.detach() + joined.detach()
        difference = torch.where(mask, joined.expand_as(difference), 0.0)
    low, high = bounds
    return difference.exp() if low is None and high is None else difference.clamp(low, high).exp()


@dataclass(frozen=True)
class PolicyTerm:
    """Per-token policy losses [B, T] and what the clips did."""

    loss: Tensor
    """To be minimised; 0 off the mask."""
    ratio: Tensor
    """Detached."""
    clipped_low: Tensor
    """bool: the lower clip replaced the loss (negative advantage, ratio below 1 - clip_low)."""
    clipped_high: Tensor
    """bool: the upper clip replaced the loss (positive advantage, ratio above 1 + clip_high)."""
    clipped_dual: Tensor
    """bool: the bound for negative advantages replaced the loss."""


def policy_term(
    ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> PolicyTerm:
    """Clipped surrogate -min(r A, clip(r, 1 - low, 1 + high) A), at most dual_clip * |A| where A < 0.

    PPO (arXiv 1707.06347), asymmetric range of DAPO (2503.14476), dual clip of 1912.09729. clip bounds None: open side.
    """
    advantages = torch.where(mask, advantages.to(ratio.dtype), 0.0)
    plain = -ratio * advantages
    loss = plain
    if clip_low is not None or clip_high is not None:
        low = None if clip_low is None else 1.0 - clip_low
        high = None if clip_high is None else 1.0 + clip_high
        loss = torch.maximum(plain, -ratio.clamp(low, high) * advantages)
    replaced = loss > plain
    negative = advantages < 0
    is_dual = torch.zeros_like(negative)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_dual = negative & (loss > bound)
        loss = torch.where(negative, torch.minimum(loss, bound), loss)
    return PolicyTerm(loss, ratio.detach(), replaced & negative & ~is_dual, replaced & ~negative, is_dual)


def weighted_logprob_term(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, mask: Tensor, *, low: float | None = None, high: float | None = None
) -> Tensor:
    """-clip(r, low, high) A log pi with the clipped ratio as a constant (CISPO, arXiv 2506.13585): no token loses its gradient."""
    weight = ratio.detach()
    weight = weight if low is None and high is None else weight.clamp(low, high)
    logprobs = torch.where(mask, upcast(logprobs), 0.0)
    return -weight * torch.where(mask, advantages.to(weight.dtype), 0.0) * logprobs


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None = None) -> Tensor:
    """Per-token critic loss 0.5 max((V - R)^2, (clip(V, V_old ± clip) - R)^2), [B, T], not masked."""
    values = upcast(values)
    loss = (values - returns).square()
    if clip is not None:
        near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
        loss = torch.maximum(loss, (near - returns).square())
    return 0.5 * loss


# --- aggregation ------------------------------------------------------------------------------------------------------


def aggregate(
    values: Tensor,
    mask: Tensor,
    normalizer: Normalizer,
    *,
    num_rows: Tensor | float | None = None,
    num_tokens: Tensor | float | None = None,
    constant: float = 1.0,
    row_weights: Tensor | None = None,
    row_eps: float = 0.0,
) -> Tensor:
    """Add per-token values [B, T] up to a scalar, each divided by counts of the *whole* update, so that parts sum exactly.

    token: sum / num_tokens. sequence: each row's mean, summed / num_rows. constant: sum / (constant * num_rows) (Dr.GRPO,
    arXiv 2503.20783). Empty masks give 0 with a graph.

    Args:
        values: terms; off the mask they may be anything, even nan.
        mask: tokens that count, bool [B, T].
        normalizer: see above.
        num_rows: rows of the update; default: the rows of this mask that have a token.
        num_tokens: tokens of the update; default: those of this mask.
        constant: fixed length.
        row_weights: factor of each row [B], in the numerator only.
        row_eps: added to each row's token count (sequence).
    """
    values = torch.where(mask, values, torch.zeros_like(values))
    row_tokens = mask.sum(-1)
    sums = values.sum(-1)
    if row_weights is not None:
        sums = sums * row_weights
    if normalizer == "token":
        return sums.sum() / _at_least_one(row_tokens.sum() if num_tokens is None else num_tokens)
    rows = _at_least_one((row_tokens > 0).sum() if num_rows is None else num_rows)
    if normalizer == "sequence":
        per_row = row_tokens + row_eps if row_eps else row_tokens.clamp(min=1)
        return (sums / per_row).sum() / rows
    if normalizer == "constant":
        return sums.sum() / constant / rows
    raise ValueError(f"unknown normalizer {normalizer!r}; use token, sequence or constant")


def _at_least_one(count: Tensor | float) -> Tensor | float:
    """A count that can divide: an update without rows or tokens gives 0, not nan."""
    return count.clamp(min=1) if isinstance(count, Tensor) else (count if count > 0 else 1.0)
