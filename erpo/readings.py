r"""How an answer is read: LaTeX text in, a small tree out (number, words, list, tuple, set, matrix, assignment, expression).

Reading never evaluates: what is not a literal stays text, for `erpo.verifier` to judge. The rules are listed in
docs/grading.md; their names there are the names used here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from erpo.answers import closing_brace, unbox
from erpo.units import UNWRAPPED_UNITS, canonical_unit

MAX_LITERAL_DIGITS = 1_000
"""Longer literals are not turned into numbers here."""
MAX_LITERAL_EXPONENT = 4_000
"""Scientific notation beyond this stays text."""

Kind = Literal["number", "words", "list", "tuple", "set", "matrix", "assignment", "relation", "expression"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One answer or one part of an answer."""

    kind: Kind
    latex: str
    """Normalised text of this part, without unit."""
    items: tuple[Reading, ...] = ()
    """Parts of a list, tuple, set or matrix (rows of a matrix are tuples); right side of an assignment."""
    brackets: str = ""
    """Opening and closing character of a tuple or interval."""
    name: str = ""
    """Left side of an assignment."""
    value: Fraction | None = None
    """Value of a number; of a percentage, the number before the sign."""
    is_decimal: bool = False
    """Whether a number is written with a decimal point, so that it may be rounded."""
    is_percent: bool = False
    unit: str = ""
    """Unit, `degree`, or empty."""
    base: str = ""
    """Subscript of a number in another base."""


# --- normalisation: text that prints the same becomes the same text -------------------------------------------------------

_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
     "°": r"^\circ ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
     "√": r"\sqrt ", "∅": r"\emptyset ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "²": "^2", "³": "^3",
     "，": ",", "。": ".", "（": "(", "）": ")", "％": "%", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "′": "'", "″": "''"}
)  # fmt: skip

_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\[()\[\]]|(?<!\\)\$", ""),
        (r"\\(?:left|right|middle)\s*\.", ""),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
        (r"(?<=\d)\s*(?:,\s*\\!|\\[,;:! ]|\{,\}|~)\s*(?=\d{3}(?!\d))", ""),
        (r"\\!", ""),
        (r"\\[,;:>]|\\ |~|\\q?quad(?![a-zA-Z])|\\(?:en|thin|med|thick)space(?![a-zA-Z])|\\hspace\*?\{[^{}]*\}", " "),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|strut)(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\(?:geqslant|geqq|geq)(?![a-zA-Z])", r"\\ge"),
        (r"\\(?:leqslant|leqq|leq)(?![a-zA-Z])", r"\\le"),
        (r"\\(?:neq)(?![a-zA-Z])", r"\\ne"),
        (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\(?:text(?:rm|bf|it|normal|sf|tt)|mbox|mathrm|emph|operatorname\*?|textup)\s*\{", r"\\text{"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf)\s*\{([^{}]*)\}", r"\1"),
        (r"\\text\{\s*([^\s{}])\s*\}(?=\^|_)", r"\1"),
        (r"\\degree(?:s)?(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"^\\circ "),
        (r"\\%", "%"),
        (r"\\text\{\s*(?:percent|per cent|pct)\s*\}|(?<=\d)\s+(?:percent|per cent)\b", "%"),
        (r"\\text\{\s*,?\s*(?:and|or)\s*\}|(?<=[\d\s)}\]]),?\s+(?:and|or)\s+(?![a-z]{2})|\\lor(?![a-zA-Z])", " , "),
        (r"(?<=\d)\s+(\d+)/(\d+)(?![\d.])", r"\\frac{\1}{\2}"),
        (r"(?<![\d.])(\d{1,3})((?: \d{3})+)(?![\d.])", lambda found: found[0].replace(" ", "")),
        (r"\+\s*\\infty", r"\\infty"),
        (r"(?<![a-zA-Z\\])(?:infinity|\\text\{\s*infinity\s*\})", r"\\infty"),
        (r"^\s*(?:\\approx|\\simeq|\\sim|=|:)\s*", ""),
        (r"\s+", " "),
        (r"(?:,\s*)+,", ","),
        (r"(?<!\\)[\s.,;:]+$", ""),
    )
)


@lru_cache(maxsize=20_000)
def normalise(text: str) -> str:
    """The same answer with one spelling for layout, sizes, spacing, text commands and digit groups."""
    text = unbox(text).translate(_UNICODE).strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _brace_arguments(text).strip()


def squeeze(text: str) -> str:
    r"""Normalised text without spaces, text commands and needless braces: equal squeezed texts print the same."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", normalise(text))
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    text = re.sub(r"(\\[a-zA-Z]+)\s+(?=[a-zA-Z])", r"\1{}", text)
    return re.sub(r"\s", "", text)


_ARGUMENTS = re.compile(r"\\(frac|binom|sqrt)(?![a-zA-Z])")


def _brace_arguments(text: str) -> str:
    r"""`\frac12`, `\frac{1}2`, `\sqrt2` with braces around every argument."""
    position = 0
    while (found := _ARGUMENTS.search(text, position)) is not None:
        position = found.end()
        if text[position : position + 1] == "[" and found[1] == "sqrt":
            position = text.find("]", position) + 1 or len(text)
        for _ in range(1 if found[1] == "sqrt" else 2):
            argument = re.compile(r"\s*(\{|\\[a-zA-Z]+|[^\s\\{}^_])").match(text, position)
            if argument is None:
                break
            if argument[1] == "{":
                end = closing_brace(text, argument.end())
                if end < 0:
                    break
                text, position = text[:position] + text[argument.start(1) :], position + end + 1 - argument.start(1)
                continue
            text = f"{text[:position]}{{{argument[1]}}}{text[argument.end() :]}"
            position += len(argument[1]) + 2
        position = found.end()
    return text


# --- splitting -----------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|.", re.DOTALL)
_OPENING = {"{", "(", "[", r"\{", r"\begin", r"\lfloor", r"\lceil", r"\langle"}
_CLOSING = {"}", ")", "]", r"\}", r"\end", r"\rfloor", r"\rceil", r"\rangle"}


def split(text: str, separators: set[str]) -> list[str]:
    """Cut at separators that are inside no bracket of any sort."""
    parts, depth, start = [], 0, 0
    for token in _TOKEN.finditer(text):
        if token[0] in _OPENING:
            depth += 1
        elif token[0] in _CLOSING:
            depth -= 1
        elif depth == 0 and token[0] in separators:
            parts.append(text[start : token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _is_one_group(text: str) -> bool:
    """Whether the first bracket closes with the last character."""
    depth = 0
    tokens = list(_TOKEN.finditer(text))
    for index, token in enumerate(tokens):
        depth += (token[0] in _OPENING) - (token[0] in _CLOSING)
        if depth <= 0:
            return index == len(tokens) - 1
    return False


# --- reading -------------------------------------------------------------------------------------------------------------

_RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\to", r"\equiv", r"\lt", r"\gt"}
_NAME = re.compile(
    r"(?:[a-zA-Z]|\\[a-zA-Z]+|\\text\{[^{}]*\}|[A-Z][a-z]{2,})(?:_(?:\w|\{[^{}]*\}))?'*(?:\^\{-1\})?(?:\s*\([\w\s,\\]*\))?|"
    r"(?:m?\s*\\angle\s*|\\triangle\s*|\[|\|)?(?:[A-Z]\s*(?:_(?:\d|\{\d\}))?'?\s*){1,5}[\]|]?|\\overline\{[A-Z\s]+\}|\([a-z](?:\s*,\s*[a-z])+\)"
)
_CONSTANTS = {r"\pi", r"\infty", "e", "i"}


@lru_cache(maxsize=20_000)
def read(text: str) -> tuple[Reading, ...]:
    """The readings of an answer, likeliest first; several only for `1,234`, a number or a list."""
    text = normalise(text)
    if (whole := re.fullmatch(r"\\text\{([^{}]*)\}", text)) is not None:
        text = normalise(whole[1])
        return (_read_words(text),) if re.search(r"[^\W\d_]{2}", text) and "\\" not in text else (_read(text),)
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        return _read_scalar(text.replace(",", "")), _read(text)
    return (_read(text),)


def _read(text: str) -> Reading:
    parts = [part for part in split(text, {",", ";"}) if part]
    if len(parts) > 1:
        return Reading("list", text, tuple(item for part in parts for item in _expand(part)))
    expanded = _expand(text)
    return expanded[0] if len(expanded) == 1 else Reading("list", text, expanded)


def _expand(text: str) -> tuple[Reading, ...]:
    r"""`a \pm b` is two values; `\mp` goes the other way."""
    if len(re.findall(r"\\pm(?![a-zA-Z])", text)) != 1 or text[:1] in "([{" or text.startswith(("\\{", "\\begin")):
        return (_read_one(text),)
    plus = re.sub(r"\\pm(?![a-zA-Z])", "+", text)
    minus = re.sub(r"\\pm(?![a-zA-Z])", "-", text)
    flipped = re.sub(r"\\mp(?![a-zA-Z])", "-", plus), re.sub(r"\\mp(?![a-zA-Z])", "+", minus)
    return tuple(_read_one(value.strip().removeprefix("+").strip()) for value in flipped)


def _read_one(text: str) -> Reading:
    sides = split(text, _RELATIONS)
    if len(sides) > 1:
        return _read_relation(text, sides)
    return _read_matrix(text) or _read_brackets(text) or _read_scalar(text)


def _read_relation(text: str, sides: list[str]) -> Reading:
    operators = {token[0] for token in _TOKEN.finditer(text)} & _RELATIONS
    names_value = operators <= {"=", r"\approx", r"\in"} and _NAME.fullmatch(sides[0]) and sides[0] not in _CONSTANTS
    right = _read_one(sides[-1])
    if names_value and all(sides):
        return Reading("assignment", text, (right,), name=squeeze(sides[0]).casefold())
    is_equation = operators <= {"=", r"\approx"} and all(sides)
    return Reading("relation", text, (right,) if is_equation else ())


_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def intervals(reading: Reading) -> tuple[Reading, ...]:
    """The intervals a reading stands for: itself, a union, inequalities for one unknown; empty where it stands for none."""
    if reading.kind == "tuple" and len(reading.items) == 2:
        return (reading,)
    if reading.kind == "assignment" and r"\in" in reading.latex:
        return intervals(reading.items[0])
    if reading.kind == "relation":
        return _bounds(reading.latex)
    if reading.kind == "expression":
        if re.fullmatch(r"\\mathbb\{R\}|\\mathbb R|\\R", reading.latex):
            return (_read_one(r"(-\infty,\infty)"),)
        parts = split(reading.latex, {r"\cup"})
        found = [intervals(_read_one(part)) for part in parts] if len(parts) > 1 else []
        return tuple(part for span in found for part in span) if all(found) else ()
    if reading.kind == "list" and all(item.kind == "relation" for item in reading.items):
        return _join([_bounds(item.latex) for item in reading.items])
    return ()


def _bounds(text: str) -> tuple[Reading, ...]:
    r"""`a < x \le b`, `x \ge a`, `x \ne a` as intervals."""
    sides = split(text, _RELATIONS)
    operators = [token for token in (found[0] for found in _TOKEN.finditer(text)) if token in _RELATIONS]
    operators = [{r"\lt": "<", r"\gt": ">"}.get(operator, operator) for operator in operators]
    names = [index for index, side in enumerate(sides) if _NAME.fullmatch(side) and side not in _CONSTANTS]
    if len(names) != 1 or len(operators) != len(sides) - 1 or not all(sides):
        return ()
    if operators == [r"\ne"]:
        value = sides[1 - names[0]]
        return _read_one(rf"(-\infty,{value})"), _read_one(rf"({value},\infty)")
    if not set(operators) <= set(_FLIPPED) or names[0] != len(sides) // 2 and len(sides) == 3 or len(sides) > 3:
        return ()
    low, high = "(-\\infty", "\\infty)"
    for index, side in enumerate(sides):
        if index == names[0]:
            continue
        operator = operators[min(index, len(operators) - 1)] if len(sides) == 2 else operators[index // 2]
        towards_name = operator if index < names[0] else _FLIPPED[operator]
        if towards_name in ("<", r"\le"):
            low = ("(" if towards_name == "<" else "[") + side
        else:
            high = side + (")" if towards_name == ">" else "]")
    return (_read_one(f"{low},{high}"),)


def _join(spans: list[tuple[Reading, ...]]) -> tuple[Reading, ...]:
    """Several inequalities: `x>2, x<5` is one interval, `x<1, x>3` two."""
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
                return (_read_one(f"{brackets[0]}{lows[first].latex},{highs[second].latex}{brackets[1]}"),)
    return tuple(part for span in spans for part in span)


def _read_matrix(text: str) -> Reading | None:
    found = re.fullmatch(r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|\s]*\})?(.*)\\end\{\1\}", text, re.DOTALL)
    if found is None:
        return None
    rows = [row for row in split(found[2], {"\\\\"}) if row]
    cells = [tuple(_read_one(cell) for cell in split(row, {"&"})) for row in rows]
    return Reading("matrix", text, tuple(Reading("tuple", row, items) for row, items in zip(rows, cells, strict=True)))


def _read_brackets(text: str) -> Reading | None:
    if text.startswith("\\{") and text.endswith("\\}") and _is_one_group(text):
        inside = text[2:-2].strip()
        if len(split(inside, {"|", r"\mid", ":"})) > 1:
            return Reading("expression", text)
        parts = [part for part in split(inside, {",", ";"}) if part]
        return Reading("set", text, tuple(item for part in parts for item in _expand(part)))
    if text.startswith(r"\langle") and text.endswith(r"\rangle"):
        text = f"({text[7:-7].strip()})"
    if not (text[:1] in ("(", "[") and text[-1:] in (")", "]") and _is_one_group(text)):
        return None
    parts = split(text[1:-1], {",", ";"})
    if len(parts) > 1 and all(parts):
        return Reading("tuple", text, tuple(_read_one(part) for part in parts), brackets=text[0] + text[-1])
    return _read_one(text[1:-1].strip()) if text[0] == "(" and text[-1] == ")" and text[1:-1].strip() else None


# --- scalars -------------------------------------------------------------------------------------------------------------

_INTEGER = r"\d+|\d{1,3}(?:,\d{3})+"
_DECIMAL = rf"(?:{_INTEGER})?\.\d+|(?:{_INTEGER})\.?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:"
    rf"(?P<whole>\d+)?\\frac\{{(?P<top>[-+]?\d+(?:\.\d+)?)\}}\{{(?P<bottom>\d+(?:\.\d+)?)\}}|"
    rf"(?P<over>\d+(?:\.\d+)?)/(?P<under>\d+(?:\.\d+)?)|"
    rf"(?P<head>\d*\.\d*)\\overline\{{(?P<period>\d+)\}}|"
    rf"(?:(?P<mantissa>{_DECIMAL})(?:[eE](?P<e>[-+]?\d+)|(?:\\times|\\cdot|\*|x|×)10\^(?:\{{(?P<power>[-+]?\d+)\}}|(?P<digit>\d)))?"
    rf"|10\^\{{(?P<ten>[-+]?\d+)\}}))"
)
_BASED = re.compile(r"([0-9]+)_(?:\{(\d+)\}|(\d+)|\{?\\text\{(\w+)\}\}?)")
_UNIT_TAIL = re.compile(r"^(?P<body>.*?)\s*(?P<unit>(?:\\text\{[^{}]*\}(?:\^(?:\{-?\d\}|\d))?\s*(?:\\cdot|/)?\s*)+)$")
_BARE_UNIT_TAIL = re.compile(r"^(?P<body>.*[\d}])\s*(?P<unit>[a-zA-Z]{2,}(?:\^(?:\{-?\d\}|\d))?)$")


def _read_scalar(text: str) -> Reading:
    text = text.strip()
    body, unit = _split_unit(text)
    number = _read_number(body)
    if number is not None:
        return replace(number, unit=unit)
    if unit and (canonical_unit(unit) or unit == "degree"):
        return Reading("expression", body, unit=unit)
    flat = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    is_wrapped = r"\text{" in text
    if re.fullmatch(r"[^\W\d_][^\W\d_\s.'’-]*(?:[\s.'’-]+[^\W\d_]+)*\.?", flat) and (is_wrapped or len(flat) > 1 and " " in flat):
        return _read_words(flat)
    return Reading("expression", text)


def _read_words(text: str) -> Reading:
    r"""Words: compared without case, spaces, punctuation and a leading article."""
    if re.fullmatch(r"[^,;]*\w[^,;]*(?:[,;][^,;]*\w[^,;]*)+", text) and not re.search(r"\d", text):
        parts = [part.strip() for part in re.split(r"[,;]|\band\b", text) if part.strip()]
        return Reading("list", text, tuple(_read_words(part) for part in parts))
    if (number := _read_scalar_number(text)) is not None:
        return number
    plain = re.sub(r"^(?:the|an?)\s+(?=\w{2})", "", text.casefold())
    return Reading("words", text, name=re.sub(r"[^\w:+]", "", plain))


def _read_scalar_number(text: str) -> Reading | None:
    """`18 cm` inside one text command."""
    found = re.fullmatch(r"\s*(\\?\$?\s*[-+]?[\d.,/ ]*\d)\s*([^\d].*)?", text)
    if found is None:
        return None
    number = _read_number(found[1].replace("\\$", "").replace("$", "").strip())
    return replace(number, unit=(found[2] or "").strip()) if number is not None else None


def _split_unit(text: str) -> tuple[str, str]:
    """A scalar and its unit as written; the unit is empty where there is none."""
    for sign, unit in (("\\$", "dollar"), ("\\pounds", "pound"), ("€", "euro"), ("£", "pound")):
        if text.startswith(sign) or text.endswith(sign):
            return text.removeprefix(sign).removesuffix(sign).strip(), unit
    if (found := re.fullmatch(r"(.*?)\s*\^\\circ\s*(?:\\text\{\s*([CF])\s*\}|([CF]))?", text)) is not None and found[1]:
        scale = found[2] or found[3]
        return found[1], f"degree {scale}" if scale else "degree"
    if (found := re.fullmatch(r"(.*\d)\s*(\^\s*\{?\s*(?:\\prime\s*)+\}?|'{1,2})", text)) is not None:
        return found[1], "arcsecond" if len(re.findall(r"\\prime|'", found[2])) == 2 else "arcminute"
    if (found := _UNIT_TAIL.fullmatch(text)) is not None and found["body"]:
        body = found["body"].strip()
        if _read_number(body) is not None or canonical_unit(found["unit"]):
            return body, found["unit"].strip()
    if (found := _BARE_UNIT_TAIL.fullmatch(text)) is not None and found["unit"].split("^")[0] in UNWRAPPED_UNITS:
        return found["body"], found["unit"]
    return text, ""


def _read_number(text: str) -> Reading | None:
    """A literal number, a percentage, or digits in another base."""
    bare = text.replace(" ", "").replace("{}", "")
    while bare.startswith("(") and bare.endswith(")") and _is_one_group(bare):
        bare = bare[1:-1]
    is_percent = bare.endswith("%")
    bare = bare.removesuffix("%")
    if sum(character.isdigit() for character in bare) > MAX_LITERAL_DIGITS:
        return None
    if (found := re.fullmatch(r"(\d{1,2}):(\d\d)(?::(\d\d))?", bare)) is not None:
        clock = Fraction(int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3] or 0), 3600)
        return Reading("number", text, value=clock, base="clock")
    if (found := _BASED.fullmatch(bare)) is not None:
        return Reading("number", text, value=Fraction(int(found[1])), base=found[2] or found[3] or found[4])
    found = _NUMBER.fullmatch(bare)
    value = None if found is None else _value(found)
    if found is None or value is None:
        return None
    is_decimal = "." in bare.rstrip(".") and found["period"] is None
    return Reading("number", text, value=value, is_decimal=is_decimal, is_percent=is_percent)


def _value(found: re.Match[str]) -> Fraction | None:
    """Value of a matched literal; None where it has none (a zero denominator) or is too large to write out."""
    sign = -1 if found["sign"] == "-" else 1
    if found["top"] is not None or found["over"] is not None:
        top, bottom = Fraction(found["top"] or found["over"]), Fraction(found["bottom"] or found["under"])
        return None if bottom == 0 else sign * (int(found["whole"] or 0) + top / bottom)
    if found["period"] is not None:
        _, _, fixed = found["head"].partition(".")
        repeated = Fraction(int(found["period"]), (10 ** len(found["period"]) - 1) * 10 ** len(fixed))
        return sign * (Fraction((found["head"].strip(".") and found["head"] + "0") or 0) + repeated)
    exponent = int(found["e"] or found["power"] or found["digit"] or found["ten"] or 0)
    if abs(exponent) > MAX_LITERAL_EXPONENT:
        return None
    mantissa = (found["mantissa"] or "1").replace(",", "").removesuffix(".")
    return sign * Fraction(mantissa) * Fraction(10) ** exponent
