"""The cache that training reads: VAE moments and text states in memory-mapped Arrow shards, described by `manifest.json`.

A folder of shards is written beside its place and moved there whole; the manifest names it only after that. So what the
manifest names is complete, whatever moment a writer was killed at.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sdlab.config import ConfigError, resolve_path

MANIFEST = "manifest.json"
SCHEMA = "sdlab cache 1"
TEXT = "text"
"""Folder of the text states: one row for each different caption; row 0 is the null condition, the empty caption."""
SHARD_BYTES = 256 << 20


def moments_folder(resolution: int) -> str:
    """Name of the folder that holds one resolution."""
    return f"moments_{resolution}"


class Cache:
    """One resolution of a prepared folder, memory-mapped: opening reads no moments.

    Attributes:
        key: what the rows were made from: file bytes, captions, encoders, size, crop and pixel version.
        manifest: the whole `manifest.json`.
        resolution: pixels a side.
        null_embeds: `prompt_embeds` of the empty caption, float32 (L, D).
        original_size: int32 (N, 2), height and width before any resize.
        crop: int32 (N, 2), top and left in the resized picture.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], resolution: int) -> None:
        entry = manifest["resolutions"][str(resolution)]
        rows, texts = _open_shards(folder / moments_folder(resolution), entry), _open_shards(folder / TEXT, manifest["text"])
        self.folder, self.manifest, self.resolution, self.key = folder, manifest, resolution, str(entry["key"])
        self.original_size, self.crop = (np.concatenate(list(_arrays(rows.column(name), (2,)))) for name in ("original_size", "crop"))
        self._text_ids = rows.column("text").to_numpy()
        self._texts = texts
        self._moments = _Rows(rows.column("moments"), entry["shape"])
        self._embeds = _Rows(texts.column("prompt_embeds"), manifest["text"]["shape"])
        self.null_embeds = torch.from_numpy(self._embeds.take([0])[0]).float()

    def __len__(self) -> int:
        return len(self._text_ids)

    @functools.cached_property
    def captions(self) -> list[str]:
        """Captions in row order; "" where a picture has none."""
        texts = self._texts.column("caption").to_pylist()
        return [texts[index] for index in self._text_ids]

    @functools.cached_property
    def num_tokens(self) -> np.ndarray:
        """Tokens of each row's caption before cutting, start and end included, int32 (N,)."""
        return self._texts.column("num_tokens").to_numpy()[self._text_ids]

    def rows(self, indices: Sequence[int]) -> dict[str, Any]:
        """Rows by index, in the order asked for.

        Returns:
            `moments` float32 (B, 2C, h, w), `prompt_embeds` float32 (B, L, D); int32 arrays `original_size` and `crop` (B, 2).

        Raises:
            IndexError: an index lies outside [0, len).
        """
        index = np.asarray(indices, dtype=np.int64)
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"rows {index.min()} to {index.max()} are asked for; the cache holds 0 to {len(self) - 1}")
        return {
            "moments": torch.from_numpy(self._moments.take(index)).float(),
            "prompt_embeds": torch.from_numpy(self._embeds.take(self._text_ids[index])).float(),
            "original_size": self.original_size[index],
            "crop": self.crop[index],
        }


class _Rows:
    """Random access to a column of fixed-size float16 rows without copying the column."""

    def __init__(self, column: pa.ChunkedArray, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)
        self._chunks = list(_arrays(column, self._shape))
        self._starts = np.cumsum([0, *(len(chunk) for chunk in self._chunks)])

    def take(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        taken = np.empty((len(indices), *self._shape), dtype=np.float16)
        chunks = np.searchsorted(self._starts, indices, side="right") - 1
        for place, (chunk, row) in enumerate(zip(chunks.tolist(), (indices - self._starts[chunks]).tolist(), strict=True)):
            taken[place] = self._chunks[chunk][row]
        return taken


def _arrays(column: pa.ChunkedArray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    for chunk in column.chunks:
        yield chunk.flatten().to_numpy(zero_copy_only=True).reshape(-1, *shape)


def _open_shards(folder: Path, entry: Mapping[str, Any]) -> pa.Table:
    """One memory-mapped table of the shards that the manifest's `entry` lists.

    Raises:
        ConfigError: a shard is missing or of another length.
    """
    for name, size in entry["shards"].items():
        there = (folder / name).stat().st_size if (folder / name).is_file() else None
        if there != size:
            state = "is not there" if there is None else f"has {there:,} bytes, not {size:,}"
            raise ConfigError(f"cache shard {folder / name} {state}; prepare the folder again (notebooks/01_prepare_data.ipynb)")
    try:
        return pa.concat_tables([pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in entry["shards"]])
    except pa.ArrowInvalid as error:
        raise ConfigError(f"a cache shard in {folder} is damaged ({error}); prepare the folder again") from None


def open_cache(data_dir: str | Path, resolution: int) -> Cache:
    """Open one resolution of a folder that `prepare` made.

    Raises:
        ConfigError: the folder, its manifest or this resolution is not there, or a shard is damaged.
    """
    folder = resolve_path(data_dir)
    manifest = read_manifest(folder)
    how = f"make it with notebooks/01_prepare_data.ipynb: data_dir={str(data_dir)!r}, resolution={resolution}"
    if manifest is None:
        raise ConfigError(f"data_dir {folder} holds no prepared data ({MANIFEST} is not there); {how}")
    if str(resolution) not in manifest["resolutions"]:
        there = ", ".join(manifest["resolutions"]) or "none"
        raise ConfigError(f"data_dir {folder} holds resolution {there}, not {resolution}; {how}")
    return Cache(folder, manifest, resolution)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a prepared folder; None where there is none.

    Raises:
        ConfigError: the file is there and is not one of sdlab's.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); give another data_dir, or remove the file to prepare anew") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise ConfigError(f"{path} was not written by this version of sdlab (it has no schema {SCHEMA!r}); give another data_dir")
    return manifest


class ShardWriter:
    """Writes a folder of Arrow shards beside its place; `publish` moves it there.

    Args:
        folder: the place.
        lists: columns of fixed-size rows: their number type, and how many numbers a row holds.
        values: columns of single values: their type.
        shard_bytes: a new shard begins after this many bytes.
    """

    def __init__(
        self, folder: Path, *, lists: Mapping[str, tuple[str, int]], values: Mapping[str, str], shard_bytes: int = SHARD_BYTES
    ) -> None:
        from datasets import Features, List, Value  # takes a second, and reading needs none of it

        self.folder, self.partial, self._shard_bytes = folder, folder.with_name(folder.name + ".partial"), shard_bytes
        self._features = Features(
            {name: List(Value(kind), length=length) for name, (kind, length) in lists.items()}
            | {name: Value(kind) for name, kind in values.items()}
        )
        self._writer: Any = None
        self._count = self._bytes = 0
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def write(self, columns: Mapping[str, Any]) -> None:
        """Add a batch of rows: arrays (B, ...) for lists, sequences of B for single values."""
        schema = self._features.arrow_schema
        table = pa.Table.from_arrays([_column(columns[field.name], field.type) for field in schema], schema=schema)
        if self._writer is None:
            from datasets.arrow_writer import ArrowWriter

            self._writer = ArrowWriter(features=self._features, path=str(self.partial / f"shard-{self._count:05d}.arrow"))
            self._count += 1
        self._writer.write_table(table)
        self._bytes += table.nbytes
        if self._bytes >= self._shard_bytes:
            self._finish_shard()

    def _finish_shard(self) -> None:
        if self._writer is not None:
            self._writer.finalize()
            self._writer, self._bytes = None, 0

    def publish(self) -> dict[str, int]:
        """Move the folder to its place and return the shards' sizes in bytes by name."""
        self._finish_shard()
        remove_shards(self.folder)
        os.rename(self.partial, self.folder)
        return {path.name: path.stat().st_size for path in sorted(self.folder.glob("shard-*.arrow"))}


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(values, kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1), kind.value_type), kind.list_size)


def remove_shards(folder: Path) -> None:
    """Remove a folder of shards if it is there.

    Raises:
        ConfigError: the folder holds something else.
    """
    if not folder.exists():
        return
    others = [path.name for path in folder.iterdir() if not (path.name.startswith("shard-") or path.name == "samples.npz")]
    if others:
        raise ConfigError(f"{folder} has to be replaced, but holds files that sdlab did not write ({others[0]!r}); give another data_dir")
    shutil.rmtree(folder)


def check_disk(folder: Path, needed: int) -> None:
    """Refuse to start writing what will not fit.

    Args:
        folder: where it will be written; need not be there yet.
        needed: bytes.

    Raises:
        ConfigError: less than `needed` and a tenth is free.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    need = f"data_dir {folder} needs about {needed / 1e9:.2f} GB"
    if free < 1.1 * needed:
        raise ConfigError(f"{need} and {free / 1e9:.2f} GB are free there; free some, or give another data_dir")
