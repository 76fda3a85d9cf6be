"""Archives: packed the same every time, unpacked only whole, and rebuilt into the same files, byte for byte."""

import hashlib
import io
import json
import zipfile

import pytest

from erpo.__main__ import main
from erpo.archive import MANIFEST, unpack_archive, write_archive
from erpo.config import Cell
from erpo.paper.figures import make_figure
from erpo.paper.tables import make_table
from tests.synthetic import inputs_of, make_results, study_with

TABLES = "  main: {runs: [base, grpo, erpo], metrics: [avg@n, kl/query], baseline: grpo}\n"
FIGURES = "  sweep: {kind: temperature_sweep, runs: [base, grpo, erpo]}\n  drift: {kind: drift, runs: [grpo, erpo]}\n"


def project(folder, **more):
    """A folder with a study and its results, as in a clone."""
    study = study_with(folder / "config", TABLES, FIGURES)
    return study, *make_results(folder / "results/small", study, gain=0.2, **more)


def pack(folder, out="small.zip", **more):
    return write_archive(folder / "config/small.yaml", folder / "results/small", folder / out, **more)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    project(folder)
    return pack(folder)


def test_an_archive_holds_scores_markers_logs_and_the_study(packed):
    with zipfile.ZipFile(packed.path) as archive:
        names = set(archive.namelist())
        facts = json.loads(archive.read(MANIFEST))
    assert packed.checkpoints == 6
    assert packed.missing == facts["missing"] == []
    assert {"config/small.yaml", "results/small/scores/erpo/seed1/step20.parquet"} <= names
    work = "results/small/runs/grpo/seed0/work"
    assert {"results/small/runs/grpo/seed0/step20.json", f"{work}/metrics.jsonl", f"{work}/samples.jsonl"} <= names
    assert names == set(facts["files"]) | {MANIFEST}
    assert len(names) == 2 + 6 + 4 * 3


def test_equal_results_give_an_equal_archive(packed, tmp_path):
    again = write_archive(packed.path.parent / "config/small.yaml", packed.path.parent / "results/small", tmp_path / "again.zip")
    assert again.sha256 == packed.sha256
    assert (tmp_path / "again.zip").read_bytes() == packed.path.read_bytes()


def test_samples_of_training_can_be_left_out(packed, tmp_path):
    folder = packed.path.parent
    less = write_archive(folder / "config/small.yaml", folder / "results/small", tmp_path / "less.zip", with_samples=False)
    assert less.files == packed.files - 4
    assert not any("samples.jsonl" in name for name in zipfile.ZipFile(tmp_path / "less.zip").namelist())


def test_what_is_not_there_yet_is_named(tmp_path):
    project(tmp_path, keep=lambda cell: cell != Cell("erpo", 1, 20))
    found = pack(tmp_path)
    assert found.missing == ["scores/erpo/seed1/step20.parquet"]
    assert found.checkpoints == 5


def test_an_empty_study_is_refused(tmp_path):
    study_with(tmp_path / "config", TABLES)
    with pytest.raises(ValueError, match="holds no scores and no training of study small"):
        pack(tmp_path)


def draw_all(study, folder, monkeypatch):
    """Every artefact, in its place under `folder`, with paths as the workflow gives them."""
    monkeypatch.chdir(folder)
    results = folder / "results/small"
    scores, markers = {}, {}
    for path in sorted(results.glob("scores/*/*/*.parquet")):
        run, seed, step = path.relative_to(results / "scores").with_suffix("").parts
        scores[Cell(run, int(seed[4:]), int(step[4:]))] = path.relative_to(folder)
    for path in sorted(results.glob("runs/*/*/step*.json")):
        run, seed, step = path.relative_to(results / "runs").with_suffix("").parts
        markers[Cell(run, int(seed[4:]), int(step[4:]))] = path.relative_to(folder)
    for name in study.tables:
        make_table(**inputs_of(study, name, scores, markers), out_stem=results / "tables" / name, counts=results / "counts")
    for name in study.figures:
        make_figure(**inputs_of(study, name, scores, markers), out_stem=results / "figures" / name, counts=results / "counts")
    made = [path for kind in ("tables", "figures") for path in (results / kind).iterdir()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in made}


def test_a_rebuild_from_the_archive_is_the_same_byte_for_byte(tmp_path, monkeypatch):
    study, *_ = project(tmp_path / "here")
    original = draw_all(study, tmp_path / "here", monkeypatch)
    archive = pack(tmp_path / "here").path
    assert unpack_archive(archive, tmp_path / "there") == "small"
    rebuilt = draw_all(study, tmp_path / "there", monkeypatch)
    assert sorted(rebuilt) == sorted(original)
    assert len(original) == 5 + 2 * 4
    for name, content in original.items():
        assert rebuilt[name] == content, name


# --- damage ------------------------------------------------------------------------------------------------------------


def cut(data):
    return data[: len(data) // 2]


def flip(data):
    """One bit of the last scores file, whose bytes stand in the archive as they are."""
    place = data.rindex(b"PAR1") - 100
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def rewrite(change):
    """The archive with its members changed by `change(members)`."""

    def edit(data):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
        change(members)
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return out.getvalue()

    return edit


def edit_manifest(members, **values):
    members[MANIFEST] = json.dumps({**json.loads(members[MANIFEST]), **values}).encode()


def smuggle(name):
    """One more file under a name that does not stay in the two folders of an archive."""

    def change(members):
        facts = json.loads(members[MANIFEST])
        members[name] = b"x"
        facts["files"][name] = {"bytes": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
        members[MANIFEST] = json.dumps(facts).encode()

    return rewrite(change)


def twice(data):
    """A second file under the name of one that is there."""
    held = io.BytesIO(data)
    with zipfile.ZipFile(held, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(LOG, b"{}")
    return held.getvalue()


def locked(data):
    """Every member says that it needs a password."""
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        parts = data.split(signature)
        data = signature.join(
            [parts[0], *(part[: place - 4] + bytes([part[place - 4] | 1]) + part[place - 3 :] for part in parts[1:])]
        )
    return data


LOG = "results/small/runs/grpo/seed0/work/metrics.jsonl"


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "is damaged or no archive of this project"),
        (flip, "is damaged or no archive of this project"),
        (lambda data: b"hello", "is damaged or no archive of this project"),
        (rewrite(lambda members: members.pop(MANIFEST)), f"no readable {MANIFEST}"),
        (rewrite(lambda members: members.pop(LOG)), f"its list of contents does not fit: {LOG}"),
        (rewrite(lambda members: members.update({"results/extra": b""})), "its list of contents does not fit: results/extra"),
        (rewrite(lambda members: members.update({LOG: b"{}"})), f"{LOG} does not have the checksum"),
        (rewrite(lambda members: edit_manifest(members, format=9)), "has format 9"),
        (smuggle("../outside.txt"), "it would write to ../outside.txt"),
        (smuggle("results/../../outside.txt"), "it would write to results/../../outside.txt"),
        (smuggle("/tmp/outside.txt"), "it would write to /tmp/outside.txt"),
        (smuggle("results"), "it would write to results"),
        (smuggle("erpo/archive.py"), "it would write to erpo/archive.py"),
        (rewrite(lambda members: edit_manifest(members, files=[MANIFEST])), f"no readable {MANIFEST}"),
        (rewrite(lambda members: edit_manifest(members, files={LOG: {}})), f"no readable {MANIFEST}"),
        (rewrite(lambda members: members.update({MANIFEST: b"[]"})), f"no readable {MANIFEST}"),
        (rewrite(lambda members: edit_manifest(members, study="other")), "it holds no study 'other'"),
        (rewrite(lambda members: edit_manifest(members, study="small --unlock")), "it holds no study 'small --unlock'"),
        (twice, f"its list of contents does not fit: {LOG}"),
        (locked, "is damaged or no archive of this project"),
    ],
)
def test_a_damaged_archive_is_one_sentence_and_leaves_nothing(packed, tmp_path, capsys, damage, said):
    broken = tmp_path / "broken.zip"
    broken.write_bytes(damage(packed.path.read_bytes()))
    assert main(["unpack", "--archive", str(broken), "--out", str(tmp_path / "out")]) == 2
    words = capsys.readouterr().err
    assert words.startswith(f"erpo unpack: {broken} ")
    assert said in words
    assert words.count("\n") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path != broken]


def test_an_absent_archive_and_files_in_the_way_are_refused(packed, tmp_path):
    with pytest.raises(ValueError, match=r"absent\.zip does not exist; give the file"):
        unpack_archive(tmp_path / "absent.zip", tmp_path)
    with pytest.raises(ValueError, match="is a folder, no archive"):
        unpack_archive(tmp_path, tmp_path)
    unpack_archive(packed.path, tmp_path)
    unpack_archive(packed.path, tmp_path)  # the same files again: nothing to do
    (tmp_path / LOG).write_text("mine")
    with pytest.raises(ValueError, match=r"metrics\.jsonl exists and is not the one in .*unpack into an empty folder"):
        unpack_archive(packed.path, tmp_path)
    assert (tmp_path / LOG).read_text() == "mine"


def test_a_place_that_cannot_be_written_is_one_sentence(packed, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="file cannot be written: Not a directory"):
        unpack_archive(packed.path, tmp_path / "file")
    with pytest.raises(ValueError, match=r"small\.zip cannot be written: "):
        pack(packed.path.parent, out=tmp_path / "file/small.zip")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_damaged_marker_is_named_and_nothing_is_written(tmp_path):
    project(tmp_path)
    marker = tmp_path / "results/small/runs/erpo/seed1/step20.json"
    for content in ("{", "[]"):
        marker.write_text(content)
        with pytest.raises(ValueError, match=r"runs/erpo/seed1/step20\.json is damaged"):
            pack(tmp_path)
    assert not list(tmp_path.glob("*small.zip*"))


def test_a_reference_cache_that_is_gone_is_named_as_missing(tmp_path):
    study, *_ = project(tmp_path)
    run = study.runs["erpo"]
    marker = tmp_path / f"results/small/reference/{run.model}/{run.train_set}.json"
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({"cache": "gone.parquet"}))
    assert pack(tmp_path).missing == [f"reference/{run.model}/gone.parquet"]
