"""Models in the files that others read: a diffusers pipeline folder, a single file with LDM's key names, and what is to be said of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from safetensors.torch import save_file
from torch import Tensor

from sdlab import cache, files, lora, parts, presets, runs, single
from sdlab.config import ConfigError, Lora, TrainConfig
from sdlab.encoders import KINDS
from sdlab.models import TextToImage

SINGLE_FILE = "single_file.safetensors"
PREFIX = "text_model."
"""Of a text encoder's key names: transformers leaves it out today, and older loaders need it."""
ARCHITECTURES = {(768,): "stable-diffusion-v1", (1024,): "stable-diffusion-v2", (768, 1280): "stable-diffusion-xl-v1-base"}
"""How the model specification of single files calls families, by the widths of their text encoders."""


@dataclass(frozen=True)
class Origin:
    """Where exported weights come from."""

    title: str
    """The recipe, as in "sd15/v1_2_512"."""
    parent: str
    """What training started from, with its hash."""
    licence: str
    """Of the parent, as it says itself; "" where it says nothing."""
    data: str
    results: str
    lineage_hash: str
    """SHA-256 of the run's `lineage.json`."""


def origin(config: TrainConfig, run_dir: Path) -> Origin:
    """Where the weights of a run come from, by what its folder says."""
    lineage = files.read_json(run_dir / "lineage.json")
    parent = lineage["parent"]
    manifest = cache.read_manifest(Path(config.data_dir)) or {}
    counts, last = manifest.get("counts", {}), runs.read_metrics(run_dir)[-1:]
    measured = {name: row[name] for row in last for name in ("step", "loss", "val_loss") if row.get(name) is not None}
    return Origin(
        title=presets.label(config.preset, config.stage, config.overrides),
        parent=_parent(parent),
        licence=str((parent or {}).get("licence", "")),
        data=f"{manifest.get('source', config.data_dir)}: {counts.get('used', 0):,} used, content key {config.data_key[:16]}",
        results=", ".join(f"{name} {value:.6g}" for name, value in measured.items()) or "none yet",
        lineage_hash=runs.file_hash(run_dir / "lineage.json"),
    )


def _parent(parent: Mapping[str, Any] | None) -> str:
    if parent is None:
        return "random weights"
    return f"{parent['path']}, {parent['weights']} weights of step {parent['step']:,}, SHA-256 {parent['sha256']}"


def write(folder: Path, model: TextToImage, origin: Origin, *, change: Lora | None = None) -> None:
    """Write a pipeline folder with a single file and a README in it, and read all of it again.

    Args:
        folder: which is made.
        model: what to write.
        origin: what to say of it.
        change: the low-rank change that `model` holds, which is written to `lora/` by itself too.

    Raises:
        RuntimeError: a file does not hold what was written.
    """
    save_pipeline(folder, model)
    _compare(folder, {part: files.Tensors(files.weight_files(folder / part)) for part in dict(_networks(model))}, model)
    problem = _save_single(folder / SINGLE_FILE, model, origin)
    if change is not None and model.adapter is not None:
        lora.write(folder / "lora", model.adapter, change, networks=model.networks, metadata={"modelspec.title": origin.title})
    card = folder / "README.md"
    card.write_text(_readme(model, origin, problem), encoding="utf-8")
    for path in folder.rglob("*.safetensors"):  # its writer makes files that nobody else can read
        path.chmod(card.stat().st_mode)


# A pipeline folder


def save_pipeline(folder: Path, model: TextToImage) -> None:
    """Write a model as a diffusers pipeline folder, with `sdlab.json` saying which weights it holds.

    Part by part, as `StableDiffusionPipeline.save_pretrained` does: importing that class takes longer than saving.
    """
    model.unet.register_to_config(sample_size=model.resolution // model.frozen.vae_factor)  # the size that diffusers draws unasked
    pieces: dict[str, Any] = {**dict(_networks(model)), "scheduler": single.scheduler(model.networks)}
    pieces |= dict(zip(files.TOKENIZERS, model.frozen.tokenizers, strict=False))
    for name, piece in pieces.items():
        save_part(piece, folder / name)
    runs.write_json(folder / "model_index.json", single.index(model.networks, len(model.frozen.text_encoders)))
    runs.write_json(folder / "sdlab.json", _note(model))


def _networks(model: TextToImage) -> Iterator[tuple[str, Any]]:
    yield from (("vae", model.frozen.vae), ("unet", model.unet))
    yield from zip(files.ENCODERS, model.frozen.text_encoders, strict=False)


def _note(model: TextToImage) -> dict[str, Any]:
    about = {"weights": model.weights, "step": model.step, "resolution": model.resolution}
    return {**about, "prediction_type": model.networks.prediction_type}


def save_part(part: Any, folder: Path) -> None:
    """Write one part of a pipeline in its own library's layout, without the path that it was once loaded from."""
    if isinstance(part, KINDS):
        part.config.save_pretrained(folder)
        tensors = {_historic(key): tensor.contiguous() for key, tensor in part.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    if isinstance(part, ModelMixin):
        part.register_to_config(_name_or_path="")
    part.save_pretrained(folder)


def _historic(key: str) -> str:
    """The name of a text encoder's tensor that all versions of transformers read."""
    return key if key.startswith((PREFIX, "text_projection.")) else PREFIX + key


# A single file


def _save_single(path: Path, model: TextToImage, origin: Origin) -> str:
    """Write and read again the single file; why there can be none, for a family that no single file has names for."""
    tensors = {part: network.state_dict() for part, network in _networks(model)}
    vae, encoders = parts.network_configs(model.frozen)
    unet = {**model.networks.unet, "sample_size": model.unet.config.sample_size}
    networks = model.networks.model_copy(update={"frozen": "", "vae": vae, "text_encoders": encoders, "unet": unet})
    try:
        single.pack(path, networks, tensors, metadata=_metadata(model, origin, networks.model_dump_json()))
    except ConfigError as error:
        return str(error)
    _compare(path, single.read(path, networks), model)
    return ""


def _metadata(model: TextToImage, origin: Origin, networks: str) -> dict[str, str]:
    """What the file says of itself, in the words of Stability's model specification (ModelSpec 1.0) and our own."""
    architecture = ARCHITECTURES.get(model.frozen.text_widths, "stable-diffusion")
    if architecture.endswith("v2"):
        architecture += f"-{model.resolution}" + ("-v" if model.networks.prediction_type == "v_prediction" else "")
    return {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": architecture,
        "modelspec.implementation": "https://github.com/huggingface/diffusers",
        "modelspec.title": origin.title,
        "modelspec.date": runs.now(),
        "modelspec.license": origin.licence,
        "modelspec.resolution": f"{model.resolution}x{model.resolution}",
        single.PREDICTION: single.SPEC[model.networks.prediction_type],
        single.NETWORKS: networks,
        single.NOTE: json.dumps(_note(model)),
        "sdlab.lineage_sha256": origin.lineage_hash,
    }


def _compare(where: Path, found: Mapping[str, Mapping[str, Tensor]], model: TextToImage) -> None:
    """Make sure that what was written is what the model holds.

    Raises:
        RuntimeError: a part differs.
    """
    for part, network in _networks(model):
        own = {key.removeprefix(PREFIX): tensor for key, tensor in network.state_dict().items()}
        there = {key.removeprefix(PREFIX): key for key in found[part]}
        wrong = own.keys() ^ there.keys() or {key for key in own if not torch.equal(found[part][there[key]], own[key].cpu())}
        if wrong:
            raise RuntimeError(f"{where}: {part} does not hold what was written ({', '.join(sorted(wrong)[:5])}); is the disk in order?")


# Words


def _readme(model: TextToImage, origin: Origin, problem: str) -> str:
    kind = "moving average" if model.weights == "ema" else "weights themselves"
    loader = "StableDiffusionXLPipeline" if len(model.frozen.text_encoders) > 1 else "StableDiffusionPipeline"
    alone = f"There is no single file: {problem}." if problem else f"`{SINGLE_FILE}` is the same model for ComfyUI and A1111."
    frozen = model.networks.frozen
    rows = {
        "recipe": origin.title,
        "trained for": f"{model.step:,} optimizer steps; this is the {kind}",
        "resolution": f"{model.resolution} pixels a side",
        "the UNet predicts": model.networks.prediction_type,
        "started from": origin.parent,
        "VAE and text encoders": {"tiny": "those of sdlab's built-in model", "random": "random weights"}.get(frozen, frozen),
        "data": origin.data,
        "results": origin.results,
        "SHA-256 of lineage.json": origin.lineage_hash,
    }
    return "\n".join(
        [
            *(["---", f"license: {origin.licence}", "---", ""] if origin.licence else []),
            f"# {origin.title}",
            "",
            f"A text-to-image model for `diffusers.{loader}.from_pretrained`. {alone}",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {_cell(value)} |" for name, value in rows.items()),
            "",
            "## Licence",
            "",
            f"Of what it started from: {origin.licence or 'not stated'}. The pictures that it learned from have licences of their own.",
            "",
        ]
    )


def _cell(value: str) -> str:
    return value.replace("|", "\\|").replace("\n", " ")
