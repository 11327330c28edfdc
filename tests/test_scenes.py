"""Scenes carry exact captions, and the reader finds exactly what was drawn."""

import numpy as np
import pytest

from sdlab import scenes

DRAWN = scenes.draw(120, seed=5)
IMAGES = scenes.render(DRAWN)
CAPTIONS = [scene.caption for scene in DRAWN]


def test_the_same_seed_draws_the_same_scenes_however_many_are_asked_for() -> None:
    assert scenes.draw(30, seed=5) == DRAWN[:30]
    assert scenes.draw(30, seed=6) != DRAWN[:30]


def test_most_scenes_show_one_object_and_some_two() -> None:
    share = np.mean([len(scene.objects) == 2 for scene in scenes.draw(1000, seed=1)])
    assert 0.35 < share < 0.45


def test_captions_say_exactly_what_is_drawn() -> None:
    owl = scenes.Scene((scenes.Placed("owl", "large", 10, 10),), "pink")
    pair = scenes.Scene((scenes.Placed("apple", "small", 18, 2), scenes.Placed("rocket", "small", 18, 34)), "yellow")
    assert owl.caption == "a large owl on a pink background"
    assert pair.caption == "an apple above a rocket on a yellow background"


def test_the_reader_reads_every_real_picture_back() -> None:
    for found, scene in zip(scenes.read(IMAGES), DRAWN, strict=True):
        assert found.background == scene.background
        assert sorted(found.objects, key=str) == sorted(scene.objects, key=str)


def test_right_captions_are_strictly_right_and_wrong_ones_are_not() -> None:
    assert scenes.check(IMAGES, CAPTIONS)["strict"].all()
    assert scenes.check(IMAGES, CAPTIONS[1:] + CAPTIONS[:1])["strict"].mean() < 0.03


def test_the_reader_bears_noise_and_sees_an_empty_picture_as_empty() -> None:
    noisy = np.clip(IMAGES + np.random.default_rng(0).normal(0, 20, IMAGES.shape), 0, 255).astype(np.uint8)
    assert scenes.check(noisy, CAPTIONS)["strict"].all()
    plain = np.broadcast_to(np.array(scenes.BACKGROUNDS["green"], np.uint8)[:, None, None], (1, 3, 64, 64))
    assert scenes.read(plain) == [scenes.Scene((), "green")]


@pytest.mark.parametrize(
    ("drawn", "caption", "wrong"),
    [
        (("owl", "large", 10, 10), "a small owl on a pink background", "sizes"),
        (("owl", "large", 10, 10), "a large cat on a pink background", "objects"),
        (("owl", "large", 10, 10), "a large owl on a blue background", "background"),
        (("owl", "small", 2, 2), "a small owl on a pink background", "places"),
    ],
)
def test_the_check_says_what_is_wrong(drawn: tuple[str, str, int, int], caption: str, wrong: str) -> None:
    found = scenes.check(scenes.render([scenes.Scene((scenes.Placed(*drawn),), "pink")]), [caption])
    assert not found[wrong][0] and not found["strict"][0]
    if wrong == "background":
        assert found["objects"][0] and found["sizes"][0] and found["places"][0]


def test_a_second_object_that_nobody_asked_for_is_wrong() -> None:
    pair = scenes.Scene((scenes.Placed("owl", "small", 18, 2), scenes.Placed("cat", "small", 18, 34)), "blue")
    assert not scenes.check(scenes.render([pair]), ["a small owl on a blue background"])["strict"][0]
    assert not scenes.check(scenes.render([pair]), ["an owl below a cat on a blue background"])["places"][0]


def test_only_captions_of_scenes_can_be_checked() -> None:
    with pytest.raises(ValueError, match="knows only captions of scenes, not 'a dragon'"):
        scenes.check(IMAGES[:1], ["a dragon"])
    with pytest.raises(ValueError, match="uint8"):
        scenes.read(IMAGES.astype(np.float32))
    with pytest.raises(ValueError, match="share"):
        scenes.draw(3, seed=0, two_object_share=2)


def test_every_caption_can_be_parsed_back() -> None:
    for scene in DRAWN:
        parsed = scenes.parse(scene.caption)
        assert parsed is not None and parsed.caption == scene.caption
