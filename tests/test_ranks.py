"""Several ranks, killed, signalled, out of disk: what a run leaves verifies, and the same command goes on with the same numbers."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from erpo.checkpoint import newest_state
from erpo.processes import first_host, slurm_variables
from erpo.progress import Walltime, end_of_job
from erpo.trainer import train
from tests import ranks
from tests.tiny import Place, assert_equal_policies, make_place

ERPO = {"kl_on": "query", "query_weight": "reference_likelihood"}
STAGES = (0, 1, 2, 3)
ROWS_OF_TOKENS = {1: 1, 4: 120}
"""Rows in a micro-batch (a budget of one token gives single rows) -> its token budget."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return make_place(tmp_path_factory.mktemp("ranks"))


def lines(place: Place, name: str) -> list[dict]:
    """Complete lines of the metrics log."""
    path = place.root / "runs" / name / "work" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()[: text.count("\n")] if line.startswith("{")]


def wait_for(condition, processes, seconds: float = 120) -> bool:
    """Whether it came true while the processes ran."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and all(process.is_alive() for process in processes):
        if condition():
            return True
        time.sleep(0.001)
    return condition()


# --- stages, ranks, micro-batches --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_ranks(place) -> Place:
    """Every stage and micro-batch size on two ranks, one after the other in the same two processes; and a state for others."""
    commands = [
        place.command(f"two-{stage}-{rows}", 2, ERPO, zero_stage=stage, micro_batch_tokens=budget)
        for stage in STAGES
        for rows, budget in ROWS_OF_TOKENS.items()
    ]
    commands += [place.command("again", 2, ERPO, zero_stage=3, micro_batch_tokens=1), place.command("moving", 2, ERPO)]
    ranks.run(commands, place.root / "two.log", ranks=2)
    train(**place.arguments("one-1-4", 4, ERPO, micro_batch_tokens=120))
    return place


def assert_alike(place: Place, name: str, other: str, step: int) -> None:
    """Losses and all other metrics within float noise, and parameters within what Adam makes of it."""
    ours, theirs = place.rows(name), place.rows(other)
    for number in range(1, step + 1):
        for key in ("loss/total", "loss/policy", "kl/query", "reward/mean", "grad/norm", "response/length"):
            assert ours[number][key] == pytest.approx(theirs[number][key], rel=2e-5, abs=2e-6), (number, key)
    a, b = place.policy(name, step), place.policy(other, step)
    assert max(float((a[key] - b[key]).abs().max()) for key in a) < 2e-5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rows", ROWS_OF_TOKENS)
@pytest.mark.parametrize("num_ranks", ["one", "two"])
def test_stage_ranks_and_micro_batches_change_nothing(two_ranks, stage, rows, num_ranks):
    name = f"{num_ranks}-{stage}-{rows}"
    if num_ranks == "one":
        train(**two_ranks.arguments(name, 2, ERPO, zero_stage=stage, micro_batch_tokens=ROWS_OF_TOKENS[rows]))
    reference = "one-reference"
    train(**two_ranks.arguments(reference, 2, ERPO, zero_stage=0))
    assert_alike(two_ranks, name, reference, 2)


def test_one_configuration_repeats_bit_for_bit(two_ranks):
    assert_equal_policies(two_ranks.policy("again", 2), two_ranks.policy("two-3-1", 2))
    assert two_ranks.rows("again") == two_ranks.rows("two-3-1")


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 1), (4, 2)])
def test_a_state_of_two_ranks_goes_on_with_one_and_with_four(two_ranks, num_ranks, stage):
    name, runs = f"moved-to-{num_ranks}", two_ranks.root / "runs"
    shutil.copytree(runs / "moving", runs / name)
    command = two_ranks.command(name, 4, ERPO, zero_stage=stage)
    ranks.run([command], two_ranks.root / f"{name}.log", ranks=num_ranks)
    assert_alike(two_ranks, name, "one-1-4", 4)
    assert json.loads((runs / name / "step4.json").read_text())["ranks"] == num_ranks


# --- kill -9 -----------------------------------------------------------------------------------------------------------


def saves_begun(states: Path) -> set[tuple[int, int]]:
    """Unfinished saves. One left by a kill is the same until the next save removes it and begins its own."""
    found = set()
    for folder in states.glob(".saving-*"):
        try:
            facts = folder.stat()
        except FileNotFoundError:  # finished since
            continue
        found.add((facts.st_ino, facts.st_ctime_ns))
    return found


def kill_and_restart(place: Place, name: str, steps: int, kills: int, seed: int) -> int:
    """Kill a run of two ranks again and again, half of the times when a save has begun; how many saves were torn.

    After each kill the newest state verifies and is at most one save interval (2) old.
    """
    moment, torn = random.Random(seed), 0
    command = place.command(name, steps, ERPO, keep_states=1, keep_milestone_states=False)
    states = place.root / "runs" / name / "work" / "states"
    for number in range(kills):
        before, left = len(lines(place, name)), saves_begun(states)
        processes = ranks.start([command], place.root / f"{name}.log", ranks.group(2))
        if number % 2:
            wait_for(lambda old=left: saves_begun(states) - old, processes)
            time.sleep(moment.uniform(0, 0.03))
        else:
            wait_for(lambda b=before: len(lines(place, name)) > b, processes)
            time.sleep(moment.uniform(0, 0.3))
        for process in moment.sample(processes, 2):
            process.kill()
        assert -signal.SIGKILL in ranks.finish(processes), f"attempt {number + 1} had ended before it could be killed"
        torn += bool(saves_begun(states) - left)
        reached = max((row["step"] for row in lines(place, name)), default=0)
        found = newest_state(states)
        assert reached - (found[0] if found else 0) <= 2, (reached, found)
    ranks.run([command], place.root / f"{name}.log", ranks=2)
    return torn


def test_kill_at_three_moments_then_the_same_command_gives_the_same_numbers(place):
    ranks.run([place.command("steady", 8, ERPO)], place.root / "steady.log", ranks=2)
    kill_and_restart(place, "killed", 8, kills=3, seed=1)
    assert_equal_policies(place.policy("steady", 8), place.policy("killed", 8))
    assert place.rows("steady") == place.rows("killed")


@pytest.mark.slow
def test_kill_at_twenty_moments_then_the_same_command_gives_the_same_numbers(place):
    ranks.run([place.command("long-steady", 40, ERPO)], place.root / "long-steady.log", ranks=2)
    torn = kill_and_restart(place, "long-killed", 40, kills=20, seed=2)
    assert torn > 0, "no kill fell inside a save"
    assert_equal_policies(place.policy("long-steady", 40), place.policy("long-killed", 40))
    assert place.rows("long-steady") == place.rows("long-killed")


# --- signals and the time limit ----------------------------------------------------------------------------------------


def test_a_signal_to_one_rank_saves_and_stops_all_and_a_second_one_does_no_harm(place):
    """SIGUSR1 to rank 1 at a random step, SIGTERM to both while the state is being saved; then the same command."""
    ranks.run([place.command("undisturbed", 12, ERPO, save_every=100)], place.root / "undisturbed.log", ranks=2)
    command = place.command("signalled", 12, ERPO, save_every=100)
    states = place.root / "runs/signalled/work/states"
    processes = ranks.start([command], place.root / "signalled.log", ranks.group(2))
    wanted = random.Random(3).randint(1, 5)
    assert wait_for(lambda: len(lines(place, "signalled")) >= wanted, processes)
    signal_to(processes[1], signal.SIGUSR1)
    assert wait_for(lambda: any(states.glob(".saving-*")), processes)
    for process in processes:
        signal_to(process, signal.SIGTERM)
    assert ranks.finish(processes) == [75, 75]
    done = lines(place, "signalled")[-1]["step"]
    assert wanted <= done <= wanted + 2
    assert newest_state(states)[0] == done
    ranks.run([command], place.root / "signalled.log", ranks=2)
    attempts = [(row["step"], row["attempt"]) for row in lines(place, "signalled")]
    assert attempts == [(step, 1 if step <= done else 2) for step in range(1, 13)]  # no step was repeated
    assert_equal_policies(place.policy("undisturbed", 12), place.policy("signalled", 12))
    assert place.rows("undisturbed") == place.rows("signalled")


def signal_to(process, number: int) -> None:
    subprocess.run(["kill", f"-{int(number)}", str(process.pid)], check=False)


def test_the_walltime_planner_reckons_with_a_step_and_a_save(monkeypatch):
    walltime = Walltime(end=1000.0, first_save=40.0, margin=30.0)
    assert not walltime.is_short(929.0)
    assert walltime.is_short(931.0)
    walltime.saw_step(100.0)
    walltime.saw_step(50.0)
    assert walltime.is_short(831.0)
    walltime.saw_save(10.0)  # the first measured save takes the guess's place
    assert not walltime.is_short(859.0)
    assert walltime.is_short(861.0)
    assert not Walltime(end=None).is_short(1e12)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1234")
    assert end_of_job() == 1234.0
    assert end_of_job(limit_minutes=1.0) == 1234.0
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert end_of_job() is None
    assert abs(end_of_job(limit_minutes=60.0) - time.time()) < 3600


def test_a_near_end_of_the_job_stops_all_ranks_after_a_save(place):
    group = [{**variables, "SLURM_JOB_END_TIME": str(int(time.time()) + 1)} for variables in ranks.group(2)]
    processes = ranks.start([place.command("late", 50, ERPO, save_every=100)], place.root / "late.log", group)
    assert ranks.finish(processes) == [75, 75]
    assert newest_state(place.root / "runs/late/work/states")[0] == 1
    assert "stopping after step 1 (time limit); saved" in (place.root / "late.log.0").read_text()


# --- a full disk -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path) -> Path:
    """A file system of 50 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small file system: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """A file that leaves so many bytes free."""
    ballast = folder / "ballast"
    with ballast.open("wb") as handle:
        handle.write(b"x" * (shutil.disk_usage(folder).free - leave))
    return ballast


def test_a_full_disk_is_refused_before_training_and_survived_during_it(place, small_disk):
    train(**place.arguments("roomy", 6, ERPO))
    (place.root / "runs").mkdir(exist_ok=True)
    (place.root / "runs/cramped").symlink_to(small_disk)
    command, log = place.command("cramped", 6, ERPO, keep_states=1), place.root / "cramped.log"

    ballast = fill(small_disk, leave=600_000)
    assert ranks.finish(ranks.start([command], log, ranks.group(2))) == [2, 2]
    assert "needs about" in Path(f"{log}.1").read_text()
    assert not lines(place, "cramped")
    ballast.unlink()

    processes = ranks.start([command], log, ranks.group(2))
    assert wait_for(lambda: newest_state(small_disk / "work/states") is not None, processes)
    ballast = fill(small_disk, leave=20_000)
    assert ranks.finish(processes) == [2, 2]
    for rank in (0, 1):
        said = Path(f"{log}.{rank}").read_text().strip().splitlines()
        assert "no space left while writing" in said[-1]
        assert "run the same command again" in said[-1]
    assert newest_state(small_disk / "work/states") is not None
    assert not list((small_disk / "work/states").glob(".saving-*"))
    ballast.unlink()

    ranks.run([command], log, ranks=2)
    ours, theirs = place.policy("cramped", 6), place.policy("roomy", 6)
    assert max(float((ours[key] - theirs[key]).abs().max()) for key in ours) < 2e-5


# --- several nodes -----------------------------------------------------------------------------------------------------


def test_srun_tells_ranks_nodes_and_the_address_of_rank_0():
    env = {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "20123",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "2",
        "SLURM_STEP_NUM_TASKS": "10",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
        "SLURM_STEP_NODELIST": "gpu[07-08,11]",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    }
    assert slurm_variables(env) == {
        "RANK": "9",
        "WORLD_SIZE": "10",
        "LOCAL_RANK": "1",
        "LOCAL_SIZE": "2",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "28123",
    }
    assert slurm_variables({**env, "SLURM_NODEID": "1"})["LOCAL_SIZE"] == "4"
    assert slurm_variables({**env, "MASTER_ADDR": "head", "MASTER_PORT": "7"})["MASTER_ADDR"] == "head"
    assert [first_host(names) for names in ("n1", "n1,n2", "a-b[3]", "rack[01-04]-x,z", "big1.site,c[1-2]")] == [
        "n1",
        "n1",
        "a-b3",
        "rack01-x",
        "big1.site",
    ]


def test_srun_on_two_nodes_trains_as_two_ranks_do(two_ranks):
    """Two processes that believe to be on two nodes; the node list spells this machine's own address."""
    common = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    common |= {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "MASTER_PORT": ranks.free_port(), "SLURM_LOCALID": "0"}
    nodes = [{**common, "SLURM_PROCID": str(node), "SLURM_NODEID": str(node)} for node in range(2)]
    command = two_ranks.command("nodes", 2, ERPO, zero_stage=3, micro_batch_tokens=1)
    assert ranks.finish(ranks.start([command], two_ranks.root / "nodes.log", nodes)) == [0, 0]
    assert_equal_policies(two_ranks.policy("nodes", 2), two_ranks.policy("two-3-1", 2))


@pytest.mark.slow
def test_torchrun_on_two_nodes_trains_as_two_ranks_do(two_ranks):
    command = two_ranks.command("torchrun", 2, ERPO, zero_stage=3, micro_batch_tokens=1)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", ranks.free_port()]
    processes = [
        subprocess.Popen([*launcher, "--node-rank", str(node), "-m", "erpo", *command], env=ranks.environment()) for node in (0, 1)
    ]
    assert [process.wait(240) for process in processes] == [0, 0]
    assert_equal_policies(two_ranks.policy("torchrun", 2), two_ranks.policy("two-3-1", 2))
    assert all(torch.isfinite(tensor).all() for tensor in two_ranks.policy("torchrun", 2).values())
