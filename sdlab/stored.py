"""Models where they lie: a run folder, a pipeline folder, the hub, or what sdlab ships, described and read without building a network."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
from diffusers import UNet2DConditionModel
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CLIPTokenizer

from sdlab import captions, runs
from sdlab.config import ConfigError, Model, Networks, NoiseSchedule, build, resolve_path

TINY_DIR = Path(__file__).parent / "assets" / "tiny"
"""The built-in model as a diffusers pipeline folder, and its judge."""
FAMILY = {
    "unet": ("UNet2DConditionModel",),
    "vae": ("AutoencoderKL",),
    "text_encoder": ("CLIPTextModel",),
    "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
}
"""The classes of the parts that a model is made of."""
UNUSED_PARTS = ("scheduler", "safety_checker", "feature_extractor")
"""Further parts that a pipeline may have, and that draw nothing."""
WEIGHTS = ("diffusion_pytorch_model", "model")
"""How diffusers and transformers name files of weights."""
PICKLES = (".bin", ".ckpt", ".pt", ".pth")

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*")
HUB_WEIGHTS = ("config.json", "*model.safetensors", "*model-*-of-*.safetensors", "*model.safetensors.index.json")
HUB_FILES = [
    *("sdlab.json", "scheduler/*.json", "tokenizer/*.json", "tokenizer/*.txt"),
    *(f"{part}/{name}" for part in ("unet", "vae", "text_encoder") for name in HUB_WEIGHTS),
]
"""What is fetched of a repository beside its index: no pickles, and one copy of the weights where there are several."""


class Tensors(Mapping[str, Tensor]):
    """The tensors of safetensors files by name, each read when it is asked for, in float32."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {key: opened for path in files for opened in [_open(path)] for key in opened.keys()}  # noqa: SIM118 (it is no dict)

    def __getitem__(self, key: str) -> Tensor:
        return self._files[key].get_tensor(key).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shapes(self) -> dict[str, Tensor]:
        """The tensors without data, of which nothing is read but their shapes."""
        return {key: torch.empty(opened.get_slice(key).get_shape(), device="meta") for key, opened in self._files.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be loaded: {captions.error_line(error)}") from None


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
    files: tuple[Path, ...]
    """The UNet's weights."""

    def state_dict(self) -> Tensors:
        """The UNet's tensors in float32, read one by one as they are asked for.

        Raises:
            ConfigError: a file is damaged or gone.
        """
        return Tensors(self.files)


def find(model: str, *, weights: str = "auto", checkpoint: str | int = "latest") -> Stored:
    """Find a model and describe it, without building any of its networks.

    Args:
        model: "tiny", a run folder, a diffusers pipeline folder, or the hub id of one, as in "owner/name".
        weights: "ema" or "raw", or "auto" for EMA where there is one; a stage without EMA has only "raw", a pipeline only one of them.
        checkpoint: "latest" or an optimizer step of a run folder.

    Raises:
        ConfigError: nothing of these is there or can be fetched, its family is not supported, or its weights are pickled.
    """
    if weights not in ("ema", "raw", "auto"):
        raise ConfigError(f"weights={weights!r}; allowed are 'ema', 'raw' and 'auto'")
    folder, path = _locate(model)
    if (folder / "config.json").is_file() and (folder / "checkpoints").is_dir():
        return _describe_run(folder, weights=weights, checkpoint=checkpoint, name=model)
    if checkpoint != "latest":
        raise ConfigError(f"model {model!r} is no run folder, so it has no checkpoint {checkpoint!r}; leave checkpoint at 'latest'")
    if folder.suffix in PICKLES and folder.is_file():
        raise ConfigError(f"model {model!r}: {_refuse_pickles('from_single_file')}")
    if (folder / "unet").is_dir() or (folder / "model_index.json").is_file():
        return _describe_pipeline(folder, path, weights=weights, name=model)
    raise ConfigError(f"model {model!r}: {folder} is neither a run folder nor a pipeline folder; give one of these or 'tiny'")


def _locate(model: str) -> tuple[Path, str]:
    """The folder of a model, and how to write down where it came from."""
    if model == "tiny":
        return TINY_DIR, "tiny"
    folder = resolve_path(model)
    if folder.exists():
        return folder, str(folder)
    if HUB_ID.fullmatch(model) is None:
        raise ConfigError(f"there is no model at {model!r}; give a run folder, a pipeline folder, a hub id as in 'owner/name', or 'tiny'")
    # the index comes first and alone, so that a family that is not supported costs no download
    commit = _fetch(model, folder, ["model_index.json"]).name
    snapshot = _fetch(model, folder, HUB_FILES, commit=commit)
    return snapshot, f"hub: {model}@{commit}"


def _fetch(model: str, folder: Path, patterns: list[str], *, commit: str | None = None) -> Path:
    """Bring files of a hub repository into the cache, where they are not yet there, and check its family.

    Raises:
        ConfigError: it is not there or cannot be reached, or is of a family that is not supported.
    """
    try:
        snapshot = Path(huggingface_hub.snapshot_download(model, revision=commit, allow_patterns=patterns))
    except Exception as error:  # its own errors, those of its HTTP library and those of the disk
        offline = " (HF_HUB_OFFLINE is set: only in its cache)" if huggingface_hub.is_offline_mode() else ""
        raise ConfigError(
            f"model {model!r} is no path here ({folder}), and the hub was asked for a repository of this name{offline}: "
            f"{captions.error_line(error)}; correct the name, or fetch it where there is a network: HF_HUB_OFFLINE=0 hf download {model}"
        ) from None
    if not (snapshot / "model_index.json").is_file():
        raise ConfigError(f"model {model!r}: this hub repository has no model_index.json; give one that holds a diffusers pipeline")
    _check_family(snapshot, model)
    return snapshot


def _check_family(folder: Path, model: str) -> None:
    index = read_json(folder / "model_index.json")
    parts = {name: str(given[1]) for name, given in index.items() if isinstance(given, list) and len(given) == 2 and given[1]}
    wrong = [f"{name} {parts.get(name)}" for name, known in FAMILY.items() if parts.get(name) not in known]
    wrong += [f"{name} {kind}" for name, kind in parts.items() if name not in (*FAMILY, *UNUSED_PARTS)]
    if wrong:
        known = ", ".join(kinds[0] for kinds in FAMILY.values())
        title = index.get("_class_name", "pipeline")
        raise ConfigError(
            f"model {model!r} is a {title} with {', '.join(wrong)}: this family is not supported yet; give one made of {known}"
        )


def _describe_run(folder: Path, *, weights: str, checkpoint: str | int, name: str) -> Stored:
    config = runs.read_config(folder)
    found = runs.find_checkpoint(folder, checkpoint)
    kept = "raw" if config.recipe.ema_decay is None else "ema"
    chosen = kept if weights == "auto" else weights
    if (chosen, kept) == ("ema", "raw"):
        raise ConfigError(f"checkpoint {found} has no EMA weights (its stage keeps none); use weights='raw'")
    path = found / ("ema.safetensors" if chosen == "ema" else "weights.safetensors")
    return Stored(
        name=name,
        path=str(folder),
        weights=chosen,
        step=runs.checkpoint_step(found),
        weights_hash=runs.file_hash(path),
        resolution=config.recipe.resolution,
        networks=config.networks,
        files=(path,),
    )


def _describe_pipeline(folder: Path, path: str, *, weights: str, name: str) -> Stored:
    if (folder / "model_index.json").is_file():
        _check_family(folder, name)
    networks = _pipeline_networks(folder)
    files = weight_files(folder / "unet")
    ours = folder / "sdlab.json"
    if ours.is_file():
        note = build(_Note, read_json(ours), where=str(ours))
    else:
        note = _Note(weights="raw", step=0, resolution=_native_resolution(folder, networks))
    if weights not in ("auto", note.weights):
        raise ConfigError(f"pipeline {folder} holds the {note.weights!r} weights only; use weights={note.weights!r}")
    return Stored(name=name, path=path, **note.model_dump(), weights_hash=hash_files(files), networks=networks, files=tuple(files))


class _Note(Model):
    """What a run says of the pipeline that it exports, in `sdlab.json`."""

    weights: Literal["ema", "raw"]
    step: int
    resolution: int


def _pipeline_networks(folder: Path) -> Networks:
    arguments, *_ = UNet2DConditionModel.extract_init_dict(read_json(folder / "unet" / "config.json"))
    where = folder / "scheduler" / "scheduler_config.json"
    scheduler = read_json(where)
    lacking = [key for key in ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule") if key not in scheduler]
    if lacking or scheduler.get("trained_betas") is not None:
        told = f"lacks {', '.join(lacking)}" if lacking else "gives trained_betas"
        raise ConfigError(
            f"{where} {told}: this noise schedule is not supported yet; it has to be one of betas from beta_start to beta_end"
        )
    values = {
        "frozen": str(folder),
        "unet": arguments,
        "prediction_type": scheduler.get("prediction_type", "epsilon"),
        "noise_schedule": {key: scheduler[key] for key in NoiseSchedule.model_fields if key in scheduler},
    }
    networks = build(Networks, values, where=str(folder))
    frozen_folder(networks)
    for part in ("vae", "text_encoder"):
        weight_files(folder / part)
    return networks


def _native_resolution(folder: Path, networks: Networks) -> int:
    """Pixels a side that a UNet says it was made for."""
    size = networks.unet.get("sample_size")
    if not isinstance(size, int):
        raise ConfigError(f"{folder / 'unet' / 'config.json'} gives sample_size={size!r}; it has to be one whole number")
    return size * vae_factor(networks)


def read_json(path: Path) -> dict[str, Any]:
    """A table of a pipeline folder.

    Raises:
        ConfigError: it is missing or damaged.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a whole pipeline folder") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights of one part of a pipeline: one, or the shards that an index names.

    Raises:
        ConfigError: there are none, or only pickled ones, which are never read.
    """
    for name in WEIGHTS:
        index, whole = folder / f"{name}.safetensors.index.json", folder / f"{name}.safetensors"
        if index.is_file():
            return _shards(index)
        if whole.is_file():
            return [whole]
    there = ", ".join(sorted(path.name for path in folder.glob("*"))[:10]) or "nothing"
    raise ConfigError(
        f"{folder} has no {' or '.join(f'{name}.safetensors' for name in WEIGHTS)} ({there}): {_refuse_pickles('from_pretrained')}"
    )


def _shards(index: Path) -> list[Path]:
    named = read_json(index).get("weight_map")
    names = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
    wrong = [name for name in names if Path(name).name != name or not (index.parent / name).is_file()]
    if wrong or not names:
        raise ConfigError(f"{index} names {', '.join(wrong[:5]) or 'no files'}, not there; give a whole pipeline folder")
    return [index.parent / name for name in names]


def _refuse_pickles(loader: str) -> str:
    convert = f"from diffusers import StableDiffusionPipeline as P; P.{loader}('OLD').save_pretrained('NEW')"
    return f'pickled weights can run code and are never read; convert them where you trust them: python -c "{convert}"'


def frozen_folder(networks: Networks) -> Path:
    """The folder of the frozen parts.

    Raises:
        ConfigError: it lacks one of them.
    """
    folder = TINY_DIR if networks.frozen == "tiny" else resolve_path(networks.frozen)
    parts = ("vae", "text_encoder", "tokenizer")
    missing = [part for part in parts if not (folder / part).is_dir()]
    if missing:
        raise ConfigError(f"folder {folder} lacks {', '.join(missing)}; give a folder in diffusers' layout with {', '.join(parts)}")
    return folder


def vae_factor(networks: Networks) -> int:
    """Pixels a side of one latent, read from the config of the frozen VAE."""
    return 2 ** (len(read_json(frozen_folder(networks) / "vae" / "config.json").get("block_out_channels", [64])) - 1)


def hash_files(files: Iterable[Path]) -> str:
    """SHA-256 over the bytes of files, one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def load_tokenizer(folder: Path) -> tuple[CLIPTokenizer, int]:
    """The tokenizer of a folder of frozen parts, and the number of tokens that its text encoder reads.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    except Exception as error:  # the library raises nearly every kind of exception
        raise ConfigError(f"{folder / 'tokenizer'} cannot be loaded: {captions.error_line(error)}") from None
    return tokenizer, int(read_json(folder / "text_encoder" / "config.json").get("max_position_embeddings", 77))


def token_ids(tokenizer: CLIPTokenizer, length: int, texts: Sequence[str]) -> Tensor:
    """Token ids, int64 (B, length), padded and cut."""
    return tokenizer(list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
