"""Draw pictures from prompts: one seed an image, the same image bit for bit whatever its neighbours."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from sdlab import guidance as guidances
from sdlab import models
from sdlab.config import SamplePrecision
from sdlab.drawing import Drawing, Shot, check_scales, configure, shots_of
from sdlab.guidance import Combine, Guidance
from sdlab.predictor import BOTH, Forward, Predictor, filled, in_batches, start, starting_alike

OnEvaluation = Callable[[int, int], object]
"""(forwards of the UNet done, their total), before each of them."""
SMALL = 20_000_000
"""Parameters of a UNet below which several threads share a forward badly."""
BATCHES_A_PART = 8
"""Batches of images whose text states are held at a time."""
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")
_one_at_a_time = threading.RLock()
_here = threading.local()


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
            continue
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            drawing = _halved(drawing, whole, error)
        gc.collect()  # what the forward that failed has held
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _draw_part(
    model: models.TextToImage, drawing: Drawing, shots: Sequence[Shot], part: Sequence[int], before_each: Callable[[], object]
) -> Iterator[tuple[list[int], np.ndarray]]:
    [forward] = _run(model, partial(Forward, model, drawing, before_each=before_each), [[shots[one] for one in part]])
    for group in in_batches(in_batches(part, drawing.batch_size), beside(model)):
        drawn = _run(model, partial(_draw, forward), [[shots[one] for one in which] for which in group], forward.ending_all)
        yield from zip(group, drawn, strict=True)


def beside(model: models.TextToImage) -> int:
    """Batches that are drawn at the same time: on a CPU, of a small UNet, one a thread, which is faster than sharing each of them."""
    return _default_threads() if _is_small(model) else 1


def _is_small(model: models.TextToImage) -> bool:
    return model.unet.device.type == "cpu" and sum(weight.numel() for weight in model.unet.parameters()) < SMALL


def _default_threads() -> int:
    """Torch's threads in a thread that has not set them."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(torch.get_num_threads).result()


def _run(
    model: models.TextToImage,
    work: Callable[[_Item], _Made],
    items: Sequence[_Item],
    guarded: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[_Made]:
    """Do some work; of a small UNet each item in one thread of its own, so that no bit of a picture depends on their number."""
    with _turn():
        if not _is_small(model):
            with guarded():
                return [work(item) for item in items]
        threads = _default_threads()
        torch.set_num_threads(1)  # MKL's number is that of the process
        try:
            with ThreadPoolExecutor(len(items), initializer=_begin) as pool, guarded():
                return list(pool.map(work, items))
        finally:
            torch.set_num_threads(threads)


def _begin() -> None:
    torch.set_num_threads(1)
    _here.drawing = True


@contextmanager
def _turn() -> Iterator[None]:
    """One thread draws at a time; what is drawn from within a drawing, by a guidance function for example, is part of that."""
    if getattr(_here, "drawing", False):
        yield
    else:
        with _one_at_a_time:
            yield


def _in_order(drawing: Drawing, shots: Sequence[Shot]) -> list[int]:
    """Which shot comes when: those of equal work together, so that few batches are mixed, and of these those that start alike."""
    rows = {scale: drawing.work(scale).rows for scale in {shot.guidance_scale for shot in shots}}
    starts = {start: place for place, start in enumerate(dict.fromkeys(map(start, shots)))}
    return sorted(range(len(shots)), key=lambda which: (rows[shots[which].guidance_scale], starts[start(shots[which])]))


def _halved(drawing: Drawing, whole: Drawing, error: BaseException) -> Drawing:
    """The same with half the batch, once, where memory has run out."""
    out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    if not out_of_memory or drawing is not whole or drawing.batch_size == 1:
        raise error
    half = replace(drawing, batch_size=drawing.batch_size // 2)
    print(f"out of memory at batch_size {drawing.batch_size}: drawing goes on at {half.batch_size}; give that as batch_size next time")
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
    for part in in_batches(shots, drawing.batch_size * BATCHES_A_PART):
        shared = starting_alike(drawing, part)
        for batch in in_batches(part, drawing.batch_size):
            total += sum(len(set(step)) for step in zip(*(needed[shot.guidance_scale] for shot in batch), strict=True))
            total -= bool(shared) and any(needed[shot.guidance_scale][0] == BOTH for shot in batch)
        total += len(in_batches(shared, drawing.batch_size))
    return total


@torch.inference_mode()
def _draw(forward: Forward, shots: Sequence[Shot]) -> np.ndarray:
    """One batch of images, uint8 (b, 3, H, W)."""
    drawing, predict = forward.drawing, Predictor(forward, shots)
    with forward.ending_all():
        latents = drawing.solve(predict, forward.noise(shots))
        return forward.model.frozen.decode(latents[filled(range(len(shots)), drawing.batch_size)]).numpy()[: len(shots)]
