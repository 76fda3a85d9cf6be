"""The ERPO loss, query weights, and evaluation metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from erpo.config import RunConfig
from erpo.metrics import avg_at_k, maj_at_k, majority_answer, pass_at_k
from erpo.objective import GlobalCounts, RolloutBatch, global_counts, kl_term, query_nll, token_logprobs, total_loss
from erpo.terms import aggregate, importance_ratio, kl_penalty, policy_term
from erpo.weights import query_weights
from tests.parity.cases import FaultError, Inputs, Outputs, adapter, bools, fault, flat, floats
from tests.parity.policy_cases import easyr1_average

KL_ON = {"prompt": "query", "response": "response", "all": "all"}
NORMALIZER = {
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "constant",
    "seq-mean-token-sum-norm": "constant",
    "token-mean": "token",
}


def run_of(inputs: Inputs) -> RunConfig:
    """The settings of a ROLL or ERPO case as ours."""
    own_range = inputs.get("use_pg_clip_range", False)
    pg_clip = inputs["pg_clip"]
    return RunConfig(
        kl_on=KL_ON[inputs["kl_loss_mask_mode"]],
        kl_coef=inputs["kl_loss_coef"],
        clip_low=inputs["pg_clip_low"] if own_range else pg_clip,
        clip_high=inputs["pg_clip_high"] if own_range else pg_clip,
        dual_clip=1 + 2 * pg_clip if inputs["dual_clip_loss"] else None,
        normalizer=NORMALIZER[inputs["loss_agg_mode"]],
        # the length of `constant`: a plain sum, or one over the padded width
        max_response_tokens=len(inputs["input_ids"][0]) - 1 if inputs["loss_agg_mode"] == "seq-mean-token-sum-norm" else 1,
        ratio="sequence" if inputs.get("importance_sampling") == "seq" else "token",
        entropy_coef=inputs.get("entropy_loss_coef") or 0.0,
        query_weight="online_inverse_nll" if inputs["prompt_weight"] else "none",
    )


class Rows:
    """A batch of right-padded sequences with logits that take a gradient; every row has its own query."""

    def __init__(self, inputs: Inputs) -> None:
        self.logits = floats(inputs["logits"]).requires_grad_()
        ids = torch.tensor(inputs["input_ids"])
        attention, response = bools(inputs["attention_mask"]), bools(inputs["response_mask"])
        self.query_mask, self.response_mask = (attention & ~response)[:, 1:], (attention & response)[:, 1:]
        self.logprobs, self.entropy = token_logprobs(self.logits, ids, self.response_mask, 1.0)
        self.valid = bools(inputs.get("sample_mask", [1] * len(ids)))
        zeros = torch.zeros_like(self.logprobs).detach()
        self.batch = RolloutBatch(
            input_ids=ids,
            lengths=attention.sum(-1),
            query_lengths=(attention & ~response).sum(-1),
            query_mask=self.query_mask,
            response_mask=self.response_mask & self.valid.unsqueeze(-1),
            group=torch.arange(len(ids)),
            advantages=floats(inputs["advantages"]) if "advantages" in inputs else zeros,
            query_weights=torch.ones(len(ids), dtype=torch.float64),
            old_logprobs=floats(inputs["old_log_probs"]) if "old_log_probs" in inputs else None,
            ref_logprobs=floats(inputs["ref_log_probs"]) if "ref_log_probs" in inputs else None,
        )
        self.nll, self.num_tokens = query_nll(self.logprobs, self.batch), self.query_mask.sum(-1)
        self.weights = query_weights("online_inverse_nll", self.nll, self.num_tokens)
        if inputs.get("prompt_weight"):
            self.batch = replace(self.batch, query_weights=self.weights)
        self.own_counts = {"num_rows": 1} if inputs.get("loss_agg_mode") == "seq-mean-token-sum-norm" else {}

    def counts(self) -> GlobalCounts:
        """ROLL divides both terms by the number of valid responses."""
        counts = replace(global_counts(self.batch), **self.own_counts)
        return replace(counts, num_queries=counts.num_rows)


@adapter(
    "policy.roll.rlvr_loss",
    *[f"erpo.erpo.total_{kind}" for kind in ("prompt_kl", "response_kl", "all_kl", "filtered", "off_policy", "seq_ratio")],
)
def erpo_total(inputs: Inputs) -> Outputs:
    rows, run = Rows(inputs), run_of(inputs)
    counts = rows.counts()
    output = total_loss(rows.logprobs, rows.batch, counts, run, entropy=rows.entropy)
    (gradient,) = torch.autograd.grad(output.loss, rows.logits, retain_graph=True)
    return {
        "prompt_nll": rows.nll,
        "prompt_weights": rows.weights,
        "total_loss": output.loss,
        "grad_logits": gradient,
        "metrics": total_metrics(rows, counts, run, output.metrics["loss/policy"]),
    }


def total_metrics(rows: Rows, counts: GlobalCounts, run: RunConfig, weighted: Tensor) -> dict[str, Any]:
    unweighted = replace(rows.batch, query_weights=torch.ones_like(rows.batch.query_weights))
    weights = rows.batch.query_weights
    return {
        "pg_loss@sum": total_loss(rows.logprobs, unweighted, counts, run, entropy=rows.entropy).metrics["loss/policy"],
        "weighted_pg_loss@sum": weighted,
        "kl_loss@sum": roll_kl(rows, counts, run, run.kl_on),
        "all_kl@sum": roll_kl(rows, counts, run, "all"),
        "prompt_kl@sum": roll_kl(rows, counts, run, "query"),
        "response_kl@sum": roll_kl(rows, counts, run, "response"),
        "sample_weights_mean@mean": weights.mean(),
        "sample_weights_min@min": weights.min(),
        "sample_weights_max@max": weights.max(),
        **ratio_metrics(rows, counts, run),
    }


def roll_kl(rows: Rows, counts: GlobalCounts, run: RunConfig, kl_on: str) -> Tensor:
    """A removed response leaves the sum over responses, but not the one over all tokens."""
    batch = replace(rows.batch, response_mask=rows.response_mask) if kl_on == "all" else rows.batch
    return kl_term(rows.logprobs.detach(), batch, counts, run, kl_on)


def ratio_metrics(rows: Rows, counts: GlobalCounts, run: RunConfig) -> dict[str, Tensor]:
    mask, batch = rows.batch.response_mask, rows.batch
    old = rows.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratio = importance_ratio(rows.logprobs, batch.old_logprobs, mask, run.ratio)
    term = policy_term(ratio, batch.advantages, mask, clip_low=run.clip_low, clip_high=run.clip_high, dual_clip=None)
    per_token = {
        "approxkl@sum": kl_penalty(rows.logprobs, old, "k2", log_ratio_clamp=None),
        "policykl@sum": kl_penalty(rows.logprobs, old, "k1", log_ratio_clamp=None),
        "clipfrac@sum": (term.clipped_low | term.clipped_high).to(torch.float64),
    }
    by_mode = {name: aggregate(values, mask, run.normalizer, num_rows=counts.num_rows) for name, values in per_token.items()}
    return {**by_mode, "ratio_mean@sum": aggregate(ratio, mask, "sequence", num_rows=counts.num_rows)}


@adapter("erpo.erpo.micro_batches")
def micro_batches(inputs: Inputs) -> Outputs:
    rows, run = Rows(inputs), run_of(inputs)
    counts = rows.counts()
    micro, policy, divergence = [], [], []
    for index in inputs["micro_batches"]:
        part = rows.batch.rows(index)
        logprobs = rows.logprobs[index, : part.input_ids.shape[1] - 1]
        output = total_loss(logprobs, part, counts, run)
        micro.append(output.loss)
        policy.append(output.metrics["loss/policy"])
        divergence.append(kl_term(logprobs, part, counts, run))
    return {
        "micro_losses": torch.stack(micro),
        "micro_pg": torch.stack(policy),
        "micro_kl": torch.stack(divergence),
        "full_loss": total_loss(rows.logprobs, rows.batch, counts, run).loss,
        "sum_of_micro": torch.stack(micro).sum(),
    }


@adapter("erpo.erpo.left_padded_layout")
def left_padded(inputs: Inputs) -> Outputs:
    attention, response = bools(inputs["attention_mask"]), bools(inputs["response_mask"])
    positions = attention[:, 1:] & attention[:, :-1] & ~response[:, 1:]  # the first real token is predicted from padding
    logprobs, _ = token_logprobs(floats(inputs["logits"]), torch.tensor(inputs["input_ids"]), response[:, 1:], 1.0)
    nll = -torch.where(positions, logprobs, 0.0).sum(-1)
    return {
        "prompt_nll": nll,
        "prompt_weights": query_weights("online_inverse_nll", nll, positions.sum(-1)),
        "prompt_kl": aggregate(
            kl_penalty(logprobs, floats(inputs["ref_log_probs"])), positions, "sequence", num_rows=len(positions)
        ),
        "prompt_positions": positions,
    }


@adapter("erpo.easyr1.composed")
def composed(inputs: Inputs) -> Outputs:
    query, logprobs = floats(inputs["prompt_log_probs"]).requires_grad_(), floats(inputs["log_probs"]).requires_grad_()
    reference, query_mask = floats(inputs["prompt_ref_log_probs"]), bools(inputs["prompt_mask"])
    mask, mode = bools(inputs["response_mask"]), inputs["loss_avg_mode"]
    weights = query_weights("reference_inverse_nll", -(reference * query_mask).sum(-1), query_mask.sum(-1), cap=None)
    ratio = importance_ratio(logprobs, floats(inputs["old_log_probs"]), mask)
    clips = {"clip_low": inputs["clip_low"], "clip_high": inputs["clip_high"], "dual_clip": inputs["clip_dual"]}
    policy = easyr1_average(
        policy_term(ratio, floats(inputs["advantages"]), mask, **clips).loss * weights.unsqueeze(-1), mask, mode
    )
    divergence = easyr1_average(kl_penalty(query, reference), query_mask, mode)
    total = policy + inputs["kl_coef"] * divergence
    on_query, on_response = torch.autograd.grad(total, (query, logprobs))
    return {
        "weights": weights,
        "pg_loss": policy,
        "query_kl": divergence,
        "total": total,
        "grad_prompt_log_probs": on_query,
        "grad_log_probs": on_response,
    }


# --- weights ----------------------------------------------------------------------------------------------------------


@adapter("erpo.erpo.normalize_weights")
def normalize_weights(inputs: Inputs) -> Outputs:
    given = [v for key, v in inputs.items() if key not in ("prompt_nll", "valid_prompt") and isinstance(v, int | float)]
    valid = bools(inputs["valid_prompt"])
    mean = float(given[0]) if given else None
    return {"weights": query_weights("online_inverse_nll", floats(inputs["prompt_nll"]), valid, mean_nll=mean)}


@adapter("erpo.erpo.dynamic_weights")
def dynamic_weights(inputs: Inputs) -> Outputs:
    mask = bools(inputs["prompt_mask"])
    nll = -torch.where(mask, floats(inputs["log_probs"]), 0.0).sum(-1)
    return {"weights": query_weights("online_inverse_nll", nll, mask.sum(-1)), "prompt_nll": nll}


@adapter("erpo.erpo.global_mean")
def global_mean(inputs: Inputs) -> Outputs:
    own, everyone = floats(inputs["local_nll"]), floats(flat([inputs["local_nll"], inputs["other_rank_nll"]]))
    weights = query_weights("online_inverse_nll", everyone, torch.ones_like(everyone))
    return {"weights": weights[: len(own)], "global_mean_nll": everyone.mean(), "global_samples": float(len(everyone))}


@adapter("erpo.erpo.prompt_nll")
def prompt_nll(inputs: Inputs) -> Outputs:
    rows = Rows(inputs)
    return {"prompt_nll": rows.nll, "valid_prompt": rows.num_tokens > 0, "weights": rows.weights}


@adapter("erpo.paper-text.static_weight_clip")
def static_weight_clip(inputs: Inputs) -> Outputs:
    nll = floats(inputs["reference_prompt_nll"])
    tokens, cap = torch.ones_like(nll), inputs["clip_max"]
    capped = query_weights("reference_inverse_nll", nll, tokens, cap=cap)
    unclipped = query_weights("reference_inverse_nll", nll, tokens, cap=None)
    return {"weights_unclipped": unclipped, "weights": capped, "mean_of_clipped": capped.mean()}


# --- evaluation -------------------------------------------------------------------------------------------------------


@adapter("eval.roll.pass_at_k_percent")
def roll_pass_at_k(inputs: Inputs) -> Outputs:
    n, c = np.array(inputs["num_samples"]), np.array(inputs["num_correct"])
    return {f"pass@{k}": (100 * pass_at_k(n, c, k)).tolist() for k in inputs["k"]}


@adapter("eval.simplerl.pass_at_k")
def simplerl_pass_at_k(inputs: Inputs) -> Outputs:
    found: Outputs = {}
    for k in inputs["k"]:
        values = pass_at_k(np.array(inputs["num_samples"]), np.array(inputs["num_correct"]), k)
        found |= {f"pass@{k}": values.tolist(), f"pass@{k}/mean": float(values.mean())}
    return found


@adapter("eval.simplerl.matrix")
def simplerl_matrix(inputs: Inputs) -> Outputs:
    correct = np.array(inputs["correct"], dtype=float)
    n, c = correct.shape[1], correct.sum(1).astype(int)
    per_problem = avg_at_k(correct)
    passes = {f"pass@{k}": float(pass_at_k(n, c, k).mean()) for k in range(1, n + 1)}
    return {"avg@n": float(per_problem.mean()), "avg_per_problem": per_problem.tolist(), **passes}


@adapter("eval.verl.maj_vote")
def verl_maj_vote(inputs: Inputs) -> Outputs:
    answers = inputs["pred"]
    winner = majority_answer(answers)
    value = maj_at_k([answers], [inputs["val"]])[0]
    return {"verl_maj_val": float(value), "qwen_majority": winner, "qwen_majority_first_index": answers.index(winner)}


# --- faults -----------------------------------------------------------------------------------------------------------


@fault("bug.erpo.token_mean_ignores_mask")
def token_mean_ignores_mask(inputs: Inputs, faulty: Outputs) -> str:
    rows = Rows(inputs)
    counts = rows.counts()
    found = {name: float(roll_kl(rows, counts, run_of(inputs), ours)) for name, ours in KL_ON.items()}
    tokens = {"prompt": counts.num_query_tokens, "response": counts.num_response_tokens, "all": counts.num_tokens}
    sums = {name: found[name] * tokens[name] for name in found}
    if abs(sums["prompt"] + sums["response"] - sums["all"]) > 1e-12 or sums["prompt"] == sums["all"]:
        raise FaultError(f"the sums over query, response and all tokens do not add up: {sums}")
    their_sums = [faulty["kl_loss_by_mask_mode"][name] * tokens[name] for name in found]
    assert max(their_sums) - min(their_sums) < 1e-6
    if abs(sums["all"] - their_sums[0]) > 1e-6:
        raise FaultError("the sum over all tokens is not the reference's")
    return "each mode sums its own tokens; query and response add up to all"


@fault("bug.roll.reference_log_probs_zero_on_prompt")
def reference_zero_on_prompt(inputs: Inputs, faulty: Outputs) -> str:
    rows = Rows(inputs)
    themselves = replace(rows.batch, ref_logprobs=rows.logprobs.detach().clone())
    value = float(kl_term(rows.logprobs.detach(), themselves, rows.counts(), run_of(inputs), "query"))
    if value != 0.0:
        raise FaultError(f"Query-KL of a policy against itself is {value}")
    assert faulty["qkl_of_identical_models"] > 1
    return "Query-KL of a policy against itself is exactly 0"
