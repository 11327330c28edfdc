"""The run folder: its config and history, metrics, checkpoints and result, each written so that a kill leaves it whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sdlab.config import ConfigError, TrainConfig, build

if TYPE_CHECKING:
    from torch import Tensor

Resume = Literal["auto", "never", "must"]
KEEP_CHECKPOINTS = 3
"""The newest checkpoints that stay; older ones go once a new one is verified."""


def write_json(path: Path, content: Any) -> None:
    """Write JSON whole or not at all."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


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
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no run folder: it has no config.json") from None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is damaged: it holds no table")
    return build(TrainConfig, values, where=str(path))


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
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run_dir {folder} is a file; give a folder")
    known = read_config(folder) if (folder / "config.json").is_file() else None
    if known is None and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"run_dir {folder} holds other files and no config.json; give a new or empty folder")
    if known is not None and resume == "never":
        raise ConfigError(f"run_dir {folder} is in use and resume='never'; give a new folder, or resume='auto' to continue it")
    if known is not None:
        _check_science(folder, known, config)
    checkpoint = find_checkpoint(folder) if any(_checkpoints(folder)) else None
    if checkpoint is None and resume == "must":
        raise ConfigError(f"run_dir {folder} has no valid checkpoint and resume='must'; use resume='auto' to start it")
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    (folder / "previews").mkdir(exist_ok=True)
    _record_change(folder, known, config)
    write_json(folder / "config.json", config.model_dump(mode="json"))
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
    """Add one row to `metrics.jsonl`."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All whole rows of `metrics.jsonl`; a line cut short by a kill is left out."""
    path = folder / "metrics.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows += [row] if isinstance(row, dict) and "step" in row else []
    return rows


def rewind_metrics(folder: Path, step: int) -> None:
    """Move the rows beyond `step` to `metrics.discarded.jsonl`: they are about to be computed again."""
    rows = read_metrics(folder)
    beyond = [row for row in rows if row["step"] > step]
    if beyond:
        with (folder / "metrics.discarded.jsonl").open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in beyond)
    scratch = folder / ".metrics.jsonl"
    scratch.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step), encoding="utf-8")
    os.replace(scratch, folder / "metrics.jsonl")


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Path:
    """Write `checkpoints/step-XXXXXXXX/`: one safetensors file a group of tensors, `state.json`, and a manifest of hashes last.

    Args:
        folder: the run folder.
        step: optimizer steps done.
        tensors: groups ("weights", "ema", "exp_avg", ...) of tensors by parameter name.
        state: everything scalar.
    """
    from safetensors.torch import save_file

    final = folder / "checkpoints" / f"step-{step:08d}"
    scratch = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for name, group in tensors.items():
        save_file({key: tensor.detach().contiguous().cpu() for key, tensor in group.items()}, scratch / f"{name}.safetensors")
    write_json(scratch / "state.json", {"step": step, **state})
    files = {path.name: {"bytes": path.stat().st_size, "sha256": file_hash(path)} for path in sorted(scratch.iterdir())}
    write_json(scratch / "manifest.json", files)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(scratch, final)
    _prune(folder)
    return final


def _prune(folder: Path) -> None:
    there = sorted(_checkpoints(folder), key=checkpoint_step, reverse=True)
    oldest = [path for path in there[: 2 * KEEP_CHECKPOINTS] if is_valid(path)][:KEEP_CHECKPOINTS][-1:]
    for old in there[there.index(oldest[0]) + 1 :] if oldest else []:
        shutil.rmtree(old)


def _checkpoints(folder: Path) -> list[Path]:
    return [path for path in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]


def checkpoint_step(checkpoint: Path) -> int:
    """Optimizer steps behind a checkpoint folder."""
    return int(checkpoint.name.removeprefix("step-"))


def is_valid(checkpoint: Path) -> bool:
    """Whether every file of a checkpoint is there with the size and hash of its manifest."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(files, dict) or not {"weights.safetensors", "state.json"} <= set(files):
        return False
    paths = {checkpoint / name: wanted for name, wanted in files.items()}
    sizes_fit = all(path.is_file() and path.stat().st_size == wanted["bytes"] for path, wanted in paths.items())
    return sizes_fit and all(file_hash(path) == wanted["sha256"] for path, wanted in paths.items())


def find_checkpoint(folder: Path, which: str | int = "latest") -> Path:
    """The newest valid checkpoint of a run folder, or that of one step.

    Raises:
        ConfigError: there is none, with the steps that are there.
    """
    there = sorted(_checkpoints(folder), key=checkpoint_step, reverse=True)
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
