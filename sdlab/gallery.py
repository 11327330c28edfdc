"""What the panel hangs up: pictures of a request with their settings, and a widget that shows them with captions.

ipywidgets has no pictures that can be clicked; this one selects and enlarges them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from sdlab import drawing, models, sample, settings, solvers
from sdlab.config import SamplePrecision, near_path
from sdlab.guidance import CONSTANT, Combine, Guidance

Checkpoint = int | str
_ASSETS = Path(__file__).parent / "assets"


@dataclass(frozen=True)
class Request:
    """What the panel is asked to draw: `pictures` of one prompt, with seeds from `seed` up."""

    prompt: str
    negative_prompt: str = ""
    guidance_scale: float = 2.0
    solver: str = "dpmpp_2m"
    num_inference_steps: int = 10
    seed: int = 0
    pictures: int = 8
    compare_scale: float | None = None
    """A second guidance scale for the same seeds."""
    checkpoint: Checkpoint = "latest"
    spacing: str | None = None
    resolution: int | tuple[int, ...] | None = None
    """Pixels a side, or height and width; None for the model's own."""
    precision: SamplePrecision = "32-true"

    @property
    def shots(self) -> list[tuple[int, float]]:
        """Seed and guidance scale of each picture; those to compare stand side by side."""
        scales = [self.guidance_scale] if self.compare_scale is None else [self.guidance_scale, self.compare_scale]
        return list(itertools.product(range(self.seed, self.seed + self.pictures), scales))

    @property
    def captions(self) -> list[str]:
        """What is said of each picture."""
        return [f"seed {seed}, guidance {scale:g}" for seed, scale in self.shots]

    @property
    def in_short(self) -> str:
        """All but the prompts."""
        evaluations = solvers.evaluations(self.solver, self.num_inference_steps)
        seeds = f"seed {self.seed}" if self.pictures == 1 else f"seeds {self.seed} to {self.seed + self.pictures - 1}"
        steps = f"{self.num_inference_steps} step{'s' if self.num_inference_steps > 1 else ''}"
        compared = "" if self.compare_scale is None else f" and {self.compare_scale:g}"
        checkpoint = "" if self.checkpoint == "latest" else f", checkpoint {self.checkpoint}"
        return (
            f"guidance {self.guidance_scale:g}{compared}, {self.solver}, {steps} "
            f"({evaluations} UNet evaluation{'s' if evaluations > 1 else ''}), {seeds}{checkpoint}"
        )

    def __str__(self) -> str:
        negative = f", away from {quoted(self.negative_prompt)}" if self.negative_prompt else ""
        return f"{quoted(self.prompt)}{negative}: {self.in_short}"


def quoted(text: str) -> str:
    """The start of a text in quotation marks."""
    start = text if len(text) <= 80 else f"{text[:79].rstrip()}\u2026"
    return f"\u201c{start}\u201d"


def images_of(
    model: models.TextToImage,
    request: Request,
    *,
    guidance: Guidance | Combine | str = CONSTANT,
    on_evaluation: sample.OnEvaluation | None = None,
) -> np.ndarray:
    """Draw a request, all its pictures at the same time: uint8 (N, 3, H, W) in the order of its shots.

    Raises:
        ConfigError: as `sample.sample`.
    """
    seeds, scales = zip(*request.shots, strict=True)
    return sample.sample(
        model,
        [request.prompt] * len(seeds),
        guidance_scale=scales,
        seeds=seeds,
        solver=request.solver,
        num_inference_steps=request.num_inference_steps,
        spacing=request.spacing,
        resolution=request.resolution,
        negative_prompt=request.negative_prompt,
        batch_size=_batch_size(model, request),
        precision=request.precision,
        guidance=guidance,
        on_evaluation=on_evaluation,
    )


def _batch_size(model: models.TextToImage, request: Request) -> int:
    """So that all pictures are drawn at the same time."""
    return math.ceil(len(request.shots) / sample.beside(model))


def cut_off(model: models.TextToImage, request: Request) -> str:
    """What is said where a prompt is longer than what is read of it, else nothing."""
    return drawing.truncated(model, [request.prompt, request.negative_prompt])


@dataclass(frozen=True)
class Drawn:
    """What came of a request."""

    request: Request
    pngs: list[bytes]
    settings: list[settings.Settings]
    seconds: float
    note: str
    """What is to be said of it besides; "" for nothing."""

    def save(self, index: int, folder: Path) -> Path:
        """Write a picture with its settings, under a name of its own for each content, and return the path.

        Raises:
            ConfigError: the file cannot be written.
        """
        png, its = self.pngs[index], self.settings[index]
        name = f"seed{its.seed}-guidance{its.guidance_scale:g}-{hashlib.sha256(png).hexdigest()[:8]}.png"
        return settings.write(png, folder / name)


def finish(model: models.TextToImage, request: Request, *, guidance: Guidance, images: np.ndarray, seconds: float) -> Drawn:
    """What came of a request: its pictures with their settings."""
    shared: dict[str, Any] = {"prompt": request.prompt, "negative_prompt": request.negative_prompt, "guidance": guidance.name}
    shared |= {"guidance_source": guidance.source_hash or "", "model": near_path(model.name)}
    shared |= {"solver": request.solver, "spacing": request.spacing, "num_inference_steps": request.num_inference_steps}
    shared |= {"weights": model.weights, "step": model.step, "weights_hash": model.weights_hash}
    shared |= {
        "height": images.shape[2],
        "width": images.shape[3],
        "batch_size": _batch_size(model, request),
        "precision": request.precision,
    }
    each = [settings.Settings(seed=seed, guidance_scale=scale, **shared) for seed, scale in request.shots]
    pngs = [settings.png_bytes(image, its) for image, its in zip(images, each, strict=True)]
    return Drawn(request, pngs, each, seconds, cut_off(model, request))


class Gallery(anywidget.AnyWidget):
    """A grid of pictures; a click selects one and shows it large, until Escape or the next click."""

    _esm = _ASSETS / "gallery.js"
    _css = _ASSETS / "gallery.css"

    pictures = traitlets.List(traitlets.Bytes()).tag(sync=True)
    """PNG files."""
    captions = traitlets.List(traitlets.Unicode()).tag(sync=True)
    """A text a picture, shown as it is."""
    columns = traitlets.Int(4).tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)
    """Which picture was clicked last; -1 for none."""
