"""Evaluation in two halves: a policy's responses go to the sample store, and stored samples become scores.

The first (`generate_samples`) needs the policy and draws only what the store lacks; the second (`score_samples`) needs none, so
a changed grader never generates anything again. Both may be killed at any time and go on where they were.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tqdm import tqdm

from erpo.checkpoint import code_commit, policy_hash, read_json, write_json
from erpo.config import digest, temperature_label
from erpo.inspection import inspect_samples
from erpo.records import Verdict, read_queries
from erpo.rewards import Grader, check_canaries
from erpo.samples import NEUTRAL, Asked, Drawn, Key, Shelf, ask_all, find, hash_prompts, read_markers
from erpo.scores import (
    NEEDED,
    SCHEMA,
    changed_verdicts,
    count_disagreements,
    count_verdict,
    grade_samples,
    read_scores,
    refuse_errors,
    repeated_texts,
    write_scores,
)

__all__ = ["generate_samples", "inspect_samples", "regrade_scores", "score_samples"]

if TYPE_CHECKING:
    from erpo.generation import Generator, Request

logger = logging.getLogger(__name__)

FIRST_CHUNK_ROWS = 2048
"""Samples in the first part of a session, before the speed is known."""
MIN_CHUNK_ROWS = 64
"""Fewest samples in one part, however slow the machine."""
MAX_CHUNK_ROWS = 8192
"""Most samples in one part."""
CHUNK_SECONDS = 300.0
"""A part should take about this long: what a kill can cost."""

_VLLM_MEMORY = 0.9
"""Share of GPU memory for vLLM, which has the GPU to itself here."""

_GRADING_PACKAGES = ("erpo", "math-verify", "latex2sympy2-extended", "sympy", "pyarrow")


@dataclass
class _Session:
    """Policy and engine of one generate job; the weights are loaded when the first missing sample asks for them."""

    policy: Path
    trust_remote_code: bool
    policy_hash: str
    top_p: float
    max_tokens: int
    engine: str
    batch_rows: int
    longest_prompt: int
    tensor_parallel: int
    tokenizer: Any = field(init=False)
    stop_ids: tuple[int, ...] = field(init=False)
    _generator: Generator | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        from erpo.templates import load_tokenizer, stop_ids  # transformers is slow to import: scoring does without

        self.tokenizer = load_tokenizer(self.policy, self.trust_remote_code)
        self.stop_ids = stop_ids(self.tokenizer, self.policy)

    @property
    def limits(self) -> dict[str, Any]:
        """Sampling parameters in effect that all temperatures share."""
        return {**NEUTRAL, "top_p": self.top_p, "max_response_tokens": self.max_tokens, "stop_ids": sorted(self.stop_ids)}

    @property
    def generator(self) -> Generator:
        """The engine with the policy's weights, checked against the marker."""
        if self._generator is None:
            found = policy_hash(self.policy)
            if found != self.policy_hash:
                raise ValueError(
                    f"{self.policy} has the content hash {found}, but its marker says {self.policy_hash}: the checkpoint was "
                    "changed; make it again (delete the marker and run the step that makes it)"
                )
            from erpo.vllm_engine import check_length

            longest = self.longest_prompt + self.max_tokens
            check_length(self.policy, longest, self.trust_remote_code)  # the sampler would go beyond it in silence
            if self.engine == "vllm":
                self._generator = _open_vllm(self.policy, longest, self.tensor_parallel, self.trust_remote_code)
            else:
                self._generator = _open_sampler(self.policy, self.batch_rows, self.trust_remote_code)
        return self._generator

    @property
    def about(self) -> dict[str, str]:
        """What samples, for the metadata of the parts."""
        if self.engine == "vllm":
            from erpo.vllm_engine import vllm_version

            return {"name": self.engine, "torch": version("torch"), "vllm": vllm_version()}
        return {"name": self.engine, "torch": version("torch")}

    def sample(self, wanted: Sequence[Asked], temperature: float, bar: tqdm) -> list[Drawn]:
        """Draw one sample for every row of `wanted`, in its order."""
        from erpo.generation import Sampling
        from erpo.templates import decode

        sampling = Sampling(temperature, self.top_p, self.max_tokens, self.stop_ids)
        before = bar.n

        def finished(count: int) -> None:
            bar.update(before + count - bar.n)

        groups = self.generator.generate(_requests(wanted), sampling, finished)
        rollouts = [rollout for group in groups for rollout in group]
        assert len(rollouts) == len(wanted)
        return [
            Drawn(asked, rollout, decode(self.tokenizer, rollout.response_ids))
            for asked, rollout in zip(wanted, rollouts, strict=True)
        ]


def generate_samples(
    *,
    policy_marker: Path,
    benchmarks: Mapping[str, Path],
    temperatures: Sequence[float],
    samples: int,
    top_p: float,
    max_response_tokens: int,
    seed: int,
    store: Path,
    marker: Path,
    generator: str = "sampler",
    keep_token_ids: bool = True,
    batch_rows: int = 512,
    tensor_parallel: int = 1,
) -> None:
    """Sample responses of a checkpoint into the store: all benchmarks and temperatures in one session, only what is missing.

    Args:
        policy_marker: JSON with `policy` (folder, relative to the marker's) and `policy_hash`.
        benchmarks: name -> queries (parquet).
        temperatures: the shard's part of the sweep.
        samples: n, responses per problem and temperature.
        top_p: nucleus; 1 is off.
        max_response_tokens: longer responses are cut and count as truncated.
        seed: root of all sampling seeds.
        store: root of the sample store.
        marker: written last; JSON with the parts that hold the samples and their counts.
        generator: `sampler` (the package's own) or `vllm`.
        keep_token_ids: keep response token ids in the store.
        batch_rows: responses sampled at once by the package's sampler.
        tensor_parallel: GPUs that share the vLLM engine.

    Raises:
        ValueError: a missing file, a checkpoint that is not what its marker says, or a full disk.
    """
    policy = read_json(policy_marker)
    folder = policy_marker.parent / policy["policy"]
    queries = {name: read_queries(path) for name, path in benchmarks.items()}
    longest = max((len(query.prompt_ids) for rows in queries.values() for query in rows), default=0)
    trust = bool(policy.get("trust_remote_code", False))
    limits = (top_p, max_response_tokens)
    session = _Session(folder, trust, policy["policy_hash"], *limits, generator, batch_rows, longest, tensor_parallel)
    asked = {value: ask_all(queries, value, samples, seed) for value in sorted(set(temperatures))}
    shelves = {value: Shelf(store, session.policy_hash, {"temperature": value, **session.limits}) for value in asked}
    parts = _fill(session, shelves, asked, keep_token_ids)
    facts = {
        "policy_hash": session.policy_hash,
        "seed": seed,
        "samples": samples,
        "temperatures": list(asked),
        "sampling": session.limits,
        "prompts": {name: hash_prompts(rows) for name, rows in queries.items()},
    }
    holdings = {temperature_label(value): _holdings(asked[value], parts[value], store) for value in asked}
    write_json(marker, {**facts, "spec_hash": digest(facts), "holdings": holdings})


def _fill(
    session: _Session, shelves: Mapping[float, Shelf], asked: Mapping[float, list[Asked]], keep_token_ids: bool
) -> dict[float, dict[Path, list[Key]]]:
    """Draw what is missing, temperature after temperature, a part at a time; keys of all parts, old and new."""
    parts = {value: shelf.keys() for value, shelf in shelves.items()}
    missing = {}
    for value, held in parts.items():
        present = {key for keys in held.values() for key in keys}
        missing[value] = [row for row in asked[value] if row.key not in present]
    total, done, start = sum(map(len, missing.values())), 0, time.monotonic()
    logger.info("%d samples wanted, %d of them to draw", sum(map(len, asked.values())), total)
    with tqdm(total=total, desc="sampling", disable=None if total else True) as bar:
        for value, rows in missing.items():
            while rows:
                size = _chunk_rows(done, time.monotonic() - start)
                chunk, rows = rows[:size], rows[size:]
                drawn = session.sample(chunk, value, bar)
                parts[value][shelves[value].add(drawn, session.about, keep_token_ids)] = [row.key for row in chunk]
                done += len(chunk)
                _log_progress(value, done, total, time.monotonic() - start)
    return parts


def _chunk_rows(done: int, seconds: float) -> int:
    """Samples in the next part, by the speed so far."""
    if done == 0:
        return FIRST_CHUNK_ROWS
    return max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS, int(done / seconds * CHUNK_SECONDS)))


def _log_progress(temperature: float, done: int, total: int, seconds: float) -> None:
    rate = done / max(seconds, 1e-9)
    eta = timedelta(seconds=round((total - done) / rate))
    logger.info("T = %s: %d of %d samples, %.1f/s, ETA %s", temperature_label(temperature), done, total, rate, eta)


def _requests(wanted: Sequence[Asked]) -> list[Request]:
    """Requests in the order of `wanted`: consecutive sample indices of one query share one."""
    from erpo.generation import Request

    requests = []
    for (_, query_id, _), run in groupby(
        enumerate(wanted), lambda row: (row[1].benchmark, row[1].query.query_id, row[1].sample_index - row[0])
    ):
        rows = [row for _, row in run]
        seeds = tuple(row.key.seed for row in rows)
        requests.append(Request(query_id, rows[0].query.prompt_ids, seeds, first_index=rows[0].sample_index))
    return requests


def _holdings(asked: Sequence[Asked], parts: Mapping[Path, Sequence[Key]], store: Path) -> dict[str, Any]:
    """Which parts hold the asked samples of one temperature, and how many there are by benchmark."""
    wanted = {row.key for row in asked}
    used = {part: wanted.intersection(keys) for part, keys in parts.items()}
    held = set().union(*used.values())
    return {
        "parts": sorted(part.relative_to(store).as_posix() for part, keys in used.items() if keys),
        "counts": dict(Counter(row.benchmark for row in asked if row.key in held)),
    }


def _open_sampler(policy: Path, batch_rows: int, trust_remote_code: bool) -> Generator:
    """The package's sampler: float32 on a CPU (bfloat16 is emulated there, and slow), else as the weights were saved."""
    import torch
    from transformers import AutoModelForCausalLM

    from erpo.generation import PolicySampler

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if device == "cpu" else "auto"
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype, trust_remote_code=trust_remote_code)
    return PolicySampler(model.to(device), batch_rows)  # pyright: ignore[reportArgumentType]


def _open_vllm(policy: Path, max_length: int, tensor_parallel: int, trust_remote_code: bool) -> Generator:
    """A vLLM engine for all benchmarks and temperatures, with nearly the whole GPU for it.

    Raises:
        ValueError: vLLM is not installed, or the model is too short for the prompts.
    """
    import torch

    from erpo.vllm_engine import VllmGenerator

    dtype = "auto" if torch.cuda.is_available() else "float32"
    return VllmGenerator(
        policy,
        dtype=dtype,
        max_length=max_length,
        tensor_parallel=tensor_parallel,
        memory=_VLLM_MEMORY,
        trust_remote_code=trust_remote_code,
    )


# --- scoring -----------------------------------------------------------------------------------------------------------


def score_samples(
    *,
    markers: Sequence[Path],
    benchmarks: Mapping[str, Path],
    store: Path,
    out: Path,
    provenance: Mapping[str, Any],
    workers: int | None = None,
    max_error_share: float = 0.01,
) -> None:
    """Grade the stored samples of one checkpoint; no policy is needed and nothing is generated.

    A sample that is not in the store is an absent row: the metadata says how many were asked for and how many are missing.

    Args:
        markers: what `generate_samples` left, one for each shard.
        benchmarks: name -> queries (parquet) with the gold answers.
        store: root of the sample store.
        out: scores (parquet, `erpo.scores.SCHEMA`).
        provenance: study, run, seed, step, temperatures, samples and whatever else decides the numbers; kept as metadata.
        workers: most processes of the grader; None: one a core.
        max_error_share: share of grader errors from which nothing is written.

    Raises:
        ValueError: shards of different policies, prompts that changed since the samples were drawn, or too many grader errors.
        RuntimeError: the grader fails its canaries.
    """
    queries = {name: read_queries(path) for name, path in benchmarks.items()}
    drawn = read_markers(markers, store, queries)
    facts = {
        **provenance,
        "policy_hash": drawn.policy_hash,
        "benchmarks": {name: len(rows) for name, rows in queries.items()},
        "sampling": drawn.sampling,
        "spec": dict(provenance),
        "spec_hash": digest(provenance),
        "commit": code_commit(),
        "versions": {package: version(package) for package in _GRADING_PACKAGES},
    }
    unfinished = out.with_name(f".{out.stem}.unfinished")
    tables, missing = {}, {}
    with Grader(workers) as grader:
        check_canaries(grader)
        for value in provenance["temperatures"]:
            asked, label = ask_all(queries, value, provenance["samples"], drawn.seed), temperature_label(value)
            tables[label] = _grade_once(asked, drawn.parts(value), value, grader, unfinished, facts)
            missing[label] = len(asked) - len(tables[label])
            logger.info("T = %s: %d of %d samples graded", label, len(tables[label]), len(asked))
    scores = pa.concat_tables([SCHEMA.empty_table(), *tables.values()])
    refuse_errors(scores, max_error_share)
    _report_missing(missing, markers)
    repeated = {label: repeated_texts(table) for label, table in tables.items()}
    found = {"missing": missing, "identical_text": repeated, "disagreements": count_disagreements(scores)}
    write_scores(out, scores, {**facts, **found})
    shutil.rmtree(unfinished, ignore_errors=True)


def regrade_scores(
    *, scores: Path, markers: Sequence[Path], benchmarks: Mapping[str, Path], store: Path, workers: int | None = None
) -> dict[str, int]:
    """Grade the samples behind a scores file again with the grader as it is now, and replace the file.

    Returns:
        how many samples changed their verdict, by `old -> new`; empty where none did.

    Raises:
        ValueError: there are no scores, or the store lacks samples: the scores stay as they are.
    """
    old, facts = read_scores(scores)
    absent, number = read_markers(markers, store, {name: read_queries(path) for name, path in benchmarks.items()}).absent()
    if absent:
        raise ValueError(
            f"{len(absent)} of {number} parts of the samples are not in the store {store} (the first: {absent[0].name}), so "
            f"nothing was graded: name the right --store, or generate them again; {scores} is as it was"
        )
    score_samples(markers=markers, benchmarks=benchmarks, store=store, out=scores, provenance=facts["spec"], workers=workers)
    changes = changed_verdicts(old, read_scores(scores)[0])
    logger.info(
        "regraded %s: %s", scores, ", ".join(f"{number} {what}" for what, number in changes.items()) or "no verdict changed"
    )
    return changes


def _grade_once(
    asked: Sequence[Asked], parts: Sequence[Path], temperature: float, grader: Grader, folder: Path, facts: Mapping[str, Any]
) -> pa.Table:
    """Scores of one temperature, kept in `folder` until all are there: an interrupted job grades the rest only."""
    golds = [(row.key, row.query.answer, row.query.level, row.query.flags) for row in asked if row.sample_index == 0]
    name = digest({**facts, "parts": [part.name for part in parts], "golds": golds})
    kept = folder / f"t{temperature_label(temperature)}-{name}.parquet"
    if kept.is_file():
        return read_scores(kept)[0]
    found, rows = find(asked, parts, NEEDED)
    table = grade_samples(found, rows, temperature, grader)
    if not count_verdict(table, Verdict.GRADER_ERROR):  # a grader that failed is asked again
        write_scores(kept, table, facts)
    return table


def _report_missing(missing: Mapping[str, int], markers: Sequence[Path]) -> None:
    lacking = {label: number for label, number in missing.items() if number}
    if lacking:
        logger.warning(
            "%d samples are not in the store (%s) and will show as missing; to draw them delete %s and run again",
            sum(lacking.values()),
            ", ".join(f"T = {label}: {number}" for label, number in lacking.items()),
            " ".join(str(path) for path in markers),
        )
