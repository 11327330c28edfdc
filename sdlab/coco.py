"""COCO from where a user has it: captions, the prompts that protocols choose of them, reference images, and published statistics.

Nothing is read until it is asked for. Files are hostile: one that is damaged is refused with its name.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sdlab.captions import MAX_BYTES, error_line
from sdlab.config import ConfigError, hint, resolve_path

SHOWN = 3
"""How many of several are named in a message."""
TSV_COLUMNS = ("image_id", "id", "caption")
_KINDS = {int: "a whole number from 0 up", str: "text"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A caption that is asked for, with its id and that of its image, None where that is not known."""

    caption_id: int
    image_id: int | None
    text: str


@dataclass(frozen=True)
class Coco:
    """An annotation file of captions and the folder of its images; the file is read when something of it is asked for."""

    annotation_file: Path
    image_dir: Path | None = None

    @cached_property
    def captions(self) -> list[Prompt]:
        """All captions in the order of the file, their text as it is there.

        Raises:
            ConfigError: the file is missing or damaged, or captions have equal ids or images that it does not list.
        """
        records = _records(self._table, "annotations", {"image_id": int, "id": int, "caption": str}, self.annotation_file)
        captions = [Prompt(record["id"], record["image_id"], record["caption"]) for record in records]
        _refuse_twice((caption.caption_id for caption in captions), "caption id", self.annotation_file)
        lost = [caption for caption in captions if caption.image_id not in self.file_names]
        if lost:
            listed = _first(f"{caption.image_id} of caption {caption.caption_id}" for caption in lost)
            raise ConfigError(f"{self.annotation_file} does not list the images of {len(lost)} captions ({listed}); give the whole file")
        return captions

    @cached_property
    def file_names(self) -> dict[int, str]:
        """Names of the image files by image id.

        Raises:
            ConfigError: the file is missing or damaged, ids or names come twice, or a name leads out of the folder.
        """
        records = _records(self._table, "images", {"id": int, "file_name": str}, self.annotation_file)
        _refuse_twice((record["id"] for record in records), "image id", self.annotation_file)
        _refuse_twice((record["file_name"] for record in records), "file name", self.annotation_file)
        outside = next((name for name in (record["file_name"] for record in records) if not _is_plain(name)), None)
        if outside is not None:
            raise ConfigError(f"{self.annotation_file} has the file name {outside!r:.80}; a name without folders is allowed")
        return {record["id"]: record["file_name"] for record in records}

    def choose(self, rule: str, *, count: int, seed: int) -> list[Prompt]:
        """The prompts that a rule chooses, in ascending order of their caption ids.

        Args:
            rule: one of `RULES`.
            count: how many.
            seed: of the rule's random order.

        Raises:
            ConfigError: unknown rule, fewer captions than `count`, or a file that cannot be used.
        """
        if rule not in RULES:
            raise ConfigError(f"prompt rule {rule!r} is not known{hint(str(rule), RULES)}")
        chosen = RULES[rule](self.captions, seed)[:count]
        if len(chosen) < count:
            of = "captions of different images" if rule == "one_caption_per_image" else "captions"
            raise ConfigError(f"{self.annotation_file} has {len(chosen)} {of}, and {count} are asked for; lower num_images")
        return sorted(chosen, key=lambda prompt: prompt.caption_id)

    def image_paths(self, image_ids: Iterable[int] | None = None) -> dict[int, Path]:
        """Paths of reference images by id, ascending; all are there, and none is opened.

        Args:
            image_ids: of which images; None for all that the annotation file lists.

        Raises:
            ConfigError: no folder was given, ids are unknown, or files are missing, counted and the first few named.
        """
        if self.image_dir is None:
            raise ConfigError(f"reference images of {self.annotation_file} are asked for; give the folder of its images")
        wanted = sorted(set(self.file_names if image_ids is None else image_ids))
        unknown = [number for number in wanted if number not in self.file_names]
        if unknown:
            raise ConfigError(
                f"{self.annotation_file} lists no {len(unknown)} of {len(wanted)} images ({_first(unknown)}); give the file they are of"
            )
        there = _files_in(self.image_dir)
        missing = [self.file_names[number] for number in wanted if self.file_names[number] not in there]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(wanted)} images are not in {self.image_dir} ({_first(missing)}); give the whole folder"
            )
        return {number: self.image_dir / self.file_names[number] for number in wanted}

    @cached_property
    def _table(self) -> Mapping[str, Any]:
        try:
            table = json.loads(self.annotation_file.read_bytes())
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{self.annotation_file} cannot be read ({error_line(error)}); give COCO's captions_*.json") from None
        if not isinstance(table, dict):
            raise ConfigError(f"{self.annotation_file} holds {type(table).__name__}; it has to be a table of 'images' and 'annotations'")
        return table


def locate(folder: str | Path, *, split: str = "val2014") -> Coco:
    """COCO in a folder as it is unpacked: `annotations/captions_SPLIT.json`, images in `SPLIT` or `images/SPLIT`, where there are any.

    Raises:
        ConfigError: the annotation file is not there.
    """
    root = resolve_path(folder)
    file = root / "annotations" / f"captions_{split}.json"
    if not file.is_file():
        raise ConfigError(f"{file} is not there; give the folder that holds COCO's annotations/captions_{split}.json")
    return Coco(file, next((place for place in (root / split, root / "images" / split) if place.is_dir()), None))


def one_caption_per_image(captions: Sequence[Prompt], seed: int) -> list[Prompt]:
    """MLPerf's rule: a random order, of each image the caption that comes first, line breaks taken out.

    Equal to what mlcommons/training's coco-split-resize.py does with pandas, whose sample(frac=1, random_state=seed) is this permutation.
    """
    order = np.random.RandomState(seed).permutation(len(captions))
    first: dict[int | None, Prompt] = {}
    for caption in (captions[place] for place in order):
        first.setdefault(caption.image_id, caption)
    return [Prompt(kept.caption_id, kept.image_id, kept.text.replace("\n", "").strip()) for kept in first.values()]


def random_captions(captions: Sequence[Prompt], seed: int) -> list[Prompt]:
    """NeMo's rule: captions in random order, several of an image too, each run of white space one space, as CLIP's tokenizer has it.

    Its launcher scripts call numpy.random.choice(ids, replace=False) without a seed; here with one.
    """
    order = np.random.RandomState(seed).permutation(len(captions))
    chosen = (captions[place] for place in order)
    return [Prompt(caption.caption_id, caption.image_id, " ".join(caption.text.split())) for caption in chosen]


RULES: dict[str, Callable[[Sequence[Prompt], int], list[Prompt]]] = {
    "one_caption_per_image": one_caption_per_image,
    "random_captions": random_captions,
}
"""Captions in a random order of a seed, of which a protocol takes the first."""


def read_tsv(path: str | Path, *, count: int | None = None) -> list[Prompt]:
    """MLPerf's prompts, as in val2014_30k.tsv: a header image_id, id, caption and a row a prompt.

    Args:
        path: the file.
        count: take so many, the first ones; None for all.

    Raises:
        ConfigError: the file is missing or damaged, caption ids come twice, or it has fewer prompts than `count`.
    """
    file = resolve_path(path)
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.reader(stream, delimiter="\t", strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(f"{file} cannot be read ({error_line(error)}); give MLPerf's prompts, as in val2014_30k.tsv") from None
    if not rows or sorted(rows[0]) != sorted(TSV_COLUMNS):
        given = ", ".join(rows[0])[:80] if rows else "nothing"
        raise ConfigError(f"{file} begins with {given!r}; its first line has to name {', '.join(TSV_COLUMNS)}, with tabs between")
    prompts = [_prompt(rows[0], row, f"{file}, row {number}") for number, row in enumerate(rows[1:], 1)]
    _refuse_twice((prompt.caption_id for prompt in prompts), "caption id", file)
    return _first_of(prompts, count, file)


def read_caption_folder(folder: str | Path, *, count: int, image_ids: Mapping[int, int] | None = None) -> list[Prompt]:
    """NeMo's prompts, as in coco2014_val_sampled_30k/captions: a file a caption, CAPTION_ID.txt, the first of them by name.

    Args:
        folder: of the files.
        count: how many are read.
        image_ids: of captions by their ids, where they are known.

    Raises:
        ConfigError: fewer files than `count`, a name that is no caption id, or a file that cannot be read.
    """
    place = resolve_path(folder)
    found = _first_of(sorted(name for name in _files_in(place) if name.endswith(".txt")), count, place)
    wrong = next((name for name in found if not _is_id(name.removesuffix(".txt"))), None)
    if wrong is not None:
        raise ConfigError(f"{place / wrong} is not named by a caption id, as in 000000000042.txt; take it out of the folder")
    numbers = [int(name.removesuffix(".txt")) for name in found]
    _refuse_twice(numbers, "caption id", place)
    known = image_ids or {}
    return [Prompt(number, known.get(number), _caption_in(place / name)) for number, name in zip(numbers, found, strict=True)]


@dataclass(frozen=True)
class Statistics:
    """Mean and covariance of the features of reference images, as they are handed around."""

    path: Path
    mean: np.ndarray
    """Float64 (D,)."""
    covariance: np.ndarray
    """Float64 (D, D), symmetric."""
    num_images: int | None = None
    """Of how many images, where the file says it; MLPerf's does not."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the numbers."""
        return hashlib.sha256(self.mean.tobytes() + self.covariance.tobytes()).hexdigest()


def read_statistics(path: str | Path) -> Statistics:
    """Statistics as pytorch-fid and MLPerf keep them, as in val2014_30k_stats.npz: `mu` (D,), `sigma` (D, D), and `num_images` if there.

    Raises:
        ConfigError: the file is missing or damaged, or its arrays are no mean and covariance.
    """
    file = resolve_path(path)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            mean, covariance = (np.asarray(arrays[name], np.float64) for name in ("mu", "sigma"))
            count = int(arrays["num_images"]) if "num_images" in arrays else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{file} cannot be read ({error_line(error)}); give an .npz of 'mu' and 'sigma'") from None
    if mean.ndim != 1 or not mean.size or covariance.shape != (len(mean), len(mean)):
        raise ConfigError(
            f"{file} has mu {mean.shape} and sigma {covariance.shape}; (D,) and (D, D) are allowed, give the file they are of"
        )
    if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
        raise ConfigError(f"{file} has numbers that are not finite; give statistics that are")
    uneven = np.abs(covariance - covariance.T).max() > 1e-6 * np.abs(covariance).max()
    if uneven or (covariance.diagonal() < 0).any():
        raise ConfigError(f"{file} has a sigma that is no covariance: not symmetric, or with variances below 0; give another file")
    return Statistics(file, mean, covariance, count)


def check_together(
    prompts: Sequence[Prompt], statistics: Statistics, *, num_images: int, width: int, reference_images: int | None = None
) -> None:
    """Refuse prompts and statistics that do not belong together.

    Args:
        prompts: that are asked.
        statistics: of the reference images.
        num_images: how many prompts the protocol wants.
        width: numbers in a feature of the extractor.
        reference_images: of how many images the statistics have to be; None: of those of the prompts.

    Raises:
        ConfigError: a number disagrees, with both.
    """
    if len(prompts) != num_images:
        raise ConfigError(f"{len(prompts)} prompts were given, and the protocol asks {num_images}; give those, or change num_images")
    if len(statistics.mean) != width:
        raise ConfigError(
            f"{statistics.path} is of features of width {len(statistics.mean)}, the extractor's have {width}; give statistics of its own"
        )
    wanted = len({prompt.image_id for prompt in prompts}) if reference_images is None else reference_images
    if statistics.num_images not in (None, wanted):
        raise ConfigError(
            f"{statistics.path} is of {statistics.num_images} images, and the reference has {wanted}; give statistics of these images"
        )


def digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of prompts in their order: equal only where ids and texts are."""
    rows = [[prompt.caption_id, prompt.image_id, prompt.text] for prompt in prompts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _records(table: Mapping[str, Any], key: str, fields: Mapping[str, type], file: Path) -> list[dict[str, Any]]:
    """The list `key` of an annotation file, each of its tables with `fields` of the right types."""
    records = table.get(key)
    if not isinstance(records, list) or not records:
        raise ConfigError(f"{file} has no list {key!r} that holds something; give COCO's captions_*.json")
    for place, record in enumerate(records):
        for field, kind in fields.items():
            value = record.get(field) if isinstance(record, dict) else None
            if not _fits(value, kind):
                raise ConfigError(f"{file}: {field!r} of {key}[{place}] is {value!r:.40}; it has to be {_KINDS[kind]}, give the whole file")
    return records


def _fits(value: Any, kind: type) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value < 2**63
    return isinstance(value, str) and _is_writable(value)


def _is_writable(text: str) -> bool:
    """Whether text is Unicode: JSON may hold halves of characters, which no file takes."""
    try:
        return bool(text.encode()) or not text
    except UnicodeEncodeError:
        return False


def _refuse_twice(values: Iterable[Any], what: str, file: Path) -> None:
    seen: set[Any] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"{file} has the {what} {value!r:.80} more than once; each may come once, give the file as published")
        seen.add(value)


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _files_in(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file()}
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error_line(error)}); give a folder") from None


def _first(things: Iterable[Any]) -> str:
    listed = list(islice(map(str, things), SHOWN + 1))
    return ", ".join(listed[:SHOWN]) + (", ..." if len(listed) > SHOWN else "")


def _first_of(things: list[Any], count: int | None, where: Path) -> list[Any]:
    if count is not None and len(things) < count:
        raise ConfigError(f"{where} has {len(things)} captions, and {count} are asked for; give all of them, or lower num_images")
    return things[:count]


def _prompt(columns: Sequence[str], row: Sequence[str], where: str) -> Prompt:
    fields = dict(zip(columns, row, strict=False))
    if len(row) != len(columns) or not (_is_id(fields["image_id"]) and _is_id(fields["id"])):
        raise ConfigError(f"{where} is {' | '.join(row)!r:.80}; it has to hold two whole numbers and a caption, with tabs between")
    return Prompt(int(fields["id"]), int(fields["image_id"]), fields["caption"])


def _caption_in(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{file} has more than {MAX_BYTES} bytes; a caption file may have so many, take it out of the folder")
        return " ".join(data.decode("utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error_line(error)}); give one caption a file, in UTF-8") from None
