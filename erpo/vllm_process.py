"""vLLM in a process of its own, on GPUs that the trainer does not use. New weights go through files of at most 1 GiB each.

The process takes its orders through a pipe and one at a time: its rollouts are as much on-policy as those of an engine beside
the trainer.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from erpo.generation import Request, Sampling
from erpo.records import Rollout
from erpo.vllm_engine import VllmGenerator, require_vllm, ties_weights, with_output_weights

_SHARD_BYTES = 1 << 30
"""Most bytes of tensors held in memory before they are written."""

_GOODBYE_SECONDS = 30.0
"""How long a process that is no longer wanted may take to end."""

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


class VllmProcess:
    """A `VllmGenerator` in a child process.

    Args:
        folder: Hugging Face folder of the policy.
        gpus: numbers of its GPUs among those this process sees; empty on a machine without any.
        options: further arguments of `VllmGenerator`; its processes are vLLM's own (`is_rank` stays False).

    Raises:
        ValueError: vLLM is not installed, or refuses the model.
        RuntimeError: the process ended while it started.
    """

    def __init__(self, folder: Path, gpus: Sequence[int], **options: Any) -> None:
        require_vllm()
        self._is_tied = ties_weights(folder, options.get("trust_remote_code", False))
        self._pipe, other_end = multiprocessing.Pipe()
        arguments = (other_end, visible_gpus(gpus), folder, options)
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=arguments)
        self._process.start()
        other_end.close()  # so that the end of the process ends the pipe
        atexit.register(self.close)
        self._answer()

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, progress: Callable[[int], None] | None = None
    ) -> list[list[Rollout]]:
        """See `erpo.generation.Generator`."""
        groups = self._call("generate", requests, sampling)
        if progress is not None:
            progress(sum(len(group) for group in groups))
        return groups

    def update_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Write the tensors beside each other in the temporary folder (TMPDIR) and have the process read them."""
        with tempfile.TemporaryDirectory(prefix="erpo-weights-") as folder:
            write_shards(with_output_weights(named_tensors, self._is_tied), Path(folder))
            self._call("load_weights", folder, version)

    def sleep(self) -> None:
        """Nothing to do: nobody else wants its GPUs."""

    def wake(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """End the process."""
        atexit.unregister(self.close)
        self._pipe.close()
        self._process.join(_GOODBYE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"the vLLM process ended with exit code {self._process.exitcode}; its last lines above say why"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def write_shards(named_tensors: Iterable[tuple[str, Tensor]], folder: Path, shard_bytes: int = _SHARD_BYTES) -> None:
    """Write tensors to safetensors files in `folder`, never holding more than a shard and one tensor."""
    shard: dict[str, Tensor] = {}
    held, number = 0, 0
    for name, tensor in named_tensors:
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += shard[name].nbytes
        if held >= shard_bytes:
            save_file(shard, folder / f"shard-{number:05}.safetensors")
            shard, held, number = {}, 0, number + 1
    if shard:
        save_file(shard, folder / f"shard-{number:05}.safetensors")


def visible_gpus(gpus: Sequence[int]) -> str:
    """The value of CUDA_VISIBLE_DEVICES that shows these of the GPUs this process sees."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(number) for number in range(torch.cuda.device_count())]
    return ",".join(names[number] for number in gpus)


def _serve(pipe: Connection, gpus: str, folder: Path, options: dict[str, Any]) -> None:
    """The child: start vLLM, then carry out calls until the parent is gone, which alone decides when that is."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # Slurm and terminals send them to all processes of a job. (SIG_IGN would be handed down to vLLM's own processes.)
        signal.signal(number, lambda *_: None)
    for name in _RANK_VARIABLES:
        os.environ.pop(name, None)  # vLLM would take itself for a rank of the trainer's group
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # nothing has touched CUDA in this process yet
    try:
        generator = VllmGenerator(folder, **options)
    except ValueError as error:
        pipe.send(error)
        return
    pipe.send(None)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            generator.close()
            return
        try:
            answer = getattr(generator, method)(*arguments)
        except (ValueError, RuntimeError) as error:
            answer = error
        pipe.send(answer)
