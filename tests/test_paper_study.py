"""Every table and figure of the paper study, from made-up results of its shape at small scale."""

import pandas as pd
import pytest

from erpo.config import load_study, load_style
from erpo.paper.comparison import INCOMPARABLE
from tests.conftest import ROOT
from tests.paper_study import cells_of, draw_everything, write_results

SIZES = {"aime24": 2, "aime25": 2, "amc": 3, "math500": 6, "minerva": 3, "olympiadbench": 4}
ASKED_TABLES = {  # what the paper has, and what a reproduction owes besides
    "main", "main-32b", "by-temperature", "high-temperature", "bands", "ablation", "wrappers", "gap-240", "long-run-bands",
    "weights", "alpha", "paper-against-ours",
}  # fmt: skip
ASKED_FIGURES = {
    "drift", "temperature-sweep", "training-dynamics", "training-dynamics-long", "long-run", "query-weights", "train-eval-gap",
    "gradient-cosine",
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    whole = load_study("paper", ROOT)
    study = whole.model_copy(update={"evaluation": whole.evaluation.model_copy(update={"samples": 4})})
    folder = tmp_path_factory.mktemp("paper")
    write_results(folder, study, SIZES)
    style = load_style().model_copy(update={"png_dpi": 50})
    pictures = draw_everything(folder, study, folder / "made", style)
    return study, folder, pictures


def test_the_study_asks_for_everything_the_paper_shows(built):
    study, *_ = built
    assert set(study.tables) >= ASKED_TABLES
    assert set(study.figures) >= ASKED_FIGURES
    assert {run for run in study.runs if run.endswith("-erpo")} <= set(study.tables["wrappers"].runs)
    assert set(study.tables["ablation"].metrics) >= {"avg@n", "kl/query", "kl/response"}
    assert set(study.tables["main"].metrics) >= {"avg@n", "pass@n", "pass@1"}


def test_every_table_is_whole_in_every_format(built):
    study, folder, _ = built
    for name in study.tables:
        for ending in ("csv", "md", "tex", "parquet", "json"):
            assert (folder / f"made/{name}.{ending}").stat().st_size > 100, name
        assert "†" not in (folder / f"made/{name}.md").read_text(), name
        frame = pd.read_csv(folder / f"made/{name}.csv")
        if name != "paper-against-ours":
            untrained = (frame["step"] == 0) & frame["metric"].str.contains("/")
            assert frame["value"][~untrained].notna().all(), name


def test_every_figure_has_all_its_panels(built):
    study, folder, pictures = built
    for name, picture in pictures.items():
        assert not any(panel.is_empty for panel in picture.panels), name
        for ending in ("pdf", "png", "csv", "json"):
            assert (folder / f"made/{name}.{ending}").stat().st_size > 100, name
    titles = [panel.title for panel in pictures["training-dynamics-long"].panels]
    assert titles == [
        "Query-KL", "Policy-KL", "Entropy", "Reward", "Response length", "Training accuracy", "Evaluation, T=1",
    ]  # fmt: skip
    assert len(pictures["temperature-sweep"].panels) == len(study.benchmarks) + 1


def test_what_the_paper_reports_finds_its_cell_of_ours(built):
    _, folder, _ = built
    frame = pd.read_csv(folder / "made/paper-against-ours.csv")
    assert frame["id"].is_unique
    left = frame[frame["verdict"] == INCOMPARABLE]
    no_cell = {"protocol.training-problems", "gap.eval-from.grpo", "gap.gap.grpo", "gap.gap.erpo"}
    one_seed = {"drift.query.query-kl-only"}
    assert set(left["id"]) == no_cell | one_seed
    statements = frame[frame["reported"].isna()].set_index("id")["verdict"]
    assert len(statements) == 9
    for name in ("long.grpo-kl", "long.grpo-policy-kl", "long.grpo-collapses", "drift.grpo"):  # as the made-up curves run
        assert statements[name] == "holds", name


def test_made_up_results_are_the_same_every_time(built, tmp_path):
    study, folder, _ = built
    few = study.model_copy(update={"runs": {"base": study.runs["base"]}, "tables": {}, "figures": {}})
    again = write_results(tmp_path, few, SIZES)
    assert len(again) == 3
    assert len(cells_of(study)) > 40
    for cell, path in again.items():
        assert path.read_bytes() == (folder / f"scores/{cell.run}/seed{cell.seed}/step{cell.step}.parquet").read_bytes()
