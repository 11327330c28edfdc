"""The optimizer, the learning rate as a function of the step, and the moving average of weights."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from sdlab.config import Stage


def make_optimizer(module: nn.Module, recipe: Stage) -> torch.optim.AdamW:
    """Fused AdamW (Loshchilov & Hutter 2019) over all parameters."""
    return torch.optim.AdamW(
        module.parameters(), lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.eps, weight_decay=recipe.weight_decay, fused=True
    )


def learning_rate(recipe: Stage, step: int) -> float:
    """The learning rate of optimizer step `step` (from 1): linear warm-up, then constant or half a cosine down to zero."""
    if step <= recipe.warmup_steps:
        return recipe.learning_rate * step / recipe.warmup_steps
    if recipe.lr_schedule == "constant":
        return recipe.learning_rate
    progress = (step - recipe.warmup_steps) / max(1, recipe.schedule_steps - recipe.warmup_steps + 1)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The Adam moments by parameter name: groups "exp_avg" and "exp_avg_sq"."""
    states = {name: optimizer.state[parameter] for name, parameter in module.named_parameters()}
    return {moment: {name: state[moment] for name, state in states.items()} for moment in ("exp_avg", "exp_avg_sq")}


def restore_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, dict[str, Tensor]], *, step: int) -> None:
    """Put saved Adam moments back after `step` optimizer steps."""
    for name, parameter in module.named_parameters():
        state: dict[str, Any] = {moment: moments[moment][name].to(parameter.device) for moment in moments}
        optimizer.state[parameter] = {"step": torch.tensor(float(step), device=parameter.device), **state}


class Ema:
    """An exponential moving average of a module's parameters, itself a module that can draw.

    After step t the decay is min(decay, (1 + t) / (10 + t)), so that early averages forget the random start.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(module).requires_grad_(False).eval()
        self.decay = decay
        self._shadow: list[Tensor] = list(self.module.parameters())

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Move towards the weights after optimizer step `step` (from 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights: list[Tensor] = list(module.parameters())
        torch._foreach_lerp_(self._shadow, weights, 1 - decay)
