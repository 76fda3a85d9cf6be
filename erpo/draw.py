"""Drawing tokens: one uniform number per (seed, position), the cumulative distribution inverted at it. No global random state."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_DRAW_ELEMENTS = 1 << 24
"""Most logits per chunk of a draw: bounds its float64 temporaries to about 0.3 GiB whatever the vocabulary."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers (float64 [N], inside 0 and 1) for uint64 seeds and positions: SplitMix64 streams of the mixed seeds.

    Counter-based: any position of any stream at once, without a generator state. Reference: Steele, Lea and Flood, OOPSLA 2014.
    """
    state = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return ((_mix(state) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draw(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Tokens (int64 [B]) drawn from logits [B, V] and their log-probs (float32 [B]) under the distribution they were drawn from.

    Temperature 0 takes the most likely token and reports its log-prob at temperature 1.

    Args:
        logits: any float dtype; computed in float32, the cumulative distribution in float64.
        uniform: float64 [B].
        temperature: 0 is greedy.
        top_p: nucleus; 1 is off.
    """
    rows = max(1, _DRAW_ELEMENTS // logits.shape[-1])
    parts = [
        _draw_rows(logits[i : i + rows].float(), uniform[i : i + rows], temperature, top_p) for i in range(0, len(logits), rows)
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _draw_rows(logits: Tensor, uniform: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    if temperature == 0:
        logprobs = torch.log_softmax(logits, -1)
        tokens = logits.argmax(-1, keepdim=True)
    else:
        logprobs = torch.log_softmax(logits / temperature, -1)
        if top_p < 1:
            logprobs = _nucleus(logprobs, top_p)
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        threshold = uniform.unsqueeze(-1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, threshold, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


def _nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """Log-probs of the most likely tokens that together reach top_p, renormalised; -inf elsewhere."""
    ordered, order = logprobs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1, dtype=torch.float64) - ordered.exp()
    kept = torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, before < top_p)
    return torch.log_softmax(logprobs.masked_fill(~kept, float("-inf")), -1)
