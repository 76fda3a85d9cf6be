"""Studies, typed once: runs, tables and figures as frozen pydantic models, and the one loader of study files.

A *run* is a set of settings with a name, a *table* or *figure* selects runs, a *study* is one YAML file of all of them.
Nothing here imports torch or Snakemake: a dry run and the command line read studies through this module alone.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

RESULTS_VERSION = 1
"""Part of every spec. Raise it when a correction changes numbers: everything is then computed again."""

NAME = r"[a-z0-9][a-z0-9.-]*"
"""Names of runs, tables, figures, models, data sets: directory, row label and target at once."""

PROMPT_SUFFIX = (
    " You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The reasoning "
    "process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)
"""The paper's instruction, appended to every problem (METHOD: protocol)."""

PositiveInt = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class _Frozen(BaseModel):
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


class RunConfig(_Frozen):
    """Everything that decides the numbers of one training run. Defaults are the paper's protocol (METHOD, section 5)."""

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
    """Baseline and scale: GRPO, Dr.GRPO, RLOO, REINFORCE, PPO (METHOD, section 3)."""
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
    """w(q), multiplies the policy term only (METHOD, section 4)."""
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


class Machine(_Frozen):
    """How a job runs on this machine: speed, memory and safety. Nothing here is part of a spec or triggers a rerun."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    """DeepSpeed ZeRO stage; numbers agree within float tolerance between stages."""
    micro_batch_tokens: PositiveInt = 16384
    """Padded tokens per forward and backward on one rank."""
    offload_optimizer: bool = False
    """Keep optimizer states in CPU memory."""
    offload_parameters: bool = False
    """Keep parameters in CPU memory (ZeRO 3)."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    generator: Literal["sampler", "vllm"] = "sampler"
    """Engine of the rollouts: the package's own sampler, or vLLM."""
    tensor_parallel: PositiveInt = 1
    """GPUs that share one vLLM engine."""
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
    samples_every: Annotated[int, Field(ge=0)] = 10
    """Steps between sample tables; 0: never."""
    max_logprob_gap: Annotated[float, Field(gt=0)] = 0.1
    """Mean absolute log-prob gap between generator and trainer that stops the run: the generator would be stale or wrong."""
    max_grader_error_share: Fraction = 0.01
    """Share of grader errors that stops the run."""
    max_skipped_updates: PositiveInt = 3
    """Consecutive updates with a non-finite gradient that stop the run."""
    deterministic: bool = False
    """Deterministic kernels; slower on GPUs."""
    grading_workers: Annotated[int, Field(ge=0)] = 1
    """Worker processes of the grader; 0: as many as cores."""


class SyntheticModel(_Frozen):
    """A small Qwen2-architecture model made on the spot: own tokenizer, warm-started on synthetic texts (query and solution)."""

    kind: Literal["synthetic"]
    """Marks this sort of model."""
    hidden_size: PositiveInt = 128
    """Width."""
    num_layers: PositiveInt = 3
    """Depth."""
    num_heads: PositiveInt = 4
    """Attention heads (also key-value heads)."""
    warm_start_steps: PositiveInt = 600
    """Most updates of the warm start."""
    warm_start_batch: PositiveInt = 64
    """Texts per update."""
    warm_start_learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate of the warm start."""
    annotator_noise: Fraction = 0.0
    """Share of steps in which the annotator who wrote the warm-start solutions errs and goes on from the error."""
    stop_at_accuracy: Fraction = 0.42
    """The warm start ends when accuracy at T = 1 on held-out problems reaches this."""
    train_set: str = "train"
    """Synthetic train set whose generator writes the warm-start texts (other problems than the RL ones)."""
    seed: int = 0
    """Seed of initialisation and texts."""


class PretrainedModel(_Frozen):
    """An existing checkpoint in Hugging Face form."""

    kind: Literal["pretrained"]
    """Marks this sort of model."""
    source: str
    """Hub id or local folder."""
    revision: str | None = None
    """Pinned commit of the hub id."""
    gguf_file: str | None = None
    """File inside `source` when it is a GGUF model."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint: off unless you trust it."""
    parameters_billions: Annotated[float, Field(gt=0)] | None = None
    """Size, for the planner."""


class SyntheticData(_Frozen):
    """Problems from the project's own seeded generator."""

    kind: Literal["synthetic"]
    """Marks this sort of data."""
    families: tuple[str, ...]
    """Problem families (erpo.problems.FAMILIES)."""
    levels: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Difficulty levels, 1 to 5."""
    size: PositiveInt
    """Number of problems."""
    seed: int = 0
    """Seed of the generator."""


class FileData(_Frozen):
    """Problems from a JSONL file: `file` in the data folder, or downloaded from `url`, checked against `sha256`."""

    kind: Literal["file"]
    """Marks this sort of data."""
    file: str
    """File name in the data folder (`data_dir` of the study, or the environment variable ERPO_DATA)."""
    url: str | None = None
    """Where to fetch the file when it is not in the data folder."""
    sha256: str | None = None
    """Checksum of the file; a mismatch is refused."""
    levels: tuple[int, ...] | None = None
    """Keep only these levels (training sets); null: all."""


ModelEntry = Annotated[SyntheticModel | PretrainedModel, Field(discriminator="kind")]
DataEntry = Annotated[SyntheticData | FileData, Field(discriminator="kind")]


class Evaluation(_Frozen):
    """How checkpoints are evaluated (METHOD, section 6)."""

    temperatures: tuple[Annotated[float, Field(ge=0, le=2)], ...]
    """The sweep."""
    samples: PositiveInt = 32
    """n: responses per problem and temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; 1 is off."""
    max_response_tokens: PositiveInt = 3000
    """Length limit of evaluation responses."""
    low_band: tuple[float, float] = (0.0, 1.0)
    """Temperatures of the low band, both ends included."""
    high_band: tuple[float, float] = (1.2, 1.5)
    """Temperatures of the high band, both ends included."""
    shard_width: Annotated[float, Field(gt=0)] = 0.5
    """Temperatures in one interval of this width share one engine session (one job)."""
    keep_token_ids: bool = True
    """Keep response token ids in the sample store; off saves about half its size."""

    @field_validator("temperatures")
    @classmethod
    def _canonical(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sorted({round(value, 4) for value in values}))


class Selection(_Frozen):
    """What a table or figure is made of."""

    runs: tuple[str, ...]
    """Names of runs, or patterns with * and ?, in the order of the rows."""
    temperatures: Literal["all", "low_band", "high_band"] | tuple[float, ...] = "all"
    """Which part of the sweep."""
    benchmarks: tuple[str, ...] | None = None
    """Unset: all."""
    steps: tuple[int, ...] | None = None
    """Checkpoints; unset: each run's own last step."""
    seeds: tuple[int, ...] | None = None
    """Unset: each run's own seeds."""
    caption: str = ""
    """What it shows, in a sentence."""
    baseline: str | None = None
    """Run against which differences are tested, paired over problems."""


class Table(Selection):
    """One table: a row per run (and step), columns by `columns`, one block per metric."""

    columns: Literal["benchmark", "temperature", "band", "step", "none"] = "benchmark"
    """What the columns stand for."""
    metrics: tuple[str, ...] = ("avg@n",)
    """avg@n, pass@n, pass@1, pass@1:first, pass@K, maj@n, or a training metric such as kl/query (value at the row's step)."""


class Figure(Selection):
    """One figure."""

    kind: Literal[
        "drift",
        "temperature_sweep",
        "training_dynamics",
        "long_run",
        "query_weights",
        "train_eval_gap",
        "gradient_cosine",
    ]
    """Which drawing."""


class Study(_Frozen):
    """One file: models, data, evaluation, and the runs, tables and figures made of them."""

    name: str
    """Taken from the file name."""
    title: str = ""
    """Heading of the report."""
    data_dir: str = "data"
    """Folder of the data files, relative to the project; the environment variable ERPO_DATA wins."""
    prompt_suffix: str = PROMPT_SUFFIX
    """Appended to every problem."""
    max_query_tokens: PositiveInt = 1024
    """Longer queries are left out of training and listed in the manifest."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of every run that names none."""
    save_every: PositiveInt = 10
    """Steps between saved training states."""
    models: dict[str, ModelEntry]
    """Starting checkpoints by name."""
    train_sets: dict[str, DataEntry]
    """Training sets by name."""
    benchmarks: dict[str, DataEntry]
    """Benchmarks by name, in the order of the tables."""
    evaluation: Evaluation
    """The temperature sweep."""
    runs: dict[str, RunConfig]
    """Runs by name; `like` and `defaults` are resolved."""
    tables: dict[str, Table] = {}
    """Tables by name."""
    figures: dict[str, Figure] = {}
    """Figures by name."""

    @model_validator(mode="after")
    def _consistent(self) -> Study:
        for group, names in {
            "runs": self.runs,
            "tables": self.tables,
            "figures": self.figures,
            "models": self.models,
            "train_sets": self.train_sets,
            "benchmarks": self.benchmarks,
        }.items():
            for name in names:
                if not re.fullmatch(NAME, name):
                    raise ValueError(
                        f"{group}.{name}: names are lower-case letters, digits, dots and dashes, and start with a letter or digit"
                    )
        _check_run_names(self)
        for name, run in self.runs.items():
            _known(f"runs.{name}.model", run.model, self.models)
            _known(f"runs.{name}.train_set", run.train_set, self.train_sets)
        for group, artefacts in (("tables", self.tables), ("figures", self.figures)):
            for name, artefact in artefacts.items():
                _check_selection(self, f"{group}.{name}", artefact)
        _check_equal_runs(self)
        return self


def _known(where: str, name: str, names: dict[str, Any]) -> None:
    if name not in names:
        raise ValueError(f"{where}: {name!r} is not defined; there are: {', '.join(names) or 'none'}")


_RULES = ("all", "tables", "figures", "report", "data", "train", "generate", "score", "table", "figure")


def _check_run_names(study: Study) -> None:
    taken: dict[str, str] = {name: "a rule of the workflow" for name in _RULES}
    for group, names in (("runs", study.runs), ("tables", study.tables), ("figures", study.figures)):
        for name in names:
            if name in taken:
                raise ValueError(
                    f"{group}.{name}: the name is already {taken[name]}; every run, table and figure is a target and needs its own"
                )
            taken[name] = f"one of {group}"


def _check_selection(study: Study, where: str, artefact: Selection) -> None:
    for pattern in artefact.runs:
        if not fnmatch.filter(study.runs, pattern):
            raise ValueError(f"{where}.runs: {pattern!r} matches no run; there are: {', '.join(study.runs)}")
    for benchmark in artefact.benchmarks or ():
        _known(f"{where}.benchmarks", benchmark, study.benchmarks)
    if artefact.baseline is not None:
        _known(f"{where}.baseline", artefact.baseline, study.runs)
    if isinstance(artefact.temperatures, tuple):
        missing = [value for value in artefact.temperatures if value not in study.evaluation.temperatures]
        if missing:
            raise ValueError(f"{where}.temperatures: {missing} are not in evaluation.temperatures")
    elif not temperatures_of(study, artefact.temperatures):
        raise ValueError(f"{where}.temperatures: no temperature of the sweep lies in the {artefact.temperatures}")


def _check_equal_runs(study: Study) -> None:
    seen: dict[str, str] = {}
    for name, run in study.runs.items():
        key = f"untrained {run.model}" if run.steps == 0 else json.dumps(run_settings(run), sort_keys=True)
        if key in seen:
            raise ValueError(
                f"runs.{seen[key]} and runs.{name} resolve to the same settings; remove one "
                "(for later checkpoints of a run give the table `steps`)"
            )
        seen[key] = name


# --- loading -----------------------------------------------------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice (plain YAML keeps the last one in silence)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"line {node.start_mark.line + 1}: the key {key!r} is given twice")
        return super().construct_mapping(node, deep=deep)


def study_path(name: str, root: Path = Path(".")) -> Path:
    """Path of the study `name` (config/NAME.yaml) or of a study file given by path.

    Raises:
        ValueError: no such study; the sentence lists those there are.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else root / "config" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(entry.stem for entry in (root / "config").glob("*.yaml"))
        raise ValueError(f"study {name!r} not found ({path}); there are: {', '.join(known) or 'none'}")
    return path


def load_study(name: str, root: Path = Path(".")) -> Study:
    """Read, resolve (`defaults`, `like`) and check a study.

    Raises:
        ValueError: one readable sentence per fault: where, what, and what to do.
    """
    path = study_path(name, root)
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: a study is a mapping with models, runs, tables; found {type(raw).__name__}")
    raw = dict(raw)
    defaults = raw.pop("defaults", {}) or {}
    try:
        raw["runs"] = resolve_runs(raw.get("runs") or {}, defaults)
        return Study(name=path.stem, **raw)
    except ValidationError as error:
        raise ValueError("; ".join(f"{path}: {sentence}" for sentence in _sentences(error))) from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def resolve_runs(runs: dict[str, Any], defaults: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of every run after inheritance: own keys, then those of `like` (recursively), then `defaults`.

    Raises:
        ValueError: an unknown `like`, a circle, or an entry that is not a mapping.
    """

    def settings(name: str, trail: tuple[str, ...]) -> dict[str, Any]:
        if name in trail:
            raise ValueError(f"runs.{trail[0]}: `like` goes round in a circle ({' -> '.join((*trail, name))})")
        own = runs[name] if runs[name] is not None else {}
        if not isinstance(own, dict):
            raise ValueError(f"runs.{name}: expected settings such as {{kl_on: query}}, found {own!r}")
        parent = own.get("like")
        if parent is not None and parent not in runs:
            raise ValueError(f"runs.{name}.like: {parent!r} is not a run; there are: {', '.join(runs)}")
        inherited = settings(parent, (*trail, name)) if parent is not None else defaults
        return {**inherited, **{key: value for key, value in own.items() if key != "like"}}

    return {name: settings(name, ()) for name in runs}


def _sentences(error: ValidationError) -> list[str]:
    sentences = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"] if part not in ("synthetic", "file", "pretrained"))
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            key = str(fault["loc"][-1])
            message = f"unknown key {key!r}{_did_you_mean(key)}"
        elif not message.startswith(where):
            message = (
                f"{message} (found {fault['input']!r})"
                if fault["type"] != "value_error" and fault["type"] != "missing"
                else message
            )
        sentences.append(f"{where}: {message}" if where and not message.startswith(where) else message)
    return sentences


def _did_you_mean(key: str) -> str:
    import difflib

    known = [*RunConfig.model_fields, *Study.model_fields, *Table.model_fields, *Figure.model_fields, *Evaluation.model_fields]
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; config/README.md lists all keys"


# --- what a job sees ---------------------------------------------------------------------------------------------------

_NOT_TRAINING = {"steps", "seeds", "model", "train_set"}


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


def run_spec(study: Study, name: str) -> dict[str, Any]:
    """Everything that decides the weights of a run besides seed and step: what its job sees and what retriggers it."""
    run = study.runs[name]
    settings = {key: value for key, value in non_default(run).items() if key not in _NOT_TRAINING}
    return {
        "results_version": RESULTS_VERSION,
        "run": settings,
        "model": model_spec(study, run.model),
        "train_set": train_set_spec(study, run.train_set),
    }


def model_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a starting checkpoint; a synthetic one is warm-started on its train set's generator."""
    entry = study.models[name]
    spec: dict[str, Any] = {"results_version": RESULTS_VERSION, "entry": non_default(entry), "prompt_suffix": study.prompt_suffix}
    if isinstance(entry, SyntheticModel):
        spec["texts"] = non_default(study.train_sets[entry.train_set])
    return spec


def train_set_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a training set."""
    return {
        "results_version": RESULTS_VERSION,
        "entry": non_default(study.train_sets[name]),
        "prompt_suffix": study.prompt_suffix,
        "max_query_tokens": study.max_query_tokens,
    }


def benchmark_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a benchmark."""
    return {"results_version": RESULTS_VERSION, "entry": non_default(study.benchmarks[name]), "prompt_suffix": study.prompt_suffix}


def artefact_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a table or figure: its selection, resolved to runs, temperatures and bands."""
    artefact = study.tables.get(name) or study.figures[name]
    evaluation = study.evaluation
    return {
        "name": name,
        "study": study.name,
        "artefact": artefact.model_dump(mode="json"),
        "runs": list(runs_of(study, artefact)),
        "temperatures": list(temperatures_of(study, artefact.temperatures)),
        "benchmarks": list(artefact.benchmarks or study.benchmarks),
        "samples": evaluation.samples,
        "low_band": list(evaluation.low_band),
        "high_band": list(evaluation.high_band),
    }


# --- cells: which checkpoints an artefact needs ------------------------------------------------------------------------


class Cell(NamedTuple):
    """One evaluated checkpoint of one artefact."""

    run: str
    seed: int
    step: int


def runs_of(study: Study, selection: Selection) -> tuple[str, ...]:
    """Names selected by the patterns, in their order, each once."""
    names: dict[str, None] = {}
    for pattern in selection.runs:
        names.update(dict.fromkeys(fnmatch.filter(study.runs, pattern)))
    return tuple(names)


def temperatures_of(study: Study, selection: str | tuple[float, ...]) -> tuple[float, ...]:
    """Temperatures named by a band, by `all`, or one by one."""
    sweep = study.evaluation.temperatures
    if selection == "all":
        return sweep
    if isinstance(selection, str):
        low, high = getattr(study.evaluation, selection)
        return tuple(value for value in sweep if low - 1e-9 <= value <= high + 1e-9)
    return tuple(sorted(selection))


def cells(study: Study, selection: Selection) -> list[Cell]:
    """Checkpoints a table or figure needs: runs x their seeds x steps. The untrained run has step 0 alone."""
    found = []
    for name in runs_of(study, selection):
        run = study.runs[name]
        steps = (0,) if run.steps == 0 else (selection.steps or (run.steps,))
        for seed in selection.seeds or seeds_of(study, name):
            found += [Cell(name, seed, step) for step in steps]
    return found


def seeds_of(study: Study, name: str) -> tuple[int, ...]:
    """Seeds of a run: its own, or the study's."""
    return study.runs[name].seeds or study.seeds


def milestones(study: Study) -> dict[str, tuple[int, ...]]:
    """Steps at which each run leaves a policy: its last step and every one that a table or figure asks for."""
    steps = {name: {run.steps} for name, run in study.runs.items()}
    for artefact in (*study.tables.values(), *study.figures.values()):
        for name in runs_of(study, artefact):
            steps[name].update(artefact.steps or () if study.runs[name].steps > 0 else ())
    return {name: tuple(sorted(found - {0})) for name, found in steps.items()}


def shards(study: Study) -> dict[str, tuple[float, ...]]:
    """Temperatures of the sweep by shard label. A label names a fixed interval, so adding a temperature moves no other."""
    found: dict[str, list[float]] = {}
    width = study.evaluation.shard_width
    for value in study.evaluation.temperatures:
        index = max(math.ceil(value / width - 1e-9), 1)
        found.setdefault(f"upto{index * width:g}", []).append(value)
    return {label: tuple(values) for label, values in found.items()}


def temperature_label(value: float) -> str:
    """Canonical spelling in file names and tables: at least one decimal, no float residue."""
    text = f"{round(value, 4):g}"
    return text if "." in text else f"{text}.0"


# --- what the stages of a study are asked for --------------------------------------------------------------------------

_TRAINING_FIGURES = {"drift", "training_dynamics", "query_weights", "gradient_cosine"}
_SCORED_AND_TRAINING_FIGURES = {"train_eval_gap"}
_OF_EVALUATION = {"temperatures", "benchmarks", "samples", "low_band", "high_band"}


def needs_scores(artefact: Table | Figure) -> bool:
    """Whether it shows evaluation results (a metric without a slash is one)."""
    if isinstance(artefact, Figure):
        return artefact.kind not in _TRAINING_FIGURES
    return any("/" not in metric for metric in artefact.metrics)


def needs_training(artefact: Table | Figure) -> bool:
    """Whether it shows what was logged during training (metric keys have a slash)."""
    if isinstance(artefact, Figure):
        return artefact.kind in _TRAINING_FIGURES | _SCORED_AND_TRAINING_FIGURES
    return any("/" in metric for metric in artefact.metrics)


def scored_cells(study: Study) -> dict[str, list[Cell]]:
    """Checkpoints to evaluate, by run: every run's last step for all its seeds, and what tables and figures ask besides."""
    found = {name: {Cell(name, seed, run.steps): None for seed in seeds_of(study, name)} for name, run in study.runs.items()}
    for artefact in (*study.tables.values(), *study.figures.values()):
        for cell in cells(study, artefact) if needs_scores(artefact) else ():
            found[cell.run][cell] = None
    return {name: sorted(chosen) for name, chosen in found.items()}


def queries_spec(study: Study, model: str, train_set: str) -> dict[str, Any]:
    """Spec of prepared training queries: the problems, and the tokenizer. Benchmarks have no say in what is trained on."""
    return {**train_set_spec(study, train_set), "model": model_spec(study, model)}


def overlap_spec(study: Study) -> dict[str, Any]:
    """Spec of the overlap report of a training set with the benchmarks."""
    benchmarks = {name: non_default(entry) for name, entry in study.benchmarks.items()}
    return {"results_version": RESULTS_VERSION, "benchmarks": benchmarks}


def prepared_benchmark_spec(study: Study, model: str, benchmark: str) -> dict[str, Any]:
    """Spec of a benchmark in the prompts of one model."""
    return {**benchmark_spec(study, benchmark), "model": model_spec(study, model)}


def reference_spec(study: Study, model: str, train_set: str) -> dict[str, Any]:
    """Spec of a reference cache."""
    return {"results_version": RESULTS_VERSION, "model": model_spec(study, model), "train_set": train_set_spec(study, train_set)}


def generation_spec(study: Study, cell: Cell, temperatures: tuple[float, ...]) -> dict[str, Any]:
    """Spec of the samples of one checkpoint at some temperatures. The policy itself is known by its marker."""
    evaluation = study.evaluation
    spec: dict[str, Any] = {
        "results_version": RESULTS_VERSION,
        **cell._asdict(),
        "temperatures": list(temperatures),
        "samples": evaluation.samples,
        "top_p": evaluation.top_p,
        "max_response_tokens": evaluation.max_response_tokens,
        "prompt_suffix": study.prompt_suffix,
        "benchmarks": {name: non_default(entry) for name, entry in study.benchmarks.items()},
    }
    return spec if evaluation.keep_token_ids else {**spec, "keep_token_ids": False}


def scores_spec(study: Study, cell: Cell) -> dict[str, Any]:
    """Spec of the graded samples of one checkpoint, and their provenance."""
    evaluation = study.evaluation
    return {
        "results_version": RESULTS_VERSION,
        "study": study.name,
        **cell._asdict(),
        "temperatures": list(evaluation.temperatures),
        "samples": evaluation.samples,
        "sampling": {"top_p": evaluation.top_p, "max_response_tokens": evaluation.max_response_tokens},
        "prompt_suffix": study.prompt_suffix,
        "benchmarks": {name: non_default(entry) for name, entry in study.benchmarks.items()},
    }


def drawn_spec(study: Study, name: str) -> dict[str, Any]:
    """Spec of a table or figure with the checkpoints it is made of. A figure of training alone knows nothing of the evaluation."""
    artefact = study.tables.get(name) or study.figures[name]
    spec = {**artefact_spec(study, name), "cells": [list(cell) for cell in cells(study, artefact)]}
    if isinstance(artefact, Figure) and not needs_scores(artefact):
        spec = {key: value for key, value in spec.items() if key not in _OF_EVALUATION}
    return spec


def report_spec(study: Study) -> dict[str, Any]:
    """Spec of the report: what it shows, and the settings of the runs it shows."""
    artefacts = {**study.tables, **study.figures}
    shown = {name: None for artefact in artefacts.values() for name in runs_of(study, artefact)}
    return {
        "study": study.name,
        "title": study.title,
        "tables": list(study.tables),
        "figures": list(study.figures),
        "runs": {name: run_settings(study.runs[name]) for name in shown},
        "evaluation": study.evaluation.model_dump(mode="json"),
    }
