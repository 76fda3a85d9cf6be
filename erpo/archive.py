"""All that tables, figures and report of a study are made of, in one file: packed with checksums, unpacked only whole.

The archive is a zip: `manifest.json` (study, commit, SHA-256 and size of every file), the study file, the scores of every
checkpoint, the markers and logs of training, and the reference caches that figures of query weights read. No weights, no responses
of the evaluation. Equal results give an equal archive, byte for byte.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from erpo import __version__
from erpo.checkpoint import disk_error, file_hash, read_json
from erpo.config import Cell, Study, cells, load_study, scored_cells

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Of a study: it becomes a folder and an argument of a command."""


@dataclass(frozen=True)
class Packed:
    """What went into an archive."""

    path: Path
    sha256: str
    """Of the whole archive."""
    files: int
    checkpoints: int
    missing: list[str]
    """Results the study asks for that do not exist yet; tables and figures will mark them."""


def write_archive(study_file: Path, results: Path, out: Path, with_samples: bool = True) -> Packed:
    """Pack what tables, figures and report of a study are made of.

    Args:
        study_file: the study (`config/NAME.yaml`).
        results: its results (`results/NAME`).
        out: the archive.
        with_samples: also the samples that training kept, for the pages of runs.

    Raises:
        ValueError: no scores and no training at all, or a damaged marker.
    """
    study = load_study(str(study_file))
    present, missing = _inputs(study, results, with_samples)
    if not present:
        raise ValueError(f"{results} holds no scores and no training of study {study.name}; run it first: snakemake --cores 2 all")
    inside = {f"config/{study.name}.yaml": study_file}
    inside |= {f"results/{study.name}/{path.relative_to(results).as_posix()}": path for path in present}
    files = {name: {"bytes": path.stat().st_size, "sha256": file_hash(path)} for name, path in sorted(inside.items())}
    facts = {"format": FORMAT, "study": study.name, "erpo": __version__, "commit": _commit(), "missing": missing, "files": files}
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(temporary, "w") as archive:
            _put(archive, MANIFEST, (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode())
            for name in files:
                _put(archive, name, inside[name].read_bytes())
        temporary.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise _unwritable(error, out) from error
    checkpoints = sum(path.suffix == ".parquet" and path.is_relative_to(results / "scores") for path in present)
    return Packed(out, file_hash(out), len(files), checkpoints, missing)


def _put(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    """One file; parquet is compressed already. No dates, no owners: equal content, equal archive."""
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.external_attr = 0o644 << 16
    kind = zipfile.ZIP_STORED if name.endswith(".parquet") else zipfile.ZIP_DEFLATED
    archive.writestr(entry, content, compress_type=kind)


def _inputs(study: Study, results: Path, with_samples: bool) -> tuple[list[Path], list[str]]:
    """Files that exist, and results that do not."""
    present, missing = [], []
    for cell in _checkpoints(study):
        scores = results / f"scores/{cell.run}/seed{cell.seed}/step{cell.step}.parquet"
        marker = results / f"runs/{cell.run}/seed{cell.seed}/step{cell.step}.json"
        for path in (scores, marker) if cell.step > 0 else (scores,):
            if path.is_file():
                present.append(path)
            else:
                missing.append(path.relative_to(results).as_posix())
        if marker.is_file():
            present += _logs(marker, with_samples)
    for model, train_set in dict.fromkeys((run.model, run.train_set) for run in study.runs.values() if run.steps > 0):
        marker = results / f"reference/{model}/{train_set}.json"
        if marker.is_file():
            cache = marker.parent / str(_facts(marker).get("cache"))
            present.append(marker)
            (present if cache.is_file() else missing).append(cache if cache.is_file() else cache.relative_to(results).as_posix())
    return list(dict.fromkeys(present)), missing


def _checkpoints(study: Study) -> list[Cell]:
    wanted = {cell for found in scored_cells(study).values() for cell in found}
    for artefact in (*study.tables.values(), *study.figures.values()):
        wanted.update(cells(study, artefact))
    return sorted(wanted)


def _logs(marker: Path, with_samples: bool) -> Iterator[Path]:
    """What a training marker points to: its log, and the samples it kept."""
    facts = _facts(marker)
    for key in ("metrics", "samples") if with_samples else ("metrics",):
        path = marker.parent / str(facts.get(key, ""))
        if key in facts and path.is_file():
            yield path


def _facts(marker: Path) -> dict[str, Any]:
    """A marker's content, which must be an object."""
    facts = read_json(marker)
    if not isinstance(facts, dict):
        raise ValueError(f"{marker} is damaged (no object); delete it and run the step that makes it again")
    return facts


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


# --- unpacking ---------------------------------------------------------------------------------------------------------


def unpack_archive(archive: Path, out: Path) -> str:
    """Put an archive's files under `out` after every one was checked; the study's name.

    Files that are there already with the same content are left alone.

    Raises:
        ValueError: missing, damaged, cut or foreign archive, or other files in the way; nothing was written then.
    """
    if not archive.is_file():
        what = "is a folder, no archive" if archive.is_dir() else "does not exist"
        raise ValueError(f"{archive} {what}; give the file that `python -m erpo archive` wrote")
    staging = out / f".unpacking-{archive.name}"
    try:
        with zipfile.ZipFile(archive) as opened:
            contents = _manifest(archive, opened)
            _refuse_conflicts(archive, contents, out)
            for name, expected in contents.sums.items():
                _extract(archive, opened, name, expected, staging / name)
        for name in contents.sums:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(out / name)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:  # the last: a password
        raise _damaged(archive, str(error)) from error
    except OSError as error:
        raise _unwritable(error, out) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for lacking in contents.missing:
        logger.warning("not in the archive, because it was not there when it was written: %s", lacking)
    return contents.study


def _unwritable(error: OSError, path: Path) -> Exception:
    """What the system says against writing there, in one sentence."""
    full = disk_error(error, path)
    return full if isinstance(full, ValueError) else ValueError(f"{path} cannot be written: {error.strerror} ({error.filename})")


def _damaged(archive: Path, why: str) -> ValueError:
    return ValueError(f"{archive} is damaged or no archive of this project ({why}); copy or make it again and compare its SHA-256")


class Contents(NamedTuple):
    """What an archive says of itself."""

    study: str
    missing: list[str]
    sums: dict[str, str]
    """SHA-256 by name of file."""


def _manifest(archive: Path, opened: zipfile.ZipFile) -> Contents:
    """The list of contents, which must be exactly what the archive holds."""
    try:
        facts = json.loads(opened.read(MANIFEST))
        known = facts["format"]
    except (KeyError, ValueError, TypeError) as error:
        raise _damaged(archive, f"no readable {MANIFEST}") from error
    if known != FORMAT:
        raise ValueError(f"{archive} has format {known}; this version of erpo reads format {FORMAT}: update erpo")
    try:
        sums = {name: expected["sha256"] for name, expected in facts["files"].items()}
        contents = Contents(str(facts["study"]), list(facts["missing"]), sums)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(archive, f"no readable {MANIFEST}") from error
    held = sorted(name for name in opened.namelist() if name != MANIFEST)
    if held != sorted(sums):
        odd = sorted(set(held) ^ sums.keys()) or [name for name in held if held.count(name) > 1]
        raise _damaged(archive, f"its list of contents does not fit: {odd[0]}")
    for name in sums:
        if not _is_inside(name):
            raise _damaged(archive, f"it would write to {name or 'a file without a name'}")
    if not _NAME.fullmatch(contents.study) or f"config/{contents.study}.yaml" not in sums:
        raise _damaged(archive, f"it holds no study {contents.study!r}")
    return contents


def _is_inside(name: str) -> bool:
    """Whether a name of a member stays within the two folders an archive fills."""
    path = PurePosixPath(name)
    return len(path.parts) > 1 and path.parts[0] in ("config", "results") and ".." not in path.parts and path.as_posix() == name


def _refuse_conflicts(archive: Path, contents: Contents, out: Path) -> None:
    for name, expected in contents.sums.items():
        path = out / name
        if path.exists() and (not path.is_file() or file_hash(path) != expected):
            raise ValueError(f"{path} exists and is not the one in {archive}; unpack into an empty folder")


def _extract(archive: Path, opened: zipfile.ZipFile, name: str, expected: str, target: Path) -> None:
    sha = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with opened.open(name) as source, target.open("wb") as sink:
        while chunk := source.read(_CHUNK):
            sha.update(chunk)
            sink.write(chunk)
    if sha.hexdigest() != expected:
        raise _damaged(archive, f"{name} does not have the checksum in {MANIFEST}")
