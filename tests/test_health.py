"""A run that goes wrong says so: non-finite gradients, collapse, steps without signal, broken trackers."""

import json
import logging

import numpy as np
import pytest
import torch

from erpo.checkpoint import newest_state, read_json
from erpo.config import Machine
from erpo.engine import Engine
from erpo.health import NO_SIGNAL, UnhealthyRunError, Watch, lack_of_signal
from erpo.progress import describe_status
from erpo.trackers import Trackers
from erpo.trainer import train
from tests.tiny import Place, assert_equal_policies, make_place

ERPO = {"kl_on": "query", "query_weight": "reference_likelihood"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return make_place(tmp_path_factory.mktemp("health"))


# --- non-finite gradients ----------------------------------------------------------------------------------------------


def inject(monkeypatch, backwards: range, value: float = float("inf")) -> None:
    """Make the losses of some backward passes (numbered from 1) infinite."""
    healthy, count = Engine.backward, [0]

    def backward(self, loss):
        count[0] += 1
        healthy(self, loss * value if count[0] in backwards else loss)

    monkeypatch.setattr(Engine, "backward", backward)


def test_one_infinite_gradient_is_skipped_counted_and_reported(place, monkeypatch, caplog):
    inject(monkeypatch, range(3, 4))  # two updates of one micro-batch a step: the first of step 2
    with caplog.at_level(logging.WARNING):
        train(**place.arguments("once", 3, ERPO))
    rows = place.rows("once")
    assert [rows[step]["update/skipped"] for step in (1, 2, 3)] == [0, 1, 0]
    assert [rows[step]["update/applied"] for step in (1, 2, 3)] == [2, 1, 2]
    assert "step 2: 1 updates skipped for a non-finite gradient" in caplog.text
    facts = read_json(place.root / "runs/once/work/states/step3/manifest.json")["info"]
    assert facts["updates"] == 5
    assert all(torch.isfinite(tensor).all() for tensor in place.policy("once", 3).values())


@pytest.mark.parametrize("stage", [0, 1])
def test_from_one_step_on_the_run_stops_and_the_last_healthy_state_stands(place, monkeypatch, stage):
    name = f"sick-{stage}"
    inject(monkeypatch, range(7, 1000))  # from step 4 on
    with pytest.raises(UnhealthyRunError, match=r"stopped at step 5: update/skipped is 4, above 3"):
        train(**place.arguments(name, 9, ERPO, save_every=3, max_skipped_updates=4, zero_stage=stage))
    assert newest_state(place.root / "runs" / name / "work/states")[0] == 3
    monkeypatch.undo()
    train(**place.arguments(name, 6, ERPO, save_every=3, zero_stage=stage))
    train(**place.arguments(f"well-{stage}", 6, ERPO, save_every=3, zero_stage=stage))
    assert_equal_policies(place.policy(name, 6), place.policy(f"well-{stage}", 6))
    assert place.rows(name) == place.rows(f"well-{stage}")


def test_skipped_updates_in_a_row_are_counted_across_a_restart(place, monkeypatch):
    inject(monkeypatch, range(3, 1000))  # from step 2 on, two a step
    train(**place.arguments("cut-short", 2, ERPO, max_skipped_updates=4))
    with pytest.raises(UnhealthyRunError, match=r"stopped at step 3: update/skipped is 4, above 3"):
        train(**place.arguments("cut-short", 9, ERPO, max_skipped_updates=4))


def test_weights_that_are_not_finite_are_never_saved(place, monkeypatch):
    train(**place.arguments("poisoned", 2, ERPO))
    healthy = Engine.step

    def step(self, *args, **kwargs):
        result = healthy(self, *args, **kwargs)
        with torch.no_grad():
            next(self.module.value_head.parameters()).fill_(float("nan"))
        return result

    ppo = {"advantage": "gae", "kl_on": "query"}
    monkeypatch.setattr(Engine, "step", step)
    with pytest.raises(UnhealthyRunError, match=r"stopped at step [12]: .*value_head"):
        train(**place.arguments("poisoned-critic", 2, ppo, zero_stage=0))
    assert newest_state(place.root / "runs/poisoned-critic/work/states") is None


# --- the watch ---------------------------------------------------------------------------------------------------------


def watched(rows: list[dict], **settings) -> list[str]:
    watch = Watch(Machine(collapse_window=4, **settings))
    return [text for step, row in enumerate(rows, 1) for text in watch.look(step, row)]


def series(**values) -> list[dict]:
    healthy = {"policy/entropy": 1.0, "reward/mean": 0.5, "response/length": 100.0, "kl/query": 0.01, NO_SIGNAL: 0.0}
    names = {"entropy": "policy/entropy", "reward": "reward/mean", "length": "response/length", "drift": "kl/query"}
    steps = max(map(len, values.values()))
    rows = [dict(healthy) for _ in range(steps)]
    for name, numbers in values.items():
        for row, number in zip(rows, numbers, strict=True):
            row[names.get(name, name)] = number
    return rows


def test_a_healthy_run_is_left_alone():
    noise = np.random.default_rng(0).normal(0, 0.05, 200)
    rows = series(entropy=1 + noise, reward=0.3 + noise, length=100 + 100 * noise)
    assert watched(rows) == []


def test_each_kind_of_collapse_is_named_with_its_step():
    """Windows of four steps: means of the last four fall below a tenth of the first four, and so on."""
    assert watched(series(entropy=[1.0] * 4 + [0.05] * 4)) == [
        "step 8: policy/entropy is 0.05 over the last 4 steps, below 0.1 of its start (1): responses become all alike"
    ]
    assert watched(series(reward=[0.8] * 4 + [0.3] * 4)) == [
        "step 8: reward/mean is 0.3 over the last 4 steps, below 0.5 of its best (0.8)"
    ]
    assert watched(series(length=[100.0] * 4 + [500.0] * 4)) == [
        "step 8: response/length is 500 over the last 4 steps and was 100: more than a factor of 4"
    ]
    assert len(watched(series(length=[100.0] * 4 + [5.0] * 4))) == 1
    assert watched(series(drift=[0.1] * 4 + [1.3] * 4)) == ["step 8: kl/query is 1.3 over the last 4 steps, above 1 per token"]
    assert watched(series(**{NO_SIGNAL: [0.0] * 2 + [1.0] * 4})) == [
        f"step 6: {NO_SIGNAL} is 1 over the last 4 steps: no reward differs, so nothing is learnt from rewards"
    ]


def test_the_watch_repeats_itself_once_a_window_and_can_be_off():
    rows = series(entropy=[1.0] * 4 + [0.05] * 12)
    assert [text.split(":")[0] for text in watched(rows)] == ["step 8", "step 12", "step 16"]
    assert watched(rows, collapse_watch="off") == []


def test_a_noisy_reward_does_not_alarm():
    rows = series(reward=[0.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.16, 0.0])
    assert watched(rows) == []


def test_the_watch_goes_on_where_a_resumed_run_left_it():
    rows = series(entropy=[1.0] * 4 + [0.05] * 4)
    watch = Watch(Machine(collapse_window=4), [(step, row) for step, row in enumerate(rows[:6], 1)])
    assert [text for step in (7, 8) for text in watch.look(step, rows[step - 1])] == watched(rows)


def test_a_run_warns_and_stops_as_set_and_status_shows_it(place):
    """An untrained policy shortens its responses to one token at once, and its rewards become all alike."""
    settings = {**ERPO, "learning_rate": 3e-3}
    train(**place.arguments("warned", 6, settings, collapse_window=2))
    (line,) = [line for line in describe_status(place.root / "runs/warned") if "warning" in line]
    assert "step 6" in line
    with pytest.raises(UnhealthyRunError, match=r"stopped by the collapse watch at step \d: "):
        train(**place.arguments("stopped", 6, settings, collapse_window=2, collapse_watch="stop"))


def test_status_survives_an_empty_progress_file(place):
    train(**place.arguments("torn-progress", 1, ERPO))
    (place.root / "runs/torn-progress/work/progress.json").write_text("")
    assert "not readable" in describe_status(place.root / "runs/torn-progress")[0]


def test_lack_of_signal_has_a_reason(place):
    from erpo.config import RunConfig
    from erpo.rollouts import Experience

    def experience(*rewards):
        return Experience(queries=[], groups=[], grades=[], formats=np.zeros(0), rewards=np.array(rewards, dtype=float))

    run = RunConfig(dtype="float32")
    assert lack_of_signal(experience([0, 1], [1, 1]), run) is None
    assert lack_of_signal(experience([0, 0], [1, 1]), run) == "within each group all responses earned the same"
    assert lack_of_signal(experience([0, 0], [1, 1]), RunConfig(advantage="batch_mean")) is None
    assert lack_of_signal(experience([0, 0], [0, 0]), run) == "every response earned 0"
    assert lack_of_signal(experience([np.nan, np.nan]), run) == "the grader could judge no response"


# --- trackers ----------------------------------------------------------------------------------------------------------


def test_tensorboard_has_one_value_a_step_after_a_kill(place):
    pytest.importorskip("tensorboard", reason="needs the extra `trackers`")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(**place.arguments("board", 3, ERPO, trackers=("tensorboard",)))
    work = place.root / "runs/board/work"
    for folder in ("states/step3", "policies/step3"):  # as after a kill before the last save
        (work / folder).rename(work / folder.replace("step3", "lost3"))
    train(**place.arguments("board", 4, ERPO, trackers=("tensorboard",)))
    events = EventAccumulator(str(work / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("kl/query")]
    rows = place.rows("board")
    assert [step for step, _ in shown] == [1, 2, 3, 4]
    assert [value for _, value in shown] == pytest.approx([rows[step]["kl/query"] for step in (1, 2, 3, 4)], rel=1e-6)


def test_wandb_offline_gets_every_step(place, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra `trackers`")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(**place.arguments("bias", 2, ERPO, trackers=("wandb",)))
    assert list((place.root / "runs/bias/work/wandb").glob("offline-run-*/*.wandb"))


def test_a_tracker_that_is_missing_is_refused_and_one_that_breaks_is_dropped(tmp_path, caplog):
    with pytest.raises(ValueError, match="'paper' is not known; there are: tensorboard, wandb"):
        Trackers(["paper"], "run", tmp_path, {}, 0)

    class Broken:
        errors = (OSError,)

        def log(self, step, row):
            raise OSError("no network")

        def close(self):
            raise OSError("still none")

    trackers = Trackers([], "run", tmp_path, {}, 0)
    trackers.open = [Broken()]
    trackers.log(3, {"a": 1.0})
    assert trackers.open == []
    assert "Broken failed at step 3 (no network); the run goes on without it" in caplog.text


def test_the_log_keeps_attempts_and_the_latest_wins(place):
    train(**place.arguments("attempts", 2, ERPO))
    work = place.root / "runs/attempts/work"
    for folder in ("states", "policies"):
        (work / folder).rename(work / f"lost-{folder}")
    with (work / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 3, "atte')  # cut by a kill
    train(**place.arguments("attempts", 2, ERPO))
    complete = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]
    assert [(row["step"], row["attempt"]) for row in complete] == [(1, 1), (2, 1), (1, 2), (2, 2)]
