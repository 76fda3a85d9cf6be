"""The update with each group's query computed once, against row by row, paired, at equal rows.

    python benchmarks/shared_query.py [--pairs 7] [--groups 4]

Eight responses to each query, lengths of query and response as in the table; one update is forward, loss (ERPO), backward and AdamW
on a tiny Qwen2. The last columns are the largest differences of log-probs and of gradients between the two ways.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from _pairs import paired, ratios, report
from transformers import Qwen2Config, Qwen2ForCausalLM

from erpo.batching import collate
from erpo.config import RunConfig
from erpo.objective import RolloutBatch, global_counts, total_loss
from erpo.scoring import Scorer

SIBLINGS, VOCABULARY = 8, 400
LENGTHS = ((32, 32), (64, 64), (128, 128), (256, 256), (64, 16), (32, 128))
RUN = RunConfig(kl_on="query", query_weight="reference_likelihood", dtype="float32")


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=4, tie_word_embeddings=True, **sizes)).train()


def random_batch(groups: int, query: int, response: int) -> RolloutBatch:
    rng = np.random.default_rng(0)
    queries = [rng.integers(0, VOCABULARY, query).tolist() for _ in range(groups)]
    group = np.repeat(np.arange(groups), SIBLINGS)
    batch = collate(
        [queries[g] for g in group],
        [rng.integers(0, VOCABULARY, response).tolist() for _ in group],
        group,
        query_ref_logprobs=[np.full(query - 1, -6.0) for _ in group],
    )
    return replace(batch, advantages=torch.from_numpy(rng.standard_normal(batch.response_mask.shape)).float())


def gradients(model: Qwen2ForCausalLM, batch: RolloutBatch, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    scores = getattr(Scorer(model), way)(batch, 1.0)
    total_loss(scores.logprobs, batch, global_counts(batch), RUN, entropy=scores.entropy).loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return torch.where(batch.query_mask | batch.response_mask, scores.logprobs.detach(), 0.0), gradient


def case(groups: int, query: int, response: int, pairs: int) -> dict[str, object]:
    model, batch = tiny_model(), random_batch(groups, query, response)
    (whole, whole_gradient), (shared, shared_gradient) = (gradients(model, batch, way) for way in ("rows", "groups"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def update(way: str) -> None:
        scores = getattr(Scorer(model), way)(batch, 1.0)
        total_loss(scores.logprobs, batch, global_counts(batch), RUN, entropy=scores.entropy).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    found = paired({"rows": lambda _: update("rows"), "groups": lambda _: update("groups")}, pairs)
    return {
        "query": query,
        "response": response,
        "row by row, s": statistics.median(found["rows"]),
        "shared, s": statistics.median(found["groups"]),
        **ratios(found, "rows", "groups"),
        "log-probs differ": float((whole - shared).abs().max()),
        "gradients differ": float((whole_gradient - shared_gradient).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--groups", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [case(args.groups, query, response, args.pairs) for query, response in LENGTHS]
    report("shared_query", rows, siblings=SIBLINGS, groups=args.groups)


if __name__ == "__main__":
    main()
