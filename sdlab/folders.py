"""Folders of pictures with their captions beside them, in metadata files, or in the names of `N_concept` folders."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.parquet as pq

from sdlab import captions
from sdlab.captions import MAX_BYTES, SIDECARS, Caption
from sdlab.columnar import UNREADABLE, rows_of, wanted
from sdlab.config import ConfigError, hint
from sdlab.items import PICTURES, Item, Tally, kind_of, numbers, problem

METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
CONCEPT = re.compile(r"\d+_(.+)")
"""Names of folders as Kohya's trainers want them: repeats and concept."""
Listed = dict[str, dict[str, tuple[Caption, dict[str, float]]]]
"""Rows of metadata by the picture that they name, equal ones once."""


def walk(root: Path, failed: Callable[[OSError], None] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Each folder below `root`, sorted, as a POSIX path relative to it, with the names of its files.

    Hidden folders, links to folders and folders with a picture's name come as files; `failed` is told of those that cannot be read.
    """
    for folder, subfolders, files in os.walk(root, onerror=failed):
        passed = [name for name in subfolders if name.startswith(".") or os.path.islink(os.path.join(folder, name))]
        subfolders[:] = sorted(set(subfolders) - set(passed))
        odd = [name for name in subfolders if os.path.splitext(name)[1].lower() in PICTURES]
        yield Path(folder).relative_to(root).as_posix(), sorted([*files, *passed, *odd])


def read(root: Path, column: str | None, columns: tuple[str, ...], skip: frozenset[str], tally: Tally) -> Iterator[Item]:
    """Pictures below `root` with captions from metadata rows, else from the files beside them; then rows that name no picture.

    Args:
        root: the folder.
        column: field of the captions, or None.
        columns: numbers to keep.
        skip: files that other parts read.
        tally: counts what is passed over.
    """
    listed: Listed = {}
    for folder, names in walk(root):
        for name in METADATA:
            if name in names:
                yield from _read_metadata(root, os.path.normpath(os.path.join(folder, name)), column, columns, listed, tally)
    for folder, names in walk(root, lambda error: tally.ignore("folder that cannot be read", captions.label(str(error.filename)))):
        beside = _captions_beside(names)
        stems = {os.path.splitext(name)[0] for name in names if is_picture(name)}
        for name in names:
            path = os.path.normpath(os.path.join(folder, name))
            if is_picture(name):
                rows = list(listed.pop(path, {}).values()) or [_beside(root, path, beside, column, columns, tally)]
                yield from _file_items(root, path, rows)
            elif path not in skip and name not in METADATA:
                _pass_over(root, path, stems, beside, tally)
    for path, found in listed.items():
        yield from _file_items(root, path, list(found.values()))


def _captions_beside(names: Sequence[str]) -> dict[tuple[str, str], str]:
    """The caption files of a folder by stem and suffix in lower case, the first of each."""
    split = [(name, *os.path.splitext(name)) for name in names]
    return {(stem, suffix.lower()): name for name, stem, suffix in reversed(split) if suffix.lower() in SIDECARS}


def is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in PICTURES and not name.startswith(".")


def _pass_over(root: Path, path: str, stems: set[str], beside: dict[tuple[str, str], str], tally: Tally) -> None:
    name = os.path.basename(path)
    stem, suffix = os.path.splitext(name)
    if suffix.lower() not in SIDECARS or stem.startswith("."):
        linked = os.path.islink(root / path) and os.path.isdir(root / path)
        tally.ignore("link to a folder" if linked else kind_of(path), captions.label(path))
    elif path.endswith("_stats.json"):
        tally.ignore("statistics of img2dataset", captions.label(path))
    elif beside[stem, suffix.lower()] != name:
        tally.ignore("caption that comes twice", captions.label(path))
    elif stem not in stems:
        tally.orphan(captions.label(path))


def _file_items(root: Path, name: str, found: Sequence[tuple[Caption, dict[str, float]]]) -> Iterator[Item]:
    file, wrong = root / name, None
    if not stays_inside(root, file):
        wrong = ("outside_root", "leads to a place outside the source folder")
    elif not os.path.lexists(file) or (os.path.islink(file) and not os.path.exists(file)):
        wrong = ("missing_file", "named by the metadata or a link, but not there")
    elif not os.path.isfile(file):
        wrong = ("not_a_file", "a folder, pipe or device with a picture's name")
    for caption, fields in found:
        yield Item(captions.label(name), caption, file=os.fsencode(name), problem=wrong, fields=fields)


def _beside(
    root: Path, name: str, beside: dict[tuple[str, str], str], column: str | None, columns: tuple[str, ...], tally: Tally
) -> tuple[Caption, dict[str, float]]:
    """Caption and numbers from the files beside a picture, or the concept that its folder is named after."""
    texts: dict[str, bytes | None] = {}
    stem = os.path.splitext(os.path.basename(name))[0]
    for suffix in SIDECARS:
        file = (root / name).parent / beside.get((stem, suffix), "")
        if file.is_file() and stays_inside(root, file):
            texts[suffix] = _read_text(file)
    caption = captions.from_files(texts, column)
    if not texts and column is None and (concept := CONCEPT.fullmatch((root / name).parent.name)):
        caption = Caption(captions.one_line(concept[1].replace("_", " ")), "", ("caption_from_folder",))
    return caption, tally.numbers_beside(texts, columns)


def _read_text(file: Path) -> bytes | None:
    """A caption file, None for one that is too long or may not be read."""
    try:
        return file.read_bytes() if file.stat().st_size <= MAX_BYTES else None
    except OSError:
        return None


def stays_inside(root: Path, file: Path) -> bool:
    """Whether `file`, links followed, lies below `root`."""
    return Path(os.path.realpath(file)).is_relative_to(root)


# Metadata files


def _read_metadata(root: Path, name: str, column: str | None, columns: tuple[str, ...], listed: Listed, tally: Tally) -> Iterator[Item]:
    """Put the rows of a metadata file into `listed` by picture path; yield the rows that cannot be used."""
    if not stays_inside(root, root / name):
        yield problem(captions.label(name), "outside_root", "leads to a place outside the source folder")
        return
    if not (root / name).is_file():
        yield problem(captions.label(name), "not_a_file", "a folder, pipe or device with the name of a metadata file, or nothing")
        return
    for number, row in _rows(root / name, column, columns):
        label = captions.label(name) + (f":{number}" if number else "")
        if isinstance(row, str):
            yield problem(label, "bad_metadata", row)
        elif not isinstance(row.get("file_name"), str) or not row["file_name"]:
            yield problem(label, "bad_metadata", f"no text in the field 'file_name'; the row has {', '.join(map(str, row))[:200]}")
        elif (path := _below(PurePosixPath(name).parent, row["file_name"])) is None:
            detail = f"row {number} of {captions.label(name)} names no place inside the source folder"
            yield problem(captions.one_line(captions.label(row["file_name"])), "outside_root", detail)
        else:
            tally.columns.update(row)
            found = captions.from_fields(row, column, where=captions.label(name)), numbers(row, columns)
            rows = listed.setdefault(path, {})
            tally.duplicates += repr(found) in rows
            rows.setdefault(repr(found), found)


def _below(folder: PurePosixPath, name: str) -> str | None:
    """`folder / name` without "..", or None where that leaves the root or is no possible path."""
    if "\0" in name or captions.label(name) != name:
        return None
    path = os.path.normpath(folder / name)
    return None if os.path.isabs(path) or path.split(os.sep)[0] == ".." else path


def _rows(file: Path, column: str | None, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Number and content of each row; text in place of a row says why it cannot be read, number 0 stands for the whole file."""
    if file.suffix == ".parquet":
        yield from _parquet_rows(file, column, columns)
        return
    try:
        text, _ = captions.decode(file.read_bytes())
    except OSError as error:
        yield 0, f"cannot be read: {captions.error_line(error)}"
        return
    if file.suffix == ".csv":
        yield from _csv_rows(file, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, captions.parse_json(line) or "not a JSON object with fields"


def _csv_rows(file: Path, text: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    before = csv.field_size_limit(MAX_BYTES)
    try:
        reader = csv.DictReader(io.StringIO(text.replace("\0", " "), newline=""), restkey="")
        _check_columns(file, list(reader.fieldnames or []))
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        yield reader.line_num, f"not valid CSV from here on: {error}"
    finally:
        csv.field_size_limit(before)


def _parquet_rows(file: Path, column: str | None, columns: tuple[str, ...]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    number, count = 0, 0
    try:
        with file.open("rb") as stream, pq.ParquetFile(stream) as opened:
            _check_columns(file, opened.schema_arrow.names)
            count = opened.metadata.num_rows
            for batch in opened.iter_batches(columns=wanted(opened.schema_arrow.names, column, columns, "file_name")):
                for row in rows_of(batch):
                    name = row["file_name"]
                    yield (number := number + 1), {**row, "file_name": captions.decode(name)[0] if isinstance(name, bytes) else name}
    except ConfigError:
        raise
    except UNREADABLE as error:
        told = captions.error_line(error)
        yield from ((row, f"this row cannot be read: {told}") for row in range(number + 1, count + 1))
        if not count:
            yield 0, f"not a Parquet file that can be read: {told}"


def _check_columns(file: Path, known: list[str]) -> None:
    if "file_name" not in known:
        raise ConfigError(f"{file} has no column 'file_name'{hint('file_name', known)}")
