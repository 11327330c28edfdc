"""From a picture of any shape to the shape that training wants: aspect-ratio buckets, crops and mirrors."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from sdlab.config import Crop

Shape = tuple[int, int]
"""Height and width."""
MIN_FILL = 0.9
"""Least area of a bucket, as a share of the square's."""
MAX_ASPECT = 4.0
"""Of the longest bucket, either way."""


@functools.cache
def buckets(resolution: int, step: int) -> tuple[Shape, ...]:
    """Aspect-ratio buckets: the square, and all other shapes of whole steps with 0.9 to 1 times its area and an aspect of 1:4 to 4:1.

    At 1024 pixels in steps of 64 these are 41, among them all that Stability's sampling script for SDXL lists.

    Args:
        resolution: pixels a side of the square.
        step: pixels that the sides of the others are multiples of.
    """
    sides = range(step, int(resolution * MAX_ASPECT) + 1, step)
    area = resolution**2
    shapes = [(h, w) for h in sides for w in sides if h != w and MIN_FILL * area <= h * w <= area and max(h, w) <= MAX_ASPECT * min(h, w)]
    return tuple(sorted([*shapes, (resolution, resolution)]))


def bucket_step(resolution: int, unit: int) -> int:
    """Pixels between buckets: a sixteenth of the resolution as at SDXL's 1024 pixels, in whole units that the networks can halve."""
    return unit * max(1, round(resolution / 16 / unit))


def nearest_bucket(sizes: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """Which of `shapes` comes nearest in the logarithm of height / width to each row of `sizes` (N, 2), of two the squarer: int64 (N,)."""
    if len(shapes) == 1:
        return np.zeros(len(sizes), np.int64)
    aspects = np.log([h / w for h, w in shapes])
    order = np.argsort(aspects)
    wanted = np.log(sizes[:, 0] / sizes[:, 1])
    place = np.searchsorted(aspects[order], wanted).clip(1, len(shapes) - 1)
    below, above = aspects[order][place - 1], aspects[order][place]
    nearer = (above - wanted) - (wanted - below)
    take_below = np.where(np.abs(nearer) < 1e-9, np.abs(below) <= np.abs(above), nearer > 0)
    return order[np.where(take_below, place - 1, place)]


def cut_away(sizes: np.ndarray, shape: Shape) -> np.ndarray:
    """Share of the area of pictures of heights and widths `sizes` (N, 2) that a crop to `shape` loses: float64 (N,) in [0, 1)."""
    ratio = sizes[:, 0] * shape[1] / (sizes[:, 1] * shape[0])
    return 1 - np.minimum(ratio, 1 / ratio)


def is_upscaled(sizes: np.ndarray, shape: Shape) -> np.ndarray:
    """Which pictures of heights and widths `sizes` (N, 2) have to be enlarged to cover `shape`: bool (N,)."""
    return np.any(sizes < np.array(shape), axis=1)


@dataclass(frozen=True, slots=True)
class View:
    """Which part of a picture one row of the cache shows."""

    shape: Shape
    crop: Crop
    seed: int
    number: int
    mirrored: bool

    def place(self, digest: bytes) -> tuple[float, float] | None:
        """Where a random crop lies, down and across, each in [0, 1): a function of seed, view and the file's bytes; None for the middle."""
        if self.crop != "random":
            return None
        down, across = np.random.default_rng((self.seed, self.number, int.from_bytes(digest[:8], "big"))).random(2)
        return float(down), float(across)

    def key(self, digest: bytes, made_by: str) -> bytes:
        """16 bytes that name what comes of this view of a file with this digest; `made_by` names encoder and pixel code."""
        seed = self.seed if self.crop == "random" else None
        text = f"{made_by} {self.shape} {self.crop == 'random'} {seed} {self.number if seed is not None else 0} {self.mirrored} "
        return hashlib.sha256(text.encode() + digest).digest()[:16]

    def cut(self, picture: Image.Image, digest: bytes) -> tuple[np.ndarray, Shape]:
        """The pixels, uint8 (3, h, w), and top and left of the crop in the resized picture (before mirroring)."""
        pixels, corner = crop(picture, self.shape, place=self.place(digest))
        return (np.ascontiguousarray(pixels[:, :, ::-1]) if self.mirrored else pixels), corner


def crop(picture: Image.Image, shape: Shape, *, place: tuple[float, float] | None = None) -> tuple[np.ndarray, Shape]:
    """Resize with antialiased Lanczos until the picture just covers `shape`, and cut that out.

    Only what is cut out is computed, so that a very long picture costs no more than another.

    Args:
        picture: RGB.
        shape: height and width that come out.
        place: where it lies between the first and the last possible place, down and across, each in [0, 1); None for the middle.

    Returns:
        uint8 (3, h, w), and its top and left in the resized picture.
    """
    width, height = picture.size
    h, w = shape
    scale = max(h / height, w / width)
    tall, wide = max(h, round(height * scale)), max(w, round(width * scale))
    slack = (tall - h, wide - w)
    top, left = (slack[0] // 2, slack[1] // 2) if place is None else (int(place[0] * (slack[0] + 1)), int(place[1] * (slack[1] + 1)))
    if (height, width) != (h, w):
        right, bottom = min(width, (left + w) * width / wide), min(height, (top + h) * height / tall)
        box = (left * width / wide, top * height / tall, right, bottom)
        picture = picture.resize((w, h), Image.Resampling.LANCZOS, box=box)
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1)), (top, left)
