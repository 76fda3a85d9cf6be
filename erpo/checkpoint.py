"""Files that survive anything: atomic writes, verified training states, retention, work directories tied to one spec.

A *state* is a folder `step{N}` that is complete or absent: it is written under a temporary name, every file is synced, the
manifest with sizes and checksums goes in last, then the folder is renamed. States hold safetensors and JSON only, so loading
one never executes anything.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from erpo.config import canonical_json, digest

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_CHUNK = 1 << 22


# --- single files ------------------------------------------------------------------------------------------------------


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: readers see the old file or the new one, never a part.

    Raises:
        ValueError: the disk is full (with what to do).
    """
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from error
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as readable JSON, atomically."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file of ours.

    Raises:
        ValueError: missing or damaged, with the path.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} does not exist; run the step that makes it first") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and run the step that makes it again") from error


_TEXTS = ("policy", "policy_hash", "cache", "cache_sha256")


def read_marker(path: Path, *keys: str) -> dict[str, Any]:
    """Read a marker and insist on what the caller needs of it.

    Raises:
        ValueError: missing, damaged, or without one of `keys`; names and hashes are texts.
    """
    facts = read_json(path)
    known = facts if isinstance(facts, dict) else {}
    missing = [key for key in keys if key not in known or (key in _TEXTS and not isinstance(known[key], str))]
    if missing:
        raise ValueError(f"{path} is no marker of the kind needed here: it says nothing of {', '.join(missing)}")
    return facts


def make_folder(folder: Path) -> None:
    """Make a folder and those above it.

    Raises:
        ValueError: a file is in the way, or it may not be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        full = disk_error(error, folder)
        if full is not error:
            raise full from error
        raise ValueError(f"the folder {folder} cannot be made: {error.strerror} ({error.filename})") from error


def disk_error(error: OSError, path: Path) -> Exception:
    """A full disk as one sentence; any other error as it is."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ValueError(
            f"no space left while writing {path}; nothing complete was lost: free space there and run the same command again"
        )
    return error


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_hash(path: Path) -> str:
    """SHA-256 of a file's content."""
    sha = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            sha.update(chunk)
    return sha.hexdigest()


# --- training states ---------------------------------------------------------------------------------------------------


def begin_state(root: Path, step: int) -> Path:
    """A fresh temporary folder for the state of `step`; leftovers of interrupted saves are removed."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(".saving-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    folder = root / f".saving-step{step}"
    folder.mkdir()
    return folder


def file_facts(path: Path) -> dict[str, Any]:
    """What a manifest says of a file, once it is on the disk and readable by the group: size and checksum."""
    with path.open("rb+") as handle:
        os.fsync(handle.fileno())
    path.chmod(0o644)  # safetensors are written private, which breaks shared file systems
    return {"bytes": path.stat().st_size, "sha256": file_hash(path)}


def commit_state(folder: Path, root: Path, step: int, info: dict[str, Any], files: dict[str, Any] | None = None) -> Path:
    """Make what all ranks wrote into `begin_state`'s folder the state of `step`; `info` holds small JSON facts.

    Args:
        folder: the temporary folder.
        root: folder of the states.
        step: step of the state.
        info: small JSON facts.
        files: name -> `file_facts`, where the ranks have each looked at their own; None: of all files there.
    """
    target = root / f"step{step}"
    commit_folder(folder, target, {**info, "step": step}, files)
    return target


def commit_folder(temporary: Path, target: Path, info: dict[str, Any], files: dict[str, Any] | None = None) -> None:
    """Sync every file, write the manifest last, rename into place: `target` is complete or as it was."""
    if files is None:
        found = sorted(path for path in temporary.rglob("*") if path.is_file())
        files = {str(path.relative_to(temporary)): file_facts(path) for path in found}
    write_json(temporary / MANIFEST, {"files": files, "info": info})
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    sync_folder(target.parent)


def why_invalid(folder: Path, only: str | None = None) -> str | None:
    """None for a complete, unaltered folder; else what is wrong with it. `only` looks at that file alone."""
    if not (folder / MANIFEST).is_file():
        return "no manifest (an interrupted save)"
    try:
        manifest = read_json(folder / MANIFEST)
        files = manifest["files"]
    except (ValueError, KeyError, TypeError):
        return "the manifest is damaged"
    for name, facts in files.items():
        if only is not None and name != only:
            continue
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != facts["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {facts['bytes']}"
        if file_hash(path) != facts["sha256"]:
            return f"{name} does not match its checksum"
    return None


def saved_steps(root: Path) -> list[int]:
    """Steps that have a state folder (verified or not), ascending."""
    found = (re.fullmatch(r"step(\d+)", entry.name) for entry in root.glob("step*"))
    return sorted(int(match.group(1)) for match in found if match)


def newest_state(root: Path, at_most: int | None = None) -> tuple[int, Path] | None:
    """The newest state that verifies, and its step; why others were passed over goes to the log."""
    for step in reversed(saved_steps(root)):
        if at_most is not None and step > at_most:
            continue
        reason = why_invalid(root / f"step{step}")
        if reason is None:
            return step, root / f"step{step}"
        logger.warning("state %s is not usable: %s; looking for an older one", root / f"step{step}", reason)
    return None


def prune_states(root: Path, newest: int, keep: int, always: Iterable[int] = ()) -> None:
    """Delete all but `keep` states up to `newest`, which has just verified, and those of the steps in `always`.

    Later states stay: they are those of a run that went further, or damaged ones that will be written again.
    """
    steps = [step for step in saved_steps(root) if step <= newest]
    kept = set(always) | set(steps[-keep:])
    for step in steps:
        if step not in kept:
            shutil.rmtree(root / f"step{step}", ignore_errors=True)


def best_state(root: Path) -> int | None:
    """Step of the state whose `reward` is highest (the mean training reward of the steps since the state before it)."""
    rewards = {}
    for step in saved_steps(root):
        if (root / f"step{step}" / MANIFEST).is_file():
            reward = read_json(root / f"step{step}" / MANIFEST)["info"].get("reward")
            if reward is not None:
                rewards[step] = reward
    return max(rewards, key=lambda step: (rewards[step], step)) if rewards else None


def check_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        ValueError: less than `needed_bytes` free where `folder` lies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise ValueError(
            f"{what} needs about {needed_bytes / 2**30:.1f} GiB in {folder}, but only {free / 2**30:.1f} GiB are free; "
            "free space or move the results folder"
        )


def code_commit() -> str:
    """Commit of the package's working tree, `-dirty` with uncommitted changes; `unknown` outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


# --- policies and work directories -------------------------------------------------------------------------------------


def policy_hash(folder: Path) -> str:
    """Content hash of a Hugging Face folder: weights, configuration and tokenizer. First 16 hex digits."""
    names = sorted(p.name for p in folder.iterdir() if p.is_file() and p.name not in (MANIFEST, "generation_config.json"))
    if not any(name.endswith((".safetensors", ".bin", ".gguf")) for name in names):
        raise ValueError(f"{folder} holds no weights (*.safetensors); make the model again")
    return digest({name: file_hash(folder / name) for name in names})


def claim_work(work: Path, spec: dict[str, Any], supersede: bool = False) -> None:
    """Tie a work directory to one spec; the same spec finds its work again, another one is refused.

    Raises:
        ValueError: the directory belongs to other settings; the sentence names the keys and the two ways out.
    """
    path = work / "spec.json"
    if path.is_file():
        old = read_json(path)
        if canonical_json(old) == canonical_json(spec):
            return
        if not supersede:
            raise ValueError(
                f"{work} holds work made under other settings ({'; '.join(differences(old, spec))}). Give the changed run a new "
                "name, or run with supersede (`--config supersede=RUN`), which moves the old work aside"
            )
        move_aside(work)
    write_json(path, spec)


@contextmanager
def only_one(work: Path) -> Iterator[None]:
    """Hold a work directory. A trainer that outlived its killed workflow may still be in it: wait for it to finish.

    Raises:
        ValueError: it cannot be made.
    """
    make_folder(work)
    with work.with_name(f".{work.name}.lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process works in %s; waiting for it", work)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def move_aside(work: Path) -> None:
    """Rename a work directory to the first free `NAME.superseded-K`; nothing is deleted."""
    number = 1
    while work.with_name(f"{work.name}.superseded-{number}").exists():
        number += 1
    work.rename(work.with_name(f"{work.name}.superseded-{number}"))
    logger.warning("%s was made under other settings and is now %s.superseded-%d", work, work.name, number)


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Dotted keys in which two specs differ, each as `key: old -> new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [line for key in keys for line in differences(old.get(key), new.get(key), f"{prefix}.{key}" if prefix else key)]
    return [] if old == new else [f"{prefix}: {_spell(old)} -> {_spell(new)}"]


def _spell(value: Any) -> str:
    return "default" if value is None else json.dumps(value)


def retry_free(action: Callable[[], Any], path: Path) -> Any:
    """Run a write; a full disk becomes one sentence."""
    try:
        return action()
    except OSError as error:
        raise disk_error(error, path) from error
