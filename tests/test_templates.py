"""Prompts: one template, one beginning-of-text token, every end token; the word-level tokenizer gives texts back exactly."""

import json
import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from erpo.config import PROMPT_SUFFIX
from erpo.data.problems import vocabulary
from erpo.templates import build_tokenizer, decode, fingerprint, load_tokenizer, render_prompt, stop_ids, template_name

BOS_TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}user {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)
PLAIN_CHAT = "{% for m in messages %}user {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"


def toy(template: str | None, *, has_bos: bool, adds_bos: bool = False, name: str = "toy") -> PreTrainedTokenizerFast:
    words = ["<s>", "</s>", "user", "assistant", "one", "two", "a"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>" if has_bos else None, eos_token="</s>", name_or_path=name
    )
    tokenizer.chat_template = template
    return tokenizer


# --- R14: exactly one BOS where the model uses one, none otherwise -------------------------------------------------------


def test_a_template_that_writes_bos_gives_one_bos_although_the_tokenizer_adds_one_too():
    tokenizer = toy(BOS_TEMPLATE, has_bos=True, adds_bos=True)
    assert render_prompt(tokenizer, "one", " two") == (0, 2, 4, 5, 3)


def test_a_template_without_bos_gets_the_bos_that_the_tokenizer_adds_to_plain_text():
    tokenizer = toy(PLAIN_CHAT, has_bos=True, adds_bos=True)
    assert render_prompt(tokenizer, "one", " two") == (0, 2, 4, 5, 3)


def test_a_template_that_writes_bos_twice_gives_one():
    tokenizer = toy("{{ bos_token }} " + BOS_TEMPLATE, has_bos=True)
    assert render_prompt(tokenizer, "one", "") == (0, 2, 4, 3)


@pytest.mark.parametrize("has_bos", [False, True])
def test_no_bos_where_neither_template_nor_tokenizer_uses_one(has_bos: bool):
    assert render_prompt(toy(PLAIN_CHAT, has_bos=has_bos), "one", " two") == (2, 4, 5, 3)


def test_without_a_chat_template_the_named_fallback_is_plain_text_and_is_logged_once(caplog: pytest.LogCaptureFixture):
    tokenizer = toy(None, has_bos=False, name="a base model without a template")
    with caplog.at_level(logging.WARNING, logger="erpo.templates"):
        assert render_prompt(tokenizer, "one", " two") == (4, 5)
        render_prompt(tokenizer, "two", " two")
    assert template_name(tokenizer) == "plain"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'plain'" in caplog.text
    assert "a base model without a template" in caplog.text


def test_the_fallback_also_keeps_the_one_bos():
    assert render_prompt(toy(None, has_bos=True, adds_bos=True, name="base with bos"), "one", " two") == (0, 4, 5)


# --- a real tokenizer ----------------------------------------------------------------------------------------------------


def test_the_bare_chatml_template_costs_eight_tokens_and_the_instruction_44(qwen_tokenizer_dir: Path):
    tokenizer = load_tokenizer(qwen_tokenizer_dir)
    problem = "Find the sum of all integer bases $b>9$ for which $17_{b}$ is a divisor of $97_{b}$."
    ids = render_prompt(tokenizer, problem, PROMPT_SUFFIX)
    plain = tokenizer(problem + PROMPT_SUFFIX, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(plain) + 8
    assert len(plain) == len(tokenizer(problem)["input_ids"]) + 44
    assert list(ids[3:-5]) == plain
    assert tokenizer.decode(ids) == f"<|im_start|>user\n{problem}{PROMPT_SUFFIX}<|im_end|>\n<|im_start|>assistant\n"


def test_decoding_leaves_out_special_tokens_and_changes_nothing_else(qwen_tokenizer_dir: Path):
    tokenizer = load_tokenizer(qwen_tokenizer_dir)
    text = "<think> so , x ' s value is 3 .</think>  \\boxed{ 3 } "
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    assert decode(tokenizer, ids) == text


def test_the_fingerprint_follows_vocabulary_and_template():
    tokenizer = build_tokenizer(["a"])
    before = fingerprint(tokenizer)
    assert before == fingerprint(build_tokenizer(["a"]))
    tokenizer.chat_template = tokenizer.chat_template + " "
    after = fingerprint(tokenizer)
    assert after["tokenizer"] == before["tokenizer"]
    assert after["template"] != before["template"]
    assert fingerprint(build_tokenizer(["b"]))["tokenizer"] != before["tokenizer"]


# --- R16: every end token stops ------------------------------------------------------------------------------------------


def test_end_tokens_of_tokenizer_generation_config_and_config_all_stop(tmp_path: Path):
    tokenizer = toy(PLAIN_CHAT, has_bos=False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 3]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert stop_ids(tokenizer, tmp_path) == (1, 5, 3, 4)


def test_one_end_token_named_everywhere_is_one_stop_id_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tokenizer = toy(PLAIN_CHAT, has_bos=False)
    for name in ("generation_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": 1}))
    with caplog.at_level(logging.INFO, logger="erpo.templates"):
        assert stop_ids(tokenizer, tmp_path) == (1,)
    assert "1 (</s>)" in caplog.text


def test_no_end_token_anywhere_is_refused(tmp_path: Path):
    tokenizer = toy(PLAIN_CHAT, has_bos=False)
    tokenizer.eos_token = None
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="names an end token"):
        stop_ids(tokenizer, tmp_path)


# --- the word-level tokenizer --------------------------------------------------------------------------------------------

TEXTS = [
    "Anna has 12 apples, finds 5, loses 3. How many apples now?",
    "<think> (3 + 4) * 2 = 14. 14 mod 5 = 4. </think> \\boxed{4}",
    "Solve 6 (x + 5) = 2 x + 46.",
    "Answer within <think> </think> tags; write it as \\boxed{}.",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back_exactly(text: str):
    tokenizer = build_tokenizer(TEXTS)
    assert decode(tokenizer, tokenizer(text)["input_ids"]) == text


def test_one_token_per_word_number_and_sign():
    tokenizer = build_tokenizer(TEXTS)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("14 mod 5 = 4. </think> \\boxed{4}")["input_ids"])
    assert tokens == ["14", "mod", "5", "=", "4", ".", "</think>", "\\boxed{", "4", "}"]


def test_a_saved_tokenizer_loads_as_the_same_one(tmp_path: Path):
    suffix = " Think first, then answer in \\boxed{}."
    tokenizer = build_tokenizer([*vocabulary(), suffix])
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    ids = render_prompt(loaded, "Take 12, add 5.", suffix)
    assert ids == render_prompt(tokenizer, "Take 12, add 5.", suffix)
    assert fingerprint(loaded) == fingerprint(tokenizer)
    assert loaded.eos_token_id is not None
    assert loaded.eos_token_id != loaded.pad_token_id
    assert decode(loaded, [*ids, loaded.eos_token_id]) == "Take 12, add 5. Think first, then answer in \\boxed{}."
    assert tokenizer.convert_ids_to_tokens([ids[0], ids[-1]]) == ["<|user|>", "<|assistant|>"]
    assert len(ids) == 2 + 6 + 9


def test_a_word_outside_the_vocabulary_is_refused():
    tokenizer = build_tokenizer(["Take 12."])
    with pytest.raises(ValueError, match="does not know a word of"):
        render_prompt(tokenizer, "Take 13.", "")


def test_a_missing_or_empty_folder_is_one_sentence(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no tokenizer at .*absent"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_a_saved_tokenizer_keeps_its_own_splitting_beside_a_config_of_another_family(tmp_path: Path):
    tokenizer = build_tokenizer(TEXTS)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    loaded = load_tokenizer(tmp_path)
    for text in TEXTS:
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"]
        assert decode(loaded, ids) == text
