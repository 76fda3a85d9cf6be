"""Single samples with their verdicts and reasons, and counts of verdicts by benchmark, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from erpo.checkpoint import read_marker
from erpo.config import temperature_label
from erpo.records import Grade, Query, Verdict, read_queries
from erpo.rewards import Grader
from erpo.samples import Holdings, ask_all, find, hash_prompts, read_markers
from erpo.scores import NEEDED, read_scores, texts_of

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


def find_samples(
    place: Path | None, markers: Sequence[Path] = (), benchmarks: Sequence[Path] = (), store: Path | None = None
) -> dict[str, Any]:
    """Markers, benchmarks and store of a checkpoint's samples: as given, or found from where they lie.

    Args:
        place: `results/STUDY/samples/RUN/seedS/stepN`, or the scores file of the same checkpoint.
        markers: what `generate_samples` left; where given, `benchmarks` and `store` must be too.
        benchmarks: queries (parquet), named by their file; instead of those found from the place.
        store: root of the sample store; instead of the one found from the place.

    Raises:
        ValueError: too little is given, there are no samples, or no benchmark has the prompts that they answer.
    """
    given = {path.stem: path for path in benchmarks}
    if markers and given and store is not None:
        return {"markers": markers, "benchmarks": given, "store": store}
    if place is None or markers:
        raise ValueError(
            "give the folder of the samples (results/STUDY/samples/RUN/seedS/stepN), or all of --markers, --benchmarks, --store"
        )
    folder = _samples_folder(place.absolute())
    found = sorted(folder.glob("*.json"))
    study = folder.parents[3] if len(folder.parents) > 3 else None
    if not found or study is None:
        raise ValueError(
            f"no samples at {folder}: give the folder of a checkpoint's markers, results/STUDY/samples/RUN/seedS/stepN"
        )
    named = given or _benchmarks_of(found[0], study)
    return {"markers": found, "benchmarks": named, "store": study / "store" if store is None else store}


def _samples_folder(place: Path) -> Path:
    """The folder of the markers behind a scores file; any other place is one itself."""
    if place.suffix != ".parquet":
        return place
    *study, kind, run, seed, name = ("", "", "", *place.parts)  # a place of any depth can be taken apart
    if kind != "scores":
        raise ValueError(
            f"{place} does not lie where a study keeps its scores (results/STUDY/scores/RUN/seedS/stepN.parquet): "
            "name the samples with --markers, --benchmarks and --store"
        )
    return Path(*study, "samples", run, seed, Path(name).stem)


def _benchmarks_of(marker: Path, study: Path) -> dict[str, Path]:
    benchmarks: dict[str, Path] = {}
    for name, prompts in read_marker(marker, "prompts")["prompts"].items():
        known = sorted(study.glob(f"data/*/benchmarks/{name}.parquet"))
        path = next((path for path in known if hash_prompts(read_queries(path)) == prompts), None)
        if path is None:
            raise ValueError(
                f"no benchmark {name} with the prompts of these samples in {study / 'data'}: name it with --benchmarks"
            )
        benchmarks[name] = path
    return benchmarks


def verdict_table(scores: Sequence[Path]) -> str:
    """Samples by benchmark: shares of every verdict, and how often grader and second opinion differ, and which way.

    Args:
        scores: scores files, or folders of them.
    """
    files = [file for path in scores for file in (sorted(path.rglob("*.parquet")) if path.is_dir() else [path])]
    tables = [read_scores(file)[0] for file in files]
    if not tables:
        raise ValueError("no scores there: name scores files, results/STUDY/scores/RUN/seedS/stepN.parquet, or their folder")
    columns = {name: np.concatenate([table[name].to_pylist() for table in tables]) for name in ("benchmark", "verdict")}
    opinion = np.concatenate([table["second_opinion"].to_numpy() for table in tables])
    kinds = [str(kind) for kind in Verdict]
    rows = [["benchmark", "samples", *(kind.replace("_", " ") for kind in kinds), "opinion right", "opinion wrong", "differ"]]
    for name in [*sorted(set(columns["benchmark"])), "all"]:
        here = np.full(len(opinion), True) if name == "all" else columns["benchmark"] == name
        verdict = columns["verdict"][here]
        scored = np.isin(verdict, [str(kind) for kind in Verdict if kind.is_scored])
        says_right = scored & (verdict != Verdict.CORRECT) & (opinion[here] == 1)
        says_wrong = (verdict == Verdict.CORRECT) & (opinion[here] == 0)
        shares = [f"{(verdict == kind).mean():.1%}" for kind in kinds]
        differing = f"{(says_right | says_wrong).mean():.2%}"
        rows.append([name, f"{here.sum():,}", *shares, f"{says_right.sum():,}", f"{says_wrong.sum():,}", differing])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


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
        ValueError: an unknown benchmark, temperature or verdict, no samples in the store, or prompts that changed since they
            were drawn.
    """
    every = {name: read_queries(path) for name, path in benchmarks.items()}
    holdings = read_markers(markers, store, every)
    absent, number = holdings.absent()
    if number and len(absent) == number:
        raise ValueError(f"none of the {number} parts of these samples is in the store {store}: name the right one with --store")
    if limit is not None and limit < 1:
        raise ValueError(f"--limit must be at least 1, found {limit}")
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
