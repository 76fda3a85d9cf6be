"""Sampling speed: the package's sampler against transformers.generate (and vLLM's CPU engine, where it is installed), paired.

    python benchmarks/sampling.py [--pairs 5] [--vllm FOLDER]

A tiny Qwen2 model with random weights near zero draws almost uniformly, so that eight end tokens among 200 end a response with
probability 4% a step; the cap is 256 tokens. Every pair runs both sides one after the other on the same prompts; ratios are medians
over pairs of real tokens (end tokens included, padding never counted) per second.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import transformers
from _pairs import report
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from erpo.generation import PolicySampler, Request, Sampling

VOCABULARY, STOPS, CAP, BATCH, GROUP = 200, tuple(range(1, 9)), 256, 256, 8
SHORTEST, LONGEST = 8, 32

Run = Callable[[list[Request]], int]
"""Samples every request and returns the number of real tokens."""


def tiny_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.001,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config).eval()


def prompts(rows: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    return [
        Request(
            f"q{i}",
            tuple(rng.integers(STOPS[-1] + 1, VOCABULARY, rng.integers(SHORTEST, LONGEST + 1)).tolist()),
            tuple(int(s) for s in rng.integers(0, 2**62, GROUP)),
        )
        for i in range(rows // GROUP)
    ]


def with_sampler(model: torch.nn.Module, stops: tuple[int, ...], cap: int) -> Run:
    def run(requests: list[Request]) -> int:
        groups = PolicySampler(model, BATCH).generate(requests, Sampling(1.0, 1.0, cap, stops))
        return sum(len(rollout.response_ids) for group in groups for rollout in group)

    return run


def with_generate(model: Qwen2ForCausalLM, stops: tuple[int, ...], cap: int) -> Run:
    """Left-padded batches of 256 rows; neutral sampling parameters; no log-probs (so it has less to do)."""
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=cap,
        num_return_sequences=GROUP,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
    )

    def run(requests: list[Request]) -> int:
        total = 0
        for begin in range(0, len(requests), BATCH // GROUP):
            part = [torch.tensor(request.prompt_ids) for request in requests[begin : begin + BATCH // GROUP]]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_side="left")
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in part], batch_first=True, padding_side="left")
            with torch.no_grad():
                output = model.generate(ids, attention_mask=mask, generation_config=config)
            ended = torch.isin(output[:, ids.shape[1] :], torch.tensor(stops, dtype=torch.long)).int()
            total += int((ended.cumsum(1) - ended == 0).sum())  # up to and with the first end token
        return total

    return run


def with_vllm(model: Qwen2ForCausalLM, stops: tuple[int, ...], cap: int, folder: Path) -> Run:
    from erpo.vllm_engine import VllmGenerator

    model.save_pretrained(folder)
    engine = VllmGenerator(folder, dtype="float32", max_length=LONGEST + cap)

    def run(requests: list[Request]) -> int:
        groups = engine.generate(requests, Sampling(1.0, 1.0, cap, stops))
        return sum(len(rollout.response_ids) for group in groups for rollout in group)

    return run


def compare(title: str, ours: Run, theirs: Run, rows: int, pairs: int) -> dict[str, float | str]:
    """Paired runs; order alternates."""
    for run in (ours, theirs):
        run(prompts(BATCH, seed=99))  # warm up
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    for pair in range(pairs):
        requests = prompts(rows, seed=pair)
        sides = [("ours", ours), ("theirs", theirs)]
        for name, run in sides if pair % 2 == 0 else sides[::-1]:
            wall, cpu = time.perf_counter(), time.process_time()
            tokens = run(requests)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            rates[name].append(tokens / (wall if torch.cuda.is_available() else cpu))
    ratios = [a / b for a, b in zip(rates["ours"], rates["theirs"], strict=True)]
    row = {
        "case": title,
        "rows": rows,
        "ours tokens/s": statistics.median(rates["ours"]),
        "theirs tokens/s": statistics.median(rates["theirs"]),
        "ratio": statistics.median(ratios),
        "lowest ratio": min(ratios),
        "highest ratio": max(ratios),
    }
    print(
        "  ".join(f"{key}: {value if isinstance(value, str) else format(value, '.4g')}" for key, value in row.items()), flush=True
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--vllm", type=Path, help="scratch folder; also compare with vLLM's engine, which must be installed")
    parser.add_argument("--only-vllm", action="store_true", help="leave transformers.generate out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = tiny_model()
    ends = (model, STOPS, CAP)
    equal = (model, (), 64)
    rows = []
    if not args.only_vllm:
        rows += [
            compare("random ends, one batch, generate", with_sampler(*ends), with_generate(*ends), BATCH, args.pairs),
            compare("random ends, four batches, generate", with_sampler(*ends), with_generate(*ends), 4 * BATCH, args.pairs),
            compare("equal lengths of 64, generate", with_sampler(*equal), with_generate(*equal), BATCH, args.pairs),
        ]
    if args.vllm is not None:
        rows.append(compare("equal lengths of 64, vLLM", with_sampler(*equal), with_vllm(*equal, args.vllm), BATCH, args.pairs))
        rows.append(compare("random ends, vLLM", with_sampler(*ends), with_vllm(*ends, args.vllm), BATCH, args.pairs))
    print("tokens per CPU second, one thread" if not torch.cuda.is_available() else "tokens per second")
    report("sampling", rows, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
