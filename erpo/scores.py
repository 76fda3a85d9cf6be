"""Scores: one row per graded sample, and the file that holds those of one checkpoint."""

from __future__ import annotations

import io
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from erpo.checkpoint import write_atomic
from erpo.records import Grade, Verdict
from erpo.rewards import Grader, has_format
from erpo.samples import Asked, hash_text

logger = logging.getLogger(__name__)

_NAMES = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        ("benchmark", _NAMES),
        ("query_id", pa.string()),
        ("temperature", pa.float64()),
        ("sample_index", pa.int32()),
        ("verdict", _NAMES),
        ("correct", pa.bool_()),
        ("format_ok", pa.bool_()),
        ("length", pa.int32()),
        ("truncated", pa.bool_()),
        ("answer", pa.string()),
        ("flagged", pa.bool_()),
        ("level", pa.int8()),
        ("text_hash", pa.int64()),
        ("second_opinion", pa.int8()),
    ]
)
"""Columns. `answer` and `level` may be null; `second_opinion`: 1 right, 0 wrong, -1 it cannot tell."""

METADATA = b"erpo"
"""Key of the provenance in the parquet metadata (JSON)."""

NEEDED = ("text", "length", "finish_reason")
"""Columns of stored samples that grading reads."""


def grade_samples(asked: Sequence[Asked], samples: pa.Table, temperature: float, grader: Grader) -> pa.Table:
    """Scores [n] of the samples of one temperature. Samples of equal text and gold answer are graded once.

    Args:
        asked: what each row of `samples` answers.
        samples: columns `NEEDED`.
        temperature: sampling temperature of all of them.
        grader: the grader of training.
    """
    golds = [row.query.answer for row in asked]
    responses, truncated = texts_of(samples)
    rows = list(zip(responses, golds, truncated, strict=True))
    number_of = {row: number for number, row in enumerate(dict.fromkeys(rows))}
    texts, unique_golds, unique_truncated = zip(*number_of, strict=True) if number_of else ((), (), ())
    graded = _graded(texts, grader.grade(texts, unique_golds, unique_truncated))
    judged = graded.take(pa.array([number_of[row] for row in rows], pa.int64()))
    columns = {
        "benchmark": pa.array([row.benchmark for row in asked], pa.string()).cast(_NAMES),
        "query_id": pa.array([row.query.query_id for row in asked], pa.string()),
        "temperature": np.full(len(asked), temperature),
        "sample_index": pa.array([row.sample_index for row in asked], pa.int32()),
        "length": samples["length"],
        "truncated": pa.array(truncated, pa.bool_()),
        "flagged": pa.array([bool(row.query.flags) for row in asked], pa.bool_()),
        "level": pa.array([row.query.level for row in asked], pa.int8()),
        **{name: judged[name] for name in judged.column_names},
    }
    return pa.table({name: columns[name] for name in SCHEMA.names}, schema=SCHEMA)


def _graded(texts: Sequence[str], grades: Sequence[Grade]) -> pa.Table:
    opinions = {True: 1, False: 0, None: -1}
    return pa.table(
        {
            "verdict": pa.array([str(grade.verdict) for grade in grades], pa.string()).cast(_NAMES),
            "correct": pa.array([grade.is_correct for grade in grades], pa.bool_()),
            "format_ok": pa.array([has_format(text) for text in texts], pa.bool_()),
            "answer": pa.array([grade.answer for grade in grades], pa.string()),
            "text_hash": pa.array([hash_text(text) for text in texts], pa.int64()),
            "second_opinion": pa.array([opinions[grade.second_opinion] for grade in grades], pa.int8()),
        }
    )


def texts_of(samples: pa.Table) -> tuple[list[str], list[bool]]:
    """Response texts, and whether each was cut at the length limit."""
    return samples["text"].to_pylist(), [reason == "length" for reason in samples["finish_reason"].to_pylist()]


def refuse_errors(scores: pa.Table, max_share: float) -> None:
    """Say how many samples the grader failed on.

    Raises:
        ValueError: more than `max_share` of all.
    """
    errors = count_verdict(scores, Verdict.GRADER_ERROR)
    if errors > max_share * len(scores):
        raise ValueError(
            f"the grader failed on {errors} of {len(scores)} samples ({errors / len(scores):.1%}), more than the "
            f"{max_share:.1%} that are accepted: no scores were written; the log names the answers (`grader error: ...`)"
        )
    if errors:
        logger.warning("the grader failed on %d of %d samples: they count as neither right nor wrong", errors, len(scores))


def count_verdict(scores: pa.Table, verdict: Verdict) -> int:
    """Number of rows with a verdict."""
    return scores["verdict"].to_pylist().count(str(verdict))


def count_disagreements(scores: pa.Table) -> dict[str, int]:
    """Samples by benchmark on which the grader and the second opinion differ (where both say something)."""
    counts: dict[str, int] = {}
    for row in _grouped(scores, ["benchmark", "verdict", "correct", "second_opinion"], [([], "count_all")]):
        differ = Verdict(row["verdict"]).is_scored and row["second_opinion"] == 1 - row["correct"]
        counts[row["benchmark"]] = counts.get(row["benchmark"], 0) + differ * row["count_all"]
    return dict(sorted(counts.items()))


def identical_text_rates(scores: pa.Table) -> dict[tuple[str, str], float]:
    """Share of a problem's samples that repeat the text of another one, 1 - distinct / n, by (benchmark, query_id).

    Args:
        scores: rows of one temperature.
    """
    rows = _grouped(scores, ["benchmark", "query_id"], [("text_hash", "count_distinct"), ([], "count_all")])
    return {(row["benchmark"], row["query_id"]): 1 - row["text_hash_count_distinct"] / row["count_all"] for row in rows}


def repeated_texts(scores: pa.Table) -> dict[str, float]:
    """Identical-text rate of each benchmark at one temperature, the mean over its problems."""
    rates: dict[str, list[float]] = {}
    for (benchmark, _), rate in sorted(identical_text_rates(scores).items()):
        rates.setdefault(benchmark, []).append(rate)
    return {benchmark: float(np.mean(values)) for benchmark, values in rates.items()}


def changed_verdicts(old: pa.Table, new: pa.Table) -> dict[str, int]:
    """Number of samples by `old -> new` verdict, most frequent first; samples that only one table holds are left out."""
    key = ("benchmark", "query_id", "temperature", "sample_index")
    before = dict(zip(zip(*(old[name].to_pylist() for name in key), strict=True), old["verdict"].to_pylist(), strict=True))
    after = zip(zip(*(new[name].to_pylist() for name in key), strict=True), new["verdict"].to_pylist(), strict=True)
    pairs = Counter((before[sample], verdict) for sample, verdict in after if before.get(sample, verdict) != verdict)
    return {f"{was} -> {now}": number for (was, now), number in pairs.most_common()}


def _grouped(scores: pa.Table, by: list[str], aggregations: list[tuple[Any, str]]) -> list[dict[str, Any]]:
    texts = pa.table(
        {name: scores[name].cast(pa.string()) if scores[name].type == _NAMES else scores[name] for name in (*by, "text_hash")}
    )
    return texts.group_by(by).aggregate(aggregations).to_pylist()


def write_scores(path: Path, scores: pa.Table, provenance: Mapping[str, Any]) -> None:
    """Write scores with their provenance, atomically."""
    buffer = io.BytesIO()
    metadata = {METADATA: json.dumps(provenance, sort_keys=True, allow_nan=False)}
    pq.write_table(scores.unify_dictionaries().replace_schema_metadata(metadata), buffer, compression="zstd")
    write_atomic(path, buffer.getvalue())


def read_scores(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    """Scores and their provenance.

    Raises:
        ValueError: the file is missing, damaged, or holds something else.
    """
    if not path.is_file():
        raise ValueError(f"no scores at {path}; grade the samples first (rule score)")
    try:
        table = pq.read_table(path)
        facts = json.loads((table.schema.metadata or {}).get(METADATA, b"null"))
    except (pa.ArrowInvalid, OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the rule score again") from error
    lacking = [name for name in SCHEMA.names if name not in table.column_names]
    if lacking or not isinstance(facts, dict):
        what = f"the columns {', '.join(lacking)}" if lacking else "their provenance in its metadata"
        raise ValueError(f"{path} holds no scores: it lacks {what}; name a file that the rule score made")
    unknown = set(table["verdict"].unique().to_pylist()) - {str(kind) for kind in Verdict}
    if unknown:
        raise ValueError(f"{path} holds unknown verdicts ({', '.join(sorted(map(str, unknown)))}); run the rule score again")
    return table, facts
