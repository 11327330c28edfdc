"""Small pictures, tars, tables and folders, and what is listed of them.

Worker processes of tests import this, so what takes long to import is imported where it is used.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from sdlab.index import Index
    from sdlab.items import Item, Tally

RED = (255, 0, 0)


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(side: int = 8) -> bytes:
    """The file of a red square."""
    return encoded(Image.new("RGB", (side, side), RED))


def noise(seed: int = 0, width: int = 8, height: int = 8) -> Image.Image:
    """An RGB picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def write_tar(path: Path, members: dict[str, bytes], *again: tuple[str, bytes]) -> Path:
    """A tar of these members, then of others that may have the same names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in [*members.items(), *again]:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_files(root: Path, files: dict[str, bytes | str]) -> Path:
    """A folder of these files."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def parquet(columns: dict[str, Any], **options: Any) -> bytes:
    """A Parquet file of these columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, **options)
    return sink.getvalue().to_pybytes()


def listing(given: Any, **options: Any) -> tuple[list[Item], str, list[Tally]]:
    """The items of a source, its name, and what each part has counted."""
    from sdlab import sources

    source, tallies = sources.open_source(given, **options), []
    items = [item for _, item in source.items(tallies)]
    return items, source.name(tallies), tallies


def items_of(given: Any, **options: Any) -> dict[str, Item]:
    """The items of a source by their labels, which have to differ."""
    items = listing(given, **options)[0]
    assert len({item.path for item in items}) == len(items)
    return {item.path: item for item in items}


def captions_of(given: Any, **options: Any) -> dict[str, str | None]:
    """The captions of a source by label."""
    return {path: item.caption.text for path, item in items_of(given, **options).items()}


def indexed(given: Any, folder: Path, columns: tuple[str, ...] = (), **options: Any) -> Index:
    """A source, listed into `folder`."""
    from sdlab import index, sources

    source = sources.open_source(given, columns=columns, **options)
    return index.write(source, folder, columns=columns, seed=options.get("seed", 0))


def bytes_of(listed: Index, rows: Any = None) -> list[Any]:
    """What the handles of rows lead to, in the order asked for: bytes, or a scene."""
    handles = [listed.handle(part, item) for part, item in listed.items(range(len(listed)) if rows is None else rows)]
    return [handle.read() if hasattr(handle, "read") else handle for handle in handles]


def check_hashes(folder: Path, manifest: dict[str, Any], resolution: int) -> None:
    """Every shard that the manifest names is there byte for byte."""
    from sdlab import cache, runs

    for place, shard in cache.shards_of(manifest, resolution):
        assert runs.file_hash(folder / place / shard["name"]) == shard["sha256"]
