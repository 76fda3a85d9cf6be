"""Responses from a policy: token ids in, token ids and their log-probs out. The generator protocol and the package's own sampler.

A sample depends on the weights, the prompt, the sampling parameters and its own seed, on nothing else: not on the other rows of the
batch, their order, the batch size or any global random state (up to float noise of the forward pass). Every draw inverts the
cumulative distribution at one uniform number that is a pure function of (seed, position).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from erpo.draw import draw, uniforms
from erpo.records import Rollout
from erpo.slots import Slots

logger = logging.getLogger(__name__)

_PREFILL_TOKENS = 1 << 15
"""Most padded prompt tokens in one prefill forward."""

_REFILL_SHARE = 8
"""Free slots are filled again when they are at least 1/8 of all: small prefills would cost more than idle slots."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn. Nothing else has a say: a checkpoint's generation_config is never read."""

    temperature: float
    """0: greedy."""
    top_p: float
    """Nucleus: smallest set of tokens with at least this probability; 1: off."""
    max_tokens: int
    """A response is cut here."""
    stop_ids: tuple[int, ...]
    """Every one of them ends a response and belongs to it."""

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or larger")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; a response needs at least one token")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the seeds of its samples, one response each."""

    query_id: str
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    first_index: int = 0
    """Sample index of the first seed."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which requests this rank's generator gets, and which of the responses are this rank's to grade.

    Ranks that hold parts of one generator are asked the same and grade in turns; a rank without a generator is asked nothing.
    """

    engine: int | None
    """Number of this rank's generator; None: it has none."""
    engines: int
    """Generators of all ranks."""
    place: int = 0
    """Number of this rank among those that hold parts of its generator."""
    ranks: int = 1
    """How many those are."""

    def asked(self, items: list[int]) -> list[int]:
        """Those of the items that go to this rank's generator."""
        return [] if self.engine is None else items[self.engine :: self.engines]

    @property
    def own(self) -> slice:
        """Those of the generator's responses that this rank goes on with."""
        return slice(self.place, None, self.ranks)


class Generator(Protocol):
    """An engine that samples."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Rollout]]:
        """One list of rollouts per request, in order. `progress` is told the number of finished responses now and then."""
        ...

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take over new weights; rollouts carry `version` from now on."""
        ...

    def sleep(self) -> None:
        """Give memory back until `wake`."""
        ...

    def wake(self) -> None:
        """Be ready to generate."""
        ...


# --- the sampler -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Job:
    """Samples of one request that start together."""

    prompt_ids: tuple[int, ...]
    rows: np.ndarray
    """int64: numbers of the responses in the order of the output."""
    seeds: np.ndarray
    """uint64."""


class _Running:
    """Numbers of the running rows, one entry a slot; kept on the CPU."""

    def __init__(self) -> None:
        self.row = np.empty(0, np.int64)
        self.seed = np.empty(0, np.uint64)
        self.drawn = np.empty(0, np.int64)  # tokens drawn so far
        self.prompt = np.empty(0, np.int64)  # prompt length

    def add(self, jobs: Sequence[_Job]) -> None:
        self.row = np.concatenate([self.row, *(job.rows for job in jobs)])
        self.seed = np.concatenate([self.seed, *(job.seeds for job in jobs)])
        self.prompt = np.concatenate([self.prompt, *(np.full(len(job.rows), len(job.prompt_ids)) for job in jobs)])
        self.drawn = np.concatenate([self.drawn, *(np.zeros(len(job.rows), np.int64) for job in jobs)])

    def keep(self, slots: np.ndarray) -> None:
        self.row, self.seed = self.row[slots], self.seed[slots]
        self.prompt, self.drawn = self.prompt[slots], self.drawn[slots]


class PolicySampler:
    """Batched sampling from any Hugging Face causal language model, on CPU or GPU, with a key-value cache.

    Each prompt is read once and shared by its samples; finished rows leave the batch at once and waiting ones take their slots.

    Args:
        model: the policy; used as it is, in evaluation mode and without gradients.
        batch_rows: responses in progress at the same time.
    """

    def __init__(self, model: nn.Module, batch_rows: int = 256) -> None:
        self.model, self.batch_rows, self.version = model, batch_rows, 0

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the tensors into the model (none where it is the trained module itself) and stamp rollouts with `version`."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in named_tensors:
                if name not in own:
                    raise ValueError(
                        f"the sampler's model has no parameter {name!r}; it must have the trained model's architecture"
                    )
                own[name].copy_(tensor)
        self.version = version

    def sleep(self) -> None:
        """Nothing is held between calls."""

    def wake(self) -> None:
        """Nothing to do."""

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Rollout]]:
        """Sample every request. See `Generator.generate`.

        Raises:
            ValueError: an empty prompt.
            FloatingPointError: the policy's logits are not finite.
        """
        waiting = deque(_jobs(requests, self.batch_rows))
        total = sum(len(job.rows) for job in waiting)
        found = []
        with evaluation_mode(self.model):
            batch = _Batch(self.model, min(self.batch_rows, total), sampling)
            for drawn in batch.run(waiting):
                found.append(drawn)
                if progress is not None:
                    progress(total - len(batch.running.row) - sum(len(job.rows) for job in waiting))
        return _rollouts(requests, found, sampling, self.version)


def _jobs(requests: Sequence[Request], batch_rows: int) -> list[_Job]:
    """Requests in chunks of at most `batch_rows` samples, longest prompts first: later prompts then fit the window as it is."""
    jobs, row = [], 0
    for request in requests:
        if not request.prompt_ids:
            raise ValueError(f"query {request.query_id} has an empty prompt; the policy needs at least one token to start from")
        seeds = np.array(request.seeds, dtype=np.uint64)
        rows = np.arange(row, row + len(seeds))
        row += len(seeds)
        for i in range(0, len(seeds), batch_rows):
            jobs.append(_Job(request.prompt_ids, rows[i : i + batch_rows], seeds[i : i + batch_rows]))
    return sorted(jobs, key=lambda job: -len(job.prompt_ids))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """The model without dropout inside the block, as it was after it."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _refuse_recurrent(model: nn.Module) -> None:
    """Only keys and values can be moved between slots.

    Raises:
        ValueError: the model has layers with another kind of state.
    """
    kinds = _layer_kinds(model)
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        raise ValueError(
            f"{type(model).__name__} keeps a recurrent state; the package's sampler runs attention layers only: use generator: vllm"
        )


def _layer_kinds(model: nn.Module) -> set[type]:
    return {type(layer) for layer in DynamicCache(config=model.config).layers}  # pyright: ignore


def _takes_prepared_masks(model: nn.Module) -> bool:
    """Whether one boolean mask [B, 1, 1, columns] suits all layers, which spares building it inside the model at every token."""
    return model.config._attn_implementation == "sdpa" and _layer_kinds(model) == {DynamicLayer}  # pyright: ignore


class _Batch:
    """The rows in progress: prefill, decode one token for all, drop the finished, admit the waiting."""

    def __init__(self, model: nn.Module, num_slots: int, sampling: Sampling) -> None:
        _refuse_recurrent(model)
        self.model, self.num_slots, self.sampling = model, num_slots, sampling
        self.device = next(model.parameters()).device
        self.stops = np.array(sampling.stop_ids, dtype=np.int64)
        self.prepares_masks = _takes_prepared_masks(model)
        self.slots, self.running = Slots(num_slots), _Running()
        self.pending = torch.empty(0, dtype=torch.long, device=self.device)  # last token of each row, not yet in the cache

    def run(self, waiting: deque[_Job]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (response number, token, log-prob) of every draw until all responses are finished."""
        while waiting or len(self.running.row):
            jobs = self._next_jobs(waiting)
            if jobs:
                yield self._prefill(jobs)
            elif len(self.running.row):
                yield self._decode()

    def _next_jobs(self, waiting: deque[_Job]) -> list[_Job]:
        free = self.num_slots - len(self.running.row)
        jobs: list[_Job] = []
        if free < self.num_slots / _REFILL_SHARE:
            return jobs
        while (
            waiting and len(waiting[0].rows) <= free and (len(jobs) + 1) * len((*jobs, waiting[0])[0].prompt_ids) <= _PREFILL_TOKENS
        ):
            jobs.append(waiting.popleft())
            free -= len(jobs[-1].rows)
        if not jobs and waiting and not len(self.running.row):
            jobs.append(waiting.popleft())
        return jobs

    def _prefill(self, jobs: Sequence[_Job]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read the prompts of `jobs`, copy their keys and values to their rows, draw the first token of each row."""
        lengths = np.array([len(job.prompt_ids) for job in jobs])
        width = int(lengths.max())
        ids = np.zeros((len(jobs), width), dtype=np.int64)
        for i, job in enumerate(jobs):
            ids[i, width - lengths[i] :] = job.prompt_ids
        columns = np.arange(width) - (width - lengths)[:, None]  # position of each column, negative on padding
        mask = None if (lengths == width).all() else self._tensor((columns >= 0).astype(np.int64))
        cache = DynamicCache()
        logits = self._forward(self._tensor(ids), mask, self._tensor(columns.clip(min=0)), cache)
        source = self._tensor(np.repeat(np.arange(len(jobs)), [len(job.rows) for job in jobs]))
        self.slots.admit(cache, source)
        first = len(self.running.row)
        self.running.add(jobs)
        return self._draw(logits[source], first)

    def _decode(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One more token for every row."""
        running, slots = self.running, self.slots
        begins = slots.end - running.prompt - running.drawn + 1  # column of each row's first token
        slots.start = int(begins.min())
        columns = np.arange(slots.start, slots.end + 1)
        mask = None
        if (begins > slots.start).any():
            is_real = self._tensor(columns >= begins[:, None])
            mask = is_real[:, None, None] if self.prepares_masks else is_real.long()
        positions = self._tensor((running.prompt + running.drawn - 1)[:, None])
        logits = self._forward(self.pending[:, None], mask, positions, slots.cache)
        slots.advance()
        return self._draw(logits, 0)

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] after the last token of each row."""
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]

    def _draw(self, logits: Tensor, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw for the rows from slot `first` on; rows that are finished thereby give up their slots."""
        running = self.running
        uniform = uniforms(running.seed[first:], running.drawn[first:])
        tokens, logprobs = draw(logits, self._tensor(uniform), self.sampling.temperature, self.sampling.top_p)
        drawn = running.row[first:], tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not np.isfinite(drawn[2]).all():
            raise FloatingPointError("the policy's logits are not finite: its weights are damaged or overflow in this precision")
        running.drawn[first:] += 1
        self.pending = torch.cat([self.pending[:first], tokens])
        done = np.zeros(len(running.row), dtype=bool)
        done[first:] = (drawn[1][:, None] == self.stops).any(1) | (running.drawn[first:] >= self.sampling.max_tokens)
        if done.any():
            self._drop(done)
        return drawn

    def _drop(self, done: np.ndarray) -> None:
        """Close finished rows: the last living rows move into their slots."""
        rows = int((~done).sum())
        holes = np.flatnonzero(done[:rows])
        tails = rows + np.flatnonzero(~done[rows:])
        order = np.arange(rows)
        order[holes] = tails
        self.slots.close(holes, tails, rows)
        self.running.keep(order)
        self.pending = self.pending[self._tensor(order)]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _rollouts(
    requests: Sequence[Request], found: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], sampling: Sampling, version: int
) -> list[list[Rollout]]:
    """Draws in order of time -> one rollout a response."""
    empty = (np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))
    rows, tokens, logprobs = (np.concatenate(parts) for parts in zip(empty, *found, strict=True))
    order = np.argsort(rows, kind="stable")
    ends = np.cumsum(np.bincount(rows, minlength=sum(len(r.seeds) for r in requests)))[:-1]
    ids = np.split(tokens[order].astype(np.int32), ends)
    values = np.split(logprobs[order], ends)
    stops, row, groups = set(sampling.stop_ids), 0, []
    for request in requests:
        group = []
        for number in range(len(request.seeds)):
            reason = "stop" if int(ids[row][-1]) in stops else "length"
            group.append(Rollout(request.query_id, request.first_index + number, ids[row], values[row], reason, version))
            row += 1
        groups.append(group)
    return groups
