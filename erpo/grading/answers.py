"""What a response answers: its last complete box, and whether a gold answer can be graded against at all. Pure text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

BOX = "\\boxed"
ALTERNATIVE = " ||| "
"""Separates accepted answers within one gold answer: each of them is right."""
TOLERANCE = re.compile(r"^(?P<gold>.*?)\s*\\tolerance\{(?P<size>[\d.]+(?:[eE][-+]?\d+)?)\}$")
r"""A gold number may carry its own absolute tolerance: `4.2 \tolerance{0.1}`."""
MAX_ANSWER_CHARS = 1_000
"""Longer answers are wrong unless they are the gold text (the longest gold of the data has 230 characters)."""
MAX_NESTING = 40
"""Deeper nesting of braces and brackets is wrong without parsing."""
MAX_EXPONENT_DIGITS = 5
"""Numeric exponents, factorials and binomials with more digits than this are wrong without parsing."""


@dataclass(frozen=True, slots=True)
class Box:
    """The last box of a response."""

    answer: str | None
    """Content of the box, or None where there is no usable one."""
    reason: Literal["", "no box", "unterminated", "empty"] = ""
    """Why `answer` is None."""


def closing_brace(text: str, start: int) -> int:
    """Index of the brace that closes the group whose first character inside is `start`; -1 where none does.

    A brace after a backslash is a printed brace and opens nothing.
    """
    depth, index = 1, start
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return index
        index += 1
    return -1


_BRACE = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_CUT_BOX = re.compile(r"\\(?:bo|box|boxe|boxed\s*)$")


def extract_answer(response: str) -> Box:
    r"""Content of the last `\boxed{...}` of a response; a box inside a complete box is part of it.

    The last box decides alone: when it is unterminated or empty no earlier box is taken instead. `\boxed` without
    braces is no box, except at the very end of the text, where the response was cut inside it. One pass, linear time.
    """
    if _CUT_BOX.search(response[-40:]):
        return Box(None, "unterminated")
    groups: list[list[int] | None] = []  # open braces; of a box its [start inside, end], shared with `boxes`
    boxes: list[list[int]] = []  # boxes that are not inside a complete one
    for token in _BRACE.finditer(response):
        if token[0].startswith(BOX):
            boxes.append([token.end(), -1])
            groups.append(boxes[-1])
        elif token[0] == "{":
            groups.append(None)
        elif token[0] == "}" and groups and (box := groups.pop()) is not None:
            box[1] = token.start()
            while boxes[-1] is not box:
                boxes.pop()
    if not boxes:
        return Box(None, "no box")
    start, end = boxes[-1]
    return _content(response[start:end]) if end >= 0 else Box(None, "unterminated")


def _content(inside: str) -> Box:
    """A box that prints nothing is empty; an oversized one is left as it is, for `excess` to refuse."""
    if len(inside) > MAX_ANSWER_CHARS:
        return Box(inside)
    inside = re.sub(r"(?<!\\)\s+$", "", unbox(inside).lstrip())  # the blank of a `\ ` stays
    printed = re.sub(r"\\(?:text|mathrm|mbox|textbf)\b|\\[ ,;:!]|\\q?quad\b|[\s{}$~]", "", inside)
    return Box(inside) if printed else Box(None, "empty")


def unbox(text: str) -> str:
    r"""The text with every complete `\boxed{x}` in it replaced by `x`."""
    while (found := re.search(r"\\boxed\s*\{", text)) is not None:
        end = closing_brace(text, found.end())
        if end < 0:
            return text
        text = text[: found.start()] + text[found.end() : end] + text[end + 1 :]
    return text


def has_format(response: str) -> bool:
    r"""Whether a response has the shape `<think>...</think>...\boxed{...}`, starting with `<think>`, box complete."""
    text = response.lstrip()
    if not text.startswith("<think>"):
        return False
    _, found, rest = text.partition("</think>")
    return bool(found) and extract_answer(rest).answer is not None


_MISSING_VALUE = re.compile(r"|none|null|nil|nan|n/?a|missing|unknown|unavailable|tbd|todo|[?.…-]+", re.IGNORECASE)
"""What a program or a hurried hand writes for no label; as a word answer (`\\text{none}`) it is one."""
_POINTER = re.compile(
    r"\W*(?:please |as )?(?:see|refer to|shown)\b.*|.*\b(?:not available|not provided|no answer)\b.*", re.IGNORECASE
)
"""A label that points elsewhere: `see figure`."""
_LACKS_ARGUMENT = re.compile(
    r"\\[dtc]?frac\s*(?:\{\s*\}|$)|\\[dtc]?frac\s*\{[^{}]*\}\s*(?:\{\s*\}|$)|\\sqrt\s*(?:\{\s*\}|$)|(?<!\\)\\$|[\^_]\s*$"
)


@lru_cache(maxsize=50_000)
def gold_problem(gold: str) -> str:
    """Why nothing can be graded against this gold answer; empty where it is fine.

    Unreadable are: nothing, a missing value (`None`, `n/a`, `[]`), a pointer (`see figure`), unbalanced brackets, a command
    without its arguments; also where that is true of one of several accepted answers.
    """
    problems = (_problem(TOLERANCE.sub(r"\g<gold>", accepted.strip())) for accepted in gold.split(ALTERNATIVE.rstrip()))
    return next(filter(None, problems), "")


def _problem(gold: str) -> str:
    if "\\tolerance" in gold:
        return "gold with a tolerance that is no number"
    if _content(gold.strip()).answer is None:
        return "empty gold"
    words = re.sub(r"\\(?:text|mathrm|mbox|textbf|textrm)\s*\{([^{}]*)\}", r"\1", gold)
    if _MISSING_VALUE.fullmatch(gold.strip(" $.[]()<>'\"#")) or (words != gold and re.fullmatch(r"\s*[nN]/?[aA]\s*", words)):
        return "placeholder gold"
    if _POINTER.fullmatch(words.strip(" $")):
        return "gold that points elsewhere"
    if not is_balanced(gold):
        return "gold with unbalanced brackets"
    if len(re.findall(r"\\begin(?![a-zA-Z])", gold)) != len(re.findall(r"\\end(?![a-zA-Z])", gold)):
        return "gold with an environment that does not end"
    return "gold with a command that lacks its arguments" if _LACKS_ARGUMENT.search(gold.strip(" $")) else ""


def is_balanced(text: str) -> bool:
    """Whether every brace has its partner, and brackets pair up in number (`[0,1)` is fine)."""
    braces = brackets = 0
    for token in re.findall(r"\\[a-zA-Z]+|\\.|[{}()\[\]]", text, re.DOTALL):
        braces += (token == "{") - (token == "}")
        brackets += (token in "([") - (token in ")]")
        if braces < 0:
            return False
    return braces == 0 == brackets


def excess(answer: str) -> str:
    """Which limit an answer breaks before anything tries to read it; empty where none."""
    if len(answer) > MAX_ANSWER_CHARS:
        return f"longer than {MAX_ANSWER_CHARS} characters"
    if _nesting(answer) > MAX_NESTING:
        return f"nested deeper than {MAX_NESTING}"
    flat = re.sub(r"\\left|\\right|[{}()\s]", "", answer.replace("**", "^"))
    if re.search(rf"\d{{{MAX_EXPONENT_DIGITS + 1},}}!|!!|\^\d+!", flat) or re.search(r"!\s*[)}]+\s*!", answer):
        return "factorial too large"
    is_tower = any(_tower_digits(*found) > MAX_EXPONENT_DIGITS for found in re.findall(r"(?<=\^)(\d+)\^(\d+)", flat))
    if is_tower or re.search(rf"\^[-+]?\d{{{MAX_EXPONENT_DIGITS + 1},}}", flat):
        return "exponent too large"
    return ""


def _tower_digits(base: str, exponent: str) -> float:
    """Decimal digits of base ** exponent, both given in digits."""
    if len(base) > MAX_EXPONENT_DIGITS or len(exponent) > MAX_EXPONENT_DIGITS:
        return math.inf
    return int(exponent) * math.log10(max(1, int(base)))


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth = max(0, depth + (character in "{([") - (character in "})]"))
        deepest = max(deepest, depth)
    return deepest
