"""The built-in data: captioned pictures made of emoji at fixed places on plain backgrounds, and an exact reader of them.

A scene holds one object (small or large, in the middle) or two small ones (above, below, left of, right of), each moved by
at most 2 pixels, on one of six backgrounds. The reader finds the objects again by matching the very sprites.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

EMOJI_DIR = Path(__file__).parent / "assets" / "emoji"
SIDE = 64
"""Pixels a side of a scene."""
NAMES = ("apple", "balloon", "car", "cat", "frog", "octopus", "owl", "pizza", "rocket", "tulip")
SIZES = {"small": 28, "large": 44}
"""Pixels a side of an object."""
BACKGROUNDS = {
    "white": (250, 250, 250),
    "blue": (110, 170, 245),
    "green": (130, 205, 120),
    "yellow": (250, 225, 110),
    "pink": (250, 175, 200),
    "purple": (150, 115, 205),
}
RELATIONS = {"above": (0, -1), "below": (0, 1), "left of": (-1, 0), "right of": (1, 0)}
"""Direction (x, y) from the second object to the first; y grows downwards."""
MAX_RESIDUAL = 0.75
"""An object counts as found when at most this share of its sprite's amplitude is left unexplained."""


@dataclass(frozen=True)
class Placed:
    """An object in a picture: `left` and `top` are pixels of its box, which is `SIZES[size]` a side."""

    name: str
    size: str
    left: int
    top: int

    @property
    def centre(self) -> tuple[float, float]:
        return self.left + SIZES[self.size] / 2, self.top + SIZES[self.size] / 2


@dataclass(frozen=True)
class Scene:
    """One or two placed objects on a named background; what is drawn, and what the reader reports."""

    objects: tuple[Placed, ...]
    background: str

    @property
    def caption(self) -> str:
        """The exact caption, as in "a large owl on a pink background"."""
        first = self.objects[0]
        if len(self.objects) == 1:
            return f"a {first.size} {first.name} on a {self.background} background"
        second = self.objects[1]
        return f"{_article(first.name)} {_relation(first, second)} {_article(second.name)} on a {self.background} background"


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _relation(first: Placed, second: Placed) -> str:
    (x1, y1), (x2, y2) = first.centre, second.centre
    if abs(x1 - x2) > abs(y1 - y2):
        return "left of" if x1 < x2 else "right of"
    return "above" if y1 < y2 else "below"


def draw(count: int, *, seed: int, two_object_share: float = 0.4) -> list[Scene]:
    """Draw `count` scenes from `seed`; scene i does not depend on `count`.

    Raises:
        ValueError: `count` is negative or `two_object_share` lies outside [0, 1].
    """
    if count < 0 or not 0 <= two_object_share <= 1:
        raise ValueError(f"count={count}, two_object_share={two_object_share}: count must be >= 0 and the share in [0, 1]")
    return [_draw_one(np.random.default_rng((seed, index)), two_object_share) for index in range(count)]


def _draw_one(random: np.random.Generator, two_object_share: float) -> Scene:
    background = list(BACKGROUNDS)[random.integers(len(BACKGROUNDS))]
    jitter = lambda: 2 * int(random.integers(-1, 2))  # noqa: E731
    if random.random() >= two_object_share:
        size = list(SIZES)[random.integers(len(SIZES))]
        corner = (SIDE - SIZES[size]) // 2
        name = NAMES[random.integers(len(NAMES))]
        return Scene((Placed(name, size, corner + jitter(), corner + jitter()),), background)
    names = random.choice(len(NAMES), 2, replace=False)
    dx, dy = list(RELATIONS.values())[random.integers(len(RELATIONS))]
    middle, reach = (SIDE - SIZES["small"]) // 2, 16
    first, second = (
        Placed(NAMES[n], "small", middle + sign * dx * reach + jitter(), middle + sign * dy * reach + jitter())
        for n, sign in zip(names, (1, -1), strict=True)
    )
    return Scene((first, second), background)


@functools.cache
def sprites(size: str) -> np.ndarray:
    """All sprites of one size: float32 (len(NAMES), 4, p, p) in [0, 1], colours premultiplied with the alpha in channel 3."""
    side = SIZES[size]
    pictures = [Image.open(EMOJI_DIR / f"{name}.png").convert("RGBA").resize((side, side), Image.Resampling.LANCZOS) for name in NAMES]
    stack = np.stack([np.asarray(picture, dtype=np.float32) / 255 for picture in pictures]).transpose(0, 3, 1, 2)
    return np.concatenate([stack[:, :3] * stack[:, 3:], stack[:, 3:]], axis=1)


def render(scenes: Sequence[Scene]) -> np.ndarray:
    """Draw scenes as `images`: uint8 (B, 3, 64, 64); the first object lies on top."""
    images = np.empty((len(scenes), 3, SIDE, SIDE), dtype=np.uint8)
    for image, scene in zip(images, scenes, strict=True):
        canvas = np.empty((3, SIDE, SIDE), dtype=np.float32)
        canvas[:] = np.array(BACKGROUNDS[scene.background], dtype=np.float32)[:, None, None] / 255
        for item in reversed(scene.objects):
            sprite = sprites(item.size)[NAMES.index(item.name)]
            side = sprite.shape[-1]
            box = canvas[:, item.top : item.top + side, item.left : item.left + side]
            box[:] = box * (1 - sprite[3]) + sprite[:3]
        image[:] = np.rint(canvas * 255)
    return images


def parse(caption: str) -> Scene | None:
    """The scene that a caption of this module describes, at its nominal places; None for any other text."""
    one = re.fullmatch(r"a (\w+) (\w+) on a (\w+) background", caption)
    two = re.fullmatch(r"an? (\w+) (above|below|left of|right of) an? (\w+) on a (\w+) background", caption)
    if two and {two[1], two[3]} <= set(NAMES) and two[4] in BACKGROUNDS:
        dx, dy = RELATIONS[two[2]]
        middle, reach = (SIDE - SIZES["small"]) // 2, 16
        placed = [Placed(two[i], "small", middle + s * dx * reach, middle + s * dy * reach) for i, s in ((1, 1), (3, -1))]
        return Scene(tuple(placed), two[4])
    if one and one[1] in SIZES and one[2] in NAMES and one[3] in BACKGROUNDS:
        corner = (SIDE - SIZES[one[1]]) // 2
        return Scene((Placed(one[2], one[1], corner, corner),), one[3])
    return None


def read(images: np.ndarray) -> list[Scene]:
    """Say what each picture shows: background by its border, then at most two objects by matching sprites everywhere.

    Args:
        images: uint8 (B, 3, 64, 64).

    Raises:
        ValueError: the array has another shape or type.
    """
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (3, SIDE, SIDE):
        raise ValueError(f"images are {images.dtype} {images.shape}; the reader takes uint8 (B, 3, {SIDE}, {SIDE})")
    return [scene for start in range(0, len(images), 64) for scene in _read_batch(images[start : start + 64])]


def _read_batch(images: np.ndarray) -> list[Scene]:
    pixels = images.astype(np.float32) / 255
    border = np.concatenate([pixels[:, :, 0], pixels[:, :, -1], pixels[:, :, :, 0], pixels[:, :, :, -1]], axis=2)
    colour = np.median(border, axis=2)
    palette = np.array(list(BACKGROUNDS.values()), dtype=np.float32) / 255
    nearest = ((colour[:, None] - palette) ** 2).sum(2).argmin(1)
    matches = {size: _match(pixels, colour, size) for size in SIZES}
    backgrounds = [list(BACKGROUNDS)[index] for index in nearest]
    return [Scene(_find_objects({s: (g[i], t[i]) for s, (g, t) in matches.items()}), backgrounds[i]) for i in range(len(images))]


def _match(pixels: np.ndarray, colour: np.ndarray, size: str) -> tuple[np.ndarray, np.ndarray]:
    """Cost saved by laying each sprite at each place (B, K, y, x), and each sprite's own energy there (B, K).

    On background b a sprite with premultiplied colour c and alpha a should differ from b by t = c - a b; laying it over the
    picture's difference d saves |d|^2 - |d - t|^2 = 2 d.t - t.t.
    """
    import torch
    from torch.nn.functional import conv2d

    sheet = sprites(size)
    colours, alpha = sheet[:, :3], sheet[:, 3:]
    targets = colours[None] - alpha[None] * colour[:, None, :, None, None]
    energy = (targets**2).sum((2, 3, 4))
    difference = torch.from_numpy(pixels - colour[:, :, None, None])
    on_colour = conv2d(difference, torch.from_numpy(colours))
    on_alpha = torch.stack([conv2d(difference[:, c : c + 1], torch.from_numpy(alpha)) for c in range(3)], dim=2)
    product = on_colour - (on_alpha * torch.from_numpy(colour)[:, None, :, None, None]).sum(2)
    return 2 * product.numpy() - energy[:, :, None, None], energy


def _find_objects(matches: dict[str, tuple[np.ndarray, np.ndarray]]) -> tuple[Placed, ...]:
    found: list[Placed] = []
    for _ in range(2):
        best = max((_best_place(gain, size, found) for size, (gain, _) in matches.items()), key=lambda candidate: candidate[0])
        gain, placed = best
        energy = matches[placed.size][1][NAMES.index(placed.name)]
        if gain < (1 - MAX_RESIDUAL**2) * energy:
            break
        found.append(placed)
    return tuple(found)


def _best_place(gain: np.ndarray, size: str, taken: Sequence[Placed]) -> tuple[float, Placed]:
    side, free = SIZES[size], np.ones(gain.shape[1:], dtype=bool)
    top, left = np.mgrid[: gain.shape[1], : gain.shape[2]]
    for other in taken:
        x, y = other.centre
        distance = np.maximum(abs(left + side / 2 - x), abs(top + side / 2 - y))
        free &= distance >= (side + SIZES[other.size]) / 2 - 4
    masked = np.where(free, gain, -np.inf)
    index, row, column = np.unravel_index(int(masked.argmax()), masked.shape)
    return float(masked[index, row, column]), Placed(NAMES[index], size, int(column), int(row))


def check(images: np.ndarray, captions: Sequence[str]) -> dict[str, np.ndarray]:
    """Compare what the reader finds with what the captions ask for.

    Args:
        images: uint8 (B, 3, 64, 64).
        captions: B captions in this module's words.

    Returns:
        bool arrays (B,): `two` (the caption asks for two objects), `background`, `objects` (the right ones and no others),
        `sizes`, `places`, and `strict` (all of them).

    Raises:
        ValueError: a caption is none of this module's, or the lengths differ.
    """
    wanted = [parse(caption) for caption in captions]
    unknown = [caption for caption, scene in zip(captions, wanted, strict=True) if scene is None]
    if unknown:
        raise ValueError(f"the reader knows only captions of scenes, not {unknown[0]!r}")
    rows = [_compare(found, scene) for found, scene in zip(read(images), wanted, strict=True) if scene is not None]
    keys = ("two", "background", "objects", "sizes", "places", "strict")
    return {key: np.array([row[key] for row in rows], dtype=bool) for key in keys}


def _compare(found: Scene, wanted: Scene) -> dict[str, bool]:
    ordered = _same_order(found.objects, wanted.objects)
    row = {"two": len(wanted.objects) == 2, "background": found.background == wanted.background, "objects": ordered is not None}
    row["sizes"] = ordered is not None and all(a.size == b.size for a, b in zip(ordered, wanted.objects, strict=True))
    row["places"] = ordered is not None and _places_agree(ordered, wanted.objects)
    return {**row, "strict": row["background"] and row["objects"] and row["sizes"] and row["places"]}


def _same_order(found: tuple[Placed, ...], wanted: tuple[Placed, ...]) -> tuple[Placed, ...] | None:
    names = [item.name for item in wanted]
    if sorted(item.name for item in found) != sorted(names):
        return None
    return tuple(sorted(found, key=lambda item: names.index(item.name)))


def _places_agree(found: tuple[Placed, ...], wanted: tuple[Placed, ...]) -> bool:
    if len(wanted) == 2:
        return _relation(*found) == _relation(*wanted)
    return all(abs(a - b) <= 6 for a, b in zip(found[0].centre, wanted[0].centre, strict=True))
