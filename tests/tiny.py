"""A tiny untrained policy with queries and reference cache: what the trainer's tests run on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from erpo import templates
from erpo.checkpoint import policy_hash, write_json
from erpo.config import Machine, RunConfig, SyntheticData, run_settings
from erpo.data import problems
from erpo.data.queries import prepare_queries
from erpo.reference import build_cache

SETTINGS = {
    "dtype": "float32",
    "queries_per_step": 4,
    "responses_per_query": 4,
    "updates_per_step": 2,
    "max_response_tokens": 12,
    "learning_rate": 1e-3,
    "policy_kl_every": 2,
    # An untrained policy never answers: the length penalty is what it can learn from.
    "overlong_buffer_tokens": 12,
}


@dataclass
class Place:
    """Files of one small study."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "models" / "tiny.json"

    @property
    def queries(self) -> Path:
        return self.root / "queries.parquet"

    @property
    def reference(self) -> Path:
        return self.root / "reference.json"

    def arguments(
        self, name: str, step: int, settings: dict[str, Any], folder: str | None = None, **machine: Any
    ) -> dict[str, Any]:
        """Keyword arguments of trainer.train."""
        run = RunConfig(**{**SETTINGS, **settings})
        work = self.root / "runs" / (folder or name)
        return {
            "spec": {"run": {key: value for key, value in run_settings(run).items() if key not in ("model", "train_set")}},
            "run": run,
            "machine": Machine(**{"save_every": 2, "samples_every": 1, **machine}),
            "name": name,
            "seed": 5,
            "step": step,
            "model_marker": self.model,
            "queries_path": self.queries,
            "reference_marker": self.reference,
            "work": work / "work",
            "marker": work / f"step{step}.json",
        }

    def command(self, name: str, step: int, settings: dict[str, Any], folder: str | None = None, **machine: Any) -> list[str]:
        """What follows `python -m erpo` to train so."""
        given = self.arguments(name, step, settings, folder)
        files = {"model": "model_marker", "queries": "queries_path", "reference": "reference_marker"}
        files |= {"work": "work", "marker": "marker"}
        options = {**{option: given[key] for option, key in files.items()}, "name": name, "seed": 5, "step": step}
        options |= {key.replace("_", "-"): value for key, value in {"save_every": 2, "samples_every": 1, **machine}.items()}
        pairs = [part for option, value in options.items() for part in (f"--{option}", str(value))]
        return ["train", "--spec", json.dumps(given["spec"]), *pairs]

    def policy(self, folder: str, step: int) -> dict[str, torch.Tensor]:
        """Exported weights."""
        return load_file(self.root / "runs" / folder / "work" / "policies" / f"step{step}" / "model.safetensors")

    def rows(self, folder: str) -> dict[int, dict[str, float]]:
        """Metrics by step, the latest attempt, without wall-clock figures."""
        found = {}
        for line in (self.root / "runs" / folder / "work" / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            found[row["step"]] = {
                key: value
                for key, value in row.items()
                if not key.startswith(("time/", "tokens_per_second/", "memory/", "attempt"))
            }
        return found


def assert_equal_policies(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Equal to the last bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def make_place(root: Path, **shape: Any) -> Place:
    """Build model (`shape` overrides its configuration), queries and reference cache under `root`."""
    place = Place(root)
    tokenizer = templates.build_tokenizer(problems.vocabulary())
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, **shape}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        **{"tie_word_embeddings": True, **sizes},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():  # responses of many lengths: the end token is likely now and then
        model.model.embed_tokens.weight[tokenizer.eos_token_id] *= 40
    return furnish(place, model, tokenizer)


def furnish(place: Place, model: Any, tokenizer: Any, code: str | None = None) -> Place:
    """Save a model, with the source of a class `Remote` and its `RemoteConfig` if it needs one, and prepare what training needs."""
    root, folder = place.root, place.model.with_suffix("")
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if code is not None:
        (folder / "remote.py").write_text(code)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoConfig": "remote.RemoteConfig", "AutoModelForCausalLM": "remote.Remote"}
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "remote"}))
    trust = code is not None
    marker = {"policy": "tiny", "policy_hash": policy_hash(folder), "spec_hash": "-", "spec": {}, "trust_remote_code": trust}
    write_json(place.model, marker)
    entry = SyntheticData(kind="synthetic", families=("chain", "linear"), levels=(1, 2), size=10)
    prepare_queries(
        entry,
        tokenizer_dir=folder,
        prompt_suffix="",
        max_query_tokens=64,
        data_dir=root,
        benchmarks={},
        out=place.queries,
        manifest=root / "queries.manifest.json",
        trust_remote_code=trust,
    )
    cache = {"out": root / "reference.parquet", "marker": place.reference, "spec": {}, "trust_remote_code": trust}
    build_cache(folder, place.queries, **cache)
    return place
