"""Who has which generator, what is refused, and the files that carry weights to an engine in a process of its own."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from erpo.config import Machine
from erpo.generation import Share
from erpo.rollout_engine import check_generator, share_of_rank
from erpo.vllm_engine import with_output_weights
from erpo.vllm_process import visible_gpus, write_shards


def shares(machine: Machine, ranks: int, ranks_of_node: int) -> list[Share]:
    return [share_of_rank(machine, rank, ranks, rank % ranks_of_node, ranks_of_node) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("machine", "asked"),
    [
        ({}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ({"generator": "vllm"}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ({"generator": "vllm", "tensor_parallel": 2}, [[0, 2, 4, 6], [0, 2, 4, 6], [1, 3, 5, 7], [1, 3, 5, 7]]),
        ({"generator": "vllm", "rollout_gpus": 1}, [[0, 2, 4, 6], [], [1, 3, 5, 7], []]),
        ({"generator": "vllm", "rollout_gpus": 2}, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ({"generator": "vllm", "rollout_gpus": 2, "tensor_parallel": 2}, [[0, 2, 4, 6], [], [1, 3, 5, 7], []]),
    ],
)
def test_every_request_is_sampled_by_one_engine_and_graded_by_one_rank(machine, asked):
    """Two nodes of two ranks each, eight requests."""
    found = shares(Machine(**machine), ranks=4, ranks_of_node=2)
    requests = list(range(8))
    assert [share.asked(requests) for share in found] == asked
    graded = [item for share in found for item in share.asked(requests)[share.own]]
    assert sorted(graded) == requests


@pytest.mark.parametrize(
    ("machine", "ranks", "gpus", "message"),
    [
        ({"tensor_parallel": 2}, 2, 2, "are for generator: vllm"),
        ({"rollout_gpus": 1}, 2, 4, "are for generator: vllm"),
        ({"generator": "vllm", "tensor_parallel": 2}, 3, 3, "2 ranks are to share an engine, but a node has 3"),
        ({"generator": "vllm", "tensor_parallel": 2, "rollout_gpus": 3}, 4, 8, "must be a multiple of tensor_parallel"),
        ({"generator": "vllm", "rollout_gpus": 3}, 2, 8, "each engine needs a rank of the node"),
        ({"generator": "vllm", "rollout_gpus": 4}, 6, 8, "need 10 GPUs on a node, but 8 are there"),
    ],
)
def test_what_cannot_run_is_refused_with_what_to_do(machine, ranks, gpus, message):
    with pytest.raises(ValueError, match=message):
        check_generator(Machine(**machine), ranks, gpus)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_vllm_is_refused_where_it_is_not_installed():
    with pytest.raises(ValueError, match="generator: vllm needs vLLM, which is not installed here"):
        check_generator(Machine(generator="vllm"), 1, 0)


def test_shards_hold_every_tensor_and_are_written_as_they_fill(tmp_path):
    tensors = [(f"t{i}", torch.full((4,), float(i))) for i in range(5)]
    written = []

    def watched():
        for item in tensors:
            yield item
            written.append(len(list(tmp_path.iterdir())))

    write_shards(watched(), tmp_path, shard_bytes=32)
    assert written == [0, 1, 1, 2, 2]
    shards = [load_file(path) for path in sorted(tmp_path.iterdir())]
    assert [sorted(shard) for shard in shards] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    assert all(torch.equal(shard[name], dict(tensors)[name]) for shard in shards for name in shard)


def test_tied_output_weights_are_sent_under_their_own_name(tmp_path):
    embedding, other = torch.ones(3, 2), torch.zeros(2)
    named = [("model.embed_tokens.weight", embedding), ("model.norm.weight", other)]
    sent = list(with_output_weights(named, is_tied=True))
    assert [name for name, _ in sent] == ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    assert sent[1][1] is embedding
    assert list(with_output_weights(named, is_tied=False)) == named
    write_shards(sent, tmp_path)  # one storage under two names is no obstacle
    assert torch.equal(load_file(tmp_path / "shard-00000.safetensors")["lm_head.weight"], embedding)


def test_gpus_are_counted_among_those_the_job_sees(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert visible_gpus([2, 3]) == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus([]) == ""
