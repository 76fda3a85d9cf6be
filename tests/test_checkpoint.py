"""Atomic files, verified states, retention, work directories tied to one spec."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from erpo import checkpoint as cp


def save(root: Path, step: int, content: bytes = b"x" * 1000) -> Path:
    folder = cp.begin_state(root, step)
    (folder / "tensors-0.safetensors").write_bytes(content)
    return cp.commit_state(folder, root, step, {"updates": step})


def test_a_state_is_found_verified_and_carries_its_facts(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 7)
    step, folder = cp.newest_state(tmp_path)
    assert step == 7
    assert cp.read_json(folder / cp.MANIFEST)["info"] == {"updates": 7, "step": 7}
    assert cp.newest_state(tmp_path, at_most=6)[0] == 3
    assert cp.newest_state(tmp_path, at_most=2) is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "no manifest", "empty manifest"])
def test_a_damaged_state_is_passed_over_for_an_older_one(tmp_path, damage):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    tensor, manifest = newest / "tensors-0.safetensors", newest / cp.MANIFEST
    if damage == "truncate":
        tensor.write_bytes(tensor.read_bytes()[:-1])
    elif damage == "flip":
        tensor.write_bytes(b"y" + tensor.read_bytes()[1:])
    elif damage == "delete":
        tensor.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_bytes(b"")
    assert cp.why_invalid(newest) is not None
    assert cp.newest_state(tmp_path)[0] == 1


def test_an_interrupted_save_is_never_a_state_and_is_cleaned_up(tmp_path):
    folder = cp.begin_state(tmp_path, 5)
    (folder / "tensors-0.safetensors").write_bytes(b"half")
    assert cp.saved_steps(tmp_path) == []
    save(tmp_path, 5)
    assert cp.saved_steps(tmp_path) == [5]
    assert not list(tmp_path.glob(".saving-*"))


def test_retention_keeps_the_newest_and_the_milestones(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, b"z")
    cp.prune_states(tmp_path, 40, keep=1, always=(20,))
    assert cp.saved_steps(tmp_path) == [20, 40]


def test_states_are_readable_by_a_group(tmp_path):
    folder = cp.begin_state(tmp_path, 1)
    path = folder / "tensors-0.safetensors"
    path.write_bytes(b"1")
    path.chmod(0o600)
    saved = cp.commit_state(folder, tmp_path, 1, {})
    assert (saved / "tensors-0.safetensors").stat().st_mode & 0o044 == 0o044


def test_kill_during_atomic_writes_never_leaves_half_a_file(tmp_path):
    target = tmp_path / "value.json"
    code = (
        "import sys; from pathlib import Path; from erpo.checkpoint import write_json\n"
        "i = 0\n"
        "while True:\n    i += 1; write_json(Path(sys.argv[1]), {'i': i, 'pad': 'x' * 200000})\n"
    )
    for pause in (0.0, 0.013, 0.029):
        process = subprocess.Popen([sys.executable, "-c", code, str(target)])
        while not target.exists():
            time.sleep(0.01)
        time.sleep(0.2 + pause)
        process.kill()
        process.wait()
        assert len(json.loads(target.read_text())["pad"]) == 200000


def test_a_work_directory_belongs_to_one_spec(tmp_path):
    work = tmp_path / "work"
    old = {"run": {"learning_rate": 1e-4, "kl_on": "query"}, "seed": 1}
    new = {"run": {"learning_rate": 2e-4, "kl_on": "query"}, "seed": 1}
    cp.claim_work(work, old)
    cp.claim_work(work, dict(reversed(old.items())))
    with pytest.raises(ValueError, match=r"run\.learning_rate: 0\.0001 -> 0\.0002.*new name.*supersede"):
        cp.claim_work(work, new)
    (work / "states").mkdir()
    cp.claim_work(work, new, supersede=True)
    assert cp.read_json(work / "spec.json") == new
    assert (tmp_path / "work.superseded-1" / "states").is_dir()


def test_policy_hash_follows_weights_and_tokenizer_not_generation_defaults(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"w")
    (tmp_path / "config.json").write_text("{}")
    before = cp.policy_hash(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7}')
    assert cp.policy_hash(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"v")
    assert cp.policy_hash(tmp_path) != before
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights"):
        cp.policy_hash(tmp_path)


def test_a_full_disk_is_one_sentence(tmp_path):
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ValueError, match=r"no space left while writing .*free space"):
        cp.retry_free(full, tmp_path)
    with pytest.raises(ValueError, match=r"needs about .* GiB"):
        cp.check_space(tmp_path, 1 << 60, "a training state")


def test_missing_and_damaged_json_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="does not exist; run the step"):
        cp.read_json(tmp_path / "no.json")
    (tmp_path / "bad.json").write_text('{"a": ')
    with pytest.raises(ValueError, match="is damaged"):
        cp.read_json(tmp_path / "bad.json")
