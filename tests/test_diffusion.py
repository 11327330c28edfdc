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


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("beta_schedule", ["scaled_linear", "linear"])
def test_the_schedule_is_that_of_diffusers(beta_schedule, rescaled):
    schedule = NoiseSchedule(beta_schedule=beta_schedule, rescale_betas_zero_snr=rescaled)
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


def test_a_rescaled_schedule_starts_as_before_and_ends_without_signal():
    rescaled = diffusion.alphas_cumprod(NoiseSchedule(rescale_betas_zero_snr=True))
    assert rescaled[0] == pytest.approx(ALPHAS[0].item()) and 0 < rescaled[-1] < 1e-7 and (rescaled[1:] < rescaled[:-1]).all()


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_a_min_snr_weight_makes_every_error_one_of_latents_weighed_alike(prediction_type):
    """Whatever is predicted, the weighted loss of the same wrong latents is min(SNR, gamma) times their squared error."""
    wrong = LATENTS + 0.1
    noisy = diffusion.add_noise(LATENTS, NOISE, TIMESTEPS, alphas=ALPHAS)
    signal, sigma = diffusion.signal_and_noise(ALPHAS, TIMESTEPS)
    its_noise = (noisy - signal * wrong) / sigma
    about = {"alphas": ALPHAS, "prediction_type": prediction_type}
    target = diffusion.training_target(LATENTS, NOISE, TIMESTEPS, **about)
    model_pred = diffusion.training_target(wrong, its_noise, TIMESTEPS, **about)
    weights = diffusion.loss_weights(TIMESTEPS, min_snr_gamma=5.0, **about)
    snr = (ALPHAS / (1 - ALPHAS))[TIMESTEPS]
    expected = snr.clamp(max=5.0).float() * 0.1**2
    torch.testing.assert_close(weights * (model_pred - target).square().mean(dim=(1, 2, 3)), expected, rtol=2e-3, atol=1e-7)


def test_without_gamma_all_timesteps_weigh_alike():
    weights = diffusion.loss_weights(TIMESTEPS, alphas=ALPHAS, prediction_type="v_prediction", min_snr_gamma=None)
    assert torch.equal(weights, torch.ones(4))
