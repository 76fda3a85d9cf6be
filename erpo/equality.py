"""Whether two answers are equal: literal numbers and words here, everything else through a callback."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple


class Equality(NamedTuple):
    """A decision and the rule that made it."""

    equal: bool
    reason: str


Leaf = Callable[[str, str], bool]
"""Decides two expressions that the rules here cannot."""


class Undecided(Exception):  # noqa: N818
    """The cheap rules cannot tell."""


def undecided(gold: str, answer: str) -> bool:
    """The leaf of the cheap path: it never decides."""
    raise Undecided


def compare(gold: str, answer: str, leaf: Leaf = undecided) -> Equality:
    """Compare by the written rules; `leaf` decides what is left."""
    left, right = _squeeze(gold), _squeeze(answer)
    if left == right:
        return Equality(True, "equal as text")
    a, b = _number(left), _number(right)
    if a is not None and b is not None:
        return Equality(a == b, "equal numbers" if a == b else "different numbers")
    equal = leaf(gold, answer)
    return Equality(equal, "equivalent" if equal else "not equivalent")


def _squeeze(text: str) -> str:
    text = re.sub(r"\\left|\\right|\\[,;:! ]|[\s$~]", "", text)
    return re.sub(r"\\[dt]frac", r"\\frac", text)


def _number(text: str) -> Fraction | None:
    if len(text) > 300:
        return None
    if re.fullmatch(r"[-+]?\d+(\.\d+)?|[-+]?\.\d+", text):
        return Fraction(text)
    if found := re.fullmatch(r"([-+]?)\\frac\{(-?\d+)\}\{(\d+)\}", text):
        if int(found[3]) == 0:
            return None
        return Fraction(int(found[1] + "1") * int(found[2]), int(found[3]))
    return None
