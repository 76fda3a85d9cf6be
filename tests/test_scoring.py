"""Shared queries and chunked log-probs give the numbers of the plain computation, row by row and with whole logits."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen2ForCausalLM

from erpo import scoring
from erpo.batching import collate, plan_shared_micro_batches
from erpo.config import Machine
from erpo.learning import plan_rows
from erpo.logprobs import head_logprobs
from erpo.objective import RolloutBatch
from erpo.scoring import Scorer, can_share_queries, has_plain_head, pieces_of, shared_tokens
from erpo.terms import entropy, label_logprobs
from tests.batches import VOCABULARY, tiny_policy

TEMPERATURE = 0.7


def ragged_batch(seed: int = 0, num_queries: int = 4, responses: int = 8, longest: int = 12) -> RolloutBatch:
    """Groups in shuffled rows; some responses are empty or have one token, and one query has one token."""
    rng = np.random.default_rng(seed)
    queries = [rng.integers(0, VOCABULARY, size=n).tolist() for n in (1, 3, 7, 9, 2, 5)[:num_queries]]
    group = rng.permutation(np.repeat(np.arange(num_queries), responses))
    drawn = [rng.integers(0, VOCABULARY, size=rng.integers(0, longest)).tolist() for _ in group]
    return collate([queries[g] for g in group], drawn, group)


def weighted(scores: scoring.Scores, batch: RolloutBatch, seed: int = 5) -> torch.Tensor:
    """A scalar that every predicted token enters with its own weight."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, *batch.response_mask.shape, generator=generator, dtype=torch.float64)
    real = batch.query_mask | batch.response_mask
    return (torch.where(real, scores.logprobs * first, 0.0) + torch.where(batch.response_mask, scores.entropy * second, 0.0)).sum()


def compared(policy: nn.Module, batch: RolloutBatch, one: str, other: str, monkeypatch_elements: tuple[int, int]) -> list[float]:
    """Largest differences of log-probs, of entropies on responses, and of the gradient relative to its size."""
    found = []
    for name, elements in zip((one, other), monkeypatch_elements, strict=True):
        scoring.SPLIT_ELEMENTS = elements
        scores = getattr(Scorer(policy, entropy_gradient=True), name)(batch, TEMPERATURE)
        gradient = torch.autograd.grad(weighted(scores, batch), list(policy.parameters()))
        found.append((scores, torch.cat([part.flatten() for part in gradient])))
    (a, grad_a), (b, grad_b) = found
    real = batch.query_mask | batch.response_mask
    return [
        (a.logprobs - b.logprobs)[real].abs().max().item(),
        (a.entropy - b.entropy)[batch.response_mask].abs().max().item(),
        float((grad_a - grad_b).abs().max() / grad_a.abs().max()),
    ]


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "SPLIT_ELEMENTS", scoring.SPLIT_ELEMENTS)


WHOLE, SPLIT = 1 << 40, 0


@pytest.mark.parametrize("seed", range(3))
def test_shared_queries_equal_rows(seed: int) -> None:
    batch, policy = ragged_batch(seed), tiny_policy(seed, torch.float32)
    assert max(compared(policy, batch, "rows", "groups", (WHOLE, WHOLE))) < 5e-6


def test_shared_queries_equal_rows_in_float64() -> None:
    """Qwen2 normalises in float32 whatever the weights, so the last digits are float32's here too."""
    batch, policy = ragged_batch(), tiny_policy(0, torch.float64)
    assert max(compared(policy, batch, "rows", "groups", (WHOLE, WHOLE))) < 1e-6


@pytest.mark.parametrize("way", ["rows", "groups"])
def test_scores_without_whole_logits_equal_those_with_them(way: str) -> None:
    batch, policy = ragged_batch(), tiny_policy(0, torch.float64)
    assert max(compared(policy, batch, way, way, (WHOLE, SPLIT))) < 1e-13


def test_shared_queries_need_no_response() -> None:
    batch = collate([[1, 2, 3], [1, 2, 3]], [[], [4]], [0, 0])
    assert max(compared(tiny_policy(0), batch, "rows", "groups", (WHOLE, WHOLE))) < 1e-6


def test_short_responses_pass_apart_from_long_ones() -> None:
    lengths = np.array([10] * 8 + [100] * 8)
    assert [sorted(piece.tolist()) for piece in pieces_of(lengths)] == [list(range(8, 16)), list(range(8))]
    assert len(pieces_of(np.array([10, 100]))) == 1


def test_sliding_windows_and_checkpointed_activations_are_not_shared() -> None:
    policy = tiny_policy(0)
    assert can_share_queries(policy)
    policy.gradient_checkpointing_enable()
    assert not can_share_queries(policy)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    assert not can_share_queries(Gemma2ForCausalLM(Gemma2Config(vocab_size=11, num_hidden_layers=2, pad_token_id=0, **sizes)))


def test_a_model_that_caps_its_logits_keeps_them_whole() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(0)
    capped = Gemma2ForCausalLM(
        Gemma2Config(vocab_size=VOCABULARY, num_hidden_layers=2, pad_token_id=0, final_logit_softcapping=30.0, **sizes)
    ).double()
    assert max(compared(capped, ragged_batch(), "rows", "rows", (WHOLE, SPLIT))) == 0
    assert not has_plain_head(capped)
    capped.config.final_logit_softcapping = None
    assert has_plain_head(capped)


def test_texts_are_scored_without_whole_logits_alike() -> None:
    policy, ids = tiny_policy(0), torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0], [7, 0, 0, 0, 0]])
    with torch.no_grad():
        scoring.SPLIT_ELEMENTS = WHOLE
        whole = Scorer(policy).texts(ids, [5, 3, 1])
        scoring.SPLIT_ELEMENTS = SPLIT
        split = Scorer(policy).texts(ids, [5, 3, 1])
        logprobs = torch.log_softmax(policy(input_ids=ids).logits, -1)
    assert [len(row) for row in whole] == [4, 2, 0]
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole[1], torch.stack([logprobs[1, 0, 2], logprobs[1, 1, 6]]))


# --- from hidden states ------------------------------------------------------------------------------------------------


class NotLinear(nn.Module):
    """An output layer that only its call knows."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_chunks_equal_whole_logits(bias: bool, wrapped: bool, entropy_gradient: bool) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(6, 50, bias=bias).double()
    hidden = (torch.randn(23, 6, dtype=torch.float64) * 3).requires_grad_()
    labels, temperature = torch.randint(50, (23,)), torch.rand(23, dtype=torch.float64) + 0.5
    weights = torch.randn(2, 23, dtype=torch.float64)

    def outcome(logprobs: torch.Tensor, entropies: torch.Tensor) -> list[torch.Tensor]:
        value = logprobs @ weights[0] + (entropies @ weights[1] if entropy_gradient else 0.0)
        return [logprobs, entropies, *torch.autograd.grad(value, [hidden, *layer.parameters()])]

    logits = layer(hidden) / temperature.unsqueeze(-1)
    whole = outcome(label_logprobs(logits, labels), entropy(logits))
    head = NotLinear(layer) if wrapped else layer
    parts = outcome(*head_logprobs(head, hidden, labels, temperature, entropy_gradient=entropy_gradient, chunk_elements=200))
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_logged_entropy_has_no_gradient() -> None:
    layer, hidden = nn.Linear(4, 9), torch.randn(5, 4, requires_grad=True)
    logprobs, entropies = head_logprobs(layer, hidden, torch.zeros(5, dtype=torch.long))
    assert logprobs.requires_grad
    assert not entropies.requires_grad


def test_tied_output_layer_gathers_both_gradients() -> None:
    policy: Qwen2ForCausalLM = tiny_policy(0)
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight
    batch = ragged_batch(1)
    assert compared(policy, batch, "rows", "rows", (WHOLE, SPLIT))[2] < 1e-13


# --- planning ----------------------------------------------------------------------------------------------------------


def lengths_batch(query: int, response: int, groups: int = 4, siblings: int = 8) -> RolloutBatch:
    rows = groups * siblings
    return collate([[1] * query] * rows, [[2] * response] * rows, np.repeat(np.arange(groups), siblings))


@pytest.mark.parametrize(("query", "response", "shares"), [(32, 32, True), (8, 64, False), (200, 20, True)])
def test_sharing_is_chosen_where_it_saves_positions(query: int, response: int, shares: bool) -> None:
    batch = lengths_batch(query, response)
    assert plan_rows(batch, Machine(), 2, can_share=True)[1] is shares
    assert plan_rows(batch, Machine(share_queries="on"), 2, can_share=True)[1]
    assert not plan_rows(batch, Machine(share_queries="off"), 2, can_share=True)[1]
    assert not plan_rows(batch, Machine(share_queries="on"), 2, can_share=False)[1]


@pytest.mark.parametrize("budget", [30, 120, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shared_plan_deals_every_row_once_and_keeps_siblings_together(budget: int, ranks: int) -> None:
    batch = ragged_batch(2)
    queries, responses = batch.query_lengths.numpy(), (batch.lengths - batch.query_lengths).numpy()
    plan = plan_shared_micro_batches(queries, responses, batch.group.numpy(), budget, ranks)
    assert len({len(rank) for rank in plan}) == 1
    dealt = np.concatenate([rows for rank in plan for rows in rank])
    assert sorted(dealt.tolist()) == list(range(batch.num_rows))
    homes = [
        {number for number, rows in enumerate(r for rank in plan for r in rank) if (batch.group.numpy()[rows] == g).any()}
        for g in range(4)
    ]
    if budget == 10_000:
        assert [len(home) for home in homes] == [1, 1, 1, 1]
    if budget == 30:
        assert max(len(home) for home in homes) > 1


def test_shared_positions_by_hand() -> None:
    """Two queries of at most 5 tokens; responses of 4, 4 and 1 tokens have 3, 3 and 0 inputs."""
    assert shared_tokens(np.array([5, 5, 2]), np.array([4, 4, 1]), np.array([0, 0, 1])) == 2 * 5 + 2 * 3
