"""A Slurm cluster for the session, and clones of the project whose small studies run through it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing_programs, wait_until

ROOT = Path(__file__).resolve().parents[2]

TRIAL = """
prompt_suffix: ""
max_query_tokens: 64
save_every: 2
models: {tiny: {kind: synthetic, hidden_size: 32, num_layers: 1, num_heads: 2, warm_start_steps: 20, warm_start_batch: 8}}
train_sets: {train: {kind: synthetic, families: [chain], levels: [1], size: 32}}
benchmarks: {chains: {kind: synthetic, families: [chain], levels: [1], size: 8, seed: 2}}
evaluation: {temperatures: [1.0], samples: 2, max_response_tokens: 24, shard_width: 1.5}
defaults:
  {model: tiny, train_set: train, dtype: float32, steps: 4, queries_per_step: 4, responses_per_query: 4, updates_per_step: 1,
   max_response_tokens: 24, learning_rate: 1.0e-3}
runs:
  erpo: {kl_on: query, query_weight: reference_likelihood}
  long: {like: erpo, steps: 24, queries_per_step: 16, responses_per_query: 16, max_response_tokens: 64}
tables:
  main: {runs: [erpo], metrics: [avg@n, kl/query]}
  training: {runs: [long], columns: none, metrics: [kl/query, policy/entropy, grad/norm, response/length]}
figures: {drift: {kind: drift, runs: [erpo]}}
"""
"""`erpo` is over in a second; `long` can be interrupted. Its table needs its training alone."""

LONG_STEPS, SAVE_EVERY = 24, 2

ACCOUNTING = os.environ.get("ERPO_SLURM_ACCOUNTING") == "1"

_FAST = Path(__file__).with_name("fast_polling.py")


def pytest_collection_modifyitems(items) -> None:
    """Everything here needs a cluster; where Slurm is not installed it is skipped, with the reason in the summary."""
    here = [item for item in items if Path(item.fspath).parent == Path(__file__).parent]
    reason = why_not()
    for item in here:
        item.add_marker(pytest.mark.slurm)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def why_not() -> str | None:
    """Why no cluster can come up here. With ERPO_NEED_SLURM=1 that is an error and not a skip."""
    lacking = missing_programs(ACCOUNTING)
    reason = f"no Slurm here (missing: {', '.join(lacking)}); apt-get install slurm-wlm munge" if lacking else None
    if os.geteuid() != 0:
        reason = "a Slurm cluster for tests needs root"
    if reason and os.environ.get("ERPO_NEED_SLURM") == "1":
        raise pytest.UsageError(reason)
    return reason


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Two nodes with fake GPUs, with accounting if ERPO_SLURM_ACCOUNTING=1; or what is up in the folder ERPO_SLURM_CLUSTER."""
    if "ERPO_SLURM_CLUSTER" in os.environ:
        yield Cluster(folder=Path(os.environ["ERPO_SLURM_CLUSTER"]), accounting=ACCOUNTING)
        return
    port = int(os.environ.get("ERPO_SLURM_PORT", Cluster.port))
    cluster = Cluster(folder=tmp_path_factory.mktemp("slurm"), port=port, accounting=ACCOUNTING)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@dataclass(frozen=True)
class Clone:
    """The project, as it would be cloned, with the study `trial` added."""

    folder: Path
    cluster: Cluster

    def command(self, *arguments: str) -> list[str]:
        """Snakemake with the profile as shipped; only the waiting between two looks at the queue is shortened."""
        return [sys.executable, str(_FAST), "--profile", "slurm", *arguments]

    def start(self, *arguments: str, command: list[str] | None = None, **environment: str) -> subprocess.Popen[str]:
        """Snakemake in the background, its words in head.log; SIGINT reaches it as Ctrl-C would."""
        with (self.folder / "head.log").open("a") as log:
            return subprocess.Popen(
                command or self.command(*arguments),
                cwd=self.folder,
                env={**self.cluster.environment(), "PYTHONDONTWRITEBYTECODE": "1", **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def finish(self, process: subprocess.Popen[str], timeout: float = 900.0) -> int:
        """Exit status; a Snakemake that hangs is killed and shown."""
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            pytest.fail(f"Snakemake did not end within {timeout:.0f} s:\n{self.said()[-3000:]}")

    def run(self, *arguments: str, **environment: str) -> int:
        """Snakemake to its end."""
        return self.finish(self.start(*arguments, **environment))

    def erpo(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line, here."""
        command = [sys.executable, "-m", "erpo", *arguments]
        environment = self.cluster.environment()
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120, check=False)

    def said(self) -> str:
        """Everything that Snakemake said here."""
        return (self.folder / "head.log").read_text()

    def path(self, relative: str) -> Path:
        """A file of the clone."""
        return self.folder / relative

    def tables(self) -> dict[str, str]:
        """Text of the final tables."""
        return {path.name: path.read_text() for path in sorted(self.path("results/trial/tables").glob("*.csv"))}

    def await_job(self, rule: str, states: str = "R", seconds: float = 300.0, after: int = 0) -> dict[str, str]:
        """The first job of a rule in these states with an id above `after`."""
        found: list[dict[str, str]] = []

        def seen() -> bool:
            jobs = self.cluster.jobs(states)
            found[:] = [job for job in jobs if job["comment"].startswith(f"rule_{rule}") and int(job["id"]) > after]
            return bool(found)

        assert wait_until(seen, seconds), f"no job of {rule} in {states}:\n{self.said()[-3000:]}"
        return found[0]


def make_clone(folder: Path, cluster: Cluster, study: str = TRIAL) -> Clone:
    """Copy what git knows of the working tree, and add the study."""
    folder.mkdir(parents=True)
    known = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in known.stdout.splitlines():
        source = ROOT / name
        if name.startswith(("tests/", "docs/", ".ci/")) or not (source.exists() or source.is_symlink()):
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, folder / name, follow_symlinks=False)
    (folder / "config" / "trial.yaml").write_text(study)
    return Clone(folder, cluster)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, cluster) -> Clone:
    """The study run on this machine, without Slurm: what every other way of running it must lead to."""
    clone = make_clone(tmp_path_factory.mktemp("undisturbed") / "erpo", cluster)
    local = [sys.executable, "-m", "snakemake", "--cores", "2", "main", "drift", "training", "--config", "study=trial"]
    assert clone.finish(clone.start(command=local), 600) == 0, clone.said()[-3000:]
    return clone


@pytest.fixture
def prepared(tmp_path, undisturbed) -> Iterator[Clone]:
    """A clone with model, data and reference cache in place: what is left is the training of `long` and its table."""
    shutil.copytree(undisturbed.folder, tmp_path / "erpo", symlinks=True)
    clone = Clone(tmp_path / "erpo", undisturbed.cluster)
    for path in ("runs/long", "tables"):
        shutil.rmtree(clone.path(f"results/trial/{path}"))
    yield clone
    _clean_up(clone)


@pytest.fixture
def clone(tmp_path, cluster) -> Iterator[Clone]:
    """A fresh clone; what is left of its jobs is cancelled afterwards."""
    clone = make_clone(tmp_path / "erpo", cluster)
    yield clone
    _clean_up(clone)


def _clean_up(clone: Clone) -> None:
    """Cancel what is left of a clone's jobs, and of no other's."""

    def left() -> list[str]:
        return [job["id"] for job in clone.cluster.jobs("R,PD,CG") if Path(job["workdir"]).is_relative_to(clone.folder)]

    if left():
        clone.cluster.client("scancel", *left(), check=False)
    wait_until(lambda: not left(), 15)
    _end_orphans(clone.folder)


def _end_orphans(folder: Path) -> None:
    """End job steps of this clone that outlived their job, by their process ids."""
    lines = subprocess.run(["ps", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
    for line in lines:
        if f"--snakefile {folder}/" in line and "--target-jobs" in line:  # whatever its executor: a job, not the head
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
