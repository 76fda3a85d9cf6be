"""Advantages, reward shaping and group filters."""

from __future__ import annotations

import torch
from torch import Tensor

from erpo.advantages import (
    best_of_group_advantages,
    constant_groups,
    generalized_advantages,
    keep_groups,
    outcome_advantages,
    overlong_penalty,
    place_on_last_token,
    rewards_to_go,
    whiten,
)
from erpo.terms import kl_penalty
from tests.parity.cases import FaultError, Inputs, Outputs, adapter, bools, fault, floats, labels, runs_of

COUNT_EPS = 1e-8
"""EasyR1, verl and ROLL add it to the count of every masked mean."""


def spread(per_row: Tensor, mask: Tensor) -> Tensor:
    return per_row.unsqueeze(-1) * mask


# --- outcome rewards, one number a response ---------------------------------------------------------------------------


def outcome(inputs: Inputs, baseline: str, scale: str, single: str, eps: float = 1e-6) -> Outputs:
    scores = floats(inputs["token_level_rewards"]).sum(-1)
    found = outcome_advantages(scores, labels(inputs["index"]), baseline, scale, eps=eps, single=single)
    return {"advantages": spread(found, bools(inputs["response_mask"])), "sequence_advantage": found}


@adapter("adv.easyr1.grpo")
def easyr1_grpo(inputs: Inputs) -> Outputs:
    return outcome(inputs, "group_mean", "group", "refuse", inputs["eps"])


@adapter("adv.verl.grpo", "adv.verl.drgrpo", "adv.verl.grpo_vectorized", "adv.verl.drgrpo_vectorized")
def verl_grpo(inputs: Inputs) -> Outputs:
    return outcome(inputs, "group_mean", "group" if inputs["norm_adv_by_std"] else "none", "raw", inputs["eps"])


@adapter("adv.easyr1.rloo")
def easyr1_rloo(inputs: Inputs) -> Outputs:
    return outcome(inputs, "leave_one_out", "none", "refuse")


@adapter("adv.verl.rloo")
def verl_rloo(inputs: Inputs) -> Outputs:
    return outcome(inputs, "leave_one_out", "none", "raw")


@adapter("adv.verl.rloo_vectorized")
def verl_rloo_vectorized(inputs: Inputs) -> Outputs:
    return outcome(inputs, "leave_one_out", "none", "zero")


@adapter("adv.easyr1.grpo_passk", "adv.verl.grpo_passk")
def passk(inputs: Inputs) -> Outputs:
    scores = floats(inputs["token_level_rewards"]).sum(-1)
    scale = "group" if inputs.get("norm_adv_by_std", True) else "none"
    found = best_of_group_advantages(scores, labels(inputs["index"]), scale, eps=inputs["eps"])
    return {"advantages": spread(found, bools(inputs["response_mask"]))}


@adapter("adv.verl.reinforce_pp_baseline")
def reinforce_pp_baseline(inputs: Inputs) -> Outputs:
    per_token = outcome(inputs, "group_mean", "none", "raw")["advantages"]
    mask = bools(inputs["response_mask"])
    return {"advantages": whiten(per_token, mask, count_eps=COUNT_EPS) * mask}


@adapter("adv.urz.grpo")
def urz_grpo(inputs: Inputs) -> Outputs:
    rewards = floats(inputs["rewards"])
    group = runs_of(inputs["n_sample"], len(rewards))
    return {
        "grpo": outcome_advantages(rewards, group, "group_mean", "group", eps=1e-8, single="zero"),
        "drgrpo": outcome_advantages(rewards, group, "group_mean", single="zero"),
    }


@adapter("adv.roll.reward_norm")
def roll_reward_norm(inputs: Inputs) -> Outputs:
    rewards = floats(inputs["rewards"])
    group = runs_of(inputs["n_sample"], len(rewards))
    names = {"group": "group_mean", "batch": "batch_mean"}
    pairs = [("group", "group"), ("group", "none"), ("group", "batch"), ("batch", "batch"), ("batch", "none")]
    return {f"{m}/{s}": outcome_advantages(rewards, group, names[m], s, single="zero") for m, s in pairs}


@adapter("adv.roll.group_reward_norm")
def roll_group_reward_norm(inputs: Inputs) -> Outputs:
    rewards = floats(inputs["rewards"])
    group = runs_of(inputs["n_sample"], len(rewards))
    centred = outcome_advantages(rewards, group, "group_mean", single="zero")
    return {
        "grpo": outcome_advantages(rewards, group, "group_mean", "group", single="zero"),
        "no_std": centred,
        "global_std": outcome_advantages(centred, group, "none", "batch"),
    }


@adapter("adv.roll.grpo_pipeline")
def roll_grpo_pipeline(inputs: Inputs) -> Outputs:
    rewards = floats(inputs["rewards"])
    group = runs_of(inputs["n_sample"], len(rewards))
    attention, response = bools(inputs["attention_mask"])[:, 1:], bools(inputs["response_mask"])[:, 1:]
    normalised = outcome_advantages(rewards, group, "group_mean", "group", single="zero")
    returns = rewards_to_go(place_on_last_token(normalised, attention), attention, inputs["gamma"], at_hole="discount")
    clip = inputs["advantage_clip"]
    plain = returns * response
    whitened = whiten(plain, response, count_eps=COUNT_EPS) * response if response.sum() > 1 else plain
    return {"advantages": plain.clamp(-clip, clip), "advantages_whitened": whitened.clamp(-clip, clip), "returns": returns}


def joined_rewards(inputs: Inputs) -> Tensor:
    """Weighted sum of the reward functions that judged a response; nan if none did."""
    per_function = floats(inputs["rewards_per_func"])
    weights = floats(inputs.get("reward_weights", [1.0] * per_function.shape[1]))
    joined = (per_function.nan_to_num(nan=0.0) * weights).sum(-1)
    return torch.where(per_function.isnan().all(-1), torch.nan, joined)


@adapter("adv.trl.grpo")
def trl_grpo(inputs: Inputs) -> Outputs:
    rewards, eps = joined_rewards(inputs), 1e-4
    group = runs_of(inputs["num_generations"], len(rewards))
    found = {
        scale: outcome_advantages(rewards, group, "group_mean", scale, eps=eps, single="zero")
        for scale in ("group", "batch", "none")
    }
    columns = floats(inputs["rewards_per_func"]).T
    normalised = torch.stack([outcome_advantages(c, group, "group_mean", "group", eps=eps, single="zero") for c in columns], dim=1)
    summed = torch.where(rewards.isnan(), torch.nan, (normalised * floats(inputs["reward_weights"])).sum(-1))
    return {**found, "normalize_then_sum": outcome_advantages(summed, group, "batch_mean", "batch", eps=eps)}


@adapter("adv.trl.rloo")
def trl_rloo(inputs: Inputs) -> Outputs:
    old, ref, mask = floats(inputs["old_log_probs"]), floats(inputs["ref_log_probs"]), bools(inputs["mask"])
    k1 = kl_penalty(old, ref, "k1", log_ratio_clamp=None)
    rewards = joined_rewards(inputs) - inputs["beta"] * (k1 * mask).sum(-1)
    group = runs_of(inputs["num_generations"], len(rewards))
    found = outcome_advantages(rewards, group, "leave_one_out", single="zero")
    known = torch.where(rewards.isnan(), torch.nan, found)
    return {"advantages": found, "advantages_normalized": outcome_advantages(known, group, "batch_mean", "batch", eps=1e-4)}


# --- one number a token -----------------------------------------------------------------------------------------------


@adapter("adv.easyr1.masked_whiten", "adv.verl.masked_whiten", "adv.roll.masked_whiten")
def masked_whiten(inputs: Inputs) -> Outputs:
    return whitened_both(inputs, COUNT_EPS)


@adapter("adv.trl.masked_whiten")
def trl_masked_whiten(inputs: Inputs) -> Outputs:
    return whitened_both(inputs, 0.0)


def whitened_both(inputs: Inputs, count_eps: float) -> Outputs:
    values, mask = floats(inputs["values"]), bools(inputs["mask"])
    return {
        "whitened": whiten(values, mask, count_eps=count_eps),
        "whitened_keep_mean": whiten(values, mask, count_eps=count_eps, keep_mean=True),
    }


@adapter("adv.easyr1.reinforce_pp")
def easyr1_reinforce_pp(inputs: Inputs) -> Outputs:
    rewards, mask = floats(inputs["token_level_rewards"]), bools(inputs["response_mask"])
    returns = rewards_to_go(rewards, mask, inputs["gamma"], at_hole="reset")
    return {"advantages": whiten(returns, mask, count_eps=COUNT_EPS), "returns": returns}


@adapter("adv.verl.reinforce_pp")
def verl_reinforce_pp(inputs: Inputs) -> Outputs:
    rewards, mask = floats(inputs["token_level_rewards"]), bools(inputs["response_mask"])
    returns = rewards_to_go(rewards, mask, inputs["gamma"], at_hole="carry") * mask
    return {"advantages": whiten(returns, mask, count_eps=COUNT_EPS) * mask, "returns": returns}


@adapter("adv.verl.remax")
def verl_remax(inputs: Inputs) -> Outputs:
    rewards, mask = floats(inputs["token_level_rewards"]), bools(inputs["response_mask"])
    returns = rewards_to_go(rewards * mask, mask)
    return {"advantages": returns - spread(floats(inputs["reward_baselines"]), mask), "returns": returns}


@adapter("adv.easyr1.gae", "adv.verl.gae")
def verl_gae(inputs: Inputs) -> Outputs:
    mask = bools(inputs["response_mask"])
    rewards, values = floats(inputs["token_level_rewards"]), floats(inputs["values"])
    found, returns = generalized_advantages(rewards, values, mask, inputs["gamma"], inputs["lam"], zero_off_mask=False)
    return {"advantages": whiten(found, mask, count_eps=COUNT_EPS), "returns": returns}


@adapter("adv.roll.gae")
def roll_gae(inputs: Inputs) -> Outputs:
    rewards, values, mask = floats(inputs["token_level_rewards"]), floats(inputs["values"]), bools(inputs["response_mask"])
    everywhere, gamma, lam = torch.ones_like(mask), inputs["gamma"], inputs["lam"]
    raw, returns = generalized_advantages(rewards, values, everywhere, gamma, lam)
    masked, _ = generalized_advantages(rewards, values * mask, everywhere, gamma, lam)
    return {
        "raw_advantages_unmasked_values": raw,
        "raw_returns_unmasked_values": returns,
        "pipeline_advantages_masked_values": whiten(masked, mask, count_eps=COUNT_EPS) * mask,
    }


@adapter("adv.trl.gae")
def trl_gae(inputs: Inputs) -> Outputs:
    rewards, values = floats(inputs["rewards"]), floats(inputs["values"])
    positions, last = torch.arange(values.shape[1]), torch.tensor(inputs["sequence_lengths"]).unsqueeze(-1)
    values = torch.where(positions > last + 1, 0.0, values)
    everywhere, mask = torch.ones_like(values, dtype=torch.bool), positions <= last
    found, returns = generalized_advantages(rewards, values, everywhere, inputs["gamma"], inputs["lam"])
    return {"advantages": whiten(found, mask) * mask, "returns": returns}


# --- DAPO -------------------------------------------------------------------------------------------------------------


@adapter("dapo.easyr1.overlong", "dapo.trl.overlong")
def overlong(inputs: Inputs) -> Outputs:
    lengths = torch.tensor(inputs["response_lengths"])
    limit, buffer, factor = inputs["max_response_length"], inputs["overlong_buffer_length"], inputs["penalty_factor"]
    return {
        "penalty": overlong_penalty(lengths, limit, buffer),
        "penalty_times_factor": overlong_penalty(lengths, limit, buffer, factor),
    }


@adapter("dapo.verl.overlong")
def verl_overlong(inputs: Inputs) -> Outputs:
    lengths = torch.tensor(inputs["response_lengths"])
    limit, buffer, factor = inputs["max_response_length"], inputs["overlong_buffer_length"], inputs["penalty_factor"]
    return {"penalty_times_factor": overlong_penalty(lengths, limit, buffer, factor, floor=False)}


def kept_labels(inputs: Inputs, keep: Tensor) -> tuple[list, list]:
    kept = sorted({uid for uid, k in zip(inputs["uid"], keep.tolist(), strict=True) if k})
    return kept, sorted(set(inputs["uid"]) - set(kept))


@adapter("dapo.easyr1.dynamic_sampling")
def easyr1_dynamic_sampling(inputs: Inputs) -> Outputs:
    keep = keep_groups(
        floats(inputs["scores"]),
        labels(inputs["uid"]),
        drop_constant=False,
        mean_above=inputs["filter_low"],
        mean_below=inputs["filter_high"],
    )
    return {"kept_groups": kept_labels(inputs, keep)[0], "kept_sample_indices": torch.nonzero(keep).flatten()}


@adapter("dapo.verl.dynamic_sampling")
def verl_dynamic_sampling(inputs: Inputs) -> Outputs:
    kept, dropped = kept_labels(inputs, keep_groups(floats(inputs["scores"]), labels(inputs["uid"])))
    return {"kept_groups": kept, "dropped_groups": dropped}


@adapter("dapo.roll.query_filter")
def roll_query_filter(inputs: Inputs) -> Outputs:
    groups = inputs["groups"]
    rewards = floats([reward for group in groups for reward in group])
    group = torch.tensor([index for index, members in enumerate(groups) for _ in members])
    first = torch.tensor([0, *torch.tensor([len(members) for members in groups]).cumsum(0)[:-1].tolist()])

    def per_group(**bounds: float) -> Tensor:
        return keep_groups(rewards, group, drop_constant=False, **bounds)[first]

    bounds = {"mean_above": inputs["low_threshold"], "mean_below": inputs["high_threshold"]}
    return {
        "keep_mean_filter": per_group(mean_above=inputs["threshold_down"], mean_below=inputs["threshold_up"]),
        "keep_std_filter": per_group(std_above=inputs["std_threshold"]),
        "keep_no_filter": per_group(),
        "difficulty_mask": keep_groups(rewards, group, drop_constant=False, **bounds),
    }


# --- faults -----------------------------------------------------------------------------------------------------------


@fault("bug.roll.gae_padding_leak")
def gae_padding_leak(inputs: Inputs, faulty: Outputs) -> str:
    rewards, mask = floats(inputs["token_level_rewards"]), bools(inputs["response_mask"])
    before, after = (
        generalized_advantages(rewards, floats(inputs[key]), mask)[0] for key in ("values", "values_changed_on_padding")
    )
    if not torch.equal(before, after):
        raise FaultError("values on padding change advantages of tokens")
    assert faulty["advantages"] != faulty["advantages_after_change"]
    return "values on padding change nothing"


@fault("bug.verl.dynamic_sampling_float_std")
def dynamic_sampling_float_std(inputs: Inputs, faulty: Outputs) -> str:
    rewards = floats(inputs["group"])
    group = torch.zeros(len(rewards), dtype=torch.long)
    if not constant_groups(rewards, group).all() or keep_groups(rewards, group).any():
        raise FaultError("a group of equal rewards is kept")
    if outcome_advantages(rewards, group, "group_mean", "group").abs().max() > 0:
        raise FaultError("a group of equal rewards has advantages")
    assert not faulty["dropped"]
    return "a group of equal rewards is dropped, its advantages are exactly 0"
