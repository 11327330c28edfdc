"""Solvers of the probability-flow ODE as short pure functions, in epsilon space whatever the UNet predicts.

With alpha the share of signal variance, x / sqrt(alpha) moves along epsilon as sigma = sqrt((1 - alpha) / alpha) falls to zero.
All solvers have one signature: `predict(latents, timestep)` gives epsilon, `timesteps` fall, the state keeps its dtype, and
coefficients are float64.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sdlab.config import ConfigError, hint

Predict = Callable[[Tensor, int], Tensor]
"""Epsilon (B, C, h, w) of `noisy_latents` (B, C, h, w) at one timestep."""
Solver = Callable[..., Tensor]


def ddim(predict: Predict, latents: Tensor, *, timesteps: Sequence[int], alphas: Tensor) -> Tensor:
    """Deterministic DDIM (Song et al. 2021, eq. 12 with eta 0), which ends at the training schedule's first alpha.

    Args:
        predict: epsilon of latents at a timestep.
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
    for index, timestep in enumerate(timesteps):
        latents = _move(latents, predict(latents, timestep), levels[index], levels[index + 1])
    return latents


def plms(predict: Predict, latents: Tensor, *, timesteps: Sequence[int], alphas: Tensor) -> Tensor:
    """Pseudo linear multistep (Liu et al. 2022, eq. 12): the first step averages epsilon at both its ends, then Adams-Bashforth 2, 3, 4.

    Arguments and result are those of `ddim`; the first step evaluates twice, so n steps cost n + 1 evaluations.
    """
    levels = _levels(timesteps, alphas, last=float(alphas[0]))
    past: list[Tensor] = []
    for index, timestep in enumerate(timesteps):
        past = [predict(latents, timestep), *past[:3]]
        if index == 0:
            ahead = _move(latents, past[0], levels[0], levels[1])
            epsilon = (past[0] + predict(ahead, timesteps[:2][-1])) / 2
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
        denoised = (latents - math.sqrt(1 - now) * predict(latents, timestep)) / math.sqrt(now)
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


SOLVERS: dict[str, Solver] = {"plms": plms, "ddim": ddim, "dpmpp_2m": dpmpp_2m, "euler": euler}
SPACINGS: dict[str, Callable[[int, int], list[int]]] = {"plms": leading, "ddim": leading, "dpmpp_2m": trailing, "euler": trailing}
"""Timesteps of each solver: (num_inference_steps, num_train_timesteps) to falling timesteps."""


def check(solver: str, num_inference_steps: int, *, num_train_timesteps: int = 1000) -> None:
    """Refuse a solver or a number of steps that cannot be used.

    Raises:
        ConfigError: `solver` is unknown, or `num_inference_steps` lies outside 1 to `num_train_timesteps`.
    """
    if solver not in SOLVERS:
        raise ConfigError(f"solver {solver!r} is not known{hint(str(solver), SOLVERS)}")
    whole = isinstance(num_inference_steps, int) and not isinstance(num_inference_steps, bool)
    if not whole or not 1 <= num_inference_steps <= num_train_timesteps:
        raise ConfigError(f"num_inference_steps={num_inference_steps!r}: it has to be a whole number from 1 to {num_train_timesteps}")


def solve(solver: str, predict: Predict, latents: Tensor, *, num_inference_steps: int, alphas: Tensor) -> Tensor:
    """Take unit noise (B, C, h, w) to latents with a solver on its own timesteps.

    Raises:
        ConfigError: as `check`.
    """
    check(solver, num_inference_steps, num_train_timesteps=len(alphas))
    timesteps = SPACINGS[solver](num_inference_steps, len(alphas))
    return SOLVERS[solver](predict, latents, timesteps=timesteps, alphas=alphas)


def evaluations(solver: str, num_inference_steps: int) -> int:
    """UNet evaluations of so many steps, counted by taking them on one number: 50 PLMS steps are 51.

    Raises:
        ConfigError: the solver is unknown or the number of steps is below 1.
    """
    asked: list[int] = []

    def count(latents: Tensor, timestep: int) -> Tensor:
        asked.append(timestep)
        return latents

    check(solver, num_inference_steps, num_train_timesteps=sys.maxsize)
    alphas = torch.linspace(0.999, 0.005, num_inference_steps, dtype=torch.float64)
    solve(solver, count, torch.ones(1), num_inference_steps=num_inference_steps, alphas=alphas)
    return len(asked)
