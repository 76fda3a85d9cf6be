"""How the update grows: with the length of responses, with responses per query, with ranks.

    python benchmarks/scaling.py [--repeats 5] [--ranks 2]

Seconds of one update (median over repeats) of a tiny model; with several ranks the same update is dealt out with torchrun, in wall
seconds, so give each rank a core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import _world
import torch
import torch.distributed as dist
from _pairs import report

from erpo.config import RunConfig

LENGTHS, SIBLINGS = (16, 32, 64, 128), (2, 4, 8, 16)
QUERIES = 8


def settings(cap: int, siblings: int) -> RunConfig:
    return RunConfig(
        dtype="float32",
        kl_on="query",
        queries_per_step=QUERIES,
        responses_per_query=siblings,
        updates_per_step=1,
        max_response_tokens=cap,
        policy_kl_every=0,
    )


def update_seconds(world: _world.World, cap: int, siblings: int, repeats: int) -> dict[str, object]:
    step = _world.stepper(world, settings(cap, siblings), stops=False)
    rows = [step(number) for number in range(1, repeats + 2)][1:]
    return {
        "response": cap,
        "siblings": siblings,
        "ranks": dist.get_world_size(),
        "update, s": statistics.median(row["time/update"] for row in rows),
        "tokens/s": statistics.median(row["tokens_per_second/update"] for row in rows),
    }


def on_ranks(ranks: int, repeats: int) -> dict[str, object]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*launch, __file__, "--one", str(repeats)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks failed: {done.stderr[-2000:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def one(repeats: int) -> None:
    """The middle case on every rank of this launch."""
    from erpo.processes import join_processes

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        world = _world.make_world(Path(folder))  # alone: in a process group transformers saves on the first rank only
        rank, _ = join_processes()
        row = update_seconds(world, 64, 8, repeats)
        if rank == 0:
            print(json.dumps(row), flush=True)
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one)
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        world = _world.make_world(Path(folder))
        rows = [update_seconds(world, cap, 8, args.repeats) for cap in LENGTHS]
        rows += [update_seconds(world, 64, siblings, args.repeats) for siblings in SIBLINGS if siblings != 8]
    rows += [on_ranks(ranks, args.repeats) for ranks in range(1, args.ranks + 1)]
    report("scaling", rows, queries=QUERIES)


if __name__ == "__main__":
    main()
