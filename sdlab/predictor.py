"""What a solver asks of the UNet while some images are drawn: forwards of fixed size, guided, their first one shared where it can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from sdlab import diffusion, launch, models, parts, solvers
from sdlab.config import ConfigError
from sdlab.diffusion import Prediction
from sdlab.drawing import Drawing, Shot, Size
from sdlab.guidance import At
from sdlab.parts import TextStates

Needed = tuple[bool, bool]
"""Whether an image needs the conditional prediction, and the unconditional one."""
BOTH: Needed = (True, True)
_Item = TypeVar("_Item")


class Forward:
    """The UNet's forwards for some shots that are drawn together: each different text is encoded once.

    A forward has `batch_size` rows for images that need one prediction, and twice as many for images that need both.
    """

    @torch.inference_mode()
    def __init__(
        self, model: models.TextToImage, drawing: Drawing, shots: Sequence[Shot], *, before_each: Callable[[], object] = lambda: None
    ) -> None:
        self.model, self.drawing, self._before_each = model, drawing, before_each
        self._failure: BaseException | None = None
        texts = list(dict.fromkeys(text for shot in shots for text in (shot.prompt, shot.negative_prompt)))
        self._places = {text: place for place, text in enumerate(texts)}
        self._states = self._encode(texts)
        self._first: dict[tuple[str, str, int], Tensor] = {}
        for alike in in_batches(starting_alike(drawing, shots), drawing.batch_size):
            both = torch.stack(self(self.noise(alike), drawing.timesteps[0], self.text(alike, BOTH), BOTH), dim=1)
            self._first |= {start(shot): preds for shot, preds in zip(alike, both, strict=True)}

    @contextmanager
    def ending_all(self) -> Iterator[None]:
        """What fails in here ends all batches that are drawn, at their next evaluation, with the same error."""
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error
            raise

    def _encode(self, texts: Sequence[str]) -> TextStates:
        """Float32 on the UNet's device, `batch_size` texts a forward."""
        frozen, size = self.model.frozen, self.drawing.batch_size
        encoded = [frozen.encode_text(frozen.tokenize(filled(batch, size)))[: len(batch)] for batch in in_batches(texts, size)]
        return parts.join(encoded).to(self.model.unet.device)

    def text(self, shots: Sequence[Shot], needed: Needed) -> TextStates:
        """Text states of shots, filled up to the rows of a forward: of the prompts, the negative prompts, or both."""
        full = filled(shots, self.drawing.batch_size)
        asked = [[shot.prompt for shot in full]] * needed[0] + [[shot.negative_prompt for shot in full]] * needed[1]
        return self._states[[self._places[text] for texts in asked for text in texts]]

    def noise(self, shots: Sequence[Shot]) -> Tensor:
        """Unit noise of shots, as `draw_noise`."""
        return draw_noise(self.model, [shot.seed for shot in shots], self.drawing.size)

    def first(self, shots: Sequence[Shot]) -> tuple[Tensor, ...] | None:
        """Both predictions of the first evaluation, where they are known already."""
        if not self._first:
            return None
        return tuple(torch.stack([self._first[start(shot)] for shot in shots]).unbind(1))

    def __call__(self, latents: Tensor, timestep: int, text: TextStates, needed: Needed) -> tuple[Tensor, ...]:
        """The predictions that are needed of latents (b, C, h, w), each (b, C, h, w); what fills the batch is cut off again."""
        if self._failure is not None:
            raise self._failure
        self._before_each()
        device, drawing, add_time_ids = latents.device, self.drawing, None
        rows = torch.cat([launch.filled(latents, drawing.batch_size)] * sum(needed))
        timesteps = torch.full((len(rows),), timestep, device=device)
        if drawing.networks.takes_sizes:
            add_time_ids = torch.tensor([*drawing.size, 0, 0, *drawing.size], device=device).expand(len(rows), 6)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=drawing.precision == "bf16-mixed"):
            preds = self.model.unet(rows, timesteps, **text.conditioning(add_time_ids)).sample.float()
        return tuple(pred[: len(latents)] for pred in preds.split(drawing.batch_size))


def draw_noise(model: models.TextToImage, seeds: Sequence[int], size: Size | None = None) -> Tensor:
    """Unit noise, float32 (B, C, h, w) on the UNet's device, for pictures of a size; row i is drawn on the CPU from `seeds[i]` alone."""
    shape = (model.unet.config.in_channels, *(side // model.frozen.vae_factor for side in size or [model.resolution] * 2))
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
    return torch.stack(noise).to(model.unet.device)


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
        shots, own = [self._shots[place] for place in places], latents if len(places) == len(latents) else latents[places]
        known = self._forward.first(shots) if needed == BOTH and not self._begun else None
        preds = known or self._forward(own, at.timestep, self._text(needed, places, shots), needed)
        if len(preds) == 1:
            return self._read(preds[0], own, at)
        cond, uncond = preds
        scales = [self._drawing.guidance.scale_at(shot.guidance_scale, at) for shot in shots]
        followed = self._drawing.guidance.combine(
            cond, uncond, torch.tensor(scales, dtype=own.dtype, device=own.device).view(-1, 1, 1, 1), at
        )
        picture, noise = self._pair(followed)
        return Prediction(self._read(picture, own, at).denoised, self._read(noise, own, at).epsilon)

    def _pair(self, followed: Any) -> tuple[Any, Any]:
        """What picture and noise are read from."""
        if not isinstance(followed, tuple) or len(followed) != 2:
            return followed, followed
        if self._drawing.solver not in solvers.FIRST_ORDER:
            raise ConfigError(
                f"guidance gave a pair, which solver {self._drawing.solver!r} cannot follow; use {' or '.join(solvers.FIRST_ORDER)}"
            )
        return followed

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


def start(shot: Shot) -> tuple[str, str, int]:
    """What the first evaluation of an image depends on."""
    return shot.prompt, shot.negative_prompt, shot.seed


def starting_alike(drawing: Drawing, shots: Sequence[Shot]) -> list[Shot]:
    """One shot of each start where several images start alike, as along a sweep of scales; the first evaluation of these is run once."""
    guided = [shot for shot in shots if drawing.needs(shot.guidance_scale, drawing.timesteps[0]) == BOTH]
    starts = {start(shot): shot for shot in guided}
    return list(starts.values()) if len(starts) < len(guided) else []


def in_batches(items: Sequence[_Item], size: int) -> list[list[_Item]]:
    """Items in lists of `size`, the last one shorter."""
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def filled(items: Sequence[_Item], size: int) -> list[_Item]:
    """Items and as many copies of the first as make `size`."""
    return [*items, *[items[0]] * (size - len(items))]
