"""Single samples with their verdicts and reasons, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from erpo.config import temperature_label
from erpo.records import Grade, Query, Verdict, read_queries
from erpo.rewards import Grader
from erpo.samples import Holdings, ask_all, find, read_markers
from erpo.scores import NEEDED, texts_of

_AT_ONCE = 256
"""Samples graded together: a look at twenty must not grade a whole sweep."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A graded sample, for people."""

    benchmark: str
    temperature: float
    sample_index: int
    query: Query
    response: str
    grade: Grade

    def __str__(self) -> str:
        opinion = {True: "right", False: "wrong", None: "cannot tell"}[self.grade.second_opinion]
        where = f"{self.benchmark} {self.query.query_id}, T = {temperature_label(self.temperature)}, sample {self.sample_index}"
        return "\n".join(
            [
                f"=== {where}",
                f"query:     {self.query.problem}",
                f"response:  {self.response}",
                f"extracted: {self.grade.answer!r}   gold: {self.query.answer!r}",
                f"verdict:   {self.grade.verdict} ({self.grade.reason})   second opinion: {opinion}",
                *([f"flags:     {', '.join(self.query.flags)}"] if self.query.flags else []),
            ]
        )


def inspect_samples(
    *,
    markers: Sequence[Path],
    benchmarks: Mapping[str, Path],
    store: Path,
    benchmark: str | None = None,
    temperature: float | None = None,
    verdict: str | None = None,
    disagreement: bool = False,
    limit: int | None = None,
    workers: int | None = 1,
) -> Iterator[Sample]:
    """Stored samples with what the grader says of them now, in the order benchmark, query, sample index at each temperature.

    Args:
        markers: what `generate_samples` left.
        benchmarks: name -> queries (parquet).
        store: root of the sample store.
        benchmark: only this one.
        temperature: only this one.
        verdict: only this one (`erpo.records.Verdict`).
        disagreement: only where grader and second opinion differ.
        limit: at most so many; None: all.
        workers: most processes of the grader.

    Raises:
        ValueError: an unknown benchmark, temperature or verdict, or prompts that changed since the samples were drawn.
    """
    every = {name: read_queries(path) for name, path in benchmarks.items()}
    holdings = read_markers(markers, store, every)
    _one_of("benchmark", benchmark, list(every))
    _one_of("temperature", temperature, holdings.temperatures)
    _one_of("verdict", verdict, [str(name) for name in Verdict])
    queries = {name: rows for name, rows in every.items() if benchmark in (None, name)}
    temperatures = [value for value in holdings.temperatures if temperature in (None, value)]
    return islice(_graded(holdings, queries, temperatures, _filter(verdict, disagreement), workers), limit)


def _one_of(what: str, value: Any, known: Sequence[Any]) -> None:
    if value is not None and value not in known:
        raise ValueError(f"--{what} {value}: there is none among these samples; there are: {', '.join(map(str, known))}")


def _filter(verdict: str | None, disagreement: bool) -> Callable[[Grade], bool]:
    def passes(grade: Grade) -> bool:
        differs = grade.second_opinion is not None and grade.verdict.is_scored and grade.second_opinion != grade.is_correct
        return verdict in (None, grade.verdict) and (differs or not disagreement)

    return passes


def _graded(
    holdings: Holdings,
    queries: Mapping[str, Sequence[Query]],
    temperatures: Sequence[float],
    passes: Callable[[Grade], bool],
    workers: int | None,
) -> Iterator[Sample]:
    with Grader(workers) as grader:
        for value in temperatures:
            found, table = find(ask_all(queries, value, holdings.samples, holdings.seed), holdings.parts(value), NEEDED)
            for start in range(0, len(found), _AT_ONCE):
                rows = found[start : start + _AT_ONCE]
                texts, cut = texts_of(table.slice(start, len(rows)))
                for row, text, grade in zip(rows, texts, grader.grade(texts, [row.query.answer for row in rows], cut), strict=True):
                    if passes(grade):
                        yield Sample(row.benchmark, value, row.sample_index, row.query, text, grade)
