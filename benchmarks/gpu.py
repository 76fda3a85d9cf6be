"""The table for a GPU: a random Qwen2 of half a billion parameters, update and memory by case, and model FLOP utilisation.

    python benchmarks/gpu.py [--pairs 5]

Forward, loss and backward in bfloat16 of 8 queries with 8 responses each (256 + 256 tokens): no regulariser, ERPO with and without
shared queries, GRPO with a forward of the reference model. Utilisation is 6 operations per parameter and real position, attention
included, over the dense bfloat16 peak of the card's data sheet. Without a GPU it says so and stops.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace

import torch
from _pairs import paired, ratios, report
from shared_query import random_batch
from transformers import Qwen2Config, Qwen2ForCausalLM

from erpo.config import RunConfig
from erpo.objective import global_counts, total_loss
from erpo.rates import PEAKS
from erpo.scoring import Scorer

QUERY, RESPONSE, GROUPS = 256, 256, 8
CASES = {
    "no regulariser": ("rows", "none"),
    "ERPO, row by row": ("rows", "query"),
    "ERPO, shared queries": ("groups", "query"),
    "GRPO, reference model": ("rows", "response"),
}


def half_billion() -> Qwen2ForCausalLM:
    """The shape of Qwen2.5-0.5B with random weights."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen2ForCausalLM(config).to(torch.bfloat16)


def operations(model: Qwen2ForCausalLM, positions: int, context: float) -> float:
    """Arithmetic of forward and backward: weights, and attention over the mean context."""
    config = model.config
    weights = sum(p.numel() for p in model.parameters())
    attention = 2 * config.num_hidden_layers * config.hidden_size * context
    return 6.0 * positions * (weights + attention)


def peak_flops() -> float | None:
    """Dense bfloat16 peak of this card by its data sheet; None for one that is not in the list."""
    name = torch.cuda.get_device_name().lower()
    return next((1e12 * flops for kind, (flops, _) in PEAKS.items() if kind in name), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return 0
    model, reference = half_billion(), half_billion().eval()
    batch = random_batch(GROUPS, QUERY, RESPONSE).to("cuda")
    memory: dict[str, int] = {}

    def update(case: str) -> None:
        way, kl_on = CASES[case]
        torch.cuda.reset_peak_memory_stats()
        part = batch
        if kl_on == "response":
            with torch.no_grad():
                scored = Scorer(reference).rows(batch, 1.0).logprobs
            part = replace(batch, ref_logprobs=torch.where(batch.response_mask, scored, batch.ref_logprobs))
        scores = getattr(Scorer(model), way)(part, 1.0)
        run = RunConfig(kl_on=kl_on)
        total_loss(scores.logprobs, part, global_counts(part), run, entropy=scores.entropy).loss.backward()
        model.zero_grad()
        memory[case] = torch.cuda.max_memory_allocated()

    found = paired({case: lambda _, case=case: update(case) for case in CASES}, args.pairs)
    peak, rows = peak_flops(), []
    for case, (way, _) in CASES.items():
        positions = GROUPS * (QUERY + 8 * RESPONSE if way == "groups" else 8 * (QUERY + RESPONSE))
        middle = statistics.median(found[case])
        rows.append(
            {
                "case": case,
                "update, s": middle,
                "of no regulariser": ratios(found, case, "no regulariser")["ratio"],
                "of GRPO": ratios(found, case, "GRPO, reference model")["ratio"],
                "peak GiB": memory[case] / 2**30,
                "utilisation": None if peak is None else operations(model, positions, (QUERY + RESPONSE) / 2) / middle / peak,
            }
        )
    report("gpu", rows, seconds=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
