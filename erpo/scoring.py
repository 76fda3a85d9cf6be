"""Log-probs and entropy of rollouts under a policy: row by row, or with the query of a group computed once.

The G rows of a group begin with the same query. Under causal attention its hidden states, keys and values are the same in all of
them, so one pass over the queries and one over the responses, which attend to the stored keys and values, give the log-probs of
all rows with the same gradients: autograd adds up what the siblings ask of their query. G (P + R) positions become P + G R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from erpo.logprobs import head_logprobs
from erpo.objective import RolloutBatch
from erpo.terms import entropy as entropy_of
from erpo.terms import label_logprobs, token_logprobs, upcast

SPLIT_ELEMENTS = 1 << 26
"""Logits of a forward (256 MiB in float32) from which they are never made as a whole."""

_PROBE_TOKENS = 8
"""Tokens on which a model is asked whether its logits are its output layer's."""

_PIECE_ROWS = 8
_PIECE_SHARE = 0.7
"""Responses shorter than this share of the longest beside them go through the layers apart, if at least 8 rows stay together."""


@dataclass(frozen=True)
class Scores:
    """What a policy says of the predicted tokens of a batch."""

    logprobs: Tensor
    """[B, S-1]: query tokens at temperature 1, response tokens at the sampling temperature; anything on padding."""
    entropy: Tensor
    """[B, S-1]; of response tokens at least, anything elsewhere."""
    hidden: Tensor | None = None
    """[B, S, H] last hidden states, where asked for."""


class Scorer:
    """Scores batches with one policy.

    Args:
        policy: any Hugging Face causal language model.
        entropy_gradient: False: entropy only to be logged.
    """

    def __init__(self, policy: nn.Module, entropy_gradient: bool = False) -> None:
        self.policy, self.entropy_gradient = policy, entropy_gradient
        self._is_plain: bool | None = None

    def rows(self, batch: RolloutBatch, temperature: float, with_hidden: bool = False) -> Scores:
        """Every row by itself. Rows are right-padded and attention is causal, so no padding mask is needed."""
        ids, mask = batch.input_ids, batch.response_mask
        if self._splits(ids.numel()):
            hidden = _body(self.policy)(input_ids=ids, use_cache=False).last_hidden_state
            real = torch.arange(ids.shape[1] - 1, device=ids.device) < (batch.lengths - 1).unsqueeze(1)
            temperatures = torch.where(mask, temperature, 1.0)[real]
            found = self._from_hidden(hidden[:, :-1][real], ids[:, 1:][real], temperatures)
            logprobs, entropy = (torch.zeros_like(real, dtype=value.dtype).masked_scatter(real, value) for value in found)
            return Scores(logprobs, entropy, hidden if with_hidden else None)
        output = self.policy(input_ids=ids, use_cache=False, output_hidden_states=with_hidden)
        logprobs, entropy = token_logprobs(output.logits, ids, mask, temperature, entropy_gradient=self.entropy_gradient)
        return Scores(logprobs, entropy, output.hidden_states[-1] if with_hidden else None)

    def groups(self, batch: RolloutBatch, temperature: float) -> Scores:
        """The query of each group once, then the responses; siblings need not be adjacent, nor all be there.

        Args:
            batch: every query has at least one token.
            temperature: of the responses.
        """
        layout = _Layout(batch)
        splits = self._splits(layout.positions)
        cache = DynamicCache(config=self.policy.config)  # pyright: ignore
        states = self._states(splits, input_ids=layout.query_ids, past_key_values=cache, use_cache=True)
        last = states[layout.of_row, layout.prompts - 1]
        parts = [
            self._score(splits, states[:, :-1], layout.query_ids[:, 1:], 1.0),
            self._score(splits, last, layout.first_labels, temperature),
        ]
        for rows in layout.pieces:
            inputs, positions, mask, labels = layout.piece(rows)
            states = self._states(
                splits,
                input_ids=inputs,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=_of_rows(cache, layout.of_row[rows]),
                use_cache=True,
            )
            parts.append(self._score(splits, states, labels, temperature))
        return Scores(layout.placed([logprobs for logprobs, _ in parts]), layout.placed([entropy for _, entropy in parts]))

    def texts(self, ids: Tensor, lengths: list[int]) -> list[Tensor]:
        """Log-probs [n - 1] of tokens 2 to n of right-padded texts [B, S] of n tokens each, at temperature 1, in float32."""
        splits = self._splits(ids.numel())
        states = self._states(splits, input_ids=ids, use_cache=False)
        score = self._from_hidden if splits else lambda logits, labels, _: (label_logprobs(logits, labels), None)
        # Text by text: a float32 copy of a whole batch's logits would be the largest tensor of the job.
        return [score(row[: n - 1], own[1:n], 1.0)[0] for row, own, n in zip(states, ids, lengths, strict=True)]

    def _states(self, splits: bool, **inputs: Any) -> Tensor:
        """Logits, or the hidden states before the output layer where the logits would be too many."""
        return _body(self.policy)(**inputs).last_hidden_state if splits else self.policy(**inputs).logits

    def _score(self, splits: bool, states: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        if splits:
            found = self._from_hidden(states.flatten(0, -2), labels.flatten(), temperature)
            return found[0].view(labels.shape), found[1].view(labels.shape)
        logits = upcast(states) if temperature == 1 else upcast(states) / temperature
        with torch.set_grad_enabled(self.entropy_gradient and torch.is_grad_enabled()):
            entropy = entropy_of(logits)
        return label_logprobs(logits, labels), entropy

    def _from_hidden(self, hidden: Tensor, labels: Tensor, temperature: Tensor | float) -> tuple[Tensor, Tensor]:
        head = self.policy.get_output_embeddings()  # pyright: ignore
        return head_logprobs(head, hidden, labels, temperature, entropy_gradient=self.entropy_gradient)

    def _splits(self, positions: int) -> bool:
        """Whether the logits of so many positions are too many to be made as a whole, and the model allows it."""
        config: Any = getattr(self.policy, "config", None)  # a module of another kind than Hugging Face's may have none
        if config is None or positions * config.get_text_config().vocab_size < SPLIT_ELEMENTS:
            return False
        if self._is_plain is None:
            self._is_plain = has_plain_head(self.policy)
        return self._is_plain


def can_share_queries(policy: nn.Module) -> bool:
    """Whether the policy's layers all keep plain keys and values, which its responses can attend to in a second pass.

    Sliding windows drop them, recurrent states cannot be shared, and activation checkpointing keeps no cache.
    """
    if getattr(policy, "is_gradient_checkpointing", False):
        return False
    return {type(layer) for layer in DynamicCache(config=policy.config).layers} == {DynamicLayer}  # pyright: ignore


def pieces_of(lengths: np.ndarray) -> list[np.ndarray]:
    """Indices of rows that go through the layers together: longest first, cut where rows get much shorter."""
    order = np.argsort(-lengths, kind="stable")
    pieces, start = [], 0
    for i in range(1, len(order)):
        if lengths[order[i]] < _PIECE_SHARE * lengths[order[start]] and min(i - start, len(order) - i) >= _PIECE_ROWS:
            pieces.append(order[start:i])
            start = i
    return [*pieces, order[start:]]


def shared_tokens(query_lengths: np.ndarray, response_lengths: np.ndarray, group: np.ndarray) -> int:
    """Positions that the two passes compute for such rows, padding included."""
    if not len(group):
        return 0
    inputs = response_lengths[response_lengths > 1] - 1
    queries = len(np.unique(group)) * int(query_lengths.max())
    return queries + sum(len(piece) * int(inputs[piece].max()) for piece in pieces_of(inputs) if len(piece))


class _Layout:
    """Where the tokens of a batch go when queries are computed once."""

    def __init__(self, batch: RolloutBatch) -> None:
        self.ids, self.prompts = batch.input_ids, batch.query_lengths
        self.responses = batch.lengths - batch.query_lengths
        device = self.ids.device
        _, first, of_row = np.unique(batch.group.cpu().numpy(), return_index=True, return_inverse=True)
        self.of_row = torch.from_numpy(of_row).to(device)
        width = int(self.prompts.max())
        assert int(self.prompts.min()) >= 1, "a row without a query has nothing to share"
        self.query_ids = self.ids[torch.from_numpy(first).to(device), :width]
        self.first_labels = self._tokens(torch.arange(len(self.ids), device=device), self.prompts.unsqueeze(1)).squeeze(1)
        # The last response token is predicted but predicts nothing: responses of two tokens and more have inputs.
        inputs = (self.responses - 1).cpu().numpy()
        long = np.flatnonzero(inputs > 0)
        self.pieces = [torch.from_numpy(long[piece]).to(device) for piece in pieces_of(inputs[long])] if len(long) else []

    @property
    def positions(self) -> int:
        """Padded positions of all passes."""
        return self.query_ids.numel() + sum(len(rows) * self._width(rows) for rows in self.pieces)

    def _width(self, rows: Tensor) -> int:
        return int(self.responses[rows].max()) - 1

    def _tokens(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self.ids[rows].gather(1, columns.clamp(max=self.ids.shape[1] - 1))

    def piece(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input tokens, positions, mask over query and response columns, and predicted tokens of some rows' responses."""
        prompts = self.prompts[rows].unsqueeze(1)
        positions = prompts + torch.arange(self._width(rows), device=self.ids.device)
        query_columns = torch.arange(self.query_ids.shape[1], device=self.ids.device)
        mask = torch.cat([query_columns < prompts, torch.ones_like(positions, dtype=torch.bool)], 1).long()
        return self._tokens(rows, positions), positions, mask, self._tokens(rows, positions + 1)

    def placed(self, parts: list[Tensor]) -> Tensor:
        """Values of queries [Q, P-1], of first response tokens [B] and of each piece -> [B, S-1], 0 on padding."""
        queries, firsts, *pieces = parts
        flat = torch.cat([firsts.new_zeros(1), *(part.flatten() for part in parts)])
        begins = torch.zeros_like(self.prompts)  # of each row's later tokens in `flat`
        offset = 1 + queries.numel() + firsts.numel()
        for rows, values in zip(self.pieces, pieces, strict=True):
            begins[rows] = offset + torch.arange(len(rows), device=begins.device) * values.shape[1]
            offset += values.numel()
        column = torch.arange(1, self.ids.shape[1], device=begins.device)  # of the predicted token
        beyond = column - self.prompts.unsqueeze(1)
        own_query = 1 + self.of_row.unsqueeze(1) * queries.shape[1] + column - 1
        own_first = 1 + queries.numel() + torch.arange(len(self.ids), device=begins.device).unsqueeze(1)
        where = torch.where(beyond < 0, own_query, torch.where(beyond == 0, own_first, begins.unsqueeze(1) + beyond - 1))
        return flat[torch.where(beyond < self.responses.unsqueeze(1), where, 0)]


def _of_rows(cache: DynamicCache, of_row: Tensor) -> DynamicCache:
    """Keys and values of the query of each row, in a cache of its own."""
    return DynamicCache([(layer.keys[of_row], layer.values[of_row]) for layer in cache.layers])  # pyright: ignore


def _body(policy: nn.Module) -> nn.Module:
    return policy.base_model  # pyright: ignore


@torch.no_grad()
def has_plain_head(policy: nn.Module) -> bool:
    """Whether logits are the output layer applied to the last hidden states, and nothing else (no scale, no soft cap).

    A soft cap hardly shows in small logits, so its setting is looked up; everything else shows in the logits of a few tokens.
    """
    head, config = policy.get_output_embeddings(), policy.config.get_text_config()  # pyright: ignore
    caps = [value for key, value in config.to_dict().items() if "softcap" in key and "attn" not in key]
    if head is None or _body(policy) is policy or any(caps):
        return False
    ids = torch.arange(1, 1 + min(_PROBE_TOKENS, config.vocab_size - 1), device=next(policy.parameters()).device).unsqueeze(0)
    logits = policy(input_ids=ids, use_cache=False).logits
    hidden = _body(policy)(input_ids=ids, use_cache=False).last_hidden_state
    return bool(torch.allclose(head(hidden).to(logits.dtype), logits, rtol=1e-4, atol=1e-4))
