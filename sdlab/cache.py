"""The cache that training reads: VAE moments and text states in memory-mapped Arrow shards, described by `manifest.json`.

A shard never changes: it is named after what it holds, written beside its place and moved there whole. The manifest names
shards only once they are all there, and is replaced in one step. So what the manifest names is complete, whatever moment a
writer was killed at, and what an earlier manifest named can be taken over row by row.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import socket
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from sdlab import runs
from sdlab.config import ConfigError, resolve_path

MANIFEST = "manifest.json"
SCHEMA = "sdlab cache 3"
TEXT = "text"
"""Folder of the text shards: different captions and what the text encoder says; the first shard is the null condition alone."""
ROWS = 2048
"""Rows of a full shard: the most work that a kill costs."""
CHUNK = 64
"""Rows of a record batch in a shard."""
MAPPED = 8192
"""Shards that are mapped at a time; a Linux process may have 65,530 maps."""
KEY = np.dtype("V16")
"""Names what a row was made from."""
PLACES = {name: np.dtype((np.int32, (2,))) for name in ("original_size", "crop", "text")}
"""Columns beside the moments: height and width, top and left, and where the caption is: shard and row."""
OURS = re.compile(r"[0-9a-f]{32}\.(arrow|json)|samples-[0-9a-f]{16}\.npz")
"""Names of files that are written beside shards."""
LEFT = re.compile(r"[0-9a-f]{32}\..+\.partial|\.[0-9a-f]{32}\.json\.\d+|samples-[0-9a-f]{16}\.npz\.partial\.npz")
"""Names of files that a killed writer leaves."""


def moments_folder(resolution: int) -> str:
    """Name of the folder that holds one resolution."""
    return f"moments_{resolution}"


@dataclass(frozen=True)
class Bucket:
    """Rows of one shape: pixels and latents, and which rows of the cache they are."""

    height: int
    width: int
    first: int
    count: int


class Cache:
    """One resolution of a prepared folder: opening reads no shards, and each is checked by its hash and mapped when it is first asked for.

    Attributes:
        key: what the rows were made from: file bytes, captions, encoders, shapes, crops and pixel version.
        manifest: the whole `manifest.json`.
        resolution: pixels a side of a square with the area of all pictures.
        buckets: rows by shape, one bucket for square pictures.
        text_widths: width of each text encoder's states, which lie side by side along D.
        null: what stands for no caption: `input_ids` int64 (1, E x L), and where text states were cached `prompt_embeds` float32 (1, L, D)
            and, of two encoders, `pooled_prompt_embeds` float32 (1, P).
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], resolution: int) -> None:
        entry, text = manifest["resolutions"][str(resolution)], manifest["text"]
        self.folder, self.manifest, self.resolution, self.key = folder, manifest, resolution, str(entry["key"])
        starts = np.cumsum([0, *(bucket["count"] for bucket in entry["buckets"])]).tolist()
        self.buckets = tuple(
            Bucket(bucket["height"], bucket["width"], first, bucket["count"])
            for bucket, first in zip(entry["buckets"], starts, strict=False)
        )
        check_sizes(folder, manifest, resolution)
        place = folder / moments_folder(resolution)
        columns = [{"moments": np.dtype((np.float16, tuple(bucket["shape"]))), **PLACES} for bucket in entry["buckets"]]
        self._shards = _Shards(
            [(place, shard, names) for bucket, names in zip(entry["buckets"], columns, strict=True) for shard in bucket["shards"]]
        )
        self._starts = np.cumsum([0, *(shard["rows"] for shard in moment_shards(manifest, resolution))])
        self._bucket_starts = np.array(starts)
        self.has_text_states = bool(text["states"])
        self.text_widths = tuple(text["widths"])
        self._states = {"prompt_embeds": np.dtype((np.float16, (text["length"], sum(self.text_widths))))} if self.has_text_states else {}
        if self.has_text_states and text["pooled_width"]:
            self._states["pooled_prompt_embeds"] = np.dtype((np.float16, (text["pooled_width"],)))
        texts = {"input_ids": np.dtype((np.int32, (text["length"] * len(self.text_widths),))), **self._states}
        self._texts = _Shards([(folder / TEXT, shard, texts) for shard in text["shards"]])
        self.null = _as_tensors(self._texts.take(list(texts), np.array([0]), np.array([0])))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def bucket(self, row: int) -> Bucket:
        """The bucket that a row belongs to."""
        return self.buckets[int(np.searchsorted(self._bucket_starts, row, side="right")) - 1]

    def shard_rows(self, bucket: Bucket) -> list[range]:
        """Rows of a bucket by shard: rows that lie together on disk."""
        inside = [(int(a), int(b)) for a, b in zip(self._starts[:-1], self._starts[1:], strict=True)]
        return [range(a, b) for a, b in inside if bucket.first <= a < bucket.first + bucket.count]

    def rows(self, indices: Sequence[int] | np.ndarray) -> dict[str, Any]:
        """Rows by index, in the order asked for; all of one bucket.

        Returns:
            `moments` float32 (B, 2C, h, w); `prompt_embeds` float32 (B, L, D) and, of two text encoders, `pooled_prompt_embeds`
            float32 (B, P), or, where text states were not cached, `input_ids` int64 (B, E x L); int32 arrays `original_size`, `crop` and
            `target_size` (B, 2): height and width, or top and left.

        Raises:
            IndexError: an index lies outside [0, len).
            ValueError: rows of different shapes.
        """
        index, shards, rows = self._find(indices)
        bucket = self.bucket(int(index[0])) if index.size else self.buckets[0]
        if index.size and not (index.min() >= bucket.first and index.max() < bucket.first + bucket.count):
            raise ValueError("rows of different buckets are asked for together; their shapes differ")
        taken = self._shards.take(["moments", *PLACES], shards, rows)
        return {
            "moments": torch.from_numpy(taken["moments"]).float(),
            **_as_tensors(self._texts.take(list(self._states) or ["input_ids"], *taken["text"].T)),
            "original_size": taken["original_size"],
            "crop": taken["crop"],
            "target_size": np.tile(np.array([bucket.height, bucket.width], np.int32), (len(index), 1)),
        }

    def captions(self, indices: Sequence[int] | range) -> list[str]:
        """Captions of rows, "" where a picture has none.

        Raises:
            IndexError: an index lies outside [0, len).
        """
        _, shards, rows = self._find(indices)
        text = self._shards.take(["text"], shards, rows)["text"]
        return [str(read_shard(self._texts.paths[shard]).column("caption")[row]) for shard, row in text.tolist()]

    def keys(self, indices: Sequence[int] | np.ndarray) -> list[str]:
        """What names the picture, crop and caption of each row, in hexadecimal."""
        _, shards, rows = self._find(indices)
        return [keys_of(read_shard(self._shards.paths[shard]))[row].tobytes().hex() for shard, row in zip(shards, rows, strict=True)]

    def _find(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows of the cache, and of each the shard and the row there."""
        index = np.asarray(indices, dtype=np.int64)
        if index.size and not (index.min() >= 0 and index.max() < len(self)):
            raise IndexError(f"rows {index.min()} to {index.max()} are asked for; the cache holds 0 to {len(self) - 1}")
        shards = np.searchsorted(self._starts, index, side="right") - 1
        return index, shards, index - self._starts[shards]


def _as_tensors(columns: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """float32 of float16, and int64 of int32."""
    tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
    return {name: tensor.float() if tensor.is_floating_point() else tensor.long() for name, tensor in tensors.items()}


class _Shards:
    """Random access to the columns of numbers of many shards, of which a limited number is mapped at a time.

    Args:
        files: the folder and the description of each shard, and what a row of each of its columns is.
    """

    def __init__(self, files: Sequence[tuple[Path, Mapping[str, Any], Mapping[str, np.dtype[Any]]]]) -> None:
        self.paths = [folder / shard["name"] for folder, shard, _ in files]
        self._columns = [columns for _, _, columns in files]
        self._open = functools.lru_cache(MAPPED)(lambda number: _map(*files[number]))

    def take(self, names: Sequence[str], shards: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Rows of some columns, each by the number of its shard and its row there."""
        columns = {name: self._columns[shards[0] if len(shards) else 0][name] for name in names}
        pieces: dict[str, list[memoryview]] = {name: [] for name in names}
        sizes = [(name, column.itemsize, pieces[name].append) for name, column in columns.items()]
        for shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
            data, starts = self._open(shard)
            chunk, place = divmod(row, CHUNK)
            for name, size, append in sizes:
                start = starts[name][chunk] + place * size
                append(data[start : start + size])
        return {
            name: np.frombuffer(bytearray().join(pieces[name]), column.base).reshape(len(shards), *column.shape)
            for name, column in columns.items()
        }


def _map(folder: Path, shard: Mapping[str, Any], columns: Iterable[str]) -> tuple[memoryview, dict[str, array[int]]]:
    """The bytes of a shard, and for each column where each of its chunks begins.

    Raises:
        ConfigError: it is not byte for byte what was written.
    """
    path = folder / shard["name"]
    if runs.file_hash(path) != shard["sha256"]:
        raise ConfigError(f"cache shard {path} has other content than when it was written; prepare the folder again")
    data, table = _read(path)
    values = {name: [chunk.flatten().buffers()[1] for chunk in table.column(name).chunks] for name in columns}
    return memoryview(data), {name: array("q", [one.address - data.address for one in chunks]) for name, chunks in values.items()}


def read_shard(path: Path) -> pa.Table:
    """A shard as a memory-mapped table.

    Raises:
        ConfigError: it is not there or damaged.
    """
    return _read(path)[1]


def _read(path: Path) -> tuple[pa.Buffer, pa.Table]:
    """The bytes of a shard and the table that lies in them."""
    try:
        with pa.memory_map(str(path)) as mapped:
            data = mapped.read_buffer()
        return data, pa.ipc.open_stream(data).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"cache shard {path} is damaged ({' '.join(str(error).split())[:200]}); prepare the folder again") from None


def shards_of(manifest: Mapping[str, Any], resolution: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Folder and description of each shard that one resolution needs."""
    yield from ((TEXT, shard) for shard in manifest["text"]["shards"])
    yield from ((moments_folder(resolution), shard) for shard in moment_shards(manifest, resolution))


def moment_shards(manifest: Mapping[str, Any], resolution: int) -> list[dict[str, Any]]:
    """Descriptions of the shards of one resolution, none where the manifest does not name it."""
    entry = manifest["resolutions"].get(str(resolution), {"buckets": []})
    return [shard for bucket in entry["buckets"] for shard in bucket["shards"]]


def check_sizes(folder: Path, manifest: Mapping[str, Any], resolution: int) -> None:
    """Make sure that every shard is there in its length.

    Raises:
        ConfigError: one is not.
    """
    there = {
        place: {entry.name: entry.stat().st_size for entry in os.scandir(folder / place)} if (folder / place).is_dir() else {}
        for place in (TEXT, moments_folder(resolution))
    }
    for place, shard in shards_of(manifest, resolution):
        path, size = folder / place / shard["name"], there[place].get(shard["name"])
        state = "is not there" if size is None else f"has {size:,} bytes, not {shard['bytes']:,}" if size != shard["bytes"] else ""
        if state:
            raise ConfigError(f"cache shard {path} {state}; prepare the folder again (notebooks/01_prepare_data.ipynb)")


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
    """The manifest of a prepared folder, None where there is none.

    Raises:
        ConfigError: the file is damaged, or of another version or program.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); give another data_dir") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        raise ConfigError(f"{path} was not written by this version of sdlab (it has no schema {SCHEMA!r}); give another data_dir")
    if not isinstance(manifest.get("resolutions"), dict) or not isinstance(manifest.get("text"), dict):
        raise ConfigError(f"{path} is damaged (it names no resolutions or texts); remove it, and prepare again")
    return manifest


# Writing


def write_shard(folder: Path, name: str, batches: Iterator[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """Write one shard and, last, `NAME.json`, without which it does not count.

    Args:
        folder: where.
        name: without suffix.
        batches: `CHUNK` rows each, the last one fewer: arrays (B, n) of numbers, V16 keys (B,), or lists of text.
        about: what to say of it besides rows, bytes and hash; looked at after the last batch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.arrow"
    scratch = folder / f"{name}.{socket.gethostname()}.{os.getpid()}.partial"
    rows, writer = 0, None
    try:
        with pa.OSFile(str(scratch), "wb") as sink:
            for columns in batches:
                batch = pa.RecordBatch.from_pydict({column: _column(values) for column, values in columns.items()})
                writer = writer or pa.ipc.new_stream(sink, batch.schema)
                writer.write_batch(batch)
                rows += batch.num_rows
            assert writer is not None
            writer.close()
        with scratch.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    runs.write_json(folder / f"{name}.json", {"name": path.name, "rows": rows, **_measure(path), **about})


def _measure(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": runs.file_hash(path)}


def _column(values: Any) -> pa.Array:
    if not isinstance(values, np.ndarray):
        return pa.array(values)
    if values.dtype == KEY:
        return pa.array([key.tobytes() for key in values], pa.binary(16))
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), flat.shape[1])


def find_shard(folder: Path, name: str, *, hashes: bool = True) -> dict[str, Any] | None:
    """What is said of a shard that is there whole, None where it is not."""
    try:
        about = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        path = folder / f"{name}.arrow"
        whole = about["name"] == path.name and path.stat().st_size == about["bytes"]
        whole = whole and (not hashes or (runs.file_hash(path) == about["sha256"] and read_shard(path).num_rows == about["rows"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return about if whole else None


def whole_shards(folder: Path) -> list[str]:
    """Names of all shards in a folder that are there byte for byte, whether or not a manifest names them."""
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [path.stem for path in paths if OURS.fullmatch(path.name) and find_shard(folder, path.stem) is not None]


class Old:
    """Rows of earlier shards by key, wherever in a folder they lie."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._tables = [read_shard(folder / f"{name}.arrow") for name in names]
        keys = [keys_of(table) for table in self._tables]
        together = np.concatenate([np.empty(0, KEY), *keys])
        self._starts = np.cumsum([0, *map(len, keys)])
        self._order = np.argsort(together)
        self._keys = together[self._order]

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The place of each key, -1 for one that is nowhere: int64 (N,)."""
        if not len(self._keys):
            return np.full(len(keys), -1)
        place = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        return np.where(self._keys[place] == keys, self._order[place], -1)

    def row(self, place: int, columns: Sequence[str]) -> dict[str, Any]:
        """Some columns of a row: numbers as arrays (n,), text as text."""
        number = int(np.searchsorted(self._starts, place, side="right")) - 1
        table, row = self._tables[number], int(place - self._starts[number])
        return {name: _cell(table.column(name), row) for name in columns}


def _cell(column: pa.ChunkedArray, row: int) -> Any:
    chunk = column.chunk(row // CHUNK)
    if pa.types.is_fixed_size_list(column.type):
        return chunk[row % CHUNK].values.to_numpy(zero_copy_only=True)
    return chunk[row % CHUNK].as_py()


def keys_of(table: pa.Table) -> np.ndarray:
    """The column `key` of a shard: V16 (N,)."""
    return np.frombuffer(b"".join(table.column("key").to_pylist()), KEY)


def sweep(folder: Path, keep: set[str]) -> None:
    """Remove shards of a folder that no manifest names, and what a killed writer left; other files stay."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if LEFT.fullmatch(path.name) or (OURS.fullmatch(path.name) and not {path.name, path.stem} & keep):
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


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
