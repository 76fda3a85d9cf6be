"""The generator beside the trainer: which one, which weights it samples with, when it sleeps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from erpo.config import Machine, RunConfig
from erpo.engine import Engine
from erpo.generation import Generator, PolicySampler, Share
from erpo.records import Rollout
from erpo.vllm_engine import VllmGenerator, check_length, require_vllm
from erpo.vllm_process import VllmProcess

_WHOLE_GPU = 0.9
"""Share of memory for vLLM on a GPU of its own."""


def check_generator(machine: Machine, ranks_of_node: int, gpus_of_node: int) -> None:
    """Refuse, before any weight is loaded, a generator that cannot run here.

    Args:
        machine: settings.
        ranks_of_node: on each node.
        gpus_of_node: that a rank sees; 0: there are none.

    Raises:
        ValueError: vLLM is not installed, or ranks and GPUs that cannot be divided as asked.
    """
    shared, apart = machine.tensor_parallel, machine.rollout_gpus
    if machine.generator != "vllm":
        if shared > 1 or apart:
            raise ValueError("tensor_parallel and rollout_gpus are for generator: vllm; the sampler runs on each rank's own GPU")
        return
    if apart:
        if apart % shared or apart // shared > ranks_of_node:
            raise ValueError(
                f"rollout_gpus: {apart} with tensor_parallel: {shared} and {ranks_of_node} ranks on a node: it must be a multiple "
                "of tensor_parallel, and each engine needs a rank of the node to feed it"
            )
        if gpus_of_node and ranks_of_node + apart > gpus_of_node:
            raise ValueError(
                f"rollout_gpus: {apart} and {ranks_of_node} ranks need {ranks_of_node + apart} GPUs on a node, but {gpus_of_node} "
                "are there; start fewer ranks (launcher)"
            )
    elif ranks_of_node % shared:
        raise ValueError(f"tensor_parallel: {shared} ranks are to share an engine, but a node has {ranks_of_node}")
    require_vllm()


def share_of_rank(machine: Machine, rank: int, ranks: int, local_rank: int, ranks_of_node: int) -> Share:
    """Which generator a rank has or holds a part of."""
    if machine.generator != "vllm":
        return Share(rank, ranks)
    if not machine.rollout_gpus:
        engine, place = divmod(rank, machine.tensor_parallel)
        return Share(engine, ranks // machine.tensor_parallel, place, machine.tensor_parallel)
    engines = machine.rollout_gpus // machine.tensor_parallel
    node = rank // ranks_of_node
    return Share(node * engines + local_rank if local_rank < engines else None, engines * (ranks // ranks_of_node))


class RolloutEngine:
    """The generator of a training run.

    The package's sampler runs the trained module itself. vLLM has weights of its own: the trainer's are streamed to it, one tensor
    at a time from any ZeRO stage, before it samples. On the trainer's GPUs it then sleeps; on GPUs of its own it need not.

    Args:
        engine: the trainer's.
        run: settings.
        machine: which generator, and its memory.
        folder: Hugging Face folder of the starting policy.
        longest_prompt: in tokens.
        trust_remote_code: run code that comes with the checkpoint.

    Raises:
        ValueError: the longest prompt and response are longer than the model holds, or vLLM refuses the model.
    """

    def __init__(
        self,
        engine: Engine,
        run: RunConfig,
        machine: Machine,
        folder: Path,
        longest_prompt: int,
        trust_remote_code: bool = False,
    ) -> None:
        longest = longest_prompt + run.max_response_tokens
        check_length(folder, longest, trust_remote_code)  # the sampler would go beyond it in silence
        self.engine, self.machine = engine, machine
        rank, ranks, local_rank, ranks_of_node = _places()
        self.share = share_of_rank(machine, rank, ranks, local_rank, ranks_of_node)
        self.generator: Generator | None = None
        """None on a rank that has no engine."""
        options: dict[str, Any] = {
            "tensor_parallel": machine.tensor_parallel,
            "dtype": run.dtype,
            "max_length": longest,
            "trust_remote_code": trust_remote_code,
        }
        if machine.generator != "vllm":
            self.generator = PolicySampler(engine.module.policy, batch_rows=machine.rollout_rows)
        elif not machine.rollout_gpus:
            self.generator = VllmGenerator(folder, **options, is_rank=ranks > 1, memory=machine.engine_memory)
        elif self.share.engine is not None:
            gpus = _gpus_of_engine(machine, local_rank, ranks_of_node) if torch.cuda.is_available() else []
            self.generator = VllmProcess(folder, gpus, **options, memory=_WHOLE_GPU)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside it the generator samples with the trainer's present weights. All ranks enter together."""
        version = self.engine.updates
        if isinstance(self.generator, PolicySampler):
            self.generator.update_weights((), version)
            with self.engine.whole_weights():
                yield
            return
        if self.generator is None:
            for _ in self.engine.full_weights():
                pass  # ZeRO 3 gathers a tensor with the help of all ranks
            yield
            return
        self.generator.wake()
        self.generator.update_weights(self.engine.full_weights(), version)
        yield
        self.generator.sleep()

    def refuse_stale(self, groups: Iterable[list[Rollout]]) -> None:
        """Every rollout must come from the weights it is about to train.

        Raises:
            RuntimeError: some do not.
        """
        found = {rollout.weights_version for group in groups for rollout in group} - {self.engine.updates}
        if found:
            raise RuntimeError(
                f"rollouts were sampled with the weights after {min(found)} updates, but the trainer has made {self.engine.updates}"
            )


def check_generator_here(machine: Machine) -> None:
    """`check_generator` for this job's ranks and this node's GPUs."""
    _, _, _, ranks_of_node = _places()
    check_generator(machine, ranks_of_node, torch.cuda.device_count())


def _places() -> tuple[int, int, int, int]:
    """Rank, ranks, rank on this node, ranks of this node (erpo.processes has set the variables)."""
    return dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_SIZE"])


def _gpus_of_engine(machine: Machine, local_rank: int, ranks_of_node: int) -> list[int]:
    """The trainer's ranks have the first GPUs of a node, the engines the next."""
    first = ranks_of_node + local_rank * machine.tensor_parallel
    return list(range(first, first + machine.tensor_parallel))
