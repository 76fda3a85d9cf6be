"""Problems -> queries: template, levels, unusable labels, overlap with the benchmarks. Every drop is listed in a manifest.

Training sets lose what cannot be trained on (level not asked for, unusable label, in a benchmark, too long). Benchmarks lose
nothing; their oddities become flags.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from erpo.checkpoint import file_hash, write_json
from erpo.config import FileData, SyntheticData
from erpo.data.overlap import groups_by, layout_key, near, same, windows
from erpo.data.problems import Split, generate
from erpo.data.rawdata import CORRECTIONS, RawProblem, locate, query_id, read_problems
from erpo.grading.answers import gold_problem
from erpo.grading.equality import ALTERNATIVE
from erpo.records import Query, read_queries, write_queries
from erpo.templates import fingerprint, load_tokenizer, render_prompt, template_name

log = logging.getLogger(__name__)

REFERENCE_ROWS = 8_523
"""Rows of the published training set, MATH levels 3 to 5."""

REFERENCE_SHA256 = "83b2abeb69a5132444614d3ed04fb4432a0bdeef07dcce1074ac562ffe6c61a5"
"""SHA-256 of the published training file (AlibabaResearch/ERPO, data/erpo/train/math_lvl3to5_8k.jsonl)."""

LEVEL, LABEL, IN_BENCHMARK, TOO_LONG = "level not asked for", "unusable label", "in a benchmark", "too long"
"""Reasons of a drop, in the order in which they are tried: a row has one."""

_SHORT_LIMIT = 512


@dataclass
class _Set:
    """A set on its way from rows to queries."""

    problems: list[RawProblem]
    prompts: list[tuple[int, ...]]
    manifest: dict[str, Any]
    flags: list[list[str]]
    dropped: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Position -> reason and detail."""

    def drop(self, index: int, reason: str, detail: str) -> None:
        """Leave a row out; the first reason counts."""
        self.dropped.setdefault(index, (reason, detail))

    def kept(self) -> list[int]:
        """Positions that are left."""
        return [index for index in range(len(self.problems)) if index not in self.dropped]

    def queries(self) -> list[Query]:
        """Queries of the rows that are left."""
        return [
            Query(p.query_id, p.problem, p.answer, self.prompts[i], p.level, p.source, tuple(dict.fromkeys(self.flags[i])))
            for i, p in enumerate(self.problems)
            if i not in self.dropped
        ]


def prepare_queries(
    entry: SyntheticData | FileData,
    *,
    tokenizer_dir: Path,
    prompt_suffix: str,
    max_query_tokens: int,
    data_dir: Path,
    benchmarks: dict[str, Path],
    out: Path,
    manifest: Path,
    trust_remote_code: bool = False,
) -> None:
    """Write the training queries of a study and the manifest that says how the rows read became them.

    Args:
        entry: where the problems come from, and the levels to keep.
        tokenizer_dir: folder of the starting model.
        prompt_suffix: instruction appended to every problem.
        max_query_tokens: longer prompts (template included) are left out.
        data_dir: folder of the problem files.
        benchmarks: prepared benchmarks by name; a training problem equal to one of theirs up to layout is left out.
        out: parquet of queries.
        manifest: JSON of counts, drops, labels, duplicates, overlap and token statistics.
        trust_remote_code: run code that comes with the tokenizer.

    Raises:
        ValueError: the file is missing, wrong or unreadable, or no query is left.
    """
    found = _read(entry, "train", load_tokenizer(tokenizer_dir, trust_remote_code), prompt_suffix, data_dir)
    _drop_levels(found, entry)
    _drop_labels(found)
    _list_duplicates(found)
    _drop_overlap(found, {name: read_queries(path) for name, path in benchmarks.items()})
    _drop_long(found, max_query_tokens)
    _account(found, entry)
    if not found.kept():
        raise ValueError(f"{_name(entry)}: no query is left of {len(found.problems)} rows ({found.manifest['account']})")
    _write(found, out, manifest)


def prepare_benchmark(
    entry: SyntheticData | FileData,
    *,
    tokenizer_dir: Path,
    prompt_suffix: str,
    data_dir: Path,
    out: Path,
    manifest: Path,
    trust_remote_code: bool = False,
) -> None:
    """Write the queries of a benchmark: every problem, in order, oddities as flags.

    Raises:
        ValueError: the file is missing, wrong or unreadable, or `levels` is set.
    """
    if isinstance(entry, FileData) and entry.levels is not None:
        raise ValueError(f"{entry.file}: levels selects training problems; a benchmark is evaluated whole, leave levels out")
    found = _read(entry, "test", load_tokenizer(tokenizer_dir, trust_remote_code), prompt_suffix, data_dir)
    for index, problem in enumerate(found.problems):
        if reason := gold_problem(problem.answer):
            found.flags[index].append("gold-unparsed")
            log.warning("%s row %d: %s; its responses can be neither right nor wrong", _name(entry), problem.row, reason)
    _list_labels(found)
    _list_duplicates(found)
    _account(found, entry)
    _write(found, out, manifest)


# --- reading -------------------------------------------------------------------------------------------------------------


def _read(
    entry: SyntheticData | FileData, split: Split, tokenizer: PreTrainedTokenizerBase, prompt_suffix: str, data_dir: Path
) -> _Set:
    if isinstance(entry, SyntheticData):
        problems, source = _synthetic(entry, split), {"generator": entry.model_dump(mode="json"), "split": split}
    else:
        path = locate(entry, data_dir)
        problems = read_problems(path, prompt_suffix)
        source = {
            "file": entry.file,
            "sha256": file_hash(path),
            "bytes": path.stat().st_size,
            "url": entry.url,
            "corrections_sha256": file_hash(CORRECTIONS),
        }
    prompts = [render_prompt(tokenizer, problem.problem, prompt_suffix) for problem in problems]
    manifest = {
        "input": source,
        "template": {"name": template_name(tokenizer), "prompt_suffix": prompt_suffix, **fingerprint(tokenizer)},
        "rows_read": len(problems),
        "tokens": _token_counts(tokenizer, problems, prompts, prompt_suffix),
    }
    return _Set(problems, prompts, manifest, [list(problem.flags) for problem in problems])


def _synthetic(entry: SyntheticData, split: Split) -> list[RawProblem]:
    return [
        RawProblem(row, query_id(p.problem), p.problem, p.answer, p.answer, p.level, str(p.level), f"synthetic/{p.family}", ())
        for row, p in enumerate(generate(entry, split))
    ]


def _token_counts(
    tokenizer: PreTrainedTokenizerBase, problems: Sequence[RawProblem], prompts: Sequence[tuple[int, ...]], prompt_suffix: str
) -> dict[str, Any]:
    """Statistics of the tokens of all rows read: problem alone, with the instruction, and as the prompt with its template."""

    def lengths(suffix: str) -> list[int]:
        texts = [problem.problem + suffix for problem in problems]
        return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    return {
        "problem": _statistics(lengths("")),
        "with_instruction": _statistics(lengths(prompt_suffix)),
        "prompt": _statistics([len(ids) for ids in prompts]),
    }


def _statistics(lengths: Sequence[int]) -> dict[str, float]:
    values = np.asarray(lengths)
    median, most, nearly_all = np.percentile(values, [50, 95, 99])
    return {
        "mean": round(float(values.mean()), 2),
        "median": float(median),
        "p95": float(most),
        "p99": float(nearly_all),
        "max": int(values.max()),
        f"over_{_SHORT_LIMIT}": int((values > _SHORT_LIMIT).sum()),
    }


# --- what is left out, and what is only listed ---------------------------------------------------------------------------


def _drop_levels(found: _Set, entry: SyntheticData | FileData) -> None:
    if not isinstance(entry, FileData) or entry.levels is None:
        return
    for index, problem in enumerate(found.problems):
        if problem.level not in entry.levels:
            found.drop(
                index, LEVEL, f"level {problem.level}" if problem.level is not None else f"no number: {problem.level_text!r}"
            )


def _drop_labels(found: _Set) -> None:
    """Rows whose answer nothing can be graded against would teach nothing, or worse: they are left out."""
    _list_labels(found)
    for index, problem in enumerate(found.problems):
        if reason := gold_problem(problem.answer):
            found.drop(index, LABEL, f"{reason}: {problem.label!r}")


def _list_labels(found: _Set) -> None:
    """Every label that is unusable or was replaced."""
    listed = []
    for index, problem in enumerate(found.problems):
        reason = gold_problem(problem.answer)
        if reason or "corrected-label" in found.flags[index]:
            listed.append(
                _named(problem)
                | {"label": problem.label, "answer": problem.answer, "what": f"unusable: {reason}" if reason else "label replaced"}
            )
    found.manifest["labels"] = listed


def _list_duplicates(found: _Set) -> None:
    """Repeated problems stay (the published set counts them) and are flagged."""
    texts = groups_by(problem.problem for problem in found.problems)
    layouts = [group for group in groups_by(layout_key(p.problem) for p in found.problems) if group not in texts]
    for flag, groups in (("same-text", texts), ("same-layout", layouts)):
        for group in groups:
            for index in group:
                found.flags[index].append(flag)
    found.manifest["duplicates"] = {
        flag: [[_named(found.problems[index]) | {"answer": found.problems[index].answer} for index in group] for group in groups]
        for flag, groups in (("same_text", texts), ("same_up_to_layout", layouts))
    }


def _drop_overlap(found: _Set, benchmarks: dict[str, list[Query]]) -> None:
    """Training problems that a benchmark asks too are left out; similar ones are listed."""
    keys = [layout_key(problem.problem) for problem in found.problems]
    runs = [windows(problem.problem) for problem in found.problems]
    report: dict[str, Any] = {}
    for name, queries in benchmarks.items():
        equal = same(keys, [layout_key(query.problem) for query in queries])
        for index, other in equal:
            found.drop(index, IN_BENCHMARK, f"{name} row {other} ({queries[other].query_id})")
        similar = [
            pair for pair in near(runs, [windows(query.problem) for query in queries]) if (pair.text, pair.other) not in equal
        ]
        report[name] = {
            "problems": len(queries),
            "same": [_pair(found.problems[index], other, queries[other]) for index, other in equal],
            "near": [
                _pair(found.problems[p.text], p.other, queries[p.other]) | {"shared_windows": p.shared, "share": p.share}
                for p in similar
            ],
        }
        log.info("overlap with %s: %d equal up to layout, %d similar", name, len(equal), len(similar))
    found.manifest["overlap"] = report


def _pair(problem: RawProblem, row: int, query: Query) -> dict[str, Any]:
    is_same = bool(set(problem.answer.split(ALTERNATIVE)) & set(query.answer.split(ALTERNATIVE)))
    return _named(problem) | {"benchmark_row": row, "benchmark_id": query.query_id, "same_answer": is_same}


def _drop_long(found: _Set, max_query_tokens: int) -> None:
    for index, ids in enumerate(found.prompts):
        if len(ids) > max_query_tokens:
            found.drop(index, TOO_LONG, f"{len(ids)} tokens, limit {max_query_tokens}")
    found.manifest["max_query_tokens"] = max_query_tokens


def _named(problem: RawProblem) -> dict[str, Any]:
    return {"row": problem.row, "query_id": problem.query_id}


# --- the account ---------------------------------------------------------------------------------------------------------


def _account(found: _Set, entry: SyntheticData | FileData) -> None:
    """Counts that add up: rows read = queries + drops by reason, each also per level."""
    read, kept = len(found.problems), len(found.kept())
    reasons = Counter(reason for reason, _ in found.dropped.values())
    parts = [f"- {reasons[reason]:,} {reason}" for reason in (LEVEL, LABEL, IN_BENCHMARK, TOO_LONG) if reasons[reason]]
    found.manifest |= {
        "account": " ".join([f"{read:,} rows read", *parts, f"= {kept:,} queries"]),
        "queries": kept,
        "dropped": dict(reasons),
        "drops": [
            _named(found.problems[index]) | {"level": found.problems[index].level, "reason": reason, "detail": detail}
            for index, (reason, detail) in sorted(found.dropped.items())
        ],
        "levels": {
            "read": _by_level(found, lambda index: True),
            "queries": _by_level(found, lambda index: index not in found.dropped),
            **{reason: _by_level(found, lambda i, r=reason: i in found.dropped and found.dropped[i][0] == r) for reason in reasons},
        },
        "flags": dict(Counter(flag for index in found.kept() for flag in set(found.flags[index])).most_common()),
        "flagged": [_named(found.problems[index]) | {"flags": found.flags[index]} for index in found.kept() if found.flags[index]],
    }
    if isinstance(entry, FileData) and "overlap" in found.manifest:
        found.manifest["reference"] = _against_reference(found)
    log.info("%s: %s", _name(entry), found.manifest["account"])


def _by_level(found: _Set, belongs: Callable[[int], bool]) -> dict[str, int]:
    counts = Counter(_level_name(problem) for index, problem in enumerate(found.problems) if belongs(index))
    return dict(sorted(counts.items()))


def _level_name(problem: RawProblem) -> str:
    return str(problem.level) if problem.level is not None else problem.level_text or "none"


def _against_reference(found: _Set) -> str:
    read, kept = len(found.problems), len(found.kept())
    if found.manifest["input"]["sha256"] == REFERENCE_SHA256:
        return f"the published MATH level 3-5 file itself: {read:,} rows, of which {kept:,} became queries"
    if read == REFERENCE_ROWS:
        return f"{read:,} rows, as many as the published MATH level 3-5 set; {kept:,} became queries"
    return f"{read:,} rows where the published MATH level 3-5 set has {REFERENCE_ROWS:,} ({read - REFERENCE_ROWS:+,}); another set"


def _name(entry: SyntheticData | FileData) -> str:
    return entry.file if isinstance(entry, FileData) else f"synthetic {'+'.join(entry.families)}"


def _write(found: _Set, out: Path, manifest: Path) -> None:
    for path in (out, manifest):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_queries(out, found.queries())
    write_json(manifest, found.manifest)
