"""Query weights w(q) and their statistics (docs/method.md lists the readings). Pure tensors."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from erpo.terms import upcast

WeightKind = Literal["none", "reference_likelihood", "reference_inverse_nll", "online_inverse_nll"]

NLL_FLOOR = 1e-8
"""Smallest NLL that divides: a query the model knows by heart keeps a finite weight."""


def query_weights(
    kind: WeightKind,
    query_nll: Tensor,
    num_tokens: Tensor,
    cap: float | None = 2.0,
    renormalise: bool = False,
    *,
    mean_nll: float | None = None,
) -> Tensor:
    """Weights [N] of N queries (the data set: static weights) or rows (the update: online weights), detached.

    reference_likelihood: exp(-NLL / tokens), scaled to mean 1, then capped (the paper's text, length-normalised).
    reference_inverse_nll, online_inverse_nll: mean(NLL) / NLL on summed NLLs, floored at 1e-8; the online form has no cap (the
    released patch). Rows without a query token keep weight 1 and stay out of the means. No weight carries a gradient.

    Args:
        kind: which weight.
        query_nll: summed negative log-likelihood [N], under the reference, or under the current policy for the online form.
        num_tokens: predicted query tokens [N].
        cap: largest weight, applied after scaling to mean 1; None: none.
        renormalise: divide by the mean once more after the cap.
        mean_nll: use this mean NLL instead of the mean over these N (inverse-NLL kinds).

    Raises:
        ValueError: an unknown kind, or an NLL that is not finite.
    """
    nll, counted = upcast(query_nll.detach()), num_tokens > 0
    ones = torch.ones_like(nll)
    if kind == "none" or not bool(counted.any()):
        return ones
    if not bool(nll[counted].isfinite().all()):
        raise ValueError(
            f"query_weight: {kind}: {int((~nll[counted].isfinite()).sum())} queries have a likelihood that is not finite"
        )
    if kind == "reference_likelihood":
        weights = _relative_likelihood(-nll[counted] / num_tokens[counted])
    elif kind in ("reference_inverse_nll", "online_inverse_nll"):
        mean = nll[counted].mean() if mean_nll is None else mean_nll
        weights = mean / nll[counted].clamp(min=NLL_FLOOR)
    else:
        raise ValueError(f"unknown query_weight {kind!r}")
    if cap is not None and kind != "online_inverse_nll":
        weights = weights.clamp(max=cap)
    if renormalise:
        weights = weights / weights.mean()
    return ones.masked_scatter(counted, weights)


def _relative_likelihood(mean_logprob: Tensor) -> Tensor:
    likelihood = (mean_logprob - mean_logprob.max()).exp()  # the common factor cancels; without it a poor model underflows
    return likelihood / likelihood.mean()


def weight_statistics(weights: Tensor, num_tokens: Tensor) -> dict[str, float]:
    """Mean, min, max, effective sample size (as a share of N) and correlation with query length, by metric key."""
    w, n = weights.double(), num_tokens.double()
    deviation_w, deviation_n = w - w.mean(), n - n.mean()
    spread = float(deviation_w.norm() * deviation_n.norm())
    statistics = {
        "query_weight/mean": float(w.mean()),
        "query_weight/min": float(w.min()),
        "query_weight/max": float(w.max()),
        "query_weight/ess": float(w.sum().square() / (w.numel() * w.square().sum())),
    }
    if spread > 0:  # undefined for equal weights or equal lengths: absent
        statistics["query_weight/length_correlation"] = float((deviation_w * deviation_n).sum()) / spread
    return statistics
