"""A whole training step (rollout, grading, one update), ours against TRL's GRPOTrainer, paired step by step in one process.

    python benchmarks/training_step.py [--pairs 5]

The same tiny model, queries, batch (8 queries, 8 responses each), cap on responses, grader, reference model and updates on both
sides. Each pair is one step of TRL's trainer followed by one of ours on the same thread, in CPU seconds (wall seconds on a
GPU). TRL is part of the dev extra.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _world
import torch
from _pairs import ratios, report
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from erpo.config import RunConfig
from erpo.rewards import Grader

QUERIES, SIBLINGS = 8, 8
CASES = {
    "GRPO with reference model": {"kl_on": "response"},
    "ERPO (TRL: GRPO with reference model)": {"kl_on": "query", "query_weight": "reference_likelihood"},
}


def settings(cap: int, **more: object) -> RunConfig:
    return RunConfig(
        dtype="float32",
        queries_per_step=QUERIES,
        responses_per_query=SIBLINGS,
        updates_per_step=1,
        max_response_tokens=cap,
        policy_kl_every=0,
        learning_rate=1e-6,
        **more,
    )


class _Between(TrainerCallback):
    """Times TRL's steps and does one of ours after each."""

    def __init__(self, ours: Callable[[int], object], clock: Callable[[], float]) -> None:
        self.ours, self.clock = ours, clock
        self.seconds: dict[str, list[float]] = {"TRL": [], "ours": []}

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.begun = self.clock()

    def on_step_end(self, args: object, state: object, *_: object, **__: object) -> None:
        middle = self.clock()
        self.ours(state.global_step)  # pyright: ignore
        self.seconds["TRL"].append(middle - self.begun)
        self.seconds["ours"].append(self.clock() - middle)


def trl_trainer(world: _world.World, cap: int, steps: int, beta: float, between: _Between, out: str) -> GRPOTrainer:
    grader = Grader(workers=1)
    answers = {query.problem: query.answer for query in world.queries}

    def reward(prompts: list, completions: list, **_: object) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        grades = grader.grade(texts, [answers[prompt[0]["content"]] for prompt in prompts])
        return [float(grade.is_correct) for grade in grades]

    grader.__enter__()
    arguments = GRPOConfig(
        output_dir=out,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=steps,
        disable_tqdm=True,
        per_device_train_batch_size=QUERIES * SIBLINGS,
        num_generations=SIBLINGS,
        max_completion_length=cap,
        max_steps=steps,
        learning_rate=1e-6,
        beta=beta,
        gradient_checkpointing=False,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(world.folder, dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": query.problem}]} for query in world.queries]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(world.folder),
        callbacks=[between],
    )


def case(world: _world.World, title: str, ends: float, cap: int, pairs: int) -> dict[str, object]:
    step = _world.stepper(world, settings(cap, **CASES[title]))
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    between = _Between(step, clock)
    with tempfile.TemporaryDirectory() as out:
        trl_trainer(world, cap, pairs + 1, 0.01, between, out).train()
    found = {side: values[1:] for side, values in between.seconds.items()}  # the first step warms up
    return {
        "case": title,
        "responses end": f"{ends:.0%} a token" if ends else "rarely",
        "cap": cap,
        "TRL, s": statistics.median(found["TRL"]),
        "ours, s": statistics.median(found["ours"]),
        **ratios(found, "TRL", "ours"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--caps", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--ends", type=float, nargs="*", default=[0.0, 0.04], help="mean probability of the end token at a step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for ends in args.ends:
        with tempfile.TemporaryDirectory() as folder:
            world = _world.make_world(Path(folder), ends=ends)
            rows += [case(world, title, ends, cap, args.pairs) for title in CASES for cap in args.caps]
    report("training_step", rows, queries=QUERIES, siblings=SIBLINGS)


if __name__ == "__main__":
    main()
