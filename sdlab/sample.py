"""Draw pictures from prompts: one seed an image, the same image bit for bit whatever its neighbours."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sdlab import diffusion, launch, models, parts, scenes, solvers
from sdlab.config import ConfigError, SamplePrecision, check_resolution
from sdlab.parts import TextStates

Guidance = Callable[[Tensor, Tensor, Tensor | float], Tensor]
"""(cond, uncond, guidance_scale) to the epsilon to follow, all (B, C, h, w); `diffusion.constant_guidance` or one's own."""
OnEvaluation = Callable[[int, int], object]
"""(UNet evaluations done, their total), before each of them."""
Epsilon = Callable[[Tensor, int, TextStates], Tensor]
"""Epsilon of latents (B, C, h, w) at a timestep given the text states of B prompts."""
_Item = TypeVar("_Item")
_one_at_a_time = threading.RLock()


def sample(
    model: models.TextToImage,
    prompts: Sequence[str],
    *,
    guidance_scale: float,
    seeds: Sequence[int],
    solver: str = "dpmpp_2m",
    num_inference_steps: int = 10,
    negative_prompt: str = "",
    batch_size: int = 32,
    guidance: Guidance = diffusion.constant_guidance,
    precision: SamplePrecision = "32-true",
    report: Callable[[int], object] | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> np.ndarray:
    """Draw one picture a prompt, on the device that holds the model.

    Every forward has exactly `batch_size` prompts (twice the rows when guided), so image i depends only on its prompt, its seed, the
    settings and `batch_size`. Constant guidance at 1 runs only the conditional rows, at 0 only the unconditional ones. Threads take turns.

    Args:
        model: what draws.
        prompts: B texts.
        guidance_scale: 1 is off, 0 unconditional.
        seeds: B whole numbers; each makes the noise of its image.
        solver: a name of `solvers.SOLVERS`.
        num_inference_steps: 1 to the model's number of training timesteps.
        negative_prompt: the condition to move away from.
        batch_size: prompts a forward.
        guidance: how conditional and unconditional epsilon become one.
        precision: "bf16-mixed" runs the UNet under autocast; text, solver and VAE stay float32.
        report: called with how many images were finished since its last call, as a progress bar's `update` wants it.
        on_evaluation: called before each UNet evaluation with those done and the total; what it raises ends the drawing.

    Returns:
        `images`, uint8 (B, 3, H, W).

    Raises:
        ConfigError: anything of the above cannot be used.
    """
    _check_texts(prompts, negative_prompt)
    _check_seeds(seeds, len(prompts))
    _check_settings(model, guidance_scale, solver, num_inference_steps, batch_size, precision)
    starts = range(0, len(prompts), batch_size)
    before_each = _counter(on_evaluation, total=len(starts) * solvers.evaluations(solver, num_inference_steps))
    alphas = diffusion.alphas_cumprod(model.networks.noise_schedule)
    images = np.empty((len(prompts), 3, model.resolution, model.resolution), dtype=np.uint8)
    with _one_at_a_time, torch.inference_mode():
        texts = encode_prompts(model, [negative_prompt, *prompts], batch_size=batch_size)
        epsilon = _epsilon_of(model, alphas=alphas, precision=precision, before_each=before_each)
        for start in starts:
            rows = list(range(start, min(start + batch_size, len(prompts))))
            full = _filled(rows, batch_size)
            cond, uncond = texts[[row + 1 for row in full]], texts[[0] * batch_size]
            predict = _guided(epsilon, cond, uncond, guidance=guidance, guidance_scale=guidance_scale)
            noise = draw_noise(model, [seeds[row] for row in full])
            latents = solvers.solve(solver, predict, noise, num_inference_steps=num_inference_steps, alphas=alphas)
            images[rows] = model.frozen.decode(latents).numpy()[: len(rows)]
            if report is not None:
                report(len(rows))
    return images


def _filled(items: Sequence[_Item], size: int) -> list[_Item]:
    return [*items, *[items[0]] * (size - len(items))]


def _counter(on_evaluation: OnEvaluation | None, *, total: int) -> Callable[[], object]:
    done = itertools.count()
    return (lambda: None) if on_evaluation is None else (lambda: on_evaluation(next(done), total))


def encode_prompts(model: models.TextToImage, prompts: Sequence[str], *, batch_size: int) -> TextStates:
    """Text states in float32 on the UNet's device; each different text is encoded once, `batch_size` a forward."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    unique = list(places)
    batches = [_filled(unique[start : start + batch_size], batch_size) for start in range(0, len(unique), batch_size)]
    encoded = parts.join([model.frozen.encode_text(model.frozen.tokenize(batch)) for batch in batches])
    return encoded[[places[prompt] for prompt in prompts]].to(model.unet.device)


def draw_noise(model: models.TextToImage, seeds: Sequence[int]) -> Tensor:
    """Unit noise, float32 (B, C, h, w) on the UNet's device; row i is drawn on the CPU from `seeds[i]` alone."""
    side = model.resolution // model.frozen.vae_factor
    shape = (model.unet.config.in_channels, side, side)
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(noise).to(model.unet.device)


def _epsilon_of(model: models.TextToImage, *, alphas: Tensor, precision: SamplePrecision, before_each: Callable[[], object]) -> Epsilon:
    device, prediction_type = model.unet.device, model.networks.prediction_type
    sizes = torch.tensor([[model.resolution, model.resolution, 0, 0, model.resolution, model.resolution]], device=device)

    def epsilon(latents: Tensor, timestep: int, text: TextStates) -> Tensor:
        before_each()
        timesteps = torch.full((len(latents),), timestep, device=device)
        add_time_ids = sizes.expand(len(latents), 6) if model.networks.takes_sizes else None
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            model_pred = model.unet(latents, timesteps, **text.conditioning(add_time_ids)).sample.float()
        return diffusion.to_epsilon(model_pred, latents, timesteps, alphas=alphas, prediction_type=prediction_type)

    return epsilon


def _guided(epsilon: Epsilon, cond: TextStates, uncond: TextStates, *, guidance: Guidance, guidance_scale: float) -> solvers.Predict:
    if guidance is diffusion.constant_guidance and guidance_scale in (0, 1):
        alone = cond if guidance_scale == 1 else uncond
        return lambda latents, timestep: epsilon(latents, timestep, alone)
    both = parts.join([uncond, cond])

    def predict(latents: Tensor, timestep: int) -> Tensor:
        away, towards = epsilon(torch.cat([latents, latents]), timestep, both).chunk(2)
        followed = guidance(towards, away, guidance_scale)
        if not isinstance(followed, Tensor) or followed.shape != latents.shape:
            got = tuple(followed.shape) if isinstance(followed, Tensor) else type(followed).__name__
            raise ConfigError(f"guidance gave {got}; it has to give a tensor {tuple(latents.shape)} like its first two arguments")
        return followed

    return predict


def sample_grid(
    model: models.TextToImage,
    prompts: Sequence[str],
    *,
    guidance_scales: Sequence[float],
    seed: int,
    negative_prompt: str = "",
    solver: str = "dpmpp_2m",
    num_inference_steps: int = 10,
    guidance: Guidance = diffusion.constant_guidance,
) -> np.ndarray:
    """Draw every prompt at every guidance scale, with a progress bar; prompt i keeps the noise of `seed` + i at all scales.

    Returns:
        `images`, uint8 (P, S, 3, H, W).

    Raises:
        ConfigError: no scales, or as `sample`.
    """
    if not len(guidance_scales):
        raise ConfigError("guidance_scales is empty; give at least one scale, as in [1, 2, 5]")
    _check_texts(prompts, negative_prompt)
    _check_seeds([seed], 1)
    seeds, batch_size = range(seed, seed + len(prompts)), min(32, len(prompts))
    for scale in guidance_scales:
        _check_settings(model, scale, solver, num_inference_steps, batch_size, "32-true")
    with launch.progress(total=len(prompts) * len(guidance_scales), title="drawing", unit=" pictures") as bar:
        draw = functools.partial(sample, model, prompts, seeds=seeds, batch_size=batch_size, report=bar.update)
        draw = functools.partial(draw, solver=solver, num_inference_steps=num_inference_steps)
        draw = functools.partial(draw, negative_prompt=negative_prompt, guidance=guidance)
        columns = [draw(guidance_scale=scale) for scale in guidance_scales]
    return np.stack(columns, axis=1)


def read_grid(images: np.ndarray, prompts: Sequence[str], guidance_scales: Sequence[float]) -> list[dict[str, str]]:
    """What the exact reader says of a grid (P, S, 3, 64, 64): a row a prompt that is a scene's caption, a column a scale.

    A cell says "right", or what is wrong: "background", "objects" (then sizes and places are not compared), "sizes", "places".
    Pictures of another size have no rows.
    """
    if images.shape[-1] != scenes.SIDE:
        return []
    rows = []
    for prompt, line in zip(prompts, images, strict=True):
        if scenes.parse(prompt) is not None:
            verdict = scenes.check(line, [prompt] * len(line))
            cells = {f"{scale:g}": _faults(verdict, index) for index, scale in enumerate(guidance_scales)}
            rows.append({"prompt": prompt, **cells})
    return rows


def _faults(verdict: dict[str, np.ndarray], index: int) -> str:
    compared = ["background", "objects"] + (["sizes", "places"] if verdict["objects"][index] else [])
    wrong = [part for part in compared if not verdict[part][index]]
    return "wrong: " + ", ".join(wrong) if wrong else "right"


def tile(images: np.ndarray, *, columns: int, min_side: int = 128) -> Image.Image:
    """Lay pictures uint8 (B, 3, H, W) out in rows, each enlarged by a whole factor to at least `min_side` pixels, without smoothing."""
    number, _, height, width = images.shape
    zoom, gap = max(1, math.ceil(min_side / width)), 4
    columns = min(columns, number)
    sheet = Image.new("RGB", (columns * (width * zoom + gap) - gap, math.ceil(number / columns) * (height * zoom + gap) - gap), "white")
    for index, image in enumerate(images):
        picture = Image.fromarray(image.transpose(1, 2, 0)).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
        sheet.paste(picture, (index % columns * (width * zoom + gap), index // columns * (height * zoom + gap)))
    return sheet


def _check_texts(prompts: Sequence[str], negative_prompt: str) -> None:
    if isinstance(prompts, str):
        raise ConfigError(f"prompts={prompts!r} is one text; give a list of texts, as in [{prompts!r}]")
    if not len(prompts):
        raise ConfigError("prompts is empty; give at least one text, as in ['a large owl on a pink background']")
    for name, text in [*((f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)), ("negative_prompt", negative_prompt)]:
        if not isinstance(text, str):
            raise ConfigError(f"{name}={text!r} is {type(text).__name__}; it has to be text")


def _check_seeds(seeds: Sequence[int], number: int) -> None:
    if len(seeds) != number:
        raise ConfigError(f"{len(seeds)} seeds for {number} prompts; give one seed a prompt")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**63:
            raise ConfigError(f"seed {seed!r} cannot be used; a seed is a whole number from 0 to 2**63 - 1")


def _check_settings(
    model: models.TextToImage, guidance_scale: float, solver: str, num_inference_steps: int, batch_size: int, precision: SamplePrecision
) -> None:
    if isinstance(guidance_scale, (bool, str)) or not (math.isfinite(guidance_scale) and guidance_scale >= 0):
        raise ConfigError(f"guidance_scale={guidance_scale!r}; it has to be a finite number from 0 up (1 is off, 0 unconditional)")
    solvers.check(solver, num_inference_steps, num_train_timesteps=model.networks.noise_schedule.num_train_timesteps)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(f"batch_size={batch_size!r}; it has to be a whole number from 1 up")
    if precision not in get_args(SamplePrecision):
        raise ConfigError(f"precision={precision!r}; allowed are {', '.join(map(repr, get_args(SamplePrecision)))}")
    check_resolution(model.resolution, vae_factor=model.frozen.vae_factor, unet_factor=models.unet_factor(model.networks))
