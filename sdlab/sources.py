"""What people have: tars, image folders and scenes, listed item by item with their captions.

File names, tar members and captions are hostile: a name is only ever a label, and what cannot be used is an item that says
so; neither ends a run.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from sdlab import scenes
from sdlab.config import ConfigError, hint, resolve_path

PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
SIDECARS = (".txt", ".caption", ".json")
METADATA = ("metadata.jsonl", "metadata.csv")
CAPTION_FIELDS = ("caption", "text")
"""Fields of JSON and metadata that hold a caption unless `caption_column` names another."""
UNDERSTOOD = (
    "a folder of .tar files (KEY.png|jpg|webp with KEY.txt or KEY.json), one .tar, a folder of pictures with .txt, .caption or .json "
    'beside them or a metadata.jsonl|csv, a list of these, or "scenes"'
)
MAX_TEXT_BYTES = 1 << 20
"""Longest caption file that is read."""
SCENES = 4096
"""Scenes drawn where no limit says how many."""


@dataclass(frozen=True, slots=True)
class Item:
    """One picture of a source: a label, its caption, and where its bytes lie."""

    path: str
    """Relative to the root; tar members as `shard.tar::member`. A label, never opened."""
    caption: str | None
    """One line of text; "" for an empty caption, None for none."""
    note: str = ""
    """Why there is no caption, where more is known than that."""
    file: Path | None = None
    offset: int = 0
    size: int = -1
    scene: scenes.Scene | None = None
    problem: tuple[str, str] | None = None
    """Reason and detail of what is wrong already before the picture is opened."""

    def read(self) -> bytes:
        """The bytes of the picture's file."""
        assert self.file is not None
        with self.file.open("rb") as handle:
            handle.seek(self.offset)
            return handle.read(self.size)


@dataclass(frozen=True)
class Source:
    """Where pictures come from: `name` is what a person is shown, `count` how many items `items` yields each time."""

    name: str
    count: int
    roots: tuple[Path, ...]
    items: Callable[[], Iterator[Item]]


def open_source(source: str | Sequence[str], *, caption_column: str | None = None, limit: int | None = None, seed: int = 0) -> Source:
    """Detect what `source` is and count its pictures.

    Args:
        source: a path, "scenes", or a list of these.
        caption_column: field of JSON or metadata that holds the caption; None for "caption", then "text".
        limit: take at most this many pictures, the first ones.
        seed: of drawn scenes.

    Raises:
        ConfigError: a path is not there, or nothing in it is understood.
    """
    roots = [source] if isinstance(source, str) else list(source)
    if not roots:
        raise ConfigError(f"source is an empty list; give {UNDERSTOOD}")
    parts = [part for root in roots for part in _detect(root, caption_column, limit or SCENES, seed)]
    counts = [sum(1 for _ in part.items()) for part in parts]
    total = sum(counts)
    name = _name(parts, counts) + (f"; the first {limit:,} are taken" if limit and limit < total else "")

    def items() -> Iterator[Item]:
        return itertools.islice(itertools.chain.from_iterable(part.items() for part in parts), limit)

    return Source(name, min(total, limit or total), tuple(part.root for part in parts if part.root is not None), items)


@dataclass(frozen=True)
class _Part:
    kind: str
    root: Path | None
    items: Callable[[], Iterator[Item]]


def _detect(given: str, column: str | None, scene_count: int, seed: int) -> list[_Part]:
    if given == "scenes":
        return [_Part(f"scenes drawn from seed {seed}", None, partial(_scene_items, scene_count, seed))]
    root = resolve_path(given)
    if not root.exists():
        raise ConfigError(f"source {given!r}: {root} is not there; give {UNDERSTOOD}")
    if root.is_file() and root.suffix == ".tar":
        return [_Part("webdataset", root, partial(_tar_items, root, root.name, column))]
    names = list(_walk(root)) if root.is_dir() else []
    tars = [name for name in names if name.endswith(".tar")]
    parts = [_Part("webdataset", root, partial(_tar_items, root / name, name, column)) for name in tars]
    if any(PurePosixPath(name).suffix.lower() in PICTURES for name in names):
        parts.append(_Part("image folder", root, partial(_folder_items, root, column)))
    if not parts:
        raise ConfigError(f"source {given!r}: no pictures or .tar files are recognised in {root}; give {UNDERSTOOD}")
    return parts


def _name(parts: Sequence[_Part], counts: Sequence[int]) -> str:
    """As in "webdataset: 3 tars, 1,911 pictures; image folder: 40 pictures"."""
    told = []
    for kind in dict.fromkeys(part.kind for part in parts):
        found = [count for part, count in zip(parts, counts, strict=True) if part.kind == kind]
        tars = f"{len(found):,} tar{'s' * (len(found) != 1)}, " if kind == "webdataset" else ""
        told.append(f"{kind}: {tars}{sum(found):,} picture{'s' * (sum(found) != 1)}")
    return "; ".join(told)


def _scene_items(count: int, seed: int) -> Iterator[Item]:
    for index, scene in enumerate(scenes.draw(count, seed=seed)):
        yield Item(f"scene-{index:06d}", scene.caption, scene=scene)


def _walk(root: Path) -> Iterator[str]:
    """Files below `root` as sorted POSIX paths relative to it; hidden ones and links to folders are passed over."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        above = Path(folder).relative_to(root)
        yield from ((above / name).as_posix() for name in sorted(files) if not name.startswith("."))


# Webdataset tars


def _tar_items(path: Path, label: str, column: str | None) -> Iterator[Item]:
    """Pictures of one tar in their order; text members are matched by key wherever in the tar they lie."""
    pictures: list[tuple[str, int, int]] = []
    texts: dict[str, dict[str, bytes | None]] = {}
    damage = ""
    try:
        for name, offset, size, text in _tar_members(path):
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in SIDECARS:
                texts.setdefault(stem, {})[suffix.lower()] = text
            elif suffix.lower() in PICTURES:
                pictures.append((name, offset, size))
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError) as error:
        damage = error_line(error)
    for name, offset, size in pictures:
        caption, note = _caption(texts.get(os.path.splitext(name)[0], {}), column)
        yield Item(_label(f"{label}::{name}"), caption, note, file=path, offset=offset, size=size)
    if damage:
        yield Item(
            _label(label), None, problem=("damaged_tar", f"what follows the first {len(pictures)} pictures cannot be read: {damage}")
        )


def _tar_members(path: Path) -> Iterator[tuple[str, int, int, bytes | None]]:
    """Name, offset and size of each plain file, and the bytes of caption files (None where they are too long)."""
    with tarfile.open(path, "r:") as tar:
        assert tar.fileobj is not None
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
            if not member.isreg() or member.issparse() or os.path.basename(member.name).startswith("."):
                continue
            text = None
            if member.name.lower().endswith(SIDECARS) and member.size <= MAX_TEXT_BYTES:
                tar.fileobj.seek(member.offset_data)
                text = tar.fileobj.read(member.size)
            yield member.name, member.offset_data, member.size, text
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"bad header at byte {tar.offset}")


# Image folders


def _folder_items(root: Path, column: str | None) -> Iterator[Item]:
    """Pictures below `root` with captions from metadata rows, else from the files beside them; then rows that name no picture."""
    listed: dict[str, list[tuple[str | None, str]]] = {}
    for name in _walk(root):
        if PurePosixPath(name).name in METADATA:
            yield from _read_metadata(root, name, column, listed)
    for name in _walk(root):
        if PurePosixPath(name).suffix.lower() in PICTURES:
            yield from _file_items(root, name, listed.pop(name, []) or [_sidecar_caption(root, name, column)])
    for name, captions in listed.items():
        yield from _file_items(root, name, captions)


def _file_items(root: Path, name: str, captions: Iterable[tuple[str | None, str]]) -> Iterator[Item]:
    file = root / name
    problem = None
    if not _stays_inside(root, file):
        problem = ("outside_root", "leads to a place outside the source folder")
    elif not os.path.isfile(file):
        problem = ("missing_file", "named by the metadata, but not there")
    for caption, note in captions:
        yield Item(_label(name), caption, note, file=file, problem=problem)


def _sidecar_caption(root: Path, name: str, column: str | None) -> tuple[str | None, str]:
    texts: dict[str, bytes | None] = {}
    for suffix in SIDECARS:
        file = (root / name).with_suffix(suffix)
        if os.path.isfile(file) and _stays_inside(root, file):
            texts[suffix] = file.read_bytes() if file.stat().st_size <= MAX_TEXT_BYTES else None
    return _caption(texts, column)


def _read_metadata(root: Path, name: str, column: str | None, listed: dict[str, list[tuple[str | None, str]]]) -> Iterator[Item]:
    """Put the captions of a metadata file into `listed` by picture path; yield the rows that cannot be used."""
    for number, row in _metadata_rows(root / name):
        if isinstance(row, str) or not isinstance(row.get("file_name"), str) or not row["file_name"]:
            detail = row if isinstance(row, str) else f"no text in the field 'file_name'; the row has {', '.join(map(str, row))}"
            yield Item(f"{_label(name)}:{number}", None, problem=("bad_metadata", detail))
            continue
        path = _below(PurePosixPath(name).parent, row["file_name"])
        if path is None:
            detail = f"row {number} of {name} names no place inside the source folder"
            yield Item(_label(row["file_name"]), None, problem=("outside_root", detail))
        else:
            listed.setdefault(path, []).append(_field(row, column, where=name))


def _below(folder: PurePosixPath, name: str) -> str | None:
    """`folder / name` without "..", or None where that leaves the root or is no possible path."""
    if "\0" in name or _label(name) != name:
        return None
    path = os.path.normpath(folder / name)
    return None if os.path.isabs(path) or path.split(os.sep)[0] == ".." else path


def _stays_inside(root: Path, file: Path) -> bool:
    """Whether `file`, links followed, lies below `root`."""
    return Path(os.path.realpath(file)).is_relative_to(root)


def _metadata_rows(file: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Line number and row; text in place of a row says why it cannot be read."""
    text = decode_text(file.read_bytes())
    if file.suffix == ".csv":
        reader = csv.DictReader(io.StringIO(text, newline=""), restkey="")
        known = list(reader.fieldnames or [])
        if "file_name" not in known:
            raise ConfigError(f"{file} has no column 'file_name'{hint('file_name', known)}")
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            yield reader.line_num, f"not valid CSV from here on: {error}"
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _parse_json(line) or "not a JSON object with fields"


# Captions


def decode_text(data: bytes) -> str:
    """Text of a file: UTF-8 with or without BOM, UTF-16 with BOM, else Windows-1252."""
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def one_line(text: str) -> str:
    """A caption as it is kept: NULs gone, every run of white space (line breaks too) one space, lone surrogates replaced."""
    return " ".join(text.replace("\0", " ").split()).encode("utf-8", "replace").decode("utf-8")


def _caption(texts: dict[str, bytes | None], column: str | None) -> tuple[str | None, str]:
    """The first caption that is not empty among .txt, .caption and .json (only .json where a column is asked for), and a note."""
    found: list[tuple[str | None, str]] = []
    for suffix in SIDECARS if column is None else (".json",):
        if suffix not in texts:
            continue
        if (data := texts[suffix]) is None:
            found.append((None, f"the {suffix} file is longer than {MAX_TEXT_BYTES:,} bytes"))
        elif suffix == ".json":
            fields = _parse_json(decode_text(data))
            found.append(
                _field(fields, column, where="the .json file") if fields is not None else (None, "the .json file is not a JSON object")
            )
        else:
            found.append((one_line(decode_text(data)), ""))
    captions = sorted((caption for caption, _ in found if caption is not None), key=lambda caption: not caption)
    return captions[0] if captions else None, "; ".join(note for _, note in found if note)


def _parse_json(text: str) -> dict[str, Any] | None:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _field(fields: dict[str, Any], column: str | None, *, where: str) -> tuple[str | None, str]:
    wanted = (column,) if column else CAPTION_FIELDS
    name = next((name for name in wanted if name in fields), None)
    if name is None:
        return None, f"{where} has no field {' or '.join(map(repr, wanted))}; it has {', '.join(map(str, list(fields)[:20])) or 'none'}"
    value = fields[name]
    if value is None or isinstance(value, str):
        return (None if value is None else one_line(value)), ""
    return None, f"the field {name!r} of {where} holds {type(value).__name__}, not text"


def _label(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def error_line(error: BaseException) -> str:
    """An exception as one short line."""
    return one_line(f"{type(error).__name__}: {error}")[:200]
