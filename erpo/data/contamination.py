"""Which training queries a benchmark asks too, or nearly: a report beside the data. Nothing is dropped by it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from erpo.checkpoint import write_json
from erpo.data.overlap import Windows, layout_key, near, same, windows
from erpo.records import Query, read_queries

logger = logging.getLogger(__name__)


def check_overlap(queries: Path, benchmarks: Mapping[str, Path], out: Path) -> None:
    """Write, for every benchmark, the training queries that are equal up to layout or share half of their 8-word windows.

    Args:
        queries: prepared training queries.
        benchmarks: prepared benchmarks by name.
        out: JSON with, by benchmark, its number of problems and the pairs `same` and `near` with both rows, ids and answers.

    Raises:
        ValueError: a file is missing.
    """
    training = read_queries(queries)
    keys = [layout_key(query.problem) for query in training]
    runs = [windows(query.problem) for query in training]
    report = {name: _against(training, keys, runs, read_queries(path)) for name, path in benchmarks.items()}
    for name, found in report.items():
        logger.info("overlap with %s: %d equal up to layout, %d similar", name, len(found["same"]), len(found["near"]))
    write_json(out, {"queries": len(training), "benchmarks": report})


def _against(training: Sequence[Query], keys: Sequence[str], runs: Sequence[Windows], asked: Sequence[Query]) -> dict[str, Any]:
    equal = same(keys, [layout_key(query.problem) for query in asked])
    similar = [pair for pair in near(runs, [windows(query.problem) for query in asked]) if (pair.text, pair.other) not in equal]
    return {
        "problems": len(asked),
        "same": [_pair(training, row, asked, other) for row, other in equal],
        "near": [_pair(training, pair.text, asked, pair.other) | {"share": pair.share} for pair in similar],
    }


def _pair(training: Sequence[Query], row: int, asked: Sequence[Query], other: int) -> dict[str, Any]:
    return {
        "query": row,
        "query_id": training[row].query_id,
        "answer": training[row].answer,
        "benchmark_row": other,
        "benchmark_id": asked[other].query_id,
        "benchmark_answer": asked[other].answer,
    }
