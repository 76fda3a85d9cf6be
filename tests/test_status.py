"""`erpo status`: what is said of runs whose news cannot be read, and of a place that holds none."""

import json
import time

import pytest

from erpo.__main__ import main
from erpo.progress import describe_status

NEWS = {"title": "train erpo seed 0", "step": 3, "total": 9, "steps_per_second": 0.5, "eta_seconds": 12.0, "last_save": 2}


def write(root, name: str, text: str) -> None:
    place = root / name / "work"
    place.mkdir(parents=True)
    (place / "progress.json").write_text(text)


def test_a_run_is_one_line(tmp_path):
    write(tmp_path, "erpo", json.dumps({**NEWS, "time": time.time()}))
    assert describe_status(tmp_path) == ["train erpo seed 0: step 3/9, 0.50 steps/s, ETA 0:12, last save 2, 0:00 ago"]


@pytest.mark.parametrize("text", ["", '{"title": "tr', "[]", "{}", "null", '{"time": "noon"}', json.dumps({**NEWS, "time": None})])
def test_news_that_cannot_be_read_hide_no_other_run(tmp_path, text):
    write(tmp_path, "a", text)
    write(tmp_path, "b", json.dumps({**NEWS, "time": time.time()}))
    torn, whole = describe_status(tmp_path)
    assert torn == f"{tmp_path}/a/work/progress.json: not readable; the next step of the run writes it anew"
    assert whole.startswith("train erpo seed 0: step 3/9")


def test_a_file_is_no_folder_of_results(tmp_path, capsys):
    (tmp_path / "notes.md").touch()
    assert main(["status", str(tmp_path / "notes.md")]) == 2
    assert "notes.md is a file; name the folder of results, such as results/quickstart" in capsys.readouterr().err
    assert main(["status", str(tmp_path / "none")]) == 0
    assert f"no training run under {tmp_path}/none" in capsys.readouterr().out
