"""The optimizer, the learning rate as a function of the step, and the moving average of weights."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from sdlab.config import ConfigError, Stage

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each parameter."""
BLOCK = 256
"""Elements that share a scale in bitsandbytes' 8-bit moments."""


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training moves, by name: all, or those of an adapter alone."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def check_states(recipe: Stage, device_type: str, *, strategy: str) -> None:
    """Refuse `optimizer_states` that these devices cannot keep.

    Args:
        recipe: of the stage.
        device_type: "cpu" or "cuda".
        strategy: as of `TrainConfig`.

    Raises:
        ConfigError: 8bit on a CPU, with fsdp, or without bitsandbytes.
    """
    if recipe.optimizer_states != "8bit":
        return
    if device_type != "cuda":
        raise ConfigError("optimizer_states='8bit' needs a GPU; use optimizer_states='bfloat16'")
    if strategy == "fsdp":
        raise ConfigError("optimizer_states='8bit' cannot be used with strategy='fsdp'; use optimizer_states='bfloat16', or ddp")
    if importlib.util.find_spec("bitsandbytes") is None:
        needed = "needs the package bitsandbytes: pip install 'sdlab[bitsandbytes]'"
        raise ConfigError(f"optimizer_states='8bit' {needed}, or use optimizer_states='bfloat16'")


def make_optimizer(module: nn.Module, recipe: Stage) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019) over what is trained, with moments as the recipe's `optimizer_states` says.

    In float32 it is fused, but for 16-mixed, whose scaled gradients have to be clipped before. In 8 bits it is bitsandbytes' (Dettmers et
    al. 2021), which keeps small parameters' moments in float32.
    """
    hyper: dict[str, Any] = {"lr": recipe.learning_rate, "betas": recipe.betas, "eps": recipe.eps, "weight_decay": recipe.weight_decay}
    parameters = list(trained(module).values())
    if recipe.optimizer_states == "bfloat16":
        return RoundedAdamW(parameters, **hyper)
    if recipe.optimizer_states == "8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, **hyper)
    return torch.optim.AdamW(parameters, **hyper, fused=recipe.precision != "16-mixed")


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW whose moments are bfloat16, rounded up or down at random so that they are right on average.

    With beta2 = 0.999 a step moves the second moment by less than half of bfloat16's unit: rounded to the nearest it would stand still. The
    randomness is `random_bits`, so that training depends neither on ranks nor on being stopped.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._first, count = {}, 0
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            self._first[parameter] = count + _first_element(parameter)
            count += parameter.numel()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient; what `closure`, which may compute those, returns."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, local(parameter.grad), **group)
        return loss

    def _update(
        self, parameter: Tensor, gradient: Tensor, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, **_: Any
    ) -> None:
        state = self.state[parameter]
        if not state:
            state.update({"step": 0, **{moment: torch.zeros_like(parameter, dtype=torch.bfloat16) for moment in MOMENTS}})
        state["step"] += 1
        corrections = [1 - beta ** state["step"] for beta in betas]
        weight = local(parameter)
        mean, square = (local(state[moment]).float() for moment in MOMENTS)
        mean.lerp_(gradient, 1 - betas[0])
        square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        spread = square.sqrt().div_(math.sqrt(corrections[1])).add_(eps)
        weight.mul_(1 - lr * weight_decay).addcdiv_(mean, spread, value=-lr / corrections[0])
        bits = random_bits(weight, state["step"], first=self._first[parameter])
        for moment, values in zip(MOMENTS, (mean, square), strict=True):
            local(state[moment]).copy_(rounded(values, bits))


def random_bits(like: Tensor, step: int, *, first: int) -> Tensor:
    """16 random bits, as int32 in the shape of `like`, for an optimizer step and elements of numbers `first`, `first` + 1, ... of all.

    They are the upper half of a hash (lowbias32, Wellons 2018) of step and number, and the same on every device.
    """
    bits = torch.arange(like.numel(), dtype=torch.int32, device=like.device)
    bits += _as_int32(first + step * 0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits ^= (bits >> shift) & (0xFFFFFFFF >> shift)
        bits *= _as_int32(factor)
    return ((bits >> 16) & 0xFFFF).view(like.shape)


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def rounded(values: Tensor, bits: Tensor) -> Tensor:
    """float32 values, each as one of the two beside it that bfloat16 holds, as likely as makes the mean right, by 16 random bits."""
    return ((values.view(torch.int32) + bits) & ~0xFFFF).view(torch.float32)


def _first_element(parameter: Tensor) -> int:
    """The number, within a parameter, of the first element that this rank holds: shards are rows."""
    if not isinstance(parameter, DTensor):
        return 0
    rows = local(sharded_like(torch.arange(len(parameter)), parameter))
    return int(rows[0]) * parameter.shape[1:].numel() if len(rows) else 0


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


class Quantised(Tensor):
    """A moment in 8 bits, which looks like a float32 tensor and is made one by `whole`, so that there is only one of them at a time."""

    make: Callable[[], Tensor]


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together, for which all ranks have to call, or a quantised one in float32; any other tensor as it is."""
    if isinstance(tensor, Quantised):
        return tensor.make()
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def sharded_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, on the device of `pattern` and sharded as that is."""
    if not isinstance(pattern, DTensor):
        return tensor.to(pattern.device, pattern.dtype)
    on_device = tensor.to(pattern.to_local().device, pattern.dtype)
    return distribute_tensor(on_device, pattern.device_mesh, pattern.placements, src_data_rank=None)


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The Adam moments by parameter name: groups "exp_avg" and "exp_avg_sq", zeros before the first step; what `whole` takes."""
    names = trained(module)
    return {moment: {name: _moment(optimizer, parameter, moment) for name, parameter in names.items()} for moment in MOMENTS}


def _moment(optimizer: torch.optim.Optimizer, parameter: Tensor, moment: str) -> Tensor:
    state, number = optimizer.state[parameter], MOMENTS.index(moment) + 1
    if moment in state:
        return state[moment]
    if "state1" not in state:
        return torch.zeros_like(parameter, dtype=_moment_dtype(optimizer))
    return _quantised(*(state.get(f"{part}{number}") for part in ("state", "absmax", "qmap")))


def _moment_dtype(optimizer: torch.optim.Optimizer) -> torch.dtype:
    return torch.bfloat16 if isinstance(optimizer, RoundedAdamW) else torch.float32


def _quantised(codes: Tensor, scales: Tensor | None, table: Tensor | None) -> Tensor:
    """A moment that bitsandbytes keeps; without scales it is in float32."""
    if scales is None:
        return codes
    from bitsandbytes.functional import dequantize_blockwise

    tensor = torch.empty(codes.shape, device="meta").as_subclass(Quantised)
    tensor.make = partial(dequantize_blockwise, codes, absmax=scales, code=table, blocksize=BLOCK)
    return tensor


def restore_optimizer(
    module: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Callable[[str], Tensor]], *, step: int
) -> None:
    """Put saved Adam moments back after `step` optimizer steps, bit for bit but for those in 8 bits, which are quantised again.

    Args:
        module: whose parameters the optimizer moves.
        optimizer: of `make_optimizer`.
        moments: what gives the whole tensor of a parameter's name, by moment.
        step: optimizer steps that were not skipped.
    """
    for index, (name, parameter) in enumerate(trained(module).items()):
        pattern = parameter.detach().to(_moment_dtype(optimizer))
        state: dict[str, Any] = {moment: sharded_like(moments[moment](name), pattern) for moment in MOMENTS}
        if isinstance(optimizer, RoundedAdamW):
            optimizer.state[parameter] = {"step": step, **state}
        elif isinstance(optimizer, torch.optim.AdamW):
            optimizer.state[parameter] = {"step": torch.tensor(float(step), device=local(parameter).device), **state}
        else:
            _restore_8bit(optimizer, index, state, step=step)


def _restore_8bit(optimizer: Any, index: int, moments: Mapping[str, Tensor], *, step: int) -> None:
    """Quantise the moments of a parameter, of which bitsandbytes says where it keeps them in float32."""
    from bitsandbytes.functional import quantize_blockwise

    (group,) = optimizer.param_groups
    parameter = group["params"][index]
    optimizer.init_state(group, parameter, 0, index)
    state = optimizer.state[parameter]
    state["step"] = step
    for number, moment in enumerate(MOMENTS, 1):
        codes = moments[moment]
        if f"qmap{number}" in state:
            codes, quantised = quantize_blockwise(codes, code=state[f"qmap{number}"], blocksize=BLOCK)
            state[f"absmax{number}"] = quantised.absmax
        state[f"state{number}"] = codes


class Ema:
    """An exponential moving average of a module's trained parameters, sharded as they are.

    After step t the decay is min(decay, (1 + t) / (10 + t)), so that early averages forget the random start.

    Attributes:
        tensors: the average by parameter name.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.tensors = {name: parameter.detach().clone() for name, parameter in trained(module).items()}

    @torch.no_grad()
    def update(self, module: nn.Module, step: int) -> None:
        """Move towards the weights after optimizer step `step` (from 1)."""
        decay = min(self.decay, (1 + step) / (10 + step))
        weights = [local(parameter) for parameter in trained(module).values()]
        torch._foreach_lerp_([local(tensor) for tensor in self.tensors.values()], weights, 1 - decay)

    def restore(self, read: Callable[[str], Tensor]) -> None:
        """Put a saved average back; `read` gives the whole tensor of a parameter's name."""
        for name, tensor in self.tensors.items():
            self.tensors[name] = sharded_like(read(name), tensor)
