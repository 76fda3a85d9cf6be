"""The key-value cache of the sampler: rows of different ages side by side, in place, for any attention-only model."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

_SPARE_COLUMNS = 32
"""Least free columns of a new buffer."""


class _SlotLayer(CacheLayerMixin):
    """Keys and values [slots, heads, columns, dim] of one layer, written in place; attention reads a view of the window."""

    is_sliding = False  # all columns are kept; a sliding layer masks them itself

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self.slots = slots

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        s = self.slots
        self.keys[: s.rows, :, s.end : s.end + 1] = key_states
        self.values[: s.rows, :, s.end : s.end + 1] = value_states
        window = (slice(s.rows), slice(None), slice(s.start, s.end + 1))
        return self.keys[window], self.values[window]

    def get_seq_length(self) -> int:
        return self.slots.end - self.slots.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: `Slots.admit` allocates."""


class Slots:
    """The key-value cache: rows occupy slots 0 to `rows`, all end at column `end`; a shorter row begins at a later column.

    Finished rows are closed by moving the last rows into their slots, so nothing but the moved rows is ever copied.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.rows, self.start, self.end = num_slots, 0, 0, 0
        self.cache = Cache(layers=[])

    def admit(self, prefilled: DynamicCache, source: Tensor) -> None:
        """Add one row for each entry of `source` (row of the prefilled cache, whose prompts are left-padded to a common width)."""
        width = prefilled.get_seq_length()
        if not self.cache.layers:
            self.cache.layers += [_SlotLayer(self) for _ in prefilled.layers]
        if self.rows == 0:
            self.start, self.end = 0, width
        assert width <= self.end - self.start, "prompts come longest first, so the window holds them"
        if self._columns <= self.end:
            self._relocate(prefilled)
        rows, begin = slice(self.rows, self.rows + len(source)), self.end - width
        for layer, fresh in zip(self.cache.layers, prefilled.layers, strict=True):
            for kept, new in ((layer.keys, fresh.keys), (layer.values, fresh.values)):
                kept[rows, :, self.start : begin] = 0  # masked columns are multiplied by 0, and 0 x nan would not be 0
                kept[rows, :, begin : self.end] = new[source]
        self.rows += len(source)

    def advance(self) -> None:
        """Count the column that the last forward wrote, and make room for the next."""
        self.end += 1
        if self._columns <= self.end:
            self._relocate(self.cache)

    def close(self, holes: np.ndarray, tails: np.ndarray, rows: int) -> None:
        """Move the rows `tails` into the slots `holes`; `rows` remain."""
        for layer in self.cache.layers if len(holes) else ():
            for kept in (layer.keys, layer.values):
                window = kept[:, :, self.start : self.end]
                window[holes] = window[tails]
        self.rows = rows

    @property
    def _columns(self) -> int:
        return 0 if self.cache.layers[0].keys is None else self.cache.layers[0].keys.shape[2]

    def _relocate(self, like: Cache) -> None:
        """Move the window to the left end of buffers (heads, dim and dtype of `like`) with a quarter more room than it takes."""
        held = self.end - self.start
        for layer, template in zip(self.cache.layers, like.layers, strict=True):
            for name in ("keys", "values"):
                _, heads, _, dim = getattr(template, name).shape
                new = getattr(template, name).new_empty(self.num_slots, heads, held + held // 4 + _SPARE_COLUMNS, dim)
                if self.rows:
                    new[: self.rows, :, :held] = getattr(layer, name)[: self.rows, :, self.start : self.end]
                setattr(layer, name, new)
        self.start, self.end = 0, held
