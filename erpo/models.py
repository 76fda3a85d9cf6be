"""Starting checkpoints: a tiny model warm-started on synthetic texts, or an existing one from hub, folder or GGUF file.

Either ends as an ordinary Hugging Face folder and a small marker that names it and the hash of its content.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from erpo.checkpoint import MANIFEST, commit_folder, move_aside, policy_hash, read_json, why_invalid, write_json
from erpo.config import PretrainedModel, SyntheticData, SyntheticModel, digest
from erpo.templates import load_tokenizer
from erpo.warm_start import warm_start

logger = logging.getLogger(__name__)


def prepare_model(
    entry: SyntheticModel | PretrainedModel,
    *,
    texts: SyntheticData | None,
    prompt_suffix: str,
    out: Path,
    marker: Path,
    spec: dict[str, Any],
) -> None:
    """Make or fetch a starting checkpoint and write its marker. Done already under the same spec: the marker is rewritten.

    Args:
        entry: what to make.
        texts: the data set whose generator writes the warm-start texts (synthetic models).
        prompt_suffix: instruction appended to every problem; its words belong to a synthetic model's vocabulary.
        out: folder of the model (synthetic, GGUF), or of the note of where the model lies (other pretrained ones).
        marker: JSON file; its `policy` is the folder, relative to the marker's own.
        spec: everything that decides the result.

    Raises:
        ValueError: an entry that cannot be made or found.
    """
    if isinstance(entry, SyntheticModel):
        if texts is None:
            raise ValueError(f"model {out.name}: a synthetic model needs a synthetic train set whose generator writes its texts")
        folder, facts = _made(out, spec, lambda folder: _warm_started(entry, texts, prompt_suffix, folder, out.name))
    elif entry.gguf_file is not None:
        folder, facts = _made(out, spec, lambda folder: _convert_gguf(entry, folder))
    else:
        folder, facts = _found(entry, out, spec)
    seed = entry.seed if isinstance(entry, SyntheticModel) else 0
    trust = isinstance(entry, PretrainedModel) and entry.trust_remote_code
    origin = {"run": out.name, "seed": seed, "step": 0, "spec": spec, "spec_hash": digest(spec), "trust_remote_code": trust}
    write_json(marker, {**facts, **origin, "policy": os.path.relpath(folder, marker.parent)})


def _made(out: Path, spec: dict[str, Any], make: Any) -> tuple[Path, dict[str, Any]]:
    """A folder filled by `make(folder) -> facts`, complete or absent; one made under another spec is moved aside, not deleted."""
    if why_invalid(out) is None:
        info = read_json(out / MANIFEST)["info"]
        if info["spec_hash"] == digest(spec):
            logger.info("%s is complete under these settings: nothing to do", out)
            return out, info["facts"]
        move_aside(out)
    temporary = out.parent / f".making-{out.name}" / "model"
    shutil.rmtree(temporary.parent, ignore_errors=True)
    temporary.mkdir(parents=True)
    facts = make(temporary)
    facts["policy_hash"] = policy_hash(temporary)
    commit_folder(temporary, out, {"spec_hash": digest(spec), "facts": facts})
    shutil.rmtree(temporary.parent)
    return out, facts


def _warm_started(entry: SyntheticModel, texts: SyntheticData, prompt_suffix: str, folder: Path, title: str) -> dict[str, Any]:
    model, tokenizer, result = warm_start(entry, texts, prompt_suffix, title)
    _save(model, tokenizer, folder)
    return asdict(result)


# --- existing checkpoints ----------------------------------------------------------------------------------------------


def _found(entry: PretrainedModel, out: Path, spec: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Folder of an existing checkpoint (the hub's cache or the given folder: never copied) and the hash of its content.

    Hashing a large model takes minutes, so it is done again only when spec, sizes or times of its files change.
    """
    folder = _local_folder(entry)
    stamps = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in sorted(folder.iterdir()) if path.is_file()}
    note = out / "source.json"
    known = {"spec_hash": digest(spec), "folder": str(folder), "files": stamps}
    if note.is_file():
        old = read_json(note)
        if {key: old.get(key) for key in known} == known:
            return folder, {"policy_hash": old["policy_hash"]}
    _check_loadable(folder, entry.trust_remote_code)
    content = policy_hash(folder)
    write_json(note, {**known, "policy_hash": content})
    return folder, {"policy_hash": content}


def _local_folder(entry: PretrainedModel) -> Path:
    """The given folder, or the hub's snapshot of the pinned revision, downloaded on first use (safetensors only).

    Raises:
        ValueError: neither a folder nor something the hub (or its local cache, when offline) has.
    """
    folder = Path(entry.source).expanduser()
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"] + (["*.py"] if entry.trust_remote_code else [])
    if entry.gguf_file is not None:
        patterns.append(entry.gguf_file)
    if entry.revision is None:
        logger.warning("%s: no revision is pinned; the hub may change what this name means", entry.source)
    try:
        return Path(snapshot_download(entry.source, revision=entry.revision, allow_patterns=patterns)).resolve()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"source: {entry.source!r} (revision {entry.revision or 'newest'}) is neither a folder nor obtainable from the hub "
            f"({' '.join(str(error).split())[:200]}); check name, revision and network, or give a local folder"
        ) from error


def _check_loadable(folder: Path, trust_remote_code: bool) -> None:
    load_tokenizer(folder, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} is not a model that transformers can load: {' '.join(str(error).split())[:300]}") from error
    logger.info("%s: a %s checkpoint", folder, config.model_type)


def _convert_gguf(entry: PretrainedModel, folder: Path) -> dict[str, Any]:
    """Read a GGUF file through transformers and save it as an ordinary float32 folder, which loads many times faster."""
    source = _local_folder(entry)
    if not (source / str(entry.gguf_file)).is_file():
        raise ValueError(f"gguf_file: {entry.gguf_file} is not in {source}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=entry.gguf_file)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=entry.gguf_file, dtype=torch.float32)
    except ImportError as error:
        raise ValueError("reading a GGUF file needs the package gguf: install the extra with `pip install 'erpo[gguf]'`") from error
    # What is in memory is plain float32; transformers otherwise refuses to save what it thinks is quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _save(model, tokenizer, folder)
    return {"parameters": model.num_parameters()}


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """An ordinary Hugging Face folder whose generation_config names end and padding token and no sampling defaults."""
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    end = eos if eos is not None else tokenizer.eos_token_id
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
