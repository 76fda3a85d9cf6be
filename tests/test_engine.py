"""DeepSpeed behind the engine: every stage gives a plain loop's numbers, accumulates exactly, saves and restores bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import group

SCRIPT = Path(__file__).with_name("engine_script.py")
STAGES = (0, 1, 2, 3)


def run_engine(folder: Path, ranks: int, scenarios: dict) -> dict:
    """Run scenarios one after the other on `ranks` processes and return what rank 0 reports."""
    given, out = folder / f"scenarios-{ranks}.json", folder / f"found-{ranks}.json"
    given.write_text(json.dumps(scenarios))
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(given), str(out)],
            env={**os.environ, **variables, "PYTHONPATH": str(SCRIPT.parents[1])},
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in group(ranks)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=400)
        assert process.returncode == 0, errors[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """All scenarios, on one and on two ranks (starting a process costs far more than the updates)."""
    folder = tmp_path_factory.mktemp("engine")
    two = {f"stage {stage}, 2 ranks": {"stage": stage} for stage in STAGES}
    two["saved on 2 ranks"] = {"stage": 2, "updates": 2, "save": str(folder / "from-two")}
    one: dict = {"plain": {"plain": True}, "plain 4": {"plain": True, "updates": 4}}
    for stage in STAGES:
        state = str(folder / f"state-{stage}")
        one[f"stage {stage}"] = {"stage": stage}
        one[f"whole {stage}"] = {"stage": stage, "updates": 4}
        one[f"first half {stage}"] = {"stage": stage, "updates": 2, "save": state}
        one[f"second half {stage}"] = {"stage": stage, "updates": 4, "start": 2, "load": state}
        one[f"poisoned {stage}"] = {"stage": stage, "updates": 3, "poison": 1}
    one["2 ranks to 1"] = {"stage": 1, "updates": 4, "start": 2, "load": str(folder / "from-two")}
    return {**run_engine(folder, 2, two), **run_engine(folder, 1, one)}


def largest_difference(a: dict, b: dict) -> float:
    x, y = torch.tensor(a["parameters"]), torch.tensor(b["parameters"])
    return float((x - y).abs().max())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_stage_equals_a_plain_loop(found, stage, ranks):
    ours, plain = found[f"stage {stage}" + (", 2 ranks" if ranks == 2 else "")], found["plain"]
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-6)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert largest_difference(ours, plain) < 5e-6


@pytest.mark.parametrize("stage", STAGES)
def test_a_restored_engine_goes_on_bit_for_bit(found, stage):
    whole, rest = found[f"whole {stage}"], found[f"second half {stage}"]
    assert rest["losses"] == whole["losses"][2:]
    assert largest_difference(whole, rest) == 0.0


def test_a_state_of_two_ranks_goes_on_with_one_and_another_stage(found):
    assert largest_difference(found["2 ranks to 1"], found["plain 4"]) < 5e-6


@pytest.mark.parametrize("stage", STAGES)
def test_a_non_finite_gradient_is_skipped(found, stage):
    poisoned = found[f"poisoned {stage}"]
    assert poisoned["applied"] == [True, False, True]
    assert all(abs(value) < 1e3 for value in poisoned["parameters"])
