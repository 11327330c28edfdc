"""Metrics of features beside the Frechet distance, in bounded memory, and what a reader has to know before any of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sdlab.config import ConfigError
from sdlab.statistics import EPS, Reference, Statistics, checked, frechet_distance

TILE = 1024
"""Rows a side of the tiles in which kernels and distances of all pairs are computed: 8 MB each, however many pictures there are."""


class Estimate(NamedTuple):
    """A number and how well it is known."""

    value: float
    standard_error: float


class Extrapolation(NamedTuple):
    """A straight line of distances over 1 / N, and its value at no 1 / N at all."""

    value: float
    """The intercept; noise may take it a little below 0."""
    standard_error: float
    """Of the intercept, from how far the points lie off the line."""
    slope: float
    counts: tuple[int, ...]
    """N of each point."""
    distances: tuple[float, ...]


class PrecisionRecall(NamedTuple):
    """Shares from 0 to 1 (Kynkaanniemi et al. 2019, eq. 2)."""

    precision: float
    """Of the sample's pictures that lie among the reference's."""
    recall: float
    """Of the reference's pictures that lie among the sample's."""


def _pair(features: np.ndarray, reference: np.ndarray, least: int) -> None:
    checked(features, name="features", least=least)
    checked(reference, name="reference features", least=least)
    if features.shape[1] != reference.shape[1]:
        raise ConfigError(
            f"features of width {features.shape[1]} cannot be compared with a reference of width {reference.shape[1]}; "
            "take both from one extractor"
        )


def _tiles(rows: np.ndarray, tile: int) -> Iterator[np.ndarray]:
    return (rows[start : start + tile].astype(np.float64) for start in range(0, len(rows), tile))


def kid(features: np.ndarray, reference: np.ndarray, *, subsets: int = 100, size: int = 1000, seed: int = 0) -> Estimate:
    """Kernel distance: unbiased MMD^2 with the kernel (x . y / D + 1)^3, a mean over random subsets (Binkowski et al. 2018).

    Its standard error counts the pictures of both sets as drawn anew, by the variance of what each adds (Sutherland et al. 2017), and the
    draws of subsets. Where both sets come from one distribution it is cautious.

    Args:
        features: (n, D).
        reference: (m, D).
        subsets: how many; more make the draws matter less.
        size: pictures a subset and set, at least 2.
        seed: of the draws, and of nothing else.

    Raises:
        ConfigError: unusable features, or fewer than `size`.
    """
    if size < 2 or subsets < 2:
        raise ConfigError(f"{subsets} subsets of {size} pictures tell no distance; use at least 2 of 2")
    _pair(features, reference, size)
    random, values, variance = np.random.default_rng(seed), np.empty(subsets), 0.0
    for index in range(subsets):
        a, b = (rows[random.choice(len(rows), size, replace=False)].astype(np.float64) for rows in (features, reference))
        added = _added(a, b)
        values[index] = sum(one.mean() for one in added)
        variance += sum(4 * one.var(ddof=1) / len(rows) for one, rows in zip(added, (features, reference), strict=True)) / subsets
    return Estimate(float(values.mean()), float((variance + values.var(ddof=1) / subsets) ** 0.5))


def _added(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What each row adds to MMD^2, (size,) for either set: its mean kernel with the others of its set less that with the other set."""
    own_a, own_b, between = ((x @ y.T / a.shape[1] + 1) ** 3 for x, y in ((a, a), (b, b), (a, b)))
    others = len(a) - 1
    within_a, within_b = ((own.sum(1) - np.diag(own)) / others for own in (own_a, own_b))
    return within_a - between.mean(1), within_b - between.mean(0)


def cmmd(features: np.ndarray, reference: np.ndarray, *, sigma: float = 10.0, scale: float = 1000.0, tile: int = TILE) -> float:
    """Distance of CLIP embeddings: MMD^2 with a Gaussian kernel, biased so that it is never below 0 (Jayasumana et al. 2024).

    Args:
        features: (n, D), set to length 1 here.
        reference: (m, D), likewise.
        sigma: width of the kernel exp(-|x - y|^2 / (2 sigma^2)).
        scale: by which MMD^2 is multiplied.
        tile: pairs a side that are in memory at once.

    Raises:
        ConfigError: unusable features, or one of length 0.
    """
    _pair(features, reference, 1)
    within = _mean_kernel(features, features, sigma, tile) + _mean_kernel(reference, reference, sigma, tile)
    return max(0.0, scale * (within - 2 * _mean_kernel(features, reference, sigma, tile)))


def _mean_kernel(a: np.ndarray, b: np.ndarray, sigma: float, tile: int) -> float:
    """Mean of the kernel less 1 over all pairs of rows: near 1 as it is, it keeps more digits so; of one set with itself half the pairs."""
    found = 0.0
    for i, rows in enumerate(_tiles(a, tile)):
        left = _unit(rows)
        for j, others in enumerate(_tiles(b[: (i + 1) * tile] if a is b else b, tile)):
            total = np.expm1((left @ _unit(others).T - 1) / sigma**2).sum()
            found += total * (2 if a is b and j < i else 1)
    return float(found / (len(a) * len(b)))


def _unit(rows: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    if not lengths.all():
        raise ConfigError("an embedding has length 0, which cannot be set to length 1; leave its picture out")
    return rows / lengths


def precision_recall(features: np.ndarray, reference: np.ndarray, *, k: int = 3, tile: int = TILE) -> PrecisionRecall:
    """Improved precision and recall: shares of pictures within reach of the other set (Kynkaanniemi et al. 2019).

    A picture's reach is the distance to its `k`-th nearest neighbour in its own set. Depends on n; compare only equal ones.

    Args:
        features: (n, D), n above k.
        reference: (m, D), m above k.
        k: neighbours, at least 1.
        tile: pairs a side that are in memory at once.

    Raises:
        ConfigError: unusable features, or too few.
    """
    if k < 1:
        raise ConfigError(f"k = {k} is no count of neighbours; use at least 1")
    _pair(features, reference, k + 1)
    reaches = tuple(
        np.concatenate([_nearest(part, rows, k + 1, tile)[:, k] for part in _tiles(rows, tile)]) for rows in (features, reference)
    )
    inside = np.zeros(len(features), dtype=bool), np.zeros(len(reference), dtype=bool)
    for i, left in enumerate(_tiles(features, tile)):
        for j, right in enumerate(_tiles(reference, tile)):
            here, there = slice(i * tile, (i + 1) * tile), slice(j * tile, (j + 1) * tile)
            apart = _squared(left, right)
            inside[0][here] |= (apart <= reaches[1][there]).any(1)
            inside[1][there] |= (apart <= reaches[0][here, None]).any(0)
    return PrecisionRecall(float(inside[0].mean()), float(inside[1].mean()))


def _nearest(rows: np.ndarray, others: np.ndarray, count: int, tile: int) -> np.ndarray:
    """The smallest `count` squared distances to `others` in rising order, (rows, count)."""
    found = np.full((len(rows), count), np.inf)
    for part in _tiles(others, tile):
        found = np.sort(np.partition(np.concatenate([found, _squared(rows, part)], 1), count - 1)[:, :count])
    return found


def _squared(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances of all pairs of rows; what rounding leaves of equal rows counts as 0."""
    lengths = (a**2).sum(1)[:, None] + (b**2).sum(1)
    found = lengths - 2 * a @ b.T
    return np.where(found <= 4 * EPS * a.shape[1] ** 0.5 * lengths, 0, found)


def fid_infinity(
    features: np.ndarray, reference: Reference, *, points: int = 15, smallest: int | None = None, seed: int = 0
) -> Extrapolation:
    """The Frechet distance of endlessly many pictures, by a straight line over 1 / N through random subsets (Chong & Forsyth 2020).

    It is straight only where N is above the width. Subsets share pictures, so the standard error tells how straight the points lie, not
    how much other pictures would change it: for that see `frechet_influence`.

    Args:
        features: (n, D).
        reference: what they are compared with.
        points: subsets, evenly spaced in 1 / N up to all, at least 3.
        smallest: N of the first; None for n / 10, or D + 1 where that is more, but at most n / 2.
        seed: of the draws, and of nothing else.

    Raises:
        ConfigError: unusable features, or too few.
    """
    n, width = checked(features, least=4).shape
    smallest = max(2, min(n // 2, max(n // 10, width + 1))) if smallest is None else smallest
    if points < 3 or not 2 <= smallest < n:
        raise ConfigError(f"{points} points from {smallest} to {n} pictures make no line; use at least 3, from 2 or more to fewer than all")
    random = np.random.default_rng(seed)
    counts = np.rint(1 / np.linspace(1 / smallest, 1 / n, points)).astype(int)
    subsets = (features[random.choice(n, count, replace=False)] for count in counts)
    distances = np.array([frechet_distance(Statistics.of(subset), reference) for subset in subsets])
    return _line(1 / counts, distances, counts)


def _line(x: np.ndarray, y: np.ndarray, counts: np.ndarray) -> Extrapolation:
    """Least squares with the textbook's standard error of the intercept."""
    spread = ((x - x.mean()) ** 2).sum()
    slope = float(((x - x.mean()) * y).sum() / spread)
    value = float(y.mean() - slope * x.mean())
    residual = ((y - value - slope * x) ** 2).sum() / (len(x) - 2)
    error = float((residual * (1 / len(x) + x.mean() ** 2 / spread)) ** 0.5)
    return Extrapolation(value, error, slope, tuple(map(int, counts)), tuple(map(float, y)))


def warnings_of(features: np.ndarray, *, what: str = "pictures") -> list[str]:
    """What a reader has to know before a number about `features` (n, D): a sentence a matter, none where all is well.

    Args:
        features: of any real dtype; those that are not finite are told, and left out of what else is told.
        what: they are of, which opens the sentences.

    Raises:
        ConfigError: no matrix.
    """
    checked(features[:0], name=what)
    rows = features[np.isfinite(features).all(1)]
    n, width = rows.shape
    unique = len({row.tobytes() for row in rows + 0})
    found = []
    if n < len(features):
        found.append(f"{len(features) - n} of {len(features)} {what} have features that are not finite; leave them out.")
    if n <= width:
        found.append(f"{n} {what} are not more than their {width} features, so the Frechet distance is far too high; use more of them.")
    if unique < n:
        found.append(f"{n - unique} of {n} {what} repeat another one exactly; each counts, and every standard error is too small.")
    return found + _degenerate(rows, unique, what) if n > 1 else found


def _degenerate(rows: np.ndarray, unique: int, what: str) -> list[str]:
    width = rows.shape[1]
    constant = int((rows == rows[0]).all(0).sum())
    possible, rank = min(unique - 1, width - constant), Reference.of(Statistics.of(rows)).rank
    found = [f"{constant} of {width} features are the same for all {what}; look whether the extractor works."] if constant else []
    if rank < possible:
        found.append(f"The features of these {what} vary in {rank} directions where {possible} are possible; some are made of others.")
    return found
