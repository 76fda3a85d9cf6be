"""In-training evaluation: accuracy at T = 1 on a fixed subset, with seeds of its own: training draws what it would have drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from erpo.generation import Generator, Request, Sampling
from erpo.records import Query, derive_seed
from erpo.rewards import Grader


def fixed_subset(queries: Sequence[Query], size: int, seed: int) -> list[Query]:
    """At most `size` queries, the same ones whatever their order: those of the smallest seeded hash."""
    return sorted(queries, key=lambda query: derive_seed(seed, "probe subset", query.query_id))[:size]


def evaluate_policy(
    generator: Generator,
    grader: Grader,
    decode: Callable[[np.ndarray], str],
    queries: Sequence[Query],
    *,
    max_response_tokens: int,
    stop_ids: tuple[int, ...],
    seed: int,
    samples: int = 1,
) -> dict[str, float]:
    """Accuracy at T = 1, top-p 1. The seeds are the same at every call: what changes between steps is the policy.

    Args:
        generator: engine with the policy's present weights.
        grader: the grader of training.
        decode: response ids -> text.
        queries: what to ask, see `fixed_subset`.
        max_response_tokens: length limit.
        stop_ids: tokens that end a response.
        seed: root of the seeds.
        samples: responses per query.

    Returns:
        eval/accuracy (nan where nothing could be graded), eval/truncated_share, eval/length (tokens).
    """
    requests = [
        Request(query.query_id, query.prompt_ids, tuple(derive_seed(seed, "probe", query.query_id, i) for i in range(samples)))
        for query in queries
    ]
    groups = generator.generate(requests, Sampling(1.0, 1.0, max_response_tokens, stop_ids))
    rows = [(query, rollout) for query, group in zip(queries, groups, strict=True) for rollout in group]
    truncated = [rollout.is_truncated for _, rollout in rows]
    grades = grader.grade([decode(rollout.response_ids) for _, rollout in rows], [query.answer for query, _ in rows], truncated)
    scored = [grade.is_correct for grade in grades if grade.verdict.is_scored]
    return {
        "eval/accuracy": float(np.mean(scored)) if scored else float("nan"),
        "eval/truncated_share": float(np.mean(truncated)),
        "eval/length": float(np.mean([len(rollout.response_ids) for _, rollout in rows])),
    }
