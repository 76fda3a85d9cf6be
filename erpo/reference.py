"""The reference side of Query-KL and of the query weights: log-probs of every training query, computed once and kept.

One forward per query under the untrained model; training then needs no reference model. A cache names what it was made of (model,
tokenizer, template, queries) and refuses to serve anything else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from erpo.checkpoint import file_hash, policy_hash, read_marker, write_atomic, write_json
from erpo.config import RunConfig, digest
from erpo.generation import evaluation_mode
from erpo.objective import query_weights
from erpo.progress import Progress
from erpo.records import Query, derive_seed, read_queries
from erpo.scoring import Scorer
from erpo.templates import fingerprint, load_tokenizer

logger = logging.getLogger(__name__)

CACHE_VERSION = 1
"""Part of every cache's identity. Raise it when a correction changes what is cached."""

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest mean absolute difference per token between cache and policy before its first update, by the policy's precision.

Other kernels or another batch shape move float32 log-probs by about 1e-5 and bfloat16 ones by about 1e-2; another model, template
or temperature moves them by much more.
"""

_METADATA = b"erpo"
_SHOWN_IDS = 3


# --- scoring -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score_prompts(
    model: nn.Module, prompts: Sequence[Sequence[int]], batch_tokens: int, progress: Progress | None = None
) -> list[np.ndarray]:
    """Log-probs (float32 [P - 1] each) of tokens 2 to P of every prompt, at temperature 1, in the given order.

    The first token is never predicted, so a prompt of one token has none. Rows are right-padded; attention is causal, so no real
    token sees padding, and batching changes nothing but float noise.

    Args:
        model: causal language model; used in evaluation mode, without gradients.
        prompts: token ids.
        batch_tokens: padded tokens per forward.
        progress: told the number of scored prompts.
    """
    device, scorer = next(model.parameters()).device, Scorer(model)
    found: list[np.ndarray] = [np.empty(0, np.float32)] * len(prompts)
    done = 0
    with evaluation_mode(model):
        for rows in _batches([len(prompt) for prompt in prompts], batch_tokens):
            ids = nn.utils.rnn.pad_sequence([torch.tensor(prompts[i], dtype=torch.long) for i in rows], batch_first=True).to(device)
            for i, logprobs in zip(rows, scorer.texts(ids, [len(prompts[i]) for i in rows]), strict=True):
                found[i] = logprobs.cpu().numpy()
            done += len(rows)
            if progress is not None:
                progress.update(done)
    return found


def _batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of like length, longest first, each of at most `batch_tokens` padded tokens (or of one prompt)."""
    batches: list[list[int]] = []
    width = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * width > batch_tokens:
            batches.append([])
            width = lengths[i]
        batches[-1].append(i)
    return batches


# --- making ------------------------------------------------------------------------------------------------------------


def build_cache(
    model_folder: Path,
    queries_path: Path,
    *,
    out: Path,
    marker: Path,
    spec: dict[str, Any],
    batch_tokens: int = 16384,
    trust_remote_code: bool = False,
) -> None:
    """Score every training query with the reference and write the cache and its marker. The same cache already there is kept.

    The model runs in the precision it is stored in, on the GPU where there is one.

    Args:
        model_folder: the reference: the checkpoint that training starts from.
        queries_path: prepared training queries.
        out: parquet file of the cache.
        marker: JSON file with the cache's place, identity and statistics.
        spec: settings behind it, kept in the marker.
        batch_tokens: padded tokens per forward.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        ValueError: no queries, or a likelihood that is not finite.
    """
    begun = time.monotonic()
    queries = read_queries(queries_path)
    if not queries:
        raise ValueError(f"{queries_path} holds no queries: nothing to score; look into its manifest for what was dropped")
    identity = _identity(policy_hash(model_folder), load_tokenizer(model_folder, trust_remote_code), queries)
    if _stored_identity(out) != identity:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto", trust_remote_code=trust_remote_code).to(device)
        progress = Progress("reference cache", 0, len(queries))
        logprobs = score_prompts(model, [query.prompt_ids for query in queries], batch_tokens, progress)
        _write(out, queries, logprobs, identity)
    else:
        logger.info("%s is this cache already: nothing to do", out)
    checksum = file_hash(out)
    cache = _read(out, checksum)
    facts = {
        "cache": os.path.relpath(out, marker.parent),
        "cache_sha256": checksum,
        "identity": identity,
        "num_queries": len(queries),
        "mean_nll": float(cache.nll.mean()),
        "mean_tokens": float(cache.num_tokens.mean()),
        "seconds": time.monotonic() - begun,
    }
    write_json(marker, {**facts, "spec": spec, "spec_hash": digest(spec)})


def _identity(model_hash: str, tokenizer: PreTrainedTokenizerBase, queries: Sequence[Query]) -> dict[str, Any]:
    return {"version": CACHE_VERSION, "model": model_hash, **fingerprint(tokenizer), "data": hash_queries(queries)}


def hash_queries(queries: Sequence[Query]) -> str:
    """Hash (16 hex digits) of ids and prompts, in any order: texts, template and tokenizer all show in it."""
    rows = sorted(f"{query.query_id} {' '.join(map(str, query.prompt_ids))}" for query in queries)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]


def _write(path: Path, queries: Sequence[Query], logprobs: Sequence[np.ndarray], identity: dict[str, Any]) -> None:
    broken = [query.query_id for query, values in zip(queries, logprobs, strict=True) if not np.isfinite(values).all()]
    if broken:
        raise ValueError(
            f"{len(broken)} queries ({', '.join(broken[:_SHOWN_IDS])}, ...) have a likelihood that is not finite: "
            "the model is damaged or its tokenizer is another one"
        )
    table = pa.table(
        {
            "query_id": pa.array([query.query_id for query in queries], pa.string()),
            "prompt_ids": pa.array([list(query.prompt_ids) for query in queries], pa.list_(pa.int32())),
            "logprobs": pa.array(list(logprobs), pa.list_(pa.float32())),
            "nll": pa.array([-float(values.sum(dtype=np.float64)) for values in logprobs], pa.float64()),
            "num_tokens": pa.array([len(values) for values in logprobs], pa.int32()),
        }
    ).replace_schema_metadata({_METADATA: json.dumps(identity, sort_keys=True)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    write_atomic(path, sink.getvalue().to_pybytes())


def _stored_identity(path: Path) -> dict[str, Any] | None:
    """Identity of the cache at `path`; None where there is none that can be read."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowInvalid):
        return None
    return json.loads(metadata[_METADATA]) if _METADATA in metadata else None


# --- serving -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceCache:
    """Reference log-probs by query. The arrays are in the order of the queries it was loaded for."""

    query_ids: tuple[str, ...]
    token_logprobs: tuple[np.ndarray, ...]
    """float32 [P - 1] each."""
    identity: dict[str, Any]
    """What it was made of: hashes of model, tokenizer, template and data."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_row", {query_id: row for row, query_id in enumerate(self.query_ids)})

    def logprobs(self, query_id: str) -> np.ndarray:
        """Log-probs (float32 [P - 1]) of tokens 2 to P of a query's prompt, at temperature 1."""
        return self.token_logprobs[self._row[query_id]]  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def nll(self) -> np.ndarray:
        """float64 [N]: summed negative log-likelihood of each query."""
        return np.array([-values.sum(dtype=np.float64) for values in self.token_logprobs])

    @property
    def num_tokens(self) -> np.ndarray:
        """int64 [N]: predicted tokens of each query, one less than its tokens."""
        return np.array([len(values) for values in self.token_logprobs])


def load_cache(
    marker: Path, queries: Sequence[Query], *, model_hash: str | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> ReferenceCache:
    """Load the cache behind a marker for these queries.

    Args:
        marker: what `build_cache` wrote.
        queries: the training queries, which must be those that were scored.
        model_hash: content hash of the starting checkpoint, compared where given.
        tokenizer: compared by vocabulary and template where given.

    Raises:
        ValueError: the cache is missing or damaged, or belongs to another model, tokenizer, template or data set.
    """
    facts = read_marker(marker, "cache", "cache_sha256")
    path = marker.parent / facts["cache"]
    if not path.is_file():
        raise ValueError(
            f"the reference cache {path} is missing although {marker} names it; delete the marker and run cache_reference again"
        )
    cache = _read(path, facts["cache_sha256"])
    expected = {"version": CACHE_VERSION, "data": hash_queries(queries)}
    if model_hash is not None:
        expected["model"] = model_hash
    if tokenizer is not None:
        expected |= fingerprint(tokenizer)
    reasons = [
        _REASONS[key].format(cache.identity.get(key), value) for key, value in expected.items() if cache.identity.get(key) != value
    ]
    if reasons:
        detail = _data_difference(path, queries) if cache.identity.get("data") != expected["data"] else ""
        raise ValueError(f"the reference cache {path} does not fit: {'; '.join(reasons)}{detail}. Run cache_reference again")
    return _in_order(cache, queries)


_REASONS = {
    "version": "it has format {} and this version writes {}",
    "model": "it was made with another model ({} instead of {})",
    "tokenizer": "it was made with another tokenizer ({} instead of {})",
    "template": "it was made with another chat template ({} instead of {})",
    "data": "it was made for other queries ({} instead of {})",
}


def _data_difference(path: Path, queries: Sequence[Query]) -> str:
    """In what the queries differ: which are missing, which have other token ids."""
    table = pq.read_table(path, columns=["query_id", "prompt_ids"])
    held = dict(zip(table["query_id"].to_pylist(), map(tuple, table["prompt_ids"].to_pylist()), strict=True))
    missing = [query.query_id for query in queries if query.query_id not in held]
    changed = [query.query_id for query in queries if held.get(query.query_id, query.prompt_ids) != query.prompt_ids]
    parts = [f"{len(held)} queries in it, {len(queries)} asked for"]
    parts += [
        f"{len(ids)} {what} (first: {ids[0]})" for ids, what in ((missing, "missing"), (changed, "with other token ids")) if ids
    ]
    return f" [{', '.join(parts)}]"


def _read(path: Path, checksum: str) -> ReferenceCache:
    if file_hash(path) != checksum:
        raise ValueError(
            f"{path} does not match its checksum: it is damaged or was changed; delete it and run cache_reference again"
        )
    table = pq.read_table(path, columns=["query_id", "logprobs"])
    lists = table["logprobs"].combine_chunks()
    values, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    rows = tuple(values[begin:end] for begin, end in pairwise(offsets))
    return ReferenceCache(tuple(table["query_id"].to_pylist()), rows, _stored_identity(path) or {})


def _in_order(cache: ReferenceCache, queries: Sequence[Query]) -> ReferenceCache:
    ids = tuple(query.query_id for query in queries)
    return ReferenceCache(ids, tuple(cache.logprobs(query_id) for query_id in ids), cache.identity)


def verify_cache(
    cache: ReferenceCache,
    model: nn.Module,
    queries: Sequence[Query],
    *,
    seed: int = 0,
    fraction: float = 0.01,
    at_least: int = 4,
    tolerance: float | None = None,
    batch_tokens: int = 16384,
) -> float:
    """Score a random sample of the queries with the policy before its first update, and compare with the cache.

    Args:
        cache: the loaded cache.
        model: the policy, which still equals the reference.
        queries: the training queries.
        seed: root seed of the sample.
        fraction: share of the queries that is scored again.
        at_least: fewest queries scored again.
        tolerance: largest mean absolute difference per token; None: by the policy's precision (TOLERANCES).
        batch_tokens: padded tokens per forward.

    Returns:
        The mean absolute difference per token.

    Raises:
        ValueError: the difference is larger: the cache comes from another model, or scoring differs between the two.
    """
    count = min(len(queries), max(at_least, math.ceil(fraction * len(queries))))
    rows = np.random.default_rng(derive_seed(seed, "verify cache")).choice(len(queries), count, replace=False)
    chosen = [queries[i] for i in sorted(rows.tolist())]
    scored = score_prompts(model, [query.prompt_ids for query in chosen], batch_tokens)
    gaps = [np.abs(values - cache.logprobs(query.query_id)) for query, values in zip(chosen, scored, strict=True)]
    mean = float(np.concatenate(gaps).mean()) if sum(map(len, gaps)) else 0.0
    limit = TOLERANCES.get(next(model.parameters()).dtype, max(TOLERANCES.values())) if tolerance is None else tolerance
    if not mean <= limit:
        worst = max(range(count), key=lambda i: float(gaps[i].max(initial=0.0)))
        raise ValueError(
            f"the reference cache does not describe this policy: over {count} queries scored again the mean absolute difference "
            f"per token is {mean:.3g}, above {limit:.3g} (worst: query {chosen[worst].query_id}). It comes from another model; "
            "run cache_reference again"
        )
    logger.info("reference cache verified on %d queries: mean absolute difference per token %.2g", count, mean)
    return mean


def static_weights(cache: ReferenceCache, queries: Sequence[Query], run: RunConfig) -> dict[str, float]:
    """Weight w(q) of every query by id, constant through the run; empty where the run has none or computes them online."""
    if run.query_weight not in ("reference_likelihood", "reference_inverse_nll"):
        return {}
    own = _in_order(cache, queries)
    weights: Tensor = query_weights(
        run.query_weight,
        torch.from_numpy(own.nll),
        torch.from_numpy(own.num_tokens),
        cap=run.query_weight_cap,
        renormalise=run.renormalise_query_weights,
    )
    return dict(zip(own.query_ids, weights.tolist(), strict=True))
