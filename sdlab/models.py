"""Networks: the frozen parts, the UNet, and whole text-to-image models, from what sdlab ships, a folder or a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, ModelMixin, UNet2DConditionModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer
from transformers.utils.logging import disable_progress_bar

from sdlab import launch, runs, stored
from sdlab.config import ConfigError, Networks, Preset
from sdlab.stored import TINY_DIR as TINY_DIR
from sdlab.stored import frozen_folder, read_json
from sdlab.stored import vae_factor as vae_factor

logging.getLogger("diffusers").setLevel(logging.ERROR)
logging.getLogger("transformers").setLevel(logging.ERROR)
disable_progress_bar()


def to_pixel_values(images: np.ndarray | Tensor) -> Tensor:
    """`images` (B, 3, H, W) from 0 to 255, uint8 or resized to floats, as `pixel_values`: float32 in [-1, 1], as networks take them."""
    return torch.as_tensor(images).float() / 127.5 - 1


def to_images(pixel_values: Tensor) -> Tensor:
    """`pixel_values` (B, 3, H, W) of any float type, cut to [-1, 1], as `images`: uint8 on the CPU."""
    return ((pixel_values.float().clamp(-1, 1) + 1) * 127.5).round().to("cpu", torch.uint8)


@dataclass(frozen=True)
class Frozen:
    """The parts that training takes as given: VAE, text encoder and tokenizer, in float32 evaluation mode."""

    vae: AutoencoderKL
    text_encoder: CLIPTextModel
    tokenizer: CLIPTokenizer
    hashes: dict[str, str]
    """SHA-256 of each part's weights, by part."""

    @property
    def device(self) -> torch.device:
        return self.vae.device

    @property
    def vae_factor(self) -> int:
        """Pixels a side of one latent."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def scaling_factor(self) -> float:
        return float(self.vae.config.scaling_factor)

    @property
    def max_tokens(self) -> int:
        """Tokens that the text encoder reads, start and end included."""
        return int(self.text_encoder.config.max_position_embeddings)

    @torch.no_grad()
    def encode_moments(self, pixel_values: Tensor) -> Tensor:
        """VAE mean and log-variance (B, 2C, h, w) of `pixel_values` (B, 3, H, W) in [-1, 1]."""
        return self.vae.encode(pixel_values.to(self.device)).latent_dist.parameters

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures as `images`, uint8 (B, 3, H, W) on the CPU, of scaled latents (B, C, h, w)."""
        return to_images(self.vae.decode(latents.to(self.device) / self.scaling_factor).sample)

    def tokenize(self, captions: Sequence[str]) -> Tensor:
        """Token ids, int64 (B, L), padded and cut to the encoder's length."""
        return stored.token_ids(self.tokenizer, self.max_tokens, captions)

    def count_tokens(self, captions: Sequence[str]) -> list[int]:
        """Tokens of each caption before cutting, start and end included."""
        return [len(ids) for ids in self.tokenizer(list(captions)).input_ids]

    @torch.no_grad()
    def encode_text(self, token_ids: Tensor) -> Tensor:
        """`prompt_embeds`, float32 (B, L, D): the last hidden state for token ids (B, L)."""
        return self.text_encoder(token_ids.to(self.device)).last_hidden_state

    def to(self, device: torch.device | str) -> Frozen:
        """Move the networks to a device in place."""
        self.vae.to(device)
        self.text_encoder.to(device)
        return self


@dataclass(frozen=True)
class TextToImage:
    """A model that draws: frozen parts and a UNet, and where its weights come from."""

    frozen: Frozen
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


def load_frozen(networks: Networks) -> Frozen:
    """Load VAE, text encoder and tokenizer from what sdlab ships or a folder in diffusers' layout, onto the GPU if there is one.

    Raises:
        ConfigError: the folder or one of its parts is not there, or its weights are pickled.
    """
    folder = frozen_folder(networks)
    tokenizer, _ = stored.load_tokenizer(folder)
    return Frozen(
        vae=_ready(_load_whole(AutoencoderKL, folder / "vae")),
        text_encoder=_ready(_load_whole(CLIPTextModel, folder / "text_encoder")),
        tokenizer=tokenizer,
        hashes=hash_frozen(networks),
    ).to(launch.device())


def _load_whole(kind: Any, folder: Path) -> Any:
    """Load a network from a folder; weights that are missing, surplus or damaged are refused, never filled in at random."""
    stored.weight_files(folder)
    try:
        network, found = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True, use_safetensors=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be loaded: {' '.join(str(error).split())[:300]}") from None
    wrong = [f"{word} {key}" for word in ("missing", "unexpected", "mismatched") for key in sorted(map(str, found[f"{word}_keys"]))]
    if wrong:
        raise ConfigError(f"{folder} does not hold the whole network ({len(wrong)} keys): {'; '.join(wrong[:20])}")
    return network


def hash_frozen(networks: Networks) -> dict[str, str]:
    """SHA-256 of the weights of `vae` and `text_encoder` and of the files of `tokenizer`, by part."""
    folder = frozen_folder(networks)
    weights = {part: hash_weights(folder / part) for part in ("vae", "text_encoder")}
    return weights | {"tokenizer": hash_weights(folder / "tokenizer", "*.*")}


def _ready(module: Any) -> Any:
    return module.float().eval().requires_grad_(False)


def hash_weights(folder: Path, pattern: str = "*.safetensors") -> str:
    """SHA-256 over some files of a folder, in order of their names."""
    return stored.hash_files(sorted(folder.glob(pattern)))


def build_unet(networks: Networks, *, seed: int = 0) -> UNet2DConditionModel:
    """A UNet with random weights drawn from `seed`, without touching the global random state.

    Raises:
        ConfigError: the arguments do not make a UNet.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return UNet2DConditionModel(**networks.unet)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"networks.unet does not make a UNet: {error}") from None


def count_unet(networks: Networks) -> int:
    """Parameters of the UNet, counted without allocating them."""
    return sum(tensor.numel() for tensor in unet_shapes(networks).values())


def check_networks(networks: Networks) -> None:
    """Refuse a UNet that does not fit its frozen parts, before anything is built with weights.

    Raises:
        ConfigError: it cannot be made, or its channels or conditioning width are not those of the VAE and the text encoder.
    """
    unet_shapes(networks)
    folder = frozen_folder(networks)
    channels = AutoencoderKL.load_config(folder / "vae", local_files_only=True)["latent_channels"]
    width = read_json(folder / "text_encoder" / "config.json")["hidden_size"]
    wanted = {"in_channels": channels, "out_channels": channels, "cross_attention_dim": width}
    wrong = [f"{name}={networks.unet.get(name)!r} has to be {value}" for name, value in wanted.items() if networks.unet.get(name) != value]
    if wrong:
        raise ConfigError(f"networks.unet does not fit the frozen parts in {folder}: {'; '.join(wrong)}")


def unet_factor(networks: Networks) -> int:
    """How far the UNet shrinks latents: a power of two."""
    return 2 ** (len(networks.unet.get("block_out_channels", (320, 640, 1280, 1280))) - 1)


def count_parameters(preset: Preset) -> dict[str, int]:
    """Numbers of parameters of `unet`, `vae` and `text_encoders`, counted without allocating them."""
    folder = frozen_folder(preset.networks)
    with torch.device("meta"):
        built = {
            "vae": AutoencoderKL.from_config(AutoencoderKL.load_config(folder / "vae")),
            "text_encoders": CLIPTextModel(CLIPTextModel.config_class.from_pretrained(folder / "text_encoder")),
        }
    counts = {name: sum(parameter.numel() for parameter in module.parameters()) for name, module in built.items()}
    return {"unet": count_unet(preset.networks), **counts}


def hand_over(unet: UNet2DConditionModel, weights: Mapping[str, Tensor], *, source: str) -> None:
    """Copy weights into the UNet; every key has to be there with its shape.

    Raises:
        ConfigError: as `check_fit`.
    """
    read = dict(weights)
    check_fit(unet.state_dict(), read, source=source)
    unet.load_state_dict(read)


def unet_shapes(networks: Networks) -> dict[str, Tensor]:
    """The UNet's parameters as tensors without data, by name.

    Raises:
        ConfigError: the arguments do not make a UNet.
    """
    with torch.device("meta"):
        return dict(build_unet(networks).state_dict())


def check_fit(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, source: str) -> None:
    """Refuse weights whose keys and shapes are not those of a network.

    Raises:
        ConfigError: missing, surplus or misshapen keys, the first twenty of them listed.
    """
    problems = [f"missing {key}" for key in own if key not in weights]
    problems += [f"unknown {key}" for key in weights if key not in own]
    shapes = {key: (tuple(weights[key].shape), tuple(own[key].shape)) for key in own if key in weights}
    problems += [f"{key} is {given}, not {wanted}" for key, (given, wanted) in shapes.items() if given != wanted]
    if problems:
        listed = "; ".join(problems[:20]) + ("; ..." if len(problems) > 20 else "")
        raise ConfigError(f"the weights of {source} do not fit the UNet ({len(problems)} keys): {listed}")


def load(model: str, *, weights: str = "ema", checkpoint: str | int = "latest") -> TextToImage:
    """Load a model that draws, onto the GPU if there is one.

    Args:
        model: "tiny", a run folder, a diffusers pipeline folder, or the hub id of one.
        weights: "ema" or "raw", or "auto" for EMA where there is one; what sdlab did not write counts as "raw".
        checkpoint: "latest" or an optimizer step of a run folder.

    Raises:
        ConfigError: as `stored.find`, or weights that are missing, surplus or damaged.
    """
    found = stored.find(model, weights=weights, checkpoint=checkpoint)
    with torch.device("meta"):  # random weights take longer to draw than others to read
        unet = build_unet(found.networks)
    hand_over(unet.to_empty(device="cpu"), found.state_dict(), source=model)
    return TextToImage(
        frozen=load_frozen(found.networks),
        unet=_ready(unet).to(launch.device()),
        networks=found.networks,
        name=model,
        weights=found.weights,
        step=found.step,
        weights_hash=found.weights_hash,
        resolution=found.resolution,
    )


def save_pipeline(folder: Path, model: TextToImage) -> None:
    """Write a model as a diffusers pipeline folder, with `sdlab.json` saying which weights it holds.

    Part by part, as `StableDiffusionPipeline.save_pretrained` does: importing that class takes longer than saving.
    """
    scheduler = DDIMScheduler(
        **model.networks.noise_schedule.model_dump(),
        prediction_type=model.networks.prediction_type,
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    frozen = model.frozen
    parts = {
        "vae": frozen.vae,
        "text_encoder": frozen.text_encoder,
        "tokenizer": frozen.tokenizer,
        "unet": model.unet,
        "scheduler": scheduler,
    }
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": diffusers.__version__}
    index |= {name: [type(part).__module__.split(".")[0], type(part).__name__] for name, part in parts.items()}
    index |= dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder"), (None, None))
    for name, part in parts.items():
        save_part(part, folder / name)
    runs.write_json(folder / "model_index.json", dict(sorted({**index, "requires_safety_checker": False}.items())))
    runs.write_json(folder / "sdlab.json", {"weights": model.weights, "step": model.step, "resolution": model.resolution})


def save_part(part: Any, folder: Path) -> None:
    """Write one part of a pipeline in its own library's layout, without the path that it was once loaded from."""
    if isinstance(part, ModelMixin):
        part.register_to_config(_name_or_path="")
    part.save_pretrained(folder)
