"""The trainer: resumed equals uninterrupted, bit for bit; what should change nothing changes nothing; trouble is survived."""

import json
import subprocess
import sys

import pytest
import torch

from erpo.trainer import UnhealthyRunError, train
from tests import ranks
from tests.tiny import Place, assert_equal_policies, make_place


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return make_place(tmp_path_factory.mktemp("tiny"))


def moved(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


METRICS = """
reward/mean reward/accuracy reward/format response/length response/truncated_share group/constant_share policy/entropy
ratio/mean ratio/max clip/low_fraction clip/high_fraction kl/query kl/response kl/query_clamped_share kl/response_clamped_share
grad/norm update/applied update/skipped query_weight/mean query_weight/min query_weight/max query_weight/ess query/nll
rollout/logprob_gap_mean rollout/logprob_gap_max time/rollout time/grade time/update time/total tokens_per_second/rollout
tokens_per_second/update memory/peak_gib grader/error_share loss/policy loss/total
"""

METHODS = {
    "erpo": {"kl_on": "query", "query_weight": "reference_likelihood"},
    "ppo": {"advantage": "gae", "kl_on": "query", "value_warmup_steps": 1},
}


@pytest.mark.parametrize("method", METHODS)
def test_resumed_training_equals_uninterrupted_training(place, method):
    """Ten queries, four a step: the cut after step 3 lies in the second epoch."""
    settings = METHODS[method]
    train(**place.arguments(f"{method}-whole", 6, settings))
    train(**place.arguments(f"{method}-cut", 3, settings))
    train(**place.arguments(f"{method}-cut", 6, settings))
    assert_equal_policies(place.policy(f"{method}-whole", 6), place.policy(f"{method}-cut", 6))
    assert place.rows(f"{method}-whole") == place.rows(f"{method}-cut")
    assert moved(place.policy(f"{method}-cut", 3), place.policy(f"{method}-cut", 6)) > 1e-4


def test_without_coefficient_and_weight_query_kl_is_the_base_method(place):
    base = {"updates_per_step": 1, "query_weight": "none"}
    train(**place.arguments("base-method", 3, {**base, "kl_on": "none"}))
    train(**place.arguments("erpo-off", 3, {**base, "kl_on": "query", "kl_coef": 0.0}))
    assert_equal_policies(place.policy("base-method", 3), place.policy("erpo-off", 3))


def test_every_metric_of_the_protocol_is_logged(place):
    train(**place.arguments("metrics", 2, METHODS["erpo"]))
    row = json.loads((place.root / "runs/metrics/work/metrics.jsonl").read_text().splitlines()[1])
    for key in METRICS.split():
        assert isinstance(row[key], float | int), key
    assert row["update/applied"] == 2
    assert row["rollout/logprob_gap_mean"] < 1e-5
    samples = [json.loads(line) for line in (place.root / "runs/metrics/work/samples.jsonl").read_text().splitlines()]
    assert {"query", "response", "gold", "verdict", "reason", "reward"} <= samples[0].keys()


def test_both_kls_are_exactly_zero_before_the_first_update(place):
    train(**place.arguments("first", 1, {"kl_on": "all", "updates_per_step": 1}))
    row = place.rows("first")[1]
    assert row["kl/query"] == pytest.approx(0.0, abs=1e-12)
    assert row["kl/response"] == 0.0
    assert row["ratio/mean"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage": "group_normalized", "refill_constant_groups": True, "refill_rounds": 1},
        {"advantage": "leave_one_out", "kl_on": "query", "query_weight": "reference_inverse_nll"},
        {"advantage": "group_mean", "normalizer": "constant", "clip_high": 0.2, "kl_on": "none"},
        {"kl_on": "query", "query_weight": "online_inverse_nll", "importance_cap": 2.0},
        {"kl_form": "future"},
        {"kl_form": "importance_weighted", "entropy_coef": 0.01, "ratio": "sequence"},
    ],
)
def test_settings_train_end_to_end(place, settings):
    name = "-".join(settings)
    train(**place.arguments(name, 2, settings))
    assert all(torch.isfinite(tensor).all() for tensor in place.policy(name, 2).values())


def test_finished_work_is_found_and_other_settings_are_refused(place):
    arguments = place.arguments("once", 2, METHODS["erpo"])
    train(**arguments)
    first = arguments["marker"].read_text()
    arguments["marker"].unlink()
    before = (place.root / "runs/once/work/metrics.jsonl").read_text()
    train(**arguments)
    assert arguments["marker"].read_text() == first
    assert (place.root / "runs/once/work/metrics.jsonl").read_text() == before
    other = place.arguments("once", 2, {**METHODS["erpo"], "learning_rate": 2e-3})
    with pytest.raises(ValueError, match=r"run\.learning_rate: 0\.001 -> 0\.002"):
        train(**other)
    train(**other, supersede=True)
    assert (place.root / "runs/once/work.superseded-1/policies/step2").is_dir()


def test_a_damaged_newest_state_costs_one_save_interval_and_no_number(place):
    train(**place.arguments("damaged", 6, METHODS["erpo"], save_every=1, keep_states=3))
    whole = place.policy("damaged", 6)
    work = place.root / "runs/damaged/work"
    (work / "policies/step6/model.safetensors").unlink()
    tensors = work / "states/step6/tensors-0.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-7])
    (work / "states/step5/manifest.json").write_text("")
    train(**place.arguments("damaged", 6, METHODS["erpo"], save_every=1, keep_states=3))
    assert_equal_policies(whole, place.policy("damaged", 6))


def test_non_finite_weights_stop_the_run_and_are_never_saved(place, monkeypatch):
    from erpo.engine import Engine

    train(**place.arguments("sick", 2, METHODS["erpo"], save_every=1))
    healthy = Engine.backward
    monkeypatch.setattr(Engine, "backward", lambda self, loss: healthy(self, loss * float("inf")))
    with pytest.raises(UnhealthyRunError, match=r"stopped at step 4: update/skipped"):
        train(**place.arguments("sick", 6, METHODS["erpo"], save_every=1, max_skipped_updates=4))
    monkeypatch.undo()
    train(**place.arguments("sick", 6, METHODS["erpo"], save_every=1))
    assert all(torch.isfinite(tensor).all() for tensor in place.policy("sick", 6).values())


# --- real processes ----------------------------------------------------------------------------------------------------


def test_missing_input_is_one_sentence_before_any_work(place):
    given = place.command("missing", 1, METHODS["erpo"])
    given[given.index("--queries") + 1] = str(place.root / "nowhere.parquet")
    command = [sys.executable, "-m", "erpo", *given]
    found = subprocess.run(command, env=ranks.environment(), capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert "no queries at" in found.stderr.strip().splitlines()[-1]
    assert "Traceback" not in found.stderr
