"""Peak memory and time of log-probs, entropy and their backward pass: from hidden states in chunks, and by plain log-softmax.

    python benchmarks/logprob_memory.py [--pairs 5] [--vocabulary 151936] [--tokens 2048]

Every run is a process of its own; memory is the peak above what the inputs take. Both sides receive the same hidden states and
output layer in float32; the largest difference between them is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from _pairs import in_child, peak_bytes, report
from torch import Tensor, nn

from erpo.logprobs import head_logprobs

WIDTH = 64


def inputs(vocabulary: int, tokens: int) -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(WIDTH, vocabulary, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocabulary, WIDTH, generator=generator) * 0.3)
    hidden = torch.randn(tokens, WIDTH, generator=generator).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    return head, hidden, labels, torch.randn(2, tokens, generator=generator)


def plain(head: nn.Linear, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(head(hidden).float(), -1)
    return logprobs.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def chunked(head: nn.Linear, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return head_logprobs(head, hidden, labels, entropy_gradient=True)


def one(side: str, vocabulary: int, tokens: int, keep: str) -> None:
    head, hidden, labels, grads = inputs(vocabulary, tokens)
    before, begun = peak_bytes(), time.process_time()
    logprobs, entropies = {"plain": plain, "chunked": chunked}[side](head, hidden, labels)
    (logprobs @ grads[0] + entropies @ grads[1]).backward()
    took = time.process_time() - begun
    torch.save([logprobs.detach(), entropies.detach(), hidden.grad, head.weight.grad], keep)
    print(json.dumps({"bytes": peak_bytes() - before, "seconds": took}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--keep", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return one(args.side, args.vocabulary, args.tokens, args.keep)
    import tempfile

    sizes = ["--vocabulary", str(args.vocabulary), "--tokens", str(args.tokens)]
    found: dict[str, list[dict]] = {"plain": [], "chunked": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.pairs):
            for side, runs in found.items():
                runs.append(in_child(__file__, "--side", side, "--keep", str(Path(folder) / side), *sizes))
        kept = [torch.load(Path(folder) / side) for side in found]
    names = ("log-probs", "entropy", "gradient of hidden states", "gradient of output layer")
    difference = {name: float((a - b).abs().max() / a.abs().max()) for name, a, b in zip(names, *kept, strict=True)}
    rows = [
        {
            "side": side,
            "peak GiB": statistics.median(run["bytes"] for run in runs) / 2**30,
            "CPU seconds": statistics.median(run["seconds"] for run in runs),
            "memory ratio": statistics.median(a["bytes"] / b["bytes"] for a, b in zip(runs, found["plain"], strict=True)),
            "time ratio": statistics.median(a["seconds"] / b["seconds"] for a, b in zip(runs, found["plain"], strict=True)),
        }
        for side, runs in found.items()
    ]
    report("logprob_memory", rows, raw=found, largest_difference=difference, vocabulary=args.vocabulary, tokens=args.tokens)
    print("largest difference, relative to the largest value: " + ", ".join(f"{k} {v:.1g}" for k, v in difference.items()))
    return None


if __name__ == "__main__":
    sys.exit(main())
