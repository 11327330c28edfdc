"""What the cache is to hold, shard by shard, and the writing of those that are missing."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import ImageColor

from sdlab import cache, crops, launch, models, parts, pictures, places, pool, presets
from sdlab.config import ConfigError, PrepareConfig
from sdlab.crops import View
from sdlab.items import Handle
from sdlab.parts import Frozen, TextStates, to_pixel_values
from sdlab.pictures import Colour, Pixels
from sdlab.preflight import Found

Encoded = TypeVar("Encoded", torch.Tensor, TextStates)

ENCODED_AT_ONCE = 16
"""Pictures in one pass through the VAE; so many stay in a CPU's caches and go through a third faster than 64."""
PIXELS_AT_ONCE = 16 << 20
"""Pixels of one batch that a decoding process hands back."""


@dataclass(frozen=True)
class TextShard:
    """One shard of captions, all different."""

    name: str
    captions: list[str]
    keys: np.ndarray

    @property
    def folder(self) -> str:
        return cache.TEXT


@dataclass(frozen=True)
class RowShard:
    """One shard of moments: which used picture and which view each row shows."""

    name: str
    resolution: int
    shape: crops.Shape
    used: np.ndarray
    """Places in `Found.rows`."""
    views: list[View]
    keys: np.ndarray

    @property
    def folder(self) -> str:
        return cache.moments_folder(self.resolution)


@dataclass(frozen=True)
class Plan:
    """Every shard that the cache is to have, and where the caption of each used picture is: shard and row, int32 (U, 2)."""

    texts: list[TextShard]
    pointers: np.ndarray
    rows: dict[int, list[RowShard]]

    @property
    def shards(self) -> list[TextShard | RowShard]:
        return [*self.texts, *itertools.chain.from_iterable(self.rows.values())]


def make_plan(config: PrepareConfig, found: Found, frozen: Frozen, resolutions: Sequence[int]) -> Plan:
    """What the cache is to hold of the used pictures at some resolutions."""
    texts, pointers = _plan_texts(config, found, frozen)
    return Plan(texts, pointers, {r: list(_plan_rows(config, found, frozen, pointers, r)) for r in resolutions})


def _plan_texts(config: PrepareConfig, found: Found, frozen: Frozen) -> tuple[list[TextShard], np.ndarray]:
    """Different captions by blocks of used pictures, after the null condition; pictures without a caption point to that."""
    said_by = [digest for part, digest in frozen.hashes.items() if part.startswith("text_encoder")] if config.text_states else [None]
    read_by = [digest for part, digest in frozen.hashes.items() if part.startswith("tokenizer")]
    made_by = " ".join(map(str, [pictures.PIXEL_VERSION, *read_by, *said_by, frozen.layer, ""]))
    shards, pointers = [_text_shard([""], made_by)], np.zeros((len(found.rows), 2), np.int32)
    for start in range(0, len(found.rows), cache.ROWS):
        block = [item.caption.text or "" for _, item in found.index.items(found.rows[start : start + cache.ROWS])]
        places = {caption: place for place, caption in enumerate(dict.fromkeys(caption for caption in block if caption))}
        pointers[start : start + len(block)] = [(len(shards), places[caption]) if caption else (0, 0) for caption in block]
        shards += [_text_shard(list(places), made_by)] if places else []
    return shards, pointers


def _text_shard(captions: list[str], made_by: str) -> TextShard:
    keys = [hashlib.sha256((made_by + caption).encode()).digest()[:16] for caption in captions]
    return TextShard(_name(b"".join(keys)), captions, np.frombuffer(b"".join(keys), cache.KEY))


def _name(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _plan_rows(config: PrepareConfig, found: Found, frozen: Frozen, pointers: np.ndarray, resolution: int) -> Iterator[RowShard]:
    made_by = f"{pictures.PIXEL_VERSION} {frozen.hashes['vae']} {colour(config)}"
    shapes = _shapes(config, resolution)
    bucket = crops.nearest_bucket(found.sizes, shapes)
    for number, shape in enumerate(shapes):
        views = [View(shape, config.crop, config.seed, view, config.flip and view % 2 == 1) for view in range(config.views)]
        used = np.repeat(np.flatnonzero(bucket == number), len(views))
        for start in range(0, len(used), cache.ROWS):
            places = used[start : start + cache.ROWS]
            seen = [views[(start + row) % len(views)] for row in range(len(places))]
            keys = b"".join(view.key(found.digests[place].tobytes(), made_by) for view, place in zip(seen, places, strict=True))
            yield RowShard(_name(keys + pointers[places].tobytes()), resolution, shape, places, seen, np.frombuffer(keys, cache.KEY))


def _shapes(config: PrepareConfig, resolution: int) -> tuple[crops.Shape, ...]:
    if config.crop != "buckets":
        return ((resolution, resolution),)
    networks = presets.get(config.preset).networks
    unit = places.vae_factor(networks) * models.unet_factor(networks)
    return crops.buckets(resolution, crops.bucket_step(resolution, unit))


# Writing


def colour(config: PrepareConfig) -> Colour:
    """What transparent pictures are laid on.

    Raises:
        ConfigError: it is no colour.
    """
    try:
        red, green, blue = ImageColor.getrgb(config.background)[:3]
    except ValueError:
        raise ConfigError(f"background={config.background!r} is no colour; give a name or #rrggbb") from None
    return red, green, blue


def size_of(shard: TextShard | RowShard, frozen: Frozen, config: PrepareConfig) -> int:
    """Bytes of a shard, about."""
    if isinstance(shard, RowShard):
        return len(shard.keys) * (2 * math.prod(moments_shape(frozen, shard.shape)) + 64)
    states = 2 * sum(_state_sizes(frozen).values()) if config.text_states else 0
    return len(shard.keys) * (states + 4 * frozen.max_tokens * len(frozen.text_encoders) + 256)


def _state_sizes(frozen: Frozen) -> dict[str, int]:
    """Numbers in each column of the text states of a caption."""
    sizes = {"prompt_embeds": frozen.max_tokens * sum(frozen.text_widths), "pooled_prompt_embeds": frozen.pooled_width}
    return {name: size for name, size in sizes.items() if size}


def moments_shape(frozen: Frozen, shape: crops.Shape) -> tuple[int, int, int]:
    """Channels, height and width of the moments of pictures of a shape."""
    height, width = (side // frozen.vae_factor for side in shape)
    return 2 * int(frozen.vae.config.latent_channels), height, width


def write_shards(
    config: PrepareConfig, found: Found, plan: Plan, names: Sequence[str], whole: dict[str, list[str]], frozen: Frozen, folder: Path
) -> None:
    """Write some of the plan's shards, those of text first; rows that the whole shards hold are taken over."""
    asked = set(names)
    mine = [shard for shard in plan.shards if shard.name in asked]
    texts = [shard for shard in mine if isinstance(shard, TextShard)]
    if texts:
        _write_texts(config, texts, cache.Old(folder / cache.TEXT, whole[cache.TEXT]), frozen, folder / cache.TEXT)
    rows = [shard for shard in mine if isinstance(shard, RowShard)]
    for place, group in itertools.groupby(rows, key=lambda shard: shard.folder):
        _write_moments(config, found, plan, list(group), cache.Old(folder / place, whole[place]), frozen, folder / place)


def _write_texts(config: PrepareConfig, shards: Sequence[TextShard], old: cache.Old, frozen: Frozen, folder: Path) -> None:
    with launch.progress(total=sum(len(shard.captions) for shard in shards), title="Captions", unit=" captions") as bar:
        for shard in shards:
            cache.write_shard(folder, shard.name, _text_chunks(shard, old, frozen, bar, states=config.text_states), {})


def _text_chunks(shard: TextShard, old: cache.Old, frozen: Frozen, bar: Any, *, states: bool) -> Iterator[dict[str, Any]]:
    places = old.find(shard.keys)
    for start in range(0, len(shard.captions), cache.CHUNK):
        part = slice(start, start + cache.CHUNK)
        captions = shard.captions[part]
        ids = frozen.tokenize(captions)
        chunk = {"key": shard.keys[part], "input_ids": ids.int().numpy(), "caption": captions, "num_tokens": frozen.count_tokens(captions)}
        if states:
            chunk |= _states(places[part], ids, old, frozen)
        bar.update(len(captions))
        yield chunk


def _states(places: np.ndarray, ids: torch.Tensor, old: cache.Old, frozen: Frozen) -> dict[str, np.ndarray]:
    """Text states by column, taken over where they are there already."""
    columns = {name: np.empty((len(ids), size), np.float16) for name, size in _state_sizes(frozen).items()}
    for row in np.flatnonzero(places >= 0):
        for name, values in old.row(places[row], list(columns)).items():
            columns[name][row] = values
    new = np.flatnonzero(places < 0)
    if len(new):
        encoded = parts.join(_in_full_batches(ids[torch.from_numpy(new)], cache.CHUNK, frozen.encode_text))
        for name, values in encoded.named().items():
            columns[name][new] = _to_half(values, what="text states").reshape(len(new), -1)
    return columns


def _in_full_batches(rows: torch.Tensor, size: int, encode: Callable[[torch.Tensor], Encoded]) -> Iterator[Encoded]:
    """What `encode` makes of rows, always `size` at a time, so that a result does not depend on how many rows are new."""
    for part in rows.split(size):
        yield encode(launch.filled(part, size))[: len(part)]


def _to_half(values: torch.Tensor, *, what: str) -> np.ndarray:
    """float16 on the CPU.

    Raises:
        ConfigError: values that float16 cannot hold.
    """
    with np.errstate(over="ignore"):
        half = values.float().cpu().numpy().astype(np.float16)
    if not np.isfinite(half).all():
        raise ConfigError(f"{what} reach {float(values.abs().max()):g}, more than float16 holds; the encoder's weights seem damaged")
    return half


def _write_moments(
    config: PrepareConfig, found: Found, plan: Plan, shards: Sequence[RowShard], old: cache.Old, frozen: Frozen, folder: Path
) -> None:
    """Moments of one resolution: rows that are there already are copied, the others decoded in the pool and encoded here."""
    places = {shard.name: old.find(shard.keys) for shard in shards}
    new = sum(int((place < 0).sum()) for place in places.values())
    load = partial(pictures.load_batch, background=colour(config))
    jobs = _jobs(found, shards, places)
    loaded = pool.map_batches(load, jobs, num_workers=pool.workers(config.num_workers, new))
    with launch.progress(total=sum(len(shard.keys) for shard in shards), title=f"Encode {shards[0].resolution}", unit=" rows") as bar:
        for number, group in itertools.groupby(_unchanged(loaded), key=lambda pair: pair[0][0]):
            shard = shards[number]
            filled = _Filled(shard, plan.pointers, old, places[shard.name], frozen)
            bar.update(int((places[shard.name] >= 0).sum()))
            for (_, rows), pixels in group:
                if pixels is not None:
                    for row, digest in zip(rows, pixels.digests, strict=True):
                        check_digest(found, shard, row, digest)
                    filled.add(rows, pixels)
                    bar.update(len(rows))
            cache.write_shard(folder, shard.name, filled.chunks(), {"range": filled.range()})


Job = tuple[tuple[int, list[int]], list[tuple[Handle, View]]]


def _jobs(found: Found, shards: Sequence[RowShard], places: dict[str, np.ndarray]) -> Iterator[Job]:
    """Batches of rows to decode, with the number of their shard; an empty one for a shard that is all there."""
    for number, shard in enumerate(shards):
        new = np.flatnonzero(places[shard.name] < 0)
        size = _loaded_at_once(shard.shape)
        for start in range(0, max(1, len(new)), size):
            rows = new[start : start + size].tolist()
            items = found.index.items(found.rows[shard.used[rows]])
            yield (number, rows), [(found.index.handle(*item), shard.views[row]) for item, row in zip(items, rows, strict=True)]


def _loaded_at_once(shape: crops.Shape) -> int:
    return min(pool.BATCH, max(1, PIXELS_AT_ONCE // math.prod(shape)))


def _unchanged(loaded: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from loaded
    except pictures.BadPicture as bad:
        raise ConfigError(f"a picture that was good a moment ago is not any more ({bad.reason}: {bad.detail}); run again") from None


def check_digest(found: Found, shard: RowShard, row: int, digest: bytes) -> None:
    """Make sure that the picture of a row has the bytes that were looked at.

    Raises:
        ConfigError: it has others.
    """
    if found.digests[shard.used[row]].tobytes() != digest:
        _, item = next(found.index.items([found.rows[shard.used[row]]]))
        raise ConfigError(f"{item.path} was changed after it was looked at; run again")


class _Filled:
    """The columns of one shard of moments while they are filled."""

    def __init__(self, shard: RowShard, pointers: np.ndarray, old: cache.Old, places: np.ndarray, frozen: Frozen) -> None:
        self._shard, self._frozen, count = shard, frozen, len(shard.keys)
        self._columns: dict[str, np.ndarray] = {
            "moments": np.empty((count, math.prod(moments_shape(frozen, shard.shape))), np.float16),
            "original_size": np.empty((count, 2), np.int32),
            "crop": np.empty((count, 2), np.int32),
        }
        for row in np.flatnonzero(places >= 0):
            for name, values in old.row(places[row], list(self._columns)).items():
                self._columns[name][row] = values
        self._columns |= {"key": shard.keys, "text": pointers[shard.used]}

    def add(self, rows: Sequence[int], pixels: Pixels) -> None:
        """Encode one batch."""
        pixel_values = to_pixel_values(pixels.images)
        size = min(ENCODED_AT_ONCE, _loaded_at_once(self._shard.shape))
        encoded = torch.cat(list(_in_full_batches(pixel_values, size, self._frozen.encode_moments)))
        moments = _to_half(encoded, what=f"moments at resolution {self._shard.resolution}")
        self._columns["moments"][rows] = moments.reshape(len(rows), -1)
        self._columns["original_size"][rows], self._columns["crop"][rows] = pixels.original_size, pixels.crop

    def chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """The shard as it is written."""
        for start in range(0, len(self._shard.keys), cache.CHUNK):
            yield {name: values[start : start + cache.CHUNK] for name, values in self._columns.items()}

    def range(self) -> dict[str, list[float]]:
        """Least and largest mean and log-variance."""
        halves = zip(("mean", "log_variance"), np.split(self._columns["moments"], 2, axis=1), strict=True)
        return {name: [float(values.min()), float(values.max())] for name, values in halves}
