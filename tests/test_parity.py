"""The parity checker: expected numbers of other implementations, and that it notices when they are missed."""

import json
import re
from pathlib import Path

import pytest

from tests.parity.__main__ import main
from tests.parity.cases import ADAPTERS, FAULTS, UNSUPPORTED

NEEDED = 185


def test_no_case_differs_and_what_is_left_out_has_a_reason(golden_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(golden_dir)]) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    agree, targets, differ, left_out, avoided, faults = (int(n) for n in re.findall(r"\d+", summary))
    assert len(lines) == targets + faults == len(list(golden_dir.glob("*.json")))
    assert agree >= NEEDED
    assert differ == 0
    assert agree + left_out == targets
    assert avoided == faults > 0
    reasons = [line for line in lines if line.startswith("not supported")]
    assert len(reasons) == left_out
    assert all(any(reason in line for reason in UNSUPPORTED.values()) for line in reasons)


def changed_case(golden_dir: Path, tmp_path: Path, name: str, change) -> Path:
    case = json.loads((golden_dir / f"{name}.json").read_text())
    change(case)
    folder = tmp_path / "cases"
    folder.mkdir()
    (folder / f"{name}.json").write_text(json.dumps(case))
    return folder


def test_a_wrong_number_differs(golden_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shift(case: dict) -> None:
        case["expected"]["grad_log_probs"][0][0] += 1e-4

    folder = changed_case(golden_dir, tmp_path, "policy.easyr1.ppo_token.a", shift)
    assert main([str(folder)]) == 1
    assert "differ" in (text := capsys.readouterr().out)
    assert "grad_log_probs" in text


def test_a_number_we_do_not_give_differs(golden_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed_case(golden_dir, tmp_path, "agg.easyr1.average_loss.a", lambda case: case["expected"].update(median=0.0))
    assert main([str(folder)]) == 1
    assert "median missing" in capsys.readouterr().out


def test_inputs_an_adapter_cannot_read_differ(golden_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed_case(golden_dir, tmp_path, "adv.easyr1.grpo.a", lambda case: case["inputs"].pop("index"))
    assert main([str(folder)]) == 1
    assert "KeyError" in capsys.readouterr().out


def test_an_operation_nobody_knows_is_not_supported(golden_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = changed_case(golden_dir, tmp_path, "adv.easyr1.grpo.a", lambda case: case.update(name="adv.other.method.a"))
    assert main([str(folder)]) == 0
    assert "not supported" in capsys.readouterr().out


def test_a_folder_without_cases_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) != 0
    assert main([]) != 0
    assert "no case files" in capsys.readouterr().out


def test_operations_have_one_answer() -> None:
    assert not set(ADAPTERS) & set(UNSUPPORTED)
    assert not set(FAULTS) & set(ADAPTERS)
    assert len(ADAPTERS) > 80
