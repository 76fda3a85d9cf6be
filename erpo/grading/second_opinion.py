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
CLOSE = 1e-9
"""Relative difference up to which two values are the same ..."""
APART = 1e-4
"""... and from which they are different; in between there is no opinion."""

ZERO = 1e-12
"""Below this a value may be a zero with rounding."""

_SPACING = re.compile(r"\\[,;:! ]|~|\\q?quad\b|\\displaystyle\b|\\left\b|\\right\b|\\[bB]igg?[lr]?\b|\\?\$")
_DEGREES = re.compile(r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree\b|°)\s*(?:\\(?:text|mathrm)\{\s*[CF]\s*\}|[CF]\b)?")
_WRAPPED = re.compile(r"\\(?:text\w*|mbox|mathrm|mathbf|operatorname)\{([^{}]*)\}")
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|\\.|[a-zA-Z]|[^\s]")
_GREEK = re.compile(
    r"\\(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi|psi|omega|hbar|ell)"
)
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


_TAKES_BACK = re.compile(
    r"\b(?:or|and|not|no|but|maybe|if|when|to|more|less|than|times|plus|minus|over|half|halves|thirds?|quarters?|hundred|thousand|million|"
    r"billion|dozen|squared|cubed|factorial|mod|[eixyz]|is|wrong|incorrect)\b|\?"
)


def _clean(text: str) -> tuple[str, str]:
    """An answer without layout, and the words that stood behind it."""
    is_money = "\\$" in text
    text = re.sub(r"(\d)(?:,\\!|\\,)\s*(?=\d{3}(?!\d))|(\d)\{,\}(?=\d{3}(?!\d))", r"\1\2", text.strip())
    text = _SPACING.sub(" ", text).replace("\\%", "%").strip().rstrip(",;:")
    text = re.sub(r"(?<!\.)\.$", "", text)
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    text = re.sub(r"\\(?:text|mbox)\{\s*,?\s*(?:and|or)\s*\}|(?<=[\d}])\s+(?:and|or)\s+(?=[-\d\\])", ",", text)
    tail = re.search(r"(?<=[\d}\s%])(?:\\(?:text\w*|mbox|mathrm)\{[^{}]*\}(?:\^\{?-?\d\}?)? ?)+$", text)
    if (tail and _TAKES_BACK.search(tail[0])) or re.search(r"(?:\\frac\s*\{\s*|\^\{?\s*)\\(?:text|mathrm)|\\textcolor", text):
        return "_", ""  # out of scope
    words = re.sub(r"\W", "", _WRAPPED.sub(r"\1", tail[0])) if tail and tail.start() else ""
    text = _WRAPPED.sub(r"\1", text[: tail.start()] if words and tail else text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", re.sub(r"\\(?:lt|leqslant|leq)\b", r"\\le", text)).strip()
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", text), words + "$" * is_money


_OUT_OF_SCOPE = re.compile(
    r"\\(?:text)?color|\\underline|\\fbox|\\(?:bf|it|rm|Large|large)\b|(?<![\\a-zA-Z])(?:sqrt|pi|sin|cos|tan|cis|log|ln|exp|inf)(?![a-zA-Z])|"
    r"^\(\(|\d\s+\(|\.\.|\\cup|\\begin|matrix|<|>|\\le\b|\\ge|\\pm|\\in\b|_|:|;|\)=|\\frac\{?d[}\d]|\\(?:text|mathrm)\w*\{[^{}]*\}\^|\d\s+[a-zA-Z]+/|\\boxed|\b(?:and|or|not|maybe)\b|\d\s+\d|[\d}]\s*[a-zA-Z]{2,}$|\d\s+[a-zA-Z]{2,}|^\(?[A-J]\)?[.:)\s].*\w|[^\x00-\x7f]"
)
"""What this checker does not try to understand."""


def _compare(gold: tuple[str, str], answer: tuple[str, str]) -> bool | None:
    if gold[1] != answer[1] and "%" in gold[0] + answer[0]:
        return None
    degrees = [bool(_DEGREES.search(text)) for text, _ in (gold, answer)]
    if any(degrees) and re.search(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)|[CF]$", gold[0] + " " + answer[0]):
        return None
    one, other = (_DEGREES.sub("", text).strip() for text, _ in (gold, answer))
    if gold[1] and answer[1] and gold[1] != answer[1]:
        return None
    if re.sub(r"\s", "", one).casefold() == re.sub(r"\s", "", other).casefold():
        return None if any(re.search(r"\d\s+\d", text) for text in (one, other)) else True
    if (degrees[0] != degrees[1] or "degrees" in (gold[1], answer[1])) and "\\pi" in one + other:
        return None
    if all(re.fullmatch(r"[A-Za-z()., '-]+", text) for text in (one, other)) and max(len(one), len(other)) > 3:
        return None
    return None if _OUT_OF_SCOPE.search(one) or _OUT_OF_SCOPE.search(other) else _compare_values(one, other)


def _compare_values(gold: str, answer: str) -> bool | None:
    (kind, left), (other_kind, right) = _split(gold), _split(answer)
    if kind != other_kind:
        return None
    if all(re.fullmatch(r"[A-J]+", part) for part in [*left, *right]):
        return True if sorted(left) == sorted(right) else None  # choices, or products
    if len(left) != len(right):
        return _lengths_differ(left, right) if kind != "{" else None
    names = [{part.split("=")[0] for part in parts if "=" in part} for parts in (left, right)]
    if names[0] != names[1] and (all(names) or len(names[0] | names[1]) > 1):
        return None
    if names[0] == names[1] and len(names[0]) == len(left):
        left, right, kind = sorted(left), sorted(right), "by name"
    left, right = _drop_names(left), _drop_names(right)
    if kind in ("", "{"):
        return _same_multiset(left, right)
    return _all(_same_value(one, other) for one, other in zip(left, right, strict=True))


def _lengths_differ(left: list[str], right: list[str]) -> bool | None:
    """More or fewer values than asked for are wrong, except that `1,234` may be one number."""
    may_be_one = any(re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+", ",".join(parts)) for parts in (left, right))
    return None if may_be_one else False


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
        return _compare_values(one, other) if _split(one)[0] and _split(other)[0] else None
    try:
        left, right = _evaluate(one.removesuffix("%")), _evaluate(other.removesuffix("%"))
    except _FAILURES:
        return None
    if one.endswith("%") == other.endswith("%"):
        is_whole = {type(left), type(right)} == {int, float}  # an integer is exact
        return None if is_whole and left != right and _close(left, right) else _close(left, right)
    if re.search(r"[a-zA-Z]", re.sub(r"\\[a-z]+", "", one + other)):
        return None
    percentage, number = (left, right) if one.endswith("%") else (right, left)
    as_share, as_bare = _close(percentage / 100, number), _close(percentage, number)
    if as_bare and abs(percentage) <= 1:
        as_bare = False
    if as_share or as_bare:
        return True
    return None if None in (as_share, as_bare) else False


def _close(left: complex, right: complex) -> bool | None:
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if not (cmath.isfinite(left) and cmath.isfinite(right)):
        return None
    gap, size = abs(left - right), max(abs(left), abs(right))
    if min(abs(left), abs(right)) < ZERO and size < ZERO and gap > CLOSE * size and 0 in (left, right):
        return None
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


MAX_EXACT = 1_000
"""Bases, exponents and arguments of factorials up to this stay integers."""


def _raise(base: complex, exponent: complex) -> complex:
    is_exact = isinstance(base, int) and isinstance(exponent, int) and abs(base) <= MAX_EXACT and 0 <= exponent <= MAX_EXACT
    return base**exponent if is_exact else complex(base) ** exponent


def _factorial(value: complex) -> complex:
    is_exact = isinstance(value, int) and 0 <= value <= MAX_EXACT
    return math.factorial(value) if is_exact else math.gamma(value.real + 1)


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
            value = _factorial(value) if self.take() == "!" else _raise(value, self.exponent())
        return value

    def exponent(self) -> complex:
        if len(self.peek()) > 1 and self.peek().isdigit():
            raise ValueError("digits after ^ without braces")
        return self.argument()

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
            if power == -1:
                raise ValueError("an inverse function or a reciprocal")
            return complex(_FUNCTIONS[token](self.power() if self.peek() in ("(", "{", "[") else self.product())) ** power
        constants = {"\\pi": math.pi, "e": math.e, "i": 1j, "\\imath": 1j}
        if token in constants:
            return constants[token]
        if not re.fullmatch(r"[a-zA-Z]", token) and not _GREEK.fullmatch(token):
            raise ValueError(f"not understood: {token}")
        return 1 + zlib.crc32(token.encode()) % 99_991 / 99_991
