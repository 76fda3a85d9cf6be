"""Input that cannot be used, through the command line: exit code 2 and one sentence, before anything is made."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from erpo.__main__ import main
from erpo.processes import first_host, slurm_variables
from tests import ranks
from tests.tiny import Place, make_place

SPEC = {"run": {"dtype": "float32"}}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return make_place(tmp_path_factory.mktemp("bad"))


def training(place: Place, work: Path, spec: object = SPEC, **options: object) -> list[str]:
    """Arguments of `train`; a spec that is text is taken as it is."""
    files = {"model": place.model, "queries": place.queries, "reference": place.reference, "work": work / "work"}
    given = {**files, "marker": work / "step1.json", "name": "bad", "seed": 0, "step": 1, **options}
    pairs = [part for option, value in given.items() for part in (f"--{option}", str(value))]
    return ["train", "--spec", spec if isinstance(spec, str) else json.dumps(spec), *pairs]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command writes."""
    assert main(arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("erpo ")]
    assert len(lines) == 1
    return lines[0]


SPECS = {
    "a list": ("[1, 2]", "erpo train: --spec must be a JSON object such as {\"key\": 1}, found '[1, 2]'"),
    "no JSON": ("run.json", "erpo train: --spec must be JSON text such as {\"key\": 1}, found 'run.json' (Expecting value: line 1"),
    "nothing": ("", "erpo train: --spec must be JSON text"),
    "no run": ({"seed": 1}, "erpo train: --spec lacks run; it has seed"),
    "a run that is a number": (
        {"run": 5},
        "erpo train: --spec run: Input should be a valid dictionary or instance of RunConfig (found 5)",
    ),
    "a value out of range": (
        {"run": {"learning_rate": -1}},
        "erpo train: --spec run: learning_rate: Input should be greater than 0 (found -1)",
    ),
    "a word that is none of those allowed": (
        {"run": {"kl_on": "qeury"}},
        "erpo train: --spec run: kl_on: Input should be 'none', 'response', 'query' or 'all' (found 'qeury')",
    ),
    "a misspelt key": ({"run": {"kl_one": "query"}}, "erpo train: --spec run: kl_one: unknown key 'kl_one'; did you mean 'kl_on'?"),
}


@pytest.mark.parametrize("name", SPECS)
def test_a_spec_that_cannot_be_is_one_line(place, tmp_path, capsys, name):
    spec, sentence = SPECS[name]
    assert refused(training(place, tmp_path, spec), capsys).startswith(sentence)
    assert not list(tmp_path.iterdir())


def test_a_machine_that_cannot_be_is_one_line(place, tmp_path, capsys, monkeypatch):
    said = refused(training(place, tmp_path, **{"zero-stage": 7}), capsys)
    assert said == "erpo train: machine settings: zero_stage: Input should be less than or equal to 3 (found 7)"
    said = refused(training(place, tmp_path, generator="vlm"), capsys)
    assert said == "erpo train: machine settings: generator: Input should be 'sampler' or 'vllm' (found 'vlm')"
    monkeypatch.setenv("ERPO_MACHINE", "zero_stage=three")
    assert "ERPO_MACHINE: 'zero_stage=three': invalid literal" in refused(training(place, tmp_path), capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("verb", "files", "lacking"),
    [
        ("prepare-model", "out marker", "entry, prompt_suffix"),
        ("prepare-queries", "model data-dir out manifest", "entry, prompt_suffix, max_query_tokens"),
        ("prepare-benchmark", "model data-dir out manifest", "entry, prompt_suffix"),
        ("generate", "policy store marker seed", "temperatures, samples, top_p, max_response_tokens"),
        ("score", "store out", "study, run, seed, step, temperatures, samples"),
        ("table", "out-stem", "name, study, artefact, runs, cells, temperatures, benchmarks, samples"),
        ("figure", "out-stem", "name, study, artefact, runs, cells"),
        ("report", "out", "study, title, tables, figures, runs"),
    ],
)
def test_every_verb_says_what_its_spec_lacks(tmp_path, capsys, verb, files, lacking):
    options = [part for name in files.split() for part in (f"--{name}", "0")]
    assert refused([verb, "--spec", "{}", *options], capsys) == f"erpo {verb}: --spec lacks {lacking}; it has nothing"


def test_an_entry_of_an_unknown_kind_is_one_line(tmp_path, capsys):
    spec = json.dumps({"entry": {"kind": "magic"}, "prompt_suffix": ""})
    said = refused(["prepare-model", "--spec", spec, "--out", "x", "--marker", "y"], capsys)
    assert said.startswith("erpo prepare-model: --spec entry: Input tag 'magic' found using 'kind' does not match any")
    assert "'synthetic'" in said


def test_a_log_that_cannot_be_written_is_one_line(place, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for log, why in ((tmp_path / "file/train.log", "File exists"), (tmp_path, "Is a directory")):
        said = refused(training(place, tmp_path / "run", log=log), capsys)
        assert said.startswith(f"erpo train: --log {log} cannot be written: {why}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK is 'zero', but it must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', but it must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "-1"}, "MASTER_PORT is '-1', but it must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, but with WORLD_SIZE 2 the last one is 1"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many'"),
    ],
)
def test_ranks_that_cannot_be_are_one_line(place, tmp_path, variables, sentence):
    """In a process of its own: this one may have joined a group already."""
    log = tmp_path / "log"
    assert ranks.finish(ranks.start([training(place, tmp_path / "run")], log, [variables])) == [2]
    said = Path(f"{log}.0").read_text().strip().splitlines()
    assert said[-1].startswith(f"erpo train: {sentence}")
    assert "Traceback" not in "\n".join(said)
    assert not (tmp_path / "run").exists()


def test_lists_that_srun_would_not_write_are_named():
    common = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1"}
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE has 'x2', but it must be a list such as 8\(x3\),4"):
        slurm_variables({**common, "SLURM_STEP_TASKS_PER_NODE": "x2"})
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST is '\[1-2\]', which is no list of nodes"):
        first_host("[1-2]")


@pytest.mark.parametrize("content", ["{}", "[]", '{"policy": 3, "policy_hash": null, "cache": 3, "cache_sha256": null}'])
def test_files_of_another_kind_are_one_line(place, tmp_path, capsys, content):
    marker, table, text = tmp_path / "empty.json", tmp_path / "table.parquet", tmp_path / "text.parquet"
    marker.write_text(content)
    pq.write_table(pa.table({"question": ["2 + 2"]}), table)
    text.write_text("query_id,problem\n")
    run = tmp_path / "run"
    for option, sentence in (
        ({"reference": marker}, f"{marker} is no marker of the kind needed here: it says nothing of cache, cache_sha256"),
        ({"model": marker}, f"{marker} is no marker of the kind needed here: it says nothing of policy, policy_hash"),
        ({"queries": table}, f"{table} holds no queries: its columns are question, those of queries query_id, problem, "),
        ({"queries": text}, f"{text} is not parquet, or damaged; prepare the queries again"),
    ):
        assert refused(training(place, run, **option), capsys).startswith(f"erpo train: {sentence}")
    assert not (run / "work/metrics.jsonl").exists()
    out = {"queries": place.queries, "out": tmp_path / "r.parquet", "marker": tmp_path / "r.json"}
    pairs = [part for name, path in out.items() for part in (f"--{name}", str(path))]
    said = refused(["cache-reference", "--spec", "{}", "--model", str(marker), *pairs], capsys)
    assert said.endswith(f"{marker} is no marker of the kind needed here: it says nothing of policy")


@pytest.mark.parametrize("generator", ["sampler", "vllm"])
def test_responses_beyond_the_models_positions_are_refused_by_every_generator(tmp_path, monkeypatch, generator):
    """A model of 32 positions; the longest prompt and 12 tokens fit or not by one token."""
    from erpo import rollout_engine
    from erpo.records import read_queries
    from erpo.trainer import train

    monkeypatch.setattr(rollout_engine, "require_vllm", lambda: None)  # the length is looked at before vLLM is
    short = make_place(tmp_path, max_position_embeddings=32)
    longest = max(len(query.prompt_ids) for query in read_queries(short.queries))
    room = 32 - longest
    settings = {"kl_on": "query", "overlong_buffer_tokens": 1}
    sentence = r"the longest prompt and response together have 33 tokens, but .*tiny holds 32; lower max_response_tokens"
    with pytest.raises(ValueError, match=sentence):
        train(**short.arguments("over", 1, {**settings, "max_response_tokens": room + 1}, generator=generator))
    assert not (tmp_path / "runs/over/work/metrics.jsonl").exists()
    if generator == "sampler":
        train(**short.arguments("fits", 1, {**settings, "max_response_tokens": room}))
