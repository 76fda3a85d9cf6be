"""The nouns that travel between the stages: queries, rollouts, verdicts. No torch, no engine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path

import numpy as np


class Verdict(StrEnum):
    """What the grader says of one response."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    """No complete, non-empty last box."""
    TRUNCATED = "truncated"
    """Cut at the length limit before a complete last box: counts as not correct."""
    GRADER_ERROR = "grader_error"
    """The grader failed: neither right nor wrong."""
    GOLD_UNPARSED = "gold_unparsed"
    """The gold answer cannot be read: neither right nor wrong."""

    @property
    def is_scored(self) -> bool:
        """Whether the verdict says anything about the response (errors of grader or gold do not)."""
        return self not in (Verdict.GRADER_ERROR, Verdict.GOLD_UNPARSED)


@dataclass(frozen=True, slots=True)
class Query:
    """A problem as the policy reads it."""

    query_id: str
    """First 16 hex digits of sha256(problem); a repeated problem of one set gets the suffix -2."""
    problem: str
    """Problem text without the instruction."""
    answer: str
    """Gold answer, as prepared for the grader."""
    prompt_ids: tuple[int, ...]
    """Problem and instruction through the model's chat template."""
    level: int | None = None
    """Difficulty, 1 to 5, where known."""
    source: str = ""
    """Data set it comes from."""
    flags: tuple[str, ...] = ()
    """Oddities of the row (several answers, corrected label, ...); flagged items are reported apart, never dropped."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response. Ids and log-probs are what the generator drew, never re-encoded text."""

    query_id: str
    sample_index: int
    """Position in the group, 0 to G-1."""
    response_ids: np.ndarray
    """int32 [length]; a final end token is included when the response stopped by itself."""
    logprobs: np.ndarray
    """float32 [length]; log-prob of each drawn token at the sampling temperature."""
    finish_reason: str
    """'stop' (an end token was drawn) or 'length' (cut at the limit)."""
    weights_version: int = 0
    """Optimizer updates the sampling weights had seen."""

    @property
    def is_truncated(self) -> bool:
        """Whether the response was cut at the length limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Grade:
    """A verdict with its reason."""

    verdict: Verdict
    reason: str = ""
    """Why, in a few words (`equal as text`, `unterminated box`, ...)."""
    answer: str | None = None
    """What was taken from the last box."""
    second_opinion: bool | None = field(default=None, compare=False)
    """The independent checker's view: right, wrong, or None where it cannot tell."""

    @property
    def is_correct(self) -> bool:
        """Whether the answer counts as right."""
        return self.verdict is Verdict.CORRECT


def derive_seed(root: int, *names: object) -> int:
    """A 63-bit seed for one named purpose, from the run's one integer.

    Every random draw of the project comes from such a seed, so a resumed run needs no saved generator state and the
    number of ranks or workers cannot change what is drawn.
    """
    text = "/".join([str(root), *(str(name) for name in names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def write_queries(path: Path, queries: list[Query]) -> None:
    """Write queries as parquet, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "query_id": pa.array([q.query_id for q in queries], pa.string()),
            "problem": pa.array([q.problem for q in queries], pa.string()),
            "answer": pa.array([q.answer for q in queries], pa.string()),
            "prompt_ids": pa.array([list(q.prompt_ids) for q in queries], pa.list_(pa.int32())),
            "level": pa.array([q.level for q in queries], pa.int8()),
            "source": pa.array([q.source for q in queries], pa.string()),
            "flags": pa.array([list(q.flags) for q in queries], pa.list_(pa.string())),
        }
    )
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(table, temporary)
    temporary.replace(path)


def read_queries(path: Path) -> list[Query]:
    """Read queries written by `write_queries`.

    Raises:
        ValueError: the file is missing, or holds something else.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise ValueError(f"no queries at {path}; prepare them first (rule prepare_queries or prepare_benchmark)")
    try:
        held = pq.read_schema(path).names
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not parquet, or damaged; prepare the queries again") from error
    expected = [each.name for each in fields(Query)]
    if sorted(held) != sorted(expected):
        raise ValueError(f"{path} holds no queries: its columns are {', '.join(held)}, those of queries {', '.join(expected)}")
    rows = pq.read_table(path).to_pylist()
    return [Query(**{**row, "prompt_ids": tuple(row["prompt_ids"]), "flags": tuple(row["flags"])}) for row in rows]
