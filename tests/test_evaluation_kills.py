"""kill -9 through the command line: five times while `erpo generate` draws, five times while `erpo score` grades."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from erpo.inspection import verdict_table
from erpo.paper.aggregate import problem_values
from erpo.paper.aggregate import read_scores as count_scores
from erpo.scores import read_scores
from tests.test_evaluation import Study

pytestmark = pytest.mark.slow
TEMPERATURES = [round(0.1 * i, 1) for i in range(1, 16)]
SAMPLES = 16


def command(study, verb):
    sampling = {"temperatures": TEMPERATURES, "samples": SAMPLES, "top_p": 1.0, "max_response_tokens": 40}
    spec = sampling if verb == "generate" else {"study": "s", "run": "base", "seed": 0, "step": 0, **sampling}
    files = {
        "generate": ["--policy", study.policy.with_suffix(".json"), "--marker", study.root / "m.json", "--seed", "0"],
        "score": ["--markers", study.root / "m.json", "--out", study.root / "scores/step0.parquet"],
    }[verb]
    shared = ["--benchmarks", *study.benchmarks.values(), "--store", study.store, "--spec", json.dumps(spec)]
    return [sys.executable, "-m", "erpo", verb, *map(str, files), *map(str, shared)]


def kill_when(arguments, pieces):
    """SIGKILL the command, its whole session with it, as soon as it has written something new."""
    before = pieces()
    with subprocess.Popen(arguments, start_new_session=True, stderr=subprocess.DEVNULL) as process:
        while not pieces().keys() - before.keys():
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert before.items() <= pieces().items()  # what was there is there, untouched


def test_tables_after_ten_kills_equal_those_without(tmp_path):
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    studies = [Study(tmp_path / "whole"), cut := Study(tmp_path / "cut")]

    def parts():
        return {path: path.stat().st_mtime_ns for path in cut.store.rglob("part-*.parquet")}

    def graded():
        return {path: path.stat().st_mtime_ns for path in (cut.root / "scores").glob(".step0.unfinished/t*.parquet")}

    for _ in range(5):
        kill_when(command(cut, "generate"), parts)
        assert not (cut.root / "m.json").exists()
    drawn = parts()
    for study in studies:
        subprocess.run(command(study, "generate"), check=True)
    assert drawn.items() <= parts().items()
    rows = cut.rows()
    assert len({row["seed"] for row in rows}) == len(rows) == 15 * 8 * SAMPLES  # nothing drawn twice
    stored = parts()
    for _ in range(5):
        kill_when(command(cut, "score"), graded)
        assert not (cut.root / "scores/step0.parquet").exists()
    for study in studies:
        subprocess.run(command(study, "score"), check=True)
    assert parts() == stored
    files = [study.root / "scores/step0.parquet" for study in studies]
    assert read_scores(files[0])[0].equals(read_scores(files[1])[0])
    assert verdict_table(files[:1]) == verdict_table(files[1:])
    values = [problem_values(count_scores([file], SAMPLES), "avg@n") for file in files]
    assert (values[0] == values[1]).all()
