"""A SLURM of two node daemons on this machine, for the tests of what runs on several nodes; as a program, the keeper of one daemon."""

import ctypes
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

# names that are addresses too, so that what a job reads as the head's name can be connected to
NODES = ("127.0.0.1", "127.0.0.2")
CPUS = 8
PATIENCE_S = 60
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "srun")
ENDED = re.compile(r"JobState=(?!PENDING|CONFIGURING|RUNNING|SUSPENDED|COMPLETING)\S+ .*?ExitCode=(?P<code>\d+):(?P<signal>\d+)")
SET_CHILD_SUBREAPER = 36
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={short}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0
EnforcePartLimits=ALL
FirstJobId={first}
StateSaveLocation={folder}/state
SlurmctldPidFile={short}/slurmctld.pid
SlurmdSpoolDir={short}/%n
SlurmdPidFile={short}/%n.pid
SlurmdParameters=config_overrides
MessageTimeout=60
TCPTimeout=10
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=main Nodes=ALL Default=YES
"""


def find(program: str) -> str | None:
    """The path of a program, also from where only root's path leads."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def available() -> bool:
    """Whether SLURM and munge are installed."""
    return all(find(program) for program in PROGRAMS)


@dataclass(frozen=True)
class Cluster:
    """A running SLURM: its folder holds the configuration, the daemons' logs and what jobs print."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which SLURM's programs find this cluster, without any job that the tests run in themselves."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SALLOC", "SRUN"))}
        return {**ours, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """What one of SLURM's programs answers."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def run(self, command: Sequence[str], *, nodes: int = 2, timeout: float) -> subprocess.CompletedProcess[str]:
        """Run a command as a batch script: once, on the first of so many whole nodes, with one task a node for `srun`."""
        options = [f"--nodes={nodes}", "--ntasks-per-node=1", "--exclusive", "--no-requeue"]
        options += [f"--output={self.folder}/%j.out", f"--error={self.folder}/%j.err"]
        job, deadline = self.ask("sbatch", "--parsable", *options, str(self.folder / "job.sh"), *command), time.monotonic() + timeout
        ended = None
        try:
            while ended is None and time.monotonic() < deadline:
                time.sleep(0.1)
                ended = ENDED.search(self.ask("scontrol", "show", "job", "-o", job))
        finally:
            if ended is None:
                self.ask("scancel", "--full", "--signal=KILL", job)
        out, err = (path.read_text() if path.exists() else "" for path in (self.folder / f"{job}.out", self.folder / f"{job}.err"))
        if ended is None:
            raise subprocess.TimeoutExpired(command, timeout, out.encode(), err.encode())
        return subprocess.CompletedProcess(command, -int(ended["signal"]) or int(ended["code"]), out, err)


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def daemon(name: str, cluster: Cluster, program: str, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon with a log and a keeper of its own; its keeper takes it away, also if these tests are killed."""
    command = [sys.executable, __file__, str(find(program)), *options]
    with (cluster.folder / f"{name}.log").open("wb") as log:
        keeper = subprocess.Popen(command, env=cluster.environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    try:
        yield keeper
    finally:
        keeper.communicate(b"end")


def wait_until_idle(cluster: Cluster, keepers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait for both nodes; say what the daemons logged where they do not come."""
    states, deadline = "unknown", time.monotonic() + PATIENCE_S
    while states.split() != ["idle"] * len(NODES):
        if time.monotonic() > deadline or any(keeper.poll() is not None for keeper in keepers):
            tails = (f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in sorted(cluster.folder.glob("*.log")))
            raise RuntimeError("\n".join([f"SLURM did not start; the states of its nodes: {states}", *tails]))
        time.sleep(0.1)
        with suppress(RuntimeError, subprocess.TimeoutExpired):
            states = cluster.ask("sinfo", "-h", "-N", "-o", "%T")


@contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """A running SLURM of two node daemons on this machine, in `folder`; all its daemons are gone afterwards."""
    cluster = Cluster(folder.absolute())
    (folder / "state").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        short = Path(name)  # sockets live here: their paths may have 107 letters
        short.chmod(0o755)  # munged demands that everybody reaches its socket
        for node in NODES:
            (short / node).mkdir()
        key = short / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        names = {"host": socket.gethostname(), "user": psutil.Process().username(), "folder": cluster.folder, "short": short}
        ports = free_ports(3)
        first = ports[0] % 10_000 + 1  # jobs make ports of their numbers, and two clusters at a time share the machine's
        (folder / "slurm.conf").write_text(CONFIGURATION.format(**names, nodes=NODES, ports=ports, first=first, cpus=CPUS))
        (folder / "job.sh").write_text('#!/bin/sh\nexec "$@"\n')
        files = [f"--socket={short}/munge.socket", f"--key-file={key}", f"--pid-file={short}/munged.pid", f"--seed-file={short}/seed"]
        files += [f"--log-file={short}/munged.log", "--origin=127.0.0.1"]
        keepers = [stack.enter_context(daemon("munged", cluster, "munged", "--foreground", *files))]
        deadline = time.monotonic() + PATIENCE_S
        while not (short / "munge.socket").exists() and keepers[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        keepers.append(stack.enter_context(daemon("slurmctld", cluster, "slurmctld", "-D", "-c")))
        keepers += [stack.enter_context(daemon(f"slurmd-{node}", cluster, "slurmd", "-D", "-N", node)) for node in NODES]
        wait_until_idle(cluster, keepers)
        yield cluster


def keep(command: Sequence[str]) -> int:
    """Run a daemon until it ends or standard input has something to say, then kill all that came from it, orphans too."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1)
    kept = subprocess.Popen(command, stdin=subprocess.DEVNULL).pid
    status, closed = None, False
    while status is None and not closed:
        closed = bool(select.select([sys.stdin], [], [], 0.1)[0])
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
            if ended.si_pid == kept:
                status = ended.si_status or 1
                break
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        time.sleep(0.02)
        while psutil.Process().children() and os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass
    return status or 0


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
