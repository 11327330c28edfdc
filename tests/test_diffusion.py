"""The forward process, the targets of training, and guidance."""

import pytest
import torch
from diffusers import DDIMScheduler

from sdlab import diffusion
from sdlab.config import NoiseSchedule

ALPHAS = diffusion.alphas_cumprod(NoiseSchedule())
TIMESTEPS = torch.tensor([0, 17, 500, 999])
RANDOM = torch.Generator().manual_seed(1)
LATENTS, NOISE = torch.randn(4, 3, 2, 2, generator=RANDOM), torch.randn(4, 3, 2, 2, generator=RANDOM)


@pytest.mark.parametrize("beta_schedule", ["scaled_linear", "linear"])
def test_the_schedule_is_that_of_diffusers(beta_schedule):
    schedule = NoiseSchedule(beta_schedule=beta_schedule)
    expected = DDIMScheduler(**schedule.model_dump()).alphas_cumprod
    torch.testing.assert_close(diffusion.alphas_cumprod(schedule).float(), expected, atol=1e-6, rtol=1e-5)


def test_the_signal_falls_and_its_share_and_that_of_noise_add_to_one():
    signal, sigma = diffusion.signal_and_noise(ALPHAS, torch.arange(1000))
    assert (ALPHAS.diff() < 0).all()
    torch.testing.assert_close(signal**2 + sigma**2, torch.ones_like(signal))


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
def test_a_perfect_prediction_of_any_type_implies_the_noise_that_was_added(prediction_type):
    noisy = diffusion.add_noise(LATENTS, NOISE, TIMESTEPS, alphas=ALPHAS)
    target = diffusion.training_target(LATENTS, NOISE, TIMESTEPS, alphas=ALPHAS, prediction_type=prediction_type)
    found = diffusion.to_epsilon(target, noisy, TIMESTEPS, alphas=ALPHAS, prediction_type=prediction_type)
    torch.testing.assert_close(found, NOISE, atol=1e-4, rtol=1e-4)


def test_noisy_latents_and_v_are_those_of_diffusers():
    scheduler = DDIMScheduler(**NoiseSchedule().model_dump(), prediction_type="v_prediction")
    noisy = diffusion.add_noise(LATENTS, NOISE, TIMESTEPS, alphas=ALPHAS)
    v = diffusion.training_target(LATENTS, NOISE, TIMESTEPS, alphas=ALPHAS, prediction_type="v_prediction")
    torch.testing.assert_close(noisy, scheduler.add_noise(LATENTS, NOISE, TIMESTEPS), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(v, scheduler.get_velocity(LATENTS, NOISE, TIMESTEPS), atol=1e-5, rtol=1e-5)


def test_guidance_at_one_is_the_condition_and_at_zero_the_unconditional_prediction():
    torch.testing.assert_close(diffusion.constant_guidance(LATENTS, NOISE, 1.0), LATENTS)
    assert torch.equal(diffusion.constant_guidance(LATENTS, NOISE, 0.0), NOISE)


def test_guidance_goes_on_beyond_the_condition():
    cond, uncond = torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1, 1), 1.0)
    assert diffusion.constant_guidance(cond, uncond, 7.5).item() == 16


def test_one_batch_may_carry_one_scale_an_image():
    scales = torch.tensor([0.0, 1.0, 2.0, 8.0]).view(-1, 1, 1, 1)
    together = diffusion.constant_guidance(LATENTS, NOISE, scales)
    for row, scale in enumerate(scales.flatten().tolist()):
        torch.testing.assert_close(together[row], diffusion.constant_guidance(LATENTS[row], NOISE[row], scale))
