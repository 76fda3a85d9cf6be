"""Equal and similar problem texts: repeats within a set, and overlap between a training set and the benchmarks. Pure text."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WINDOW_WORDS = 8
"""Words of one window."""
NEAR_SHARE = 0.5
"""Two problems are near when they share this part of the windows of the shorter one."""

_SPACING = re.compile(r"\\(?:quad|qquad|displaystyle|limits|left|right|[ ,;:!>])(?![a-zA-Z])|\\\\|[~\s]+")
_FONT = re.compile(r"\\(?:text|mathrm|mbox|textrm|textbf|mathbf|mathit|operatorname)(?![a-zA-Z])\*?")
_DELIMITERS = re.compile(r"\\[\[\]()]|[$&{}]")
_PUNCTUATION = re.compile(r"(?<!\d)\.|\.(?!\d)|[,;:!?'\"`]")


class Near(NamedTuple):
    """Two similar problems."""

    text: int
    """Position among the training texts."""
    other: int
    """Position among the benchmark texts."""
    shared: int
    """Windows in common."""
    share: float
    """Windows in common, as part of the shorter problem's."""


Windows = set[tuple[str, ...]]
"""Runs of words of one text."""


def _plain(text: str) -> str:
    r"""Lower case, `\dfrac` as `\frac`, without spacing commands, fonts and math delimiters; words stay apart."""
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\(?:l|c|d)?dots(?:[bcm](?![a-zA-Z]))?", "...", text)
    text = re.sub(r"\\le(?![a-zA-Z])", r"\\leq", re.sub(r"\\ge(?![a-zA-Z])", r"\\geq", text))
    text = _SPACING.sub(" ", text)
    text = _FONT.sub("", text)
    return _DELIMITERS.sub(" ", text).casefold()


def layout_key(text: str) -> str:
    """What remains of a problem without layout: equal keys mean the same text up to spacing, punctuation and LaTeX spelling."""
    return re.sub(r"\s+", "", _PUNCTUATION.sub("", _plain(text)))


def windows(text: str) -> Windows:
    """Every run of 8 words, numbers or operators; a shorter text is one window."""
    words = re.findall(r"\\?[a-z]+|\d+|[-+*/=<>^]", _plain(text))
    return {tuple(words[i : i + WINDOW_WORDS]) for i in range(max(len(words) - WINDOW_WORDS + 1, 1))} if words else set()


def groups_by(keys: Iterable[str]) -> list[list[int]]:
    """Positions of equal keys, for keys that occur more than once."""
    found: dict[str, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        found[key].append(index)
    return [indices for indices in found.values() if len(indices) > 1]


def same(keys: Sequence[str], others: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs (position in keys, position in others) of equal layout keys."""
    by_key: dict[str, list[int]] = defaultdict(list)
    for index, other in enumerate(others):
        by_key[other].append(index)
    return [(index, other) for index, key in enumerate(keys) for other in by_key.get(key, ())]


def near(texts: Sequence[Windows], others: Sequence[Windows]) -> list[Near]:
    """Pairs that share at least half of the shorter one's windows, most similar first; both sides as `windows` gives them."""
    where: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, other in enumerate(others):
        for window in other:
            where[window].append(index)
    pairs = []
    for index, own in enumerate(texts):
        shared = Counter(other for window in own for other in where.get(window, ()))
        for other, count in shared.items():
            share = count / min(len(own), len(others[other]))
            if share >= NEAR_SHARE:
                pairs.append(Near(index, other, count, round(share, 3)))
    return sorted(pairs, key=lambda pair: (-pair.share, pair.text, pair.other))
