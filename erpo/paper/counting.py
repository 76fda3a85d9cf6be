"""The samples of one checkpoint, counted by problem and temperature: once per content, then read from a cache.

A scores file of the paper's size has 763,200 rows; its counts are a few arrays of [1,590 problems, 15 temperatures]. They are kept
under the checksum of the file they were counted from, so a file that changed in any way is counted again, and a damaged or
foreign cache entry is as good as none.
"""

from __future__ import annotations

import io
import logging
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from erpo.checkpoint import file_hash, write_atomic
from erpo.metrics import maj_at_k
from erpo.records import Verdict

logger = logging.getLogger(__name__)

COUNTS = ("found", "scored", "correct", "truncated", "no_answer", "grader_error", "gold_unparsed")
"""Per problem and temperature: samples found, samples that say something, and what they say."""
_COLUMNS = ["benchmark", "query_id", "temperature", "sample_index", "verdict", "correct", "truncated", "flagged", "level"]
_VERSION = 1
"""Part of every cache key. Raise it when counting changes."""


@dataclass(frozen=True, eq=False)
class Counted:
    """Counts of one checkpoint on its own grid [P problems, T temperatures]; what is missing counts 0 or is NaN."""

    benchmark: np.ndarray
    """str [P]."""
    query_id: np.ndarray
    """str [P]; unique within a benchmark."""
    flagged: np.ndarray
    """bool [P]."""
    level: np.ndarray
    """int8 [P]; 0 where unknown."""
    temperatures: np.ndarray
    """float64 [T], ascending."""
    counts: np.ndarray
    """int32 [len(COUNTS), P, T]."""
    first: np.ndarray
    """float64 [P, T]: whether sample 0 is correct; NaN where it is missing or not scored."""
    majority: np.ndarray
    """float64 [P, T]: whether the most frequent answer is right; empty unless answers were read."""


def count_samples(path: Path, samples: int, with_answers: bool = False, cache: Path | None = None) -> Counted:
    """Counts of a scores file, from the cache where it knows this content.

    Args:
        path: scores file.
        samples: n; samples with a higher index are left out.
        with_answers: also find the most frequent answer of each problem (needs more time and memory).
        cache: folder of counts by content; None: count anew, keep nothing.

    Raises:
        ValueError: a sample twice.
    """
    if cache is None:
        return _count(path, samples, with_answers)
    entry = cache / f"{file_hash(path)[:32]}-n{samples}{'-votes' if with_answers else ''}-v{_VERSION}.npz"
    known = _load(entry)
    if known is None:
        known = _count(path, samples, with_answers)
        _save(entry, known)
    return known


def _load(entry: Path) -> Counted | None:
    if not entry.is_file():
        return None
    try:
        with np.load(entry, allow_pickle=False) as stored:
            return Counted(**{name: stored[name] for name in Counted.__dataclass_fields__})
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s is damaged (%s); its samples are counted again", entry, error)
        return None


def _save(entry: Path, counted: Counted) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **vars(counted))
    write_atomic(entry, buffer.getvalue())


def _count(path: Path, samples: int, with_answers: bool) -> Counted:
    columns = [*_COLUMNS, "answer"] if with_answers else _COLUMNS
    texts = [name for name in ("benchmark", "query_id", "verdict", "answer") if name in columns]
    table = pq.read_table(path, columns=columns, read_dictionary=texts).unify_dictionaries().combine_chunks()
    table = table.filter(pc.less(table["sample_index"], samples))
    problem, about = _problems(table)
    temperatures, at = np.unique(np.round(table["temperature"].to_numpy(), 4), return_inverse=True)
    shape = (len(about["query_id"]), len(temperatures))
    group = problem * len(temperatures) + at
    index = table["sample_index"].to_numpy()
    if len(group) and np.bincount(group * samples + index).max() > 1:
        raise ValueError(f"{path} holds a sample twice (same problem, temperature and sample_index); score it again")
    correct, scored = _flags(table)
    size = shape[0] * shape[1]
    first = np.full(size, np.nan)
    drawn_first = (index == 0) & scored
    first[group[drawn_first]] = correct[drawn_first]
    votes = _majorities(table, group, size).reshape(shape) if with_answers else np.empty(0)
    return Counted(
        **about,
        temperatures=temperatures,
        counts=_tallies(table, group, size).reshape(len(COUNTS), *shape),
        first=first.reshape(shape),
        majority=votes,
    )


def _problems(table: pa.Table) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Number of every row's problem, and what is known of the problems, sorted by benchmark and query_id."""
    benchmark, names = _codes(table["benchmark"])
    query, ids = _codes(table["query_id"])
    code = benchmark.astype(np.int64) * max(len(ids), 1) + query
    found, start, problem = np.unique(code, return_index=True, return_inverse=True)
    benchmarks, queries = names[found // max(len(ids), 1)], ids[found % max(len(ids), 1)]
    order = np.lexsort((queries, benchmarks))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    about = {
        "benchmark": benchmarks[order],
        "query_id": queries[order],
        "flagged": table["flagged"].to_numpy()[start][order],
        "level": pc.fill_null(table["level"], 0).to_numpy().astype(np.int8)[start][order],
    }
    return place[problem], about


def _codes(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows] (-1 for null) and their texts of a dictionary-encoded column."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    codes = array.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return codes, np.array(array.dictionary.to_pylist(), dtype=str)


def _flags(table: pa.Table) -> tuple[np.ndarray, np.ndarray]:
    """Whether each sample is correct, and whether its verdict says anything."""
    verdict, names = _codes(table["verdict"])
    scored = np.array([Verdict(name).is_scored for name in names], dtype=bool)[verdict]
    return table["correct"].to_numpy() & scored, scored


def _tallies(table: pa.Table, group: np.ndarray, size: int) -> np.ndarray:
    """int32 [len(COUNTS), size]."""
    verdict, names = _codes(table["verdict"])
    correct, scored = _flags(table)
    chosen = {"found": np.ones(len(group), bool), "scored": scored, "correct": correct, "truncated": table["truncated"].to_numpy()}
    for kind in (Verdict.NO_ANSWER, Verdict.GRADER_ERROR, Verdict.GOLD_UNPARSED):
        chosen[kind.value] = names[verdict] == kind.value if len(names) else np.zeros(len(group), bool)
    return np.stack([np.bincount(group[chosen[name]], minlength=size) for name in COUNTS]).astype(np.int32)


def _majorities(table: pa.Table, group: np.ndarray, size: int) -> np.ndarray:
    """Whether each group's most frequent answer is right (`maj_at_k` over the samples found); NaN for an empty group."""
    correct, scored = _flags(table)
    codes, _ = _codes(table["answer"])
    order = np.lexsort((table["sample_index"].to_numpy(), group))
    starts = np.searchsorted(group[order], np.arange(1, size))
    answers = np.where(codes >= 0, codes, None)[order]  # codes vote as well as texts
    marks = np.where(scored, correct, np.nan)[order]
    return maj_at_k([list(part) for part in np.split(answers, starts)], np.split(marks, starts))
