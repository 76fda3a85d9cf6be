"""Reading a dry run, reasons in words, and what jobs cost. Expected numbers are worked out by hand."""

import json

import pytest

from erpo import rates
from erpo.config import Site, load_study
from erpo.dryrun import Job, changed_specs, differences, read_jobs, why
from erpo.estimates import Cost, Estimator, longest_chain, measure, missing_share
from erpo.plan import clock
from tests.conftest import ROOT

SAID = """
Building DAG of jobs...
Job stats:
job         count
--------  -------
train           1

[Tue Dec  1 16:11:26 2026]
rule train:
    input: results/paper/models/m.json, results/paper/data/m/math.parquet
    output: results/paper/runs/grpo/seed0/step240.json
    jobid: 12
    reason: Missing output files: results/paper/runs/grpo/seed0/step240.json
    wildcards: run=grpo, seed=0, step=240
    threads: 32
    resources: tmpdir=/tmp, runtime=1320, gpu=8, launcher=torchrun --standalone --nproc-per-node=gpu, nodes=1
[Tue Dec  1 16:11:26 2026]
rule train_across_nodes:
    output: results/paper/runs/erpo/seed0/step240.json
    reason: Forced execution
    wildcards: run=erpo, seed=0, step=240
    resources: gres=gpu:a100:8, nodes=2
localrule all:
    input: results/paper/runs/grpo/seed0/step240.json
    jobid: 0
Job stats:
"""


SWEEP = [number / 10 for number in range(1, 16)]


@pytest.fixture(scope="module")
def paper():
    return load_study("paper", ROOT)


def test_jobs_of_a_dry_run():
    one, two = read_jobs(SAID)
    assert (one.rule, one.threads, one.gpus, one.wildcards) == ("train", 32, 8, {"run": "grpo", "seed": "0", "step": "240"})
    assert one.inputs == ["results/paper/models/m.json", "results/paper/data/m/math.parquet"]
    assert one.resources["launcher"] == "torchrun --standalone --nproc-per-node=gpu"
    assert (two.rule, two.gpus, two.inputs, two.reason) == ("train_across_nodes", 16, [], "Forced execution")


def changed(before: dict, now: dict) -> str:
    union = "Union of exclusive params before and now across all output"
    return f"Params have changed since last execution: {union}: before: {json.dumps(before)!r} now: {json.dumps(now)!r} "


def test_a_changed_setting_is_named_with_both_values():
    reason = changed({"run": {}, "results_version": 1}, {"run": {"learning_rate": 2e-6}, "results_version": 1})
    assert changed_specs(reason) == ({"run": {}, "results_version": 1}, {"run": {"learning_rate": 2e-6}, "results_version": 1})
    assert why(Job("train", reason=reason)) == "changed: run.learning_rate: unset -> 2e-06"
    quoted = changed({"prompt_suffix": 'it\'s "so"'}, {"prompt_suffix": "so"})
    assert differences(*changed_specs(quoted)) == ['prompt_suffix: "it\'s \\"so\\"" -> "so"']


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (SWEEP, [*SWEEP, 1.6], ["temperatures: [1.6] added"]),
        (SWEEP, [*SWEEP[1:], 1.6], ["temperatures: [1.6] added, [0.1] removed"]),
        ([0.1, 0.2], [0.2, 0.3], ["temperatures: [0.1, 0.2] -> [0.2, 0.3]"]),
        (SWEEP, SWEEP, []),
    ],
)
def test_of_a_long_list_only_what_came_and_went_is_named(old, new, words):
    assert differences({"temperatures": old}, {"temperatures": new}) == words


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Missing output files: a.json; Input files updated by another job: b.json", "new"),
        ("Input files updated by another job: b.json", "follows another job"),
        ("Updated input files: b.json", "changed input"),
        ("Forced execution", "forced execution"),
    ],
)
def test_other_reasons(reason, words):
    assert why(Job("score", reason=reason)) == words


def test_more_samples_and_temperatures_cost_the_difference():
    more = Job("generate", reason=changed({"samples": 8, "temperatures": [0.5, 1.0]}, {"samples": 32, "temperatures": [0.5, 1.0]}))
    assert missing_share(more, temperatures=2, samples=32) == 24 / 32
    wider = Job("generate", reason=changed({"temperatures": [0.5], "samples": 8}, {"temperatures": [0.5, 0.6], "samples": 8}))
    assert missing_share(wider, temperatures=2, samples=8) == 1 / 2
    other = Job("generate", reason=changed({"top_p": 1.0, "samples": 8}, {"top_p": 0.9, "samples": 32}))
    assert missing_share(other, temperatures=2, samples=32) == 1.0
    assert missing_share(Job("generate", reason="Missing output files: x"), temperatures=2, samples=32) == 1.0


def test_a_training_step_of_the_paper(paper):
    """4096 responses of 900 tokens on 150 query tokens; 8 x 7.6e9 flops a token; 8 A100 at 35 % of 312 TFLOP/s."""
    update = 8 * 7.6e9 * 4096 * (900 + 150) / (8 * 312e12 * 0.35)
    read = 2e9 * 7.6 + 256 * (150 + 450) * 8000 * 7.6
    sampling = 4096 * 900 / (8 * 0.35 * 256 * 2039e9 / read)
    assert rates.training_seconds(paper, "erpo", 240, 8) == pytest.approx(180 + 240 * (update + sampling))
    assert rates.training_seconds(paper, "erpo", 240, 16) < rates.training_seconds(paper, "erpo", 240, 8)
    assert rates.training_seconds(paper, "grpo", 240, 8) > rates.training_seconds(paper, "erpo", 240, 8), "a reference forward more"


def test_gpu_types_are_recognised_in_longer_names():
    assert rates.peaks("nvidia_h100_80gb_hbm3") == rates.PEAKS["h100"]
    assert rates.peaks("unheard-of") == rates.peaks(None) == rates.PEAKS["a100"]


def test_time_limits_have_a_margin_and_an_end():
    assert rates.limit_minutes(10) == 60
    assert rates.limit_minutes(3600) == 120
    assert rates.limit_minutes(1e6) == 1440


def test_measured_rates_replace_the_assumed_ones(paper, tmp_path):
    work = tmp_path / "runs/grpo/seed0/work"
    work.mkdir(parents=True)
    lines = [json.dumps({"step": step, "time/total": seconds}) for step, seconds in enumerate((100.0, 300.0, 110.0), 1)]
    (work / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "time/to']))
    timing = tmp_path / "timings/generate/grpo/seed0/step240/upto0.5.tsv"
    timing.parent.mkdir(parents=True)
    timing.write_text("s\th:m:s\n3690.0\t1:01:30\n")
    found = measure(paper, tmp_path)
    assert found.step_seconds == {("qwen2.5-math-7b", 4096): 110.0}
    assert found.responses_per_second == {"qwen2.5-math-7b": 6 * 265 * 5 * 32 / 3600}
    job = Job("train", outputs=["x"], wildcards={"run": "erpo", "seed": "0", "step": "240"}, resources={"gpu": "8"})
    cost = Estimator(paper, Site(), tmp_path).cost(job)
    assert cost.seconds == 180 + 240 * 110.0
    assert cost.gpu_hours == cost.seconds * 8 / 3600


def test_a_job_that_holds_idle_gpus_samples_no_faster(paper, tmp_path):
    """On a workstation a sampling job asks for all GPUs and its engine runs on one."""
    wildcards = {"run": "erpo", "seed": "0", "step": "240", "shard": "upto0.5"}
    one, holding = (
        Job("generate", outputs=["x"], wildcards=wildcards, resources={"gpu": gpus, "tensor_parallel": "1"}) for gpus in ("1", "8")
    )
    estimator = Estimator(paper, Site(), tmp_path)
    assert estimator.cost(holding).seconds == estimator.cost(one).seconds == rates.generation_seconds(paper, "erpo", 5, 1)
    assert estimator.cost(holding).gpu_hours == 8 * estimator.cost(one).gpu_hours


def test_an_interrupted_run_costs_what_is_left(paper, tmp_path):
    job = Job("train", outputs=["x"], wildcards={"run": "erpo", "seed": "0", "step": "400"}, resources={"gpu": "8"})
    whole = Estimator(paper, Site(), tmp_path).cost(job)
    assert whole.seconds == pytest.approx(rates.training_seconds(paper, "erpo", 160, 8)), "step 240 is a milestone before"
    (tmp_path / "runs/erpo/seed0/work/states/step390").mkdir(parents=True)
    assert Estimator(paper, Site(), tmp_path).cost(job).seconds == pytest.approx(rates.training_seconds(paper, "erpo", 10, 8))


def test_the_longest_chain_is_not_the_sum():
    jobs = [Job("a", [], ["a"]), Job("b", ["a"], ["b"]), Job("c", [], ["c"]), Job("d", ["b", "c"], ["d"])]
    costs = [Cost(seconds, 0.0) for seconds in (10.0, 5.0, 100.0, 1.0)]
    assert longest_chain(jobs, costs) == 101.0


def test_durations_as_people_say_them():
    assert [clock(seconds) for seconds in (45, 600, 9000, 400_000)] == ["45 s", "10 min", "2.5 h", "4.6 d"]
