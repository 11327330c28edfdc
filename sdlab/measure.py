"""Draw the pictures of a FID-CLIP study and measure them, a shard of prompts at a time, on any number of ranks.

A shard is drawn whole by one rank, at all scales from the same noise, and kept as soon as it is measured; shards are read in their order,
so that results depend neither on the number of ranks nor on how often a study was stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from sdlab import drawing, features, launch, models, places, sample, scenes, solvers, stored
from sdlab.config import ConfigError, Model, SamplePrecision, resolve_path

SHARD = 64
"""Prompts of a shard."""
SHOWN = 16
"""Pictures of a guidance scale that are kept."""
JOB = "job"


class EvaluateConfig(Model):
    """What notebook 04 asks."""

    models: list[str] = Field(["tiny"], min_length=1)
    """Run folders, pipeline folders or "tiny": one curve each."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    checkpoint: int | Literal["latest"] = "latest"
    guidance_scales: list[float] = Field([1, 1.5, 2, 3, 4, 5, 6, 7, 8], min_length=1)
    num_images: int = Field(160, ge=2)
    """Prompts, and pictures a guidance scale."""
    solver: str = "dpmpp_2m"
    num_inference_steps: int = Field(10, ge=1)
    batch_size: int = Field(32, ge=1)
    precision: SamplePrecision = "32-true"
    """Number format of the UNet's forwards; judge, solver and VAE stay float32."""
    seed: int = Field(0, ge=0)
    """Of prompts and initial noise."""
    devices: int | Literal["auto"] = "auto"
    num_nodes: int = Field(1, ge=1)
    study_dir: str = "papermill_runs/out/studies/fid_clip"

    @model_validator(mode="after")
    def _values_fit(self) -> Self:
        for name in ("models", "guidance_scales"):
            twice = [value for value, count in Counter(getattr(self, name)).items() if count > 1]
            if twice:
                raise ValueError(f"{name} holds {twice[0]!r} more than once; give each once")
        wrong = [scale for scale in self.guidance_scales if not 0 <= scale < float("inf")]
        if wrong:
            raise ValueError(f"guidance_scales {wrong}: a scale is 0 or more (1 is off)")
        solvers.check(self.solver, self.num_inference_steps)
        return self


@dataclass(frozen=True)
class Asked:
    """Prompts of a study: captions of scenes, each with the seed of the noise that its pictures start from at every scale."""

    seed: int
    drawn: list[scenes.Scene]

    @classmethod
    def of(cls, count: int, *, seed: int) -> Asked:
        """The captions of so many scenes that a seed draws."""
        return cls(seed, scenes.draw(count, seed=seed))

    @cached_property
    def prompts(self) -> list[str]:
        return [scene.caption for scene in self.drawn]

    @property
    def noise_seed(self) -> int:
        """Of the first prompt; each next one has the next."""
        return self.seed * 1_000_000

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the prompts."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()

    @property
    def shards(self) -> list[slice]:
        """Which prompts each shard has."""
        return [slice(start, min(start + SHARD, len(self.drawn))) for start in range(0, len(self.drawn), SHARD)]


@dataclass(frozen=True)
class Point:
    """One model at one guidance scale: a point of a curve, and the folder that its shards are kept in."""

    found: stored.Stored
    how: drawing.Drawing
    guidance_scale: float
    folder: Path

    def shard(self, index: int) -> Path:
        """The file of a shard."""
        return self.folder / f"{index:05d}.npz"

    def missing(self, asked: Asked) -> list[int]:
        """Shards that are not there whole."""
        return [index for index, which in enumerate(asked.shards) if _read(self.shard(index), which.stop - which.start) is None]

    def collect(self, asked: Asked) -> dict[str, np.ndarray]:
        """What was measured of all prompts in their order: `features` (n, D), `clip_scores` (n,), the reader's verdicts, and `pictures`.

        Raises:
            ConfigError: a shard is not there whole.
        """
        parts = [_read(self.shard(index), which.stop - which.start) for index, which in enumerate(asked.shards)]
        lost = [str(self.shard(index)) for index, part in enumerate(parts) if part is None]
        if lost:
            raise ConfigError(f"{lost[0]} is gone or damaged; run the study again, which draws it anew")
        known = [part for part in parts if part is not None]
        return {name: np.concatenate([part[name] for part in known]) for name in known[0]}


def find(cfg: EvaluateConfig) -> list[stored.Stored]:
    """The models of a study, as they are stored.

    Raises:
        ConfigError: one is not there, or they draw at different resolutions.
    """
    found = [stored.find(name, weights=cfg.weights, checkpoint=cfg.checkpoint) for name in cfg.models]
    resolutions = {one.name: one.resolution for one in found}
    if len(set(resolutions.values())) > 1:
        raise ConfigError(f"models draw at different resolutions ({resolutions}), which no axis can share; evaluate each by itself")
    return found


def point(cfg: EvaluateConfig, found: stored.Stored, guidance_scale: float, asked: Asked, judge: features.Judge) -> Point:
    """A point of a curve; its folder is named after all that its shards depend on.

    Raises:
        ConfigError: as `drawing.configure`, or a scale that cannot be used.
    """
    shared = {"solver": cfg.solver, "num_inference_steps": cfg.num_inference_steps, "precision": cfg.precision}
    how = drawing.configure(found, batch_size=min(cfg.batch_size, cfg.num_images), **shared)  # type: ignore[arg-type]
    drawing.check_scales(how.guidance, [guidance_scale])
    depends = {
        **{**shared, "batch_size": how.batch_size, "guidance_scale": float(guidance_scale), "size": how.size, "schema": 2},
        **{"weights": found.weights_hash, "frozen": places.hash_frozen(found.networks)},
        **{"networks": found.networks.model_dump(mode="json", exclude={"frozen"})},
        **{"judge": judge.weights_hash, "pixel_path": judge.pixel_path(found.resolution)},
        **{"prompts": asked.digest, "noise_seed": asked.noise_seed},
    }
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    return Point(found, how, guidance_scale, resolve_path(cfg.study_dir) / "shards" / f"guidance-{guidance_scale:g}-{key[:16]}")


def run(cfg: EvaluateConfig, points: Sequence[Point], asked: Asked, judge: features.Judge, *, title: str = "evaluate") -> None:
    """Draw and measure what is missing of some points, here or on as many ranks as are asked for."""
    different = {one.folder: one for one in reversed(points)}
    points = list(reversed(different.values()))
    units = list(dict.fromkeys((one.found.name, index) for one in points for index in one.missing(asked)))
    ranks = launch.Ranks(launch.devices(cfg.devices), cfg.num_nodes)
    if units and ranks.devices * ranks.num_nodes > 1:
        asks = {"config": cfg.model_dump(mode="json"), "seed": asked.seed, "units": units}
        asks |= {"points": [(one.found.name, one.guidance_scale) for one in points]}
        launch.run_ranks(resolve_path(cfg.study_dir) / JOB, {"verb": "evaluate", **asks}, ranks)
    else:
        _measure(cfg, points, asked, judge, units, title)


def work(job: Mapping[str, Any], *, rank: int, world_size: int) -> None:
    """What one rank draws and measures: every `world_size`-th shard."""
    cfg = EvaluateConfig.model_validate(job["config"])
    judge, asked = features.load_judge(launch.device()), Asked.of(cfg.num_images, seed=job["seed"])
    found = {one.name: one for one in find(cfg)}
    points = [point(cfg, found[name], scale, asked, judge) for name, scale in job["points"]]
    units = [(name, index) for name, index in job["units"][rank::world_size]]
    _measure(cfg, points, asked, judge, units, "evaluate" if world_size == 1 else f"evaluate (rank {rank} of {world_size})")


def _measure(
    cfg: EvaluateConfig, points: Sequence[Point], asked: Asked, judge: features.Judge, units: Sequence[tuple[str, int]], title: str
) -> None:
    """Draw and measure shards, those of one model together."""
    lacking = [(one, set(one.missing(asked))) for one in points]
    wanted = {(name, index): [one for one, lost in lacking if one.found.name == name and index in lost] for name, index in sorted(units)}
    total = sum(len(of_unit) * (asked.shards[index].stop - asked.shards[index].start) for (_, index), of_unit in wanted.items())
    model = None
    with launch.progress(total=total, title=title, unit=" pictures") as bar:
        for (name, index), of_unit in wanted.items():
            if model is None or model.name != name:
                model = _load(cfg, of_unit[0].found, model)
            _measure_shard(model, of_unit, asked, index, judge, bar.update)


def _load(cfg: EvaluateConfig, found: stored.Stored, before: models.TextToImage | None) -> models.TextToImage:
    alike = before is not None and before.frozen.hashes == places.hash_frozen(found.networks)
    frozen = before.frozen if before is not None and alike else None
    loaded = models.load(found.name, weights=cfg.weights, checkpoint=cfg.checkpoint, frozen=frozen)
    if loaded.weights_hash != found.weights_hash:
        raise ConfigError(f"{found.path} holds other weights than when the study began; run it again")
    return loaded


def _measure_shard(
    model: models.TextToImage, points: Sequence[Point], asked: Asked, index: int, judge: features.Judge, report: Callable[[int], object]
) -> None:
    """One shard of prompts at all scales that lack it."""
    which = asked.shards[index]
    prompts, first = asked.prompts[which], asked.noise_seed + which.start
    shots = [drawing.Shot(prompt, first + place, one.guidance_scale) for one in points for place, prompt in enumerate(prompts)]
    images = np.empty((len(shots), 3, *points[0].how.size), dtype=np.uint8)
    for some, drawn in sample.stream(model, points[0].how, shots, report=report):
        images[some] = drawn
    text_features = judge.text_features(prompts)
    for one, of_scale in zip(points, images.reshape(len(points), len(prompts), *images.shape[1:]), strict=True):
        shown = of_scale[: SHOWN if index == 0 else 0]
        one.folder.mkdir(parents=True, exist_ok=True)
        _save(one.shard(index), **look(of_scale, prompts, text_features, judge), pictures=shown)


def look(images: np.ndarray, prompts: Sequence[str], text_features: np.ndarray, judge: features.Judge) -> dict[str, np.ndarray]:
    """Features (B, D), CLIP scores (B,) and the reader's verdicts (none at other sizes than its own) of the pictures of some prompts."""
    image_features = judge.image_features(images)
    measured = {"features": image_features, "clip_scores": (image_features * text_features).sum(1)}
    return measured | (scenes.check(images, prompts) if images.shape[-1] == scenes.SIDE else {})


def _save(path: Path, **arrays: np.ndarray) -> None:
    scratch = path.with_name(f".{os.getpid()}-{path.name}")
    np.savez(scratch, allow_pickle=False, **arrays)
    os.replace(scratch, path)


def _read(path: Path, count: int) -> dict[str, np.ndarray] | None:
    """The arrays of a shard of so many prompts, None where it is not there whole."""
    try:
        with np.load(path) as arrays:
            read = {name: arrays[name] for name in arrays.files}
        return read if len(read["clip_scores"]) == len(read["features"]) == count and "pictures" in read else None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        return None
