"""One picture of a source as it is listed, before anything is opened, and what listing a shard has counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sdlab import captions
from sdlab.captions import Caption, number, one_line
from sdlab.scenes import Scene

PICTURES = frozenset(
    {".png", ".apng", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".heif", ".jp2"}
    | {".ppm", ".pgm", ".tga", ".ico", ".psd"}
)
"""Suffixes of files that are taken for pictures; what Pillow cannot read of them is quarantined."""
EXAMPLES = 5
"""Names of what was passed over that a tally keeps."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file."""

    path: bytes
    offset: int
    size: int
    """-1 for all."""

    def length(self) -> int:
        """How many they are."""
        return self.size if self.size >= 0 else os.stat(self.path).st_size - self.offset

    def read(self) -> bytes:
        """All of them, as far as the file goes."""
        with open(self.path, "rb") as handle:
            handle.seek(self.offset)
            return handle.read(self.size)


@dataclass(frozen=True, slots=True)
class Broken:
    """Bytes that could not be read out of a table, and why."""

    detail: str


Handle = Span | Scene | bytes | Broken
"""What a worker process needs to come at the pixels of a picture."""


@dataclass(frozen=True, slots=True)
class Item:
    """One picture: a label, its caption, and where its bytes lie."""

    path: str
    """Relative to the root; tar members as `shard.tar::member`, rows of a table as `file.parquet:row`. A label, never opened."""
    caption: Caption
    file: bytes = b""
    """Path of the file with its bytes, below the root; empty for the root itself."""
    offset: int = 0
    size: int = -1
    """Bytes from `offset`; -1 for all."""
    row: int = -1
    """Of a table or of the scenes."""
    problem: tuple[str, str] | None = None
    """Reason and detail of what is wrong already before the picture is opened."""
    fields: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the metadata holds, by column, NaN where there is none."""


def problem(path: str, reason: str, detail: str, **place: Any) -> Item:
    """An item that cannot be used."""
    told = one_line(detail)[:400]
    return Item(path, Caption(None, told), problem=(reason, told), **place)


def numbers(row: Mapping[str, Any], columns: tuple[str, ...]) -> dict[str, float]:
    """The wanted columns of a metadata row."""
    return {column: number(row.get(column)) for column in columns}


@dataclass
class Tally:
    """What the listing of one shard (a tar, a folder, a table) has found."""

    shard: str
    pictures: int = 0
    captions: int = 0
    pictures_without_caption: int = 0
    captions_without_picture: int = 0
    duplicates: int = 0
    unreadable: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    """Files and members that are no pictures or captions, by suffix or kind."""
    examples: list[str] = field(default_factory=list)
    """Some names of captions without a picture and of what was ignored."""
    columns: set[str] = field(default_factory=set)
    """Names of metadata columns that were seen."""

    def count(self, item: Item) -> Item:
        """Take note of an item and pass it on."""
        self.pictures += 1
        if item.problem is None:
            self.captions += item.caption.text is not None
            self.pictures_without_caption += item.caption.text is None
        elif item.problem[0] == "duplicate_member":
            self.duplicates += 1
        else:
            self.unreadable += 1
        return item

    def orphan(self, name: str) -> None:
        """Take note of a caption that belongs to no picture."""
        self.captions_without_picture += 1
        self._example(name)

    def ignore(self, kind: str, name: str) -> None:
        """Take note of something that is passed over."""
        self.ignored[kind] += 1
        self._example(name)

    def numbers_beside(self, texts: Mapping[str, bytes | None], columns: tuple[str, ...]) -> dict[str, float]:
        """The wanted columns of the .json file among the texts of a picture, by suffix; its names are taken note of."""
        data = texts.get(".json") if columns else None
        row = captions.parse_json(captions.decode(data)[0]) if data else None
        self.columns.update(row or ())
        return numbers(row or {}, columns)

    def _example(self, name: str) -> None:
        if len(self.examples) < EXAMPLES:
            self.examples.append(name)


def kind_of(name: str) -> str:
    """How a file that is passed over is counted: hidden, or its suffix."""
    base = os.path.basename(name)
    return "hidden" if base.startswith(".") else os.path.splitext(base)[1].lower() or "no suffix"


@dataclass(frozen=True)
class Part:
    """One shard of a source: what it is, where it lies, and how to list it."""

    kind: str
    """"webdataset", "image folder", "parquet", "data set" or "scenes"."""
    root: str
    """Where it lies: a path, a hub id, or nothing for scenes."""
    label: str
    """Its name as it opens the labels of its pictures."""
    source: str
    """What was given, of which it is a part."""
    read: Callable[[Tally], Iterator[Item]]
    note: str = ""
    """What a person should know about how it was understood."""
