"""Synthetic math problems with short worked solutions: seeded, small vocabulary, whole numbers from 0 to 99.

A problem is a *draft*: a text and the arithmetic steps that solve it. Every problem belongs to one split by a hash of its
arithmetic, so problems of different splits differ in their numbers, not only in their wording, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple

from erpo.config import SyntheticData
from erpo.records import derive_seed

Split = Literal["warm", "train", "test"]

LARGEST = 99
"""Every number of a problem, of its steps and its answer lies between 0 and this: one token each."""

SPLIT_SHARES: dict[str, int] = {"warm": 50, "train": 35, "test": 15}
"""Percent of all problems in each split."""

_FRUITLESS_TRIES = 20_000
"""Drafts in a row without a new problem after which a family and level count as used up."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem, its true answer and a worked solution (with a noisy annotator the solution may end in another answer)."""

    problem: str
    answer: str
    solution: str
    level: int
    family: str


class Ref(NamedTuple):
    """The result of an earlier step."""

    step: int


Operand = int | Ref


class Step(NamedTuple):
    """One line of arithmetic."""

    left: Operand
    op: str
    right: Operand


class Draft(NamedTuple):
    """A problem before its solution is written out."""

    text: str
    steps: list[Step]


# --- phrases: the vocabulary is read off these ---------------------------------------------------------------------------

_CHAIN_STARTS = ("Take {}", "Start with {}", "Begin at {}")
_CHAIN_OPS = {"+": ("add {}", "plus {}"), "-": ("subtract {}", "minus {}"), "*": ("times {}", "multiply by {}")}
_NAMES = ("Anna", "Ben", "Carl", "Dora", "Emil", "Fay")
_THINGS = ("apples", "books", "coins", "stamps", "pens", "shells")
_EVENTS = {"+": ("finds {}", "buys {}", "wins {}"), "-": ("loses {}", "sells {}", "gives away {}")}
_MULTIPLES = {2: "doubles them", 3: "triples them"}
_STORY_STARTS = ("{} has {} {}", "{} owns {} {}")
_STORY_ENDS = ("How many {} now?", "How many {} are left?")
_VARIABLES = ("x", "y", "n", "t")
_LINEAR = ("Solve {}.", "Find {} if {}.", "If {}, what is {}?")
_MODULAR = ("Find {} mod {}.", "What is {} mod {}?", "Remainder of {} divided by {}?")
_SEQUENCE = ("What comes next: {}?", "Next number: {}?")
_SEQUENCE_SECOND = ("What comes second: {}?", "Second next number: {}?")
_SIGNS = "+ - * / = ( ) . , ? : mod <think> </think> \\boxed{ }"


def vocabulary() -> list[str]:
    """Every word, number and sign that a problem or solution can contain."""
    phrases = (
        *_CHAIN_STARTS,
        *(phrase for group in (_CHAIN_OPS, _EVENTS) for phrases in group.values() for phrase in phrases),
        *(*_NAMES, *_THINGS, *_MULTIPLES.values(), *_STORY_STARTS, *_STORY_ENDS, *_VARIABLES),
        *(*_LINEAR, *_MODULAR, *_SEQUENCE, *_SEQUENCE_SECOND),
    )
    words = re.findall(r"[A-Za-z]+", " ".join(phrases))
    return list(dict.fromkeys([*_SIGNS.split(), *words, *(str(number) for number in range(LARGEST + 1))]))


# --- arithmetic ----------------------------------------------------------------------------------------------------------


def _apply(op: str, left: int, right: int) -> int:
    if op == "+":
        return left + right
    if op == "-":
        return left - right
    if op == "*":
        return left * right
    # Only a noisy annotator meets a division that does not come out or a zero divisor.
    return left % max(right, 1) if op == "mod" else left // max(right, 1)


def _work_out(steps: Sequence[Step], noise: float = 0.0, rng: Random | None = None) -> tuple[list[str], int]:
    """Lines and result. With noise each result is off by 1 or 10 with that probability, and later steps go on from it."""
    results: list[int] = []
    lines = []
    for step in steps:
        left, right = (results[x.step] if isinstance(x, Ref) else x for x in (step.left, step.right))
        result = _apply(step.op, left, right)
        if rng is not None:
            result = min(max(result, 0), LARGEST)
            if rng.random() < noise:
                result = _slip(result, rng)
        results.append(result)
        lines.append(f"{left} {step.op} {right} = {result}")
    return lines, results[-1]


def _slip(result: int, rng: Random) -> int:
    off = [result + error for error in (-10, -1, 1, 10) if 0 <= result + error <= LARGEST]
    return rng.choice(off)


def _solution(lines: Sequence[str], answer: int) -> str:
    return f"<think> {' '.join(line + '.' for line in lines)} </think> \\boxed{{{answer}}}"


# --- families ------------------------------------------------------------------------------------------------------------


def _largest_addend(level: int) -> int:
    return 2 + 2 * level


def _next_operation(rng: Random, value: int, level: int, largest_factor: int) -> tuple[str, int]:
    """An operation on `value` that stays within 0 and 99; addition and subtraction are the more frequent."""
    most = _largest_addend(level)
    choices = []
    if value < LARGEST:
        choices += ["+"] * 2
    if value > 1:
        choices += ["-"] * 2
    if 0 < value <= LARGEST // 2:
        choices.append("*")
    op = rng.choice(choices)
    if op == "+":
        return op, rng.randint(1, min(most, LARGEST - value))
    if op == "-":
        return op, rng.randint(1, min(most, value - 1))
    return op, rng.randint(2, min(largest_factor, LARGEST // value))


def _chain_steps(
    rng: Random, first: Operand, value: int, count: int, level: int, offset: int, largest_factor: int = 5
) -> list[Step]:
    """`count` operations, each on the result of the one before; the first on `first`, whose value is `value`."""
    steps: list[Step] = []
    for index in range(count):
        op, operand = _next_operation(rng, value, level, largest_factor)
        steps.append(Step(first if index == 0 else Ref(offset + index - 1), op, operand))
        value = _apply(op, value, operand)
    return steps


def _spell_chain(rng: Random, steps: Sequence[Step]) -> str:
    return ", ".join(rng.choice(_CHAIN_OPS[step.op]).format(step.right) for step in steps)


def _chain(rng: Random, level: int) -> Draft:
    start = rng.randint(2, 10 * level + 10)
    steps = _chain_steps(rng, start, start, level + 1, level, 0, largest_factor=3)
    return Draft(f"{rng.choice(_CHAIN_STARTS).format(start)}, {_spell_chain(rng, steps)}.", steps)


def _story(rng: Random, level: int) -> Draft:
    start = rng.randint(5, 10 * level + 20)
    steps = _chain_steps(rng, start, start, level, level, 0, largest_factor=max(_MULTIPLES))
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    events = [_MULTIPLES[s.right] if s.op == "*" else rng.choice(_EVENTS[s.op]).format(s.right) for s in steps]  # type: ignore[index]
    opening = rng.choice(_STORY_STARTS).format(name, start, thing)
    return Draft(f"{opening}, {', '.join(events)}. {rng.choice(_STORY_ENDS).format(thing)}", steps)


def _linear(rng: Random, level: int) -> Draft:
    variable = rng.choice(_VARIABLES)
    equation, steps = _equation(rng, level, variable)
    phrase = rng.choice(_LINEAR)
    order = {_LINEAR[0]: (equation,), _LINEAR[1]: (variable, equation), _LINEAR[2]: (equation, variable)}[phrase]
    return Draft(phrase.format(*order), steps)


def _equation(rng: Random, level: int, variable: str) -> tuple[str, list[Step]]:
    """An equation with one whole solution, and the steps to it."""
    build = (_shifted, _scaled, _scaled, _both_sides, _bracket)[level - 1]
    return build(rng, level, variable)


def _shifted(rng: Random, level: int, variable: str) -> tuple[str, list[Step]]:
    root = rng.randint(1, 60)
    shift = rng.randint(1, min(30, LARGEST - root))
    if rng.random() < 0.5 and shift <= root:
        return f"{variable} - {shift} = {root - shift}", [Step(root - shift, "+", shift)]
    return f"{variable} + {shift} = {root + shift}", [Step(root + shift, "-", shift)]


def _scaled(rng: Random, level: int, variable: str) -> tuple[str, list[Step]]:
    factor = rng.randint(2, 3 * level - 1)
    root = rng.randint(2, min(20, (LARGEST - 1) // factor))
    product = factor * root
    shift = rng.randint(1, min(30, LARGEST - product))
    if rng.random() < 0.5 and shift <= product:
        equation, undo = f"{factor} {variable} - {shift} = {product - shift}", Step(product - shift, "+", shift)
    else:
        equation, undo = f"{factor} {variable} + {shift} = {product + shift}", Step(product + shift, "-", shift)
    return equation, [undo, Step(Ref(0), "/", factor)]


def _both_sides(rng: Random, level: int, variable: str) -> tuple[str, list[Step]]:
    small, more = rng.randint(2, 6), rng.randint(2, 5)
    large = small + more
    root = rng.randint(2, (LARGEST - 1) // large)
    left = rng.randint(1, LARGEST - large * root)
    right = left + more * root
    equation = f"{large} {variable} + {left} = {small} {variable} + {right}"
    return equation, [Step(large, "-", small), Step(right, "-", left), Step(Ref(1), "/", Ref(0))]


def _bracket(rng: Random, level: int, variable: str) -> tuple[str, list[Step]]:
    small, more = rng.randint(2, 4), rng.randint(2, 4)
    large = small + more
    root = rng.randint(2, LARGEST // large - 1)
    inside = rng.randint(1, LARGEST // large - root)
    right = large * inside + more * root
    equation = f"{large} ({variable} + {inside}) = {small} {variable} + {right}"
    steps = [Step(large, "*", inside), Step(right, "-", Ref(0)), Step(large, "-", small), Step(Ref(1), "/", Ref(2))]
    return equation, steps


def _modular(rng: Random, level: int) -> Draft:
    modulus = rng.randint(3, 12)
    expression, steps = _residue(rng, level, modulus)
    return Draft(rng.choice(_MODULAR).format(expression, modulus), steps)


def _residue(rng: Random, level: int, modulus: int) -> tuple[str, list[Step]]:
    if level == 1:
        value = rng.randint(10, LARGEST)
        return str(value), [Step(value, "mod", modulus)]
    if level == 2:
        first, second = rng.randint(10, 60), rng.randint(2, 30)
        return f"({first} + {second})", [Step(first, "+", second), Step(Ref(0), "mod", modulus)]
    first = rng.randint(3, 24)
    factor = rng.randint(2, min(9, (LARGEST - 1) // first))
    if level == 3:
        return f"({first} * {factor})", [Step(first, "*", factor), Step(Ref(0), "mod", modulus)]
    if level == 4:
        added = rng.randint(1, min(30, LARGEST - first * factor))
        steps = [Step(first, "*", factor), Step(Ref(0), "+", added), Step(Ref(1), "mod", modulus)]
        return f"({first} * {factor} + {added})", steps
    first, second, factor = rng.randint(10, 60), rng.randint(2, 30), rng.randint(2, 8)
    steps = [Step(first, "+", second), Step(Ref(0), "mod", modulus), Step(Ref(1), "*", factor), Step(Ref(2), "mod", modulus)]
    return f"(({first} + {second}) * {factor})", steps


def _sequence(rng: Random, level: int) -> Draft:
    """Constant differences (levels 1 to 3: up, down, second next), growing differences (4, and 5 second next)."""
    growth = 0 if level <= 3 else rng.randint(1, 3)
    count = 3 if level <= 2 else 4
    difference = rng.randint(2, 9 if growth == 0 else 5)
    differences = [difference + growth * index for index in range(count + 1)]
    total = sum(differences)
    start = rng.randint(1, LARGEST - total)
    terms = [start]
    for gap in differences:
        terms.append(terms[-1] + gap)
    if level == 2:
        terms = [LARGEST + 1 - term for term in terms]
    second = level in (3, 5)
    phrase = rng.choice(_SEQUENCE_SECOND if second else _SEQUENCE)
    steps = _growing_steps(terms, second) if growth else _constant_steps(terms, down=level == 2, count=count, second=second)
    return Draft(phrase.format(", ".join(str(term) for term in terms[:count])), steps)


def _constant_steps(terms: Sequence[int], down: bool, count: int, second: bool) -> list[Step]:
    difference = Step(terms[0], "-", terms[1]) if down else Step(terms[1], "-", terms[0])
    steps = [difference, Step(terms[count - 1], "-" if down else "+", Ref(0))]
    return [*steps, Step(Ref(1), "+", Ref(0))] if second else steps


def _growing_steps(terms: Sequence[int], second: bool) -> list[Step]:
    """Two last differences, their growth, the next difference, the next term (and once more)."""
    steps = [
        Step(terms[2], "-", terms[1]),
        Step(terms[3], "-", terms[2]),
        Step(Ref(1), "-", Ref(0)),
        Step(Ref(1), "+", Ref(2)),
        Step(terms[3], "+", Ref(3)),
    ]
    return [*steps, Step(Ref(3), "+", Ref(2)), Step(Ref(4), "+", Ref(5))] if second else steps


def _combined(rng: Random, level: int) -> Draft:
    """An equation whose solution starts a chain: words that other families use, put together in a new way."""
    variable = rng.choice(_VARIABLES)
    equation, steps = _equation(rng, min(level, 3), variable)
    _, root = _work_out(steps)
    chain = _chain_steps(rng, Ref(len(steps) - 1), root, 1 + level // 2, level, len(steps))
    return Draft(f"Solve {equation}. {_CHAIN_STARTS[0].format(variable)}, {_spell_chain(rng, chain)}.", [*steps, *chain])


FAMILIES: dict[str, Callable[[Random, int], Draft]] = {
    "chain": _chain,
    "story": _story,
    "linear": _linear,
    "modular": _modular,
    "sequence": _sequence,
    "combined": _combined,
}
"""Problem families by name. `combined` and `sequence` are meant as out-of-distribution tests."""


# --- sets ----------------------------------------------------------------------------------------------------------------


def split_of(lines: Sequence[str]) -> Split:
    """The split of a problem with these lines of arithmetic."""
    share = int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest(), "big") % 100
    for name, percent in SPLIT_SHARES.items():
        if share < percent:
            return name  # type: ignore[return-value]
        share -= percent
    raise AssertionError("SPLIT_SHARES must add up to 100")


def generate(entry: SyntheticData, split: Split, noise: float = 0.0) -> list[Problem]:
    """`entry.size` different problems of one split, families and levels in equal shares, in random order.

    Args:
        entry: families, levels, size and seed.
        split: `warm` (warm start), `train` (RL) or `test` (benchmarks); disjoint for all seeds, families and sizes.
        noise: share of solution steps in which the annotator errs by 1 or 10 and goes on from the error. Problems and answers
            do not depend on it.

    Raises:
        ValueError: an unknown family, level or split, or fewer different problems than asked for.
    """
    _check(entry, split)
    cells = [(family, level) for family in dict.fromkeys(entry.families) for level in dict.fromkeys(entry.levels)]
    order = Random(derive_seed(entry.seed, "problems", "order", split))
    shares = {cell: entry.size // len(cells) for cell in cells}
    for cell in order.sample(cells, entry.size % len(cells)):
        shares[cell] += 1
    problems: dict[str, Problem] = {}
    for (family, level), count in shares.items():
        _fill(problems, entry, split, family, level, count, noise)
    found = list(problems.values())
    order.shuffle(found)
    return found


def _check(entry: SyntheticData, split: str) -> None:
    unknown = [family for family in entry.families if family not in FAMILIES]
    if unknown or not entry.families:
        raise ValueError(f"families: {unknown or 'none given'} not among the problem families {', '.join(FAMILIES)}")
    if not entry.levels or not all(1 <= level <= 5 for level in entry.levels):
        raise ValueError(f"levels: {list(entry.levels)} must be one or more of 1 to 5")
    if split not in SPLIT_SHARES:
        raise ValueError(f"split: {split!r} must be one of {', '.join(SPLIT_SHARES)}")


def _fill(
    problems: dict[str, Problem], entry: SyntheticData, split: Split, family: str, level: int, count: int, noise: float
) -> None:
    """Add `count` new problems of one family and level."""
    rng = Random(derive_seed(entry.seed, "problems", split, family, level))
    annotator = Random(derive_seed(entry.seed, "annotator", split, family, level))
    added = fruitless = 0
    while added < count:
        fruitless += 1
        if fruitless > _FRUITLESS_TRIES:
            raise ValueError(
                f"size: {entry.size} problems need {count} of family {family!r} at level {level}, but split {split!r} has only "
                f"about {added}; ask for fewer problems or for more families and levels"
            )
        draft = FAMILIES[family](rng, level)
        lines, answer = _work_out(draft.steps)
        assert 0 <= answer <= LARGEST, draft
        if draft.text in problems or split_of(lines) != split:
            continue
        lines, boxed = _work_out(draft.steps, noise, annotator) if noise > 0 else (lines, answer)
        problems[draft.text] = Problem(draft.text, str(answer), _solution(lines, boxed), level, family)
        added, fruitless = added + 1, 0
