"""Advantages in numbers worked out by hand, and by enumeration where an expectation is claimed."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from erpo.advantages import (
    best_of_group_advantages,
    compute_advantages,
    constant_groups,
    generalized_advantages,
    keep_groups,
    kl_to_go,
    outcome_advantages,
    overlong_penalty,
    place_on_last_token,
    rewards_to_go,
    whiten,
)
from erpo.config import RunConfig
from erpo.terms import importance_ratio, kl_penalty


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def everywhere(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


REWARDS = tensor(1.0, 0.0, 0.0, 1.0, 1.0, 1.0)
GROUP = torch.tensor([7, 7, 7, 2, 2, 2])
NAN = math.nan


# --- one number a response --------------------------------------------------------------------------------------------


def test_group_normalized_by_hand() -> None:
    std = math.sqrt(((2 / 3) ** 2 + 2 * (1 / 3) ** 2) / 2)
    found = outcome_advantages(REWARDS, GROUP, "group_mean", "group", eps=1e-6)
    assert found.tolist() == pytest.approx([2 / 3 / (std + 1e-6), -1 / 3 / (std + 1e-6), -1 / 3 / (std + 1e-6), 0, 0, 0])


def test_group_mean_leave_one_out_and_batch_mean_by_hand() -> None:
    assert outcome_advantages(REWARDS, GROUP, "group_mean").tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0, 0])
    assert outcome_advantages(REWARDS, GROUP, "leave_one_out").tolist() == pytest.approx([1, -0.5, -0.5, 0, 0, 0])
    assert outcome_advantages(REWARDS, GROUP, "batch_mean").tolist() == pytest.approx([1 / 3, -2 / 3, -2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert outcome_advantages(REWARDS, GROUP, "none").tolist() == REWARDS.tolist()


def test_batch_scale_divides_by_the_deviation_of_raw_rewards() -> None:
    std = math.sqrt((4 * (1 / 3) ** 2 + 2 * (2 / 3) ** 2) / 5)
    found = outcome_advantages(REWARDS, GROUP, "group_mean", "batch", eps=0.0)
    assert found.tolist() == pytest.approx([2 / 3 / std, -1 / 3 / std, -1 / 3 / std, 0, 0, 0])


@pytest.mark.parametrize("value", [0.1, 0.3, 0.9 + 0.1, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_groups_are_exactly_0(value: float, size: int, baseline: str, dtype: torch.dtype) -> None:
    rewards = torch.full((size,), value, dtype=dtype)
    group = torch.zeros(size, dtype=torch.long)
    assert outcome_advantages(rewards, group, baseline, "group").eq(0).all()
    assert constant_groups(rewards, group).all()


def test_missing_rewards_stay_out_of_the_statistics_and_get_0() -> None:
    rewards = tensor(1.0, NAN, 0.0, 1.0, NAN, NAN)
    assert outcome_advantages(rewards, GROUP, "group_mean").tolist() == pytest.approx([0.5, 0, -0.5, 0, 0, 0])
    assert outcome_advantages(rewards, GROUP, "leave_one_out").tolist() == pytest.approx([1, 0, -1, 0, 0, 0])
    assert outcome_advantages(rewards, GROUP, "batch_mean").tolist() == pytest.approx([1 / 3, 0, -2 / 3, 1 / 3, 0, 0])
    assert constant_groups(rewards, GROUP).tolist() == [False] * 3 + [True] * 3


def test_a_group_of_one() -> None:
    rewards, group = tensor(0.5, 1.0, 0.0), torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="batch_mean"):
        outcome_advantages(rewards, group, "group_mean")
    assert outcome_advantages(rewards, group, "leave_one_out", single="zero").tolist() == [0, 1, -1]
    assert outcome_advantages(rewards, group, "leave_one_out", single="raw").tolist() == [0.5, 1, -1]
    assert outcome_advantages(rewards, group, "batch_mean").tolist() == [0, 0.5, -0.5]


def test_unknown_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="median"):
        outcome_advantages(REWARDS, GROUP, "median")


def test_best_of_group() -> None:
    assert best_of_group_advantages(tensor(1.0, 0.25, 0.0, 0.5, 0.5, 0.0), GROUP, "none").tolist() == [0.75, 0, 0, 0, 0, 0]


def test_keep_groups() -> None:
    rewards = tensor(1, 0, 0, 1, 1, 1)
    assert keep_groups(rewards, GROUP).tolist() == [True] * 3 + [False] * 3
    assert keep_groups(rewards, GROUP, drop_constant=False, mean_above=0.5, mean_below=1.0).tolist() == [False] * 6
    assert keep_groups(rewards, GROUP, drop_constant=False, std_above=0.5).tolist() == [True] * 3 + [False] * 3
    assert keep_groups(tensor(0.1, 0.1, 0.1, 0.5, 0.5, 0.25), GROUP).tolist() == [False] * 3 + [True] * 3
    assert keep_groups(tensor(1.0), torch.tensor([0])).tolist() == [True]


@pytest.mark.parametrize(("length", "penalty"), [(80, 0.0), (90, -0.25), (100, -0.5), (110, -0.5)])
def test_overlong_penalty(length: int, penalty: float) -> None:
    assert overlong_penalty(torch.tensor([length]), 100, 20, 0.5).item() == pytest.approx(penalty)


def test_overlong_penalty_without_a_floor_keeps_growing() -> None:
    assert overlong_penalty(torch.tensor([110]), 100, 20, 0.5, floor=False).item() == pytest.approx(-0.75)


# --- one number a token -----------------------------------------------------------------------------------------------


def test_reward_sits_on_the_last_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert place_on_last_token(tensor(5, 6, 7), mask).tolist() == [[0, 0, 5, 0], [0, 0, 0, 0], [0, 0, 0, 7]]


@pytest.mark.parametrize(
    ("at_hole", "expected"), [("carry", [1.5, 0.5, 1.0]), ("reset", [1.0, 0.5, 1.0]), ("discount", [1.25, 0.5, 1.0])]
)
def test_rewards_to_go_across_a_hole(at_hole: str, expected: list[float]) -> None:
    rewards, mask = tensor(1.0, 0.0, 1.0)[None], torch.tensor([[True, False, True]])
    assert rewards_to_go(rewards, mask, 0.5, at_hole=at_hole)[0].tolist() == pytest.approx(expected)


def test_gae_by_hand_and_values_off_the_mask_change_nothing() -> None:
    rewards, mask = tensor(0.0, 0.0, 1.0, 0.0)[None], torch.tensor([[True, False, True, False]])
    values = tensor(0.5, 0.9, 0.25, -3.0)[None]
    # tokens 0 and 2: deltas 0.9 * 0.25 - 0.5 and 1 - 0.25
    expected = [0.9 * 0.25 - 0.5 + 0.9 * 0.8 * 0.75, 0.0, 0.75, 0.0]
    found, returns = generalized_advantages(rewards, values, mask, 0.9, 0.8)
    assert found[0].tolist() == pytest.approx(expected)
    assert returns[0].tolist() == pytest.approx([expected[0] + 0.5, 0, 1.0, 0])
    other, _ = generalized_advantages(rewards, torch.where(mask, values, 77.0), mask, 0.9, 0.8)
    assert torch.equal(found, other)


def test_gae_with_gamma_and_lambda_1_is_return_minus_value() -> None:
    rewards, values = torch.randn(3, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 3, 0])[:, None]
    found, _ = generalized_advantages(rewards, values, mask)
    to_go = rewards_to_go(rewards * mask, mask)
    torch.testing.assert_close(found, torch.where(mask, to_go - values, 0.0))


def test_whitened_values_have_mean_0_and_variance_1_over_the_mask() -> None:
    values = torch.randn(4, 9, dtype=torch.float64) * 3 + 5
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(0)) < 0.6
    inside = whiten(values, mask)[mask]
    assert inside.mean().item() == pytest.approx(0, abs=1e-12)
    assert inside.var().item() == pytest.approx(1, abs=1e-8)
    assert whiten(values, mask, keep_mean=True)[mask].mean().item() == pytest.approx(values[mask].mean().item())


@pytest.mark.parametrize("count", [0, 1])
def test_whitening_too_few_values_is_finite(count: int) -> None:
    mask = torch.zeros(1, 3, dtype=torch.bool)
    mask[0, :count] = True
    assert whiten(tensor(5.0, NAN, 1.0)[None], mask)[mask].eq(0).all()


def test_kl_to_go_by_hand() -> None:
    mask = torch.tensor([[False, True, True, True, False]])
    found = kl_to_go(torch.tensor([[9.0, -1.0, -2.0, -3.0, NAN]]), torch.tensor([[1.0, -2.0, -2.5, -2.0, NAN]]), mask)
    assert found[0].tolist() == pytest.approx([0, 0.5, -0.5, -1.0, 0])


# --- expectations by enumeration --------------------------------------------------------------------------------------


def sequence_tables(num_tokens: int = 3, size: int = 3) -> tuple[dict, dict]:
    """Random next-token logits for every prefix, of a policy and a reference."""
    generator = torch.Generator().manual_seed(4)
    prefixes = [p for length in range(num_tokens) for p in itertools.product(range(size), repeat=length)]
    policy = {p: torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True) for p in prefixes}
    reference = {p: torch.randn(size, generator=generator, dtype=torch.float64) for p in prefixes}
    return policy, reference


def logprobs_of(table: dict, sequence: tuple[int, ...]) -> torch.Tensor:
    return torch.stack([torch.log_softmax(table[sequence[:t]], 0)[token] for t, token in enumerate(sequence)])


def test_future_kl_is_the_gradient_of_the_sequence_kl() -> None:
    """E[sum_t grad log pi(o_t) * kl_to_go_t] over all sequences equals the gradient of KL(pi || pi_ref)."""
    policy, reference = sequence_tables()
    sequences = list(itertools.product(range(3), repeat=3))
    logs = [logprobs_of(policy, o) for o in sequences]
    refs = [logprobs_of(reference, o) for o in sequences]
    parameters = list(policy.values())
    exact = sum(lp.sum().exp() * (lp - ref).sum() for lp, ref in zip(logs, refs, strict=True))
    wanted = torch.autograd.grad(exact, parameters, retain_graph=True)

    mask = everywhere(len(sequences), 3)
    to_go = kl_to_go(torch.stack(logs), torch.stack(refs), mask)
    assert not to_go.requires_grad
    score = sum(lp.sum().exp().detach() * (lp * togo).sum() for lp, togo in zip(logs, to_go, strict=True))
    for got, want in zip(torch.autograd.grad(score, parameters), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_importance_weighted_k3_is_the_exact_kl_of_the_policy_off_policy() -> None:
    """E over the old policy of ratio * k3 is KL(pi || pi_ref), value and gradient; the plain penalty is not, off-policy."""
    generator = torch.Generator().manual_seed(1)
    logits, old, ref = (torch.randn(1, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    logprobs, old, ref = (torch.log_softmax(x, -1) for x in (logits, old, ref))
    exact = (logprobs.exp() * (logprobs - ref)).sum()
    k3 = kl_penalty(logprobs, ref)
    weighted = (old.exp() * importance_ratio(logprobs, old, everywhere(1, 5)) * k3).sum()
    assert weighted.item() == pytest.approx(exact.item(), abs=1e-12)
    assert (old.exp() * k3).sum().item() != pytest.approx(exact.item(), abs=1e-2)
    (want,) = torch.autograd.grad(exact, logits, retain_graph=True)
    (got,) = torch.autograd.grad(weighted, logits)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


# --- joined by settings -----------------------------------------------------------------------------------------------


MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()


def test_outcome_advantages_are_spread_over_the_response() -> None:
    found = compute_advantages(REWARDS, GROUP, MASK, RunConfig(advantage="group_mean"))
    assert found.advantages.dtype == torch.float32
    assert found.advantages[0].tolist() == pytest.approx([0, 2 / 3, 2 / 3, 0])
    assert found.advantages[3:].eq(0).all()
    assert found.is_constant.tolist() == [False] * 3 + [True] * 3
    assert found.num_missing == 0
    assert found.returns is None


def test_reinforce_plus_plus_whitens_over_tokens() -> None:
    found = compute_advantages(REWARDS, GROUP, MASK, RunConfig(advantage="batch_mean", whiten_advantages=True)).advantages
    assert found[MASK].mean().item() == pytest.approx(0, abs=1e-6)
    assert found[MASK].var().item() == pytest.approx(1, abs=1e-6)
    assert found[~MASK].eq(0).all()


def test_ppo_needs_values_and_missing_rewards_teach_the_critic_nothing() -> None:
    run = RunConfig(advantage="gae", gamma=0.9, gae_lambda=0.8)
    with pytest.raises(ValueError, match="critic"):
        compute_advantages(REWARDS, GROUP, MASK, run)
    values = torch.rand(MASK.shape, dtype=torch.float64)
    rewards = REWARDS.clone()
    rewards[1] = NAN
    found = compute_advantages(rewards, GROUP, MASK, run, values=values)
    assert found.num_missing == 1
    assert found.advantages[1].eq(0).all()
    torch.testing.assert_close(found.returns[1], values[1].float())
    last = 1.0 - values[0, 2]
    first = 0.9 * values[0, 2] - values[0, 1] + 0.9 * 0.8 * last
    assert found.advantages[0].tolist() == pytest.approx([0, first.item(), last.item(), 0])
    assert found.returns[0, 1].item() == pytest.approx((first + values[0, 1]).item())


def test_future_kl_is_subtracted_after_the_group_advantage() -> None:
    run = RunConfig(advantage="group_mean", kl_form="future", kl_coef=0.5)
    old, ref = torch.full(MASK.shape, -1.0), torch.full(MASK.shape, -1.5)
    with pytest.raises(ValueError, match="future"):
        compute_advantages(REWARDS, GROUP, MASK, run, old_logprobs=old)
    found = compute_advantages(REWARDS, GROUP, MASK, run, old_logprobs=old, ref_logprobs=ref)
    assert found.advantages[0].tolist() == pytest.approx([0, 2 / 3 - 0.5 * 1.0, 2 / 3 - 0.5 * 0.5, 0])
    assert found.advantages[5].tolist() == pytest.approx([0, -0.75, -0.5, -0.25])


# --- properties -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(NAN)), min_size=2, max_size=12),
    st.sampled_from(["group_mean", "leave_one_out", "batch_mean", "none"]),
    st.sampled_from(["none", "group", "batch"]),
    st.randoms(use_true_random=False),
)
def test_advantages_are_finite_permutable_and_centred(rewards: list, baseline: str, scale: str, random: object) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    group = torch.arange(len(rewards)) // 2
    found = outcome_advantages(values, group, baseline, scale, single="zero")
    assert found.isfinite().all()
    assert found[values.isnan()].eq(0).all()
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = outcome_advantages(values[order], group[order], baseline, scale, single="zero")
    torch.testing.assert_close(shuffled, found[order], rtol=1e-9, atol=1e-9)
    if baseline == "group_mean" and scale == "none":
        sums = torch.zeros(len(rewards), dtype=torch.float64).index_add(0, group, found)
        assert sums.abs().max() <= 1e-9 * max(1.0, values.nan_to_num(nan=0.0).abs().max().item())
