"""The documented rebuild: an archive, Snakemake, no training and no evaluation; the same bytes twice."""

import os
import subprocess
import sys

from erpo.archive import unpack_archive, write_archive
from tests.conftest import ROOT
from tests.synthetic import make_results, study_with

TABLES = "  main: {runs: [base, grpo, erpo], metrics: [avg@n, kl/query], baseline: grpo}\n"
FIGURES = "  drift: {kind: drift, runs: [grpo, erpo]}\n"


def snakemake(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "snakemake", *arguments, "--directory", str(folder), "--config", "study=small", "archive=true"],
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
    made = []
    for name in ("one place", "another"):
        unpack_archive(archive, tmp_path / name)
        done = snakemake(tmp_path / name, "--cores", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / name / "results/small/report.html").is_file()
        made.append(contents(tmp_path / name))
    assert sorted(made[0]) == sorted(made[1])
    assert len(made[0]) == 5 + 4
    assert made[0] == made[1]
    (tmp_path / "another/results/small/scores/erpo/seed1/step20.parquet").unlink()
    again = snakemake(tmp_path / "another", "--cores", "1", "--forcerun", "table", "--", "main")
    assert again.returncode == 0, again.stdout + again.stderr
    text = (tmp_path / "another/results/small/tables/main.md").read_text()
    assert "† incomplete (left out of bold and *): run `snakemake results/small/scores/erpo/seed1/step20.parquet`." in text
