"""`python -m tests.parity DIR`: one line a case, a summary, exit status 1 on any difference or when there is no case."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import tests.parity.advantage_cases
import tests.parity.erpo_cases
import tests.parity.policy_cases  # noqa: F401 - the three modules register their adapters
from tests.parity.cases import ADAPTERS, FAULTS, UNSUPPORTED, Case, FaultError, read_case, worst_error

AGREE, DIFFER, UNSUPPORTED_STATUS, AVOIDED = "agree", "differ", "not supported", "fault avoided"


def check(case: Case) -> tuple[str, str]:
    """Status and detail of a case."""
    if case.operation in FAULTS:
        try:
            return AVOIDED, FAULTS[case.operation](case.inputs, case.expected)
        except FaultError as error:
            return DIFFER, str(error)
    if case.operation not in ADAPTERS:
        return UNSUPPORTED_STATUS, UNSUPPORTED.get(case.operation, "no such operation here; docs/method.md lists what is left out")
    try:
        got = ADAPTERS[case.operation](case.inputs)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return DIFFER, f"{type(error).__name__}: {error}"
    wanted = [case.expected] if case.expected_f64 is None else [case.expected, case.expected_f64]
    error, where = max(worst_error(got, want) for want in wanted)
    return (
        AGREE if error <= case.tol else DIFFER
    ), f"worst error {error:.1e} of {case.tol:.0e} allowed, at {where.lstrip('/') or 'all'}"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m tests.parity DIR")
        return 2
    paths = sorted(Path(arguments[0]).glob("*.json"))
    if not paths:
        print(f"no case files (*.json) in {arguments[0]}")
        return 1
    counts: Counter[str] = Counter()
    num_faults = 0
    for path in paths:
        case = read_case(path)
        status, detail = check(case)
        num_faults += case.operation in FAULTS
        counts[status] += 1
        print(f"{status:13}  {case.name:48} {detail}")
    targets = len(paths) - num_faults
    print(
        f"{counts[AGREE]} of {targets} target cases agree, {counts[DIFFER]} differ, {counts[UNSUPPORTED_STATUS]} not supported; "
        f"{counts[AVOIDED]} of {num_faults} faults of the references avoided"
    )
    return 1 if counts[DIFFER] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
