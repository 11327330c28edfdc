"""What differs from place to place: devices, ranks, how progress is shown, and which attention kernel is used."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdlab import pool, runs
from sdlab.config import ConfigError

JOB = "job.json"
LOG = "log.txt"
"""What ranks say that nobody waits for."""
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MPLBACKEND", "JPY_PARENT_PID")
"""Names in the environment that tell this process who it is, and would tell its ranks something wrong."""
GRACE_FILE = "SDLAB_GRACE"
"""The environment variable that names a file in which a notebook says how many seconds a stop may take."""
GRACE_S = 10
"""Seconds that ranks have to leave by themselves when they are told to."""
TOLD_TO_LEAVE = (0, -signal.SIGTERM, 128 + signal.SIGTERM)
"""How ranks leave that torchrun has ended since another one had failed."""
TAIL = 2000
"""Characters of what a rank said last that an error repeats."""


def device() -> torch.device:
    """The device of this process: the GPU of its local rank if there is one, else the CPU."""
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def machine() -> dict[str, Any]:
    """What this process runs on, for a study's `results.json`."""
    here = device()
    name = torch.cuda.get_device_name(here) if here.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": f"{here.type}: {name}",
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }


def devices(asked: int | str) -> int:
    """Ranks a node: as asked, or one a GPU, or one."""
    return asked if isinstance(asked, int) else max(1, torch.cuda.device_count())


def progress(*, total: int | None = None, title: str, unit: str, initial: int = 0) -> Any:
    """A tqdm bar with rate and ETA: a widget in JupyterLab, plain lines under the sdlab engine and in scripts."""
    if os.environ.get("SDLAB_HEADLESS"):
        from tqdm import tqdm

        return tqdm(total=total, desc=title, unit=unit, initial=initial, file=sys.stderr, mininterval=1.0, ascii=True, ncols=100)
    from tqdm.auto import tqdm as auto

    return auto(total=total, desc=title, unit=unit, initial=initial)


def attention(on: torch.device) -> AbstractContextManager[Any]:
    """The attention kernel to use on a device: on a CPU the plain one, whose backward is several times faster at few tokens."""
    return sdpa_kernel(SDPBackend.MATH) if on.type == "cpu" else nullcontext()


@contextmanager
def whole_float32(on: torch.device) -> Iterator[None]:
    """No autocast, and TF32 neither in convolutions nor in products, which would leave 10 of float32's 23 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    try:
        with torch.autocast(on.type, enabled=False), exact:
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def filled(batch: torch.Tensor, rows: int) -> torch.Tensor:
    """A batch and as many copies of its first row as make `rows`, so that a result does not depend on how many rows there are."""
    return torch.cat([batch, batch[:1].expand(rows - len(batch), *batch.shape[1:])])


@dataclass(frozen=True)
class Ranks:
    """How many ranks do a job, and what happens to them."""

    devices: int = 1
    """Ranks on each node."""
    num_nodes: int = 1
    rendezvous: str | None = None
    """Where several nodes meet outside SLURM, as host:port of the first."""
    max_restarts: int = 0
    """How often all ranks are started again after one has died."""
    stop: str | None = None
    """The file that asks the ranks to stop in order; without one they are told by a signal."""
    grace_s: float | None = None
    """Seconds that ranks which were asked to stop may take; None for what `runs.grace_s` says."""


def run_ranks(
    folder: Path,
    job: Mapping[str, Any],
    ranks: Ranks,
    *,
    detach: bool = False,
    held: Sequence[int] = (),
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Run one job on several ranks under torchrun, and wait for them.

    What rank 0 says is shown here, what the others say is in `folder/rank-N.log`. The ranks end when this process does, in order where
    they have a file to be stopped by.

    Args:
        folder: where the job is written for them; on a file system that all nodes share.
        job: with its `verb`, see `sdlab.worker`.
        ranks: how many, and how they meet.
        held: descriptors, as of a lock, that stay open as long as the ranks of this node run.
        detach: do not wait; the ranks go on when this process ends, and what they say is in `folder/log.txt`.
        meanwhile: called about ten times a second.

    Raises:
        ConfigError: more nodes or ranks a node than there may be, or what a rank raised as such.
        RuntimeError: a rank failed; with its traceback, or the signal that ended it and what it said last.
    """
    command = [sys.executable, "-m", "sdlab.worker", "--supervise", *([] if detach else ["--attached"]), str(folder)]
    started, threads = _on_all_nodes(ranks)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    meeting = {"run_id": uuid.uuid4().hex, "endpoint": _endpoint(ranks), "shutdown_s": GRACE_S}
    runs.write_json(folder / JOB, {**job, "ranks": {**asdict(ranks), **meeting}})
    several = f"{ranks.devices} rank{'s' * (ranks.devices > 1)}" + (f" on each of {ranks.num_nodes} nodes" if ranks.num_nodes > 1 else "")
    print(f"starting {several}; what they say beside the first is in {folder}", flush=True)
    if ranks.rendezvous and ranks.num_nodes > 1:
        print(f"start on each of the other {ranks.num_nodes - 1} nodes: {Path(sys.executable).name} -m sdlab.worker --supervise {folder}")
    if detach:
        with (folder / LOG).open("wb") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            subprocess.Popen([*started, *command], env=_environment(threads), start_new_session=True, pass_fds=held, **streams)
        return
    _attend(_start([*started, *command], _environment(threads), held), folder, ranks, meanwhile)


def check(ranks: Ranks) -> None:
    """Refuse more ranks than there may be.

    Raises:
        ConfigError: see `run_ranks`.
    """
    _on_all_nodes(ranks)


def _on_all_nodes(ranks: Ranks) -> tuple[list[str], int]:
    """What starts a command once on each node, and the threads of a rank.

    Raises:
        ConfigError: more nodes or ranks a node than there may be.
    """
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
    if ranks.num_nodes == 1 or ranks.rendezvous:
        return [], max(1, pool.cores() // ranks.devices)
    if ranks.num_nodes > nodes or shutil.which("srun") is None:
        given = f"num_nodes={ranks.num_nodes}, and this process may use {nodes}"
        raise ConfigError(f"{given}: start it inside a SLURM allocation of that many nodes, or say where they meet (rendezvous)")
    cpus = _cpus()
    if ranks.devices > cpus:
        raise ConfigError(f"devices={ranks.devices}, and the SLURM allocation has {cpus} CPUs on a node; a rank needs one")
    several = [f"--nodes={ranks.num_nodes}", f"--ntasks={ranks.num_nodes}", "--ntasks-per-node=1"]
    # a step does not take over the job's CPUs, and else holds back lines that do not end, as those of a bar
    more = [f"--cpus-per-task={cpus}", "--unbuffered", "--overlap", "--kill-on-bad-exit=1", "--export=ALL"]
    return ["srun", *several, *more], cpus // ranks.devices


def _cpus() -> int:
    """CPUs of this SLURM job on the node where it has fewest ("8(x2),4")."""
    return min(map(int, re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))), default=pool.cores())


def _endpoint(ranks: Ranks) -> str:
    """Where the nodes meet, as host:port."""
    if ranks.rendezvous:
        return ranks.rendezvous
    if ranks.num_nodes == 1:
        return "127.0.0.1:0"
    hosts = subprocess.run(["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]], capture_output=True, text=True, check=True)
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{hosts.stdout.split()[0]}:{free.getsockname()[1]}"


def _environment(threads: int) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    return {
        "OMP_NUM_THREADS": str(threads),
        pool.CORES: str(threads),
        **ours,
        "PYTHONUNBUFFERED": "1",
        "SDLAB_HEADLESS": "1",
        # without it ranks that are started again now and then read where the ones before them met
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


@contextmanager
def asks_to_stop(stop: Path | None, grace_s: float | None) -> Iterator[None]:
    """Turn the first interrupt or SIGTERM into a request to stop, the file `stop` of a run folder; a second one interrupts at once."""
    if stop is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    asked = False

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        stop.touch()
        if GRACE_FILE in os.environ:
            Path(os.environ[GRACE_FILE]).write_text(str(runs.grace_s(stop.parent, grace_s)))
        print("stopping after this step, with a checkpoint; interrupt again to stop at once", flush=True)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _attend(process: subprocess.Popen[bytes], folder: Path, ranks: Ranks, meanwhile: Callable[[], None]) -> None:
    """Show what the ranks say, and see to it that what supervises them ends."""
    said = ""
    try:
        with asks_to_stop(Path(ranks.stop) if ranks.stop else None, ranks.grace_s):
            while process.poll() is None:
                said = _show(process, said)
                meanwhile()
                time.sleep(0.1)
        meanwhile()
    finally:
        _end(process)
        said = _show(process, said)
    if process.returncode:
        raise cause(process.returncode, said, folder)


def _start(command: list[str], environment: dict[str, str], held: Sequence[int]) -> subprocess.Popen[bytes]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=environment, start_new_session=True, pass_fds=held, **pipes)
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _show(process: subprocess.Popen[bytes], said: str) -> str:
    assert process.stdout is not None
    while data := process.stdout.read(1 << 16):
        text = data.decode("utf-8", "replace")
        said = (said + text)[-TAIL:]
        sys.stderr.write(text)
        sys.stderr.flush()
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    """Tell a process that still runs to leave, twice since the first time may ask it to do so in order, and make it after a while."""
    for patience in (1, 2 * GRACE_S):
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cause(code: int, said: str, folder: Path) -> ConfigError | RuntimeError:
    """Why ranks failed: one that a signal ended, else the first error that one has written down, else how the first one has left.

    Args:
        code: how what supervises them has left.
        said: what was heard last.
        folder: of the job.
    """
    failures = [one for path in folder.glob("failures-*.json") for one in json.loads(path.read_text(encoding="utf-8"))]
    failures.sort(key=lambda one: (one["exit_code"] in TOLD_TO_LEAVE, one["exit_code"] >= 0, one["time"]))
    errors = sorted((json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("error-*.json")), key=lambda one: one["time"])
    if errors and not (failures and failures[0]["exit_code"] < 0 and failures[0]["exit_code"] not in TOLD_TO_LEAVE):
        if errors[0]["config_error"]:
            return ConfigError(errors[0]["message"])
        return RuntimeError(f"rank {errors[0]['rank']} failed:\n{errors[0]['traceback']}")
    rank, ended = (failures[0]["rank"], failures[0]["exit_code"]) if failures else (None, code)
    memory = " (out of memory?)" if ended == -signal.SIGKILL else ""
    how = f"was ended by {signal.Signals(-ended).name}{memory}" if ended < 0 else f"left with exit code {ended}"
    log = folder / f"rank-{rank}.log"
    last = (log.read_text(encoding="utf-8", errors="replace") if log.is_file() else said).strip()[-TAIL:]
    return RuntimeError(f"{'what supervises the ranks' if rank is None else f'rank {rank}'} {how}; what it said last:\n{last or 'nothing'}")
