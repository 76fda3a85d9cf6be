"""KL estimators, log-probs, aggregation, policy and value losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from erpo.terms import (
    aggregate,
    entropy,
    full_kl,
    importance_ratio,
    kl_penalty,
    label_logprobs,
    log_ratio,
    policy_term,
    token_logprobs,
    value_loss,
    weighted_logprob_term,
)
from tests.parity.cases import FaultError, Inputs, Outputs, adapter, bools, fault, floats

EPS = 1e-8
"""EasyR1, verl and ROLL add it to the token count of a row, EasyR1 and ROLL to other counts too."""


# --- aggregation under the names of the frameworks --------------------------------------------------------------------


def easyr1_average(values: Tensor, mask: Tensor, mode: str) -> Tensor:
    if mode == "token":
        return aggregate(values, mask, "token", num_tokens=float(mask.sum()) + EPS)
    return aggregate(values, mask, "sequence", num_rows=len(mask), row_eps=EPS)


def verl_average(
    values: Tensor,
    mask: Tensor,
    mode: str,
    *,
    dp_size: int = 1,
    tokens: int | None = None,
    rows: int | None = None,
    factor: float | None = None,
) -> Tensor:
    if mode == "token-sum":
        return dp_size * aggregate(values, mask, "token", num_tokens=1)
    if mode == "token-mean":
        return dp_size * aggregate(values, mask, "token", num_tokens=tokens)
    if mode == "seq-mean-token-mean":
        return dp_size * aggregate(values, mask, "sequence", num_rows=rows, row_eps=EPS)
    constant = 1.0 if mode == "seq-mean-token-sum" else factor or mask.shape[-1]
    return dp_size * aggregate(values, mask, "constant", num_rows=rows, constant=constant)


def roll_average(
    values: Tensor, mask: Tensor, mode: str, *, tokens: int | None = None, rows: float | None = None, weights: Tensor | None = None
) -> Tensor:
    if mode == "token-mean":
        return aggregate(values, mask, "token", num_tokens=tokens, row_weights=weights)
    if mode == "seq-mean-token-sum-norm":
        return aggregate(values, mask, "constant", num_rows=1, constant=mask.shape[-1], row_weights=weights)
    count = (len(mask) if rows is None else rows) + EPS
    if mode == "seq-mean-token-mean":
        return aggregate(values, mask, "sequence", num_rows=count, row_eps=EPS, row_weights=weights)
    return aggregate(values, mask, "constant", num_rows=count, row_weights=weights)


ROLL_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@adapter("agg.easyr1.average_loss")
def easyr1_aggregation(inputs: Inputs) -> Outputs:
    values, mask = floats(inputs["loss_mat"]), bools(inputs["mask"])
    return {mode: easyr1_average(values, mask, mode) for mode in ("token", "seq")}


@adapter("agg.oat.constant_normalizer")
def oat_aggregation(inputs: Inputs) -> Outputs:
    values, mask, constant = floats(inputs["loss_mat"]), bools(inputs["mask"]), inputs["constant_normalizer"]
    rows = [aggregate(values[i : i + 1], mask[i : i + 1], "constant", num_rows=1, constant=constant) for i in range(len(mask))]
    return {
        "per_row": torch.stack(rows),
        "mean": aggregate(values, mask, "constant", num_rows=len(mask), constant=constant),
        "all": aggregate(values, mask, "constant", num_rows=1, constant=constant),
    }


@adapter("agg.roll.agg_loss")
def roll_aggregation(inputs: Inputs) -> Outputs:
    values, mask, weights = floats(inputs["loss_mat"]), bools(inputs["mask"]), floats(inputs["weights"])
    counts = {"tokens": inputs["batch_num_tokens"], "rows": inputs["global_valid_samples"]}
    found = {}
    for mode in ROLL_MODES:
        found[mode] = roll_average(values, mask, mode)
        found[f"{mode}/weights"] = roll_average(values, mask, mode, weights=weights)
        found[f"{mode}/global+weights"] = roll_average(values, mask, mode, weights=weights, **counts)
    return found


@adapter("agg.verl.agg_loss")
def verl_aggregation(inputs: Inputs) -> Outputs:
    values, mask = floats(inputs["loss_mat"]), bools(inputs["mask"])
    counts = {
        "dp_size": inputs["dp_size"],
        "tokens": inputs["batch_num_tokens"],
        "rows": inputs["global_batch_size"],
        "factor": inputs["loss_scale_factor"],
    }
    found = {}
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        found[mode] = verl_average(values, mask, mode)
        found[f"{mode}/global"] = verl_average(values, mask, mode, **counts)
    return found


# --- log-probs and entropy --------------------------------------------------------------------------------------------


@adapter("logits.easyr1.log_probs", "logits.trl.log_probs_entropy")
def plain_logprobs(inputs: Inputs) -> Outputs:
    logits = floats(inputs["logits"])
    return {"log_probs": label_logprobs(logits, torch.tensor(inputs["labels"])), "entropy": entropy(logits)}


@adapter("logits.verl.log_probs_entropy")
def verl_logprobs(inputs: Inputs) -> Outputs:
    found, mask = plain_logprobs(inputs), bools(inputs["mask"])
    losses = {f"entropy_loss/{m}": verl_average(found["entropy"], mask, m) for m in ("token-mean", "seq-mean-token-mean")}
    return {**found, "log_probs_naive": found["log_probs"], **losses}


@adapter("logits.roll.op_log_probs_entropy")
def roll_logprobs(inputs: Inputs) -> Outputs:
    masks = {key: bools(inputs[key])[:, 1:] for key in ("attention_mask", "response_mask")}
    found = token_logprobs(floats(inputs["logits"]), torch.tensor(inputs["input_ids"]), masks["response_mask"], 1.0)
    named = dict(zip(("log_probs", "entropy"), found, strict=True))
    return {f"{name}/{key}": values * mask for key, mask in masks.items() for name, values in named.items()}


# --- KL ---------------------------------------------------------------------------------------------------------------


NO_CLAMPS: dict[str, Any] = {"log_ratio_clamp": None, "k3_clamp": None}
OUTPUT_CLAMP: dict[str, Any] = {"log_ratio_clamp": None}
"""ROLL clamps k3 alone."""


def with_gradient(inputs: Inputs, estimator: str, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    logprobs = floats(inputs["log_probs"]).requires_grad_()
    values = kl_penalty(logprobs, floats(inputs["ref_log_probs"]), estimator, **options)
    values = values if mask is None else values * mask
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    return values, gradient


def estimators(inputs: Inputs, names: dict[str, tuple[str, dict]], mask: Tensor | None = None) -> Outputs:
    found = {}
    for name, (estimator, options) in names.items():
        found[name], found[f"grad_{name}"] = with_gradient(inputs, estimator, mask, **options)
    return found


@adapter("kl.easyr1.per_token")
def easyr1_kl(inputs: Inputs) -> Outputs:
    plain: dict[str, Any] = {"log_ratio_clamp": None}
    return estimators(inputs, {"kl": ("k1", plain), "abs": ("abs", plain), "mse": ("k2", plain), "low_var_kl": ("k3", {})})


@adapter("kl.verl.per_token")
def verl_kl(inputs: Inputs) -> Outputs:
    plain: dict[str, Any] = {"log_ratio_clamp": None}
    names = {"k1": ("k1", plain), "abs": ("abs", plain), "k2": ("k2", plain), "k3": ("k3", {})}
    found = estimators(inputs, names)
    for name in ("k1", "k3"):  # the value of one estimator, the gradient of k2
        found[f"{name}+"], found[f"grad_{name}+"] = found[name], found["grad_k2"]
    straight = estimators(inputs, {"k1+": ("k1", {**plain, "gradient_of": "k2"})})
    return {**found, **straight, "k3+": found["k3"]}


@adapter("kl.roll.per_token")
def roll_kl(inputs: Inputs) -> Outputs:
    names = {"kl": ("k1", OUTPUT_CLAMP), "abs": ("abs", OUTPUT_CLAMP), "mse": ("k2", OUTPUT_CLAMP), "k3": ("k3", OUTPUT_CLAMP)}
    found = estimators(inputs, names, bools(inputs["mask"]))
    return {**found, "k3_nomask": with_gradient(inputs, "k3", **OUTPUT_CLAMP)[0]}


@adapter("kl.trl.per_token")
def trl_kl(inputs: Inputs) -> Outputs:
    found = estimators(inputs, {"k3": ("k3", NO_CLAMPS), "ppo_k1": ("k1", NO_CLAMPS)})
    return {**found, "ppo_k3": found["k3"]}


@adapter("kl.easyr1.full", "kl.roll.full")
def full(inputs: Inputs) -> Outputs:
    return {"full": full_kl(floats(inputs["logits"]), floats(inputs["ref_logits"]))}


def k3_and_mask(inputs: Inputs) -> tuple[Tensor, Tensor]:
    return kl_penalty(floats(inputs["log_probs"]), floats(inputs["ref_log_probs"])), bools(inputs["mask"])


@adapter("kl.easyr1.loss")
def easyr1_kl_loss(inputs: Inputs) -> Outputs:
    values, mask = k3_and_mask(inputs)
    return {mode: easyr1_average(values, mask, mode) for mode in ("token", "seq")}


@adapter("kl.verl.loss")
def verl_kl_loss(inputs: Inputs) -> Outputs:
    values, mask = k3_and_mask(inputs)
    return {mode: verl_average(values, mask, mode) for mode in ROLL_MODES}


@adapter("kl.roll.loss")
def roll_kl_loss(inputs: Inputs) -> Outputs:
    values, mask = k3_and_mask(inputs)
    global_valid = roll_average(values, mask, "seq-mean-token-mean", rows=int(mask.any(-1).sum()))
    return {**{mode: roll_average(values, mask, mode) for mode in ROLL_MODES}, "seq-mean-token-mean/global_valid": global_valid}


# --- policy losses ----------------------------------------------------------------------------------------------------


class Policy:
    """Inputs of a policy loss as tensors, and means over tokens."""

    def __init__(self, inputs: Inputs) -> None:
        self.logprobs = floats(inputs["log_probs"]).requires_grad_()
        self.old, self.advantages, self.mask = floats(inputs["old_log_probs"]), floats(inputs["advantages"]), bools(inputs["mask"])

    def mean(self, values: Tensor) -> Tensor:
        return aggregate(values.to(torch.float64), self.mask, "token")

    def result(self, loss: Tensor, metrics: dict[str, Any] | None = None) -> Outputs:
        (gradient,) = torch.autograd.grad(loss, self.logprobs)
        return {"loss": loss, "grad_log_probs": gradient, "metrics": metrics or {}}


def easyr1_policy(inputs: Inputs, **ratio_options: Any) -> Outputs:
    case = Policy(inputs)
    ratio = importance_ratio(case.logprobs, case.old, case.mask, **ratio_options)
    clips = {"clip_low": inputs["clip_low"], "clip_high": inputs["clip_high"], "dual_clip": inputs["clip_dual"]}
    term = policy_term(ratio, case.advantages, case.mask, **clips)
    metrics = {
        **easyr1_metrics(case, inputs),
        "pg_clipfrac_higher": case.mean(term.clipped_low | term.clipped_high),
        "pg_clipfrac_lower": case.mean(term.clipped_dual),
    }
    return case.result(easyr1_average(term.loss, case.mask, inputs["loss_avg_mode"]), metrics)


def easyr1_metrics(case: Policy, inputs: Inputs) -> dict[str, Tensor]:
    difference = log_ratio(case.old, case.logprobs)
    return {"ppo_kl": case.mean(difference), "entropy_loss": easyr1_average(-case.logprobs, case.mask, inputs["loss_avg_mode"])}


@adapter("policy.easyr1.ppo_token", "policy.easyr1.ppo_seq")
def easyr1_ppo(inputs: Inputs) -> Outputs:
    return easyr1_policy(inputs)


@adapter("policy.easyr1.gspo")
def easyr1_gspo(inputs: Inputs) -> Outputs:
    return easyr1_policy(inputs, level="sequence", row_eps=EPS)


@adapter("policy.easyr1.gspo_token")
def easyr1_gspo_token(inputs: Inputs) -> Outputs:
    return easyr1_policy(inputs, level="sequence", row_eps=EPS, token_gradient=True)


@adapter("policy.easyr1.cispo")
def easyr1_cispo(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    ratio = importance_ratio(case.logprobs, case.old, case.mask)
    low, high = 1 - inputs["clip_low"], 1 + inputs["clip_high"]
    values = weighted_logprob_term(case.logprobs, ratio, case.advantages, case.mask, low=low, high=high)
    return case.result(easyr1_average(values, case.mask, inputs["loss_avg_mode"]), easyr1_metrics(case, inputs))


@adapter("policy.easyr1.micro_batch_scaling")
def easyr1_micro_batches(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    ratio = importance_ratio(case.logprobs, case.old, case.mask)
    clips = {"clip_low": inputs["clip_low"], "clip_high": inputs["clip_high"], "dual_clip": inputs["clip_dual"]}
    values = policy_term(ratio, case.advantages, case.mask, **clips).loss
    total = case.mask.sum()
    found = {}
    for mode in ("token", "seq"):
        parts = [(values[rows], case.mask[rows]) for rows in inputs["micro_batches"]]
        micro = torch.stack([easyr1_average(v, m, mode) * (m.sum() / total) for v, m in parts])
        found[mode] = {"micro": micro, "sum": micro.sum(), "full_batch": easyr1_average(values, case.mask, mode)}
    return found


VERL_PPO = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def verl_term(case: Policy, inputs: Inputs) -> Any:
    ratio = importance_ratio(case.logprobs, case.old, case.mask)
    clips = {"clip_low": inputs["clip_low"], "clip_high": inputs["clip_high"], "dual_clip": inputs["clip_dual"]}
    return policy_term(ratio, case.advantages, case.mask, **clips)


@adapter(*[f"policy.verl.ppo_{mode}" for mode in VERL_PPO])
def verl_ppo(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    term = verl_term(case, inputs)
    metrics = {
        "actor/pg_clipfrac": case.mean(term.clipped_low | term.clipped_high),
        "actor/ppo_kl": case.mean(log_ratio(case.old, case.logprobs).clamp(-20, 20)),
        "actor/pg_clipfrac_lower": case.mean(term.clipped_dual),
    }
    loss = verl_average(term.loss, case.mask, inputs["loss_agg_mode"], factor=inputs.get("loss_scale_factor"))
    return case.result(loss, metrics)


@adapter("policy.verl.ppo_global_norm")
def verl_global_norm(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    values = verl_term(case, inputs).loss
    counts = {"dp_size": inputs["dp_size"], "tokens": inputs["batch_num_tokens"], "rows": inputs["global_batch_size"]}
    counts["factor"] = inputs.get("loss_scale_factor")
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    return {mode: verl_average(values, case.mask, mode, **counts) for mode in modes}


@adapter("policy.verl.gspo")
def verl_gspo(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    ratio = importance_ratio(case.logprobs, case.old, case.mask, "sequence", token_gradient=True, bounds=(None, 10.0))
    term = policy_term(ratio, case.advantages, case.mask, clip_low=inputs["clip_low"], clip_high=inputs["clip_high"])
    metrics = {
        "actor/pg_clipfrac": case.mean(term.clipped_low | term.clipped_high),
        "actor/ppo_kl": case.mean(log_ratio(case.old, case.logprobs)),
        "actor/pg_clipfrac_lower": 0.0,
    }
    return case.result(verl_average(term.loss, case.mask, "seq-mean-token-mean"), metrics)


@adapter("policy.verl.cispo")
def verl_cispo(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    ratio = importance_ratio(case.logprobs, case.old, case.mask)
    low, high = 1 - inputs["clip_low"], 1 + inputs["clip_high"]
    values = weighted_logprob_term(case.logprobs, ratio, case.advantages, case.mask, low=low, high=high)
    metrics = {
        "actor/pg_clipfrac": case.mean((ratio < low) | (ratio > high)),
        "actor/ppo_kl": case.mean(log_ratio(case.old, case.logprobs).clamp(-20, 20)),
        "actor/pg_clipfrac_lower": 0.0,
    }
    return case.result(verl_average(values, case.mask, inputs["loss_agg_mode"], factor=inputs.get("loss_scale_factor")), metrics)


def trl_average(values: Tensor, mask: Tensor, inputs: Inputs) -> Tensor:
    match inputs["loss_type"]:
        case "grpo":
            return aggregate(values, mask, "sequence", num_rows=len(mask)) / inputs["grad_accum"]
        case "bnpo":
            return aggregate(values, mask, "token") / inputs["grad_accum"]
        case "dr_grpo":
            constant = inputs["max_completion_length"]
            return aggregate(values, mask, "constant", num_rows=len(mask), constant=constant) / inputs["grad_accum"]
    return aggregate(values, mask, "token", num_tokens=inputs["num_items_in_batch"] / inputs["num_processes"])


def trl_kl_part(case: Policy, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """beta * k3, added per token before aggregation: the same as adding the aggregates."""
    if not inputs["beta"]:
        return torch.zeros(()), {}
    k3 = kl_penalty(case.logprobs, floats(inputs["ref_log_probs"]), **NO_CLAMPS)
    return inputs["beta"] * trl_average(k3, case.mask, inputs), {"kl": case.mean(k3)}


def trl_clip_metrics(case: Policy, low: Tensor, high: Tensor, by_row: bool) -> dict[str, Tensor]:
    """Means over tokens (or rows, for a ratio per row), and the extremes over rows."""
    mask = torch.ones_like(case.mask[:, :1]) if by_row else case.mask
    low, high = (flag[:, :1] if by_row else flag for flag in (low, high))
    shares = [(flag & mask).sum(-1) / mask.sum(-1) for flag in (low, high)]
    low_share, high_share = (share[~share.isnan()] for share in shares)

    def mean(flag: Tensor) -> Tensor:
        return aggregate(flag.to(torch.float64), mask, "token")

    return {
        "clip_ratio/low_mean": mean(low),
        "clip_ratio/high_mean": mean(high),
        "clip_ratio/region_mean": mean(low | high),
        "clip_ratio/low_min": low_share.min(),
        "clip_ratio/high_max": high_share.max(),
    }


@adapter("policy.trl.grpo", "policy.trl.bnpo", "policy.trl.dr_grpo", "policy.trl.dapo", "policy.trl.gspo")
def trl_policy(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    by_row = inputs["level"] == "sequence"
    ratio = importance_ratio(case.logprobs, case.old, case.mask, inputs["level"], bounds=(None, None))
    clips = {"clip_low": inputs["eps_low"], "clip_high": inputs["eps_high"], "dual_clip": inputs.get("delta")}
    term = policy_term(ratio, case.advantages, case.mask, **clips)
    divergence, metrics = trl_kl_part(case, inputs)
    outside_low = (ratio < 1 - inputs["eps_low"]) & (case.advantages < 0)
    outside_high = (ratio > 1 + inputs["eps_high"]) & (case.advantages > 0)
    metrics = {**metrics, **trl_clip_metrics(case, outside_low, outside_high, by_row)}
    return case.result(trl_average(term.loss, case.mask, inputs) + divergence, metrics)


@adapter("policy.trl.cispo")
def trl_cispo(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    ratio = importance_ratio(case.logprobs, case.old, case.mask, inputs["level"], bounds=(None, None))
    values = weighted_logprob_term(case.logprobs, ratio, case.advantages, case.mask, high=inputs["eps_high"])
    divergence, metrics = trl_kl_part(case, inputs)
    metrics["cispo_clip_ratio"] = case.mean((ratio > inputs["eps_high"]) & (case.advantages > 0))
    return case.result(trl_average(values, case.mask, inputs) + divergence, metrics)


@adapter("policy.trl.ppo")
def trl_ppo(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    ratio = importance_ratio(case.logprobs, case.old, case.mask, bounds=(None, None))
    term = policy_term(ratio, case.advantages, case.mask, clip_low=inputs["clip"], clip_high=inputs["clip"])
    return {**case.result(case.mean(term.loss)), "clipfrac": case.mean(term.clipped_low | term.clipped_high)}


@adapter("policy.trl.rloo")
def trl_rloo(inputs: Inputs) -> Outputs:
    case = Policy(inputs)
    sums = (torch.where(case.mask, x, 0.0).sum(-1, keepdim=True) for x in (case.logprobs, case.old))
    rows = torch.ones_like(case.mask[:, :1])  # one action a response: its whole probability
    ratio = importance_ratio(*sums, rows, bounds=(None, None))
    advantages = case.advantages[:, :1]
    term = policy_term(ratio, advantages, rows, clip_low=inputs["eps_low"], clip_high=inputs["eps_high"])
    loss = aggregate(term.loss, rows, "sequence")
    low = (ratio < 1 - inputs["eps_low"]) & (advantages < 0)
    high = (ratio > 1 + inputs["eps_high"]) & (advantages > 0)
    return case.result(loss, trl_clip_metrics(case, low, high, by_row=True))


# --- value losses -----------------------------------------------------------------------------------------------------


class Critic:
    """Inputs of a value loss as tensors, per-token losses and where the clip replaced them."""

    def __init__(self, inputs: Inputs) -> None:
        self.predicted = floats(inputs["vpreds"]).requires_grad_()
        old, returns, self.mask = floats(inputs["values"]), floats(inputs["returns"]), bools(inputs["mask"])
        self.losses = value_loss(self.predicted, old, returns, inputs["cliprange_value"])
        self.unclipped = value_loss(self.predicted, old, returns)
        self.replaced = (self.losses > self.unclipped).to(torch.float64)

    def result(self, loss: Tensor, **more: Any) -> Outputs:
        (gradient,) = torch.autograd.grad(loss, self.predicted, retain_graph=True)
        return {"loss": loss, "grad_vpreds": gradient, **more}


@adapter("value.easyr1.ppo")
def easyr1_value(inputs: Inputs) -> Outputs:
    case = Critic(inputs)
    means = {"vf_clipfrac": case.replaced, "vpred_mean": case.predicted}
    metrics = {name: easyr1_average(values, case.mask, "token") for name, values in means.items()}
    return {mode: case.result(easyr1_average(case.losses, case.mask, mode), metrics=metrics) for mode in ("token", "seq")}


@adapter("value.verl.ppo")
def verl_value(inputs: Inputs) -> Outputs:
    case = Critic(inputs)
    clipped = aggregate(case.replaced, case.mask, "token")
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
    return {mode: case.result(verl_average(case.losses, case.mask, mode), clipfrac=clipped) for mode in modes}


@adapter("value.trl.ppo")
def trl_value(inputs: Inputs) -> Outputs:
    case = Critic(inputs)
    return case.result(aggregate(case.losses, case.mask, "token"), clipfrac=aggregate(case.replaced, case.mask, "token"))


@adapter("value.roll.ppo")
def roll_value(inputs: Inputs) -> Outputs:
    case = Critic(inputs)

    def mean(values: Tensor) -> Tensor:
        return aggregate(values, case.mask, "sequence", num_rows=len(case.mask), row_eps=EPS)

    error = mean(2 * case.unclipped)
    return case.result(mean(case.losses), clipfrac=mean(case.replaced), vpred_mean=mean(case.predicted), error=error)


# --- faults -----------------------------------------------------------------------------------------------------------


@fault("bug.roll.k3_nan_gradient")
def k3_nan_gradient(inputs: Inputs, faulty: Outputs) -> str:
    logprobs = floats(inputs["log_probs"]).float().requires_grad_()
    values = kl_penalty(logprobs, floats(inputs["ref_log_probs"]).float())
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    if not (values.isfinite().all() and gradient.isfinite().all()):
        raise FaultError("k3 or its gradient is not finite")
    for got, want in ((values, faulty["verl_k3"]), (gradient, faulty["verl_grad"])):
        if not torch.allclose(got.double(), floats(want), rtol=1e-6, atol=1e-6):
            raise FaultError(f"finite, but {got.tolist()} instead of {want}")
    assert "nan" in faulty["roll_grad"]
    return "k3 and its gradient are finite and those of the clamped reference"
