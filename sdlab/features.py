"""Features that metrics compare: the built-in judge's, their mergeable statistics, and the Frechet distance of two sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPModel, CLIPTokenizer

from sdlab.config import ConfigError
from sdlab.files import hash_weights
from sdlab.parts import to_pixel_values
from sdlab.places import TINY_DIR

BATCH_SIZE = 64
"""Rows of every forward of the judge; a short last batch is filled and cut, so that a feature does not depend on its neighbours."""


@dataclass(frozen=True)
class Judge:
    """A CLIP that judges pictures, in float32.

    Both metrics use its *normalised* embeddings (length 1): a CLIP score is their dot product, and the Frechet distance of the built-in
    family is defined on them too, which keeps it between 0 and 4, and at a few hundredths for a good model.
    """

    model: Any
    """transformers' `CLIPModel`."""
    tokenizer: CLIPTokenizer
    name: str
    weights_hash: str

    @property
    def side(self) -> int:
        """Pixels a side of the pictures that it takes."""
        return int(self.model.config.vision_config.image_size)

    @property
    def width(self) -> int:
        """Numbers a feature."""
        return int(self.model.config.projection_dim)

    def pixel_path(self, resolution: int) -> str:
        """In words, how pictures of `resolution` pixels a side become its input."""
        resized = "" if resolution == self.side else f", torch bicubic antialiased to {self.side}"
        return f"uint8 RGB {resolution} px{resized}, x / 127.5 - 1"

    @torch.no_grad()
    def image_features(self, images: np.ndarray) -> np.ndarray:
        """Normalised features, float32 (B, width), of `images`, uint8 (B, 3, H, W)."""

        def forward(batch: Tensor) -> Tensor:
            pixels = batch.float()
            if pixels.shape[-2:] != (self.side, self.side):
                pixels = F.interpolate(pixels, (self.side, self.side), mode="bicubic", antialias=True).clamp(0, 255)
            return self.model.visual_projection(self.model.vision_model(pixel_values=to_pixel_values(pixels)).pooler_output)

        return self._in_batches(forward, torch.from_numpy(images))

    @torch.no_grad()
    def text_features(self, captions: Sequence[str]) -> np.ndarray:
        """Normalised features, float32 (B, width), of `captions`, which are cut to the judge's context."""
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        return self._in_batches(lambda batch: self.model.text_projection(self.model.text_model(input_ids=batch).pooler_output), tokens)

    def _in_batches(self, forward: Callable[[Tensor], Tensor], rows: Tensor) -> np.ndarray:
        done = [np.empty((0, self.width), dtype=np.float32)]
        for batch in rows.split(BATCH_SIZE):
            filled = torch.cat([batch, batch[:1].expand(BATCH_SIZE - len(batch), *batch.shape[1:])])
            done.append(F.normalize(forward(filled.to(self.model.device)), dim=-1)[: len(batch)].cpu().numpy())
        return np.concatenate(done)


def load_judge(device: torch.device | str = "cpu") -> Judge:
    """The built-in judge, a CLIP trained from another seed than the one that conditions the built-in model."""
    folder = TINY_DIR / "judge"
    model: Any = CLIPModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = CLIPTokenizer.from_pretrained(TINY_DIR / "tokenizer", local_files_only=True)
    return Judge(model.eval().requires_grad_(False).to(device), tokenizer, "built-in judge", hash_weights(folder))


@dataclass(frozen=True)
class Statistics:
    """Float64 sums over a set of features; two sets are merged with `+`."""

    n: int
    total: np.ndarray
    """Sum of the features, (D,)."""
    outer: np.ndarray
    """Sum of their outer products, (D, D)."""

    @classmethod
    def of(cls, features: np.ndarray) -> Statistics:
        """Statistics of features (n, D)."""
        rows = features.astype(np.float64)
        return cls(len(rows), rows.sum(0), rows.T @ rows)

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(self.n + other.n, self.total + other.total, self.outer + other.outer)

    @cached_property
    def mean(self) -> np.ndarray:
        return self.total / self.n

    @cached_property
    def covariance(self) -> np.ndarray:
        """Unbiased, (D, D).

        Raises:
            ConfigError: fewer than two features.
        """
        if self.n < 2:
            raise ConfigError(f"a covariance wants at least 2 pictures and got {self.n}; use more (num_images)")
        return (self.outer - self.n * np.outer(self.mean, self.mean)) / (self.n - 1)

    @cached_property
    def root(self) -> np.ndarray:
        """R (D, D) with R R' = covariance, factored once; eigenvalues that rounding made negative count as 0."""
        values, vectors = np.linalg.eigh(self.covariance)
        return vectors * np.sqrt(values.clip(min=0))


def frechet_distance(sample: Statistics, reference: Statistics) -> float:
    """Squared Frechet distance of two Gaussians, |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)) (Dowson & Landau 1982).

    With R R' = S2 the last trace is the sum of the square roots of the eigenvalues of R' S1 R, which is symmetric. Never below 0.

    Args:
        sample: of one set of features.
        reference: of the other; factored once, however many samples are compared with it.

    Raises:
        ConfigError: a set has fewer than two features, or their widths differ.
    """
    if sample.total.shape != reference.total.shape:
        raise ConfigError(f"features of width {len(sample.total)} cannot be compared with a reference of width {len(reference.total)}")
    shift = sample.mean - reference.mean
    eigenvalues = np.linalg.eigvalsh(reference.root.T @ sample.covariance @ reference.root)
    cross = np.sqrt(eigenvalues.clip(min=0)).sum()
    return max(0.0, float(shift @ shift + np.trace(sample.covariance) + np.trace(reference.covariance) - 2 * cross))


def frechet_influence(features: np.ndarray, reference: Statistics) -> np.ndarray:
    """By how much each picture moves the Frechet distance, to first order: float64 (n,) with mean 0.

    This is the derivative of the distance in the weight of each picture. Its standard deviation over sqrt(n) is the standard error, and
    resampling it gives a bootstrap interval. Resampling the pictures themselves would not: sets with repeated pictures have poorer
    covariances, which lifts every resampled distance and overstates the error twofold where n is near the width of the features; there
    this one is still cautious, by up to 60 %. Influences of two sets drawn for the same prompts give the error of their difference.

    Args:
        features: (n, D), n at least 2.
        reference: what they are compared with.
    """
    sample = Statistics.of(features)
    centred = features.astype(np.float64) - sample.mean
    projected = centred @ reference.root
    values, vectors = np.linalg.eigh(projected.T @ projected / (sample.n - 1))
    kept = values > 1e-10 * max(values[-1], 1e-300)
    cross = ((projected @ vectors[:, kept]) ** 2 / np.sqrt(values[kept])).sum(1)
    influence = 2 * centred @ (sample.mean - reference.mean) + (centred**2).sum(1) - cross
    return influence - influence.mean()


def bootstrap(influence: np.ndarray, *, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """2.5 % and 97.5 % points of the mean of `influence` (n,) over resampled pictures."""
    n = len(influence)
    picks = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    low, high = np.percentile(picks @ influence / n, [2.5, 97.5])
    return float(low), float(high)
