"""The report: what it claims, that it stands alone, that model output stays text, and that it works in a real browser."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from erpo.config import Cell, drawn_spec, report_spec
from erpo.paper.answer import answer
from erpo.paper.figures import make_figure
from erpo.paper.report import duration, make_report
from erpo.paper.tables import make_table
from tests.synthetic import inputs_of, make_results, study_with

REPORTED = "  beside: {runs: ['*'], columns: reported, caption: Ours beside the paper.}\n"
TABLES = (
    "  main: {runs: [base, grpo, erpo], baseline: grpo, caption: Swept accuracy.}\n  plain: {runs: [grpo], columns: temperature}\n"
)
FIGURES = "  drift: {kind: drift, runs: [grpo, erpo], caption: Drift.}\n"


def write_report(folder, gain, keep=lambda cell: True):
    study = study_with(folder, TABLES + REPORTED, FIGURES)
    scores, markers = make_results(folder, study, gain, keep)
    for name in study.tables:
        make_table(**inputs_of(study, name, scores, markers), out_stem=folder / "tables" / name)
    for name in study.figures:
        make_figure(**inputs_of(study, name, scores, markers), out_stem=folder / "figures" / name)
    make_report(
        study_spec=report_spec(study),
        tables=[folder / "tables" / name for name in study.tables],
        figures=[folder / "figures" / name for name in study.figures],
        markers=list(markers.values()),
        scores=list(scores.values()),
        out=folder / "report.html",
    )
    return folder / "report.html", study, scores


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report"), gain=0.25)[0]


class Page(HTMLParser):
    """Addresses, tags and text of a page."""

    def __init__(self, path):
        super().__init__()
        self.addresses, self.tags, self.texts = [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [(tag, value) for name, value in attrs if name in ("src", "href", "action", "data")]

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_the_page_stands_alone(report):
    page = Page(report)
    loaded = [(tag, address[:5]) for tag, address in page.addresses if tag != "a"]
    assert loaded == [("link", "data:"), ("img", "data:")]
    links = [address for tag, address in page.addresses if tag == "a"]
    assert all(address.startswith("#") or (report.parent / address).is_file() for address in links)
    assert not re.search(r"https?://|//cdn|@import|url\(", report.read_text())


def test_output_of_a_model_is_text(report):
    assert page_scripts(report) == 1  # ours
    text = report.read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script>alert" not in text
    assert "1 + 1 &lt;b&gt;?" in text


def page_scripts(report):
    return Page(report).tags.count("script")


def test_the_answer_names_the_winner_and_how_sure_that_is(report):
    text = report.read_text()
    assert re.search(
        r"Over the whole sweep: erpo is above grpo \(\+\d+\.\d points \[\+\d+\.\d, \+\d+\.\d\], p = 0\.\d+, same sign in 2 of 2",
        text,
    )
    assert "Highest by temperature: erpo is highest at all 3 temperatures, above every other run here." in text
    assert "Temperature by temperature: erpo is above grpo at all 3 temperatures." in text
    assert "With 2 seeds a run" in text


def said(folder, gain, keep=lambda cell: True):
    study = study_with(folder, TABLES)
    scores, _ = make_results(folder, study, gain, keep)
    wanted = [scores[cell] for cell in scores if cell.run in ("base", "grpo", "erpo")]
    return answer(drawn_spec(study, "main"), wanted)


def test_without_a_difference_nothing_is_claimed(tmp_path):
    found = said(tmp_path, gain=0.0)
    about = [sentence for sentence in found.sentences if "erpo" in sentence]
    assert about
    claimless = ("no difference shown", "no single temperature", "are not told apart")
    assert all(any(words in sentence for words in claimless) for sentence in about)
    assert not any("is highest" in sentence for sentence in found.sentences)
    assert all(len(row["leaders"]) > 1 for row in found.rows)


def test_incomplete_samples_allow_no_verdict(tmp_path):
    found = said(tmp_path, gain=0.25, keep=lambda cell: cell != Cell("erpo", 1, 20))
    assert any("rests on incomplete samples" in sentence for sentence in found.sentences)
    assert not any("erpo is above" in sentence for sentence in found.sentences)
    assert "Highest by temperature: at all 3 temperatures samples are missing." in found.sentences
    assert any("Some samples are missing" in caution for caution in found.cautions)


def test_without_scores_there_is_no_answer(tmp_path):
    study = study_with(tmp_path, TABLES)
    assert answer(drawn_spec(study, "main"), []).sentences == ["There are no scores yet, so there is no answer yet."]


def test_an_empty_study_has_a_report_too(tmp_path):
    study = study_with(tmp_path, TABLES)
    out = tmp_path / "report.html"
    make_report(study_spec=report_spec(study), tables=[], figures=[], markers=[], scores=[], out=out)
    assert "no table of scores" in out.read_text()


def test_runs_cost_and_provenance_are_there(report):
    texts = Page(report).texts
    assert "kl_on" in texts
    assert '"query"' in texts
    assert "Training took 2.7 min in all, as the logs of the steps add up: 0.08889 GPU-hours." in texts  # 4 x 20 x 2 s, 2 GPUs
    assert "4 trainings" in texts
    assert any("torch 2.13.0" in text and "Trained on: 2 x a GPU." in text for text in texts)
    assert "10 input files with checksums" in texts
    assert [text for text in texts if text == "†"] == []


def test_a_second_report_is_the_same_file(report, tmp_path):
    other, *_ = write_report(tmp_path, gain=0.25)
    ours, theirs = (path.read_text().replace(str(path.parent), "") for path in (report, other))
    assert strip_sums(ours) == strip_sums(theirs)


def strip_sums(text):
    return re.sub(r"<code>[0-9a-f]{16}</code>", "", text)


@pytest.mark.parametrize(("seconds", "text"), [(5, "5 s"), (90, "1.5 min"), (7200, "2.0 h")])
def test_durations(seconds, text):
    assert duration(seconds) == text


# --- in a real browser -------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (apt-get install chromium)")

PROBE = """<script>
const seen = [];
addEventListener("error", (event) => seen.push("error: " + event.message));
addEventListener("securitypolicyviolation", (event) => seen.push("blocked: " + event.blockedURI));
addEventListener("load", () => {
  const table = document.querySelector("#table-main ~ .scroll table");
  const column = () => [...table.tBodies[0].rows].map((row) => row.cells[3].dataset.value);
  const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
  const clicks = [];
  for (const place of [3, 3, 0]) {
    table.tHead.rows[0].cells[place].querySelector("button").click();
    clicks.push(place ? column() : names());
  }
  const beside = document.querySelector("#table-beside ~ .scroll table");
  beside.tHead.rows[0].cells[4].querySelector("button").click();
  const verdicts = [...beside.tBodies[0].rows].map((row) => row.cells[4].textContent);
  for (const button of document.querySelectorAll("table.sortable th button")) button.click();
  const tables = document.querySelectorAll("table.sortable").length;
  const sorted = document.querySelectorAll("table.sortable th[aria-sort]").length;
  for (const run of document.querySelectorAll("#runs details")) run.open = true;
  const charts = document.querySelectorAll("#run-erpo svg polyline").length;
  document.querySelector("img.zoom").click();
  const lens = document.getElementById("lens");
  const zoomed = lens.open && lens.querySelector("img").naturalWidth > 500;
  lens.click();
  const requests = performance.getEntriesByType("resource").map((entry) => entry.name.slice(0, 5));
  const result = { clicks, verdicts, tables, sorted, charts, zoomed, closed: !lens.open, seen, requests };
  document.body.dataset.result = JSON.stringify(result);
});
</script>"""


def browse(path, *options):
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1280,1600"]
    done = subprocess.run([*command, *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, console


@needs_browser
def test_tables_sort_and_figures_zoom_in_a_browser(report):
    import html
    import json

    probed = report.with_name("probed.html")
    probed.write_text(report.read_text().replace("<title>", PROBE + "<title>", 1))
    document, console = browse(probed, "--dump-dom")
    found = json.loads(html.unescape(re.search(r'data-result="([^"]*)"', document)[1]))
    falling, rising, names = found["clicks"]
    assert [float(value) for value in falling] == sorted(map(float, falling), reverse=True)
    assert rising == falling[::-1]
    assert names == ["grpo", "erpo", "base"]
    assert found["verdicts"] == sorted(found["verdicts"], reverse=True)
    assert len(set(found["verdicts"])) == 3
    assert found["tables"] == found["sorted"] == 7  # answer, main, plain, two of the comparison, cost, inputs
    assert found["charts"] == 12  # six curves of two seeds
    assert (found["zoomed"], found["closed"], found["seen"]) == (True, True, [])
    assert set(found["requests"]) <= {"data:"}
    assert console == []


@needs_browser
def test_a_screenshot_shows_a_page(report):
    picture = report.with_name("page.png")
    _, console = browse(report, f"--screenshot={picture}")
    assert console == []
    assert picture.stat().st_size > 20_000
    assert Path(picture).read_bytes().startswith(b"\x89PNG")
