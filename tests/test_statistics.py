"""Statistics, the Frechet distance and its companions, against closed forms and plain formulas."""

import itertools
import json
import os

import numpy as np
import pytest

from sdlab import distances, statistics
from sdlab.config import ConfigError
from sdlab.statistics import Reference, Statistics, bootstrap, difference, frechet_distance, frechet_influence

EXTRACTOR = json.dumps({"name": "made up", "weights": "ab12"})


def gaussian(mean, covariance, n=1000):
    """Statistics of an imagined set with exactly this mean and covariance."""
    return Statistics(n, n * mean, (n - 1) * covariance)


def distance(sample, other):
    return frechet_distance(sample, Reference.of(other))


def drawn(n, width, *, seed, decay=0.0):
    """Features whose variances fall as a power, in a rotated frame and away from 0."""
    random = np.random.default_rng(seed)
    rotation = np.linalg.qr(np.random.default_rng(99).normal(size=(width, width)))[0]
    return (random.normal(size=(n, width)) * np.arange(1, width + 1.0) ** (-decay / 2)) @ rotation + 3


def by_singular_values(a, b):
    """The distance from the features themselves, which is right whatever the ranks: cross term = nuclear norm of the centred A B'."""
    rows = [(x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (a, b)]
    cross = np.linalg.svd(rows[0] @ rows[1].T, compute_uv=False).sum()
    return ((a.mean(0) - b.mean(0)) ** 2).sum() + sum((x**2).sum() for x in rows) - 2 * cross


@pytest.fixture(scope="module")
def rotation():
    return np.linalg.qr(np.random.default_rng(0).normal(size=(12, 12)))[0]


@pytest.fixture(scope="module")
def covariance(rotation):
    return rotation * np.linspace(0.1, 3, 12) @ rotation.T


# Statistics that merge


@pytest.mark.parametrize("cuts", [[37], [1, 2, 3], [10, 10, 99], range(1, 100)])
def test_merged_statistics_equal_those_of_the_whole(cuts):
    rows = drawn(100, 8, seed=1)
    merged = sum((Statistics.of(shard) for shard in np.split(rows, cuts)), Statistics.empty(8))
    assert merged.n == 100
    np.testing.assert_allclose(merged.mean, rows.mean(0), rtol=1e-13)
    np.testing.assert_allclose(merged.covariance, np.cov(rows.T), rtol=1e-11, atol=1e-13)


def test_shards_in_any_order_and_grouping_agree_to_rounding_and_in_the_same_order_to_the_last_bit():
    a, b, c = (Statistics.of(drawn(50, 8, seed=seed)) for seed in range(3))
    assert np.array_equal((a + b + c).scatter, (a + b + c).scatter)
    for other in (a + (b + c), c + b + a):
        np.testing.assert_allclose(other.scatter, (a + b + c).scatter, rtol=1e-12, atol=1e-12)
    assert np.array_equal((Statistics.empty(8) + a).scatter, a.scatter)


def test_a_large_set_is_the_sum_of_its_blocks_to_the_last_bit(monkeypatch):
    monkeypatch.setattr(statistics, "BLOCK", 16)
    rows = drawn(50, 8, seed=1).astype(np.float32)
    whole, merged = Statistics.of(rows), Statistics.empty(8)
    for start in range(0, 50, 16):
        merged += Statistics.of(rows[start : start + 16])
    assert np.array_equal(whole.scatter, merged.scatter) and np.array_equal(whole.total, merged.total)


def test_a_large_mean_with_a_small_spread_keeps_its_digits():
    rows = 100 + 0.01 * np.random.default_rng(0).normal(size=(20000, 8))
    exact = np.cov((rows.astype(np.longdouble) - 100).astype(np.float64).T)
    merged = Statistics.of(rows[:300]) + Statistics.of(rows[300:])
    np.testing.assert_allclose(merged.covariance, exact, rtol=0, atol=1e-12 * exact.max())


def test_a_covariance_is_symmetric_to_the_last_bit():
    merged = Statistics.of(drawn(50, 9, seed=1)) + Statistics.of(drawn(70, 9, seed=2) + 1)
    assert np.array_equal(merged.covariance, merged.covariance.T)


def test_unusable_features_are_refused_by_name():
    rows = drawn(10, 4, seed=0)
    rows[[3, 7], 1] = np.nan, np.inf
    with pytest.raises(ConfigError, match=r"drawn at 7\.5 are not finite for 2 of 10 pictures, first for 3"):
        Statistics.of(rows, name="drawn at 7.5")
    with pytest.raises(ConfigError, match=r"float64 \(10,\)"):
        Statistics.of(rows[:, 0])
    with pytest.raises(ConfigError, match="complex"):
        Statistics.of(rows.astype(complex))
    with pytest.raises(ConfigError, match="width 4 and 6"):
        Statistics.empty(4) + Statistics.empty(6)


def test_too_few_pictures_have_no_mean_and_no_covariance():
    with pytest.raises(ConfigError, match="at least 1 picture"):
        _ = Statistics.empty(4).mean
    with pytest.raises(ConfigError, match="at least 2 pictures and got 1"):
        distance(Statistics.of(np.ones((1, 4))), Statistics.of(np.eye(4)))


# Files


def rewritten(path, **changes):
    """A copy of the file beside it with arrays replaced, or left out where they are None."""
    with np.load(path) as kept:
        arrays = {name: kept[name] for name in kept.files} | changes
    other = path.with_name("other.npz")
    np.savez(other, **{name: array for name, array in arrays.items() if array is not None})
    return other


@pytest.fixture
def stored(tmp_path):
    Statistics.of(drawn(30, 6, seed=1)).save(tmp_path / "some.npz", extractor=EXTRACTOR)
    return tmp_path / "some.npz"


def test_a_file_gives_back_what_was_saved_and_merges(stored):
    saved = Statistics.of(drawn(30, 6, seed=1))
    loaded, extractor, digest = statistics.load(stored, width=6, extractor=EXTRACTOR)
    assert (loaded.n, extractor, len(digest)) == (30, EXTRACTOR, 64)
    assert np.array_equal(loaded.total, saved.total) and np.array_equal(loaded.scatter, saved.scatter)
    assert (loaded + saved).n == 60
    assert saved.save(stored, extractor=EXTRACTOR) == digest and statistics.load(stored, digest=digest).digest == digest
    assert saved.save(stored, extractor="{}") != digest


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(stored, monkeypatch):
    before = stored.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Statistics.of(drawn(40, 6, seed=2)).save(stored, extractor=EXTRACTOR)
    assert stored.read_bytes() == before and list(stored.parent.iterdir()) == [stored]


@pytest.mark.parametrize("wanted", [{"width": 7}, {"extractor": "{}"}, {"digest": "0" * 64}])
def test_a_file_of_something_else_is_refused_with_its_name(stored, wanted):
    with pytest.raises(ConfigError, match=rf"some\.npz has the {next(iter(wanted))}"):
        statistics.load(stored, **wanted)


@pytest.mark.parametrize("name", ["n", "total", "scatter", "extractor", "digest"])
def test_a_file_that_lacks_an_array_is_refused_with_its_name(stored, name):
    with pytest.raises(ConfigError, match=rf"other\.npz lacks {name}"):
        statistics.load(rewritten(stored, **{name: None}))


@pytest.mark.parametrize(
    "changes", [{"n": 31}, {"total": np.ones(6)}, {"scatter": np.eye(6)}, {"extractor": "{}"}, {"digest": "0" * 64}], ids=str
)
def test_a_file_whose_content_was_changed_is_refused(stored, changes):
    with pytest.raises(ConfigError, match=r"other\.npz is damaged"):
        statistics.load(rewritten(stored, **changes))


@pytest.mark.parametrize("changes", [{"n": -1}, {"n": 1.5}, {"n": np.ones(2, int)}, {"total": np.eye(6)}, {"scatter": np.eye(5)}], ids=str)
def test_a_file_with_arrays_of_other_shapes_is_refused(stored, changes):
    with pytest.raises(ConfigError, match=r"other\.npz holds n"):
        statistics.load(rewritten(stored, **changes))


def test_a_file_that_is_cut_off_flipped_missing_or_no_npz_is_refused_with_its_name(stored):
    content, other = stored.read_bytes(), stored.with_name("bad.npz")
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 255
    for bad in (content[:200], content[:-30], b"", b"not an npz", bytes(flipped)):
        other.write_bytes(bad)
        with pytest.raises(ConfigError, match=r"bad\.npz"):
            statistics.load(other)
    np.save(stored.with_name("one.npy"), np.eye(2))
    for name in ("missing.npz", "one.npy"):
        with pytest.raises(ConfigError, match=name):
            statistics.load(stored.with_name(name))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_no_flipped_byte_changes_a_number_unseen_or_fails_in_another_way(tmp_path, save):
    path, refused = tmp_path / "bad.npz", 0
    save(path, mu=np.arange(3.0), sigma=np.eye(3))
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        try:
            kept = statistics.load_foreign(path)
            assert np.array_equal(kept.mean, np.arange(3.0)) and np.array_equal(kept.covariance, np.eye(3))
        except ConfigError as error:
            refused += "bad.npz" in str(error)
    assert refused > len(content) / 2


def test_a_foreign_reference_can_be_compared_with_but_not_merged(tmp_path):
    real, sample = Statistics.of(drawn(100, 6, seed=1)), Statistics.of(drawn(80, 6, seed=2))
    np.savez(tmp_path / "mlperf.npz", mu=real.mean, sigma=real.covariance)
    foreign = statistics.load_foreign(tmp_path / "mlperf.npz")
    assert foreign.n is None and statistics.load_foreign(tmp_path / "mlperf.npz", n=100).n == 100
    assert frechet_distance(sample, foreign) == pytest.approx(distance(sample, real), rel=1e-12)
    with pytest.raises(ConfigError, match="cannot be merged"):
        sample + foreign


def test_a_foreign_reference_of_unknown_few_pictures_is_right(tmp_path):
    real, made = drawn(20, 64, seed=1), drawn(200, 64, seed=2)
    np.savez(tmp_path / "few.npz", mu=real.mean(0), sigma=np.cov(real.T))
    foreign = statistics.load_foreign(tmp_path / "few.npz")
    assert foreign.rank == 19
    assert frechet_distance(Statistics.of(made), foreign) == pytest.approx(by_singular_values(made, real), rel=1e-9)


NO_GAUSSIANS = {
    "lacks sigma": {"mu": np.zeros(3)},
    r"mu \(3,\) and sigma \(4, 4\)": {"mu": np.zeros(3), "sigma": np.eye(4)},
    "no mean and covariance: both": {"mu": np.zeros(2), "sigma": np.array([[1.0, 2.0], [0.0, 1.0]])},
    "variances from 0": {"mu": np.zeros(2), "sigma": -np.eye(2)},
    "both finite": {"mu": np.array([0.0, np.nan]), "sigma": np.eye(2)},
}


@pytest.mark.parametrize("said", NO_GAUSSIANS)
def test_a_foreign_file_without_a_gaussian_is_refused_with_its_name(tmp_path, said):
    np.savez(tmp_path / "odd.npz", **NO_GAUSSIANS[said])
    with pytest.raises(ConfigError, match=rf"odd\.npz .*{said}"):
        statistics.load_foreign(tmp_path / "odd.npz")


def test_a_foreign_reference_of_one_picture_is_refused(tmp_path):
    np.savez(tmp_path / "one.npz", mu=np.zeros(2), sigma=np.eye(2))
    with pytest.raises(ConfigError, match="n = 1"):
        statistics.load_foreign(tmp_path / "one.npz", n=1)


# The Frechet distance


def test_equal_gaussians_are_at_distance_zero(covariance):
    same = gaussian(np.arange(12.0), covariance)
    assert distance(same, same) == pytest.approx(0, abs=1e-12)


def test_a_shifted_mean_adds_its_squared_length(covariance):
    shift = np.linspace(-1, 1, 12)
    assert distance(gaussian(shift, covariance), gaussian(np.zeros(12), covariance)) == pytest.approx(shift @ shift, rel=1e-12)


@pytest.mark.parametrize("scale", [1e-6, 0.5, 3.0, 1e6])
def test_scaled_features_differ_by_the_scale_less_one(covariance, scale):
    first, second = gaussian(np.zeros(12), scale**2 * covariance), gaussian(np.zeros(12), covariance)
    assert distance(first, second) == pytest.approx((scale - 1) ** 2 * np.trace(covariance), rel=1e-12)


def test_covariances_that_commute_differ_by_their_standard_deviations(rotation):
    a, b = np.linspace(0.1, 3, 12), np.linspace(2, 0.5, 12)
    first, second = (gaussian(np.zeros(12), rotation * variances @ rotation.T) for variances in (a, b))
    assert distance(first, second) == pytest.approx(((np.sqrt(a) - np.sqrt(b)) ** 2).sum(), rel=1e-12)


@pytest.fixture
def no_singular_values(monkeypatch):
    """Makes the slow way of the cross term fail."""
    monkeypatch.setattr(np.linalg, "svd", None)


@pytest.mark.parametrize(("decay", "error"), [(4, 1e-8), (6, 1e-7)])
def test_variances_that_fall_steeply_all_count_and_take_the_fast_way(decay, error, no_singular_values):
    random = np.random.default_rng(3)
    rotation = np.linalg.qr(random.normal(size=(256, 256)))[0]
    a, b = (np.arange(1, 257.0) ** -decay * random.uniform(0.5, 1.5, size=256) for _ in range(2))
    first, second = (gaussian(np.zeros(256), (lambda s: (s + s.T) / 2)(rotation * variances @ rotation.T)) for variances in (a, b))
    assert distance(first, second) == pytest.approx(((np.sqrt(a) - np.sqrt(b)) ** 2).sum(), rel=error)


def test_few_pictures_that_differ_take_the_fast_way(no_singular_values):
    assert distance(Statistics.of(drawn(60, 256, seed=1)), Statistics.of(drawn(500, 256, seed=2))) > 0


def test_as_many_pictures_as_features_vary_in_one_direction_less():
    assert {Reference.of(Statistics.of(drawn(16, 16, seed=seed))).rank for seed in range(40)} == {15}


def test_a_feature_that_is_made_of_others_takes_a_direction_away():
    random = np.random.default_rng(0)
    for seed in range(20):
        rows = drawn(200, 64, seed=seed)
        rows[:, 63] = rows[:, :63] @ random.normal(size=63)
        assert Reference.of(Statistics.of(rows)).rank == 63


@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_the_distance_agrees_with_pytorch_fid_and_torch_fidelity(decay):
    fid_score = pytest.importorskip("pytorch_fid.fid_score")
    metric_fid = pytest.importorskip("torch_fidelity.metric_fid")
    a, b = (Statistics.of(drawn(1000, 256, seed=seed, decay=decay) * (1 + 0.1 * seed)) for seed in (1, 2))
    found = distance(a, b)
    assert found == pytest.approx(fid_score.calculate_frechet_distance(a.mean, a.covariance, b.mean, b.covariance), rel=1e-8)
    theirs = [{"mu": one.mean, "sigma": one.covariance} for one in (a, b)]
    assert found == pytest.approx(metric_fid.fid_statistics_to_metric(*theirs, False)["frechet_inception_distance"], rel=1e-8)
    assert found == pytest.approx(distance(b, a), rel=1e-9)


def test_blocks_of_the_product_do_not_show():
    a, b = (Statistics.of(drawn(700, 300, seed=seed)) for seed in (1, 2))
    triangular = Reference.of(b).root
    turned = triangular @ np.linalg.qr(np.random.default_rng(0).normal(size=(300, 300)))[0]
    for root in (triangular, turned, turned[:, :100]):
        found = statistics._congruence(root, a.covariance, block=64)
        np.testing.assert_allclose(np.tril(found), np.tril(root.T @ a.covariance @ root), atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 1.5])
@pytest.mark.parametrize(("n", "m"), [(60, 500), (500, 60), (60, 90), (60, 60), (257, 257), (256, 600)])
def test_fewer_pictures_than_features_are_right(n, m, decay):
    a, b = drawn(n, 256, seed=1, decay=decay), drawn(m, 256, seed=2, decay=decay) * 1.1
    assert distance(Statistics.of(a), Statistics.of(b)) == pytest.approx(by_singular_values(a, b), rel=1e-9)


@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_repeated_pictures_and_dead_features_are_right(decay):
    a, b = drawn(600, 256, seed=1, decay=decay), drawn(600, 256, seed=2, decay=decay)
    repeated, dead_a, dead_b = a[np.arange(600) % 100], a.copy(), b.copy()
    dead_a[:, :30], dead_b[:, 20:50] = 3, 5
    for x, y in ((repeated, b), (b, repeated), (dead_a, b), (b, dead_a), (dead_a, dead_b), (repeated[:200], dead_b)):
        assert distance(Statistics.of(x), Statistics.of(y)) == pytest.approx(by_singular_values(x, y), rel=1e-9)


def test_the_distance_is_never_negative():
    few = Statistics.of(drawn(5, 64, seed=2))
    assert 0 <= distance(few, few) < 1e-12
    for seed in range(20):
        same = Statistics.of(drawn(30, 16, seed=seed))
        assert distance(same, same) >= 0


def test_pictures_that_are_all_the_same_differ_by_their_mean():
    same, other = Statistics.of(np.ones((5, 4))), Statistics.of(np.full((5, 4), 3.0))
    assert distance(same, other) == 16
    assert Reference.of(same).rank == 0


def test_a_reference_is_factored_once_however_many_samples_are_compared(monkeypatch):
    calls, factor = [], np.linalg.cholesky
    monkeypatch.setattr(np.linalg, "cholesky", lambda matrix: calls.append(1) or factor(matrix))
    reference = Reference.of(Statistics.of(drawn(100, 8, seed=1)))
    for seed in range(5):
        frechet_distance(Statistics.of(drawn(100, 8, seed=seed)), reference)
    assert len(calls) == 1


def test_features_of_different_width_are_refused_with_both_widths():
    reference = Reference.of(Statistics.of(np.eye(6)))
    for refused in (lambda: frechet_distance(Statistics.of(np.eye(4)), reference), lambda: frechet_influence(np.eye(4), reference)):
        with pytest.raises(ConfigError, match=r"width 4 .* width 6"):
            refused()


# Its uncertainty


def test_influence_is_the_derivative_in_a_pictures_weight():
    rows, many = drawn(400, 6, seed=5) * 1.5, 10**6
    reference = Reference.of(Statistics.of(drawn(500, 6, seed=6)))
    one = Statistics.of(rows)
    heavy = Statistics(many * one.n, many * one.total, many * one.scatter)
    base = frechet_distance(heavy, reference)
    slopes = [(frechet_distance(heavy + Statistics.of(rows[[row]]), reference) - base) * many * 400 for row in range(20)]
    np.testing.assert_allclose(frechet_influence(rows, reference)[:20], slopes, rtol=0.02, atol=0.1)


@pytest.mark.parametrize(("n", "decay"), [(150, 1.5), (150, 6.0), (20, 1.5)])
def test_influences_are_those_of_the_singular_vectors_for_few_pictures_too(n, decay):
    rows, reference = drawn(n, 32, seed=5, decay=decay), Reference.of(Statistics.of(drawn(2000, 32, seed=6)))
    centred = rows - rows.mean(0)
    left, values, _ = np.linalg.svd(centred @ reference.root, full_matrices=False)
    kept = min(n - 1, 32)
    cross = (left[:, :kept] ** 2 * values[:kept]).sum(1) * (n - 1) ** 0.5
    plain = 2 * centred @ (rows.mean(0) - reference.mean) + (centred**2).sum(1) - cross
    np.testing.assert_allclose(frechet_influence(rows, reference), plain - plain.mean(), rtol=1e-7, atol=1e-9)


def test_the_standard_error_is_the_spread_over_repeated_draws():
    random = np.random.default_rng(4)
    mixing = random.normal(size=(16, 16)) / 4
    reference = Reference.of(Statistics.of(random.normal(size=(2000, 16)) @ mixing))
    sets = [random.normal(size=(150, 16)) @ mixing * 1.2 + 0.1 for _ in range(200)]
    true = np.std([frechet_distance(Statistics.of(rows), reference) for rows in sets])
    said = np.mean([frechet_influence(rows, reference).std(ddof=1) / 150**0.5 for rows in sets[:20]])
    assert said == pytest.approx(true, rel=0.25)


def test_the_error_of_a_paired_difference_is_its_spread_over_repeated_draws():
    random = np.random.default_rng(4)
    reference = Reference.of(Statistics.of(random.normal(size=(2000, 8))))
    sets = [(rows, rows * 1.1 + 0.05 * random.normal(size=(300, 8)) + 0.1) for rows in (random.normal(size=(300, 8)) for _ in range(200))]
    true = np.std([np.subtract(*(frechet_distance(Statistics.of(rows), reference) for rows in pair)) for pair in sets])
    pairs = [[frechet_influence(rows, reference) for rows in pair] for pair in sets[:20]]
    said = np.mean([difference(*pair) for pair in pairs])
    unpaired = np.mean([difference(pair[0], pair[1][::-1]) for pair in pairs])
    assert said == pytest.approx(true, rel=0.25)
    assert unpaired > 1.3 * said
    assert difference(pairs[0][0], pairs[0][0]) == 0


def test_influences_that_are_no_pairs_are_refused():
    for a, b in ((np.ones(4), np.ones(5)), (np.ones(1), np.ones(1)), (np.ones((2, 2)), np.ones((2, 2)))):
        with pytest.raises(ConfigError, match="no pairs"):
            difference(a, b)


def test_the_bootstrap_interval_is_about_two_standard_errors_each_way_and_repeats():
    influence = np.random.default_rng(7).normal(size=400)
    low, high = bootstrap(influence - influence.mean())
    assert (low, high) == bootstrap(influence - influence.mean())
    assert (low, high) != bootstrap(influence - influence.mean(), seed=1)
    assert -low == pytest.approx(1.96 / 20, rel=0.15)
    assert high == pytest.approx(1.96 / 20, rel=0.15)


# Kernels


def plain_kid(a, b):
    """The unbiased estimate with one kernel at a time."""

    def kernel(x, y):
        return (sum(p * q for p, q in zip(x, y, strict=True)) / len(x) + 1) ** 3

    within = [sum(kernel(x[i], x[j]) for i in range(len(x)) for j in range(len(x)) if i != j) / len(x) / (len(x) - 1) for x in (a, b)]
    return sum(within) - 2 * sum(kernel(x, y) for x in a for y in b) / len(a) / len(b)


def test_kid_is_the_plain_double_loop():
    a, b = drawn(12, 5, seed=1), drawn(12, 5, seed=2) * 1.2
    found = distances.kid(a, b, subsets=2, size=12)
    assert found.value == pytest.approx(plain_kid(a.tolist(), b.tolist()), rel=1e-10)


def test_kid_is_a_mean_over_subsets_of_its_own_seed():
    a, b = drawn(40, 5, seed=1), drawn(30, 5, seed=2)
    random = np.random.default_rng(3)
    picked = [[rows[random.choice(len(rows), 10, replace=False)] for rows in (a, b)] for _ in range(4)]
    np.random.seed(0)
    found = distances.kid(a, b, subsets=4, size=10, seed=3)
    assert found.value == pytest.approx(np.mean([plain_kid(x.tolist(), y.tolist()) for x, y in picked]), rel=1e-10)
    np.random.seed(1)
    assert distances.kid(a, b, subsets=4, size=10, seed=3) == found != distances.kid(a, b, subsets=4, size=10, seed=4)


def test_kid_is_unbiased_and_its_standard_error_the_spread_over_repeated_draws():
    def found(shift, seed):
        random = np.random.default_rng(seed)
        return distances.kid(random.normal(size=(200, 8)) + shift, random.normal(size=(300, 8)), subsets=20, size=100)

    apart, same = ([found(shift, seed) for seed in range(150)] for shift in (0.3, 0.0))
    spread = np.std([one.value for one in apart])
    assert np.mean([one.standard_error for one in apart]) == pytest.approx(spread, rel=0.25)
    values = np.array([one.value for one in same])
    assert abs(values.mean()) < 3 * values.std() / 150**0.5 and (values < 0).any()
    assert np.mean([one.standard_error for one in same]) > values.std()


def test_kid_refuses_more_pictures_than_there_are_and_subsets_that_tell_nothing():
    with pytest.raises(ConfigError, match="reference features are of 20 pictures where 30 are needed"):
        distances.kid(drawn(40, 4, seed=1), drawn(20, 4, seed=2), size=30)
    for wrong in ({"size": 1}, {"size": 5, "subsets": 1}):
        with pytest.raises(ConfigError, match="tell no distance"):
            distances.kid(drawn(40, 4, seed=1), drawn(20, 4, seed=2), **wrong)


@pytest.mark.parametrize(("sigma", "scale"), [(10.0, 1000.0), (0.5, 1.0)])
def test_cmmd_is_the_plain_formula_whatever_the_tile(sigma, scale):
    a, b = drawn(50, 8, seed=1) - 3, drawn(37, 8, seed=2) - 2.5
    x, y = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (a, b))

    def mean(u, v):
        return np.exp(-((u[:, None] - v) ** 2).sum(-1) / (2 * sigma**2)).mean()

    plain = scale * (mean(x, x) + mean(y, y) - 2 * mean(x, y))
    how = {} if sigma == 10 else {"sigma": sigma, "scale": scale}
    for tile in (7, 16, 1024):
        assert distances.cmmd(a, b, **how, tile=tile) == pytest.approx(plain, rel=1e-9)
        assert distances.cmmd(5 * a, b.astype(np.float32), **how, tile=tile) == pytest.approx(plain, rel=1e-5)
    for seed in range(20):
        rows = drawn(50, 8, seed=seed)
        assert 0 <= distances.cmmd(rows, rows[::-1].copy(), tile=7) < 1e-10


def test_cmmd_refuses_an_embedding_without_length():
    rows = drawn(5, 4, seed=1)
    with pytest.raises(ConfigError, match="length 0"):
        distances.cmmd(rows, rows * (np.arange(5) > 0)[:, None])


# Precision and recall


def plain_share(points, centres, k):
    between = np.linalg.norm(points[:, None] - centres, axis=-1)
    reach = np.sort(np.linalg.norm(centres[:, None] - centres, axis=-1), axis=1)[:, k]
    return (between <= reach).any(1).mean()


@pytest.mark.parametrize(("k", "tile"), itertools.product([1, 3], [7, 16, 1024]))
def test_precision_and_recall_are_those_of_brute_force(k, tile):
    a, b = drawn(60, 3, seed=1), drawn(45, 3, seed=2) + 1
    found = distances.precision_recall(a, b, k=k, tile=tile)
    assert found == pytest.approx((plain_share(a, b, k), plain_share(b, a, k)))
    assert 0.1 < found.recall < 0.9 and found.precision != found.recall


def test_precision_and_recall_take_the_third_neighbour():
    a, b = drawn(60, 3, seed=1), drawn(45, 3, seed=2) + 1
    assert distances.precision_recall(a, b) == distances.precision_recall(a, b, k=3) != distances.precision_recall(a, b, k=1)


def test_repeated_pictures_lie_in_balls_of_no_size():
    rows = np.repeat(np.random.default_rng(1).normal(size=(30, 64)) + 100, 4, axis=0)
    mixed = rows[np.random.default_rng(2).permutation(120)]
    for tile in (7, 50, 1024):
        assert distances.precision_recall(rows, mixed, tile=tile) == (1, 1)


def test_precision_refuses_too_few_pictures_and_no_neighbour():
    with pytest.raises(ConfigError, match="features are of 3 pictures where 4 are needed"):
        distances.precision_recall(np.eye(3), np.ones((9, 3)))
    with pytest.raises(ConfigError, match="k = 0"):
        distances.precision_recall(np.eye(3), np.eye(3), k=0)


@pytest.mark.parametrize("metric", [lambda a, b: distances.kid(a, b, size=2), distances.cmmd, distances.precision_recall])
def test_every_metric_of_two_sets_refuses_other_widths_and_nan(metric):
    with pytest.raises(ConfigError, match=r"width 4 .* width 6"):
        metric(np.ones((5, 4)), np.ones((5, 6)))
    with pytest.raises(ConfigError, match="reference features are not finite"):
        metric(np.ones((5, 4)), np.full((5, 4), np.nan))


# Endlessly many pictures


def test_fid_infinity_takes_the_bias_of_few_pictures_away():
    reference = Reference(np.zeros(16), np.eye(16))
    found = [distances.fid_infinity(np.random.default_rng(seed).normal(size=(600, 16)) * 1.2, reference) for seed in range(20)]
    true, biased = 16 * 0.2**2, np.mean([one.distances[-1] for one in found])
    assert biased > 1.15 * true
    assert np.mean([one.value for one in found]) == pytest.approx(true, rel=0.05)


def test_fid_infinity_has_points_evenly_in_one_over_n_and_repeats():
    rows, reference = drawn(1000, 6, seed=1), Reference.of(Statistics.of(drawn(900, 6, seed=2)))
    found = distances.fid_infinity(rows, reference)
    assert len(found.counts) == len(found.distances) == 15 and found.counts[0] == 100 and found.counts[-1] == 1000
    np.testing.assert_allclose(np.diff(1 / np.array(found.counts)), np.full(14, -0.009 / 14), rtol=0.1)
    assert found.distances[-1] == pytest.approx(frechet_distance(Statistics.of(rows), reference), rel=1e-12)
    assert found == distances.fid_infinity(rows, reference) != distances.fid_infinity(rows, reference, seed=1)
    assert distances.fid_infinity(rows[:100], reference).counts[0] == 10 and distances.fid_infinity(rows[:40], reference).counts[0] == 7
    assert distances.fid_infinity(rows[:10], reference).counts[0] == 5


def test_the_line_is_that_of_least_squares_with_the_error_of_its_intercept():
    rows, reference = drawn(400, 6, seed=1), Reference.of(Statistics.of(drawn(900, 6, seed=2)))
    found = distances.fid_infinity(rows, reference, points=8, smallest=50)
    (slope, value), errors = np.polyfit(1 / np.array(found.counts), found.distances, 1, cov=True)
    assert (found.value, found.slope) == pytest.approx((value, slope), rel=1e-8)
    assert found.standard_error == pytest.approx(errors[1, 1] ** 0.5, rel=1e-8)


@pytest.mark.parametrize("wrong", [{"points": 2}, {"smallest": 40}, {"smallest": 1}])
def test_points_that_make_no_line_are_refused(wrong):
    with pytest.raises(ConfigError, match="make no line"):
        distances.fid_infinity(drawn(40, 4, seed=1), Reference(np.zeros(4), np.eye(4)), **wrong)


# What a reader has to know


def test_good_features_need_no_warning():
    assert distances.warnings_of(drawn(40, 8, seed=1)) == []


def test_each_matter_is_told_in_a_sentence_of_its_own():
    rows = drawn(40, 8, seed=1)
    broken, repeated, dead, made = (rows.copy() for _ in range(4))
    broken[3, 2], broken[5] = np.nan, np.inf
    rows[1, 3], repeated[1, 3] = 0.0, -0.0
    repeated[[7, 8, 30]] = rows[1]
    dead[:, [2, 4]] = 0.3
    made[:, 5] = made[:, 1] - 2 * made[:, 2]
    expected = {
        "2 of 40 fakes have features that are not finite": broken,
        "8 fakes are not more than their 8 features": rows[:8],
        "3 of 40 fakes repeat another one exactly": repeated,
        "2 of 8 features are the same for all fakes": dead,
        "these fakes vary in 7 directions where 8 are possible": made,
    }
    for said, features in expected.items():
        (found,) = distances.warnings_of(features, what="fakes")
        assert said in found and found.endswith(".")
    both = dead.copy()
    both[[7, 8]] = dead[1]
    assert len(distances.warnings_of(both)) == 2
    assert len(distances.warnings_of(rows[np.arange(40) % 5])) == 1  # a small rank follows from 35 that repeat


def test_warnings_are_given_for_hardly_any_pictures_too():
    for count, sentences in ((0, 1), (1, 1), (2, 1)):
        assert len(distances.warnings_of(drawn(2, 8, seed=1)[:count])) == sentences
    with pytest.raises(ConfigError, match="give a matrix"):
        distances.warnings_of(np.ones(4))
