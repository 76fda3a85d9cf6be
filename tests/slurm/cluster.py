"""A whole Slurm cluster on one machine, for tests: controller, node daemons on loopback, fake GPUs, accounting if wanted.

    python tests/slurm/cluster.py up [--accounting] [--nodes 2]      python tests/slurm/cluster.py down

Needs root and the packages slurm-wlm and munge (slurmdbd and mariadb-server too for accounting). No systemd, no cgroups. Everything
lives in one folder; the configuration is linked from /etc/slurm while the cluster is up, because the clients look for it there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ETC = Path("/etc/slurm")
READY_SECONDS = 90.0
STOP_SECONDS = 10.0
KILL_WAIT = 8
"""Seconds between the TERM of a time limit and the KILL."""

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scontrol")
_ACCOUNTING_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacctmgr")
_NULL_DEVICE = os.makedev(1, 3)

_SLURM_CONF = """\
ClusterName=trial
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/pid/slurmctld
SlurmdPidFile={folder}/pid/slurmd-%n
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=100000
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
EnforcePartLimits=ALL
GresTypes=gpu
MinJobAge=3600
KillWait={kill_wait}
SlurmdTimeout=60
ReturnToService=2
{accounting}
{nodes}
PartitionName=cpu Nodes=ALL Default=YES MaxTime=1-00:00:00 DefaultTime=00:10:00 State=UP
PartitionName=gpu Nodes=ALL MaxTime=1-00:00:00 DefaultTime=00:10:00 State=UP
PartitionName=short Nodes=ALL MaxTime=00:05:00 DefaultTime=00:01:00 State=UP
"""
_ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge/socket
AccountingStoreFlags=job_comment
AccountingStorageTRES=gres/gpu"""
_SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile={folder}/log/slurmdbd
PidFile={folder}/pid/slurmdbd
"""


def missing_programs(accounting: bool = False) -> list[str]:
    """What has to be installed before a cluster can come up."""
    names = _PROGRAMS + (_ACCOUNTING_PROGRAMS if accounting else ())
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in names if shutil.which(name, path=path) is None]


@dataclass(frozen=True)
class Cluster:
    """A cluster in one folder. `up` and `down` may be called any number of times."""

    folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "erpo-slurm")
    nodes: int = 2
    cpus: int = 8
    memory_mb: int = 16000
    gpus: int = 4
    port: int = 16917
    accounting: bool = False

    # --- life ---------------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Start what is not running and wait until every node takes jobs."""
        lacking = missing_programs(self.accounting)
        if lacking:
            raise RuntimeError(f"not installed: {', '.join(lacking)}; apt-get install slurm-wlm munge (slurmdbd mariadb-server)")
        self._configure()
        self._start("munged", self._munged())
        if self.accounting:
            self._start_accounting()
        self.start_controller()
        for node in self.node_names():
            self._start(f"slurmd-{node}", ["slurmd", "-N", node])
        self._await_nodes()

    def down(self) -> None:
        """Cancel all jobs, stop all daemons by their PID files, take the links away."""
        if self.is_alive("slurmctld"):
            self.client("scancel", "--user=root", check=False)
            wait_until(lambda: not self.client("squeue", "-h", "-t", "R,CG,PD", check=False).strip(), STOP_SECONDS)
        for name in (*(f"slurmd-{node}" for node in self.node_names()), "slurmctld", "slurmdbd", "mariadbd", "munged"):
            self.stop(name)
        for path in ETC.glob("*.conf"):
            if path.is_symlink() and Path(os.readlink(path)).parent == self.folder / "etc":
                path.unlink()

    def start_controller(self) -> None:
        """Start slurmctld with the state it left, if any."""
        self._start("slurmctld", ["slurmctld", "-i"])

    def stop(self, name: str) -> None:
        """TERM, and KILL if that is not enough, to the process of a PID file."""
        pid = self._pid(name)
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        if not wait_until(lambda: self._pid(name) is None, STOP_SECONDS):
            os.kill(pid, signal.SIGKILL)
        (self.folder / "pid" / name).unlink(missing_ok=True)

    def is_alive(self, name: str) -> bool:
        """Whether a daemon runs."""
        return self._pid(name) is not None

    # --- asking and telling -------------------------------------------------------------------------------------------

    def node_names(self) -> list[str]:
        """Names that Slurm alone knows; they do not resolve."""
        return [f"n{number}" for number in range(1, self.nodes + 1)]

    def client(self, *command: str, check: bool = True, timeout: float = 20.0) -> str:
        """Output of a Slurm command; a dead controller makes it fail after the timeout instead of blocking."""
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, timeout=timeout, check=False)
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def jobs(self, states: str = "all") -> list[dict[str, str]]:
        """Jobs that the controller remembers, oldest first: id, state, rule (the comment), partition, cpus, memory, gpus, nodes."""
        columns = ("id", "state", "comment", "partition", "cpus", "memory", "gpus", "nodes", "limit", "name", "workdir")
        form = "%i|%T|%k|%P|%C|%m|%b|%N|%l|%j|%Z"
        lines = self.client("squeue", "-h", "-t", states, "-o", form).splitlines()
        found = [dict(zip(columns, line.split("|"), strict=True)) for line in lines]
        return sorted(found, key=lambda job: int(job["id"]))

    def environment(self) -> dict[str, str]:
        """Variables of a client."""
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return {**os.environ, "PATH": path, "SLURM_CONF": str(self.folder / "etc" / "slurm.conf")}

    # --- inside ---------------------------------------------------------------------------------------------------------

    def _configure(self) -> None:
        for name in ("etc", "state", "log", "pid", "munge", "dev", *(f"spool/{node}" for node in self.node_names())):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        key = self.folder / "etc" / "munge.key"
        if not key.exists():
            key.write_bytes(os.urandom(128))
            key.chmod(0o400)
        for number in range(self.gpus):
            # A GPU must be a character device, or its jobs get no CUDA_VISIBLE_DEVICES: a private clone of /dev/null will do.
            if not (self.folder / "dev" / f"gpu{number}").exists():
                os.mknod(self.folder / "dev" / f"gpu{number}", 0o20666, _NULL_DEVICE)
        self._write("slurm.conf", self._slurm_conf())
        self._write("gres.conf", f"Name=gpu Type=a100 File={self.folder}/dev/gpu[0-{self.gpus - 1}]\n")
        self._write("cgroup.conf", "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")  # loaded always, used by nothing here

    def _slurm_conf(self) -> str:
        shape = f"NodeAddr=127.0.0.1 CPUs={self.cpus} RealMemory={self.memory_mb} Gres=gpu:a100:{self.gpus} State=UNKNOWN"
        nodes = [
            f"NodeName={node} NodeHostname=localhost Port={self.port + number} {shape}"
            for number, node in enumerate(self.node_names(), start=1)
        ]
        storage = _ACCOUNTING.format(port=self._dbd_port(), folder=self.folder) if self.accounting else ""
        return _SLURM_CONF.format(
            port=self.port,
            folder=self.folder,
            kill_wait=KILL_WAIT,
            accounting=storage or "AccountingStorageType=accounting_storage/none",
            nodes="\n".join(nodes),
        )

    def _dbd_port(self) -> int:
        return self.port + 50

    def _write(self, name: str, text: str) -> None:
        path, link = self.folder / "etc" / name, ETC / name
        path.write_text(text)
        path.chmod(0o600 if name == "slurmdbd.conf" else 0o644)
        ETC.mkdir(exist_ok=True)
        if link.exists() and not link.is_symlink():
            raise RuntimeError(f"{link} is a real file: this machine has a Slurm of its own")
        link.unlink(missing_ok=True)
        link.symlink_to(path)

    def _munged(self) -> list[str]:
        munge = self.folder / "munge"
        munge.chmod(0o755)
        options = {
            "key-file": self.folder / "etc" / "munge.key",
            "socket": munge / "socket",
            "pid-file": self.folder / "pid" / "munged",
            "log-file": self.folder / "log" / "munged",
            "seed-file": munge / "seed",
        }
        return ["munged", "--force", *(f"--{name}={value}" for name, value in options.items())]

    def _start(self, name: str, command: list[str], **variables: str) -> None:
        if self.is_alive(name):
            return
        with (self.folder / "log" / f"{name}.start").open("w") as log:
            subprocess.run(command, env={**self.environment(), **variables}, stdout=log, stderr=log, timeout=60, check=True)
        if not wait_until(lambda: self.is_alive(name), 5):
            raise RuntimeError(f"{name} did not start; see {self.folder}/log")

    def _start_accounting(self) -> None:
        data, socket = self.folder / "db", self.folder / "db.socket"
        if not data.is_dir():
            options = [
                "--no-defaults",
                "--user=root",
                f"--datadir={data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ]
            subprocess.run(["mariadb-install-db", *options], capture_output=True, timeout=120, check=True)
        if not self.is_alive("mariadbd"):
            options = ["--no-defaults", "--user=root", f"--datadir={data}", f"--socket={socket}", "--skip-networking"]
            options += [
                f"--pid-file={self.folder}/pid/mariadbd",
                "--innodb-buffer-pool-size=256M",
                "--innodb-lock-wait-timeout=900",
            ]
            with (self.folder / "log" / "mariadbd").open("w") as log:
                subprocess.Popen(["mariadbd", *options], stdout=log, stderr=log, start_new_session=True)
        create = ["mariadb", "--no-defaults", "-S", str(socket), "-e", "create database if not exists slurm_acct_db"]
        _await("the database", lambda: subprocess.run(create, capture_output=True, check=False).returncode == 0)
        self._write("slurmdbd.conf", _SLURMDBD_CONF.format(port=self._dbd_port(), folder=self.folder))
        self._start("slurmdbd", ["slurmdbd"], MYSQL_UNIX_PORT=str(socket))
        _await("slurmdbd", lambda: self._accounts("list", "cluster") is not None)
        if "trial" not in (self._accounts("list", "cluster", "format=cluster") or ""):
            self._accounts("add", "cluster", "trial")
            self._accounts("add", "account", "lab", "Description=lab", "Organization=lab")
            self._accounts("add", "user", "root", "Account=lab", "DefaultAccount=lab")

    def _accounts(self, *command: str) -> str | None:
        try:
            return self.client("sacctmgr", "-n", "-i", *command)
        except (RuntimeError, subprocess.TimeoutExpired):
            return None

    def _await_nodes(self) -> None:
        def ready() -> bool:
            if not self.is_alive("slurmctld"):
                raise RuntimeError(f"slurmctld died; see {self.folder}/log/slurmctld")
            lines = self.client("sinfo", "-h", "-N", "-t", "idle,mix,alloc", "-o", "%N", check=False).split()
            return len(set(lines)) == self.nodes

        _await("the nodes", ready)

    def _pid(self, name: str) -> int | None:
        try:
            pid = int((self.folder / "pid" / name).read_text())
            os.kill(pid, 0)
        except (OSError, ValueError):
            return None
        return None if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z" else pid


def wait_until(condition, seconds: float) -> bool:
    """Whether a condition came true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.1)
    return False


def _await(what: str, condition) -> None:
    if not wait_until(condition, READY_SECONDS):
        raise RuntimeError(f"{what}: not ready after {READY_SECONDS:.0f} s")


def main() -> None:
    """Bring a cluster up or down by hand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("up", "down"))
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd, so that sacct works")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Cluster().folder)
    args = parser.parse_args()
    cluster = Cluster(folder=args.folder, nodes=args.nodes, accounting=args.accounting)
    cluster.up() if args.action == "up" else cluster.down()
    if args.action == "up":
        print(cluster.client("sinfo"), end="")


if __name__ == "__main__":
    sys.exit(main())
