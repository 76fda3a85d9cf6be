"""What a response answers: its last complete box, and whether a gold answer can be graded against at all. Pure text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

BOX = "\\boxed"
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
    inside = unbox(inside).strip()
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


_PLACEHOLDERS = re.compile(
    r"none|null|nan|n/?a|unknown|unavailable|tbd|todo|\?+|-+|\.+|"
    r"(please )?(see|refer to|as shown in|shown in)( the)?( \w+)?( (above|below|attached))?",
    re.IGNORECASE,
)


def gold_problem(gold: str) -> str:
    """Why nothing can be graded against this gold answer; empty where it is fine.

    Unreadable are: nothing, a placeholder (`None`, `n/a`, `see figure`), unbalanced braces, a command without its arguments.
    """
    text = re.sub(r"\\(?:text|mathrm|mbox|textbf|textrm)\s*\{([^{}]*)\}", r"\1", gold.strip().strip("$")).strip()
    if _content(text).answer is None:
        return "empty gold"
    if _PLACEHOLDERS.fullmatch(text.strip(" .")):
        return "placeholder gold"
    if not is_balanced(gold):
        return "gold with unbalanced braces"
    if re.search(r"\\[dt]?frac\s*(\{\s*\}|$)|\\frac\s*\{[^{}]*\}\s*(\{\s*\}|$)|\\sqrt\s*(\{\s*\}|$)|\\$", text):
        return "gold with a command that lacks its arguments"
    return ""


def is_balanced(text: str) -> bool:
    """Whether every brace has its partner."""
    depth = 0
    for token in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += (token == "{") - (token == "}")
        if depth < 0:
            return False
    return depth == 0


def excess(answer: str) -> str:
    """Which limit an answer breaks before anything tries to read it; empty where none."""
    if len(answer) > MAX_ANSWER_CHARS:
        return f"answer longer than {MAX_ANSWER_CHARS} characters"
    if _nesting(answer) > MAX_NESTING:
        return f"nested deeper than {MAX_NESTING}"
    if re.search(rf"\d{{{MAX_EXPONENT_DIGITS + 1},}}\s*[)}}]*\s*!|!\s*[)}}]*\s*!", answer):
        return "factorial too large"
    if re.search(rf"\^\s*\{{?\s*[-+]?\d{{{MAX_EXPONENT_DIGITS + 1},}}|\^\s*\{{?[^{{}}]*\d+\s*\^", answer):
        return "exponent too large"
    return ""


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    return deepest
