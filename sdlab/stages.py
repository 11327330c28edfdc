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

from sdlab import checkpoints, launch, models, parents, presets, runs
from sdlab.cache import Cache, open_cache
from sdlab.config import ConfigError, Stage, TrainConfig, build, check_resolution, resolve_path

STATE_BYTES = 16
"""A parameter's weight, gradient and two Adam moments in float32; its average takes four more."""


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
    memory_bytes: int
    """On each device, for weights, gradients, Adam moments, moving average and frozen parts; activations come on top."""
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
    chosen = {"global_batch_size": global_batch_size, "precision": precision}
    changes = {**(overrides or {}), **{key: value for key, value in chosen.items() if value is not None}}
    recipe = presets.stage(family, stage, changes)
    check_parent(recipe, stage, init_from)
    models.check_networks(family.networks)
    factor = models.vae_factor(family.networks)
    check_resolution(recipe.resolution, vae_factor=factor, unet_factor=models.unet_factor(family.networks))
    encoders = models.hash_frozen(family.networks)
    cache = _open_data(data_dir, recipe, encoders, "data_dir")
    if val_data_dir is not None:
        _open_data(val_data_dir, recipe, encoders, "val_data_dir")
    parent = parents.load_parent(init_from, weights=init_weights) if init_from else None
    if parent is not None:
        parents.check_parent_fits(parent, family.networks)
    ranks = launch.devices("auto") if devices == "auto" else devices
    counts = (ranks, running.get("num_nodes", 1))
    share = recipe.global_batch_size // max(1, math.prod(counts)) if all(isinstance(count, int) for count in counts) else 1
    values = {
        **{"preset": preset, "stage": stage, "overrides": changes, "networks": family.networks, "recipe": recipe},
        **{"data_key": cache.key, "data_dir": str(resolve_path(data_dir))},
        **{"init_from": init_from, "init_weights": init_weights, "parent_hash": parent.weights_hash if parent is not None else None},
        "max_steps": recipe.schedule_steps if max_steps is None else max_steps,
        "micro_batch_size": min(recipe.micro_batch_size, max(1, share)) if micro_batch_size is None else micro_batch_size,
        **{"devices": ranks, "bucketed": len(cache.buckets) > 1},
        "val_data_dir": None if val_data_dir is None else str(resolve_path(val_data_dir)),
        "val_every": (save_every if val_data_dir else 0) if val_every is None else val_every,
        **{"save_every": save_every, "log_every": log_every, "preview_every": preview_every},
        **running,
    }
    config = build(TrainConfig, values, where=presets.label(preset, stage, changes))
    _check_machine(config)
    return config


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
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError("tensorboard=True needs the package tensorboard: pip install 'sdlab[tensorboard]'")
    needed, there = _memory(config), _available(config)
    if needed > there:
        advice = "use strategy='fsdp' on more devices, or a smaller model" if config.strategy != "fsdp" else "use more devices"
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


def _memory(config: TrainConfig) -> int:
    counts = models.count_parameters(presets.get(config.preset))
    states = (STATE_BYTES + (0 if config.recipe.ema_decay is None else 4)) * counts["unet"]
    return states // (config.world_size if config.strategy == "fsdp" else 1) + 4 * (counts["vae"] + counts["text_encoders"])


def _available(config: TrainConfig) -> int:
    if launch.device().type == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // config.devices


def disk_needed(config: TrainConfig, folder: Path) -> int:
    """Bytes that a run may still write to its folder."""
    there = [runs.checkpoint_step(path) for path in runs.checkpoints(folder)]
    return checkpoints.disk_needed(
        models.count_unet(config.networks),
        ema=config.recipe.ema_decay is not None,
        steps_left=max(0, config.max_steps - max(there, default=0)),
        save_every=config.save_every,
        keep_every=config.keep_every,
        there=len(there),
    )


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
