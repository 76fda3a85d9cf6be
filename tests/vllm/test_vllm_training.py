"""Training with vLLM rollouts: the engine has the trainer's weights at every step, from every ZeRO stage, or the run stops."""

import pytest

from erpo.trainer import UnhealthyRunError, train
from erpo.vllm_engine import VllmGenerator
from tests.vllm.ranks import FAST


def gaps(place, name: str) -> list[float]:
    return [row["rollout/logprob_gap_mean"] for _, row in sorted(place.rows(name).items())]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_gap_stays_at_its_first_level_over_five_large_updates(place, stage):
    """Sleep, wake and new weights at each step."""
    name = f"five-{stage}"
    train(**place.arguments(name, 5, {**FAST, "evaluate_every": 2}, generator="vllm", zero_stage=stage))
    found = gaps(place, name)
    assert len(found) == 5
    for row in place.rows(name).values():
        assert row["update/applied"] == 1
    assert min(found[:4]) > 0  # log-probs of a policy that draws; after the fifth large update it always says the same
    assert max(found) < 2 * found[0] < 1e-5


def test_an_engine_that_keeps_old_weights_is_caught_at_the_second_step(place, monkeypatch):
    update_weights, first = VllmGenerator.update_weights, []

    def keep_first(self, named_tensors, version):
        if not first:
            first.extend((name, tensor.clone()) for name, tensor in named_tensors)
        update_weights(self, first, version)

    monkeypatch.setattr(VllmGenerator, "update_weights", keep_first)
    with pytest.raises(UnhealthyRunError, match=r"stopped at step 2: rollout/logprob_gap_mean is .* above 0\.1"):
        train(**place.arguments("stale", 5, {**FAST, "entropy_coef": 0.0}, generator="vllm", save_every=1))
    first, second = gaps(place, "stale")
    assert first < 1e-5 < 0.1 < second
    assert [path.name for path in (place.root / "runs/stale/work/states").glob("step*")] == ["step1"]


def test_an_engine_in_a_process_of_its_own_gets_every_update(place):
    train(**place.arguments("apart", 3, FAST, generator="vllm", rollout_gpus=1, zero_stage=3))
    found = gaps(place, "apart")
    assert len(found) == 3
    assert max(found) < 3 * found[0] < 1e-5
