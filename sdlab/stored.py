"""Models where they lie: a run folder, a pipeline folder, the hub, or what sdlab ships, described and read without building a network."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from diffusers import UNet2DConditionModel

from sdlab import encoders, files, lora, places, runs, single
from sdlab.config import ConfigError, Lora, Networks, NoiseSchedule, TrainConfig, build, resolve_path

FAMILY = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
}
SECOND = {"text_encoder_2": ("CLIPTextModelWithProjection",), "tokenizer_2": FAMILY["tokenizer"]}
"""The classes of the parts that a model is made of; SDXL has the second ones too."""
UNUSED_PARTS = ("scheduler", "safety_checker", "feature_extractor", "image_encoder")
"""Further parts that a pipeline may have, and that draw nothing."""
HUB_FILES = [
    *("README.md", "sdlab.json", "scheduler/*.json"),
    *(f"unet/{name}" for name in files.HUB_WEIGHTS),
    *files.HUB_PARTS,
]
"""What is fetched of a repository beside its index."""


@dataclass(frozen=True)
class Stored:
    """A model as it is stored."""

    name: str
    """What was asked for."""
    path: str
    """Where it is: an absolute path, "tiny", or "hub: owner/name@commit"."""
    weights: str
    """"ema" or "raw"."""
    step: int
    """Optimizer steps behind the weights; 0 where nobody says."""
    weights_hash: str
    """SHA-256 of the UNet's files."""
    resolution: int
    """Pixels a side of the pictures that it learned from."""
    networks: Networks
    unet_files: tuple[Path, ...]
    """The UNet's weights, or a low-rank change of them."""
    change: tuple[Lora, Stored] | None = None
    """Of a low-rank change its kind, and what it is to be put into."""
    licence: str = ""
    """As its model card, or that of what it started from, says; "" where none does."""

    @cached_property
    def frozen_hashes(self) -> dict[str, str]:
        """SHA-256 of VAE, text encoders and tokenizers by part, when it is first asked for."""
        return places.hash_frozen(self.networks)

    def state_dict(self) -> files.Shaped:
        """The UNet's tensors in float32, read one by one as they are asked for.

        Raises:
            ConfigError: a file is damaged or gone.
        """
        tensors = files.Tensors(self.unet_files)
        if self.change is None:
            return tensors
        kind, base = self.change
        return lora.merged(base.state_dict(), tensors, kind)


def find(model: str, *, weights: str = "auto", checkpoint: str | int = "latest") -> Stored:
    """Find a model and describe it, without building any of its networks.

    Args:
        model: "tiny", a run folder, a diffusers pipeline folder, the hub id of one, as in "owner/name", or a single .safetensors file.
        weights: "ema" or "raw", or "auto" for EMA where there is one; a stage without EMA has only "raw", a pipeline only one of them.
        checkpoint: "latest" or an optimizer step of a run folder.

    Raises:
        ConfigError: nothing of these is there or can be fetched, its family is not supported, or its weights are pickled.
    """
    if weights not in ("ema", "raw", "auto"):
        raise ConfigError(f"weights={weights!r}; allowed are 'ema', 'raw' and 'auto'")
    folder, path = _locate(model)
    if folder.is_file() and folder.suffix == ".safetensors":
        folder = single.unpack(folder)
    if (folder / "config.json").is_file() and (folder / "checkpoints").is_dir():
        return _describe_run(folder, weights=weights, checkpoint=checkpoint, name=model)
    if checkpoint != "latest":
        raise ConfigError(f"model {model!r} is no run folder, so it has no checkpoint {checkpoint!r}; leave checkpoint at 'latest'")
    if folder.suffix in files.PICKLES and folder.is_file():
        raise ConfigError(f"model {model!r}: {files.refuse_pickles('from_single_file')}")
    if (folder / "unet").is_dir() or (folder / "model_index.json").is_file():
        return _describe_pipeline(folder, path, weights=weights, name=model)
    raise ConfigError(
        f"model {model!r}: {folder} is neither a run folder, a pipeline folder nor a .safetensors file; give one of these or 'tiny'"
    )


def checkpoints(model: str) -> list[int | str]:
    """What `checkpoint` may be: "latest", and of a run folder also the steps that it keeps, newest first."""
    return ["latest", *map(runs.checkpoint_step, runs.checkpoints(resolve_path(model)))]


def _locate(model: str) -> tuple[Path, str]:
    """The folder of a model, and how to write down where it came from."""
    if model == "tiny":
        return places.TINY_DIR, "tiny"
    folder = resolve_path(model)
    if folder.exists():
        return folder, str(folder)
    if files.HUB_ID.fullmatch(model) is None:
        raise ConfigError(
            f"there is no model at {model!r}; give a run folder, a pipeline folder, a .safetensors file, a hub id as in 'owner/name', "
            "or 'tiny'"
        )
    # the index comes first and alone, so that a family that is not supported costs no download
    commit = _fetch(model, folder, ["model_index.json"]).name
    snapshot = _fetch(model, folder, HUB_FILES, commit=commit)
    return snapshot, f"hub: {model}@{commit}"


def _fetch(model: str, folder: Path, patterns: list[str], *, commit: str | None = None) -> Path:
    """As `files.fetch`, for a repository that holds a pipeline of a family that is supported."""
    snapshot = files.fetch(model, patterns, commit=commit, here=folder)
    if not (snapshot / "model_index.json").is_file():
        raise ConfigError(f"model {model!r}: this hub repository has no model_index.json; give one that holds a diffusers pipeline")
    _check_family(snapshot, model)
    return snapshot


def _check_family(folder: Path, model: str) -> dict[str, Any]:
    """The index of a pipeline of a family that is supported."""
    index = files.read_json(folder / "model_index.json")
    made_of = {name: str(given[1]) for name, given in index.items() if isinstance(given, list) and len(given) == 2 and given[1]}
    family = FAMILY | SECOND if SECOND.keys() & made_of.keys() else FAMILY
    wrong = [f"{name} {made_of.get(name)}" for name, known in family.items() if made_of.get(name) not in known]
    wrong += [f"{name} {kind}" for name, kind in made_of.items() if name not in (*family, *UNUSED_PARTS)]
    if wrong:
        known = ", ".join(kinds[0] for kinds in family.values())
        title = index.get("_class_name", "pipeline")
        raise ConfigError(f"model {model!r} is a {title} with {', '.join(wrong)}: this family is not supported; give one made of {known}")
    return index


def _describe_run(folder: Path, *, weights: str, checkpoint: str | int, name: str) -> Stored:
    config = runs.read_config(folder)
    found = runs.find_checkpoint(folder, checkpoint)
    kept = "raw" if config.recipe.ema_decay is None else "ema"
    chosen = kept if weights == "auto" else weights
    if (chosen, kept) == ("ema", "raw"):
        raise ConfigError(f"checkpoint {found} has no EMA weights (its stage keeps none); use weights='raw'")
    path = found / ("ema.safetensors" if chosen == "ema" else "weights.safetensors")
    digest, change = runs.file_hash(path), None
    if config.recipe.lora is not None:
        change = (config.recipe.lora, _changed(config, folder))
        digest = hashlib.sha256(f"{digest} {config.parent_hash}".encode()).hexdigest()
    return Stored(
        name=name,
        path=str(folder),
        weights=chosen,
        step=runs.checkpoint_step(found),
        weights_hash=digest,
        resolution=config.recipe.resolution,
        networks=config.networks,
        unet_files=(path,),
        change=change,
        licence=_licence_behind(folder),
    )


def _describe_pipeline(folder: Path, path: str, *, weights: str, name: str) -> Stored:
    index = _check_family(folder, name) if (folder / "model_index.json").is_file() else {}
    networks = _pipeline_networks(folder, zeros=bool(index.get("force_zeros_for_empty_prompt", False)))
    unet_files = files.weight_files(folder / "unet")
    ours = folder / "sdlab.json"
    if ours.is_file():
        note = build(single.Note, files.read_json(ours), where=str(ours))
    else:
        note = single.Note(weights="raw", step=0, resolution=_native_resolution(folder, networks))
    if note.prediction_type not in (None, networks.prediction_type):
        raise ConfigError(
            f"{folder / 'scheduler' / 'scheduler_config.json'} says that the UNet predicts {networks.prediction_type!r}, but "
            f"{ours.name} says that it has learned {note.prediction_type!r}; put that back"
        )
    if weights not in ("auto", note.weights):
        raise ConfigError(f"pipeline {folder} holds the {note.weights!r} weights only; use weights={note.weights!r}")
    return Stored(
        name=name,
        path=path,
        **note.model_dump(exclude={"prediction_type"}),
        weights_hash=files.hash_files(unet_files),
        networks=networks,
        unet_files=tuple(unet_files),
        licence=_licence(folder / "README.md"),
    )


def _changed(config: TrainConfig, folder: Path) -> Stored:
    """What the low-rank change of a run is to be put into.

    Raises:
        ConfigError: it is gone, or holds other weights by now.
    """
    assert config.init_from is not None
    base = find(config.init_from, weights=config.init_weights)
    if base.weights_hash != config.parent_hash:
        raise ConfigError(f"{folder} is a low-rank change of {config.init_from}, which holds other weights by now; its export/ is whole")
    return base


def _licence_behind(run_dir: Path) -> str:
    """The licence of what a run started from."""
    path = run_dir / "lineage.json"
    parent = files.read_json(path).get("parent") if path.is_file() else None
    return str((parent or {}).get("licence", ""))


def _licence(card: Path) -> str:
    """The licence in the table that opens a model card."""
    with suppress(OSError, ValueError, yaml.YAMLError, IndexError, AttributeError):
        table = yaml.safe_load(card.read_text(encoding="utf-8").removeprefix("---\n").split("\n---\n")[0])
        return str(table.get("license") or "")
    return ""


def _pipeline_networks(folder: Path, *, zeros: bool) -> Networks:
    arguments, *_ = UNet2DConditionModel.extract_init_dict(files.read_json(folder / "unet" / "config.json"))
    where = folder / "scheduler" / "scheduler_config.json"
    scheduler = files.read_json(where)
    lacking = [key for key in ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule") if key not in scheduler]
    if lacking or scheduler.get("trained_betas") is not None:
        told = f"lacks {', '.join(lacking)}" if lacking else "gives trained_betas"
        raise ConfigError(
            f"{where} {told}: this noise schedule is not supported yet; it has to be one of betas from beta_start to beta_end"
        )
    values = {
        "frozen": str(folder),
        "null_condition": "zeros" if zeros else "empty_text",
        "unet": arguments,
        "prediction_type": scheduler.get("prediction_type", "epsilon"),
        "noise_schedule": {key: scheduler[key] for key in NoiseSchedule.model_fields if key in scheduler},
    }
    networks = build(Networks, values, where=str(folder))
    for part in places.names(places.check_layout(folder)):
        if part not in files.TOKENIZERS and not encoders.is_open_clip(folder / part):
            files.weight_files(folder / part)
    return networks


def _native_resolution(folder: Path, networks: Networks) -> int:
    """Pixels a side that a UNet says it was made for."""
    size = networks.unet.get("sample_size")
    if not isinstance(size, int):
        raise ConfigError(f"{folder / 'unet' / 'config.json'} gives sample_size={size!r}; it has to be one whole number")
    return size * places.vae_factor(networks)
