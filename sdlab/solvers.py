"""Solvers of the probability-flow ODE as short pure functions, for a UNet that predicts the noise, the picture or v.

With alpha the share of signal variance, noisy latents are sqrt(alpha) x picture + sqrt(1 - alpha) x noise. All solvers have one
signature: `predict(latents, timestep)` says what picture and what noise the UNet sees in them, `timesteps` fall, the state keeps its
dtype, and coefficients are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sdlab.config import ConfigError, Networks, hint
from sdlab.diffusion import Prediction, alphas_cumprod

Predict = Callable[[Tensor, int], Prediction]
"""Picture and noise, each (B, C, h, w), that `noisy_latents` (B, C, h, w) consist of at one timestep."""
Solver = Callable[..., Tensor]
Spacing = Literal["leading", "trailing", "linspace"]


def ddim(predict: Predict, latents: Tensor, *, timesteps: Sequence[int], alphas: Tensor) -> Tensor:
    """Deterministic DDIM (Song et al. 2021, eq. 12 with eta 0), which ends at the training schedule's first alpha.

    Args:
        predict: picture and noise in latents at a timestep.
        latents: unit noise (B, C, h, w).
        timesteps: falling timesteps of the training schedule.
        alphas: the schedule's cumulative alphas, float64 (num_train_timesteps,).

    Returns:
        Latents (B, C, h, w) with next to no noise left.
    """
    return _first_order(predict, latents, timesteps, _levels(timesteps, alphas, last=float(alphas[0])))


def euler(predict: Predict, latents: Tensor, *, timesteps: Sequence[int], alphas: Tensor) -> Tensor:
    """Euler steps in sigma down to zero noise (Karras et al. 2022, algorithm 1): DDIM's step, with another end.

    Arguments and result are those of `ddim`.
    """
    return _first_order(predict, latents, timesteps, _levels(timesteps, alphas, last=1.0))


def _first_order(predict: Predict, latents: Tensor, timesteps: Sequence[int], levels: Sequence[float]) -> Tensor:
    for timestep, after in zip(timesteps, levels[1:], strict=True):
        denoised, epsilon = predict(latents, timestep)
        latents = math.sqrt(after) * denoised + math.sqrt(1 - after) * epsilon
    return latents


def plms(predict: Predict, latents: Tensor, *, timesteps: Sequence[int], alphas: Tensor) -> Tensor:
    """Pseudo linear multistep (Liu et al. 2022, eq. 12): the first step averages the noise at both its ends, then Adams-Bashforth 2, 3, 4.

    Arguments and result are those of `ddim`; the first step evaluates twice, so n steps cost n + 1 evaluations.
    """
    levels = _levels(timesteps, alphas, last=float(alphas[0]))
    past: list[Tensor] = []
    for index, timestep in enumerate(timesteps):
        past = [predict(latents, timestep).epsilon, *past[:3]]
        if index == 0:
            ahead = _move(latents, past[0], levels[0], levels[1])
            epsilon = (past[0] + predict(ahead, timesteps[:2][-1]).epsilon) / 2
        else:
            epsilon = torch.stack([weight * earlier for weight, earlier in zip(_ADAMS_BASHFORTH[len(past)], past, strict=True)]).sum(0)
        latents = _move(latents, epsilon, levels[index], levels[index + 1])
    return latents


_ADAMS_BASHFORTH = {2: (3 / 2, -1 / 2), 3: (23 / 12, -16 / 12, 5 / 12), 4: (55 / 24, -59 / 24, 37 / 24, -9 / 24)}


def dpmpp_2m(predict: Predict, latents: Tensor, *, timesteps: Sequence[int], alphas: Tensor) -> Tensor:
    """DPM-Solver++(2M) (Lu et al. 2022, algorithm 2): second order in log-SNR, with a first-order last step to zero noise.

    Arguments and result are those of `ddim`.
    """
    levels = _levels(timesteps, alphas, last=1.0)
    before, h_before = latents, 0.0
    for index, timestep in enumerate(timesteps):
        now, after = levels[index], levels[index + 1]
        denoised = predict(latents, timestep).denoised
        h = _half_log_snr(after) - _half_log_snr(now)
        ahead = denoised if index in (0, len(timesteps) - 1) else denoised + (h / h_before / 2) * (denoised - before)
        latents = math.sqrt((1 - after) / (1 - now)) * latents - math.sqrt(after) * math.expm1(-h) * ahead
        before, h_before = denoised, h
    return latents


def _levels(timesteps: Sequence[int], alphas: Tensor, *, last: float) -> list[float]:
    return [*(float(alphas[timestep]) for timestep in timesteps), last]


def _move(latents: Tensor, epsilon: Tensor, now: float, after: float) -> Tensor:
    """Go from noise level alpha `now` to `after` along one epsilon."""
    return math.sqrt(after / now) * latents + (math.sqrt(1 - after) - math.sqrt(after / now * (1 - now))) * epsilon


def _half_log_snr(alpha: float) -> float:
    return math.inf if alpha == 1 else math.log(alpha / (1 - alpha)) / 2


def leading(num_inference_steps: int, num_train_timesteps: int) -> list[int]:
    """Equal strides that end at timestep 1, as in 981, 961, ..., 1 for 50 of 1000; all 1000 of 1000 end at 0."""
    stride = num_train_timesteps // num_inference_steps
    offset = min(1, num_train_timesteps - 1 - (num_inference_steps - 1) * stride)
    return [index * stride + offset for index in reversed(range(num_inference_steps))]


def trailing(num_inference_steps: int, num_train_timesteps: int) -> list[int]:
    """Equal strides that start at the last timestep, as in 999, 899, ..., 99 for 10 of 1000 (Lin et al. 2024, table 2)."""
    left = num_train_timesteps - np.arange(num_inference_steps) * (num_train_timesteps / num_inference_steps)
    return [int(timestep) - 1 for timestep in left.round()]


def linspace(num_inference_steps: int, num_train_timesteps: int) -> list[int]:
    """Equal strides from the last timestep to the first, as in 999, 666, 333, 0 for 4 of 1000 (Lin et al. 2024, table 2)."""
    return [int(timestep) for timestep in np.linspace(num_train_timesteps - 1, 0, num_inference_steps).round()]


SOLVERS: dict[str, Solver] = {"plms": plms, "ddim": ddim, "dpmpp_2m": dpmpp_2m, "euler": euler}
FIRST_ORDER = ("ddim", "euler")
SPACINGS: dict[str, Callable[[int, int], list[int]]] = {"leading": leading, "trailing": trailing, "linspace": linspace}
"""(num_inference_steps, num_train_timesteps) to falling timesteps."""


def default_spacing(solver: str, *, zero_snr: bool = False) -> Spacing:
    """The spacing that a solver is known with; where the last timestep holds no signal, one that starts there."""
    return "leading" if solver in ("plms", "ddim") and not zero_snr else "trailing"


def check(solver: str, num_inference_steps: int, spacing: str | None = None, *, networks: Networks | None = None) -> None:
    """Refuse a solver, a spacing or a number of steps that cannot be used.

    Raises:
        ConfigError: `solver` or `spacing` is unknown, they do not go with the networks' noise schedule, or `num_inference_steps` lies
            outside 1 to `num_train_timesteps`.
    """
    if not isinstance(solver, str) or solver not in SOLVERS:
        raise ConfigError(f"solver {solver!r} is not known{hint(str(solver), SOLVERS)}")
    if spacing is not None and (not isinstance(spacing, str) or spacing not in SPACINGS):
        raise ConfigError(f"spacing {spacing!r} is not known{hint(str(spacing), SPACINGS)}")
    most = networks.noise_schedule.num_train_timesteps if networks is not None else None
    whole = isinstance(num_inference_steps, int) and not isinstance(num_inference_steps, bool)
    if not whole or num_inference_steps < 1 or (most is not None and num_inference_steps > most):
        allowed = "from 1 up" if most is None else f"from 1 to {most}"
        raise ConfigError(f"num_inference_steps={num_inference_steps!r}: it has to be a whole number {allowed}")
    if networks is not None and networks.noise_schedule.rescale_betas_zero_snr:
        _check_zero_snr(solver, spacing)


def _check_zero_snr(solver: str, spacing: str | None) -> None:
    if solver == "plms":
        raise ConfigError(
            "solver 'plms' follows the noise alone, and this model's last timestep holds nothing else, so that no picture can be read "
            "from it (rescale_betas_zero_snr); use ddim, dpmpp_2m or euler"
        )
    if spacing == "leading":
        raise ConfigError(
            "spacing 'leading' leaves out the last timestep, where this model has learned to start from noise alone "
            "(rescale_betas_zero_snr); use trailing or linspace"
        )


def timesteps_of(solver: str, num_inference_steps: int, spacing: str | None = None, *, networks: Networks) -> list[int]:
    """The falling timesteps that so many steps of a solver visit.

    Raises:
        ConfigError: as `check`.
    """
    check(solver, num_inference_steps, spacing, networks=networks)
    schedule = networks.noise_schedule
    chosen = spacing or default_spacing(solver, zero_snr=schedule.rescale_betas_zero_snr)
    return SPACINGS[chosen](num_inference_steps, schedule.num_train_timesteps)


def evaluated(solver: str, timesteps: Sequence[int]) -> list[int]:
    """The timestep of each UNet evaluation of a solver, found by taking its steps on one number."""
    asked: list[int] = []

    def note(latents: Tensor, timestep: int) -> Prediction:
        asked.append(timestep)
        return Prediction(latents, latents)

    alphas = torch.linspace(0.999, 0.005, max(timesteps) + 1, dtype=torch.float64)
    SOLVERS[solver](note, torch.ones(1), timesteps=timesteps, alphas=alphas)
    return asked


def evaluations(solver: str, num_inference_steps: int) -> int:
    """UNet evaluations of so many steps: 50 PLMS steps are 51.

    Raises:
        ConfigError: the solver is unknown or the number of steps is below 1.
    """
    check(solver, num_inference_steps)
    return len(evaluated(solver, range(num_inference_steps - 1, -1, -1)))


def solve(
    solver: str, predict: Predict, latents: Tensor, *, num_inference_steps: int, networks: Networks, spacing: str | None = None
) -> Tensor:
    """Take unit noise (B, C, h, w) to latents with a solver on its timesteps.

    Raises:
        ConfigError: as `check`.
    """
    timesteps = timesteps_of(solver, num_inference_steps, spacing, networks=networks)
    return SOLVERS[solver](predict, latents, timesteps=timesteps, alphas=alphas_cumprod(networks.noise_schedule))
