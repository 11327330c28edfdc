"""Writing checkpoints: tensor by tensor, renamed into place when whole, read again, and only then are older ones pruned."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdlab import runs

KEEP_CHECKPOINTS = 3
"""The newest valid checkpoints that stay; older ones go once a new one is verified."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_SMALL = 1 << 18
"""Bytes that are hashed sooner than handed to a thread."""
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"},
}


class NoSpace(RuntimeError):
    """A checkpoint does not fit on the disk; those that were there are as they were."""


class DamagedCheckpoint(RuntimeError):
    """A checkpoint read other bytes than were written; it was renamed, so that nobody continues from it."""


class Checkpoints:
    """The checkpoints of one run: each is read again in a thread once it is written, and older ones are pruned after that."""

    def __init__(self, folder: Path, *, keep_every: int = 0) -> None:
        """Checkpoints of the run in `folder`; those of a step that is a multiple of `keep_every` are never pruned (0: none)."""
        self._folder, self._keep_every = folder, keep_every
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._verification: Future[None] | None = None
        self._verified: set[Path] = set()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        gather: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> Path:
        """Write `checkpoints/step-XXXXXXXX/`: one safetensors file a group of tensors, `state.json`, and a manifest of hashes last.

        A valid checkpoint of this step is left as it is. A failed verification of the one before is reported on stderr.

        Args:
            step: optimizer steps done.
            tensors: groups ("weights", "ema", "exp_avg", ...) of tensors by parameter name, whole or in shards.
            state: everything scalar.
            gather: makes one tensor whole; it is called tensor by tensor, in order, and only one result is held at a time.

        Raises:
            NoSpace: it does not fit on the disk.
        """
        started = time.monotonic()
        self._report()
        final = self._folder / "checkpoints" / f"step-{step:08d}"
        if runs.is_valid(final):
            return final
        final.parent.mkdir(parents=True, exist_ok=True)
        needed = _with_spare(sum(_size(tensor) for group in tensors.values() for tensor in group.values()))
        if shutil.disk_usage(final.parent).free <= needed:
            raise _no_space(self._folder, needed)
        with _scratch(final, needed) as scratch:
            size = _write_all(scratch, tensors, {"step": step, **state}, gather)
            _put_in_place(scratch, final)
        self._verification = self._reader.submit(self._verify, final)
        runs.write_json(self._folder / runs.LAST_SAVE, {"step": step, "seconds": time.monotonic() - started, "bytes": size})
        return final

    def wait(self) -> None:
        """Wait until the checkpoint written last is verified.

        Raises:
            DamagedCheckpoint: it is not what was written; told once.
        """
        verification, self._verification = self._verification, None
        if verification is not None:
            verification.result()

    def close(self) -> None:
        """Wait and end the thread.

        Raises:
            DamagedCheckpoint: see `wait`.
        """
        try:
            self.wait()
        finally:
            self._reader.shutdown()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # an error that is on its way matters more
            self._report()
        self.close()

    def _report(self) -> None:
        try:
            self.wait()
        except (DamagedCheckpoint, OSError) as error:
            print(error, file=sys.stderr)

    def _verify(self, checkpoint: Path) -> None:
        damaged = runs.damaged_file(checkpoint)
        if damaged is not None:
            aside = checkpoint.with_name(f".bad-{checkpoint.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(checkpoint, aside)
            raise DamagedCheckpoint(f"{checkpoint / damaged} does not read as it was written; the checkpoint is now called {aside.name}")
        self._verified.add(checkpoint)
        self._prune()

    def _prune(self) -> None:
        kept = 0
        for checkpoint in runs.checkpoints(self._folder):
            if kept < KEEP_CHECKPOINTS:
                kept += self._is_valid(checkpoint)
            elif not self._keep_every or runs.checkpoint_step(checkpoint) % self._keep_every:
                shutil.rmtree(_move_aside(checkpoint))

    def _is_valid(self, checkpoint: Path) -> bool:
        if checkpoint not in self._verified and runs.is_valid(checkpoint):
            self._verified.add(checkpoint)
        return checkpoint in self._verified


def checkpoint_bytes(parameters: int, *, ema: bool) -> int:
    """Bytes of a checkpoint: float32 weights, their two moments and, with `ema`, the moving average."""
    return 4 * parameters * (4 if ema else 3)


def disk_needed(parameters: int, *, ema: bool, steps_left: int, save_every: int, keep_every: int, there: int) -> int:
    """Bytes that the checkpoints of a run still take at most: those that come and go, and milestones that stay.

    Args:
        parameters: that are trained.
        ema: whether a moving average is kept.
        steps_left: optimizer steps until the run is done.
        save_every: optimizer steps between checkpoints; the last step is saved too.
        keep_every: see `Checkpoints`.
        there: checkpoints in the folder.
    """
    passing = max(1, KEEP_CHECKPOINTS + 1 - there)
    milestones = 0
    if keep_every:
        at_saves = math.ceil(steps_left / math.lcm(save_every, keep_every))
        milestones = min(math.ceil(steps_left / keep_every), at_saves + 1)
    return (passing + milestones) * checkpoint_bytes(parameters, ema=ema)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize


def _with_spare(size: int) -> int:
    return size + size // 20 + (16 << 20)


def _no_space(folder: Path, needed: int, reason: str = "") -> NoSpace:
    sizes = f"{shutil.disk_usage(folder).free:,} bytes are free and {needed:,} are needed"
    return NoSpace(f"run_dir {folder} has no space for a checkpoint: {sizes}{reason}; make room and run again, what was saved is untouched")


@contextmanager
def _scratch(final: Path, needed: int) -> Iterator[Path]:
    """A folder to write a checkpoint into, which an error removes.

    Raises:
        NoSpace: the disk, or a quota, is full.
    """
    scratch = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        scratch.mkdir()
        yield scratch
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _FULL:
            raise _no_space(final.parents[1], needed, f" ({error.strerror})") from error
        raise


def _write_all(
    scratch: Path, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], gather: Callable[[Tensor], Tensor]
) -> int:
    """Write all files of a checkpoint, bring each to the disk while the next one is written, and return their bytes."""
    files = {f"{name}.safetensors": _safetensors(group, gather) for name, group in tensors.items()}
    files["state.json"] = iter([_json(state)])
    manifest, syncs = {}, []
    with ThreadPoolExecutor(len(files) + 1) as beside:
        for name, pieces in files.items():
            manifest[name] = _write(scratch / name, pieces, beside)
            syncs.append(beside.submit(_sync, scratch / name))
        for sync in syncs:
            sync.result()
        last = _write(scratch / "manifest.json", [_json(manifest)], beside)
    _sync(scratch / "manifest.json")
    _sync(scratch)
    return sum(about["bytes"] for about in (*manifest.values(), last))


def _json(content: Mapping[str, Any]) -> memoryview:
    return memoryview(f"{json.dumps(content, indent=2)}\n".encode())


def _safetensors(group: Mapping[str, Tensor], gather: Callable[[Tensor], Tensor]) -> Iterator[memoryview]:
    """A safetensors file in pieces: the header's length (8 bytes, little-endian), the header (padded to 8), then tensor by tensor."""
    header, end = {}, 0
    for name, tensor in group.items():
        start, end = end, end + _size(tensor)
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for name, tensor in group.items():
        yield _whole(name, tensor, gather)


def _whole(name: str, tensor: Tensor, gather: Callable[[Tensor], Tensor]) -> memoryview:
    """The bytes of a tensor, which the caller releases.

    Raises:
        ValueError: what `gather` made is not what the header says.
    """
    whole = gather(tensor)
    if (whole.shape, whole.dtype) != (tensor.shape, tensor.dtype):
        raise ValueError(f"{name} is {whole.dtype} {tuple(whole.shape)} once gathered, and was {tensor.dtype} {tuple(tensor.shape)}")
    return whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, pieces: Iterable[memoryview], beside: ThreadPoolExecutor) -> dict[str, Any]:
    """Write a file and hash it, releasing each piece; returns its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=_SMALL) as stream:
        for piece in pieces:
            with _hashed(digest.update, piece, beside):
                stream.write(piece)
            size += piece.nbytes
            piece.release()  # the thread's last reference to it may outlive this round
    return {"bytes": size, "sha256": digest.hexdigest()}


@contextmanager
def _hashed(update: Callable[[memoryview], None], piece: memoryview, beside: ThreadPoolExecutor) -> Iterator[None]:
    """Take a piece into a hash while something else is done with it."""
    if piece.nbytes <= _SMALL:
        update(piece)
        yield
        return
    hashing = beside.submit(update, piece)
    try:
        yield
    finally:
        hashing.result()


def _sync(path: Path) -> None:
    """Bring the bytes of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put_in_place(scratch: Path, final: Path) -> None:
    """Rename a whole checkpoint to its name; an invalid one that has the name goes."""
    invalid = _move_aside(final) if final.exists() else None
    os.replace(scratch, final)
    _sync(final.parent)
    if invalid is not None:
        shutil.rmtree(invalid)


def _move_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that is about to be removed, so that a kill on the way leaves scratch and no half of one."""
    aside = checkpoint.with_name(f".{checkpoint.name}.old.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)
