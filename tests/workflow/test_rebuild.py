"""The documented rebuild: an archive, Snakemake, no training and no evaluation; what it lacks stays marked."""

import os
import subprocess
import sys

from erpo.archive import unpack_archive, write_archive
from tests.conftest import ROOT
from tests.synthetic import make_results, study_with

TABLES = "  main: {runs: [base, grpo, erpo], metrics: [avg@n, kl/query], baseline: grpo}\n"
FIGURES = "  drift: {kind: drift, runs: [grpo, erpo]}\n"


def snakemake(folder, targets):
    where = ["--cores", "2", "--directory", str(folder), "--config", "study=small", "archive=true"]
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *where, "--", *targets],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "", "ERPO_DATA": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def contents(folder):
    made = [path for kind in ("tables", "figures") for path in (folder / "results/small" / kind).iterdir()]
    return {path.name: path.read_bytes() for path in made}


def test_tables_figures_and_report_come_out_of_an_archive_alone(tmp_path):
    home = tmp_path / "home"
    study = study_with(home / "config", TABLES, FIGURES)
    make_results(home / "results/small", study, gain=0.2)
    archive = write_archive(home / "config/small.yaml", home / "results/small", tmp_path / "small.zip").path
    whole, holed = tmp_path / "one place", tmp_path / "another"
    for place in (whole, holed):
        unpack_archive(archive, place)
    (holed / "results/small/scores/erpo/seed1/step20.parquet").unlink()
    for place, targets in ((whole, ["all"]), (holed, ["main", "drift"])):
        done = snakemake(place, targets)
        assert done.returncode == 0, done.stdout + done.stderr
    assert (whole / "results/small/report.html").is_file()
    assert len(contents(whole)) == 5 + 4
    assert {name: data for name, data in contents(whole).items() if "drift" in name} == {
        name: data for name, data in contents(holed).items() if "drift" in name
    }
    text = (holed / "results/small/tables/main.md").read_text()
    assert "† incomplete (left out of bold and *): run `snakemake results/small/scores/erpo/seed1/step20.parquet`." in text
    assert "†" not in (whole / "results/small/tables/main.md").read_text()
