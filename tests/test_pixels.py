"""Pixel paths beside what each tool does itself: its own functions where it is installed, else its steps written out."""

import dataclasses
import importlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import needs
from PIL import Image
from torch.nn import functional as F
from torchvision.transforms.functional import to_tensor

from sdlab import parts, pixels
from sdlab.config import ConfigError
from sdlab.pixels import PATHS

EMOJI = sorted((Path(pixels.__file__).parent / "assets" / "emoji").glob("*.png"))
SIZES = ((512, 512), (256, 256), (299, 299), (64, 64), (300, 431))
"""Height and width; of every kind there is: shrunk, enlarged, left as it is, and not square."""


def tool(name: str):
    """A module of another tool, which only the extra `parity` installs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        needs(name, False)


def draw(height: int, width: int) -> np.ndarray:
    """Three pictures of that size, uint8 (3, 3, height, width): two emoji over a gradient, and noise."""
    random = np.random.default_rng(height * width)
    ramp = np.linspace(0, 255, width)[None, :, None] * np.linspace(0.3, 1, height)[:, None, None] * np.array([1, 0.7, 0.4])
    shown = []
    for path in EMOJI[:2]:
        picture = Image.fromarray(ramp.astype(np.uint8))
        emoji = Image.open(path).convert("RGBA").resize((width, height), Image.Resampling.LANCZOS)
        picture.paste(emoji, mask=emoji)
        shown.append(np.asarray(picture))
    return np.stack([*shown, random.integers(0, 256, (height, width, 3), dtype=np.uint8)]).transpose(0, 3, 1, 2).copy()


def float_pictures(height: int, width: int) -> torch.Tensor:
    """`pixel_values` between whole levels, some of them beyond -1 and 1, as a VAE decodes them."""
    images = parts.to_pixel_values(draw(height, width))
    return images * 1.05 + torch.rand(images.shape, generator=torch.Generator().manual_seed(0)) * 0.01


def through_png(image: np.ndarray, folder: Path) -> Image.Image:
    path = folder / "one.png"
    Image.fromarray(image.transpose(1, 2, 0)).save(path)
    return Image.open(path).convert("RGB")


@pytest.mark.parametrize("size", SIZES)
def test_clean_fid_resizes_to_the_same_pixels(size):
    resizer = tool("cleanfid.resize").build_resizer("clean")
    images = draw(*size)
    theirs = np.stack([resizer(image.transpose(1, 2, 0)).transpose(2, 0, 1) for image in images])
    np.testing.assert_array_equal(PATHS["cleanfid"].reference(images), (theirs - 128) / 128)


@pytest.mark.parametrize("size", SIZES)
def test_torch_fidelity_resizes_to_the_same_pixels(size):
    resize = tool("torch_fidelity.interpolate_compat_tensorflow").interpolate_bilinear_2d_like_tensorflow1x
    images = torch.from_numpy(draw(*size))
    theirs = resize(images.float(), size=(299, 299), align_corners=False)
    torch.testing.assert_close(PATHS["tf1"].reference(images), (theirs - 128) / 128, rtol=0, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_pytorch_fid_reads_files_to_the_same_pixels(size, tmp_path):
    images = draw(*size)
    for image, ours in zip(images, PATHS["pytorchfid"].reference(images), strict=True):
        theirs = F.interpolate(to_tensor(through_png(image, tmp_path))[None], size=(299, 299), mode="bilinear", align_corners=False)
        torch.testing.assert_close(ours, 2 * theirs[0] - 1, rtol=0, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_torchmetrics_resizes_with_antialiasing_and_truncates(size):
    values = float_pictures(*size)
    theirs = (((values.clamp(-1, 1) + 1) / 2) * 255).byte()
    resized = F.interpolate(theirs.float(), size=(299, 299), mode="bilinear", align_corners=False, antialias=True)
    torch.testing.assert_close(PATHS["torchmetrics"].generated(values), (resized - 128) / 128, rtol=0, atol=0)
    torch.testing.assert_close(PATHS["torchmetrics"].reference(theirs), (resized - 128) / 128, rtol=0, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_nemo_squashes_generated_pictures_to_256_and_crops_references(size, tmp_path):
    def theirs(picture: Image.Image) -> torch.Tensor:
        values = (2 * to_tensor(picture) - 1)[None].clamp(-1, 1)
        return F.interpolate(values, size=(299, 299), mode="bicubic", align_corners=True)[0]

    images = draw(*size)
    for image, generated, reference in zip(images, PATHS["nemo"].generated(images), PATHS["nemo"].reference(images), strict=True):
        picture = through_png(image, tmp_path)
        torch.testing.assert_close(generated, theirs(picture.resize((256, 256), Image.BICUBIC)), rtol=0, atol=0)
        width, height = picture.size
        square = min(width, height)
        box = ((width - square) // 2, (height - square) // 2, (width + square) // 2, (height + square) // 2)
        picture.crop(box).resize((256, 256), resample=Image.Resampling.BICUBIC).save(tmp_path / "one.jpg", quality=95)
        torch.testing.assert_close(reference, theirs(Image.open(tmp_path / "one.jpg").convert("RGB")), rtol=0, atol=0)


def test_references_that_nemo_prepared_are_not_prepared_again():
    prepared = draw(256, 256)
    ours = PATHS["nemo"].reference(prepared, prepared=True)
    torch.testing.assert_close(ours, PATHS["nemo"].generated(prepared), rtol=0, atol=0)  # at 256 neither crops, resizes nor keeps a JPEG
    assert not torch.equal(ours, PATHS["nemo"].reference(prepared))
    with pytest.raises(ConfigError, match=r"256 x 256 pixels and these are 512 x 512"):
        PATHS["nemo"].reference(draw(512, 512), prepared=True)


@pytest.mark.parametrize("size", SIZES)
def test_mlperf_keeps_generated_pictures_as_floats_and_references_as_jpeg(size, tmp_path):
    values = float_pictures(*size)
    theirs = F.interpolate(((values + 1.0) / 2.0).clamp(0, 1), size=(299, 299), mode="bilinear", align_corners=False)
    torch.testing.assert_close(PATHS["mlperf"].generated(values), 2 * theirs - 1, rtol=0, atol=0)
    images = draw(*size)
    for image, ours in zip(images, PATHS["mlperf"].reference(images), strict=True):
        through_png(image, tmp_path).resize((512, 512), resample=Image.BICUBIC).save(tmp_path / "one.jpg")
        kept = to_tensor(Image.open(tmp_path / "one.jpg").convert("RGB"))[None]
        resized = F.interpolate(kept, size=(299, 299), mode="bilinear", align_corners=False)
        torch.testing.assert_close(ours, 2 * resized[0] - 1, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["nemo", "cleanfid", "pytorchfid", "tf1"])
def test_rounded_pixel_values_are_the_pictures_that_sdlab_writes(name):
    values = float_pictures(96, 80)
    torch.testing.assert_close(PATHS[name].generated(values), PATHS[name].generated(parts.to_images(values)), rtol=0, atol=0)
    torch.testing.assert_close(PATHS[name].generated(values.double()), PATHS[name].generated(values), rtol=0, atol=0)


def test_truncation_darkens_by_half_a_level():
    values = torch.rand(1, 3, 299, 299, generator=torch.Generator().manual_seed(0)) * 2 - 1
    path = PATHS["torchmetrics"]
    darker = path.generated(values) - dataclasses.replace(path, quantiser="round").generated(values)
    assert float(darker.mean()) * 128 == pytest.approx(-0.5, abs=0.01)


def test_pytorch_fid_and_torchmetrics_agree_where_pictures_grow_and_not_where_they_shrink():
    def gap(side: int) -> float:
        images = draw(side, side)
        levels = [path.reference(images) * scale + shift for path, scale, shift in ((first, 127.5, 127.5), (second, 128, 128))]
        return float((levels[0] - levels[1]).abs().max())

    first, second = PATHS["pytorchfid"], PATHS["torchmetrics"]
    assert gap(256) < 1e-3
    assert gap(512) > 10


def test_one_pass_gives_what_each_path_gives_and_rounds_once(monkeypatch):
    values, rounded, rounding = float_pictures(128, 128), [], pixels._QUANTISERS["round"]
    monkeypatch.setitem(pixels._QUANTISERS, "round", lambda given: rounded.append(given) or rounding(given))
    found = dict(pixels.generated(PATHS.values(), values))
    assert len(rounded) == 1
    assert [path.name for path in found] == list(PATHS)
    for path, made in found.items():
        torch.testing.assert_close(made, path.generated(values), rtol=0, atol=0)
    images = draw(300, 431)
    for path, made in pixels.reference(PATHS.values(), images):
        torch.testing.assert_close(made, path.reference(images), rtol=0, atol=0)


def test_a_path_says_all_of_itself_in_plain_types():
    identities = [path.identity() for path in PATHS.values()]
    assert json.loads(json.dumps(identities)) == identities
    told = [json.dumps({key: value for key, value in identity.items() if key != "name"}) for identity in identities]
    assert len(set(told)) == len(told)
    assert pixels.find("nemo").identity() | {"name": ""} == {
        "name": "",
        "quantiser": "round",
        "library": "torch",
        "kernel": "bicubic",
        "antialias": False,
        "grid": "aligned corners",
        "clipped": False,
        "scale": "2 x / 255 - 1, resized",
        "generated_side": 256,
        "reference_cropped": True,
        "reference_side": 256,
        "reference_jpeg": 95,
    }


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_white_black_and_no_pictures_come_out_as_such(path):
    ends = torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand(2, 3, 40, 40)
    made = path.generated(ends)
    assert (made.shape, made.dtype) == ((2, 3, 299, 299), torch.float32)
    torch.testing.assert_close(made[0], torch.full_like(made[0], -1))
    torch.testing.assert_close(made[1], torch.full_like(made[1], 127 / 128 if "128" in path.scale else 1))
    assert path.generated(ends[:0]).shape == (0, 3, 299, 299)
    assert path.reference(np.empty((0, 3, 40, 40), np.uint8)).shape == (0, 3, 299, 299)


@pytest.mark.parametrize(
    ("name", "pictures", "said"),
    [
        ("mlperf", np.zeros((1, 3, 8, 8), np.uint8), r"'none' and was given uint8.*replace\(path, quantiser='round'\)"),
        ("torchmetrics", np.zeros((1, 3, 8, 8), np.uint8), r"'truncate' and was given uint8"),
        ("tf1", np.zeros((1, 3, 8, 8), np.int64), "torch.int64"),
        ("tf1", np.zeros((3, 8, 8), np.uint8), r"\(3, 8, 8\)"),
        ("tf1", np.zeros((1, 8, 8, 3), np.uint8), "channels first"),
        ("tf1", np.full((1, 3, 8, 8), 200.0), "reach 200"),
        ("tf1", np.full((1, 3, 8, 8), np.nan), "reach nan"),
    ],
)
def test_generated_pictures_of_another_kind_are_refused(name, pictures, said):
    with pytest.raises(ConfigError, match=said):
        PATHS[name].generated(pictures)
    with pytest.raises(ConfigError, match=said):
        pixels.generated([PATHS[name]], pictures)


def test_references_are_images():
    with pytest.raises(ConfigError, match=r"uint8 from 0 to 255, and these are torch.float32"):
        PATHS["tf1"].reference(torch.zeros(1, 3, 8, 8))


def test_a_path_that_no_library_can_go_and_an_unknown_one_are_refused():
    with pytest.raises(ConfigError, match=r"pillow cannot resize.*antialias=False"):
        dataclasses.replace(PATHS["cleanfid"], antialias=False)
    with pytest.raises(ConfigError, match=r"tensorflow 1 cannot resize with kernel='bicubic'"):
        dataclasses.replace(PATHS["tf1"], kernel="bicubic")
    with pytest.raises(ConfigError, match=r"quantiser='rounded' is none of round, truncate, none"):
        dataclasses.replace(PATHS["tf1"], quantiser="rounded")
    with pytest.raises(ConfigError, match=r"squashes whole levels and quantises by 'none'"):
        dataclasses.replace(PATHS["nemo"], quantiser="none")
    with pytest.raises(ConfigError, match=r"no pixel path 'clean'; choose from nemo, mlperf"):
        pixels.find("clean")


def test_jpeg_at_75_is_pillows_default():
    picture, default = Image.fromarray(draw(64, 64)[0].transpose(1, 2, 0)), io.BytesIO()
    picture.save(default, "JPEG")
    np.testing.assert_array_equal(np.asarray(pixels._through_jpeg(picture, 75)), np.asarray(Image.open(default)))
