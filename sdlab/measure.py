"""Draw the pictures of a FID-CLIP study and measure them, a shard of prompts at a time, on any number of ranks.

A shard is drawn whole by one rank, at all scales from the same noise, and kept as soon as it is measured; shards are read in their order,
so that results depend neither on the number of ranks nor on how often a study was stopped.
"""

from __future__ import annotations

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

from sdlab import drawing, features, launch, models, runs, sample, scenes, solvers, stored
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
        return runs.digest(self.prompts)

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
        **{"weights": found.weights_hash, "frozen": found.frozen_hashes},
        **{"networks": found.networks.model_dump(mode="json", exclude={"frozen"})},
        **{"judge": judge.weights_hash, "pixel_path": judge.pixel_path(found.resolution)},
        **{"prompts": asked.digest, "noise_seed": asked.noise_seed},
    }
    name = f"guidance-{guidance_scale:g}-{runs.digest(depends)[:16]}"
    return Point(found, how, guidance_scale, resolve_path(cfg.study_dir) / "shards" / name)


def run(cfg: EvaluateConfig, points: Sequence[Point], asked: Asked, judge: features.Judge, *, title: str = "evaluate") -> None:
    """Draw and measure what is missing of some points, here or on as many ranks as are asked for."""
    different: dict[Path, Point] = {}
    for one in points:
        different.setdefault(one.folder, one)
    lacking: dict[tuple[str, int], list[float]] = {}
    for one in different.values():
        for index in one.missing(asked):
            lacking.setdefault((one.found.name, index), []).append(one.guidance_scale)
    todo = [(name, index, scales) for (name, index), scales in sorted(lacking.items())]
    ranks = launch.Ranks(launch.devices(cfg.devices), cfg.num_nodes)
    if todo and ranks.devices * ranks.num_nodes > 1:
        job = {"verb": "evaluate", "config": cfg.model_dump(mode="json"), "seed": asked.seed, "todo": todo}
        launch.run_ranks(resolve_path(cfg.study_dir) / JOB, job, ranks)
    else:
        _measure(cfg, [one.found for one in points], todo, asked, judge, title)


def work(job: Mapping[str, Any], *, rank: int, world_size: int) -> None:
    """What one rank draws and measures: every `world_size`-th shard."""
    cfg = EvaluateConfig.model_validate(job["config"])
    judge, asked = features.load_judge(launch.device()), Asked.of(cfg.num_images, seed=job["seed"])
    title = "evaluate" if world_size == 1 else f"evaluate (rank {rank} of {world_size})"
    _measure(cfg, find(cfg), job["todo"][rank::world_size], asked, judge, title)


def _measure(
    cfg: EvaluateConfig,
    found: Sequence[stored.Stored],
    todo: Sequence[tuple[str, int, list[float]]],
    asked: Asked,
    judge: features.Judge,
    title: str,
) -> None:
    """Draw and measure shards, each of a model at the scales that lack it."""
    named, model = {one.name: one for one in found}, None
    total = sum(len(scales) * len(asked.prompts[asked.shards[index]]) for _, index, scales in todo)
    with launch.progress(total=total, title=title, unit=" pictures") as bar:
        for name, index, scales in todo:
            model = models.load_again(named[name], checkpoint=cfg.checkpoint, loaded=model)
            points = [point(cfg, named[name], scale, asked, judge) for scale in scales]
            _measure_shard(model, points, asked, index, judge, bar.update)


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
        save(one.shard(index), **look(of_scale, prompts, text_features, judge), pictures=shown)


def look(images: np.ndarray, prompts: Sequence[str], text_features: np.ndarray, judge: features.Judge) -> dict[str, np.ndarray]:
    """Features (B, D), CLIP scores (B,) and the reader's verdicts (none at other sizes than its own) of the pictures of some prompts."""
    image_features = judge.image_features(images)
    measured = {"features": image_features, "clip_scores": (image_features * text_features).sum(1)}
    return measured | (scenes.check(images, prompts) if images.shape[-1] == scenes.SIDE else {})


def save(path: Path, **arrays: np.ndarray) -> None:
    """Write arrays whole or not at all."""
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
