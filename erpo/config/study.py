"""A study: models, data, evaluation, and the runs, tables and figures made of them."""

from __future__ import annotations

import fnmatch
import re
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from erpo.config.run import Fraction, Frozen, PositiveInt, RunConfig, canonical_json, run_settings

NAME = r"[a-z0-9][a-z0-9.-]*"
"""Names of runs, tables, figures, models, data sets: directory, row label and target at once."""


PROMPT_SUFFIX = (
    " You FIRST think about the reasoning process as an internal monologue and then provide the final answer. The reasoning "
    "process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in \\boxed{}."
)
"""The paper's instruction, appended to every problem (docs/method.md)."""


class SyntheticModel(Frozen):
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
    hasty_share: Fraction = 0.0
    """Share of solutions in the last tenth of the warm start that give the answer without the steps: the model learns to guess."""
    stop_at_accuracy: Fraction = 0.42
    """The warm start ends when accuracy at T = 1 on held-out problems reaches this."""
    train_set: str = "train"
    """Synthetic train set whose generator writes the warm-start texts (other problems than the RL ones)."""
    seed: int = 0
    """Seed of initialisation and texts."""


class PretrainedModel(Frozen):
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


class SyntheticData(Frozen):
    """Problems from the project's own seeded generator."""

    kind: Literal["synthetic"]
    """Marks this sort of data."""
    families: tuple[str, ...]
    """Problem families (erpo.data.problems.FAMILIES)."""
    levels: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Difficulty levels, 1 to 5."""
    size: PositiveInt
    """Number of problems."""
    seed: int = 0
    """Seed of the generator."""


class FileData(Frozen):
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
    without: tuple[str, ...] = ()
    """Benchmarks whose problems are left out of this training set (equal up to layout)."""


ModelEntry: TypeAlias = Annotated[SyntheticModel | PretrainedModel, Field(discriminator="kind")]
DataEntry: TypeAlias = Annotated[SyntheticData | FileData, Field(discriminator="kind")]


class Evaluation(Frozen):
    """How checkpoints are evaluated (docs/evaluation.md)."""

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


class Selection(Frozen):
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
    baseline: str | dict[str, str] | None = None
    """Run against which differences are tested, paired over problems; or, for each run, its own: {erpo: grpo, dapo-erpo: dapo}."""


class Table(Selection):
    """One table: a row per run (and step), columns by `columns`, one block per metric."""

    columns: Literal["benchmark", "temperature", "band", "step", "none", "reported"] = "benchmark"
    """What the columns stand for; `reported`: every number the paper reports beside ours, one a row."""
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


class Study(Frozen):
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
    tables: dict[str, Table] = {}  # noqa: RUF012 - copied by pydantic
    """Tables by name."""
    figures: dict[str, Figure] = {}  # noqa: RUF012 - copied by pydantic
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
        for name, entry in self.train_sets.items():
            for benchmark in entry.without if isinstance(entry, FileData) else ():
                _known(f"train_sets.{name}.without", benchmark, self.benchmarks)
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
    if isinstance(artefact.baseline, str):
        _known(f"{where}.baseline", artefact.baseline, study.runs)
    for run, baseline in artefact.baseline.items() if isinstance(artefact.baseline, dict) else ():
        _known(f"{where}.baseline", run, study.runs)
        _known(f"{where}.baseline.{run}", baseline, study.runs)
    if isinstance(artefact.temperatures, tuple):
        missing = [value for value in artefact.temperatures if value not in study.evaluation.temperatures]
        if missing:
            raise ValueError(f"{where}.temperatures: {missing} are not in evaluation.temperatures")
    elif not temperatures_of(study, artefact.temperatures):
        raise ValueError(f"{where}.temperatures: no temperature of the sweep lies in the {artefact.temperatures}")


def _check_equal_runs(study: Study) -> None:
    seen: dict[str, str] = {}
    for name, run in study.runs.items():
        key = f"untrained {run.model}" if run.steps == 0 else canonical_json(run_settings(run))
        if key in seen:
            raise ValueError(
                f"runs.{seen[key]} and runs.{name} resolve to the same settings; remove one "
                "(for later checkpoints of a run give the table `steps`)"
            )
        seen[key] = name


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
