"""From one step's experience to optimizer updates: batch, advantages, weights, micro-batches, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from erpo.advantages import compute_advantages
from erpo.batching import collate, padded_tokens, plan_micro_batches, plan_shared_micro_batches
from erpo.config import Machine, RunConfig
from erpo.engine import Engine, PolicyModule, gather_objects
from erpo.objective import (
    MAX_METRICS,
    GlobalCounts,
    RolloutBatch,
    global_counts,
    kl_term,
    query_nll,
    query_weights,
    reduce_metrics,
    total_loss,
    weight_statistics,
)
from erpo.rollouts import Experience
from erpo.scoring import Scorer, can_share_queries, shared_tokens

_SHARING_PAYS = 1.2
"""Positions of whole rows per position with shared queries from which sharing wins: it takes two passes through the layers."""


class Learner:
    """Turns experience into updates of the engine's policy. All ranks hold the whole batch and train their share of its rows."""

    def __init__(
        self,
        engine: Engine,
        run: RunConfig,
        machine: Machine,
        load_reference: Callable[[], nn.Module],
        query_logprobs: Callable[[str], np.ndarray],
        static_weights: dict[str, float],
    ) -> None:
        self.engine, self.run, self.machine = engine, run, machine
        self.query_logprobs, self.static_weights = query_logprobs, static_weights
        self._load_reference = load_reference
        self._reference: nn.Module | None = None
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def learn(self, step: int, experience: Experience) -> dict[str, float]:
        """All optimizer updates of a step. Returns their metrics, averaged over the updates."""
        begun = time.monotonic()
        updates = self._split(experience)
        batch = self._batch(step, experience, updates)
        rows = []
        for number, chosen in enumerate(updates):
            part = batch.rows(torch.from_numpy(np.flatnonzero(np.isin(batch.group.numpy(), chosen))))
            if number == 0:
                part = replace(part, old_logprobs=None)  # still on-policy: the ratio is 1 without a second forward
            if self.run.query_weight == "online_inverse_nll":
                part = self._with_online_weights(part)
            rows.append(self._update(step, part))
        return _summary(rows, int(batch.lengths.sum()), time.monotonic() - begun)

    def _split(self, experience: Experience) -> list[np.ndarray]:
        return np.array_split(np.arange(len(experience.queries)), self.run.updates_per_step)

    # --- the batch

    def _batch(self, step: int, experience: Experience, updates: list[np.ndarray]) -> RolloutBatch:
        batch = self._collated(experience)
        on_policy = torch.isin(batch.group, torch.from_numpy(updates[0]))
        values = None
        if self.run.advantage == "gae" or self.run.kl_form == "future":
            old, values = self._score_policy(batch, torch.ones_like(on_policy))
            batch = replace(batch, old_logprobs=old, values=values)
        elif len(updates) > 1:
            batch = replace(batch, old_logprobs=self._score_policy(batch, ~on_policy)[0])
        rows = self._rows_with_response_reference(step, on_policy)
        if rows.any():
            batch = replace(batch, ref_logprobs=self._with_response_reference(batch, rows))
        found = compute_advantages(
            torch.from_numpy(experience.rewards).flatten(),
            batch.group,
            batch.response_mask,
            self.run,
            values=values,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
        )
        return replace(batch, advantages=found.advantages, returns=found.returns)

    def _collated(self, experience: Experience) -> RolloutBatch:
        """One row a response; the reference's query log-probs come from the cache."""
        queries = [query for query, group in zip(experience.queries, experience.groups, strict=True) for _ in group]
        rollouts = [rollout for group in experience.groups for rollout in group]
        return collate(
            [query.prompt_ids for query in queries],
            [rollout.response_ids for rollout in rollouts],
            [number for number, group in enumerate(experience.groups) for _ in group],
            rollout_logprobs=[rollout.logprobs for rollout in rollouts],
            query_ref_logprobs=[self.query_logprobs(query.query_id) for query in queries],
            query_weights=[self.static_weights.get(query.query_id, 1.0) for query in queries],
        )

    def _rows_with_response_reference(self, step: int, on_policy: Tensor) -> Tensor:
        """Rows (bool [B]) whose responses the reference scores: all with Policy-KL in the loss, else now and then some."""
        every = self.run.policy_kl_every
        if self.run.needs_reference_on_responses:
            return torch.ones_like(on_policy)
        return on_policy if every and (step == 1 or step % every == 0) else torch.zeros_like(on_policy)

    @property
    def reference(self) -> nn.Module:
        """The frozen reference policy, loaded at first need: ERPO's own loss never needs it."""
        if self._reference is None:
            self._reference = self._load_reference().to(self.engine.device).eval()
        return self._reference

    def _score_policy(self, batch: RolloutBatch, wanted: Tensor) -> tuple[Tensor, Tensor | None]:
        """Log-probs (and values) [B, S-1] of the wanted rows under the current policy; zeros elsewhere."""

        def forward(micro: RolloutBatch, shared: bool) -> tuple[Tensor, Tensor | None]:
            logprobs, _, values = self.engine.forward(micro, self.run.temperature, shared)
            return logprobs, values

        return self._score(batch, wanted, forward)

    def _with_response_reference(self, batch: RolloutBatch, wanted: Tensor) -> Tensor:
        """Reference log-probs [B, S-1]: queries from the cache, responses of wanted rows from a forward, nan elsewhere."""

        def forward(micro: RolloutBatch, shared: bool) -> tuple[Tensor, None]:
            scorer = Scorer(self.reference)
            shared = shared and can_share_queries(self.reference)
            scores = (scorer.groups if shared else scorer.rows)(micro, self.run.temperature)
            return scores.logprobs, None

        scored, _ = self._score(batch, wanted, forward)
        assert batch.ref_logprobs is not None
        return torch.where(batch.response_mask & wanted.unsqueeze(1), scored, batch.ref_logprobs)

    @torch.no_grad()
    def _score(
        self, batch: RolloutBatch, wanted: Tensor, forward: Callable[[RolloutBatch, bool], tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Run `forward` over the wanted rows, shared among ranks; every rank receives the whole [B, S-1] results, 0 elsewhere."""
        index = torch.nonzero(wanted).squeeze(1).numpy()
        mine = []
        for rows, micro, shared in self._micro_batches(batch.rows(index)):
            outputs = forward(micro, shared)
            if len(rows):
                mine.append((index[rows], *(None if out is None else out.float().cpu().numpy() for out in outputs)))
        found: list[Tensor | None] = [None, None]
        for part in gather_objects(mine):
            for rows, *outputs in part:
                for place, output in enumerate(outputs):
                    if output is not None:
                        whole = found[place] if found[place] is not None else torch.zeros(batch.response_mask.shape)
                        whole[rows, : output.shape[1]] = torch.from_numpy(output)
                        found[place] = whole
        scored, values = found
        assert scored is not None
        return scored, values

    def _micro_batches(self, batch: RolloutBatch) -> Iterator[tuple[np.ndarray, RolloutBatch, bool]]:
        """Row indices and rows of each micro-batch of this rank, and whether its queries are to be computed once.

        Idle ranks get a padding row and no indices, to stay in step.
        """
        plan, shared = plan_rows(batch, self.machine, self.world, self.engine.can_share_queries)
        for rows in plan[self.rank]:
            yield rows, batch.rows(rows).to(self.engine.device), shared and len(rows) > 0

    def _with_online_weights(self, part: RolloutBatch) -> RolloutBatch:
        """Weights from the current policy's query likelihood over this optimizer batch (the released patch's reading)."""
        first = torch.zeros_like(part.group, dtype=torch.bool)
        first[_first_rows(part)] = True
        logprobs, _ = self._score_policy(part, first)
        nll = torch.zeros(int(part.group.max()) + 1).index_copy(0, part.group[first], query_nll(logprobs, part)[first])
        weights = query_weights(
            self.run.query_weight,
            nll[part.group],
            part.query_mask.sum(1),
            cap=None,
            renormalise=self.run.renormalise_query_weights,
        )
        return replace(part, query_weights=weights.float())

    # --- one optimizer update

    def _measures_cosine(self, step: int) -> bool:
        """Parameters that ZeRO 3 has dealt out have no gradient of their own to compare."""
        every = self.run.gradient_cosine_every
        return bool(every) and step % every == 0 and self.machine.zero_stage < 3

    def _update(self, step: int, batch: RolloutBatch) -> dict[str, float]:
        run, counts = self.run, global_counts(batch)
        train_policy = run.advantage != "gae" or step > run.value_warmup_steps
        shares = []
        micro_batches = list(self._micro_batches(batch))
        for position, (_, micro, shared) in enumerate(micro_batches):
            self.engine.expect(is_last=position == len(micro_batches) - 1)
            logprobs, entropy, values = self.engine.forward(micro, run.temperature, shared)
            share = total_loss(logprobs, micro, counts, run, entropy=entropy, values=values, train_policy=train_policy)
            self.engine.backward(share.loss)
            shares.append(share.metrics)
            if position == 0 and self._measures_cosine(step):
                shares[0] = {**shares[0], "gradient/cosine": gradient_cosine(self.engine.module, micro, counts, run) / self.world}
        metrics = reduce_metrics(gather_objects(reduce_metrics(shares)))
        warm = min(1.0, step / run.warmup_steps) if run.warmup_steps else 1.0
        # Weight decay is not part of the gradient: a policy that is not to move needs the rate 0.
        done = self.engine.step(run.learning_rate * warm if train_policy else 0.0, run.value_learning_rate)
        once = _first_rows(batch)
        return {
            **metrics,
            **weight_statistics(batch.query_weights[once], batch.query_mask.sum(1)[once]),
            "grad/norm": done.grad_norm,
            "update/applied": float(done.applied),
        }


def plan_rows(batch: RolloutBatch, machine: Machine, num_ranks: int, can_share: bool) -> tuple[list[list[np.ndarray]], bool]:
    """Micro-batches of every rank, and whether queries are to be computed once: where allowed and worth it, or asked for."""
    budget, lengths = machine.micro_batch_tokens, batch.lengths.numpy()
    whole = plan_micro_batches(lengths, budget, num_ranks)
    if machine.share_queries == "off" or not can_share:
        return whole, False
    queries, group = batch.query_lengths.numpy(), batch.group.numpy()
    shared = plan_shared_micro_batches(queries, lengths - queries, group, budget, num_ranks)
    once = sum(shared_tokens(queries[rows], lengths[rows] - queries[rows], group[rows]) for rank in shared for rows in rank)
    if machine.share_queries == "on" or padded_tokens(lengths, whole) >= _SHARING_PAYS * once:
        return shared, True
    return whole, False


def gradient_cosine(module: PolicyModule, micro: RolloutBatch, counts: GlobalCounts, run: RunConfig) -> float:
    """Cosine between the gradients of Query-KL and of the policy term in the policy's parameters, over one micro-batch.

    Proposition 1 of the paper: no score function of a response appears in the first. The parameters are shared all the same;
    the cosine says how much the two pull on one another. nan where either gradient is 0.
    """
    parameters = [parameter for parameter in module.policy.parameters() if parameter.requires_grad]
    logprobs, _, _ = module(micro, run.temperature)
    bare = run.model_copy(update={"kl_on": "none", "entropy_coef": 0.0, "advantage": "batch_mean"})
    losses = (kl_term(logprobs, micro, counts, run, kl_on="query"), total_loss(logprobs, micro, counts, bare).loss)
    query, policy = (torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in losses)

    def dot(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> float:
        return sum(float((x.double() * y.double()).sum()) for x, y in zip(a, b, strict=True) if x is not None and y is not None)

    size = (dot(query, query) * dot(policy, policy)) ** 0.5
    return dot(query, policy) / size if size > 0 else float("nan")


def _first_rows(batch: RolloutBatch) -> Tensor:
    """Index of one row of every query of the batch."""
    return torch.from_numpy(np.unique(batch.group.numpy(), return_index=True)[1])


def _summary(rows: list[dict[str, float]], num_tokens: int, seconds: float) -> dict[str, float]:
    """Metrics of a step from those of its updates: means, maxima for maxima."""
    keys = sorted({key for row in rows for key in row})
    found = {key: [row[key] for row in rows if key in row] for key in keys}
    metrics = {key: max(values) if key in MAX_METRICS else float(np.mean(values)) for key, values in found.items()}
    applied = sum(found["update/applied"])
    return {
        **metrics,
        "update/applied": applied,
        "update/skipped": len(rows) - applied,
        "time/update": seconds,
        "tokens_per_second/update": num_tokens / max(seconds, 1e-9),
    }
