"""What changes nothing, what is exactly zero, and Proposition 1 with its limit: on logits and on a real tiny transformer."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2ForCausalLM

from erpo.advantages import compute_advantages
from erpo.batching import collate, plan_micro_batches
from erpo.config import RunConfig
from erpo.objective import GlobalCounts, RolloutBatch, global_counts, kl_term, token_logprobs, total_loss
from tests.batches import VOCABULARY, random_batch, random_logprobs, tiny_policy

GRPO = RunConfig(kl_coef=0.1)
ERPO = RunConfig(kl_on="query", kl_coef=0.1, query_weight="reference_likelihood")
UNREGULARISED = RunConfig(kl_on="none")
BASES = {
    "grpo": {},
    "dapo": {"normalizer": "token", "clip_high": 0.28, "dual_clip": None},
    "dr.grpo": {"advantage": "group_mean", "normalizer": "constant", "max_response_tokens": 6},
    "rloo": {"advantage": "leave_one_out", "clip_low": None, "clip_high": None, "dual_clip": None},
    "reinforce": {"advantage": "batch_mean", "whiten_advantages": True, "normalizer": "token"},
}


def scored(policy: Qwen2ForCausalLM, batch: RolloutBatch, temperature: float = 1.0) -> Tensor:
    logits = policy(input_ids=batch.input_ids).logits
    return token_logprobs(logits, batch.input_ids, batch.response_mask, temperature)[0]


def gradients(policy: Qwen2ForCausalLM) -> list[Tensor]:
    return [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in policy.parameters()]


def loss_and_gradients(
    policy: Qwen2ForCausalLM, parts: list[RolloutBatch], counts: GlobalCounts, run: RunConfig, temperature: float = 1.0
) -> tuple[float, list[Tensor]]:
    policy.zero_grad()
    total = 0.0
    for part in parts:
        loss = total_loss(scored(policy, part, temperature), part, counts, run).loss
        loss.backward()
        total += loss.item()
    return total, gradients(policy)


def assert_same(first: tuple[float, list[Tensor]], second: tuple[float, list[Tensor]], tolerance: float) -> None:
    assert first[0] == pytest.approx(second[0], abs=tolerance)
    for a, b in zip(first[1], second[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def policy() -> Qwen2ForCausalLM:
    return tiny_policy()


@pytest.fixture(scope="module")
def batch(policy: Qwen2ForCausalLM) -> RolloutBatch:
    """Nine rows, some responses empty; old policy and reference are other networks of the same kind."""
    found = random_batch(2, num_queries=3, responses_per_query=3)
    with torch.no_grad():
        old = scored(policy, found, 0.7) + 0.3 * torch.randn(found.response_mask.shape, generator=torch.Generator().manual_seed(0))
        reference = scored(tiny_policy(seed=5), found, 0.7)
    return replace(found, old_logprobs=old, ref_logprobs=reference)


# --- splits, padding, order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [GRPO, ERPO, RunConfig(kl_on="all", normalizer="token", kl_coef=0.1)], ids=["grpo", "erpo", "all"])
def test_micro_batches_and_ranks_change_nothing_on_a_transformer(
    policy: Qwen2ForCausalLM, batch: RolloutBatch, run: RunConfig
) -> None:
    counts = global_counts(batch)
    whole = loss_and_gradients(policy, [batch], counts, run, 0.7)
    assert max(g.abs().max() for g in whole[1]) > 1e-3
    for size in (1, 3, 8):
        parts = [batch.rows(range(i, min(i + size, 9))) for i in range(0, 9, size)]
        assert_same(loss_and_gradients(policy, parts, counts, run, 0.7), whole, 1e-10)
    for ranks in (1, 2, 4):
        plan = plan_micro_batches(batch.lengths, 20, ranks)
        parts = [batch.rows(rows) for rank in plan for rows in rank]
        assert_same(loss_and_gradients(policy, parts, counts, run, 0.7), whole, 1e-10)


def test_float32_splits_agree_to_1e_6(batch: RolloutBatch) -> None:
    policy = tiny_policy(dtype=torch.float32, scale=2.0)
    single = batch.to("cpu")
    as_float = {k: v.float() for k, v in vars(single).items() if isinstance(v, Tensor) and v.is_floating_point()}
    single, counts = replace(single, **as_float), global_counts(batch)
    whole = loss_and_gradients(policy, [single], counts, ERPO)
    parts = [single.rows([i]) for i in range(9)]
    assert_same(loss_and_gradients(policy, parts, counts, ERPO), whole, 1e-6)


def padded(batch: RolloutBatch, columns: int, token: int) -> RolloutBatch:
    def widen(value: Tensor, fill: float) -> Tensor:
        return torch.cat([value, value.new_full((value.shape[0], columns), fill)], dim=1)

    fills = {"input_ids": token, "query_mask": False, "response_mask": False, "advantages": 0.0, "ref_logprobs": float("nan")}
    fills |= {"old_logprobs": float("inf"), "rollout_logprobs": -1e9}
    return replace(batch, **{name: widen(getattr(batch, name), fill) for name, fill in fills.items()}, values=None)


@pytest.mark.parametrize("run", [GRPO, ERPO], ids=["grpo", "erpo"])
def test_padding_changes_nothing_whatever_it_holds(policy: Qwen2ForCausalLM, batch: RolloutBatch, run: RunConfig) -> None:
    counts = global_counts(batch)
    whole = loss_and_gradients(policy, [batch], counts, run)
    wider = padded(batch, 4, VOCABULARY - 1)
    assert global_counts(wider).num_response_tokens == counts.num_response_tokens
    assert_same(loss_and_gradients(policy, [wider], global_counts(wider), run), whole, 1e-10)


def test_row_order_changes_nothing(policy: Qwen2ForCausalLM, batch: RolloutBatch) -> None:
    shuffled = batch.rows([4, 0, 8, 2, 6, 1, 7, 3, 5])
    whole = loss_and_gradients(policy, [batch], global_counts(batch), ERPO)
    assert_same(loss_and_gradients(policy, [shuffled], global_counts(shuffled), ERPO), whole, 1e-10)


# --- the base method is untouched -------------------------------------------------------------------------------------


def three_updates(run: RunConfig, weights: Tensor | None = None) -> list[Tensor]:
    """AdamW parameters after three updates, float32, as in training: reference log-probs at hand, first update on-policy."""
    policy = tiny_policy(dtype=torch.float32, scale=1.5)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for step in range(3):
        batch = random_batch(step, dtype=torch.float32, run=run, on_policy=step == 0)
        batch = replace(batch, query_weights=torch.ones(batch.num_rows) if weights is None else weights)
        optimizer.zero_grad()
        total_loss(scored(policy, batch), batch, global_counts(batch), run).loss.backward()
        optimizer.step()
    return [p.detach() for p in policy.parameters()]


@pytest.mark.parametrize("base", BASES)
def test_without_coefficient_and_weight_erpo_is_the_base_method_bit_for_bit(base: str) -> None:
    plain = three_updates(RunConfig(**BASES[base], kl_on="none"))
    off = three_updates(RunConfig(**BASES[base], kl_on="query", kl_coef=0.0))
    assert all(torch.equal(a, b) for a, b in zip(plain, off, strict=True))
    on = three_updates(RunConfig(**BASES[base], kl_on="query", kl_coef=1.0))
    assert not all(torch.equal(a, b) for a, b in zip(plain, on, strict=True))


def test_unit_weights_change_nothing_and_others_do() -> None:
    unit = three_updates(ERPO)
    assert all(torch.equal(a, b) for a, b in zip(unit, three_updates(ERPO, torch.ones(12)), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(unit, three_updates(ERPO, torch.full((12,), 0.5)), strict=True))


def test_the_weight_multiplies_the_policy_term_only(batch: RolloutBatch) -> None:
    logprobs, counts = random_logprobs(batch), global_counts(batch)
    half = replace(batch, query_weights=batch.query_weights / 2)
    whole, halved = (total_loss(logprobs, b, counts, ERPO) for b in (batch, half))
    assert halved.metrics["loss/policy"].item() == pytest.approx(whole.metrics["loss/policy"].item() / 2)
    assert halved.metrics["kl/query"] == whole.metrics["kl/query"]
    assert (whole.loss - halved.loss).item() == pytest.approx(whole.metrics["loss/policy"].item() / 2)


# --- Query-KL ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalizer", ["sequence", "token", "constant"])
def test_query_kl_does_not_change_with_siblings(policy: Qwen2ForCausalLM, batch: RolloutBatch, normalizer: str) -> None:
    run = RunConfig(kl_on="query", normalizer=normalizer, max_response_tokens=10)
    doubled = batch.rows([*range(9), *range(9)])
    uneven = batch.rows([0, 1, 2] * 2 + [3, 4, 5] * 4 + [6, 7, 8])  # powers of 2: Qwen2's norms round to float32
    some = batch.rows([0, 4, 5, 6])

    def value_and_gradient(rows: RolloutBatch) -> tuple[float, list[Tensor]]:
        policy.zero_grad()
        value = kl_term(scored(policy, rows), rows, global_counts(rows), run)
        value.backward()
        return value.item(), gradients(policy)

    single = value_and_gradient(batch)
    assert single[0] > 1e-3
    assert_same(value_and_gradient(doubled), single, 1e-10)
    assert_same(value_and_gradient(uneven), single, 1e-10)
    assert_same(value_and_gradient(some), single, 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kl_on", ["query", "response", "all"])
def test_a_policy_against_itself_has_exactly_no_kl_and_no_gradient(kl_on: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(dtype=dtype)
    rows = random_batch(2, dtype=dtype)
    with torch.no_grad():
        reference = scored(policy, rows)
    rows = replace(rows, ref_logprobs=reference)
    value = kl_term(scored(policy, rows), rows, global_counts(rows), RunConfig(kl_on=kl_on))
    value.backward()
    assert value.item() == 0
    assert all(g.eq(0).all() for g in gradients(policy))


def test_proposition_1_on_logits(batch: RolloutBatch) -> None:
    """The gradient of Query-KL is exactly zero off the query and nowhere zero on it; the policy term's sits on the response."""
    shape = (9, batch.input_ids.shape[1], VOCABULARY)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    batch = replace(batch, ref_logprobs=batch.ref_logprobs.clamp(min=-4.0))  # no token at the clamp of k3
    logprobs, _ = token_logprobs(logits, batch.input_ids, batch.response_mask, 1.0)
    counts = global_counts(batch)
    (on_query,) = torch.autograd.grad(kl_term(logprobs, batch, counts, ERPO), logits, retain_graph=True)
    (on_response,) = torch.autograd.grad(total_loss(logprobs, batch, counts, UNREGULARISED).loss, logits)
    off_query, off_response = ~batch.query_mask, ~batch.response_mask
    assert on_query[:, :-1][off_query].eq(0).all()
    assert on_query[:, -1].eq(0).all()
    assert (on_query[:, :-1][batch.query_mask].abs().amax(-1) > 0).all()
    assert on_response[:, :-1][off_response].eq(0).all()
    assert on_response.abs().max() > 0


def test_proposition_1_on_a_transformer_and_its_limit(policy: Qwen2ForCausalLM, batch: RolloutBatch) -> None:
    """Zero on response logits, blind to what was answered; but the weights are shared, so responses do move."""
    counts, run = global_counts(batch), ERPO
    policy.zero_grad()
    logits = policy(input_ids=batch.input_ids).logits
    logits.retain_grad()
    logprobs, _ = token_logprobs(logits, batch.input_ids, batch.response_mask, 1.0)
    value = kl_term(logprobs, batch, counts, run)
    value.backward()
    assert logits.grad[:, :-1][~batch.query_mask].eq(0).all()
    assert logits.grad[:, :-1][batch.query_mask].abs().max() > 0
    query_gradient = gradients(policy)
    assert all(g.abs().max() > 0 for g in query_gradient)  # the limit: every shared parameter feels it

    answers = torch.where(batch.response_mask, (batch.input_ids[:, 1:] + 3) % VOCABULARY, batch.input_ids[:, 1:])
    otherwise = replace(batch, input_ids=torch.cat([batch.input_ids[:, :1], answers], dim=1))
    policy.zero_grad()
    other = kl_term(scored(policy, otherwise), otherwise, counts, run)
    other.backward()
    assert_same((other.item(), gradients(policy)), (value.item(), query_gradient), 1e-12)

    _, policy_gradient = loss_and_gradients(policy, [batch], counts, UNREGULARISED)
    flat = [torch.cat([g.flatten() for g in gs]) for gs in (query_gradient, policy_gradient)]
    cosine = torch.nn.functional.cosine_similarity(*flat, dim=0).item()
    assert 0 < abs(cosine) < 1  # not orthogonal by construction: a diagnostic, not a theorem

    moved = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter, gradient in zip(moved.parameters(), query_gradient, strict=True):
            parameter -= 0.1 * gradient
        before, after = (scored(p, batch)[batch.response_mask] for p in (policy, moved))
    assert (before - after).abs().max() > 1e-3  # a step on Query-KL alone changes the responses' probabilities


# --- the policy term --------------------------------------------------------------------------------------------------


def test_on_policy_clips_never_bite(policy: Qwen2ForCausalLM, batch: RolloutBatch) -> None:
    fresh = replace(batch, old_logprobs=None)
    counts = global_counts(fresh)
    free = {"clip_low": None, "clip_high": None, "dual_clip": None}
    clipped, unclipped = (
        loss_and_gradients(policy, [fresh], counts, RunConfig(kl_on="none", **options), 0.7) for options in ({}, free)
    )
    assert_same(clipped, unclipped, 1e-12)
    # and both are the plain policy gradient: minus advantage times the gradient of the log-prob
    policy.zero_grad()
    logprobs, mask = scored(policy, fresh, 0.7), fresh.response_mask
    per_row = -(fresh.query_weights[:, None] * fresh.advantages * logprobs * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    (per_row.sum() / counts.num_rows).backward()
    for a, b in zip(gradients(policy), unclipped[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("advantage", ["group_normalized", "group_mean", "leave_one_out"])
@pytest.mark.parametrize(
    "rewards", [[0.1] * 9, [1.0] * 3 + [0.3] * 3 + [0.0] * 3, [float("nan")] * 9, [0.7, float("nan"), 0.7] * 3]
)
def test_constant_and_missing_rewards_give_no_policy_gradient(
    policy: Qwen2ForCausalLM, batch: RolloutBatch, advantage: str, rewards: list[float]
) -> None:
    run = RunConfig(kl_on="none", advantage=advantage)
    found = compute_advantages(torch.tensor(rewards), batch.group, batch.response_mask, run)
    silent = replace(batch, advantages=found.advantages.double())
    loss, gradient = loss_and_gradients(policy, [silent], global_counts(silent), run)
    assert loss == 0
    assert all(g.eq(0).all() for g in gradient)


def test_a_batch_of_truncated_wrong_answers_trains_on_its_penalty_alone(policy: Qwen2ForCausalLM, batch: RolloutBatch) -> None:
    silent = replace(batch, advantages=torch.zeros_like(batch.advantages))
    counts = global_counts(silent)
    with_penalty = loss_and_gradients(policy, [silent], counts, ERPO)
    policy.zero_grad()
    alone = ERPO.kl_coef * kl_term(scored(policy, silent), silent, counts, ERPO)
    alone.backward()
    assert_same(with_penalty, (alone.item(), gradients(policy)), 1e-12)


# --- properties -------------------------------------------------------------------------------------------------------

RUNS = [
    GRPO,
    ERPO,
    RunConfig(kl_on="all", normalizer="token", ratio="sequence"),
    RunConfig(kl_form="importance_weighted", importance_cap=5.0),
    RunConfig(kl_on="response", kl_estimator="k1", clip_low=None, clip_high=None, dual_clip=None),
    RunConfig(advantage="gae", kl_on="query", kl_estimator="k2"),
]
EXTREMES = [0.0, -1e-30, -1.0, -30.0, -100.0, -1e5, float("-inf")]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_finite_or_impossible_log_probs_give_finite_loss_gradient_and_metrics(data: st.DataObject) -> None:
    run = data.draw(st.sampled_from(RUNS))
    rows = random_batch(data.draw(st.integers(0, 20)), num_queries=2, responses_per_query=2, dtype=torch.float32, run=run)
    shape = rows.response_mask.shape

    def draw() -> Tensor:
        values = data.draw(st.lists(st.sampled_from(EXTREMES), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        return torch.tensor(values).reshape(shape)

    on_policy = data.draw(st.booleans())
    rows = replace(rows, old_logprobs=None if on_policy else draw(), ref_logprobs=draw(), rollout_logprobs=draw())
    logprobs = draw().requires_grad_()
    output = total_loss(logprobs, rows, global_counts(rows), run, values=torch.zeros(shape))
    output.loss.backward()
    assert output.loss.isfinite()
    assert logprobs.grad.isfinite().all()
    clean = {key: value for key, value in output.metrics.items() if not key.startswith(("rollout/", "query/nll"))}
    assert all(value.isfinite() for value in clean.values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_ragged_rows_in_any_order_and_split_sum_to_the_same(data: st.DataObject) -> None:
    queries = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    responses = [data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)) for _ in queries]
    group = [g for g, lengths in enumerate(responses) for _ in lengths]
    sizes = [length for lengths in responses for length in lengths]
    rows = collate(
        [[1] * queries[g] for g in group],
        [[2] * size for size in sizes],
        group,
        query_ref_logprobs=[[-1.0] * (queries[g] - 1) for g in group],
    )
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    logprobs = -torch.rand(rows.response_mask.shape, generator=generator, dtype=torch.float64)
    rows = replace(
        rows, advantages=torch.randn(rows.response_mask.shape, generator=generator, dtype=torch.float64) * rows.response_mask
    )
    run = data.draw(st.sampled_from([RunConfig(kl_on="query", normalizer=n) for n in ("sequence", "token", "constant")]))
    counts = global_counts(rows)
    assert counts.num_rows == sum(size > 0 for size in sizes)
    assert counts.num_response_tokens == sum(sizes)
    assert counts.num_queries == sum(size > 1 for size in queries)
    assert counts.num_query_tokens == sum(size - 1 for size in queries)
    whole = total_loss(logprobs, rows, counts, run).loss.item()
    plan = plan_micro_batches(rows.lengths, data.draw(st.integers(1, 40)), data.draw(st.integers(1, 3)))
    order = data.draw(st.permutations([piece for rank in plan for piece in rank]))
    parts = 0.0
    for piece in order:
        part = rows.rows(piece)
        width = part.response_mask.shape[1]
        own = logprobs[torch.from_numpy(piece), :width] if len(piece) else logprobs.new_zeros(1, width)
        parts += total_loss(own, part, counts, run).loss.item()
    assert parts == pytest.approx(whole, abs=1e-12)
