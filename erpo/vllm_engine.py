"""vLLM behind the generator protocol (vLLM 0.32): in this process, so that new weights are handed over without a file.

What must not go wrong is done in one place: neutral sampling parameters are spelt out, so that neither the checkpoint nor vLLM adds
any; log-probs are those of the tempered distribution; tied models get their output weights pushed by name (vLLM would keep stale
ones); the prefix cache is emptied at every update (it would serve keys and values of old weights).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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


class VllmGenerator:
    """One vLLM engine on this rank (or one over `tensor_parallel` ranks, which then make the same calls).

    Args:
        folder: Hugging Face folder of the policy.
        dtype: precision of the weights, the trainer's.
        max_length: longest prompt and response together, in tokens.
        tensor_parallel: ranks that share the engine, as torchrun or srun started them.
        memory: share of GPU memory for weights, keys and values.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        ValueError: vLLM is not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "bfloat16",
        max_length: int,
        tensor_parallel: int = 1,
        memory: float = 0.4,
        trust_remote_code: bool = False,
    ) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # tensors cannot be handed to another process
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise ValueError("generator: vllm needs vLLM: `pip install 'erpo[gpu]'`; generator: sampler works without") from error
        on_gpu = torch.cuda.is_available()
        self._parameters, self.version = SamplingParams, 0
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        self._is_tied = bool(getattr(config, "tie_word_embeddings", False))
        self.llm = LLM(
            model=str(folder),
            dtype=dtype,
            max_model_len=max_length,
            tensor_parallel_size=tensor_parallel,
            gpu_memory_utilization=memory,
            trust_remote_code=trust_remote_code,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            enable_sleep_mode=on_gpu,
            enforce_eager=not on_gpu,
            **({"distributed_executor_backend": "external_launcher"} if tensor_parallel > 1 else {}),
        )

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Rollout]]:
        """Sample every request; each sample is its own vLLM request with its own seed. See `erpo.generation.Generator`."""
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests for _ in request.seeds]
        common = {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}
        common |= {"stop_token_ids": list(sampling.stop_ids), **_NEUTRAL}
        parameters = [self._parameters(seed=seed, **common) for request in requests for seed in request.seeds]
        outputs = iter(self.llm.generate(prompts, parameters, use_tqdm=False) if prompts else ())
        groups = [
            [self._rollout(request, request.first_index + i, next(outputs), sampling) for i in range(len(request.seeds))]
            for request in requests
        ]
        if progress is not None:
            progress(len(prompts))
        return groups

    def _rollout(self, request: Request, index: int, output: Any, sampling: Sampling) -> Rollout:
        (completion,) = output.outputs
        ids = np.array(completion.token_ids, dtype=np.int32)
        logprobs = [entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        reason = "stop" if int(ids[-1]) in sampling.stop_ids else "length"
        return Rollout(request.query_id, index, ids, np.array(logprobs, dtype=np.float32), reason, self.version)

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load the trainer's tensors (Hugging Face names) and forget everything computed with the old ones."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._with_output_weights(named_tensors)})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache after a weight update: it would serve states of old weights")
        self.version = version

    def _with_output_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named_tensors:
            if name != "lm_head.weight" or not self._is_tied:
                yield name, tensor
            if self._is_tied and name.endswith(_INPUT_EMBEDDINGS):
                yield "lm_head.weight", tensor

    def sleep(self) -> None:
        """Move the weights to CPU memory and drop keys and values, so that the trainer has the GPU."""
        if torch.cuda.is_available():
            self.llm.sleep(level=1)

    def wake(self) -> None:
        """Bring the weights back; call it before `update_weights`."""
        if torch.cuda.is_available():
            self.llm.wake_up()
