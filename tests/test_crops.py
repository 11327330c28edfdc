"""From a picture of any shape to the shape that training wants."""

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest
from made import RED, noise
from PIL import Image

from sdlab import crops
from sdlab.crops import View

WHITE = (255, 255, 255)
SDXL = [(704, 1408), (704, 1344), (768, 1344), (768, 1280), (832, 1216), (832, 1152), (896, 1152), (896, 1088), (960, 1088), (960, 1024)]
WIDE = [(1472, 704), (1536, 640), (1600, 640), (1664, 576), (1728, 576)]
"""Widths and heights of Stability's sampling script beside the mirrors of `SDXL` and the square."""


# Buckets


def test_all_shapes_of_the_sampling_script_of_sdxl_are_among_its_41_buckets():
    found = crops.buckets(1024, 64)
    assert {(h, w) for w, h in [*SDXL, *WIDE, (1024, 1024)]} | set(SDXL) <= set(found)
    assert len(found) == len(set(found)) == 41


@pytest.mark.parametrize(("resolution", "step"), [(1024, 64), (512, 32), (256, 16), (64, 8), (64, 64), (160, 8)])
def test_buckets_are_all_shapes_of_whole_steps_that_are_neither_small_nor_long(resolution, step):
    found = crops.buckets(resolution, step)
    area = resolution**2
    sides = range(step, 4 * resolution + 1, step)
    near = {(h, w) for h, w in itertools.product(sides, sides) if 0.9 <= h * w / area <= 1 and 1 / 4 <= h / w <= 4}
    every = {(h, w) for h, w in near if h != w or h == resolution}
    assert list(found) == sorted(every)
    assert (resolution, resolution) in found and {(w, h) for h, w in found} == set(found)


def test_the_square_is_a_bucket_though_its_side_is_no_whole_number_of_steps():
    assert (200, 200) in crops.buckets(200, 16)
    assert all(h % 16 == w % 16 == 0 for h, w in crops.buckets(200, 16) if (h, w) != (200, 200))


@pytest.mark.parametrize(
    ("resolution", "unit", "step"), [(1024, 8, 64), (1024, 64, 64), (768, 32, 64), (512, 32, 32), (64, 16, 16), (64, 8, 8)]
)
def test_steps_are_a_sixteenth_of_the_resolution_in_whole_units(resolution, unit, step):
    assert crops.bucket_step(resolution, unit) == step


def lost(sizes: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """How far a shape is from each size in the logarithm of height / width."""
    return np.abs(np.log(sizes[:, 0] / sizes[:, 1]) - np.log(shape[0] / shape[1]))


@pytest.mark.parametrize(("resolution", "step"), [(1024, 64), (64, 8), (64, 64), (160, 8)])
def test_no_bucket_is_nearer_than_the_nearest(resolution, step):
    shapes = crops.buckets(resolution, step)
    sizes = np.vstack([np.random.default_rng(0).integers(1, 5000, (2000, 2)), shapes, [(1, 5000), (5000, 1), (3, 3)]]).astype(np.int32)
    found = crops.nearest_bucket(sizes, shapes)
    table = np.stack([lost(sizes, shape) for shape in shapes])
    assert found.dtype == np.int64 and found.shape == (len(sizes),)
    assert np.allclose(table[found, np.arange(len(sizes))], table.min(axis=0), atol=1e-12)


def test_every_bucket_is_the_nearest_to_itself():
    shapes = crops.buckets(1024, 64)
    assert crops.nearest_bucket(np.array(shapes), shapes).tolist() == list(range(len(shapes)))


@pytest.mark.parametrize(("resolution", "step"), [(160, 8), (200, 16), (1000, 64)])
def test_a_square_picture_gets_the_whole_square_and_no_smaller_one(resolution, step):
    shapes = crops.buckets(resolution, step)
    assert shapes[crops.nearest_bucket(np.array([[500, 500]]), shapes)[0]] == (resolution, resolution)


def test_pictures_that_are_smaller_than_their_shape_on_either_side_are_enlarged():
    sizes = np.array([[64, 96], [63, 96], [64, 95], [1000, 1000]])
    assert crops.is_upscaled(sizes, (64, 96)).tolist() == [False, True, True, False]


# Crops


def test_the_crop_is_cut_where_it_says():
    picture = Image.new("RGB", (200, 100), WHITE)
    picture.paste(RED, (0, 0, 50, 100))
    middle, corner = crops.crop(picture, (50, 50))
    assert middle.shape == (3, 50, 50) and middle.dtype == np.uint8 and middle.flags.c_contiguous
    assert corner == (0, 25)
    assert (middle[0] == 255).all() and (middle[1:, :, 1:] >= 250).all()
    left, corner = crops.crop(picture, (50, 50), place=(0.0, 0.0))
    assert corner == (0, 0)
    assert (left[1, :, :23] <= 5).all() and (left[1, :, 27:] >= 250).all()


@pytest.mark.parametrize("place", [None, (0.0, 0.0), (0.3, 0.7), (0.999, 0.999)])
@pytest.mark.parametrize(
    ("size", "shape", "whole"),
    [
        ((301, 200), (64, 64), (64, 96)),
        ((200, 301), (64, 64), (96, 64)),
        ((301, 200), (48, 96), (64, 96)),
        ((301, 200), (96, 48), (96, 144)),
        ((40, 30), (60, 120), (90, 120)),
        ((96, 64), (64, 48), (64, 96)),
    ],
)
def test_cropping_while_resizing_equals_resizing_then_cropping(size, shape, whole, place):
    picture = noise(1, 20, 15).resize(size, Image.Resampling.BICUBIC)
    (h, w), slack = shape, (whole[0] - shape[0], whole[1] - shape[1])
    pixels, (top, left) = crops.crop(picture, shape, place=place)
    expected = np.asarray(picture.resize(whole[::-1], Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    assert np.abs(pixels.astype(int) - expected[:, top : top + h, left : left + w]).max() <= 2
    assert (top, left) == tuple(int(at * (most + 1)) if place else most // 2 for at, most in zip(place or (0, 0), slack, strict=True))


def test_a_picture_of_the_right_shape_keeps_its_pixels():
    picture = noise(2, 24, 16)
    pixels, corner = crops.crop(picture, (16, 24), place=(0.5, 0.5))
    assert corner == (0, 0) and (pixels == np.asarray(picture).transpose(2, 0, 1)).all()


@pytest.mark.parametrize("turned", [False, True])
def test_a_very_long_picture_costs_no_more_than_another(turned):
    size, corner = ((20_000, 1), (0, (20_000 * 64 - 64) // 2)) if not turned else ((1, 20_000), ((20_000 * 64 - 64) // 2, 0))
    pixels, found = crops.crop(Image.new("RGB", size, RED), (64, 64))
    assert found == corner
    assert (pixels[0] == 255).all() and (pixels[1:] == 0).all()


# Views

VIEW = View((64, 48), "random", 1, 0, False)
DIGEST = bytes(range(16))


def place_of(view: View, digest: bytes) -> tuple[float, float]:
    place = view.place(digest)
    assert place is not None and 0 <= min(place) <= max(place) < 1
    return place


def test_random_crops_depend_on_seed_view_and_bytes_alone():
    place = place_of(VIEW, DIGEST)
    assert place == place_of(dataclasses.replace(VIEW, shape=(8, 8), mirrored=True), DIGEST)
    others = [dataclasses.replace(VIEW, seed=2), dataclasses.replace(VIEW, number=1)]
    assert len({place, *(place_of(view, DIGEST) for view in others), place_of(VIEW, bytes(16))}) == 4
    assert all(dataclasses.replace(VIEW, crop=crop).place(DIGEST) is None for crop in ("center", "buckets"))


def test_random_crops_reach_every_place_alike():
    digests = [hashlib.sha256(bytes([i, j])).digest()[:16] for i in range(8) for j in range(250)]
    corners = [VIEW.cut(Image.new("RGB", (52, 64)), digest)[1] for digest in digests]
    counts = np.bincount([left for _, left in corners], minlength=5)
    assert {top for top, _ in corners} == {0} and len(counts) == 5
    assert np.abs(counts - 400).max() < 4 * np.sqrt(400 * 0.8)


def test_random_crops_of_two_resolutions_show_the_same_part():
    picture = noise(3, 96, 32)
    for digest in (DIGEST, bytes(16), bytes([7]) * 16):
        small, large = (View((side, side), "random", 1, 0, False).cut(picture, digest)[1] for side in (16, 32))
        assert np.abs(np.array(large) - 2 * np.array(small)).max() <= 2


def test_a_mirrored_view_is_the_mirror_of_the_same_crop():
    picture = noise(4, 90, 70)
    plain, corner = VIEW.cut(picture, DIGEST)
    mirrored, same = dataclasses.replace(VIEW, mirrored=True).cut(picture, DIGEST)
    assert (mirrored == plain[:, :, ::-1]).all() and same == corner and mirrored.flags.c_contiguous
    assert (plain != mirrored).any()


@pytest.mark.parametrize(
    ("change", "crops_that_differ"),
    [
        ({"shape": (48, 64)}, ["center", "random", "buckets"]),
        ({"mirrored": True}, ["center", "random", "buckets"]),
        ({"digest": bytes(16)}, ["center", "random", "buckets"]),
        ({"made_by": "another encoder"}, ["center", "random", "buckets"]),
        ({"seed": 2}, ["random"]),
        ({"number": 1}, ["random"]),
        ({"crop": "random"}, ["center", "buckets"]),
        ({"crop": "center"}, ["random"]),
        ({"crop": "buckets"}, ["random"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("crop", ["center", "random", "buckets"])
def test_the_key_of_a_view_differs_in_what_its_pixels_differ_in(crop, change, crops_that_differ):
    def key(digest: bytes = DIGEST, made_by: str = "an encoder", **values: object) -> bytes:
        return dataclasses.replace(VIEW, **{"crop": crop, **values}).key(digest, made_by)

    assert len(key()) == 16 and key() == key()
    assert (key(**change) != key()) == (crop in crops_that_differ)


def test_of_two_equally_near_buckets_the_squarer_is_taken_either_way():
    shapes = ((16, 64), (32, 32), (64, 16))
    assert crops.nearest_bucket(np.array([[64, 128], [128, 64]]), shapes).tolist() == [1, 1]


def test_the_area_that_a_crop_loses_is_told():
    lost = crops.cut_away(np.array([[64, 64], [64, 128], [128, 64], [40, 400]]), (32, 32))
    assert lost.tolist() == pytest.approx([0, 0.5, 0.5, 0.9])
