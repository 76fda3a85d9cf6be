"""Several processes: ranks with vLLM rollouts as torchrun starts them, and an engine over processes that vLLM starts."""

import json
import subprocess
import sys

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from erpo.generation import Request, Sampling
from erpo.records import read_queries
from erpo.vllm_process import VllmProcess
from tests.conftest import ROOT
from tests.vllm.checks import jitter, largest_gap


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
    assert max(found) < 3 * found[0] < 1e-5
    assert all(row["update/applied"] == 1 for row in place.rows(name).values())


@pytest.mark.slow
def test_an_engine_over_two_processes_takes_over_weights_from_files(place):
    folder = place.root / "models" / "tiny"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    requests = [Request(query.query_id, query.prompt_ids, (1, 2)) for query in read_queries(place.queries)]
    engine = VllmProcess(folder, [], dtype="float32", max_length=128, tensor_parallel=2)
    try:
        sampling = Sampling(1.0, 1.0, 12, (0,))
        assert largest_gap(model, requests, engine.generate(requests, sampling)) < 1e-4
        engine.update_weights(jitter(model, seed=1), version=3)
        groups = engine.generate(requests, sampling)
        assert largest_gap(model, requests, groups) < 1e-4
        assert {rollout.weights_version for group in groups for rollout in group} == {3}
        with pytest.raises(ValueError, match="empty prompt"):
            engine.generate([Request("q", (), (1,))], sampling)
        assert np.array_equal(engine.generate(requests, sampling)[0][0].response_ids, groups[0][0].response_ids)
        started = psutil.Process(engine._process.pid).children(recursive=True)
        assert len(started) >= 2
    finally:
        engine.close()
    assert psutil.wait_procs(started, timeout=20)[1] == []
