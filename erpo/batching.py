"""Ragged rollouts to a padded `RolloutBatch`, and its rows to micro-batches of equal work on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from erpo.objective import RolloutBatch

Ids = Sequence[int] | np.ndarray
Floats = Sequence[float] | np.ndarray


def collate(
    query_ids: Sequence[Ids],
    response_ids: Sequence[Ids],
    group: Sequence[int] | np.ndarray,
    *,
    rollout_logprobs: Sequence[Floats] | None = None,
    query_ref_logprobs: Sequence[Floats] | None = None,
    query_weights: Floats | None = None,
    pad_id: int = 0,
) -> RolloutBatch:
    """Rows `query ++ response`, right-padded, masks aligned to the predicted tokens. Advantages are 0: set them with `replace`.

    Args:
        query_ids: B queries of at least one token (siblings repeat theirs).
        response_ids: B responses; may be empty.
        group: B indices of the query of each row.
        rollout_logprobs: B rows of log-probs of the response tokens, as the generator drew them.
        query_ref_logprobs: B rows of reference log-probs of query tokens 2 to P (one fewer than the query has).
        query_weights: B weights; default 1.
        pad_id: token on padding; nothing depends on it.

    Raises:
        ValueError: an empty batch, an empty query, or per-token inputs whose lengths do not fit.
    """
    if not len(query_ids) == len(response_ids) == len(group) or len(group) == 0:
        raise ValueError(
            f"a batch needs as many queries ({len(query_ids)}) as responses ({len(response_ids)}) and groups, at least one"
        )
    queries, responses = np.array([len(q) for q in query_ids]), np.array([len(r) for r in response_ids])
    if query_weights is not None and len(query_weights) != len(queries):
        raise ValueError(f"query_weights: {len(query_weights)} weights for {len(queries)} rows")
    if queries.min() < 1:
        raise ValueError(f"row {int(queries.argmin())} has an empty query; a response needs a token to follow")
    lengths = queries + responses
    width = max(int(lengths.max()), 2)
    ids = np.full((len(lengths), width), pad_id, dtype=np.int64)
    for row, (query, response) in enumerate(zip(query_ids, response_ids, strict=True)):
        ids[row, : queries[row]] = query
        ids[row, queries[row] : lengths[row]] = response
    predicted = np.arange(1, width)
    query_mask = predicted < queries[:, None]
    response_mask = (predicted >= queries[:, None]) & (predicted < lengths[:, None])
    reference = _placed(query_ref_logprobs, query_mask, np.nan, "query_ref_logprobs")
    drawn = _placed(rollout_logprobs, response_mask, 0.0, "rollout_logprobs")
    weights = np.ones(len(lengths)) if query_weights is None else np.asarray(query_weights)
    return RolloutBatch(
        input_ids=torch.from_numpy(ids),
        lengths=torch.from_numpy(lengths),
        query_lengths=torch.from_numpy(queries),
        query_mask=torch.from_numpy(query_mask),
        response_mask=torch.from_numpy(response_mask),
        group=torch.from_numpy(np.asarray(group, dtype=np.int64)),
        advantages=torch.zeros(ids.shape[0], width - 1),
        query_weights=torch.from_numpy(weights.astype(np.float32)),
        ref_logprobs=reference,
        rollout_logprobs=drawn,
    )


def _placed(rows: Sequence[Floats] | None, mask: np.ndarray, fill: float, name: str) -> Tensor | None:
    """Ragged per-token values at the positions of a mask, float32."""
    if rows is None:
        return None
    given, wanted = [len(row) for row in rows], mask.sum(-1).tolist()
    if given != wanted:
        row = next((i for i, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b), min(len(given), len(wanted)))
        raise ValueError(
            f"{name}: row {row} does not have one value for each of its tokens ({given[row : row + 1]} for {wanted[row : row + 1]})"
        )
    placed = np.full(mask.shape, fill, dtype=np.float32)
    placed[mask] = np.concatenate([np.asarray(row, dtype=np.float32) for row in rows])
    return torch.from_numpy(placed)


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray | Tensor, token_budget: int, num_ranks: int = 1
) -> list[list[np.ndarray]]:
    """Deal rows out: plan[rank] is a list of arrays of row indices, equally many on every rank (empty arrays fill up).

    A micro-batch costs rows * longest row, as it is padded; none exceeds the budget unless a single row does. Rows are sorted by
    length, cut into micro-batches of even cost and dealt round, so the ranks work on like shapes at the same time. Deterministic.

    Args:
        lengths: tokens of each row.
        token_budget: largest cost of a micro-batch.
        num_ranks: ranks that share the rows.

    Raises:
        ValueError: a budget or a number of ranks below 1.
    """
    if token_budget < 1 or num_ranks < 1:
        raise ValueError(f"micro-batches need a token budget ({token_budget}) and a number of ranks ({num_ranks}) of at least 1")
    sizes = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    rounds = -(-len(_cut(order, sizes, token_budget)) // num_ranks)
    pieces = _split_to_multiple(_cut(order, sizes, _even_budget(order, sizes, token_budget, rounds * num_ranks)), sizes, num_ranks)
    rounds = -(-len(pieces) // num_ranks)
    pieces += [np.zeros(0, dtype=np.int64)] * (rounds * num_ranks - len(pieces))
    # every other round is dealt backwards, so no rank gets the longer half each time
    hands = [pieces[i * num_ranks : (i + 1) * num_ranks][:: 1 if i % 2 == 0 else -1] for i in range(rounds)]
    return [[hand[rank] for hand in hands] for rank in range(num_ranks)]


def plan_shared_micro_batches(
    query_lengths: np.ndarray, response_lengths: np.ndarray, group: np.ndarray, token_budget: int, num_ranks: int = 1
) -> list[list[np.ndarray]]:
    """Like `plan_micro_batches` where queries are computed once: siblings stay together, and a group costs its query once.

    A group above the budget is halved until it fits or is one row; its query is then computed once in each part.

    Args:
        query_lengths: tokens of each row's query.
        response_lengths: tokens of each row's response.
        group: query of each row.
        token_budget: largest cost of a micro-batch.
        num_ranks: ranks that share the rows.
    """
    waiting = [np.flatnonzero(group == number) for number in np.unique(group)]
    units: list[np.ndarray] = []
    while waiting:
        rows = waiting.pop()
        if len(rows) > 1 and _shared_cost(rows, query_lengths, response_lengths) > token_budget:
            ordered = rows[np.argsort(-response_lengths[rows], kind="stable")]
            waiting += [np.sort(ordered[: len(rows) // 2]), np.sort(ordered[len(rows) // 2 :])]
        else:
            units.append(rows)
    units.sort(key=lambda rows: int(rows[0]))
    costs = [_shared_cost(rows, query_lengths, response_lengths) for rows in units]
    plan = plan_micro_batches(costs, token_budget, num_ranks)
    return [[np.concatenate([units[i] for i in piece]) if len(piece) else piece for piece in rank] for rank in plan]


def _shared_cost(rows: np.ndarray, query_lengths: np.ndarray, response_lengths: np.ndarray) -> int:
    return int(query_lengths[rows[0]] + len(rows) * response_lengths[rows].max())


def padded_tokens(lengths: np.ndarray, plan: list[list[np.ndarray]]) -> int:
    """Positions that all ranks compute under a plan of `plan_micro_batches`, padding included."""
    return sum(len(rows) * int(lengths[rows].max()) for rank in plan for rows in rank if len(rows))


def _cut(order: np.ndarray, sizes: np.ndarray, budget: int) -> list[np.ndarray]:
    """Consecutive pieces of rows sorted from long to short; the first row of a piece sets its width."""
    pieces, start = [], 0
    while start < len(order):
        count = max(int(budget // max(sizes[order[start]], 1)), 1)
        pieces.append(order[start : start + count])
        start += count
    return pieces


def _even_budget(order: np.ndarray, sizes: np.ndarray, budget: int, num_pieces: int) -> int:
    """The smallest budget that needs no more than so many pieces: fewer steps are not possible, but more even ones are."""
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(order, sizes, middle)) <= num_pieces else (middle + 1, high)
    return high


def _split_to_multiple(pieces: list[np.ndarray], sizes: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Halve the costliest pieces until their number is a multiple of the ranks, or none can be halved."""
    pieces = list(pieces)
    while len(pieces) % num_ranks:
        costs = [len(piece) * int(sizes[piece[0]]) if len(piece) > 1 else 0 for piece in pieces]
        where = int(np.argmax(costs))
        if costs[where] == 0:
            break
        half = (len(pieces[where]) + 1) // 2
        pieces[where : where + 1] = [pieces[where][:half], pieces[where][half:]]
    return pieces
