"""Networks: the UNet, and whole text-to-image models, from what sdlab ships, a folder, a file, the hub or a run."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextConfig
from transformers.utils.logging import disable_progress_bar

from sdlab import files, launch, parts, places, stored
from sdlab.config import ConfigError, Networks, Preset
from sdlab.encoders import KINDS

logging.getLogger("diffusers").setLevel(logging.ERROR)
logging.getLogger("transformers").setLevel(logging.ERROR)
disable_progress_bar()


@dataclass(frozen=True)
class TextToImage:
    """A model that draws: frozen parts and a UNet, and where its weights come from."""

    frozen: parts.Frozen
    unet: UNet2DConditionModel
    networks: Networks
    name: str
    """What was asked for: "tiny" or a path."""
    weights: str
    """"ema" or "raw"."""
    step: int
    """Optimizer steps behind the weights."""
    weights_hash: str
    resolution: int = 64
    adapter: Mapping[str, Tensor] | None = None
    """The low-rank change that the UNet's weights hold, under peft's names."""


def build_unet(networks: Networks, *, seed: int = 0) -> UNet2DConditionModel:
    """A UNet with random weights drawn from `seed`, without touching the global random state.

    Raises:
        ConfigError: the arguments do not make a UNet.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            unet = UNet2DConditionModel(**networks.unet)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"networks.unet does not make a UNet: {error}") from None
    if networks.takes_sizes:
        unet.add_time_proj.register_forward_hook(_leave_out_unsaid)
    return unet


def _leave_out_unsaid(module: nn.Module, inputs: tuple[Tensor], embedded: Tensor) -> Tensor:
    """Zeros for sizes below zero, which stand for sizes that were dropped."""
    return embedded * (inputs[0] >= 0).unsqueeze(1)


def count_unet(networks: Networks) -> int:
    """Parameters of the UNet, counted without allocating them."""
    return sum(tensor.numel() for tensor in unet_shapes(networks).values())


def check_networks(networks: Networks) -> None:
    """Refuse a UNet that does not fit its frozen parts, before anything is built with weights.

    Raises:
        ConfigError: it cannot be made, or its channels or conditioning are not those of the VAE and the text encoders.
    """
    unet_shapes(networks)
    vae, encoders = places.configs(networks)
    channels, width = places.fact(AutoencoderKL, vae, "latent_channels"), sum(encoder["hidden_size"] for encoder in encoders)
    wanted = {"in_channels": channels, "out_channels": channels, "cross_attention_dim": width}
    if networks.takes_sizes:
        wanted["projection_class_embeddings_input_dim"] = encoders[-1]["projection_dim"] + 6 * networks.unet["addition_time_embed_dim"]
    given = {name: networks.unet.get(name) for name in wanted}
    wrong = [f"{name}={given[name]!r} has to be {value}" for name, value in wanted.items() if given[name] != value]
    if networks.takes_sizes != (len(encoders) == 2):
        wrong.append(f"addition_embed_type={networks.unet.get('addition_embed_type')!r} does not go with {len(encoders)} text encoders")
    if wrong:
        raise ConfigError(f"networks.unet does not fit the frozen parts ({networks.frozen}): {'; '.join(wrong)}")


def unet_factor(networks: Networks) -> int:
    """How far the UNet shrinks latents: a power of two."""
    return 2 ** (len(networks.unet.get("block_out_channels", (320, 640, 1280, 1280))) - 1)


def count_parameters(preset: Preset) -> dict[str, int]:
    """Numbers of parameters of `unet`, `vae` and `text_encoders`, counted without allocating them."""
    return count_networks(preset.networks)


def count_networks(networks: Networks) -> dict[str, int]:
    """As `count_parameters`, of a family's networks."""
    return {"unet": count_unet(networks), **_count_frozen(json.dumps(places.configs(networks)))}


@functools.lru_cache(maxsize=16)
def _count_frozen(configs: str) -> dict[str, int]:
    """Remembered, since a run asks more than once."""
    vae, encoders = json.loads(configs)
    with torch.device("meta"):
        towers = [kind(CLIPTextConfig(**config)) for kind, config in zip(KINDS, encoders, strict=False)]
        return {"vae": _count(AutoencoderKL.from_config(vae)), "text_encoders": sum(map(_count, towers))}


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def hand_over(unet: UNet2DConditionModel, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Copy weights into the UNet; every key has to be there with its shape, and every number has to be finite.

    Raises:
        ConfigError: as `check_fit`, or with the keys that hold others.
    """
    read = dict(weights)
    check_fit(unet.state_dict(), read, source=source)
    files.check_finite(read, f"the weights of {source} are")
    unet.load_state_dict(read)


def unet_shapes(networks: Networks) -> dict[str, Tensor]:
    """The UNet's parameters as tensors without data, by name.

    Raises:
        ConfigError: the arguments do not make a UNet.
    """
    return dict(_unet_shapes(networks.model_dump_json()))


@functools.lru_cache(maxsize=16)
def _unet_shapes(networks: str) -> dict[str, Tensor]:
    """Remembered, since a UNet of thousands of layers takes a second to lay out, and is asked about more than once."""
    with torch.device("meta"):
        return dict(build_unet(Networks.model_validate_json(networks)).state_dict())


def check_fit(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse weights whose keys and shapes are not those of a network.

    Raises:
        ConfigError: missing, surplus or misshapen keys, the first twenty of them listed.
    """
    files.check_shapes(weights, {key: tuple(tensor.shape) for key, tensor in own.items()}, f"the weights of {source} do not fit the UNet")


def load_again(found: stored.Stored, *, checkpoint: str | int, loaded: TextToImage | None = None) -> TextToImage:
    """A model as it was found before, or what is the same of one that is loaded already.

    Raises:
        ConfigError: as `load`, or its weights are not any more what they were when it was found.
    """
    frozen = loaded.frozen if loaded is not None and loaded.frozen.hashes == found.frozen_hashes else None
    if loaded is not None and frozen is not None and (loaded.weights_hash, loaded.networks) == (found.weights_hash, found.networks):
        return loaded
    again = load(found.name, weights=found.weights, checkpoint=checkpoint, frozen=frozen)
    if again.weights_hash != found.weights_hash:
        raise ConfigError(f"{found.path} holds other weights than a moment ago; run this again")
    return again


def load(model: str, *, weights: str = "ema", checkpoint: str | int = "latest", frozen: parts.Frozen | None = None) -> TextToImage:
    """Load a model that draws, onto the GPU if there is one.

    Args:
        model: "tiny", a run folder, a diffusers pipeline folder, the hub id of one, or a single .safetensors file.
        weights: "ema" or "raw", or "auto" for EMA where there is one; what sdlab did not write counts as "raw".
        checkpoint: "latest" or an optimizer step of a run folder.
        frozen: the model's frozen parts, where they are loaded already.

    Raises:
        ConfigError: as `stored.find`, or weights that are missing, surplus or damaged.
    """
    found = stored.find(model, weights=weights, checkpoint=checkpoint)
    check_networks(found.networks)
    with torch.device("meta"):  # random weights take longer to draw than others to read
        unet = build_unet(found.networks)
    hand_over(unet.to_empty(device="cpu"), found.state_dict(), source=model)
    return TextToImage(
        frozen=frozen or parts.load_frozen(found.networks),
        unet=unet.eval().requires_grad_(False).to(launch.device(), memory_format=torch.channels_last),
        networks=found.networks,
        name=model,
        weights=found.weights,
        step=found.step,
        weights_hash=found.weights_hash,
        resolution=found.resolution,
    )
