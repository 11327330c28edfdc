import numpy as np
import pytest

from sdlab import features, scenes


@pytest.fixture(scope="module")
def judge() -> features.Judge:
    return features.load_judge()


def test_image_features_have_length_one_and_do_not_depend_on_their_neighbours(judge):
    images = scenes.render(scenes.draw(70, seed=5))
    found = judge.image_features(images)
    assert found.shape == (70, judge.width)
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(judge.image_features(images[66:]), found[66:])


def test_text_features_have_length_one_and_do_not_depend_on_their_neighbours(judge):
    captions = [scene.caption for scene in scenes.draw(70, seed=5)]
    found = judge.text_features(captions)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(judge.text_features(captions[66:]), found[66:])


def test_text_longer_than_the_context_is_cut(judge):
    assert judge.text_features(["owl " * 200]).shape == (1, judge.width)


def test_pictures_of_another_size_are_resized_and_the_pixel_path_says_so(judge):
    images = scenes.render(scenes.draw(3, seed=6))[:, :, ::2, ::2]
    assert judge.image_features(np.ascontiguousarray(images)).shape == (3, judge.width)
    assert "bicubic" in judge.pixel_path(32)
    assert "bicubic" not in judge.pixel_path(judge.side)
