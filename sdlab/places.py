"""Where the frozen parts of a family lie, and what they are by their configs."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig

from sdlab import captions, encoders, files, single
from sdlab.config import ConfigError, Networks, resolve_path
from sdlab.encoders import KINDS

TINY_DIR = Path(__file__).parent / "assets" / "tiny"
"""The built-in model as a diffusers pipeline folder, and its judge."""
DRAWN = 1
"""Raised by hand when parts are drawn in another way, so that older ones are not taken for them."""
VAE_FACTS = ("latent_channels", "block_out_channels", "scaling_factor", "shift_factor")
TEXT_FACTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act", "max_position_embeddings", "vocab_size")
"""What a preset says of its parts, and what they have to be."""


def frozen_folder(networks: Networks) -> Path:
    """The folder of the frozen parts, in diffusers' layout; a hub id is fetched, random parts are drawn once and kept.

    Raises:
        ConfigError: it lacks one of them, or cannot be had.
    """
    return check_layout(_find(networks))


def check_layout(folder: Path) -> Path:
    """The same folder, with `vae`, `text_encoder` and `tokenizer`, and the second of each or none.

    Raises:
        ConfigError: it lacks one of them.
    """
    wanted = names(folder)
    missing = [part for part in wanted if not (folder / part).is_dir()]
    if missing:
        raise ConfigError(f"folder {folder} lacks {', '.join(missing)}; give a folder in diffusers' layout with {', '.join(wanted)}")
    return folder


def names(folder: Path) -> tuple[str, ...]:
    """The frozen parts that a folder should hold, in order."""
    second = (folder / "text_encoder_2").is_dir() or (folder / "tokenizer_2").is_dir()
    return ("vae", *files.ENCODERS[: 1 + second], *files.TOKENIZERS[: 1 + second])


def _find(networks: Networks) -> Path:
    if networks.frozen == "tiny":
        return TINY_DIR
    if networks.frozen == "random":
        if not (networks.vae and networks.text_encoders):
            raise ConfigError("networks.frozen is 'random', so networks.vae and networks.text_encoders have to say what to draw")
        return _drawn(networks.vae, networks.text_encoders)
    path = resolve_path(networks.frozen)
    if path.is_file() and path.suffix == ".safetensors":
        return single.unpack(path)
    if path.is_file() and path.suffix in files.PICKLES:
        raise ConfigError(f"networks.frozen {networks.frozen!r}: {files.refuse_pickles('from_single_file')}")
    if path.exists():
        return path
    if files.HUB_ID.fullmatch(networks.frozen) is None:
        raise ConfigError(
            f"networks.frozen: there is nothing at {path}; give a folder in diffusers' layout, a .safetensors file or a hub id"
        )
    try:
        return _fetched(networks.frozen, path)
    except ConfigError as error:
        raise ConfigError(f"{error}; or say in a preset of your own where you have the parts: networks: {{frozen: FOLDER}}") from None


@functools.lru_cache(maxsize=8)
def _fetched(repository: str, here: Path) -> Path:
    return files.fetch(repository, files.HUB_PARTS, here=here)


def _drawn(vae: dict[str, Any], encoders: Sequence[dict[str, Any]]) -> Path:
    """Parts with random weights, the same for all who ask."""
    made_from = f"{DRAWN} {json.dumps([vae, encoders], sort_keys=True)}"
    try:
        return files.keep("random", made_from, partial(_draw, vae, encoders))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"networks.vae and networks.text_encoders do not make frozen parts: {captions.error_line(error)}") from None


def _draw(vae: dict[str, Any], encoders: Sequence[dict[str, Any]], folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoencoderKL(**vae).save_pretrained(folder / "vae")
        for name, tokenizer, kind, given in zip(files.ENCODERS, files.TOKENIZERS, KINDS, encoders, strict=False):
            kind(CLIPTextConfig(**given)).save_pretrained(folder / name)
            single.make_tokenizer(given).save_pretrained(folder / tokenizer)


def vae_factor(networks: Networks) -> int:
    """Pixels a side of one latent, as the preset or the config of the frozen VAE says."""
    config = networks.vae or files.read_json(frozen_folder(networks) / "vae" / "config.json")
    return 2 ** (len(fact(AutoencoderKL, config, "block_out_channels")) - 1)


def configs(networks: Networks) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Arguments of the VAE and of the text encoders, as the preset says, else as their files do."""
    if networks.vae and networks.text_encoders:
        return networks.vae, networks.text_encoders
    return stored_configs(frozen_folder(networks))


def stored_configs(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Arguments of the VAE and of the text encoders in a folder.

    Raises:
        ConfigError: a config is missing or damaged.
    """
    known = [part for part in names(folder) if part in files.ENCODERS]
    told = [encoders.config(folder / part, alone=len(known) == 1) for part in known]
    return files.read_json(folder / "vae" / "config.json"), told


def check_configs(networks: Networks) -> None:
    """Refuse frozen parts that are not what the preset says.

    Raises:
        ConfigError: every difference with both values.
    """
    if not (networks.vae and networks.text_encoders):
        return
    folder = frozen_folder(networks)
    vae, told = stored_configs(folder)
    wrong = list(_differing("vae", AutoencoderKL, networks.vae, vae, VAE_FACTS))
    if len(told) != len(networks.text_encoders):
        wrong.append(f"{len(told)} text encoders, not {len(networks.text_encoders)}")
    for name, wanted, there in zip(files.ENCODERS, networks.text_encoders, told, strict=False):
        wrong += _differing(name, CLIPTextConfig, wanted, there, TEXT_FACTS)
    if wrong:
        raise ConfigError(f"the frozen parts in {folder} are not those of this preset: {'; '.join(wrong)}")


def _differing(part: str, kind: Any, wanted: dict[str, Any], there: dict[str, Any], facts: Iterable[str]) -> Iterator[str]:
    for name in facts:
        ours, theirs = (fact(kind, table, name) for table in (wanted, there))
        if ours != theirs:
            yield f"{part}.{name} is {theirs!r}, not {ours!r}"


def fact(kind: Any, table: Mapping[str, Any], name: str) -> Any:
    """A value of a config, or the default of its class, `AutoencoderKL` or `CLIPTextConfig`."""
    value = table[name] if name in table else inspect.signature(kind).parameters[name].default
    return list(value) if isinstance(value, tuple) else value


def hash_frozen(networks: Networks) -> dict[str, str]:
    """SHA-256 of the weights of VAE and text encoders and of the files of tokenizers, by part."""
    folder = frozen_folder(networks)
    return {part: files.hash_weights(folder / part, "*.*" if part in files.TOKENIZERS else "*.safetensors") for part in names(folder)}
