"""Text to token ids and back: the one function that renders a prompt, and the word-level tokenizer of the synthetic models.

Training, reference cache, rollouts and evaluation read the ids that `render_prompt` made once; nothing else applies a template.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

log = logging.getLogger(__name__)

transformers_logging.disable_progress_bar()  # a bar for each file of a checkpoint would hide ours

PLAIN_TEMPLATE = "plain"
"""Name of the fallback for a tokenizer without a chat template: the problem and the instruction, nothing else."""

CHAT_TEMPLATE = "chat"
"""Name of the ordinary case: the tokenizer's own chat template, one user message, generation prompt."""

USER_TOKEN, ASSISTANT_TOKEN, END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN = "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "<|unknown|>"
"""Special tokens of the word-level tokenizer."""

_WORD = r"\\boxed\{|</?think>|[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]"
_NO_SPACE_BEFORE = (".", ",", "?", ":", ";", ")", "}")
_NO_SPACE_AFTER = ("(", "\\boxed{")
_WORD_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    f"{{%- if message['role'] == 'assistant' -%}}{ASSISTANT_TOKEN}{{{{ message['content'] }}}}{END_TOKEN}"
    f"{{%- else -%}}{USER_TOKEN}{{{{ message['content'] }}}}{{%- endif -%}}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{ASSISTANT_TOKEN}{{%- endif -%}}"
)


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder.

    Raises:
        ValueError: there is no such folder, or no tokenizer in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no tokenizer at {folder}: the folder does not exist; prepare the model first (rule prepare_model)")
    try:
        tokenizer = _loader(folder).from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} holds no tokenizer that transformers can load: {' '.join(str(error).split())}") from error
    template_name(tokenizer)
    return tokenizer


def _loader(folder: Path) -> Any:
    if _is_generic(folder):
        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer  # imports torch and every model's mapping: seconds that most jobs need not spend

    return AutoTokenizer


def _is_generic(folder: Path) -> bool:
    """Whether tokenizer.json is all there is to the tokenizer. Beside a config.json AutoTokenizer would take the class of the model
    type (Qwen2Tokenizer, say) and put that family's splitting and decoding in the place of the saved ones.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file() or not (folder / "tokenizer.json").is_file():
        return False
    return json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")


def template_name(tokenizer: PreTrainedTokenizerBase) -> str:
    """`chat`, or `plain` (with a warning, once per tokenizer) where the tokenizer has no chat template."""
    if tokenizer.chat_template:
        return CHAT_TEMPLATE
    _warn_plain(tokenizer.name_or_path or type(tokenizer).__name__)
    return PLAIN_TEMPLATE


@functools.cache
def _warn_plain(name: str) -> None:
    log.warning(
        "tokenizer %s has no chat template; using the fallback %r: problem and instruction as plain text", name, PLAIN_TEMPLATE
    )


def render_prompt(tokenizer: PreTrainedTokenizerBase, problem: str, suffix: str) -> tuple[int, ...]:
    """Token ids of a problem as the policy reads it.

    Problem and suffix are one user message through the chat template, followed by the generation prompt. The ids begin with exactly
    one beginning-of-text token where the model uses one (its template or its plain encoding has it) and with none elsewhere.

    Raises:
        ValueError: the tokenizer does not know a word of the text.
    """
    text = problem + suffix
    if template_name(tokenizer) == CHAT_TEMPLATE:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert isinstance(rendered, str)
        text = rendered
    ids = _with_one_bos(tokenizer, _encode(tokenizer, text))
    _refuse_unknown(tokenizer, ids, text)
    return tuple(ids)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(map(int, tokenizer(text, add_special_tokens=False)["input_ids"]))


def _with_one_bos(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    if not isinstance(bos, int):
        return ids
    starts_with_bos = bool(ids) and ids[0] == bos
    while len(ids) > 1 and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return ids if starts_with_bos or not _adds_bos(tokenizer) else [bos, *ids]


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer itself puts the token before a plain text: that is how its model was trained."""
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def _refuse_unknown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str) -> None:
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids or unknown in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        return
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path or 'in use'} does not know a word of {text[:80]!r}; "
        "a synthetic model reads synthetic problems only, and its tokenizer must be built with the study's prompt_suffix"
    )


def decode(tokenizer: PreTrainedTokenizerBase, ids: Iterable[int]) -> str:
    """Text of response ids, special tokens left out, spaces as the tokenizer writes them."""
    text = tokenizer.decode([int(i) for i in ids], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def stop_ids(tokenizer: PreTrainedTokenizerBase, model_folder: Path) -> tuple[int, ...]:
    """Every id that ends a response: end tokens of the tokenizer, of generation_config.json and of config.json.

    Base checkpoints often name different ones; a response that runs past the one it was trained on looks truncated.

    Raises:
        ValueError: none of the three names an end token.
    """
    found = _as_ids(tokenizer.eos_token_id)
    for name in ("generation_config.json", "config.json"):
        path = Path(model_folder) / name
        if path.is_file():
            found += _as_ids(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    stops = tuple(dict.fromkeys(found))
    if not stops:
        raise ValueError(f"{model_folder}: neither tokenizer nor generation_config.json nor config.json names an end token (eos)")
    log.info("responses end at %s", ", ".join(f"{i} ({tokenizer.convert_ids_to_tokens(i)})" for i in stops))
    return stops


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list | tuple) else [int(value)]


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Hashes (16 hex digits) of vocabulary with merging rules, and of the template: equal ones render equal ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    template = str(tokenizer.chat_template or PLAIN_TEMPLATE)
    return {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in (("tokenizer", content), ("template", template))}


# --- the word-level tokenizer of the synthetic models --------------------------------------------------------------------


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    r"""A tokenizer with one token per word, number or sign of `texts` (words or whole sentences), with its own chat template.

    Text whose spacing is ordinary (one space between words, none before `. , ? : ; ) }`, none after `(` and `\boxed{`) comes
    back exactly from its ids. End and padding token are distinct. Save it with `save_pretrained`: any tool can load the folder.
    """
    specials = (PAD_TOKEN, END_TOKEN, USER_TOKEN, ASSISTANT_TOKEN, UNKNOWN_TOKEN)
    split = Regex(_WORD)
    pieces = pre_tokenizers.Split(split, behavior="removed", invert=True)
    words = sorted(
        {word for text in texts for word, _ in pieces.pre_tokenize_str(text)}, key=lambda word: (word.isdigit(), len(word), word)
    )
    vocabulary = {word: index for index, word in enumerate((*specials, *words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN_TOKEN))
    backend.pre_tokenizer = pieces
    backend.decoder = _word_decoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_TOKEN,
        pad_token=PAD_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        additional_special_tokens=[USER_TOKEN, ASSISTANT_TOKEN],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    tokenizer.chat_template = _WORD_CHAT_TEMPLATE
    return tokenizer


def _word_decoder() -> Any:
    """Join words with spaces, then take out those that ordinary writing has not."""
    before = [decoders.Replace(f" {sign}", sign) for sign in _NO_SPACE_BEFORE]
    after = [decoders.Replace(f"{sign} ", sign) for sign in _NO_SPACE_AFTER]
    # A prefix that no word has: the WordPiece decoder then only puts a space before every word but the first.
    return decoders.Sequence([decoders.WordPiece(prefix="\x00", cleanup=False), decoders.Fuse(), *before, *after])
