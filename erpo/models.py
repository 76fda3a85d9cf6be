"""Starting checkpoints: a tiny model warm-started on synthetic texts, or an existing one from hub, folder or GGUF file.

Either ends as an ordinary Hugging Face folder and a small marker that names it and the hash of its content.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from erpo.checkpoint import MANIFEST, commit_folder, move_aside, policy_hash, read_json, why_invalid, write_json
from erpo.config import PretrainedModel, SyntheticData, SyntheticModel, digest
from erpo.data.problems import LARGEST, Problem, generate, vocabulary
from erpo.generation import PolicySampler, Request, Sampling
from erpo.grading.answers import extract_answer
from erpo.progress import Progress
from erpo.records import derive_seed
from erpo.templates import build_tokenizer, decode, load_tokenizer, render_prompt

logger = logging.getLogger(__name__)

MLP_WIDTH = 2
"""Width of the feed-forward layers of a synthetic model, in units of its hidden size."""

NUM_POSITIONS = 512
"""Longest text a synthetic model is made for."""

_EPOCH_TEXTS = 4096
_NUM_CHECKS = 12
_CHECK_PROBLEMS = 240
_CHECK_TOKENS = 64
_WARMUP_UPDATES = 20
_LAST_RATE = 0.05
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_MAX_GRAD_NORM = 1.0
_INIT_STD = 0.06
_COPY_SCALE = 0.7
_ROPE_THETA = 100.0  # texts have tens of tokens, not thousands: all rotations should be felt
_PERIODS = (200.0, 100.0, 50.0, 20.0, 10.0, 5.0, 2.0)
_CIRCLE_RADIUS = 0.6


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
        folder, facts = _made(out, spec, lambda folder: warm_start(entry, texts, prompt_suffix, folder, out.name))
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


# --- warm start --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmStart:
    """What a warm start came to."""

    parameters: int
    updates: int
    accuracy: float
    """At T = 1 on held-out problems: those of the training set's split, not its texts."""
    loss: float
    """Mean negative log-likelihood per token of the last update's texts."""
    seconds: float
    """CPU seconds."""


def warm_start(entry: SyntheticModel, texts: SyntheticData, prompt_suffix: str, folder: Path, title: str) -> dict[str, Any]:
    """Train a small Qwen2 model on whole texts (query, solution, end token) until it solves enough; save it to `folder`.

    Every token of a text is learnt, the query's too: the likelihood of a query under this model means something. One thread, no
    global random state: the same settings give the same bits on the same machine.

    Raises:
        ValueError: settings that make no model (heads and width).
    """
    begun = time.process_time()
    tokenizer = build_tokenizer([*vocabulary(), prompt_suffix])
    model = _new_model(entry, tokenizer)
    with _one_thread():
        updates, accuracy, loss = _train(model, tokenizer, entry, texts, prompt_suffix, Progress(title, 0, entry.warm_start_steps))
    _save(model, tokenizer, folder)
    result = WarmStart(model.num_parameters(), updates, accuracy, loss, time.process_time() - begun)
    logger.info("%s", result)
    if accuracy < entry.stop_at_accuracy:
        logger.warning(
            "the warm start ended after %d updates at accuracy %.2f, below stop_at_accuracy %.2f: raise warm_start_steps",
            updates,
            accuracy,
            entry.stop_at_accuracy,
        )
    return asdict(result)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Fixed order of summation, whatever the machine offers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _new_model(entry: SyntheticModel, tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    if entry.hidden_size % (2 * entry.num_heads):
        raise ValueError(f"hidden_size ({entry.hidden_size}) must be an even multiple of num_heads ({entry.num_heads})")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=entry.hidden_size,
        intermediate_size=MLP_WIDTH * entry.hidden_size,
        num_hidden_layers=entry.num_layers,
        num_attention_heads=entry.num_heads,
        num_key_value_heads=entry.num_heads,
        max_position_embeddings=NUM_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=_INIT_STD,
        rope_parameters={"rope_type": "default", "rope_theta": _ROPE_THETA},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(entry.seed, "initialisation"))
        model = Qwen2ForCausalLM(config)
        _start_heads_as_copies(model)
    _place_numbers_on_circles(model.get_input_embeddings(), tokenizer)
    return model


@torch.no_grad()
def _start_heads_as_copies(model: Qwen2ForCausalLM) -> None:
    """Start every attention layer so that value and output projection together copy what is attended to.

    One random rotation and its transpose, scaled: each head then carries its own part of the residual stream unchanged (after
    Trockman and Kolter, arXiv 2305.09828). Copying operands is most of what a solution asks for; it is learnt much faster so.
    """
    for layer in model.model.layers:
        width = layer.self_attn.o_proj.weight.shape[0]
        rotation, _ = torch.linalg.qr(torch.randn(width, width))
        layer.self_attn.v_proj.weight.copy_(_COPY_SCALE * rotation)
        layer.self_attn.o_proj.weight.copy_(_COPY_SCALE * rotation.T)


@torch.no_grad()
def _place_numbers_on_circles(embedding: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Start the embeddings of 0 to 99 as points on circles of several periods, where adding is turning.

    Small models find this representation by themselves, after thousands of updates (Nanda et al., arXiv 2301.05217); starting
    there brings the warm start down to about a minute.
    """
    numbers = torch.arange(LARGEST + 1)
    angles = 2 * torch.pi * numbers[:, None] / torch.tensor(_PERIODS)
    points = torch.stack([angles.cos(), angles.sin()], -1).flatten(1)[:, : embedding.embedding_dim]
    ids = torch.tensor(tokenizer.convert_tokens_to_ids([str(number) for number in numbers.tolist()]))
    embedding.weight[ids, : points.shape[1]] = _CIRCLE_RADIUS * points


def _train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    entry: SyntheticModel,
    texts: SyntheticData,
    prompt_suffix: str,
    progress: Progress,
) -> tuple[int, float, float]:
    """Updates made, accuracy reached, last loss."""
    held_out = generate(texts.model_copy(update={"size": _CHECK_PROBLEMS, "seed": derive_seed(entry.seed, "held out")}), "train")
    optimizer = torch.optim.AdamW(model.parameters(), lr=entry.warm_start_learning_rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY)
    batches = _batches(tokenizer, entry, texts, prompt_suffix)
    check_every = max(entry.warm_start_steps // _NUM_CHECKS, 1)
    accuracy, loss = 0.0, float("nan")
    for update in range(1, entry.warm_start_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = entry.warm_start_learning_rate * _rate(update, entry.warm_start_steps)
        loss = _update(model, optimizer, next(batches))
        if update % check_every == 0 or update == entry.warm_start_steps:
            accuracy = _accuracy(model, tokenizer, held_out, prompt_suffix, entry.seed)
            logger.info("update %d: loss %.4f, accuracy %.3f", update, loss, accuracy)
            if accuracy >= entry.stop_at_accuracy:
                return update, accuracy, loss
        progress.update(update, {"loss": loss, "accuracy": accuracy})
    return entry.warm_start_steps, accuracy, loss


def _rate(update: int, updates: int) -> float:
    """Share of the peak learning rate: linear up, then linear down."""
    return min(1.0, update / _WARMUP_UPDATES) * max(_LAST_RATE, 1 - update / updates)


def _update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    ids, targets = batch
    model.train()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
    optimizer.step()
    return float(loss.detach())


def _batches(
    tokenizer: PreTrainedTokenizerBase, entry: SyntheticModel, texts: SyntheticData, prompt_suffix: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and targets [b, S] without end; new problems every epoch, texts of like length together, batches in random order."""
    epoch = 0
    while True:
        size = max(_EPOCH_TEXTS, entry.warm_start_batch)
        part = texts.model_copy(update={"size": size, "seed": derive_seed(entry.seed, "warm start", epoch)})
        rows = encode_texts(tokenizer, generate(part, "warm", entry.annotator_noise), prompt_suffix)
        rng = np.random.default_rng(derive_seed(entry.seed, "batches", epoch))
        order = np.lexsort((rng.random(len(rows)), [len(row) for row in rows]))
        chunks = np.array_split(order, len(order) // entry.warm_start_batch)
        for number in rng.permutation(len(chunks)):
            yield _padded([rows[i] for i in chunks[number]])
        epoch += 1


def encode_texts(tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], prompt_suffix: str) -> list[list[int]]:
    """Ids of whole texts: the prompt exactly as `render_prompt` makes it, the solution, the end token."""
    solutions = tokenizer([problem.solution for problem in problems], add_special_tokens=False)["input_ids"]
    prompts = [render_prompt(tokenizer, problem.problem, prompt_suffix) for problem in problems]
    return [[*prompt, *solution, tokenizer.eos_token_id] for prompt, solution in zip(prompts, solutions, strict=True)]


def _padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=-100)
    return ids, targets


def _accuracy(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], prompt_suffix: str, seed: int
) -> float:
    """Share of problems solved by one sample each at T = 1; the answer must be the gold text itself."""
    sampling = Sampling(1.0, 1.0, _CHECK_TOKENS, (int(tokenizer.eos_token_id),))
    requests = [
        Request(problem.problem, render_prompt(tokenizer, problem.problem, prompt_suffix), (derive_seed(seed, "check", i),))
        for i, problem in enumerate(problems)
    ]
    groups = PolicySampler(model).generate(requests, sampling)
    answers = [extract_answer(decode(tokenizer, group[0].response_ids)).answer for group in groups]
    return float(np.mean([answer == problem.answer for answer, problem in zip(answers, problems, strict=True)]))
