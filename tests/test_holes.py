"""The samples of one cell are taken away: whatever uses it says so and names the target; nothing else changes anywhere."""

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from erpo.config import Cell
from erpo.paper.aggregate import read_facts
from erpo.paper.figures import make_figure
from erpo.paper.tables import make_table
from erpo.scores import write_scores
from tests.synthetic import inputs_of, make_results, study_with

HOLE = Cell("erpo", 1, 20)
TARGET = "snakemake results/small/scores/erpo/seed1/step20.parquet"

TABLES = """
  main: {runs: [base, grpo, erpo], metrics: [avg@n, pass@n, kl/query], baseline: grpo}
  gains: {runs: [base, grpo, erpo], columns: temperature, baseline: {erpo: grpo}}
  bands: {runs: [grpo, erpo], columns: band, steps: [10, 20], baseline: grpo}
  long: {runs: [grpo, erpo], columns: step, steps: [10, 20]}
  hot: {runs: [grpo, erpo], columns: none, temperatures: [1.3], benchmarks: [hard]}
  cold: {runs: [grpo, erpo], columns: none, temperatures: [0.5, 1.0]}
  easy: {runs: [grpo, erpo], columns: none, benchmarks: [easy]}
"""
FIGURES = """
  sweep: {kind: temperature_sweep, runs: [base, grpo, erpo]}
  checkpoints: {kind: long_run, runs: [base, grpo, erpo], steps: [10, 20]}
  gap: {kind: train_eval_gap, runs: [grpo, erpo], temperatures: [1.3]}
  drift: {kind: drift, runs: [grpo, erpo]}
"""
UNTOUCHED = {"cold", "easy", "drift"}


def draw(study, scores, markers, folder):
    """CSV frames and notes of everything."""
    for name in study.tables:
        make_table(**inputs_of(study, name, scores, markers), out_stem=folder / name)
    notes = {name: (folder / f"{name}.md").read_text() for name in study.tables}
    for name in study.figures:
        notes[name] = " ".join(make_figure(**inputs_of(study, name, scores, markers), out_stem=folder / name).notes)
    texts = {"missing": object, "baseline": object}
    return {name: pd.read_csv(folder / f"{name}.csv", dtype=texts).fillna({"missing": ""}) for name in notes}, notes


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("holes")
    study = study_with(folder, TABLES, FIGURES)
    scores, markers = make_results(folder, study, gain=0.2)
    before, _ = draw(study, scores, markers, folder / "before")
    path = scores[HOLE]
    rows = pq.read_table(path)
    gone = (np.array(rows["benchmark"].to_pylist()) == "hard") & np.isclose(rows["temperature"].to_numpy(), 1.3)
    assert gone.sum() == 80  # 20 problems, 4 samples
    write_scores(path, rows.filter(~gone), read_facts(path))
    after, notes = draw(study, scores, markers, folder / "after")
    return study, before, after, notes


def uses_the_hole(line):
    """Whether a cell or point is a mean over the hole."""
    if line["run"] != "erpo":
        return False
    if "metric" in line:
        at = {"easy", "T=0.5", "T=1.0", "low_band", "step10", "kl/query"}
        return line["column"] not in at and line["step"] == 20
    title, x = line["panel"], line["x"]
    if line["style"] == "points" or title.startswith("Gap"):
        return True
    if title in ("easy", "hard", "mean"):
        return title != "easy" and x == 1.3
    return x == 20 and title.startswith(("high band", "all temperatures"))


def test_every_cell_and_point_that_uses_it_is_incomplete_and_no_other_changes(drawn):
    study, before, after, _ = drawn
    for name in (*study.tables, *study.figures):
        old, new = before[name], after[name]
        touched = new.apply(uses_the_hole, axis=1) if name not in UNTOUCHED else pd.Series(False, new.index)
        if name not in UNTOUCHED:
            assert touched.any(), name
        assert not new["complete"][touched].any(), name
        assert new["complete"][~touched].all(), name
        assert old["complete"].all(), name
        pd.testing.assert_frame_equal(old[~touched], new[~touched], obj=name)


def test_the_target_is_named_where_it_is_lacking_and_nowhere_else(drawn):
    study, _, after, notes = drawn
    for name in (*study.tables, *study.figures):
        assert (TARGET in notes[name]) == (name not in UNTOUCHED), name
    for name in set(study.tables) - UNTOUCHED:
        lines = after[name][~after[name]["complete"]]
        assert set(lines["missing"]) == {TARGET.removeprefix("snakemake ")}
        assert not lines["best"].any()
        assert not lines["significant"].any()
        assert "†" in notes[name]
