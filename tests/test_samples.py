"""The sample store: what finds a sample again, what never does, and what survives damage and crowds."""

import json
import os
import random
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from erpo.checkpoint import write_json
from erpo.records import Query, Rollout
from erpo.samples import (
    SCHEMA,
    Drawn,
    Shelf,
    ask,
    ask_all,
    find,
    hash_prompt,
    hash_prompts,
    part_facts,
    read_markers,
    read_part,
)

PARAMETERS = {"temperature": 0.7, "top_p": 1.0, "max_response_tokens": 16, "stop_ids": [1]}
ENGINE = {"name": "sampler"}


def make_queries(count, shift=0):
    return [Query(f"q{i}", f"problem {i}", str(i), (5 + i, 6 + shift, 7)) for i in range(count)]


def draw(asked):
    """What a generator would return: a pure function of the key."""
    drawn = []
    for row in asked:
        rng = np.random.default_rng(row.key.seed)
        ids = rng.integers(0, 50, rng.integers(1, 9)).astype(np.int32)
        rollout = Rollout(row.query.query_id, row.sample_index, ids, rng.normal(size=len(ids)).astype(np.float32), "stop")
        drawn.append(Drawn(row, rollout, " ".join(map(str, ids))))
    return drawn


def missing(shelf, asked):
    held = {key for keys in shelf.keys().values() for key in keys}
    return [row for row in asked if row.key not in held]


def test_a_part_gives_back_what_was_drawn_and_says_how(tmp_path):
    shelf = Shelf(tmp_path, "policy", PARAMETERS)
    drawn = draw(ask("math", make_queries(2), 0.7, 3, seed=0))
    part = shelf.add(drawn, ENGINE)
    found, table = find([row.asked for row in drawn], [part], SCHEMA.names)
    assert found == [row.asked for row in drawn]
    assert table.schema.names == SCHEMA.names
    for row, stored in zip(drawn, table.to_pylist(), strict=True):
        assert stored["response_ids"] == row.rollout.response_ids.tolist()
        assert (stored["query_id"], stored["benchmark"], stored["text"]) == (row.asked.query.query_id, "math", row.text)
        assert (stored["sample_index"], stored["seed"]) == (row.asked.sample_index, row.asked.key.seed)
        assert (stored["temperature"], stored["length"], stored["finish_reason"]) == (0.7, len(row.rollout.response_ids), "stop")
        assert stored["logprob_sum"] == pytest.approx(float(np.sum(row.rollout.logprobs, dtype=np.float64)), abs=1e-12)
    assert part_facts(part) == {"policy_hash": "policy", "sampling": PARAMETERS, "engine": ENGINE}


def test_token_ids_can_be_left_out(tmp_path):
    drawn = draw(ask("math", make_queries(50), 0.7, 4, seed=0))
    full = Shelf(tmp_path / "full", "p", PARAMETERS).add(drawn, ENGINE)
    compact = Shelf(tmp_path / "compact", "p", PARAMETERS).add(drawn, ENGINE, keep_token_ids=False)
    assert compact.stat().st_size < full.stat().st_size
    _, table = find([row.asked for row in drawn], [compact], ["response_ids", "text"])
    assert table["response_ids"].null_count == len(drawn)
    assert table["text"].to_pylist() == [row.text for row in drawn]


def test_more_samples_keep_those_there_are(tmp_path):
    shelf, queries = Shelf(tmp_path, "p", PARAMETERS), make_queries(3)
    eight, more = ask("math", queries, 0.7, 8, seed=0), ask("math", queries, 0.7, 32, seed=0)
    shelf.add(draw(eight), ENGINE)
    lacking = missing(shelf, more)
    assert len(lacking) == 3 * 24
    assert {row.sample_index for row in lacking} == set(range(8, 32))
    assert not missing(shelf, eight)


def test_another_prompt_seed_benchmark_or_temperature_is_another_sample(tmp_path):
    shelf, queries = Shelf(tmp_path, "p", PARAMETERS), make_queries(3)
    asked = ask("math", queries, 0.7, 4, seed=0)
    shelf.add(draw(asked), ENGINE)
    others = [
        ask("math", make_queries(3, shift=1), 0.7, 4, seed=0),  # the template changed
        ask("math", queries, 0.7, 4, seed=1),
        ask("amc", queries, 0.7, 4, seed=0),
        ask("math", queries, 0.8, 4, seed=0),
    ]
    assert [len(missing(shelf, other)) for other in others] == [12, 12, 12, 12]
    keys = [row.key for rows in (asked, *others) for row in rows]
    assert len(set(keys)) == len(keys)


@given(changed=st.sampled_from(["policy", *PARAMETERS, "top_k"]))
@settings(max_examples=20, deadline=None)
def test_another_policy_or_parameter_is_another_shelf(tmp_path_factory, changed):
    store = tmp_path_factory.getbasetemp()
    others = {"temperature": 0.6, "top_p": 0.9, "max_response_tokens": 32, "stop_ids": [1, 2], "top_k": 20}
    same = Shelf(store, "policy", dict(reversed(PARAMETERS.items())))
    assert same.folder == Shelf(store, "policy", PARAMETERS).folder
    policy = "other" if changed == "policy" else "policy"
    parameters = PARAMETERS if changed == "policy" else {**PARAMETERS, changed: others[changed]}
    assert Shelf(store, policy, parameters).folder != same.folder


def test_seeds_of_samples_are_all_different():
    queries = {"a": make_queries(20), "b": make_queries(20)}
    rows = [row for value in (0.1, 1.0, 1.1) for row in ask_all(queries, value, 32, seed=0)]
    assert len({row.key.seed for row in rows}) == len(rows) == 3 * 2 * 20 * 32
    assert all(0 <= row.key.seed < 2**63 for row in rows)


def test_prompt_hashes_see_every_id_and_the_order():
    hashes = {hash_prompt(ids) for ids in ((1, 2), (2, 1), (1, 2, 0), (258,), (1, 3))}
    assert len(hashes) == 5
    queries = make_queries(3)
    assert hash_prompts(queries) == hash_prompts(make_queries(3)) != hash_prompts(queries[::-1])


@given(position=st.integers(0, 10**6), kind=st.sampled_from(["cut", "flip", "longer"]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_part_is_set_aside_and_drawn_again(tmp_path_factory, caplog, position, kind):
    shelf = Shelf(tmp_path_factory.mktemp("store"), "p", PARAMETERS)
    asked = ask("math", make_queries(2), 0.7, 6, seed=0)
    shelf.add(draw(asked[:5]), ENGINE)
    victim = shelf.add(draw(asked[5:]), ENGINE)
    data = bytearray(victim.read_bytes())
    position %= len(data)
    damaged = {"cut": data[:position], "longer": data + b"x", "flip": bytearray(data)}[kind]
    if kind == "flip":
        damaged[position] ^= 0x40
    victim.write_bytes(damaged)
    caplog.clear()
    lacking = missing(shelf, asked)
    assert [row.key for row in lacking] == [row.key for row in asked[5:]]
    assert "set aside" in caplog.text
    assert victim.name in caplog.text
    assert not victim.exists()
    assert victim.with_suffix(".damaged").read_bytes() == damaged
    shelf.add(draw(lacking), ENGINE)
    assert not missing(shelf, asked)


def test_a_part_that_vanished_counts_as_not_drawn(tmp_path, caplog):
    asked = ask("math", make_queries(1), 0.7, 3, seed=0)
    found, table = find(asked, [tmp_path / "part-0.parquet"], ["text"])
    assert (found, len(table)) == ([], 0)
    assert "missing" in caplog.text


def test_absent_samples_are_left_out_and_double_ones_count_once(tmp_path):
    shelf = Shelf(tmp_path, "p", PARAMETERS)
    asked = ask("math", make_queries(2), 0.7, 4, seed=0)
    shelf.add(draw(asked[:4]), ENGINE)
    shelf.add(draw(asked[2:6]), ENGINE)  # another process drew some of the same
    found, table = find(asked, shelf.parts(), ["sample_index", "text"])
    assert found == asked[:6]
    assert table["sample_index"].to_pylist() == [0, 1, 2, 3, 0, 1]
    assert table["text"].to_pylist() == [row.text for row in draw(asked[:6])]


def _add_share(store, number):
    shelf = Shelf(store, "p", PARAMETERS)
    for row in ask("math", make_queries(4), 0.7, 8, seed=0)[number::4]:
        shelf.add(draw([row]), ENGINE)


def test_processes_fill_one_shelf_together(tmp_path):
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(_add_share, [tmp_path] * 4, range(4)))
    shelf = Shelf(tmp_path, "p", PARAMETERS)
    assert len(shelf.parts()) == 32
    assert not missing(shelf, ask("math", make_queries(4), 0.7, 8, seed=0))
    assert not list(shelf.folder.glob(".*"))


def test_leftovers_of_killed_writers_go_once_they_are_old(tmp_path):
    shelf = Shelf(tmp_path, "p", PARAMETERS)
    part = shelf.add(draw(ask("math", make_queries(1), 0.7, 1, seed=0)), ENGINE)
    old, young = (shelf.folder / f".part-{name}.parquet.tmp" for name in ("a", "b"))
    for leftover in (old, young):
        leftover.write_bytes(part.read_bytes()[:100])
    os.utime(old, (time.time() - 7200,) * 2)
    assert list(shelf.keys()) == [part]
    assert (old.exists(), young.exists()) == (False, True)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_history_ends_with_every_sample_once_and_the_same(tmp_path_factory, data):
    """Interrupted sessions of any part sizes, damage between them, growing n: the end is what one clean session gives."""
    shelf = Shelf(tmp_path_factory.mktemp("store"), "p", PARAMETERS)
    queries, rng = {"a": make_queries(3), "b": make_queries(2)}, random.Random(data.draw(st.integers(0, 10**6)))
    for samples in sorted(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))):
        asked = ask_all(queries, 0.7, samples, seed=0)
        rows = missing(shelf, asked)
        for _ in range(data.draw(st.integers(0, 4))):
            size = data.draw(st.integers(1, 7))
            if rows[:size]:
                shelf.add(draw(rows[:size]), ENGINE)
            rows = rows[size:]
        if shelf.parts() and data.draw(st.booleans()):
            victim = rng.choice(shelf.parts())
            victim.write_bytes(victim.read_bytes()[: rng.randrange(victim.stat().st_size)])
    last = missing(shelf, asked)
    if last:
        shelf.add(draw(last), ENGINE)
    found, table = find(asked, shelf.parts(), ["text", "length"])
    assert found == asked
    assert table["text"].to_pylist() == [row.text for row in draw(asked)]


def test_a_part_read_twice_is_the_same_and_its_name_is_its_content(tmp_path):
    drawn = draw(ask("math", make_queries(2), 0.7, 2, seed=0))
    one, two = (Shelf(tmp_path / name, "p", PARAMETERS).add(drawn, ENGINE) for name in "ab")
    assert one.name == two.name
    assert read_part(one, ["seed"]).equals(read_part(two, ["seed"]))


def _marker(path, **changes):
    queries = {"math": make_queries(2)}
    facts = {"policy_hash": "p", "seed": 0, "samples": 4, "temperatures": [0.7], "sampling": {"top_p": 1.0}}
    facts |= {"prompts": {"math": hash_prompts(queries["math"])}, "holdings": {"0.7": {"parts": ["p/x/part-1.parquet"]}}}
    write_json(path, {**facts, **changes})
    return path


def test_markers_of_shards_are_read_together(tmp_path):
    low = _marker(tmp_path / "low.json")
    high = _marker(tmp_path / "high.json", temperatures=[1.2], holdings={"1.2": {"parts": []}}, samples=8)
    holdings = read_markers([high, low], tmp_path / "store", {"math": make_queries(2)})
    assert holdings.temperatures == (0.7, 1.2)
    assert holdings.samples == 8
    assert holdings.parts(0.7) == [tmp_path / "store/p/x/part-1.parquet"]
    assert holdings.parts(1.2) == holdings.parts(0.3) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"policy_hash": "q"}, "differ in policy_hash"), ({"seed": 1}, "differ in seed"), ({"sampling": {"top_p": 0.9}}, "sampling")],
)
def test_markers_that_do_not_belong_together_are_refused(tmp_path, changes, sentence):
    one, two = _marker(tmp_path / "1.json"), _marker(tmp_path / "2.json", **changes)
    with pytest.raises(ValueError, match=sentence):
        read_markers([one, two], tmp_path, {"math": make_queries(2)})


def test_prompts_that_changed_since_are_refused(tmp_path):
    marker = _marker(tmp_path / "1.json")
    with pytest.raises(ValueError, match="prompts of math"):
        read_markers([marker], tmp_path, {"math": make_queries(2, shift=1)})
    with pytest.raises(ValueError, match="name the markers"):
        read_markers([], tmp_path, {})
    assert json.loads(marker.read_text())["samples"] == 4
