"""Starting checkpoints: the warm start of a synthetic model, and existing checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

from erpo.checkpoint import policy_hash, read_json
from erpo.config import PretrainedModel, SyntheticData, SyntheticModel, digest
from erpo.data.problems import generate, vocabulary
from erpo.models import prepare_model
from erpo.templates import build_tokenizer, decode, load_tokenizer, render_prompt, stop_ids
from erpo.warm_start import encode_texts, hastily

TEXTS = SyntheticData(kind="synthetic", families=("chain", "modular"), levels=(1, 2), size=64)
SUFFIX = " Think first."


def tiny(**changes) -> SyntheticModel:
    settings = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "warm_start_steps": 24, "warm_start_batch": 16}
    return SyntheticModel(kind="synthetic", **{**settings, "stop_at_accuracy": 1.0, **changes})


def prepare(root: Path, entry: SyntheticModel | PretrainedModel, texts: SyntheticData | None = TEXTS, **spec) -> dict:
    spec = {"entry": entry.model_dump(mode="json"), **spec}
    marker = root / "models" / "tiny.json"
    prepare_model(entry, texts=texts, prompt_suffix=SUFFIX, out=root / "models" / "tiny", marker=marker, spec=spec)
    return read_json(marker)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.fixture(scope="module", autouse=True)
def few_problems_per_check():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("erpo.warm_start._CHECK_PROBLEMS", 8)
        patch.setattr("erpo.warm_start._EPOCH_TEXTS", 256)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return root, prepare(root, tiny())


# --- the warm start ----------------------------------------------------------------------------------------------------


def test_the_marker_names_policy_hash_spec_and_origin(made):
    root, marker = made
    folder = root / "models" / marker["policy"]
    assert marker["policy"] == "tiny"
    assert marker["policy_hash"] == policy_hash(folder)
    assert marker["spec_hash"] == digest(marker["spec"])
    assert (marker["run"], marker["seed"], marker["step"]) == ("tiny", 0, 0)
    assert marker["updates"] == 24
    assert 0 <= marker["accuracy"] <= 1
    assert marker["parameters"] == AutoModelForCausalLM.from_pretrained(folder).num_parameters()


def test_the_folder_is_ordinary_and_names_no_sampling_defaults(made):
    folder = made[0] / "models" / "tiny"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert (folder / "model.safetensors").is_file()
    defaults = json.loads((folder / "generation_config.json").read_text())
    assert defaults["eos_token_id"] == tokenizer.eos_token_id
    assert not {"temperature", "top_k", "top_p", "repetition_penalty", "do_sample"} & defaults.keys()
    assert stop_ids(tokenizer, folder) == (tokenizer.eos_token_id,)
    for path in folder.iterdir():
        assert path.stat().st_mode & 0o044 == 0o044, f"{path.name} must be readable for the group"


def test_any_tool_can_generate_with_it(made):
    folder = made[0] / "models" / "tiny"
    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([render_prompt(tokenizer, "What is 52 mod 9?", SUFFIX)])
    config = GenerationConfig(max_new_tokens=4, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert output.shape[1] > ids.shape[1]


def test_query_and_solution_are_both_learnt(tmp_path):
    """The loss of query tokens and that of solution tokens fall well below those of uniform guesses (ln V each)."""
    prepare(tmp_path, tiny(warm_start_steps=100, warm_start_learning_rate=1e-2))
    folder = tmp_path / "models" / "tiny"
    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    problems = generate(TEXTS, "train")
    query, solution = [], []
    for problem, row in zip(problems, encode_texts(tokenizer, problems, SUFFIX), strict=True):
        ids, first = torch.tensor([row]), len(render_prompt(tokenizer, problem.problem, SUFFIX))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0]
        query += logprobs[: first - 1].tolist()
        solution += logprobs[first - 1 :].tolist()
    uniform = np.log(len(tokenizer))
    assert -np.mean(query) < uniform - 1.5
    assert -np.mean(solution) < uniform - 1.5


def test_the_same_settings_give_the_same_bits_and_leave_the_global_random_state_alone(made, tmp_path):
    torch.manual_seed(11)
    np.random.seed(11)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    again = prepare(tmp_path, tiny())
    assert again["policy_hash"] == made[1]["policy_hash"]
    assert again["loss"] == made[1]["loss"]
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(before_numpy, np.random.get_state()[1])


def test_another_seed_gives_another_model(made, tmp_path):
    assert prepare(tmp_path, tiny(seed=1))["policy_hash"] != made[1]["policy_hash"]


def test_a_complete_folder_is_kept_and_only_the_marker_is_written(made, monkeypatch):
    root, first = made
    (root / "models" / "tiny.json").unlink()
    monkeypatch.setattr("erpo.models.warm_start", None)  # training again would fail
    assert prepare(root, tiny()) == first


def test_a_damaged_folder_is_made_again_and_another_spec_moves_the_old_aside(made, tmp_path):
    first = prepare(tmp_path, tiny(warm_start_steps=1))
    weights = tmp_path / "models" / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert prepare(tmp_path, tiny(warm_start_steps=1))["policy_hash"] == first["policy_hash"]
    second = prepare(tmp_path, tiny(warm_start_steps=2))
    assert second["policy_hash"] != first["policy_hash"]
    assert policy_hash(tmp_path / "models" / "tiny.superseded-1") == first["policy_hash"]
    assert not list((tmp_path / "models").glob(".making*"))


def test_it_stops_where_accuracy_suffices(tmp_path):
    marker = prepare(tmp_path, tiny(stop_at_accuracy=0.0))
    assert marker["updates"] == 2  # the first of twelve checks


def test_texts_are_prompt_solution_and_end_token():
    tokenizer = build_tokenizer([*vocabulary(), SUFFIX])
    problems = generate(TEXTS, "warm")
    for problem, row in zip(problems, encode_texts(tokenizer, problems, SUFFIX), strict=True):
        prompt = render_prompt(tokenizer, problem.problem, SUFFIX)
        assert tuple(row[: len(prompt)]) == prompt
        assert row[-1] == tokenizer.eos_token_id
        assert decode(tokenizer, row[len(prompt) :]) == problem.solution


def test_a_hasty_solution_skips_the_steps_and_keeps_the_answer():
    problem = generate(TEXTS, "warm")[0]
    assert hastily(problem).solution == f"<think> </think> \\boxed{{{problem.answer}}}"
    assert hastily(problem).problem == problem.problem


def test_impossible_entries_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a synthetic train set"):
        prepare(tmp_path, tiny(), texts=None)
    with pytest.raises(ValueError, match=r"hidden_size \(30\) must be an even multiple of num_heads \(4\)"):
        prepare(tmp_path, tiny(hidden_size=30, num_heads=4))
    assert not (tmp_path / "models" / "tiny").exists()


# --- existing checkpoints ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "checkpoint"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=200, **sizes)).save_pretrained(folder)
    build_tokenizer(vocabulary()).save_pretrained(folder)
    return folder


def test_a_local_folder_is_used_where_it_lies(llama, tmp_path):
    marker = prepare(tmp_path, PretrainedModel(kind="pretrained", source=str(llama)), texts=None)
    assert (tmp_path / "models" / marker["policy"]).resolve() == llama.resolve()
    assert marker["policy_hash"] == policy_hash(llama)
    assert marker["trust_remote_code"] is False


def test_it_is_hashed_once_while_nothing_changes(llama, tmp_path, monkeypatch):
    entry = PretrainedModel(kind="pretrained", source=str(llama))
    first = prepare(tmp_path, entry, texts=None)
    with monkeypatch.context() as patch:
        patch.setattr("erpo.models.policy_hash", None)  # hashing again would fail
        assert prepare(tmp_path, entry, texts=None) == first
    weights = llama / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert prepare(tmp_path, entry, texts=None)["policy_hash"] != first["policy_hash"]


def test_what_is_not_there_or_not_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither a folder nor obtainable from the hub"):
        prepare(tmp_path, PretrainedModel(kind="pretrained", source="nobody/nothing-like-this", revision="abc"), texts=None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        prepare(tmp_path, PretrainedModel(kind="pretrained", source=str(tmp_path / "empty")), texts=None)
    build_tokenizer(vocabulary()).save_pretrained(tmp_path / "half")
    with pytest.raises(ValueError, match="not a model that transformers can load"):
        prepare(tmp_path, PretrainedModel(kind="pretrained", source=str(tmp_path / "half")), texts=None)
    with pytest.raises(ValueError, match=r"gguf_file: weights\.gguf is not in"):
        prepare(tmp_path, PretrainedModel(kind="pretrained", source=str(tmp_path / "half"), gguf_file="weights.gguf"), texts=None)
