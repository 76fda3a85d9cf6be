r"""A small independent checker beside the grader: plain text comparison and evaluation in floating point.

It shares no code with the grader's own reading of answers, and uses neither math-verify nor sympy nor `eval`, so that a
disagreement between the two means something. It says right, wrong, or nothing (None) where it cannot tell.
"""

from __future__ import annotations

import cmath
import math
import re
import zlib
from collections.abc import Callable, Iterable
from functools import lru_cache

MAX_CHARS = 400
CLOSE = 1e-6
"""Relative difference up to which two values are the same ..."""
APART = 1e-4
"""... and from which they are different; in between there is no opinion."""

_DROPPED = re.compile(
    r"\\left\b|\\right\b|\\[bB]igg?[lr]?\b|\\[,;:! ]|~|\\q?quad\b|\\displaystyle\b|\^\s*\{?\s*\\circ\s*\}?|\\degree\b|\\?\$|\s"
)
_WRAPPED = re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf|operatorname)\{([^{}]*)\}")
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|\\.|[a-zA-Z]|.")
_FUNCTIONS: dict[str, Callable[[complex], complex]] = {
    "\\sin": cmath.sin, "\\cos": cmath.cos, "\\tan": cmath.tan, "\\ln": cmath.log, "\\exp": cmath.exp, "\\log": cmath.log10,
    "\\arcsin": cmath.asin, "\\arccos": cmath.acos, "\\arctan": cmath.atan, "\\cot": lambda z: 1 / cmath.tan(z),
    "\\sec": lambda z: 1 / cmath.cos(z), "\\csc": lambda z: 1 / cmath.sin(z), "\\sinh": cmath.sinh, "\\cosh": cmath.cosh,
}  # fmt: skip
_FAILURES = (ValueError, ArithmeticError, IndexError, RecursionError, TypeError)


@lru_cache(maxsize=50_000)
def second_opinion(gold: str, answer: str) -> bool | None:
    """Whether an answer equals a gold answer: True, False, or None where this checker cannot tell."""
    if max(len(gold), len(answer)) > MAX_CHARS or "\\tolerance" in gold:
        return None
    opinions = [_compare(_clean(accepted), _clean(answer)) for accepted in gold.split(" ||| ")]
    if True in opinions:
        return True
    return None if None in opinions else False


def _clean(text: str) -> str:
    text = re.sub(r"\\(?:text|mbox)\{\s*,?\s*(?:and|or)\s*\}", ",", text.strip())
    words = _WRAPPED.sub(r"\1", text)
    if not re.fullmatch(r"[\W_]*[A-Za-z][^\d\\]*", words):  # words after a number are units
        words = re.sub(r"(?<=[\d}])\s*\\(?:text\w*|mbox|mathrm)\{[^{}]*\}(?:\^\{?-?\d\}?)?.*$", "", text)
        words = _WRAPPED.sub(r"\1", words)
    words = re.sub(r"(\d),?\\[!,]\s*(?=\d{3})|(\d)\{,\}(?=\d{3})", r"\1\2", words)
    words = re.sub(r"\\[dtc]frac", r"\\frac", re.sub(r"\\(?:lt|leqslant|leq)\b", r"\\le", words))
    words = _DROPPED.sub("", words.replace("\\%", "%")).strip(".,;:")
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", words)


def _compare(gold: str, answer: str) -> bool | None:
    if gold.casefold() == answer.casefold():
        return True
    if re.fullmatch(r"[A-Za-z().'-]+", gold) and re.fullmatch(r"[A-Za-z().'-]+", answer) and max(len(gold), len(answer)) > 3:
        return None
    if any(
        mark in text for text in (gold, answer) for mark in ("\\cup", "matrix", "<", ">", "\\le", "\\ge", "\\pm", "\\in", "_", ":")
    ):
        return None
    sides = [_split(text) for text in (gold, answer)]
    if sides[0][0] != sides[1][0]:
        return None
    left, right = (_drop_names(parts) for _, parts in sides)
    if len(left) != len(right):
        return _lengths_differ(left, right)
    if sides[0][0] in ("", "{"):
        return _same_multiset(left, right)
    return _all(_same_value(one, other) for one, other in zip(left, right, strict=True))


def _lengths_differ(left: list[str], right: list[str]) -> bool | None:
    """More values than asked for are wrong, except that `1,234` may be one number."""
    joined = [re.fullmatch(r"\d{1,3}(?:,\d{3})+", ",".join(parts)) for parts in (left, right)]
    if any(joined):
        return _same_value("".join(left), "".join(right))
    return False


def _drop_names(parts: list[str]) -> list[str]:
    return [re.sub(r"^[a-zA-Z](?:\([a-zA-Z]\))?=", "", part) for part in parts]


def _split(text: str) -> tuple[str, list[str]]:
    """The brackets around an answer and the values between its outer commas."""
    pairs = {"(": ")", "[": "]", "\\{": "\\}"}
    kind = ""
    tokens = _TOKEN.findall(text)
    if len(tokens) > 1 and tokens[0] in pairs and _closes(tokens) == len(tokens) - 1 and "," in tokens:
        kind, tokens = tokens[0] + tokens[-1], tokens[1:-1]
    parts, depth = [""], 0
    for token in tokens:
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        if token == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += token
    return {"\\{\\}": "{"}.get(kind, kind), [part for part in parts if part]


def _closes(tokens: list[str]) -> int:
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token in ("(", "[", "{", "\\{")) - (token in (")", "]", "}", "\\}"))
        if depth == 0:
            return index
    return -1


def _all(opinions: Iterable[bool | None]) -> bool | None:
    seen = list(opinions)
    if False in seen:
        return False
    return None if None in seen else True


def _same_multiset(left: list[str], right: list[str]) -> bool | None:
    rest, is_sure = list(right), True
    for one in left:
        opinions = [_same_value(one, other) for other in rest]
        is_sure = is_sure and None not in opinions
        if True not in opinions:
            return False if is_sure else None
        del rest[opinions.index(True)]
    return True


def _same_value(one: str, other: str) -> bool | None:
    if one == other:
        return True
    if "," in one or "," in other:
        return _compare(one, other) if _split(one)[0] and _split(other)[0] else None
    try:
        left, right = _evaluate(one.removesuffix("%")), _evaluate(other.removesuffix("%"))
    except _FAILURES:
        return None
    if one.endswith("%") == other.endswith("%"):
        return _close(left, right)
    left, right = (left, right) if one.endswith("%") else (right, left)  # left is the percentage
    if _close(left / 100, right) or (_close(left, right) and abs(left) > 1):
        return True
    return False if _close(left / 100, right) is False and _close(left, right) is False else None


def _close(left: complex, right: complex) -> bool | None:
    if not (cmath.isfinite(left) and cmath.isfinite(right)):
        return None
    gap, size = abs(left - right), max(abs(left), abs(right))
    return True if gap <= CLOSE * size else False if gap >= APART * size else None


def _evaluate(text: str) -> complex:
    """Value of an expression; every letter stands for a fixed number.

    Raises:
        ValueError: the expression is not understood.
    """
    reader = _Reader(_TOKEN.findall(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)))
    value = reader.sum()
    if reader.tokens:
        raise ValueError(f"left over: {reader.tokens}")
    return value


class _Reader:
    """Recursive descent over tokens, evaluating as it reads."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]

    def peek(self) -> str:
        return self.tokens[-1] if self.tokens else ""

    def take(self, expected: str = "") -> str:
        token = self.tokens.pop()
        if expected and token != expected:
            raise ValueError(f"{token} instead of {expected}")
        return token

    def sum(self) -> complex:
        sign = -1 if self.peek() == "-" else 1
        if self.peek() in ("+", "-"):
            self.take()
        value = sign * self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take() == "+" else value - self.product()
        return value

    def product(self) -> complex:
        value = self.mixed(self.power())
        while (token := self.peek()) and token not in ("+", "-", ")", "]", "}", "|", "\\rfloor", "\\rceil", "=", ","):
            if token in ("*", "\\cdot", "\\times"):
                self.take()
                value *= self.signed_power()
            elif token in ("/", "\\div"):
                self.take()
                value /= self.signed_power()
            else:
                value *= self.power()
        return value

    def mixed(self, value: complex) -> complex:
        r"""`1\frac{4}{5}` is a sum, where both parts of the fraction are digits."""
        following = "".join(self.tokens[::-1][:9])
        if isinstance(value, int) and re.match(r"\\frac\{\d+\}\{\d+\}|\\frac\d\d", following):
            return value + self.power()
        return value

    def signed_power(self) -> complex:
        if self.peek() == "-":
            self.take()
            return -self.power()
        return self.power()

    def power(self) -> complex:
        value = self.atom()
        while self.peek() in ("^", "!"):
            value = math.gamma(value.real + 1) if self.take() == "!" else complex(value) ** self.argument()
        return value

    def argument(self) -> complex:
        if self.peek() != "{":
            token = self.peek()
            if token[:1].isdigit() and len(token) > 1:  # \frac12 takes one digit
                self.tokens[-1:] = [token[1:], token[0]]
            return self.atom()
        return self.group("{", "}")

    def group(self, opening: str, closing: str) -> complex:
        self.take(opening)
        value = self.sum()
        self.take(closing)
        return value

    def atom(self) -> complex:
        token = self.peek()
        closing = {"(": ")", "[": "]", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}.get(token)
        if closing is not None:
            value = self.group(token, closing)
            around = {"|": abs, "\\lfloor": lambda z: math.floor(z.real), "\\lceil": lambda z: math.ceil(z.real)}.get(token)
            return around(value) if around else value
        self.take()
        if token[0].isdigit() or token[0] == ".":
            return self.number(token)
        return self.command(token)

    def number(self, token: str) -> complex:
        if self.peek() in ("e", "E") and re.match(r"[eE][-+]?\d+$", "".join(self.tokens[::-1])):
            self.take()
            sign = self.take() if self.peek() in ("+", "-") else ""
            return float(f"{token}e{sign}{self.take()}")
        return float(token) if "." in token else int(token)

    def command(self, token: str) -> complex:
        if token == "\\frac":
            return self.argument() / self.argument()
        if token == "\\sqrt":
            root = self.group("[", "]") if self.peek() == "[" else 2
            return complex(self.argument()) ** (1 / root)
        if token == "\\binom":
            top, bottom = self.argument().real, self.argument().real
            return math.gamma(top + 1) / math.gamma(bottom + 1) / math.gamma(top - bottom + 1)
        if token in _FUNCTIONS:
            power = self.argument() if self.peek() == "^" and self.take() else 1
            return complex(_FUNCTIONS[token](self.power() if self.peek() in ("(", "{", "[") else self.product())) ** power
        constants = {"\\pi": math.pi, "e": math.e, "i": 1j, "\\imath": 1j}
        if token in constants:
            return constants[token]
        if not token.strip("\\").isalpha():
            raise ValueError(f"not understood: {token}")
        return 1 + zlib.crc32(token.encode()) % 99_991 / 99_991
