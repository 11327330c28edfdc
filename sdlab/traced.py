"""One forward of a UNet without data: its work, and what it leaves for the backward pass."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sdlab import models, places
from sdlab.config import ConfigError, Lora, Networks, Precision, check_resolution, hint
from sdlab.lora import layers

_LOWER = {F.linear, F.conv2d, F.scaled_dot_product_attention, torch.matmul, torch.bmm, torch.baddbmm, torch.einsum}
_WORK: dict[Any, Callable[[Tensor, Tensor], int]] = {
    F.linear: lambda _, weight: weight.shape[1],
    F.conv2d: lambda _, weight: weight[0].numel(),
    F.scaled_dot_product_attention: lambda _, key: 2 * key.shape[-2],
}
"""Multiply-adds behind each number that a function gives; attention sums over the keys twice, for scores and for values."""
_FLOAT32 = {F.group_norm, F.layer_norm, F.softmax, torch.softmax}
"""What CUDA's autocast runs in bfloat16 and in float32, of what a UNet calls; a CPU's leaves the second as they are."""


@dataclass(frozen=True)
class Kept:
    """Bytes that autograd keeps of one sample, and of copies of weights in a lower precision, which do not grow with samples."""

    sample: int
    copies: int

    def bytes(self, samples: int) -> int:
        return self.sample * samples + self.copies


@dataclass(frozen=True)
class Forward:
    """What one forward of one sample takes."""

    flops: int
    kept: Kept
    outside: Kept
    """What is kept where gradient checkpointing throws away what each of its parts keeps."""
    again: frozenset[Kept]
    """What each of those parts keeps once it is computed again."""
    cached: int
    """Bytes of the copies of weights that autocast holds until the forward ends."""


class _Autocast(TorchFunctionMode):
    """What mixed precision and attention kernels make of a forward on the meta device, for which torch has neither."""

    def __init__(self, *, mixed: bool, device_type: str) -> None:
        super().__init__()
        self.mixed, self.cuda = mixed, device_type == "cuda"
        self.copies: dict[nn.Parameter, Tensor] = {}
        self.flops = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.mixed and func in _LOWER:
            args = [self._cast(value, torch.bfloat16) for value in args]
            kwargs = {name: self._cast(value, torch.bfloat16) for name, value in kwargs.items()}
        elif self.mixed and self.cuda and func in _FLOAT32:
            args = [self._cast(value, torch.float32) for value in args]
        if self.cuda and func is F.scaled_dot_product_attention:
            output = torch.ops.aten._scaled_dot_product_flash_attention(*args[:3])[0]
        else:
            output = func(*args, **kwargs)
        if func in _WORK:
            self.flops += 2 * output.numel() * _WORK[func](*args[:2])
        return output

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(dtype)
        return self.copies.setdefault(value, value.to(dtype))


class _Keeper:
    """Counts the storages that autograd keeps in a forward, each once, as it is and as gradient checkpointing would have it.

    It holds them, for one that is let go leaves its address to another.
    """

    def __init__(self, unet: nn.Module, copies: Mapping[nn.Parameter, Tensor]) -> None:
        self.copies = copies
        self.weights = {_storage(parameter) for parameter in unet.parameters()}
        self.all: dict[int, torch.UntypedStorage] = {}
        self.outside: dict[int, torch.UntypedStorage] = {}
        self.inside: dict[int, torch.UntypedStorage] | None = None
        self.again: set[Kept] = set()

    def keep(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves."""
        if _storage(tensor) not in self.weights:
            self.all[_storage(tensor)] = tensor.untyped_storage()
            (self.outside if self.inside is None else self.inside)[_storage(tensor)] = tensor.untyped_storage()
        return tensor

    def call(self, module: Callable[..., Any], *args: Any) -> Any:
        """Call what gradient checkpointing would keep the inputs of, and nothing else."""
        self.outside |= {_storage(value): value.untyped_storage() for value in args if isinstance(value, Tensor)}
        self.inside = {}
        output = module(*args)
        self.again.add(self.count({key: value for key, value in self.inside.items() if key not in self.outside}))
        self.inside = None
        return output

    def count(self, storages: Mapping[int, torch.UntypedStorage]) -> Kept:
        """Bytes of storages, copies of weights apart."""
        copies = {_storage(copy) for copy in self.copies.values()}
        sizes: Counter[bool] = Counter()
        for key, storage in storages.items():
            sizes[key in copies] += storage.nbytes()
        return Kept(sample=sizes[False], copies=sizes[True])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def forward(networks: Networks, resolution: int, *, precision: str, device_type: str, lora: Lora | None = None) -> Forward:
    """What one forward of the UNet for one sample does and leaves, remembered for as long as the process lives.

    Raises:
        ConfigError: an unknown word, a resolution that cannot be halved evenly, or arguments that make no UNet.
    """
    check_word("precision", precision, get_args(Precision))
    check_word("device_type", device_type, ("cuda", "cpu"))
    check_resolution(resolution, vae_factor=places.vae_factor(networks), unet_factor=models.unet_factor(networks))
    return _run(networks.model_dump_json(), resolution, precision != "32-true", device_type, lora and lora.model_dump_json())


@functools.lru_cache(maxsize=64)
def _run(networks_json: str, resolution: int, mixed: bool, device_type: str, lora_json: str | None) -> Forward:
    networks = Networks.model_validate_json(networks_json)
    with torch.device("meta"):
        unet = models.build_unet(networks).train()
    if lora_json is not None:  # an adapter keeps the input of its layer
        changed = layers(dict(unet.named_parameters()), Lora.model_validate_json(lora_json))
        unet.requires_grad_(False)
        for layer in changed:
            unet.get_parameter(f"{layer}.weight").requires_grad_(True)
    autocast = _Autocast(mixed=mixed, device_type=device_type)
    keeper = _Keeper(unet, autocast.copies)
    unet.enable_gradient_checkpointing(keeper.call)
    inputs = _inputs(networks, resolution, torch.bfloat16 if mixed else torch.float32)
    with saved_tensors_hooks(keeper.keep, lambda tensor: tensor), autocast:
        unet(**inputs, return_dict=False)
    cached = sum(copy.untyped_storage().nbytes() for weight, copy in autocast.copies.items() if weight.requires_grad)
    counted = keeper.count(keeper.all), keeper.count(keeper.outside), frozenset(keeper.again)
    return Forward(autocast.flops, *counted, cached)


def _inputs(networks: Networks, resolution: int, dtype: torch.dtype) -> dict[str, Any]:
    """What the UNet is called with for one sample, without data."""
    unet, side = networks.unet, resolution // places.vae_factor(networks)
    tokens = places.configs(networks)[1][0].get("max_position_embeddings", 77)
    with torch.device("meta"):
        inputs: dict[str, Any] = {
            "sample": torch.empty(1, unet.get("in_channels", 4), side, side, dtype=dtype),
            "timestep": torch.empty(1, dtype=torch.int64),
            "encoder_hidden_states": torch.empty(1, tokens, unet.get("cross_attention_dim", 1280), dtype=dtype),
        }
        if networks.takes_sizes:
            pooled = unet["projection_class_embeddings_input_dim"] - 6 * unet["addition_time_embed_dim"]
            sizes = torch.empty(1, 6, dtype=torch.int64)
            inputs["added_cond_kwargs"] = {"text_embeds": torch.empty(1, pooled, dtype=dtype), "time_ids": sizes}
    return inputs


def check_word(name: str, value: str, known: Iterable[str]) -> None:
    """Refuse a word that is not known.

    Raises:
        ConfigError: with the known ones.
    """
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not known{hint(value, known)}")
