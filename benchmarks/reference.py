"""The reference cache: queries scored per second, and what it spares in training.

    python benchmarks/reference.py [--queries 512] [--pairs 5]

Sorted into batches of like length, against one padded batch after another in the order of the file (what a loop over a data loader
does), on the same tiny model and queries.
"""

from __future__ import annotations

import argparse
import os
import statistics

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from _pairs import paired, ratios, report
from shared_query import VOCABULARY, tiny_model

from erpo.reference import score_prompts

BUDGET, BATCH = 4096, 32


def padded_in_order(model: torch.nn.Module, prompts: list[list[int]]) -> None:
    for begin in range(0, len(prompts), BATCH):
        part = [torch.tensor(prompt) for prompt in prompts[begin : begin + BATCH]]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        with torch.no_grad():
            torch.log_softmax(model(input_ids=ids, use_cache=False).logits, -1)[:, :-1].gather(-1, ids[:, 1:, None])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng, model = np.random.default_rng(0), tiny_model()
    lengths = np.clip(rng.lognormal(4.0, 0.6, args.queries), 8, 400).astype(int)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]
    found = paired(
        {
            "cache": lambda _: score_prompts(model, prompts, BUDGET),
            "in order": lambda _: padded_in_order(model, prompts),
        },
        args.pairs,
    )
    row = {"queries": args.queries, "mean tokens": float(lengths.mean())}
    row |= {f"{side}, queries/s": args.queries / statistics.median(values) for side, values in found.items()}
    report("reference", [row | ratios(found, "in order", "cache")], seconds=found)


if __name__ == "__main__":
    main()
