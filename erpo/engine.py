"""DeepSpeed behind a few verbs: forward, backward, step, weights, save, load, export.

What is hidden here, once: ZeRO stages 0 to 3; exact accumulation over any number of micro-batches (losses arrive as shares of the
global loss and are summed, never averaged); float32 training states that do not depend on the stage or the number of ranks, as
safetensors. The names of `erpo.processes` are passed on.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.path.exists("/dev/nvidiactl") else "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from erpo.config import Machine, RunConfig
from erpo.objective import RolloutBatch
from erpo.processes import agree, barrier, gather_objects, join_processes, together
from erpo.scoring import Scorer, can_share_queries

__all__ = ["Engine", "PolicyModule", "StepResult", "agree", "barrier", "gather_objects", "join_processes", "together"]

logger = logging.getLogger(__name__)

_MOMENTS = ("exp_avg", "exp_avg_sq")

# DeepSpeed looks for the Muon optimizer at every start, and importing that sets up torch's compiler, which takes seconds.
for _name, _content in {
    "muon_optimizer": {"MuonWithAuxAdam": type("MuonWithAuxAdam", (torch.optim.Optimizer,), {})},
    "original_muon": {"muon_update": None, "adam_update": None},
}.items():
    _module = ModuleType(f"deepspeed.runtime.zero.muon.{_name}")
    vars(_module).update(_content)
    sys.modules.setdefault(_module.__name__, _module)

if not torch.cuda.is_available():
    # DeepSpeed would otherwise compile a C++ extension that only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


# --- the trained module ------------------------------------------------------------------------------------------------


class PolicyModule(nn.Module):
    """The policy and, for PPO, a value head that reads its hidden states without a gradient into them."""

    def __init__(self, policy: nn.Module, with_value_head: bool, seed: int = 0, entropy_gradient: bool = False) -> None:
        super().__init__()
        self.policy, self.scorer = policy, Scorer(policy, entropy_gradient)
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

    def forward(self, batch: RolloutBatch, temperature: float, share_queries: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Log-probs [B, S-1] and entropy [B, S-1] of the predicted tokens, values [B, S-1] or None.

        Args:
            batch: rows.
            temperature: of the responses.
            share_queries: compute the query of each group once; see `erpo.scoring`.
        """
        if share_queries:
            found = self.scorer.groups(batch, temperature)
            return found.logprobs, found.entropy, None
        found = self.scorer.rows(batch, temperature, with_hidden=self.value_head is not None)
        values = None
        if self.value_head is not None and found.hidden is not None:
            values = self.value_head(found.hidden[:, :-1].detach()).squeeze(-1).float()
        return found.logprobs, found.entropy, values


@contextmanager
def _tensor_errors(path: Path) -> Iterator[None]:
    """What safetensors says of a full disk, as the OSError it is."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error


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
        if self.machine.offload_optimizer and torch.cuda.is_available():
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
            # DeepSpeed's AdamW for CPUs is a C++ extension that compiles for minutes: used where a GPU waits for it, see _optimizer
            "zero_force_ds_cpu_optimizer": torch.cuda.is_available(),
            "bf16": {"enabled": bf16},
            "steps_per_print": 10**9,
            "wall_clock_breakdown": False,
        }
        if bf16 and machine.zero_stage in (1, 2):
            config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config

    @property
    def num_parameters(self) -> int:
        """Parameters of policy and value head, over all ranks."""
        return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in self.module.parameters())

    # --- one update

    @property
    def can_share_queries(self) -> bool:
        """Whether this policy's updates may compute queries once: plain attention, no critic, weights whole on every rank."""
        return self.machine.zero_stage < 3 and self.module.value_head is None and can_share_queries(self.module.policy)

    def forward(self, batch: RolloutBatch, temperature: float, share_queries: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """See `PolicyModule.forward`."""
        return self._deepspeed(batch, temperature, share_queries)

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

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside it the policy runs as an ordinary model, on each rank as often as it likes; all ranks enter and leave.

        Under ZeRO 3 its parameters are gathered before and dealt out again afterwards. DeepSpeed's hooks would deal them out
        after every layer, in step with the other ranks, which sample for other numbers of tokens: they are off inside.
        """
        if self.machine.zero_stage < 3:
            yield
            return
        offload = self._deepspeed.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(self.module.policy.parameters())):
            places = [(handle.hooks_dict_ref(), handle.id) for handle in (*offload.forward_hooks, *offload.backward_hooks)]
            hooks = [(place, key, place.pop(key)) for place, key in places]
            try:
                yield
            finally:
                for place, key, hook in hooks:
                    place[key] = hook

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every policy parameter, whole, one at a time; all ranks iterate together."""
        for name, parameter in self.module.policy.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.machine.zero_stage == 3):
                yield name, parameter.data

    def export(self, folder: Path, tokenizer: Any) -> None:
        """Write the policy as an ordinary Hugging Face folder, in the run's dtype. All ranks call it; rank 0 writes."""
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.full_weights()}
        if dist.get_rank() == 0:
            with _tensor_errors(folder):
                self.module.policy.save_pretrained(folder, state_dict=state, safe_serialization=True)  # pyright: ignore
            tokenizer.save_pretrained(folder)

    # --- states

    def save(self, folder: Path) -> Path:
        """Write parameters and moments as float32 safetensors, dealt out over the ranks; any stage and rank count reads them.

        Returns:
            This rank's file.

        Raises:
            FloatingPointError: weights or moments are not finite; nothing is written.
            OSError: the file cannot be written.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        self._link_optimizer_state()
        mine: dict[str, Tensor] = {}
        for index, (name, parameter) in enumerate(self.module.named_parameters()):
            whole = {"param": self._full(parameter), **{key: self._full(parameter, key) for key in _MOMENTS}}
            if index % world == rank:
                mine |= {f"{key}/{name}": tensor.detach().float().cpu().contiguous() for key, tensor in whole.items()}
        broken = [name for name, tensor in mine.items() if not torch.isfinite(tensor).all()]
        if broken:
            raise FloatingPointError(f"{broken[0]} and {len(broken) - 1} more tensors of the state are not finite")
        path = folder / f"tensors-{rank}.safetensors"
        with _tensor_errors(path):
            save_file(mine, path, metadata={"optimizer_step": str(self._optimizer_step())})
        return path

    def load(self, folder: Path) -> None:
        """Read a state written by `save` on any number of ranks and with any ZeRO stage.

        Raises:
            ValueError: no state there, or one of another model.
        """
        files = [safe_open(str(path), framework="pt") for path in sorted(folder.glob("tensors-*.safetensors"))]
        if not files:
            raise ValueError(f"there is no training state in {folder}: nothing to resume from")
        self._create_optimizer_state()
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
