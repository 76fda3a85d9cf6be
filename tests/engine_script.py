"""Run by test_engine.py on one or more processes: scenarios of a few updates of a tiny model, with the engine or a plain loop."""

import json
import sys
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from erpo.batching import collate, plan_micro_batches
from erpo.config import Machine, RunConfig
from erpo.engine import Engine, PolicyModule, gather_objects, join_processes
from erpo.objective import global_counts, total_loss

DEFAULTS = {"plain": False, "stage": 1, "updates": 3, "start": 0, "save": None, "load": None, "poison": None}
RUN = RunConfig(
    dtype="float32", learning_rate=1e-3, kl_on="query", kl_coef=0.1, queries_per_step=4, updates_per_step=1, max_grad_norm=0.5
)


def batch_of(number: int):
    """Ragged rows, four queries of two responses; the reference is the policy shifted by a constant."""
    generator = torch.Generator().manual_seed(number)
    queries, responses, groups, reference = [], [], [], []
    for group in range(4):
        query = torch.randint(0, 40, (3 + group,), generator=generator).tolist()
        for _ in range(2):
            length = int(torch.randint(1, 7, (1,), generator=generator))
            queries.append(query)
            responses.append(torch.randint(0, 40, (length,), generator=generator).tolist())
            groups.append(group)
            reference.append([-3.5] * (len(query) - 1))
    batch = collate(queries, responses, groups, query_ref_logprobs=reference)
    advantages = torch.randn(len(groups), 1, generator=generator) * batch.response_mask
    return batch.__class__(**{**batch.__dict__, "advantages": advantages.float()})


def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def plain_loop(options: dict) -> dict:
    module = PolicyModule(model(), with_value_head=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RUN.learning_rate, weight_decay=RUN.weight_decay)
    losses, norms = [], []
    for number in range(options["updates"]):
        batch = batch_of(number)
        logprobs, entropy, _ = module(batch, 1.0)
        loss = total_loss(logprobs, batch, global_counts(batch), RUN, entropy=entropy).loss
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), RUN.max_grad_norm)))
        optimizer.step()
        losses.append(float(loss))
    return {"losses": losses, "norms": norms, "parameters": flat(module.policy.named_parameters())}


def flat(named) -> list[float]:
    return torch.cat([tensor.detach().float().flatten() for _, tensor in named]).tolist()


def engine_loop(options: dict, rank: int, world: int) -> dict:
    engine = Engine(PolicyModule(model(), with_value_head=False), RUN, Machine(zero_stage=options["stage"]))
    if options["load"]:
        engine.load(Path(options["load"]))
    losses, norms, applied = [], [], []
    for number in range(options["start"], options["updates"]):
        batch = batch_of(number)
        counts = global_counts(batch)
        plan = plan_micro_batches(batch.lengths.numpy(), 22, world)[rank]
        share = 0.0
        for position, rows in enumerate(plan):
            micro = batch.rows(rows)
            engine.expect(is_last=position == len(plan) - 1)
            logprobs, entropy, _ = engine.forward(micro, 1.0)
            loss = total_loss(logprobs, micro, counts, RUN, entropy=entropy).loss
            share += float(loss)
            engine.backward(loss * float("inf") if options["poison"] == number else loss)
        result = engine.step(RUN.learning_rate)
        losses.append(sum(gather_objects(share)))
        norms.append(result.grad_norm)
        applied.append(result.applied)
    if options["save"]:
        Path(options["save"]).mkdir(exist_ok=True)
        engine.save(Path(options["save"]))
    parameters = flat([(name, tensor.clone()) for name, tensor in engine.full_weights()])
    return {"losses": losses, "norms": norms, "applied": applied, "parameters": parameters}


rank, world = join_processes()
found = {}
for name, given in json.loads(Path(sys.argv[1]).read_text()).items():
    options = {**DEFAULTS, **given}
    found[name] = plain_loop(options) if options["plain"] else engine_loop(options, rank, world)
if rank == 0:
    Path(sys.argv[2]).write_text(json.dumps(found))
