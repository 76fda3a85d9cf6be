"""Ours beside the paper: every reported number once, verdicts with reasons, statements as predicates."""

import re
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import yaml

from erpo.config import Cell, drawn_spec
from erpo.paper.comparison import AGREES, DIFFERS, FAILS, HOLDS, INCOMPARABLE, REPORTED, compare_with_paper
from erpo.paper.tables import make_table
from tests.conftest import _outside
from tests.synthetic import inputs_of, log_rows, make_results, simulate_scores, study_with, write_cell, write_training

TABLE = "  ours: {runs: ['*'], steps: [10, 20], metrics: [avg@n, kl/query]}\n"


def entry(value, run="erpo", **more):
    return {"id": f"e{value}", "value": value, "source": "D2", "run": run, "metric": "avg@n", **more}


def compare(folder, entries=(), statements=(), keep=lambda cell: True, gain=0.1):
    study = study_with(folder, TABLE)
    scores, markers = make_results(folder, study, gain=gain, keep=keep)
    inputs = inputs_of(study, "ours", scores, markers)
    inputs.pop("spec")
    return judged(folder, drawn_spec(study, "ours"), entries, statements, **inputs), scores


def judged(folder, spec, entries, statements, scores, markers):
    path = folder / "reported.yaml"
    defaults = {"step": 20, "run": "erpo"}
    path.write_text(yaml.safe_dump({"paper": "x", "defaults": defaults, "entries": list(entries), "statements": list(statements)}))
    frame, _ = compare_with_paper(spec, scores, markers, path)
    return frame


def test_a_number_in_our_interval_agrees_and_one_outside_differs_by_how_much(tmp_path):
    ours = compare(tmp_path, [entry(0.5)])[0].iloc[0]
    found, _ = compare(tmp_path, [entry(float(ours["high"]) - 0.01), entry(0.9, benchmarks=["easy"])])
    near, far = found.iloc[0], found.iloc[1]
    assert near["low"] < near["ours"] < near["high"]
    assert (near["verdict"], far["verdict"]) == (AGREES, DIFFERS)
    assert far["why"] == f"ours is {100 * (far['ours'] - 0.9):+.1f} points from it"
    assert (near["seeds"], near["samples"], near["samples_expected"]) == (2, 960, 960)


def test_missing_samples_allow_no_verdict(tmp_path):
    found, _ = compare(tmp_path, [entry(0.5)], keep=lambda cell: cell != Cell("erpo", 0, 20))
    assert found.iloc[0]["verdict"] == INCOMPARABLE
    assert found.iloc[0]["why"] == "samples are missing: run `snakemake results/small/scores/erpo/seed0/step20.parquet`"
    nothing, _ = compare(tmp_path / "none", [entry(0.5)], keep=lambda cell: cell.run != "erpo")
    assert "snakemake results/small/scores/erpo/seed0/step20.parquet" in nothing.iloc[0]["why"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"run": "dapo"}, "dapo at step 20 is not part"),
        ({"step": 999}, "erpo at step 999 is not part"),
        ({"benchmarks": ["math500"]}, "not evaluated here: math500"),
        ({"temperatures": [1.5]}, "not evaluated here: 1.5"),
        ({"why_not": "unclear"}, "unclear"),
    ],
)
def test_what_cannot_be_compared_says_why(tmp_path, more, why):
    found, _ = compare(tmp_path, [entry(0.5, **more)])
    assert found.iloc[0]["verdict"] == INCOMPARABLE
    assert why in found.iloc[0]["why"]


def test_gains_are_paired_differences(tmp_path):
    found, _ = compare(tmp_path, [entry(0.1, minus="grpo"), entry(0.9, minus="grpo")])
    one = found.iloc[0]
    assert one["low"] < one["ours"] < one["high"]
    assert one["ours"] == pytest.approx(0.1, abs=0.06)
    assert list(found["verdict"]) == [AGREES, DIFFERS]


def test_training_metrics_are_judged_by_the_range_of_seeds(tmp_path):
    entries = [entry(0.1, metric="kl/query"), entry(0.5, metric="kl/query"), entry(0.5, run="grpo", metric="kl/none")]
    found, _ = compare(tmp_path, entries)
    assert list(found["verdict"]) == [AGREES, DIFFERS, INCOMPARABLE]
    assert found.iloc[1]["why"] == "ours is 0.2 times it"


def test_settings_are_compared_as_settings(tmp_path):
    entries = [
        {"id": "n", "value": 4, "source": "D2", "setting": "samples"},
        {"id": "g", "value": 8, "source": "D2", "setting": "responses_per_query"},
        {"id": "a", "value": 0.05, "source": "D2", "setting": "kl_coef"},
        {"id": "s", "value": 20, "source": "D2", "setting": "long_run_steps"},
    ]
    found, _ = compare(tmp_path, entries)
    assert list(found["verdict"]) == [AGREES, AGREES, DIFFERS, AGREES]


# --- statements --------------------------------------------------------------------------------------------------------

STEPS = (240, 400, 480, 600)


def long_run(folder, low, high, kl=lambda step: 0.01):
    """A run whose accuracy in the two bands is given at every checkpoint."""
    study = study_with(
        folder, f"  ours: {{runs: [grpo], steps: [{', '.join(map(str, STEPS))}], seeds: [0], metrics: [avg@n, kl/query]}}\n"
    )
    sizes, temperatures = {"easy": 20, "hard": 20}, (0.5, 1.0, 1.3)
    scores = []
    for number, step in enumerate(STEPS):
        rates = {0.5: low[number], 1.0: low[number], 1.3: high[number]}
        table = simulate_scores(np.random.default_rng(step), lambda _, t, r=rates: r[t], sizes, temperatures, 4)
        scores.append(write_cell(folder, table, "grpo", 0, step, 4, sizes, temperatures, study="small"))
    rows = [{**row, "kl/query": kl(row["step"]), "kl/response": 0.02} for row in log_rows(600, 1.0)]
    markers = [write_training(folder, "grpo", 0, step, rows) for step in STEPS]
    return {"spec": drawn_spec(study, "ours"), "scores": scores, "markers": markers}


def statement(predicate, **more):
    return {"id": predicate, "source": "D1", "says": "...", "predicate": predicate, "run": "grpo", **more}


def test_statements_on_a_collapsing_run_hold(tmp_path):
    run = long_run(tmp_path, [0.6, 0.6, 0.6, 0.2], [0.5, 0.3, 0.1, 0.05], kl=lambda step: 0.1 if step <= 480 else 5.0)
    said = [
        statement("high_band_first"),
        statement("low_band_holds", step=400),
        statement("explodes", metric="kl/query", step=480),
        statement("query_kl_outgrows", step=600),
        statement("high_band_rises"),
        statement("collapses", step=480),
    ]
    found = judged(tmp_path, **run, entries=[], statements=said)
    assert list(found["verdict"]) == [HOLDS, HOLDS, HOLDS, HOLDS, FAILS, HOLDS]
    assert "high band falls at step 400, low band falls at step 600" in found.iloc[0]["why"]


def test_statements_on_a_steady_run_do_not_hold(tmp_path):
    run = long_run(tmp_path, [0.6, 0.6, 0.6, 0.6], [0.3, 0.45, 0.5, 0.45])
    said = [
        statement("high_band_first"),
        statement("explodes", metric="kl/query", step=480),
        statement("query_kl_outgrows", step=600),
        statement("accuracy_falls", step=600),
        statement("high_band_rises"),
        statement("collapses", step=480),
    ]
    found = judged(tmp_path, **run, entries=[], statements=said)
    assert list(found["verdict"]) == [FAILS, FAILS, FAILS, FAILS, HOLDS, FAILS]


def test_a_long_seed_beside_short_ones_is_what_long_statements_look_at(tmp_path):
    run = long_run(tmp_path, [0.6] * 4, [0.3] * 4, kl=lambda step: 0.1 if step <= 480 else 5.0)
    rows = [{**row, "kl/query": 0.1} for row in log_rows(240, 1.0)]
    run["markers"].append(write_training(tmp_path, "grpo", 1, 240, rows))
    found = judged(tmp_path, **run, entries=[], statements=[statement("explodes", metric="kl/query", step=480)])
    assert found.iloc[0]["verdict"] == HOLDS


def test_a_run_that_keeps_more_of_its_best_than_another(tmp_path):
    study = study_with(tmp_path, "  ours: {runs: [grpo, erpo], steps: [240, 400, 480], seeds: [0], metrics: [avg@n]}\n")
    sizes, temperatures, scores = {"easy": 20, "hard": 20}, (0.5, 1.0, 1.3), []
    for name, levels in (("grpo", (0.6, 0.5, 0.2)), ("erpo", (0.6, 0.6, 0.5))):
        for step, level in zip((240, 400, 480), levels, strict=True):
            table = simulate_scores(np.random.default_rng(step), lambda _, __, at=level: at, sizes, temperatures, 4)
            scores.append(write_cell(tmp_path, table, name, 0, step, 4, sizes, temperatures, study="small"))
    said = [statement("keeps_more", run="erpo", than="grpo"), statement("keeps_more", run="grpo", than="erpo")]
    found = judged(tmp_path, drawn_spec(study, "ours"), [], said, scores, [])
    assert list(found["verdict"]) == [HOLDS, FAILS]
    assert "of its best at step 480 erpo keeps" in found.iloc[0]["why"]


def test_statements_without_their_curves_are_not_judged(tmp_path):
    found, _ = compare(tmp_path, statements=[statement("high_band_first"), statement("explodes", metric="kl/query", step=480)])
    assert list(found["verdict"]) == [INCOMPARABLE, INCOMPARABLE]
    assert "2 checkpoints with both bands; needs 3" in found.iloc[0]["why"]


def test_a_statement_is_not_judged_on_the_rest_of_its_curve(tmp_path):
    run = long_run(tmp_path, [0.6, 0.6, 0.6, 0.2], [0.5, 0.3, 0.1, 0.05])
    said = [statement("high_band_first"), statement("collapses", step=480), statement("query_kl_outgrows", step=600)]
    whole = judged(tmp_path, **run, entries=[], statements=said)
    assert list(whole["verdict"]) == [HOLDS, HOLDS, FAILS]
    run["scores"] = run["scores"][:3]  # step 600 is gone
    found = judged(tmp_path, **run, entries=[], statements=said)
    assert list(found["verdict"]) == [INCOMPARABLE, INCOMPARABLE, FAILS]  # the last looks at training alone
    for why in found["why"][:2]:
        assert why == "samples are missing: run `snakemake results/small/scores/grpo/seed0/step600.parquet`"


def test_a_training_metric_that_a_seed_lacks_allows_no_verdict(tmp_path):
    study = study_with(tmp_path, TABLE)
    scores, markers = make_results(tmp_path, study)
    inputs = inputs_of(study, "ours", scores, markers)
    inputs["markers"] = [path for path in inputs["markers"] if path != markers[Cell("erpo", 1, 20)]]
    found = judged(tmp_path, inputs.pop("spec"), [entry(0.1, metric="kl/query")], [], **inputs)
    assert (found.iloc[0]["verdict"], found.iloc[0]["why"]) == (INCOMPARABLE, "logged by 1 of 2 seeds")


# --- the shipped file --------------------------------------------------------------------------------------------------


def leaves(value):
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in leaves(part)]
    if isinstance(value, list):
        return [leaf for part in value for leaf in leaves(part)]
    return [float(value)] if isinstance(value, int | float) and not isinstance(value, bool) else []


def test_every_reported_number_stands_in_the_comparison_exactly_once():
    everything = yaml.safe_load(_outside("ERPO_REPORTED", "paper/reported.yaml").read_text())
    ours = yaml.safe_load(REPORTED.read_text())
    in_words = [8523.0, 1.0, 1.2, 1.5]  # numbers that the list of reported facts holds inside sentences
    protocol = everything["protocol"]
    assert "8523 problems" in protocol["train_set"]
    assert (protocol["temperatures"]["low_band"], protocol["temperatures"]["high_band"]) == ("<= 1.0", "1.2-1.5")
    assert Counter(float(row["value"]) for row in ours["entries"]) == Counter([*leaves(everything), *in_words])
    names = [row["id"] for row in (*ours["entries"], *ours["statements"])]
    assert len(names) == len(set(names))


def test_the_shipped_comparison_is_a_table_like_any_other(tmp_path):
    study = study_with(tmp_path, TABLE)
    scores, markers = make_results(tmp_path, study)
    inputs = inputs_of(study, "ours", scores, markers)
    inputs["spec"]["artefact"]["columns"] = "reported"
    make_table(**inputs, out_stem=tmp_path / "ours")
    frame = pd.read_csv(tmp_path / "ours.csv")
    shipped = yaml.safe_load(REPORTED.read_text())
    assert list(frame["id"]) == [row["id"] for row in (*shipped["entries"], *shipped["statements"])]
    assert set(frame["verdict"]) <= {AGREES, DIFFERS, INCOMPARABLE, HOLDS, FAILS}
    assert frame["why"].notna().all()
    text = (tmp_path / "ours.md").read_text()
    assert "| main.avg.erpo" in text
    settings = sum("setting" in row for row in shipped["entries"])
    numbers, statements = len(shipped["entries"]) - settings, len(shipped["statements"])
    parts = rf"- {numbers} numbers: .*; {settings} settings: .*; {statements} statements: .*not comparable\."
    assert re.search(parts, text)  # settings agree by construction, so they are counted apart
    assert "| number " in text
    assert "long.grpo-high-first" in text
    assert all((tmp_path / f"ours.{ending}").is_file() for ending in ("tex", "parquet", "json"))
