"""The listing of a source on disk: one row a picture, read by row number, so that ranks and passes share one look at the source."""

from __future__ import annotations

import functools
import itertools
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sdlab import columnar, launch, runs, scenes
from sdlab.captions import Caption, error_line
from sdlab.config import SIZE_COLUMNS, ConfigError, hint
from sdlab.items import Broken, Handle, Item, Span, Tally
from sdlab.sources import Source

FOLDER = "index"
ITEMS = "items.arrow"
ABOUT = "source.json"
SHARDS = "shards.jsonl"
CHUNK = 2048
"""Rows of a record batch."""
FIELD = "field."
"""Opens the names of columns with numbers of the metadata."""


class Index:
    """A written listing.

    Attributes:
        about: name, run and parts of the source.
        tallies: what each shard's listing has counted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self.about: dict[str, Any] = json.loads((self.folder / ABOUT).read_text(encoding="utf-8"))
        self._file = pa.ipc.open_file(pa.memory_map(str(self.folder / ITEMS)))

    def __len__(self) -> int:
        return int(self.about["count"])

    @property
    def name(self) -> str:
        """The source as it was understood."""
        return str(self.about["name"])

    @functools.cached_property
    def tallies(self) -> list[dict[str, Any]]:
        """One row a shard, see `items.Tally`."""
        with (self.folder / SHARDS).open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    @property
    def shards(self) -> list[dict[str, Any]]:
        """The tallies of shards in which something was found."""
        return [tally for tally in self.tallies if tally["pictures"] or tally["captions_without_picture"] or tally["ignored"]]

    def items(self, rows: Sequence[int] | np.ndarray) -> Iterator[tuple[int, Item]]:
        """The number of its part and the item of each row, in the order asked for; quick where rows are in order."""
        for row in rows:
            columns = self._chunk(int(row) // CHUNK)
            yield _item({name: values[int(row) % CHUNK] for name, values in columns.items()})

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def _chunk(self, number: int) -> dict[str, list[Any]]:
        return self._file.get_batch(number).to_pydict()

    def fields(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Numbers of the metadata in rows `start` to `stop` of one chunk, float64 by column, NaN where there is none."""
        batch = self._file.get_batch(start // CHUNK).slice(start % CHUNK, stop - start)
        names = [name for name in batch.schema.names if name.startswith(FIELD)]
        return {name.removeprefix(FIELD): batch.column(name).to_numpy(zero_copy_only=False) for name in names}

    def handle(self, part: int, item: Item) -> Handle:
        """Where the bytes of an item lie; those of tables are read here, since rows in order are read together."""
        about = self.about["parts"][part]
        if about["kind"] == "scenes":
            return self._scenes(part)[item.row]
        if about["kind"] in ("parquet", "data set"):
            try:
                return self._table(part).data(item.row)
            except (pa.ArrowException, OSError) as error:
                return Broken(error_line(error))
        root = os.fsencode(about["root"])
        return Span(os.path.join(root, item.file) if item.file else root, item.offset, item.size)

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _scenes(self, part: int) -> list[scenes.Scene]:
        return scenes.draw(self.tallies[part]["pictures"], seed=self.about["seed"])

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def _table(self, part: int) -> columnar.Table:
        about = self.about["parts"][part]
        if about["kind"] == "parquet":
            return columnar.Parquet(Path(about["root"]))
        return columnar.Dataset(columnar.open_dataset(about["root"])[0])


def _item(row: dict[str, Any]) -> tuple[int, Item]:
    caption = Caption(row["caption"], row["note"], tuple(row["marks"].split()))
    problem = (row["reason"], row["detail"]) if row["reason"] else None
    return row["part"], Item(row["path"], caption, row["file"], row["offset"], row["size"], row["row"], problem)


def write(source: Source, folder: Path, *, columns: Sequence[str], seed: int) -> Index:
    """List a source into `folder/index`, with what each shard's listing has counted.

    Raises:
        ConfigError: a metadata file without the column that names its pictures, or a column for a filter that is nowhere.
    """
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    tallies: list[Tally] = []
    part = folder / FOLDER / f"{ITEMS}.partial"
    schema = pa.schema([*_FIXED, *(pa.field(FIELD + name, pa.float64()) for name in columns)])
    with (
        pa.OSFile(str(part), "wb") as sink,
        pa.ipc.new_file(sink, schema) as writer,
        launch.progress(title="List", unit=" pictures") as bar,
    ):
        items = source.items(tallies)
        for rows in iter(lambda: list(itertools.islice(items, CHUNK)), []):
            writer.write_batch(_batch(rows, schema, columns))
            bar.update(len(rows))
    _check_columns([name for name in columns if name not in SIZE_COLUMNS], tallies)
    os.replace(part, folder / FOLDER / ITEMS)
    with (folder / FOLDER / SHARDS).open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps({**vars(tally), "columns": sorted(map(str, tally.columns))}) + "\n" for tally in tallies)
    parts = [{"kind": one.kind, "root": one.root, "source": one.source} for one in source.parts]
    count = sum(tally.pictures for tally in tallies)
    runs.write_json(
        folder / FOLDER / ABOUT,
        {"name": source.name(tallies), "run": uuid.uuid4().hex, "count": count, "seed": seed, "parts": parts},
    )
    return Index(folder)


_FIXED = [
    pa.field("path", pa.string()),
    pa.field("part", pa.int32()),
    pa.field("file", pa.binary()),
    pa.field("offset", pa.int64()),
    pa.field("size", pa.int64()),
    pa.field("row", pa.int64()),
    pa.field("caption", pa.string()),
    pa.field("note", pa.string()),
    pa.field("marks", pa.string()),
    pa.field("reason", pa.string()),
    pa.field("detail", pa.string()),
]


def _batch(rows: Sequence[tuple[int, Item]], schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    values = {
        "path": [item.path for _, item in rows],
        "part": [number for number, _ in rows],
        "file": [item.file for _, item in rows],
        "offset": [item.offset for _, item in rows],
        "size": [item.size for _, item in rows],
        "row": [item.row for _, item in rows],
        "caption": [item.caption.text for _, item in rows],
        "note": [item.caption.note for _, item in rows],
        "marks": [" ".join(item.caption.marks) for _, item in rows],
        "reason": [item.problem[0] if item.problem else "" for _, item in rows],
        "detail": [item.problem[1] if item.problem else "" for _, item in rows],
    } | {FIELD + name: [item.fields.get(name, np.nan) for _, item in rows] for name in columns}
    return pa.RecordBatch.from_arrays([pa.array(values[field.name], field.type) for field in schema], schema=schema)


def _check_columns(columns: Sequence[str], tallies: Sequence[Tally]) -> None:
    known = set().union(*(tally.columns for tally in tallies))
    missing = [name for name in columns if name not in known]
    if missing:
        raise ConfigError(f"filters: no picture has a column {missing[0]!r} in its metadata{hint(missing[0], map(str, known))}")
