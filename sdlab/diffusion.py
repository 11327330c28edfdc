"""The forward process, the targets of training, and guidance as plain functions."""

from __future__ import annotations

import torch
from torch import Tensor

from sdlab.config import NoiseSchedule, PredictionType


def alphas_cumprod(schedule: NoiseSchedule) -> Tensor:
    """Share of signal variance left at each timestep, float64 (num_train_timesteps,), falling from near 1 (Ho et al. 2020, eq. 4)."""
    start, end, count = schedule.beta_start, schedule.beta_end, schedule.num_train_timesteps
    if schedule.beta_schedule == "scaled_linear":
        betas = torch.linspace(start**0.5, end**0.5, count, dtype=torch.float64) ** 2
    else:
        betas = torch.linspace(start, end, count, dtype=torch.float64)
    alphas = torch.cumprod(1 - betas, dim=0)
    return _rescale_zero_snr(alphas) if schedule.rescale_betas_zero_snr else alphas


def _rescale_zero_snr(alphas: Tensor) -> Tensor:
    """Shift and scale the signal's factor so that none is left at the last timestep (Lin et al. 2024, algorithm 1).

    A trace of 2 ** -24 stays, as in diffusers, so that solvers may divide by it.
    """
    signal = alphas.sqrt()
    rescaled = (signal - signal[-1]) * signal[0] / (signal[0] - signal[-1])
    return (rescaled**2).clamp(min=2.0**-24)


def signal_and_noise(alphas: Tensor, timesteps: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of signal and noise at `timesteps` (B,), float32 (B, 1, 1, 1) each; their squares add to 1."""
    alpha = alphas.to(timesteps.device)[timesteps].view(-1, 1, 1, 1)
    return alpha.sqrt().float(), (1 - alpha).sqrt().float()


def add_noise(latents: Tensor, noise: Tensor, timesteps: Tensor, *, alphas: Tensor) -> Tensor:
    """`noisy_latents` (B, C, h, w) at `timesteps` (B,)."""
    signal, sigma = signal_and_noise(alphas, timesteps)
    return signal * latents + sigma * noise


def training_target(latents: Tensor, noise: Tensor, timesteps: Tensor, *, alphas: Tensor, prediction_type: PredictionType) -> Tensor:
    """What the UNet should say: the noise, the latents, or v = signal x noise - sigma x latents (Salimans & Ho 2022)."""
    signal, sigma = signal_and_noise(alphas, timesteps)
    return {"epsilon": noise, "sample": latents, "v_prediction": signal * noise - sigma * latents}[prediction_type]


def loss_weights(timesteps: Tensor, *, alphas: Tensor, prediction_type: PredictionType, min_snr_gamma: float | None) -> Tensor:
    """What each sample's squared error counts for, float32 (B,): min(SNR, gamma) of the error in latents (Hang et al. 2023, eq. 6).

    An error of epsilon is one of latents times SNR, and one of v is one of latents times SNR + 1, so the weight is divided by these.
    """
    if min_snr_gamma is None:
        return torch.ones(len(timesteps))
    alpha = alphas[timesteps]
    snr = alpha / (1 - alpha)
    per_latent_error = {"epsilon": snr, "sample": torch.ones_like(snr), "v_prediction": snr + 1}[prediction_type]
    return (snr.clamp(max=min_snr_gamma) / per_latent_error).float()


def to_epsilon(model_pred: Tensor, noisy_latents: Tensor, timesteps: Tensor, *, alphas: Tensor, prediction_type: PredictionType) -> Tensor:
    """The noise that a prediction of any type implies, (B, C, h, w); `timesteps` is (B,)."""
    signal, sigma = signal_and_noise(alphas, timesteps)
    if prediction_type == "epsilon":
        return model_pred
    if prediction_type == "v_prediction":
        return signal * model_pred + sigma * noisy_latents
    return (noisy_latents - signal * model_pred) / sigma


def constant_guidance(cond: Tensor, uncond: Tensor, guidance_scale: Tensor | float) -> Tensor:
    """Classifier-free guidance: uncond + guidance_scale x (cond - uncond) (Ho & Salimans 2022, eq. 6 with w = guidance_scale - 1).

    Args:
        cond: epsilon (B, C, h, w) given the prompt.
        uncond: epsilon (B, C, h, w) given the negative prompt.
        guidance_scale: one number, or one an image as (B, 1, 1, 1); 1 gives `cond`, 0 gives `uncond`.
    """
    return uncond + guidance_scale * (cond - uncond)
