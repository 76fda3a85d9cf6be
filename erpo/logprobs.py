"""Log-probs and entropy straight from hidden states: logits of a large vocabulary exist for a few tokens at a time only.

With 151,936 tokens in the vocabulary the float32 logits of 2,048 positions take 1.2 GiB, and log-softmax, entropy and their
gradients several times that. Here the positions pass through the output layer in chunks, in the backward pass once more; what is
kept in between is one number a position. The price is one more product with the output layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from erpo.terms import entropy as entropy_of
from erpo.terms import label_logprobs, upcast

CHUNK_ELEMENTS = 1 << 24
"""Logits in one chunk: 64 MiB in float32."""


def head_logprobs(
    head: nn.Module,
    hidden: Tensor,
    labels: Tensor,
    temperature: Tensor | float = 1.0,
    *,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `labels` [N] and entropies [N] (float32 at least) under softmax(head(hidden) / temperature).

    Args:
        head: output layer, hidden size -> vocabulary. A whole `nn.Linear` takes the fused path; anything else, or a layer whose
            weights are dealt out over ranks (ZeRO 3), is called chunk by chunk and again in the backward pass.
        hidden: [N, H], any float dtype; products are taken in it, everything after them in float32 at least.
        labels: int64 [N].
        temperature: one number, or one a position [N].
        entropy_gradient: False: entropy only to be logged.
        chunk_elements: most logits at a time.
    """
    scale = torch.as_tensor(temperature, dtype=upcast(hidden[:0]).dtype, device=hidden.device).reciprocal().expand(len(hidden))
    if isinstance(head, nn.Linear) and head.weight.ndim == 2 and head.weight.shape[1] == hidden.shape[1]:
        rows = max(1, chunk_elements // head.weight.shape[0])
        return _HeadLogprobs.apply(hidden, head.weight, head.bias, labels, scale, rows, entropy_gradient)  # pyright: ignore
    rows = max(1, chunk_elements // _width(head))
    parts = [
        checkpoint(
            _called, head, hidden[i : i + rows], labels[i : i + rows], scale[i : i + rows], entropy_gradient, use_reentrant=False
        )
        for i in range(0, max(len(hidden), 1), rows)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])  # pyright: ignore


def _width(head: nn.Module) -> int:
    """Vocabulary of an output layer, also where ZeRO 3 has dealt its weight out."""
    weight = next(head.parameters())
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def _called(head: nn.Module, hidden: Tensor, labels: Tensor, scale: Tensor, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    logits = upcast(head(hidden)) * scale.unsqueeze(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropies = entropy_of(logits)
    return label_logprobs(logits, labels), entropies


class _HeadLogprobs(torch.autograd.Function):
    """Two passes over chunks of positions; d log p(y) = onehot(y) - p and dH = -p (log p + H) in the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor,
        rows: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalizers = (scale.new_empty(len(hidden)) for _ in range(3))
        for i in range(0, len(hidden), rows):
            here = slice(i, i + rows)
            logits = _logits(hidden[here], weight, bias, scale[here])
            logprobs[here] = logits.gather(-1, labels[here].unsqueeze(-1)).squeeze(-1)
            normalizers[here] = torch.logsumexp(logits, -1)
            logits -= normalizers[here].unsqueeze(-1)  # log p
            entropies[here] = _entropies(logits)
        logprobs -= normalizers
        ctx.save_for_backward(hidden, weight, bias, labels, scale, normalizers, entropies)
        ctx.rows, ctx.entropy_gradient = rows, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, scale, normalizers, entropies = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Sums over many chunks lose digits in half precision.
        grad_weight = torch.zeros_like(weight, dtype=scale.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=scale.dtype)
        for i in range(0, len(hidden), ctx.rows):
            here = slice(i, i + ctx.rows)
            logprobs = _logits(hidden[here], weight, bias, scale[here])
            logprobs -= normalizers[here].unsqueeze(-1)
            factor = grad_logprobs[here].unsqueeze(-1)
            if ctx.entropy_gradient:
                probs = logprobs.exp()
                logprobs += entropies[here].unsqueeze(-1)
                logprobs = torch.where(probs > 0, logprobs, 0.0).mul_(grad_entropies[here].unsqueeze(-1)).add_(factor)
                grad = logprobs.mul_(probs).neg_()
            else:
                grad = logprobs.exp_().mul_(-factor)
            grad.scatter_add_(-1, labels[here].unsqueeze(-1), factor)
            grad.mul_(scale[here].unsqueeze(-1))
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(weight.dtype)
            grad_hidden[here] = grad @ weight
            if grad_weight is not None:
                if grad_weight.dtype == weight.dtype:
                    grad_weight.addmm_(grad.T, hidden[here])
                else:
                    grad_weight += grad.T @ hidden[here]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """Scaled logits in float32 at least, in a buffer of their own."""
    logits = upcast(nn.functional.linear(hidden, weight, bias))
    return logits.mul_(scale.unsqueeze(-1))


def _entropies(logprobs: Tensor) -> Tensor:
    """Entropy [N] from log-probs [N, V]; 0 log 0 = 0."""
    probs = logprobs.exp()
    return -torch.where(probs > 0, probs * logprobs, 0.0).sum(-1)
