"""What several tests of vLLM measure."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from erpo.generation import Request
from erpo.records import Rollout


@torch.no_grad()
def logprobs_of(model: nn.Module, request: Request, rollout: Rollout, temperature: float, top_p: float = 1.0) -> np.ndarray:
    """Log-probs of a response's tokens under the distribution asked for, written down directly."""
    ids = torch.tensor([[*request.prompt_ids, *rollout.response_ids.tolist()]])
    logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].double() / temperature
    probs = logits.softmax(-1)
    for row in probs:
        order = row.argsort(descending=True)
        before = row[order].cumsum(0) - row[order]
        row[order[before >= top_p]] = 0.0
    probs = probs / probs.sum(-1, keepdim=True)
    return probs[torch.arange(len(probs)), ids[0, len(request.prompt_ids) :]].log().numpy()


def largest_gap(model: nn.Module, requests: Sequence[Request], groups: list[list[Rollout]], temperature=1.0, top_p=1.0) -> float:
    return max(
        np.abs(logprobs_of(model, request, rollout, temperature, top_p) - rollout.logprobs).max()
        for request, group in zip(requests, groups, strict=True)
        for rollout in group
    )


def jitter(model: nn.Module, seed: int, scale: float = 0.3) -> list[tuple[str, torch.Tensor]]:
    """The model's tensors with noise, by Hugging Face name, and the model changed to them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += scale * parameter.std().nan_to_num(1.0).clamp(min=0.01) * torch.randn(parameter.shape, generator=generator)
    return list(model.named_parameters())
