"""Tars as webdataset and img2dataset write them: KEY.png beside KEY.txt and KEY.json, listed without unpacking."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sdlab import captions
from sdlab.captions import MAX_BYTES, SIDECARS
from sdlab.items import PICTURES, Item, Tally, kind_of, problem

DAMAGE = (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError, MemoryError)
Texts = dict[str, dict[str, bytes | None]]


def read(path: Path, label: str, column: str | None, columns: tuple[str, ...], tally: Tally) -> Iterator[Item]:
    """Pictures of one tar in their order; captions are matched by key wherever in the tar they lie."""
    pictures, texts, damage = _list(path, tally)
    matched: set[str] = set()
    for name, offset, size, wrong in pictures:
        shown = captions.label(f"{label}::{name}")
        key = next((key for key in _keys(name) if key in texts), "")
        matched.add(key)
        if wrong is not None:
            yield problem(shown, *wrong)
            continue
        found = texts.get(key, {})
        caption = captions.from_files(found, column)
        yield Item(shown, caption, offset=offset, size=size, fields=tally.numbers_beside(found, columns))
    for key in texts:
        if key not in matched:
            tally.orphan(captions.label(f"{label}::{key}"))
    if damage:
        detail = f"what follows the first {len(pictures)} pictures cannot be read: {damage}"
        yield problem(captions.label(label), "damaged_tar", detail)


def _list(path: Path, tally: Tally) -> tuple[list[tuple[str, int, int, tuple[str, str] | None]], Texts, str]:
    """Name, offset, size and problem of each picture; caption files by key and suffix; and what damage ended the listing."""
    pictures: list[tuple[str, int, int, tuple[str, str] | None]] = []
    texts: Texts = {}
    seen: set[str] = set()
    end = path.stat().st_size
    try:
        for member, text in _members(path, tally):
            stem, suffix = os.path.splitext(member.name)
            if os.path.basename(member.name).startswith(".") or (suffix.lower() not in PICTURES and suffix.lower() not in SIDECARS):
                if not member.isdir():
                    tally.ignore(kind_of(member.name), captions.label(member.name))
            elif suffix.lower() in PICTURES:
                pictures.append((member.name, member.offset_data, member.size, _wrong(member, member.name in seen, end)))
                seen.add(member.name)
            elif member.isreg() and suffix.lower() not in texts.get(stem, {}):
                texts.setdefault(stem, {})[suffix.lower()] = text
            else:
                tally.ignore("caption that is a link or comes twice", captions.label(member.name))
    except DAMAGE as error:
        return pictures, texts, captions.error_line(error)
    return pictures, texts, ""


def _wrong(member: tarfile.TarInfo, again: bool, end: int) -> tuple[str, str] | None:
    if not member.isreg() or member.issparse():
        return "not_a_file", "a link, folder, device or sparse file, which is not followed"
    if again:
        return "duplicate_member", "a member of this name comes earlier in the tar, and that one is taken"
    if member.offset_data + member.size > end:
        return "unreadable", f"the tar ends within this member of {member.size:,} bytes"
    return None


def _members(path: Path, tally: Tally) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    """Each member, and the bytes of caption files (None where they are too long or cut off), also of tars that were joined to one."""
    with path.open("rb") as stream:
        start: int | None = 0
        while start is not None:
            stream.seek(start)
            tar = tarfile.open(fileobj=stream, mode="r:")  # noqa: SIM115  # closing it would do nothing to the stream
            if start and tar.firstmember is None:  # type: ignore[attr-defined]
                tally.ignore("bytes behind the end of a tar", captions.label(path.name))
                return
            yield from _members_of(tar, stream)
            start = _next_start(stream, tar.offset)


def _members_of(tar: tarfile.TarFile, stream: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, bytes | None]]:
    while (member := tar.next()) is not None:
        if tar.offset < member.offset_data:
            raise tarfile.ReadError(f"a member of {member.size:,} bytes at byte {member.offset}")
        tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
        text = None
        if member.isreg() and member.name.lower().endswith(SIDECARS) and member.size <= MAX_BYTES:
            stream.seek(member.offset_data)
            text = stream.read(member.size)
            text = text if len(text) == member.size else None
        yield member, text
    stream.seek(tar.offset)
    if stream.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise tarfile.ReadError(f"bad header at byte {tar.offset}")


def _next_start(stream: BinaryIO, offset: int) -> int | None:
    """The first block from `offset` on that is not empty, None where there is none."""
    stream.seek(offset)
    while data := stream.read(MAX_BYTES):
        if rest := data.lstrip(b"\0"):
            return offset + (len(data) - len(rest)) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
        offset += len(data)
    return None


def _keys(name: str) -> tuple[str, str]:
    """What the caption of a picture may be called: the name without its suffix, or webdataset's key, up to the first dot."""
    folder, base = os.path.split(name)
    return os.path.splitext(name)[0], os.path.join(folder, base.split(".")[0])


def compressed(label: str) -> Item:
    """A compressed tar, which cannot be read at random."""
    return problem(captions.label(label), "damaged_tar", "a compressed tar cannot be read at random; unpack it to a plain .tar")
