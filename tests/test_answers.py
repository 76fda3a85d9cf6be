"""Pure parts of the grader: boxes, golds, limits, readings, units, intervals, equality, the second opinion."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from erpo.grading.answers import Box, excess, extract_answer, gold_problem, is_balanced
from erpo.grading.equality import Undecided, choice_letter, compare, numbers_agree
from erpo.grading.intervals import intervals
from erpo.grading.latex import split, squeeze
from erpo.grading.readings import read
from erpo.grading.second_opinion import second_opinion
from erpo.grading.units import canonical_unit, units_differ

PIECES = [
    r"\frac",
    r"\frac{1}{2}",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    ",",
    "1",
    "0",
    "7.5",
    "1,234",
    "x",
    "ab",
    " ",
    r"\pm",
    r"\cup",
    "=",
    "<",
    r"\{",
    r"\}",
    "^",
    "_",
    "!",
    "%",
    r"\%",
    "$",
    ".",
    "-",
    "+",
    r"\sqrt",
    r"\text{ cm}",
    r"\text{",
    "e5",
    r"\times 10^{3}",
    "/",
    ":",
    r"\infty",
    r"\circ",
    "^\\circ",
    r"\overline{3}",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    "&",
    r"\\",
    "(A) ",
    " and ",
    r"\in ",
    "'",
    r"\boxed{",
    "π",
    "³",
    "\n",
    " p.m.",
    r"\tolerance{0.1}",
    " ||| ",
    r"\le ",
    "|",
]
anything = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(max_examples=600, deadline=None)
@given(anything, anything)
def test_no_text_breaks_the_pure_parts(gold, answer):
    extract_answer(answer)
    extract_answer(rf"\boxed{{{answer}}}")
    gold_problem(gold)
    excess(answer)
    assert second_opinion(gold, answer) in (True, False, None)
    try:
        decided = compare(gold, answer)
    except Undecided:
        return
    assert isinstance(decided.equal, bool)
    assert decided.reason


@settings(max_examples=400, deadline=None)
@given(anything)
def test_every_text_equals_itself(text):
    if " ||| " not in text and "tolerance" not in text:
        assert compare(text, text).equal


@settings(max_examples=300, deadline=None)
@given(
    st.fractions(min_value=-1000, max_value=1000, max_denominator=400),
    st.fractions(min_value=-1000, max_value=1000, max_denominator=400),
)
def test_fractions_are_equal_exactly_when_their_values_are(one, other):
    text = [rf"\frac{{{value.numerator}}}{{{value.denominator}}}" for value in (one, other)]
    assert compare(*text).equal is (one == other)
    assert compare(text[0], f"{one.numerator * 3}/{one.denominator * 3}").equal


@settings(max_examples=300, deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_integers_are_compared_exactly_in_every_spelling(one, other):
    assert compare(str(one), str(other)).equal is (one == other)
    for spelling in (f"{one:,}", f"{one:,}".replace(",", "{,}"), f"{one}.0", f"{one}.", f"x = {one}", rf"{one}\text{{ cm}}"):
        assert compare(str(one), spelling).equal, spelling
    assert second_opinion(str(one), str(other)) is (one == other)


def test_a_changed_digit_is_never_the_same_answer(data_dir):
    decided = 0
    for name in ("aime_2024", "aime_2025", "amc", "math500", "minerva", "olympiad_bench"):
        for line in (data_dir / f"eval_{name}.jsonl").read_text().splitlines():
            gold = json.loads(line)["answer"]
            for position, character in enumerate(gold):
                if not character.isdigit():
                    continue
                changed = f"{gold[:position]}{(int(character) + 1 + position) % 10}{gold[position + 1 :]}"
                try:
                    assert changed == gold or not compare(gold, changed).equal, (gold, changed)
                except Undecided:
                    continue
                decided += 1
    assert decided > 3000


# --- boxes and golds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "box"),
    [
        (r"\boxed{1}", Box("1")),
        (r"\boxed{1} \boxed{2}", Box("2")),
        (r"\boxed{a\{b}", Box(r"a\{b")),
        (r"\boxed{\text{a}}", Box(r"\text{a}")),
        (r"\boxed{1", Box(None, "unterminated")),
        (r"\boxed{1}\boxed{", Box(None, "unterminated")),
        (r"\boxed{1} \boxed", Box(None, "unterminated")),
        (r"\boxed{1} \bo", Box(None, "unterminated")),
        (r"\boxed{1} with \boxed braces", Box("1")),
        (r"\boxed{}", Box(None, "empty")),
        (r"\boxed{$$}", Box(None, "empty")),
        (r"\boxed{{}}", Box(None, "empty")),
        (r"\boxed{0}", Box("0")),
        ("", Box(None, "no box")),
        (r"\fbox{1}", Box(None, "no box")),
        (r"} \boxed{1} }", Box("1")),
        (r"\frac{1 \boxed{2}", Box("2")),
        (r"\boxed{1 \boxed{2} 3} 4", Box("1 2 3")),
    ],
)
def test_boxes(response, box):
    assert extract_answer(response) == box


@pytest.mark.parametrize("text", ["", "{}", "{a{b}}", r"\{", "[0,1)", r"a\\{b}"])
def test_balanced(text):
    assert is_balanced(text)


@pytest.mark.parametrize("text", ["{", "}{", "(1", r"\frac{1}{2", "1]"])
def test_unbalanced(text):
    assert not is_balanced(text)


@pytest.mark.parametrize(
    ("answer", "limit"),
    [
        ("1" * 1001, "longer than 1000 characters"),
        ("{" * 41 + "}" * 41, "nested deeper than 40"),
        ("9^{9^9}", "exponent too large"),
        ("9^9^9", "exponent too large"),
        ("9**9**9", "exponent too large"),
        (r"\left(9^{9}\right)^{999999}", "exponent too large"),
        ("2^{2^{10}}", ""),
        ("2^{1009}", ""),
        ("(30!)!", "factorial too large"),
        ("1234567!", "factorial too large"),
        (r"\frac{100!}{2^{50}}", ""),
        ("x^{2^n}", ""),
    ],
)
def test_limits_before_parsing(answer, limit):
    assert excess(answer) == limit


# --- text --------------------------------------------------------------------------------------------------------------------


def test_squeezed_text_keeps_what_matters():
    assert squeeze(r"\left( \dfrac12 ,\; x^{2} \right)") == squeeze(r"(\frac{1}{2},x^2)")
    assert squeeze("1 1/2") != squeeze("11/2")
    assert squeeze(r"\alpha b") != squeeze(r"\alphab")
    assert squeeze(r"\sqrt[3]4") == squeeze(r"\sqrt[3]{4}")
    assert squeeze("x^{12}") != squeeze("x^1 2")


def test_split_respects_brackets():
    assert split(r"(1,2), \{3,4\}, f(x,y), \begin{pmatrix}1,2\end{pmatrix}", {","}) == [
        "(1,2)",
        r"\{3,4\}",
        "f(x,y)",
        r"\begin{pmatrix}1,2\end{pmatrix}",
    ]


# --- readings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("007", 7),
        ("-3.50", Fraction(-7, 2)),
        (".25", Fraction(1, 4)),
        ("1,234,567", 1234567),
        (r"3\frac18", Fraction(25, 8)),
        ("-1 1/2", Fraction(-3, 2)),
        ("4.5e3", 4500),
        (r"2 \times 10^{-2}", Fraction(1, 50)),
        ("10^{-3}", Fraction(1, 1000)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"-\frac{6}{4}", Fraction(-3, 2)),
        ("6/4", Fraction(3, 2)),
        ("(5)", 5),
    ],
)
def test_values_of_literals(text, value):
    assert read(text)[0].kind == "number"
    assert read(text)[0].value == value


@pytest.mark.parametrize("text", [r"\frac{1}{0}", "1e99999", "x", r"\sqrt{4}", "2^3", "1.2.3", "--1"])
def test_what_is_no_literal(text):
    assert read(text)[0].value is None


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("1,234", ["number", "list"]),
        ("1, 234", ["list"]),
        ("(1,234)", ["tuple"]),
        (r"\{1,2\}", ["set"]),
        ("x=5", ["assignment"]),
        ("x+y=5", ["relation"]),
        ("x>2", ["relation"]),
        (r"\text{east}", ["words"]),
        (r"1\pm\sqrt2", ["list"]),
        ("p - q", ["expression"]),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", ["matrix"]),
        (r"x\in(1,2]", ["assignment"]),
        (r"(1,2)\cup(3,4)", ["expression"]),
    ],
)
def test_kinds(text, kinds):
    assert [reading.kind for reading in read(text)] == kinds


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("x>2", [r"(2,\infty)"]),
        (r"2 \le x", [r"[2,\infty)"]),
        (r"1 \le x < 5", ["[1,5)"]),
        (r"5 \ge x > -1", ["(-1,5]"]),
        ("x>2, x<5", ["(2,5)"]),
        ("x<1, x>3", [r"(-\infty,1)", r"(3,\infty)"]),
        (r"x \ne 3", [r"(-\infty,3)", r"(3,\infty)"]),
        (r"(0,9)\cup[9,36)", ["(0,9)", "[9,36)"]),
        ("x=2", []),
        ("x<y", []),
        ("5", []),
    ],
)
def test_intervals(text, spans):
    assert [span.latex for span in intervals(read(text)[0])] == spans


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("cm", "cm"),
        (r"\text{ centimeters}", "cm"),
        (r"\text{ cm}^2", "cm^2"),
        (r"\text{ square feet}", "ft^2"),
        (r"\text{ km/h}", "hour^-1 km"),
        ("mph", "hour^-1 mi"),
        (r"\text{ miles per hour}", "hour^-1 mi"),
        (r"\text{ p.m.}", "pm"),
        (r"\text{ apples}", ""),
        (r"\text{ degrees}", "degree"),
        (r"\text{ cubic inches}", "in^3"),
    ],
)
def test_units(text, unit):
    assert canonical_unit(text) == unit.replace("hour", canonical_unit("hour"))


def test_units_differ_only_when_both_are_known():
    assert units_differ("cm", "m")
    assert units_differ(r"\text{cm}^2", "cm")
    assert not units_differ("cm", "")
    assert not units_differ("cm", "apples")
    assert not units_differ("square units", r"\text{ cm}^2")


@pytest.mark.parametrize(
    ("text", "letter"), [("C", "C"), ("(C)", "C"), (r"\text{(C)}", "C"), ("Option c", "C"), ("CD", ""), ("7", "")]
)
def test_choice_letters(text, letter):
    assert choice_letter(text) == letter


# --- numbers that may be rounded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        (Fraction(1, 3), Fraction("0.333333"), True),
        (Fraction(1, 3), Fraction("0.33333"), False),
        (Fraction(10), Fraction("10.0000001"), False),
        (Fraction("0.0000001"), Fraction("0.0000002"), False),
        (Fraction("2.5"), Fraction("2.5000005"), True),
        (Fraction("2.5"), Fraction("2.5000006"), False),
    ],
)
def test_rounding(one, other, agree):
    assert numbers_agree(one, other, is_rounded=True) is agree
    assert numbers_agree(other, one, is_rounded=True) is agree
    assert not numbers_agree(one, other, is_rounded=False)


# --- second opinion ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gold", "answer", "opinion"),
    [
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"2\sqrt{3}", r"\sqrt{13}", False),
        ("x^2-1", "(x-1)(x+1)", True),
        ("x^2-1", "(x-1)(x-1)", False),
        (r"\frac{5}{8}", "0.625", True),
        (r"12\%", "0.12", True),
        (r"12\%", "1200", False),
        (r"0.5", r"0.5\%", False),
        ("4.5e33", r"4.5\times 10^{33}", True),
        (r"1\frac{4}{5}", "1.8", True),
        (r"\binom{10}{3}", "120", True),
        (r"\frac{1}{2},3", "3,0.5", True),
        ("(1,2)", "(2,1)", False),
        (r"\{1,2\}", r"\{2,1\}", True),
        (r"18\text{ cm}", "18", True),
        ("90^\\circ", "90", True),
        (r"\ln 2 + i\frac{\pi}{3}", r"\frac{i\pi}{3} + \ln 2", True),
        (r"\sin^2 x", r"1-\cos^2 x", True),
        ("x>2", r"(2,\infty)", None),
        (r"\text{even}", r"\text{odd}", None),
        (r"9^{9^{9}}", "7", None),
    ],
)
def test_second_opinion(gold, answer, opinion):
    assert second_opinion(gold, answer) is opinion
    assert second_opinion(answer, gold) is opinion
