"""How far a training step on this CPU is from its two floors, arithmetic and bytes; and how well plan's rates describe it.

    python benchmarks/floors.py [--repeats 5]

Floors: sgemm of 512 x 512 matrices gives the arithmetic rate, a copy of 256 MiB the memory bandwidth, both on one thread. An update
takes 6 operations per weight and real position, sampling 2; AdamW moves 28 bytes per parameter, each decoding step reads the
weights and the rows' keys and values once.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import _world
import torch
from _pairs import report

from erpo.config import RunConfig
from erpo.rates import CPU_SAMPLING_TOKENS, CPU_TRAINING_TOKENS

QUERIES, SIBLINGS, CAP = 16, 8, 64
FLOAT = 4
ADAM_BYTES = 28  # weight, gradient, two moments read; weight and two moments written


def rate(work: float, run) -> float:
    """Work per second: the best of ten."""
    best = 0.0
    for _ in range(10):
        begun = time.perf_counter()
        run()
        best = max(best, work / (time.perf_counter() - begun))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    square, big = torch.randn(512, 512), torch.randn(1 << 26)
    flops = rate(2 * 512**3, lambda: square @ square)
    bandwidth = rate(2 * big.nbytes, big.clone)
    run = RunConfig(
        dtype="float32",
        kl_on="query",
        query_weight="reference_likelihood",
        queries_per_step=QUERIES,
        responses_per_query=SIBLINGS,
        updates_per_step=1,
        max_response_tokens=CAP,
        policy_kl_every=0,
    )
    rows = []
    for width, layers in ((64, 2), (128, 3), (256, 4)):
        with tempfile.TemporaryDirectory() as folder:
            world = _world.make_world(Path(folder), width=width, layers=layers)
            step, seconds = _world.stepper(world, run, stops=False), {"update": [], "rollout": []}
            for number in range(1, args.repeats + 2):
                found = step(number)
                seconds["update"].append(found["time/update"])
                seconds["rollout"].append(found["time/rollout"])
        middle = {part: statistics.median(values[1:]) for part, values in seconds.items()}
        prompt = sum(len(query.prompt_ids) for query in world.queries) / len(world.queries)
        weights, responses = layers * 10 * width**2 + found["vocabulary"] * width, QUERIES * SIBLINGS
        positions = QUERIES * prompt + responses * CAP
        cache = responses * CAP * (prompt + CAP / 2) * 2 * layers * width * FLOAT
        rows.append(
            {
                "width x layers": f"{width} x {layers}",
                "update, s": middle["update"],
                "its floor, s": 6 * weights * positions / flops + ADAM_BYTES * weights / bandwidth,
                "sampling, s": middle["rollout"],
                "its arithmetic, s": 2 * weights * responses * CAP / flops,
                "its bytes, s": (CAP * weights * FLOAT + cache) / bandwidth,
                "update tokens/s": responses * (prompt + CAP) / middle["update"],
                "error of plan": CPU_TRAINING_TOKENS / (responses * (prompt + CAP) / middle["update"]) - 1,
                "sampled tokens/s": responses * CAP / middle["rollout"],
                "its error of plan": CPU_SAMPLING_TOKENS / (responses * CAP / middle["rollout"]) - 1,
            }
        )
    report("floors", rows, gflops=flops / 1e9, gigabytes_per_second=bandwidth / 1e9)
    print(f"one thread: {flops / 1e9:.0f} GFLOP/s in float32, {bandwidth / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
