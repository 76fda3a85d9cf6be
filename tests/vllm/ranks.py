"""One rank of a training run with vLLM rollouts: ROOT NAME STEPS MACHINE (JSON), under torchrun."""

import json
import sys
from pathlib import Path

from erpo.trainer import train
from tests.tiny import Place

FAST = {
    "learning_rate": 1e-2,
    "updates_per_step": 1,
    "kl_on": "query",
    "query_weight": "reference_likelihood",
    "entropy_coef": 1.0,
}
"""One large update a step; the entropy bonus keeps the policy from settling on one response."""

if __name__ == "__main__":
    root, name, steps, machine = sys.argv[1:]
    train(**Place(Path(root)).arguments(name, int(steps), FAST, generator="vllm", **json.loads(machine)))
