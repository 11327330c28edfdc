"""From a person's pictures to a cache that training reads: preflight, then encode what is good.

The source is only read; everything is written in `data_dir`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sdlab import cache, launch, models, pictures, preflight, presets, runs
from sdlab.config import ConfigError, PrepareConfig, build, check_resolution, resolve_path
from sdlab.models import Frozen, to_pixel_values
from sdlab.pictures import Pixels
from sdlab.preflight import Found
from sdlab.sources import Item, Source

ENCODED_AT_ONCE = {"cpu": 16, "cuda": 64}
"""Pictures in one pass through the VAE, by device; 16 stay in a CPU's caches and go through a third faster than 64."""
SAMPLES = 64
"""Pictures a resolution that are decoded again, to measure what the VAE loses."""


def configure(**values: Any) -> PrepareConfig:
    """Check what a person gave, all problems together.

    Raises:
        ConfigError: unknown names, wrong types or values.
    """
    return build(PrepareConfig, values, where="what to prepare")


def prepare(config: PrepareConfig) -> dict[str, Any]:
    """Look at every picture of the source, then encode the good ones; what is already there with an equal key is kept.

    Returns:
        The manifest, as written to `manifest.json`.

    Raises:
        ConfigError: a resolution that cannot be halved, a source or a `data_dir` that cannot be used, no captions, more bad
            pictures than `max_bad_fraction`, no picture left, or too little disk.
    """
    networks = presets.get(config.preset).networks
    frozen = models.load_frozen(networks)
    for resolution in config.resolution:
        check_resolution(resolution, vae_factor=frozen.vae_factor, unet_factor=models.unet_factor(networks))
    folder, source = resolve_path(config.data_dir), preflight.find(config)
    _check_data_dir(folder, source)
    print(source.name)
    found = preflight.preflight(config, source, frozen, folder)
    preflight.judge(config, found, folder)
    return _encode(config, source, found, frozen, folder)


def _check_data_dir(folder: Path, source: Source) -> None:
    for root in source.roots:
        if folder.is_relative_to(root):
            raise ConfigError(f"data_dir {folder} lies in the source {root}, which is never written to; give a folder outside of it")
    if folder.is_file():
        raise ConfigError(f"data_dir {folder} is a file; give a folder")
    cache.read_manifest(folder)
    report = folder / preflight.PREFLIGHT
    if report.is_file() and '"scanned"' not in report.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"data_dir {folder} holds a {report.name} that sdlab did not write; give another folder")


def _encode(config: PrepareConfig, source: Source, found: Found, frozen: Frozen, folder: Path) -> dict[str, Any]:
    old = cache.read_manifest(folder) or {"resolutions": {}}
    keys = {r: _content_key(config, found, frozen, r) for r in {*config.resolution, *map(int, old["resolutions"])}}
    kept = {r: entry for r, entry in old["resolutions"].items() if entry["key"] == keys[int(r)] and _is_whole(folder, old, int(r))}
    missing = [r for r in config.resolution if str(r) not in kept]
    _say_plan(old, kept, missing)
    manifest = {**_describe(config, source, found, frozen), "text": old["text"] if kept else None, "resolutions": kept}
    if missing:
        _check_disk(folder, found, frozen, missing, with_text=not kept)
    runs.write_json(folder / cache.MANIFEST, manifest)
    for resolution in set(old["resolutions"]) - set(kept):
        cache.remove_shards(folder / cache.moments_folder(int(resolution)))
    if not kept:
        manifest["text"] = _encode_texts(list(found.texts), frozen, folder)
    if missing:
        made = _encode_pictures(config, source, found, frozen, folder, missing)
        entries = kept | {str(r): {"key": keys[r], **entry} for r, entry in made.items()}
        manifest["resolutions"] = dict(sorted(entries.items(), key=lambda pair: int(pair[0])))
        runs.write_json(folder / cache.MANIFEST, manifest)
    return manifest


def _content_key(config: PrepareConfig, found: Found, frozen: Frozen, resolution: int) -> str:
    parts = {
        "pixel_version": pictures.PIXEL_VERSION,
        "content": found.content,
        "encoders": frozen.hashes,
        "resolution": resolution,
        "crop": config.crop if config.crop == "center" else f"{config.crop} {config.seed}",
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _is_whole(folder: Path, manifest: dict[str, Any], resolution: int) -> bool:
    samples = folder / cache.moments_folder(resolution) / "samples.npz"
    try:
        cache.Cache(folder, manifest, resolution)
    except ConfigError as error:
        print(f"made anew: {error}")
        return False
    return samples.is_file()


def _say_plan(old: Mapping[str, Any], kept: Mapping[str, Any], missing: Sequence[int]) -> None:
    stale = [r for r in old["resolutions"] if r not in kept]
    if kept:
        print(f"already prepared: resolution {', '.join(kept)}")
    if stale:
        print(f"removed, made from other pictures or settings: resolution {', '.join(stale)}")
    if missing:
        print(f"to encode: resolution {', '.join(map(str, missing))}")


def _describe(config: PrepareConfig, source: Source, found: Found, frozen: Frozen) -> dict[str, Any]:
    report = found.report()
    return {
        "schema": cache.SCHEMA,
        "source": source.name,
        "config": config.model_dump(),
        "pixel_version": pictures.PIXEL_VERSION,
        "resize": "lanczos",
        "transparent_on": "white",
        "encoders": frozen.hashes,
        "scaling_factor": frozen.scaling_factor,
        "counts": {name: report[name] for name in ("scanned", "used", "filtered", "quarantined")},
        "content": found.content,
    }


def _check_disk(folder: Path, found: Found, frozen: Frozen, resolutions: Sequence[int], *, with_text: bool) -> None:
    rows = sum(found.used) * sum(2 * int(np.prod(_moments_shape(frozen, r))) + 128 for r in resolutions)
    text = len(found.texts) * (2 * int(np.prod(_text_shape(frozen))) + 512) if with_text else 0
    cache.check_disk(folder, rows + text)


def _moments_shape(frozen: Frozen, resolution: int) -> tuple[int, int, int]:
    side = resolution // frozen.vae_factor
    return 2 * int(frozen.vae.config.latent_channels), side, side


def _text_shape(frozen: Frozen) -> tuple[int, int]:
    return int(frozen.text_encoder.config.max_position_embeddings), int(frozen.text_encoder.config.hidden_size)


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


def _encode_texts(captions: Sequence[str], frozen: Frozen, folder: Path) -> dict[str, Any]:
    shape = _text_shape(frozen)
    lists = {"prompt_embeds": ("float16", shape[0] * shape[1]), "input_ids": ("int32", shape[0])}
    writer = cache.ShardWriter(folder / cache.TEXT, lists=lists, values={"caption": "string", "num_tokens": "int32"})
    with launch.progress(total=len(captions), title="Captions", unit=" captions") as bar:
        for start in range(0, len(captions), pictures.BATCH):
            batch = captions[start : start + pictures.BATCH]
            ids = frozen.tokenize(batch)
            embeds = _to_half(frozen.encode_text(ids), what="text states")
            writer.write(
                {"prompt_embeds": embeds, "input_ids": ids.int().numpy(), "caption": batch, "num_tokens": frozen.count_tokens(batch)}
            )
            bar.update(len(batch))
    return {"count": len(captions), "shape": list(shape), "dtype": "float16", "shards": writer.publish()}


def _encode_pictures(
    config: PrepareConfig, source: Source, found: Found, frozen: Frozen, folder: Path, resolutions: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Moments of the used pictures at each resolution; returns the manifest's entries."""
    used, content = sum(found.used), hashlib.sha256()
    makers = {r: _Moments(folder, r, frozen, count=used) for r in resolutions}
    work = partial(pictures.load_batch, resolutions=tuple(resolutions), crop=config.crop, seed=config.seed)
    items = itertools.compress(source.items(), found.used)
    with launch.progress(total=used, title="Encode", unit=" pictures") as bar:
        for batch, pixels in _unchanged(pictures.map_batches(work, items, num_workers=config.num_workers)):
            for item, digest in zip(batch, pixels.digests, strict=True):
                content.update(preflight.content_line(digest, item.caption or ""))
            for maker in makers.values():
                maker.add(pixels, batch, found.texts)
            bar.update(len(batch))
    if content.hexdigest() != found.content:
        raise ConfigError(f"pictures or captions of {source.name} were changed while they were read; run again")
    return {r: maker.publish() for r, maker in makers.items()}


def _unchanged(batches: Iterator[tuple[list[Item], Pixels]]) -> Iterator[tuple[list[Item], Pixels]]:
    try:
        yield from batches
    except pictures.BadPicture as bad:
        raise ConfigError(f"a picture that was good a moment ago is not any more ({bad.reason}: {bad.detail}); run again") from None


class _Moments:
    """Encodes the pictures of one resolution, writes them, and keeps a sample to measure what the VAE loses."""

    def __init__(self, folder: Path, resolution: int, frozen: Frozen, *, count: int) -> None:
        self._resolution, self._frozen, self._shape = resolution, frozen, _moments_shape(frozen, resolution)
        lists = {"moments": ("float16", int(np.prod(self._shape))), "original_size": ("int32", 2), "crop": ("int32", 2)}
        self._writer = cache.ShardWriter(folder / cache.moments_folder(resolution), lists=lists, values={"text": "int32", "path": "string"})
        self._wanted = set(np.linspace(0, count - 1, min(SAMPLES, count)).round().astype(int).tolist())
        self._samples: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._range: dict[str, tuple[float, float]] = {}
        self._count = self._upscaled = 0

    def add(self, pixels: Pixels, items: Sequence[Item], texts: Mapping[str, int]) -> None:
        """Encode and write one batch."""
        images, ids = pixels.images[self._resolution], [texts[item.caption or ""] for item in items]
        pixel_values = to_pixel_values(images)
        parts = [self._frozen.encode_moments(part) for part in pixel_values.split(ENCODED_AT_ONCE[self._frozen.device.type])]
        moments = _to_half(torch.cat(parts), what=f"moments at resolution {self._resolution}")
        columns = {"moments": moments, "original_size": pixels.original_size, "crop": pixels.crop[self._resolution], "text": ids}
        self._writer.write({**columns, "path": [item.path for item in items]})
        mean, log_variance = np.split(moments, 2, axis=1)
        self._widen(pixel_values=pixel_values.numpy(), mean=mean, log_variance=log_variance)
        self._samples += [(self._count + i, images[i], mean[i]) for i in range(len(items)) if self._count + i in self._wanted]
        self._upscaled += int((pixels.original_size.min(1) < self._resolution).sum())
        self._count += len(items)

    def _widen(self, **arrays: np.ndarray) -> None:
        for name, values in arrays.items():
            low, high = self._range.get(name, (np.inf, -np.inf))
            self._range[name] = (min(low, float(values.min())), max(high, float(values.max())))

    def publish(self) -> dict[str, Any]:
        """Move the shards to their place and return their entry in the manifest."""
        images, decoded = self._decode_samples()
        rows = np.array([row for row, _, _ in self._samples])
        np.savez(self._writer.partial / "samples.npz", rows=rows, images=images, decoded=decoded)
        about = {"count": self._count, "shape": list(self._shape), "dtype": "float16", "upscaled": self._upscaled}
        checked = {
            "range": {name: list(bounds) for name, bounds in self._range.items()},
            "psnr_db": round(float(pictures.psnr(images, decoded).mean()), 2),
        }
        return {**about, **checked, "shards": self._writer.publish()}

    def _decode_samples(self) -> tuple[np.ndarray, np.ndarray]:
        means = torch.from_numpy(np.stack([mean for _, _, mean in self._samples])).float()
        return np.stack([image for _, image, _ in self._samples]), self._frozen.decode(means * self._frozen.scaling_factor).numpy()


# What a person looks at


@dataclass(frozen=True)
class Samples:
    """Training pictures as the UNet's VAE gets them, and what it makes of them."""

    images: np.ndarray
    """uint8 (n, 3, r, r)."""
    decoded: np.ndarray
    """The same after encoding and decoding."""
    captions: list[str]

    @property
    def pairs(self) -> np.ndarray:
        """uint8 (2, n, 3, r, r): `images`, then `decoded`."""
        return np.stack([self.images, self.decoded])


def sample_pictures(data_dir: str | Path, resolution: int, *, n: int = 24) -> Samples:
    """Up to `n` of the kept pictures, evenly spread, at a prepared `resolution`.

    Raises:
        ConfigError: the folder or the resolution is not prepared.
    """
    opened = cache.open_cache(data_dir, resolution)
    with np.load(opened.folder / cache.moments_folder(resolution) / "samples.npz") as kept:
        rows, images, decoded = kept["rows"], kept["images"], kept["decoded"]
    pick = np.linspace(0, len(rows) - 1, min(n, len(rows))).round().astype(int)
    return Samples(images[pick], decoded[pick], [opened.captions[row] for row in rows[pick]])
