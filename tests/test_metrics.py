"""Metrics against enumeration, known rates and hand-worked numbers."""

import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erpo.metrics import (
    avg_at_k,
    bootstrap_interval,
    maj_at_k,
    majority_answer,
    paired_difference,
    pass_at_k,
    read_log,
    sampling_interval,
    student_quantile,
)

NAN = math.nan

# --- one value a problem ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 11))
def test_pass_at_k_equals_enumeration_of_all_subsets(n: int) -> None:
    for c in range(n + 1):
        marks = [1] * c + [0] * (n - c)
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(marks, k))
            exact = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k).item() == pytest.approx(exact, abs=1e-15)


def test_pass_at_k_of_too_few_samples_is_undefined_never_1() -> None:
    found = pass_at_k(np.array([3, 4, 8]), np.array([3, 4, 0]), 5)
    assert np.isnan(found[:2]).all()
    assert found[2] == 0


def test_pass_at_k_stays_exact_for_many_samples() -> None:
    assert pass_at_k(2048, 1, 1024).item() == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, c, k)


def test_avg_at_k_leaves_missing_samples_out() -> None:
    correct = np.array([[1, 0, NAN, 1], [0, 0, 0, 1], [NAN, NAN, NAN, NAN]])
    np.testing.assert_allclose(avg_at_k(correct), [2 / 3, 0.25, NAN])
    np.testing.assert_allclose(avg_at_k(correct, 2), [0.5, 0.0, NAN])
    np.testing.assert_allclose(avg_at_k(correct, 3), [NAN, 0.0, NAN])
    np.testing.assert_allclose(avg_at_k(correct, 5), [NAN] * 3)


def test_majority_ties_go_to_the_answer_seen_first_and_silence_does_not_vote() -> None:
    answers = [["4", "5", "5", "4"], [None, None, "7"], [None, None], ["1", "2", "2"], []]
    correct = [[0, 1, 1, 0], [0, 0, 1], [0, 0], [1, 0, 0], []]
    np.testing.assert_allclose(maj_at_k(answers, correct), [0, 1, 0, 0, NAN])
    np.testing.assert_allclose(maj_at_k(answers, correct, 2), [0, 0, 0, 1, NAN])
    assert majority_answer([None, None]) is None


# --- intervals --------------------------------------------------------------------------------------------------------

POPULATIONS = {
    "AIME-like": ((0.2, 1.8), 0.1),
    "AMC-like": ((0.5, 1.5), 0.25),
    "all or nothing": ((0.3, 0.3), 0.5),
    "easy": ((3.0, 0.5), 3 / 3.5),
}


def draw(rng: np.random.Generator, num_problems: int, shape: tuple[float, float], samples: int) -> tuple[np.ndarray, np.ndarray]:
    rates = rng.beta(*shape, num_problems)
    return rates, (rng.random((num_problems, samples)) < rates[:, None]).astype(float)


@pytest.mark.parametrize("num_problems", [30, 83])
@pytest.mark.parametrize("name", POPULATIONS)
def test_intervals_cover_known_rates_in_93_to_97_of_100(num_problems: int, name: str) -> None:
    """Over problems: the mean rate of the population. Over samples: the mean rate of these problems."""
    shape, truth = POPULATIONS[name]
    rng = np.random.default_rng(11)
    hits = np.zeros(2)
    for _ in range(1000):
        rates, correct = draw(rng, num_problems, shape, 16)
        over_problems = bootstrap_interval(avg_at_k(correct), seed=0, resamples=1000)
        over_samples = sampling_interval(correct)
        hits += [over_problems.low <= truth <= over_problems.high, over_samples.low <= rates.mean() <= over_samples.high]
    assert 930 <= hits[0] <= 970
    assert 930 <= hits[1] <= 970


def test_the_average_of_several_benchmarks_is_covered_too() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(1000):
        tables = [draw(rng, size, shape, 8)[1] for size, (shape, _) in zip((30, 30, 83, 60), POPULATIONS.values(), strict=True)]
        interval = bootstrap_interval([avg_at_k(table) for table in tables], seed=0, resamples=1000)
        hits += interval.low <= np.mean([truth for _, truth in POPULATIONS.values()]) <= interval.high
    assert 930 <= hits <= 970


def test_the_paired_test_holds_its_level_and_finds_real_differences() -> None:
    rng = np.random.default_rng(3)
    false, found = 0, 0
    for _ in range(1000):
        rates, first = draw(rng, 83, (0.5, 1.5), 16)
        second, better = ((rng.random(first.shape) < r[:, None]).astype(float) for r in (rates, np.clip(rates + 0.06, 0, 1)))
        false += paired_difference(avg_at_k(first), avg_at_k(second), seed=0, resamples=1000).p_value <= 0.05
        found += paired_difference(avg_at_k(better), avg_at_k(first), seed=0, resamples=1000).p_value <= 0.05
    assert 25 <= false <= 65
    assert found > 950


def test_paired_difference_by_hand() -> None:
    found = paired_difference([1.0, 0.5, 0.25, NAN], [0.5, 0.5, 0.5, 1.0], seed=1)
    assert found.mean == pytest.approx(0.25 / 3)
    assert found.num_problems == 3
    assert found.low <= found.mean <= found.high
    # the eight sign patterns of (0.5, 0, -0.25) sum to ±0.75 or ±0.25: none is nearer to 0 than the observed 0.25
    assert found.p_value == pytest.approx(1.0)


def test_equal_methods_differ_by_exactly_0() -> None:
    values = np.random.default_rng(0).random(30)
    found = paired_difference(values, values, seed=0)
    assert (found.mean, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_pairs_need_the_same_problems() -> None:
    with pytest.raises(ValueError, match="same problems"):
        paired_difference([1.0, 0.0], [1.0], seed=0)


@pytest.mark.parametrize(("value", "low", "high"), [(0.0, 0.0, 1 - 0.025 ** (1 / 30)), (1.0, 0.025 ** (1 / 30), 1.0)])
def test_a_benchmark_at_the_floor_or_the_ceiling_still_has_a_width(value: float, low: float, high: float) -> None:
    interval = bootstrap_interval(np.full(30, value), seed=0)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((value, low, high))


def test_too_few_problems_have_no_interval() -> None:
    one = bootstrap_interval([0.5], seed=0)
    assert one.mean == 0.5
    assert math.isnan(one.low)
    assert math.isnan(bootstrap_interval([NAN, NAN], seed=0).mean)
    assert math.isnan(bootstrap_interval([[0.5, 0.25], [NAN]], seed=0).mean)
    assert math.isnan(sampling_interval(np.array([[1.0], [0.0]])).low)


def test_missing_problems_are_left_out_and_counted() -> None:
    interval = bootstrap_interval([1.0, 0.0, NAN, 0.5], seed=0)
    assert interval.mean == 0.5
    assert interval.num_problems == 3


def test_student_quantiles() -> None:
    table = {
        (0.975, 1): 12.7062,
        (0.975, 2): 4.3027,
        (0.95, 5): 2.0150,
        (0.975, 29): 2.0452,
        (0.995, 30): 2.7500,
        (0.975, 400): 1.9659,
        (0.975, 10**6): 1.9600,
    }
    for (probability, freedom), value in table.items():
        assert student_quantile(probability, freedom) == pytest.approx(value, abs=1e-4)


def test_no_global_random_state_is_touched_and_seeds_decide() -> None:
    np.random.seed(0)
    before, plain = np.random.get_state()[1].tolist(), random.getstate()
    values = np.random.default_rng(1).random(50)
    first = bootstrap_interval(values, seed=3)
    paired_difference(values, values[::-1], seed=3)
    maj_at_k([["a"]], [[1]])
    assert np.random.get_state()[1].tolist() == before
    assert random.getstate() == plain
    assert bootstrap_interval(values, seed=3) == first
    assert bootstrap_interval(values, seed=4) != first


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_intervals_stay_within_bounds_and_around_the_mean(values: list[float]) -> None:
    interval = bootstrap_interval(values, seed=0, resamples=500)
    assert 0 <= interval.low <= interval.high <= 1
    assert interval.low <= interval.mean <= interval.high


# --- logs -------------------------------------------------------------------------------------------------------------


def write(path: Path, *rows: dict | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_the_latest_attempt_wins_and_a_discarded_past_is_dropped(tmp_path: Path) -> None:
    first = [{"step": s, "attempt": 1, "x": s} for s in range(1, 8)]
    second = [{"step": s, "attempt": 2, "x": -s} for s in (5, 6)]
    path = write(tmp_path / "metrics.jsonl", *first, *second)
    assert [(row["step"], row["x"]) for row in read_log(path)] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, -5), (6, -6)]


def test_torn_lines_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "metrics.jsonl", {"step": 1, "x": 1}, '{"step": 2, "x"', {"step": 2, "attempt": 2, "x": 4}, "")
    assert [row["x"] for row in read_log(path)] == [1, 4]
    assert "1 torn" in caplog.text


def test_a_missing_log_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training log"):
        read_log(tmp_path / "metrics.jsonl")
