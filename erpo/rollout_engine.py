"""The generator beside the trainer: which one, which weights it samples with, when it sleeps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from erpo.config import Machine, RunConfig
from erpo.engine import Engine
from erpo.generation import Generator, PolicySampler
from erpo.records import Rollout
from erpo.vllm_engine import VllmGenerator, require_vllm

logger = logging.getLogger(__name__)


def check_generator(machine: Machine) -> None:
    """Refuse, before any weight is loaded, a generator that cannot run here.

    Raises:
        ValueError: vLLM is not installed, or ranks that cannot share engines as asked.
    """
    ranks, shared = dist.get_world_size(), machine.tensor_parallel
    if machine.generator == "vllm":
        require_vllm()
        if ranks % shared:
            raise ValueError(f"tensor_parallel: {shared} ranks are to share an engine, but {ranks} ranks cannot be divided so")
    elif shared > 1:
        raise ValueError(f"tensor_parallel: {shared} is for generator: vllm; the sampler uses one GPU a rank: leave it out")


class RolloutEngine:
    """The generator of a training run.

    The package's sampler runs the trained module itself. vLLM has weights of its own: the trainer's are streamed to it, one tensor
    at a time from any ZeRO stage, before it samples; then it sleeps.

    Args:
        engine: the trainer's.
        run: settings.
        machine: which generator, and its memory.
        folder: Hugging Face folder of the starting policy.
        longest_prompt: in tokens.
        trust_remote_code: run code that comes with the checkpoint.
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
        self.engine = engine
        self.is_vllm = machine.generator == "vllm"
        self.ranks_per_engine = machine.tensor_parallel
        """Ranks that hold parts of one generator and get the same requests."""
        self.generator: Generator
        if self.is_vllm:
            self.generator = VllmGenerator(
                folder,
                dtype=run.dtype,
                max_length=longest_prompt + run.max_response_tokens,
                tensor_parallel=machine.tensor_parallel,
                is_rank=dist.get_world_size() > 1,
                memory=machine.engine_memory,
                trust_remote_code=trust_remote_code,
            )
        else:
            self.generator = PolicySampler(engine.module.policy, batch_rows=machine.rollout_rows)

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside it the generator samples with the trainer's present weights. All ranks enter together."""
        if not self.is_vllm:
            self.generator.update_weights((), self.engine.updates)
            with self.engine.whole_weights():
                yield
            return
        self.generator.wake()
        self.generator.update_weights(self.engine.full_weights(), self.engine.updates)
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
