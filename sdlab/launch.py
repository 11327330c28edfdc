"""What differs from place to place: devices, ranks, how progress is shown, and which attention kernel is used."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdlab import pool, runs
from sdlab.config import ConfigError

JOB = "job.json"
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Names in the environment that tell a rank which it is."""
GRACE_S = 10
"""Seconds that ranks have to leave by themselves when they are told to."""
TAIL = 2000
"""Characters of what a rank said last that an error repeats."""


def device() -> torch.device:
    """The device of this process: the GPU of its local rank if there is one, else the CPU."""
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


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


def run_ranks(folder: Path, job: Mapping[str, Any], *, devices: int, num_nodes: int) -> None:
    """Run one job on `devices` x `num_nodes` ranks that need not talk to one another, and wait for them.

    What rank 0 says is shown here, what the others say is in `folder/rank-N.log`. The ranks end when this process does.

    Args:
        folder: where the job is written for them; on a file system that all nodes share.
        job: with its `verb`, see `sdlab.worker`.
        devices: ranks a node.
        num_nodes: nodes; more than one need a SLURM allocation.

    Raises:
        ConfigError: more nodes or ranks a node than there may be, or what a rank raised as such.
        RuntimeError: a rank failed; with its traceback, or the signal that ended it and what it said last.
    """
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
    if num_nodes > nodes or (num_nodes > 1 and shutil.which("srun") is None):
        raise ConfigError(f"num_nodes={num_nodes}, and this process may use {nodes}: start it inside a SLURM allocation of that many nodes")
    cpus = _cpus(num_nodes)
    if num_nodes > 1 and devices > cpus:
        raise ConfigError(f"devices={devices}, and the SLURM allocation has {cpus} CPUs on a node; a rank needs one")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    runs.write_json(folder / JOB, dict(job))
    command = [sys.executable, "-m", "sdlab.worker", str(folder)]
    if num_nodes > 1:
        several = [f"--nodes={num_nodes}", f"--ntasks={num_nodes * devices}", f"--ntasks-per-node={devices}"]
        # a step does not take over the job's CPUs, and else holds back lines that do not end, as those of a bar
        srun = ["srun", *several, f"--cpus-per-task={cpus // devices}", "--unbuffered", "--overlap", "--kill-on-bad-exit=1", "--export=ALL"]
        _run([*srun, *command], [_environment(cpus // devices)], folder)
    else:
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(devices)} for rank in range(devices)]
        _run(command, [{**_environment(cpus // devices), **rank} for rank in ranks], folder)


def _cpus(num_nodes: int) -> int:
    """CPUs of this process, or, on several nodes, of the job on the node where it has fewest ("8(x2),4")."""
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")) if num_nodes > 1 else []
    return min(map(int, counts), default=pool.cores())


def _environment(threads: int) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name not in RANKS}
    return {
        "OMP_NUM_THREADS": str(max(1, threads)),
        pool.CORES: str(max(1, threads)),
        **ours,
        "PYTHONUNBUFFERED": "1",
        "SDLAB_HEADLESS": "1",
    }


def _run(command: list[str], environments: list[dict[str, str]], folder: Path) -> None:
    """Start a command once in each environment, and wait until all have ended or one has failed."""
    processes: list[subprocess.Popen[bytes]] = []
    said = [""] * len(environments)
    try:
        for environment in environments:
            processes.append(_start(command, environment))
        while None in (codes := [process.poll() for process in processes]):
            _show(processes, said)
            if any(codes):
                break
            time.sleep(0.1)
    finally:
        _end(processes)
        _show(processes, said)
    if any(codes):
        _raise(codes, said, folder)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    return process


def _show(processes: list[subprocess.Popen[bytes]], said: list[str]) -> None:
    for number, process in enumerate(processes):
        assert process.stdout is not None
        while data := process.stdout.read(1 << 16):
            text = data.decode("utf-8", "replace")
            said[number] = (said[number] + text)[-TAIL:]
            sys.stderr.write(text)
            sys.stderr.flush()


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Tell those that still run to leave, and make them after a while."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _raise(codes: list[int | None], said: list[str], folder: Path) -> None:
    """The first error that a rank has written down, else how the first process that failed by itself has ended."""
    errors = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("error-*.json"))]
    for error in sorted(errors, key=lambda one: one["time"]):
        if error["config_error"]:
            raise ConfigError(error["message"])
        raise RuntimeError(f"rank {error['rank']} failed:\n{error['traceback']}")
    number, ended = next((number, code) for number, code in enumerate(codes) if code)
    memory = " (out of memory?)" if ended == -signal.SIGKILL else ""
    how = f"was ended by {signal.Signals(-ended).name}{memory}" if ended < 0 else f"left with exit code {ended}"
    log = folder / f"rank-{number}.log"
    last = (said[number] + (log.read_text(encoding="utf-8", errors="replace") if log.is_file() else "")).strip()[-TAIL:]
    raise RuntimeError(f"{'rank ' + str(number) if len(codes) > 1 else 'a rank'} {how}; what it said last:\n{last or 'nothing'}")
