"""What people have, detected and named back to them: tars, image folders, tables, data sets and scenes, alone or mixed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sdlab import captions, columnar, folders, scenes, tars
from sdlab.captions import Caption
from sdlab.config import ConfigError, nearest, resolve_path
from sdlab.items import Item, Part, Tally, problem

UNDERSTOOD = (
    "a folder of .tar files (KEY.png|jpg|webp with KEY.txt or KEY.json), one .tar, a folder of pictures with .txt, .caption or .json "
    "beside them or a metadata.jsonl|csv|parquet, .parquet files with pictures in them, a data set that `datasets` saved, "
    'the id of one on the Hugging Face hub, a list of these, or "scenes"'
)
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
SCENES = 4096
"""Scenes drawn where no limit says how many."""


@dataclass(frozen=True)
class Source:
    """Where pictures come from, as parts that are listed one after another."""

    parts: tuple[Part, ...]
    limit: int | None

    def items(self, tallies: list[Tally]) -> Iterator[tuple[int, Item]]:
        """Each picture with the number of its part; a tally a part is added to `tallies`.

        Beyond the limit, parts are listed no further.
        """
        left = self.limit
        for number, part in enumerate(self.parts):
            if left == 0:
                return
            tallies.append(Tally(part.label))
            for item in part.read(tallies[-1]):
                if left == 0:
                    return
                left = left if left is None else left - 1
                yield number, tallies[-1].count(item)

    def name(self, tallies: Sequence[Tally]) -> str:
        """As in "webdataset: 3 tars, 1,911 pictures; image folder: 40 pictures"."""
        counted = list(zip(self.parts, tallies, strict=False))
        told = [_name(kind, [pair for pair in counted if pair[0].kind == kind]) for kind in dict.fromkeys(part.kind for part, _ in counted)]
        named = "; ".join(text for text in told if text) or "nothing"
        left = sum(part.kind != "image folder" for part in self.parts[len(counted) :])
        unopened = f", {left:,} more shard{'s are' if left > 1 else ' is'} not opened" if left else ""
        cut = self.limit is not None and sum(tally.pictures for tally in tallies) >= self.limit
        return named + (f"; no more than limit={self.limit:,} are taken{unopened}" if cut and self.parts[0].kind != "scenes" else "")


def _name(kind: str, counted: Sequence[tuple[Part, Tally]]) -> str:
    pictures = sum(tally.pictures for _, tally in counted)
    if kind == "image folder" and not pictures:
        return ""
    what = {"webdataset": "tar", "parquet": "file"}.get(kind)
    shards = f"{len(counted):,} {what}{'s' * (len(counted) != 1)}, " if what else ""
    notes = "".join(f" ({note})" for note in dict.fromkeys(part.note for part, _ in counted) if note)
    return f"{kind}{notes}: {shards}{pictures:,} picture{'s' * (pictures != 1)}"


def open_source(
    source: str | Sequence[str],
    *,
    caption_column: str | None = None,
    columns: Sequence[str] = (),
    limit: int | None = None,
    seed: int = 0,
) -> Source:
    """Detect what `source` is.

    Args:
        source: a path, a hub id, "scenes", or a list of these.
        caption_column: field of JSON, metadata or a table that holds the caption; None for "caption", then "text".
        columns: numbers of the metadata to keep for filters.
        limit: take at most this many pictures, the first ones.
        seed: of drawn scenes.

    Raises:
        ConfigError: a path is not there, or nothing in it is understood.
    """
    roots = [source] if isinstance(source, str) else list(dict.fromkeys(source))
    if not roots:
        raise ConfigError(f"source is an empty list; give {UNDERSTOOD}")
    _check_apart([root for root in roots if root != "scenes"])
    wanted = tuple(columns)
    return Source(tuple(part for root in roots for part in _detect(root, caption_column, wanted, limit or SCENES, seed)), limit)


def _check_apart(roots: Sequence[str]) -> None:
    """Refuse roots of which one lies in another: its pictures would be read twice."""
    paths = {root: resolve_path(root) for root in roots}
    for one, other in itertools.permutations(roots, 2):
        if paths[one].is_relative_to(paths[other]):
            raise ConfigError(f"source lists {one!r}, which lies in {other!r}; give each picture once")


def _detect(given: str, column: str | None, columns: tuple[str, ...], scene_count: int, seed: int) -> list[Part]:
    if given == "scenes":
        return [Part("scenes", "", "scenes", given, partial(_scenes, scene_count, seed), f"drawn from seed {seed}")]
    root = resolve_path(given)
    if not root.exists():
        if columnar.HUB_ID.fullmatch(given):
            return [_dataset(given, given, column, columns)]
        raise ConfigError(f"source {given!r}: {root} is not there{nearest(given, ['scenes'])}; give {UNDERSTOOD}")
    if root.is_file():
        return [_file(root, root.name, given, column, columns)]
    if columnar.is_saved_dataset(root):
        return [_dataset(str(root), given, column, columns)]
    return _folder(root, given, column, columns)


def _file(file: Path, label: str, given: str, column: str | None, columns: tuple[str, ...]) -> Part:
    name = file.name.lower()
    if name.endswith(".tar"):
        return Part("webdataset", str(file), label, given, partial(tars.read, file, label, column, columns))
    if name.endswith(COMPRESSED):
        return Part("webdataset", str(file), label, given, partial(_compressed, label))
    if name.endswith(".parquet") and columnar.holds_pictures(file):
        return Part("parquet", str(file), label, given, partial(columnar.read_parquet, file, label, column, columns))
    raise ConfigError(f"source {given!r}: {file} is no .tar, and no .parquet file with pictures in it; give {UNDERSTOOD}")


def _folder(root: Path, given: str, column: str | None, columns: tuple[str, ...]) -> list[Part]:
    shards, pictures, metadata, concepts = [], False, False, []
    for folder, names in folders.walk(root):
        paths = [os.path.normpath(os.path.join(folder, name)) for name in names if not name.startswith(".")]
        shards += [path for path in paths if _is_shard(root, path)]
        metadata |= any(name in folders.METADATA for name in names)
        here = any(map(folders.is_picture, names))
        pictures |= here
        concepts += [name for name in [(root / folder).name] if here and folders.CONCEPT.fullmatch(name)]
    if not shards and not pictures and not metadata:
        raise ConfigError(f"source {given!r}: no pictures, .tar or .parquet files are recognised in {root}; give {UNDERSTOOD}")
    parts = [_shard(root, path, given, column, columns) for path in shards]
    note = (
        f"folders {', '.join(concepts[:5])}{' ...' * (len(concepts) > 5)} name their concept; repeats are not applied" if concepts else ""
    )
    rest = partial(folders.read, root, column, columns, frozenset(shards))
    return [*parts, Part("image folder", str(root), root.name, given, rest, note)]


def _is_shard(root: Path, path: str) -> bool:
    name = os.path.basename(path).lower()
    if name in folders.METADATA or not name.endswith((".tar", ".parquet", *COMPRESSED)) or not os.path.isfile(root / path):
        return False
    return not (name.endswith(".parquet") and folders.stays_inside(root, root / path)) or columnar.holds_pictures(root / path)


def _shard(root: Path, path: str, given: str, column: str | None, columns: tuple[str, ...]) -> Part:
    if folders.stays_inside(root, root / path):
        return _file(root / path, path, given, column, columns)
    kind = "parquet" if path.lower().endswith(".parquet") else "webdataset"
    return Part(kind, str(root / path), path, given, partial(_outside, path))


def _outside(label: str, tally: Tally) -> Iterator[Item]:
    yield problem(captions.label(label), "outside_root", "leads to a place outside the source folder")


def _dataset(where: str, given: str, column: str | None, columns: tuple[str, ...]) -> Part:
    dataset, split = columnar.open_dataset(where)
    read = partial(columnar.read_dataset, dataset, split, column, columns)
    return Part("data set", where, split, given, read, f"split {split!r} of {given}")


def _scenes(count: int, seed: int, tally: Tally) -> Iterator[Item]:
    for index, scene in enumerate(scenes.draw(count, seed=seed)):
        yield Item(f"scene-{index:06d}", Caption(scene.caption), row=index)


def _compressed(label: str, tally: Tally) -> Iterator[Item]:
    yield tars.compressed(label)
