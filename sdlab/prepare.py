"""From a person's pictures to a cache that training reads: list, look at every picture, then encode what is good.

The source is only read; everything is written in `data_dir`. Both passes can be shared out: over processes that decode, and over
ranks that encode, on one or many nodes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout

from sdlab import cache, checks, crops, encode, index, launch, models, parts, pictures, places, preflight, presets, runs, sources
from sdlab.captions import NEWLINES
from sdlab.config import SIZE_COLUMNS, ConfigError, PrepareConfig, build, check_resolution, resolve_path
from sdlab.parts import Frozen, to_pixel_values
from sdlab.preflight import Found

LOCK = ".sdlab-data.lock"
"""Marks a data folder as ours, and is held by whoever writes in it."""
USED = "used.npz"
TODO = "todo.json"
SAMPLES = 32
"""Pictures a resolution that are decoded again, to measure what the VAE loses."""


def configure(**values: Any) -> PrepareConfig:
    """Check what a person gave, all problems together.

    Raises:
        ConfigError: unknown names, wrong types or values, an unknown preset, or a resolution that cannot be halved.
    """
    config = build(PrepareConfig, values, where="what to prepare")
    networks = presets.get(config.preset).networks
    for resolution in config.resolution:
        check_resolution(resolution, vae_factor=places.vae_factor(networks), unet_factor=models.unet_factor(networks))
    encode.colour(config)
    return config


def inspect(config: PrepareConfig) -> Found:
    """Look at every picture of the source: list it, decode what filters by metadata leave, and say what is left out and why.

    Writes `preflight.json`, `quarantine.jsonl` and what they were made of to `config.data_dir`. Pictures whose bytes were looked at
    before are read, but not decoded again.

    Raises:
        ConfigError: a source or a `data_dir` that cannot be used.
    """
    folder, source = resolve_path(config.data_dir), _source(config)
    with _locked(folder, config):
        return _inspect(config, source, folder, parts.load_frozen(presets.get(config.preset).networks))


def prepare(config: PrepareConfig, found: Found | None = None) -> dict[str, Any]:
    """Encode what is good; every entry that is there already, made from the same file by the same encoder and code, is kept.

    Args:
        config: of `configure`.
        found: of `inspect`; without it, the source is looked at first.

    Returns:
        The manifest, as written to `manifest.json`.

    Raises:
        ConfigError: a source or a `data_dir` that cannot be used, no captions, more bad pictures than `max_bad_fraction`, no
            picture left, too little disk, or pictures that have changed since they were looked at.
    """
    folder, found = resolve_path(config.data_dir), found or inspect(config)
    with _locked(folder, config):
        _check_found(config, found, folder)
        preflight.judge(config, found, folder)
        return _encode(config, found, parts.load_frozen(presets.get(config.preset).networks), folder)


ASKED = ("preset", "source", "data_dir", "caption_column", "filters", "min_resolution", "limit", "allow_uncaptioned", "seed")
"""Settings that what `inspect` finds depends on."""


def _check_found(config: PrepareConfig, found: Found, folder: Path) -> None:
    """Refuse what was found with other settings, or is no longer what lies in the folder."""
    changed = [name for name in ASKED if getattr(config, name) != getattr(found.config, name)]
    if changed:
        was = "; ".join(f"{name}: then {getattr(found.config, name)!r}, now {getattr(config, name)!r}" for name in changed)
        raise ConfigError(f"the pictures were looked at with other settings ({was}); call inspect with these")
    if not (folder / index.FOLDER / index.ABOUT).is_file() or index.Index(folder).about["run"] != found.index.about["run"]:
        raise ConfigError(f"data_dir {folder} has been looked at anew or removed since; run again")


@contextmanager
def _locked(folder: Path, config: PrepareConfig) -> Iterator[None]:
    """The data folder, for this process alone.

    Raises:
        ConfigError: it is in use, lies in the source, or holds what sdlab did not write.
    """
    _check_data_dir(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        raise ConfigError(f"data_dir {folder} is being prepared by another process; wait for it, or give another data_dir") from None


def _check_data_dir(folder: Path, config: PrepareConfig) -> None:
    for given in [config.source] if isinstance(config.source, str) else config.source:
        root = None if given == "scenes" else resolve_path(given)
        if root is not None and root.is_dir() and folder.is_relative_to(root):
            raise ConfigError(f"data_dir {folder} lies in the source {root}, which is never written to; give a folder outside of it")
        if root is not None and root.is_relative_to(folder) and root != folder and _is_ours(root.relative_to(folder).parts[0]):
            raise ConfigError(f"source {root} lies where data_dir {folder} is written to; give another data_dir")
    if folder.is_file():
        raise ConfigError(f"data_dir {folder} is a file; give a folder")
    cache.read_manifest(folder)
    marked = (folder / LOCK).exists() or not folder.exists()
    foreign = [] if marked else sorted(path.name for path in folder.iterdir() if _is_ours(path.name))
    if foreign:
        raise ConfigError(f"data_dir {folder} holds a {foreign[0]} that sdlab did not write; give another folder")


def _is_ours(name: str) -> bool:
    """Whether a name in a data folder is one that is written there."""
    ours = (cache.MANIFEST, preflight.PREFLIGHT, preflight.QUARANTINE, checks.FOLDER, index.FOLDER, cache.TEXT)
    return name in ours or name.startswith(cache.moments_folder(0)[:-1])


def _columns(config: PrepareConfig) -> list[str]:
    """Numbers of the metadata that filters may ask for."""
    columns = [one.column for one in config.filters if one.column not in SIZE_COLUMNS]
    return list(dict.fromkeys([*columns, *(("width", "height") if config.min_resolution is not None else ())]))


def _source(config: PrepareConfig) -> sources.Source:
    return sources.open_source(
        config.source, caption_column=config.caption_column, columns=_columns(config), limit=config.limit, seed=config.seed
    )


def _inspect(config: PrepareConfig, source: sources.Source, folder: Path, frozen: Frozen) -> Found:
    listed = index.write(source, folder, columns=_columns(config), seed=config.seed)
    print(listed.name)
    checks.gather_known(folder, listed.about["run"])
    _share_out(config, folder, "check", partial(checks.check, config, listed, frozen, folder))
    return preflight.decide(config, listed, frozen.max_tokens, folder)


def _share_out(config: PrepareConfig, folder: Path, step: str, here: Any) -> None:
    """Do a step in this process, or on as many ranks as are asked for."""
    devices = launch.devices(config.devices)
    if devices * config.num_nodes == 1:
        here()
    else:
        job = {"verb": "prepare", "step": step, "config": config.model_dump(mode="json")}
        launch.run_ranks(folder / index.FOLDER / "job", job, launch.Ranks(devices, config.num_nodes))


def work(job: dict[str, Any], *, rank: int, world_size: int) -> None:
    """What one rank does of a step that `prepare` or `inspect` share out."""
    config = PrepareConfig.model_validate(job["config"])
    folder, frozen = resolve_path(config.data_dir), parts.load_frozen(presets.get(config.preset).networks)
    listed = index.Index(folder)
    if job["step"] == "check":
        checks.check(config, listed, frozen, folder, rank=rank, world_size=world_size)
        return
    with np.load(folder / index.FOLDER / USED) as used:
        found = Found(listed, config, rows=used["rows"], digests=used["digests"], sizes=used["sizes"])
    todo = json.loads((folder / index.FOLDER / TODO).read_text(encoding="utf-8"))
    names = todo["names"][rank::world_size]
    encode.write_shards(config, found, encode.make_plan(config, found, frozen, todo["resolutions"]), names, todo["whole"], frozen, folder)


def _encode(config: PrepareConfig, found: Found, frozen: Frozen, folder: Path) -> dict[str, Any]:
    old = cache.read_manifest(folder) or {"resolutions": {}, "text": {"shards": []}}
    plan = encode.make_plan(config, found, frozen, sorted({*config.resolution, *map(int, old["resolutions"])}))
    wanted = {r: rows for r, rows in plan.rows.items() if r in config.resolution or _is_same(old, r, rows)}
    for resolution in plan.rows.keys() - wanted.keys():
        print(f"resolution {resolution}: made of other pictures or settings, and not asked for now: removed")
    plan = encode.Plan(plan.texts, plan.pointers, wanted)
    resolutions = sorted({*plan.rows, *map(int, old["resolutions"])})
    whole = {name: cache.whole_shards(folder / name) for name in (cache.TEXT, *map(cache.moments_folder, resolutions))}
    missing = [shard for shard in plan.shards if shard.name not in whole[shard.folder]]
    counts = {r: _count_entries(folder, whole[cache.moments_folder(r)], old, r, plan.rows.get(r, [])) for r in resolutions}
    cache.check_disk(folder, sum(encode.size_of(shard, frozen, config) for shard in missing))
    names = [shard.name for shard in missing]
    if names:
        np.savez(folder / index.FOLDER / USED, rows=found.rows, digests=found.digests, sizes=found.sizes)
        runs.write_json(folder / index.FOLDER / TODO, {"resolutions": list(plan.rows), "names": names, "whole": whole})
        _share_out(config, folder, "encode", partial(encode.write_shards, config, found, plan, names, whole, frozen, folder))
    manifest = _describe(config, found, frozen, folder, plan, counts)
    runs.write_json(folder / cache.MANIFEST, manifest)
    cache.sweep(folder / cache.TEXT, {shard.name for shard in plan.texts})
    for place in folder.glob(f"{cache.moments_folder(0)[:-1]}*"):
        entry = next((one for r, one in manifest["resolutions"].items() if cache.moments_folder(int(r)) == place.name), {"samples": ""})
        cache.sweep(place, {shard.name for shard in plan.shards if shard.folder == place.name} | {entry["samples"]})
    return manifest


def _is_same(old: dict[str, Any], resolution: int, rows: Sequence[encode.RowShard]) -> bool:
    """Whether an earlier resolution that is not asked for now still holds what it would hold."""
    return [shard["name"] for shard in cache.moment_shards(old, resolution)] == [f"{shard.name}.arrow" for shard in rows]


def _count_entries(
    folder: Path, whole: Sequence[str], old: dict[str, Any], resolution: int, rows: Sequence[encode.RowShard]
) -> dict[str, int]:
    """Entries that are kept (hits), encoded now (misses), and dropped since they were made of something else (stale)."""
    place = folder / cache.moments_folder(resolution)
    named = {shard["name"] for shard in cache.moment_shards(old, resolution)}
    tables = {name: cache.keys_of(cache.read_shard(place / f"{name}.arrow")) for name in whole}
    wanted = np.concatenate([np.empty(0, cache.KEY), *(shard.keys for shard in rows)])
    there = np.concatenate([np.empty(0, cache.KEY), *tables.values()])
    before = np.concatenate([np.empty(0, cache.KEY), *(keys for name, keys in tables.items() if f"{name}.arrow" in named)])
    hits = int(np.isin(wanted, there).sum())
    counts = {"hits": hits, "misses": len(wanted) - hits, "stale": int((~np.isin(before, wanted)).sum())}
    print(f"resolution {resolution}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items()))
    return counts


# Describing it


def _describe(
    config: PrepareConfig, found: Found, frozen: Frozen, folder: Path, plan: encode.Plan, counts: dict[int, dict[str, int]]
) -> dict[str, Any]:
    report = found.report()
    text = {
        "count": sum(len(shard.captions) for shard in plan.texts),
        "length": frozen.max_tokens,
        "widths": list(frozen.text_widths),
        "pooled_width": frozen.pooled_width,
        "states": config.text_states,
        "layer": frozen.layer,
        "dtype": "float16",
        "shards": [_found(folder, shard) for shard in plan.texts],
    }
    return {
        "schema": cache.SCHEMA,
        "source": found.index.name,
        "config": config.model_dump(mode="json"),
        "pixel_version": pictures.PIXEL_VERSION,
        "resize": "lanczos",
        "transparent_on": config.background,
        "newlines": NEWLINES,
        "encoders": frozen.hashes,
        "scaling_factor": frozen.scaling_factor,
        "counts": {name: report[name] for name in ("scanned", "used", "filtered", "quarantined")},
        "entries": {str(r): one for r, one in counts.items()},
        "text": text,
        "resolutions": {str(r): _describe_rows(config, found, frozen, folder, plan, r) for r in sorted(plan.rows)},
    }


def _found(folder: Path, shard: encode.TextShard | encode.RowShard) -> dict[str, Any]:
    about = cache.find_shard(folder / shard.folder, shard.name, hashes=False)
    if about is None:
        raise ConfigError(f"{folder / shard.folder / shard.name}.arrow was not written or is gone; run again")
    return about


def _describe_rows(config: PrepareConfig, found: Found, frozen: Frozen, folder: Path, plan: encode.Plan, resolution: int) -> dict[str, Any]:
    shards = plan.rows[resolution]
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(shard.keys.tobytes())
        for number, row in plan.pointers[shard.used].tolist():
            digest.update(plan.texts[number].keys[row].tobytes())
    buckets = [
        _describe_bucket(found, frozen, folder, shape, list(group)) for shape, group in itertools.groupby(shards, key=lambda one: one.shape)
    ]
    samples = f"samples-{digest.hexdigest()[:16]}.npz"
    path = folder / cache.moments_folder(resolution) / samples
    if (measured := _measure(path)) is None:
        _write_samples(config, found, frozen, path, shards)
        measured = _measure(path)
    return {
        "key": digest.hexdigest(),
        "count": sum(bucket["count"] for bucket in buckets),
        "dtype": "float16",
        "upscaled": sum(bucket["upscaled"] for bucket in buckets),
        "range": _join_ranges([shard["range"] for bucket in buckets for shard in bucket["shards"]]),
        **(measured or {}),
        "samples": samples,
        "buckets": buckets,
    }


def _describe_bucket(found: Found, frozen: Frozen, folder: Path, shape: crops.Shape, shards: Sequence[encode.RowShard]) -> dict[str, Any]:
    used = np.unique(np.concatenate([shard.used for shard in shards]))
    return {
        "height": shape[0],
        "width": shape[1],
        "shape": list(encode.moments_shape(frozen, shape)),
        "pictures": len(used),
        "count": sum(len(shard.keys) for shard in shards),
        "upscaled": int(crops.is_upscaled(found.sizes[used], shape).sum()),
        "cut_away": round(float(crops.cut_away(found.sizes[used], shape).mean()), 4),
        "shards": [_found(folder, shard) for shard in shards],
    }


def _write_samples(config: PrepareConfig, found: Found, frozen: Frozen, path: Path, shards: Sequence[encode.RowShard]) -> None:
    """Keep some pictures, evenly spread, as they go into the VAE and as they come back."""
    starts = np.cumsum([0, *(len(shard.keys) for shard in shards)])
    rows = np.linspace(0, starts[-1] - 1, min(SAMPLES, starts[-1])).round().astype(int)
    arrays: dict[str, np.ndarray] = {"rows": rows}
    for number, (row, at) in enumerate(zip(rows, np.searchsorted(starts, rows, side="right") - 1, strict=True)):
        shard, local = shards[at], int(row - starts[at])
        stored = cache.read_shard(path.with_name(f"{shard.name}.arrow")).column("moments").chunk(local // cache.CHUNK)[local % cache.CHUNK]
        moments = torch.from_numpy(np.array(stored.values)).float().reshape(1, *encode.moments_shape(frozen, shard.shape))
        arrays[f"image_{number}"] = _pixels(config, found, shard, local)
        arrays[f"decoded_{number}"] = frozen.decode(moments.chunk(2, dim=1)[0] * frozen.scaling_factor).numpy()[0]
    scratch = path.with_name(f"{path.name}.partial.npz")
    np.savez(scratch, **arrays)  # type: ignore[arg-type]
    scratch.rename(path)


def _pixels(config: PrepareConfig, found: Found, shard: encode.RowShard, row: int) -> np.ndarray:
    """A picture as it went into the VAE, read again."""
    part, item = next(found.index.items([found.rows[shard.used[row]]]))
    try:
        picture, digest = pictures.open_picture(found.index.handle(part, item), encode.colour(config))
    except pictures.BadPicture as bad:
        raise ConfigError(f"{item.path} was good a moment ago and is not any more ({bad.reason}: {bad.detail}); run again") from None
    encode.check_digest(found, shard, row, digest)
    return shard.views[row].cut(picture, digest)[0]


def _measure(path: Path) -> dict[str, Any] | None:
    """What the sample says of the pixels that went into the VAE, and of what came back; None where it cannot be read."""
    try:
        with np.load(path) as kept:
            pairs = [(kept[f"image_{number}"], kept[f"decoded_{number}"]) for number in range(len(kept["rows"]))]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    ends = [f(float(to_pixel_values(image).aminmax()[place]) for image, _ in pairs) for place, f in enumerate((min, max))]
    return {"pixel_values": ends, "psnr_db": round(float(np.mean([pictures.psnr(a[None], b[None])[0] for a, b in pairs])), 2)}


def _join_ranges(ranges: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: [min(one[name][0] for one in ranges), max(one[name][1] for one in ranges)] for name in ranges[0]}


# What a person looks at


@dataclass(frozen=True)
class Samples:
    """Training pictures as the UNet's VAE gets them, and what it makes of them."""

    images: np.ndarray
    """uint8 (n, 3, H, W); smaller ones lie on grey."""
    decoded: np.ndarray
    """The same after encoding and decoding."""
    captions: list[str]

    @property
    def pairs(self) -> np.ndarray:
        """uint8 (2, n, 3, H, W): `images`, then `decoded`."""
        return np.stack([self.images, self.decoded])


def sample_pictures(data_dir: str | Path, resolution: int, *, n: int = 24) -> Samples:
    """Up to `n` of the kept pictures, evenly spread, at a prepared `resolution`.

    Raises:
        ConfigError: the folder or the resolution is not prepared.
    """
    opened = cache.open_cache(data_dir, resolution)
    name = opened.manifest["resolutions"][str(resolution)]["samples"]
    with np.load(opened.folder / cache.moments_folder(resolution) / name) as kept:
        rows = kept["rows"]
        pick = np.linspace(0, len(rows) - 1, min(n, len(rows))).round().astype(int)
        images, decoded = ([kept[f"{kind}_{number}"] for number in pick] for kind in ("image", "decoded"))
    return Samples(_together(images), _together(decoded), opened.captions(rows[pick]))


def _together(images: Sequence[np.ndarray]) -> np.ndarray:
    """Pictures of different shapes in one array, each in the middle of grey."""
    height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
    together = np.full((len(images), 3, height, width), preflight.GREY, np.uint8)
    for place, image in zip(together, images, strict=True):
        top, left = (height - image.shape[1]) // 2, (width - image.shape[2]) // 2
        place[:, top : top + image.shape[1], left : left + image.shape[2]] = image
    return together
