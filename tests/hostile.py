"""Hostile inputs for the preparation of data: damaged pictures, odd modes, names, captions, metadata, tars and tables.

Each kind is a small folder of its own with at least one sound captioned picture in it, and says what preflight has to find.
Everything is generated here, the same each time.
"""

import gzip
import io
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageCms

USED = "used"
OUTSIDE = "outside"
"""Folder beside each root, with `secret.png` and `secret.txt`, of which nothing may be read."""
CAPTION = "a hostile picture"
LISTED = "a caption from the metadata"
MIB = 1 << 20


@dataclass(frozen=True)
class Kind:
    """One kind of hostile input, and what has to come of it."""

    name: str
    files: dict[str, bytes]
    """Content by path relative to the root."""
    expect: dict[str, str]
    """What becomes of each label: "used" or a reason of quarantine; labels that are not here may not turn up."""
    links: dict[str, str] = field(default_factory=dict)
    """Targets of symbolic links by path; "{outside}" stands for the folder beside the root."""
    captions: dict[str, str | None] = field(default_factory=dict)
    """Captions of used labels, where the kind is about text; None where only being used counts."""
    notes: tuple[str, ...] = ()
    """Counters of `preflight.json` that may not be zero; one that stands here twice has to be 2 or more."""
    again: dict[str, str] = field(default_factory=dict)
    """Reason of the later items under a label that `expect` has already."""
    pipes: tuple[str, ...] = ()
    """Paths of named pipes; who opens one waits for ever."""
    picky: bool = False
    """Whether a file system may refuse its names, or hold two of them for one; `build` then raises an OSError."""


def kinds() -> list[Kind]:
    """All kinds, by unique names."""
    parts = (_damaged, _bombs, _modes, _profiles, _exif, _frames, _shapes, _names, _links, _sidecars, _metadata, _tars, _tables)
    found = [kind for part in parts for kind in part()]
    assert len({kind.name for kind in found}) == len(found)
    return found


def build(kind: Kind, root: Path) -> Path:
    """Write a kind into the new folder `root`, the outside beside it, and return `root`.

    Raises:
        OSError: the file system refuses a name.
    """
    outside = root.parent / OUTSIDE
    for folder in (root, outside):
        folder.mkdir(parents=True, exist_ok=True)
    (outside / "secret.png").write_bytes(sound(99))
    (outside / "secret.txt").write_bytes(b"a secret caption")
    for name, data in kind.files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (root / name).open("xb") as file:
            file.write(data)
    for name in kind.pipes:
        os.mkfifo(root / name)
    for name, target in kind.links.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target.replace("{outside}", str(outside)), root / name)
    return root


# Pictures


def sound(seed: int = 0, side: int = 8, kind: str = "PNG", **options: Any) -> bytes:
    """The file of a plain picture of noise, RGB."""
    return encoded(noise(seed, side), kind, **options)


def noise(seed: int, side: int = 8) -> Image.Image:
    """An RGB picture of noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8))


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def _kind(name: str, files: dict[str, bytes], expect: dict[str, str], **more: Any) -> Kind:
    """A kind with a sound picture beside what is hostile."""
    return Kind(name, {"sound.png": sound(), "sound.txt": b"a sound picture", **files}, {"sound.png": USED, **expect}, **more)


def _group(name: str, became: str, files: dict[str, bytes], *notes: str) -> Kind:
    """A kind of hostile pictures that all become the same, each with a good caption."""
    texts = {f"{os.path.splitext(file)[0]}.txt": CAPTION.encode() for file in files}
    return _kind(name, files | texts, dict.fromkeys(files, became), notes=notes)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, depth: int, colour: int, data: bytes, *chunks: bytes, interlaced: bool = False) -> bytes:
    """A PNG by hand; `data` are its scan lines before compression, `chunks` come before them."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    body = [_chunk(b"IHDR", header), *chunks, _chunk(b"IDAT", zlib.compress(data)), _chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def _png_with(*chunks: bytes) -> bytes:
    """A sound PNG with chunks of one's own."""
    return _png(4, 4, 8, 2, bytes(13 * 4), *chunks)


def _interlaced() -> bytes:
    pixels, data = np.asarray(noise(5)), b""
    for x, y, across, down in ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)):
        data += b"".join(b"\0" + row.tobytes() for row in pixels[y::down, x::across])
    return _png(8, 8, 8, 2, data, interlaced=True)


def _gif(width: int, height: int) -> bytes:
    """A GIF whose one frame claims a size."""
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\0;"
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff" + frame


def _bmp(width: int, height: int, bits: int = 24, header: int = 40) -> bytes:
    """The header of a BMP without pixels."""
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", header, width, height, 1, bits, 0, 0, 0, 0, 0, 0)


def _ifd(*entries: tuple[int, int, int, int], following: int = 0) -> bytes:
    """A directory of tag, type, count and value; all of TIFF and EXIF hangs on these."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + packed + struct.pack("<I", following)


def _tiff(side: int = 8, strip: int | None = None, first: int = 8, following: int = 0, compression: int = 1) -> bytes:
    """A grey TIFF by hand, with the pixels of 8 x 8."""
    start = 8 + 2 + 9 * 12 + 4
    shape = [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, compression), (262, 3, 1, 1)]
    rest = [(273, 4, 1, start if strip is None else strip), (277, 3, 1, 1), (278, 4, 1, side), (279, 4, 1, 64)]
    return struct.pack("<2sHI", b"II", 42, first) + _ifd(*shape, *rest, following=following) + bytes(range(64))


def _webp(side: int) -> bytes:
    """The header of a lossless WebP that claims a size."""
    data = b"VP8L" + struct.pack("<I", 25) + b"\x2f" + struct.pack("<I", (side - 1) | (side - 1) << 14) + bytes(21)
    return b"RIFF" + struct.pack("<I", 4 + len(data)) + b"WEBP" + data


def _changed(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "GIF": ".gif", "TIFF": ".tif", "BMP": ".bmp"}


def _damaged() -> Iterator[Kind]:
    files = {kind: sound(1, 48 if kind == "JPEG" else 24, kind) for kind in SUFFIXES}
    shares = {f"60 percent of a {kind}{SUFFIXES[kind]}": data[: len(data) * 6 // 10] for kind, data in files.items()}
    yield _group("pictures_cut_at_60_percent", "unreadable", shares)
    last = {"JPEG": 2, "PNG": 24, "WEBP": 1, "GIF": 9, "TIFF": 1, "BMP": 1}
    ends = {f"{kind}{SUFFIXES[kind]}": files[kind][:-cut] for kind, cut in last.items()}
    yield _group("pictures_cut_in_their_last_bytes", "unreadable", ends)
    yield from _damaged_pngs(files["PNG"])
    jpeg = files["JPEG"]
    damage = {
        "no scans.jpg": jpeg[: jpeg.index(b"\xff\xda")],
        "a header within the scan.jpg": _changed(jpeg, len(jpeg) * 2 // 3, b"\xff\xc0"),
        "no height.jpg": _changed(jpeg, jpeg.index(b"\xff\xc0") + 5, b"\0\0"),
        "one byte.jpg": b"\xff",
    }
    yield _group("damaged_jpegs", "unreadable", damage)
    damage = {
        "unknown depth.bmp": _bmp(4, 4, bits=77),
        "a header beyond the file.bmp": _bmp(4, 4, header=2**31),
        "no size.bmp": _bmp(0, 0),
    }
    yield _group("damaged_bmps", "unreadable", damage)
    damage = {
        "a directory beyond the file.tif": _tiff(first=10**6),
        "pixels beyond the file.tif": _tiff(strip=10**6),
        "unknown compression.tif": _tiff(compression=999),
        "garbage for lzw.tif": _tiff(compression=5),
    }
    yield _group("damaged_tiffs", "unreadable", damage)
    whole = {
        "junk behind it.png": files["PNG"] + b"junk" * 50,
        "junk behind it.jpg": jpeg + b"PK\x03\x04junk" * 50,
        "no trailer.gif": files["GIF"][:-1],
        "a directory that follows itself.tif": _tiff(following=8),
    }
    yield _group("pictures_that_are_odd_but_whole", USED, whole)
    yield _group("pictures_of_zero_bytes", "empty_file", {f"{kind}{suffix}": b"" for kind, suffix in SUFFIXES.items()})
    others = {
        "html.jpg": b"<!doctype html><title>404</title><p>Not found",
        "text.png": b"no picture, just text\n" * 9,
        "svg.png": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "postscript.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
        "pdf.jpeg": b"%PDF-1.4\n%%EOF",
        "nuls.webp": bytes(512),
    }
    yield _group("pictures_that_are_none", "unreadable", others)
    named = {"JPEG": ".png", "PNG": ".jpeg", "GIF": ".jpg", "WEBP": ".png", "BMP": ".tiff"}
    wrong = {f"{kind}{suffix}": files[kind] for kind, suffix in named.items()}
    yield _group("pictures_with_the_suffix_of_another_format", USED, wrong, *["wrong_extension"] * len(wrong))


def _damaged_pngs(png: bytes) -> Iterator[Kind]:
    start = png.index(b"IDAT") + 4
    end = start + struct.unpack(">I", png[start - 8 : start - 4])[0]
    damage = {
        "no pixels.png": png[: start - 8] + png[-12:],
        "a flipped bit.png": _changed(png, end - 9, bytes([png[end - 9] ^ 1])),
        "a wrong checksum.png": _changed(png, end, bytes([png[end] ^ 255])),
        "a wrong checksum of the header.png": _changed(png, 29, bytes([png[29] ^ 255])),
        "no width.png": _png(0, 5, 8, 2, bytes(99)),
        "an unknown filter.png": _png(4, 4, 8, 2, (b"\x09" + bytes(12)) * 4),
        "no palette.png": _png(4, 4, 8, 3, bytes(5 * 4)),
        "a chunk beyond the file.png": _png_with()[:33] + b"\x7f\xff\xff\xfftEXtabc",
    }
    yield _group("damaged_pngs", "unreadable", damage)
    yield _group("damaged_png_with_all_its_pixels", USED, {"no end chunk.png": png[:-12]})


def _bombs() -> Iterator[Kind]:
    jpeg, blown = sound(1, 16, "JPEG"), zlib.compress(bytes(2 * MIB))
    size = jpeg.index(b"\xff\xc0") + 5
    bombs = {
        "60,000 x 60,000.png": _png(60_000, 60_000, 8, 2, bytes(99)),
        "100 megapixels.png": _png(10_000, 10_000, 8, 2, bytes(99)),
        "a second header.png": _png_with(_chunk(b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0))),
        "65,535 x 65,535.gif": _gif(65_535, 65_535),
        "60,000 x 60,000.bmp": _bmp(60_000, 60_000),
        "a negative size.bmp": _bmp(-5, -(2**31)),
        "one endless row.bmp": _bmp(2**31 - 1, 1),
        "60,000 x 60,000.tif": _tiff(60_000),
        "16,384 x 16,384.webp": _webp(16_384),
        "65,500 x 65,500.jpg": _changed(jpeg, size, struct.pack(">HH", 65_500, 65_500)),
    }
    yield _group("pictures_that_claim_a_huge_size", "too_large", bombs)
    texts = {
        "text.png": _png_with(_chunk(b"zTXt", b"comment\0\0" + blown)),
        "international text.png": _png_with(_chunk(b"iTXt", b"comment\0\1\0\0\0" + blown)),
        "a colour profile.png": _png_with(_chunk(b"iCCP", b"profile\0\0" + blown)),
    }
    yield _group("pngs_with_two_mebibytes_packed_small", "unreadable", texts)


def _modes() -> Iterator[Kind]:
    plain, clear = noise(2), noise(2).convert("RGBA")
    clear.putalpha(Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4))
    palette, grey = plain.quantize(16), plain.convert("L")
    flattened = {
        "rgba.png": encoded(clear),
        "rgba too.webp": encoded(clear, "WEBP"),
        "la.png": encoded(clear.convert("LA")),
        "pa.tif": encoded(clear.convert("PA"), "TIFF"),
        "a palette and one clear colour.png": encoded(palette, transparency=3),
        "a palette and alpha of each colour.png": encoded(palette, transparency=bytes(range(0, 160, 10))),
        "a palette and one clear colour too.gif": encoded(palette, "GIF", transparency=3),
        "rgb and a clear colour.png": encoded(plain, transparency=plain.getpixel((0, 0))),
        "grey and a clear value.png": encoded(grey, transparency=grey.getpixel((0, 0))),
        "bilevel and a clear value.png": encoded(plain.convert("1"), transparency=0),
    }
    yield _group("modes_with_transparency", USED, flattened, *["transparency_flattened"] * len(flattened))
    modes = {
        "bilevel.png": encoded(plain.convert("1")),
        "grey.png": encoded(grey),
        "grey too.jpg": encoded(grey, "JPEG"),
        "palette.png": encoded(palette),
        "a palette that is too short.png": _png(4, 4, 8, 3, b"\0\0\1\xc8\xff" * 4, _chunk(b"PLTE", bytes(6))),
        "ycbcr.tif": encoded(plain.convert("YCbCr"), "TIFF"),
        "lab.tif": encoded(Image.frombytes("LAB", (8, 8), plain.tobytes()), "TIFF"),
        "interlaced.png": _interlaced(),
        "progressive.jpg": encoded(plain, "JPEG", progressive=True),
    }
    yield _group("modes", USED, modes)
    cmyk = plain.convert("CMYK")
    both = {"a.jpg": encoded(cmyk, "JPEG"), "b.tif": encoded(cmyk, "TIFF")}
    yield _group("modes_of_print", USED, both, *["cmyk_converted"] * 2)
    yield from _deep_modes()


def _deep_modes() -> Iterator[Kind]:
    ramp = np.arange(64).reshape(8, 8)
    share = (ramp / 63).astype(np.float32)
    deep = Image.fromarray((ramp * 1000).astype(np.uint16))
    reduced = {
        "rgb of 16 bits.png": _png(4, 4, 16, 2, (b"\0" + bytes(range(0, 240, 10))) * 4),
        "rgb of 16 bits and a clear colour.png": _png(2, 2, 16, 2, (b"\0" + bytes(range(12))) * 2, _chunk(b"tRNS", bytes(range(6)))),
        "16 bits.png": encoded(deep),
        "16 bits too.tif": encoded(deep, "TIFF"),
        "32 bits within 16.tif": encoded(Image.fromarray((ramp * 1000).astype(np.int32)), "TIFF"),
        "floats from 0 to 1.tif": encoded(Image.fromarray(share), "TIFF"),
    }
    yield _group("modes_of_more_than_8_bits", USED, reduced, *["depth_reduced"] * len(reduced))
    clear = {
        "rgba.png": _png(4, 4, 16, 6, (b"\0" + bytes(range(0, 256, 8))) * 4),
        "a clear value.png": encoded(deep, transparency=1000),
    }
    yield _group("modes_of_16_bits_with_transparency", USED, clear, *["depth_reduced", "transparency_flattened"] * 2)
    hole, endless = share.copy(), share.copy()
    hole[3, 3], endless[3, 3] = np.nan, np.inf
    unknown = {
        "32 bits beyond 16": (ramp * 2000).astype(np.int32),
        "32 bits below zero": (ramp - 5).astype(np.int32),
        "floats up to 255": share * 255,
        "floats below zero": share - 0.5,
        "floats with a hole": hole,
        "floats without an end": endless,
    }
    pictures = {f"{name}.tif": encoded(Image.fromarray(values), "TIFF") for name, values in unknown.items()}
    yield _group("modes_of_values_without_a_range", "unknown_range", pictures)


def _built_in(space: Any) -> bytes:
    """One of Pillow's own colour profiles, without its date."""
    return _changed(ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes(), 24, bytes(12))


def _fixed(*values: float) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def _profile(space: bytes, gamma: float, **primaries: tuple[float, float, float]) -> bytes:
    """A colour profile by hand: one gamma, and what its primaries are in XYZ."""
    white = (0.9642, 1.0, 0.8249)
    text = b"a profile by hand\0"
    tags = {b"desc": b"desc" + bytes(4) + struct.pack(">I", len(text)) + text + bytes(78), b"cprt": b"text" + bytes(4) + b"none\0"}
    tags |= {name.encode(): b"XYZ " + bytes(4) + _fixed(*value) for name, value in ({"wtpt": white} | primaries).items()}
    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC") if primaries else (b"kTRC",), curve)
    table, body, start = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += name + struct.pack(">II", start + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = struct.pack(">I4sI4s4s4s12s4s", start + len(body), b"", 0x02100000, b"mntr", space, b"XYZ ", bytes(12), b"acsp")
    return head + bytes(28) + _fixed(*white) + bytes(48) + struct.pack(">I", len(tags)) + table + body


def _profiles() -> Iterator[Kind]:
    swapped = _profile(b"RGB ", 2.2, rXYZ=(0.3851, 0.7169, 0.0971), gXYZ=(0.4361, 0.2225, 0.0139), bXYZ=(0.1431, 0.0606, 0.7141))
    grey = _profile(b"GRAY", 1.0)
    plain = {
        "srgb.png": sound(3, icc_profile=_built_in("sRGB")),
        "what does not unpack.png": _png_with(_chunk(b"iCCP", b"profile\0\0no zlib")),
    }
    yield _group("profiles_that_change_nothing", USED, plain)
    kinds = ("PNG", "JPEG", "WEBP", "TIFF")
    applied = {f"{kind}{SUFFIXES[kind]}": sound(3, kind=kind, icc_profile=swapped) for kind in kinds}
    yield _group("profiles_with_red_and_green_swapped", USED, applied, *["icc_converted"] * len(applied))
    linear = {"x.png": encoded(noise(2).convert("L"), icc_profile=grey)}
    yield _group("profile_of_linear_grey", USED, linear, "icc_converted")
    wrong = {
        "garbage": b"no profile at all" * 9,
        "cut": swapped[: len(swapped) // 2],
        "xyz": _built_in("XYZ"),
        "lab": _built_in("LAB"),
        "grey for rgb": grey,
    }
    broken = {f"{name}.jpg": sound(3, kind="JPEG", icc_profile=profile) for name, profile in wrong.items()}
    yield _group("profiles_that_are_broken", USED, broken, *["icc_broken"] * len(broken))
    cmyk = {"x.jpg": encoded(noise(2).convert("CMYK"), "JPEG", icc_profile=swapped)}
    yield _group("profile_of_rgb_on_cmyk", USED, cmyk, "icc_broken", "cmyk_converted")


def _tagged(directory: bytes) -> bytes:
    """EXIF with its first directory at the usual place."""
    return b"Exif\0\0" + struct.pack("<2sHI", b"II", 42, 8) + directory


def _exif() -> Iterator[Kind]:
    wide = noise(4, 24).crop((0, 0, 24, 16))
    for turn in range(1, 9):
        exif = _tagged(_ifd((0x0112, 3, 1, turn)))
        turned = {f"{kind}{SUFFIXES[kind]}": encoded(wide, kind, exif=exif) for kind in ("JPEG", "PNG", "WEBP")}
        yield _group(f"exif_orientation_{turn}", USED, turned, *["exif_turned"] * (3 if turn > 1 else 0))
    thumbnail = sound(5, kind="JPEG")
    small = [(0x0103, 3, 1, 6), (0x0201, 4, 1, 8 + 18 + 42), (0x0202, 4, 1, len(thumbnail))]
    odd = {
        "orientation 0": _tagged(_ifd((0x0112, 3, 1, 0))),
        "orientation 9": _tagged(_ifd((0x0112, 3, 1, 9))),
        "orientation 65,535": _tagged(_ifd((0x0112, 3, 1, 65535))),
        "orientation as text": _tagged(_ifd((0x0112, 2, 4, int.from_bytes(b"top\0", "little")))),
        "two orientations": _tagged(_ifd((0x0112, 3, 2, 0))),
        "orientation over zero": _tagged(_ifd((0x0112, 5, 1, 26)) + bytes(8)),
        "garbage": b"Exif\0\0no tags here",
        "empty": b"Exif\0\0",
        "cut": _tagged(_ifd((0x0112, 3, 1, 1), (0x010F, 2, 4, 0)))[:-9],
        "beyond the file": b"Exif\0\0" + struct.pack("<2sHI", b"II", 42, 10**6),
        "loop": _tagged(_ifd((0x8769, 4, 1, 8), (0x8825, 4, 1, 8), following=8)),
        "huge": _tagged(_ifd((0x927C, 7, 20_000, 26)) + bytes(20_000)),
        "thumbnail": _tagged(_ifd((0x0112, 3, 1, 1), following=8 + 18) + _ifd(*small) + thumbnail),
    }
    files = {f"{name}.jpg": encoded(wide, "JPEG", exif=exif) for name, exif in odd.items()}
    yield _group("exif_of_odd_kinds", USED, files | {"garbage too.png": _png_with(_chunk(b"eXIf", b"no tags here"))})


def _frames() -> Iterator[Kind]:
    first, both = noise(6), {"save_all": True, "append_images": [noise(7)]}
    files = {f"{kind}{SUFFIXES[kind]}": encoded(first, kind, **both) for kind in ("GIF", "PNG", "WEBP", "TIFF")}
    yield _group("pictures_of_two_frames", "animated", files | {"a gif named.png": files["GIF.gif"]})
    yield _group("picture_of_one_frame", USED, {"x.gif": encoded(first, "GIF")})
    yield _group("photo_with_a_preview_behind_it", USED, {"x.jpg": encoded(first, "MPO", **both)})


def _shapes() -> Iterator[Kind]:
    sizes = ((4000, 1), (1, 4000), (1, 1), (2, 1))
    shapes = {f"{width} x {height}.png": encoded(Image.new("RGB", (width, height), (200, 30, 30))) for width, height in sizes}
    yield _group("pictures_of_odd_shapes", USED, shapes)


# File names and links

NAMES = {
    "spaces": " two  words ",
    "quotes": 'it\'s "quoted" `here`',
    "newline": "two\nlines\r\tand a tab",
    "emoji": "🚀👩‍👩‍👧‍👦",
    "html": "<img src=x onerror=alert(1)>&amp;",
    "markdown": "[a](b)|**c**|$x$",
    "shell": "$(touch pwned); rm -rf ~ | *?",
    "long": "n" * 236,
    "long_in_bytes": "猫" * 83,
    "dash": "-rf",
    "dots": "a.b.c",
    "two_suffixes": "a.png",
    "dots_at_its_end": "a...",
    "format": "{0}%s%n{outside}\\",
    "backslash": "a\\..\\b",
    "escapes": "\x1b[31mred\x07\x7f",
    "right_to_left": "\u202egnp.exe",
    "device": "CON",
}
"""Stems of file names that people and programs have trouble with."""


def _shown(name: str) -> str:
    """A name as a label: what is no Unicode is escaped."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _names() -> Iterator[Kind]:
    told = {f"{stem}.png": f"name with {name}" for name, stem in NAMES.items()}
    texts = {f"{stem}.txt": f"name with {name}".encode() for name, stem in NAMES.items()}
    yield _kind("odd_names", dict.fromkeys(told, sound(8)) | texts, dict.fromkeys(told, USED), captions=told)
    bytes_name = os.fsdecode(b"caf\xe9\xff")
    label = _shown(f"{bytes_name}.png")
    files = {f"{bytes_name}.png": sound(8), f"{bytes_name}.txt": CAPTION.encode()}
    yield _kind("name_that_is_no_unicode", files, {label: USED}, captions={label: CAPTION}, picky=True)
    for name, stems in (("case", ("twin", "TWIN")), ("accents", ("caf\u00e9", "cafe\u0301"))):
        told = {f"{stem}.png": ascii(stem) for stem in stems}
        files = dict.fromkeys(told, sound(8)) | {f"{stem}.txt": ascii(stem).encode() for stem in stems}
        yield _kind(f"names_that_differ_in_{name}", files, dict.fromkeys(told, USED), captions=told, picky=True)
    decoy = {"a.b.c.png": sound(8), "a.b.c.txt": b"its own", "a.txt": b"not this", "a.b.txt": b"nor this"}
    yield _kind("name_with_dots_beside_shorter_ones", decoy, {"a.b.c.png": USED}, captions={"a.b.c.png": "its own"})
    upper = {"A.PNG": sound(8), "A.txt": b"one", "b.Jpg": sound(8, kind="JPEG"), "b.TXT": b"two"}
    yield _kind("suffixes_in_upper_case", upper, {"A.PNG": USED, "b.Jpg": USED}, captions={"A.PNG": "one", "b.Jpg": "two"})
    shared = {"a.png": sound(8), "a.jpg": sound(8, kind="JPEG"), "a.txt": b"both"}
    yield _kind("pictures_that_share_a_caption", shared, {"a.png": USED, "a.jpg": USED}, captions={"a.png": "both", "a.jpg": "both"})
    hidden = {name: sound(8) for name in (".a.png", "._a.png", ".cache/b.png", "__MACOSX/._c.png")}
    yield _kind("hidden_files", hidden, {})
    deep = "/".join(["deep"] * 40)
    yield _kind("folders_forty_deep", {f"{deep}/a.png": sound(8), f"{deep}/a.txt": b"deep"}, {f"{deep}/a.png": USED})
    yield _kind("folder_named_png", {"x.png/notes.md": b"no picture", "x.txt": b"x"}, {"x.png": "not_a_file"})
    inner = {"x.png/a.png": sound(8), "x.png/a.txt": b"inside"}
    yield _kind("folder_named_png_with_a_picture", inner, {"x.png": "not_a_file", "x.png/a.png": USED})
    yield _kind("pipe_named_png", {"x.txt": b"x"}, {"x.png": "not_a_file"}, pipes=("x.png",))
    yield _kind("pipe_for_a_caption", {"x.png": sound(8)}, {"x.png": "no_caption"}, pipes=("x.txt",))
    yield _kind("folder_for_a_caption", {"x.png": sound(8), "x.txt/notes.md": b"x"}, {"x.png": "no_caption"})


def _links() -> Iterator[Kind]:
    text = {"x.txt": CAPTION.encode()}
    for name, target, expected in (
        ("a_picture_inside", "sound.png", USED),
        ("a_picture_outside", "{outside}/secret.png", "outside_root"),
        ("a_picture_outside_by_dots", f"../{OUTSIDE}/secret.png", "outside_root"),
        ("a_device", "/dev/zero", "outside_root"),
        ("nothing", "gone.png", "missing_file"),
        ("nothing_outside", "{outside}/gone.png", "outside_root"),
        ("itself", "x.png", "missing_file"),
        ("a_folder_outside", "{outside}", "outside_root"),
    ):
        yield _kind(f"link_to_{name}", text, {"x.png": expected}, links={"x.png": target})
    yield _kind("links_in_a_loop", text, {"x.png": "missing_file", "y.png": "missing_file"}, links={"x.png": "y.png", "y.png": "x.png"})
    chain = {"x.png": "y.png", "y.png": "z/z.png", "z/z.png": "{outside}/secret.png"}
    yield _kind("links_that_lead_outside_one_by_one", text, dict.fromkeys(chain, "outside_root"), links=chain)
    through = {"y": "{outside}", "x.png": "y/secret.png"}
    yield _kind("link_through_a_folder_that_is_one", text, {"x.png": "outside_root"}, links=through)
    yield _kind("link_to_a_folder_of_secrets", {}, {}, links={"album": "{outside}"})
    yield _kind("link_to_the_folder_above", {"deep/notes.md": b"x"}, {}, links={"deep/up": ".."})
    yield _kind("link_to_a_caption_outside", {"x.png": sound(8)}, {"x.png": "no_caption"}, links={"x.txt": "{outside}/secret.txt"})
    inside = {"x.png": sound(8), "texts/x.txt": b"linked"}
    yield _kind("link_to_a_caption_inside", inside, {"x.png": USED}, links={"x.txt": "texts/x.txt"}, captions={"x.png": "linked"})
    metadata = {"metadata.jsonl": "{outside}/secret.txt"}
    yield _kind("link_to_metadata_outside", {}, {"metadata.jsonl": "outside_root"}, links=metadata)
    yield _kind("link_to_a_tar_outside", {}, {"shard.tar": "outside_root"}, links={"shard.tar": "{outside}/secret.png"})


# Captions

WORDS = "a red balloon"
TEXTS: dict[str, tuple[bytes, str | None, str | None]] = {
    "utf 8": (WORDS.encode(), WORDS, None),
    "utf 8 with bom": (WORDS.encode("utf-8-sig"), WORDS, None),
    "utf 16 with bom": ("ein Bär 🐻".encode("utf-16"), "ein Bär 🐻", None),
    "utf 16 of the other end with bom": (b"\xfe\xff" + WORDS.encode("utf-16-be"), WORDS, None),
    "utf 16 without bom": (WORDS.encode("utf-16-le"), WORDS, None),
    "utf 16 of the other end without bom": (WORDS.encode("utf-16-be"), WORDS, None),
    "utf 16 cut in half": (WORDS.encode("utf-16")[:-1], None, None),
    "cp1252": ("„naïve“ café €5".encode("cp1252"), "„naïve“ café €5", "caption_cp1252"),
    "bytes that even cp1252 lacks": (b"caf\xe9 \x81\x8d", None, "caption_cp1252"),
    "utf 8 cut in half": ("ein Bär".encode()[:-2], "ein BÃ", "caption_cp1252"),
    "half a pair in utf 8": (b"half \xed\xa0\xbd pair", None, "caption_cp1252"),
    "nuls": (b"a red\0balloon\0\0", WORDS, "caption_nul"),
    "line breaks": (b"  a\r\n\r\nred\rballoon\n", WORDS, "caption_line_breaks"),
    "breaks of unicode": ("a\u2028red\x85\u3000\u00a0balloon\x0b".encode(), WORDS, "caption_line_breaks"),
    "tabs": (b"\ta\t red\t\tballoon \t", WORDS, None),
    "arabic": ("قطة على القمر".encode(), "قطة على القمر", None),
    "emoji": ("👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪".encode(), "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪", None),
    "combining characters": (("z" + "\u0300" * 50 + "algo").encode(), "z" + "\u0300" * 50 + "algo", None),
    "bidi controls": ("a \u202eneddih\u202c \u2066word\u2069".encode(), "a \u202eneddih\u202c \u2066word\u2069", None),
    "bom in the middle": ("a\ufeff red\u200bballoon".encode(), "a\ufeff red\u200bballoon", None),
    "html": (b"<script>alert(1)</script>&amp;", "<script>alert(1)</script>&amp;", None),
    "control characters": (b"\x1b[31mred\x07\x08", "\x1b[31mred\x07\x08", None),
    "a hundred kilobytes": (b"red " * 25_000, " ".join(["red"] * 25_000), None),
    "one long word": (b"r" * 9_000, "r" * 9_000, None),
}
"""Bytes of a .txt file, what they mean (None: only that they are used), and what is counted."""
JSONS: dict[str, tuple[bytes, str | None]] = {
    "caption": (b'{"caption": "a red balloon", "text": "not this"}', WORDS),
    "text": (b'{"text": "a red balloon"}', WORDS),
    "empty caption and a text": (b'{"caption": " ", "text": "a red balloon"}', WORDS),
    "null caption and a text": (b'{"caption": null, "text": "a red balloon"}', WORDS),
    "bom": (b'\xef\xbb\xbf{"caption": "a red balloon"}', WORDS),
    "utf 16": ('{"caption": "a red balloon"}'.encode("utf-16"), WORDS),
    "escaped breaks and nuls": (b'{"caption": "a\\u0000red\\r\\n\\u2028balloon"}', WORDS),
    "half a pair": (b'{"caption": "half \\ud83d pair"}', "half ? pair"),
    "a pair": (b'{"caption": "\\ud83d\\ude80"}', "🚀"),
    "broken": (b'{"caption": "a red', None),
    "list": (b'["a red balloon"]', None),
    "text alone": (b'"a red balloon"', None),
    "number alone": (b"5", None),
    "number": (b'{"caption": 5}', None),
    "not a number": (b'{"caption": NaN}', None),
    "list of captions": (b'{"caption": ["a red balloon"]}', None),
    "object": (b'{"caption": {"en": "a red balloon"}}', None),
    "null": (b'{"caption": null}', None),
    "other fields": (b'{"title": "a red balloon"}', None),
    "empty object": (b"{}", None),
    "nested 20 000 deep": (b'{"caption": ' + b"[" * 20_000, None),
    "number of 5000 digits": (b'{"caption": "a red balloon", "id": ' + b"9" * 5000 + b"}", None),
}
"""Bytes of a .json file, and its caption, None for none."""
EMPTY = {
    "nothing": b"",
    "white space": " \r\n\t\u00a0\u2028\u3000".encode(),
    "nuls alone": bytes(8),
    "a bom alone": b"\xef\xbb\xbf",
    "a bom of utf 16 alone": b"\xff\xfe",
}
"""Bytes of .txt files in which there is no caption."""


def _sidecars() -> Iterator[Kind]:
    for note in (None, "caption_cp1252", "caption_nul", "caption_line_breaks"):
        texts = {f"{stem}.txt": data for stem, (data, _, counted) in TEXTS.items() if counted == note}
        told = {f"{stem}.png": text for stem, (_, text, counted) in TEXTS.items() if counted == note}
        files, notes = dict.fromkeys(told, sound(9)) | texts, (note,) * len(told) if note else ()
        yield _kind(note or "captions", files, dict.fromkeys(told, USED), captions=told, notes=notes)
    for name, bad in (("captions_in_json", False), ("captions_in_bad_json", True)):
        texts = {f"{stem}.json": data for stem, (data, text) in JSONS.items() if (text is None) == bad}
        told = {f"{stem}.png": text for stem, (_, text) in JSONS.items() if (text is None) == bad}
        files, became = dict.fromkeys(told, sound(9)) | texts, dict.fromkeys(told, "no_caption" if bad else USED)
        yield _kind(name, files, became, captions={} if bad else told)
    files = {f"{stem}.txt": data for stem, data in EMPTY.items()}
    labels = [*(f"{stem}.png" for stem in EMPTY), "no file.png"]
    yield _kind("captions_that_are_empty", dict.fromkeys(labels, sound(9)) | files, dict.fromkeys(labels, "no_caption"))
    long = {"x.png": sound(9), "x.txt": b"red " * (MIB // 4) + b"!"}
    yield _kind("caption_of_more_than_a_mebibyte", long, {"x.png": "no_caption"})
    texts = {"x.txt": b" \n", "x.caption": b"from caption", "x.json": b'{"caption": "from json"}'}
    yield _kind("caption_after_an_empty_one", {"x.png": sound(9), **texts}, {"x.png": USED}, captions={"x.png": "from caption"})
    broken = {"x.txt": b"", "x.json": b"{"}
    yield _kind("caption_empty_and_another_broken", {"x.png": sound(9), **broken}, {"x.png": "no_caption"})
    yield _kind("captions_without_pictures", {"y.txt": b"orphan", "z.json": b"{broken"}, {})


# Metadata

ESCAPES = (f"../{OUTSIDE}/secret.png", "../secret.png", f"a/../../{OUTSIDE}/secret.png", "/etc/passwd", f"{'../' * 40}etc/passwd")
"""Names in metadata that leave the root."""
LOST = ("gone.png", "deep/gone.png", "x" * 1000, "deep\\a.png", "C:\\a.png")
"""Names in metadata of what is not there."""


def _jsonl(rows: list[tuple[Any, Any]]) -> bytes:
    return "".join(json.dumps({"file_name": name, "text": text}) + "\n" for name, text in rows).encode()


def _csv(rows: list[tuple[Any, Any]]) -> bytes:
    return "".join(f"{name},{text}\n" for name, text in [("file_name", "text"), *rows]).encode()


def _parquet(rows: list[tuple[Any, Any]]) -> bytes:
    return _table(pa.table({"file_name": [name for name, _ in rows], "text": [text for _, text in rows]}))


def _table(table: pa.Table, **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, **options)
    return buffer.getvalue()


BROKEN_LINES = (
    b'{"file_name": "x.png"',
    b"x.png,a caption",
    b'["x.png", "a caption"]',
    b"5",
    b"null",
    b"{}",
    b'{"text": "a caption"}',
    b'{"file_name": 7, "text": "a caption"}',
    b'{"file_name": null, "text": "a caption"}',
    b'{"file_name": ["x.png"], "text": "a caption"}',
)
"""Lines of metadata that name no picture."""
CELLS = (
    ('a "red" balloon', 'a "red" balloon'),
    ('"a red" balloon', WORDS),
    ('"a, ""red"" balloon"', 'a, "red" balloon'),
    ('"a red\r\nballoon"', WORDS),
    ("a red balloon,more,and more", WORDS),
    ("a red\0balloon", WORDS),
)
"""What stands in a line of CSV behind the name, and the caption it means."""
FORMS: dict[str, tuple[Callable[[list[tuple[Any, Any]]], bytes], int]] = {"jsonl": (_jsonl, 1), "csv": (_csv, 2), "parquet": (_parquet, 1)}
"""How metadata is written, and the number of its first row."""


def _listing(name: str, file: str, data: bytes, expect: dict[str, str], **more: Any) -> Kind:
    """A kind of metadata that lists `sound.png`, then what is hostile, then `last.png`."""
    captions = {"sound.png": LISTED, "last.png": LISTED, **more.pop("captions", {})}
    files = {"last.png": sound(10), file: data, **more.pop("files", {})}
    return _kind(name, files, {"last.png": USED, **expect}, captions=captions, **more)


def _metadata() -> Iterator[Kind]:
    first, last = ("sound.png", LISTED), ("last.png", LISTED)
    for form, (write, start) in FORMS.items():
        file, here = f"metadata.{form}", f"{form}_with"
        escapes = write([first, *((name, "x") for name in ESCAPES), last])
        yield _listing(f"{here}_names_that_leave_the_root", file, escapes, dict.fromkeys(ESCAPES, "outside_root"))
        lost = write([first, ("", "x"), *((name, "x") for name in LOST), last])
        nowhere = {f"{file}:{start + 1}": "bad_metadata", **dict.fromkeys(LOST, "missing_file")}
        yield _listing(f"{here}_names_of_nothing", file, lost, nowhere)
        rows = [("x.png", "one"), ("x.png", "two"), ("./deep//y.png", "in a folder"), ("e.png", ""), ("w.png", " \t"), ("z.txt", "text")]
        pictures = dict.fromkeys(("x.png", "deep/y.png", "e.png", "w.png"), sound(11)) | {"z.txt": b"no picture"}
        became = {"x.png": USED, "deep/y.png": USED, "e.png": "no_caption", "w.png": "no_caption", "z.txt": "unreadable"}
        told = {"deep/y.png": "in a folder"}
        yield _listing(f"{here}_odd_rows", file, write([first, *rows, last]), became, captions=told, files=pictures)
        linked = write([first, ("x.png", "linked"), last])
        outside = {"x.png": "{outside}/secret.png"}
        yield _listing(f"{here}_a_link_that_leaves_the_root", file, linked, {"x.png": "outside_root"}, links=outside)
    yield from _json_lines()
    yield from _comma_separated()
    yield from _columns()


def _json_lines() -> Iterator[Kind]:
    file, good, last = "metadata.jsonl", _jsonl([("sound.png", LISTED)]), _jsonl([("last.png", LISTED)])
    broken = {f"{file}:{number}": "bad_metadata" for number in range(2, len(BROKEN_LINES) + 2)}
    yield _listing("jsonl_with_broken_lines", file, good + b"".join(line + b"\n" for line in BROKEN_LINES) + last, broken)
    nested = b'{"file_name": "x.png", "text": ' + b"[" * 100_000 + b"\n"
    yield _listing("jsonl_with_nesting_100_000_deep", file, good + nested + last, {f"{file}:2": "bad_metadata"})
    yield _listing("jsonl_with_nul_in_a_name", file, good + _jsonl([("x\0.png", "x")]) + last, {"x .png": "outside_root"})
    yield _listing("jsonl_with_half_a_pair_in_a_name", file, good + _jsonl([("\ud800.png", "x")]) + last, {"\\ud800.png": "outside_root"})
    content = good + _jsonl([("x.png", 5), ("y.png", ["a list"]), ("z.png", None)]) + last
    pictures = {f"{name}.png": sound(11) for name in "xyz"}
    yield _listing("jsonl_with_captions_that_are_no_text", file, content, dict.fromkeys(pictures, "no_caption"), files=pictures)
    rows = [("x.png", "half \ud83d pair"), ("y.png", "a red\0balloon"), ("z.png", "a red\r\n\u2028balloon")]
    told = {"x.png": "half ? pair", "y.png": WORDS, "z.png": WORDS}
    content, notes = good + _jsonl(rows) + last, ("caption_nul", "caption_line_breaks")
    yield _listing("jsonl_with_odd_captions", file, content, dict.fromkeys(told, USED), captions=told, notes=notes, files=pictures)
    raw = '{"file_name": "x.png", "text": "a\u2028red\u0085balloon"}\n'.encode()
    x, told = {"x.png": sound(11)}, {"x.png": WORDS}
    yield _listing("jsonl_with_breaks_of_unicode_within_a_line", file, good + raw + last, {"x.png": USED}, captions=told, files=x)
    yield _listing("jsonl_with_blank_lines", file, b"\n\r\n" + good + b" \n\n{}\n\n" + last, {f"{file}:6": "bad_metadata"})
    yield _listing("jsonl_with_a_bom_and_no_last_break", file, b"\xef\xbb\xbf" + good + last.rstrip(), {})
    yield _listing("jsonl_with_breaks_of_windows", file, (good + last).replace(b"\n", b"\r\n"), {})
    yield _listing("jsonl_in_utf_16", file, (good + last).decode().encode("utf-16"), {})
    yield _kind("jsonl_of_nothing", {file: b""}, {}, captions={"sound.png": "a sound picture"})
    own = {"deep/x.png": sound(11), "deep/metadata.jsonl": _jsonl([("x.png", "in its folder"), (f"../../{OUTSIDE}/secret.png", "x")])}
    told = {"deep/x.png": "in its folder"}
    yield _kind("jsonl_in_a_folder", own, {"deep/x.png": USED, f"../../{OUTSIDE}/secret.png": "outside_root"}, captions=told)


def _comma_separated() -> Iterator[Kind]:
    file, head, last = "metadata.csv", f"file_name,text\nsound.png,{LISTED}\n", f"last.png,{LISTED}\n"
    told = {f"{number}.png": text for number, (_, text) in enumerate(CELLS)}
    rows = "".join(f"{number}.png,{cells}\n" for number, (cells, _) in enumerate(CELLS))
    content, pictures = (head + rows + last).encode(), dict.fromkeys(told, sound(11))
    yield _listing("csv_with_odd_quotes_and_commas", file, content, dict.fromkeys(told, USED), captions=told, files=pictures)
    long = {"x.png": ("red " * 33_000).strip()}
    content = f"{head}x.png,{long['x.png']}\n{last}".encode()
    yield _listing("csv_with_a_field_of_132_000_letters", file, content, {"x.png": USED}, captions=long, files={"x.png": sound(11)})
    short = (head + "x.png\n" + last).encode()
    yield _listing("csv_with_a_field_too_few", file, short, {"x.png": "no_caption"}, files={"x.png": sound(11)})
    blank = (head + "\n\n,x\n\n" + last).encode()
    yield _listing("csv_with_blank_lines", file, blank, {f"{file}:5": "bad_metadata"})
    for name, content in (
        ("a_bom", (head + last).encode("utf-8-sig")),
        ("utf_16", (head + last).encode("utf-16")),
        ("breaks_of_windows", (head + last).replace("\n", "\r\n").encode()),
        ("breaks_of_old_macs", (head + last).replace("\n", "\r").encode()),
    ):
        yield _listing(f"csv_with_{name}", file, content, {})
    open_quote = {"x.png": sound(11), file: (head + 'x.png,"a red\nballoon').encode()}
    yield _kind("csv_with_a_quote_that_never_ends", open_quote, {"x.png": USED}, captions={"sound.png": LISTED, "x.png": WORDS})


def _columns() -> Iterator[Kind]:
    file, rows = "metadata.parquet", [("sound.png", LISTED), ("x.png", "a red\0balloon\n"), ("last.png", LISTED)]
    x = {"x.png": sound(11)}
    told = {"x.png": WORDS}
    yield _listing("parquet_with_a_nul_in_a_caption", file, _parquet(rows), {"x.png": USED}, captions=told, notes=("caption_nul",), files=x)
    names, texts = pa.array(["sound.png", "x\0.png", None, "last.png"]), pa.array([LISTED, "x", "x", LISTED])
    bad = {"x .png": "outside_root", f"{file}:3": "bad_metadata"}
    yield _listing("parquet_with_a_nul_and_a_null_for_names", file, _table(pa.table({"file_name": names, "text": texts})), bad)
    broken = pa.array([b"sound.png", b"caf\xe9.png", b"last.png"]).view(pa.string())
    data = _table(pa.table({"file_name": broken, "text": [LISTED, "x", LISTED]}))
    yield _listing("parquet_with_a_name_that_is_no_unicode", file, data, {"caf\u00e9.png": "missing_file"})
    whole = _parquet([("sound.png", LISTED)] * 50)
    for name, content in (
        ("cut", whole[: len(whole) // 2]),
        ("cut_in_its_last_bytes", whole[:-3]),
        ("of_garbage", b"PAR1 but not really PAR1"),
        ("of_zero_bytes", b""),
    ):
        yield _kind(f"parquet_{name}", {file: content}, {file: "bad_metadata"}, captions={"sound.png": "a sound picture"})
    none = _table(pa.table({"file_name": pa.array([], pa.string()), "text": pa.array([], pa.string())}))
    yield _kind("parquet_without_rows", {file: none}, {}, captions={"sound.png": "a sound picture"})


# Tars


def _member(name: str, data: bytes = b"", kind: bytes = tarfile.REGTYPE, *, link: str = "", size: int | None = None) -> bytes:
    """A header with whatever it says, and the data padded to whole blocks."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape") + data + bytes(-len(data) % 512)


def _field(member: bytes, at: int, value: bytes) -> bytes:
    """A member with bytes of its header changed and the checksum made right again."""
    header = _changed(_changed(member[:512], at, value), 148, b" " * 8)
    return _changed(header, 148, f"{sum(header):06o}\0 ".encode()) + member[512:]


def _pax(member: bytes, records: dict[str, bytes]) -> bytes:
    """A member with extended headers before it."""
    lines = b""
    for key, value in records.items():
        body = b" " + key.encode() + b"=" + value + b"\n"
        length = len(body)
        while length != len(body) + len(str(length)):
            length = len(body) + len(str(length))
        lines += str(length).encode() + body
    return _member("PaxHeaders/x", lines, tarfile.XHDTYPE) + member


def _pair(name: str, text: str = CAPTION) -> bytes:
    """A picture and its caption."""
    stem = os.path.splitext(name)[0]
    return _member(name, sound(13)) + _member(f"{stem}.txt", text.encode())


def _shard(name: str, members: bytes, expect: dict[str, str], end: bytes = bytes(1024), **more: Any) -> Kind:
    """A kind of one tar whose first members are sound; names in it are given without that of the tar, which is ""."""
    labels = {(f"shard.tar::{member}" if member else "shard.tar"): became for member, became in expect.items()}
    for told in ("captions", "again"):
        more[told] = {f"shard.tar::{member}": text for member, text in more.get(told, {}).items()}
    return _kind(f"tar_{name}", {"shard.tar": _pair("first.png") + members + end}, {"shard.tar::first.png": USED, **labels}, **more)


def _tars() -> Iterator[Kind]:
    yield from _broken_tars()
    yield from _odd_members()
    yield from _named_members()


def _broken_tars() -> Iterator[Kind]:
    damaged = {"": "damaged_tar"}
    big, last = sound(14, 32), _pair("last.png")
    cut = {"x.png": "unreadable", **damaged}
    yield _shard("cut_in_a_picture", _member("x.txt", b"x") + _member("x.png", big)[: 512 + 2000], cut, end=b"")
    yield _shard("cut_in_a_header", last[:100], damaged, end=b"")
    yield _shard("with_a_member_larger_than_itself", _member("x.txt", b"x") + _member("x.png", big[:2000], size=10**6), cut)
    yield _shard("with_a_member_of_8_gib", _member("x.txt", b"x") + _member("x.png", big[:2000], size=8**11 - 1), cut)
    yield _shard("with_a_member_of_2_to_the_70", _member("x.txt", b"x") + _member("x.png", big[:2000], size=2**70), cut)
    for name, header in (
        ("garbage_for_a_header", b"\xff" * 512),
        ("a_wrong_checksum", _changed(_member("x.png", sound(13)), 148, b"0000000\0")),
        ("letters_for_a_size", _field(_member("x.png", sound(13)), 124, b"zzzzzzzzzzz\0")),
        ("a_negative_size", _member("x.png", size=-1536)),
        ("a_size_of_minus_one_block", _member("x.png", size=-512)),
        ("extended_headers_of_a_wrong_length", _member("PaxHeaders/x", b"99999 path=x.png\n", tarfile.XHDTYPE) + _member("x.png")),
        ("a_long_name_of_8_gib", _member("././@LongLink", b"x.png\0", tarfile.GNUTYPE_LONGNAME, size=8**11 - 1)),
        ("a_long_name_before_nothing", _member("././@LongLink", b"x.png\0", tarfile.GNUTYPE_LONGNAME)[:1024] + b"\xff" * 512),
    ):
        yield _shard(f"with_{name}", header + b"\xff" * 1024, damaged, end=b"")
    yield _shard("without_an_end", last, {"last.png": USED}, end=b"")
    yield _shard("with_junk_behind_its_end", last, {"last.png": USED}, end=bytes(1024) + b"junk" * 500)
    whole = last + bytes(1024)
    for name, file, data in (
        ("that_is_text", "shard.tar", b"no tar at all, but long enough for a header" * 50),
        ("of_zero_bytes", "shard.tar", b""),
        ("of_three_bytes", "shard.tar", b"abc"),
        ("that_is_compressed", "shard.tar", gzip.compress(whole, mtime=0)),
        ("named_tar_gz", "shard.tar.gz", gzip.compress(whole, mtime=0)),
    ):
        yield _kind(f"tar_{name}", {"other.tar": whole, file: data}, {"other.tar::last.png": USED, file: "damaged_tar"})
    yield _kind("tar_without_members", {"other.tar": whole, "shard.tar": bytes(1024)}, {"other.tar::last.png": USED})


def _sparse() -> bytes:
    """A member in the old way of GNU of which all but one block is a hole."""
    places = b"%011o\0%011o\0" % (0, 512)
    return _field(_field(_member("old.png", bytes(512), tarfile.GNUTYPE_SPARSE), 386, places), 483, b"%011o\0" % MIB)


def _odd_members() -> Iterator[Kind]:
    last, text = _pair("last.png"), _member("x.txt", CAPTION.encode())
    odd = {
        "symbolic link.png": _member("symbolic link.png", kind=tarfile.SYMTYPE, link="/etc/passwd"),
        "link to a member.png": _member("link to a member.png", kind=tarfile.SYMTYPE, link="first.png"),
        "hard link.png": _member("hard link.png", kind=tarfile.LNKTYPE, link="/etc/passwd"),
        "hard link to a member.png": _member("hard link to a member.png", kind=tarfile.LNKTYPE, link="first.png"),
        "character device.png": _member("character device.png", kind=tarfile.CHRTYPE),
        "block device.png": _member("block device.png", kind=tarfile.BLKTYPE),
        "pipe.png": _member("pipe.png", kind=tarfile.FIFOTYPE),
        "folder.png": _member("folder.png", kind=tarfile.DIRTYPE),
    }
    members = b"".join(member + _member(f"{name[:-4]}.txt", b"x") for name, member in odd.items())
    yield _shard("with_links_devices_and_folders", members + last, {**dict.fromkeys(odd, "not_a_file"), "last.png": USED})
    newer = _member("PaxHeaders/new.png", b"1\n0\n512\n".ljust(512, b"\0") + bytes(512))
    records = {"GNU.sparse.major": b"1", "GNU.sparse.minor": b"0", "GNU.sparse.name": b"new.png", "GNU.sparse.realsize": str(MIB).encode()}
    holes = _sparse() + _member("old.txt", b"x") + _pax(newer, records) + _member("new.txt", b"x") + last
    yield _shard("with_sparse_members", holes, {"old.png": "not_a_file", "new.png": "not_a_file", "last.png": USED})
    bad = {
        "empty.png": (_member("empty.png") + _member("empty.txt", b"x"), "empty_file"),
        "cut.png": (_member("cut.png", sound(14, 32)[:2000]) + _member("cut.txt", b"x"), "unreadable"),
        "alone.png": (_member("alone.png", sound(13)), "no_caption"),
        "link.png": (_member("link.png", sound(13)) + _member("link.txt", kind=tarfile.SYMTYPE, link="/etc/passwd"), "no_caption"),
        "nested.png": (_member("nested.png", sound(13)) + _member("nested.json", b"[" * 5_000), "no_caption"),
    }
    members = b"".join(member for member, _ in bad.values())
    yield _shard("with_bad_members", members + last, {**{name: reason for name, (_, reason) in bad.items()}, "last.png": USED})
    hidden = _member("._a.png", sound(13)) + _member("deep/.b.png", sound(13)) + _member("._a.txt", b"x")
    others = _member("x.exe", b"MZ") + _member("no suffix", b"?") + _member("y.cls", b"3") + _member("orphan.txt", b"orphan")
    inner = _member("inner.tar", _pair("x.png") + bytes(1024))
    yield _shard("with_members_to_pass_over", hidden + others + inner + last, {"last.png": USED})
    old = _field(_member("x.png", sound(13)), 156, tarfile.AREGTYPE)
    old = _field(old, 257, bytes(8))
    new = _field(_member("y.png", sound(13)), 156, tarfile.CONTTYPE)
    ways = old + text + new + _member("y.txt", b"y") + last
    yield _shard("with_members_of_old_and_new_ways", ways, {"x.png": USED, "y.png": USED, "last.png": USED})
    twice = _pair("x.png") + _pair("y.png") + _member("x.png", sound(15)) + _member("y.png", b"broken")
    again = dict.fromkeys(("x.png", "y.png"), "duplicate_member")
    yield _shard("with_members_twice", twice + last, {"x.png": USED, "y.png": USED, "last.png": USED}, again=again)
    texts = _member("x.txt", b"the first") + _member("x.png", sound(13)) + _member("x.txt", b"the second")
    yield _shard("with_a_caption_twice", texts + last, {"x.png": USED, "last.png": USED}, captions={"x.png": "the first"})
    told, notes = {"a.png": "café", "b.png": WORDS}, ("caption_cp1252", "caption_nul")
    texts = _member("a.png", sound(13)) + _member("a.txt", b"caf\xe9") + _member("b.png", sound(13)) + _member("b.txt", b"a red\0balloon")
    yield _shard("with_odd_captions", texts + last, {**dict.fromkeys(told, USED), "last.png": USED}, captions=told, notes=notes)


def _named_members() -> Iterator[Kind]:
    stems = ["../../evil", "/etc/evil", "./plain", "a/../b", "d" * 150 + "/x", *NAMES.values()]
    told = {f"{stem}.png": f"caption {index}" for index, stem in enumerate(stems)}
    members = b"".join(_pair(name, text) for name, text in told.items())
    yield _shard("with_odd_names", members, dict.fromkeys(told, USED), captions=told)
    raw = b"caf\xe9\xff.png".decode("utf-8", "surrogateescape")
    yield _shard("with_a_name_that_is_no_unicode", _pair(raw), {_shown(raw): USED}, captions={_shown(raw): CAPTION})
    apart = _member("a.txt", b"A") + _member("b.png", sound(13)) + _member("a.png", sound(13)) + _member("b.txt", b"B")
    yield _shard("with_captions_far_from_pictures", apart, {"a.png": USED, "b.png": USED}, captions={"a.png": "A", "b.png": "B"})
    dotted = _member("0001.rgb.png", sound(13)) + _member("0001.txt", b"by its key")
    dotted += _pair("v1.2.png", "one two") + _pair("v1.3.png", "one three")
    keys = {"0001.rgb.png": "by its key", "v1.2.png": "one two", "v1.3.png": "one three"}
    yield _shard("with_keys_of_several_dots", dotted, dict.fromkeys(keys, USED), captions=keys)
    upper = _member("A.PNG", sound(13)) + _member("A.TXT", b"upper") + _member("a.png", sound(13)) + _member("a.txt", b"lower")
    yield _shard("with_names_in_upper_case", upper, {"A.PNG": USED, "a.png": USED}, captions={"A.PNG": "upper", "a.png": "lower"})
    for name, records in (
        ("huge", {"comment": b"c" * 8_000}),
        ("odd", {"mtime": b"1e999", "uid": b"-5", "gid": b"many", "uname": b"\xff\xfe", "LIBARCHIVE.x": b"\n\n=", "atime": b"nan"}),
    ):
        yield _shard(f"with_{name}_extended_headers", _pax(_pair("x.png"), records), {"x.png": USED}, captions={"x.png": CAPTION})
    named = _pax(_member("n", sound(13)), {"path": b"..\n/\0x.png"}) + _pax(_member("n", b"told"), {"path": b"..\n/\0x.txt"})
    yield _shard("with_a_nul_in_an_extended_name", named, {"..\n/\0x.png": USED}, captions={"..\n/\0x.png": "told"})


# Tables with pictures in them


def _pictures(cells: list[Any], texts: Any, **options: Any) -> bytes:
    """A table as data sets of Hugging Face are: pictures as bytes and path, and a text."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    cells = [{"bytes": cell, "path": None} if isinstance(cell, bytes) else cell for cell in cells]
    return _table(pa.table({"image": pa.array(cells, kind), "text": pa.array(texts)}), **options)


def _tables() -> Iterator[Kind]:
    file, good = "train.parquet", sound(16)
    cells: dict[str, list[Any]] = {
        "empty_file": [None, {"bytes": None, "path": None}, {"bytes": None, "path": f"../{OUTSIDE}/secret.png"}, b""],
        "unreadable": [b"no picture at all", sound(14, 32)[:2000]],
        "too_large": [_png(60_000, 60_000, 8, 2, bytes(99))],
        USED: [{"bytes": good, "path": "../../etc/\0<b>.png"}],
    }
    column = [good, *(cell for several in cells.values() for cell in several), good]
    rows = [USED, *(reason for reason, several in cells.items() for _ in several), USED]
    expect = {f"{file}:{row}": reason for row, reason in enumerate(rows, start=1)}
    yield _kind("table_with_odd_cells", {file: _pictures(column, [CAPTION] * len(column))}, expect)
    told: list[Any] = ["one", None, "", " \n ", "a\0red\n\nballoon"]
    became = {f"{file}:{row}": USED if row in (1, 5) else "no_caption" for row in range(1, 6)}
    texts = {f"{file}:1": "one", f"{file}:5": WORDS}
    data, notes = _pictures([good] * 5, told), ("caption_nul", "caption_line_breaks")
    yield _kind("table_with_odd_captions", {file: data}, became, captions=texts, notes=notes)
    latin = pa.array([b"one", b"caf\xe9", b"three"]).view(pa.string())
    expect = {f"{file}:{row}": USED for row in (1, 2, 3)}
    texts = {f"{file}:1": "one", f"{file}:2": "café", f"{file}:3": "three"}
    yield _kind("table_with_a_caption_of_cp1252", {file: _pictures([good] * 3, latin)}, expect, captions=texts, notes=("caption_cp1252",))
    groups = _pictures([good, good, sound(17, 16), sound(18, 16)], list("abcd"), row_group_size=2, compression="none", use_dictionary=False)
    page = pq.read_metadata(io.BytesIO(groups)).row_group(1).column(0).data_page_offset
    half = {f"{file}:{row}": USED if row < 3 else "unreadable" for row in range(1, 5)}
    yield _kind("table_with_damage_in_its_second_half", {file: _changed(groups, page, b"\xff" * 40)}, half)
    whole, others = _pictures([good] * 4, list("abcd")), {f"other.parquet:{row}": USED for row in range(1, 5)}
    for name, data in (
        ("cut", whole[: len(whole) // 2]),
        ("cut_in_its_last_bytes", whole[:-3]),
        ("of_garbage", b"PAR1 but not really PAR1"),
        ("of_zero_bytes", b""),
    ):
        yield _kind(f"table_{name}", {file: data, "other.parquet": whole}, {**others, file: "bad_metadata"})
    yield _kind("table_without_rows", {file: _pictures([], pa.array([], pa.string()))}, {})
