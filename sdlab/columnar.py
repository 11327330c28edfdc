"""Tables with the pictures themselves in a column: Parquet files and data sets of Hugging Face."""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from sdlab import captions
from sdlab.config import ConfigError, hint
from sdlab.items import Item, Tally, numbers, problem

IMAGES = ("image", "jpg", "png", "jpeg", "webp", "img", "picture", "image_bytes", "bytes")
"""Columns that are looked at first for the bytes of a picture."""
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
AT_ONCE = 64
"""Rows that are read together."""


class Table(Protocol):
    """A table whose rows hold pictures."""

    def data(self, row: int) -> bytes:
        """The bytes of the picture in a row, empty where there are none; rows asked for in order are read in one go."""


def image_column(schema: pa.Schema) -> str | None:
    """The column that holds pictures as bytes, or as a struct of `bytes` and `path`; None if there is none."""
    return next((name for name in [*IMAGES, *schema.names] if name in schema.names and _holds_bytes(schema.field(name).type)), None)


def _holds_bytes(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _bytes(value: Any) -> bytes:
    """Of a cell as Python holds it."""
    value = value.get("bytes") if isinstance(value, Mapping) else value
    return value if isinstance(value, bytes) else b""


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Rows as Python holds them, text as the bytes that are stored, since not all of it is UTF-8."""
    columns = [column.cast(pa.binary()) if pa.types.is_string(column.type) else column for column in batch.columns]
    columns = [column.cast(pa.large_binary()) if pa.types.is_large_string(column.type) else column for column in columns]
    for values in zip(*(column.to_pylist() for column in columns), strict=True):
        yield dict(zip(batch.schema.names, values, strict=True))


def _items(rows: Iterator[Mapping[str, Any]], label: str, column: str | None, columns: tuple[str, ...], tally: Tally) -> Iterator[Item]:
    for index, row in enumerate(rows):
        tally.columns.update(row)
        caption = captions.from_fields(row, column, where=label)
        yield Item(f"{label}:{index + 1}", caption, row=index, fields=numbers(row, columns))


# Parquet


def holds_pictures(file: Path) -> bool:
    """Whether a Parquet file has a column of pictures; one that cannot be read counts as if, so that it is reported."""
    try:
        with file.open("rb") as opened:
            return image_column(pq.read_schema(opened)) is not None
    except (pa.ArrowException, OSError):
        return True


def read_parquet(file: Path, label: str, column: str | None, columns: tuple[str, ...], tally: Tally) -> Iterator[Item]:
    """Rows of a Parquet file, without reading their pictures."""
    label = captions.label(label)
    try:
        with file.open("rb") as stream, pq.ParquetFile(stream) as opened:
            schema = opened.schema_arrow
            texts = [field.name for field in schema if not _holds_bytes(field.type)]
            batches = opened.iter_batches(columns=texts)
            rows = (row for batch in batches for row in (rows_of(batch) if texts else [{}] * batch.num_rows))
            yield from _items(rows, label, column, columns, tally)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        yield problem(label, "bad_metadata", f"not a Parquet file that can be read: {captions.error_line(error)}")


class Parquet:
    """The pictures of a Parquet file, read a few at a time and in order."""

    def __init__(self, file: Path) -> None:
        self._file = pq.ParquetFile(file.open("rb"))
        self._column = image_column(self._file.schema_arrow) or ""
        groups = [self._file.metadata.row_group(index).num_rows for index in range(self._file.num_row_groups)]
        self._starts = [0, *itertools.accumulate(groups)]
        self._first = self._end = 0

    def _seek(self, row: int) -> None:
        group = bisect.bisect_right(self._starts, row) - 1
        self._end = self._starts[group + 1]
        self._batches = self._file.iter_batches(AT_ONCE, row_groups=[group], columns=[self._column])
        self._read(self._starts[group])

    def _read(self, first: int) -> None:
        if (batch := next(self._batches, None)) is None:
            raise pa.ArrowInvalid(f"the row group ends before row {first + 1}")
        self._first, self._values = first, batch.column(0)

    def data(self, row: int) -> bytes:
        if not self._first <= row < self._end:
            self._seek(row)
        while row >= self._first + len(self._values):
            self._read(self._first + len(self._values))
        return _bytes(self._values[row - self._first].as_py())


# Data sets


def is_saved_dataset(folder: Path) -> bool:
    """Whether a folder is what `datasets` saves to disk."""
    return (folder / "dataset_dict.json").is_file() or ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file())


def open_dataset(given: str) -> tuple[Any, str]:
    """A data set by its folder or hub id, and the name of its split: "train" where there are several.

    Raises:
        ConfigError: it cannot be opened or fetched, has no such split, or no column of pictures.
    """
    import datasets

    try:
        found = datasets.load_from_disk(given) if os.path.isabs(given) else datasets.load_dataset(given)
    except Exception as error:  # the library raises nearly every kind of exception
        told = captions.error_line(error)
        if os.path.isabs(given):
            raise ConfigError(f"source {given!r} looks like a saved data set, and cannot be opened: {told}") from None
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise ConfigError(f"source {given!r} is no path here, and no data set of the hub that can be fetched{offline}: {told}") from None
    splits = dict(found) if isinstance(found, Mapping) else {str(found.split or "all"): found}
    split = "train" if "train" in splits else next(iter(splits), "")
    if len(splits) != 1 and split != "train":
        raise ConfigError(f"source {given!r} has the splits {', '.join(splits) or 'none'} and no 'train'; save the one to take by itself")
    dataset = splits[split].with_format(None)
    if image_column(dataset.data.schema) is None:
        raise ConfigError(f"source {given!r} has no column of pictures{hint('image', dataset.column_names)}")
    return dataset, split


def read_dataset(dataset: Any, label: str, column: str | None, columns: tuple[str, ...], tally: Tally) -> Iterator[Item]:
    """Rows of a data set, without decoding their pictures."""
    schema = dataset.data.schema
    rest = dataset.select_columns([name for name in dataset.column_names if not _holds_bytes(schema.field(name).type)])
    rows = (rest[index] if rest.column_names else {} for index in range(len(dataset)))
    yield from _items(rows, captions.label(label), column, columns, tally)


class Dataset:
    """The pictures of a data set."""

    def __init__(self, dataset: Any) -> None:
        import datasets

        self._column = image_column(dataset.data.schema) or ""
        kind = dataset.features[self._column]
        self._rows = dataset.cast_column(self._column, datasets.Image(decode=False)) if isinstance(kind, datasets.Image) else dataset
        self._rows = self._rows.select_columns([self._column])

    def data(self, row: int) -> bytes:
        return _bytes(self._rows[row][self._column])
