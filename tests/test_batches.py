"""What a step trains on is a function of seed, step and slot alone."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sdlab import batches, prepare, presets
from sdlab.cache import Bucket, Cache, open_cache
from sdlab.config import ConfigError

TINY = presets.get("tiny")


def make(cache: Any, *, micro_batch_size: int = 8, seed: int = 3, rank: int = 0, world_size: int = 1, **recipe: float) -> batches.Batches:
    stage = TINY.stages["stage1_32"].model_copy(update={"global_batch_size": 8, **recipe})
    shares = {"micro_batch_size": micro_batch_size, "rank": rank, "world_size": world_size}
    return batches.Batches(cache, stage, TINY.networks, scaling_factor=0.5, seed=seed, **shares)


@pytest.fixture(scope="module")
def cache(scenes_dir: Path) -> Cache:
    return open_cache(str(scenes_dir), 32)


class Memory:
    """A cache in memory, of shards of `shard` rows: each moment of a row, and each of its text states, is the row's number."""

    has_text_states = True
    text_widths = (2,)
    null = MappingProxyType({"prompt_embeds": torch.full((1, 3, 2), -1.0)})

    def __init__(self, *counts: int, shard: int = 2048) -> None:
        starts = np.cumsum([0, *counts]).tolist()
        self.buckets = tuple(Bucket(8 * (n + 1), 8, first, count) for n, (first, count) in enumerate(zip(starts, counts, strict=False)))
        self._shard = shard

    def shard_rows(self, bucket: Bucket) -> list[range]:
        stop = bucket.first + bucket.count
        return [range(start, min(start + self._shard, stop)) for start in range(bucket.first, stop, self._shard)]

    def rows(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        (bucket,) = {self.bucket(row) for row in indices}
        index = torch.tensor(indices, dtype=torch.float32)
        height = bucket.height // 8
        return {
            "moments": index.view(-1, 1, 1, 1).expand(-1, 8, height, 1),
            "prompt_embeds": index.view(-1, 1, 1).expand(-1, 3, 2),
        }

    def __len__(self) -> int:
        return sum(bucket.count for bucket in self.buckets)

    def bucket(self, row: int) -> Bucket:
        return next(one for one in self.buckets if one.first <= row < one.first + one.count)


def flat(batch: batches.Batch) -> dict[str, torch.Tensor]:
    tensors = {**vars(batch), **batch.text.named()}
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


def equal(first: Sequence[batches.Batch], second: Sequence[batches.Batch]) -> bool:
    pairs = [(flat(one), flat(other)) for one, other in zip(first, second, strict=True)]
    return all(torch.equal(one[name], other[name]) for one, other in pairs for name in one)


def whole(parts: Sequence[batches.Batch]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([flat(part)[name] for part in parts]) for name in flat(parts[0])}


# Order


def test_every_epoch_sees_every_sample_once_across_its_borders(cache: Cache) -> None:
    stream = [index for step in range(1, 11) for index in make(cache).sample_indices(step)]
    first, second = stream[:40], stream[40:]
    assert sorted(first) == sorted(second) == list(range(40)) and first != second


@pytest.mark.parametrize(("count", "batch"), [(41, 8), (7, 8), (1, 4), (100, 32)])
def test_epochs_that_end_inside_a_step_see_every_sample_once_too(count: int, batch: int) -> None:
    stream = make(Memory(count, shard=8), global_batch_size=batch, micro_batch_size=batch)
    rows = [row for step in range(1, 5 * count // batch + 2) for row in stream.sample_indices(step)]
    assert all(sorted(rows[epoch * count : (epoch + 1) * count]) == list(range(count)) for epoch in range(5))


def test_the_order_is_a_function_of_seed_and_epoch(cache: Cache) -> None:
    assert make(cache).sample_indices(1) != make(cache, seed=4).sample_indices(1)
    order, again = batches.Order(cache, 8, 3), batches.Order(cache, 2, 3)
    late = order.rows(200, 240)
    assert late == again.rows(200, 240) == order.rows(200, 240) != order.rows(240, 280)
    assert sorted(late) == sorted(order.rows(240, 280))


def test_an_epoch_goes_through_few_shards_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "BLOCK_SHARDS", 3)
    order = batches.Order(Memory(95, shard=10), 8, 0)  # ten shards, the last of five rows
    epochs = [order.rows(95 * epoch, 95 * (epoch + 1)) for epoch in range(20)]
    for rows in epochs:
        shards, place = [row // 10 for row in rows], 0
        assert sorted(rows) == list(range(95))
        for _ in range(4):
            block = list(dict.fromkeys(shards[place:]))[:3]
            size = sum(5 if shard == 9 else 10 for shard in block)
            assert set(shards[place : place + size]) == set(block) and not set(block) & set(shards[place + size :])
            assert len(block) < 3 or shards[place : place + size] != sorted(shards[place : place + size], key=block.index)
            place += size
        assert place == 95
    assert len({tuple(dict.fromkeys(row // 10 for row in rows[:25])) for rows in epochs}) > 10


def test_every_row_comes_equally_early_on_average() -> None:
    order = batches.Order(Memory(24, shard=4), 8, 1)
    places = np.array([np.argsort(order.rows(24 * epoch, 24 * (epoch + 1))) for epoch in range(1500)])
    assert np.abs(places.mean(axis=0) - 11.5).max() < 1  # 5.6 standard errors


@pytest.mark.parametrize("counts", [(180_000,), (100_000, 50_000, 30_001)])
def test_memory_of_the_order_does_not_grow_with_the_data(counts: tuple[int, ...]) -> None:
    def peak(scale: int) -> int:
        memory = Memory(*(count * scale for count in counts))
        tracemalloc.start()
        order = batches.Order(memory, 1, 0)  # type: ignore[arg-type]
        for first in range(0, 400_000, 4_000):
            order.rows(first, first + 16)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(10) < 1.2 * peak(1)


# Steps


def test_micro_batches_put_together_are_the_whole_batch(cache: Cache) -> None:
    single, parts = make(cache).step(5), make(cache, micro_batch_size=2).step(5)
    assert (len(single), len(parts)) == (1, 4)
    together = whole(parts)
    assert all(torch.equal(flat(single[0])[name], values) for name, values in together.items())


@pytest.mark.parametrize("counts", [(40,), (13, 9, 2)])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_shares_of_all_ranks_are_the_step_of_one(counts: tuple[int, ...], world_size: int) -> None:
    for step in (1, 6, 7):
        alone = make(Memory(*counts, shard=5), micro_batch_size=2).step(step)
        ranks = [make(Memory(*counts, shard=5), micro_batch_size=2, rank=r, world_size=world_size).step(step) for r in range(world_size)]
        assert {len(one) for one in ranks} == {4 // world_size}
        assert equal(alone, [batch for one in ranks for batch in one])


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_step_is_the_same_whether_reached_or_started_from(cache: Cache, prefetch: bool) -> None:
    reached = list(make(cache).steps(1, 6, prefetch=prefetch))[-1]
    fresh = next(make(cache).steps(6, 6, prefetch=not prefetch))
    assert equal(reached, fresh)


@pytest.mark.parametrize("prefetch", [True, False])
def test_no_steps_are_no_batches(cache: Cache, prefetch: bool) -> None:
    assert list(make(cache).steps(7, 6, prefetch=prefetch)) == []


def test_slots_and_steps_have_noise_of_their_own() -> None:
    draws = {batches.slot_generator(1, step, slot).standard_normal() for step in range(20) for slot in range(20)}
    assert len(draws) == 400


def test_dropped_captions_become_the_null_condition_and_the_others_stay(cache: Cache) -> None:
    kept = make(cache, caption_drop_prob=0.0).step(1)[0]
    dropped = make(cache, caption_drop_prob=1.0).step(1)[0]
    said = dropped.text.prompt_embeds
    assert torch.equal(said, cache.null["prompt_embeds"].expand_as(said)) and dropped.dropped.all()
    assert torch.equal(kept.text.prompt_embeds, cache.rows(make(cache).sample_indices(1))["prompt_embeds"]) and not kept.dropped.any()


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_captions_drop_as_often_as_they_should_and_are_marked(probability: float) -> None:
    stream = make(Memory(500), global_batch_size=64, micro_batch_size=32, caption_drop_prob=probability)
    steps = [batch for step in range(1, 64) for batch in stream.step(step)]
    for batch in steps:
        assert torch.equal((batch.text.prompt_embeds == Memory.null["prompt_embeds"]).all(dim=(1, 2)), batch.dropped[:, 0])
    dropped = torch.cat([batch.dropped for batch in steps]).double()
    assert abs(float(dropped.mean()) - probability) < 4 * (probability * (1 - probability) / len(dropped)) ** 0.5


def test_every_timestep_is_equally_likely(cache: Cache) -> None:
    stream = make(Memory(500), global_batch_size=64, micro_batch_size=64)
    timesteps = torch.cat([stream.step(step)[0].timesteps for step in range(1, 101)])
    assert timesteps.dtype == torch.int64 and int(timesteps.min()) >= 0 and int(timesteps.max()) < 1000
    assert abs(float(timesteps.double().mean()) - 499.5) < 4 * 288.7 / 6400**0.5


def test_the_target_and_the_noisy_latents_give_back_the_latents(cache: Cache) -> None:
    """For v-prediction: latents = signal x noisy_latents - sigma x v."""
    stream = make(cache)
    batch = stream.step(2)[0]
    alpha = stream.alphas[batch.timesteps].view(-1, 1, 1, 1)
    latents = alpha.sqrt() * batch.noisy_latents - (1 - alpha).sqrt() * batch.target
    mean, logvar = cache.rows(stream.sample_indices(2))["moments"].chunk(2, dim=1)
    spread = (latents / 0.5 - mean) / torch.exp(0.5 * logvar)
    assert abs(float(spread.mean())) < 0.2 and 0.8 < float(spread.std()) < 1.2


# Several shapes


COUNTS = (37, 20, 3, 1)
"""Rows of four buckets; in micro-batches of 4: 10, 5, 1 and 1."""


def epoch_of(order: batches.Order, epoch: int) -> np.ndarray:
    """The rows of an epoch by micro-batch."""
    return np.array(order.rows(17 * 4 * epoch, 17 * 4 * (epoch + 1))).reshape(17, 4)


def test_every_micro_batch_is_of_one_bucket_and_every_picture_comes_every_epoch() -> None:
    memory = Memory(*COUNTS, shard=8)
    order = batches.Order(memory, 4, 5)  # type: ignore[arg-type]
    for epoch in range(6):
        micro_batches = epoch_of(order, epoch)
        kinds = [{memory.buckets.index(memory.bucket(row)) for row in one} for one in micro_batches.tolist()]
        assert all(len(one) == 1 for one in kinds) and Counter(kind.pop() for kind in kinds) == {0: 10, 1: 5, 2: 1, 3: 1}
        assert set(micro_batches.flat) == set(range(61))
    assert epoch_of(order, 0).tolist() != epoch_of(order, 1).tolist() != epoch_of(batches.Order(memory, 4, 6), 1).tolist()  # type: ignore[arg-type]


def test_the_last_micro_batch_of_a_bucket_is_filled_from_its_start() -> None:
    memory = Memory(*COUNTS, shard=8)
    order = batches.Order(memory, 4, 5)  # type: ignore[arg-type]
    for epoch in range(4):
        micro_batches = epoch_of(order, epoch)
        for bucket, filled in zip(memory.buckets, order.filled, strict=True):
            rows = [row for row in micro_batches.flat if memory.bucket(row) == bucket]
            assert len(rows) == bucket.count + filled
            assert sorted(rows[: bucket.count]) == list(range(bucket.first, bucket.first + bucket.count))
            assert rows[bucket.count :] == (rows[: bucket.count] * 4)[:filled]
    assert order.filled == [3, 0, 1, 3] and batches.Order(Memory(37), 4, 5).filled == [0]  # type: ignore[arg-type]


def test_buckets_are_mixed_in_hands_that_leave_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "HAND", 5)
    memory = Memory(*COUNTS, shard=8)
    order = batches.Order(memory, 4, 5)  # type: ignore[arg-type]
    for epoch in range(4):
        micro_batches = epoch_of(order, epoch)
        assert set(micro_batches.flat) == set(range(61))
        large = [memory.bucket(row).first == 0 for row in micro_batches[:, 0].tolist()]
        assert [sum(large[start:stop]) for start, stop in ((0, 3), (3, 7), (7, 10), (10, 17))] == [2, 3, 2, 3]
    assert len({tuple(memory.bucket(row).first for row in epoch_of(order, epoch)[:, 0].tolist()) for epoch in range(8)}) > 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_over_buckets_is_the_same_whether_reached_or_started_from(world_size: int) -> None:
    shares = {"micro_batch_size": 4, "rank": world_size - 1, "world_size": world_size}
    reached = list(make(Memory(*COUNTS, shard=8), **shares).steps(1, 60, prefetch=False))
    for step in (1, 9, 60):
        assert equal(reached[step - 1], next(make(Memory(*COUNTS, shard=8), **shares).steps(step, step, prefetch=True)))
    assert {tuple(batch.noisy_latents.shape[1:]) for one in reached for batch in one} == {(4, n, 1) for n in (1, 2, 3, 4)}


def test_prepared_buckets_make_batches_of_their_shapes(tmp_path: Path, pictures: Path) -> None:
    from PIL import Image

    for name, size in (("wide", (99, 48)), ("wider", (120, 50)), ("tall", (40, 90))):
        Image.new("RGB", size, "red").save(pictures / f"{name}.png")
        (pictures / f"{name}.txt").write_text(name)
    prepare.prepare(prepare.configure(source=str(pictures), data_dir=str(tmp_path / "data"), resolution=32, crop="buckets"))
    cache = open_cache(tmp_path / "data", 32)
    stream = make(cache, micro_batch_size=4)
    shapes = {(bucket.height // 8, bucket.width // 8) for bucket in cache.buckets}
    steps = [batch for step in range(1, 3) for batch in stream.step(step)]
    assert len(shapes) == 3 and {tuple(batch.noisy_latents.shape[2:]) for batch in steps} == shapes
    assert sorted({row for step in (1, 2) for row in stream.sample_indices(step)}) == list(range(9))
    assert sum(stream.order.filled) == 16 - 9


# Without text states


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """The scenes of `scenes_dir` with token ids alone."""
    folder = tmp_path_factory.mktemp("bare") / "data"
    prepare.prepare(prepare.configure(source="scenes", data_dir=str(folder), resolution=32, limit=40, text_states=False))
    return open_cache(folder, 32)


def test_token_ids_are_encoded_to_what_the_cache_would_hold(cache: Cache, bare: Cache, frozen: Any) -> None:
    stage = TINY.stages["stage1_32"].model_copy(update={"global_batch_size": 8, "caption_drop_prob": 0.3})
    options = {"scaling_factor": 0.5, "micro_batch_size": 4, "seed": 3}
    encoded = batches.Batches(bare, stage, TINY.networks, encode_text=frozen.encode_text, **options)
    held = batches.Batches(cache, stage, TINY.networks, **options)
    for step in (1, 4):
        one, other = whole(encoded.step(step)), whole(held.step(step))
        assert one["dropped"].any() and not one["dropped"].all()
        assert one["prompt_embeds"].dtype == torch.float32
        torch.testing.assert_close(one.pop("prompt_embeds"), other.pop("prompt_embeds"), rtol=1e-3, atol=1e-3)
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_token_ids_without_an_encoder_are_refused(bare: Cache) -> None:
    with pytest.raises(ConfigError, match=r"token ids alone \(text_states=False\): a text encoder is needed"):
        make(bare)


def test_cached_text_states_are_not_encoded_again(cache: Cache) -> None:
    stage = TINY.stages["stage1_32"].model_copy(update={"global_batch_size": 8})
    encode = SimpleNamespace(text=lambda ids: pytest.fail("encoded"))
    options = {"scaling_factor": 0.5, "micro_batch_size": 8, "seed": 3}
    assert equal(batches.Batches(cache, stage, TINY.networks, encode_text=encode.text, **options).step(1), make(cache).step(1))


@pytest.mark.parametrize(("micro_batch_size", "world_size"), [(3, 1), (16, 1), (4, 4), (8, 2)])
def test_batch_sizes_that_do_not_divide_are_refused(cache: Cache, micro_batch_size: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"global_batch_size=8 is not a multiple of micro_batch_size={micro_batch_size}"):
        make(cache, micro_batch_size=micro_batch_size, world_size=world_size)


# Options


def test_offset_noise_shifts_each_channel_as_a_whole_and_draws_nothing_else(cache: Cache) -> None:
    plain, shifted = make(cache).step(1)[0], make(cache, noise_offset=0.5).step(1)[0]
    assert torch.equal(plain.timesteps, shifted.timesteps) and torch.equal(plain.dropped, shifted.dropped)
    _, sigma = batches.diffusion.signal_and_noise(make(cache).alphas, plain.timesteps)
    shift = (shifted.noisy_latents - plain.noisy_latents) / sigma
    assert torch.allclose(shift, shift.mean(dim=(2, 3), keepdim=True).expand_as(shift), atol=1e-4)
    means = torch.cat(
        [(make(cache, noise_offset=0.5).step(n)[0].target - make(cache).step(n)[0].target).mean(dim=(2, 3)) for n in range(1, 30)]
    )
    assert means.std() > 0.1
    assert not torch.equal(plain.target, shifted.target)


def test_a_min_snr_weight_reaches_the_batch(cache: Cache) -> None:
    plain, weighed = make(cache).step(1)[0], make(cache, min_snr_gamma=5.0).step(1)[0]
    assert torch.equal(plain.weights, torch.ones(8)) and (weighed.weights <= 1).all() and weighed.weights.std() > 0
    assert torch.equal(plain.noisy_latents, weighed.noisy_latents)


def test_validation_is_the_same_for_every_seed_rank_and_batch_size_and_even_over_the_timesteps(cache: Cache) -> None:
    def rows(made: batches.Batches) -> dict[int, tuple[int, torch.Tensor]]:
        shown = [made.validation_batch(placed) for placed in made.validation(16)]
        return {int(b.indices[n]): (int(b.timesteps[n]), b.noisy_latents[n]) for b in shown for n in range(len(b.indices))}

    plain = {"caption_drop_prob": 0.0}
    one, other = rows(make(cache, **plain)), rows(make(cache, seed=99, micro_batch_size=2, rank=1, world_size=2, **plain))
    assert len(one) == 16 and one.keys() == other.keys()
    assert all(one[row][0] == other[row][0] and torch.equal(one[row][1], other[row][1]) for row in one)
    assert Counter(timestep // 250 for timestep, _ in one.values()) == {0: 4, 1: 4, 2: 4, 3: 4}


def test_validation_batches_have_one_shape_each() -> None:
    made = make(Memory(5, 9, 2), caption_drop_prob=0.0)
    batches_of = [[row for _, row in placed] for placed in made.validation(100)]
    assert sorted(row for rows in batches_of for row in rows) == list(range(16))
    assert all(len({made.cache.bucket(row) for row in rows}) == 1 for rows in batches_of)
