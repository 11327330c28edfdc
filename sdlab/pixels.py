"""Pixel paths: how each tool turns pictures into the 299-pixel input of the 2015 Inception.

Two tools that share weights still give different distances, because they resize, quantise and scale differently. A path says all of this
as data, so that it can be part of a metric's identity. The size of the pictures that go in is not part of a path and has to be named
beside it. Sources: pytorch-fid 0.3.0, clean-fid 0.1.35, torch-fidelity 0.4.0, torchmetrics 1.9.0, MLCommons training `stable_diffusion`,
NeMo `scripts/fid-eval-text2img` and its launcher's `coco2014` preparation.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sdlab.config import ConfigError

SIDE = 299
"""Pixels a side of Inception's input."""
FARTHEST = 100.0
"""Floats beyond this are no `pixel_values`, however poor the model that drew them: they are levels from 0 to 255."""

Quantiser = Literal["round", "truncate", "none"]
Library = Literal["torch", "pillow", "tensorflow 1"]
Kernel = Literal["bilinear", "bicubic"]
Grid = Literal["half pixel", "aligned corners", "top left"]
Scale = Literal["(x - 128) / 128", "x / 255, resized, 2 x - 1", "2 x / 255 - 1, resized"]
_CHOICES = {"quantiser": Quantiser, "library": Library, "kernel": Kernel, "grid": Grid, "scale": Scale}


@dataclass(frozen=True, kw_only=True)
class PixelPath:
    """One tool's way from pictures to Inception's input.

    Raises:
        ConfigError: an unknown choice, or the library cannot resize that way.
    """

    name: str
    quantiser: Quantiser
    """How generated `pixel_values` become levels from 0 to 255; "none" keeps them as floats."""
    library: Library
    """What resizes to 299: Pillow does it channel by channel in float32, without going back to whole levels."""
    kernel: Kernel
    antialias: bool
    """Whether the kernel widens when pictures shrink."""
    grid: Grid
    """Where samples lie: at pixels' centres, with the corner pixels on each other, or as in TensorFlow 1, counted from the top left."""
    clipped: bool
    """Whether what the kernel overshoots is cut to 0 to 255."""
    scale: Scale
    """How levels become the network's input; the last two scale to 0 to 1, or to -1 to 1, before they resize."""
    generated_side: int | None = None
    """Pixels a side to which generated pictures are squashed before, as whole levels, by Pillow's bicubic filter."""
    reference_cropped: bool = False
    """Whether references are cut to their central square before, or squashed."""
    reference_side: int | None = None
    """Pixels a side to which references are then brought, likewise."""
    reference_jpeg: int | None = None
    """Quality of the JPEG, with Pillow's defaults, as which references are then kept."""

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            if getattr(self, field) not in get_args(allowed):
                raise ConfigError(f"pixel path {self.name!r}: {field}={getattr(self, field)!r} is none of {', '.join(get_args(allowed))}")
        if self.quantiser == "none" and self.generated_side is not None:
            raise ConfigError(f"pixel path {self.name!r} squashes whole levels and quantises by 'none'; take quantiser='round'")
        able = {
            "torch": self.grid != "top left" and not (self.antialias and self.grid == "aligned corners"),
            "pillow": self.antialias and self.grid == "half pixel",
            "tensorflow 1": (self.kernel, self.antialias, self.grid) == ("bilinear", False, "top left"),
        }
        if not able[self.library]:
            raise ConfigError(
                f"pixel path {self.name!r}: {self.library} cannot resize with kernel={self.kernel!r}, antialias={self.antialias}, "
                f"grid={self.grid!r}; take these from one of {', '.join(PATHS)}"
            )

    def identity(self) -> dict[str, Any]:
        """All of this by name, in plain types, as a metric's identity keeps it."""
        return dataclasses.asdict(self)

    def generated(self, pictures: np.ndarray | Tensor) -> Tensor:
        """Generated pictures as the network takes them.

        Args:
            pictures: `pixel_values`, float (B, 3, H, W), cut to [-1, 1]; or `images`, uint8 (B, 3, H, W), where the quantiser is "round".

        Returns:
            float32 (B, 3, 299, 299) about in [-1, 1], on the pictures' device.

        Raises:
            ConfigError: they are neither, not finite, or were quantised by another rule than this path's.
        """
        return self._generated(_Pass(pictures))

    def reference(self, images: np.ndarray | Tensor, *, prepared: bool = False) -> Tensor:
        """References as the network takes them.

        Args:
            images: uint8 (B, 3, H, W), as decoded from the data set's own files.
            prepared: whether they were already cropped, resized and kept as JPEG by the tool's own script, as NeMo's `images_256` are.

        Returns:
            float32 (B, 3, 299, 299) about in [-1, 1], on the pictures' device.

        Raises:
            ConfigError: they are not uint8, or prepared at another size than this path's.
        """
        return self._reference(_Pass(images), prepared)

    def _generated(self, made: _Pass) -> Tensor:
        if self.generated_side is None:
            return self._input(made, ("levels", self.quantiser), lambda: made.levels(self.quantiser, self.name))
        steps = (False, self.generated_side, None)
        return self._input(made, (self.quantiser, *steps), lambda: _prepare(made.levels(self.quantiser, self.name), *steps))

    def _reference(self, made: _Pass, prepared: bool) -> Tensor:
        levels = made.images(self.name)
        steps = (self.reference_cropped, self.reference_side, self.reference_jpeg)
        if not prepared and steps != (False, None, None):
            return self._input(made, steps, lambda: _prepare(levels, *steps))
        side = self.reference_side
        if prepared and side is not None and levels.shape[-2:] != (side, side):
            raise ConfigError(
                f"prepared references of pixel path {self.name!r} are {side} x {side} pixels and these are "
                f"{' x '.join(map(str, levels.shape[-2:]))}; leave prepared=True out for the data set's own pictures"
            )
        return self._input(made, ("levels", "round"), lambda: levels)

    def _input(self, made: _Pass, start: tuple[Hashable, ...], levels: Callable[[], Tensor]) -> Tensor:
        """Levels, resized and scaled; each step that another path of this pass has already made is taken from there."""
        before, after = _SCALES[self.scale]
        scaled = made.once((start, before), lambda: _BEFORE[before](made.once(start, levels)))
        resize = (self.library, self.kernel, self.antialias, self.grid)
        resized = made.once((start, before, resize), lambda: _resize(scaled, *resize))
        return after(resized.clamp(0, 255) if self.clipped else resized)


class _Pass:
    """Pictures and what paths have made of them so far."""

    def __init__(self, pictures: np.ndarray | Tensor) -> None:
        self.pictures = pictures if isinstance(pictures, Tensor) else torch.from_numpy(np.ascontiguousarray(pictures))
        self._made: dict[Hashable, Tensor] = {}
        if self.pictures.ndim != 4 or self.pictures.shape[1] != 3 or 0 in self.pictures.shape[2:]:
            raise ConfigError(f"pictures are (B, 3, H, W) and these are {tuple(self.pictures.shape)}; give a batch of RGB, channels first")

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def images(self, path: str) -> Tensor:
        """The pictures, which have to be `images`."""
        if self.pictures.dtype != torch.uint8:
            raise ConfigError(
                f"references of pixel path {path!r} are images, uint8 from 0 to 255, and these are {self.pictures.dtype}; "
                "give them as decoded from their files"
            )
        return self.pictures

    def levels(self, quantiser: Quantiser, path: str) -> Tensor:
        """Generated pictures from 0 to 255: uint8, or floats for the quantiser "none"."""
        if self.pictures.dtype == torch.uint8:
            if quantiser != "round":
                raise ConfigError(
                    f"pixel path {path!r} quantises pixel_values by {quantiser!r} and was given uint8 images, which were rounded; give "
                    "pixel_values, or score them under a path that says so: dataclasses.replace(path, quantiser='round')"
                )
            return self.pictures
        return self.once(("levels", quantiser), lambda: _QUANTISERS[quantiser](self.once("pixel_values", self._pixel_values)))

    def _pixel_values(self) -> Tensor:
        if not self.pictures.is_floating_point():
            raise ConfigError(f"generated pictures are uint8 images or float pixel_values and these are {self.pictures.dtype}; convert")
        values = self.pictures.float()
        farthest = float(values.abs().max()) if len(values) else 0.0
        if not farthest <= FARTHEST:  # what is not a number compares so, too
            raise ConfigError(f"pixel_values are finite and lie in [-1, 1] and these reach {farthest:g}; give levels as uint8")
        return values.clamp(-1, 1)


def _unit(values: Tensor) -> Tensor:
    return (values + 1) / 2


_QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "round": lambda values: ((values + 1) * 127.5).round().to(torch.uint8),
    "truncate": lambda values: (_unit(values) * 255).to(torch.uint8),
    "none": _unit,
}
"""From pixel_values in [-1, 1] to uint8, or to floats in [0, 1]; the first is the rule by which sdlab writes pictures."""
_BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "255": lambda levels: levels.float() if levels.dtype == torch.uint8 else levels * 255,
    "1": lambda levels: levels.float() / 255 if levels.dtype == torch.uint8 else levels,
    "-1": lambda levels: 2 * _BEFORE["1"](levels) - 1,
}
"""From levels to the range in which they are resized, named by its end: 0 to 255, 0 to 1, or -1 to 1."""
_SCALES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "(x - 128) / 128": ("255", lambda resized: (resized - 128) / 128),
    "x / 255, resized, 2 x - 1": ("1", lambda resized: 2 * resized - 1),
    "2 x / 255 - 1, resized": ("-1", lambda resized: resized),
}
"""The range in which a path resizes, and what it then does."""


def _prepare(images: Tensor, cropped: bool, side: int | None, jpeg: int | None) -> Tensor:
    """Pictures, uint8 (B, 3, H, W), as Pillow crops, resizes (bicubic, antialiased, whole levels) and keeps them."""
    done = [] if len(images) else [np.empty((3, side or SIDE, side or SIDE), np.uint8)]
    for image in images.cpu().numpy():
        picture = Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0)))
        if cropped:
            (width, height), square = picture.size, min(picture.size)
            left, top = (width - square) // 2, (height - square) // 2
            picture = picture.crop((left, top, left + square, top + square))
        if side is not None:
            picture = picture.resize((side, side), Image.Resampling.BICUBIC)
        done.append(np.asarray(picture if jpeg is None else _through_jpeg(picture, jpeg)).transpose(2, 0, 1))
    return torch.from_numpy(np.stack(done)[: len(images)]).to(images.device)


def _through_jpeg(picture: Image.Image, quality: int) -> Image.Image:
    stream = io.BytesIO()
    picture.save(stream, "JPEG", quality=quality)
    return Image.open(stream).convert("RGB")


def _resize(levels: Tensor, library: Library, kernel: Kernel, antialias: bool, grid: Grid) -> Tensor:
    """Float32 (B, 3, H, W) to (B, 3, 299, 299)."""
    if not len(levels):
        return levels.new_empty((0, 3, SIDE, SIDE))
    if library == "pillow":
        return _resize_pillow(levels, kernel)
    if library == "tensorflow 1":
        return _resize_tensorflow(levels)
    return F.interpolate(levels, (SIDE, SIDE), mode=kernel, antialias=antialias, align_corners=grid == "aligned corners")


def _resize_pillow(levels: Tensor, kernel: Kernel) -> Tensor:
    method = Image.Resampling[kernel.upper()]
    planes = levels.cpu().numpy().reshape(-1, *levels.shape[-2:])
    resized = [np.asarray(Image.fromarray(plane).resize((SIDE, SIDE), method)) for plane in planes]
    return torch.from_numpy(np.stack(resized)).view(-1, 3, SIDE, SIDE).to(levels.device)


def _resize_tensorflow(levels: Tensor) -> Tensor:
    """Bilinear as in TensorFlow 1: sample i lies at i x size / 299, counted from the first pixel's centre; columns first, then rows."""
    for axis in (3, 2):
        size = levels.shape[axis]
        at = torch.arange(SIDE, dtype=torch.float32) * torch.tensor(size / SIDE, dtype=torch.float32)  # on the CPU, so that devices agree
        low = at.long()
        share = (at - low).to(levels.device).view((-1,) + (1,) * (3 - axis))
        low = low.to(levels.device)
        first, second = levels.index_select(axis, low), levels.index_select(axis, (low + 1).clamp(max=size - 1))
        levels = first + (second - first) * share
    return levels


PATHS: dict[str, PixelPath] = {}
"""The paths by name."""
PATHS |= {
    path.name: path
    for path in (
        PixelPath(
            name="nemo",
            quantiser="round",
            library="torch",
            kernel="bicubic",
            antialias=False,
            grid="aligned corners",
            clipped=False,
            scale="2 x / 255 - 1, resized",
            generated_side=256,
            reference_cropped=True,
            reference_side=256,
            reference_jpeg=95,
        ),
        PixelPath(
            name="mlperf",
            quantiser="none",
            library="torch",
            kernel="bilinear",
            antialias=False,
            grid="half pixel",
            clipped=False,
            scale="x / 255, resized, 2 x - 1",
            reference_side=512,
            reference_jpeg=75,
        ),
        PixelPath(
            name="cleanfid",
            quantiser="round",
            library="pillow",
            kernel="bicubic",
            antialias=True,
            grid="half pixel",
            clipped=True,
            scale="(x - 128) / 128",
        ),
        PixelPath(
            name="pytorchfid",
            quantiser="round",
            library="torch",
            kernel="bilinear",
            antialias=False,
            grid="half pixel",
            clipped=False,
            scale="x / 255, resized, 2 x - 1",
        ),
        PixelPath(
            name="tf1",
            quantiser="round",
            library="tensorflow 1",
            kernel="bilinear",
            antialias=False,
            grid="top left",
            clipped=False,
            scale="(x - 128) / 128",
        ),
        PixelPath(
            name="torchmetrics",
            quantiser="truncate",
            library="torch",
            kernel="bilinear",
            antialias=True,
            grid="half pixel",
            clipped=False,
            scale="(x - 128) / 128",
        ),
    )
}


def find(name: str) -> PixelPath:
    """A path by its name.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in PATHS:
        raise ConfigError(f"there is no pixel path {name!r}; choose from {', '.join(PATHS)}")
    return PATHS[name]


def generated(paths: Iterable[PixelPath], pictures: np.ndarray | Tensor) -> Iterator[tuple[PixelPath, Tensor]]:
    """Generated pictures under several paths, one after the other; what two have in common is made once.

    Args:
        paths: which.
        pictures: as `PixelPath.generated` takes them.

    Raises:
        ConfigError: as there, before anything is resized.
    """
    made, paths = _Pass(pictures), tuple(paths)
    for path in paths:
        made.levels(path.quantiser, path.name)
    return ((path, path._generated(made)) for path in paths)


def reference(paths: Iterable[PixelPath], images: np.ndarray | Tensor, *, prepared: bool = False) -> Iterator[tuple[PixelPath, Tensor]]:
    """References under several paths, one after the other; what two have in common is made once.

    Args:
        paths: which.
        images: as `PixelPath.reference` takes them.
        prepared: as there, for all paths.

    Raises:
        ConfigError: as there.
    """
    made = _Pass(images)
    return ((path, path._reference(made, prepared)) for path in paths)
