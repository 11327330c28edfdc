"""What the bytes of a picture become, in this process and in others."""

import functools
import hashlib
import io
import os

import numpy as np
import pytest
from made import RED, encoded, noise, plain, write_files
from PIL import Image, ImageCms, ImageOps

from sdlab import pictures, scenes
from sdlab.crops import View
from sdlab.items import Broken, Span
from sdlab.pictures import Checked, Known

WHITE, GREEN = (255, 255, 255), (0, 255, 0)
VIEW = View((16, 16), "center", 0, 0, False)
BACKGROUNDS = [WHITE, (10, 200, 30)]


def pixels_of(picture: Image.Image) -> np.ndarray:
    """Values that can be subtracted."""
    return np.asarray(picture).astype(int)


def decoded(data: bytes, *background: tuple[int, int, int]) -> np.ndarray:
    return pixels_of(pictures.decode(data, *background).picture)


def file_of(values: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    return encoded(Image.fromarray(values), kind, **options)


# Modes


def half_clear(mode: str) -> bytes:
    """A 4 x 4 picture of which the right half is transparent black."""
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


@pytest.mark.parametrize("background", BACKGROUNDS)
@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_transparency_of_every_mode_lies_on_the_background(mode, background):
    found = pictures.decode(half_clear(mode), background)
    left = RED if mode in ("RGBA", "P", "RGB") else (76, 76, 76)
    assert found.picture.mode == "RGB" and found.marks == ("transparency_flattened",)
    assert [found.picture.getpixel((x, 1)) for x in range(4)] == [left, left, background, background]


@pytest.mark.parametrize(("background", "expected"), [(WHITE, (255, 127, 127)), ((0, 0, 0), (128, 0, 0)), ((0, 0, 255), (128, 0, 127))])
def test_half_transparent_red_is_half_red(background, expected):
    assert decoded(encoded(Image.new("RGBA", (2, 2), (*RED, 128))), background)[0, 0].tolist() == list(expected)


def test_an_alpha_channel_that_hides_nothing_changes_nothing_and_is_not_counted():
    found = pictures.decode(encoded(noise(1).convert("RGBA")))
    assert found.marks == () and (pixels_of(found.picture) == pixels_of(noise(1))).all()


def test_16_bit_values_are_scaled_and_not_clipped():
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None].repeat(2, 0)
    for data in (file_of(ramp), file_of(ramp, "TIFF"), file_of(ramp.astype(np.int32), "TIFF"), file_of(ramp / np.float32(65535), "TIFF")):
        found = pictures.decode(data)
        assert (pixels_of(found.picture) == np.arange(256)[None, :, None]).all() and found.marks == ("depth_reduced",)


@pytest.mark.parametrize("background", BACKGROUNDS)
def test_the_clear_value_of_16_bit_grey_lies_on_the_background(background):
    values = np.array([[1000, 1001, 65535]], np.uint16)
    found = pictures.decode(file_of(values, transparency=1000), background)
    assert pixels_of(found.picture)[0].tolist() == [list(background), [4, 4, 4], [255, 255, 255]]
    assert found.marks == ("depth_reduced", "transparency_flattened")
    assert pictures.decode(file_of(values, transparency=7), background).marks == ("depth_reduced",)


def test_values_without_a_known_range_are_refused_with_what_they_are():
    with pytest.raises(pictures.BadPicture) as bad:
        pictures.decode(file_of(np.full((4, 4), 300.0, np.float32), "TIFF"))
    assert (bad.value.reason, bad.value.detail) == ("unknown_range", "mode F with values from 300.0 to 300.0, not within 0 to 1")


def test_cmyk_and_bilevel_become_rgb():
    cmyk = pictures.decode(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(pixels_of(cmyk.picture) - RED).max() <= 3 and cmyk.marks == ("cmyk_converted",)
    assert (decoded(encoded(Image.new("1", (8, 8), 1))) == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_every_exif_orientation_comes_out_upright(orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(1, 48, 32), kind, exif=exif)
    found = pictures.decode(data)
    assert found.picture.size == ((48, 32) if orientation < 5 else (32, 48))
    assert (pixels_of(found.picture) == pixels_of(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))).all()
    assert found.marks == (("exif_turned",) if orientation > 1 else ())


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO", "MPO"])
def test_a_file_is_decoded_as_what_it_is(kind):
    preview = {"save_all": True, "append_images": [noise(2)]} if kind == "MPO" else {}
    found = pictures.decode(encoded(noise(1, 16, 16), kind, **preview))
    assert found.format == {"MPO": "JPEG"}.get(kind, kind) and found.picture.size == (16, 16) and found.picture.mode == "RGB"


def test_any_cut_of_a_picture_is_decoded_whole_or_refused():
    data = encoded(noise(1, 128, 128), "JPEG")
    for end in range(0, len(data) - 2, 997):
        with pytest.raises(pictures.BadPicture):
            pictures.decode(data[:end])


def test_a_png_with_a_changed_byte_among_its_pixels_is_refused():
    data = bytearray(encoded(noise(1)))
    data[len(data) // 2] ^= 255
    with pytest.raises(pictures.BadPicture, match="checksum of its chunk IDAT"):
        pictures.decode(bytes(data))


# Colours


@functools.cache
def profile(first: bytes = b"rXYZ", second: bytes = b"gXYZ") -> bytes:
    """sRGB, but with red and green in each other's place."""
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    return srgb.replace(first, b"****").replace(second, first).replace(b"****", second)


def srgb() -> bytes:
    return profile(b"rXYZ", b"rXYZ")


def grey_profile() -> bytes:
    """Grey whose values are shares of light."""
    import hostile

    return hostile._profile(b"GRAY", 1.0)


def converted(picture: Image.Image, icc_profile: bytes) -> np.ndarray:
    """What lcms makes of the colours of a profile."""
    made = ImageCms.profileToProfile(picture, io.BytesIO(icc_profile), ImageCms.createProfile("sRGB"), outputMode="RGB")
    assert made is not None
    return pixels_of(made)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_colours_of_another_profile_become_what_lcms_makes_of_them(kind):
    data = encoded(noise(1), kind, icc_profile=profile())
    found = pictures.decode(data)
    assert (pixels_of(found.picture) == converted(noise(1), profile())).all() and found.marks == ("icc_converted",)
    assert np.abs(pixels_of(found.picture) - pixels_of(noise(1))[:, :, [1, 0, 2]]).max() <= 2


@pytest.mark.parametrize(
    ("mode", "icc_profile", "marks"),
    [
        ("RGB", srgb(), ()),
        ("P", srgb(), ()),
        ("RGB", b"no profile at all", ("icc_broken",)),
        ("RGB", profile()[:300], ("icc_broken",)),
        ("L", srgb(), ("icc_broken",)),
    ],
    ids=["sRGB", "sRGB of a palette", "garbage", "cut", "of colours on grey"],
)
def test_a_profile_that_is_srgb_or_broken_changes_nothing_and_only_a_broken_one_is_counted(mode, icc_profile, marks):
    picture = noise(1).convert(mode)
    found = pictures.decode(encoded(picture, icc_profile=icc_profile))
    assert (pixels_of(found.picture) == pixels_of(picture.convert("RGB"))).all() and found.marks == marks


def test_the_background_is_no_colour_of_the_profile():
    picture = Image.new("RGBA", (2, 1), (*RED, 255))
    picture.putpixel((1, 0), (0, 0, 0, 0))
    found = pictures.decode(encoded(picture, icc_profile=profile()), RED)
    assert np.abs(pixels_of(found.picture) - [[GREEN, RED]]).max() <= 2
    assert found.marks == ("icc_converted", "transparency_flattened")


@pytest.mark.parametrize("mode", ["L", "LA"])
def test_a_profile_of_grey_is_applied_to_grey(mode):
    grey = noise(1).convert("L")
    picture = grey.convert(mode)
    if mode == "LA":
        picture.putpixel((0, 0), (grey.getpixel((0, 0)), 254))
    found = pictures.decode(encoded(picture, icc_profile=grey_profile()))
    wanted = converted(grey, grey_profile())
    assert "icc_converted" in found.marks and np.abs(wanted - pixels_of(grey)[..., None]).max() > 50
    assert np.abs(pixels_of(found.picture) - wanted).max() <= 1


def test_lab_is_lightness_and_colour():
    lightness = np.arange(256, dtype=np.uint8)[None]
    neutral = Image.new("L", (256, 1), 128)
    found = decoded(encoded(Image.merge("LAB", [Image.fromarray(lightness), neutral, neutral]), "TIFF"))
    share = lightness[0] / 255 * 100
    light = np.where(share > 8, ((share + 16) / 116) ** 3, share * 27 / 24389)
    srgb = 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    assert np.abs(found[0] - srgb[:, None]).max() <= 2
    red = Image.merge("LAB", [Image.new("L", (1, 1), value) for value in (138, 128 + 81, 128 + 70)])
    assert np.abs(decoded(encoded(red, "TIFF"))[0, 0] - RED).max() <= 8


# Files, views and what was learned


def test_a_check_says_what_the_file_is_upright_and_before_any_resize(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new("RGB", (90, 60)), "JPEG", exif=exif)
    write_files(tmp_path, {"a.jpg": b"****" + data + b"****"})
    digest = hashlib.sha256(data).digest()[:16]
    good, bad, gone, broken = pictures.check_batch(
        [Span(os.fsencode(tmp_path / "a.jpg"), 4, len(data)), b"broken", Span(b"/nowhere/a.png", 0, -1), Broken("a reason")]
    )
    assert good == Checked(digest, (90, 60), "JPEG", ("exif_turned",))
    assert bad == Checked(hashlib.sha256(b"broken").digest()[:16], problem=("unreadable", "in no format that Pillow knows"))
    assert gone.digest == b"" and gone.problem is not None and gone.problem[0] == "unreadable" and "No such file" in gone.problem[1]
    assert broken == Checked(b"", problem=("unreadable", "a reason"))
    loaded = pictures.load_batch([(data, View((32, 32), "center", 0, 0, False))], background=WHITE)
    assert (loaded.digests, loaded.original_size.tolist()) == ([digest], [[90, 60]])


@pytest.mark.parametrize("size", [6, -1])
def test_a_file_beyond_the_largest_size_is_not_read(tmp_path, monkeypatch, size):
    write_files(tmp_path, {"a.png": b"123456"})
    monkeypatch.setattr(pictures, "MAX_BYTES", 5)
    (found,) = pictures.check_batch([Span(os.fsencode(tmp_path / "a.png"), 0, size)])
    assert found == Checked(b"", problem=("too_large", "a file of 6 bytes; 5 are the most"))


def test_a_batch_is_cut_as_its_views_say_on_its_background():
    clear = encoded(Image.new("RGBA", (40, 20), (0, 0, 0, 0)))
    views = [View((16, 16), "random", 1, number, number == 1) for number in range(3)]
    files = [encoded(noise(1, 60, 40)), encoded(noise(2, 40, 60)), clear]
    found = pictures.load_batch(list(zip(files, views, strict=True)), background=(1, 2, 3))
    assert found.images.shape == (3, 3, 16, 16) and found.images.dtype == np.uint8
    for place, (data, view) in enumerate(zip(files, views, strict=True)):
        expected, corner = view.cut(pictures.decode(data, (1, 2, 3)).picture, hashlib.sha256(data).digest()[:16])
        assert (found.images[place] == expected).all() and tuple(found.crop[place]) == corner
    assert found.images[2, :, 0, 0].tolist() == [1, 2, 3]
    assert found.original_size.tolist() == [[40, 60], [60, 40], [20, 40]]


def test_a_picture_that_is_no_longer_good_ends_the_batch_with_its_reason():
    with pytest.raises(pictures.BadPicture) as bad:
        pictures.load_batch([(plain(), VIEW), (b"", VIEW)], background=WHITE)
    assert (bad.value.reason, bad.value.detail) == ("empty_file", "0 bytes")


def test_one_picture_is_opened_for_looking_at():
    assert (pixels_of(pictures.open_picture(encoded(noise(1)))[0]) == pixels_of(noise(1))).all()
    assert pixels_of(pictures.open_picture(half_clear("RGBA"), RED)[0])[0, 3].tolist() == list(RED)
    with pytest.raises(pictures.BadPicture):
        pictures.open_picture(Broken("a reason"))


def test_scenes_keep_their_pixels_at_their_own_size():
    drawn = scenes.draw(5, seed=7)
    found = pictures.load_batch([(scene, View((64, 64), "center", 0, 0, False)) for scene in drawn], background=WHITE)
    assert (found.images == scenes.render(drawn)).all()
    assert {one.size for one in pictures.check_batch(drawn)} == {(64, 64)}
    assert [one.digest for one in pictures.check_batch(drawn)] == found.digests and len(set(found.digests)) == 5


def test_pixels_and_tokens_are_those_of_this_pixel_version(frozen):
    y, x = np.mgrid[:40, :56]
    pattern = np.stack([x * 4, y * 6, (x * y) % 256, 255 - x * 2], axis=-1).astype(np.uint8)
    views = [View((32, 32), "center", 0, 0, False), View((48, 24), "random", 7, 1, True)]
    cuts = [view.cut(pictures.decode(file_of(pattern)).picture, bytes(16))[0].tobytes() for view in views]
    tokens = frozen.tokenize(["a large owl on a pink background"]).numpy().astype(np.int64)
    seen = hashlib.sha256(b"".join(cuts) + tokens.tobytes()).hexdigest()
    golden = {2: "33969b768f1c6f20e23c3190e96de9b43e4437b0e5b338ef1667101b53d91903"}
    assert seen == golden[pictures.PIXEL_VERSION], "pixels or tokens changed: raise pictures.PIXEL_VERSION and note the new hash"


def test_a_picture_whose_bytes_are_known_is_not_decoded_again(tmp_path, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 3
    files = [encoded(noise(seed, 8 + seed), "JPEG", exif=exif) if seed % 2 else encoded(noise(seed, 8 + seed)) for seed in range(9)]
    learned = pictures.check_batch(files)
    rows = np.zeros(9, Known.ROW)
    for row, one in zip(rows, learned, strict=True):
        row["digest"], (row["height"], row["width"]), row["format"] = np.void(one.digest), one.size, one.format.encode()
        row["marks"] = sum(1 << pictures.MARKS.index(mark) for mark in one.marks)
    Known.write(tmp_path, rows[:8])
    seen: list[bytes] = []
    decode = pictures.decode
    monkeypatch.setattr(pictures, "decode", lambda data, *background: (seen.append(data), decode(data, *background))[1])
    assert pictures.check_batch(files, known=str(tmp_path)) == learned
    assert seen == [files[8]]
    assert pictures.check_batch(files) == learned and seen[1:] == files


def test_what_is_known_is_told_apart_by_the_whole_digest(tmp_path):
    digests = [bytes(8) + bytes([i]) * 8 for i in (3, 1, 2, 0)] + [b"\xff" * 16]
    rows = np.zeros(5, Known.ROW)
    rows["digest"], rows["height"], rows["width"] = [np.void(digest) for digest in digests], range(1, 6), 9
    Known.write(tmp_path, rows)
    store = Known(tmp_path)
    assert [store.find(digest) for digest in digests] == [Checked(digest, (i, 9)) for i, digest in enumerate(digests, start=1)]
    assert [store.find(digest) for digest in (bytes(8) + b"\7" * 8, b"\1" * 16)] == [None, None]
    Known.write(tmp_path, rows[:0])
    assert Known(tmp_path).find(digests[0]) is None


def test_psnr_is_infinite_only_on_paper():
    black = np.zeros((3, 3, 4, 4), np.uint8)
    others = black + np.array([0, 1, 255], np.uint8)[:, None, None, None]
    assert np.allclose(pictures.psnr(black, others), [100, 20 * np.log10(255), 0])
