"""A tiny policy with queries and reference cache, and real training steps on it: collect, grade, update."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from erpo import templates
from erpo.checkpoint import policy_hash, write_json
from erpo.config import Machine, RunConfig, SyntheticData
from erpo.data import problems
from erpo.data.queries import prepare_queries
from erpo.engine import Engine, PolicyModule, join_processes
from erpo.generation import PolicySampler, Sampling
from erpo.learning import Learner
from erpo.records import Query, read_queries
from erpo.reference import ReferenceCache, build_cache, load_cache, static_weights
from erpo.rewards import Grader
from erpo.rollouts import Collector

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class World:
    """What a training job reads."""

    folder: Path
    queries: list[Query]
    cache: ReferenceCache


def make_world(root: Path, *, width: int = 128, layers: int = 3, num_queries: int = 64, ends: float = 0.0) -> World:
    """Model of random weights near zero (it draws almost uniformly), word-level queries, reference cache.

    Args:
        root: empty folder.
        width: hidden size; feed-forward layers have twice as much, heads 32.
        layers: of the model.
        num_queries: training queries.
        ends: mean probability of the end token at a step, above 1 / vocabulary; 0: as likely as any other.
    """
    tokenizer = templates.build_tokenizer(problems.vocabulary())
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        tie_word_embeddings=True,
        initializer_range=0.001,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    folder = root / "models" / "tiny"
    folder.mkdir(parents=True)
    model = Qwen2ForCausalLM(config)
    if ends:
        # Logits of one token's row vary over states; its mean probability is exp(variance / 2) times a uniform one's.
        spread = math.sqrt(2 * math.log(ends * len(tokenizer)))
        with torch.no_grad():
            model.model.embed_tokens.weight[tokenizer.eos_token_id] *= spread / (config.initializer_range * math.sqrt(width))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    entry = SyntheticData(kind="synthetic", families=("chain", "linear"), levels=(1, 2, 3), size=num_queries)
    marker, path = root / "models" / "tiny.json", root / "queries.parquet"
    write_json(marker, {"policy": "tiny", "policy_hash": policy_hash(folder), "spec_hash": "-", "spec": {}})
    prepare_queries(
        entry,
        tokenizer_dir=folder,
        prompt_suffix="",
        max_query_tokens=128,
        data_dir=root,
        benchmarks={},
        out=path,
        manifest=root / "queries.manifest.json",
    )
    build_cache(folder, path, out=root / "reference.parquet", marker=root / "reference.json", spec={})
    queries = read_queries(path)
    return World(folder, queries, load_cache(root / "reference.json", queries))


def stepper(world: World, run: RunConfig, machine: Machine | None = None, stops: bool = True) -> Callable[[int], dict[str, float]]:
    """A function that does training step number n and returns the update's metrics; its policy is its own.

    Args:
        world: model, queries and cache.
        run: settings.
        machine: settings of the machine.
        stops: False: no token ends a response, all have the same length.
    """
    join_processes()
    machine = machine or Machine()

    def load() -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(world.folder, dtype=getattr(torch, run.dtype))

    policy, tokenizer = load(), templates.load_tokenizer(world.folder)
    engine = Engine(PolicyModule(policy, run.advantage == "gae", entropy_gradient=run.entropy_coef > 0), run, machine)
    ends = templates.stop_ids(tokenizer, world.folder) if stops else ()
    sampling = Sampling(run.temperature, 1.0, run.max_response_tokens, ends)
    grader = Grader(workers=1)
    sampler = PolicySampler(policy, machine.rollout_rows)
    collector = Collector(world.queries, sampler, grader, run, sampling, lambda ids: templates.decode(tokenizer, ids), seed=0)
    weights = static_weights(world.cache, world.queries, run)
    learner = Learner(engine, run, machine, load, world.cache.logprobs, weights)
    grader.__enter__()  # workers stay until the process ends

    def step(number: int) -> dict[str, float]:
        experience = collector.collect(number)
        sampled = {"time/rollout": experience.seconds["rollout"], "vocabulary": float(len(tokenizer))}
        return learner.learn(number, experience) | sampled

    return step


sys.path.insert(0, str(ROOT))
