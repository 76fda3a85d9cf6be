"""Time of a dry run against the number of jobs in the study.

    python benchmarks/planning.py [--jobs 100 1000 10000]

Each study trains runs over seeds and milestones and evaluates every checkpoint in three shards, five jobs a checkpoint, in a
temporary folder that links to this workflow. Wall and CPU seconds of `snakemake -n`, which builds the whole graph of jobs.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from _pairs import report

ROOT = Path(__file__).resolve().parents[1]
JOBS_PER_CHECKPOINT, MILESTONES = 5, 10
PROBLEMS = {"kind": "synthetic", "families": ["chain"]}
COMMAND = ("-m", "snakemake", "-n", "--cores", "2", "--quiet", "rules", "--config", "study=planning", "--", "all")


def study(jobs: int) -> dict:
    """About so many jobs: 20 runs at most, ten milestones, as many seeds as it takes."""
    checkpoints = max(jobs // JOBS_PER_CHECKPOINT, MILESTONES)
    runs = min(20, checkpoints // MILESTONES)
    seeds = round(checkpoints / MILESTONES / runs)
    steps = [10 * (index + 1) for index in range(MILESTONES)]
    names = [f"run{index}" for index in range(runs)]
    return {
        "title": "planning",
        "prompt_suffix": "",
        "seeds": list(range(seeds)),
        "models": {"tiny": {"kind": "synthetic", "warm_start_steps": 100}},
        "train_sets": {"train": {**PROBLEMS, "size": 1024}},
        "benchmarks": {
            f"b{index}": {"kind": "synthetic", "families": ["chain"], "size": 32, "seed": index} for index in range(1, 7)
        },
        "evaluation": {
            "temperatures": [round(0.1 * index, 1) for index in range(1, 16)],
            "samples": 8,
            "max_response_tokens": 64,
            "shard_width": 0.5,
        },
        "defaults": {"model": "tiny", "train_set": "train", "dtype": "float32", "steps": steps[-1]},
        "runs": {name: {"kl_on": "query", "learning_rate": 1e-6 * (index + 1)} for index, name in enumerate(names)},
        "tables": {"main": {"runs": names, "metrics": ["avg@n"], "steps": steps}},
        "figures": {},
    }


def dry_run(jobs: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("Snakefile", "workflow", "profiles", "erpo"):
            (Path(folder) / name).symlink_to(ROOT / name)
        (Path(folder) / "config").mkdir()
        (Path(folder) / "config" / "planning.yaml").write_text(yaml.safe_dump(study(jobs)), encoding="utf-8")
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "snakemake",
                "-n",
                "--cores",
                "2",
                "--quiet",
                "rules",
                "--config",
                "study=planning",
                "--",
                "all",
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    found = re.search(r"^total\s+(\d+)", done.stdout + done.stderr, re.MULTILINE)
    if done.returncode or found is None:
        raise RuntimeError(f"the dry run failed:\n{(done.stdout + done.stderr)[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"jobs": int(found[1]), "wall s": wall, "CPU s": cpu, "ms a job": 1000 * cpu / int(found[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="*", default=[100, 1000, 10_000])
    args = parser.parse_args()
    report("planning", [dry_run(jobs) for jobs in args.jobs])


if __name__ == "__main__":
    main()
