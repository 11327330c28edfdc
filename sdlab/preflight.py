"""Looking at every picture before anything is encoded, and saying what is left out and why.

It reads the source and writes only `preflight.json` and `quarantine.jsonl`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sdlab import launch, runs, sources
from sdlab.config import ConfigError, PrepareConfig, resolve_path
from sdlab.models import Frozen
from sdlab.pictures import BadPicture, Checked, check_batch, map_batches, open_batch, square_crop
from sdlab.sources import Item, Source

PREFLIGHT = "preflight.json"
QUARANTINE = "quarantine.jsonl"
TILE = 64
"""Pixels a side of a quarantined picture that is shown."""
GREY = 160
"""Value of every pixel where nothing can be shown."""


def find(config: PrepareConfig) -> Source:
    """Detect and count the pictures that `config` asks for.

    Raises:
        ConfigError: a path is not there, or nothing in it is understood.
    """
    return sources.open_source(config.source, caption_column=config.caption_column, limit=config.limit, seed=config.seed)


@dataclass
class Found:
    """What preflight learned: counts by reason, which items are used, and what the cache will be made of."""

    scanned: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    quarantined: Counter[str] = field(default_factory=Counter)
    captions: Counter[str] = field(default_factory=Counter)
    used: bytearray = field(default_factory=bytearray)
    """1 for each item that is used, 0 for the others, in source order."""
    texts: dict[str, int] = field(default_factory=lambda: {"": 0})
    """Different captions by their row in the text states; row 0 is the null condition."""
    content: str = ""
    """SHA-256 over file bytes and captions of the used pictures."""
    first_note: str = ""
    """Why the first picture without a caption has none."""

    def report(self) -> dict[str, Any]:
        """The fields of `preflight.json`; `scanned` = `used` + sum of `filtered` + sum of `quarantined`."""
        captions = {name: self.captions[name] for name in ("present", "missing", "empty", "truncated")}
        counts = {"filtered": dict(sorted(self.filtered.items())), "quarantined": dict(sorted(self.quarantined.items()))}
        return {"scanned": self.scanned, "used": sum(self.used), **counts, "captions": captions}


def preflight(config: PrepareConfig, source: Source, frozen: Frozen, folder: Path) -> Found:
    """Decode every picture whole; write `preflight.json` and `quarantine.jsonl` to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found, content = Found(), hashlib.sha256()
    part = folder / (QUARANTINE + ".partial")
    batches = map_batches(check_batch, source.items(), num_workers=config.num_workers)
    with part.open("w", encoding="utf-8") as lines, launch.progress(total=source.count, title="Preflight", unit=" pictures") as bar:
        for items, results in batches:
            _count_captions(items, found, frozen)
            for item, result in zip(items, results, strict=True):
                _count(item, result, config, found, content, lines)
            bar.update(len(items))
    os.replace(part, folder / QUARANTINE)
    found.content = content.hexdigest()
    runs.write_json(folder / PREFLIGHT, found.report())
    return found


def content_line(digest: str, caption: str) -> bytes:
    """What one used picture adds to the hash of the content."""
    return f"{digest} {len(caption)} {caption}\n".encode()


def _count_captions(items: Sequence[Item], found: Found, frozen: Frozen) -> None:
    present = [item.caption for item in items if item.caption]
    longest = frozen.text_encoder.config.max_position_embeddings
    found.captions["present"] += len(present)
    found.captions["missing"] += sum(item.caption is None for item in items)
    found.captions["empty"] += sum(item.caption == "" for item in items)
    found.captions["truncated"] += sum(count > longest for count in frozen.count_tokens(present)) if present else 0


def _count(item: Item, result: Checked, config: PrepareConfig, found: Found, content: Any, lines: Any) -> None:
    found.scanned += 1
    lost = _filter_reason(result.size, config) if result.size else None
    bad = result.problem or (("no_caption", item.note or _without(item)) if not item.caption and not config.allow_uncaptioned else None)
    found.used.append(not lost and not bad)
    if lost:
        found.filtered[lost] += 1
    elif bad:
        found.quarantined[bad[0]] += 1
        found.first_note = found.first_note or (item.note if bad[0] == "no_caption" else "")
        lines.write(json.dumps({"path": item.path, "reason": bad[0], "detail": bad[1]}) + "\n")
    else:
        found.texts.setdefault(item.caption or "", len(found.texts))
        content.update(content_line(result.digest, item.caption or ""))


def _without(item: Item) -> str:
    return "there is no caption" if item.caption is None else "the caption is empty"


def _filter_reason(size: tuple[int, int], config: PrepareConfig) -> str | None:
    height, width = size
    if config.min_resolution is not None and min(size) < config.min_resolution:
        return "min_resolution"
    if width / height < config.filters.get("min_aspect", 0):
        return "min_aspect"
    return "max_aspect" if width / height > config.filters.get("max_aspect", float("inf")) else None


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
        raise ConfigError(
            f"no captions: none of {counts} has one{note}; put a .txt, .caption or .json of the same name beside each picture, "
            f"or a metadata.jsonl with file_name and caption, or name the field with caption_column, or set allow_uncaptioned"
        )
    bad = sum(found.quarantined.values())
    if bad > config.max_bad_fraction * found.scanned:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.quarantined.most_common())
        raise ConfigError(
            f"{bad:,} of {counts} cannot be used ({reasons}), more than max_bad_fraction={config.max_bad_fraction} allows; "
            f"each is named in {folder / QUARANTINE}: repair or remove them, or raise max_bad_fraction"
        )
    if not any(found.used):
        raise ConfigError(
            f"no picture is left of {counts}: filtered {dict(found.filtered)}, quarantined {dict(found.quarantined)}; loosen the filters"
        )


# What a person looks at


def read_preflight(data_dir: str | Path) -> dict[str, Any]:
    """The content of `preflight.json`."""
    return json.loads((resolve_path(data_dir) / PREFLIGHT).read_text(encoding="utf-8"))


def read_quarantine(data_dir: str | Path, n: int | None = None) -> list[dict[str, str]]:
    """The first `n` rows (None: all) of `quarantine.jsonl`: `path`, `reason`, `detail`."""
    with (resolve_path(data_dir) / QUARANTINE).open(encoding="utf-8") as lines:
        return [json.loads(line) for line in itertools.islice(lines, n)]


def quarantined_pictures(config: PrepareConfig, n: int = 16) -> tuple[np.ndarray, list[str]]:
    """The first `n` quarantined pictures, read again: uint8 (n, 3, TILE, TILE), grey where nothing can be decoded; path and reason."""
    reasons = {row["path"]: row["reason"] for row in read_quarantine(config.data_dir, n)}
    listed = find(config).items() if reasons else ()
    items = list(itertools.islice((item for item in listed if item.path in reasons), len(reasons)))
    tiles = np.full((len(items), 3, TILE, TILE), GREY, np.uint8)
    for tile, (_, picture) in zip(tiles, open_batch(items), strict=True):
        if not isinstance(picture, BadPicture):
            tile[:] = square_crop(picture, TILE)[0]
    return tiles, [f"{item.path.split('::')[-1]}: {reasons[item.path]}" for item in items]
