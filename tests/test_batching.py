"""Collating ragged rollouts and dealing rows out to ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from erpo.batching import collate, plan_micro_batches

# --- collate ----------------------------------------------------------------------------------------------------------


def test_rows_masks_and_values_by_hand() -> None:
    batch = collate(
        [[1, 2, 3], np.array([4], dtype=np.int32)],
        [np.array([5], dtype=np.int32), [6, 7]],
        [3, 8],
        rollout_logprobs=[[-0.5], [-0.25, -0.75]],
        query_ref_logprobs=[[-1.0, -2.0], []],
        query_weights=[0.5, 1.5],
        pad_id=9,
    )
    assert batch.input_ids.tolist() == [[1, 2, 3, 5], [4, 6, 7, 9]]
    assert batch.lengths.tolist() == [4, 3]
    assert batch.query_lengths.tolist() == [3, 1]
    assert batch.query_mask.tolist() == [[True, True, False], [False, False, False]]
    assert batch.response_mask.tolist() == [[False, False, True], [True, True, False]]
    assert batch.group.tolist() == [3, 8]
    assert batch.query_weights.tolist() == [0.5, 1.5]
    assert batch.rollout_logprobs.tolist() == [[0.0, 0.0, -0.5], [-0.25, -0.75, 0.0]]
    assert batch.ref_logprobs[0, :2].tolist() == [-1.0, -2.0]
    assert batch.ref_logprobs.isnan().tolist() == [[False, False, True], [True, True, True]]
    assert batch.advantages.eq(0).all()
    assert batch.old_logprobs is batch.values is batch.returns is None
    assert batch.input_ids.dtype == batch.group.dtype == torch.int64
    assert batch.query_weights.dtype == batch.advantages.dtype == batch.ref_logprobs.dtype == torch.float32


def test_empty_responses_and_one_token_rows_keep_a_forward_possible() -> None:
    batch = collate([[1]], [[]], [0])
    assert batch.input_ids.shape == (1, 2)
    assert not batch.query_mask.any()
    assert not batch.response_mask.any()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"query_ids": [[], [1]]}, "row 0 has an empty query"),
        ({"query_ids": [[1]]}, "as many queries"),
        ({"query_ids": [], "response_ids": [], "group": []}, "at least one"),
        ({"rollout_logprobs": [[-1.0], [-1.0, -1.0]]}, "rollout_logprobs: row 1"),
        ({"rollout_logprobs": [[-1.0]]}, "rollout_logprobs: row 1"),
        ({"query_ref_logprobs": [[-1.0, -1.0], [-1.0]]}, "query_ref_logprobs: row 0"),
        ({"query_weights": [1.0]}, "query_weights"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict, match: str) -> None:
    arguments = {"query_ids": [[1, 2], [3, 4]], "response_ids": [[5], [6]], "group": [0, 1], **change}
    with pytest.raises(ValueError, match=match):
        collate(**arguments)


# --- micro-batches ----------------------------------------------------------------------------------------------------


def test_plan_by_hand() -> None:
    # sorted 9 8 4 4 2 1: pieces [9] [8] [4 4] [2 1] at a budget of 9, dealt to two ranks there and back
    plan = plan_micro_batches([4, 9, 1, 4, 8, 2], 9, 2)
    assert [[sorted(piece.tolist()) for piece in rank] for rank in plan] == [[[1], [2, 5]], [[4], [0, 3]]]


def test_no_rank_idles_while_another_could_share() -> None:
    plan = plan_micro_batches([5] * 8, 1000, 4)
    assert [[len(piece) for piece in rank] for rank in plan] == [[2], [2], [2], [2]]


def test_more_ranks_than_rows_fill_up_with_empty_micro_batches() -> None:
    plan = plan_micro_batches([3, 3], 100, 4)
    assert [len(rank) for rank in plan] == [1] * 4
    assert sorted(len(rank[0]) for rank in plan) == [0, 0, 1, 1]
    assert all(piece.dtype == np.int64 for rank in plan for piece in rank)


def test_an_update_without_rows_has_an_empty_plan() -> None:
    assert plan_micro_batches([], 100, 2) == [[], []]


@pytest.mark.parametrize(("budget", "ranks"), [(0, 1), (10, 0)])
def test_impossible_plans_are_refused(budget: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan_micro_batches([1, 2], budget, ranks)


def test_work_is_balanced_on_skewed_lengths() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 512).astype(int).clip(20, 4000)
    plan = plan_micro_batches(lengths, 16384, 8)
    costs = [sum(len(p) * lengths[p].max() for p in rank if len(p)) for rank in plan]
    assert max(costs) / np.mean(costs) < 1.1
    assert sum(costs) < 1.1 * lengths.sum()  # padding wastes less than a tenth


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=0, max_size=40), st.integers(1, 120), st.integers(1, 5))
def test_every_row_is_dealt_once_within_the_budget(lengths: list[int], budget: int, ranks: int) -> None:
    plan = plan_micro_batches(lengths, budget, ranks)
    assert len(plan) == ranks
    assert len({len(rank) for rank in plan}) == 1
    pieces = [piece for rank in plan for piece in rank]
    assert sorted(i for piece in pieces for i in piece.tolist()) == list(range(len(lengths)))
    for piece in pieces:
        assert len(piece) <= 1 or len(piece) * max(lengths[i] for i in piece) <= budget
    again = plan_micro_batches(torch.tensor(lengths, dtype=torch.long), budget, ranks)
    assert [[p.tolist() for p in rank] for rank in again] == [[p.tolist() for p in rank] for rank in plan]
