"""From the cache to the tensors of a training step: which samples, which noise, which timesteps, which captions dropped.

Everything is a function of (seed, step, slot) alone, so a run depends neither on ranks nor on having been stopped; and, with
pictures of one shape, not on the micro-batch size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdlab import diffusion
from sdlab.cache import Cache
from sdlab.config import ConfigError, Networks, Stage, accumulation_steps
from sdlab.parts import TextStates

BLOCK_SHARDS = 16
"""Shards whose rows are shuffled together: an epoch reads so many at a time, in random order, and all rows of each once."""
HAND = 1 << 16
"""Micro-batches of all buckets that are shuffled together."""
VALIDATION_SEED = 2**63 + 1
"""Of the noise that validation adds: no run can have it."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `noisy_latents` and `target` (B, C, h, w), `timesteps` int64 (B,), and the text."""

    noisy_latents: Tensor
    timesteps: Tensor
    text: TextStates
    add_time_ids: Tensor | None
    """Original size, crop and target size, int64 (B, 6) in pixels, -1 where they were dropped; None for a UNet that takes none."""
    target: Tensor
    weights: Tensor
    """What each sample's squared error counts for, float32 (B,)."""
    dropped: Tensor
    """Whose caption gave way to the null condition for which of E text encoders, bool (B, E)."""
    indices: Tensor
    """Rows of the cache, int64 (B,)."""


class Batches:
    """The endless stream of training batches of one run, as one rank sees it.

    Args:
        cache: moments and text states.
        recipe: gives the batch size and `caption_drop_prob`.
        networks: give the noise schedule and what the UNet predicts.
        scaling_factor: turns latents into scaled ones.
        micro_batch_size: samples a forward; divides the global batch size.
        seed: of order, noise, timesteps and drops.
        rank: which share of each step this is.
        world_size: how many shares there are.
        encode_text: text states of token ids (B, E x L), for a cache without them.

    Raises:
        ConfigError: batch sizes that do not divide, or a cache without text states and no `encode_text`.
    """

    def __init__(
        self,
        cache: Cache,
        recipe: Stage,
        networks: Networks,
        *,
        scaling_factor: float,
        micro_batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        encode_text: Callable[[Tensor], TextStates] | None = None,
    ) -> None:
        if not cache.has_text_states and encode_text is None:
            raise ConfigError(f"data_dir {cache.folder} holds token ids alone (text_states=False): a text encoder is needed to train on it")
        count = accumulation_steps(recipe.global_batch_size, micro_batch_size, world_size=world_size)
        self.cache, self.recipe, self.networks = cache, recipe, networks
        self.scaling_factor, self.micro_batch_size, self.seed = scaling_factor, micro_batch_size, seed
        self.alphas = diffusion.alphas_cumprod(networks.noise_schedule)
        self.order = Order(cache, micro_batch_size, seed)
        self._mine = range(rank * count, (rank + 1) * count)
        self._encode_text = encode_text
        self._null = self._text(cache.null)

    def sample_indices(self, step: int) -> list[int]:
        """Rows of the cache that step `step` (from 1) trains on, over all ranks, by slot."""
        first = (step - 1) * self.recipe.global_batch_size
        return self.order.rows(first, first + self.recipe.global_batch_size)

    def step(self, step: int) -> list[Batch]:
        """This rank's micro-batches of optimizer step `step` (from 1), on the CPU."""
        indices = self.sample_indices(step)
        return [self._micro_batch(step, indices, number * self.micro_batch_size) for number in self._mine]

    def _micro_batch(self, step: int, indices: list[int], first: int) -> Batch:
        slots = range(first, first + self.micro_batch_size)
        generators = [slot_generator(self.seed, step, slot) for slot in slots]
        return self._batch(indices[slots.start : slots.stop], generators, _any_timestep)

    def validation(self, count: int) -> list[list[tuple[int, int]]]:
        """What the validation loss is measured on: places and rows, `count` evenly spread rows, in batches of one shape."""
        rows = np.linspace(0, len(self.cache) - 1, min(count, len(self.cache))).round().astype(int).tolist()
        together = [list(group) for _, group in itertools.groupby(enumerate(rows), key=lambda placed: self.cache.bucket(placed[1]))]
        size = self.micro_batch_size
        return [group[start : start + size] for group in together for start in range(0, len(group), size)]

    def validation_batch(self, placed: Sequence[tuple[int, int]]) -> Batch:
        """One of `validation`, whose noise and timesteps depend on the places alone; those of place p lie in the quarter p modulo 4."""
        places, rows = zip(*placed, strict=True)

        def timestep(random: np.random.Generator, number: int, below: int) -> int:
            quarter = places[number] % 4
            return int(random.integers(quarter * below // 4, (quarter + 1) * below // 4))

        return self._batch(rows, [slot_generator(VALIDATION_SEED, 0, place) for place in places], timestep)

    def _batch(self, indices: Sequence[int], generators: Sequence[np.random.Generator], timestep: DrawTimestep) -> Batch:
        rows = self.cache.rows(indices)
        mean, logvar = rows["moments"].chunk(2, dim=1)
        posterior_noise, noise, timesteps, dropped = self._draw(generators, timestep, tuple(mean.shape[1:]))
        captions, sizes = dropped.split([len(self.cache.text_widths), 3], dim=1)
        latents = (mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * posterior_noise) * self.scaling_factor
        about: dict[str, Any] = {"alphas": self.alphas, "prediction_type": self.networks.prediction_type}
        noisy_latents = diffusion.add_noise(latents, noise, timesteps, alphas=self.alphas)
        target = diffusion.training_target(latents, noise, timesteps, **about)
        weights = diffusion.loss_weights(timesteps, min_snr_gamma=self.recipe.min_snr_gamma, **about)
        text, add_time_ids = self._without(captions, self._text(rows)), self._add_time_ids(rows, sizes)
        return Batch(noisy_latents, timesteps, text, add_time_ids, target, weights, captions, torch.tensor(indices))

    def _text(self, rows: Mapping[str, Tensor]) -> TextStates:
        if "prompt_embeds" in rows:
            return TextStates(rows["prompt_embeds"], rows.get("pooled_prompt_embeds"))
        assert self._encode_text is not None
        return self._encode_text(rows["input_ids"]).to(torch.device("cpu"))

    def _without(self, dropped: Tensor, text: TextStates) -> TextStates:
        """The null condition in place of what was dropped (B, E); the pooled states belong to the last encoder."""
        widths = torch.tensor(self.cache.text_widths)
        embeds = torch.where(dropped.repeat_interleave(widths, dim=1)[:, None], self._null.prompt_embeds, text.prompt_embeds)
        null, pooled = self._null.pooled_prompt_embeds, text.pooled_prompt_embeds
        return TextStates(embeds, None if null is None or pooled is None else torch.where(dropped[:, -1:], null, pooled))

    def _add_time_ids(self, rows: Mapping[str, Any], dropped: Tensor) -> Tensor | None:
        if not self.networks.takes_sizes:
            return None
        sizes = torch.from_numpy(np.concatenate([rows["original_size"], rows["crop"], rows["target_size"]], axis=1)).long()
        return torch.where(dropped.repeat_interleave(2, dim=1), -1, sizes)

    def _draw(
        self, generators: Sequence[np.random.Generator], timestep: DrawTimestep, shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, offset = len(generators), self.recipe.noise_offset
        conditions = len(self.cache.text_widths) + 3
        noises, timesteps = np.empty((2, count, *shape), np.float32), np.empty(count, np.int64)
        dropped = np.zeros((count, conditions), bool)
        for place, random in enumerate(generators):
            noises[:, place] = random.standard_normal((2, *shape), dtype=np.float32)
            timesteps[place] = timestep(random, place, len(self.alphas))
            if self.recipe.condition_drop == "each":
                dropped[place] = random.random(conditions) < self.recipe.caption_drop_prob
            else:
                dropped[place, :-3] = random.random() < self.recipe.caption_drop_prob
            if offset:
                noises[1, place] += offset * random.standard_normal((shape[0], 1, 1), dtype=np.float32)
        posterior_noise, noise = torch.from_numpy(noises)
        return posterior_noise, noise, torch.from_numpy(timesteps), torch.from_numpy(dropped)

    def steps(self, first: int, last: int, *, prefetch: bool) -> Iterator[list[Batch]]:
        """This rank's micro-batches of steps `first` to `last`.

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


class Order:
    """Which row of the cache each sample of the stream is: a function of seed and epoch, kept by no state.

    Pictures of one shape: sample k is perm[k // N][k % N], no drop, no pad. Of several: each bucket has a permutation of its own, cut
    into micro-batches, the last of them filled from the permutation's start; the micro-batches of all buckets come in random order.

    A permutation takes the shards in random order and shuffles the rows of `BLOCK_SHARDS` of them together, and micro-batches are
    shuffled by `HAND`, each with its share of every bucket: so reads stay local, and memory does not grow with the data.
    """

    def __init__(self, cache: Cache, micro_batch_size: int, seed: int) -> None:
        self.buckets, self.micro_batch_size, self.seed = cache.buckets, micro_batch_size, seed
        self._shards = [cache.shard_rows(bucket) for bucket in cache.buckets]
        self._per_bucket = [-(-bucket.count // micro_batch_size) for bucket in cache.buckets]
        hands = -(-sum(self._per_bucket) // HAND)
        self._before = np.outer(np.arange(hands + 1), self._per_bucket) // hands
        self._hands = self._before.sum(axis=1)
        self._shuffled = functools.lru_cache(128)(self._shuffle)
        self._block = functools.lru_cache(128)(self._shuffle_block)
        self._dealt = functools.lru_cache(2)(self._deal)

    @property
    def filled(self) -> list[int]:
        """Samples that an epoch shows a second time, by bucket."""
        if len(self.buckets) == 1:
            return [0]
        return [count * self.micro_batch_size - one.count for one, count in zip(self.buckets, self._per_bucket, strict=True)]

    def rows(self, first: int, stop: int) -> list[int]:
        """Rows of samples `first` to `stop`, counted over all epochs."""
        if len(self.buckets) == 1:
            return [self._at(0, *divmod(sample, self.buckets[0].count)) for sample in range(first, stop)]
        return [self._in_micro_batch(*divmod(sample, self.micro_batch_size)) for sample in range(first, stop)]

    def _in_micro_batch(self, number: int, place: int) -> int:
        epoch, number = divmod(number, int(self._hands[-1]))
        hand = int(np.searchsorted(self._hands, number, side="right")) - 1
        bucket, before = self._dealt(epoch, hand)[:, number - self._hands[hand]].tolist()
        return self._at(bucket, epoch, (before * self.micro_batch_size + place) % self.buckets[bucket].count)

    def _at(self, bucket: int, epoch: int, place: int) -> int:
        """The row at a place of a bucket's permutation."""
        _, ends = self._shuffled(bucket, epoch)
        block = int(np.searchsorted(ends, place, side="right"))
        return int(self._block(bucket, epoch, block)[place - (int(ends[block - 1]) if block else 0)])

    def _shuffle(self, bucket: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """A bucket's shards in the order of one epoch, and the places at which each block of them ends."""
        sizes = np.array([len(rows) for rows in self._shards[bucket]])
        order = np.random.default_rng((self.seed, epoch, bucket, 0)).permutation(len(sizes))
        ends = np.cumsum(sizes[order])
        return order, ends[[*range(BLOCK_SHARDS - 1, len(ends) - 1, BLOCK_SHARDS), len(ends) - 1]]

    def _shuffle_block(self, bucket: int, epoch: int, number: int) -> np.ndarray:
        """The rows of one block of shards, shuffled."""
        order, _ = self._shuffled(bucket, epoch)
        shards = [self._shards[bucket][one] for one in order[number * BLOCK_SHARDS : (number + 1) * BLOCK_SHARDS]]
        rows = np.concatenate([np.arange(shard.start, shard.stop) for shard in shards])
        return np.random.default_rng((self.seed, epoch, bucket, 1 + number)).permutation(rows)

    def _deal(self, epoch: int, hand: int) -> np.ndarray:
        """For each micro-batch of a hand: its bucket, and how many of that bucket come before it in the epoch, int64 (2, M)."""
        first, last = self._before[hand : hand + 2]
        buckets = np.repeat(np.arange(len(first)), last - first)
        bucket = np.random.default_rng((self.seed, epoch, len(first), hand)).permutation(buckets)
        before = np.empty_like(bucket)
        for number in range(len(first)):
            before[bucket == number] = np.arange(first[number], last[number])
        return np.stack([bucket, before])


DrawTimestep = Callable[[np.random.Generator, int, int], int]
"""Draws the timestep of a place in a batch: an integer below the last argument."""


def _any_timestep(random: np.random.Generator, place: int, below: int) -> int:
    return int(random.integers(below))


def slot_generator(seed: int, step: int, slot: int) -> np.random.Generator:
    """The random stream of slot `slot` of step `step`: a counter-based generator, so that no two slots share numbers."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, slot, step]))
