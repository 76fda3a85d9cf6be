"""The objective: loss = mean over responses of w(q) * clipped surrogate + alpha * KL penalty. Pure tensors in, tensors out.

A `RolloutBatch` holds the rows of one optimizer update, `GlobalCounts` what they are divided by. Losses of parts of the update
(micro-batches, ranks) are shares: they add up to the loss of the whole, whatever the split. The per-token terms are in `terms`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from erpo.config import RunConfig
from erpo.terms import (
    aggregate,
    importance_ratio,
    kl_is_clamped,
    kl_penalty,
    log_ratio,
    policy_term,
    token_logprobs,
    upcast,
    value_loss,
)
from erpo.weights import query_weights, weight_statistics

__all__ = [
    "MAX_METRICS",
    "GlobalCounts",
    "LossOutput",
    "RolloutBatch",
    "global_counts",
    "kl_penalty",
    "kl_term",
    "policy_term",
    "query_nll",
    "query_weights",
    "reduce_metrics",
    "token_logprobs",
    "total_loss",
    "value_loss",
    "weight_statistics",
]

MAX_METRICS = frozenset({"ratio/max", "rollout/logprob_gap_max"})
"""Metrics that are joined over micro-batches and ranks by their maximum; all others are sums."""

_PER_ROW = ("lengths", "query_lengths", "group", "query_weights")


@dataclass(frozen=True)
class RolloutBatch:
    """B rows `query tokens ++ response tokens`, right-padded to S; token tensors are [B, S-1], aligned with input_ids[:, 1:]."""

    input_ids: Tensor
    """int64 [B, S]."""
    lengths: Tensor
    """int64 [B]: query and response tokens of the row."""
    query_lengths: Tensor
    """int64 [B]: query tokens of the row (one more than its query terms)."""
    query_mask: Tensor
    """bool [B, S-1]: predicted tokens of the query; the first query token is never predicted."""
    response_mask: Tensor
    """bool [B, S-1]: predicted tokens of the response."""
    group: Tensor
    """int64 [B]: index of the row's query; siblings share it. Need not be dense."""
    advantages: Tensor
    """float [B, S-1]; 0 off the response."""
    query_weights: Tensor
    """float [B]: w(q), multiplies the policy term."""
    old_logprobs: Tensor | None = None
    """float [B, S-1] of the policy before the step's first update; None: the policy has not moved, the ratio is exactly 1."""
    ref_logprobs: Tensor | None = None
    """float [B, S-1] of the reference: query tokens at temperature 1 (cache), response tokens at the sampling temperature.

    nan where not measured."""
    rollout_logprobs: Tensor | None = None
    """float [B, S-1] as the generator drew them."""
    values: Tensor | None = None
    """float [B, S-1] of the critic before the step's first update."""
    returns: Tensor | None = None
    """float [B, S-1]: the critic's target."""

    @property
    def num_rows(self) -> int:
        """B."""
        return self.input_ids.shape[0]

    def rows(self, indices: Tensor | np.ndarray | Sequence[int]) -> RolloutBatch:
        """The given rows, trimmed to their longest. No rows: one row of padding that counts for nothing, as idle ranks run too."""
        index = torch.as_tensor(np.asarray(indices), dtype=torch.long, device=self.input_ids.device)
        if index.numel() == 0:
            return self._padding_row()
        width = max(int(self.lengths[index].max()), 2)

        def take(name: str, tensor: Tensor) -> Tensor:
            chosen = tensor[index]
            return chosen if name in _PER_ROW else chosen[:, : width if name == "input_ids" else width - 1]

        return self._mapped(take)

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The same batch on another device."""
        return self._mapped(lambda _, tensor: tensor.to(device))

    def _padding_row(self) -> RolloutBatch:
        blank = self._mapped(
            lambda name, tensor: tensor.new_zeros((1,) if name in _PER_ROW else (1, 2 if name == "input_ids" else 1))
        )
        return replace(blank, lengths=blank.lengths + 2)

    def _mapped(self, function: Callable[[str, Tensor], Tensor]) -> RolloutBatch:
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(name, value) for name, value in found.items() if value is not None})


@dataclass(frozen=True)
class GlobalCounts:
    """What the sums of one optimizer update are divided by, over all its micro-batches and ranks."""

    num_rows: int
    """Rows with at least one response token."""
    num_response_tokens: int
    num_tokens: int
    """Query and response terms of the rows with a response (kl_on: all)."""
    num_queries: int
    """Queries with at least one predicted token, each counted once."""
    num_query_tokens: int
    """Their predicted tokens, each query counted once."""
    num_measured_rows: int
    """Rows whose response the reference has scored."""
    num_measured_tokens: int
    row_share: Tensor
    """float64 [max group + 1]: 1 / (rows of that query in the update); index it with `batch.group`."""


def global_counts(batch: RolloutBatch) -> GlobalCounts:
    """Counts of a whole optimizer update. Call it on all its rows, before they are split over ranks and micro-batches."""
    query_tokens, response_tokens = batch.query_mask.sum(-1), batch.response_mask.sum(-1)
    has_response = response_tokens > 0
    rows_of_query = torch.bincount(batch.group)
    share = 1.0 / rows_of_query.clamp(min=1).double()
    own_share = share[batch.group]
    measured = batch.response_mask if batch.ref_logprobs is None else batch.response_mask & ~batch.ref_logprobs.isnan()
    return GlobalCounts(
        num_rows=int(has_response.sum()),
        num_response_tokens=int(response_tokens.sum()),
        num_tokens=int(((query_tokens + response_tokens) * has_response).sum()),
        num_queries=round(float(((query_tokens > 0) * own_share).sum())),
        num_query_tokens=round(float((query_tokens * own_share).sum())),
        num_measured_rows=int(measured.any(-1).sum()),
        num_measured_tokens=int(measured.sum()),
        row_share=share,
    )


def query_nll(logprobs: Tensor, batch: RolloutBatch) -> Tensor:
    """Summed negative log-likelihood of each row's query [B], detached."""
    return -torch.where(batch.query_mask, logprobs.detach(), 0.0).sum(-1)


# --- the loss ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossOutput:
    """A part's share of the loss and of the metrics."""

    loss: Tensor
    """Scalar; shares of all micro-batches and ranks sum to the loss of the update."""
    metrics: dict[str, Tensor]
    """Detached scalars by metric key; join them with `reduce_metrics`."""


def reduce_metrics(parts: Iterable[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Join the metrics of micro-batches and ranks: maxima for MAX_METRICS, sums for all others."""
    joined: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            number = float(value)
            known = joined.get(key)
            joined[key] = number if known is None else max(known, number) if key in MAX_METRICS else known + number
    return joined


def total_loss(
    logprobs: Tensor,
    batch: RolloutBatch,
    counts: GlobalCounts,
    run: RunConfig,
    entropy: Tensor | None = None,
    values: Tensor | None = None,
    *,
    train_policy: bool = True,
) -> LossOutput:
    """Share of the global loss of these rows: policy term, KL penalty, entropy bonus, value loss, as the run's settings say.

    Args:
        logprobs: current policy [B, S-1]: query tokens at temperature 1, response tokens at the sampling temperature.
        batch: the same rows.
        counts: of the whole update.
        run: settings.
        entropy: of the current policy [B, S-1]; needed with entropy_coef, otherwise only logged.
        values: of the current critic [B, S-1]; needed with advantage: gae.
        train_policy: False in the warm-up of the critic: only the value loss remains.

    Raises:
        ValueError: a tensor that the settings need is missing.
    """
    logprobs = upcast(logprobs)
    loss = torch.where(logprobs.isfinite(), logprobs, 0.0).sum() * 0.0  # a graph even where nothing counts
    metrics: dict[str, Tensor] = {}
    policy_loss = _policy_share(logprobs, batch, counts, run, metrics)
    penalty = _penalty_share(logprobs, batch, counts, run, metrics)
    if run.entropy_coef > 0 and (entropy is None or entropy.requires_grad != logprobs.requires_grad):
        raise ValueError("entropy_coef needs the policy's entropy with its gradient: token_logprobs(..., entropy_gradient=True)")
    bonus = _entropy_share(entropy, batch, counts, run, metrics)
    if train_policy:
        loss = loss + policy_loss
        loss = loss if penalty is None else loss + run.kl_coef * penalty
        loss = loss if bonus is None else loss - run.entropy_coef * bonus
    critic = _value_share(values, batch, counts, run, metrics)
    loss = loss if critic is None else loss + run.value_coef * critic
    metrics["loss/total"] = loss.detach()
    return LossOutput(loss, metrics)


def _aggregated(values: Tensor, batch: RolloutBatch, counts: GlobalCounts, run: RunConfig, weights: Tensor | None = None) -> Tensor:
    """Aggregate response terms by the run's normalizer."""
    return aggregate(
        values,
        batch.response_mask,
        run.normalizer,
        num_rows=counts.num_rows,
        num_tokens=counts.num_response_tokens,
        constant=run.max_response_tokens,
        row_weights=weights,
    )


def _policy_share(
    logprobs: Tensor, batch: RolloutBatch, counts: GlobalCounts, run: RunConfig, metrics: dict[str, Tensor]
) -> Tensor:
    mask = batch.response_mask
    ratio = importance_ratio(logprobs, batch.old_logprobs, mask, run.ratio)
    term = policy_term(ratio, batch.advantages, mask, clip_low=run.clip_low, clip_high=run.clip_high, dual_clip=run.dual_clip)
    values = term.loss
    if run.importance_cap is not None:
        values = values * _correction(logprobs, batch, counts, run.importance_cap, metrics)
    share = _aggregated(values, batch, counts, run, batch.query_weights.to(values.dtype))
    metrics["loss/policy"] = share.detach()
    tokens = max(counts.num_response_tokens, 1)
    for key, per_token in {
        "ratio/mean": term.ratio,
        "clip/low_fraction": term.clipped_low,
        "clip/high_fraction": term.clipped_high,
        "clip/dual_fraction": term.clipped_dual,
    }.items():
        metrics[key] = torch.where(mask, per_token.to(values.dtype), 0.0).sum() / tokens
    metrics["ratio/max"] = torch.where(mask, term.ratio, 0.0).max()
    if batch.rollout_logprobs is not None:
        gap = torch.where(mask, _old(logprobs, batch) - batch.rollout_logprobs, 0.0).abs()
        metrics["rollout/logprob_gap_mean"] = gap.sum() / tokens
        metrics["rollout/logprob_gap_max"] = gap.max()
    return share


def _old(logprobs: Tensor, batch: RolloutBatch) -> Tensor:
    return logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs


def _correction(logprobs: Tensor, batch: RolloutBatch, counts: GlobalCounts, cap: float, metrics: dict[str, Tensor]) -> Tensor:
    """Truncated importance weight min(pi_old / pi_generator, cap), a constant."""
    if batch.rollout_logprobs is None:
        raise ValueError("importance_cap needs the log-probs of the generator; this batch has none")
    gap = torch.where(batch.response_mask, log_ratio(_old(logprobs, batch), batch.rollout_logprobs), 0.0)
    weight, tokens = gap.exp(), max(counts.num_response_tokens, 1)
    metrics["rollout/correction_capped_share"] = (batch.response_mask & (weight > cap)).sum() / tokens
    weight = weight.clamp(max=cap)
    metrics["rollout/correction_mean"] = torch.where(batch.response_mask, weight, 0.0).sum() / tokens
    return weight


def _penalty_share(
    logprobs: Tensor, batch: RolloutBatch, counts: GlobalCounts, run: RunConfig, metrics: dict[str, Tensor]
) -> Tensor | None:
    """The penalty in the loss, or None. Both KLs are measured wherever the reference is known."""
    in_loss = run.kl_on != "none" and run.kl_coef > 0 and run.kl_form != "future"
    if batch.ref_logprobs is None:
        if in_loss:
            raise ValueError(f"kl_on: {run.kl_on} needs the reference's log-probs; this batch has none")
        return None
    with torch.no_grad():
        _measure_kl(logprobs, batch, counts, run, metrics)
    return kl_term(logprobs, batch, counts, run) if in_loss else None


def kl_term(logprobs: Tensor, batch: RolloutBatch, counts: GlobalCounts, run: RunConfig, kl_on: str | None = None) -> Tensor:
    """Share of the KL penalty R (without its coefficient; docs/method.md).

    response, all: aggregated like the policy term. query: by queries, each counted once however many rows carry it.

    Args:
        logprobs: current policy [B, S-1].
        batch: the same rows.
        counts: of the whole update.
        run: estimator, form and normalizer.
        kl_on: overrides run.kl_on.

    Raises:
        ValueError: the reference has not scored a token that counts.
    """
    kl_on = run.kl_on if kl_on is None else kl_on
    has_response = batch.response_mask.any(-1, keepdim=True)
    mask, num_rows, num_tokens = {
        "response": (batch.response_mask, counts.num_rows, counts.num_response_tokens),
        "query": (batch.query_mask, counts.num_queries, counts.num_query_tokens),
        "all": ((batch.query_mask | batch.response_mask) & has_response, counts.num_rows, counts.num_tokens),
    }[kl_on]
    assert batch.ref_logprobs is not None
    if bool((mask & batch.ref_logprobs.isnan()).any()):
        raise ValueError(f"kl_on: {kl_on}: the reference has not scored all {kl_on} tokens of this batch")
    reference = torch.where(mask, batch.ref_logprobs, logprobs.detach())
    values = kl_penalty(logprobs, reference, run.kl_estimator)
    if run.kl_form == "importance_weighted" and kl_on == "response":
        values = values * importance_ratio(logprobs, batch.old_logprobs, mask)
    return aggregate(
        values,
        mask,
        run.normalizer,
        num_rows=num_rows,
        num_tokens=num_tokens,
        constant=run.max_response_tokens,
        row_weights=_share(batch, counts, values.dtype) if kl_on == "query" else None,
    )


def _share(batch: RolloutBatch, counts: GlobalCounts, dtype: torch.dtype) -> Tensor:
    return counts.row_share.to(batch.group.device)[batch.group].to(dtype)


def _measure_kl(logprobs: Tensor, batch: RolloutBatch, counts: GlobalCounts, run: RunConfig, metrics: dict[str, Tensor]) -> None:
    """kl/query and kl/response: k3 as mean over the tokens of a query (response), then over queries (responses), for every run."""
    assert batch.ref_logprobs is not None
    measured = ~batch.ref_logprobs.isnan()
    reference = torch.where(measured, batch.ref_logprobs, logprobs)
    k3, clamped = kl_penalty(logprobs, reference), kl_is_clamped(logprobs, reference).to(logprobs.dtype)
    share = _share(batch, counts, logprobs.dtype)
    query = batch.query_mask & measured
    metrics["kl/query"] = aggregate(k3, query, "sequence", num_rows=counts.num_queries, row_weights=share)
    metrics["kl/query_clamped_share"] = aggregate(clamped, query, "token", num_tokens=counts.num_query_tokens, row_weights=share)
    nll = torch.where(batch.query_mask, -logprobs, 0.0).sum(-1)
    metrics["query/nll"] = (nll * share).sum() / max(counts.num_queries, 1)
    response = batch.response_mask & measured
    if counts.num_measured_rows:
        metrics["kl/response"] = aggregate(k3, response, "sequence", num_rows=counts.num_measured_rows)
        metrics["kl/response_clamped_share"] = aggregate(clamped, response, "token", num_tokens=counts.num_measured_tokens)


def _entropy_share(
    entropy: Tensor | None, batch: RolloutBatch, counts: GlobalCounts, run: RunConfig, metrics: dict[str, Tensor]
) -> Tensor | None:
    if entropy is None:
        return None
    metrics["policy/entropy"] = aggregate(entropy.detach(), batch.response_mask, "token", num_tokens=counts.num_response_tokens)
    return _aggregated(entropy, batch, counts, run) if run.entropy_coef > 0 else None


def _value_share(
    values: Tensor | None, batch: RolloutBatch, counts: GlobalCounts, run: RunConfig, metrics: dict[str, Tensor]
) -> Tensor | None:
    if run.advantage != "gae":
        return None
    if values is None or batch.values is None or batch.returns is None:
        raise ValueError("advantage: gae needs the critic's values: current ones, and old ones and returns in the batch")
    share = _aggregated(value_loss(values, batch.values, batch.returns, run.value_clip), batch, counts, run)
    metrics["loss/value"] = share.detach()
    return share
