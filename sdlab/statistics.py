"""Statistics of features that merge and are kept in files, and the Frechet distance of two sets with its uncertainty."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sdlab.config import ConfigError

BLOCK = 4096
"""Rows that are turned to float64 and summed at a time, which bounds memory; whole sets are merged from blocks of this size."""
EPS = float(np.finfo(np.float64).eps)


def checked(features: np.ndarray, *, name: str = "features", least: int = 0) -> np.ndarray:
    """`features` (n, D) as they are, once it is sure that a metric can use them.

    Args:
        features: of any real dtype.
        name: what the messages call them.
        least: how many rows there must be.

    Raises:
        ConfigError: no matrix, too few rows, or a number that is not finite.
    """
    if features.ndim != 2 or features.dtype.kind not in "fiu":
        raise ConfigError(f"{name} are {features.dtype} {features.shape}; give a matrix of real numbers, (pictures, width)")
    if len(features) < least:
        raise ConfigError(f"{name} are of {len(features)} pictures where {least} are needed; use more (num_images)")
    broken = np.flatnonzero(~np.isfinite(features).all(1))
    if len(broken):
        raise ConfigError(f"{name} are not finite for {len(broken)} of {len(features)} pictures, first for {broken[0]}; leave those out")
    return features


@dataclass(frozen=True, eq=False)
class Statistics:
    """Float64 sums over a set of features; two sets are merged with `+`.

    The products are summed about the mean and merged with Chan's formula (Chan et al. 1983): with a mean of 100 and a spread of 0.01 plain
    sums of products lose 1.4e-6 of a covariance, these 5e-16. Shards merged in any order or grouping agree to rounding, and in the same
    order to the last bit.
    """

    n: int
    total: np.ndarray
    """Sum of the features, (D,)."""
    scatter: np.ndarray
    """Sum of outer products of the features less their mean, (D, D)."""

    @classmethod
    def empty(cls, width: int) -> Statistics:
        """Statistics of no features of `width`, which a sum may start from."""
        return cls(0, np.zeros(width), np.zeros((width, width)))

    @classmethod
    def of(cls, features: np.ndarray, *, name: str = "features") -> Statistics:
        """Statistics of features (n, D); `name` is what messages call them.

        Raises:
            ConfigError: no matrix, or a number that is not finite.
        """
        merged = cls.empty(checked(features, name=name).shape[1])
        for start in range(0, len(features), BLOCK):
            rows = features[start : start + BLOCK].astype(np.float64)
            total = rows.sum(0)
            rows -= total / len(rows)
            merged += cls(len(rows), total, rows.T @ rows)
        return merged

    def __add__(self, other: Statistics) -> Statistics:
        if not isinstance(other, Statistics):
            raise ConfigError(f"a {type(other).__name__} cannot be merged, only compared with; merge what Statistics.save wrote")
        if self.width != other.width:
            raise ConfigError(f"features of width {self.width} and {other.width} cannot be merged; take both from one extractor")
        if not self.n or not other.n:
            return self if self.n else other
        n = self.n + other.n
        apart = (other.mean - self.mean) * np.sqrt(self.n * other.n / n)
        return Statistics(n, self.total + other.total, self.scatter + other.scatter + np.outer(apart, apart))

    @property
    def width(self) -> int:
        """Numbers a feature."""
        return len(self.total)

    @cached_property
    def mean(self) -> np.ndarray:
        """(D,); refused where there are no features."""
        if not self.n:
            raise ConfigError("a mean wants at least 1 picture and got 0; use more (num_images)")
        return self.total / self.n

    @cached_property
    def covariance(self) -> np.ndarray:
        """Unbiased, (D, D).

        Raises:
            ConfigError: fewer than two features.
        """
        if self.n < 2:
            raise ConfigError(f"a covariance wants at least 2 pictures and got {self.n}; use more (num_images)")
        return self.scatter / (self.n - 1)

    def save(self, path: str | Path, *, extractor: str) -> str:
        """Write an npz of n, total, scatter, extractor and digest that is whole or not there at all, and return the digest.

        Args:
            path: a file that is replaced where it exists.
            extractor: what made the features of which pixels, a JSON string.
        """
        digest, path = _digest(self, extractor), Path(path)
        scratch = path.with_name(f".{os.getpid()}-{path.name}")
        try:
            with scratch.open("wb") as stream:
                np.savez(stream, n=self.n, total=self.total, scatter=self.scatter, extractor=extractor, digest=digest)
            os.replace(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)
        return digest


class Stored(NamedTuple):
    """What a file of statistics holds."""

    statistics: Statistics
    extractor: str
    """What made the features, as it was given."""
    digest: str
    """SHA-256 of the rest of the content."""


def _digest(statistics: Statistics, extractor: str) -> str:
    found = hashlib.sha256(f"{statistics.n} {statistics.width} {extractor}".encode())
    for array in (statistics.total, statistics.scatter):
        found.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
    return found.hexdigest()


def _read(path: str | Path, names: tuple[str, ...]) -> list[np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as kept:
            missing = [name for name in names if name not in kept.files]
            arrays = [] if missing else [kept[name] for name in names]
    except (OSError, ValueError, EOFError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as statistics, it is missing, cut off or damaged ({error}); make it again") from None
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; statistics are an npz with {', '.join(names)}: make it again")
    return arrays


def load(path: str | Path, *, width: int | None = None, extractor: str | None = None, digest: str | None = None) -> Stored:
    """Statistics that `Statistics.save` wrote.

    Args:
        path: the npz.
        width: that they must have; None for any.
        extractor: that must have made them; None for any.
        digest: that they must have; None for any that fits their content.

    Raises:
        ConfigError: damaged, or not what is wanted.
    """
    n, total, scatter, made_by, kept = _read(path, ("n", "total", "scatter", "extractor", "digest"))
    if n.shape != () or n.dtype.kind != "i" or n < 0 or total.ndim != 1 or scatter.shape != (len(total), len(total)):
        raise ConfigError(f"{path} holds n {n.shape}, total {total.shape}, scatter {scatter.shape}; make it again with Statistics.save")
    stored = Stored(Statistics(int(n), total, scatter), str(made_by), str(kept))
    if _digest(stored.statistics, stored.extractor) != stored.digest:
        raise ConfigError(f"{path} is damaged: its content has not the digest {stored.digest} that it was written with; make it again")
    found = {"width": stored.statistics.width, "extractor": stored.extractor, "digest": stored.digest}
    for name, wanted in {"width": width, "extractor": extractor, "digest": digest}.items():
        if wanted is not None and found[name] != wanted:
            raise ConfigError(f"{path} has the {name} {found[name]}, not {wanted}; use one that was made for these features")
    return stored


@dataclass(frozen=True, eq=False)
class Reference:
    """A Gaussian that many samples are compared with: its covariance is factored once."""

    mean: np.ndarray
    """(D,)."""
    covariance: np.ndarray
    """(D, D)."""
    n: int | None = None
    """Pictures behind it, None where nobody knows."""

    @classmethod
    def of(cls, statistics: Statistics) -> Reference:
        return cls(statistics.mean, statistics.covariance, statistics.n)

    @cached_property
    def root(self) -> np.ndarray:
        """R (D, rank) with R R' = covariance: its Cholesky factor, or scaled eigenvectors where it has not full rank."""
        width = len(self.mean)
        with suppress(np.linalg.LinAlgError):
            factor = np.linalg.cholesky(self.covariance)
            enough = self.n is None or self.n > width
            if enough and np.diag(factor).min() ** 2 > width * EPS * np.diag(self.covariance).max():
                return factor
        values, vectors = np.linalg.eigh(self.covariance)
        kept = values > width * EPS * values[-1]
        return vectors[:, kept] * np.sqrt(values[kept])

    @property
    def rank(self) -> int:
        """Directions in which it varies, at most D and n - 1."""
        return self.root.shape[1]


def load_foreign(path: str | Path, *, n: int | None = None) -> Reference:
    """A reference from an npz with `mu` and `sigma`, as pytorch-fid and MLPerf write; it says not of how many pictures.

    Args:
        path: the npz.
        n: its pictures, at least 2, where you know.

    Raises:
        ConfigError: damaged, or no mean and covariance, or too few pictures.
    """
    if n is not None and n < 2:
        raise ConfigError(f"a reference of n = {n} pictures has no covariance; give at least 2, or None where you do not know")
    mean, covariance = _read(path, ("mu", "sigma"))
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)) or {mean.dtype.kind, covariance.dtype.kind} != {"f"}:
        raise ConfigError(f"{path} holds mu {mean.shape} and sigma {covariance.shape}; give a mean (D,) and a covariance (D, D)")
    mean, covariance = mean.astype(np.float64), covariance.astype(np.float64)
    finite = np.isfinite(mean).all() and np.isfinite(covariance).all()
    if not finite or np.diag(covariance).min() < 0 or abs(covariance - covariance.T).max() > 1e-6 * abs(covariance).max():
        raise ConfigError(f"{path} holds no mean and covariance: both finite, sigma symmetric with variances from 0; make it again")
    return Reference(mean, (covariance + covariance.T) / 2, n)


def _congruence(root: np.ndarray, covariance: np.ndarray, *, block: int = 256) -> np.ndarray:
    """The lower triangle of R' S R, in blocks that skip the zeros of a Cholesky factor: a third of the plain product's work."""
    rank = root.shape[1]
    triangular, found = rank == len(root) and not np.triu(root, 1).any(), np.zeros((rank, rank))
    for start in range(0, rank, block):
        columns, first = slice(start, start + block), start if triangular else 0
        found[start:, columns] = root[first:, start:].T @ (covariance[first:, first:] @ root[first:, columns])
    return found


def _cross(sample: Statistics, reference: Reference) -> float:
    """tr (S1 S2)^(1/2), the sum of square roots of the eigenvalues of R' S1 R that rank allows, where R R' = S2.

    An eigenvalue that should be 0 is some 1e-16 of the largest, its root 1e-8: those beyond the rank are left out. Where repeated pictures
    or dead features make the rank smaller than n tells, singular values of the product of both roots are summed: slower, and right.
    """
    kept = min(sample.n - 1, reference.rank)
    values = np.linalg.eigvalsh(_congruence(reference.root, sample.covariance))[reference.rank - kept :]
    if kept and values[0] <= sample.width * EPS * values[-1]:
        own = Reference.of(sample)
        if min(own.rank, reference.rank) < sample.width:
            return float(np.linalg.svd(reference.root.T @ own.root, compute_uv=False).sum())
    return float(np.sqrt(values.clip(min=0)).sum())


def frechet_distance(sample: Statistics, reference: Reference) -> float:
    """Squared Frechet distance of two Gaussians, |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)) (Dowson & Landau 1982), never below 0.

    Args:
        sample: of one set of features.
        reference: of the other; factored once, however many samples are compared with it.

    Raises:
        ConfigError: a set has fewer than two features, or their widths differ.
    """
    _same_width(sample.width, reference)
    shift = sample.mean - reference.mean
    traces = np.trace(sample.covariance) + np.trace(reference.covariance)
    return max(0.0, float(shift @ shift + traces - 2 * _cross(sample, reference)))


def _same_width(width: int, reference: Reference) -> None:
    if width != len(reference.mean):
        raise ConfigError(
            f"features of width {width} cannot be compared with a reference of width {len(reference.mean)}; take both from one extractor"
        )


def frechet_influence(features: np.ndarray, reference: Reference) -> np.ndarray:
    """By how much each picture moves the Frechet distance, to first order: float64 (n,) with mean 0.

    This is the derivative of the distance in the weight of each picture. Its standard deviation over sqrt(n) is the standard error, and
    resampling it gives a bootstrap interval. Resampling the pictures themselves would not: sets with repeated pictures have poorer
    covariances, which lifts every resampled distance and overstates the error twofold where n is near the width of the features; there
    this one is still cautious, by up to 60 %. Influences of two sets drawn for the same prompts give the error of their difference.

    Args:
        features: (n, D), n at least 2.
        reference: what they are compared with.

    Raises:
        ConfigError: unusable features, or of another width.
    """
    rows = checked(features, least=2).astype(np.float64)
    _same_width(rows.shape[1], reference)
    mean = rows.mean(0)
    rows -= mean
    projected = rows @ reference.root
    values, vectors = np.linalg.eigh(projected.T @ projected / (len(rows) - 1))
    kept = values > len(mean) * EPS * max(values.max(initial=0), np.finfo(np.float64).tiny)
    cross = ((projected @ vectors[:, kept]) ** 2 / np.sqrt(values[kept])).sum(1)
    influence = 2 * rows @ (mean - reference.mean) + (rows**2).sum(1) - cross
    return influence - influence.mean()


def bootstrap(influence: np.ndarray, *, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """2.5 % and 97.5 % points of the mean of `influence` (n,) over resampled pictures."""
    n = len(influence)
    picks = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    low, high = np.percentile(picks @ influence / n, [2.5, 97.5])
    return float(low), float(high)


def difference(influence_a: np.ndarray, influence_b: np.ndarray) -> float:
    """Standard error of the difference of two distances whose pictures were drawn in pairs, for the same prompts and seeds.

    Args:
        influence_a: of one set, (n,), n at least 2.
        influence_b: of the other, in the same order.

    Raises:
        ConfigError: they are no pairs.
    """
    if influence_a.shape != influence_b.shape or influence_a.ndim != 1 or len(influence_a) < 2:
        raise ConfigError(f"influences {influence_a.shape} and {influence_b.shape} are no pairs; give two of one length, at least 2")
    return standard_error(influence_a - influence_b)


def standard_error(values: np.ndarray) -> float:
    """Of the mean of values (n,), n at least 2."""
    return float(values.std(ddof=1, dtype=np.float64) / len(values) ** 0.5)
