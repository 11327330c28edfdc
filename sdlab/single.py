"""Single-file checkpoints, as ComfyUI and A1111 read them: taken apart into a pipeline folder, and put together."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import diffusers
import yaml
from diffusers import DDIMScheduler
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTokenizer

from sdlab import files, ldm, presets, runs
from sdlab.config import ConfigError, Model, Networks, PredictionType, build

NETWORKS = "sdlab.networks"
"""Where a file says which networks it holds, as the config of a family in JSON; published files do not."""
NOTE = "sdlab.note"
"""Where it says which weights they are, of what step and resolution."""
PREDICTION = "modelspec.prediction_type"
SPEC = {"epsilon": "epsilon", "v_prediction": "v", "sample": "x0"}
PREDICTION_TYPES = {**{word: kind for kind, word in SPEC.items()}, "eps": "epsilon", "v_prediction": "v_prediction"}
"""How what a UNet predicts is said in a file, and what is understood."""


class Note(Model):
    """What a run says of the model that it exports."""

    weights: Literal["ema", "raw"]
    step: int = Field(ge=0)
    resolution: int = Field(gt=0)
    prediction_type: PredictionType | None = None
    """What the UNet has learned to predict; None where nobody says."""


def unpack(path: Path) -> Path:
    """The folder of a diffusers pipeline with what a single file holds; made once, and kept as long as the file stays the same.

    Raises:
        ConfigError: it is no safetensors file, of no family that is supported, or not whole, or does not say what its UNet predicts.
    """
    stamp = path.stat()
    return files.keep("single", f"{path} {stamp.st_size} {stamp.st_mtime_ns}", partial(_unpack, path))


def _unpack(path: Path, folder: Path) -> None:
    networks, note = describe(path)
    _write(folder, networks, read(path, networks), note)


def read(path: Path, networks: Networks) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of a single file by part, under today's names, each read when it is asked for.

    Raises:
        ConfigError: they are not all of these networks', and those alone.
    """
    try:
        return ldm.from_ldm(files.Tensors([path], as_stored=True), networks=networks)
    except (ConfigError, TypeError, ValueError) as error:  # of sizes in its metadata that are none, the second and third
        raise ConfigError(f"{path}: {error}") from None


def describe(path: Path) -> tuple[Networks, dict[str, Any]]:
    """What networks a single file holds, by its own word or as a published family, and what it says of the training behind it.

    Raises:
        ConfigError: as `unpack`.
    """
    about = files.metadata(path)
    if NETWORKS in about:
        note = build(Note, _table(path, about, NOTE), where=f"{path}: {NOTE}") if NOTE in about else None
        networks = build(Networks, _table(path, about, NETWORKS), where=f"{path}: {NETWORKS}")
        return networks, {} if note is None else note.model_dump()
    tensors = files.Tensors([path])
    if any(".lora_" in key for key in tensors):
        raise ConfigError(f"{path} is a low-rank change alone; give the model that it changes, or the export/ of the run that made it")
    try:
        family = ldm.family(tensors.shapes())
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    networks = presets.get(family).networks
    return networks.model_copy(update={"prediction_type": _prediction_type(path, family, about)}), {}


def _table(path: Path, about: Mapping[str, str], key: str) -> dict[str, Any]:
    """A table that a file's metadata holds as JSON.

    Raises:
        ConfigError: it is none.
    """
    try:
        return dict(json.loads(about[key]))
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(f"{path}: its metadata {key} is damaged; export the model again") from None


def _prediction_type(path: Path, family: str, about: Mapping[str, str]) -> str:
    """What the UNet of a published file predicts: the file's word, else that of the .yaml beside it; SD 1 and SDXL predict noise.

    Raises:
        ConfigError: nobody says it of a file of SD 2, where it may be either.
    """
    told, beside = about.get(PREDICTION), path.with_suffix(".yaml")
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        config = yaml.safe_load(beside.read_text(encoding="utf-8"))["model"]["params"].get("parameterization", "eps")
        if told is not None and _known(told) != _known(config):
            raise ConfigError(f"{path} says that its UNet predicts {told!r}, and {beside.name} beside it {config!r}: one of them is wrong")
        told = config if told is None else told
    if told is None and family == "sd20":
        raise ConfigError(
            f"{path} holds Stable Diffusion 2 and does not say whether its UNet predicts noise or v: put the published config beside it as "
            f"{beside.name}, with model: {{params: {{parameterization: v}}}} for v"
        )
    if told is not None and _known(told) is None:
        raise ConfigError(f"{path}: its UNet is said to predict {told!r}; known are {', '.join(PREDICTION_TYPES)}")
    return _known(told) or "epsilon"


def _known(told: object) -> str | None:
    return PREDICTION_TYPES.get(str(told).lower())


def _write(folder: Path, networks: Networks, found: Mapping[str, Mapping[str, Tensor]], note: Mapping[str, Any]) -> None:
    """The parts of a file in diffusers' layout."""
    kinds = {"unet": ("UNet2DConditionModel", networks.unet), "vae": ("AutoencoderKL", networks.vae)}
    for part, (kind, arguments) in kinds.items():
        _save(folder / part, files.NAMES[0], {"_class_name": kind, **arguments}, found[part])
    for name, tokenizer, given in zip(files.ENCODERS, files.TOKENIZERS, networks.text_encoders, strict=False):
        _save(folder / name, files.NAMES[1], {"model_type": "clip_text_model", **given}, found[name])
        make_tokenizer(given).save_pretrained(folder / tokenizer)
    scheduler(networks).save_pretrained(folder / "scheduler")
    runs.write_json(folder / "model_index.json", index(networks, len(networks.text_encoders)))
    if note:
        runs.write_json(folder / "sdlab.json", dict(note))


def _save(folder: Path, name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir()
    runs.write_json(folder / "config.json", dict(config))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / f"{name}.safetensors", metadata={"format": "pt"})


def scheduler(networks: Networks) -> DDIMScheduler:
    """The noise schedule and the prediction type as diffusers keeps them."""
    return DDIMScheduler(
        **networks.noise_schedule.model_dump(),
        prediction_type=networks.prediction_type,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def index(networks: Networks, encoders: int) -> dict[str, Any]:
    """`model_index.json` of a pipeline with one or two text encoders: which classes read its parts."""
    classes = {"vae": "AutoencoderKL", "unet": "UNet2DConditionModel", "scheduler": "DDIMScheduler"}
    known: dict[str, Any] = {name: ("diffusers", kind) for name, kind in classes.items()}
    classes = {"text_encoder": "CLIPTextModel", "tokenizer": "CLIPTokenizer"}
    known |= dict.fromkeys(("feature_extractor", "image_encoder"), (None, None))
    if encoders > 1:
        classes |= {"text_encoder_2": "CLIPTextModelWithProjection", "tokenizer_2": "CLIPTokenizer"}
        known |= {"_class_name": "StableDiffusionXLPipeline", "force_zeros_for_empty_prompt": networks.null_condition == "zeros"}
    else:
        known |= {"_class_name": "StableDiffusionPipeline", "requires_safety_checker": False, "safety_checker": (None, None)}
    known |= {name: ("transformers", kind) for name, kind in classes.items()}
    return dict(sorted({**known, "_diffusers_version": diffusers.__version__}.items()))


def pack(path: Path, networks: Networks, found: Mapping[str, Mapping[str, Tensor]], *, metadata: Mapping[str, str]) -> None:
    """Write parts as one file under LDM's key names.

    Args:
        path: the file, which need not be there.
        networks: what the parts were made from.
        found: tensors of `unet`, `vae` and the text encoders, by part.
        metadata: what the file says of itself.

    Raises:
        ConfigError: single files have no names for these networks.
    """
    renamed = [ldm.to_ldm(part, tensors, networks=networks) for part, tensors in found.items()]
    together = {name: tensor.contiguous() for tensors in renamed for name, tensor in tensors.items()}
    save_file(together, path, metadata=dict(metadata))


def make_tokenizer(encoder: Mapping[str, Any]) -> CLIPTokenizer:
    """A CLIP tokenizer of the first merges of the BPE file that open_clip ships, of which 48,894 make CLIP's own 49,408 tokens.

    Args:
        encoder: arguments of its text encoder's `CLIPTextConfig`: how many tokens there are, start and end included, and how many a text
            has at most; OpenAI's pads with the end token, OpenCLIP's, which has "gelu", with token 0.
    """
    from open_clip.tokenizer import bytes_to_unicode, default_bpe

    config = CLIPTextConfig(**encoder)
    letters = list(bytes_to_unicode().values())
    words = [*letters, *(letter + "</w>" for letter in letters)]
    with gzip.open(default_bpe(), "rt", encoding="utf-8") as lines:
        merges = [tuple(line.split()) for line in lines.read().split("\n")[1 : config.vocab_size - len(words) - 1]]
    words += ["".join(pair) for pair in merges]
    vocabulary = {word: index for index, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
    pad = {"pad_token": words[0]} if config.hidden_act == "gelu" else {}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=config.max_position_embeddings, **pad)
