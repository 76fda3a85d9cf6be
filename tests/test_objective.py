"""The objective in numbers worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from erpo.batching import collate
from erpo.config import RunConfig
from erpo.objective import (
    MAX_METRICS,
    GlobalCounts,
    RolloutBatch,
    global_counts,
    kl_penalty,
    kl_term,
    policy_term,
    query_nll,
    query_weights,
    reduce_metrics,
    token_logprobs,
    total_loss,
    value_loss,
    weight_statistics,
)
from erpo.terms import aggregate, entropy, full_kl, importance_ratio, kl_is_clamped, label_logprobs, weighted_logprob_term
from tests.batches import in_micro_batches, loss_in_parts, random_batch, random_logprobs

PLAIN = RunConfig(kl_on="none", clip_low=None, clip_high=None, dual_clip=None)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- log-probs and entropy --------------------------------------------------------------------------------------------


def test_query_tokens_are_scored_at_temperature_1_and_response_tokens_at_the_sampling_temperature() -> None:
    logits = torch.log(torch.tensor([[[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]]], dtype=torch.float64))
    ids = torch.tensor([[0, 1, 1]])
    response = torch.tensor([[False, True]])
    logprobs, entropies = token_logprobs(logits, ids, response, 2.0)
    root = math.sqrt(3)
    assert logprobs[0, 0] == pytest.approx(math.log(3 / 4))
    assert logprobs[0, 1] == pytest.approx(math.log(root / (1 + root)))
    p = root / (1 + root)
    assert entropies[0].tolist() == pytest.approx(
        [-(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), -(p * math.log(p) + (1 - p) * math.log(1 - p))]
    )


@pytest.mark.parametrize(
    ("given", "kept"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)]
)
def test_log_probs_are_computed_in_float32_at_least(given: torch.dtype, kept: torch.dtype) -> None:
    logits = torch.randn(1, 3, 5).to(given)
    logprobs, entropies = token_logprobs(logits, torch.tensor([[0, 1, 2]]), torch.ones(1, 2, dtype=torch.bool), 1.0)
    assert logprobs.dtype == entropies.dtype == kept
    exact = torch.log_softmax(logits.double(), -1)[0, [0, 1], [1, 2]]
    torch.testing.assert_close(logprobs[0].double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_of_0_has_no_log_probs(temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool), temperature)


def test_entropy_of_a_uniform_distribution_is_log_v_also_with_impossible_tokens() -> None:
    logits = torch.zeros(8, dtype=torch.float64)
    assert entropy(logits).item() == pytest.approx(math.log(8))
    logits[4:] = -math.inf
    assert entropy(logits).item() == pytest.approx(math.log(4))


def test_entropy_is_detached_on_request() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    arguments = (logits, torch.tensor([[0, 1, 2]]), torch.ones(1, 2, dtype=torch.bool), 1.0)
    assert token_logprobs(*arguments)[1].requires_grad
    logprobs, detached = token_logprobs(*arguments, entropy_gradient=False)
    assert logprobs.requires_grad
    assert not detached.requires_grad


def test_full_kl_by_hand() -> None:
    policy, reference = torch.log(tensor(0.5, 0.5)), torch.log(tensor(0.25, 0.75))
    assert full_kl(policy, reference).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))


# --- KL ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("log_ratio", "value", "gradient"),
    [
        (0.0, 0.0, 0.0),
        (0.5, 0.1487, 1 - math.exp(0.5)),
        (5.0, 10.0, 0.0),
        (20.0, 10.0, 0.0),
        (90.0, 10.0, 0.0),
        (-0.5, 0.1065, 1 - math.exp(-0.5)),
    ],
)
def test_k3_table(dtype: torch.dtype, log_ratio: float, value: float, gradient: float) -> None:
    logprobs = torch.full((1,), -100.0, dtype=dtype, requires_grad=True)
    penalty = kl_penalty(logprobs, torch.full((1,), -100.0 + log_ratio, dtype=dtype))
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(value, abs=6e-5)
    assert logprobs.grad.item() == pytest.approx(gradient, rel=4e-3)  # the gradient arrives in the type of the input
    assert penalty.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shift", [0.0, 0.5, 5.0, 20.0, 90.0, -90.0])
def test_parameters_stay_finite_after_a_step_on_any_log_ratio(dtype: torch.dtype, shift: float) -> None:
    logits = torch.zeros(4, dtype=dtype, requires_grad=True)
    reference = torch.log_softmax(torch.zeros(4), 0)[0] + shift
    kl_penalty(torch.log_softmax(logits, 0)[:1], reference[None]).sum().backward()
    torch.optim.SGD([logits], lr=0.1).step()
    assert logits.isfinite().all()


@pytest.mark.parametrize(("estimator", "values"), [("k1", [-0.5, 2.0]), ("abs", [0.5, 2.0]), ("k2", [0.125, 2.0])])
def test_other_estimators_by_hand(estimator: str, values: list[float]) -> None:
    assert kl_penalty(tensor(-1.0, -1.0), tensor(-0.5, -3.0), estimator).tolist() == pytest.approx(values)


def test_k3_keeps_its_digits_near_0() -> None:
    d = 1e-5
    value = kl_penalty(torch.zeros(1), torch.full((1,), d)).item()
    assert value == pytest.approx(d * d / 2, rel=2e-2)  # exp(d) - 1 - d in float32 would be 0 or 1e-7


def test_k3_of_equals_is_exactly_0() -> None:
    values = torch.randn(1000)
    assert kl_penalty(values, values).abs().max() == 0


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize(
    ("policy", "reference"), [(-math.inf, -1.0), (-1.0, -math.inf), (-math.inf, -math.inf), (-1e30, -1.0), (0.0, -1e30)]
)
def test_penalties_of_impossible_tokens_are_finite(estimator: str, policy: float, reference: float) -> None:
    logprobs = torch.tensor([policy], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([reference]), estimator)
    penalty.sum().backward()
    assert penalty.isfinite().all()
    assert logprobs.grad.isfinite().all()


def test_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(tensor(0.0), tensor(0.0), "k4")


def test_straight_through_keeps_the_value_of_one_and_the_gradient_of_another() -> None:
    logprobs = tensor(-1.0).requires_grad_()
    penalty = kl_penalty(logprobs, tensor(-0.4), "k3", gradient_of="k2")
    penalty.sum().backward()
    assert penalty.item() == pytest.approx(math.exp(0.6) - 1.6)
    assert logprobs.grad.item() == pytest.approx(-0.6)


def test_clamped_tokens_are_told() -> None:
    policy, reference = tensor(-1.0, -4.0, -30.0, -1.0), tensor(-1.5, -1.0, -1.0, -30.0)
    assert kl_is_clamped(policy, reference).tolist() == [False, True, True, True]
    assert kl_is_clamped(policy, reference, "k2").tolist() == [False, False, True, True]


# --- ratios and clips -------------------------------------------------------------------------------------------------


def test_ratio_without_old_log_probs_is_exactly_1_and_carries_the_gradient() -> None:
    logprobs = torch.randn(2, 5, requires_grad=True)
    ratio = importance_ratio(logprobs, None, torch.ones(2, 5, dtype=torch.bool))
    assert ratio.eq(1.0).all()
    (gradient,) = torch.autograd.grad(ratio.sum(), logprobs)
    assert gradient.eq(1.0).all()


def test_sequence_ratio_is_the_exponential_of_the_mean_log_ratio() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.5, -1.9, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    ratio = importance_ratio(logprobs, old, mask, "sequence")
    assert ratio[0, :2].tolist() == pytest.approx([math.exp(0.2)] * 2)
    assert ratio[0, 2] == 1
    assert ratio[1].eq(1).all()
    (gradient,) = torch.autograd.grad(ratio[0, 0], logprobs)
    assert gradient[0].tolist() == pytest.approx([math.exp(0.2) / 2] * 2 + [0.0])
    total = importance_ratio(logprobs, old, mask, "sequence", reduction="sum")
    assert total[0, 0].item() == pytest.approx(math.exp(0.4))


def test_sequence_ratio_with_impossible_tokens_is_finite() -> None:
    logprobs = torch.tensor([[-math.inf, -1.0, -1.0]], requires_grad=True)
    ratio = importance_ratio(logprobs, torch.tensor([[-1.0, -math.inf, -1.0]]), torch.ones(1, 3, dtype=torch.bool), "sequence")
    ratio.sum().backward()
    assert ratio.eq(1).all()
    assert logprobs.grad.isfinite().all()


def test_token_gradient_form_has_the_same_value_and_each_token_its_own_gradient() -> None:
    mask = torch.ones(1, 2, dtype=torch.bool)
    logprobs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.5, -1.9]], dtype=torch.float64)
    ratio = importance_ratio(logprobs, old, mask, "sequence", token_gradient=True)
    assert ratio[0].tolist() == pytest.approx([math.exp(0.2)] * 2)
    (gradient,) = torch.autograd.grad(ratio[0, 0], logprobs)
    assert gradient[0].tolist() == pytest.approx([math.exp(0.2), 0.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "which"),
    [
        (1.0, 2.0, -2.0, None),
        (1.5, 1.0, -1.3, "high"),
        (0.5, 1.0, -0.5, None),
        (0.5, -1.0, 0.8, "low"),
        (1.5, -1.0, 1.5, None),
        (4.0, -1.0, 3.0, "dual"),
        (4.0, 1.0, -1.3, "high"),
        (4.0, 0.0, 0.0, None),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, which: str | None) -> None:
    r = torch.tensor([[ratio]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    term = policy_term(r, torch.tensor([[advantage]], dtype=torch.float64), mask, clip_low=0.2, clip_high=0.3, dual_clip=3.0)
    assert term.loss.item() == pytest.approx(loss)
    assert {name: getattr(term, f"clipped_{name}").item() for name in ("low", "high", "dual")} == {
        name: name == which for name in ("low", "high", "dual")
    }
    (gradient,) = torch.autograd.grad(term.loss.sum(), r)
    assert gradient.item() == pytest.approx(0.0 if which else -advantage)


def test_weighted_log_prob_term_keeps_the_gradient_of_clipped_tokens() -> None:
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    mask, ratio = torch.ones(1, 1, dtype=torch.bool), torch.tensor([[9.0]], dtype=torch.float64)
    value = weighted_logprob_term(logprobs, ratio, torch.tensor([[2.0]], dtype=torch.float64), mask, high=1.5)
    assert value.item() == pytest.approx(3.0)
    (gradient,) = torch.autograd.grad(value.sum(), logprobs)
    assert gradient.item() == pytest.approx(-3.0)


def test_value_loss_by_hand() -> None:
    values, old, returns = tensor(1.0, 1.0, 0.0), tensor(0.0, 0.9, 0.0), tensor(2.0, 2.0, 1.0)
    assert value_loss(values, old, returns).tolist() == pytest.approx([0.5, 0.5, 0.5])
    # clipped values: 0.2, 1.0 and 0.0; the worse of the two errors counts
    assert value_loss(values, old, returns, clip=0.2).tolist() == pytest.approx([0.5 * 1.8**2, 0.5, 0.5])


# --- aggregation ------------------------------------------------------------------------------------------------------


def two_sequences(weights: tuple[float, float] = (1.0, 1.0)) -> tuple[torch.Tensor, RolloutBatch]:
    """One token of loss 2, nine tokens of loss 1: with ratio 1 the loss of a token is minus its advantage."""
    batch = collate([[1, 2]] * 2, [[3], [4] * 9], [0, 1], query_weights=weights)
    losses = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    batch = replace(batch, advantages=-losses * batch.response_mask, query_weights=batch.query_weights.double())
    return torch.full(batch.response_mask.shape, -1.0, dtype=torch.float64, requires_grad=True), batch


@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]], [[1], [0], []]])
@pytest.mark.parametrize(
    ("normalizer", "weights", "loss"),
    [
        ("token", (1.0, 1.0), 1.1),
        ("sequence", (1.0, 1.0), 1.5),
        ("constant", (1.0, 1.0), 11 / 2 / 20),
        ("token", (1.5, 0.5), (3 + 4.5) / 10),
        ("sequence", (1.5, 0.5), (3 + 0.5) / 2),
    ],
)
def test_two_sequences_in_every_split(parts: list, normalizer: str, weights: tuple[float, float], loss: float) -> None:
    run = RunConfig(**{**PLAIN.model_dump(exclude_defaults=True), "normalizer": normalizer, "max_response_tokens": 20})
    logprobs, batch = two_sequences(weights)
    assert loss_in_parts(logprobs, batch, run, parts)[0].item() == pytest.approx(loss, abs=1e-12)


def test_counts_by_hand() -> None:
    batch = collate([[1, 2, 3]] * 3 + [[4]] + [[5, 6]], [[7, 8], [9], [], [1, 1, 1], []], [4, 4, 4, 7, 9])
    counts = global_counts(batch)
    expected = {"num_rows": 3, "num_response_tokens": 6, "num_tokens": 10, "num_queries": 2, "num_query_tokens": 3}
    assert {key: getattr(counts, key) for key in expected} == expected
    assert counts.row_share[batch.group].tolist() == pytest.approx([1 / 3] * 3 + [1, 1])


SETTINGS = {
    "grpo": RunConfig(kl_coef=0.1),
    "erpo": RunConfig(kl_on="query", kl_coef=0.1, query_weight="reference_likelihood"),
    "all tokens": RunConfig(kl_on="all", kl_coef=0.1),
    "dapo": RunConfig(kl_on="none", normalizer="token", clip_high=0.28, dual_clip=None),
    "erpo, token": RunConfig(kl_on="query", kl_coef=0.1, normalizer="token"),
    "dr.grpo": RunConfig(advantage="group_mean", normalizer="constant", max_response_tokens=7, kl_on="query", kl_coef=0.1),
    "rloo, sequence ratio": RunConfig(advantage="leave_one_out", ratio="sequence", kl_on="all", kl_coef=0.1, normalizer="token"),
    "rpg": RunConfig(kl_form="importance_weighted", kl_coef=0.1, entropy_coef=0.01, importance_cap=2.0),
    "ppo": RunConfig(advantage="gae", normalizer="token", kl_on="none"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_micro_batches_and_ranks_change_nothing(name: str, dtype: torch.dtype, tolerance: float) -> None:
    run = SETTINGS[name]
    batch = random_batch(3, num_queries=5, responses_per_query=3, dtype=dtype, run=run)
    logprobs = random_logprobs(batch)
    rows = batch.num_rows
    whole = loss_in_parts(logprobs, batch, run, [list(range(rows))])
    assert whole[0].abs() > 1e-3
    ranks = [part for rank in range(2) for part in in_micro_batches_of(range(rank, rows, 2), 3)] + [[]]
    for parts in (in_micro_batches(rows, 1), in_micro_batches(rows, 3), in_micro_batches(rows, 8), ranks):
        loss, gradient, metrics = loss_in_parts(logprobs, batch, run, parts)
        assert loss.item() == pytest.approx(whole[0].item(), abs=tolerance)
        torch.testing.assert_close(gradient, whole[1], rtol=0, atol=tolerance)
        assert metrics == pytest.approx(whole[2], abs=10 * tolerance)


def in_micro_batches_of(rows: range, size: int) -> list[list[int]]:
    return [list(rows)[start : start + size] for start in range(0, len(rows), size)]


def test_nothing_to_train_on_is_0_with_a_graph() -> None:
    batch = collate([[1, 2, 3]] * 2, [[], []], [0, 0], query_ref_logprobs=[[-1.0, -1.0]] * 2)
    for run in (
        RunConfig(kl_on="none"),
        RunConfig(kl_on="none", normalizer="token"),
        RunConfig(kl_on="none", normalizer="constant"),
    ):
        logprobs = torch.zeros(2, 2, requires_grad=True)
        output = total_loss(logprobs, batch, global_counts(batch), run)
        output.loss.backward()
        assert output.loss.item() == 0
        assert logprobs.grad.abs().max() == 0
        assert all(math.isfinite(float(value)) for value in output.metrics.values())


def test_a_padding_row_counts_for_nothing() -> None:
    batch = random_batch(0, run=SETTINGS["erpo"])
    part = batch.rows([])
    assert part.input_ids.shape == (1, 2)
    logprobs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    output = total_loss(logprobs, part, global_counts(batch), SETTINGS["erpo"])
    output.loss.backward()
    assert output.loss.item() == logprobs.grad.item() == 0
    assert all(float(value) == 0 for value in output.metrics.values())


def test_masked_positions_may_hold_anything() -> None:
    values = torch.tensor([[1.0, math.nan], [math.inf, 3.0]], requires_grad=True)
    mask = torch.tensor([[True, False], [False, True]])
    total = aggregate(values * values, mask, "token")
    total.backward()
    assert total.item() == pytest.approx(5.0)
    assert values.grad[0, 0] == 1
    assert values.grad[1, 1] == 3


def test_unknown_normalizer_is_refused() -> None:
    with pytest.raises(ValueError, match="median"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "median")


# --- parts of the loss ------------------------------------------------------------------------------------------------


def test_query_kl_by_hand_is_a_mean_over_queries_not_rows() -> None:
    # query 0 (two terms, two rows): k3(0.5) and 0; query 1 (one term, one row): k3(-1)
    batch = collate([[1, 2, 3]] * 2 + [[4, 5]], [[6], [7], [8]], [0, 0, 1], query_ref_logprobs=[[-0.5, -1.0]] * 2 + [[-2.0]])
    logprobs = torch.full((3, 3), -1.0)
    k3 = [math.exp(0.5) - 1.5, 0.0, math.exp(-1)]
    for normalizer, value in {"sequence": (k3[0] / 2 + k3[2]) / 2, "token": (k3[0] + k3[2]) / 3}.items():
        run = RunConfig(kl_on="query", normalizer=normalizer)
        assert kl_term(logprobs, batch, global_counts(batch), run).item() == pytest.approx(value, abs=1e-7)
    metrics = total_loss(logprobs, batch, global_counts(batch), RunConfig(kl_on="none")).metrics
    assert metrics["kl/query"].item() == pytest.approx((k3[0] / 2 + k3[2]) / 2, abs=1e-7)
    assert metrics["query/nll"].item() == pytest.approx((2.0 + 1.0) / 2)
    assert "kl/response" not in metrics


def test_response_kl_is_measured_where_the_reference_is_known() -> None:
    batch = random_batch(5, shortest=1)
    reference = batch.ref_logprobs.clone()
    reference[4:] = torch.where(batch.response_mask[4:], math.nan, reference[4:])
    partial = replace(batch, ref_logprobs=reference)
    logprobs = random_logprobs(batch)
    measured = total_loss(logprobs, partial, global_counts(partial), RunConfig(kl_on="query")).metrics["kl/response"]
    first = batch.rows(range(4))
    alone = total_loss(logprobs[:4, : first.response_mask.shape[1]], first, global_counts(first), RunConfig()).metrics[
        "kl/response"
    ]
    assert measured.item() == pytest.approx(alone.item(), abs=1e-12)
    with pytest.raises(ValueError, match="has not scored"):
        total_loss(logprobs, partial, global_counts(partial), RunConfig(kl_on="response"))


@pytest.mark.parametrize(
    ("run", "missing", "match"),
    [
        (RunConfig(), {"ref_logprobs": None}, "reference"),
        (RunConfig(importance_cap=2.0), {"rollout_logprobs": None}, "generator"),
        (RunConfig(advantage="gae"), {"values": None}, "critic"),
        (RunConfig(entropy_coef=0.1), {}, "entropy"),
    ],
)
def test_missing_tensors_are_refused(run: RunConfig, missing: dict, match: str) -> None:
    batch = replace(random_batch(0), **missing)
    with pytest.raises(ValueError, match=match):
        total_loss(random_logprobs(batch), batch, global_counts(batch), run)


def test_importance_cap_truncates_the_correction() -> None:
    batch = collate([[1, 2]], [[3, 4]], [0], rollout_logprobs=[[-3.0, -1.1]])
    batch = replace(batch, advantages=batch.response_mask.float(), old_logprobs=torch.full((1, 3), -1.0))
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    run = RunConfig(kl_on="none", importance_cap=2.0)
    output = total_loss(logprobs, batch, global_counts(batch), run)
    assert output.loss.item() == pytest.approx(-(2.0 + math.exp(0.1)) / 2)
    assert output.metrics["rollout/logprob_gap_mean"].item() == pytest.approx((2.0 + 0.1) / 2)
    assert output.metrics["rollout/logprob_gap_max"].item() == pytest.approx(2.0)
    assert output.metrics["rollout/correction_mean"].item() == pytest.approx((2.0 + math.exp(0.1)) / 2)
    assert output.metrics["rollout/correction_capped_share"].item() == 0.5
    # The weight is a constant: the gradient of each token is -weight / 2, the query's is 0.
    output.loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad[0].tolist() == pytest.approx([0.0, -2.0 / 2, -math.exp(0.1) / 2])


def test_importance_correction_of_the_first_update_takes_the_current_policy_as_old() -> None:
    """Generator probabilities 1/2 and 1/4 where the trainer has 1/4 and 1/2: weights 1/2 and min(2, 1.5)."""
    batch = collate([[1, 2]], [[3, 4]], [0], rollout_logprobs=[[math.log(0.5), math.log(0.25)]])
    batch = replace(batch, advantages=batch.response_mask.float())
    logprobs = torch.tensor([[0.0, math.log(0.25), math.log(0.5)]], requires_grad=True)
    output = total_loss(logprobs, batch, global_counts(batch), RunConfig(kl_on="none", importance_cap=1.5))
    assert output.loss.item() == pytest.approx(-(0.5 + 1.5) / 2)
    off = total_loss(logprobs, batch, global_counts(batch), RunConfig(kl_on="none"))
    assert off.loss.item() == pytest.approx(-1.0)
    assert "rollout/correction_mean" not in off.metrics


def test_entropy_bonus_and_value_loss_enter_with_their_coefficients() -> None:
    run = RunConfig(advantage="gae", kl_on="none", entropy_coef=0.1, value_coef=0.5, normalizer="token", value_clip=None)
    batch = collate([[1, 2]], [[3, 4]], [0])
    batch = replace(batch, values=torch.zeros(1, 3), returns=torch.ones(1, 3))
    logprobs = torch.zeros(1, 3, requires_grad=True)
    entropies = torch.full((1, 3), 2.0, requires_grad=True)
    values = torch.full((1, 3), 3.0, requires_grad=True)
    output = total_loss(logprobs, batch, global_counts(batch), run, entropy=entropies, values=values)
    assert output.loss.item() == pytest.approx(-0.1 * 2.0 + 0.5 * 0.5 * 4.0)
    assert output.metrics["policy/entropy"].item() == 2
    assert output.metrics["loss/value"].item() == 2
    warm_up = total_loss(logprobs, batch, global_counts(batch), run, entropy=entropies, values=values, train_policy=False)
    assert warm_up.loss.item() == pytest.approx(1.0)


def test_query_nll_is_summed_and_detached() -> None:
    batch = collate([[1, 2, 3], [4]], [[5], [6]], [0, 1])
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-9.0, -9.0, -9.0]], requires_grad=True)
    nll = query_nll(logprobs, batch)
    assert nll.tolist() == [3.0, 0.0]
    assert not nll.requires_grad


def test_metrics_are_summed_but_maxima_are_maxima() -> None:
    joined = reduce_metrics([{"ratio/max": 1.5, "ratio/mean": 0.25}, {"ratio/max": 1.2, "ratio/mean": 0.5, "loss/value": 1.0}])
    assert joined == {"ratio/max": 1.5, "ratio/mean": 0.75, "loss/value": 1.0}
    assert {"ratio/max", "rollout/logprob_gap_max"} == MAX_METRICS


def test_rows_are_trimmed_to_the_longest_chosen() -> None:
    batch = collate([[1, 2]] * 3, [[3], [4, 5, 6, 7], [8, 9]], [0, 1, 2], rollout_logprobs=[[-1.0], [-1.0] * 4, [-2.0, -3.0]])
    part = batch.rows([2, 0])
    assert part.input_ids.tolist() == [[1, 2, 8, 9], [1, 2, 3, 0]]
    assert part.rollout_logprobs.tolist() == [[0.0, -2.0, -3.0], [0.0, -1.0, 0.0]]
    assert part.group.tolist() == [2, 0]
    assert batch.rows(np.array([1])).input_ids.shape == (1, 6)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_likelihood_weights_by_hand() -> None:
    nll, tokens = tensor(2 * math.log(2), 4 * math.log(4), 3 * math.log(8)), torch.tensor([2, 4, 3])
    # per-token likelihoods 1/2, 1/4, 1/8: mean 7/24
    weights = query_weights("reference_likelihood", nll, tokens)
    assert weights.tolist() == pytest.approx([12 / 7, 6 / 7, 3 / 7])
    assert query_weights("reference_likelihood", nll, tokens, cap=1.5).tolist() == pytest.approx([1.5, 6 / 7, 3 / 7])
    renormalised = query_weights("reference_likelihood", nll, tokens, cap=1.5, renormalise=True)
    assert renormalised.mean().item() == pytest.approx(1.0)
    assert (renormalised[1] / renormalised[2]).item() == pytest.approx(2.0)


def test_inverse_nll_weights_by_hand() -> None:
    nll, tokens = tensor(1.0, 2.0, 6.0), torch.tensor([1, 1, 1])
    assert query_weights("reference_inverse_nll", nll, tokens).tolist() == pytest.approx([2.0, 1.5, 0.5])
    assert query_weights("online_inverse_nll", nll, tokens).tolist() == pytest.approx([3.0, 1.5, 0.5])
    assert query_weights("online_inverse_nll", nll, tokens, renormalise=True).mean().item() == pytest.approx(1.0)
    assert query_weights("online_inverse_nll", nll, tokens, mean_nll=2.0).tolist() == pytest.approx([2.0, 1.0, 1 / 3])


def test_no_weight_is_1_and_rows_without_a_query_token_keep_1() -> None:
    assert query_weights("none", tensor(1.0, 2.0), torch.tensor([1, 1])).tolist() == [1.0, 1.0]
    assert query_weights("online_inverse_nll", tensor(1.0, 0.0, 3.0), torch.tensor([1, 0, 1])).tolist() == pytest.approx(
        [2.0, 1.0, 2 / 3]
    )


@pytest.mark.parametrize("kind", ["reference_likelihood", "reference_inverse_nll", "online_inverse_nll"])
def test_a_query_known_by_heart_does_not_explode(kind: str) -> None:
    weights = query_weights(kind, tensor(0.0, 50.0, 80.0), torch.tensor([5, 5, 5]))
    assert weights.isfinite().all()
    if kind != "online_inverse_nll":
        assert weights.max() <= 2


def test_likelihood_weights_of_a_very_poor_model_do_not_underflow() -> None:
    weights = query_weights("reference_likelihood", torch.tensor([2000.0, 2001.0]), torch.tensor([2, 2]), cap=None)
    assert weights.mean().item() == pytest.approx(1.0)
    assert (weights[0] / weights[1]).item() == pytest.approx(math.exp(0.5), rel=1e-5)


def test_a_likelihood_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="1 queries"):
        query_weights("reference_inverse_nll", tensor(1.0, math.inf), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="median"):
        query_weights("median", tensor(1.0), torch.tensor([1]))


def test_weights_carry_no_gradient() -> None:
    nll = tensor(1.0, 2.0).requires_grad_()
    assert not query_weights("online_inverse_nll", nll, torch.tensor([1, 1])).requires_grad


def test_weight_statistics_by_hand() -> None:
    statistics = weight_statistics(tensor(0.5, 1.0, 1.5), torch.tensor([3, 2, 1]))
    assert statistics == pytest.approx(
        {
            "query_weight/mean": 1.0,
            "query_weight/min": 0.5,
            "query_weight/max": 1.5,
            "query_weight/ess": 9 / (3 * 3.5),
            "query_weight/length_correlation": -1.0,
        }
    )
    assert "query_weight/length_correlation" not in weight_statistics(torch.ones(3), torch.tensor([3, 2, 1]))


def test_counts_are_plain_numbers() -> None:
    counts = global_counts(random_batch(0))
    assert isinstance(counts, GlobalCounts)
    assert all(isinstance(getattr(counts, name), int) for name in ("num_rows", "num_queries", "num_query_tokens", "num_tokens"))


def test_label_log_probs_of_an_impossible_token_is_minus_infinity() -> None:
    assert label_logprobs(torch.tensor([[0.0, -math.inf]]), torch.tensor([1])).item() == -math.inf
