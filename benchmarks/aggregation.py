"""Time and memory of turning scores into numbers, at the size of the paper's evaluation.

    python benchmarks/aggregation.py [CHECKPOINTS]     # default 10, each of 763,200 samples

Prints seconds to count all samples, to summarise every cell of a main table, and the peak memory of the process.
"""

import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from erpo.paper.aggregate import problem_values, read_scores  # noqa: E402
from erpo.paper.summaries import Place, difference, summarise  # noqa: E402
from tests.synthetic import simulate_scores, write_cell  # noqa: E402

SIZES = {"aime24": 30, "aime25": 30, "amc": 83, "math500": 500, "minerva": 272, "olympiadbench": 675}
TEMPERATURES = [round(0.1 * index, 1) for index in range(1, 16)]
SAMPLES = 32


def write_study(folder, checkpoints):
    rng = np.random.default_rng(0)
    paths = []
    for index in range(checkpoints):
        table = simulate_scores(rng, lambda _, t: 0.5 - 0.2 * t, SIZES, TEMPERATURES, SAMPLES)
        paths.append(write_cell(folder, table, f"run{index}", 0, 240, SAMPLES, SIZES, TEMPERATURES))
    return paths


def main(checkpoints):
    with tempfile.TemporaryDirectory() as folder:
        paths = write_study(folder, checkpoints)
        written = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begun = time.monotonic()
        scores = read_scores(paths, SAMPLES)
        counted = time.monotonic()
        for metric in ("avg@n", "pass@n", "pass@1"):
            values = problem_values(scores, metric)
            for index in range(checkpoints):
                for names in [(name,) for name in SIZES] + [tuple(SIZES)]:
                    place = Place(f"run{index}", 240, (0,), names, tuple(TEMPERATURES))
                    summarise(scores, values, place)
                    difference(scores, values, place, place._replace(run="run0"))
        done = time.monotonic()
        print(f"{int(scores.counts['found'].sum()):,} samples of {checkpoints} checkpoints")
        print(f"counted in {counted - begun:.1f} s, {checkpoints * 7 * 3} cells summarised in {done - counted:.1f} s")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"peak memory {peak / 2**20:.2f} GiB (of which making the input: up to {written / 2**20:.2f} GiB)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
