"""Pipelines and runs that tests spoil: the shipped model as others might have written it."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sdlab import models, places, presets, runs
from sdlab.config import TrainConfig

TINY = presets.get("tiny").networks
SMALL = TINY.model_copy(update={"unet": {**TINY.unet, "block_out_channels": [16, 32], "norm_num_groups": 8}})
PNDM = {
    "_class_name": "PNDMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "num_train_timesteps": 1000,
    "skip_prk_steps": True,
    "trained_betas": None,
}


def change(path: Path, **values: Any) -> None:
    """Put values into a JSON file; None takes a key out."""
    table = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in table.items() if value is not None}))


def rewrite(path: Path, rename: Callable[[str], str] = str, convert: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
    save_file({rename(key): convert(value) for key, value in load_file(path).items()}, path, metadata={"format": "pt"})


def make_plain(folder: Path) -> Path:
    """The shipped model as a pipeline that older diffusers might have written: a PNDM scheduler, and nothing of sdlab."""
    shutil.copytree(places.TINY_DIR, folder, ignore=shutil.ignore_patterns("judge", "sdlab.json", "components.json"))
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(PNDM))
    return folder


def make_run(folder: Path, *, ema_decay: float | None = 0.99) -> Path:
    """A run folder with a checkpoint of a small UNet, whose average is another one."""
    recipe = presets.get("tiny").stages["stage1_32"].model_copy(update={"ema_decay": ema_decay})
    counts = {"max_steps": 8, "micro_batch_size": 8, "save_every": 8, "log_every": 1, "preview_every": 0}
    config = TrainConfig(preset="tiny", stage="stage1_32", networks=SMALL, recipe=recipe, data_key="", data_dir=str(folder), **counts)
    checkpoint = folder / "checkpoints" / "step-00000008"
    checkpoint.mkdir(parents=True)
    runs.write_json(folder / "config.json", config.model_dump(mode="json"))
    runs.write_json(checkpoint / "state.json", {"step": 8})
    for seed, name in enumerate(["weights"] if ema_decay is None else ["weights", "ema"]):
        save_file(models.build_unet(SMALL, seed=seed).state_dict(), checkpoint / f"{name}.safetensors")
    files = {path.name: {"bytes": path.stat().st_size, "sha256": runs.file_hash(path)} for path in checkpoint.iterdir()}
    runs.write_json(checkpoint / "manifest.json", files)
    return folder


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two networks hold the same."""
    return set(one) == set(other) and all(one[key].dtype == other[key].dtype and torch.equal(one[key], other[key]) for key in one)


def shard(folder: Path) -> Path:
    """Split a network's weights in two, as diffusers does with large ones."""
    whole = folder / "diffusion_pytorch_model.safetensors"
    weights = load_file(whole)
    names = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    where = {key: names[number % 2] for number, key in enumerate(weights)}
    for name in names:
        save_file({key: value for key, value in weights.items() if where[key] == name}, folder / name, metadata={"format": "pt"})
    whole.unlink()
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return index
