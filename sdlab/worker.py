"""The process that does one verb on one rank: `python -m sdlab.worker FOLDER`, with the job in `FOLDER/job.json`.

Rank and world size come from RANK, LOCAL_RANK and WORLD_SIZE, or from SLURM. It ends with the process that started it, whose
end closes its standard input.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any


def main() -> None:
    """Do the job; a failure is written to `FOLDER/error-RANK.json`."""
    folder = Path(sys.argv[1])
    for name, slurm in (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID"), ("WORLD_SIZE", "SLURM_NTASKS")):
        os.environ.setdefault(name, os.environ.get(slurm, "1" if name == "WORLD_SIZE" else "0"))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    threading.Thread(target=_leave_with_the_starter, daemon=True).start()
    if not folder.is_dir():
        print(f"{folder} is not there on {socket.gethostname()}; data_dir has to lie where all nodes see it", file=sys.stderr)
        _leave(1)
    try:
        if rank:
            log = os.open(folder / f"rank-{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
        _do(json.loads((folder / "job.json").read_text(encoding="utf-8")), rank, world_size)
    except BaseException as error:
        _write_error(folder, rank, error)
        _leave(1)
    _leave(0)


def _do(job: dict[str, Any], rank: int, world_size: int) -> None:
    from sdlab import prepare

    {"prepare": prepare.work}[job["verb"]](job, rank=rank, world_size=world_size)


def _leave_with_the_starter() -> None:
    while os.read(0, 1 << 12):
        pass
    os._exit(1)


def _write_error(folder: Path, rank: int, error: BaseException) -> None:
    from sdlab import runs
    from sdlab.config import ConfigError

    about = {"rank": rank, "time": time.time(), "config_error": isinstance(error, ConfigError)}
    try:
        runs.write_json(folder / f"error-{rank}.json", {**about, "message": str(error), "traceback": traceback.format_exc()})
    except OSError:  # a full disk, for example; what was said last is told too
        traceback.print_exc()


def _leave(code: int) -> None:
    """At once: an interpreter that shuts down with threads and pools of other libraries now and then aborts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
