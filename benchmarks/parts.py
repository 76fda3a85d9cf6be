"""The price of each part of a training step: regulariser, reference model, query weights; time and peak memory.

    python benchmarks/parts.py [--pairs 5] [--queries 32]

Time: full steps (rollout, grading, one update) of every case in turn, on the same queries and seeds, in CPU seconds (wall seconds
on a GPU). Memory: peak of a process (GPU: allocated) that does two steps of one case, with a larger model so that its parameters
show, and rows enough that an update and not the loading of the model is the peak, as in any real run. Diagnostics are off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import _world
import torch
from _pairs import in_child, paired, peak_bytes, ratios, report

from erpo.config import RunConfig

ERPO = {"kl_on": "query", "query_weight": "reference_likelihood"}
CASES = {
    "no regulariser": {"kl_on": "none"},
    "weights alone": {"kl_on": "none", "query_weight": "reference_likelihood"},
    "Query-KL alone": {"kl_on": "query"},
    "ERPO": ERPO,
    "GRPO, reference model": {"kl_on": "response"},
}
TIMED = {"0.5 M": {"width": 128, "layers": 3}, "2.7 M": {"width": 256, "layers": 4}}
"""By parameters: the smaller a model, the larger the share of sampling, where every token is a step of small operations."""
WEIGHED = {"width": 768, "layers": 6}
"""About 38 million parameters: 150 MB in float32."""


def settings(case: str, queries: int, cap: int) -> RunConfig:
    return RunConfig(
        dtype="float32",
        queries_per_step=queries,
        responses_per_query=8,
        updates_per_step=1,
        max_response_tokens=cap,
        policy_kl_every=0,
        **CASES[case],
    )


def weigh(case: str) -> None:
    """Peak memory of two steps of one case, as a line of JSON."""
    with tempfile.TemporaryDirectory() as folder:
        world = _world.make_world(Path(folder), num_queries=4, **WEIGHED)
        step = _world.stepper(world, settings(case, 4, 32), stops=False)
        for number in (1, 2):
            step(number)
        size = sum(path.stat().st_size for path in world.folder.glob("*.safetensors"))
    print(json.dumps({"bytes": peak_bytes(), "parameters": size}))


def time_steps(shape: dict[str, int], queries: int, cap: int, pairs: int) -> dict[str, list[float]]:
    """Seconds of full steps of every case."""
    with tempfile.TemporaryDirectory() as folder:
        world = _world.make_world(Path(folder), **shape)
        steps = {case: _world.stepper(world, settings(case, queries, cap), stops=False) for case in CASES}
        return paired({case: lambda pair, step=step: step(pair + 1) for case, step in steps.items()}, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--queries", type=int, default=32)
    parser.add_argument("--cap", type=int, default=64)
    parser.add_argument("--models", nargs="*", choices=list(TIMED), default=list(TIMED), help="models whose steps are timed")
    parser.add_argument("--weigh", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.weigh:
        weigh(args.weigh)
        return
    times = {model: time_steps(TIMED[model], args.queries, args.cap, args.pairs) for model in args.models}
    steps = [
        {
            "model": model,
            "case": case,
            "step, s": statistics.median(found[case]),
            "of no regulariser": ratios(found, case, "no regulariser")["ratio"],
            "of GRPO": ratios(found, case, "GRPO, reference model")["ratio"],
        }
        for model, found in times.items()
        for case in CASES
    ]
    weighed = {case: in_child(__file__, "--weigh", case) for case in CASES}
    most = weighed["GRPO, reference model"]
    memory = [
        {
            "model": "35.5 M",
            "case": case,
            "peak MiB": weighed[case]["bytes"] / 2**20,
            "saved, of the reference's parameters": (most["bytes"] - weighed[case]["bytes"]) / most["parameters"],
        }
        for case in CASES
    ]
    report("parts", [*steps, *memory], seconds=times, memory=weighed)


if __name__ == "__main__":
    main()
