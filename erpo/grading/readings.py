r"""How an answer is read: LaTeX text in, a small tree out (number, words, list, tuple, set, matrix, assignment, expression).

Reading never evaluates: what is not a literal stays text, for `erpo.grading.verifier` to judge. The rules are listed in
docs/grading.md; their names there are the names used here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from erpo.grading.latex import TOKEN, is_one_group, normalise, split, squeeze
from erpo.grading.units import UNWRAPPED_UNITS, canonical_unit

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


# --- reading -------------------------------------------------------------------------------------------------------------

RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\in", r"\approx", r"\to", r"\equiv", r"\lt", r"\gt"}
NAME = re.compile(
    r"(?:[a-zA-Z]|\\[a-zA-Z]+|\\text\{[^{}]*\}|[A-Z][a-z]{2,})(?:_(?:\w|\{[^{}]*\}))?'*(?:\^\{-1\})?(?:\s*\([\w\s,\\]*\))?|"
    r"(?:m?\s*\\angle\s*|\\triangle\s*|\[|\|)?(?:[A-Z]\s*(?:_(?:\d|\{\d\}))?'?\s*){1,5}[\]|]?|\\overline\{[A-Z\s]+\}|\((?:[a-z]|\\[a-z]+)(?:\s*,\s*(?:[a-z]|\\[a-z]+))+\)"
)
CONSTANTS = {r"\pi", r"\infty", "e", "i"}


@lru_cache(maxsize=20_000)
def read(text: str) -> tuple[Reading, ...]:
    """The readings of an answer, likeliest first; several only for `1,234`, a number or a list."""
    text = normalise(text)
    if text.startswith("{") and is_one_group(text):
        text = text[1:-1].strip()
    if (whole := re.fullmatch(r"\\text\{([^{}]*)\}", text)) is not None:
        text = normalise(whole[1])
        return (_read_words(text),) if re.search(r"[^\W\d_]{2}", text) and "\\" not in text else (_read(text),)
    if re.fullmatch(r"[-+]?(?:\\\$)?\d{1,3}(?:,\d{3})+(?:\.\d+)?[^\d,]*", text):
        number = _read_scalar(text.replace(",", ""))
        return (number,) if re.search(r",0", text) else (number, _read(text))  # nobody lists 000 or 045
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
        return (read_part(text),)
    plus = re.sub(r"\\pm(?![a-zA-Z])", "+", text)
    minus = re.sub(r"\\pm(?![a-zA-Z])", "-", text)
    flipped = re.sub(r"\\mp(?![a-zA-Z])", "-", plus), re.sub(r"\\mp(?![a-zA-Z])", "+", minus)
    return tuple(read_part(value.strip().removeprefix("+").strip()) for value in flipped)


def read_part(text: str) -> Reading:
    r"""The reading of text that is one value: no list outside brackets, no `\\pm` left."""
    exact, *rounded = split(text, {r"\approx"})
    if rounded and exact and not NAME.fullmatch(exact):
        return read_part(exact)
    sides = split(text, RELATIONS)
    if len(sides) > 1:
        return _read_relation(text, sides)
    return _read_matrix(text) or _read_brackets(text) or _read_scalar(text)


def _read_relation(text: str, sides: list[str]) -> Reading:
    operators = {token[0] for token in TOKEN.finditer(text)} & RELATIONS
    if operators == {"="} and len(sides) == 2 and all(sides) and NAME.fullmatch(sides[1]) and not _is_name(sides[0]):
        sides = sides[::-1]  # `7 = x`
    names_value = operators <= {"=", r"\approx", r"\in"} and _is_name(sides[0])
    right = read_part(sides[-1])
    if names_value and all(sides):
        return Reading("assignment", text, (right,), name=squeeze(sides[0]).casefold())
    is_equation = operators <= {"=", r"\approx"} and all(sides)
    return Reading("relation", text, (right,) if is_equation else ())


def _is_name(text: str) -> bool:
    return bool(NAME.fullmatch(text)) and text not in CONSTANTS


def _read_matrix(text: str) -> Reading | None:
    text = re.sub(r"^[(\[]\s*(?=\\begin\{(?:matrix|array)\})(.*\\end\{(?:matrix|array)\})\s*[)\]]$", r"\1", text, flags=re.DOTALL)
    found = re.fullmatch(r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr|\s]*\})?(.*)\\end\{\1\}", text, re.DOTALL)
    if found is None:
        return None
    rows = [row for row in split(found[2], {"\\\\"}) if row]
    cells = [tuple(read_part(cell) for cell in split(row, {"&"})) for row in rows]
    return Reading("matrix", text, tuple(Reading("tuple", row, items) for row, items in zip(rows, cells, strict=True)))


def _read_brackets(text: str) -> Reading | None:
    if text.startswith("\\{") and text.endswith("\\}") and is_one_group(text):
        inside = text[2:-2].strip()
        builder = split(inside, {"|", r"\mid", ":"})
        builder[0] = re.sub(r"\s*\\in\s*\\mathbb\{R\}$", "", builder[0])
        if len(builder) > 1:
            is_of_name = len(builder) == 2 and NAME.fullmatch(builder[0]) and builder[0].strip() in builder[1]
            condition = read_part(builder[1]) if is_of_name else None
            return condition if condition is not None and condition.kind == "relation" else Reading("expression", text)
        parts = [part for part in split(inside, {",", ";"}) if part]
        return Reading("set", text, tuple(item for part in parts for item in _expand(part)))
    if text.startswith(r"\langle") and text.endswith(r"\rangle"):
        text = f"({text[7:-7].strip()})"
    if not (text[:1] in ("(", "[") and text[-1:] in (")", "]") and is_one_group(text)):
        return None
    parts = split(text[1:-1], {",", ";"})
    if len(parts) > 1 and all(parts):
        return Reading("tuple", text, tuple(read_part(part) for part in parts), brackets=text[0] + text[-1])
    return read_part(text[1:-1].strip()) if text[0] == "(" and text[-1] == ")" and text[1:-1].strip() else None


# --- scalars -------------------------------------------------------------------------------------------------------------

_INTEGER = r"\d+|\d{1,3}(?:,\d{3})+"
_DECIMAL = rf"(?:{_INTEGER})?\.\d+|(?:{_INTEGER})\.?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:"
    rf"(?P<whole>\d+)?\\frac\{{(?P<top>[-+]?\d+(?:\.\d+)?)\}}\{{(?P<bottom>\d+(?:\.\d+)?)\}}|"
    rf"(?P<over>\d+(?:\.\d+)?)/(?P<under>\d+(?:\.\d+)?)|"
    rf"(?P<head>\d*\.\d*)\\overline\{{(?P<period>\d+)\}}|"
    rf"(?:(?P<mantissa>{_DECIMAL})(?:[eE](?P<e>[-+]?\d+)|(?:\\times|\\cdot|\*|x|×)10\^(?:\{{(?P<power>[-+]?\d+)\}}|(?P<digit>-?\d+)))?"
    rf"|10\^(?:\{{(?P<ten>[-+]?\d+)\}}|(?P<tens>-?\d+))))"
)
_BASED = re.compile(r"([0-9]+)_(?:\{(\d+)\}|(\d+)|\{?\\text\{(\w+)\}\}?)")
_BASE_NAMES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "twelve": "12",
}
_UNIT_TAIL = re.compile(r"(?P<unit>(?:\\text\{[^{}]*\}(?:\^(?:\{-?\d\}|\d))?\s*(?:(?:\\cdot|/)\s*)?)+)$")
_BARE_UNIT_TAIL = re.compile(r"(?<=[\d}\s])(?P<unit>[a-zA-Z]{2,}(?:\^(?:\{-?\d\}|\d))?)$")


_HEDGE = re.compile(
    r"(?<![\^\w-])\d|\b(?:or|and|not|no|but|maybe|if|when|where|unless|except|never|is|to|through|between|more|less|than|least|most|plus|"
    r"minus|times|over|divided|mod|modulo|choose|factorial|squared|cubed|hundred|dozen|hal(?:f|ves)|thirds?|quarters?|fourths?|fifths?|"
    r"wrong|incorrect|guess|unsure|a?sinh?|a?cosh?|a?tanh?|log|ln|exp|sqrt)\b|\?",
    re.IGNORECASE,
)
"""What keeps words after a number from being a unit: they change its value or take it back."""
_BARE_WORDS = re.compile(r"(?<=[\d}.])\s+(?P<unit>(?:[a-zA-Z]{3,}|[a-zA-Z]{2,}/[a-zA-Z]+)(?:\s+[a-zA-Z]{2,})*)$")
"""Words after a number, without a text command: `18 apples`, `5 kilometers per hour`. The blank is needed (`5abc` is a product)."""


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
    is_words = re.fullmatch(r"[^\W\d_]+(?:(?:\s|[-'’.]\s?)[^\W\d_]+)*\.?", flat)
    if is_words and (is_wrapped or (re.search(r"[^\W\d_]{3}", flat) and " " in flat)):
        return _read_words(flat)
    return Reading("expression", text)


def _read_words(text: str) -> Reading:
    r"""Words: compared without case, spaces, punctuation and a leading article."""
    if re.fullmatch(r"\s*[A-J](?:(?:\s*,\s*(?:and\s+)?|\s+and\s+)[A-J])+\s*", text):
        return Reading("list", text, tuple(_read_words(letter) for letter in re.findall(r"[A-J]", text)))
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
    unit = (found[2] or "").strip()
    if _takes_back(unit):
        return None
    number = _read_number(found[1].replace("\\$", "").replace("$", "").strip() + ("%" if unit == "%" else ""))
    return replace(number, unit=unit.removeprefix("%")) if number is not None else None


_TRIGONOMETRIC = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")


def _split_unit(text: str) -> tuple[str, str]:
    """A scalar and its unit as written; the unit is empty where there is none."""
    for sign, unit in (("\\$", "dollar"), ("\\pounds", "pound"), ("€", "euro"), ("£", "pound")):
        if text.startswith(sign) or text.endswith(sign):
            return text.removeprefix(sign).removesuffix(sign).strip(), unit
    found = re.fullmatch(r"(.*?)\s*\^\\circ\s*(?:\\text\{\s*([CF])\s*\}|([CF]))?", text)
    if found is not None and found[1] and not _TRIGONOMETRIC.search(found[1]):
        scale = found[2] or found[3]
        return found[1], f"degree {scale}" if scale else "degree"
    if (found := re.fullmatch(r"(.*\d)\s*(\^\s*\{?\s*(?:\\prime\s*)+\}?|'{1,2})", text)) is not None:
        return found[1], "arcsecond" if len(re.findall(r"\\prime|'", found[2])) == 2 else "arcminute"
    found = _UNIT_TAIL.search(text)
    if found is not None and _takes_back(" ".join(re.findall(r"\{([^{}]*)\}", found["unit"].replace("^{", "^")))):
        found = None  # `5 \text{ or maybe 6}` hedges, it has no unit
    body = text[: found.start()].strip() if found else ""
    if found and body and (_read_number(body) is not None or canonical_unit(found["unit"])):
        return body, found["unit"].strip()
    if (found := _BARE_WORDS.search(text)) is not None and not _takes_back(found["unit"]):
        body = text[: found.start()].strip()
        if _read_number(body) is not None or canonical_unit(found["unit"]):
            return body, found["unit"]
    if (found := _BARE_UNIT_TAIL.search(text)) is not None and found["unit"].split("^")[0] in UNWRAPPED_UNITS:
        return text[: found.start()].strip(), found["unit"]
    return text, ""


def _takes_back(words: str) -> bool:
    r"""Whether words after a number are no unit but change what it says: `or 6`, `dozen`, a lone letter as in `3\text{i}`."""
    return not canonical_unit(words) and (bool(_HEDGE.search(words)) or re.fullmatch(r"[a-zA-Z]", words.strip()) is not None)


def _read_number(text: str) -> Reading | None:
    """A literal number, a percentage, or digits in another base."""
    bare = text.replace(" ", "").replace("{}", "")
    while bare.startswith("(") and bare.endswith(")") and is_one_group(bare):
        bare = bare[1:-1]
    is_percent = bare.endswith("%")
    bare = bare.removesuffix("%")
    if sum(character.isdigit() for character in bare) > MAX_LITERAL_DIGITS:
        return None
    if (found := re.fullmatch(r"(\d{1,2}):(\d\d)(?::(\d\d))?", bare)) is not None:
        clock = Fraction(int(found[1]) * 3600 + int(found[2]) * 60 + int(found[3] or 0), 3600)
        return Reading("number", text, value=clock, base="clock")
    if (found := _BASED.fullmatch(bare)) is not None:
        return Reading(
            "number", text, value=Fraction(int(found[1])), base=found[2] or found[3] or _BASE_NAMES.get(found[4], found[4])
        )
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
    exponent = int(found["e"] or found["power"] or found["digit"] or found["ten"] or found["tens"] or 0)
    if abs(exponent) > MAX_LITERAL_EXPONENT:
        return None
    mantissa = (found["mantissa"] or "1").replace(",", "").removesuffix(".")
    return sign * Fraction(mantissa) * Fraction(10) ** exponent
