"""Draw pictures from prompts: one seed an image, the same image bit for bit whatever its neighbours."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from sdlab import diffusion, models, parts, solvers
from sdlab import guidance as guidances
from sdlab.config import ConfigError, SamplePrecision
from sdlab.diffusion import Prediction
from sdlab.drawing import Drawing, Shot, Size, check_scales, configure, shots_of
from sdlab.guidance import At, Combine, Guidance
from sdlab.parts import TextStates

OnEvaluation = Callable[[int, int], object]
"""(forwards of the UNet done, their total), before each of them."""
BATCHES_A_PART = 8
"""Batches of images whose text states are held at a time."""
Needed = tuple[bool, bool]
"""Whether an image needs the conditional prediction, and the unconditional one."""
BOTH: Needed = (True, True)
_Item = TypeVar("_Item")
_one_at_a_time = threading.RLock()


def sample(
    model: models.TextToImage,
    prompts: Sequence[str],
    *,
    guidance_scale: float | Sequence[float],
    seeds: Sequence[int],
    solver: str = "dpmpp_2m",
    num_inference_steps: int = 10,
    spacing: str | None = None,
    negative_prompt: str = "",
    guidance: Guidance | Combine | str = guidances.CONSTANT,
    resolution: int | Sequence[int] | None = None,
    batch_size: int = 32,
    precision: SamplePrecision = "32-true",
    report: Callable[[int], object] | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> np.ndarray:
    """Draw one picture a prompt, on the device that holds the model.

    An image depends only on its prompt, its seed, its scale, the settings and `batch_size`: a forward has exactly `batch_size` rows for
    images that need one prediction, and twice as many for images that need both. Threads take turns.

    Args:
        model: what draws.
        prompts: B texts.
        guidance_scale: one for all, or one an image; 1 is off, 0 unconditional.
        seeds: B whole numbers; each makes the noise of its image.
        solver: a name of `solvers.SOLVERS`.
        num_inference_steps: 1 to the model's number of training timesteps.
        spacing: a name of `solvers.SPACINGS`; None for the solver's own.
        negative_prompt: the condition to move away from.
        guidance: how two predictions become one: a name or a function, as `sdlab.guidance` has it.
        resolution: pixels a side, or height and width; None for the model's own.
        batch_size: images a forward.
        precision: "bf16-mixed" runs the UNet under autocast; text, solver and VAE stay float32.
        report: called with how many images were finished since its last call, as a progress bar's `update` wants it.
        on_evaluation: called before each forward of the UNet with those done and the total; what it raises ends the drawing.

    Returns:
        `images`, uint8 (B, 3, H, W).

    Raises:
        ConfigError: anything of the above cannot be used.
    """
    drawing = configure(
        model,
        solver=solver,
        num_inference_steps=num_inference_steps,
        spacing=spacing,
        guidance=guidance,
        resolution=resolution,
        batch_size=batch_size,
        precision=precision,
    )
    shots = shots_of(prompts, seeds=seeds, guidance_scale=guidance_scale, negative_prompt=negative_prompt)
    images = np.empty((len(shots), 3, *drawing.size), dtype=np.uint8)
    for which, drawn in stream(model, drawing, shots, report=report, on_evaluation=on_evaluation):
        images[which] = drawn
    return images


def stream(
    model: models.TextToImage,
    drawing: Drawing,
    shots: Sequence[Shot],
    *,
    report: Callable[[int], object] | None = None,
    on_evaluation: OnEvaluation | None = None,
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Draw a batch of images at a time: which of the shots they are, and the `images`, uint8 (b, 3, H, W).

    Text states of a few batches are held at a time, whatever the number of shots. Where memory runs out, the batch is halved once; what
    is drawn from there on may differ by rounding.

    Raises:
        ConfigError: a scale that cannot be used.
    """
    check_scales(drawing.guidance, [shot.guidance_scale for shot in shots])
    return _stream(model, drawing, shots, report, on_evaluation)


def _stream(
    model: models.TextToImage,
    drawing: Drawing,
    shots: Sequence[Shot],
    report: Callable[[int], object] | None,
    on_evaluation: OnEvaluation | None,
) -> Iterator[tuple[list[int], np.ndarray]]:
    todo, whole = _in_order(drawing, shots), drawing
    before_each = _counter(on_evaluation, total=_forwards(drawing, [shots[which] for which in todo]))
    while todo:
        part = todo[: drawing.batch_size * BATCHES_A_PART]
        try:
            for which, images in _draw_part(model, drawing, shots, part, before_each):
                yield which, images
                todo = todo[len(which) :]
                if report is not None:
                    report(len(which))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            drawing = _halved(drawing, whole, error)


def _draw_part(
    model: models.TextToImage, drawing: Drawing, shots: Sequence[Shot], part: Sequence[int], before_each: Callable[[], object]
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Batches one after the other; on a CPU as many beside each other as there are threads, which is faster than sharing each of them."""
    batches, threads = _batches(part, drawing.batch_size), torch.get_num_threads()
    beside = min(threads, len(batches)) if model.unet.device.type == "cpu" else 1
    with _one_at_a_time:
        forward = Forward(model, drawing, [shots[one] for one in part], before_each)
    for group in _batches(batches, beside):
        with _one_at_a_time:
            drawn = _beside(partial(_draw, forward), [[shots[one] for one in which] for which in group], threads)
        yield from zip(group, drawn, strict=True)


def _beside(draw: Callable[[Sequence[Shot]], np.ndarray], batches: Sequence[Sequence[Shot]], threads: int) -> list[np.ndarray]:
    """Draw batches at the same time, each in a thread of its own."""
    if len(batches) == 1:
        return [draw(batches[0])]
    pool = ThreadPoolExecutor(len(batches), initializer=partial(torch.set_num_threads, 1))
    try:
        return list(pool.map(draw, batches))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # threads that are made later take over what was set last


def _in_order(drawing: Drawing, shots: Sequence[Shot]) -> list[int]:
    """Which shot comes when: those of equal work together, so that few batches are mixed, and of these those that start alike."""
    rows = {scale: drawing.work(scale).rows for scale in {shot.guidance_scale for shot in shots}}
    starts = {start: place for place, start in enumerate(dict.fromkeys(map(_start, shots)))}
    return sorted(range(len(shots)), key=lambda which: (rows[shots[which].guidance_scale], starts[_start(shots[which])]))


def _start(shot: Shot) -> tuple[str, str, int]:
    """What the first evaluation of an image depends on."""
    return shot.prompt, shot.negative_prompt, shot.seed


def _batches(items: Sequence[_Item], size: int) -> list[list[_Item]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _halved(drawing: Drawing, whole: Drawing, error: BaseException) -> Drawing:
    """The same with half the batch, once, where memory has run out."""
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    if not out_of_memory or drawing is not whole or drawing.batch_size == 1:
        raise error
    half = replace(drawing, batch_size=drawing.batch_size // 2)
    print(f"out of memory at batch_size {drawing.batch_size}: drawing goes on at {half.batch_size}; give that as batch_size next time")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return half


def _counter(on_evaluation: OnEvaluation | None, *, total: int) -> Callable[[], object]:
    done = itertools.count()
    return (lambda: None) if on_evaluation is None else (lambda: on_evaluation(next(done), total))


def _forwards(drawing: Drawing, shots: Sequence[Shot]) -> int:
    """Forwards of the UNet that drawing takes."""
    needed = {
        scale: [drawing.needs(scale, timestep) for timestep in drawing.evaluated] for scale in {shot.guidance_scale for shot in shots}
    }
    total = 0
    for part in _batches(shots, drawing.batch_size * BATCHES_A_PART):
        for batch in _batches(part, drawing.batch_size):
            total += sum(len(set(step)) for step in zip(*(needed[shot.guidance_scale] for shot in batch), strict=True))
            total -= bool(_shared(drawing, part)) and any(needed[shot.guidance_scale][0] == BOTH for shot in batch)
        total += len(_batches(_shared(drawing, part), drawing.batch_size))
    return total


def _shared(drawing: Drawing, shots: Sequence[Shot]) -> list[Shot]:
    """One shot of each start where several images start alike, as along a sweep of scales; the first evaluation of these is run once."""
    guided = [shot for shot in shots if drawing.needs(shot.guidance_scale, drawing.timesteps[0]) == BOTH]
    starts = {_start(shot): shot for shot in guided}
    return list(starts.values()) if len(starts) < len(guided) else []


# One part


class Forward:
    """The UNet's forwards for some shots that are drawn together: each different text is encoded once.

    A forward has `batch_size` rows for images that need one prediction, and twice as many for images that need both.
    """

    @torch.inference_mode()
    def __init__(self, model: models.TextToImage, drawing: Drawing, shots: Sequence[Shot], before_each: Callable[[], object]) -> None:
        self.model, self.drawing, self._before_each = model, drawing, before_each
        texts = list(dict.fromkeys(text for shot in shots for text in (shot.prompt, shot.negative_prompt)))
        self._places = {text: place for place, text in enumerate(texts)}
        self._states = self._encode(texts)
        self._first: dict[tuple[str, str, int], Tensor] = {}
        for alike in _batches(_shared(drawing, shots), drawing.batch_size):
            both = torch.stack(self(self.noise(alike), drawing.timesteps[0], self.text(alike, BOTH), BOTH), dim=1)
            self._first |= {_start(shot): preds for shot, preds in zip(alike, both, strict=True)}

    def _encode(self, texts: Sequence[str]) -> TextStates:
        """Float32 on the UNet's device, `batch_size` texts a forward."""
        frozen, size = self.model.frozen, self.drawing.batch_size
        encoded = [frozen.encode_text(frozen.tokenize(_filled(batch, size)))[: len(batch)] for batch in _batches(texts, size)]
        return parts.join(encoded).to(self.model.unet.device)

    def text(self, shots: Sequence[Shot], needed: Needed) -> TextStates:
        """Text states of shots, filled up to the rows of a forward: of the prompts, the negative prompts, or both."""
        full = _filled(shots, self.drawing.batch_size)
        asked = [[shot.prompt for shot in full]] * needed[0] + [[shot.negative_prompt for shot in full]] * needed[1]
        return self._states[[self._places[text] for texts in asked for text in texts]]

    def noise(self, shots: Sequence[Shot]) -> Tensor:
        """Unit noise of shots, as `draw_noise`."""
        return draw_noise(self.model, [shot.seed for shot in shots], self.drawing.size)

    def first(self, shots: Sequence[Shot]) -> tuple[Tensor, ...] | None:
        """Both predictions of the first evaluation, where they are known already."""
        if not self._first:
            return None
        return tuple(torch.stack([self._first[_start(shot)] for shot in shots]).unbind(1))

    def __call__(self, latents: Tensor, timestep: int, text: TextStates, needed: Needed) -> tuple[Tensor, ...]:
        """The predictions that are needed of latents (b, C, h, w), each (b, C, h, w); what fills the batch is cut off again."""
        self._before_each()
        device, drawing, add_time_ids = latents.device, self.drawing, None
        rows = torch.cat([latents[_filled(range(len(latents)), drawing.batch_size)]] * sum(needed))
        timesteps = torch.full((len(rows),), timestep, device=device)
        if drawing.networks.takes_sizes:
            add_time_ids = torch.tensor([*drawing.size, 0, 0, *drawing.size], device=device).expand(len(rows), 6)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=drawing.precision == "bf16-mixed"):
            preds = self.model.unet(rows, timesteps, **text.conditioning(add_time_ids)).sample.float()
        return tuple(pred[: len(latents)] for pred in preds.split(drawing.batch_size))


def _filled(items: Sequence[_Item], size: int) -> list[_Item]:
    return [*items, *[items[0]] * (size - len(items))]


def draw_noise(model: models.TextToImage, seeds: Sequence[int], size: Size | None = None) -> Tensor:
    """Unit noise, float32 (B, C, h, w) on the UNet's device, for pictures of a size; row i is drawn on the CPU from `seeds[i]` alone."""
    shape = (model.unet.config.in_channels, *(side // model.frozen.vae_factor for side in size or [model.resolution] * 2))
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(noise).to(model.unet.device)


@torch.inference_mode()
def _draw(forward: Forward, shots: Sequence[Shot]) -> np.ndarray:
    """One batch of images, uint8 (b, 3, H, W)."""
    drawing, predict = forward.drawing, Predictor(forward, shots)
    latents = solvers.SOLVERS[drawing.solver](predict, forward.noise(shots), timesteps=drawing.timesteps, alphas=drawing.alphas)
    return forward.model.frozen.decode(latents[_filled(range(len(shots)), drawing.batch_size)]).numpy()[: len(shots)]


class Predictor:
    """What a solver asks: the picture and the noise that the latents of some shots consist of, guided."""

    def __init__(self, forward: Forward, shots: Sequence[Shot]) -> None:
        self._forward, self._drawing, self._shots = forward, forward.drawing, shots
        self._texts: dict[tuple[Needed, tuple[int, ...]], TextStates] = {}
        self._begun = False

    def __call__(self, latents: Tensor, timestep: int) -> Prediction:
        groups: dict[Needed, list[int]] = {}
        for place, shot in enumerate(self._shots):
            groups.setdefault(self._drawing.needs(shot.guidance_scale, timestep), []).append(place)
        answers = [self._ask(needed, places, latents, self._drawing.at(timestep)) for needed, places in groups.items()]
        self._begun = True
        if len(answers) == 1:
            return answers[0]
        order = torch.tensor([place for places in groups.values() for place in places]).argsort().to(latents.device)
        denoised, epsilon = (torch.cat(tensors)[order] for tensors in zip(*answers, strict=True))
        return Prediction(denoised, epsilon)

    def _ask(self, needed: Needed, places: list[int], latents: Tensor, at: At) -> Prediction:
        """Of images that need the same predictions, in one forward."""
        shots, own = [self._shots[place] for place in places], latents[places]
        known = self._forward.first(shots) if needed == BOTH and not self._begun else None
        preds = known or self._forward(own, at.timestep, self._text(needed, places, shots), needed)
        if len(preds) == 1:
            return self._read(preds[0], own, at)
        cond, uncond = preds
        scales = [self._drawing.guidance.scale_at(shot.guidance_scale, at) for shot in shots]
        followed = self._drawing.guidance.combine(cond, uncond, torch.tensor(scales, device=own.device).view(-1, 1, 1, 1), at)
        picture, noise = followed if isinstance(followed, tuple) and len(followed) == 2 else (followed, followed)
        return Prediction(self._read(picture, own, at).denoised, self._read(noise, own, at).epsilon)

    def _text(self, needed: Needed, places: list[int], shots: Sequence[Shot]) -> TextStates:
        """Made once for all steps."""
        key = (needed, tuple(places))
        if key not in self._texts:
            self._texts[key] = self._forward.text(shots, needed)
        return self._texts[key]

    def _read(self, model_pred: object, latents: Tensor, at: At) -> Prediction:
        if not isinstance(model_pred, Tensor) or model_pred.shape != latents.shape:
            got = tuple(model_pred.shape) if isinstance(model_pred, Tensor) else type(model_pred).__name__
            raise ConfigError(f"guidance gave {got}; it has to give a tensor {tuple(latents.shape)} like its first two arguments")
        alpha, kind = float(self._drawing.alphas[at.timestep]), self._drawing.networks.prediction_type
        return diffusion.read_prediction(model_pred, latents, alpha=alpha, prediction_type=kind)
