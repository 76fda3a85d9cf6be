"""Evaluation from policy to scores: reuse, interruption, regrading, honesty about what is missing."""

import functools
import json
import os
import shutil
import signal
import time
from importlib.metadata import version

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from erpo.checkpoint import policy_hash, read_json, write_json
from erpo.evaluation import generate_samples, inspect_samples, regrade_scores, score_samples
from erpo.generation import PolicySampler
from erpo.paper.aggregate import problem_values, read_facts
from erpo.paper.aggregate import read_scores as count_scores
from erpo.probe import evaluate_policy, fixed_subset
from erpo.records import Query, Rollout, Verdict, write_queries
from erpo.rewards import Grader, grade_one, has_format
from erpo.samples import Drawn, Shelf, ask, hash_prompts, hash_text, part_facts
from erpo.scores import SCHEMA, count_disagreements, identical_text_rates, read_scores, refuse_errors, repeated_texts, write_scores
from erpo.templates import build_tokenizer, decode, load_tokenizer, render_prompt, stop_ids
from tests.synthetic import scores_table

TEMPERATURES = [0.5, 1.0]
NUMBERS = range(4)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@functools.cache
def trained_weights(seed):
    """A policy that has half learned to close its box: every kind of verdict turns up."""
    tokenizer = build_tokenizer(["Say 0 1 2 3. <think> </think> \\boxed{0}"])
    rng, end = np.random.default_rng(seed), tokenizer.eos_token
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    policy = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-2)
    for _ in range(60):
        digits = rng.integers(0, 4, (16, 3))
        texts = [
            f"<think> {a} </think> \\boxed{{{b}}}{end}{end}" if c else f"<think> {a} {b} {b} {a} {a} {b}" for a, b, c in digits
        ]
        ids = torch.tensor([tokenizer(f"Say {i % 4}. {text}")["input_ids"][:10] for i, text in enumerate(texts)])
        policy(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return tokenizer, policy


def make_policy(folder, seed):
    """A checkpoint and its marker."""
    tokenizer, policy = trained_weights(seed)
    shutil.rmtree(folder, ignore_errors=True)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder.with_suffix(".json"), {"policy": folder.name, "policy_hash": policy_hash(folder)})
    return tokenizer


class Study:
    """A policy, two benchmarks and the paths of a study."""

    def __init__(self, root):
        self.root, self.policy, self.store = root, root / "models/tiny", root / "store"
        self.tokenizer = make_policy(self.policy, seed=0)
        self.benchmarks = {name: root / f"benchmarks/{name}.parquet" for name in ("numbers", "flagged")}
        (root / "benchmarks").mkdir()
        self.write_benchmarks()

    def write_benchmarks(self, suffix="", answers=NUMBERS):
        for name, path in self.benchmarks.items():
            flags = ("odd",) if name == "flagged" else ()
            rows = [
                Query(f"q{i}", f"Say {i}.", str(a), render_prompt(self.tokenizer, f"Say {i}.", suffix), i + 1, name, flags)
                for i, a in zip(NUMBERS, answers, strict=True)
            ]
            write_queries(path, rows)

    def generate(self, marker="m.json", **changes):
        asked = {"temperatures": TEMPERATURES, "samples": 4, "top_p": 1.0, "max_response_tokens": 12, "seed": 0}
        paths = {"policy_marker": self.policy.with_suffix(".json"), "benchmarks": self.benchmarks, "store": self.store}
        generate_samples(**{**asked, **paths, "marker": self.root / marker, **changes})
        return read_json(self.root / marker)

    def score(self, out="scores/step0.parquet", markers=("m.json",), temperatures=TEMPERATURES, samples=4, **changes):
        spec = {"study": "s", "run": "base", "seed": 0, "step": 0, "temperatures": temperatures, "samples": samples}
        paths = {"markers": [self.root / name for name in markers], "benchmarks": self.benchmarks, "store": self.store}
        score_samples(**{**paths, "out": self.root / out, "provenance": spec, "workers": 1, **changes})
        return read_scores(self.root / out)

    def rows(self):
        """All stored samples."""
        return [row for part in sorted(self.store.rglob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]


@pytest.fixture
def study(tmp_path):
    return Study(tmp_path)


# --- generating --------------------------------------------------------------------------------------------------------


def test_one_session_draws_every_benchmark_temperature_and_sample(study):
    marker = study.generate()
    rows = study.rows()
    assert len(rows) == 2 * 4 * 2 * 4
    for row in rows:
        assert row["text"] == decode(study.tokenizer, row["response_ids"])
        assert row["length"] == len(row["response_ids"]) <= 12
        assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == study.tokenizer.eos_token_id else "length")
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    assert marker["policy_hash"] == policy_hash(study.policy)
    assert {label: held["counts"] for label, held in marker["holdings"].items()} == {
        label: {"numbers": 16, "flagged": 16} for label in ("0.5", "1.0")
    }
    listed = {name for held in marker["holdings"].values() for name in held["parts"]}
    assert listed == {part.relative_to(study.store).as_posix() for part in study.store.rglob("part-*.parquet")}


def test_samples_do_not_depend_on_the_session_they_were_drawn_in(study):
    """One by one, in shards, in another batch size: the same text for the same key."""
    study.generate()
    whole = {(r["benchmark"], r["query_id"], r["temperature"], r["sample_index"]): r["text"] for r in study.rows()}
    shutil.rmtree(study.store)
    for temperature in TEMPERATURES:
        for samples in (1, 3, 4):
            study.generate(temperatures=[temperature], samples=samples, batch_rows=3)
    assert {(r["benchmark"], r["query_id"], r["temperature"], r["sample_index"]): r["text"] for r in study.rows()} == whole


def test_a_second_run_needs_no_weights_and_leaves_the_same_marker(study):
    study.generate()
    before = (study.root / "m.json").read_bytes()
    parts = {part: part.stat().st_mtime_ns for part in study.store.rglob("*.parquet")}
    (study.policy / "model.safetensors").unlink()
    study.generate()
    assert (study.root / "m.json").read_bytes() == before
    assert {part: part.stat().st_mtime_ns for part in study.store.rglob("*.parquet")} == parts


def test_only_the_same_conditions_reuse_samples(study):
    """n 4 -> 32, top-p, length limit, template, new weights under the old name; then the last one again from the store."""
    study.generate(samples=4, temperatures=[0.6])
    first = study.rows()
    study.generate(samples=32, temperatures=[0.6])
    rows = study.rows()
    assert (len(first), len(rows)) == (4 * 8, 32 * 8)
    assert {(r["seed"], r["text"]) for r in first} <= {(r["seed"], r["text"]) for r in rows}
    counts = [len(rows)]
    steps = [{"top_p": 0.9}, {"max_response_tokens": 24}, {"seed": 1}]
    for changes in steps:
        study.generate(**{"samples": 4, "temperatures": [0.6], **changes})
        counts.append(len(study.rows()))
    study.write_benchmarks(suffix=" 0")
    study.generate(samples=4, temperatures=[0.6])
    counts.append(len(study.rows()))
    make_policy(study.policy, seed=1)
    study.generate(samples=4, temperatures=[0.6])
    counts.append(len(study.rows()))
    assert np.diff(counts).tolist() == [32] * 5
    table, _ = study.score(temperatures=[0.6])
    study.generate(samples=4, temperatures=[0.6])
    assert len(study.rows()) == counts[-1]
    assert study.score(temperatures=[0.6])[0].equals(table)


def test_parameters_in_effect_are_written_down_and_generation_config_is_not_asked(study):
    plain = study.generate()
    texts = [row["text"] for row in study.rows()]
    config = {"repetition_penalty": 1.1, "top_k": 2, "top_p": 0.8, "temperature": 0.7, "do_sample": True, "eos_token_id": 1}
    (study.policy / "generation_config.json").write_text(json.dumps(config))
    shutil.rmtree(study.store)
    assert study.generate() == plain
    assert [row["text"] for row in study.rows()] == texts
    neutral = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    found = [part_facts(part) for part in sorted(study.store.rglob("part-*.parquet"))]
    asked = {**neutral, "top_p": 1.0, "max_response_tokens": 12, "stop_ids": [study.tokenizer.eos_token_id]}
    assert sorted(facts["sampling"]["temperature"] for facts in found) == TEMPERATURES
    for facts in found:
        assert {key: value for key, value in facts["sampling"].items() if key != "temperature"} == asked
        assert facts["policy_hash"] == plain["policy_hash"]
        assert facts["engine"] == {"name": "sampler", "torch": version("torch")}


def test_a_checkpoint_that_is_not_what_its_marker_says_is_refused(study):
    old = read_json(study.policy.with_suffix(".json"))
    make_policy(study.policy, seed=1)
    write_json(study.policy.with_suffix(".json"), old)
    with pytest.raises(ValueError, match="the checkpoint was changed"):
        study.generate()
    assert not (study.root / "m.json").exists()


def test_more_tokens_than_the_policy_has_positions_are_refused(study):
    limit = read_json(study.policy / "config.json")["max_position_embeddings"]
    with pytest.raises(ValueError, match=f"holds {limit}; lower max_response_tokens"):
        study.generate(max_response_tokens=limit)
    assert not study.rows()


def test_token_ids_may_stay_out_of_the_store(study):
    study.generate(keep_token_ids=False)
    assert {row["response_ids"] for row in study.rows()} == {None}
    table, _ = study.score()
    assert len(table) == 64


# --- scoring -----------------------------------------------------------------------------------------------------------


def test_scores_say_of_every_sample_what_the_grader_of_training_says(study):
    study.generate(samples=16)
    table, facts = study.score(samples=16)
    assert table.schema.equals(SCHEMA)
    assert len(table) == 2 * 4 * 2 * 16
    stored = {(r["benchmark"], r["query_id"], r["temperature"], r["sample_index"]): r for r in study.rows()}
    for row in table.to_pylist():
        sample = stored.pop((row["benchmark"], row["query_id"], row["temperature"], row["sample_index"]))
        truncated = sample["finish_reason"] == "length"
        grade = grade_one(sample["text"], row["query_id"][1:], truncated)
        opinion = {True: 1, False: 0, None: -1}[grade.second_opinion]
        assert (row["verdict"], row["correct"], row["answer"]) == (grade.verdict, grade.is_correct, grade.answer)
        assert (row["format_ok"], row["truncated"], row["length"]) == (has_format(sample["text"]), truncated, sample["length"])
        assert (row["text_hash"], row["second_opinion"]) == (hash_text(sample["text"]), opinion)
        assert (row["flagged"], row["level"]) == (row["benchmark"] == "flagged", int(row["query_id"][1:]) + 1)
    assert not stored
    assert {"correct", "wrong", "no_answer", "truncated"} == set(table["verdict"].to_pylist())
    assert facts["benchmarks"] == {"numbers": 4, "flagged": 4}
    assert (facts["run"], facts["seed"], facts["step"], facts["samples"]) == ("base", 0, 0, 16)
    assert facts["missing"] == {"0.5": 0, "1.0": 0}
    assert facts["sampling"]["top_p"] == 1.0
    assert facts["versions"]["math-verify"] == "0.9.0"
    rows = [(r["benchmark"], r["query_id"], r["text_hash"]) for r in table.to_pylist() if r["temperature"] == 0.5]
    for name in ("numbers", "flagged"):
        distinct = [len({h for b, q, h in rows if (b, q) == (name, f"q{i}")}) for i in NUMBERS]
        assert facts["identical_text"]["0.5"][name] == pytest.approx(np.mean([1 - d / 16 for d in distinct]), abs=1e-12)


def test_regrading_needs_no_policy_and_follows_the_gold(study):
    study.generate(samples=16)
    table, _ = study.score(samples=16)
    shutil.rmtree(study.policy)
    parts = sorted(study.store.rglob("*"))
    study.write_benchmarks(answers=[1, 1, 1, 1])
    again = {"markers": [study.root / "m.json"], "benchmarks": study.benchmarks, "store": study.store, "workers": 1}
    changes = regrade_scores(scores=study.root / "scores/step0.parquet", **again)
    again, _ = read_scores(study.root / "scores/step0.parquet")
    answers = table["answer"].to_pylist()
    assert [row["correct"] for row in again.to_pylist()] == [answer == "1" for answer in answers]
    old, new = np.array(table["correct"].to_pylist()), np.array(again["correct"].to_pylist())
    assert changes == {"correct -> wrong": (old & ~new).sum(), "wrong -> correct": (~old & new).sum()}
    assert again["text_hash"].equals(table["text_hash"])
    assert sorted(study.store.rglob("*")) == parts


def test_a_store_without_the_samples_leaves_scores_as_they_are(study):
    study.generate(samples=2)
    study.score(samples=2)
    scores = study.root / "scores/step0.parquet"
    before = scores.read_bytes()
    empty = {"markers": [study.root / "m.json"], "benchmarks": study.benchmarks, "store": study.root / "nowhere"}
    with pytest.raises(ValueError, match=r"parts of the samples are not in the store .*nowhere"):
        regrade_scores(scores=scores, **empty)
    assert scores.read_bytes() == before
    with pytest.raises(ValueError, match=r"none of the \d+ parts of these samples is in the store"):
        inspect_samples(**empty)
    with pytest.raises(ValueError, match="--limit must be at least 1, found 0"):
        look(study, limit=0)


def test_fewer_samples_are_scored_than_there_are(study):
    study.generate(samples=8)
    table, facts = study.score(samples=2)
    assert set(table["sample_index"].to_pylist()) == {0, 1}
    assert len(table) == 2 * 2 * 8
    assert facts["samples"] == 2


def test_a_lost_part_shows_as_missing_and_only_that_is_drawn_again(study, caplog):
    study.generate(samples=4, temperatures=[0.5])
    study.generate(samples=6)
    whole, _ = study.score(samples=6)
    extra = [part for part in study.store.rglob("t0.5-*/part-*.parquet") if len(pq.read_table(part)) == 2 * 8]
    extra[0].write_bytes(extra[0].read_bytes()[:-1])
    partial, facts = study.score(samples=6)
    assert facts["missing"] == {"0.5": 16, "1.0": 0}
    assert "16 samples are not in the store" in caplog.text
    assert len(partial) == len(whole) - 16
    assert set(partial.to_pandas().query("temperature == 0.5")["sample_index"]) == {0, 1, 2, 3}
    before = {part: part.stat().st_mtime_ns for part in study.store.rglob("part-*.parquet")}
    study.generate(samples=6)
    assert sum(len(pq.read_table(part)) for part in study.store.rglob("part-*.parquet") if part not in before) == 16
    assert study.score(samples=6)[0].equals(whole)


def store_answers(study, answers, indices):
    """Put responses with known answers to one problem into the store, and a marker that asked for 32."""
    query = Query("q0", "Say 0.", "0", (1, 2, 3))
    write_queries(study.root / "benchmarks/known.parquet", [query])
    study.benchmarks = {"known": study.root / "benchmarks/known.parquet"}
    sampling = {"top_p": 1.0, "max_response_tokens": 12, "stop_ids": [1]}
    shelf = Shelf(study.store, "known", {"temperature": 1.0, **sampling})
    asked, ids = ask("known", [query], 1.0, 32, seed=0), np.zeros(3, np.int32)
    drawn = [
        Drawn(asked[i], Rollout("q0", i, ids, ids.astype(np.float32), "stop"), f"{i} \\boxed{{{answer}}}")
        for i, answer in zip(indices, answers, strict=True)
    ]
    parts = [shelf.add(drawn, {"name": "test"}).relative_to(study.store).as_posix()] if drawn else []
    facts = {"policy_hash": "known", "seed": 0, "samples": 32, "temperatures": [1.0], "sampling": sampling}
    facts |= {"prompts": {"known": hash_prompts([query])}, "holdings": {"1.0": {"parts": parts, "counts": {"known": len(drawn)}}}}
    write_json(study.root / "m.json", facts)


def test_thirty_of_thirty_two_samples_are_thirty(study):
    """15 of 30 correct, the last one correct: 0.500 and not 17/32, pass@32 undefined."""
    store_answers(study, ["0", "1"] * 14 + ["1", "0"], range(30))
    table, facts = study.score(temperatures=[1.0], samples=32)
    assert len(table) == 30
    assert facts["samples"] == 32
    assert facts["missing"] == {"1.0": 2}
    counts = count_scores([study.root / "scores/step0.parquet"], samples=32)
    assert counts.counts["found"].ravel().tolist() == [30]
    assert problem_values(counts, "avg@n").ravel().tolist() == [0.5]
    assert np.isnan(problem_values(counts, "pass@32")).all()


def test_no_samples_at_all_is_an_empty_table_that_says_so(study):
    store_answers(study, [], [])
    table, facts = study.score(temperatures=[1.0], samples=32)
    assert len(table) == 0
    assert table.schema.equals(SCHEMA)
    assert facts["missing"] == {"1.0": 32}
    assert read_facts(study.root / "scores/step0.parquet")["benchmarks"] == {"known": 1}


def test_benchmarks_whose_prompts_changed_are_not_scored_with_old_samples(study):
    study.generate()
    study.write_benchmarks(suffix=" 0")
    with pytest.raises(ValueError, match="prompts of numbers"):
        study.score()


def verdict_rows(verdicts):
    common = {"benchmark": "b", "query_id": "q", "temperature": 1.0}
    return [{**common, "sample_index": i, "verdict": str(verdict)} for i, verdict in enumerate(verdicts)]


def test_grader_errors_above_the_threshold_stop_everything(caplog):
    good = [Verdict.WRONG] * 98 + [Verdict.GOLD_UNPARSED]
    refuse_errors(scores_table(verdict_rows([*good, Verdict.WRONG])), 0.01)
    assert not caplog.text
    refuse_errors(scores_table(verdict_rows([*good, Verdict.GRADER_ERROR])), 0.01)
    assert "failed on 1 of 100" in caplog.text
    with pytest.raises(ValueError, match=r"failed on 2 of 100 samples \(2.0%\), more than the 1.0%"):
        refuse_errors(scores_table(verdict_rows([*good[1:], *[Verdict.GRADER_ERROR] * 2])), 0.01)


def test_disagreements_and_repeats_by_hand():
    verdicts = ["correct", "correct", "wrong", "wrong", "grader_error", "correct"]
    opinions = [1, 0, 1, -1, 1, -1]
    rows = verdict_rows(verdicts)
    for row, opinion, text in zip(rows, opinions, [1, 1, 1, 2, 3, 4], strict=True):
        row |= {"second_opinion": opinion, "text_hash": text}
    table = scores_table(rows)
    assert count_disagreements(table) == {"b": 2}
    assert repeated_texts(table) == {"b": pytest.approx(1 - 4 / 6, abs=1e-12)}


def test_identical_text_rate_is_one_problem_at_a_time():
    rows = verdict_rows(["wrong"] * 8)
    for row, problem, text in zip(rows, "aaaabbcd", [1, 1, 2, 1, 5, 6, 5, 5], strict=True):
        row |= {"query_id": problem, "text_hash": text, "benchmark": "x" if problem == "d" else "b"}
    table = scores_table(rows)
    assert identical_text_rates(table) == {("b", "a"): 0.5, ("b", "b"): 0.0, ("b", "c"): 0.0, ("x", "d"): 0.0}
    assert repeated_texts(table) == {"b": pytest.approx(0.5 / 3, abs=1e-12), "x": 0.0}


def test_scores_come_back_as_written_and_damage_is_named(tmp_path):
    table = scores_table(verdict_rows(["correct", "wrong"]))
    write_scores(tmp_path / "s.parquet", table, {"run": "r"})
    assert read_scores(tmp_path / "s.parquet")[0].equals(table)
    (tmp_path / "s.parquet").write_bytes((tmp_path / "s.parquet").read_bytes()[:50])
    with pytest.raises(ValueError, match="is damaged"):
        read_scores(tmp_path / "s.parquet")
    with pytest.raises(ValueError, match="no scores at"):
        read_scores(tmp_path / "none.parquet")


# --- kill -9 -----------------------------------------------------------------------------------------------------------


def killed(action, has_moved, delay):
    """Run `action` in a process of its own and kill it (SIGKILL) `delay` seconds after `has_moved`; False if it ended before."""
    child = os.fork()
    if child == 0:
        try:
            action()
        finally:
            os._exit(0)
    while not has_moved():
        time.sleep(0.002)
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return False
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def test_kill_9_during_generation_costs_at_most_the_part_in_hand(tmp_path):
    temperatures = [round(0.1 * i, 1) for i in range(1, 16)]
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole, cut = Study(tmp_path / "whole"), Study(tmp_path / "cut")
    asked = {"temperatures": temperatures, "samples": 8, "max_response_tokens": 40}
    whole.generate(**asked)

    def parts():
        return {part: part.stat().st_mtime_ns for part in cut.store.rglob("part-*.parquet")}

    kills = 0
    for delay in (0.0, 0.013, 0.0, 0.029, 0.007, 0.019):
        before = parts()
        kills += killed(lambda: cut.generate(**asked), lambda held=before: len(parts()) > len(held), delay)
        assert before.items() <= parts().items()
        assert not (cut.root / "m.json").exists()
    assert kills >= 5
    before = parts()
    cut.generate(**asked)
    rows = cut.rows()
    assert before.items() <= parts().items()
    assert len({row["seed"] for row in rows}) == len(rows) == 15 * 8 * 8
    assert not list(cut.store.rglob("*.damaged"))
    scores = [study.score(temperatures=temperatures, samples=8)[0] for study in (whole, cut)]
    assert scores[0].equals(scores[1])


def test_kill_9_during_scoring_keeps_what_was_graded(study):
    temperatures = [round(0.1 * i, 1) for i in range(1, 8)]
    study.generate(temperatures=temperatures, samples=8)
    whole, _ = study.score(out="whole.parquet", temperatures=temperatures, samples=8)
    stored = {path: path.stat().st_mtime_ns for path in study.store.rglob("*")}

    def graded():
        return {path: path.stat().st_mtime_ns for path in (study.root / "scores").glob(".step0.unfinished/t*.parquet")}

    kills = 0
    for delay in (0.0, 0.004, 0.0, 0.002, 0.001):
        before = graded()
        kills += killed(
            lambda: study.score(temperatures=temperatures, samples=8), lambda held=before: len(graded()) > len(held), delay
        )
        assert before.items() <= graded().items()
        assert not (study.root / "scores/step0.parquet").exists()
    assert kills == 5
    table, _ = study.score(temperatures=temperatures, samples=8)
    assert table.equals(whole)
    assert {path: path.stat().st_mtime_ns for path in study.store.rglob("*")} == stored
    assert [path.name for path in (study.root / "scores").iterdir()] == ["step0.parquet"]


# --- looking and probing -----------------------------------------------------------------------------------------------


def look(study, **filters):
    return list(inspect_samples(markers=[study.root / "m.json"], benchmarks=study.benchmarks, store=study.store, **filters))


def test_inspect_shows_what_was_asked_for(study):
    study.generate(samples=16)
    table, _ = study.score(samples=16)
    everything = look(study)
    assert [sample.grade.verdict for sample in everything] == table["verdict"].to_pylist()
    chosen = look(study, benchmark="numbers", temperature=1.0, verdict="wrong")
    assert {(sample.benchmark, sample.temperature, str(sample.grade.verdict)) for sample in chosen} == {("numbers", 1.0, "wrong")}
    wanted = table.to_pandas().query("benchmark == 'numbers' and temperature == 1.0 and verdict == 'wrong'")
    assert [(s.query.query_id, s.sample_index) for s in chosen] == list(
        zip(wanted["query_id"], wanted["sample_index"], strict=True)
    )
    assert len(look(study, limit=5)) == 5
    text = str(chosen[0])
    for part in (chosen[0].query.problem, chosen[0].response, chosen[0].grade.reason, "verdict:   wrong", "T = 1.0"):
        assert part in text


def test_inspect_can_show_disagreements_alone(study):
    store_answers(study, ["0", "5"], [0, 1])
    assert len(look(study)) == 2
    assert look(study, disagreement=True) == []  # the two checkers agree on plain numbers


@pytest.mark.parametrize(
    ("filters", "known"), [({"benchmark": "aime"}, "numbers"), ({"temperature": 0.3}, "0.5"), ({"verdict": "bad"}, "correct")]
)
def test_inspect_names_what_there_is(study, filters, known):
    study.generate(samples=1)
    with pytest.raises(ValueError, match=f"there are: .*{known}"):
        look(study, **filters)


def test_the_probe_repeats_itself_and_touches_no_random_state(study):
    policy = Qwen2ForCausalLM.from_pretrained(study.policy)
    tokenizer = load_tokenizer(study.policy)
    queries = [Query(f"q{i}", f"Say {i}.", str(i), render_prompt(tokenizer, f"Say {i}.", "")) for i in NUMBERS]
    before = torch.get_rng_state()
    rule = {"max_response_tokens": 12, "stop_ids": stop_ids(tokenizer, study.policy), "seed": 3, "samples": 8}
    with Grader(1) as grader:
        probe = [
            evaluate_policy(PolicySampler(policy, rows), grader, lambda ids: decode(tokenizer, ids), queries, **rule)
            for rows in (5, 64)
        ]
        other = evaluate_policy(PolicySampler(policy), grader, lambda ids: decode(tokenizer, ids), queries, **{**rule, "seed": 4})
    assert probe[0] == probe[1] != other
    assert torch.equal(torch.get_rng_state(), before)
    assert 0 < probe[0]["eval/accuracy"] < 1
    assert 1 <= probe[0]["eval/length"] <= 12


def test_the_fixed_subset_ignores_order():
    queries = [Query(f"q{i}", "", "", (1,)) for i in range(20)]
    chosen = fixed_subset(queries, 5, seed=0)
    assert len({query.query_id for query in chosen}) == 5
    assert fixed_subset(queries[::-1], 5, seed=0) == chosen != fixed_subset(queries, 5, seed=1)
    assert fixed_subset(queries, 50, seed=0)[:5] == chosen
