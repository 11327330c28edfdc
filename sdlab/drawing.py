"""How images are drawn, checked before anything is: the images of one call, and the settings that they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import get_args

import numpy as np
from torch import Tensor

from sdlab import diffusion, guidance, models, places, solvers
from sdlab.config import ConfigError, Networks, SamplePrecision, check_resolution
from sdlab.guidance import At, Combine, Guidance
from sdlab.stored import Stored

LARGEST = 1e30
"""Guidance scale that float32 can still work with."""
Size = tuple[int, int]
"""Height and width, pixels."""


@dataclass(frozen=True)
class Shot:
    """One image to draw."""

    prompt: str
    seed: int
    guidance_scale: float
    negative_prompt: str = ""


@dataclass(frozen=True)
class Work:
    """What drawing one image takes of the UNet."""

    evaluations: int
    rows: int
    """Rows of these evaluations: two where both predictions are needed, else one."""


@dataclass(frozen=True)
class Drawing:
    """How images are drawn: what all images of one batch share; made by `configure`."""

    networks: Networks
    solver: str = "dpmpp_2m"
    num_inference_steps: int = 10
    spacing: str | None = None
    guidance: Guidance = guidance.CONSTANT
    size: Size = (0, 0)
    batch_size: int = 32
    precision: SamplePrecision = "32-true"

    @cached_property
    def alphas(self) -> Tensor:
        """Shares of signal variance, float64 (num_train_timesteps,)."""
        return diffusion.alphas_cumprod(self.networks.noise_schedule)

    @cached_property
    def timesteps(self) -> list[int]:
        """What the solver visits, falling."""
        return solvers.timesteps_of(self.solver, self.num_inference_steps, self.spacing, networks=self.networks)

    @cached_property
    def evaluated(self) -> list[int]:
        """The timestep of each UNet evaluation of an image."""
        return solvers.evaluated(self.solver, self.timesteps)

    def at(self, timestep: int) -> At:
        """Where a drawing is at a timestep."""
        alpha = float(self.alphas[timestep])
        return At(timestep, math.sqrt((1 - alpha) / alpha), 1 - timestep / max(1, len(self.alphas) - 1))

    def needs(self, guidance_scale: float, timestep: int) -> tuple[bool, bool]:
        """Whether the conditional and the unconditional prediction of an image are needed."""
        return self.guidance.needs(guidance_scale, self.at(timestep))

    def solve(self, predict: solvers.Predict, noise: Tensor) -> Tensor:
        """Take unit noise (B, C, h, w) to latents."""
        steps, networks = self.num_inference_steps, self.networks
        return solvers.solve(self.solver, predict, noise, num_inference_steps=steps, networks=networks, spacing=self.spacing)

    def work(self, guidance_scale: float) -> Work:
        """UNet evaluations and rows of an image."""
        return Work(len(self.evaluated), sum(sum(self.needs(guidance_scale, timestep)) for timestep in self.evaluated))


def shots_of(
    prompts: Sequence[str], *, seeds: Sequence[int], guidance_scale: float | Sequence[float], negative_prompt: str = ""
) -> list[Shot]:
    """One image a prompt, with its seed and its scale.

    Raises:
        ConfigError: numbers that differ, no prompts, or a value that cannot be used.
    """
    _check_texts(prompts, negative_prompt)
    given = list(guidance_scale) if isinstance(guidance_scale, (list, tuple, range, np.ndarray)) and np.ndim(guidance_scale) == 1 else None
    scales = [guidance_scale] * len(prompts) if given is None else given
    if len(scales) != len(prompts):
        raise ConfigError(f"{len(scales)} guidance scales for {len(prompts)} prompts; give one for all, or one a prompt")
    return [
        Shot(prompt, seed, _scale(scale), negative_prompt)
        for prompt, seed, scale in zip(prompts, _seeds(seeds, len(prompts)), scales, strict=True)
    ]


def _scale(given: object) -> float:
    """A guidance scale as a float; what is no number is left for `check_scales` to refuse."""
    try:
        return float(given) if isinstance(given, Real) and not isinstance(given, (bool, np.bool_)) else given  # type: ignore[return-value]
    except OverflowError:
        return math.inf


def configure(
    model: models.TextToImage | Stored,
    *,
    solver: str = "dpmpp_2m",
    num_inference_steps: int = 10,
    spacing: str | None = None,
    guidance: Guidance | Combine | str = guidance.CONSTANT,
    resolution: int | Sequence[int] | None = None,
    batch_size: int = 32,
    precision: SamplePrecision = "32-true",
) -> Drawing:
    """Settings that are checked against a model, loaded or as it is stored; arguments as of `sample`.

    Raises:
        ConfigError: a value that cannot be used, or values that do not go together.
    """
    networks = model.networks
    solvers.check(solver, num_inference_steps, spacing, networks=networks)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size={batch_size!r}; it has to be a whole number from 1 up")
    if not isinstance(precision, str) or precision not in get_args(SamplePrecision):
        raise ConfigError(f"precision={precision!r}; allowed are {', '.join(map(repr, get_args(SamplePrecision)))}")
    size = _size(networks, model.resolution if resolution is None else resolution)
    return Drawing(networks, solver, num_inference_steps, spacing, _guidance(guidance, solver), size, batch_size, precision)


def _guidance(given: Guidance | Combine | str, solver: str) -> Guidance:
    guided = guidance.read(given)
    if guided.splits and solver not in solvers.FIRST_ORDER:
        allowed = " or ".join(solvers.FIRST_ORDER)
        raise ConfigError(f"guidance {guided.name!r} reads picture and noise from different predictions; use it with solver {allowed}")
    return guided


def _size(networks: Networks, resolution: int | Sequence[int]) -> Size:
    sides = [resolution] * 2 if isinstance(resolution, (int, np.integer)) else resolution
    whole = isinstance(sides, (list, tuple)) and all(isinstance(side, (int, np.integer)) and not isinstance(side, bool) for side in sides)
    if not whole or len(sides) != 2:
        raise ConfigError(f"resolution={resolution!r}: give one whole number of pixels a side, or height and width")
    for side in sides:
        check_resolution(side, vae_factor=places.vae_factor(networks), unet_factor=models.unet_factor(networks))
    return int(sides[0]), int(sides[1])


def truncated(model: models.TextToImage, prompts: Sequence[str]) -> str:
    """What is said of prompts that the text encoder does not read to their end; "" where there are none."""
    unique, most = [prompt for prompt in dict.fromkeys(prompts) if prompt], model.frozen.max_tokens
    counts = dict(zip(unique, model.frozen.count_tokens(unique), strict=True)) if unique else {}
    long = [f"\u201c{prompt[:40].strip()}\u2026\u201d has {count}" for prompt, count in counts.items() if count > most]
    if not long:
        return ""
    listed = "; ".join([*long[:3], *(["..."] if len(long) > 3 else [])])
    return f"{len(long)} of {len(unique)} prompts go beyond the {most} tokens that are read, start and end included, and are cut: {listed}"


def _check_texts(prompts: Sequence[str], negative_prompt: str) -> None:
    if isinstance(prompts, str):
        raise ConfigError(f"prompts={prompts!r} is one text; give a list of texts, as in [{prompts!r}]")
    if not isinstance(prompts, Sequence):
        raise ConfigError(f"prompts={prompts!r} is no list; give a list of texts")
    if not len(prompts):
        raise ConfigError("prompts is empty; give at least one text, as in ['a large owl on a pink background']")
    for name, text in [*((f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)), ("negative_prompt", negative_prompt)]:
        if not isinstance(text, str):
            raise ConfigError(f"{name}={text!r} is {type(text).__name__}; it has to be text")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ConfigError(f"{name}={text!r:.80} holds half of a character (a lone surrogate), which is no text")


def _seeds(given: Sequence[int], number: int) -> list[int]:
    seeds = list(given) if isinstance(given, (Sequence, np.ndarray)) else None
    if seeds is None or len(seeds) != number:
        raise ConfigError(f"{'no list of' if seeds is None else len(seeds)} seeds for {number} prompts; give one seed a prompt")
    for seed in seeds:
        if isinstance(seed, (bool, np.bool_)) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 2**63:
            raise ConfigError(f"seed {seed!r} cannot be used; a seed is a whole number from 0 to 2**63 - 1")
    return [int(seed) for seed in seeds]


def check_scales(guided: Guidance, scales: Sequence[float]) -> None:
    """Refuse scales that a guidance cannot take.

    Raises:
        ConfigError: one that is no finite number, below 0, or above the guidance's largest.
    """
    for scale in scales:
        number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not number or not 0 <= scale <= min(guided.largest, LARGEST):
            top = "up (1 is off, 0 unconditional)" if guided.largest == math.inf else f"to {guided.largest:g} with guidance {guided.name!r}"
            raise ConfigError(f"guidance_scale={scale!r}; it has to be a finite number from 0 {top}")
