"""What the bytes of a picture become: plain 8-bit sRGB, upright, decoded whole.

Nothing here imports torch, so that the workers start quickly. Pictures are hostile: one that cannot be decoded whole is a
`BadPicture`, and ends no run.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import os
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms, UnidentifiedImageError

from sdlab import scenes
from sdlab.captions import error_line
from sdlab.crops import View
from sdlab.items import Broken, Handle

PIXEL_VERSION = 2
"""Raised by hand when the same file would give other pixels or tokens; part of every content key."""
MAX_BYTES = 1 << 30
"""Largest file that is opened."""
MARKS = ("exif_turned", "transparency_flattened", "icc_converted", "icc_broken", "cmyk_converted", "depth_reduced")
"""What was done to a picture to make it plain, for counting."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO", "PSD")
"""What Pillow may open: nothing that runs another program."""
WHITE = (255, 255, 255)
Colour = tuple[int, int, int]


class BadPicture(ValueError):
    """A picture that cannot be used: `reason` is one word for counting, `detail` says more."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Decoded:
    """A picture as plain RGB; what its file is, as Pillow calls it; and which of `MARKS` apply."""

    picture: Image.Image
    format: str
    marks: tuple[str, ...]


def decode(data: bytes, background: Colour = WHITE) -> Decoded:
    """Decode a picture whole: upright by its EXIF orientation, transparency laid on `background`, colours as 8-bit sRGB.

    Raises:
        BadPicture: empty, too large, animated, of values without a known range, or not decodable to the last byte.
    """
    if not data:
        raise BadPicture("empty_file", "0 bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            return _decode(data, background)
    except BadPicture:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise BadPicture("too_large", error_line(error)) from None
    except UnidentifiedImageError:
        raise BadPicture("unreadable", "in no format that Pillow knows") from None
    except Exception as error:  # Pillow's readers raise nearly every kind of exception on damaged files
        raise BadPicture("unreadable", error_line(error)) from None


def _decode(data: bytes, background: Colour) -> Decoded:
    _check_png(data)
    with Image.open(io.BytesIO(data), formats=FORMATS) as picture:
        kind = "JPEG" if picture.format == "MPO" else str(picture.format)  # cameras keep a preview as an MPO's second frame
        if getattr(picture, "is_animated", False) and picture.format != "MPO":
            raise BadPicture("animated", f"{getattr(picture, 'n_frames', 0)} frames")
        marks = ["depth_reduced"] if any(";16" in str(tile[-1]) for tile in picture.tile) else []
        picture.load()
        turn = _TURNS.get(_orientation(picture))
        plain = _flatten(picture, background, marks)
        if turn is not None:
            marks.append("exif_turned")
            plain = plain.transpose(turn)
        return Decoded(plain, kind, tuple(dict.fromkeys(marks)))


def _check_png(data: bytes) -> None:
    """Refuse a PNG of which a chunk that makes pixels is not what was written: Pillow does not look at their checksums.

    Raises:
        BadPicture: a checksum does not match.
    """
    place = 8 if data.startswith(b"\x89PNG\r\n\x1a\n") else len(data)
    while place + 12 <= len(data):
        length, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        end = place + 8 + length
        whole = end + 4 <= len(data) and kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT")
        if whole and zlib.crc32(memoryview(data)[place + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise BadPicture("unreadable", f"damaged: the checksum of its chunk {kind.decode()} at byte {place} does not match")
        place = end + 4


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


def _orientation(picture: Image.Image) -> Any:
    try:
        return picture.getexif().get(0x0112, 1)
    except Exception:  # a damaged EXIF block says nothing about the pixels
        return 1


def _flatten(picture: Image.Image, background: Colour, marks: list[str]) -> Image.Image:
    """Plain RGB; what was done is added to `marks`."""
    profile = picture.info.get("icc_profile")
    if picture.mode == "F" or picture.mode.startswith("I"):
        marks.append("depth_reduced")
        picture = _scaled(picture, background, marks)
    alpha = None
    if picture.has_transparency_data:
        alpha = picture.convert("RGBA").getchannel("A")
        alpha = None if alpha.getextrema() == (255, 255) else alpha
        picture = picture.convert("L" if picture.mode in _GREY else "RGB")
    marks += ["cmyk_converted"] * (picture.mode == "CMYK")
    plain = _to_srgb(picture, profile, marks)
    if alpha is not None:
        marks.append("transparency_flattened")
        plain = Image.composite(plain, Image.new("RGB", plain.size, background), alpha)
    return plain


_GREY = ("1", "L", "LA")


def _scaled(picture: Image.Image, background: Colour, marks: list[str]) -> Image.Image:
    """8-bit grey of 16-bit values or of floats in [0, 1]; Pillow's own conversion would clip."""
    values = np.asarray(picture)
    top = 1.0 if picture.mode == "F" else 65535.0
    if not (values.min() >= 0 and values.max() <= top):
        raise BadPicture("unknown_range", f"mode {picture.mode} with values from {values.min()} to {values.max()}, not within 0 to {top:g}")
    grey = np.rint(values * (255 / top)).astype(np.uint8)
    clear = picture.info.get("transparency")
    if clear is None or not (values == clear).any():
        return Image.fromarray(grey)
    marks.append("transparency_flattened")
    return Image.fromarray(np.where((values == clear)[..., None], np.array(background, np.uint8), grey[..., None]).astype(np.uint8))


# Colours


def _to_srgb(picture: Image.Image, profile: bytes | None, marks: list[str]) -> Image.Image:
    """RGB by the embedded profile where there is one that fits, as if sRGB where there is none."""
    if picture.mode == "LAB":
        return _apply(picture, _lab_to_srgb())
    if not profile:
        return picture if picture.mode == "RGB" else picture.convert("RGB")  # a copy would cost a third of decoding
    try:
        mode, transform = _transform(profile, "L" if picture.mode in _GREY else "CMYK" if picture.mode == "CMYK" else "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        marks.append("icc_broken")
        return picture.convert("RGB")
    if transform is None:
        return picture.convert("RGB")
    marks.append("icc_converted")
    return _apply(picture.convert(mode), transform)


def _apply(picture: Image.Image, transform: Any) -> Image.Image:
    made = ImageCms.applyTransform(picture, transform)
    assert made is not None
    return made


@functools.lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> tuple[str, Any]:
    """The mode that a profile wants, and its transform to sRGB; None for one that changes no colour by more than rounding."""
    opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    wanted = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(opened.profile.xcolor_space.strip(), "none")
    if wanted != mode:
        raise ValueError(f"a profile for {opened.profile.xcolor_space.strip()} in a picture of mode {mode}")
    transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), wanted, "RGB")
    if wanted == "CMYK":
        return wanted, transform
    colours = np.array(list(itertools.product(range(0, 256, 51), repeat=3)), np.uint8)[None]
    patches = Image.fromarray(colours).convert(wanted)
    change = np.asarray(_apply(patches, transform)).astype(int) - np.asarray(patches.convert("RGB"))
    return wanted, None if np.abs(change).max() <= 2 else transform


@functools.cache
def _lab_to_srgb() -> Any:
    return ImageCms.buildTransform(ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), "LAB", "RGB")


# What worker processes do


@dataclass(frozen=True, slots=True)
class Checked:
    """What decoding one picture whole has shown."""

    digest: bytes
    """First 16 bytes of the SHA-256 of the file (of the pixels, for a scene); empty where nothing could be read."""
    size: tuple[int, int] = (0, 0)
    """Height and width before any resize, upright; zeros for a bad picture."""
    format: str = ""
    marks: tuple[str, ...] = ()
    problem: tuple[str, str] | None = None
    """Reason and detail."""


@dataclass(frozen=True)
class Pixels:
    """Pictures of one batch as they are encoded."""

    digests: list[bytes]
    images: np.ndarray
    """uint8 (B, 3, h, w)."""
    original_size: np.ndarray
    """int32 (B, 2): height and width."""
    crop: np.ndarray
    """int32 (B, 2): top and left in the resized picture."""


def check_batch(handles: Sequence[Handle], *, known: str = "") -> list[Checked]:
    """Decode pictures whole and keep what was learned; files whose bytes are in the store `known` are read, but not decoded again."""
    store = Known.open(known) if known else None
    return [_check(handle, store) for handle in handles]


def _check(handle: Handle, store: Known | None) -> Checked:
    digest = b""
    try:
        data, digest = _read(handle)
        found = store.find(digest) if store is not None else None
        if found is not None:
            return found
        if isinstance(data, Image.Image):
            return Checked(digest, (data.height, data.width), "PNG")
        decoded = decode(data)
        return Checked(digest, (decoded.picture.height, decoded.picture.width), decoded.format, decoded.marks)
    except BadPicture as bad:
        return Checked(digest, problem=(bad.reason, bad.detail))


def load_batch(jobs: Sequence[tuple[Handle, View]], *, background: Colour) -> Pixels | None:
    """Decode good pictures and cut their views, all of one shape; None where there are none.

    Raises:
        BadPicture: a picture is no longer good.
    """
    if not jobs:
        return None
    digests, images, sizes, corners = [], [], [], []
    for handle, view in jobs:
        picture, digest = open_picture(handle, background)
        pixels, corner = view.cut(picture, digest)
        digests.append(digest)
        images.append(pixels)
        sizes.append((picture.height, picture.width))
        corners.append(corner)
    return Pixels(digests, np.stack(images), np.array(sizes, np.int32), np.array(corners, np.int32))


def open_picture(handle: Handle, background: Colour = WHITE) -> tuple[Image.Image, bytes]:
    """One picture as plain RGB, and its digest.

    Raises:
        BadPicture: it is none.
    """
    data, digest = _read(handle)
    return (data if isinstance(data, Image.Image) else decode(data, background).picture), digest


def _read(handle: Handle) -> tuple[bytes | Image.Image, bytes]:
    """The bytes of a file, or the picture of a scene, and its digest."""
    if isinstance(handle, scenes.Scene):
        pixels = scenes.render([handle])[0]
        return Image.fromarray(pixels.transpose(1, 2, 0)), hashlib.sha256(pixels.tobytes()).digest()[:16]
    if isinstance(handle, Broken):
        raise BadPicture("unreadable", handle.detail)
    if not isinstance(handle, bytes):
        try:
            if (length := handle.length()) > MAX_BYTES:
                raise BadPicture("too_large", f"a file of {length:,} bytes; {MAX_BYTES:,} are the most")
            handle = handle.read()
        except OSError as error:
            raise BadPicture("unreadable", error_line(error)) from None
    return handle, hashlib.sha256(handle).digest()[:16]


def bits_of(marks: Sequence[str]) -> int:
    """Some of `MARKS` as they are stored."""
    return sum(1 << MARKS.index(mark) for mark in marks)


def marks_of(bits: int) -> tuple[str, ...]:
    """Some of `MARKS` as they were stored."""
    return tuple(mark for bit, mark in enumerate(MARKS) if bits >> bit & 1)


class Known:
    """What earlier checks have learned of good pictures, by digest, in memory-mapped files that all workers share."""

    ROW = np.dtype([("digest", "V16"), ("height", "i4"), ("width", "i4"), ("format", "S8"), ("marks", "u2")])

    def __init__(self, folder: Path) -> None:
        self._heads, self._rows = (np.load(folder / name, mmap_mode="r") for name in ("heads.npy", "rows.npy"))

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def open(folder: str) -> Known:
        """The store in `folder`, once a process."""
        return Known(Path(folder))

    @staticmethod
    def write(folder: Path, rows: np.ndarray) -> None:
        """Make a store of rows of type `ROW`, in any order."""
        heads = np.frombuffer(rows["digest"].tobytes(), ">u8")[::2].astype(np.uint64)
        order = np.argsort(heads, kind="stable")
        for name, values in (("heads.npy", heads[order]), ("rows.npy", rows[order])):
            np.save(folder / f"{name}.partial.npy", values)
            os.replace(folder / f"{name}.partial.npy", folder / name)

    def find(self, digest: bytes) -> Checked | None:
        """What is known of a file with this digest."""
        head = np.uint64(int.from_bytes(digest[:8], "big"))
        for place in range(int(np.searchsorted(self._heads, head)), len(self._heads)):
            if self._heads[place] != head:
                break
            if (row := self._rows[place])["digest"].tobytes() == digest:
                return Checked(digest, (int(row["height"]), int(row["width"])), row["format"].decode(), marks_of(int(row["marks"])))
        return None


def pixel_code() -> str:
    """What has to be equal for an earlier check to count: this code's version and Pillow's."""
    return f"{PIXEL_VERSION} {Image.__version__}"


def psnr(images: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio in dB of each pair of uint8 pictures (B, 3, H, W), float64 (B,); equal ones count as 100 dB."""
    error = ((images.astype(np.float64) - decoded) ** 2).mean(axis=(1, 2, 3))
    return np.minimum(100.0, 10 * np.log10(255**2 / np.maximum(error, 1e-12)))
