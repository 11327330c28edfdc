"""What a stage takes before it runs: memory, work, time and money, from shapes alone."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, get_args

from torch import Tensor

from sdlab import models
from sdlab.config import ConfigError, Lora, Networks, Stage, Strategy
from sdlab.lora import layers
from sdlab.traced import check_word, forward

PEAK_FLOPS = {"A100": 312e12, "H100 SXM": 989e12, "H200": 989e12}
"""Dense bfloat16 FLOP/s of one device at most, by NVIDIA's data sheets of the three."""
MOMENT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "8bit": 1 + 4 / 256}
"""Bytes of one Adam moment of one parameter; 8bit has a float32 scale for each 256 (Dettmers et al. 2022)."""

_BLOCK = re.compile(r"(down_blocks|up_blocks)\.\d+|mid_block")


# Memory


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; what CUDA itself, workspaces, a layer's own gradients and gaps between tensors take comes on top."""

    weights: int
    """Float32, also in mixed precision, and with an adapter's."""
    gradients: int
    """Twice under ddp on several devices, whose buckets hold them a second time."""
    moments: int
    """Of Adam."""
    average: int
    """The moving average of what is trained."""
    gathered: int
    """The largest block's weights and gradients, which fsdp holds whole while it computes them."""
    activations: int
    """As `activation_bytes`."""
    frozen: int
    """VAE and text encoders."""

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))


def activation_bytes(
    networks: Networks,
    resolution: int,
    micro_batch_size: int,
    *,
    precision: str,
    gradient_checkpointing: bool,
    device_type: str = "cuda",
    lora: Lora | None = None,
) -> int:
    """Bytes that a forward leaves for the backward pass: what autograd keeps, and autocast's copies of weights in mixed precision.

    Each storage counts once and weights themselves do not; one sample is measured and the rest is linear. With gradient checkpointing it is
    what stays through the forward, and what the largest of the parts keeps while it is computed again. Gradients of activations, which come
    and go in the backward pass, are not in it.

    Args:
        networks: whose UNet it is.
        resolution: pixels a side.
        micro_batch_size: samples a forward.
        precision: "32-true", "bf16-mixed" or "16-mixed".
        gradient_checkpointing: compute resnets and transformer blocks again in the backward pass.
        device_type: "cuda" with flash attention and CUDA's rules of mixed precision, or "cpu" with plain attention as `launch.attention`.
        lora: the adapter, where only that is trained.

    Raises:
        ConfigError: an unknown word, a resolution that cannot be halved evenly, or arguments that make no UNet.
    """
    check_positive(micro_batch_size=micro_batch_size)
    ran = forward(networks, resolution, precision=precision, device_type=device_type, lora=lora)
    if not gradient_checkpointing:
        return ran.kept.sample * micro_batch_size + max(ran.kept.copies, ran.cached)
    again = max((kept.bytes(micro_batch_size) for kept in ran.again), default=0)
    return ran.outside.sample * micro_batch_size + max(ran.outside.copies + again, ran.cached)


def memory(
    networks: Networks,
    recipe: Stage,
    *,
    micro_batch_size: int,
    frozen_parameters: int,
    world_size: int = 1,
    strategy: str = "auto",
    gradient_checkpointing: bool = False,
    frozen_bytes_per_parameter: int = 4,
    device_type: str = "cuda",
) -> Memory:
    """What training takes on each device.

    Args:
        networks: whose UNet is trained.
        recipe: of the stage.
        micro_batch_size: samples a forward.
        frozen_parameters: of the VAE and the text encoders together; 0 where all that they say is cached.
        world_size: devices in all.
        strategy: "auto" and "ddp" hold all weights on each device, "fsdp" a share.
        gradient_checkpointing: see `activation_bytes`.
        frozen_bytes_per_parameter: 4 in float32.
        device_type: see `activation_bytes`.

    Raises:
        ConfigError: as `activation_bytes`, or a target of the adapter that no layer has.
    """
    check_word("strategy", strategy, get_args(Strategy))
    check_positive(world_size=world_size)
    sizes, trained = _sizes(networks.model_dump_json(), recipe.lora and recipe.lora.model_dump_json())
    shards, copies = (world_size, 1) if strategy == "fsdp" else (1, 1 if world_size == 1 else 2)
    moment_bytes = 2 * MOMENT_BYTES[recipe.optimizer_states]
    return Memory(
        weights=4 * sizes.total() // shards,
        gradients=4 * copies * trained.total() // shards,
        moments=int(moment_bytes * trained.total() / shards),
        average=(4 if recipe.ema_decay is not None else 0) * trained.total() // shards,
        gathered=4 * max(sizes[block] + trained[block] for block in sizes if block) if strategy == "fsdp" else 0,
        activations=activation_bytes(
            *(networks, recipe.resolution, micro_batch_size),
            precision=recipe.precision,
            gradient_checkpointing=gradient_checkpointing,
            device_type=device_type,
            lora=recipe.lora,
        ),
        frozen=frozen_parameters * frozen_bytes_per_parameter,
    )


def count_trained(networks: Networks, lora: Lora | None) -> int:
    """Parameters that training moves: the UNet's, or those of an adapter alone."""
    return _sizes(networks.model_dump_json(), None if lora is None else lora.model_dump_json())[1].total()


@functools.lru_cache(maxsize=64)
def _sizes(networks_json: str, lora_json: str | None) -> tuple[Counter[str], Counter[str]]:
    """Parameters that are there and that are trained, by block of the UNet as fsdp shards them, "" for what is in none."""
    shapes = models.unet_shapes(Networks.model_validate_json(networks_json))
    adapters = {} if lora_json is None else _adapters(shapes, Lora.model_validate_json(lora_json))
    there, trained = Counter[str](), Counter[str]()
    for name, tensor in shapes.items():
        found = _BLOCK.match(name)
        block = found.group() if found else ""
        there[block] += tensor.numel() + adapters.get(name, 0)
        trained[block] += tensor.numel() if lora_json is None else adapters.get(name, 0)
    return there, trained


def _adapters(shapes: Mapping[str, Tensor], lora: Lora) -> dict[str, int]:
    """Parameters of the adapter of each weight that has one: rank x (inputs x kernel + outputs)."""
    weights = [f"{layer}.weight" for layer in layers(shapes, lora)]
    return {name: lora.rank * (shapes[name][0].numel() + len(shapes[name])) for name in weights}


# Ways to make it fit


@dataclass(frozen=True)
class Option:
    """A way to run a stage."""

    name: str
    changes: dict[str, Any]
    """What to give, by name: `strategy`, `gradient_checkpointing`, `micro_batch_size`; `optimizer_states` is of the recipe."""
    memory: Memory


_LESS: dict[str, Any] = {"micro_batch_size": 1, "gradient_checkpointing": True}
_WAYS: tuple[dict[str, Any], ...] = (
    *({"micro_batch_size": 1}, {"gradient_checkpointing": True}, _LESS, {"strategy": "fsdp"}, {"strategy": "fsdp", **_LESS}),
    *({"optimizer_states": states, **less} for states in ("bfloat16", "8bit") for less in ({}, _LESS)),
    {"strategy": "fsdp", "optimizer_states": "bfloat16", **_LESS},
)
"""From the same training to other arithmetic."""


def options(networks: Networks, recipe: Stage, *, available_bytes: int = 0, **asked: Any) -> list[Option]:
    """Ways to run a stage: as it is asked for, and those that take less, in order of how little they change.

    First what trains the same: smaller micro-batches, gradient checkpointing, fsdp; then shorter Adam moments.

    Args:
        networks: whose UNet is trained.
        recipe: of the stage.
        available_bytes: memory of a device, for which the largest smaller micro-batch is chosen; without it that is 1.
        asked: the keywords of `memory`.

    Raises:
        ConfigError: as `memory`.
    """
    now = {"strategy": "auto", "gradient_checkpointing": False, "world_size": 1, "device_type": "cuda", **asked}
    now |= {"optimizer_states": recipe.optimizer_states}
    found = {"as it is": Option("as it is", {}, memory(networks, recipe, **asked))}
    for way in _WAYS:
        changes = {name: value for name, value in way.items() if value != now[name]}
        if changes and _is_possible(now, changes, precision=recipe.precision):
            option = _option(networks, recipe, asked, changes, available_bytes)
            found.setdefault(option.name, option)
    return [option for option in found.values() if not option.changes or option.memory.total < found["as it is"].memory.total]


def what_fits(options: Iterable[Option], available_bytes: float) -> Option | None:
    """The first of several ways that takes no more than there is; None where none does."""
    return next((option for option in options if option.memory.total <= available_bytes), None)


def _option(networks: Networks, recipe: Stage, asked: Mapping[str, Any], changes: dict[str, Any], available_bytes: int) -> Option:
    of_recipe = {name: value for name, value in changes.items() if name in Stage.model_fields and name != "micro_batch_size"}
    changed = recipe.model_copy(update=of_recipe)
    running = {**asked, **{name: value for name, value in changes.items() if name not in of_recipe}}
    if "micro_batch_size" in changes:
        largest = asked["micro_batch_size"]
        for size in (size for size in range(largest - 1, 0, -1) if largest % size == 0):
            running["micro_batch_size"] = changes["micro_batch_size"] = size
            if memory(networks, changed, **running).total <= available_bytes:
                break
    named = " + ".join(f"{name}={value!r}" for name, value in changes.items())
    return Option(named, changes, memory(networks, changed, **running))


def _is_possible(now: Mapping[str, Any], changes: Mapping[str, Any], *, precision: str) -> bool:
    """Whether changes go with the devices and with each other: bitsandbytes, which keeps 8-bit moments, needs a GPU and whole tensors."""
    way = {**now, **changes}
    if way["optimizer_states"] == "8bit" and (way["device_type"] != "cuda" or way["strategy"] == "fsdp"):
        return False
    return changes.get("strategy") != "fsdp" or (way["world_size"] > 1 and precision != "16-mixed")


# Work, time and money


def forward_flops(networks: Networks, resolution: int) -> int:
    """FLOPs, two a multiply-add, of one forward of the UNet for one sample at `resolution` pixels a side, attention with it.

    Training takes three times as much, for the backward pass takes two, and four with gradient checkpointing, which computes it again.

    Raises:
        ConfigError: as `activation_bytes`.
    """
    return forward(networks, resolution, precision="bf16-mixed", device_type="cuda").flops


def throughput(
    networks: Networks,
    resolution: int,
    *,
    device_flops: float,
    utilisation: float,
    world_size: int = 1,
    gradient_checkpointing: bool = False,
) -> float:
    """Samples a second that training gets through, by its FLOPs alone: the frozen parts and all waiting are in `utilisation`.

    Args:
        networks: whose UNet is trained.
        resolution: pixels a side.
        device_flops: FLOP/s of one device at most, as in `PEAK_FLOPS`.
        utilisation: share of them that is reached, above 0 and at most 1; published trainings reach 0.15 to 0.3.
        world_size: devices in all.
        gradient_checkpointing: another forward in each backward pass; FLOPs computed again are work here too.

    Raises:
        ConfigError: as `activation_bytes`, or numbers that cannot be.
    """
    check_positive(device_flops=device_flops, utilisation=utilisation, world_size=world_size)
    if utilisation > 1:
        raise ConfigError(f"utilisation={utilisation!r} is more than all of a device; give a share, as in 0.3")
    flops = (4 if gradient_checkpointing else 3) * forward_flops(networks, resolution)
    return world_size * device_flops * utilisation / flops


@dataclass(frozen=True)
class Cost:
    """What a stage takes of people and budgets."""

    days: float
    device_hours: float
    money: float | None
    """In the currency of the price; None without one."""


def cost(*, samples: int, samples_per_second: float, world_size: int, price_per_device_hour: float | None = None) -> Cost:
    """Time and money for `samples` at a rate that all devices reach together.

    Raises:
        ConfigError: numbers that are not above 0.
    """
    check_positive(samples=samples, samples_per_second=samples_per_second, world_size=world_size)
    if price_per_device_hour is not None and not 0 <= price_per_device_hour < math.inf:
        raise ConfigError(f"price_per_device_hour={price_per_device_hour!r} cannot be used; give 0 or more, or None")
    hours = samples / samples_per_second / 3600
    spent = hours * world_size
    return Cost(hours / 24, spent, None if price_per_device_hour is None else spent * price_per_device_hour)


def check_positive(**values: float) -> None:
    """Refuse numbers that are not above 0, or have no end.

    Raises:
        ConfigError: with their names.
    """
    wrong = [f"{name}={value!r}" for name, value in values.items() if not 0 < value < math.inf]
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} cannot be used; give numbers above 0")
