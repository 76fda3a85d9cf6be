"""The sample store: every response ever drawn in an evaluation, kept once and found again by what it was drawn from.

A sample's key is (policy, sampling parameters, prompt ids, seed). The first two are folders, the last two columns; the seed is
derived from study seed, benchmark, query, temperature and sample index, so asking for more samples keeps those there are, and
asking under any other condition finds none. A *part* is one parquet file, written atomically and never changed; its name holds
the checksum of its content, so that a torn or altered part is recognised, set aside and generated again.

    store / <policy hash> / t<temperature>-<hash of parameters> / part-<checksum>.parquet
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from erpo.checkpoint import read_marker, write_atomic
from erpo.config import digest, temperature_label
from erpo.records import Query, Rollout, derive_seed

logger = logging.getLogger(__name__)

STORE_VERSION = 1
"""Part of every hash of sampling parameters. Raise it when a correction changes what is drawn: old samples are then not found."""

NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What a checkpoint's generation_config must not fill in (0 = off): written down with the parameters that were asked for."""

SCHEMA = pa.schema(
    [
        ("benchmark", pa.dictionary(pa.int32(), pa.string())),
        ("query_id", pa.string()),
        ("temperature", pa.float64()),
        ("sample_index", pa.int32()),
        ("seed", pa.int64()),
        ("prompt_hash", pa.int64()),
        ("response_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("length", pa.int32()),
        ("finish_reason", pa.dictionary(pa.int32(), pa.string())),
        ("logprob_sum", pa.float64()),
    ]
)
"""Columns of a part; `response_ids` is null where token ids were not kept."""

METADATA = b"erpo"
"""Key of the facts in a part's parquet metadata (JSON: policy_hash, effective sampling parameters, engine)."""

_LEFTOVER_SECONDS = 3600.0


class Key(NamedTuple):
    """What tells apart samples of one policy under one set of parameters."""

    prompt_hash: int
    seed: int


class Asked(NamedTuple):
    """One sample somebody wants."""

    benchmark: str
    query: Query
    sample_index: int
    key: Key


class Drawn(NamedTuple):
    """One sample somebody drew."""

    asked: Asked
    rollout: Rollout
    text: str


def hash_prompt(prompt_ids: Sequence[int]) -> int:
    """63-bit hash of the token ids a policy reads: another template, suffix or tokenizer is another prompt."""
    data = np.asarray(prompt_ids, dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1


def hash_prompts(queries: Iterable[Query]) -> str:
    """One hash of a benchmark's prompts, in their order."""
    return digest([hash_prompt(query.prompt_ids) for query in queries])


def hash_text(text: str) -> int:
    """63-bit hash of a response text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def ask(benchmark: str, queries: Sequence[Query], temperature: float, samples: int, seed: int) -> list[Asked]:
    """The samples 0 to samples - 1 of every query of a benchmark at one temperature, query after query."""
    label = temperature_label(temperature)
    wanted = []
    for query in queries:
        prompt_hash, names = hash_prompt(query.prompt_ids), ("evaluation", benchmark, query.query_id, label)
        wanted += [Asked(benchmark, query, index, Key(prompt_hash, derive_seed(seed, *names, index))) for index in range(samples)]
    return wanted


def ask_all(queries: Mapping[str, Sequence[Query]], temperature: float, samples: int, seed: int) -> list[Asked]:
    """`ask` for several benchmarks, one after the other."""
    return [row for name, rows in queries.items() for row in ask(name, rows, temperature, samples, seed)]


class Shelf:
    """The samples of one policy under one set of sampling parameters. Any number of processes may add at the same time.

    Args:
        store: root of the store.
        policy_hash: content hash of the policy.
        parameters: everything about sampling that decides what is drawn, the temperature among it.
    """

    def __init__(self, store: Path, policy_hash: str, parameters: Mapping[str, Any]) -> None:
        self.store, self.policy_hash = store, policy_hash
        self.parameters = dict(parameters)
        name = f"t{temperature_label(parameters['temperature'])}-{digest({'version': STORE_VERSION, **self.parameters})}"
        self.folder = store / policy_hash / name

    def add(self, drawn: Sequence[Drawn], engine: Mapping[str, Any], keep_token_ids: bool = True) -> Path:
        """Write one part: complete or not at all, durable on return.

        Args:
            drawn: what was sampled.
            engine: facts on what sampled it (name, versions), kept in the metadata.
            keep_token_ids: keep the response's token ids, about half of a part's size.

        Raises:
            ValueError: the disk is full.
        """
        facts = {"policy_hash": self.policy_hash, "sampling": self.parameters, "engine": dict(engine)}
        table = _table(drawn, self.parameters["temperature"], keep_token_ids)
        data = _parquet(table.replace_schema_metadata({METADATA: json.dumps(facts, sort_keys=True)}))
        path = self.folder / f"part-{_checksum(data)}.parquet"
        write_atomic(path, data)
        return path

    def parts(self) -> list[Path]:
        """All parts, in a fixed order."""
        return sorted(self.folder.glob("part-*.parquet"))

    def keys(self) -> dict[Path, list[Key]]:
        """Keys of the samples there are, by part; damaged parts are set aside, leftovers of killed writers removed."""
        self._sweep()
        found = {}
        for part in self.parts():
            table = read_part(part, ["prompt_hash", "seed"])
            if table is not None:
                found[part] = _keys(table)
        return found

    def _sweep(self) -> None:
        for leftover in self.folder.glob(".part-*.tmp"):
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
                leftover.unlink(missing_ok=True)


def read_part(part: Path, columns: Sequence[str]) -> pa.Table | None:
    """Columns of a part; None when it is missing or damaged, which the log says. A damaged part is set aside."""
    try:
        data = part.read_bytes()
    except FileNotFoundError:
        logger.warning("samples %s are missing: they will be generated again", part)
        return None
    if part.name != f"part-{_checksum(data)}.parquet":
        _set_aside(part, f"its {len(data)} bytes do not match the checksum in its name")
        return None
    return pq.read_table(pa.BufferReader(data), columns=list(columns))


def part_facts(part: Path) -> dict[str, Any]:
    """What a part's metadata says of its origin: policy_hash, sampling parameters in effect, engine."""
    return json.loads(pq.read_schema(part).metadata[METADATA])


def find(asked: Sequence[Asked], parts: Iterable[Path], columns: Sequence[str]) -> tuple[list[Asked], pa.Table]:
    """The asked samples that `parts` hold, and their `columns`, row by row. Absent ones are left out, never filled in."""
    needed = list(dict.fromkeys([*columns, "prompt_hash", "seed"]))
    kept = [table for table in (read_part(part, needed) for part in parts) if table is not None]
    empty = pa.schema([SCHEMA.field(name) for name in needed]).empty_table()
    table = pa.concat_tables([table.replace_schema_metadata() for table in kept] or [empty], promote_options="default")
    row_of = {key: row for row, key in reversed(list(enumerate(_keys(table))))}
    found = [item for item in asked if item.key in row_of]
    rows = pa.array([row_of[item.key] for item in found], pa.int64())
    return found, table.select(list(columns)).take(rows)


@dataclass(frozen=True)
class Holdings:
    """What the markers of one checkpoint's shards say of its samples."""

    store: Path
    policy_hash: str
    seed: int
    samples: int
    sampling: dict[str, Any]
    """Parameters in effect, without the temperature."""
    parts_at: dict[str, list[str]]
    """Temperature label -> parts, relative to the store."""
    temperatures: tuple[float, ...]

    def parts(self, temperature: float) -> list[Path]:
        """Parts that hold samples of one temperature; none where it was not asked for."""
        return [self.store / name for name in self.parts_at.get(temperature_label(temperature), ())]

    def absent(self) -> tuple[list[Path], int]:
        """Parts that are not in the store, and how many there should be in all."""
        parts = [part for temperature in self.temperatures for part in self.parts(temperature)]
        return [part for part in parts if not part.is_file()], len(parts)


_MARKER_FACTS = ("policy_hash", "seed", "samples", "sampling", "prompts", "holdings", "temperatures")


def read_markers(markers: Sequence[Path], store: Path, queries: Mapping[str, Sequence[Query]]) -> Holdings:
    """Read the markers of a checkpoint's shards.

    Args:
        markers: JSON files, one for each shard.
        store: root of the sample store.
        queries: benchmark -> queries as they are now.

    Raises:
        ValueError: no marker, shards that do not belong together, or prompts that changed since the samples were drawn.
    """
    shards = [read_marker(path, *_MARKER_FACTS) for path in markers]
    if not shards:
        raise ValueError("no samples given: name the markers of the shards (rule generate)")
    first = shards[0]
    for path, shard in zip(markers, shards, strict=True):
        for fact in ("policy_hash", "seed", "sampling", "prompts"):
            if shard[fact] != first[fact]:
                raise ValueError(f"{markers[0]} and {path} differ in {fact}: scores are of one checkpoint under one setting")
    for name, rows in queries.items():
        if first["prompts"].get(name) != hash_prompts(rows):
            raise ValueError(
                f"the prompts of {name} are not those its samples were drawn for (problems, instruction, template or tokenizer "
                "changed): run the rule generate again"
            )
    return Holdings(
        store=store,
        policy_hash=first["policy_hash"],
        seed=first["seed"],
        samples=max(shard["samples"] for shard in shards),
        sampling=first["sampling"],
        parts_at={label: held["parts"] for shard in shards for label, held in shard["holdings"].items()},
        temperatures=tuple(sorted({value for shard in shards for value in shard["temperatures"]})),
    )


def _keys(table: pa.Table) -> list[Key]:
    return list(map(Key, table["prompt_hash"].to_pylist(), table["seed"].to_pylist()))


def _table(drawn: Sequence[Drawn], temperature: float, keep_token_ids: bool) -> pa.Table:
    ids = [rollout.response_ids for _, rollout, _ in drawn]
    lengths = np.array([len(row) for row in ids], dtype=np.int32)
    if keep_token_ids:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        response_ids = pa.ListArray.from_arrays(offsets, np.concatenate([*ids, np.empty(0)]).astype(np.int32))
    else:
        response_ids = pa.nulls(len(drawn), SCHEMA.field("response_ids").type)
    columns = {
        "benchmark": pa.array([asked.benchmark for asked, _, _ in drawn]).dictionary_encode(),
        "query_id": pa.array([asked.query.query_id for asked, _, _ in drawn]),
        "temperature": np.full(len(drawn), temperature),
        "sample_index": np.array([asked.sample_index for asked, _, _ in drawn], dtype=np.int32),
        "seed": np.array([asked.key.seed for asked, _, _ in drawn], dtype=np.int64),
        "prompt_hash": np.array([asked.key.prompt_hash for asked, _, _ in drawn], dtype=np.int64),
        "response_ids": response_ids,
        "text": pa.array([text for _, _, text in drawn], pa.string()),
        "length": lengths,
        "finish_reason": pa.array([rollout.finish_reason for _, rollout, _ in drawn]).dictionary_encode(),
        "logprob_sum": np.array([rollout.logprobs.sum(dtype=np.float64) for _, rollout, _ in drawn]),
    }
    return pa.table(columns, schema=SCHEMA)


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _set_aside(part: Path, reason: str) -> None:
    aside = part.with_suffix(".damaged")
    try:
        part.rename(aside)
    except OSError as error:
        logger.warning("samples %s are damaged (%s) and could not be set aside (%s): not used", part, reason, error)
    else:
        logger.warning("samples %s are damaged (%s): set aside as %s; they will be generated again", part, reason, aside.name)
