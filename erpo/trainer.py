"""rollout -> reward -> advantage -> loss -> step. The trainer knows no method: it executes settings and tensors."""

from __future__ import annotations

import logging
import math
import os
import platform
import resource
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from erpo.checkpoint import (
    begin_state,
    check_space,
    claim_work,
    code_commit,
    commit_folder,
    commit_state,
    newest_state,
    only_one,
    policy_hash,
    prune_states,
    read_json,
    retry_free,
    why_invalid,
    write_json,
)
from erpo.config import Machine, RunConfig, digest
from erpo.engine import Engine, PolicyModule, agree, barrier, gather_objects, join_processes
from erpo.generation import PolicySampler, Sampling
from erpo.learning import Learner
from erpo.probe import evaluate_policy, fixed_subset
from erpo.progress import Progress, Resubmit, RunLog, StopSignal, Walltime
from erpo.records import Query, derive_seed, read_queries
from erpo.reference import ReferenceCache, load_cache, static_weights, verify_cache
from erpo.rewards import Grader, check_canaries
from erpo.rollouts import Collector, Experience, experience_metrics
from erpo.templates import decode, load_tokenizer, stop_ids

logger = logging.getLogger(__name__)

_PROBE_QUERIES = 32
"""Problems of each benchmark in the in-training evaluation."""

_SAMPLE_ROWS = 8
"""Responses kept in the sample table each time."""


class UnhealthyRunError(RuntimeError):
    """The run cannot go on; the message names step and metric. The last healthy state stands."""


def train(
    *,
    spec: dict[str, Any],
    run: RunConfig,
    machine: Machine,
    name: str,
    seed: int,
    step: int,
    model_marker: Path,
    queries_path: Path,
    reference_marker: Path,
    work: Path,
    marker: Path,
    probe_paths: Sequence[Path] = (),
    supersede: bool = False,
) -> None:
    """Train a run up to `step` and leave its policy, state, metrics and marker. Done already: the marker is rewritten.

    Args:
        spec: what decides the numbers (config.run_spec); the work directory is tied to it.
        run: its typed settings.
        machine: how to run here.
        name: the run's name, for people.
        seed: root of every random draw.
        step: milestone to reach.
        model_marker: marker of the starting checkpoint, which is also the reference policy.
        queries_path: prepared training queries.
        reference_marker: marker of the reference cache.
        work: work directory of (run, seed).
        marker: file written when the milestone is complete.
        probe_paths: prepared benchmarks of the in-training evaluation (evaluate_every).
        supersede: move work made under other settings aside instead of refusing.

    Raises:
        ValueError: unusable input, before any work.
        UnhealthyRunError: non-finite gradients, a stale generator, a failing grader.
        Resubmit: stopped early and saved; the same command continues.
    """
    rank, _ = join_processes()
    model = read_json(model_marker)
    full_spec = {**spec, "seed": seed, "model_hash": model["policy_hash"]}
    with only_one(work) if rank == 0 else nullcontext():
        if rank == 0:
            claim_work(work, full_spec, supersede)
        barrier()
        policy_folder = work / "policies" / f"step{step}"
        if agree(why_invalid(policy_folder) is not None):
            queries = read_queries(queries_path)
            trainer = Trainer(
                run=run,
                machine=machine,
                title=f"train {name} seed {seed}",
                seed=seed,
                model_folder=model_marker.parent / model["policy"],
                queries=queries,
                cache=load_cache(reference_marker, queries, model_hash=model["policy_hash"]),
                probe=[query for path in probe_paths for query in fixed_subset(read_queries(path), _PROBE_QUERIES, seed=0)],
                work=work,
                rank=rank,
            )
            trainer.run_to(step)
    if rank == 0:
        facts = {"run": name, "seed": seed, "step": step, "spec": full_spec, "spec_hash": digest(full_spec)}
        write_json(marker, {**facts, **_result(work, policy_folder, marker)})
    barrier()


def _result(work: Path, policy_folder: Path, marker: Path) -> dict[str, Any]:
    info = read_json(policy_folder / "manifest.json")["info"]
    places = {"policy": policy_folder, "metrics": work / "metrics.jsonl", "samples": work / "samples.jsonl"}
    return {**info, **{key: os.path.relpath(path, marker.parent) for key, path in places.items()}}


class Trainer:
    """One run on this rank."""

    def __init__(
        self,
        *,
        run: RunConfig,
        machine: Machine,
        title: str,
        seed: int,
        model_folder: Path,
        queries: list[Query],
        cache: ReferenceCache,
        probe: list[Query],
        work: Path,
        rank: int,
    ) -> None:
        _, world = join_processes()
        if machine.deterministic:
            torch.use_deterministic_algorithms(True)
        self.run, self.machine, self.title, self.seed = run, machine, title, seed
        self.queries, self.cache, self.probe, self.work, self.rank = queries, cache, probe, work, rank
        self.tokenizer = load_tokenizer(model_folder)
        policy = _load_policy(model_folder, run)
        module = PolicyModule(
            policy, run.advantage == "gae", derive_seed(seed, "value head"), entropy_gradient=run.entropy_coef > 0
        )
        self.engine = Engine(module, run, machine)
        if machine.generator != "sampler":
            raise ValueError(f"generator: {machine.generator} cannot roll out in training yet; use sampler")
        self.generator = PolicySampler(policy, batch_rows=machine.rollout_rows)
        self.grader = Grader(workers=machine.grading_workers or None)
        check_canaries(self.grader)
        sampling = Sampling(run.temperature, 1.0, run.max_response_tokens, stop_ids(self.tokenizer, model_folder))
        self.collector = Collector(
            queries, self.generator, self.grader, run, sampling, lambda ids: decode(self.tokenizer, ids), seed, rank, world
        )
        self.learner = Learner(
            self.engine, run, machine, lambda: _load_policy(model_folder, run), cache.logprobs, static_weights(cache, queries, run)
        )
        self.log = RunLog(work, enabled=rank == 0)
        self.stop_signal, self.walltime = StopSignal(), Walltime()
        self.skipped_in_a_row = 0
        self.last_save: int | None = None

    # --- the loop

    def run_to(self, target: int) -> None:
        """Resume from the newest verified state at or before `target` and train on to it."""
        begun, start = time.monotonic(), self._resume(target)
        progress = Progress(self.title, start, target, self.work / "progress.json" if self.rank == 0 else None)
        with self.stop_signal.listening(), self.grader:
            for step in range(start + 1, target + 1):
                step_begun = time.monotonic()
                with self.engine.whole_weights():
                    experience = self.collector.collect(step)
                row = {**experience_metrics(experience), **self.learner.learn(step, experience)}
                self.generator.update_weights((), self.engine.updates)
                with self.engine.whole_weights():
                    row |= self._evaluate(step)
                row["time/total"] = time.monotonic() - step_begun
                row["memory/peak_gib"] = _peak_memory_gib()
                self.log.metrics(step, {key: value for key, value in row.items() if math.isfinite(value)})
                self._table_of_samples(step, experience)
                self._check_health(step, row)
                self.walltime.longest_step = max(self.walltime.longest_step, row["time/total"])
                stopping = agree(self.stop_signal.received is not None or self.walltime.is_short()) and step < target
                if step % self.machine.save_every == 0 or step == target or stopping:
                    self._save(step, is_milestone=step == target)
                if self.rank == 0:
                    shown = {"reward": row["reward/mean"], "accuracy": row["reward/accuracy"], "Query-KL": row["kl/query"]}
                    progress.update(step, shown, self.last_save)
                if stopping:
                    logger.warning("stopping after step %d (%s); saved", step, self.stop_signal.received or "time limit")
                    raise Resubmit
        self._export(target, time.monotonic() - begun)

    def _resume(self, target: int) -> int:
        found = newest_state(self.work / "states", at_most=target)
        steps = gather_objects(found[0] if found else 0)
        assert len(set(steps)) == 1, f"ranks see different states: {steps}"
        if found is None:
            verify_cache(self.cache, self.engine.module.policy, self.queries, seed=self.seed)
            check_space(self.work, 3 * self._state_bytes(), "a training state and its successor")
            return 0
        step, folder = found
        self.engine.load(folder)
        facts = read_json(folder / "manifest.json")["info"]
        self.engine.updates, self.skipped_in_a_row = facts["updates"], facts["skipped_in_a_row"]
        self.generator.update_weights((), self.engine.updates)
        logger.info("resumed from step %d", step)
        return step

    def _state_bytes(self) -> int:
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters())
        return 12 * parameters  # float32 weights and two moments

    def _save(self, step: int, is_milestone: bool) -> None:
        begun, root = time.monotonic(), self.work / "states"
        if self.rank == 0:
            begin_state(root, step)
        barrier()
        folder = root / f".saving-step{step}"
        retry_free(lambda: self.engine.save(folder), folder)
        if self.rank == 0:
            info = {"updates": self.engine.updates, "skipped_in_a_row": self.skipped_in_a_row, "is_milestone": is_milestone}
            saved = commit_state(folder, root, step, info)
            reason = why_invalid(saved)
            if reason is not None:
                raise RuntimeError(f"the state just saved does not verify ({reason}); older states are kept: {saved}")
            prune_states(root, self.machine.keep_states, self._milestones_kept(root))
        barrier()
        self.last_save = step
        self.walltime.longest_save = max(self.walltime.longest_save, time.monotonic() - begun)

    def _milestones_kept(self, root: Path) -> list[int]:
        if not self.machine.keep_milestone_states:
            return []
        policies = (self.work / "policies").glob("step*")
        return [int(path.name.removeprefix("step")) for path in policies]

    def _export(self, step: int, seconds: float) -> None:
        folder = self.work / "policies" / f".exporting-step{step}"
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        barrier()
        self.engine.export(folder, self.tokenizer)
        if self.rank == 0:
            info = {"policy_hash": policy_hash(folder), "seconds": seconds, "ranks": self.collector.world, **_origin()}
            commit_folder(folder, self.work / "policies" / f"step{step}", info)
        barrier()

    # --- watching

    def _evaluate(self, step: int) -> dict[str, float]:
        """In-training evaluation at T = 1 on fixed problems; it draws nothing that training draws from."""
        every = self.run.evaluate_every
        if not every or step % every or not self.probe or self.rank:
            return {}
        return evaluate_policy(
            self.generator,
            self.grader,
            lambda ids: decode(self.tokenizer, ids),
            self.probe,
            max_response_tokens=self.run.max_response_tokens,
            stop_ids=self.collector.sampling.stop_ids,
            seed=self.seed,
        )

    def _check_health(self, step: int, row: dict[str, float]) -> None:
        """Stop before harm is saved.

        Raises:
            UnhealthyRunError: naming the step and the metric.
        """
        self.skipped_in_a_row = self.skipped_in_a_row + int(row["update/skipped"]) if row["update/applied"] == 0 else 0
        if row["update/skipped"]:
            logger.warning("step %d: %d updates skipped for a non-finite gradient", step, int(row["update/skipped"]))
        limits = {
            "update/skipped": (
                self.skipped_in_a_row,
                self.machine.max_skipped_updates - 1,
                "updates with a non-finite gradient in a row",
            ),
            "rollout/logprob_gap_mean": (
                row.get("rollout/logprob_gap_mean", 0.0),
                self.machine.max_logprob_gap,
                "mean log-prob gap between generator and trainer: the generator has other weights or another temperature",
            ),
            "grader/error_share": (row["grader/error_share"], self.machine.max_grader_error_share, "share of grader errors"),
        }
        for metric, (value, limit, meaning) in limits.items():
            if not value <= limit:
                raise UnhealthyRunError(
                    f"{self.title}: stopped at step {step}: {metric} is {value:.4g}, above {limit:.4g} ({meaning})"
                )
        if row["group/constant_share"] == 1.0:
            logger.warning("step %d carries no signal: the rewards of every group are all equal", step)

    def _table_of_samples(self, step: int, experience: Experience) -> None:
        every = self.machine.samples_every
        if not every or (step != 1 and step % every):
            return
        rows = []
        for query, group, grades, rewards in zip(
            experience.queries, experience.groups, experience.grades, experience.rewards, strict=True
        ):
            for rollout, grade, reward in zip(group, grades, rewards, strict=True):
                rows.append(
                    {
                        "step": step,
                        "query": query.problem,
                        "response": decode(self.tokenizer, rollout.response_ids),
                        "gold": query.answer,
                        "answer": grade.answer,
                        "verdict": str(grade.verdict),
                        "reason": grade.reason,
                        "reward": None if math.isnan(reward) else float(reward),
                    }
                )
                if len(rows) == _SAMPLE_ROWS:
                    self.log.samples(rows)
                    return


def _load_policy(folder: Path, run: RunConfig) -> nn.Module:
    """The policy in the run's dtype, without dropout (sampling and training must see one distribution)."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, run.dtype))
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    policy.config.attention_dropout = 0.0
    return policy


def _origin() -> dict[str, Any]:
    """What made a policy: code, libraries, hardware."""
    gpus = torch.cuda.device_count()
    return {
        "commit": code_commit(),
        "versions": {name: version(name) for name in ("torch", "transformers", "deepspeed")},
        "hardware": torch.cuda.get_device_name() if gpus else f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "gpus": gpus,
    }


def _peak_memory_gib() -> float:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
