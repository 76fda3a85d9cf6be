r"""Whether two answers are equal, by the written rules of docs/grading.md. Pure: what the rules leave open goes to a callback.

Every rule is symmetric in gold and answer except one: an answer that is an equation may state the value asked for
(`m+n=293` for gold 293), while a gold equation is never met by its right side alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from erpo.grading.answers import ALTERNATIVE, TOLERANCE
from erpo.grading.intervals import intervals
from erpo.grading.latex import normalise, split, squeeze
from erpo.grading.readings import Reading, read, read_part
from erpo.grading.units import canonical_unit, units_differ

ROUNDING = Fraction(1, 2_000_000)
"""Numbers written as decimals agree within half a unit of the sixth decimal place ..."""
RELATIVE_ROUNDING = Fraction(1, 20_000)
"""... and to a relative 1/20000, which matters below 0.01 only."""
PERCENT_MAY_BE_BARE_FROM = 1
"""`12%` also equals 12, `0.5%` never equals 0.5: up to 1 a bare number is a share."""


class Equality(NamedTuple):
    """A decision and the rule that made it."""

    equal: bool
    reason: str


Leaf = Callable[[str, str], bool]
"""Decides two expressions, given in normalised LaTeX."""


class Undecided(Exception):  # noqa: N818
    """The rules alone cannot tell."""


def undecided(gold: str, answer: str) -> bool:
    """The leaf of the cheap path: it never decides."""
    raise Undecided


def compare(gold: str, answer: str, leaf: Leaf = undecided) -> Equality:
    """Compare an answer with a gold answer, which may hold accepted alternatives.

    Raises:
        Undecided: from `leaf`, where the rules do not suffice.
    """
    outcome = Equality(False, "no gold")
    for accepted in gold.split(ALTERNATIVE):
        outcome = _compare_one(accepted.strip(), answer, leaf)
        if outcome.equal:
            return outcome
    return outcome


def _compare_one(gold: str, answer: str, leaf: Leaf) -> Equality:
    tolerant = TOLERANCE.match(gold)
    gold = tolerant["gold"] if tolerant else gold
    if squeeze(gold) == squeeze(answer):
        return Equality(True, "same text")
    outcome = Equality(False, "unreadable")
    for left, right in _reading_pairs(gold, answer):
        if tolerant and left.value is not None:
            return _compare_within(left, right, tolerant["size"], leaf)
        outcome = _compare(left, right, leaf)
        if outcome.equal:
            return outcome
    return outcome


def _compare_within(gold: Reading, answer: Reading, size: str, leaf: Leaf) -> Equality:
    """A number with a declared tolerance against a number, a named one, or an expression that comes to one."""
    while answer.items and answer.kind in ("assignment", "relation"):
        if _is_false(answer, leaf):
            return Equality(False, "false equation")
        answer = answer.items[-1]
    assert gold.value is not None
    if units_differ(gold.unit, answer.unit):
        return Equality(False, "different units")
    if answer.value is not None:
        is_close = any(abs(left - right) <= Fraction(size) for left, right in _percent_readings(gold, answer))
        return Equality(is_close, "declared tolerance")
    is_close = answer.kind == "expression" and leaf(rf"{gold.latex} \tolerance{{{size}}}", answer.latex)
    return Equality(is_close, "declared tolerance")


_LABEL = re.compile(
    r"\\text\{\s*\(?(?P<a>[A-J])[).:]\s*\}\s*(?P<x>\S.*)|\((?P<b>[A-J])\)\s+(?P<y>[^\s+*/^(-].*)|"
    r"\\text\{\s*\(?(?P<c>[A-J])[).:]\s*(?P<z>[^\s{}][^{}]*)\}"
)
_CHOICE = re.compile(
    r"(?:\\text\{\s*)?(?:(?:option|choice|answer)\s*:?)?\s*(?:\\text\{\s*)?"
    r"(?:(?P<bare>[A-J])\)?|\(\s*(?:\\text\{\s*)?(?P<round>[A-J])(?:\s*\})?\s*\))[.:]?(?:\s*\})?[.:]?",
    re.IGNORECASE,
)


def choice_letter(text: str) -> str:
    """The letter of a multiple-choice answer such as `C`, `(C)`, `text{(C)}`; empty where it is none."""
    found = _CHOICE.fullmatch(normalise(text))
    return (found["bare"] or found["round"]).upper() if found else ""


def _reading_pairs(gold: str, answer: str) -> list[tuple[Reading, Reading]]:
    """Every reading of one with every reading of the other; of `(C) 42` letter or content, whichever the other one is."""
    labels = [_LABEL.fullmatch(normalise(text)) for text in (gold, answer)]
    texts = [gold, answer]
    for side, found in enumerate(labels):
        if found is not None and labels[1 - side] is None:
            letter, content = (found[name] or found[other] or found[third] for name, other, third in ("abc", "xyz"))
            texts[side] = letter if choice_letter(texts[1 - side]) else content
    return [(left, right) for left in read(texts[0]) for right in read(texts[1])]


def _compare(gold: Reading, answer: Reading, leaf: Leaf) -> Equality:
    """Dispatch on the two kinds; the first rule that applies decides."""
    if gold.latex == answer.latex and gold.unit == answer.unit and gold.kind == answer.kind:
        return Equality(True, "same text")
    for rule in (_compare_choices, _compare_intervals, _compare_relations, _compare_words, _compare_collections, _compare_numbers):
        outcome = rule(gold, answer, leaf)
        if outcome is not None:
            return outcome
    in_radians = _in_radians(gold, answer)
    if in_radians is None and units_differ(gold.unit, answer.unit):
        return Equality(False, "different units")
    equal = (in_radians is not None and leaf(*in_radians)) or leaf(gold.latex, answer.latex)
    return Equality(equal, "equivalent" if equal else "not equivalent")


def _compare_choices(gold: Reading, answer: Reading, leaf: Leaf) -> Equality | None:
    left, right = _letters(gold), _letters(answer)
    return Equality(left == right, "choice letters") if left and right and len(left) == len(right) else None


def _letters(reading: Reading) -> str:
    """Letters of one or several choices in order (`C`; `A,C` and `AC`); empty for anything else."""
    if reading.kind == "list":
        letters = sorted(choice_letter(item.latex) for item in reading.items)
        return "".join(letters) if all(letters) else ""
    run = re.fullmatch(r"[A-J]{2,}", reading.latex)
    return (run[0] if "".join(sorted(run[0])) == run[0] else "") if run else choice_letter(reading.latex)


# --- equations and assignments -------------------------------------------------------------------------------------------


def _compare_relations(gold: Reading, answer: Reading, leaf: Leaf) -> Equality | None:
    kinds = {gold.kind, answer.kind}
    if not kinds & {"assignment", "relation"}:
        return None
    if gold.kind == answer.kind == "assignment" and gold.name == answer.name:
        return _compare(gold.items[0], answer.items[0], leaf)
    if kinds <= {"assignment", "relation"}:
        if gold.items and answer.items and not (_has_letters(gold) or _has_letters(answer)):
            return _compare(gold.items[0], answer.items[0], leaf)  # calculations: what they come to
        equal = leaf(gold.latex, answer.latex)
        return Equality(equal, "equivalent relations" if equal else "different relations")
    if gold.kind == "assignment":
        return _compare(gold.items[0], answer, leaf)
    if answer.items and _is_false(answer, leaf):
        return Equality(False, "false equation")
    if answer.kind == "assignment" or (answer.kind == "relation" and answer.items):
        return _compare(gold, answer.items[0], leaf)
    return Equality(False, "a value is not a relation")


_ARITHMETIC = re.compile(r"(?:\d|[-+*/^(){}!\s]|\\(?:frac|sqrt|cdot|times|div|binom)(?![a-zA-Z]))+")


def _is_false(equation: Reading, leaf: Leaf) -> bool:
    """Whether two sides side by side are plain arithmetic and differ: `3=5` does not state 5. Roundings are let pass."""
    sides = [side if _ARITHMETIC.fullmatch(side) else "" for side in split(equation.latex, {"="})]
    pairs = [(left, right) for left, right in pairwise(sides) if left and right]
    return not all(_compare(read_part(left), read_part(right), leaf).equal for left, right in pairs)


def _has_letters(reading: Reading) -> bool:
    return bool(re.search(r"[a-zA-Z]", re.sub(r"\\(?!alpha|beta|gamma|theta|lambda|mu|omega|phi)[a-zA-Z]+", "", reading.latex)))


def _compare_intervals(gold: Reading, answer: Reading, leaf: Leaf) -> Equality | None:
    """Unions, inequalities and intervals, each as the intervals it stands for."""
    if gold.kind == answer.kind and gold.kind in ("tuple", "assignment", "list"):
        return None
    if len({_unknown(gold), _unknown(answer)} - {""}) > 1:
        return None
    left, right = intervals(gold), intervals(answer)
    if not left or not right:
        return None
    if _in_any_order(left, right, leaf).equal:
        return Equality(True, "same intervals")
    equal = leaf(r" \cup ".join(part.latex for part in left), r" \cup ".join(part.latex for part in right))
    return Equality(equal, "same intervals" if equal else "different intervals")


def _unknown(reading: Reading) -> str:
    """The letter an inequality is about."""
    found = re.findall(r"(?<![a-zA-Z\\])[a-zA-Z]", reading.latex) if reading.kind in ("relation", "list", "assignment") else []
    return found[0].casefold() if found else ""


# --- words ---------------------------------------------------------------------------------------------------------------


def _compare_words(gold: Reading, answer: Reading, leaf: Leaf) -> Equality | None:
    if "words" not in (gold.kind, answer.kind):
        return None
    left, right = _as_word(gold), _as_word(answer)
    return Equality(left == right, "words" if left == right else "different words")


def _as_word(reading: Reading) -> str:
    """Letters of words; nothing where an operator shows that there are none."""
    if reading.kind == "words":
        return reading.name
    flat = squeeze(reading.latex).casefold()
    return "" if re.search(r"^[-+]|[*/^=<>|\\{}]", flat) else re.sub(r"[^\w:+]", "", flat)


# --- lists, tuples, sets, matrices ---------------------------------------------------------------------------------------


def _compare_collections(gold: Reading, answer: Reading, leaf: Leaf) -> Equality | None:
    kinds = {gold.kind, answer.kind}
    if not kinds & {"list", "tuple", "set", "matrix"}:
        return None
    if "expression" in kinds and "list" not in kinds and any(_SET_OPERATION.search(side.latex) for side in (gold, answer)):
        return None
    if "matrix" in kinds:
        return _compare_matrices(gold, answer, leaf)
    if kinds & {"number", "expression", "words"}:
        left, right = _distinct(gold), _distinct(answer)
        is_single = "tuple" not in kinds and len(left) == len(right) == 1
        return _compare(left[0], right[0], leaf) if is_single else Equality(False, "one value is not several")
    if "list" in kinds and any(side.brackets not in ("", "()") and len(side.items) == 2 for side in (gold, answer)):
        return Equality(False, "an interval is not two values")
    if "tuple" in kinds:
        return _compare_tuples(gold, answer, leaf)
    if "set" not in kinds and _order_matters(gold, answer):
        return _in_order(gold.items, answer.items, leaf)
    return _in_any_order(_distinct(gold), _distinct(answer), leaf)


_SET_OPERATION = re.compile(r"\\(?:cup|cap|setminus|backslash|mathbb|emptyset|times)(?![a-zA-Z])")


def _compare_tuples(gold: Reading, answer: Reading, leaf: Leaf) -> Equality:
    if "set" in (gold.kind, answer.kind):
        return Equality(False, "a tuple is not a set")
    # brackets make intervals; with three entries or more they only group
    is_long = max(len(gold.items), len(answer.items)) > 2
    if gold.kind == answer.kind and gold.brackets != answer.brackets and not is_long:
        return Equality(False, "different brackets")
    return _in_order(gold.items, answer.items, leaf)


def _distinct(reading: Reading) -> tuple[Reading, ...]:
    """Members of a set, each once; a scalar is a set of one. In a list without braces every value counts."""
    if reading.kind == "list":
        return reading.items
    if reading.kind != "set":
        return (reading,)
    return tuple({squeeze(item.latex): item for item in reading.items}.values())


def _order_matters(gold: Reading, answer: Reading) -> bool:
    """Values given by name on one side only, and lists of words (rankings), are compared in order."""
    named = [all(item.kind == "assignment" for item in side.items) for side in (gold, answer)]
    distinct = len({item.name for side in (gold, answer) for item in side.items if item.kind == "assignment"}) > 1
    items = [*gold.items, *answer.items]
    words = all(len(item.name) > 1 if item.kind == "words" else re.fullmatch(r"[a-zA-Z]{2,}", item.latex) for item in items)
    return (named[0] != named[1] and distinct) or (words and any(item.kind == "words" for item in items))


def _in_order(gold: tuple[Reading, ...], answer: tuple[Reading, ...], leaf: Leaf) -> Equality:
    if len(gold) != len(answer):
        return Equality(False, f"{len(answer)} values instead of {len(gold)}")
    pairs = sorted(zip(gold, answer, strict=True), key=lambda pair: {pair[0].kind, pair[1].kind} != {"number"})
    equal = all(_compare(left, right, leaf).equal for left, right in pairs)
    return Equality(equal, "same values in order" if equal else "different values")


def _in_any_order(gold: tuple[Reading, ...], answer: tuple[Reading, ...], leaf: Leaf) -> Equality:
    if len(gold) != len(answer):
        return Equality(False, f"{len(answer)} values instead of {len(gold)}")
    missing = Counter(squeeze(item.latex) for item in gold)
    left_over = []
    for item in answer:
        if missing[squeeze(item.latex)] > 0:
            missing[squeeze(item.latex)] -= 1
        else:
            left_over.append(item)
    wanted = []
    for item in gold:
        if missing[squeeze(item.latex)] > 0:
            missing[squeeze(item.latex)] -= 1
            wanted.append(item)
    equal = _match(wanted, left_over, leaf)
    return Equality(equal, "same values in any order" if equal else "different values")


def _match(wanted: list[Reading], offered: list[Reading], leaf: Leaf) -> bool:
    """Pair every wanted value with an offered one of its own."""
    rest = list(offered)
    for value in wanted:
        found = next((item for item in rest if _compare(value, item, leaf).equal), None)
        if found is None:
            return False
        rest.remove(found)
    return True


_MATRIX_PRODUCT = re.compile(r"\\begin\{(\w*matrix)\}(?:(?!\\(?:begin|end)\{).)*\\end\{\1\}", re.DOTALL)


def _compare_matrices(gold: Reading, answer: Reading, leaf: Leaf) -> Equality:
    if gold.kind == answer.kind:
        if len(gold.items) != len(answer.items):
            return Equality(False, "different shapes")
        equal = all(_in_order(left.items, right.items, leaf).equal for left, right in zip(gold.items, answer.items, strict=True))
        return Equality(equal, "same matrices" if equal else "different matrices")
    if "expression" in (gold.kind, answer.kind) and all(_MATRIX_PRODUCT.search(side.latex) for side in (gold, answer)):
        equal = leaf(gold.latex, answer.latex)  # `\frac{1}{2}` before a matrix, a transpose, a product
        return Equality(equal, "same matrices" if equal else "different matrices")
    left, right = _vector(gold), _vector(answer)
    if left and right:
        return _in_order(left, right, leaf)
    return Equality(False, "a matrix is neither a value nor a set")


def _vector(reading: Reading) -> tuple[Reading, ...]:
    """Entries of a tuple in parentheses, of a single column or of a single row; empty for anything else."""
    if reading.kind == "tuple":
        return reading.items if reading.brackets in ("()", "[]") else ()
    if reading.kind != "matrix":
        return ()
    if len(reading.items) == 1:
        return reading.items[0].items
    return tuple(row.items[0] for row in reading.items) if all(len(row.items) == 1 for row in reading.items) else ()


# --- numbers -------------------------------------------------------------------------------------------------------------


def _compare_numbers(gold: Reading, answer: Reading, leaf: Leaf) -> Equality | None:
    infinite = {gold.latex, answer.latex} & {r"\infty", r"-\infty"}
    if infinite and "number" in (gold.kind, answer.kind):
        return Equality(False, "infinite and finite")
    if len(infinite) == 2:
        return Equality(False, "opposite infinities")
    if gold.value is None or answer.value is None:
        if "number" in (gold.kind, answer.kind) and any(_UNKNOWN.search(_plain(side)) for side in (gold, answer)):
            return Equality(False, "a number has no unknowns")
        is_hedged = 0 in (gold.value, answer.value) and any(_WORDS.search(side.latex) for side in (gold, answer))
        return Equality(False, "words left over") if is_hedged else None  # 0 times any word is 0 to the parser
    percent_and_unit = gold.is_percent != answer.is_percent and canonical_unit(gold.unit + answer.unit)
    if percent_and_unit or units_differ(gold.unit, answer.unit):
        return Equality(False, "different units")
    if "clock" in (gold.base, answer.base) and not {canonical_unit(gold.unit), canonical_unit(answer.unit)} <= {"am", "pm"}:
        is_time = gold.base == answer.base and (gold.value == answer.value or bool(gold.unit or answer.unit))
        return Equality(gold.value == answer.value, "times of day") if is_time else None
    if gold.base and answer.base and gold.base != answer.base:
        return Equality(False, "different bases")
    equal = any(_agree(left, right, gold, answer) for left, right in _percent_readings(gold, answer))
    return Equality(equal, "equal numbers" if equal else "different numbers")


_UNKNOWN = re.compile(
    r"(?<![a-zA-Z\\])(?!(?:a?(?:rc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|lg|log|exp|sqrt|max|min|gcd|lcm|mod|binom|[tdc]?frac|det|cdot|times|"
    r"inf(?:ty|inity)?|choose|deg|floor|ceil|abs)(?![a-zA-Z]))[a-zA-Z]+|\\(?:alpha|beta|gamma|theta|lambda|mu|omega|phi)(?![a-zA-Z])"
)
"""A letter or a run of them that is no function written without its backslash."""
_WORDS = re.compile(r"\\text\{[^{}]*[a-zA-Z]{2}")
_BINDER = re.compile(r"\\(?:sum|prod|i{1,3}nt|lim)(?![a-zA-Z])")
"""What binds a letter, so that it is no unknown."""


def _plain(reading: Reading) -> str:
    """An expression without the letters that are no unknowns; empty for anything else."""
    if reading.kind != "expression" or _BINDER.search(reading.latex):
        return ""
    return re.sub(r"\\text\{[^{}]*\}|\\begin\{\w+\}|\\end\{\w+\}|(?<![a-zA-Z\\])[eEiI](?![a-zA-Z])", " ", reading.latex)


def _percent_readings(gold: Reading, answer: Reading) -> list[tuple[Fraction, Fraction]]:
    """The value pairs of which one must agree: a percent sign on one side is a hundredth, or (above 1) may be left out."""
    assert gold.value is not None
    assert answer.value is not None
    if gold.is_percent == answer.is_percent:
        return [(gold.value, answer.value)]
    scaled = [(gold.value / 100, answer.value)] if gold.is_percent else [(gold.value, answer.value / 100)]
    percentage = gold.value if gold.is_percent else answer.value
    return [*scaled, (gold.value, answer.value)] if abs(percentage) > PERCENT_MAY_BE_BARE_FROM else scaled


def _agree(left: Fraction, right: Fraction, gold: Reading, answer: Reading) -> bool:
    return numbers_agree(left, right, is_rounded=gold.is_decimal or answer.is_decimal)


def numbers_agree(left: Fraction, right: Fraction, *, is_rounded: bool) -> bool:
    """Exact equality, or agreement within the rounding of decimals; an integer is always exact."""
    if left == right:
        return True
    if not is_rounded or left.denominator == 1 or right.denominator == 1:
        return False
    gap = abs(left - right)
    return gap <= ROUNDING and gap <= RELATIVE_ROUNDING * max(abs(left), abs(right))


def _in_radians(gold: Reading, answer: Reading) -> tuple[str, str] | None:
    r"""`45^\circ` against `\frac{\pi}{4}`: both in radians where one side is in degrees and the other written with pi."""
    for angle, other in ((gold, answer), (answer, gold)):
        in_degrees = angle.value is not None and canonical_unit(angle.unit) == "degree"
        if in_degrees and canonical_unit(other.unit) in ("", "radian") and r"\pi" in other.latex:
            assert angle.value is not None
            return rf"\frac{{{angle.value.numerator}\pi}}{{{180 * angle.value.denominator}}}", other.latex
    return None
