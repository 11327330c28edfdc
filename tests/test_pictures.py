import hashlib
import io
import struct
import subprocess
import sys
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from sdlab import pictures, scenes, sources

RED, WHITE = (255, 0, 0), (255, 255, 255)


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def items_in(root: Path, files: dict[str, bytes]) -> list[sources.Item]:
    for name, data in files.items():
        (root / name).write_bytes(data)
    return list(sources.open_source(str(root)).items())


# Pixels


def half_clear(mode: str) -> bytes:
    """A 4 x 4 picture of which the right half is transparent black, as PNG in `mode`."""
    picture = Image.new("RGBA", (4, 4), (*RED, 255))
    picture.paste((0, 0, 0, 0), (2, 0, 4, 4))
    if mode == "P":
        palette = Image.new("P", (4, 4), 0)
        palette.putpalette([*RED, 0, 0, 0])
        palette.paste(1, (2, 0, 4, 4))
        return encoded(palette, transparency=1)
    if mode in ("RGB", "L"):
        return encoded(picture.convert(mode), transparency=(0, 0, 0) if mode == "RGB" else 0)
    return encoded(picture.convert(mode))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_transparency_of_every_mode_lies_on_white(mode):
    picture = pictures.decode(half_clear(mode))
    left = RED if mode in ("RGBA", "P", "RGB") else (76, 76, 76)
    assert picture.mode == "RGB"
    assert [picture.getpixel((x, 1)) for x in range(4)] == [left, left, WHITE, WHITE]


def test_half_transparent_red_on_white_is_pink():
    assert pictures.decode(encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 128)))).getpixel((0, 0)) == (255, 127, 127)


def test_16_bit_values_are_scaled_and_not_clipped():
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None].repeat(2, 0)
    grey = np.asarray(pictures.decode(encoded(Image.fromarray(ramp))))
    assert np.abs(grey[0, :, 0].astype(int) - np.arange(256)).max() == 0
    floats = np.asarray(pictures.decode(encoded(Image.fromarray(ramp.astype(np.float32) / 65535), "TIFF")))
    assert (floats == grey).all()


def test_values_without_a_known_range_are_refused_and_not_guessed():
    with pytest.raises(pictures.BadPicture) as bad:
        pictures.decode(encoded(Image.fromarray(np.full((4, 4), 300.0, np.float32)), "TIFF"))
    assert bad.value.reason == "unknown_range"


def test_cmyk_and_bilevel_become_rgb():
    cmyk = pictures.decode(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(np.array(cmyk.getpixel((3, 3))) - np.array(RED)).max() <= 3
    assert pictures.decode(encoded(Image.new("1", (8, 8), 1))).getpixel((3, 3)) == WHITE


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_every_exif_orientation_comes_out_upright(orientation, kind):
    upright = Image.new("RGB", (48, 32), WHITE)
    upright.paste(RED, (0, 0, 16, 16))
    upright.paste((0, 0, 255), (32, 0, 48, 16))
    turn = pictures._TURNS.get(orientation)
    back = {Image.Transpose.ROTATE_90: Image.Transpose.ROTATE_270, Image.Transpose.ROTATE_270: Image.Transpose.ROTATE_90}
    stored = upright if turn is None else upright.transpose(back.get(turn, turn))
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = pictures.decode(encoded(stored, kind, exif=exif, quality=95))
    assert picture.size == (48, 32)
    assert np.abs(np.asarray(picture).astype(int) - np.asarray(upright)).mean() < 3


def with_huge_text() -> bytes:
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * (2 << 20), zip=True)
    return encoded(Image.new("RGB", (8, 8)), pnginfo=text)


def bomb() -> bytes:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def animated() -> bytes:
    return encoded(Image.new("L", (8, 8), 0), "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 255)])


def noise_jpeg() -> bytes:
    return encoded(Image.effect_noise((128, 128), 80).convert("RGB"), "JPEG")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty_file"),
        (b"<html>not a picture</html>", "unreadable"),
        (noise_jpeg()[:4000], "unreadable"),
        (encoded(Image.effect_noise((128, 128), 80))[:-3000], "unreadable"),
        (with_huge_text(), "unreadable"),
        (bomb(), "too_large"),
        (animated(), "animated"),
    ],
    ids=["empty", "html", "cut jpeg", "cut png", "huge text", "bomb", "animated"],
)
def test_pictures_that_cannot_be_used_are_refused_with_a_reason(data, reason):
    with pytest.raises(pictures.BadPicture) as bad:
        pictures.decode(data)
    assert bad.value.reason == reason
    assert bad.value.detail


def test_any_cut_of_a_picture_is_decoded_whole_or_refused():
    data = noise_jpeg()
    for end in range(0, len(data) - 2, 997):
        with pytest.raises(pictures.BadPicture):
            pictures.decode(data[:end])


# Resizing and cropping


def test_the_square_is_cut_where_it_says():
    picture = Image.new("RGB", (200, 100), WHITE)
    picture.paste(RED, (0, 0, 50, 100))
    square, corner = pictures.square_crop(picture, 50)
    assert square.shape == (3, 50, 50) and square.dtype == np.uint8
    assert corner == (0, 25)
    assert (square[0] == 255).all() and (square[1:, :, 1:] >= 250).all()
    left, corner = pictures.square_crop(picture, 50, place=(0.0, 0.0))
    assert corner == (0, 0)
    assert (left[1, :, :23] <= 5).all() and (left[1, :, 27:] >= 250).all()


def test_cropping_while_resizing_equals_resizing_then_cropping():
    picture = Image.effect_noise((150, 100), 60).resize((301, 200), Image.Resampling.BICUBIC).convert("RGB")
    square, (top, left) = pictures.square_crop(picture, 64)
    whole = np.asarray(picture.resize((96, 64), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    assert np.abs(square.astype(int) - whole[:, top : top + 64, left : left + 64]).max() <= 1


def test_a_very_long_picture_costs_no_more_than_another():
    square, (top, left) = pictures.square_crop(Image.new("RGB", (20_000, 1), RED), 64)
    assert (top, left) == (0, (20_000 * 64 - 64) // 2)
    assert (square[0] == 255).all() and (square[1:] == 0).all()


def test_random_crops_depend_on_seed_and_bytes_alone(tmp_path):
    items = items_in(tmp_path, {f"{i}.png": encoded(Image.effect_noise((96, 32), 50)) for i in range(12)})
    load = partial(pictures.load_batch, resolutions=[16, 32], crop="random")
    first, again, other = load(items, seed=1), load(items[::-1], seed=1), load(items, seed=2)
    assert (first.crop[32] == again.crop[32][::-1]).all() and (first.images[32] == again.images[32][::-1]).all()
    assert (first.crop[32] != other.crop[32]).any()
    assert len(set(first.crop[32][:, 1].tolist())) > 4 and (first.crop[32][:, 0] == 0).all()
    assert np.abs(first.crop[32] - 2 * first.crop[16]).max() <= 2


def test_sizes_are_those_before_the_resize_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    items = items_in(tmp_path, {"a.jpg": encoded(Image.new("RGB", (90, 60)), "JPEG", exif=exif)})
    assert pictures.check_batch(items)[0].size == (90, 60)
    assert pictures.load_batch(items, resolutions=[32], crop="center", seed=0).original_size.tolist() == [[90, 60]]


def test_scenes_keep_their_pixels_at_their_own_size():
    items = list(sources.open_source("scenes", limit=5, seed=7).items())
    drawn = scenes.draw(5, seed=7)
    pixels = pictures.load_batch(items, resolutions=[64], crop="center", seed=0)
    assert (pixels.images[64] == scenes.render(drawn)).all()
    assert [item.caption for item in items] == [scene.caption for scene in drawn]


def test_pixels_and_tokens_are_those_of_this_pixel_version(frozen):
    y, x = np.mgrid[:40, :56]
    pattern, buffer = np.stack([x * 4, y * 6, (x * y) % 256, 255 - x * 2], axis=-1).astype(np.uint8), io.BytesIO()
    Image.fromarray(pattern).save(buffer, "PNG")
    square, _ = pictures.square_crop(pictures.decode(buffer.getvalue()), 32)
    tokens = frozen.tokenize(["a large owl on a pink background"]).numpy().astype(np.int64)
    seen = hashlib.sha256(square.tobytes() + tokens.tobytes()).hexdigest()
    golden = {1: "46064d53d3dc9b6f52d6f0342a53c937b6949c52e1080be59d93c786cf58a110"}
    assert seen == golden[pictures.PIXEL_VERSION], "pixels or tokens changed: raise pictures.PIXEL_VERSION and note the new hash"


# Workers


def test_worker_processes_give_the_same_as_this_process(tmp_path):
    good = {f"{i}.png": encoded(Image.new("RGB", (3 + i, 3 + i), RED)) for i in range(5)}
    items = [*items_in(tmp_path, good | {"bad.png": b"broken"}), *sources.open_source("scenes", limit=90).items()]
    here, there = (list(pictures.map_batches(pictures.check_batch, items, num_workers=n)) for n in (0, 2))
    assert here == there
    assert sum(len(batch) for batch, _ in here) == len(items) == 96


def test_importing_pictures_does_not_import_torch():
    code = "import sys, sdlab.pictures; sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
