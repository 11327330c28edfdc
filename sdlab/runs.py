"""The run folder: its lock, config, history and metrics, written so that a kill leaves them whole, and its checkpoints as read."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from sdlab.config import ConfigError, TrainConfig, build

Resume = Literal["auto", "never", "must"]
LOCK = ".lock"
LOCK_S = 1.0
"""Seconds to wait for a lock that somebody only looks at."""
METRICS = "metrics.jsonl"
DISCARDED = "metrics.discarded.jsonl"
LAST_SAVE = "last_save.json"
LEAST_GRACE_S = 60.0


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def digest(content: Any) -> str:
    """SHA-256 of plain content, whatever the order of its fields."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def git_state() -> dict[str, Any]:
    """Commit and uncommitted changes of the sources, or nulls outside a checkout."""

    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    return {"commit": ask("rev-parse", "HEAD"), "dirty_diff": ask("diff", "HEAD")}


def read_config(folder: Path) -> TrainConfig:
    """The config of a run folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{folder} is no run folder: it has no config.json")
    return build(TrainConfig, _read_table(path), where=str(path))


def _read_table(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is damaged: it holds no table")
    return values


@contextmanager
def lock(folder: Path) -> Iterator[int]:
    """A run folder, made if need be, for one training alone; reading it needs no lock.

    Yields:
        The descriptor that holds the lock: a process that inherits it holds it too, until it ends.

    Raises:
        ConfigError: another one holds it, or the folder is not for a run.
    """
    _check_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        _acquire(held, folder)
        yield held
    finally:
        os.close(held)


def _acquire(held: int, folder: Path) -> None:
    until = time.monotonic() + LOCK_S
    while True:
        try:
            return fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                advice = "wait for it, stop it, or give another run_dir"
                raise ConfigError(f"run_dir {folder} is being trained by another process; {advice}") from None
        time.sleep(0.05)


def _check_folder(folder: Path) -> None:
    """Refuse what is neither new, nor empty, nor a run folder.

    Raises:
        ConfigError: it is a file, or holds other files.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run_dir {folder} is a file; give a folder")
    foreign = [path for path in folder.glob("*") if path.name != LOCK and not path.name.startswith(".config.json.")]
    if foreign and not (folder / "config.json").is_file():
        raise ConfigError(f"run_dir {folder} holds other files and no config.json; give a new or empty folder")


def check_run(folder: Path, config: TrainConfig) -> int:
    """Refuse a folder that this run may not use; the step that it would go on from, 0 for a new one.

    Raises:
        ConfigError: it is a file or holds other files, or a science field differs; both values are named.
    """
    _check_folder(folder)
    if (folder / "config.json").is_file():
        _check_science(folder, read_config(folder), config)
    return max(map(checkpoint_step, checkpoints(folder)), default=0)


def open_run(folder: Path, config: TrainConfig, *, resume: Resume, lineage: Mapping[str, Any]) -> Path | None:
    """Make a run folder or take up an existing one, and say which checkpoint to continue from (None: from the start).

    Args:
        folder: the run folder.
        config: what is to be run; in an existing folder its science fields have to be those of the folder.
        resume: "auto" continues a folder with a valid checkpoint, "never" refuses a non-empty one, "must" refuses one without.
        lineage: where the run's weights come from, written once.

    Raises:
        ConfigError: see `resume`, or a science field differs; both values are named.
    """
    _check_folder(folder)
    known = read_config(folder) if (folder / "config.json").is_file() else None
    if known is not None and resume == "never":
        raise ConfigError(f"run_dir {folder} is in use and resume='never'; give a new folder, or resume='auto' to continue it")
    if known is not None:
        _check_science(folder, known, config)
    checkpoint = find_checkpoint(folder) if checkpoints(folder) else None
    if checkpoint is None and resume == "must":
        raise ConfigError(f"run_dir {folder} has no valid checkpoint and resume='must'; use resume='auto' to start it")
    folder.mkdir(parents=True, exist_ok=True)
    _record_change(folder, known, config)
    write_json(folder / "config.json", config.model_dump(mode="json"))
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "previews").mkdir(exist_ok=True)
    if not (folder / "lineage.json").is_file():
        write_json(folder / "lineage.json", {"created": now(), **lineage, "git": git_state()})
    for scratch in (folder / "checkpoints").glob(".step-*"):
        shutil.rmtree(scratch)
    (folder / "stop").unlink(missing_ok=True)
    (folder / "result.json").unlink(missing_ok=True)
    return checkpoint


def _check_science(folder: Path, known: TrainConfig, config: TrainConfig) -> None:
    before, after = known.science(), config.science()
    changed = [f"{key}: there {before[key]!r}, now {after[key]!r}" for key in before if before[key] != after[key]]
    if changed:
        raise ConfigError(f"run_dir {folder} was made with other settings ({'; '.join(changed)}); give a new run_dir or the old settings")


def _record_change(folder: Path, known: TrainConfig | None, config: TrainConfig) -> None:
    before = known.model_dump(mode="json") if known is not None else {}
    after = config.model_dump(mode="json")
    changes = {key: [before.get(key), value] for key, value in after.items() if before.get(key) != value}
    if known is not None and changes:
        with (folder / "config_history.jsonl").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"time": now(), "changes": changes}) + "\n")


def append_metrics(folder: Path, row: Mapping[str, Any]) -> None:
    """Add one row to `metrics.jsonl`, whole or, where the disk is full, not at all."""
    with (folder / METRICS).open("ab", buffering=0) as lines:
        size = lines.tell()
        try:
            data = (json.dumps(row) + "\n").encode()
            if lines.write(data) != len(data):
                raise OSError(errno.ENOSPC, "a row does not fit on the disk", str(folder / METRICS))
        except OSError:
            lines.truncate(size)
            raise


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole rows of `metrics.jsonl`; a line cut short by a kill is left out."""
    return _read_rows(folder / METRICS)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows += [row] if isinstance(row, dict) and isinstance(row.get("step"), int) else []
    return rows


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    os.replace(scratch, path)


def rewind_metrics(folder: Path, step: int) -> None:
    """Move the rows beyond `step`, which are about to be computed again, and those out of order to `metrics.discarded.jsonl`."""
    kept: list[dict[str, Any]] = []
    discarded: list[dict[str, Any]] = []
    for row in read_metrics(folder):
        in_order = row["step"] <= step and (not kept or row["step"] > kept[-1]["step"])
        (kept if in_order else discarded).append(row)
    if discarded:  # first: a kill between the two files leaves these rows in both, and never in neither
        _write_rows(folder / DISCARDED, _read_rows(folder / DISCARDED) + discarded)
    _write_rows(folder / METRICS, kept)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, valid or not, newest first."""
    there = [path for path in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(there, key=checkpoint_step, reverse=True)


def checkpoint_step(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint folder."""
    return int(checkpoint.name.removeprefix("step-"))


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds beside its tensors.

    Raises:
        ConfigError: it is missing or damaged.
    """
    return _read_table(checkpoint / "state.json")


def is_valid(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint is there with the size and hash of its manifest."""
    return damaged_file(checkpoint) is None


def damaged_file(checkpoint: Path) -> str | None:
    """The first file of a checkpoint that is not what the manifest says, or None where all are."""
    try:
        files = _read_table(checkpoint / "manifest.json")
    except ConfigError:
        return "manifest.json"
    if not {"weights.safetensors", "state.json"} <= set(files) or not all(isinstance(about, dict) for about in files.values()):
        return "manifest.json"
    unfit = (name for fits in (_has_size, _has_hash) for name, about in files.items() if not fits(checkpoint / name, about))
    return next(unfit, None)


def _has_size(path: Path, about: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == about.get("bytes")


def _has_hash(path: Path, about: Mapping[str, Any]) -> bool:
    try:
        return file_hash(path) == about.get("sha256")
    except OSError:  # a disk that cannot give its bytes back
        return False


def find_checkpoint(folder: Path, which: str | int = "latest") -> Path:
    """The newest valid checkpoint of a run folder, or that of one step.

    Raises:
        ConfigError: there is none, with the steps that are there.
    """
    there = checkpoints(folder)
    wanted = [path for path in there if which == "latest" or checkpoint_step(path) == int(which)]
    for checkpoint in wanted:
        if is_valid(checkpoint):
            return checkpoint
    steps = ", ".join(str(checkpoint_step(path)) for path in reversed(there)) or "none"
    broken = f"; not valid: {', '.join(path.name for path in wanted)}" if wanted else ""
    raise ConfigError(f"{folder} has no valid checkpoint {which!r} (steps there: {steps}{broken})")


def stop_requested(folder: Path) -> bool:
    """Whether somebody asked this run to stop after the present step."""
    return (folder / "stop").exists()


def grace_s(folder: Path, asked: float | None) -> float:
    """Seconds that a run gets to stop: those asked for, or else the larger of 60 and three times its last save."""
    if asked is not None:
        return asked
    try:
        last = float(_read_table(folder / LAST_SAVE)["seconds"])
    except (ConfigError, KeyError, TypeError, ValueError):
        last = 0.0
    return max(LEAST_GRACE_S, 3 * last)
