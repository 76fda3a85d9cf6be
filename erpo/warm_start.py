"""The warm start of a small model on synthetic texts: from random weights to one that solves some problems.

The model is a small Qwen2 whose initial weights know how to copy and where numbers lie on a circle; both are plain settings of
ordinary weights, and all of them are trained.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from erpo.config import SyntheticData, SyntheticModel
from erpo.data.problems import LARGEST, Problem, generate, vocabulary
from erpo.generation import PolicySampler, Request, Sampling
from erpo.grading.answers import extract_answer
from erpo.progress import Progress
from erpo.records import derive_seed
from erpo.templates import build_tokenizer, decode, render_prompt

logger = logging.getLogger(__name__)

MLP_WIDTH = 2
"""Width of the feed-forward layers of a synthetic model, in units of its hidden size."""

NUM_POSITIONS = 512
"""Longest text a synthetic model is made for."""

_EPOCH_TEXTS = 2048
_HASTY_UPDATES = 0.1  # of the most updates
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


def warm_start(
    entry: SyntheticModel, texts: SyntheticData, prompt_suffix: str, title: str
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerBase, WarmStart]:
    """Train a small Qwen2 model on whole texts (query, solution, end token) until it solves enough.

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
    result = WarmStart(model.num_parameters(), updates, accuracy, loss, time.process_time() - begun)
    logger.info("%s", result)
    if accuracy < entry.stop_at_accuracy:
        logger.warning(
            "the warm start ended after %d updates at accuracy %.2f, below stop_at_accuracy %.2f: raise warm_start_steps",
            updates,
            accuracy,
            entry.stop_at_accuracy,
        )
    return model, tokenizer, result


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


class _Trainee:
    """Model and optimizer in training, and what its checks ask."""

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        entry: SyntheticModel,
        held_out: list[Problem],
        suffix: str,
    ):
        self.model, self.tokenizer, self.entry, self.suffix, self.held_out = model, tokenizer, entry, suffix, held_out
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=entry.warm_start_learning_rate, betas=_BETAS, weight_decay=_WEIGHT_DECAY
        )
        self.updates, self.loss = 0, float("nan")

    def update(self, batch: tuple[Tensor, Tensor], rate: float) -> None:
        """One update at `rate` times the peak learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.entry.warm_start_learning_rate * rate
        self.loss = _update(self.model, self.optimizer, batch)
        self.updates += 1

    def accuracy(self) -> float:
        """At T = 1 on the held-out problems."""
        found = _accuracy(self.model, self.tokenizer, self.held_out, self.suffix, self.entry.seed)
        logger.info("update %d: loss %.4f, accuracy %.3f", self.updates, self.loss, found)
        return found


def _train(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    entry: SyntheticModel,
    texts: SyntheticData,
    prompt_suffix: str,
    progress: Progress,
) -> tuple[int, float, float]:
    """Updates made, accuracy reached, last loss.

    The way to the answers comes first, haste last: mixed in from the start it would keep the model from learning the way.
    """
    held_out = generate(texts.model_copy(update={"size": _CHECK_PROBLEMS, "seed": derive_seed(entry.seed, "held out")}), "train")
    trainee = _Trainee(model, tokenizer, entry, held_out, prompt_suffix)
    most = entry.warm_start_steps
    hasty_updates = math.ceil(_HASTY_UPDATES * most) if entry.hasty_share else 0
    check_every, accuracy, rate = max(most // _NUM_CHECKS, 1), 0.0, 1.0
    for batch in itertools.islice(_batches(tokenizer, entry, texts, prompt_suffix, "patient"), most - hasty_updates):
        rate = _rate(trainee.updates + 1, most)
        trainee.update(batch, rate)
        progress.update(trainee.updates, {"loss": trainee.loss, "accuracy": accuracy})
        if trainee.updates % check_every == 0:
            accuracy = trainee.accuracy()
            if accuracy * (1 - entry.hasty_share) >= entry.stop_at_accuracy:
                break
    for number, batch in enumerate(itertools.islice(_batches(tokenizer, entry, texts, prompt_suffix, "hasty"), hasty_updates)):
        trainee.update(batch, rate * max(_LAST_RATE, 1 - number / hasty_updates))
    if hasty_updates or trainee.updates % check_every:
        accuracy = trainee.accuracy()
    progress.update(most, {"loss": trainee.loss, "accuracy": accuracy})
    return trainee.updates, accuracy, trainee.loss


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
    tokenizer: PreTrainedTokenizerBase,
    entry: SyntheticModel,
    texts: SyntheticData,
    prompt_suffix: str,
    manner: Literal["patient", "hasty"],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and targets [b, S] without end; new problems every epoch, texts of like length together, batches in random order."""
    for epoch in itertools.count():
        size = max(_EPOCH_TEXTS, entry.warm_start_batch)
        part = texts.model_copy(update={"size": size, "seed": derive_seed(entry.seed, "warm start", manner, epoch)})
        problems = generate(part, "warm", entry.annotator_noise)
        rng = np.random.default_rng(derive_seed(entry.seed, "batches", manner, epoch))
        if manner == "hasty":
            problems = [hastily(problem) if rng.random() < entry.hasty_share else problem for problem in problems]
        rows = encode_texts(tokenizer, problems, prompt_suffix)
        order = np.lexsort((rng.random(len(rows)), [len(row) for row in rows]))
        chunks = np.array_split(order, len(order) // entry.warm_start_batch)
        for number in rng.permutation(len(chunks)):
            yield _padded([rows[i] for i in chunks[number]])


def hastily(problem: Problem) -> Problem:
    """The problem with a solution that skips the steps. Who imitates it has to guess, and learns from rewards not to."""
    return replace(problem, solution=f"<think> </think> \\boxed{{{problem.answer}}}")


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
