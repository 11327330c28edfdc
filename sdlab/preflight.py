"""Looking at every picture before anything is encoded, and saying what is left out and why.

The source is only read. In the data folder it writes `index/` (what was listed), `checked/` (what decoding has shown),
`preflight.json` and `quarantine.jsonl`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sdlab import checks, pictures, runs, sources
from sdlab.captions import NEWLINES
from sdlab.config import ConfigError, PrepareConfig, resolve_path
from sdlab.crops import crop
from sdlab.index import CHUNK, Index
from sdlab.items import Item
from sdlab.pictures import BadPicture

PREFLIGHT = "preflight.json"
QUARANTINE = "quarantine.jsonl"
NOTED = 3
"""Pictures that are named for each note."""
SHOWN = 16
"""Quarantined pictures that are shown."""
TILE = 64
"""Pixels a side of a quarantined picture that is shown."""
GREY = 160
"""Value of every pixel where nothing can be shown."""


# Deciding: which pictures are used


@dataclass
class Found:
    """What preflight learned: counts by reason, and which pictures are used."""

    index: Index
    config: PrepareConfig
    max_tokens: int = 0
    """Longest caption that the text encoder reads."""
    scanned: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    captions: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    noted: dict[str, list[str]] = field(default_factory=dict)
    """The first pictures that each note is about."""
    shapes: dict[str, Counter[str]] = field(default_factory=dict)
    """How many used and filtered pictures have a smaller side, an aspect and a number of tokens of so much."""
    rows: np.ndarray = field(default_factory=lambda: _nothing()[0])
    """Rows of the index that are used, int64 (U,)."""
    digests: np.ndarray = field(default_factory=lambda: _nothing()[1])
    """Of the files of the used pictures, V16 (U,)."""
    sizes: np.ndarray = field(default_factory=lambda: _nothing()[2])
    """Height and width of the used pictures, int32 (U, 2)."""
    examples: dict[str, list[int]] = field(default_factory=dict)
    """Rows of the first pictures in quarantine, by reason."""
    first_note: str = ""
    """Why the first picture without a caption has none."""

    def note(self, mark: str, path: str) -> None:
        """Count what a person should know of a picture."""
        self.notes[mark] += 1
        if self.notes[mark] <= NOTED:
            self.noted.setdefault(mark, []).append(path)

    def report(self) -> dict[str, Any]:
        """The fields of `preflight.json`; `scanned` = `used` + sum of `filtered` + sum of `quarantined`."""
        totals = {name: sum(tally[name] for tally in self.index.tallies) for name in _TOTALS}
        ignored: Counter[str] = Counter()
        for tally in self.index.tallies:
            ignored.update(tally["ignored"])
        return {
            "source": self.index.name,
            "scanned": self.scanned,
            "used": len(self.rows),
            "filtered": dict(sorted(self.filtered.items())),
            "quarantined": dict(sorted(self.quarantined.items())),
            "captions": {name: self.captions[name] for name in ("present", "missing", "empty", "truncated")},
            "newlines": NEWLINES,
            "listed": {"shards": len(self.index.shards), **totals, "ignored": dict(ignored.most_common())},
            "notes": dict(sorted(self.notes.items())),
            "examples": self.noted,
            "shapes": {name: dict(counts) for name, counts in self.shapes.items()},
        }


_TOTALS = ("pictures", "captions", "pictures_without_caption", "captions_without_picture", "duplicates", "unreadable")


def decide(config: PrepareConfig, index: Index, max_tokens: int, folder: Path) -> Found:
    """Put together what the ranks have found, and write `preflight.json` and `quarantine.jsonl`.

    Args:
        config: filters, and whether captions are needed.
        index: what was listed.
        max_tokens: longest caption that the text encoder reads.
        folder: the data folder.
    """
    found, used = Found(index, config, max_tokens), []
    scratch = folder / f"{QUARANTINE}.partial"
    with scratch.open("w", encoding="utf-8") as lines:
        for number in range(math.ceil(len(index) / CHUNK)):
            unit = checks.read_unit(checks.unit_path(folder, number))
            if unit is None or unit.schema.metadata[b"run"].decode() != index.about["run"]:
                raise ConfigError(f"{checks.unit_path(folder, number)} is not of this call; another one works in {folder}: run again")
            used.append(_decide_unit(config, unit.to_pydict(), number * CHUNK, found, lines))
    os.replace(scratch, folder / QUARANTINE)
    found.rows, found.digests, found.sizes = (np.concatenate(column) for column in zip(*used, strict=True)) if used else _nothing()
    twins = len(found.digests) - len(np.unique(found.digests))
    found.notes.update({"same_bytes_as_another": twins} if twins else {})
    runs.write_json(folder / PREFLIGHT, found.report())
    checks.sweep(folder, index)
    return found


def _nothing() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.empty(0, np.int64), np.empty(0, "V16"), np.empty((0, 2), np.int32)


def _decide_unit(
    config: PrepareConfig, unit: dict[str, list[Any]], start: int, found: Found, lines: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count what became of the pictures of a unit; rows, digests and sizes of those that are used."""
    keep: list[int] = []
    rows = range(start, start + len(unit["digest"]))
    for place, (row, (part, item)) in enumerate(zip(rows, found.index.items(rows), strict=True)):
        one = {name: values[place] for name, values in unit.items()}
        _count_caption(item, one["num_tokens"], found)
        lost, bad = _verdict(config, item, one)
        if bad:
            found.quarantined[bad[0]] += 1
            found.first_note = found.first_note or (item.caption.note if bad[0] == "no_caption" else "")
            found.examples.setdefault(bad[0], []).extend([row] * (found.quarantined[bad[0]] <= SHOWN))
            root = found.index.about["parts"][part]["source"]
            lines.write(json.dumps({"path": item.path, "reason": bad[0], "detail": bad[1], "root": root}) + "\n")
        elif lost:
            found.filtered[lost] += 1
        else:
            keep.append(place)
        _count_shape(item, one, "quarantined" if bad else "filtered" if lost else "used", found)
    found.scanned += len(rows)
    digests = np.frombuffer(b"".join(unit["digest"][place] for place in keep), "V16")
    sizes = np.array([(unit["height"][place], unit["width"][place]) for place in keep], np.int32).reshape(-1, 2)
    return np.array(keep, np.int64) + start, digests, sizes


def _verdict(config: PrepareConfig, item: Item, one: dict[str, Any]) -> tuple[str, tuple[str, str] | None]:
    """The filter that takes a picture ("" for none), or reason and detail of its quarantine."""
    if one["filtered"] and not (item.problem and one["filtered"].endswith("_missing")):
        return one["filtered"], None
    if one["reason"]:
        return "", (one["reason"], one["detail"])
    if lost := _by_size(config, one["height"], one["width"]):
        return lost, None
    if not item.caption.text and not config.allow_uncaptioned:
        return "", ("no_caption", item.caption.note or ("there is no caption" if item.caption.text is None else "the caption is empty"))
    return "", None


def _by_size(config: PrepareConfig, height: int, width: int) -> str:
    """Which filter takes a picture of this size, "" for none."""
    if config.min_resolution is not None and min(height, width) < config.min_resolution:
        return "min_resolution"
    values = {"height": height, "width": width, "aspect": width / height}
    asked = [one for one in config.filters if one.column in values]
    lost = [one.column for one in asked if not checks.COMPARE[one.operator](values[one.column], one.value)]
    return lost[0] if lost else ""


def _count_caption(item: Item, num_tokens: int, found: Found) -> None:
    text = item.caption.text
    found.captions["present" if text else "missing" if text is None else "empty"] += 1
    found.captions["truncated"] += bool(text) and num_tokens > found.max_tokens
    for mark in item.caption.marks:
        found.note(mark, item.path)


def _count_shape(item: Item, one: dict[str, Any], state: str, found: Found) -> None:
    if one["height"]:
        for mark in pictures.marks_of(one["marks"]):
            found.note(mark, item.path)
        if _formats().get(os.path.splitext(item.path)[1].lower(), one["format"]) != one["format"]:
            found.note("wrong_extension", item.path)
        found.shapes.setdefault(f"{state}_smaller_side", Counter())[str(min(one["height"], one["width"]))] += 1
        found.shapes.setdefault(f"{state}_aspect", Counter())[f"{min(99.0, max(0.01, one['width'] / one['height'])):.2f}"] += 1
    if item.caption.text:
        found.shapes.setdefault(f"{state}_tokens", Counter())[str(min(one["num_tokens"], 1000))] += 1


@functools.cache
def _formats() -> dict[str, str]:
    return Image.registered_extensions()


def judge(config: PrepareConfig, found: Found, folder: Path) -> None:
    """Refuse what should not be trained on.

    Raises:
        ConfigError: no pictures, no captions, more bad pictures than `max_bad_fraction`, or no picture left.
    """
    counts = f"the {found.scanned:,} pictures in {config.source!r}"
    if not found.scanned:
        raise ConfigError(f"source {config.source!r} holds no pictures; give {sources.UNDERSTOOD}")
    if not found.captions["present"] and not config.allow_uncaptioned:
        note = f" ({found.first_note})" if found.first_note else ""
        advice = "put a .txt, .caption or .json of the same name beside each picture, or a metadata.jsonl with file_name and caption"
        if config.caption_column is not None:
            advice = f"caption_column={config.caption_column!r} is in none of them: correct it, or leave it out to take captions by name"
        raise ConfigError(f"no captions: none of {counts} has one{note}; {advice}, or set allow_uncaptioned")
    bad = sum(found.quarantined.values())
    if bad > config.max_bad_fraction * found.scanned:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.quarantined.most_common())
        raise ConfigError(
            f"{bad:,} of {counts} cannot be used ({reasons}), more than max_bad_fraction={config.max_bad_fraction} allows; "
            f"each is named in {folder / QUARANTINE}: repair or remove them, or raise max_bad_fraction"
        )
    if not len(found.rows):
        raise ConfigError(
            f"no picture is left of {counts}: filtered {dict(found.filtered)}, quarantined {dict(found.quarantined)}; loosen the filters"
        )


# What a person looks at


def read_preflight(data_dir: str | Path) -> dict[str, Any]:
    """The content of `preflight.json`."""
    return json.loads((resolve_path(data_dir) / PREFLIGHT).read_text(encoding="utf-8"))


def read_quarantine(data_dir: str | Path, n: int | None = None) -> list[dict[str, str]]:
    """The first `n` rows (None: all) of `quarantine.jsonl`: `path`, `reason`, `detail`, and the `root` as it was given."""
    with (resolve_path(data_dir) / QUARANTINE).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in itertools.islice(lines, n)]


def quarantined_pictures(found: Found) -> tuple[np.ndarray, list[str]]:
    """Some quarantined pictures of every reason, read again.

    Returns:
        uint8 (n, 3, TILE, TILE), grey where nothing can be decoded, and reason and path of each.
    """
    by_reason = [[(row, reason) for row in rows] for reason, rows in found.examples.items()]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*by_reason))
    chosen = sorted(itertools.islice((turn for turn in turns if turn is not None), SHOWN))
    items = list(found.index.items([row for row, _ in chosen]))
    tiles = np.full((len(items), 3, TILE, TILE), GREY, np.uint8)
    for tile, (part, item) in zip(tiles, items, strict=True):
        if item.problem is None:
            try:
                tile[:] = crop(pictures.open_picture(found.index.handle(part, item))[0], (TILE, TILE))[0]
            except BadPicture:
                continue
    return tiles, [f"{why}: {item.path.split('::')[-1]}" for (_, why), (_, item) in zip(chosen, items, strict=True)]
