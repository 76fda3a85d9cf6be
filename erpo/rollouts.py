"""One step's experience: which queries, their sampled responses, verdicts and rewards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from erpo.config import RunConfig
from erpo.engine import gather_objects
from erpo.generation import Generator, Request, Sampling, Share
from erpo.records import Grade, Query, Rollout, Verdict, derive_seed
from erpo.rewards import Grader, has_format


class QueryOrder:
    """Which queries a step rolls out: shuffled anew every epoch, whole steps only (8,523 queries give 16 steps of 512).

    A pure function of (seed, step): a resumed run continues in the middle of an epoch without any saved cursor.
    """

    def __init__(self, num_queries: int, queries_per_step: int, seed: int) -> None:
        if num_queries < queries_per_step:
            raise ValueError(
                f"queries_per_step is {queries_per_step}, but the training set holds only {num_queries} queries; lower it"
            )
        self.num_queries, self.queries_per_step, self.seed = num_queries, queries_per_step, seed
        self.steps_per_epoch = num_queries // queries_per_step

    def indices(self, step: int) -> np.ndarray:
        """Query indices [Q] of a step (steps count from 1)."""
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        order = np.random.default_rng(derive_seed(self.seed, "order", epoch)).permutation(self.num_queries)
        return order[position * self.queries_per_step : (position + 1) * self.queries_per_step]

    def spare(self, step: int, taken: Sequence[int], count: int, round_number: int) -> np.ndarray:
        """`count` further indices for refilling a step, none of those already taken."""
        order = np.random.default_rng(derive_seed(self.seed, "refill", step, round_number)).permutation(self.num_queries)
        return order[~np.isin(order, np.asarray(taken))][:count]


@dataclass
class Experience:
    """Q groups of G graded responses."""

    queries: list[Query]
    groups: list[list[Rollout]]
    grades: list[list[Grade]]
    formats: np.ndarray
    """bool [Q, G]."""
    rewards: np.ndarray
    """float64 [Q, G]; nan where the grader could not say."""
    num_dropped_groups: int = 0
    """Constant groups dropped by refill_constant_groups."""
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> np.ndarray:
        """float64 [Q, G]: 1 right, 0 wrong, nan where the grader could not say."""
        return np.array([[float(g.is_correct) if g.verdict.is_scored else np.nan for g in group] for group in self.grades])

    @property
    def lengths(self) -> np.ndarray:
        """int [Q, G] response tokens."""
        return np.array([[len(r.response_ids) for r in group] for group in self.groups])

    @property
    def is_constant(self) -> np.ndarray:
        """bool [Q]: groups whose scored rewards are all equal; they carry no policy gradient."""
        return np.array([_spread(rewards) == 0 for rewards in self.rewards])


def _spread(rewards: np.ndarray) -> float:
    scored = rewards[~np.isnan(rewards)]
    return float(scored.max() - scored.min()) if scored.size else 0.0


class Collector:
    """Samples and grades the queries of a step; ranks share the work (`share`) and all receive the whole experience."""

    def __init__(
        self,
        queries: list[Query],
        generator: Generator | None,
        grader: Grader,
        run: RunConfig,
        sampling: Sampling,
        decode: object,
        seed: int,
        rank: int = 0,
        world: int = 1,
        share: Share | None = None,
    ) -> None:
        self.queries, self.generator, self.grader, self.run, self.sampling = queries, generator, grader, run, sampling
        self.decode, self.seed, self.rank, self.world = decode, seed, rank, world
        self.share = share or Share(rank, world)
        self.order = QueryOrder(len(queries), run.queries_per_step, seed)

    def collect(self, step: int) -> Experience:
        """The experience of a step; with refill_constant_groups, groups of equal rewards are replaced as far as rounds allow."""
        taken = [int(i) for i in self.order.indices(step)]
        experience = self._roll_out(step, taken, round_number=0)
        if not self.run.refill_constant_groups:
            return experience
        kept = _select(experience, ~experience.is_constant)
        dropped = int(experience.is_constant.sum())
        for round_number in range(1, self.run.refill_rounds + 1):
            lacking = self.run.queries_per_step - len(kept.queries)
            if lacking == 0:
                break
            more = [int(i) for i in self.order.spare(step, taken, lacking, round_number)]
            taken += more
            extra = self._roll_out(step, more, round_number)
            dropped += int(extra.is_constant.sum())
            kept = _join(kept, _select(extra, ~extra.is_constant))
        if len(kept.queries) < self.run.updates_per_step:  # nothing to learn from: keep the step's own groups, advantage 0
            kept = experience
        kept.num_dropped_groups = dropped
        return kept

    def _roll_out(self, step: int, indices: list[int], round_number: int) -> Experience:
        start = time.monotonic()
        asked = self.share.asked(indices)
        requests = [self._request(step, index, round_number) for index in asked]
        groups = self.generator.generate(requests, self.sampling) if self.generator and requests else []
        mine, groups = asked[self.share.own], groups[self.share.own]
        sampled = time.monotonic()
        grades, formats = self._grade([self.queries[i] for i in mine], groups)
        graded = time.monotonic()
        parts = gather_objects(list(zip(mine, groups, grades, formats, strict=True)))
        found = {index: rest for part in parts for index, *rest in part}
        ordered = [found[index] for index in indices]
        experience = Experience(
            queries=[self.queries[i] for i in indices],
            groups=[row[0] for row in ordered],
            grades=[row[1] for row in ordered],
            formats=np.array([row[2] for row in ordered], dtype=bool).reshape(len(indices), -1),
            rewards=np.zeros((len(indices), self.run.responses_per_query)),
            seconds={"rollout": sampled - start, "grade": graded - sampled},
        )
        experience.rewards = rewards_of(experience, self.run)
        return experience

    def _request(self, step: int, index: int, round_number: int) -> Request:
        query = self.queries[index]
        names = ("rollout", step, round_number, query.query_id)
        seeds = tuple(derive_seed(self.seed, *names, g) for g in range(self.run.responses_per_query))
        return Request(query_id=query.query_id, prompt_ids=query.prompt_ids, seeds=seeds)

    def _grade(self, queries: list[Query], groups: list[list[Rollout]]) -> tuple[list[list[Grade]], list[list[bool]]]:
        rows = [(query, rollout) for query, group in zip(queries, groups, strict=True) for rollout in group]
        texts = [self.decode(rollout.response_ids) for _, rollout in rows]  # pyright: ignore
        grades = self.grader.grade(texts, [query.answer for query, _ in rows], [rollout.is_truncated for _, rollout in rows])
        formats = [has_format(text) for text in texts]
        size = self.run.responses_per_query
        return _chunks(grades, size), _chunks(formats, size)


def _chunks(values: list, size: int) -> list[list]:
    return [values[i : i + size] for i in range(0, len(values), size)]


def _select(experience: Experience, keep: np.ndarray) -> Experience:
    chosen = np.flatnonzero(keep)
    return Experience(
        queries=[experience.queries[i] for i in chosen],
        groups=[experience.groups[i] for i in chosen],
        grades=[experience.grades[i] for i in chosen],
        formats=experience.formats[chosen],
        rewards=experience.rewards[chosen],
        seconds=experience.seconds,
    )


def _join(first: Experience, second: Experience) -> Experience:
    return Experience(
        queries=first.queries + second.queries,
        groups=first.groups + second.groups,
        grades=first.grades + second.grades,
        formats=np.concatenate([first.formats, second.formats]),
        rewards=np.concatenate([first.rewards, second.rewards]),
        seconds={key: first.seconds[key] + second.seconds[key] for key in first.seconds},
    )


def rewards_of(experience: Experience, run: RunConfig) -> np.ndarray:
    """Rewards [Q, G]: accuracy and format as weighted by the run, minus the soft overlong penalty; nan where ungraded."""
    from erpo.advantages import overlong_penalty

    rewards = run.accuracy_reward * experience.accuracy + run.format_reward * experience.formats
    if run.overlong_buffer_tokens:
        penalty = overlong_penalty(experience.lengths, run.max_response_tokens, run.overlong_buffer_tokens, run.overlong_penalty)
        rewards = rewards + np.asarray(penalty)
    return rewards


def experience_metrics(experience: Experience) -> dict[str, float]:
    """Means over the step's responses (docs/method.md)."""
    verdicts = [grade.verdict for group in experience.grades for grade in group]
    seconds, tokens = experience.seconds, int(experience.lengths.sum())
    return {
        "reward/mean": _mean(experience.rewards),
        "reward/accuracy": _mean(experience.accuracy),
        "reward/format": float(experience.formats.mean()),
        "response/length": float(experience.lengths.mean()),
        "response/truncated_share": float(np.mean([r.is_truncated for group in experience.groups for r in group])),
        "group/constant_share": float(experience.is_constant.mean()),
        "group/dropped": float(experience.num_dropped_groups),
        "grader/error_share": float(np.mean([verdict is Verdict.GRADER_ERROR for verdict in verdicts])),
        "time/rollout": seconds["rollout"],
        "time/grade": seconds["grade"],
        "tokens_per_second/rollout": tokens / max(seconds["rollout"], 1e-9),
    }


def _mean(values: np.ndarray) -> float:
    scored = values[~np.isnan(values)]
    return float(scored.mean()) if scored.size else float("nan")
