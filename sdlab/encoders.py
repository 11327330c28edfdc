"""Text encoders in a folder: in transformers' files, or in those that open_clip writes."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdlab import files, ldm
from sdlab.config import ConfigError

KINDS = (CLIPTextModel, CLIPTextModelWithProjection)
"""transformers' classes of the first and the second text encoder."""
OPEN_CLIP, OPEN_CLIP_CONFIG = "open_clip_model.safetensors", "open_clip_config.json"
"""The names under which open_clip's models lie on the hub."""


def is_open_clip(folder: Path) -> bool:
    """Whether a text encoder lies there as open_clip writes it, and not as transformers does."""
    return not (folder / "config.json").is_file() and (folder / OPEN_CLIP_CONFIG).is_file()


def config(folder: Path, *, alone: bool) -> dict[str, Any]:
    """Arguments of transformers' `CLIPTextConfig`.

    Args:
        folder: of the text encoder.
        alone: whether it is a family's only one: then one of LAION's is cut before its last layer, as SD 2 wants it.

    Raises:
        ConfigError: the config is missing or damaged.
    """
    if not is_open_clip(folder):
        return files.read_json(folder / "config.json")
    path = folder / OPEN_CLIP_CONFIG
    try:
        model = files.read_json(path)["model_cfg"]
        text = model["text_cfg"]
        quick, vocabulary = bool(model.get("quick_gelu", False)), text.get("vocab_size", 49408)
        return {
            "hidden_size": text["width"],
            "intermediate_size": 4 * text["width"],
            "num_hidden_layers": text["layers"] - (alone and not quick),
            "num_attention_heads": text["heads"],
            "max_position_embeddings": text.get("context_length", 77),
            "vocab_size": vocabulary,
            "bos_token_id": vocabulary - 2,
            "eos_token_id": vocabulary - 1,
            "projection_dim": model["embed_dim"],
            "hidden_act": "quick_gelu" if quick else "gelu",
            "pad_token_id": 0,
        }
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{path} lacks {error}; give the config that lies beside the model") from None


def tensors(folder: Path, *, alone: bool) -> Mapping[str, Tensor]:
    """An encoder's tensors in float32 under transformers' names, each read when it is asked for.

    Args:
        folder, alone: as of `config`.

    Raises:
        ConfigError: there are none, or not all of a text encoder.
    """
    if not is_open_clip(folder):
        return files.Tensors(files.weight_files(folder))
    path = folder / OPEN_CLIP
    try:
        tower = ldm.from_open_clip(files.Tensors([path]))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    last = config(folder, alone=alone)["num_hidden_layers"]
    kept = {_kept(name, last, alone=alone): name for name in tower}
    return ldm.Lazy(tower, {name: ([own], itemgetter(0)) for name, own in kept.items() if name is not None})


def _kept(name: str, layers: int, *, alone: bool) -> str | None:
    """A tensor's name in an encoder of so many layers, which has no projection where it is the only one."""
    short = name.removeprefix("text_model.")
    if short.startswith("encoder.layers.") and int(short.split(".")[2]) >= layers:
        return None
    return (None if name.startswith("text_projection") else short) if alone else name


def load(kind: Any, folder: Path, *, alone: bool) -> Any:
    """An encoder of open_clip as transformers' network.

    Raises:
        ConfigError: as `tensors`.
    """
    network = kind(CLIPTextConfig(**config(folder, alone=alone)))
    network.load_state_dict(dict(tensors(folder, alone=alone)))
    return network
