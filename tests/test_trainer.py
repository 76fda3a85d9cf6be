"""The trainer: resumed equals uninterrupted, bit for bit; what should change nothing changes nothing; trouble is survived."""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from erpo.checkpoint import saved_steps
from erpo.config import Machine
from erpo.engine import Engine
from erpo.generation import PolicySampler
from erpo.options import machine_of
from erpo.progress import end_of_job
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


def state(place: Place, name: str, step: int) -> dict[str, torch.Tensor]:
    """Parameters and Adam moments of a training state."""
    return load_file(place.root / "runs" / name / "work/states" / f"step{step}" / "tensors-0.safetensors")


def facts(place: Place, name: str, step: int) -> dict:
    """What a training state says besides: updates made, updates skipped, reward."""
    return json.loads((place.root / "runs" / name / "work/states" / f"step{step}" / "manifest.json").read_text())["info"]


def samples(place: Place, name: str) -> list[dict]:
    """The sample tables: queries and the responses drawn for them."""
    return [json.loads(line) for line in (place.root / "runs" / name / "work/samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", METHODS)
def test_resumed_training_equals_uninterrupted_training(place, method):
    """Ten queries, four a step: the cut after step 3 lies in the second epoch, an evaluation before it."""
    settings = {**METHODS[method], "warmup_steps": 5, "evaluate_every": 2}
    probed = {"probe_paths": [place.queries]}
    train(**place.arguments(f"{method}-whole", 6, settings), **probed)
    train(**place.arguments(f"{method}-cut", 3, settings), **probed)
    train(**place.arguments(f"{method}-cut", 6, settings), **probed)
    whole, cut = f"{method}-whole", f"{method}-cut"
    assert_equal_policies(place.policy(whole, 6), place.policy(cut, 6))
    assert_equal_policies(state(place, whole, 6), state(place, cut, 6))
    assert facts(place, whole, 6) == facts(place, cut, 6)
    assert place.rows(whole) == place.rows(cut)
    assert samples(place, whole) == samples(place, cut)
    assert "eval/accuracy" in place.rows(cut)[4]
    assert moved(place.policy(cut, 3), place.policy(cut, 6)) > 1e-4


def test_an_evaluation_changes_nothing(place):
    train(**place.arguments("unprobed", 2, METHODS["erpo"]))
    train(**place.arguments("probed", 2, {**METHODS["erpo"], "evaluate_every": 1}), probe_paths=[place.queries])
    assert_equal_policies(place.policy("unprobed", 2), place.policy("probed", 2))


def test_lost_states_are_an_error_and_never_a_fresh_start(place):
    train(**place.arguments("lost", 2, METHODS["erpo"]))
    work = place.root / "runs/lost/work"
    (work / "states").rename(work / "elsewhere")
    with pytest.raises(ValueError, match=r"step 2 was reached, but no training state .* verifies: put the states back"):
        train(**place.arguments("lost", 4, METHODS["erpo"]))
    (work / "elsewhere").rename(work / "states")
    train(**place.arguments("lost", 4, METHODS["erpo"]))
    with pytest.raises(ValueError, match="nothing to resume from"):
        Engine.load(None, work / "nowhere")


def test_a_state_of_other_settings_is_refused(place):
    train(**place.arguments("mine", 2, METHODS["erpo"]))
    runs = place.root / "runs"
    (runs / "other/work").mkdir(parents=True)
    shutil.copytree(runs / "mine/work/states", runs / "other/work/states")
    with pytest.raises(ValueError, match="is a state of other settings"):
        train(**place.arguments("other", 3, {**METHODS["erpo"], "learning_rate": 2e-3}))


def test_an_empty_settings_file_is_one_sentence_and_an_empty_marker_is_written_again(place):
    arguments = place.arguments("emptied", 2, METHODS["erpo"])
    train(**arguments)
    marker = arguments["marker"].read_text()
    arguments["marker"].write_text("")
    train(**arguments)
    assert arguments["marker"].read_text() == marker
    (place.root / "runs/emptied/work/spec.json").write_text("")
    with pytest.raises(ValueError, match=r"spec\.json is damaged .*; delete it"):
        train(**arguments)


def test_a_longer_run_is_the_shorter_one_continued(place):
    """States at the milestones stay; the best one by training reward can stay too."""
    options = {"save_every": 1, "keep_states": 1, "keep_best_state": True}
    for step in (2, 5):
        train(**place.arguments("chain", step, METHODS["erpo"], **options))
    work = place.root / "runs/chain/work"
    rewards = {step: row["reward/mean"] for step, row in place.rows("chain").items()}
    best = max(rewards, key=lambda step: (rewards[step], step))
    assert saved_steps(work / "states") == sorted({2, best, 5})
    assert [row["attempt"] for row in map(json.loads, (work / "metrics.jsonl").read_text().splitlines())] == [1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "machine"),
    [
        ({}, {"activation_checkpointing": True}),
        ({}, {"offload_optimizer": True}),
        ({}, {"offload_optimizer": True, "offload_parameters": True, "zero_stage": 3}),
        ({}, {"deterministic": True}),
    ],
    ids=["checkpointing", "optimizer", "parameters", "deterministic"],
)
def test_memory_savers_change_no_number(place, settings, machine):
    name = "-".join(machine)
    train(**place.arguments("spacious", 4, METHODS["erpo"]))
    train(**place.arguments(name, 2, {**METHODS["erpo"], **settings}, **machine))
    train(**place.arguments(name, 4, {**METHODS["erpo"], **settings}, **machine))
    assert moved(place.policy("spacious", 4), place.policy(name, 4)) < 2e-5
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_trains_with_float32_master_weights(place, stage):
    """The learning rate is far below bfloat16's resolution of most weights: only float32 masters can gather such updates."""
    name, settings = f"half-{stage}", {**METHODS["erpo"], "dtype": "bfloat16", "learning_rate": 1e-5}
    train(**place.arguments(f"{name}-whole", 4, settings, zero_stage=stage, max_logprob_gap=1.0))
    train(**place.arguments(name, 2, settings, zero_stage=stage, max_logprob_gap=1.0))
    train(**place.arguments(name, 4, settings, zero_stage=stage, max_logprob_gap=1.0))
    assert place.policy(name, 4)["model.norm.weight"].dtype == torch.bfloat16
    assert_equal_policies(place.policy(f"{name}-whole", 4), place.policy(name, 4))
    masters = {step: state(place, name, step)["param/policy.model.norm.weight"] for step in (2, 4)}
    assert masters[2].dtype == torch.float32
    assert 1e-6 < float((masters[4] - masters[2]).abs().max()) < 1e-4
    assert_equal_policies(state(place, f"{name}-whole", 4), state(place, name, 4))


def test_impossible_machines_are_refused():
    with pytest.raises(ValueError, match="offload_parameters needs zero_stage: 3"):
        Machine(offload_parameters=True)
    with pytest.raises(ValueError, match="offload_optimizer needs zero_stage: 1, 2 or 3"):
        Machine(offload_optimizer=True, zero_stage=0)


def test_a_machine_is_also_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("ERPO_MACHINE", "trackers=tensorboard collapse_watch=stop zero_stage=2")
    arguments = argparse.Namespace(**dict.fromkeys(Machine.model_fields))
    arguments.zero_stage = 3
    found = machine_of(arguments)
    assert (found.trackers, found.collapse_watch, found.zero_stage) == (("tensorboard",), "stop", 3)
    monkeypatch.setenv("ERPO_MACHINE", "zero=2")
    with pytest.raises(ValueError, match="ERPO_MACHINE: 'zero=2' is not KEY=VALUE"):
        machine_of(arguments)


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


def test_a_state_that_does_not_verify_after_its_save_deletes_no_older_one(place, monkeypatch):
    """A disk that loses what it was given: noticed before the state before goes."""
    from erpo import states

    train(**place.arguments("lossy", 2, METHODS["erpo"], keep_states=1, keep_milestone_states=False))
    commit = states.commit_state

    def commit_and_lose(*arguments):
        path = commit(*arguments) / "tensors-0.safetensors"
        path.write_bytes(b"\0" + path.read_bytes()[1:])

    monkeypatch.setattr(states, "commit_state", commit_and_lose)
    with pytest.raises(
        RuntimeError, match=r"does not verify \(tensors-0.safetensors does not match its checksum\); older states are kept"
    ):
        train(**place.arguments("lossy", 4, METHODS["erpo"], keep_states=1, keep_milestone_states=False))
    monkeypatch.undo()
    assert saved_steps(place.root / "runs/lossy/work/states") == [2, 4]
    train(**place.arguments("lossy", 4, METHODS["erpo"], keep_states=1, keep_milestone_states=False))
    train(**place.arguments("sound", 4, METHODS["erpo"]))
    assert_equal_policies(place.policy("sound", 4), place.policy("lossy", 4))


def test_rollouts_of_other_weights_are_never_trained_on(place, monkeypatch):
    """A generator that keeps its weights, and says so, is stopped before its rollouts are used."""
    monkeypatch.setattr(PolicySampler, "update_weights", lambda *arguments: None)
    with pytest.raises(RuntimeError, match="sampled with the weights after 0 updates, but the trainer has made 2"):
        train(**place.arguments("outdated", 3, METHODS["erpo"], save_every=1))
    assert list(place.rows("outdated")) == [1]


def test_a_lost_milestone_is_made_again_from_states_before_it_and_never_from_later_ones(place):
    train(**place.arguments("further", 2, METHODS["erpo"], keep_states=9))
    train(**place.arguments("further", 4, METHODS["erpo"], keep_states=9))
    second, work = place.policy("further", 2), place.root / "runs/further/work"
    for states in ({2, 4}, {4}):  # the milestone's own state is there, or only a later one
        shutil.rmtree(work / "policies/step2")
        for step in {2, 4} - states:
            shutil.rmtree(work / f"states/step{step}")
        if 2 not in states:
            shutil.rmtree(work / "policies/step4")
        train(**place.arguments("further", 2, METHODS["erpo"], keep_states=9))
        assert_equal_policies(second, place.policy("further", 2))


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


def truncate_weights(place: Place) -> dict:
    folder = place.root / "models/torn"
    shutil.copytree(place.root / "models/tiny", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500])
    marker = place.root / "models/torn.json"
    marker.write_text(json.dumps({**json.loads(place.model.read_text()), "policy": "torn"}))
    return {"model_marker": marker}


def remove_tokenizer(place: Place) -> dict:
    """transformers then makes one up from config.json, with an empty vocabulary."""
    folder = place.root / "models/mute"
    shutil.copytree(place.root / "models/tiny", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    marker = place.root / "models/mute.json"
    marker.write_text(json.dumps({**json.loads(place.model.read_text()), "policy": "mute"}))
    return {"model_marker": marker}


def a_file(place: Place) -> Path:
    path = place.root / "in-the-way"
    path.write_text("{}")
    return path


BAD_INPUTS = {
    "a folder for a marker": (lambda place: {"model_marker": place.root}, "cannot be read: Is a directory"),
    "another kind of marker": (lambda place: {"model_marker": a_file(place)}, "it says nothing of policy, policy_hash"),
    "truncated weights": (truncate_weights, r"the model in .*torn cannot be loaded: .*; make or fetch it again"),
    "work is a file": (lambda place: {"work": a_file(place)}, "in-the-way cannot be made: File exists"),
    "no folder for the marker": (lambda place: {"marker": a_file(place) / "step1.json"}, "in-the-way cannot be made"),
    "the marker is a folder": (lambda place: {"marker": place.root}, "is a folder; name a file"),
    "a tokenizer that is gone": (remove_tokenizer, "was made with another tokenizer"),
    "a negative step": (lambda place: {"step": -3}, "step is -3"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_bad_input_is_refused_in_one_sentence_before_any_step(place, name):
    change, message = BAD_INPUTS[name]
    with pytest.raises(ValueError, match=message):
        train(**{**place.arguments(f"bad {name}", 1, METHODS["erpo"]), **change(place)})
    assert not (place.root / "runs" / f"bad {name}" / "work/metrics.jsonl").exists()


def test_an_end_time_that_is_no_number_is_named(monkeypatch):
    monkeypatch.delenv("ERPO_END_TIME", raising=False)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME is 'tomorrow', but it must be seconds since 1970"):
        end_of_job()
