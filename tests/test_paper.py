"""Tables: every cell against numbers worked out from the samples, holes, honesty, formats, byte-identical rebuilds."""

import hashlib
import json
import re
import shutil
import subprocess
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from erpo.config import Cell
from erpo.paper.aggregate import read_facts
from erpo.paper.notes import checkpoint_rule
from erpo.paper.tables import headline, make_table
from erpo.paper.typeset import Block, Entry, Sheet, latex, markdown
from erpo.scores import write_scores
from tests.synthetic import inputs_of, log_rows, make_results, study_with

MAIN = (
    "  main: {runs: [base, grpo, erpo], metrics: [avg@n, pass@n, pass@1, 'pass@1:first', maj@n], baseline: grpo, caption: Swept.}\n"
)


def build(tmp_path, tables, name="main", gain=0.0, **more):
    study = study_with(tmp_path, tables)
    scores, markers = make_results(tmp_path, study, gain, **more)
    make_table(**inputs_of(study, name, scores, markers), out_stem=tmp_path / "tables" / name)
    return pd.read_csv(tmp_path / "tables" / f"{name}.csv"), scores


def cell(frame, run, column, metric="avg@n", step=None):
    found = frame[(frame["run"] == run) & (frame["column"] == column) & (frame["metric"] == metric)]
    found = found if step is None else found[found["step"] == step]
    assert len(found) == 1
    return found.iloc[0]


def test_cells_are_what_the_samples_say(tmp_path):
    frame, scores = build(tmp_path, MAIN)
    rows = pd.concat([pq.read_table(scores[Cell("erpo", seed, 20)]).to_pandas().assign(seed=seed) for seed in (0, 1)])
    rows["benchmark"] = rows["benchmark"].astype(str)
    easy = rows[rows["benchmark"] == "easy"]
    assert cell(frame, "erpo", "easy")["value"] == pytest.approx(easy["correct"].mean())
    by_benchmark = rows.groupby("benchmark")["correct"].mean()
    assert cell(frame, "erpo", "mean")["value"] == pytest.approx(by_benchmark.mean())
    solved = easy.groupby(["seed", "query_id", "temperature"])["correct"].any().mean()
    assert cell(frame, "erpo", "easy", "pass@n")["value"] == pytest.approx(solved)
    first = easy[easy["sample_index"] == 0]["correct"].mean()
    assert cell(frame, "erpo", "easy", "pass@1:first")["value"] == pytest.approx(first)
    by_seed = easy.groupby("seed")["correct"].mean()
    got = cell(frame, "erpo", "easy")
    assert (got["seed_min"], got["seed_max"]) == pytest.approx((by_seed.min(), by_seed.max()))
    assert got["seed_sd"] == pytest.approx(by_seed.std(ddof=1))
    clean = easy[~easy["flagged"]]["correct"].mean()
    assert got["value_clean"] == pytest.approx(clean)


def test_every_cell_carries_its_honesty(tmp_path):
    frame, scores = build(tmp_path, MAIN)
    got = cell(frame, "grpo", "hard")
    rows = pd.concat([pq.read_table(scores[Cell("grpo", seed, 20)]).to_pandas() for seed in (0, 1)])
    rows = rows[rows["benchmark"].astype(str) == "hard"]
    assert (got["samples"], got["samples_expected"]) == (480, 480)  # 20 problems x 3 temperatures x 4 samples x 2 seeds
    assert (got["problems"], got["problems_expected"]) == (20, 20)
    assert got["truncated"] == pytest.approx(rows["truncated"].mean())
    assert got["no_answer"] == pytest.approx((rows["verdict"].astype(str) == "no_answer").mean())
    assert got["grader_error"] == 0
    assert got["low"] < got["value"] < got["high"]
    assert cell(frame, "erpo", "mean")["baseline"] == "grpo"
    assert np.isnan(cell(frame, "grpo", "mean")["difference"])
    assert len(frame) == 3 * 3 * 5


def test_a_second_build_is_the_same_file(tmp_path):
    study = study_with(tmp_path, MAIN)
    scores, markers = make_results(tmp_path, study)
    digests = []
    for name in ("one", "two"):
        inputs = inputs_of(study, "main", scores, markers)
        inputs["scores"] = inputs["scores"] if name == "one" else inputs["scores"][::-1]
        make_table(**inputs, out_stem=tmp_path / name / "main")
        files = sorted((tmp_path / name).iterdir())
        assert [path.name for path in files] == ["main.csv", "main.json", "main.md", "main.parquet", "main.tex"]
        digests.append([hashlib.sha256(path.read_bytes()).hexdigest() for path in files])
    assert digests[0] == digests[1]


def test_parquet_and_csv_hold_the_same(tmp_path):
    frame, _ = build(tmp_path, MAIN)
    other = pd.read_parquet(tmp_path / "tables/main.parquet")
    assert list(other.columns) == list(frame.columns)
    assert (other["value"].to_numpy() == frame["value"].to_numpy()).all()  # full precision survives the CSV


def test_sidecar_proves_its_inputs(tmp_path):
    _, scores = build(tmp_path, MAIN)
    sidecar = json.loads((tmp_path / "tables/main.json").read_text())
    assert [entry["kind"] for entry in sidecar["inputs"]] == 6 * ["scores"] + 4 * ["training"]
    for entry in sidecar["inputs"][:6]:
        path = scores[Cell(entry["run"], entry["seed"], entry["step"])]
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sidecar["commits"] == ["c" * 40]
    assert sidecar["seeds"] == {"base": [0, 1], "grpo": [0, 1], "erpo": [0, 1]}
    assert sidecar["configurations"]["erpo"]["run"] == {"kl_on": "query", "query_weight": "reference_likelihood"}
    assert sidecar["versions"] == {"math-verify": ["0.9.0"], "torch": ["2.13.0"]}
    assert sidecar["hardware"] == ["2 x a GPU"]
    assert sidecar["training_seconds"] == 4 * 20 * 2.0  # 4 trainings of 20 steps of 2 seconds
    assert sidecar["gpu_hours"] == pytest.approx(2 * 160 / 3600)
    assert sidecar["outputs"]["main.csv"] == hashlib.sha256((tmp_path / "tables/main.csv").read_bytes()).hexdigest()


def test_a_real_difference_is_marked_and_none_is_not(tmp_path):
    better, _ = build(tmp_path / "better", MAIN, gain=0.2)
    alike, _ = build(tmp_path / "alike", MAIN, gain=0.0)
    assert cell(better, "erpo", "mean")["significant"]
    assert cell(better, "erpo", "mean")["best"]
    assert not alike[alike["run"] == "erpo"]["significant"].any()
    assert "**" in (tmp_path / "better/tables/main.md").read_text()
    pure = better[(better["metric"] == "avg@n") & better["p_value"].notna()]
    assert (pure["p_adjusted"] >= pure["p_value"]).all()
    assert pure["p_adjusted"].min() == pytest.approx(len(pure) * pure["p_value"].min())


def test_a_deleted_cell_is_marked_and_nothing_else_changes(tmp_path):
    """One method, benchmark, temperature and seed is gone: its cell and every mean with it say so; the rest is as before."""
    table = (
        "  main: {runs: [grpo, erpo], metrics: [avg@n, pass@n], baseline: grpo}\n"
        "  hot: {runs: [grpo, erpo], columns: temperature, metrics: [avg@n], baseline: grpo}\n"
    )
    study = study_with(tmp_path, table)
    scores, markers = make_results(tmp_path, study, gain=0.2)
    before = {name: frame_of(study, name, scores, markers, tmp_path / "before") for name in ("main", "hot")}
    path = scores[Cell("erpo", 1, 20)]
    rows = pq.read_table(path)
    gone = (np.array(rows["benchmark"].to_pylist()) == "hard") & np.isclose(rows["temperature"].to_numpy(), 1.3)
    write_scores(path, rows.filter(~gone), read_facts(path))
    after = {name: frame_of(study, name, scores, markers, tmp_path / "after") for name in ("main", "hot")}
    for metric in ("avg@n", "pass@n"):
        for column, found in (("hard", 400), ("mean", 880)):
            got = cell(after["main"], "erpo", column, metric)
            assert not got["complete"]
            assert not got["best"]
            assert not got["significant"]
            assert got["samples"] == found
            assert got["missing"] == "results/small/scores/erpo/seed1/step20.parquet"
    assert not cell(after["hot"], "erpo", "T=1.3")["complete"]
    untouched = [("main", "grpo", "easy"), ("main", "grpo", "mean"), ("main", "erpo", "easy"), ("hot", "erpo", "T=0.5")]
    for name, run, column in untouched:
        old, new = cell(before[name], run, column), cell(after[name], run, column)
        pd.testing.assert_series_equal(old, new, check_names=False)
    text = (tmp_path / "after/main.md").read_text()
    assert "snakemake results/small/scores/erpo/seed1/step20.parquet" in text
    assert "†" in text


def frame_of(study, name, scores, markers, folder):
    make_table(**inputs_of(study, name, scores, markers), out_stem=folder / name)
    return pd.read_csv(folder / f"{name}.csv", keep_default_na=True, na_values=[""])


def test_a_missing_file_leaves_the_other_seed(tmp_path):
    frame, _ = build(tmp_path, MAIN, keep=lambda cell: cell != Cell("erpo", 0, 20))
    got = cell(frame, "erpo", "mean")
    assert (got["seeds"], got["seeds_expected"], got["complete"]) == (1, 2, False)
    assert got["seeds_compared"] == 1
    assert np.isfinite(got["value"])


def test_a_run_without_any_file_has_no_value_and_nobody_is_best(tmp_path):
    frame, _ = build(tmp_path, MAIN, gain=0.2, keep=lambda cell: cell.run != "grpo")
    assert np.isnan(cell(frame, "grpo", "mean")["value"])
    assert not frame["best"].any()
    assert not frame["significant"].any()
    assert "-†" in (tmp_path / "tables/main.md").read_text()


def test_columns_by_temperature_band_step_and_none(tmp_path):
    tables = (
        "  hot: {runs: [grpo], columns: temperature}\n"
        "  bands: {runs: [grpo], columns: band}\n"
        "  long: {runs: [base, grpo], columns: step, steps: [10, 20]}\n"
        "  one: {runs: [grpo, erpo], columns: none, metrics: [avg@n, 'pass@2', kl/query]}\n"
    )
    study = study_with(tmp_path, tables)
    scores, markers = make_results(tmp_path, study)
    frames = {name: frame_of(study, name, scores, markers, tmp_path / "t") for name in study.tables}
    assert list(frames["hot"]["column"]) == ["T=0.5", "T=1.0", "T=1.3", "mean"]
    assert cell(frames["hot"], "grpo", "mean")["value"] == pytest.approx(frames["hot"]["value"][:3].mean())
    assert list(frames["bands"]["column"]) == ["low_band", "high_band", "mean"]
    assert cell(frames["bands"], "grpo", "low_band")["value"] == pytest.approx(frames["hot"]["value"][:2].mean())
    assert cell(frames["bands"], "grpo", "high_band")["value"] == pytest.approx(frames["hot"]["value"][2])
    assert set(zip(frames["long"]["run"], frames["long"]["column"], strict=True)) == {
        ("base", "step0"), ("grpo", "step10"), ("grpo", "step20"),
    }  # fmt: skip
    assert set(frames["one"]["metric"]) == {"avg@n", "pass@2", "kl/query"}
    assert (tmp_path / "t/one.md").read_text().count("| run") == 1
    assert "| base | " in (tmp_path / "t/long.md").read_text()


def test_training_metrics_are_those_logged_at_the_step(tmp_path):
    table = "  main: {runs: [base, grpo, erpo], steps: [10, 18, 20], metrics: [avg@n, kl/query, kl/response], columns: band}\n"
    frame, _ = build(tmp_path, table)
    at = {row["step"]: row for row in log_rows(20, 1.0)}
    for step in (10, 18, 20):
        assert cell(frame, "grpo", "kl/query", "kl/query", step)["value"] == pytest.approx(at[step]["kl/query"])
    assert cell(frame, "grpo", "kl/response", "kl/response", 10)["value"] == pytest.approx(at[10]["kl/response"])
    lacking = cell(frame, "grpo", "kl/response", "kl/response", 18)
    assert np.isnan(lacking["value"])
    assert not lacking["complete"]
    text = (tmp_path / "tables/main.md").read_text()
    assert "grpo, step 18" in text
    assert "kl/response of grpo at step 18: not logged by every seed" in text


def test_a_table_of_training_metrics_alone_needs_no_scores(tmp_path):
    frame, _ = build(tmp_path, "  main: {runs: [grpo, erpo], columns: none, metrics: [kl/query, kl/response]}\n")
    assert cell(frame, "erpo", "kl/query", "kl/query")["value"] == pytest.approx(0.1)
    assert "| erpo |" in (tmp_path / "tables/main.md").read_text()


def test_a_baseline_outside_the_table_is_refused(tmp_path):
    with pytest.raises(ValueError, match="add it to runs"):
        build(tmp_path, "  main: {runs: [base, erpo], baseline: grpo}\n")


def test_mixed_commits_are_shown(tmp_path):
    study = study_with(tmp_path, MAIN)
    scores, markers = make_results(tmp_path, study)
    path = scores[Cell("base", 0, 0)]
    write_scores(path, pq.read_table(path), {**read_facts(path), "commit": "d" * 40})
    make_table(**inputs_of(study, "main", scores, markers), out_stem=tmp_path / "main")
    assert "made by 2 commits" in (tmp_path / "main.md").read_text()


def test_seeds_trained_under_different_settings_make_no_row(tmp_path):
    study = study_with(tmp_path, MAIN)
    scores, markers = make_results(tmp_path, study)
    path = markers[Cell("erpo", 1, 20)]
    marker = json.loads(path.read_text())
    marker["spec"]["run"]["learning_rate"] = 5e-6
    path.write_text(json.dumps(marker))
    with pytest.raises(ValueError, match=r"step20.json and .* were trained under different settings \(run.learning_rate\)"):
        make_table(**inputs_of(study, "main", scores, markers), out_stem=tmp_path / "main")


@pytest.mark.parametrize(
    ("key", "value"), [("sampling", {"top_p": 0.9}), ("prompt_suffix", " Think."), ("benchmarks", {"easy": 19, "hard": 20})]
)
def test_scores_of_different_evaluations_make_no_table(tmp_path, key, value):
    study = study_with(tmp_path, MAIN)
    scores, markers = make_results(tmp_path, study)
    path = scores[Cell("grpo", 1, 20)]
    write_scores(path, pq.read_table(path), {**read_facts(path), key: value})
    with pytest.raises(ValueError, match=f"evaluated under different settings \\({key}: "):
        make_table(**inputs_of(study, "main", scores, markers), out_stem=tmp_path / "main")


def test_notes_say_rule_samples_temperatures_and_interval(tmp_path):
    build(tmp_path, MAIN)
    text = (tmp_path / "tables/main.md").read_text()
    for said in (
        "the last step of each run (20), fixed before evaluation",
        "seeds 0 and 1",
        "4 samples per problem",
        "0.5 to 1.3 (3 of them)",
        "95% bootstrap interval over problems",
        "Bonferroni-corrected",
        "grader errors 0.0",
    ):
        assert said in text


def test_latex_is_balanced_and_escaped(tmp_path):
    table = "  main: {runs: [grpo, erpo], metrics: [avg@n], caption: '50% of a_b & c'}\n"
    build(tmp_path, table)
    text = (tmp_path / "tables/main.tex").read_text()
    assert r"\caption{50\% of a\_b \& c}" in text
    for name in ("toprule", "midrule", "bottomrule"):
        assert f"\\{name}" in text
    rows = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
    assert {line.count(" & ") for line in rows} == {3}
    assert text.count("{") == text.count("}")


def test_latex_is_no_wider_than_the_page_and_a_minus_is_no_hyphen(tmp_path):
    build(tmp_path, "  main: {runs: [base, grpo], baseline: {base: grpo}}\n", gain=0.2)
    text = (tmp_path / "tables/main.tex").read_text()
    shrunk = text.index(r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%")
    assert shrunk < text.index(r"\begin{tabular}") < text.index(r"\end{tabular}}")
    assert re.search(r"base minus grpo & \$-\$\d", text)
    assert r"\parbox{\textwidth}{\footnotesize Checkpoints: " in text


def long_sheet():
    words = [Entry("agrees", np.nan), Entry("because `x_1` lies in the interval " * 2, np.nan)]
    rows = [(f"n{number}", [Entry("1.5", 1.5), *words]) for number in range(60)]
    return Sheet("long", "Caption.", [Block("Numbers", ["ours", "verdict", "why"], rows, "number")], ["A note."])


def test_a_long_sheet_breaks_over_pages_and_sets_words_as_words():
    text = latex(long_sheet())
    assert r"\begin{longtable}{lrlp{0.69\textwidth}}" in text
    assert text.count(r"\caption") == text.count(r"\endfirsthead") == text.count(r"\endhead") == 1
    assert r"\textasciigrave{}x\_1\textasciigrave{}" in text
    assert text.count("{") == text.count("}")
    shown = markdown(long_sheet()).splitlines()
    assert next(line for line in shown if line.startswith("|-")).count(":") == 1  # only the numbers stand to the right
    assert any(line.startswith("| number |") for line in shown)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine (apt-get install texlive-latex-recommended)")
def test_latex_sets_a_table_and_a_long_sheet_within_the_page(tmp_path):
    table = "  main: {runs: [base, grpo, erpo], columns: temperature, baseline: grpo, caption: '50% of a_b & c'}\n"
    build(tmp_path, table, gain=0.2, keep=lambda cell: cell != Cell("erpo", 1, 20))
    for name, text in (("main", (tmp_path / "tables/main.tex").read_text()), ("long", latex(long_sheet()))):
        page = r"\documentclass{article}\usepackage{booktabs,graphicx,longtable}\begin{document}" + text + r"\end{document}"
        (tmp_path / f"{name}.tex").write_text(page)
        for _ in range(2):  # longtable learns its widths in the first run
            command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", f"{name}.tex"]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        assert "multiply" not in done.stdout
        assert not [line for line in done.stdout.splitlines() if line.startswith("Overfull")], name


def test_shares_that_training_logged_stand_in_percent_beside_scores(tmp_path):
    frame, _ = build(tmp_path, "  main: {runs: [grpo], columns: none, metrics: [avg@n, reward/accuracy, kl/query]}\n")
    text = (tmp_path / "tables/main.md").read_text()
    logged = cell(frame, "grpo", "reward/accuracy", "reward/accuracy")["value"]
    assert "| Training accuracy, percent | Query-KL |" in text
    assert re.search(rf"\| +{100 * logged:.1f} \|", text)


def test_scores_of_other_weights_than_the_trained_ones_are_refused(tmp_path):
    study = study_with(tmp_path, MAIN)
    scores, markers = make_results(tmp_path, study)
    path = scores[Cell("erpo", 1, 20)]
    marker = json.loads(markers[Cell("erpo", 1, 20)].read_text())
    markers[Cell("erpo", 1, 20)].write_text(json.dumps({**marker, "policy_hash": "a" * 16}))
    for policy, refused in (("a" * 16, False), ("b" * 16, True)):
        write_scores(path, pq.read_table(path), {**read_facts(path), "policy_hash": policy})
        with pytest.raises(ValueError, match=f"of other weights \\({policy}\\) than ") if refused else nullcontext():
            make_table(**inputs_of(study, "main", scores, markers), out_stem=tmp_path / "main")


def test_headline_names_the_winner_only_when_there_is_one(tmp_path):
    build(tmp_path / "better", MAIN, gain=0.25)
    build(tmp_path / "alike", MAIN, gain=0.0)
    said = headline(tmp_path / "better/tables/main.csv")
    assert "Avg@4: erpo is above grpo (+" in said
    assert "2 of 2 seeds" in said
    assert "Bold: largest complete value" in said
    assert "no difference shown between erpo and grpo" in headline(tmp_path / "alike/tables/main.csv")
    with pytest.raises(ValueError, match="does not exist"):
        headline(tmp_path / "absent.csv")


def test_seeds_are_named_by_run_where_runs_differ():
    def rule(seeds: dict[str, range]) -> str:
        cells = [(run, seed, 3) for run, found in seeds.items() for seed in found]
        return checkpoint_rule({"cells": cells, "artefact": {"steps": None}})

    assert rule({"grpo": range(3), "erpo": range(3)}) == (
        "Checkpoints: the last step of each run (3), fixed before evaluation; seeds 0, 1 and 2."
    )
    assert rule({"grpo": range(3), "erpo": range(3), "no-kl": range(2)}).endswith("seeds 0, 1 and 2 (no-kl: 0 and 1).")
    assert rule({"grpo": range(1)}).endswith("seed 0.")
