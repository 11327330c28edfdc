import numpy as np
import pytest

from sdlab import features, scenes
from sdlab.config import ConfigError
from sdlab.features import Statistics, bootstrap, frechet_distance, frechet_influence


def gaussian(mean: np.ndarray, covariance: np.ndarray, n: int = 1000) -> Statistics:
    """Statistics of an imagined set with exactly this mean and covariance."""
    return Statistics(n, n * mean, (n - 1) * covariance + n * np.outer(mean, mean))


@pytest.fixture(scope="module")
def rotation() -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(0).normal(size=(12, 12)))[0]


@pytest.fixture(scope="module")
def judge() -> features.Judge:
    return features.load_judge()


def test_equal_gaussians_are_at_distance_zero(rotation):
    same = gaussian(np.arange(12.0), rotation * np.linspace(0.1, 3, 12) @ rotation.T)
    assert frechet_distance(same, same) == pytest.approx(0, abs=1e-10)


def test_a_shifted_mean_adds_its_squared_length(rotation):
    covariance = rotation * np.linspace(0.1, 3, 12) @ rotation.T
    shift = np.linspace(-1, 1, 12)
    assert frechet_distance(gaussian(shift, covariance), gaussian(np.zeros(12), covariance)) == pytest.approx(shift @ shift, rel=1e-9)


def test_covariances_that_commute_differ_by_their_standard_deviations(rotation):
    a, b = np.linspace(0.1, 3, 12), np.linspace(2, 0.5, 12)
    first, second = (gaussian(np.zeros(12), rotation * variances @ rotation.T) for variances in (a, b))
    assert frechet_distance(first, second) == pytest.approx(((np.sqrt(a) - np.sqrt(b)) ** 2).sum(), rel=1e-9)


def test_the_distance_is_symmetric_and_agrees_with_eigenvalues_of_the_plain_product():
    random = np.random.default_rng(1)
    a, b = (Statistics.of(random.normal(size=(200, 24)) @ random.normal(size=(24, 24))) for _ in range(2))
    product = np.linalg.eigvals(a.covariance @ b.covariance)
    traces = np.trace(a.covariance) + np.trace(b.covariance)
    plain = ((a.mean - b.mean) ** 2).sum() + traces - 2 * np.sqrt(product.astype(complex)).sum().real
    assert frechet_distance(a, b) == pytest.approx(plain, rel=1e-8)
    assert frechet_distance(a, b) == pytest.approx(frechet_distance(b, a), rel=1e-8)


def test_fewer_pictures_than_dimensions_never_give_a_negative_distance():
    rows = np.random.default_rng(2).normal(size=(5, 64))
    few = Statistics.of(rows)
    assert 0 <= frechet_distance(few, few) < 1e-9


def test_merged_statistics_equal_those_of_the_whole():
    rows = np.random.default_rng(3).normal(size=(100, 8))
    whole, merged = Statistics.of(rows), Statistics.of(rows[:37]) + Statistics.of(rows[37:])
    assert merged.n == 100
    np.testing.assert_allclose(merged.mean, rows.mean(0))
    np.testing.assert_allclose(merged.covariance, np.cov(rows.T))
    np.testing.assert_allclose(merged.covariance, whole.covariance)


def test_one_picture_has_no_covariance():
    with pytest.raises(ConfigError, match="at least 2"):
        frechet_distance(Statistics.of(np.ones((1, 4))), Statistics.of(np.eye(4)))


def test_features_of_different_width_are_refused_with_both_widths():
    with pytest.raises(ConfigError, match=r"4.*6"):
        frechet_distance(Statistics.of(np.eye(4)), Statistics.of(np.eye(6)))


def test_the_standard_error_is_the_spread_over_repeated_draws():
    random = np.random.default_rng(4)
    mixing = random.normal(size=(16, 16)) / 4
    reference = Statistics.of(random.normal(size=(2000, 16)) @ mixing)
    sets = [random.normal(size=(150, 16)) @ mixing * 1.2 + 0.1 for _ in range(200)]
    true = np.std([frechet_distance(Statistics.of(rows), reference) for rows in sets])
    said = np.mean([frechet_influence(rows, reference).std(ddof=1) / 150**0.5 for rows in sets[:20]])
    assert said == pytest.approx(true, rel=0.25)


def test_influence_is_the_derivative_in_a_pictures_weight():
    rows = np.random.default_rng(5).normal(size=(400, 6)) * 1.5
    reference = Statistics.of(np.random.default_rng(6).normal(size=(500, 6)))
    weight = 1e-3
    heavier = Statistics.of(rows)
    moved = frechet_distance(heavier + Statistics(weight, weight * rows[0], weight * np.outer(rows[0], rows[0])), reference)
    slope = (moved - frechet_distance(heavier, reference)) / weight * len(rows)
    assert frechet_influence(rows, reference)[0] == pytest.approx(slope, rel=0.05, abs=0.05)


def test_the_bootstrap_interval_is_about_two_standard_errors_each_way_and_repeats():
    influence = np.random.default_rng(7).normal(size=400)
    low, high = bootstrap(influence - influence.mean())
    assert (low, high) == bootstrap(influence - influence.mean())
    assert -low == pytest.approx(1.96 / 20, rel=0.15)
    assert high == pytest.approx(1.96 / 20, rel=0.15)


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
