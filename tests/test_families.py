"""Any causal language model: families, tied and untied embeddings, code that comes with a checkpoint, a real pretrained one."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from erpo import templates
from erpo.checkpoint import read_json, write_json
from erpo.data import problems
from erpo.evaluation import generate_samples
from erpo.reference import build_cache
from erpo.trainer import train
from tests.tiny import Place, furnish

ERPO = {"kl_on": "query", "query_weight": "reference_likelihood"}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "gemma": (GemmaConfig, GemmaForCausalLM, {"head_dim": 8}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
}
REMOTE = """
from transformers import Qwen2Config, Qwen2ForCausalLM


class RemoteConfig(Qwen2Config):
    model_type = "remote"


class Remote(Qwen2ForCausalLM):
    config_class = RemoteConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 0.5 * output.logits  # only this code knows
        return output
"""


def tiny_model(family: str, tied: bool):
    config, model, more = FAMILIES[family]
    tokenizer = templates.build_tokenizer(problems.vocabulary())
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    made = model(config(vocab_size=len(tokenizer), tie_word_embeddings=tied, **sizes, **ends, **more))
    with torch.no_grad():
        made.get_output_embeddings().weight[tokenizer.eos_token_id] *= 40
    return made, tokenizer


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_resumes_and_loads_again(tmp_path, family, tied):
    place = furnish(Place(tmp_path), *tiny_model(family, tied))
    train(**place.arguments("run", 1, ERPO))
    train(**place.arguments("run", 2, ERPO))
    row = place.rows("run")[2]
    assert row["update/applied"] == 2
    assert row["rollout/logprob_gap_max"] < 1e-4
    assert row["kl/query"] > 0
    folder = tmp_path / "runs/run/work/policies/step2"
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.config.model_type == family
    weights = place.policy("run", 2)
    assert ("lm_head.weight" in weights) is not tied
    before = tiny_model(family, tied)[0].model.embed_tokens.weight.detach()
    assert float((weights["model.embed_tokens.weight"] - before).abs().max()) > 1e-4
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in weights.items())


def test_code_of_a_checkpoint_runs_only_where_its_entry_allows_it(tmp_path):
    model, tokenizer = tiny_model("qwen2", tied=True)
    place = furnish(Place(tmp_path), model, tokenizer, code=REMOTE)
    train(**place.arguments("run", 2, ERPO))
    row = place.rows("run")[2]
    assert row["rollout/logprob_gap_max"] < 1e-4
    sampled = {"benchmarks": {"same": place.queries}, "temperatures": [1.0], "samples": 1, "top_p": 1.0, "max_response_tokens": 4}
    trained, store = tmp_path / "runs/run/step2.json", tmp_path / "store"
    generate_samples(policy_marker=trained, seed=0, store=store, marker=tmp_path / "samples.json", **sampled)
    assert read_json(tmp_path / "samples.json")

    for marker in (place.model, trained):
        write_json(marker, {**read_json(marker), "trust_remote_code": False})
    with pytest.raises(ValueError, match="trust_remote_code"):
        train(**place.arguments("refused", 1, ERPO))
    with pytest.raises(ValueError, match="trust_remote_code"):
        build_cache(place.model.with_suffix(""), place.queries, out=tmp_path / "c", marker=tmp_path / "c.json", spec={})
    with pytest.raises(ValueError, match="trust_remote_code"):
        generate_samples(policy_marker=trained, seed=1, store=store, marker=tmp_path / "again.json", **sampled)


def test_the_code_changes_what_is_trained(tmp_path):
    """Halved logits: the reference of the same weights is another one, so the code above did run."""
    model, tokenizer = tiny_model("qwen2", tied=True)
    plain = furnish(Place(tmp_path / "plain"), model, tokenizer)
    remote = furnish(Place(tmp_path / "remote"), model, tokenizer, code=REMOTE)
    nll = [read_json(place.reference)["mean_nll"] for place in (plain, remote)]
    assert abs(nll[0] - nll[1]) > 1e-3
    identities = [read_json(place.reference)["identity"] for place in (plain, remote)]
    assert identities[0]["data"] == identities[1]["data"]
