"""The forward process, the targets of training, and what a prediction implies."""

from __future__ import annotations

import math
from typing import NamedTuple

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


class Prediction(NamedTuple):
    """What noisy latents consist of, in the eyes of a UNet: tensors (B, C, h, w)."""

    denoised: Tensor
    """The picture."""
    epsilon: Tensor
    """The noise."""


def read_prediction(model_pred: Tensor, noisy_latents: Tensor, *, alpha: float, prediction_type: PredictionType) -> Prediction:
    """Picture and noise that a prediction of any type implies (Salimans & Ho 2022, appendix D).

    Args:
        model_pred: what the UNet says (B, C, h, w).
        noisy_latents: what it was asked about (B, C, h, w).
        alpha: their share of signal variance, above 0 and below 1.
    """
    signal, sigma = math.sqrt(alpha), math.sqrt(1 - alpha)
    if prediction_type == "epsilon":
        return Prediction((noisy_latents - sigma * model_pred) / signal, model_pred)
    if prediction_type == "v_prediction":
        return Prediction(signal * noisy_latents - sigma * model_pred, signal * model_pred + sigma * noisy_latents)
    return Prediction(model_pred, (noisy_latents - signal * model_pred) / sigma)
