"""rollout -> reward -> advantage -> loss -> step. The trainer knows no method: it executes settings and tensors."""

from __future__ import annotations

import logging
import math
import os
import platform
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from erpo.checkpoint import claim_work, code_commit, make_folder, only_one, read_json, read_marker, why_invalid, write_json
from erpo.config import Machine, RunConfig, digest
from erpo.engine import Engine, PolicyModule, agree, gather_objects, join_processes, together
from erpo.generation import Sampling
from erpo.health import NO_SIGNAL, UnhealthyRunError, Watch, lack_of_signal
from erpo.learning import Learner
from erpo.probe import evaluate_policy, fixed_subset
from erpo.progress import Progress, Resubmit, RunLog, StopSignal, Walltime, end_of_job
from erpo.records import Query, derive_seed, read_queries
from erpo.reference import ReferenceCache, load_cache, static_weights, verify_cache
from erpo.rewards import Grader, check_canaries
from erpo.rollout_engine import RolloutEngine, check_generator_here
from erpo.rollouts import Collector, Experience, experience_metrics
from erpo.states import States
from erpo.templates import decode, load_tokenizer, stop_ids
from erpo.trackers import Trackers

logger = logging.getLogger(__name__)

_PROBE_QUERIES = 32
"""Problems of each benchmark in the in-training evaluation."""

_SAMPLE_ROWS = 8
"""Responses kept in the sample table each time."""


_DISK_BYTES_PER_SECOND = 2**29
"""Speed of the disk that the time limit reckons with before the first save."""


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
    if step < 0:
        raise ValueError(f"step is {step}, but a run begins at step 0")
    rank, _ = join_processes()
    model = read_marker(model_marker, "policy", "policy_hash")
    full_spec = {**spec, "seed": seed, "model_hash": model["policy_hash"]}
    policy_folder = work / "policies" / f"step{step}"
    together(lambda: _check_place(marker), only_rank=0)  # it is written last: days later
    with ExitStack() as held, StopSignal().listening() as stop_signal:
        together(lambda: held.enter_context(only_one(work)), only_rank=0)
        together(lambda: claim_work(work, full_spec, supersede), only_rank=0)
        if agree(rank == 0 and why_invalid(policy_folder) is not None):
            given = {"run": run, "machine": machine, "seed": seed, "work": work, "stop_signal": stop_signal, "spec": full_spec}
            files = _read_files(model_marker, queries_path, reference_marker, probe_paths)
            trust = model.get("trust_remote_code", False)
            Trainer(**given, **files, trust_remote_code=trust, title=f"train {name} seed {seed}").run_to(step)
    facts = {"run": name, "seed": seed, "step": step, "spec": full_spec, "spec_hash": digest(full_spec)}
    facts["trust_remote_code"] = model.get("trust_remote_code", False)
    together(lambda: write_json(marker, {**facts, **_places(work, policy_folder, marker)}), only_rank=0)


def _check_place(marker: Path) -> None:
    make_folder(marker.parent)
    if marker.is_dir():
        raise ValueError(f"the marker {marker} is a folder; name a file")


def _read_files(model: Path, queries_path: Path, reference: Path, probe_paths: Sequence[Path]) -> dict[str, Any]:
    """What a trainer reads: queries, their reference cache (of this model and tokenizer), the problems of the evaluation."""
    facts, queries = read_marker(model, "policy", "policy_hash"), read_queries(queries_path)
    folder = model.parent / facts["policy"]
    with _refusing_damaged(folder):
        tokenizer = load_tokenizer(folder, facts.get("trust_remote_code", False))
    return {
        "folder": folder,
        "tokenizer": tokenizer,
        "queries": queries,
        "cache": load_cache(reference, queries, model_hash=facts["policy_hash"], tokenizer=tokenizer),
        "probe": [query for path in probe_paths for query in fixed_subset(read_queries(path), _PROBE_QUERIES, seed=0)],
    }


def _places(work: Path, policy_folder: Path, marker: Path) -> dict[str, Any]:
    """What made the policy, and where it and the logs are, relative to the marker's folder."""
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
        spec: dict[str, Any],
        folder: Path,
        trust_remote_code: bool,
        tokenizer: PreTrainedTokenizerBase,
        queries: list[Query],
        cache: ReferenceCache,
        probe: list[Query],
        work: Path,
        stop_signal: StopSignal,
    ) -> None:
        self.rank, world = join_processes()
        if machine.deterministic:
            _be_deterministic()
        self.run, self.machine, self.title, self.seed, self.spec = run, machine, title, seed, spec
        self.queries, self.cache, self.probe, self.work, self.stop_signal = queries, cache, probe, work, stop_signal
        self.tokenizer, trust = tokenizer, trust_remote_code
        check_generator_here(machine)
        policy = _load_policy(folder, run, trust)
        module = PolicyModule(
            policy, run.advantage == "gae", derive_seed(seed, "value head"), entropy_gradient=run.entropy_coef > 0
        )
        self.engine = Engine(module, run, machine)
        longest_prompt = max((len(query.prompt_ids) for query in (*queries, *probe)), default=0)
        self.rollouts = RolloutEngine(self.engine, run, machine, folder, longest_prompt, trust)
        self.grader = Grader(workers=machine.grading_workers or None)
        check_canaries(self.grader)
        sampling = Sampling(run.temperature, 1.0, run.max_response_tokens, stop_ids(self.tokenizer, folder))
        self.collector = Collector(
            queries,
            self.rollouts.generator,
            self.grader,
            run,
            sampling,
            lambda ids: decode(self.tokenizer, ids),
            seed,
            self.rank,
            world,
            self.rollouts.share,
        )
        weights = static_weights(cache, queries, run)
        self.learner = Learner(self.engine, run, machine, lambda: _load_policy(folder, run, trust), cache.logprobs, weights)
        self.log = RunLog(work, enabled=self.rank == 0)
        self.states = States(self.engine, machine, work, self.rank, next(policy.parameters()).element_size())
        self.walltime = Walltime(end_of_job(machine.time_limit_minutes), self.states.num_bytes / _DISK_BYTES_PER_SECOND)
        self.skipped_in_a_row, self.warning = 0, None
        self.rewards_since_save: list[float] = []

    # --- the loop

    def run_to(self, target: int) -> None:
        """Resume from the newest verified state at or before `target` and train on to it."""
        begun, start = time.monotonic(), self._resume(target)
        progress = Progress(self.title, start, target, self.work / "progress.json" if self.rank == 0 else None)
        self.watch = Watch(self.machine, gather_objects(self.log.past(start) if self.rank == 0 else None)[0])
        if start < target and agree(self.stop_signal.received is not None):
            raise Resubmit
        names = self.machine.trackers if self.rank == 0 else ()
        trackers = together(lambda: Trackers(names, self.title, self.work, self.spec, start))
        with self.grader, closing(trackers):
            for step in range(start + 1, target + 1):
                step_begun = time.monotonic()
                row, experience = self._step(step)
                row["time/total"] = time.monotonic() - step_begun
                row["memory/peak_gib"] = _peak_memory_gib()
                row = {key: value for key, value in row.items() if math.isfinite(value)}
                together(lambda s=step, r=row, e=experience: self._write(s, r, e), only_rank=0)
                trackers.log(step, row)
                self._check_health(step, row)
                self.walltime.saw_step(row["time/total"])
                self.rewards_since_save.append(row.get("reward/mean", 0.0))
                stopping = agree(self.stop_signal.received is not None or self.walltime.is_short(time.time())) and step < target
                if step % self.machine.save_every == 0 or step == target or stopping:
                    self._save(step)
                shown = {"reward": "reward/mean", "accuracy": "reward/accuracy", "Query-KL": "kl/query"}
                facts = {name: row[key] for name, key in shown.items() if key in row}
                saved = self.states.last_save
                together(lambda s=step, f=facts, n=saved: progress.update(s, f, n, self.warning), only_rank=0)
                if stopping:
                    logger.warning("stopping after step %d (%s); saved", step, self.stop_signal.received or "time limit")
                    raise Resubmit
        facts = {"seconds": time.monotonic() - begun, "ranks": self.collector.world, **_origin()}
        self.states.export(target, self.tokenizer, facts)

    def _step(self, step: int) -> tuple[dict[str, float], Experience]:
        try:
            with self.rollouts.awake():
                experience = self.collector.collect(step)
        except FloatingPointError as error:
            raise UnhealthyRunError(f"{self.title}: stopped at step {step}: rollout: {error}") from error
        self.rollouts.refuse_stale(experience.groups)
        self.no_signal = lack_of_signal(experience, self.run)
        row = {**experience_metrics(experience), NO_SIGNAL: float(self.no_signal is not None)}
        row |= self.learner.learn(step, experience)
        if self._is_evaluated(step):
            with self.rollouts.awake():
                row |= self._evaluate()
        return row, experience

    def _resume(self, target: int) -> int:
        found = self.states.resume(target, digest(self.spec))
        if found is None or found[0] < target:
            self.states.check_space()
        if found is None:
            with self.engine.whole_weights():
                verify_cache(self.cache, self.engine.module.policy, self.queries, seed=self.seed)
            return 0
        step, facts = found
        self.engine.updates, self.skipped_in_a_row = facts["updates"], facts["skipped_in_a_row"]
        return step

    def _save(self, step: int) -> None:
        facts = {
            "updates": self.engine.updates,
            "skipped_in_a_row": self.skipped_in_a_row,
            "reward": sum(self.rewards_since_save) / len(self.rewards_since_save),
            "spec_hash": digest(self.spec),
        }
        try:
            seconds = self.states.save(step, facts)
        except FloatingPointError as error:
            raise UnhealthyRunError(f"{self.title}: stopped at step {step}: {error}; no state was written") from error
        self.rewards_since_save = []
        self.walltime.saw_save(seconds)

    # --- watching

    def _is_evaluated(self, step: int) -> bool:
        return bool(self.run.evaluate_every and step % self.run.evaluate_every == 0 and self.probe)

    def _evaluate(self) -> dict[str, float]:
        """In-training evaluation at T = 1 on fixed problems, by the first generator; it draws nothing that training draws from."""
        if self.rollouts.generator is None or self.rollouts.share.engine != 0:
            return {}
        return evaluate_policy(
            self.rollouts.generator,
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
        found = []
        if row["update/skipped"]:
            found.append(f"step {step}: {int(row['update/skipped'])} updates skipped for a non-finite gradient")
        if self.no_signal is not None:
            found.append(f"step {step} carries no signal: {self.no_signal}")
        alarms = self.watch.look(step, row)
        for sentence in (*found, *alarms):
            logger.warning("%s", sentence)
            self.warning = sentence
        for metric, (value, limit, meaning) in self._limits(row).items():
            if not value <= limit:
                raise UnhealthyRunError(
                    f"{self.title}: stopped at step {step}: {metric} is {value:.4g}, above {limit:.4g} ({meaning})"
                )
        if alarms and self.machine.collapse_watch == "stop":
            raise UnhealthyRunError(f"{self.title}: stopped by the collapse watch at {'; '.join(alarms)}")

    def _limits(self, row: dict[str, float]) -> dict[str, tuple[float, float, str]]:
        """Metric -> value, limit, meaning."""
        gap = "mean log-prob gap between generator and trainer: the generator has other weights or another temperature"
        skipped = "updates with a non-finite gradient in a row"
        machine = self.machine
        return {
            "update/skipped": (self.skipped_in_a_row, machine.max_skipped_updates - 1, skipped),
            "rollout/logprob_gap_mean": (row.get("rollout/logprob_gap_mean", 0.0), machine.max_logprob_gap, gap),
            "grader/error_share": (row["grader/error_share"], machine.max_grader_error_share, "share of grader errors"),
        }

    def _write(self, step: int, row: dict[str, float], experience: Experience) -> None:
        self.log.metrics(step, row)
        self._table_of_samples(step, experience)

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


def _load_policy(folder: Path, run: RunConfig, trust_remote_code: bool) -> nn.Module:
    """The policy in the run's dtype, without dropout (sampling and training must see one distribution)."""
    dtype = getattr(torch, run.dtype)
    with _refusing_damaged(folder):
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    for module in policy.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    policy.config.attention_dropout = 0.0
    return policy


@contextmanager
def _refusing_damaged(folder: Path) -> Iterator[None]:
    """What transformers and safetensors say of a folder they cannot read, as one sentence."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"the model in {folder} cannot be loaded: {said}; make or fetch it again") from error


def _be_deterministic() -> None:
    """Only kernels that give the same bits every time; torch refuses the others with their name."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)


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
