"""Several ranks with vLLM rollouts, as torchrun starts them."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize("machine", [{"tensor_parallel": 1, "zero_stage": 3}, {"tensor_parallel": 2, "zero_stage": 1}])
def test_two_ranks_have_an_engine_each_or_share_one(place, machine):
    """Data-parallel engines fed from ZeRO 3, and one engine over two ranks: each holds half of every layer."""
    name = f"ranks-{machine['tensor_parallel']}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.vllm.ranks"]
    done = subprocess.run(
        [*command, str(place.root), name, "3", json.dumps(machine)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [row["rollout/logprob_gap_mean"] for _, row in sorted(place.rows(name).items())]
    assert len(found) == 3
    assert max(found) < 2 * found[0] < 1e-4
    assert all(row["update/applied"] == 1 for row in place.rows(name).values())
