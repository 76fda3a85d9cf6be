"""What reruns what: a finished study is edited, and a dry run must plan exactly what the edit touches."""

import json
import os
import signal
import subprocess
import sys
import time

REPORT = {"report": 1, "all": 1}


def test_a_finished_study_plans_nothing_even_when_moved(finished):
    assert finished.plan("all") == {}


def test_every_call_got_its_arguments_whole(finished):
    calls = [json.loads(line) for line in finished.path("calls.jsonl").read_text().splitlines()]
    assert len(calls) == 22
    specs = [json.loads(call["spec"][0]) for call in calls]
    suffixes = {spec["prompt_suffix"] for spec in specs if "prompt_suffix" in spec}
    assert suffixes == {' it\'s "quoted" \\boxed{} $HOME'}
    assert {tuple(call["data-dir"]) for call in calls if "data-dir" in call} == {("some data",)}
    trained = [call for call in calls if call["verb"] == "train"]
    assert [call["name"][0] for call in sorted(trained, key=lambda call: call["name"])] == ["erpo", "grpo"]
    assert {len(call["previous"]) for call in trained} == {0}
    assert {call["supersede"][0] for call in trained} == {"false"}


def test_new_file_dates_plan_nothing(finished):
    for number, path in enumerate(sorted(path for path in finished.folder.rglob("*") if ".snakemake" not in path.parts)):
        os.utime(path, (time.time() - number, time.time() - number), follow_symlinks=False)
    assert finished.plan("all") == {}


def test_edits_that_change_no_number_plan_nothing(finished):
    finished.edit("workflow/rules/training.smk", '"{resources.launcher} erpo train', '"{resources.launcher}   erpo train')
    finished.edit("workflow/rules/training.smk", "rule train:", "# another remark\nrule train:")
    finished.edit("workflow/rules/evaluation.smk", '" --store', '" --verbose --store')
    finished.edit("workflow/rules/common.smk", '"mem_mb": 3000', '"mem_mb": 5000')
    finished.edit("workflow/rules/common.smk", '"micro_batch_tokens": 16384', '"micro_batch_tokens": 4096')
    finished.edit("config/trial.yaml", "defaults:", "save_every: 3\n# a remark\ndefaults:")
    finished.edit(
        "config/trial.yaml",
        "erpo: {kl_on: query, query_weight: reference_likelihood}",
        "erpo: {query_weight: reference_likelihood, kl_on: query}",
    )
    finished.path("erpo/trainer.py").write_text("# the package is no input\n")
    assert finished.plan("all", "--default-resources", "slurm_partition=big", "--set-resources", "train:runtime=9") == {}


def test_another_run_plans_only_its_own_jobs(finished):
    finished.edit("config/trial.yaml", "  grpo: {}\n", "  grpo: {}\n  no-kl: {kl_on: none}\n")
    assert finished.plan("all") == {"train": 1, "generate": 2, "score": 1, "all": 1}


def test_a_caption_draws_its_own_table_again(finished):
    finished.edit("config/trial.yaml", "All of them.", "Every one.")
    assert finished.plan("all") == {"table": 1, **REPORT}


def test_a_caption_draws_its_own_figure_again(finished):
    finished.edit(
        "config/trial.yaml", "drift: {kind: drift, runs: [grpo, erpo]}", "drift: {kind: drift, runs: [grpo, erpo], caption: New.}"
    )
    assert finished.plan("all") == {"figure": 1, **REPORT}


def test_another_style_draws_figures_only(finished):
    finished.edit("erpo/config/style.yaml", "line_width: ", "line_width: 1")
    assert finished.plan("all") == {"figure": 2, **REPORT}
    assert finished.plan("tables") == {}


def test_a_fault_in_the_style_is_one_sentence(finished):
    finished.edit("erpo/config/style.yaml", "line_width: ", "line_width: thick # ")
    done = finished.run("-n", "all", "--config", "study=trial")
    assert done.returncode != 0
    assert "erpo/config/style.yaml: line_width: Input should be a valid number" in done.stdout + done.stderr


def test_another_table_draws_only_itself(finished):
    finished.edit(
        "config/trial.yaml", "only-grpo: {runs: [grpo]}", "only-grpo: {runs: [grpo]}\n  bands: {runs: [erpo], columns: band}"
    )
    assert finished.plan("all") == {"table": 1, **REPORT}


def test_a_learning_rate_plans_its_run_and_what_shows_it(finished):
    finished.edit("config/trial.yaml", "grpo: {}", "grpo: {learning_rate: 2.0e-6}")
    done = finished.run("-n", "all", "--config", "study=trial")
    assert finished.plan("all") == {"train": 1, "generate": 2, "score": 1, "table": 2, "figure": 1, **REPORT}
    assert "Params have changed since last execution" in done.stdout
    assert "learning_rate" in done.stdout
    assert "runs/erpo/seed0/step40.json\n    jobid" not in done.stdout


def test_more_steps_train_only_what_follows(finished):
    finished.edit("config/trial.yaml", "only-grpo: {runs: [grpo]}", "only-grpo: {runs: [grpo], steps: [40, 80]}")
    assert finished.plan("all") == {"train": 1, "generate": 2, "score": 1, "table": 1, **REPORT}


def test_a_milestone_in_between_does_not_touch_the_later_one(finished):
    finished.edit("config/trial.yaml", "only-grpo: {runs: [grpo]}", "only-grpo: {runs: [grpo], steps: [20, 40]}")
    assert finished.plan("all") == {"train": 1, "generate": 2, "score": 1, "table": 1, **REPORT}


def test_another_temperature_samples_only_there(finished):
    finished.edit("config/trial.yaml", "temperatures: [0.5, 1.0]", "temperatures: [0.5, 1.0, 1.5]")
    assert finished.plan("all") == {"generate": 3, "score": 3, "table": 2, **REPORT}


def test_another_benchmark_trains_nothing(finished):
    finished.edit("config/trial.yaml", "benchmarks:", "benchmarks:\n  third: {kind: synthetic, families: [linear], size: 8}")
    jobs = finished.plan("all")
    assert jobs == {"prepare_benchmark": 1, "check_overlap": 1, "generate": 6, "score": 3, "table": 2, **REPORT}


def test_another_seed_plans_only_that_seed(finished):
    finished.edit("config/trial.yaml", "defaults:", "seeds: [0, 7]\ndefaults:")
    assert finished.plan("all") == {"train": 2, "generate": 6, "score": 3, "table": 2, "figure": 2, **REPORT}


def test_other_training_data_plans_the_whole_chain(finished):
    finished.edit("config/trial.yaml", "families: [chain], size: 64", "families: [chain], size: 65")
    jobs = finished.plan("all")
    assert (jobs["prepare_model"], jobs["prepare_queries"], jobs["cache_reference"], jobs["train"]) == (1, 1, 1, 2)


def test_a_policy_made_again_is_evaluated_again(finished):
    marker = "results/trial/runs/grpo/seed0/step40.json"
    finished.path(marker).unlink()
    assert finished.plan("all") == {}, "what is finished does not need its intermediate files"
    assert finished.plan(marker, "all") == {"train": 1, "generate": 2, "score": 1, "table": 2, "figure": 1, **REPORT}


def test_two_edits_at_different_ends_are_both_seen(finished):
    finished.edit("config/trial.yaml", "benchmarks:", "benchmarks:\n  third: {kind: synthetic, families: [linear], size: 8}")
    finished.edit("config/trial.yaml", "grpo: {}", "grpo: {learning_rate: 2.0e-6}")
    finished.edit(
        "config/trial.yaml", "drift: {kind: drift, runs: [grpo, erpo]}", "drift: {kind: drift, runs: [grpo, erpo], caption: New.}"
    )
    jobs = finished.plan("all")
    assert (jobs["train"], jobs["generate"], jobs["figure"]) == (1, 6, 1)


def test_supersede_reaches_its_run_alone(finished):
    finished.edit("config/trial.yaml", "defaults: {", "defaults: {learning_rate: 3.0e-6, ")
    done = finished.run("--cores", "2", "grpo", "erpo", "--config", "study=trial", "supersede=grpo")
    assert done.returncode == 0, done.stderr
    calls = [json.loads(line) for line in finished.path("calls.jsonl").read_text().splitlines()[22:]]
    assert {call["name"][0]: call["supersede"][0] for call in calls if call["verb"] == "train"} == {"grpo": "true", "erpo": "false"}


def test_the_same_command_goes_on_after_a_kill_of_snakemake(fresh):
    command = ["--cores", "2", "data", "--config", "study=trial"]
    environment = {**os.environ, "STUB_SECONDS": "2"}
    first = subprocess.Popen(
        [sys.executable, "-m", "snakemake", *command],
        cwd=fresh.folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not list(fresh.path(".snakemake").glob("locks/*.lock")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert list(fresh.path(".snakemake/locks").glob("*.lock")), "the kill came too early or too late to leave a lock"
    time.sleep(3)  # the orphaned job ends
    again = fresh.run(*command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert fresh.plan("data") == {}


def test_a_living_snakemake_is_not_disturbed(fresh):
    command = [sys.executable, "-m", "snakemake", "--cores", "1", "data", "--config", "study=trial"]
    with subprocess.Popen(
        command, cwd=fresh.folder, env={**os.environ, "STUB_SECONDS": "8"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as first:
        deadline = time.monotonic() + 60
        while not list(fresh.path(".snakemake").glob("locks/*.lock")) and time.monotonic() < deadline:
            time.sleep(0.05)
        second = fresh.run(*command[3:])
        first.terminate()
    assert second.returncode != 0
    assert "LockException" in second.stdout + second.stderr
