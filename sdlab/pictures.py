"""What the bytes of a picture become: plain RGB, decoded whole, then squares; shared out to worker processes.

Nothing here imports torch, so that the workers start quickly. Pictures are hostile: one that cannot be decoded whole is a
`BadPicture`, and ends no run.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import multiprocessing
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from PIL import Image, UnidentifiedImageError

from sdlab import scenes
from sdlab.config import ConfigError, Crop
from sdlab.sources import Item, error_line

PIXEL_VERSION = 1
"""Raised by hand when the same file would give other pixels or tokens; part of every content key."""
BATCH = 64
"""Pictures a worker takes at a time."""
Result = TypeVar("Result")


class BadPicture(ValueError):
    """A picture that cannot be used: `reason` is one word for counting, `detail` says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def decode(data: bytes) -> Image.Image:
    """Decode a picture whole: upright by its EXIF orientation, transparency laid on white, as 8-bit RGB.

    Raises:
        BadPicture: empty, too large, animated, of values without a known range, or not decodable to the last byte.
    """
    if not data:
        raise BadPicture("empty_file", "0 bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return _decode(data)
    except BadPicture:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadPicture("too_large", error_line(error)) from None
    except UnidentifiedImageError:
        raise BadPicture("unreadable", "in no format that Pillow knows") from None
    except Exception as error:  # Pillow's readers raise nearly every kind of exception on damaged files
        raise BadPicture("unreadable", error_line(error)) from None


def _decode(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as picture:
        if getattr(picture, "is_animated", False) and picture.format != "MPO":  # cameras keep a preview as an MPO's second frame
            raise BadPicture("animated", f"{getattr(picture, 'n_frames', 0)} frames")
        picture.load()
        turn = _TURNS.get(picture.getexif().get(0x0112, 1))
        flat = _to_rgb(picture)
        return flat if turn is None else flat.transpose(turn)


_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes a picture of each EXIF orientation upright."""


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "F" or picture.mode.startswith("I"):
        return _scaled(picture).convert("RGB")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    return picture.convert("RGB")


def _scaled(picture: Image.Image) -> Image.Image:
    """8-bit grey of 16-bit values or of floats in [0, 1]; Pillow's own conversion would clip."""
    values = np.asarray(picture)
    top = 1.0 if picture.mode == "F" else 65535.0
    if not (values.min() >= 0 and values.max() <= top):
        raise BadPicture("unknown_range", f"mode {picture.mode} with values from {values.min()} to {values.max()}, not within 0 to {top:g}")
    grey = np.rint(values * (255 / top)).astype(np.uint8)
    if (clear := picture.info.get("transparency")) is not None:
        grey[values == clear] = 255
    return Image.fromarray(grey)


def square_crop(picture: Image.Image, resolution: int, *, place: tuple[float, float] | None = None) -> tuple[np.ndarray, tuple[int, int]]:
    """Resize the smaller side to `resolution` with antialiased Lanczos and cut a square.

    Only the square is computed, so that a very long picture costs no more than another.

    Args:
        picture: RGB.
        resolution: pixels a side of the square.
        place: where it lies between the first and the last possible place, down and across, each in [0, 1); None for the middle.

    Returns:
        uint8 (3, resolution, resolution), and the square's top and left in the resized picture.
    """
    width, height = picture.size
    scale = resolution / min(height, width)
    tall, wide = max(resolution, round(height * scale)), max(resolution, round(width * scale))
    slack = (tall - resolution, wide - resolution)
    top, left = (slack[0] // 2, slack[1] // 2) if place is None else (int(place[0] * (slack[0] + 1)), int(place[1] * (slack[1] + 1)))
    if (width, height) != (resolution, resolution):
        right, bottom = min(width, (left + resolution) * width / wide), min(height, (top + resolution) * height / tall)
        box = (left * width / wide, top * height / tall, right, bottom)
        picture = picture.resize((resolution, resolution), Image.Resampling.LANCZOS, box=box)
    return np.ascontiguousarray(np.asarray(picture).transpose(2, 0, 1)), (top, left)


# What worker processes do


@dataclass(frozen=True, slots=True)
class Checked:
    """What decoding one picture whole has shown."""

    digest: str
    """SHA-256 of the file's bytes (of the pixels, for a scene); "" where nothing could be read."""
    size: tuple[int, int] | None
    """Height and width before any resize, upright; None for a bad picture."""
    problem: tuple[str, str] | None
    """Reason and detail."""


@dataclass(frozen=True)
class Pixels:
    """Pictures of one batch at every size asked for."""

    digests: list[str]
    original_size: np.ndarray
    """int32 (B, 2): height and width."""
    images: dict[int, np.ndarray]
    """uint8 (B, 3, r, r) by resolution r."""
    crop: dict[int, np.ndarray]
    """int32 (B, 2) by resolution: top and left in the resized picture."""


def check_batch(items: Sequence[Item]) -> list[Checked]:
    """Decode pictures whole and keep what was learned."""
    return [
        Checked(digest, None, (picture.reason, picture.detail))
        if isinstance(picture, BadPicture)
        else Checked(digest, (picture.height, picture.width), None)
        for digest, picture in open_batch(items)
    ]


def load_batch(items: Sequence[Item], *, resolutions: Sequence[int], crop: Crop, seed: int) -> Pixels:
    """Decode, resize and crop good pictures.

    Args:
        items: pictures that `check_batch` found good.
        resolutions: pixels a side of the square pictures made.
        crop: which square of a picture that is not one.
        seed: of random crops, which are functions of it and of the file's bytes.

    Raises:
        BadPicture: a picture is no longer good.
    """
    digests, sizes = [], []
    images: dict[int, list[np.ndarray]] = {r: [] for r in resolutions}
    crops: dict[int, list[tuple[int, int]]] = {r: [] for r in resolutions}
    for digest, picture in open_batch(items):
        if isinstance(picture, BadPicture):
            raise picture
        digests.append(digest)
        sizes.append((picture.height, picture.width))
        place = _place(crop, seed, digest)
        for resolution in resolutions:
            square, corner = square_crop(picture, resolution, place=place)
            images[resolution].append(square)
            crops[resolution].append(corner)
    stacked = {r: np.stack(squares) for r, squares in images.items()}
    return Pixels(digests, np.array(sizes, np.int32), stacked, {r: np.array(corners, np.int32) for r, corners in crops.items()})


def open_batch(items: Sequence[Item]) -> Iterator[tuple[str, Image.Image | BadPicture]]:
    """The digest of each item, as in `Checked`, and its picture or what is wrong with it."""
    drawn = iter(scenes.render([item.scene for item in items if item.scene is not None]))
    for item in items:
        if item.scene is not None:
            pixels = next(drawn)
            yield hashlib.sha256(pixels.tobytes()).hexdigest(), Image.fromarray(pixels.transpose(1, 2, 0))
        else:
            yield _open(item)


def _open(item: Item) -> tuple[str, Image.Image | BadPicture]:
    digest = ""
    try:
        if item.problem is not None:
            raise BadPicture(*item.problem)
        data = item.read()
        digest = hashlib.sha256(data).hexdigest()
        return digest, decode(data)
    except BadPicture as bad:
        return digest, bad
    except OSError as error:
        return digest, BadPicture("unreadable", error_line(error))


def _place(crop: Crop, seed: int, digest: str) -> tuple[float, float] | None:
    if crop == "center":
        return None
    down, across = np.random.default_rng((seed, int(digest[:16], 16))).random(2)
    return float(down), float(across)


def map_batches(
    work: Callable[[Sequence[Item]], Result], items: Iterable[Item], *, num_workers: int = 0
) -> Iterator[tuple[list[Item], Result]]:
    """Batches of `BATCH` items with what `work` makes of them, in order; only a few batches are under way at a time.

    Args:
        work: a function of this module, or a partial of one.
        items: any number.
        num_workers: processes that share the work, started afresh; 0 works in this process.
    """
    stream = iter(items)
    batches = iter(lambda: list(itertools.islice(stream, BATCH)), [])
    if num_workers == 0:
        yield from ((batch, work(batch)) for batch in batches)
        return
    waiting: deque[tuple[list[Item], Any]] = deque()
    try:
        with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("forkserver")) as pool:
            for batch in batches:
                waiting.append((batch, pool.submit(work, batch)))
                if len(waiting) > 2 * num_workers:
                    yield _finish(*waiting.popleft())
            while waiting:
                yield _finish(*waiting.popleft())
    except BrokenProcessPool:
        raise ConfigError(
            f"a decoding process died (out of memory?) near {waiting[0][0][0].path if waiting else 'the end'}; use num_workers=0"
        ) from None


def _finish(batch: list[Item], future: Any) -> tuple[list[Item], Any]:
    return batch, future.result()


def psnr(images: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB of each pair of uint8 pictures (B, 3, H, W), float64 (B,); equal ones count as 100 dB."""
    error = ((images.astype(np.float64) - decoded) ** 2).mean(axis=(1, 2, 3))
    return np.minimum(100.0, 10 * np.log10(255**2 / np.maximum(error, 1e-12)))
