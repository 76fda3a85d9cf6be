"""Problem files as they come: found or downloaded, checked, and read row by row into one shape, whatever their layout."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import http.client
import json
import logging
import os
import re
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from erpo.checkpoint import file_hash
from erpo.config import FileData
from erpo.grading.answers import extract_answer
from erpo.grading.equality import ALTERNATIVE

log = logging.getLogger(__name__)

CORRECTIONS = Path(__file__).with_name("corrections.yaml")
"""Corrected labels and known oddities of the published problem files, by query id."""

_ID_DIGITS = 16
_TIMEOUT_SECONDS = 60
_CHUNK_BYTES = 1 << 20
_INTEGER_CONTESTS = ("aime", "amc")


@dataclass(frozen=True, slots=True)
class RawProblem:
    """One row of a problem file, read."""

    row: int
    """From 0, blank lines not counted."""
    query_id: str
    problem: str
    answer: str
    """To be graded against; accepted alternatives are joined by ` ||| `. Empty where the row has none."""
    label: str
    """The answer as the file writes it."""
    level: int | None
    level_text: str
    """The level as the file writes it."""
    source: str
    flags: tuple[str, ...]


# --- finding the file ----------------------------------------------------------------------------------------------------


def locate(entry: FileData, data_dir: Path) -> Path:
    """Path of the entry's file, downloaded first where it is missing and has a url. The checksum is verified every time.

    The file of the data folder must have the checksum `sha256`; a download that of the url's fragment `#sha256=...`, or else
    `sha256` too. So a url may give the same problems in another layout.

    Raises:
        ValueError: no such file and no url, a failed download, or a wrong checksum.
    """
    path = Path(data_dir) / entry.file
    accepted = {checksum for checksum in (entry.sha256, _pinned(entry.url)) if checksum}
    if not path.is_file():
        if entry.url is None:
            raise ValueError(f"no data file {path}: {_put_it_there(path)}, or give the data entry a url")
        _download(entry.url, path, accepted if _pinned(entry.url) is None else {str(_pinned(entry.url))})
    found = file_hash(path)
    if accepted and found not in accepted:
        raise ValueError(
            f"{path} has sha256 {found}, expected {' or '.join(sorted(accepted))}: it is not the file this study was made for"
        )
    return path


def _pinned(url: str | None) -> str | None:
    found = re.search(r"(?:^|&)sha256=([0-9a-fA-F]{64})$", urllib.parse.urlsplit(url).fragment) if url else None
    return found[1].lower() if found else None


def _put_it_there(path: Path) -> str:
    return f"put it there, or set ERPO_DATA to the folder that holds {path.name}"


def _download(url: str, path: Path, accepted: set[str]) -> None:
    """Fetch to a temporary file beside the target, verify, rename: a half file is never seen."""
    address = urllib.parse.urldefrag(url).url
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    log.info("downloading %s to %s", address, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as response, temporary.open("wb") as file:
            while chunk := response.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if accepted and digest.hexdigest() not in accepted:
            raise ValueError(
                f"{address} gives a file with sha256 {digest.hexdigest()}, expected {' or '.join(sorted(accepted))}; "
                f"nothing was kept. {_put_it_there(path).capitalize()}"
            )
        temporary.replace(path)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise ValueError(f"could not download {address} to {path} ({error}); without a network {_put_it_there(path)}") from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()


# --- reading rows --------------------------------------------------------------------------------------------------------


def read_problems(path: Path, prompt_suffix: str) -> list[RawProblem]:
    """Rows of a JSONL file, in order, with the corrections of erpo/data/corrections.yaml.

    Problem text: `problem`, `question`, or `prompt` (the instruction at its end is taken off). Answer: `answer` with `answers`
    (accepted spellings), `ground_truth`, or the last box of `solution`. Level: `level` or `original_level`.

    Raises:
        ValueError: a line that is no JSON object, or has no problem text.
    """
    seen: Counter[str] = Counter()
    problems = []
    for row, (where, fields) in enumerate(_objects(path)):
        text = _problem_text(fields, prompt_suffix, where)
        identity = query_id(text)
        seen[identity] += 1
        problems.append(_read_row(row, text, identity, seen[identity], fields))
    if not problems:
        raise ValueError(f"{path} has no rows")
    return problems


def query_id(problem: str) -> str:
    """First 16 hex digits of the SHA-256 of the text."""
    return hashlib.sha256(problem.encode()).hexdigest()[:_ID_DIGITS]


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON ({error}); a problem file has one JSON object per line") from error
            if not isinstance(value, dict):
                raise ValueError(f"{where} is a {type(value).__name__}; a problem file has one JSON object per line")
            yield where, value


def _problem_text(fields: dict[str, Any], prompt_suffix: str, where: str) -> str:
    for key in ("problem", "question", "prompt"):
        text = fields.get(key)
        if isinstance(text, str) and text.strip():
            stripped = text.removesuffix(prompt_suffix) if key == "prompt" and prompt_suffix else text
            return stripped.strip()
    raise ValueError(f"{where} has no problem text; one of the fields problem, question, prompt must hold it")


def _read_row(row: int, text: str, identity: str, occurrence: int, fields: dict[str, Any]) -> RawProblem:
    label, accepted = _published_answers(fields)
    flags = [name for name, ids in corrections()["flags"].items() if identity in ids]
    if fields.get("is_multiple_answer") is True:
        flags.append("several-values")
    answer = _with_unit_and_tolerance(ALTERNATIVE.join(accepted), identity, fields, flags)
    corrected = corrections()["labels"].get(identity)
    if fields.get("label_status") == "reference_wrong" or (corrected and corrected.split(ALTERNATIVE)[0] not in accepted):
        flags.append("corrected-label")
    answer = corrected or answer
    if ALTERNATIVE in answer and "tolerance" not in flags:
        flags.append("accepted-alternatives")
    level_text = _level_text(fields)
    return RawProblem(
        row=row,
        query_id=identity if occurrence == 1 else f"{identity}-{occurrence}",
        problem=text,
        answer=answer,
        label=label,
        level=parse_level(level_text),
        level_text=level_text,
        source=str(fields.get("source") or ""),
        flags=tuple(dict.fromkeys(flags)),
    )


def _level_text(fields: dict[str, Any]) -> str:
    """The published layout gives the contests' difficulty in the place of the level: another scale, not read."""
    is_contest = str(fields.get("source") or "").startswith(_INTEGER_CONTESTS)
    for key in ("level",) if is_contest else ("level", "original_level"):
        if fields.get(key) not in (None, ""):
            return str(fields[key])
    return ""


def parse_level(text: str) -> int | None:
    """The number of `3`, `3.0`, `Level 3`; None for anything else (`Level ?`, nothing)."""
    found = re.fullmatch(r"(?:level\s*)?(\d{1,2})(?:\.0)?", text.strip(), re.IGNORECASE)
    return int(found[1]) if found else None


# --- answers -------------------------------------------------------------------------------------------------------------


def _published_answers(fields: dict[str, Any]) -> tuple[str, list[str]]:
    """The label as written, and the accepted answers read from it."""
    if "answer" in fields:
        label = fields.get("reference_answer", fields["answer"])
        others = fields.get("answers") or []
        return _as_text(label), _different([_as_text(fields["answer"]), *(_as_text(other) for other in others)])
    for key in ("ground_truth", "reference_answer"):
        if key in fields:
            label = _as_text(fields[key])
            return label, accepted_answers(label, str(fields.get("source") or ""))
    box = extract_answer(_as_text(fields.get("solution"))).answer
    return box or "", [box] if box else []


def _as_text(value: Any) -> str:
    """Text of a JSON value: whole floats as integers, nothing as an empty string."""
    if value is None:
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def accepted_answers(label: str, source: str) -> list[str]:
    r"""Answers that a published label accepts.

    Minerva and OlympiadBench print a Python list as text (`['9.6\n']`): its members are accepted spellings, one enclosing pair of
    `$` is taken off. AIME and AMC ask for integers but write `025`, `142.0`, `336^\circ`: read as the integer.
    """
    members = [label]
    if label.startswith("[") and label.endswith("]"):
        with contextlib.suppress(ValueError, SyntaxError):
            value = ast.literal_eval(label)
            if value and all(isinstance(member, str) for member in value):
                members = list(value)
    answers = [_without_dollars(member.strip()) for member in members]
    if source.startswith(_INTEGER_CONTESTS):
        answers = [_as_integer(answer) for answer in answers]
    return _different(answers)


def _different(answers: list[str]) -> list[str]:
    """Non-empty answers that differ in more than spaces and braces, in order."""
    found: dict[str, str] = {}
    for answer in answers:
        found.setdefault(re.sub(r"[\s{}]", "", answer), answer)
    return [answer for key, answer in found.items() if key]


def _without_dollars(answer: str) -> str:
    is_enclosed = len(answer) > 2 and answer.startswith("$") and answer.endswith("$") and "$" not in answer[1:-1]
    return answer[1:-1].strip() if is_enclosed else answer


def _as_integer(answer: str) -> str:
    found = re.fullmatch(r"(-?)0*(\d+)(?:\.0*)?(?:\^\{?\\circ\}?)?", answer)
    return found[1] + found[2] if found else answer


def _with_unit_and_tolerance(answer: str, identity: str, fields: dict[str, Any], flags: list[str]) -> str:
    """Declared absolute tolerance written into the answer; a percentage is also accepted with its sign."""
    unit = str(fields.get("unit") or corrections()["units"].get(identity) or "")
    tolerance = str(fields.get("error") or corrections()["tolerances"].get(identity) or "")
    if unit:
        flags.append("unit-apart")
    if not tolerance:
        return answer
    flags.append("tolerance")
    size = float(tolerance)
    tolerant = rf"{answer} \tolerance{{{size:g}}}"
    return f"{tolerant}{ALTERNATIVE}{answer}\\% \\tolerance{{{size / 100:g}}}" if unit in ("%", "\\%") else tolerant


@cache
def corrections(path: Path = CORRECTIONS) -> dict[str, Any]:
    """Corrections of published data: `labels`, `flags`, `units`, `tolerances`.

    Raises:
        ValueError: the file is missing: labels known to be wrong would be graded against.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} is missing; it belongs to the project and corrects published labels: restore it from the repository"
        )
    return yaml.safe_load(path.read_text(encoding="utf-8"))
