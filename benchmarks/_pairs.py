"""What the benchmarks share: paired runs in alternating order, a table of medians and ratios, a JSON file, memory of a child."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_PROCESS_GROUP = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What training leaves in the environment; a child forms a group of its own."""

RESULTS = Path(__file__).resolve().parent / "results"


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "machine": f"{os.cpu_count()}-core {platform.machine()}, {gpu}",
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def seconds(run: Callable[[], object]) -> float:
    """CPU seconds of this process on one thread, which other jobs disturb least; wall seconds where a GPU works."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return time.perf_counter() - begun
    begun = time.process_time()
    run()
    return time.process_time() - begun


def paired(sides: Mapping[str, Callable[[int], object]], pairs: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of every side in every pair; each run gets the number of its pair, and the order alternates."""
    if warm_up:
        for run in sides.values():
            run(0)
    found: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        order = list(sides.items())
        for name, run in order if pair % 2 == 0 else order[::-1]:
            found[name].append(seconds(lambda run=run, pair=pair: run(pair)))
    return found


def ratios(measured: Mapping[str, Sequence[float]], of: str, to: str) -> dict[str, float]:
    """Median, lowest and highest ratio over pairs."""
    values = [a / b for a, b in zip(measured[of], measured[to], strict=True)]
    return {"ratio": statistics.median(values), "lowest": min(values), "highest": max(values)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_shown(row.get(key)) for key in keys] for row in rows]
    lines = ["| " + " | ".join(line) + " |" for line in [keys, ["---"] * len(keys), *cells]]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def report(name: str, rows: Sequence[Mapping[str, Any]], **facts: Any) -> None:
    """Print the table and keep it with the raw figures in results/NAME.json."""
    about = machine()
    print(table(rows))
    print(f"{about['machine']}, torch {about['torch']}, {about['threads']} thread(s), load {about['load']}", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"rows": list(rows), **facts, **about}, indent=1) + "\n", encoding="utf-8")


def in_child(script: str, *arguments: str) -> dict[str, Any]:
    """Run a benchmark script on one case in a process of its own; its last line is JSON."""
    own = {key: value for key, value in os.environ.items() if key not in _PROCESS_GROUP}
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False, env=own)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_bytes() -> int:
    """Peak resident memory of this process (GPU: peak allocated)."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
