"""Random batches and tiny policies for the tests of the objective."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from erpo.advantages import compute_advantages
from erpo.batching import collate
from erpo.config import RunConfig
from erpo.objective import LossOutput, RolloutBatch, global_counts, reduce_metrics, total_loss

VOCABULARY = 11


def random_batch(
    seed: int = 0,
    *,
    num_queries: int = 4,
    responses_per_query: int = 3,
    shortest: int = 0,
    dtype: torch.dtype = torch.float64,
    run: RunConfig | None = None,
    on_policy: bool = False,
) -> RolloutBatch:
    """Ragged queries and responses (some empty, unless `shortest`), group advantages, random log-probs of everybody else."""
    rng = np.random.default_rng(seed)
    queries = [rng.integers(0, VOCABULARY, size=rng.integers(2, 6)).tolist() for _ in range(num_queries)]
    group = np.repeat(np.arange(num_queries), responses_per_query)
    responses = [rng.integers(0, VOCABULARY, size=rng.integers(shortest, 7)).tolist() for _ in group]
    batch = collate([queries[g] for g in group], responses, group, query_weights=rng.uniform(0.5, 1.5, num_queries)[group])
    shape = batch.response_mask.shape
    old, ref, drawn, values = (torch.from_numpy(-rng.exponential(1.0, shape)).to(dtype) for _ in range(4))
    rewards = torch.from_numpy(rng.integers(0, 2, len(group)).astype(float))
    found = compute_advantages(
        rewards, batch.group, batch.response_mask, run or RunConfig(), values=values, old_logprobs=old, ref_logprobs=ref
    )
    # siblings share their query, so they share the reference's view of it
    first = torch.tensor([int((batch.group == g).nonzero()[0]) for g in batch.group])
    return replace(
        batch,
        advantages=found.advantages.to(dtype),
        returns=None if found.returns is None else found.returns.to(dtype),
        query_weights=batch.query_weights.to(dtype),
        old_logprobs=None if on_policy else old,
        ref_logprobs=torch.where(batch.query_mask, ref[first], ref),
        rollout_logprobs=drawn,
        values=values,
    )


def random_logprobs(batch: RolloutBatch, seed: int = 1) -> Tensor:
    """Log-probs that require a gradient; siblings agree on their query, as under causal attention."""
    generator = torch.Generator().manual_seed(seed)
    values = -torch.rand(batch.response_mask.shape, generator=generator, dtype=batch.advantages.dtype) * 3
    first = torch.tensor([int((batch.group == g).nonzero()[0]) for g in batch.group])
    return torch.where(batch.query_mask, values[first], values).requires_grad_()


def loss_in_parts(logprobs: Tensor, batch: RolloutBatch, run: RunConfig, parts: list) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient and metrics from the given row subsets with the counts of the whole batch."""
    counts = global_counts(batch)
    outputs: list[LossOutput] = []
    for rows in parts:
        part = batch.rows(rows)
        width = part.response_mask.shape[1]
        own = logprobs[torch.as_tensor(rows), :width] if len(rows) else logprobs.new_zeros(1, width, requires_grad=True)
        outputs.append(total_loss(own, part, counts, run, entropy=-own * own, values=own * 0.5))
    loss = torch.stack([output.loss for output in outputs]).sum()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient, reduce_metrics(output.metrics for output in outputs)


def in_micro_batches(num_rows: int, size: int) -> list[list[int]]:
    return [list(range(start, min(start + size, num_rows))) for start in range(0, num_rows, size)]


def tiny_policy(seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 3.0) -> Qwen2ForCausalLM:
    """A random two-layer Qwen2 with tied embeddings, sharp enough for distributions that differ."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model
