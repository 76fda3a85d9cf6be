"""Counts of samples, and values, intervals and differences of cells, against numbers worked out by hand."""

from math import comb

import numpy as np
import pytest

from erpo.config import Cell
from erpo.paper.aggregate import problem_values, read_scores
from erpo.paper.summaries import Place, clean_value, corrected, difference, summarise
from tests.synthetic import scores_table, simulate_scores, write_cell


def samples_of(benchmark, query, temperature, verdicts, **more):
    return [
        {"benchmark": benchmark, "query_id": query, "temperature": temperature, "sample_index": index, "verdict": verdict, **more}
        for index, verdict in enumerate(verdicts)
    ]


C, W = "correct", "wrong"


@pytest.fixture
def small(tmp_path):
    """Two benchmarks (two problems and one), one temperature each 0.5 and 1.0, four samples, two seeds."""
    sizes = {"a": 2, "b": 1}
    first = [
        *samples_of("a", "p", 0.5, [C, C, W, W]),
        *samples_of("a", "q", 0.5, [W, W, W, W], flagged=True),
        *samples_of("b", "p", 0.5, [C, C, C, C]),
        *samples_of("a", "p", 1.0, [W, C, W, W]),
        *samples_of("a", "q", 1.0, [C, W, W, W], flagged=True),
        *samples_of("b", "p", 1.0, [C, C, W, "truncated"]),
    ]
    second = [{**row, "verdict": C} for row in first]
    paths = [
        write_cell(tmp_path, scores_table(rows), "x", seed, 10, 4, sizes, [0.5, 1.0]) for seed, rows in ((0, first), (1, second))
    ]
    return paths


def place(run="x", seeds=(0,), benchmarks=("a", "b"), temperatures=(0.5, 1.0), step=10):
    return Place(run, step, seeds, benchmarks, temperatures)


def value(scores, metric, **where):
    return summarise(scores, problem_values(scores, metric), place(**where)).value


def test_means_go_over_samples_problems_temperatures_then_benchmarks(small):
    scores = read_scores(small, samples=4)
    assert value(scores, "avg@n", benchmarks=("a",), temperatures=(0.5,)) == pytest.approx((0.5 + 0) / 2)
    assert value(scores, "avg@n", benchmarks=("a",)) == pytest.approx((0.25 + 0.25) / 2)
    assert value(scores, "avg@n", benchmarks=("b",)) == pytest.approx((1 + 0.5) / 2)
    assert value(scores, "avg@n") == pytest.approx((0.25 + 0.75) / 2)  # not weighted by problems


def test_seeds_are_averaged_and_shown_apart(small):
    scores = read_scores(small, samples=4)
    cell = summarise(scores, problem_values(scores, "avg@n"), place(seeds=(0, 1)))
    assert cell.value == pytest.approx((0.5 + 1.0) / 2)
    assert cell.by_seed == pytest.approx({0: 0.5, 1: 1.0})
    assert cell.seed_sd == pytest.approx(np.sqrt(0.125))
    assert (cell.samples, cell.samples_expected, cell.problems, cell.problems_expected) == (48, 48, 3, 3)
    assert cell.rates["truncated"] == 0.0


def test_pass_at_k_first_sample_and_vote(small):
    scores = read_scores(small, samples=4, with_answers=True)
    assert value(scores, "pass@n", temperatures=(0.5,)) == pytest.approx((0.5 + 1) / 2)
    assert value(scores, "pass@2", benchmarks=("a",), temperatures=(0.5,)) == pytest.approx((1 - 1 / 6) / 2)
    assert value(scores, "pass@1") == pytest.approx(value(scores, "avg@n"))
    assert value(scores, "pass@1:first", benchmarks=("a",)) == pytest.approx((0.5 + 0.5) / 2)


def test_vote_goes_to_the_most_frequent_answer_and_ties_to_the_first(tmp_path):
    answers = {"p": ["7", "3", "3", "7"], "q": ["5", "4", "4", "4"], "r": [None, "1", None, None]}
    verdicts = {"p": [W, C, C, W], "q": [W, C, C, C], "r": ["no_answer", C, "no_answer", "no_answer"]}
    rows = [
        {"benchmark": "a", "query_id": q, "temperature": 1.0, "sample_index": i, "verdict": verdicts[q][i], "answer": answers[q][i]}
        for q in answers
        for i in range(4)
    ]
    path = write_cell(tmp_path, scores_table(rows), "x", 0, 10, 4, {"a": 3}, [1.0])
    scores = read_scores([path], samples=4, with_answers=True)
    assert problem_values(scores, "maj@n")[0, :, 0].tolist() == [0.0, 1.0, 1.0]


def test_grader_errors_are_neither_right_nor_wrong(tmp_path):
    rows = samples_of("a", "p", 1.0, [C, W, "grader_error", "gold_unparsed"])
    path = write_cell(tmp_path, scores_table(rows), "x", 0, 10, 4, {"a": 1}, [1.0])
    scores = read_scores([path], samples=4)
    cell = summarise(scores, problem_values(scores, "avg@n"), place(benchmarks=("a",), temperatures=(1.0,)))
    assert cell.value == 0.5
    assert cell.rates == {"truncated": 0.0, "no_answer": 0.0, "grader_error": 0.25, "gold_unparsed": 0.25}
    assert cell.is_complete
    assert np.isnan(problem_values(scores, "pass@n")).all()  # two scored samples have no pass@4


def test_missing_samples_are_counted_and_never_padded(tmp_path):
    rows = samples_of("a", "p", 1.0, [C] * 15 + [W] * 14 + [C])  # 30 of 32, 16 correct, the last one correct
    path = write_cell(tmp_path, scores_table(rows), "x", 0, 10, 32, {"a": 1}, [1.0])
    scores = read_scores([path], samples=32)
    where = {"benchmarks": ("a",), "temperatures": (1.0,)}
    cell = summarise(scores, problem_values(scores, "avg@n"), place(**where))
    assert cell.value == pytest.approx(16 / 30)
    assert (cell.samples, cell.samples_expected, cell.missing) == (30, 32, (Cell("x", 0, 10),))
    assert np.isnan(value(scores, "pass@n", **where))
    assert value(scores, "pass@8", **where) == pytest.approx(1 - comb(14, 8) / comb(30, 8))


def test_a_missing_temperature_leaves_no_mean_over_temperatures(small):
    scores = read_scores(small, samples=4)
    cell = summarise(scores, problem_values(scores, "avg@n"), place(temperatures=(0.5, 1.0, 1.5)))
    assert np.isnan(cell.value)
    assert not cell.is_complete
    assert cell.samples_expected == 3 * 3 * 4


def test_a_missing_seed_is_named_and_the_rest_is_averaged(small):
    scores = read_scores(small[:1], samples=4)
    cell = summarise(scores, problem_values(scores, "avg@n"), place(seeds=(0, 1)))
    assert cell.value == pytest.approx(0.5)
    assert cell.missing == (Cell("x", 1, 10),)
    assert (cell.samples, cell.samples_expected) == (24, 48)


def test_a_problem_that_lacks_one_temperature_does_not_shift_the_others(tmp_path):
    rows = [
        *samples_of("a", "p", 0.5, [C, C]),
        *samples_of("a", "q", 0.5, [W, W]),
        *samples_of("a", "p", 1.0, [C, W]),  # q has nothing at 1.0
    ]
    path = write_cell(tmp_path, scores_table(rows), "x", 0, 10, 2, {"a": 2}, [0.5, 1.0])
    scores = read_scores([path], samples=2)
    assert value(scores, "avg@n", benchmarks=("a",)) == pytest.approx((0.5 + 0.5) / 2)


def test_clean_items_leave_out_flagged_problems(small):
    scores = read_scores(small, samples=4)
    got, problems = clean_value(scores, problem_values(scores, "avg@n"), place(benchmarks=("a",)))
    assert (got, problems) == (pytest.approx((0.5 + 0.25) / 2), 1)


def test_samples_above_n_are_left_out(small):
    scores = read_scores(small, samples=2)
    assert value(scores, "avg@n", benchmarks=("a",), temperatures=(0.5,)) == pytest.approx((1.0 + 0) / 2)


def two_methods(tmp_path, gain, seeds=(0, 1), step=10):
    sizes, temperatures = {"a": 40, "b": 40}, [0.5, 1.0]
    paths = []
    for run, shift in (("x", 0.0), ("y", gain)):
        for seed in seeds:
            rng = np.random.default_rng([seed, run == "y"])
            table = simulate_scores(rng, lambda _, t, s=shift: 0.5 - 0.1 * t + s, sizes, temperatures, 8)
            paths.append(write_cell(tmp_path, table, run, seed, step, 8, sizes, temperatures))
    return paths


def test_a_large_difference_is_found_and_none_is_not(tmp_path):
    for gain, found in ((0.15, True), (0.0, False)):
        scores = read_scores(two_methods(tmp_path / str(gain), gain), samples=8)
        values = problem_values(scores, "avg@n")
        change = difference(scores, values, place("y", (0, 1)), place("x", (0, 1)))
        both = [summarise(scores, values, place(run, (0, 1))).value for run in "xy"]
        assert change.value == pytest.approx(both[1] - both[0])
        assert change.low < change.value < change.high
        assert (change.p_value < 0.01, change.low > 0) == (found, found)
    assert set(change.by_seed) == {0, 1}


def test_a_difference_uses_common_seeds_only(tmp_path):
    paths = [path for path in two_methods(tmp_path, 0.1) if not (path.parts[-3] == "y" and path.parts[-2] == "seed1")]
    scores = read_scores(paths, samples=8)
    change = difference(scores, problem_values(scores, "avg@n"), place("y", (0, 1)), place("x", (0, 1)))
    assert set(change.by_seed) == {0}
    assert change.value == pytest.approx(change.by_seed[0])
    assert difference(scores, problem_values(scores, "avg@n"), place("y", (1,)), place("x", (0, 1))) is None


def test_a_p_value_is_corrected_for_all_comparisons_that_were_planned():
    assert corrected(0.01, 3) == pytest.approx(0.03)
    assert corrected(0.6, 2) == 1.0
    assert np.isnan(corrected(float("nan"), 4))


@pytest.mark.parametrize("metric", ["avg@8", "maj@2", "pass@5", "pass@0", "accuracy"])
def test_an_unknown_or_impossible_metric_is_refused(small, metric):
    scores = read_scores(small, samples=4)
    with pytest.raises(ValueError, match="metric"):
        problem_values(scores, metric)


def test_files_that_do_not_belong_together_are_refused(small, tmp_path):
    other = write_cell(
        tmp_path / "other", scores_table(samples_of("a", "p", 0.5, [C])), "y", 0, 10, 4, {"a": 2, "b": 1}, [0.5],
        sampling={"top_p": 0.9, "max_tokens": 64, "stop_ids": [2]},
    )  # fmt: skip
    with pytest.raises(ValueError, match="different settings"):
        read_scores([*small, other], samples=4)
    with pytest.raises(ValueError, match="both claim"):
        read_scores([small[0], small[0]], samples=4)
    with pytest.raises(ValueError, match="no scores at"):
        read_scores([tmp_path / "absent.parquet"], samples=4)
    with pytest.raises(ValueError, match="at least one"):
        read_scores([], samples=4)


def test_a_repeated_sample_is_refused(tmp_path):
    rows = samples_of("a", "p", 1.0, [C, W])
    path = write_cell(tmp_path, scores_table([*rows, rows[0]]), "x", 0, 10, 4, {"a": 1}, [1.0])
    with pytest.raises(ValueError, match="twice"):
        read_scores([path], samples=4)
