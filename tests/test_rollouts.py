"""Which queries a step rolls out: every one once an epoch, another order each epoch, the same after any number of restarts."""

import numpy as np
import pytest

from erpo.config import RunConfig
from erpo.engine import join_processes
from erpo.generation import Sampling
from erpo.records import Grade, Query, Rollout, Verdict
from erpo.rollouts import Collector, QueryOrder


@pytest.mark.parametrize(("queries", "per_step", "steps"), [(8, 4, 2), (10, 4, 2), (11, 4, 2), (8523, 512, 16), (4, 4, 1)])
def test_an_epoch_takes_every_query_once_at_most_and_as_many_as_whole_steps_hold(queries, per_step, steps):
    order = QueryOrder(queries, per_step, seed=7)
    for epoch in range(3):
        taken = np.concatenate([order.indices(epoch * steps + step) for step in range(1, steps + 1)])
        assert len(set(taken)) == len(taken) == steps * per_step
        assert taken.min() >= 0
        assert taken.max() < queries


def test_epochs_and_seeds_have_their_own_order_and_a_step_always_the_same():
    order = QueryOrder(8, 4, seed=7)
    epochs = [np.concatenate([order.indices(step) for step in (1 + 2 * epoch, 2 + 2 * epoch)]).tolist() for epoch in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)  # an epoch begins with step 1, 3, 5, 7 and with no other
    assert QueryOrder(8, 4, seed=7).indices(5).tolist() == order.indices(5).tolist()
    assert QueryOrder(8, 4, seed=8).indices(5).tolist() != order.indices(5).tolist()


def test_spare_queries_are_none_of_those_taken():
    order, taken = QueryOrder(10, 4, seed=7), [1, 2, 3, 4]
    for round_number in (1, 2):
        spare = order.spare(1, taken, 3, round_number).tolist()
        assert len(set(spare)) == 3
        assert not set(spare) & set(taken)
    assert order.spare(1, taken, 9, 1).size == 6


def test_too_few_queries_are_refused():
    with pytest.raises(ValueError, match="queries_per_step is 4, but the training set holds only 3 queries; lower it"):
        QueryOrder(3, 4, seed=0)


class Recorder:
    """A generator and grader that keeps the seeds it was given, by query."""

    def __init__(self):
        self.seeds: list[tuple[str, int]] = []

    def generate(self, requests, sampling):
        self.seeds += [(request.query_id, seed) for request in requests for seed in request.seeds]
        ids, logprobs = np.array([1], np.int32), np.zeros(1, np.float32)
        return [[Rollout(request.query_id, i, ids, logprobs, "stop") for i, _ in enumerate(request.seeds)] for request in requests]

    def grade(self, texts, *_):
        return [Grade(Verdict.WRONG) for _ in texts]


def seeds_drawn(seed: int, steps: range) -> list[tuple[str, int]]:
    join_processes()
    queries = [Query(str(number), "problem", "1", (1, 2)) for number in range(4)]
    run, found = RunConfig(queries_per_step=4, responses_per_query=3), Recorder()
    collector = Collector(queries, found, found, run, Sampling(1.0, 1.0, 4, ()), lambda ids: "", seed)
    for step in steps:
        collector.collect(step)
    return found.seeds


def test_every_response_of_a_run_has_its_own_seed_and_a_repeated_step_the_same_ones():
    """Four queries, all in every step: three responses each, drawn anew at each step."""
    drawn = seeds_drawn(7, range(1, 6))
    assert len({seed for _, seed in drawn}) == len(drawn) == 5 * 4 * 3
    assert seeds_drawn(7, range(4, 6)) == drawn[-2 * 4 * 3 :]
    assert not {seed for _, seed in seeds_drawn(8, range(1, 6))} & {seed for _, seed in drawn}
