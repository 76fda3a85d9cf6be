"""A worker process that decides equivalence with math-verify, one pair a line, under limits of its own.

Started by `erpo.rewards` as `python -m erpo.grading.verifier PARENT_PID`; nothing else imports it, so math-verify stays out
of the training process. A request is one JSON line `[gold, answer, cpu_seconds]`, a reply one JSON line
`{"equal": bool | null, "reason": str, "retire": bool}`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import resource
import signal
import sys
import threading
import time
from functools import lru_cache
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, Float, I, Symbol

from erpo.grading.answers import TOLERANCE
from erpo.grading.equality import RELATIVE_ROUNDING, ROUNDING, compare
from erpo.grading.latex import normalise

MEMORY_BYTES = 1 << 30
"""Address space of a worker (RLIMIT_AS)."""
RETIRE_BYTES = 640 << 20
"""A worker that has grown beyond this is replaced, so that the next pair never meets a nearly full process."""
KILL_AFTER_SECONDS = 2
"""CPU seconds beyond the limit after which the kernel ends a worker that cannot be interrupted (one long C call)."""
PARENT_POLL_SECONDS = 1.0
RECURSION_LIMIT = 5_000
"""The LaTeX parser spends about twenty frames on one level of nesting."""
GC_THRESHOLD = 100_000
"""Parsing makes many short-lived objects: looking for cycles less often saves a tenth of the time."""


class _OutOfTimeError(BaseException):
    """Not an `Exception`: math-verify and sympy catch those."""


def _out_of_time(signum: int, frame: object) -> None:
    raise _OutOfTimeError


_CONFIGURATION = [
    LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,  # else the last fraction of an unreadable expression is taken for all of it
        # units stay: the rules take them off, and math-verify's own list makes 6m equal to 6
        normalization_config=NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"),
    )
]


_FOR_PARSER = (
    (  # `2(3)` is read as 2+3 otherwise
        re.compile(r"(?<![\w^}{\\.])(?:\d+(?:\.\d+)?|\(\d+(?:\.\d+)?\))(?:\s*\(\d+(?:\.\d+)?\))+"),
        lambda found: found[0][0] + found[0][1:].replace("(", r" \cdot ("),
    ),
    (re.compile(r"\\text\{\s*cis\s*\}\s*\(([^()]*)\)"), r"(\\cos(\1)+i \\sin(\1))"),
    (re.compile(r"(\d+(?:\.\d+)?)\s*\^\\circ"), r"(\\frac{\1 \\pi}{180})"),  # within an expression: `\sin 30^\circ`
    (re.compile(r"(?<![a-zA-Z\\])([Ee])(?=_)"), r"\\Xi "),  # a subscripted e is a name, not Euler's number
    (re.compile(r"(?<=[a-zA-Z])('+)_\{?(\w+)\}?"), lambda found: "_{" + "q" * len(found[1]) + found[2] + "}"),
    (re.compile(r"(?<=[a-zA-Z])('+)"), lambda found: "_{" + "q" * len(found[0]) + "}"),  # primes are dropped otherwise
)


_DROPPED = re.compile(r"\\[lcd]?dots[bcmo]?(?![a-zA-Z])|\.\.\.|\\not(?![a-zA-Z])")
"""What the parser passes over as if it were not there."""


@lru_cache(maxsize=4096)
def _parse(latex: str) -> tuple[Any, ...]:
    for pattern, replacement in _FOR_PARSER:
        latex = pattern.sub(replacement, latex)
    return tuple(parse(f"\\boxed{{{latex}}}", _CONFIGURATION, parsing_timeout=None))  # type: ignore[arg-type]


def equivalent(gold: str, answer: str) -> bool:
    """Whether two expressions are equal: evidently unequal numbers first, then math-verify, in both directions."""
    if len(_DROPPED.findall(gold)) != len(_DROPPED.findall(answer)):
        return False
    tolerant = TOLERANCE.match(gold)
    left, right = _parse(tolerant["gold"] if tolerant else gold), _parse(answer)
    if not left or not right:
        return False
    if tolerant:
        values = [_value(side, {}) if isinstance(side, Expr) else None for side in (left[0], right[0])]
        return None not in values and bool(abs(values[0] - values[1]) <= float(tolerant["size"]))
    decided = numerically(left[0], right[0])
    if decided is not None:
        return decided
    options = {"allow_set_relation_comp": True, "timeout_seconds": None}
    return verify([*left], [*right], **options) and verify([*right], [*left], **options)


def _is_readable(answer: str) -> bool:
    """Whether math-verify makes an expression of an answer; else only the same text could have been right."""
    parsed = _parse(normalise(answer))
    return bool(parsed) and not isinstance(parsed[0], str)


_POINTS = (0.7310585786, 1.3178021753, 0.4218750913, 2.2360679775, 1.6180339887, 0.5772156649, 3.0710678119, 1.1447298858)
"""Values for unknowns: positive, unremarkable, the same for both sides."""
_DIGITS = 30
_EXACT_GAP = 1e-15
_FLOAT_GAP = 1e-9
_NOISE = 1e-14
"""Relative error of a calculation with decimals that comes to an integer (`0.11 * 100`); typed numbers are compared exactly."""
_VANISHING = 1e-40
"""Below this a value may be a zero that evaluation cannot recognise."""
_NOT_EVALUABLE = (ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError, RecursionError)


def numerically(left: Any, right: Any) -> bool | None:
    """False where two scalar expressions differ in value, True where decimals agree within rounding, None where open.

    This spares the slow attempt to simplify the difference of things that are plainly unequal, and rejects what merely
    agrees to fifteen digits.
    """
    if not (isinstance(left, Expr) and isinstance(right, Expr)):
        return None
    symbols = left.free_symbols | right.free_symbols
    unknowns = sorted({str(symbol) for symbol in symbols})  # by name: one letter may be two symbols, real and not
    is_complex = unknowns == ["i"]  # math-verify leaves the imaginary unit a letter
    if not is_complex and (isinstance(left, Symbol) or isinstance(right, Symbol)):
        return None
    if len(unknowns) > len(_POINTS):
        return None
    points = dict(zip(unknowns, [I] if is_complex else _POINTS, strict=False))
    one, other = (_value(side, {symbol: points[str(symbol)] for symbol in side.free_symbols}) for side in (left, right))
    if one is None or other is None:
        return None
    gap, size = abs(one - other), max(abs(one), abs(other))
    if size < _VANISHING:
        return None
    is_rounded = bool(left.atoms(Float) | right.atoms(Float))
    if is_rounded and not unknowns:
        whole = any(side.is_Integer for side in (left, right))
        return bool(gap <= _NOISE * size if whole else gap <= float(ROUNDING) and gap <= float(RELATIVE_ROUNDING) * size)
    if is_complex:
        return bool(gap <= _EXACT_GAP * size)
    return False if gap > (_FLOAT_GAP if is_rounded else _EXACT_GAP) * size else None


def _value(expression: Expr, values: dict[Any, float]) -> Any:
    """A finite complex number of `_DIGITS` digits, or None."""
    try:
        if I in values.values():  # left to evalf, i keeps its real and imaginary part unknown
            expression, values = expression.subs(values), {}  # type: ignore[attr-defined]
        value = expression.evalf(_DIGITS, subs=values)  # type: ignore[attr-defined]
    except _NOT_EVALUABLE:
        return None
    return (
        value
        if value.is_number
        and value.is_finite
        and all(part.is_Float or part.is_Integer or part.is_Rational for part in value.as_real_imag())
        else None
    )


def judge(gold: str, answer: str, cpu_seconds: float) -> dict[str, Any]:
    """Decide one pair within `cpu_seconds` of CPU time; running out of time or memory is an answer too."""
    kill_at = int(time.process_time() + cpu_seconds) + KILL_AFTER_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (kill_at, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds, 0.5)
        try:
            equal, reason = compare(gold, answer, equivalent)
            if not equal and reason == "not equivalent" and not _is_readable(answer):
                reason = "unreadable answer"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _OutOfTimeError:
        return {"equal": False, "reason": "time limit", "retire": False}
    except MemoryError:
        return {"equal": False, "reason": "memory limit", "retire": True}
    return {"equal": equal, "reason": reason, "retire": _address_space() > RETIRE_BYTES}


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _leave_with(parent: int) -> None:
    """End this process when the one that started it is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_SECONDS)
    os._exit(1)


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a stray print of a library must not look like a reply
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, _out_of_time)
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    threading.Thread(target=_leave_with, args=(int(sys.argv[1]),), daemon=True).start()
    sys.setrecursionlimit(RECURSION_LIMIT)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(judge(*json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
