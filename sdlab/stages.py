"""What one run of a stage is to be: everything a person gave, checked together before any device works."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sdlab import checkpoints, costs, launch, models, optim, parents, places, presets, runs
from sdlab.cache import Cache, open_cache
from sdlab.config import (
    ConfigError,
    Networks,
    Preset,
    Stage,
    TrainConfig,
    accumulation_steps,
    build,
    check_resolution,
    resolve_path,
)

UTILISATION = 0.25
"""Share of a device's peak that published trainings of these families reach, 0.15 to 0.31 with encoders online or cached."""


@dataclass(frozen=True)
class Estimate:
    """What a stage takes, from shapes alone: no data, no weights and no device are needed."""

    label: str
    parameters: dict[str, int]
    """Of `unet`, `vae` and `text_encoders`."""
    steps: int
    samples: int
    forward_flops: int
    """Of the UNet for one sample."""
    world_size: int
    options: list[costs.Option]
    """As it was asked for, and ways that take less memory."""
    costs: dict[str, tuple[float, costs.Cost]]
    """Samples a second at `UTILISATION`, or as they were given, and what that takes, by device."""


@dataclass(frozen=True)
class Plan:
    """What a run is going to take."""

    run_dir: str
    step: int
    """Where it goes on from."""
    parameters: int
    """Of the UNet."""
    samples: int
    epochs: float
    memory: costs.Memory
    """On each device."""
    available_bytes: int
    """Memory of the device, or this rank's share of the machine's."""
    disk_bytes: int
    """Most that checkpoints and the exported pipeline take."""


def configure(
    *,
    preset: str,
    stage: str,
    data_dir: str,
    overrides: Mapping[str, Any] | None = None,
    init_from: str | None = None,
    init_weights: str = "auto",
    max_steps: int | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    precision: str | None = None,
    devices: str | int = "auto",
    val_data_dir: str | None = None,
    val_every: int | None = None,
    save_every: int = 200,
    log_every: int = 10,
    preview_every: int = 0,
    **running: Any,
) -> TrainConfig:
    """Check everything that a run needs and put it into one config, before any training.

    Args:
        preset: a family's name or file.
        stage: a stage of it.
        data_dir: what notebook 01 wrote.
        overrides: recipe fields to change.
        init_from: a run folder, a pipeline folder, a hub id or "tiny" whose UNet this run starts from; a stage with a parent needs it.
        init_weights: "ema", "raw" or "auto" of `init_from`.
        max_steps: where this call stops; None for the stage's `schedule_steps`.
        global_batch_size: samples an optimizer step; None for the stage's.
        micro_batch_size: samples a forward; None for the stage's, or each rank's share of the global batch size where that is smaller.
        precision: "32-true", "bf16-mixed" or "16-mixed"; None for the stage's.
        devices: ranks a node; "auto" for one a GPU, or one.
        val_data_dir: a folder that notebook 01 wrote, of pictures that are not trained on.
        val_every: optimizer steps between validations; None for `save_every` where there is a `val_data_dir`.
        save_every: optimizer steps between checkpoints.
        log_every: optimizer steps between rows of metrics.
        preview_every: optimizer steps between preview pictures; 0 for none.
        running: other fields of `TrainConfig` by name, as `seed`, `num_nodes` or `strategy`.

    Raises:
        ConfigError: anything that does not fit, before work.
    """
    family = presets.get(preset)
    changes, recipe, networks = _recipe(family, stage, overrides, global_batch_size=global_batch_size, precision=precision)
    check_parent(recipe, stage, init_from)
    places.check_configs(networks)
    encoders = places.hash_frozen(networks)
    cache = _open_data(data_dir, recipe, encoders, "data_dir")
    if val_data_dir is not None:
        _open_data(val_data_dir, recipe, encoders, "val_data_dir")
    parent = parents.load_parent(init_from, weights=init_weights) if init_from else None
    if parent is not None:
        told = "prediction_type" in changes and parent.networks.prediction_type == networks.prediction_type
        parents.check_parent_fits(parent, networks if told else _learned_before(family, recipe, networks))
    ranks = launch.devices("auto") if devices == "auto" else devices
    counts = (ranks, running.get("num_nodes", 1))
    values = {
        **{"preset": preset, "stage": stage, "overrides": changes, "networks": networks, "recipe": recipe},
        **{"data_key": cache.key, "data_dir": str(resolve_path(data_dir))},
        **{"init_from": init_from, "init_weights": init_weights, "parent_hash": parent.weights_hash if parent is not None else None},
        "max_steps": recipe.schedule_steps if max_steps is None else max_steps,
        "micro_batch_size": _share(recipe, counts) if micro_batch_size is None else micro_batch_size,
        **{"devices": ranks, "bucketed": len(cache.buckets) > 1},
        "val_data_dir": None if val_data_dir is None else str(resolve_path(val_data_dir)),
        "val_every": (save_every if val_data_dir else 0) if val_every is None else val_every,
        **{"save_every": save_every, "log_every": log_every, "preview_every": preview_every},
        **running,
    }
    config = build(TrainConfig, values, where=presets.label(preset, stage, changes))
    _check_machine(config)
    return config


def _recipe(family: Preset, stage: str, overrides: Mapping[str, Any] | None, **chosen: Any) -> tuple[dict[str, Any], Stage, Networks]:
    """What was changed of a stage, its recipe with that, and the networks that it trains.

    Raises:
        ConfigError: anything that does not fit.
    """
    changes = {**(overrides or {}), **{key: value for key, value in chosen.items() if value is not None}}
    recipe = presets.stage(family, stage, changes)
    if recipe.lora is not None and recipe.parent is None:
        raise ConfigError(f"stage {stage!r} starts from random weights, and lora changes a model that is there; take a stage with a parent")
    networks = presets.networks(family, recipe)
    models.check_networks(networks)
    check_resolution(recipe.resolution, vae_factor=places.vae_factor(networks), unet_factor=models.unet_factor(networks))
    return changes, recipe, networks


def _learned_before(family: Preset, recipe: Stage, networks: Networks) -> Networks:
    """The networks as the stage before has trained them: its prediction type may be another one."""
    return presets.networks(family, family.stages[recipe.parent]) if recipe.parent in family.stages else networks


def _share(recipe: Stage, counts: tuple[Any, ...]) -> int:
    """The stage's micro-batch size, or each rank's share of the global batch size where that is smaller."""
    share = recipe.global_batch_size // max(1, math.prod(counts)) if all(isinstance(count, int) for count in counts) else 1
    return min(recipe.micro_batch_size, max(1, share))


def estimate(
    *,
    preset: str,
    stage: str,
    overrides: Mapping[str, Any] | None = None,
    max_steps: int | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    precision: str | None = None,
    devices: str | int = "auto",
    num_nodes: int = 1,
    strategy: str = "auto",
    gradient_checkpointing: bool = False,
    expected_samples_per_second: float | None = None,
    price_per_device_hour: float | None = None,
    **others: Any,
) -> Estimate:
    """What a stage takes, before there are data, weights or devices for it.

    Args:
        preset, stage, overrides, max_steps, global_batch_size, micro_batch_size, precision, devices, num_nodes: as of `configure`.
        strategy: as of `TrainConfig`.
        gradient_checkpointing: as of `TrainConfig`.
        expected_samples_per_second: of all devices together, where it is known; None for what the published devices should make.
        price_per_device_hour: of one device, in any currency.
        others: further parameters of a run, which change nothing here.

    Raises:
        ConfigError: anything that does not fit.
    """
    family = presets.get(preset)
    changes, recipe, networks = _recipe(family, stage, overrides, global_batch_size=global_batch_size, precision=precision)
    ranks = launch.devices("auto") if devices == "auto" else devices
    _check_counts(devices=ranks, num_nodes=num_nodes, max_steps=max_steps, micro_batch_size=micro_batch_size)
    if expected_samples_per_second is not None:
        costs.check_positive(expected_samples_per_second=expected_samples_per_second)
    world_size, micro = int(ranks) * num_nodes, micro_batch_size or _share(recipe, (ranks, num_nodes))
    accumulation_steps(recipe.global_batch_size, micro, world_size=world_size)
    counts = models.count_networks(networks)
    asked: dict[str, Any] = {"world_size": world_size, "strategy": strategy, "gradient_checkpointing": gradient_checkpointing}
    asked |= {"frozen_parameters": counts["vae"] + counts["text_encoders"], "micro_batch_size": micro}
    steps = recipe.schedule_steps if max_steps is None else max_steps
    work: dict[str, Any] = {"world_size": world_size, "gradient_checkpointing": gradient_checkpointing, "utilisation": UTILISATION}
    rates = (
        {"as expected": expected_samples_per_second}
        if expected_samples_per_second is not None
        else {name: costs.throughput(networks, recipe.resolution, device_flops=flops, **work) for name, flops in costs.PEAK_FLOPS.items()}
    )
    samples, price = steps * recipe.global_batch_size, price_per_device_hour
    return Estimate(
        label=presets.label(preset, stage, changes),
        parameters=counts,
        steps=steps,
        samples=samples,
        forward_flops=costs.forward_flops(networks, recipe.resolution),
        world_size=world_size,
        options=costs.options(networks, recipe, **asked),
        costs={
            name: (rate, costs.cost(samples=samples, samples_per_second=rate, world_size=world_size, price_per_device_hour=price))
            for name, rate in rates.items()
        },
    )


def _check_counts(**counts: Any) -> None:
    for name, count in counts.items():
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise ConfigError(f"{name}={count!r} cannot be used; give a whole number from 1 up")


def check_parent(recipe: Stage, stage: str, init_from: str | None) -> None:
    """Refuse a stage that starts from another one without its weights, and the other way round.

    Raises:
        ConfigError: with what to give.
    """
    if recipe.parent and not init_from:
        raise ConfigError(f"stage {stage!r} starts from {recipe.parent!r}: give init_from, the run folder of a finished {recipe.parent!r}")
    if init_from and not recipe.parent:
        raise ConfigError(f"stage {stage!r} starts from random weights: leave out init_from={init_from!r}")


def _open_data(data_dir: str, recipe: Stage, encoders: Mapping[str, str], name: str) -> Cache:
    """Prepared data of this resolution, encoded by the frozen parts with these hashes.

    Raises:
        ConfigError: with what is there, or the parts that differ.
    """
    cache = open_cache(data_dir, recipe.resolution)
    other = [part for part, digest in encoders.items() if cache.manifest["encoders"].get(part) != digest]
    if other:
        parts = " and ".join(other)
        raise ConfigError(f"{name} {cache.folder} was encoded by another {parts}; prepare it with this preset (notebook 01)")
    return cache


def _check_machine(config: TrainConfig) -> None:
    """Refuse what these devices cannot do.

    Raises:
        ConfigError: precision, memory or a package.
    """
    if config.recipe.precision == "16-mixed" and launch.device().type == "cpu":
        raise ConfigError("precision='16-mixed' needs a GPU: a CPU would silently use bf16; use 32-true or bf16-mixed")
    optim.check_states(config.recipe, launch.device().type, strategy=config.strategy)
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("tensorboard=True needs the package tensorboard: pip install 'sdlab[tensorboard]'")
    memory, there = _memory(config), _available(config)
    needed = memory.total - memory.activations
    if needed > there:
        fitting = costs.what_fits(costs.options(config.networks, config.recipe, **_asked(config), available_bytes=there), there)
        advice = f"this would fit: {fitting.name}" if fitting else "no option makes it fit; use more or larger devices"
        raise ConfigError(
            f"training needs {needed / 1e9:.1f} GB a device before any activation, and there are {there / 1e9:.1f} GB; {advice}"
        )


def plan(config: TrainConfig, run_dir: str | Path) -> Plan:
    """What a run is going to take, from shapes alone.

    Raises:
        ConfigError: the folder is not for this run.
    """
    folder = resolve_path(run_dir)
    step = runs.check_run(folder, config)
    parameters, samples = models.count_unet(config.networks), config.max_steps * config.recipe.global_batch_size
    rows = len(open_cache(config.data_dir, config.recipe.resolution))
    disk = disk_needed(config, folder)
    return Plan(str(folder), step, parameters, samples, samples / rows, _memory(config), _available(config), disk)


def _memory(config: TrainConfig) -> costs.Memory:
    return costs.memory(config.networks, config.recipe, **_asked(config))


def _asked(config: TrainConfig) -> dict[str, Any]:
    counts = models.count_networks(config.networks)
    return {
        **{"micro_batch_size": config.micro_batch_size, "world_size": config.world_size, "strategy": config.strategy},
        **{"gradient_checkpointing": config.gradient_checkpointing, "frozen_parameters": counts["vae"] + counts["text_encoders"]},
        "device_type": launch.device().type,
    }


def _available(config: TrainConfig) -> int:
    if launch.device().type == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // config.devices


def disk_needed(config: TrainConfig, folder: Path) -> int:
    """Bytes that a run may still write to its folder."""
    there = [runs.checkpoint_step(path) for path in runs.checkpoints(folder)]
    return _export_bytes(config) + checkpoints.disk_needed(
        costs.count_trained(config.networks, config.recipe.lora),
        ema=config.recipe.ema_decay is not None,
        steps_left=max(0, config.max_steps - max(there, default=0)),
        save_every=config.save_every,
        keep_every=config.keep_every,
        there=len(there),
    )


def _export_bytes(config: TrainConfig) -> int:
    """A pipeline folder and a single file, in float32."""
    return 2 * 4 * sum(models.count_networks(config.networks).values())


def check_disk(config: TrainConfig, folder: Path) -> None:
    """Refuse to start what would fill the disk.

    Raises:
        ConfigError: with the bytes that are free and that are needed.
    """
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free, needed = shutil.disk_usage(there).free, disk_needed(config, folder)
    if free < needed:
        sizes = f"{free / 1e9:.1f} GB are free and the checkpoints need {needed / 1e9:.1f} GB"
        raise ConfigError(f"run_dir {folder}: {sizes}; make room, give another folder, or a larger keep_every")
