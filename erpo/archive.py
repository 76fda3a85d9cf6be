"""All that tables, figures and report of a study are made of, in one file: packed with checksums, unpacked only whole.

The archive is a zip: `manifest.json` (study, commit, SHA-256 and size of every file), the study file, the scores of every
checkpoint, the markers and logs of training, and the reference caches that figures of query weights read. No weights, no responses
of the evaluation. Equal results give an equal archive, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from erpo import __version__
from erpo.checkpoint import disk_error, file_hash, read_json
from erpo.config import Cell, Study, cells, load_study, scored_cells

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20


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
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            _put(archive, MANIFEST, (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode())
            for name in files:
                _put(archive, name, inside[name].read_bytes())
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(error, out) from error
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
            present += [marker, marker.parent / read_json(marker)["cache"]]
    return list(dict.fromkeys(present)), missing


def _checkpoints(study: Study) -> list[Cell]:
    wanted = {cell for found in scored_cells(study).values() for cell in found}
    for artefact in (*study.tables.values(), *study.figures.values()):
        wanted.update(cells(study, artefact))
    return sorted(wanted)


def _logs(marker: Path, with_samples: bool) -> Iterator[Path]:
    """What a training marker points to: its log, and the samples it kept."""
    facts = read_json(marker)
    for key in ("metrics", "samples") if with_samples else ("metrics",):
        path = marker.parent / facts.get(key, "")
        if key in facts and path.is_file():
            yield path


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
    staging = out / f".unpacking-{archive.name}"
    try:
        with zipfile.ZipFile(archive) as opened:
            facts = _manifest(archive, opened)
            _refuse_conflicts(archive, facts, out)
            for name, expected in facts["files"].items():
                _extract(archive, opened, name, expected, staging / name)
        for name in facts["files"]:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (staging / name).replace(out / name)
    except FileNotFoundError as error:
        raise ValueError(f"there is no archive at {archive}; `python -m erpo archive` writes one") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise _damaged(archive, str(error)) from error
    except OSError as error:
        raise disk_error(error, out) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    for lacking in facts["missing"]:
        logger.warning("not in the archive, because it was not there when it was written: %s", lacking)
    return facts["study"]


def _damaged(archive: Path, why: str) -> ValueError:
    return ValueError(f"{archive} is damaged or no archive of this project ({why}); copy or make it again and compare its SHA-256")


def _manifest(archive: Path, opened: zipfile.ZipFile) -> dict[str, Any]:
    """The list of contents, which must be exactly what the archive holds."""
    try:
        facts = json.loads(opened.read(MANIFEST))
        names = set(facts["files"])
    except (KeyError, ValueError, TypeError) as error:
        raise _damaged(archive, f"no readable {MANIFEST}") from error
    if facts.get("format") != FORMAT:
        raise ValueError(f"{archive} has format {facts.get('format')}; this version of erpo reads format {FORMAT}: update erpo")
    held = set(opened.namelist()) - {MANIFEST}
    if held != names:
        raise _damaged(archive, f"its list of contents does not fit: {sorted(held ^ names)[0]}")
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or path.parts[0] not in ("config", "results"):
            raise _damaged(archive, f"it would write to {name}")
    return facts


def _refuse_conflicts(archive: Path, facts: dict[str, Any], out: Path) -> None:
    for name, expected in facts["files"].items():
        if (out / name).exists() and file_hash(out / name) != expected["sha256"]:
            raise ValueError(f"{out / name} exists and is not the one in {archive}; unpack into an empty folder")


def _extract(archive: Path, opened: zipfile.ZipFile, name: str, expected: dict[str, Any], target: Path) -> None:
    sha = hashlib.sha256()
    target.parent.mkdir(parents=True, exist_ok=True)
    with opened.open(name) as source, target.open("wb") as sink:
        while chunk := source.read(_CHUNK):
            sha.update(chunk)
            sink.write(chunk)
    if sha.hexdigest() != expected["sha256"]:
        raise _damaged(archive, f"{name} does not have the checksum in {MANIFEST}")
