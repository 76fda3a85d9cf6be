"""Figures: what is plotted against the inputs, gaps, formats, looks; training logs as curves and statements on them."""

import hashlib
import json

import matplotlib as mpl
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from erpo.config import load_study, load_style, reference_spec
from erpo.paper import curves
from erpo.paper.aggregate import problem_values, read_scores
from erpo.paper.figures import KINDS, draw, looks, make_figure, settings
from erpo.paper.panels import Line, Panel, Picture
from erpo.paper.summaries import Place, summarise
from tests.conftest import ROOT
from tests.synthetic import inputs_of, log_rows, make_results, study_with, write_training

FIGURES = """
  drift: {kind: drift, runs: [grpo, erpo]}
  sweep: {kind: temperature_sweep, runs: [base, grpo, erpo], caption: Sweep.}
  dynamics: {kind: training_dynamics, runs: [grpo, erpo], steps: [10, 20]}
  long: {kind: long_run, runs: [base, grpo, erpo], steps: [10, 20]}
  weights: {kind: query_weights, runs: [erpo]}
  gap: {kind: train_eval_gap, runs: [grpo, erpo], temperatures: [1.0]}
  cosine: {kind: gradient_cosine, runs: [grpo, erpo]}
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    study = study_with(folder, figures=FIGURES)
    return folder, study, *make_results(folder, study, gain=0.1)


DRAWN = {}


def drawn(results, name, **more):
    folder, study, scores, markers = results
    if not more and (folder, name) in DRAWN:
        return DRAWN[folder, name]
    picture = make_figure(**{**inputs_of(study, name, scores, markers), **more}, out_stem=folder / "figures" / name)
    DRAWN[folder, name] = picture, pd.read_csv(folder / "figures" / f"{name}.csv")
    return DRAWN[folder, name]


def test_every_kind_has_a_drawing_in_every_format(results):
    folder, study, *_ = results
    assert {figure.kind for figure in study.figures.values()} == set(KINDS)
    for name in study.figures:
        drawn(results, name)
        stem = folder / "figures" / name
        assert stem.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        sidecar = json.loads(stem.with_suffix(".json").read_text())
        assert sidecar["inputs"], name
        assert sidecar["outputs"][f"{name}.csv"] == hashlib.sha256(stem.with_suffix(".csv").read_bytes()).hexdigest()


def test_the_text_of_a_pdf_is_text(results):
    folder, *_ = results
    drawn(results, "drift")
    data = (folder / "figures/drift.pdf").read_bytes()
    assert b"/FontFile2" in data  # TrueType, not outlines
    assert b"/Type3" not in data
    assert b"CreationDate" not in data


def test_a_second_drawing_is_the_same_file(results, tmp_path):
    _, study, scores, markers = results
    for name in ("sweep", "drift"):
        for folder in ("one", "two"):
            make_figure(**inputs_of(study, name, scores, markers), out_stem=tmp_path / folder / name)
        for ending in ("csv", "png", "pdf", "json"):
            assert (tmp_path / f"one/{name}.{ending}").read_bytes() == (tmp_path / f"two/{name}.{ending}").read_bytes(), ending


def test_drift_shows_what_was_logged(results):
    _, frame = drawn(results, "drift")
    logged = pd.DataFrame(log_rows(20, 1.0))
    got = frame[(frame["panel"] == "Query-KL") & (frame["run"] == "grpo")]
    assert got["x"].tolist() == logged["step"].tolist()
    assert got["y"].to_numpy() == pytest.approx(logged["kl/query"].to_numpy())
    sparse = frame[(frame["panel"] == "Policy-KL") & (frame["run"] == "erpo")]
    assert sparse["x"].tolist() == [5, 10, 15, 20]


def test_the_sweep_shows_cells_with_their_intervals(results):
    scores = results[2]
    picture, frame = drawn(results, "sweep")
    assert [panel.title for panel in picture.panels] == ["easy", "hard", "mean"]
    found = read_scores(list(scores.values()), 4)
    cell = summarise(found, problem_values(found, "avg@n"), Place("erpo", 20, (0, 1), ("easy", "hard"), (1.3,)))
    got = frame[(frame["panel"] == "mean") & (frame["run"] == "erpo") & (frame["x"] == 1.3)].iloc[0]
    assert (got["y"], got["low"], got["high"]) == pytest.approx((100 * cell.value, 100 * cell.low, 100 * cell.high))
    assert any("95% bootstrap interval over problems" in note for note in picture.notes)


def test_long_runs_show_bands_at_checkpoints_and_the_untrained_run_as_a_level(results):
    picture, frame = drawn(results, "long")
    assert [panel.title for panel in picture.panels] == [
        "low band (T=0.5-1.0)",
        "high band (T=1.3)",
        "all temperatures",
    ]
    assert frame[frame["run"] == "erpo"]["x"].unique().tolist() == [10, 20]
    assert frame[frame["run"] == "base"]["style"].unique().tolist() == ["level"]


def test_dynamics_have_one_set_of_panels_per_horizon(results):
    picture, frame = drawn(results, "dynamics")
    titles = [panel.title for panel in picture.panels]
    assert "Query-KL, to 10" in titles
    assert "Entropy, to 20" in titles
    assert frame[frame["panel"] == "Query-KL, to 10"]["x"].max() == 10
    assert any("Not measured in these runs: Evaluation, T=1" in note for note in picture.notes)


def test_the_gap_is_training_minus_benchmarks(results):
    scores = results[2]
    _, frame = drawn(results, "gap")
    found = read_scores(list(scores.values()), 4)
    cell = summarise(found, problem_values(found, "avg@n"), Place("grpo", 20, (0, 1), ("easy", "hard"), (1.0,)))
    training = np.mean([row["reward/accuracy"] for row in log_rows(20, 1.0)][-10:])
    got = frame[(frame["panel"].str.startswith("Gap")) & (frame["run"] == "grpo")].iloc[0]
    assert got["y"] == pytest.approx(100 * (training - cell.value))
    assert (got["low"], got["high"]) == pytest.approx((100 * (training - cell.high), 100 * (training - cell.low)))


def test_weights_come_from_the_reference_cache_under_the_run_settings(results):
    folder, study, *_ = results
    cache = folder / "reference/tiny/train.parquet"
    cache.parent.mkdir(parents=True)
    pq.write_table(pa.table({"nll": [4.0, 12.0, 40.0], "num_tokens": pa.array([4, 4, 8], pa.int32())}), cache)
    cache.with_suffix(".json").write_text(json.dumps({"spec": reference_spec(study, "tiny", "train"), "cache": cache.name}))
    _, frame = drawn(results, "weights", references=[cache.with_suffix(".json")])
    likelihood = np.exp([-1.0, -3.0, -5.0])
    expected = np.minimum(likelihood / likelihood.mean(), 2.0)  # the cap is reached by the first
    by_length = frame[frame["panel"] == "By query length"]
    assert by_length["y"].tolist() == pytest.approx(expected.tolist())
    assert by_length["x"].tolist() == [4, 4, 8]
    bars = frame[(frame["panel"] == "Distribution") & (frame["y"] > 0)]
    assert bars["y"].to_numpy() == pytest.approx([100 / 3] * 3)
    assert bars["x"].to_numpy() == pytest.approx([0.05, 0.35, 2.05])  # bins [0.0, 0.1), [0.3, 0.4), [2.0, 2.1)


def test_a_missing_checkpoint_leaves_a_gap_and_names_the_target(results, tmp_path):
    _, study, scores, markers = results
    there = {cell: path for cell, path in scores.items() if cell.run != "erpo"}
    picture = make_figure(**inputs_of(study, "sweep", there, markers), out_stem=tmp_path / "sweep")
    assert any("snakemake results/small/scores/erpo/seed0/step20.parquet" in note for note in picture.notes)
    frame = pd.read_csv(tmp_path / "sweep.csv")
    assert frame[frame["run"] == "erpo"]["y"].isna().all()
    assert frame[frame["run"] == "grpo"]["y"].notna().all()


def test_a_figure_without_data_says_so(results, tmp_path):
    _, study, *_ = results
    picture = make_figure(**inputs_of(study, "drift", {}, {}), out_stem=tmp_path / "drift")
    assert all(panel.is_empty for panel in picture.panels)
    assert (tmp_path / "drift.png").is_file()


def test_runs_drawn_together_differ_in_colour_and_in_grey():
    for name in ("quickstart", "paper"):
        study = load_study(name, ROOT)
        for figure in study.figures.values():
            style = looks(figure.runs)
            assert len(set(map(str, style.values()))) == len(figure.runs)
            if len(figure.runs) <= 4:
                assert len({look.colour for look in style.values()}) == len(figure.runs), figure.runs
                assert len({f"{look.dash} {look.marker}" for look in style.values()}) == len(figure.runs), figure.runs


def test_a_run_looks_the_same_in_every_figure():
    alone, together = looks(["erpo"]), looks(["base", "grpo", "erpo"])
    assert alone["erpo"] == together["erpo"]


def test_the_same_method_on_another_model_looks_the_same_and_no_two_runs_do_in_one_figure():
    small, large = looks(["base", "grpo", "erpo"]), looks(["base-32b", "grpo-32b", "erpo-32b"])
    assert list(small.values()) == list(large.values())
    both = looks([*small, *large])
    assert len(set(map(str, both.values()))) == 6
    assert set(load_style().same_look) <= set(load_study("paper", ROOT).runs)


def test_figures_fill_the_width_of_a_page_so_that_letters_print_at_their_size():
    steps = np.arange(1, 11, dtype=float)
    style = load_style()
    with mpl.rc_context(settings(style)):
        for count in range(1, 10):
            panels = [Panel(str(number), "step", "KL", [Line("grpo", steps, steps, steps, steps)]) for number in range(count)]
            assert draw(Picture(panels, []), ["grpo"], style).get_size_inches()[0] <= 7.0, count


def test_nothing_is_cut_off_and_labels_do_not_overlap(results):
    """Every text of every figure lies inside the canvas, and no title runs into its neighbour's."""
    with mpl.rc_context(settings(load_style())):
        for name in ("sweep", "dynamics", "gap", "cosine", "long"):
            picture, _ = drawn(results, name)
            figure = draw(picture, ["base", "grpo", "erpo"])
            figure.savefig("/dev/null", format="png", dpi=figure.dpi)
            width, height = figure.canvas.get_width_height()
            boxes = [axis._left_title.get_window_extent() for axis in figure.axes if axis.get_title("left")]
            for box in boxes:
                assert box.x0 >= 0, name
                assert box.x1 <= width + 1, name
                assert box.y1 <= height + 1, name
            for one in boxes:
                for other in boxes:
                    assert one is other or not one.overlaps(other), name


def test_orders_of_magnitude_get_a_logarithmic_axis():
    steps = np.arange(1, 11, dtype=float)
    lines = [Line(run, steps, steps * factor, steps * factor, steps * factor) for run, factor in (("a", 1.0), ("b", 0.001))]
    figure = draw(Picture([Panel("far", "step", "KL", lines), Panel("near", "step", "KL", lines[:1])], []), ["a", "b"])
    assert [axis.get_yscale() for axis in figure.axes] == ["log", "linear"]


# --- curves ------------------------------------------------------------------------------------------------------------


def test_a_band_is_mean_and_range_over_seeds_where_all_measured(tmp_path):
    for seed, values in ((0, [1.0, 2.0, 3.0]), (1, [3.0, 4.0])):
        write_training(tmp_path, "x", seed, 3, [{"step": step, "kl/query": value} for step, value in enumerate(values, 1)])
    read = curves.read_curves(curves.read_markers(tmp_path.glob("runs/x/*/step3.json")))
    band = curves.band(read, "x", "kl/query")
    assert band.steps.tolist() == [1, 2]
    assert (band.mean.tolist(), band.low.tolist(), band.high.tolist()) == ([2, 3], [1, 2], [3, 4])
    assert curves.seed_values(read, "x", 3, "kl/query", [0, 1]) == {0: 3.0}
    assert curves.seed_values(read, "x", 3, "reward/mean", [0, 1]) == {}


def test_the_latest_attempt_of_a_step_counts(tmp_path):
    rows = [{"step": 1, "kl/query": 1.0}, {"step": 2, "kl/query": 9.0}, {"step": 2, "kl/query": 2.0, "attempt": 2}]
    marker = write_training(tmp_path, "x", 0, 2, rows)
    read = curves.read_curves(curves.read_markers([marker]))
    assert read["kl/query"].tolist() == [1.0, 2.0]


def test_smoothing_is_a_centred_running_mean():
    values = np.array([0.0, 3.0, 0.0, 3.0])
    curve = curves.smooth(curves.Band(np.arange(4), values, values, values, 1), 3)
    assert curve.mean.tolist() == [1.5, 1.0, 2.0, 1.5]


def test_statements_on_curves():
    steps = [240, 400, 480, 600, 1000]
    falling, later, steady = [0.6, 0.58, 0.4, 0.2, 0.1], [0.7, 0.7, 0.68, 0.5, 0.3], [0.7, 0.69, 0.7, 0.68, 0.66]
    assert curves.first_drop(steps, falling) == 480
    assert curves.first_drop(steps, steady) is None
    assert curves.drops_first(steps, falling, later)
    assert curves.drops_first(steps, falling, steady)
    assert not curves.drops_first(steps, later, falling)
    assert not curves.drops_first(steps, steady, steady)
    assert curves.holds_until(steps, later, 480)
    assert not curves.holds_until(steps, falling, 480)
    assert curves.explodes_after(steps, [0.5, 0.9, 1.0, 20.0, 50.0], 480)
    assert not curves.explodes_after(steps, [0.5, 0.9, 1.0, 2.0, 3.0], 480)
