"""Throughput of the grader against single-process math-verify on the same answers, and where the two disagree.

Draws ordinary answers from the gold answers of the six benchmarks, half right (the gold itself) and half wrong (the gold of
another item), grades them both ways and prints answers per second, CPU seconds (which a busy machine changes little), the ratio,
and every disagreement with the rule behind it:

    python benchmarks/grading.py DATA_DIR [--answers 10000] [--workers 2]
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import resource
import time
from pathlib import Path

from erpo.rewards import Grader

BENCHMARKS = ("aime_2024", "aime_2025", "amc", "math500", "minerva", "olympiad_bench")
SEED = 20_260


def draw(data_dir: Path, answers: int) -> list[tuple[str, str]]:
    """Pairs of gold and answer: right and wrong alternate."""
    files = [data_dir / f"eval_{name}.jsonl" for name in BENCHMARKS]
    golds = [json.loads(line)["answer"] for file in files for line in file.read_text().splitlines()]
    generator = random.Random(SEED)
    right = [(gold, gold) for gold in generator.choices(golds, k=answers - answers // 2)]
    wrong = []
    while len(wrong) < answers // 2:
        gold, answer = generator.choice(golds), generator.choice(golds)
        if gold != answer:
            wrong.append((gold, answer))
    mixed = right + wrong
    generator.shuffle(mixed)
    return mixed


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in usage)


def time_math_verify(pairs: list[tuple[str, str]]) -> tuple[list[bool], float, float]:
    """math-verify as its README shows it: parse both, verify; one process."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    verify(parse(r"\boxed{1}"), parse(r"\boxed{2}"))  # import and first compilation are not counted
    start, cpu = time.perf_counter(), cpu_seconds()
    verdicts = [verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{answer}}}")) for gold, answer in pairs]
    return verdicts, time.perf_counter() - start, cpu_seconds() - cpu


def time_grader(pairs: list[tuple[str, str]], workers: int) -> tuple[list, float, float]:
    """The grader, with the start of its processes."""
    responses, golds = [rf"so \boxed{{{answer}}}" for _, answer in pairs], [gold for gold, _ in pairs]
    start, cpu = time.perf_counter(), cpu_seconds()
    with Grader(workers) as grader:
        grades = grader.grade(responses, golds)
    return grades, time.perf_counter() - start, cpu_seconds() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    pairs = draw(arguments.data_dir, arguments.answers)
    grades, ours, our_cpu = time_grader(pairs, arguments.workers)
    print(
        f"grader, {arguments.workers} workers: {len(pairs) / ours:,.0f} answers/s ({ours:.1f} s, {our_cpu:.1f} s of CPU)",
        flush=True,
    )
    verdicts, theirs, their_cpu = time_math_verify(pairs)
    print(f"math-verify, one process: {len(pairs) / theirs:,.0f} answers/s ({theirs:.1f} s, {their_cpu:.1f} s of CPU)")
    print(f"ratio {theirs / ours:.1f}, of CPU time {their_cpu / our_cpu:.1f}")
    differing = {
        (pair, grade.verdict, grade.reason, verdict)
        for pair, grade, verdict in zip(pairs, grades, verdicts, strict=True)
        if grade.is_correct != verdict
    }
    print(f"{len(differing)} pairs judged differently")
    for (gold, answer), verdict, reason, theirs_is_right in sorted(differing):
        print(f"  gold {gold!r} answer {answer!r}: {verdict} ({reason}), math-verify {theirs_is_right}")


if __name__ == "__main__":
    main()
