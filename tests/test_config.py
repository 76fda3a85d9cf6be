"""Studies: every refusal is one readable sentence, inheritance, what jobs see, and which checkpoints are needed."""

import json
import re
import textwrap
from pathlib import Path

import jsonschema
import pytest
import yaml

from erpo import config, schema
from erpo.config import Cell, load_study

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ["methods", "paper", "quickstart"]

BASE = """
models: {tiny: {kind: synthetic}}
train_sets: {train: {kind: synthetic, families: [chain], size: 64}}
benchmarks:
  easy: {kind: synthetic, families: [chain], size: 8}
  hard: {kind: synthetic, families: [story], size: 8}
evaluation: {temperatures: [0.1, 0.5, 1.0, 1.5], samples: 4}
defaults: {model: tiny, steps: 40}
runs:
  base: {steps: 0}
  grpo: {}
  erpo: {kl_on: query, query_weight: reference_likelihood}
tables:
  main: {runs: [base, grpo, erpo]}
"""


def study_with(folder: Path, **changes) -> config.Study:
    """The base study with top-level keys replaced by YAML text (or merged, for runs and tables)."""
    raw = yaml.safe_load(BASE)
    for key, text in changes.items():
        value = yaml.safe_load(textwrap.dedent(text))
        raw[key] = (
            {**raw[key], **value}
            if key in ("runs", "tables", "defaults", "evaluation", "benchmarks") and isinstance(value, dict)
            else value
        )
    path = folder / "trial.yaml"
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return load_study(str(path))


def refusal(folder: Path, text: str) -> str:
    """The sentence with which a study given as YAML text is refused."""
    path = folder / "trial.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
        load_study(str(path))
    sentence = str(caught.value)
    assert not re.search("\n|Traceback|pydantic", sentence)
    return sentence.removeprefix(f"{path}: ")


def refusal_of(folder: Path, **changes) -> str:
    with pytest.raises(ValueError, match=r"trial\.yaml") as caught:
        study_with(folder, **changes)
    sentence = str(caught.value)
    assert not re.search("\n|Traceback|pydantic", sentence)
    return sentence.split("trial.yaml: ", 1)[1]


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("{kl_coeff: 0.02}", "runs.trial.kl_coeff: unknown key 'kl_coeff'; did you mean 'kl_coef'?"),
        ("{zebra: 1}", "runs.trial.zebra: unknown key 'zebra'; config/README.md lists all keys"),
        ("{steps: many}", "runs.trial.steps: Input should be a valid integer, unable to parse string as an integer (found 'many')"),
        ("{steps: -1}", "runs.trial.steps: Input should be greater than or equal to 0 (found -1)"),
        ("{kl_on: querry}", "runs.trial.kl_on: Input should be 'none', 'response', 'query' or 'all' (found 'querry')"),
        ("{refill_constant_groups: 3}", "runs.trial.refill_constant_groups: "),
        ("{learning_rate: 1e-6}", "learning_rate: '1e-6' is text in YAML, not a number; write 1.0e-6 without quotes"),
        ("{kl_coef: '0.02'}", "kl_coef: '0.02' is text in YAML, not a number; write 0.02 without quotes"),
        ("{queries_per_step: 10, updates_per_step: 4}", "queries_per_step (10) must be a multiple of updates_per_step (4)"),
        ("{responses_per_query: 1}", "responses_per_query must be at least 2; use advantage: batch_mean for single responses"),
        ("{kl_on: none, kl_coef: 0.5}", "kl_coef is set but has no effect with kl_on: none; leave it out"),
        ("{query_weight_cap: 3.0}", "query_weight_cap is set but has no effect with query_weight: none; leave it out"),
        ("{gamma: 0.9}", "gamma is set but has no effect with advantage: group_normalized; leave it out"),
        ("{clip_low: null}", "clip_low and clip_high are set or null together"),
        ("{kl_form: future, kl_on: query}", "kl_form: future needs kl_on: response"),
        ("{overlong_buffer_tokens: 4000}", "overlong_buffer_tokens (4000) is longer than max_response_tokens (3000)"),
        ("{accuracy_reward: 0, format_reward: 0}", "nothing is rewarded"),
        ("{temperature: 0}", "runs.trial.temperature: Input should be greater than 0"),
        ("{model: huge}", "runs.trial.model: 'huge' is not defined; there are: tiny"),
        ("{train_set: other}", "runs.trial.train_set: 'other' is not defined; there are: train"),
        ("{like: gone}", "runs.trial.like: 'gone' is not a run; there are: base, grpo, erpo, trial"),
        ("{like: trial}", "`like` goes round in a circle (trial -> trial)"),
        ("[1, 2]", "runs.trial: expected settings such as {kl_on: query}, found [1, 2]"),
        ("{like: grpo}", "runs.grpo and runs.trial resolve to the same settings; remove one"),
        (
            "{steps: 100}",
            "same settings; remove one (for later checkpoints of a run give the table `steps`)",
        ),
    ],
)
def test_a_faulty_run_is_refused_in_one_sentence(tmp_path, run, expected):
    assert expected in refusal_of(tmp_path, runs=f"{{trial: {run}}}")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tables": "{t: {runs: ['dapo*']}}"}, "tables.t.runs: 'dapo*' matches no run; there are: base"),
        ({"tables": "{t: {runs: [erpo], benchmarks: [medium]}}"}, "tables.t.benchmarks: 'medium' is not defined"),
        ({"tables": "{t: {runs: [erpo], temperatures: [0.2]}}"}, "tables.t.temperatures: [0.2] are not in evaluation.temperatures"),
        ({"tables": "{t: {runs: [erpo], baseline: gone}}"}, "tables.t.baseline: 'gone' is not defined"),
        ({"tables": "{t: {runs: [erpo], colums: band}}"}, "tables.t.colums: unknown key 'colums'; did you mean 'columns'?"),
        ({"tables": "{grpo: {runs: [erpo]}}"}, "tables.grpo: the name is already one of runs"),
        ({"tables": "{train: {runs: [erpo]}}"}, "tables.train: the name is already a rule of the workflow"),
        ({"tables": "{My Table: {runs: [erpo]}}"}, "tables.My Table: names are lower-case letters, digits, dots and dashes"),
        (
            {"evaluation": "{temperatures: [0.1], low_band: [0.5, 1.0]}", "tables": "{t: {runs: [erpo], temperatures: low_band}}"},
            "no temperature of the sweep lies in the low_band",
        ),
        ({"evaluation": "{temperatures: [-1.0]}"}, "evaluation.temperatures.0: "),
        ({"models": "{tiny: {kind: magic}}"}, "models.tiny: "),
        ({"models": "{tiny: {kind: pretrained}}"}, "models.tiny: the key 'source' is missing"),
        ({"benchmarks": "{easy: {kind: file}}"}, "benchmarks.easy: the key 'file' is missing"),
        ({"benchmarks": "{easy: {kind: file, file: 3}}"}, "benchmarks.easy.file: Input should be a valid string (found 3)"),
        ({"benchmarks": "{easy: {kind: file, file: a.jsonl, sha: x}}"}, "unknown key 'sha'"),
    ],
)  # fmt: skip
def test_a_faulty_study_is_refused_in_one_sentence(tmp_path, changes, expected):
    assert expected in refusal_of(tmp_path, **changes)


def test_a_duplicate_key_is_refused_with_its_line(tmp_path):
    text = BASE.replace("  grpo: {}\n", "  grpo: {}\n  grpo: {kl_coef: 0.02}\n")
    assert refusal(tmp_path, text) == "line 10: the key 'grpo' is given twice"


def test_broken_yaml_is_refused_in_one_sentence(tmp_path):
    assert "expected" in refusal(tmp_path, BASE + "tables: [unclosed")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    assert "a study is a mapping with models, runs, tables" in refusal(tmp_path, text)


def test_a_circle_of_two_is_named(tmp_path):
    sentence = refusal_of(tmp_path, runs="{a: {like: b}, b: {like: a}}")
    assert sentence == "runs.a: `like` goes round in a circle (a -> b -> a)"


def test_several_faults_are_all_named(tmp_path):
    sentence = refusal_of(tmp_path, runs="{a: {zebra: 1}, b: {steps: -3}}")
    assert re.search(r"runs\.a\.zebra: .*; .*runs\.b\.steps: ", sentence)


def test_a_fault_in_the_defaults_is_told_once_and_of_them(tmp_path):
    assert refusal_of(tmp_path, defaults="{stepz: 3}") == "defaults.stepz: unknown key 'stepz'; did you mean 'steps'?"
    assert refusal_of(tmp_path, defaults="{learning_rate: 1e-6}").startswith("defaults.learning_rate: '1e-6' is text in YAML")
    own = refusal_of(tmp_path, defaults="{steps: many}", runs="{trial: {steps: -7}}")
    assert own.startswith("defaults.steps: ")
    assert "trial.yaml: runs.trial.steps: " in own


def test_an_unknown_study_names_those_there_are(tmp_path):
    (tmp_path / "config").mkdir()
    for name in SHIPPED:
        (tmp_path / "config" / f"{name}.yaml").touch()
    with pytest.raises(ValueError, match=r"study 'papper' not found .*; there are: methods, paper, quickstart"):
        load_study("papper", tmp_path)


def test_yaml_octal_and_words_are_caught(tmp_path):
    assert "seeds" not in refusal_of(tmp_path, runs="{trial: {kl_on: no}}")  # `no` is false in YAML
    assert study_with(tmp_path, seeds="[010]").seeds == (8,)  # YAML 1.1, as written in config/README.md


# --- inheritance and equality -------------------------------------------------------------------------------------------


def test_like_and_defaults_are_resolved_in_order(tmp_path):
    study = study_with(
        tmp_path,
        defaults="{learning_rate: 1.0e-4}",
        runs="{a: {like: erpo, kl_coef: 0.05}, b: {like: a, query_weight: none, learning_rate: 2.0e-4}}",
    )
    assert study.runs["a"].kl_on == "query"
    assert study.runs["a"].query_weight == "reference_likelihood"
    assert study.runs["a"].learning_rate == 1e-4
    assert (study.runs["b"].kl_on, study.runs["b"].kl_coef, study.runs["b"].query_weight) == ("query", 0.05, "none")
    assert study.runs["b"].learning_rate == 2e-4
    assert study.runs["b"].steps == 40


def test_runs_that_differ_only_in_seeds_are_equal(tmp_path):
    assert "resolve to the same settings" in refusal_of(tmp_path, runs="{trial: {like: grpo, seeds: [5]}}")


def test_temperatures_have_one_spelling_each(tmp_path):
    study = study_with(tmp_path, evaluation="{temperatures: [0.1, 1, 1.0, 0.30000000000000004]}", tables="{main: {runs: [erpo]}}")
    assert study.evaluation.temperatures == (0.1, 0.3, 1.0)
    assert [config.temperature_label(value) for value in study.evaluation.temperatures] == ["0.1", "0.3", "1.0"]


# --- what a job sees ----------------------------------------------------------------------------------------------------


def test_the_spec_of_a_run_holds_its_own_settings_only(tmp_path):
    before = config.run_spec(study_with(tmp_path), "erpo")
    assert before["run"] == {"kl_on": "query", "query_weight": "reference_likelihood"}
    other = study_with(
        tmp_path,
        runs="{new: {kl_coef: 0.5}}",
        tables="{more: {runs: [erpo], steps: [80], caption: Other words.}}",
        evaluation="{temperatures: [0.1, 0.9], samples: 64}",
        seeds="[3, 4]",
        save_every="7",
        title="Another title",
    )
    assert config.run_spec(other, "erpo") == before


@pytest.mark.parametrize(
    "changes",
    [
        {"runs": "{erpo: {kl_on: query, query_weight: reference_likelihood, learning_rate: 2.0e-6}}"},
        {"train_sets": "{train: {kind: synthetic, families: [chain], size: 65}}"},
        {"models": "{tiny: {kind: synthetic, hidden_size: 64}}"},
        {"prompt_suffix": "Think."},
        {"max_query_tokens": "77"},
    ],
)
def test_the_spec_of_a_run_changes_with_what_decides_its_numbers(tmp_path, changes):
    before = config.digest(config.run_spec(study_with(tmp_path), "erpo"))
    assert config.digest(config.run_spec(study_with(tmp_path, **changes), "erpo")) != before


def test_specs_survive_json_and_are_canonical(tmp_path):
    study = study_with(tmp_path)
    cell = Cell("erpo", 0, 40)
    for spec in (
        config.run_spec(study, "erpo"),
        config.queries_spec(study, "tiny", "train"),
        config.prepared_benchmark_spec(study, "tiny", "easy"),
        config.reference_spec(study, "tiny", "train"),
        config.generation_spec(study, cell, (0.1, 0.5)),
        config.scores_spec(study, cell),
        config.drawn_spec(study, "main"),
        config.report_spec(study),
    ):
        text = config.canonical_json(spec)
        assert config.canonical_json(json.loads(text)) == text


def test_generation_sees_sampling_and_problems_but_no_training(tmp_path):
    cell = Cell("erpo", 0, 40)
    before = config.generation_spec(study_with(tmp_path), cell, (0.1,))
    trained = study_with(tmp_path, runs="{erpo: {kl_on: query, query_weight: reference_likelihood, learning_rate: 2.0e-6}}")
    assert config.generation_spec(trained, cell, (0.1,)) == before
    more = study_with(tmp_path, evaluation="{samples: 8}")
    assert config.generation_spec(more, cell, (0.1,)) == {**before, "samples": 8}
    third = study_with(tmp_path, benchmarks="{third: {kind: synthetic, families: [linear], size: 8}}")
    assert list(config.generation_spec(third, cell, (0.1,))["benchmarks"]) == ["easy", "hard", "third"]


# --- checkpoints --------------------------------------------------------------------------------------------------------


def test_cells_are_runs_by_seeds_by_steps(tmp_path):
    study = study_with(tmp_path, seeds="[0, 1]", tables="{long: {runs: [grpo, base], steps: [40, 80], seeds: [0]}}")
    assert config.cells(study, study.tables["long"]) == [Cell("grpo", 0, 40), Cell("grpo", 0, 80), Cell("base", 0, 0)]
    assert config.cells(study, study.tables["main"])[:3] == [Cell("base", 0, 0), Cell("base", 1, 0), Cell("grpo", 0, 40)]


def test_milestones_are_the_last_step_and_what_artefacts_ask(tmp_path):
    study = study_with(tmp_path, tables="{long: {runs: [grpo, base], steps: [20, 80]}}")
    assert config.milestones(study) == {"base": (), "grpo": (20, 40, 80), "erpo": (40,)}


def test_every_run_is_scored_at_its_last_step_and_where_a_table_asks(tmp_path):
    study = study_with(
        tmp_path,
        runs="{alone: {kl_on: none}}",
        tables="{long: {runs: [grpo], steps: [80]}, training-only: {runs: [erpo], steps: [20], metrics: [kl/query]}}",
    )
    found = config.scored_cells(study)
    assert found["alone"] == [Cell("alone", 0, 40)]
    assert found["grpo"] == [Cell("grpo", 0, 40), Cell("grpo", 0, 80)]
    assert found["erpo"] == [Cell("erpo", 0, 40)]
    assert found["base"] == [Cell("base", 0, 0)]


def test_what_an_artefact_needs_follows_from_its_metrics(tmp_path):
    study = study_with(
        tmp_path, tables="{both: {runs: [erpo], metrics: [avg@n, kl/query]}, kl: {runs: [erpo], metrics: [kl/query]}}"
    )
    needs = {name: (config.needs_scores(table), config.needs_training(table)) for name, table in study.tables.items()}
    assert needs == {"main": (True, False), "both": (True, True), "kl": (False, True)}


def test_a_new_temperature_moves_no_other_shard(tmp_path):
    before = config.shards(study_with(tmp_path))
    assert before == {"upto0.5": (0.1, 0.5), "upto1": (1.0,), "upto1.5": (1.5,)}
    after = config.shards(study_with(tmp_path, evaluation="{temperatures: [0.1, 0.5, 1.0, 1.5, 1.6]}"))
    assert after == {**before, "upto2": (1.6,)}


# --- shipped studies and generated files --------------------------------------------------------------------------------


def test_the_config_folder_holds_studies_and_nothing_else():
    assert sorted(path.stem for path in (ROOT / "config").glob("*.y*ml")) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_study_is_valid_for_program_and_editor(name):
    study = load_study(name, ROOT)
    raw = yaml.safe_load((ROOT / "config" / f"{name}.yaml").read_text())
    jsonschema.validate(raw, json.loads((ROOT / "workflow/schemas/study.schema.json").read_text()))
    shown = {run for artefact in (*study.tables.values(), *study.figures.values()) for run in config.runs_of(study, artefact)}
    assert shown == set(study.runs), "a run that no table or figure shows"


@pytest.mark.parametrize(("key", "value"), [("zebra", 1), ("runs", {"a": {"learning_rate": "1e-6"}}), ("runs", {"A b": {}})])
def test_the_schema_refuses_what_the_program_refuses(key, value):
    raw = yaml.safe_load((ROOT / "config/quickstart.yaml").read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**raw, key: value}, schema.study_schema())


def test_generated_files_are_in_sync():
    schema.main(check=True, root=ROOT)


def test_stale_generated_files_are_named_and_written_again(tmp_path):
    for relative in ("config/README.md", "workflow/schemas/study.schema.json"):
        target = tmp_path / relative
        target.parent.mkdir(parents=True)
        target.write_text((ROOT / relative).read_text())
    schema.main(check=True, root=tmp_path)
    readme = tmp_path / "config" / "README.md"
    good = readme.read_text()
    readme.write_text(good.replace("`kl_coef`", "`kl_coeff`"))
    with pytest.raises(ValueError, match=r"README.md out of date: run `python -m erpo schema`"):
        schema.main(check=True, root=tmp_path)
    schema.main(check=False, root=tmp_path)
    assert readme.read_text() == good


def test_the_key_reference_names_every_setting_of_a_run():
    text = (ROOT / "config/README.md").read_text()
    assert [key for key in config.RunConfig.model_fields if f"| `{key}` |" not in text] == []


# --- the paper's study --------------------------------------------------------------------------------------------------


def test_the_paper_study_follows_the_protocol():
    run = load_study("paper", ROOT).runs["grpo"]
    assert (run.queries_per_step, run.responses_per_query, run.updates_per_step, run.steps) == (512, 8, 4, 240)
    assert (run.learning_rate, run.weight_decay, run.kl_coef, run.max_response_tokens) == (1e-6, 0.01, 0.01, 3000)


def test_the_paper_study_has_the_named_runs_with_the_right_settings():
    study = load_study("paper", ROOT)
    runs = study.runs
    assert [name for name in ("base", "grpo", "erpo") if config.seeds_of(study, name) != (0, 1, 2)] == []
    assert runs["erpo-alpha5e-2"].kl_coef == 0.05
    assert (runs["erpo-g16"].responses_per_query, runs["erpo-g16"].query_weight) == (16, "reference_likelihood")
    assert (runs["no-kl"].kl_on, runs["query-kl-only"].query_weight) == ("none", "none")
    assert (runs["erpo-32b"].model, runs["erpo-32b"].kl_on) == ("qwen2.5-32b", "query")
    for method in ("dapo", "rloo", "ppo", "reinforce"):
        alone, wrapped = config.run_settings(runs[method]), config.run_settings(runs[f"{method}-erpo"])
        alone.pop("kl_on", None)
        assert wrapped == {**alone, "kl_on": "query", "query_weight": "reference_likelihood"}
    assert config.milestones(study)["erpo"] == (240, 400, 480, 600, 800, 1000)
