r"""The grader: response and gold answer in, verdict with its reason out. One for training and evaluation.

Only the last complete `\boxed{}` of the response counts. Literal numbers and words are compared here, exactly; everything
else goes to math-verify in worker processes with hard limits (`erpo.grading.verifier_pool`). Every pair of (gold, answer) is
decided once. A batch that needs no worker starts none.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tqdm import tqdm

from erpo.grading.answers import excess, extract_answer, gold_problem, has_format
from erpo.grading.equality import Undecided, compare
from erpo.grading.latex import squeeze
from erpo.grading.second_opinion import second_opinion
from erpo.grading.verifier_pool import ATTEMPTS, START_SECONDS, WALL_SECONDS, Decision, Pair, VerifierPool
from erpo.records import Grade, Verdict

__all__ = ["CANARIES", "Grader", "check_canaries", "extract_answer", "grade_one", "has_format"]

logger = logging.getLogger(__name__)

CACHE_SIZE = 200_000
"""Decided pairs kept (about 100 MB at most)."""
KEPT_CHARS = 200
"""An oversized answer is kept in its grade up to this length."""
PROGRESS_FROM = 500
"""Pairs left to the workers from which a progress bar is shown, where a person watches."""

CANARIES = (
    ("42", "42", True),
    ("42", "43", False),
    (r"\frac{5}{8}", "0.625", True),
    (r"2\sqrt{3}", r"\sqrt{12}", True),
    (r"2\sqrt{3}", r"\sqrt{13}", False),
    (r"x^2-1", r"(x-1)(x+1)", True),
    (r"(3,4]", "[3,4]", False),
)
"""Gold, answer, and whether they are equal: literal ones are graded before anything else is (`check_canaries`), those that need
a worker before the first answer that does: a job of plain numbers never pays for math-verify."""


class Grader:
    """Grades batches of responses; keeps its worker processes while used as a context manager, else stops them after a batch.

    Args:
        workers: most worker processes; None: one a core this process may use, at most 8.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = workers
        self._pool = VerifierPool(workers)
        self._known: OrderedDict[Pair, Decision] = OrderedDict()
        self._is_entered = False
        self._is_proven = False

    def __reduce__(self) -> tuple[type[Grader], tuple[int | None]]:
        """A copy in another process starts its own workers."""
        return Grader, (self._workers,)

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_entered = False
        self._pool.close()

    def grade(self, responses: Sequence[str], golds: Sequence[str], truncated: Sequence[bool] | None = None) -> list[Grade]:
        """A grade for every response, in order.

        Args:
            responses: response texts (never with the prompt).
            golds: gold answers, as many.
            truncated: whether each response was cut at the length limit; None: none was.

        Raises:
            ValueError: lengths differ.
            RuntimeError: worker processes cannot start, or fail their canaries.
        """
        cut = [False] * len(responses) if truncated is None else truncated
        if not len(responses) == len(golds) == len(cut):
            raise ValueError(
                f"{len(responses)} responses, {len(golds)} golds and {len(cut)} truncated flags: give one of each a response"
            )
        asked = [_first_look(*row) for row in zip(responses, golds, cut, strict=True)]
        decided = self._decide({item for item in asked if isinstance(item, Pair)})
        return [_grade(item, decided[item]) if isinstance(item, Pair) else item for item in asked]

    def longest_seconds(self, num_hard: int) -> float:
        """Bound on the wall-clock time of a batch with so many different answers that need a worker, once workers run.

        Reached only where every one of them stalls without using its CPU time; endless computations end after
        `CPU_SECONDS` of CPU time each.
        """
        return ATTEMPTS * (WALL_SECONDS + START_SECONDS) * -(-num_hard // self._pool.size)

    def _decide(self, pairs: set[Pair]) -> dict[Pair, Decision]:
        """A decision for every pair: known, cheap, or from the workers."""
        decided = {pair: self._known[pair] for pair in pairs if pair in self._known}
        hard = []
        for pair in sorted(pairs - decided.keys()):
            if (decision := _cheaply(pair)) is None:
                hard.append(pair)
            else:
                decided[pair] = decision
        if hard:
            self._ask_workers(hard, decided)
        self._remember(decided)
        return decided

    def _prove_workers(self) -> None:
        """Let the workers decide the canaries, once, before their first verdict is used.

        Raises:
            RuntimeError: one comes out otherwise.
        """
        expected = {Pair(gold, answer): equal for gold, answer, equal in CANARIES if _cheaply(Pair(gold, answer)) is None}
        decided: dict[Pair, Decision] = {}
        self._pool.decide(list(expected), decided.__setitem__)
        for pair, is_equal in expected.items():
            _require(pair, decided[pair], is_equal)
        self._is_proven = True

    def _ask_workers(self, hard: list[Pair], decided: dict[Pair, Decision]) -> None:
        with tqdm(total=len(hard), desc="grading", disable=None if len(hard) >= PROGRESS_FROM else True) as bar:

            def done(pair: Pair, decision: Decision) -> None:
                decided[pair] = decision
                bar.update()

            try:
                if not self._is_proven:
                    self._prove_workers()
                self._pool.decide(hard, done)
            finally:
                if not self._is_entered:
                    self._pool.close()

    def _remember(self, decided: dict[Pair, Decision]) -> None:
        """Keep decisions about answers; a failure of the grader is tried again next time."""
        self._known.update((pair, decision) for pair, decision in decided.items() if decision.equal is not None)
        while len(self._known) > CACHE_SIZE:
            self._known.popitem(last=False)


def _cheaply(pair: Pair) -> Decision | None:
    """The decision of the written rules alone; None where they leave it to a worker."""
    try:
        return Decision(*compare(*pair))
    except Undecided:
        return None


def _grade(pair: Pair, decision: Decision) -> Grade:
    verdict = {True: Verdict.CORRECT, False: Verdict.WRONG, None: Verdict.GRADER_ERROR}[decision.equal]
    return Grade(verdict, decision.reason, pair.answer, second_opinion(*pair))


def _first_look(response: str, gold: str, is_truncated: bool) -> Grade | Pair:
    """A grade where the answers need not be compared, else the pair to compare."""
    if problem := gold_problem(gold):
        return Grade(Verdict.GOLD_UNPARSED, problem)
    box = extract_answer(response)
    if box.answer is None:
        is_cut = is_truncated and box.reason != "empty"
        return Grade(Verdict.TRUNCATED if is_cut else Verdict.NO_ANSWER, box.reason)
    if (reason := excess(box.answer)) and not _is_same(box.answer, gold):
        return Grade(Verdict.WRONG, reason, box.answer[:KEPT_CHARS])
    return Pair(gold, box.answer)


def _is_same(answer: str, gold: str) -> bool:
    """Whether an answer of forbidden size is the gold text; nothing longer than that is looked at."""
    return answer.strip() == gold.strip() or (len(answer) <= 2 * len(gold) and squeeze(answer) == squeeze(gold))


_default_grader = Grader(workers=1)


def grade_one(response: str, gold: str, truncated: bool = False) -> Grade:
    """The grade of one response; for many use `Grader`, which keeps its workers."""
    return _default_grader.grade([response], [gold], [truncated])[0]


def check_canaries(grader: Grader) -> None:
    """Grade the known right and known wrong answers that need no worker; `Grader` sees to the others when it starts one.

    Raises:
        RuntimeError: a canary comes out otherwise, so no verdict of this installation can be trusted.
    """
    literal = [row for row in CANARIES if _cheaply(Pair(*row[:2])) is not None]
    grades = grader.grade([f"<think>t</think>\\boxed{{{answer}}}" for _, answer, _ in literal], [gold for gold, _, _ in literal])
    for (gold, answer, is_equal), grade in zip(literal, grades, strict=True):
        _require(Pair(gold, answer), Decision(grade.is_correct if grade.verdict.is_scored else None, grade.reason), is_equal)


def _require(pair: Pair, decision: Decision, is_equal: bool) -> None:
    if decision.equal is not is_equal:
        says = {True: "right", False: "wrong", None: "undecidable"}
        raise RuntimeError(
            f"the grader calls {pair.answer!r} against {pair.gold!r} {says[decision.equal]} ({decision.reason}), which must be "
            f"{says[is_equal]}: check the versions of math-verify, latex2sympy2_extended and antlr4 before trusting any grade"
        )
