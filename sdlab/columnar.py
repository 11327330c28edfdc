"""Tables with the pictures themselves in a column: Parquet files and data sets of Hugging Face."""

from __future__ import annotations

import bisect
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
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
UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError, KeyError)
"""What reading a damaged or odd table raises."""


class Table(Protocol):
    """A table whose rows hold pictures."""

    def data(self, row: int) -> bytes:
        """The bytes of the picture in a row, empty where there are none; rows asked for in order are read in one go."""


def image_column(schema: pa.Schema) -> str | None:
    """The column that holds pictures as bytes, or as a struct of `bytes` and `path`; None if there is none."""
    fields = {field.name: field for field in schema}
    named = next((name for name in IMAGES if name in fields and _holds_bytes(fields[name].type)), None)
    return named or next((name for name, field in fields.items() if pa.types.is_struct(field.type) and _holds_bytes(field.type)), None)


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


def wanted(names: Sequence[str], column: str | None, columns: Sequence[str], *others: str) -> list[str]:
    """The columns that listing needs: captions, numbers, and others by name.

    Raises:
        ValueError: one of them is there twice.
    """
    asked = [*others, *((column,) if column else captions.FIELDS), *columns]
    twice = [name for name in asked if names.count(name) > 1]
    if twice:
        raise ValueError(f"there are {list(names).count(twice[0])} columns named {twice[0]!r}")
    return [name for name in dict.fromkeys(asked) if name in names]


def _items(
    rows: Iterator[Mapping[str, Any]], count: int, label: str, column: str | None, columns: tuple[str, ...], names: Sequence[str]
) -> Iterator[Item]:
    """Rows of a table as items; where they cannot be read any further, each of the rest as one that says so."""
    done = 0
    try:
        for row in rows:
            caption = captions.from_fields(row or dict.fromkeys(names), column, where=label)
            yield Item(f"{label}:{done + 1}", caption, row=done, fields=numbers(row, columns))
            done += 1
    except UNREADABLE as error:
        for row_number in range(done, count):
            yield problem(f"{label}:{row_number + 1}", "bad_metadata", f"this row cannot be read: {captions.error_line(error)}")


# Parquet


def holds_pictures(file: Path) -> bool:
    """Whether a Parquet file has a column of pictures; one that cannot be read counts as if, so that it is reported."""
    try:
        with file.open("rb") as opened:
            return image_column(pq.read_schema(opened)) is not None
    except UNREADABLE:
        return True


def read_parquet(file: Path, label: str, column: str | None, columns: tuple[str, ...], tally: Tally) -> Iterator[Item]:
    """Rows of a Parquet file, without reading their pictures."""
    label = captions.label(label)
    try:
        with file.open("rb") as stream, pq.ParquetFile(stream) as opened:
            names = opened.schema_arrow.names
            tally.columns.update(names)
            needed = wanted(names, column, columns)
            batches = opened.iter_batches(16 * AT_ONCE, columns=needed)
            rows = (row for batch in batches for row in (rows_of(batch) if needed else [{}] * batch.num_rows))
            yield from _items(rows, opened.metadata.num_rows, label, column, columns, names)
    except UNREADABLE as error:
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
    tally.columns.update(dataset.column_names)
    needed = wanted(dataset.column_names, column, columns)
    tables = dataset.select_columns(needed).with_format("arrow").iter(16 * AT_ONCE) if needed else iter(())
    rows = (row for table in tables for batch in table.to_batches() for row in rows_of(batch)) if needed else iter([{}] * len(dataset))
    yield from _items(rows, len(dataset), captions.label(label), column, columns, dataset.column_names)


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
