"""Settings of one training run, and of the machine it runs on."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Frozen(BaseModel):
    """Base of all settings: frozen, unknown keys forbidden."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _no_numbers_as_text(cls, data: Any) -> Any:
        """YAML reads `1e-6` (no dot) and quoted numbers as text: say so instead of coercing or failing obscurely."""
        for key, value in data.items() if isinstance(data, dict) else ():
            field = cls.model_fields.get(key)
            if field is None or field.annotation in (str, str | None) or not isinstance(value, str):
                continue
            if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()):
                raise ValueError(f"{key}: {value!r} is text in YAML, not a number; write {_as_yaml_number(value)} without quotes")
        return data


def _as_yaml_number(text: str) -> str:
    """The spelling that YAML reads as a number: a dot in the mantissa, a sign in the exponent."""
    if "e" not in text.lower():
        return text.strip()
    mantissa, _, exponent = text.strip().lower().partition("e")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+d}"


class RunConfig(Frozen):
    """Everything that decides the numbers of one training run. Defaults are the paper's protocol (docs/method.md)."""

    # --- what is trained on what
    model: str = "model"
    """Entry of `models` the run starts from; it is also the reference policy."""
    train_set: str = "train"
    """Entry of `train_sets`."""
    steps: Annotated[int, Field(ge=0)] = 240
    """Last step, evaluated unless a table asks for others; 0 is the untrained base model. A longer run continues a shorter one."""
    seeds: tuple[int, ...] | None = None
    """Seeds of this run; unset: the study's."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of weights and activations in forward and backward; master weights and optimizer are always float32."""

    # --- rollout
    queries_per_step: PositiveInt = 512
    """Q: queries rolled out in one step."""
    responses_per_query: PositiveInt = 8
    """G: responses sampled per query (a group)."""
    updates_per_step: PositiveInt = 4
    """Optimizer updates per step; each sees queries_per_step / updates_per_step queries with all their responses."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature of rollouts; response log-probs are taken at it on every side (query log-probs always at 1)."""
    max_response_tokens: PositiveInt = 3000
    """Responses are cut here and flagged truncated."""

    # --- reward
    accuracy_reward: Annotated[float, Field(ge=0)] = 0.9
    """Reward of a correct last box."""
    format_reward: Annotated[float, Field(ge=0)] = 0.1
    """Reward of the shape <think>...</think>...\\boxed{...}."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """DAPO's soft overlong penalty: tokens before max_response_tokens in which it grows from 0; 0 switches it off."""
    overlong_penalty: Annotated[float, Field(ge=0)] = 1.0
    """Penalty at the end of the overlong zone."""
    refill_constant_groups: bool = False
    """DAPO's dynamic sampling: drop groups whose rewards are all equal and sample further queries in their place."""
    refill_rounds: PositiveInt = 3
    """Most extra sampling rounds for refill_constant_groups before the step goes on with what it has."""

    # --- advantage
    advantage: Literal["group_normalized", "group_mean", "leave_one_out", "batch_mean", "gae"] = "group_normalized"
    """Baseline and scale: GRPO, Dr.GRPO, RLOO, REINFORCE, PPO (docs/method.md)."""
    advantage_eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the group's standard deviation."""
    whiten_advantages: bool = False
    """Shift and scale advantages over the whole batch to mean 0, variance 1 (REINFORCE++)."""
    gamma: Fraction = 1.0
    """Discount of GAE."""
    gae_lambda: Fraction = 1.0
    """Lambda of GAE."""

    # --- policy term
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio per token, or one per response (GSPO)."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = 0.2
    """Ratio clipped below at 1 - clip_low; null: no clipping."""
    clip_high: Annotated[float, Field(gt=0)] | None = 0.3
    """Ratio clipped above at 1 + clip_high; null: no clipping."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Bound on the loss of negative advantages, as a multiple of |A|; null: none."""
    normalizer: Literal["sequence", "token", "constant"] = "sequence"
    """Aggregation over the global update: mean over rows of token means; mean over tokens; sum over max_response_tokens."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of an entropy bonus on response tokens."""
    importance_cap: Annotated[float, Field(gt=0)] | None = None
    """Truncated importance correction of the gap between generator and trainer: cap of the per-token weight; null: off."""

    # --- regularizer
    kl_on: Literal["none", "response", "query", "all"] = "response"
    """Where the KL penalty sits: Policy-KL on responses (GRPO), Query-KL on queries (ERPO), all tokens, or nowhere."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.01
    """alpha: weight of the KL penalty."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator."""
    kl_form: Literal["loss", "importance_weighted", "future"] = "loss"
    """Action-side variants for kl_on: response: RPG's importance-weighted KL, FRPO's Future-KL in the advantage."""

    # --- query weight
    query_weight: Literal["none", "reference_likelihood", "reference_inverse_nll", "online_inverse_nll"] = "none"
    """w(q), multiplies the policy term only (docs/method.md)."""
    query_weight_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Largest weight, applied after scaling to mean 1; null: none. online_inverse_nll has none by definition."""
    renormalise_query_weights: bool = False
    """Divide the weights by their mean once more after the cap, to tell weights from a larger step."""

    # --- critic (advantage: gae)
    value_coef: Annotated[float, Field(gt=0)] = 0.5
    """Weight of the value loss."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.5
    """Clip range of the value loss; null: none."""
    value_learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Learning rate of the value head, which reads the policy's last hidden states without a gradient into them."""
    value_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """First steps in which only the value head learns."""

    # --- optimizer
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """AdamW, constant after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0."""
    beta1: Fraction = 0.9
    """AdamW."""
    beta2: Fraction = 0.999
    """AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """AdamW, decoupled."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm is clipped here."""

    # --- diagnostics that cost time (the numbers of the training do not depend on them)
    policy_kl_every: Annotated[int, Field(ge=0)] = 10
    """Steps between measurements of Policy-KL where it is not in the loss; 0: never."""
    gradient_cosine_every: Annotated[int, Field(ge=0)] = 0
    """Steps between measurements of the cosine between the Query-KL gradient and the policy gradient; 0: never."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Steps between in-training evaluations at T = 1; 0: never."""

    @property
    def queries_per_update(self) -> int:
        """Queries of one optimizer update."""
        return self.queries_per_step // self.updates_per_step

    @property
    def needs_reference_on_responses(self) -> bool:
        """Whether the reference policy must score responses at every step."""
        return self.kl_on in ("response", "all") and (self.kl_coef > 0 or self.kl_form != "loss")

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        for problem in _contradictions(self):
            raise ValueError(problem)
        return self


def _contradictions(run: RunConfig) -> list[str]:
    """Each refusal says what clashes, why, and what to write instead."""
    found = []

    def refuse(condition: bool, text: str) -> None:
        if condition:
            found.append(text)

    grouped = {"group_normalized", "group_mean", "leave_one_out"}
    refuse(
        run.queries_per_step % run.updates_per_step != 0,
        f"queries_per_step ({run.queries_per_step}) must be a multiple of updates_per_step ({run.updates_per_step})",
    )
    refuse(
        run.advantage in grouped and run.responses_per_query < 2 and run.steps > 0,
        f"advantage: {run.advantage} compares the responses of one query, so responses_per_query must be at least 2; "
        "use advantage: batch_mean for single responses",
    )
    refuse(
        (run.clip_low is None) != (run.clip_high is None),
        "clip_low and clip_high are set or null together; for one open side give it a large value",
    )
    refuse(
        run.kl_form != "loss" and run.kl_on != "response",
        f"kl_form: {run.kl_form} needs kl_on: response; query tokens are not sampled from the policy (kl_on is {run.kl_on})",
    )
    refuse(
        run.kl_form == "future" and run.advantage == "gae",
        "kl_form: future adds to group advantages; with advantage: gae use kl_form: loss",
    )
    refuse(
        run.overlong_buffer_tokens > run.max_response_tokens,
        f"overlong_buffer_tokens ({run.overlong_buffer_tokens}) is longer than max_response_tokens ({run.max_response_tokens})",
    )
    refuse(
        run.accuracy_reward == 0 and run.format_reward == 0,
        "accuracy_reward and format_reward are both 0: nothing is rewarded",
    )
    for key, why in _settings_without_effect(run):
        refuse(True, f"{key} is set but has no effect {why}; leave it out")
    return found


def _settings_without_effect(run: RunConfig) -> list[tuple[str, str]]:
    """Keys given a value of their own although another key switches them off."""
    off = {
        "kl_coef": (run.kl_on == "none", "with kl_on: none"),
        "kl_estimator": (run.kl_on == "none" or run.kl_form == "future", "without a KL loss term"),
        "query_weight_cap": (
            run.query_weight in ("none", "online_inverse_nll"),
            f"with query_weight: {run.query_weight}",
        ),
        "renormalise_query_weights": (run.query_weight == "none", "with query_weight: none"),
        "overlong_penalty": (run.overlong_buffer_tokens == 0, "with overlong_buffer_tokens: 0"),
        "refill_rounds": (not run.refill_constant_groups, "with refill_constant_groups: false"),
        "gamma": (run.advantage != "gae", f"with advantage: {run.advantage}"),
        "gae_lambda": (run.advantage != "gae", f"with advantage: {run.advantage}"),
        "value_coef": (run.advantage != "gae", f"with advantage: {run.advantage}"),
        "value_clip": (run.advantage != "gae", f"with advantage: {run.advantage}"),
        "value_learning_rate": (run.advantage != "gae", f"with advantage: {run.advantage}"),
        "value_warmup_steps": (run.advantage != "gae", f"with advantage: {run.advantage}"),
        "advantage_eps": (run.advantage != "group_normalized", f"with advantage: {run.advantage}"),
    }
    fields = RunConfig.model_fields
    return [(key, why) for key, (idle, why) in off.items() if idle and getattr(run, key) != fields[key].default]


class Machine(Frozen):
    """How a job runs on this machine: speed, memory and safety. Nothing here is part of a spec or triggers a rerun."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO stage; numbers agree within float tolerance between stages."""
    micro_batch_tokens: PositiveInt = 16384
    """Padded tokens per forward and backward on one rank."""
    offload_optimizer: bool = False
    """Keep optimizer states in CPU memory."""
    offload_parameters: bool = False
    """Keep parameters in CPU memory; needs zero_stage: 3."""
    share_queries: Literal["auto", "on", "off"] = "auto"
    """Compute the query of a group once in updates, not with each response: auto does where it saves a sixth of the positions and
    more; zero_stage: 3, a critic and activation_checkpointing rule it out."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    generator: Literal["sampler", "vllm"] = "sampler"
    """Engine of the rollouts: the package's own sampler, or vLLM."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share one vLLM engine."""
    rollout_gpus: Annotated[int, Field(ge=0)] = 0
    """GPUs of each node for vLLM alone, in processes of their own; 0: vLLM shares the GPUs of the trainer's ranks."""
    engine_memory: Annotated[float, Field(gt=0, lt=1)] = 0.4
    """Share of GPU memory given to vLLM beside the trainer."""
    rollout_rows: PositiveInt = 256
    """Responses sampled at once by the package's sampler on one rank."""
    save_every: PositiveInt = 10
    """Steps between saved training states."""
    keep_states: PositiveInt = 2
    """Newest states kept; milestones are kept besides."""
    keep_milestone_states: bool = True
    """Keep the training state at milestones, so that a longer run continues from it."""
    keep_best_state: bool = False
    """Keep the training state with the highest mean training reward since the state before it."""
    time_limit_minutes: Annotated[float, Field(gt=0)] | None = None
    """Stop and save when another step would end later than so long after the start; Slurm's own end time is obeyed anyway."""
    samples_every: Annotated[int, Field(ge=0)] = 10
    """Steps between sample tables; 0: never."""
    max_logprob_gap: Annotated[float, Field(gt=0)] = 0.1
    """Mean absolute log-prob gap between generator and trainer that stops the run: the generator would be stale or wrong."""
    max_grader_error_share: Fraction = 0.01
    """Share of grader errors that stops the run."""
    max_skipped_updates: PositiveInt = 3
    """Consecutive updates with a non-finite gradient that stop the run."""
    collapse_watch: Literal["off", "warn", "stop"] = "warn"
    """What happens when means over collapse_window steps say that the run collapses (docs/training.md)."""
    collapse_window: PositiveInt = 20
    """Steps over which the watch takes means."""
    min_entropy_share: Fraction = 0.1
    """The watch speaks when the entropy falls below this share of its first window."""
    min_reward_share: Fraction = 0.5
    """... when the reward falls below this share of its best window."""
    max_length_factor: Annotated[float, Field(gt=1)] = 4.0
    """... when the response length grows or shrinks by more than this factor since its first window."""
    max_query_kl: Annotated[float, Field(gt=0)] = 1.0
    """... when Query-KL per token is larger than this."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Experiment trackers that get a copy of the metrics."""
    deterministic: bool = False
    """Refuse kernels whose sums depend on the order of threads; slower on GPUs, the same on CPUs (docs/training.md)."""
    grading_workers: Annotated[int, Field(ge=0)] = 1
    """Worker processes of the grader; 0: as many as cores."""

    @model_validator(mode="after")
    def _possible(self) -> Machine:
        if self.offload_parameters and self.zero_stage != 3:
            raise ValueError(f"offload_parameters needs zero_stage: 3, which alone deals parameters out (it is {self.zero_stage})")
        if self.offload_optimizer and self.zero_stage == 0:
            raise ValueError("offload_optimizer needs zero_stage: 1, 2 or 3 (it is 0)")
        return self


def canonical_json(value: Any) -> str:
    """The one spelling of a setting as text: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def non_default(model: BaseModel) -> dict[str, Any]:
    """Settings that differ from the class's defaults: a new knob with a default leaves every old spec as it was."""
    dumped = model.model_dump(mode="json")
    fields = type(model).model_fields
    return {key: value for key, value in dumped.items() if fields[key].is_required() or getattr(model, key) != fields[key].default}


def run_settings(run: RunConfig) -> dict[str, Any]:
    """The run's non-default settings that decide its numbers (names of model and data included, evaluation not)."""
    return {key: value for key, value in non_default(run).items() if key not in {"steps", "seeds"}}
