r"""Intervals, unions and inequalities as the same thing: `x \ge 2` is `[2,\infty)`."""

from __future__ import annotations

import re

from erpo.grading.latex import TOKEN, split
from erpo.grading.readings import CONSTANTS, NAME, RELATIONS, Reading, read_part

_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}

_DISTANCE = re.compile(r"\|\s*([a-zA-Z])\s*\|\s*(<|>|\\le|\\ge)\s*(\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\})")
"""`|x| < 2` is `-2 < x < 2`."""


def intervals(reading: Reading) -> tuple[Reading, ...]:
    """The intervals a reading stands for: itself, a union, inequalities for one unknown; empty where it stands for none."""
    if reading.kind == "tuple" and len(reading.items) == 2:
        return (reading,)
    if reading.kind == "assignment" and re.search(r"\\in(?![a-z])", reading.latex):
        return intervals(reading.items[0])
    if reading.kind == "relation":
        found = [_bounds(part) for part in split(reading.latex, {r"\cup"})]  # `x < 1 or x > 2`
        return tuple(part for span in found for part in span) if all(found) else ()
    if reading.kind == "expression":
        if re.fullmatch(r"\\mathbb\{R\}|\\mathbb R|\\R", reading.latex):
            return (read_part(r"(-\infty,\infty)"),)
        parts = split(reading.latex, {r"\cup"})
        found = [intervals(read_part(part)) for part in parts] if len(parts) > 1 else []
        return tuple(part for span in found for part in span) if all(found) else ()
    if reading.kind == "list" and all(item.kind == "relation" for item in reading.items):
        return _join([_bounds(item.latex) for item in reading.items])
    return ()


def _bounds(text: str) -> tuple[Reading, ...]:
    r"""`a < x \le b`, `x \ge a`, `x \ne a` as intervals."""
    if (found := _DISTANCE.fullmatch(text)) is not None:
        name, operator, size = found.groups()
        if operator in ("<", r"\le"):
            return _bounds(f"-{size} {operator} {name} {operator} {size}")
        return (*_bounds(f"{name} {_FLIPPED[operator]} -{size}"), *_bounds(f"{name} {operator} {size}"))
    sides = split(text, RELATIONS)
    operators = [token for token in (found[0] for found in TOKEN.finditer(text)) if token in RELATIONS]
    operators = [{r"\lt": "<", r"\gt": ">"}.get(operator, operator) for operator in operators]
    names = [index for index, side in enumerate(sides) if NAME.fullmatch(side) and side not in CONSTANTS]
    if len(names) != 1 or len(operators) != len(sides) - 1 or not all(sides):
        return ()
    if operators == [r"\ne"]:
        value = sides[1 - names[0]]
        return read_part(rf"(-\infty,{value})"), read_part(rf"({value},\infty)")
    before, after = sides[: names[0]], sides[names[0] + 1 :]
    if not set(operators) <= set(_FLIPPED) or len(before) > 1 or len(after) > 1:
        return ()
    bounds = list(zip(before, operators, strict=False))
    bounds += [(side, _FLIPPED[operators[-1]]) for side in after]  # each as `side operator unknown`
    low, high = "(-\\infty", "\\infty)"
    for side, operator in bounds:
        if operator in ("<", r"\le"):
            low = ("(" if operator == "<" else "[") + side
        else:
            high = side + (")" if operator == ">" else "]")
    return (read_part(f"{low},{high}"),)


def _join(spans: list[tuple[Reading, ...]]) -> tuple[Reading, ...]:
    """Several inequalities that hold together where they can: `x>2, x<5` is one interval, `x<1, x>3` two."""
    if not all(spans):
        return ()
    if len(spans) == 2 and all(len(span) == 1 for span in spans):
        lows = [span[0].items[0] for span in spans]
        highs = [span[0].items[1] for span in spans]
        for first, second in ((0, 1), (1, 0)):
            low, high = lows[first].value, highs[second].value
            is_open_ended = highs[first].latex == r"\infty" and lows[second].latex == r"-\infty"
            if is_open_ended and low is not None and high is not None and low < high:
                brackets = spans[first][0].brackets[0] + spans[second][0].brackets[1]
                return (read_part(f"{brackets[0]}{lows[first].latex},{highs[second].latex}{brackets[1]}"),)
    return tuple(part for span in spans for part in span)
