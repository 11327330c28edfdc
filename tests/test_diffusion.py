"""The forward process, the targets of training, and what a prediction implies."""

import pytest
import torch
from diffusers import DDIMScheduler

from sdlab import diffusion
from sdlab.config import NoiseSchedule

ALPHAS = diffusion.alphas_cumprod(NoiseSchedule())
TIMESTEPS = torch.tensor([0, 17, 500, 999])
KINDS = ["epsilon", "v_prediction", "sample"]
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


@pytest.mark.parametrize("timestep", [0, 17, 500, 999])
@pytest.mark.parametrize("prediction_type", KINDS)
def test_a_perfect_prediction_of_any_type_implies_the_picture_and_the_noise_that_were_added(prediction_type, timestep):
    latents, noise, timesteps = LATENTS.double(), NOISE.double(), torch.full((4,), timestep)
    noisy = diffusion.add_noise(latents, noise, timesteps, alphas=ALPHAS)
    target = diffusion.training_target(latents, noise, timesteps, alphas=ALPHAS, prediction_type=prediction_type)
    found = diffusion.read_prediction(target, noisy, alpha=float(ALPHAS[timestep]), prediction_type=prediction_type)
    torch.testing.assert_close(found.denoised, latents, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.epsilon, noise, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prediction_type", KINDS)
def test_any_prediction_implies_a_picture_and_a_noise_that_make_up_the_noisy_latents(prediction_type):
    for alpha in (0.9991, 0.5, 0.0047):
        denoised, epsilon = diffusion.read_prediction(NOISE, LATENTS, alpha=alpha, prediction_type=prediction_type)
        torch.testing.assert_close(alpha**0.5 * denoised + (1 - alpha) ** 0.5 * epsilon, LATENTS, atol=1e-5, rtol=1e-5)
        assert denoised.dtype == epsilon.dtype == torch.float32


@pytest.mark.parametrize("prediction_type", KINDS)
def test_what_is_read_is_what_diffusers_reads(prediction_type):
    scheduler = DDIMScheduler(**NoiseSchedule().model_dump(), prediction_type=prediction_type, clip_sample=False)
    scheduler.set_timesteps(1000)
    for timestep in (17, 500, 999):
        found = diffusion.read_prediction(NOISE, LATENTS, alpha=float(ALPHAS[timestep]), prediction_type=prediction_type)
        expected = scheduler.step(NOISE, timestep, LATENTS).pred_original_sample
        torch.testing.assert_close(found.denoised, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prediction_type", ["v_prediction", "sample"])
def test_a_picture_is_read_in_float32_where_next_to_no_signal_is_left(prediction_type):
    alpha = float(diffusion.alphas_cumprod(NoiseSchedule(rescale_betas_zero_snr=True))[-1])
    found, exact = (
        diffusion.read_prediction(LATENTS.to(dtype), NOISE.to(dtype), alpha=alpha, prediction_type=prediction_type)
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(found.denoised.double(), exact.denoised, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.epsilon.double(), exact.epsilon, atol=1e-6, rtol=1e-6)


def test_noisy_latents_and_v_are_those_of_diffusers():
    scheduler = DDIMScheduler(**NoiseSchedule().model_dump(), prediction_type="v_prediction")
    noisy = diffusion.add_noise(LATENTS, NOISE, TIMESTEPS, alphas=ALPHAS)
    v = diffusion.training_target(LATENTS, NOISE, TIMESTEPS, alphas=ALPHAS, prediction_type="v_prediction")
    torch.testing.assert_close(noisy, scheduler.add_noise(LATENTS, NOISE, TIMESTEPS), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(v, scheduler.get_velocity(LATENTS, NOISE, TIMESTEPS), atol=1e-5, rtol=1e-5)


def test_a_rescaled_schedule_starts_as_before_and_ends_without_signal():
    rescaled = diffusion.alphas_cumprod(NoiseSchedule(rescale_betas_zero_snr=True))
    assert rescaled[0] == pytest.approx(ALPHAS[0].item()) and rescaled[-1] == 2.0**-24 and (rescaled[1:] < rescaled[:-1]).all()


@pytest.mark.parametrize("prediction_type", KINDS)
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
