"""The process that does one verb on one rank, `python -m sdlab.worker FOLDER`, and the one that keeps a node's ranks, with `--supervise`.

The job lies in `FOLDER/job.json`. The second is torchrun with three differences: with `--attached` it ends with the process that started
it, whose end closes its standard input; the first SIGTERM asks ranks that can be stopped in order to do so; and how ranks failed is
written to the folder. No rank outlives it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

SET_PARENT_DEATH_SIGNAL = 1
SUPERVISOR = "SDLAB_SUPERVISOR"
"""The environment variable that tells a rank the process id of its supervisor."""


def main() -> None:
    """Supervise, or do the job of one rank."""
    folder = Path(sys.argv[-1])
    if not folder.is_dir():
        print(f"{folder} is not there on {socket.gethostname()}; it has to lie where all nodes see it", file=sys.stderr)
        _leave(1)
    if "--supervise" in sys.argv:
        _leave(_supervise(folder, attached="--attached" in sys.argv))
    _work(folder)


# The supervisor of a node


def _supervise(folder: Path, *, attached: bool) -> int:
    """Run the ranks of this node; the exit code."""
    job = _read_job(folder)
    ranks, stop = job["ranks"], _Stop(job["ranks"])
    signal.signal(signal.SIGTERM, stop.on_signal)
    signal.signal(signal.SIGINT, stop.at_once)
    os.environ[SUPERVISOR] = str(os.getpid())
    if attached:
        threading.Thread(target=_follow_the_starter, args=[stop], daemon=True).start()

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=ranks["num_nodes"],
        max_nodes=ranks["num_nodes"],
        nproc_per_node=ranks["devices"],
        run_id=ranks["run_id"],
        rdzv_backend="c10d",
        rdzv_endpoint=ranks["endpoint"],
        local_addr="127.0.0.1" if ranks["num_nodes"] == 1 else None,
        max_restarts=ranks["max_restarts"],
        logs_specs=DefaultLogsSpecs(os.devnull),
        signals_to_handle="SIGQUIT",  # the others are handled here
        shutdown_timeout=ranks["shutdown_s"],
    )
    stop.running = True
    try:
        elastic_launch(config, sys.executable)("-m", "sdlab.worker", str(folder))
    except ChildFailedError as error:
        failures = [{"rank": rank, "exit_code": one.exitcode, "time": one.timestamp} for rank, one in error.failures.items()]
        with suppress(OSError):  # a full disk, for example; what was said last is told too
            (folder / f"failures-{socket.gethostname()}-{os.getpid()}.json").write_text(json.dumps(failures), encoding="utf-8")
        if not attached and "run_dir" in job:
            _tell_nobody_waited(folder, Path(job["run_dir"]))
        return 1
    except SignalException:
        return 1
    return 0


def _tell_nobody_waited(folder: Path, run_dir: Path) -> None:
    """Write what went wrong to a run that goes on without its notebook."""
    from sdlab import launch, runs

    if not (run_dir / "result.json").is_file():
        error = str(launch.cause(1, "", folder))
        runs.write_json(run_dir / "result.json", {"status": "failed", "run_dir": str(run_dir), "error": error})


class _Stop:
    """The first SIGTERM asks the ranks to stop in order; a second one, an interrupt or too long a wait ends them."""

    def __init__(self, ranks: dict[str, Any]) -> None:
        self.file, self.grace_s, self.signals, self.running = ranks["stop"], ranks["grace_s"], 0, False

    def on_signal(self, number: int, frame: object) -> None:
        """SIGTERM has come."""
        self.signals += 1
        if self.file is None or self.signals > 1:
            self.at_once(number, frame)
        self.ask()

    def at_once(self, number: int, _: object) -> None:
        """Let torchrun end the ranks."""
        if not self.running:
            _leave(1)
        from torch.distributed.elastic.multiprocessing import SignalException

        raise SignalException("told to end", sigval=signal.Signals(number))

    def ask(self) -> None:
        """Ask the ranks to stop, and end them when they have had their time."""
        if self.file is None:
            os.kill(os.getpid(), signal.SIGINT)
            return
        from sdlab import runs

        Path(self.file).touch()
        timer = threading.Timer(runs.grace_s(Path(self.file).parent, self.grace_s), os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()


def _follow_the_starter(stop: _Stop) -> None:
    while os.read(0, 1 << 12):
        pass
    stop.ask()


# A rank


def _work(folder: Path) -> None:
    """Do the job; a failure is written to `FOLDER/error-RANK.json`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.environ.get(SUPERVISOR, str(os.getppid())) != str(os.getppid()):
            _leave(1)  # it ended before that
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    error_file = folder / f"error-{rank}.json"
    try:
        error_file.unlink(missing_ok=True)
        if rank:
            log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
        sys.stdout, sys.stderr = _Forgiving(sys.stdout), _Forgiving(sys.stderr)
        job = _read_job(folder)
        if job["ranks"]["stop"] is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            threading.Thread(target=_on_terminate, args=[Path(job["ranks"]["stop"])], daemon=True).start()
        _do(job, rank, world_size)
    except BaseException as error:
        _write_error(error_file, rank, error)
        _leave(1)
    _leave(0)


def _on_terminate(stop: Path) -> None:
    """Leave when told to, unless the supervisor was told too, as by who ends a whole job: then it has asked this rank to stop in order.

    A thread of its own hears the signal also while the main one waits for other ranks.
    """
    while signal.sigwait([signal.SIGTERM]):
        time.sleep(0.5)
        if not stop.exists():
            _leave(128 + signal.SIGTERM)


class _Forgiving:
    """A stream that may be written to when nobody reads it any more, or when there is no room for it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, if that can be."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if that can be."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _read_job(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "job.json").read_text(encoding="utf-8")))


def _do(job: dict[str, Any], rank: int, world_size: int) -> None:
    ranks = {"rank": rank, "world_size": world_size}
    if job["verb"] == "prepare":
        from sdlab import prepare

        prepare.work(job, **ranks)
    elif job["verb"] == "sample":
        from sdlab import album

        album.work(job, **ranks)
    elif job["verb"] == "evaluate":
        from sdlab import measure

        measure.work(job, **ranks)
    else:
        from sdlab import train

        train.work(job, **ranks)


def _write_error(path: Path, rank: int, error: BaseException) -> None:
    from sdlab import runs
    from sdlab.config import ConfigError

    about = {"rank": rank, "time": time.time(), "config_error": isinstance(error, ConfigError)}
    try:
        runs.write_json(path, {**about, "message": str(error), "traceback": traceback.format_exc()})
    except OSError:  # a full disk, for example; what was said last is told too
        traceback.print_exc()


def _leave(code: int) -> None:
    """At once: an interpreter that shuts down with threads, pools and process groups of other libraries now and then aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
