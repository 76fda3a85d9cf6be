"""Snakemake, looking at the queue every second: the Slurm plugin waits ten seconds to three minutes, too long for small jobs."""

import asyncio
import sys

import snakemake_executor_plugin_slurm
from snakemake.cli import main


async def _second(executor) -> None:
    await asyncio.sleep(1)


snakemake_executor_plugin_slurm.Executor.sleep = _second
sys.argv[0] = "snakemake"
main()
