"""Our loss, its gradient and one optimizer step against TRL's GRPOTrainer, live, on a tiny Qwen2.

The weights are float64, but TRL takes its log-probs in float32: the tolerances are those of float32. docs/method.md lists the
conventions that had to be aligned.
"""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="the dev extra installs TRL")

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from erpo.advantages import compute_advantages
from erpo.batching import collate
from erpo.config import RunConfig
from erpo.objective import RolloutBatch, global_counts, token_logprobs, total_loss

QUERIES = [[5, 6, 7, 8], [9, 10]]
RESPONSES = [[11, 12, 13, 14, 1], [15, 1], [16, 17, 18, 19, 20, 21, 22, 23], [24]]
REWARDS = [1.0, 0.0, 0.25, 1.0]
TEMPERATURE = 0.7
MAX_TOKENS = 8
LEARNING_RATE = 1e-3
ADAM_EPS = 1e-4  # with the usual 1e-8 the first Adam step is the sign of the gradient, even where that is rounding

CASES = {
    "grpo": ({"loss_type": "grpo"}, {"normalizer": "sequence"}),
    "bnpo": ({"loss_type": "bnpo"}, {"normalizer": "token"}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"normalizer": "token", "clip_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"normalizer": "constant"}),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"}, {"ratio": "sequence"}),
    "delta": ({"loss_type": "grpo", "delta": 1.5}, {"dual_clip": 1.5}),
    "importance_weighted_kl": ({"loss_type": "grpo", "use_bias_correction_kl": True}, {"kl_form": "importance_weighted"}),
    "no_kl": ({"loss_type": "grpo", "beta": 0.0}, {"kl_on": "none", "kl_coef": RunConfig().kl_coef}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy with a word-level tokenizer, as a Hugging Face folder."""
    path = tmp_path_factory.mktemp("policy")
    words = {f"w{i}": i for i in range(28)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w2")), pad_token="w0", eos_token="w1")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=28, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None, **sizes)
    torch.manual_seed(3)
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def policy(folder: Path) -> Qwen2ForCausalLM:
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)  # sharp enough distributions for log-ratios that matter
    return model


def base_batch(policy: Qwen2ForCausalLM, run: RunConfig) -> RolloutBatch:
    """Two groups of two; the old policy and the reference are the policy with noise, far enough for every clip to bite."""
    batch = collate([QUERIES[0]] * 2 + [QUERIES[1]] * 2, RESPONSES, [0, 0, 1, 1])
    with torch.no_grad():
        logits = policy(input_ids=batch.input_ids).logits
        logprobs, _ = token_logprobs(logits, batch.input_ids, batch.response_mask, TEMPERATURE)
    noise = torch.Generator().manual_seed(1)
    old, ref = (logprobs + 0.4 * torch.randn(logprobs.shape, generator=noise, dtype=torch.float64) for _ in range(2))
    found = compute_advantages(torch.tensor(REWARDS), batch.group, batch.response_mask, run)
    return replace(batch, advantages=found.advantages.double(), old_logprobs=old, ref_logprobs=ref)


def trl_inputs(batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """The same rows in TRL's layout: query padded left, response padded right, per-token tensors over the response only."""
    width = max(len(q) for q in QUERIES)
    queries = [QUERIES[0]] * 2 + [QUERIES[1]] * 2

    def over_response(values: torch.Tensor) -> torch.Tensor:
        rows = [values[i][batch.response_mask[i]] for i in range(4)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    completion_mask = over_response(torch.ones_like(batch.advantages)).long()
    return {
        "prompt_ids": torch.tensor([[0] * (width - len(q)) + q for q in queries]),
        "prompt_mask": torch.tensor([[0] * (width - len(q)) + [1] * len(q) for q in queries]),
        "completion_ids": torch.tensor([r + [0] * (MAX_TOKENS - len(r)) for r in RESPONSES]),
        "completion_mask": completion_mask,
        "advantages": over_response(batch.advantages)[:, 0],
        "old_per_token_logps": over_response(batch.old_logprobs),
        "ref_per_token_logps": over_response(batch.ref_logprobs),
        "num_items_in_batch": completion_mask.sum(),
    }


def trl_trainer(folder: Path, policy: Qwen2ForCausalLM, options: dict, out: Path) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=str(out),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=MAX_TOKENS,
        temperature=TEMPERATURE,
        learning_rate=LEARNING_RATE,
        adam_epsilon=ADAM_EPS,
        weight_decay=0.0,
        gradient_checkpointing=False,
        **{"beta": 0.04, "epsilon": 0.2, "epsilon_high": 0.2, "use_bias_correction_kl": False, **options},
    )
    trainer = GRPOTrainer(
        model=copy.deepcopy(policy),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w5 w6"}] * 4),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
    )
    trainer.current_gradient_accumulation_steps = 1
    return trainer


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_step_equal_trls(name: str, folder: Path, policy: Qwen2ForCausalLM, tmp_path: Path) -> None:
    theirs, ours = CASES[name]
    shared = {"kl_coef": 0.04, "clip_high": 0.2, "dual_clip": None, "max_response_tokens": MAX_TOKENS, "advantage_eps": 1e-4}
    run = RunConfig(**{**shared, **ours})
    batch = base_batch(policy, run)
    # theirs
    trainer = trl_trainer(folder, policy, theirs, tmp_path)
    trainer.model.train()
    trl_loss = trainer.compute_loss(trainer.model, trl_inputs(batch))
    trl_loss.backward()
    trainer.create_optimizer().step()
    # ours
    model = copy.deepcopy(policy)
    logits = model(input_ids=batch.input_ids).logits
    logprobs, _ = token_logprobs(logits, batch.input_ids, batch.response_mask, TEMPERATURE)
    loss = total_loss(logprobs, batch, global_counts(batch), run).loss
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS, weight_decay=0.0).step()

    assert abs(float(trl_loss.detach())) > 1e-3
    assert float(loss.detach()) == pytest.approx(float(trl_loss.detach()), abs=2e-7)
    for (key, parameter), other in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        assert other.grad.abs().max() > 1e-4, key
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(parameter.data, other.data, rtol=0, atol=2e-6)
