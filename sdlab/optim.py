"""The optimizer, the learning rate as a function of the step, and the moving average of weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sdlab.config import Stage

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each parameter."""


def make_optimizer(module: nn.Module, recipe: Stage) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) over all parameters; fused, but for 16-mixed, whose scaled gradients have to be clipped before."""
    return torch.optim.AdamW(
        module.parameters(),
        lr=recipe.learning_rate,
        betas=recipe.betas,
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        fused=recipe.precision != "16-mixed",
    )


def learning_rate(recipe: Stage, step: int) -> float:
    """The learning rate of optimizer step `step` (from 1): linear warm-up, then constant or half a cosine down to zero."""
    if step <= recipe.warmup_steps:
        return recipe.learning_rate * step / recipe.warmup_steps
    if recipe.lr_schedule == "constant":
        return recipe.learning_rate
    progress = (step - recipe.warmup_steps) / max(1, recipe.schedule_steps - recipe.warmup_steps + 1)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, for which all ranks have to call; any other tensor as it is."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def sharded_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, on the device of `pattern` and sharded as that is."""
    if not isinstance(pattern, DTensor):
        return tensor.to(pattern.device, pattern.dtype)
    on_device = tensor.to(pattern.to_local().device, pattern.dtype)
    return distribute_tensor(on_device, pattern.device_mesh, pattern.placements, src_data_rank=None)


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The Adam moments by parameter name: groups "exp_avg" and "exp_avg_sq", zeros before the first step."""
    names = dict(module.named_parameters())
    return {
        moment: {name: optimizer.state[parameter].get(moment, torch.zeros_like(parameter)) for name, parameter in names.items()}
        for moment in MOMENTS
    }


def restore_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Callable[[str], Tensor]], *, step: int
) -> None:
    """Put saved Adam moments back after `step` optimizer steps.

    Args:
        module: whose parameters the optimizer moves.
        optimizer: of `make_optimizer`.
        moments: what gives the whole tensor of a parameter's name, by moment.
        step: optimizer steps that were not skipped.
    """
    for name, parameter in module.named_parameters():
        state: dict[str, Any] = {moment: sharded_like(moments[moment](name), parameter.detach()) for moment in MOMENTS}
        optimizer.state[parameter] = {"step": torch.tensor(float(step), device=local(parameter).device), **state}


class Ema:
    """An exponential moving average of a module's parameters, sharded as they are.

    After step t the decay is min(decay, (1 + t) / (10 + t)), so that early averages forget the random start.

    Attributes:
        tensors: the average by parameter name.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Move towards the weights after optimizer step `step` (from 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [local(parameter) for parameter in module.parameters()]
        torch._foreach_lerp_([local(tensor) for tensor in self.tensors.values()], weights, 1 - decay)

    def restore(self, read: Callable[[str], Tensor]) -> None:
        """Put a saved average back; `read` gives the whole tensor of a parameter's name."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = sharded_like(read(name), tensor)
