"""DeepSpeed behind a few verbs: forward, backward, step, weights, save, load, export.

What is hidden here, once: process groups for one process, torchrun or Slurm; ZeRO stages 0 to 3; exact accumulation over any number
of micro-batches (losses arrive as shares of the global loss and are summed, never averaged); float32 training states that do not
depend on the stage or the number of ranks, as safetensors.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.path.exists("/dev/nvidiactl") else "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from erpo.config import Machine, RunConfig
from erpo.objective import RolloutBatch, token_logprobs

logger = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")


# --- processes ---------------------------------------------------------------------------------------------------------


def join_processes(timeout_minutes: int = 30) -> tuple[int, int]:
    """Form the process group from torchrun's or Slurm's variables, or of this process alone. Returns (rank, world size)."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    os.environ.update(_process_variables())
    if not torch.cuda.is_available():
        # DeepSpeed would otherwise compile a C++ extension that only inference uses.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    deepspeed.init_distributed(backend, timeout=timedelta(minutes=timeout_minutes), verbose=False)
    return dist.get_rank(), dist.get_world_size()


def _process_variables() -> dict[str, str]:
    env = os.environ
    if "WORLD_SIZE" in env and "RANK" in env:
        return {"LOCAL_SIZE": env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"]), "LOCAL_RANK": env.get("LOCAL_RANK", "0")}
    if "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        tasks = env["SLURM_STEP_NUM_TASKS"]
        port = 20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000  # two jobs on one node get two ports
        return {
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": tasks,
            "LOCAL_RANK": env["SLURM_LOCALID"],
            "LOCAL_SIZE": str(int(tasks) // int(env.get("SLURM_STEP_NUM_NODES", "1"))),
            "MASTER_ADDR": env.get("MASTER_ADDR") or env["SLURM_LAUNCH_NODE_IPADDR"],
            "MASTER_PORT": env.get("MASTER_PORT") or str(port),
        }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    return {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def gather_objects(value: Any) -> list[Any]:
    """Values of all ranks, in rank order, on every rank."""
    if dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def agree(flag: bool) -> bool:
    """Whether any rank says yes."""
    return any(gather_objects(bool(flag)))


def barrier() -> None:
    """Wait for all ranks."""
    if dist.get_world_size() > 1:
        dist.barrier()


# --- the trained module ------------------------------------------------------------------------------------------------


class PolicyModule(nn.Module):
    """The policy and, for PPO, a value head that reads its hidden states without a gradient into them."""

    def __init__(self, policy: nn.Module, with_value_head: bool, seed: int = 0, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.policy, self.entropy_gradient = policy, entropy_gradient
        self.value_head: nn.Module | None = None
        if with_value_head:
            config = policy.config.get_text_config()  # pyright: ignore
            width = config.hidden_size
            generator = torch.Generator().manual_seed(seed)
            head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
            for parameter in head.parameters():
                scale = width**-0.5 if parameter.ndim == 2 and parameter.shape[0] > 1 else 0.0
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            self.value_head = head.to(next(policy.parameters()).dtype)

    def forward(self, batch: RolloutBatch, temperature: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs [B, S-1] and entropy [B, S-1] of the predicted tokens, values [B, S-1] or None.

        Rows are right-padded and attention is causal, so no padding mask is needed: no real token sees padding.
        """
        output = self.policy(input_ids=batch.input_ids, use_cache=False, output_hidden_states=self.value_head is not None)
        logprobs, entropy = token_logprobs(
            output.logits, batch.input_ids, batch.response_mask, temperature, entropy_gradient=self.entropy_gradient
        )
        values = None
        if self.value_head is not None:
            values = self.value_head(output.hidden_states[-1][:, :-1].detach()).squeeze(-1).float()
        return logprobs, entropy, values


@dataclass(frozen=True)
class StepResult:
    """What one optimizer update did."""

    grad_norm: float
    """Global norm before clipping; inf or nan when the update was skipped."""
    applied: bool
    """False when a non-finite gradient made the update be skipped."""


class Engine:
    """A module under DeepSpeed."""

    def __init__(self, module: PolicyModule, run: RunConfig, machine: Machine) -> None:
        self.run, self.machine = run, machine
        self.module = module
        if machine.zero_stage == 0 and run.dtype != "float32":
            raise ValueError("zero_stage: 0 trains in float32 only; use zero_stage: 1 or higher for bfloat16")
        if machine.activation_checkpointing:
            module.policy.gradient_checkpointing_enable()  # pyright: ignore
        self._deepspeed, *_ = deepspeed.initialize(model=module, optimizer=self._optimizer(), config=self._config())
        self.device = self._deepspeed.device
        self.updates = 0
        """Optimizer updates applied so far."""

    def _optimizer(self) -> torch.optim.Optimizer:
        heads = list(self.module.value_head.parameters()) if self.module.value_head is not None else []
        groups = [{"params": [p for p in self.module.policy.parameters() if p.requires_grad], "name": "policy"}]
        if heads:
            groups.append({"params": heads, "name": "value"})
        run = self.run
        options = {"lr": run.learning_rate, "betas": (run.beta1, run.beta2), "weight_decay": run.weight_decay}
        if self.machine.offload_optimizer:
            return deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
        return torch.optim.AdamW(groups, **options)

    def _config(self) -> dict[str, Any]:
        """DeepSpeed ignores unknown keys at the top in silence, so this is the only place that writes them."""
        machine, bf16 = self.machine, self.run.dtype == "bfloat16"
        zero: dict[str, Any] = {"stage": machine.zero_stage}
        if machine.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if machine.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.run.max_grad_norm if machine.zero_stage > 0 else 0.0,  # stage 0: clipped in `step`
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": bf16},
            "steps_per_print": 10**9,
            "wall_clock_breakdown": False,
        }
        if bf16 and machine.zero_stage in (1, 2):
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config

    # --- one update

    def forward(self, batch: RolloutBatch, temperature: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `PolicyModule.forward`."""
        return self._deepspeed(batch, temperature)

    def expect(self, is_last: bool) -> None:
        """Say before each forward and backward whether it is the last micro-batch of the update on this rank."""
        self._deepspeed.set_gradient_accumulation_boundary(is_last)

    def backward(self, loss_share: Tensor) -> None:
        """Accumulate the gradient of this micro-batch's share of the global loss.

        DeepSpeed averages gradients over ranks; the shares are to be summed, hence the factor.
        """
        self._deepspeed.backward(loss_share * dist.get_world_size(), scale_wrt_gas=False)

    def step(self, learning_rate: float, value_learning_rate: float | None = None) -> StepResult:
        """Clip, apply one update, clear gradients. A non-finite gradient is skipped, never applied."""
        for group in self._deepspeed.optimizer.param_groups:
            is_value = group.get("name") == "value"
            group["lr"] = value_learning_rate if is_value and value_learning_rate is not None else learning_rate
        if self.machine.zero_stage == 0:
            result = self._step_without_zero()
        else:
            self._deepspeed.step()
            norm = self._deepspeed.get_global_grad_norm()
            result = StepResult(float(norm) if norm is not None else float("nan"), bool(self._deepspeed.was_step_applied()))
        self.updates += int(result.applied)
        return result

    def _step_without_zero(self) -> StepResult:
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.run.max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            self._deepspeed.optimizer.zero_grad()
            return StepResult(norm, applied=False)
        self._deepspeed.step()
        return StepResult(norm, applied=True)

    # --- weights

    def whole_weights(self) -> AbstractContextManager[None]:
        """Inside it the policy runs as an ordinary model; ZeRO 3 deals its parameters out again afterwards. All ranks enter."""
        return deepspeed.zero.GatheredParameters(list(self.module.policy.parameters()), enabled=self.machine.zero_stage == 3)

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every policy parameter, whole, one at a time; all ranks iterate together."""
        for name, parameter in self.module.policy.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.machine.zero_stage == 3):
                yield name, parameter.data

    def export(self, folder: Path, tokenizer: Any) -> None:
        """Write the policy as an ordinary Hugging Face folder, in the run's dtype. All ranks call it; rank 0 writes."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.full_weights()}
        if dist.get_rank() == 0:
            self.module.policy.save_pretrained(folder, state_dict=state, safe_serialization=True)  # pyright: ignore
            tokenizer.save_pretrained(folder)
            for path in folder.iterdir():
                path.chmod(0o644)  # safetensors are written private, which breaks shared file systems
        barrier()

    # --- states

    def save(self, folder: Path) -> None:
        """Write parameters and moments as float32 safetensors, dealt out over the ranks; any stage and rank count reads them."""
        rank, world = dist.get_rank(), dist.get_world_size()
        self._link_optimizer_state()
        mine: dict[str, Tensor] = {}
        for index, (name, parameter) in enumerate(self.module.named_parameters()):
            whole = {"param": self._full(parameter), **{key: self._full(parameter, key) for key in _MOMENTS}}
            if index % world == rank:
                mine |= {f"{key}/{name}": tensor.detach().float().cpu().contiguous() for key, tensor in whole.items()}
        save_file(mine, folder / f"tensors-{rank}.safetensors", metadata={"optimizer_step": str(self._optimizer_step())})
        barrier()

    def load(self, folder: Path) -> None:
        """Read a state written by `save` on any number of ranks and with any ZeRO stage."""
        self._create_optimizer_state()
        files = [safe_open(str(path), framework="pt") for path in sorted(folder.glob("tensors-*.safetensors"))]
        home = {key: handle for handle in files for key in handle.keys()}  # noqa: SIM118 - not a dict
        for name, parameter in self.module.named_parameters():
            missing = [key for key in ("param", *_MOMENTS) if f"{key}/{name}" not in home]
            if missing:
                raise ValueError(f"{folder} has no {missing[0]} of {name}: it was saved for another model")
            self._set_full(parameter, home[f"param/{name}"].get_tensor(f"param/{name}"))
            for key in _MOMENTS:
                self._set_full(parameter, home[f"{key}/{name}"].get_tensor(f"{key}/{name}"), key)
        self._set_optimizer_step(float(files[0].metadata()["optimizer_step"]))
        barrier()

    def _base_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self._deepspeed.optimizer, "optimizer", self._deepspeed.optimizer)

    def _create_optimizer_state(self) -> None:
        """Optimizer state appears at the first step only: take one without a gradient, `load` then overwrites everything."""
        device, ids = self.device, torch.zeros(1, 2, dtype=torch.long)
        self.expect(is_last=True)
        with torch.enable_grad():
            output = self._deepspeed.module.policy(input_ids=ids.to(device)).logits.sum()
            touched = sum((p.sum() for p in self.module.parameters() if p.numel()), output)
        self._deepspeed.backward(touched * 0.0, scale_wrt_gas=False)
        self._deepspeed.step()
        self._link_optimizer_state()

    def _link_optimizer_state(self) -> None:
        """DeepSpeed (0.19) links parameters to their moments after the first group's step only: link those of every group."""
        zero = self._deepspeed.optimizer
        if self.machine.zero_stage in (1, 2) and hasattr(zero, "single_partition_of_fp32_groups"):
            for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
                lazy_init_hp_params_optimizer_state(parameters, flat, zero.optimizer.state)

    def _optimizer_step(self) -> float:
        steps = [float(state["step"]) for state in self._base_optimizer().state.values() if "step" in state]
        return steps[0] if steps else 0.0

    def _set_optimizer_step(self, value: float) -> None:
        for state in self._base_optimizer().state.values():
            if "step" in state:
                state["step"] = torch.full_like(state["step"], value) if isinstance(state["step"], Tensor) else int(value)

    def _full(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        if self.machine.zero_stage == 0:
            return parameter.data if key is None else self._deepspeed.optimizer.state[parameter][key]
        if key is None:
            return deepspeed.utils.safe_get_full_fp32_param(parameter)
        return deepspeed.utils.safe_get_full_optimizer_state(parameter, key)

    def _set_full(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        if self.machine.zero_stage == 0:
            target = parameter.data if key is None else self._deepspeed.optimizer.state[parameter][key]
            target.copy_(value)
        elif key is None:
            deepspeed.utils.safe_set_full_fp32_param(parameter, value.to(self.device))
            # the copy that computes, besides the float32 master
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self.machine.zero_stage == 3):
                parameter.data.copy_(value)
        else:
            deepspeed.utils.safe_set_full_optimizer_state(parameter, value.to(self.device), key)
