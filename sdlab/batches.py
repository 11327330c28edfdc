"""From the cache to the tensors of a training step: which samples, which noise, which timesteps, which captions dropped.

Everything is a function of (seed, step, slot) alone, so a run depends neither on the micro-batch size nor on having been stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sdlab import diffusion
from sdlab.cache import Cache
from sdlab.config import Networks, Stage


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `noisy_latents` and `target` (B, C, h, w), `timesteps` int64 (B,), `prompt_embeds` (B, L, D)."""

    noisy_latents: Tensor
    timesteps: Tensor
    prompt_embeds: Tensor
    target: Tensor


class Batches:
    """The endless stream of training batches of one run.

    Args:
        cache: moments and text states.
        recipe: gives the batch size and `caption_drop_prob`.
        networks: give the noise schedule and what the UNet predicts.
        scaling_factor: turns latents into scaled ones.
        micro_batch_size: samples a forward; divides the global batch size.
        seed: of order, noise, timesteps and drops.
    """

    def __init__(self, cache: Cache, recipe: Stage, networks: Networks, *, scaling_factor: float, micro_batch_size: int, seed: int) -> None:
        self.cache, self.recipe, self.networks = cache, recipe, networks
        self.scaling_factor, self.micro_batch_size, self.seed = scaling_factor, micro_batch_size, seed
        self.alphas = diffusion.alphas_cumprod(networks.noise_schedule)

    def sample_indices(self, step: int) -> list[int]:
        """Rows of the cache that step `step` (from 1) trains on: slot j takes the k-th of perm(epoch 0), perm(epoch 1), ..."""
        first = (step - 1) * self.recipe.global_batch_size
        places = (divmod(k, len(self.cache)) for k in range(first, first + self.recipe.global_batch_size))
        return [int(_permutation(self.seed, epoch, len(self.cache))[place]) for epoch, place in places]

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of optimizer step `step` (from 1), on the CPU."""
        rows = self.cache.rows(self.sample_indices(step))
        mean, logvar = rows["moments"].chunk(2, dim=1)
        posterior_noise, noise, timesteps, dropped = self._draw(step, tuple(mean.shape[1:]))
        latents = (mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * posterior_noise) * self.scaling_factor
        prompt_embeds = torch.where(dropped[:, None, None], self.cache.null_embeds, rows["prompt_embeds"])
        noisy_latents = diffusion.add_noise(latents, noise, timesteps, alphas=self.alphas)
        target = diffusion.training_target(latents, noise, timesteps, alphas=self.alphas, prediction_type=self.networks.prediction_type)
        parts = (tensor.split(self.micro_batch_size) for tensor in (noisy_latents, timesteps, prompt_embeds, target))
        return [Batch(*part) for part in zip(*parts, strict=True)]

    def _draw(self, step: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = self.recipe.global_batch_size
        noises, timesteps, dropped = np.empty((2, count, *shape), np.float32), np.empty(count, np.int64), np.empty(count, bool)
        for slot in range(count):
            random = slot_generator(self.seed, step, slot)
            noises[:, slot] = random.standard_normal((2, *shape), dtype=np.float32)
            timesteps[slot] = random.integers(len(self.alphas))
            dropped[slot] = random.random() < self.recipe.caption_drop_prob
        posterior_noise, noise = torch.from_numpy(noises)
        return posterior_noise, noise, torch.from_numpy(timesteps), torch.from_numpy(dropped)

    def steps(self, first: int, last: int, *, prefetch: bool) -> Iterator[list[Batch]]:
        """The micro-batches of steps `first` to `last`.

        Args:
            first: the first step, from 1.
            last: the last step.
            prefetch: make each step in a thread while the one before is trained on. Not for a CPU: two threads with OpenMP teams
                of their own make libgomp put all of them to sleep between regions, which costs a quarter of the speed.
        """
        if not prefetch:
            yield from map(self.step, range(first, last + 1))
            return
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as pool:
            ahead = [pool.submit(self.step, step) for step in range(first, min(first, last) + 1)]
            for step in range(first, last + 1):
                ready = ahead.pop().result()
                ahead += [pool.submit(self.step, step + 1)] if step < last else []
                yield ready


def slot_generator(seed: int, step: int, slot: int) -> np.random.Generator:
    """The random stream of slot `slot` of step `step`: a counter-based generator, so that no two slots share numbers."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, slot, step]))


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)
