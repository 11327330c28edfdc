"""What the text that comes with a picture becomes: one line, whatever its encoding.

The policy: UTF-8 with or without BOM, UTF-16, else Windows-1252; NULs and every run of white space, line breaks too, become one
space. What was not plain is marked, so that it can be counted. Captions are hostile: none of this raises.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

SIDECARS = (".txt", ".caption", ".json")
"""Suffixes of files with the caption of the picture of the same name, the first that is not empty wins."""
FIELDS = ("caption", "text")
"""Fields of JSON, metadata and tables that hold a caption unless `caption_column` names another."""
MAX_BYTES = 1 << 20
"""Longest caption file that is read."""
NEWLINES = "each run of white space, line breaks too, is one space"
MARKS = ("caption_cp1252", "caption_nul", "caption_line_breaks")


@dataclass(frozen=True, slots=True)
class Caption:
    """One line of text, "" for an empty caption, None for none; why there is none; and which of `MARKS` apply."""

    text: str | None
    note: str = ""
    marks: tuple[str, ...] = ()


def decode(data: bytes) -> tuple[str, tuple[str, ...]]:
    """Text of a file, and the mark of Windows-1252 where it is neither UTF-8 nor UTF-16."""
    try:
        encoding = _unicode(data)
        return data[: len(data) // 2 * 2 if encoding.startswith("utf-16") else None].decode(encoding), ()
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace"), ("caption_cp1252",)


def _unicode(data: bytes) -> str:
    """UTF-32 and UTF-16 by their BOM, UTF-16 also by NULs in one half of at least every second pair of bytes; else UTF-8."""
    if data.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")) and len(data) % 4 == 0:
        return "utf-32"
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = data[0::2].count(0), data[1::2].count(0)
    if len(data) % 2 == 0 and max(even, odd) > len(data) / 4 and min(even, odd) == 0:
        return "utf-16-le" if odd else "utf-16-be"
    return "utf-8-sig"


def one_line(text: str) -> str:
    """A caption as it is kept: NULs and runs of white space become one space, lone surrogates "?"."""
    return " ".join(text.replace("\0", " ").split()).encode("utf-8", "replace").decode("utf-8")


def clean(text: str, marks: tuple[str, ...] = ()) -> Caption:
    """Text as a caption."""
    marks += ("caption_nul",) * ("\0" in text)
    marks += ("caption_line_breaks",) * (len(text.strip().splitlines()) > 1)
    return Caption(one_line(text), "", marks)


def from_files(texts: Mapping[str, bytes | None], column: str | None) -> Caption:
    """The first caption that is not empty.

    Args:
        texts: contents by suffix, of `SIDECARS`; None for a file beyond `MAX_BYTES`.
        column: the field of .json to take; where one is asked for, only .json counts.
    """
    suffixes = SIDECARS if column is None else (".json",)
    return first([_from_file(suffix, texts[suffix], column) for suffix in suffixes if suffix in texts])


def first(found: Sequence[Caption]) -> Caption:
    """The first that holds text, else an empty one, else none with all their notes."""
    captions = [caption for caption in found if caption.text is not None]
    for caption in captions:
        if caption.text:
            return caption
    return captions[0] if captions else Caption(None, "; ".join(caption.note for caption in found))


def _from_file(suffix: str, data: bytes | None, column: str | None) -> Caption:
    if data is None:
        return Caption(None, f"the {suffix} file cannot be read or is longer than {MAX_BYTES:,} bytes")
    text, marks = decode(data)
    if suffix != ".json":
        return clean(text, marks)
    fields = parse_json(text)
    return Caption(None, "the .json file is not a JSON object") if fields is None else from_fields(fields, column, where="the .json file")


def parse_json(text: str) -> dict[str, Any] | None:
    """The JSON object that a text holds, None where it holds none."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def from_fields(fields: Mapping[str, Any], column: str | None, *, where: str) -> Caption:
    """The caption in a row of fields: the one named `column`, else of `FIELDS`."""
    wanted = [name for name in ((column,) if column else FIELDS) if name in fields]
    if not wanted:
        there = ", ".join(one_line(str(known))[:40] for known in list(fields)[:20]) or "none"
        return Caption(None, f"{where} has no field {repr(column) if column else ' or '.join(map(repr, FIELDS))}; it has {there}")
    return first([_from_cell(fields[name], f"the field {name!r} of {where}") for name in wanted])


def _from_cell(value: Any, where: str) -> Caption:
    if isinstance(value, bytes):
        return clean(*decode(value))
    if isinstance(value, str):
        return clean(value)
    return Caption(None, f"{where} is empty" if value is None else f"{where} holds {type(value).__name__}, not text")


def number(value: Any) -> float:
    """A field as a number, NaN where it is none."""
    try:
        return float(value) if isinstance(value, int | float | str | bytes | Decimal) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def label(name: str) -> str:
    """A file's or member's name as text that can be written anywhere: what is not Unicode is escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def error_line(error: BaseException) -> str:
    """An exception as one short line."""
    return one_line(f"{type(error).__name__}: {error}")[:200]
