"""What a step trains on is a function of seed, step and slot alone."""

from pathlib import Path

import pytest
import torch

from sdlab import batches, presets
from sdlab.cache import Cache, open_cache

TINY = presets.get("tiny")


def make(cache: Cache, *, micro_batch_size: int = 8, seed: int = 3, **recipe: float) -> batches.Batches:
    stage = TINY.stages["stage1_32"].model_copy(update={"global_batch_size": 8, **recipe})
    return batches.Batches(cache, stage, TINY.networks, scaling_factor=0.5, micro_batch_size=micro_batch_size, seed=seed)


@pytest.fixture(scope="module")
def cache(scenes_dir: Path) -> Cache:
    return open_cache(str(scenes_dir), 32)


def test_every_epoch_sees_every_sample_once_across_its_borders(cache: Cache) -> None:
    stream = [index for step in range(1, 11) for index in make(cache).sample_indices(step)]
    first, second = stream[:40], stream[40:]
    assert sorted(first) == sorted(second) == list(range(40)) and first != second


def test_another_seed_gives_another_order(cache: Cache) -> None:
    assert make(cache).sample_indices(1) != make(cache, seed=4).sample_indices(1)


def test_micro_batches_put_together_are_the_whole_batch(cache: Cache) -> None:
    whole, parts = make(cache).step(5), make(cache, micro_batch_size=2).step(5)
    assert (len(whole), len(parts)) == (1, 4)
    for name in ("noisy_latents", "timesteps", "prompt_embeds", "target"):
        assert torch.equal(getattr(whole[0], name), torch.cat([getattr(part, name) for part in parts]))


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_step_is_the_same_whether_reached_or_started_from(cache: Cache, prefetch: bool) -> None:
    reached = list(make(cache).steps(1, 6, prefetch=prefetch))[-1][0]
    fresh = next(make(cache).steps(6, 6, prefetch=not prefetch))[0]
    assert torch.equal(reached.noisy_latents, fresh.noisy_latents) and torch.equal(reached.timesteps, fresh.timesteps)


def test_slots_and_steps_have_noise_of_their_own() -> None:
    draws = {batches.slot_generator(1, step, slot).standard_normal() for step in range(20) for slot in range(20)}
    assert len(draws) == 400


def test_dropped_captions_become_the_null_condition_and_the_others_stay(cache: Cache) -> None:
    kept = make(cache, caption_drop_prob=0.0).step(1)[0].prompt_embeds
    dropped = make(cache, caption_drop_prob=1.0).step(1)[0].prompt_embeds
    assert torch.equal(dropped, cache.null_embeds.expand_as(dropped))
    assert torch.equal(kept, cache.rows(make(cache).sample_indices(1))["prompt_embeds"])


def test_the_target_and_the_noisy_latents_give_back_the_latents(cache: Cache) -> None:
    """For v-prediction: latents = signal x noisy_latents - sigma x v."""
    stream = make(cache)
    batch = stream.step(2)[0]
    alpha = stream.alphas[batch.timesteps].view(-1, 1, 1, 1)
    latents = alpha.sqrt() * batch.noisy_latents - (1 - alpha).sqrt() * batch.target
    mean, logvar = cache.rows(stream.sample_indices(2))["moments"].chunk(2, dim=1)
    spread = (latents / 0.5 - mean) / torch.exp(0.5 * logvar)
    assert abs(float(spread.mean())) < 0.2 and 0.8 < float(spread.std()) < 1.2
