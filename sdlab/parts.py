"""The frozen parts of a family, which training takes as given: VAE, text encoders and tokenizers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors import SafetensorError
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTokenizer

from sdlab import captions, encoders, files, launch, places
from sdlab.config import ConfigError, Networks


def to_pixel_values(images: np.ndarray | Tensor) -> Tensor:
    """`images` (B, 3, H, W) from 0 to 255, uint8 or resized to floats, as `pixel_values`: float32 in [-1, 1], as networks take them."""
    return torch.as_tensor(images).float() / 127.5 - 1


def to_images(pixel_values: Tensor) -> Tensor:
    """`pixel_values` (B, 3, H, W) of any float type, cut to [-1, 1], as `images`: uint8 on the CPU."""
    return ((pixel_values.float().clamp(-1, 1) + 1) * 127.5).round().to("cpu", torch.uint8)


@dataclass(frozen=True)
class TextStates:
    """What the text encoders say of B texts."""

    prompt_embeds: Tensor
    """Float (B, L, D), encoders side by side along D."""
    pooled_prompt_embeds: Tensor | None = None
    """Float (B, P), of the second of two encoders."""

    def __getitem__(self, rows: Any) -> TextStates:
        pooled = self.pooled_prompt_embeds
        return TextStates(self.prompt_embeds[rows], None if pooled is None else pooled[rows])

    def __len__(self) -> int:
        return len(self.prompt_embeds)

    def to(self, device: torch.device) -> TextStates:
        """The same on another device."""
        pooled = self.pooled_prompt_embeds
        return TextStates(self.prompt_embeds.to(device), None if pooled is None else pooled.to(device))

    def named(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def conditioning(self, add_time_ids: Tensor | None) -> dict[str, Any]:
        """What the UNet takes beside latents and timesteps.

        Args:
            add_time_ids: int64 (B, 6), for a UNet that takes sizes: they stay whole numbers, which bfloat16 would round.
        """
        added = None if add_time_ids is None else {"text_embeds": self.pooled_prompt_embeds, "time_ids": add_time_ids}
        return {"encoder_hidden_states": self.prompt_embeds, "added_cond_kwargs": added}


def join(states: Iterable[TextStates]) -> TextStates:
    """Text states one after the other."""
    parts = [one.named() for one in states]
    return TextStates(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


@dataclass(frozen=True)
class Frozen:
    """VAE, one or two text encoders and their tokenizers, in float32 evaluation mode."""

    vae: AutoencoderKL
    text_encoders: tuple[Any, ...]
    """A `CLIPTextModel`; with a second one, that is a `CLIPTextModelWithProjection`."""
    tokenizers: tuple[CLIPTokenizer, ...]
    hashes: dict[str, str]
    """SHA-256 of each part's weights, by part."""
    zeros_for_null: bool = False
    """Whether zeros stand for the empty text."""

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
        """Tokens that each text encoder reads, start and end included."""
        return int(self.text_encoders[0].config.max_position_embeddings)

    @property
    def text_widths(self) -> tuple[int, ...]:
        """Width of each encoder's states; together they are D of `prompt_embeds`."""
        return tuple(int(encoder.config.hidden_size) for encoder in self.text_encoders)

    @property
    def layer(self) -> str:
        """Which states `prompt_embeds` are, and what stands for no caption."""
        state = "last_hidden_state" if len(self.text_encoders) == 1 else "hidden_states[-2]"
        return state + (", zeros for the empty text" if self.zeros_for_null else "")

    @property
    def pooled_width(self) -> int:
        """Width of `pooled_prompt_embeds`; 0 where there are none."""
        return int(self.text_encoders[1].config.projection_dim) if len(self.text_encoders) > 1 else 0

    @torch.no_grad()
    def encode_moments(self, pixel_values: Tensor) -> Tensor:
        """VAE mean and log-variance (B, 2C, h, w) of `pixel_values` (B, 3, H, W) in [-1, 1]."""
        return self.vae.encode(pixel_values.to(self.device)).latent_dist.parameters

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures as `images`, uint8 (B, 3, H, W) on the CPU, of scaled latents (B, C, h, w).

        The VAE computes in float32: in float16 that of SDXL overflows, and makes black pictures.

        Raises:
            ConfigError: latents or pictures that are not finite.
        """
        decoded = self.vae.decode(latents.to(self.device) / self.scaling_factor).sample
        if not torch.isfinite(decoded).all():
            what = "the VAE makes pictures" if torch.isfinite(latents).all() else "the UNet makes latents"
            raise ConfigError(f"{what} that are not finite; its weights seem damaged, or the guidance scale is too large")
        return to_images(decoded)

    def tokenize(self, texts: Sequence[str]) -> Tensor:
        """Token ids, int64 (B, E x L): of each of E encoders one after the other, padded and cut to its length."""
        return token_ids(self.tokenizers, self.max_tokens, texts)

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text before cutting, start and end included."""
        return [len(ids) for ids in self.tokenizers[0](list(texts)).input_ids]

    @functools.cached_property
    def _null_ids(self) -> Tensor:
        return self.tokenize([""])

    @torch.no_grad()
    def encode_text(self, token_ids: Tensor) -> TextStates:
        """What the encoders say of token ids (B, E x L), float32.

        One encoder gives its last hidden state, after the final layer norm (SD 2 leaves out the last layer of OpenCLIP's: there it has 23
        of 24). Of two, each gives the state before its last layer without a norm, and the second its projected state at the end token.
        """
        ids = token_ids.to(self.device).chunk(len(self.text_encoders), dim=1)
        if len(ids) == 1:
            states = TextStates(self.text_encoders[0](ids[0]).last_hidden_state)
        else:
            said = [encoder(part, output_hidden_states=True) for encoder, part in zip(self.text_encoders, ids, strict=True)]
            states = TextStates(torch.cat([one.hidden_states[-2] for one in said], dim=2), said[1].text_embeds)
        if not self.zeros_for_null:
            return states
        given = (token_ids != self._null_ids.to(token_ids.device)).any(dim=1).to(self.device)
        return TextStates(**{name: tensor * given.view(-1, *[1] * (tensor.ndim - 1)) for name, tensor in states.named().items()})

    def to(self, device: torch.device | str) -> Frozen:
        """Move the networks to a device in place."""
        for network in (self.vae, *self.text_encoders):
            network.to(device)
        return self


def token_ids(tokenizers: Sequence[CLIPTokenizer], length: int, texts: Sequence[str]) -> Tensor:
    """Token ids, int64 (B, E x length): of each tokenizer one after the other, padded and cut."""
    options: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True, "return_tensors": "pt"}
    return torch.cat([tokenizer(list(texts), **options).input_ids for tokenizer in tokenizers], dim=1)


def network_configs(frozen: Frozen) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Arguments of a VAE and of text encoders that are loaded."""
    vae, *_ = AutoencoderKL.extract_init_dict(dict(frozen.vae.config))
    told = ("intermediate_size", "projection_dim", "layer_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id", *places.TEXT_FACTS)
    return vae, [{name: getattr(encoder.config, name) for name in told} for encoder in frozen.text_encoders]


def load_frozen(networks: Networks) -> Frozen:
    """Load VAE, text encoders and tokenizers onto the GPU if there is one.

    Raises:
        ConfigError: one of the parts is not there, not whole or not what the preset says, or its weights are pickled.
    """
    places.check_configs(networks)
    folder = places.frozen_folder(networks)
    tokenizers, _ = load_tokenizers(folder)
    for name, tokenizer, told in zip(files.ENCODERS, tokenizers, places.stored_configs(folder)[1], strict=False):
        _check_vocabulary(folder / name, places.fact(CLIPTextConfig, told, "vocab_size"), tokenizer)
    alone = len(tokenizers) == 1
    towers = [
        _load_encoder(kind, folder / name, alone=alone) for kind, name, _ in zip(encoders.KINDS, files.ENCODERS, tokenizers, strict=False)
    ]
    vae = _load_whole(AutoencoderKL, folder / "vae")
    vae.decoder.to(memory_format=torch.channels_last)  # a tenth faster on CPUs, more on GPUs
    return Frozen(
        vae=vae,
        text_encoders=tuple(towers),
        tokenizers=tuple(tokenizers),
        hashes=places.hash_frozen(networks),
        zeros_for_null=networks.null_condition == "zeros",
    ).to(launch.device())


def _load_encoder(kind: Any, folder: Path, *, alone: bool) -> Any:
    return _ready(encoders.load(kind, folder, alone=alone), folder) if encoders.is_open_clip(folder) else _load_whole(kind, folder)


def _load_whole(kind: Any, folder: Path) -> Any:
    """Load a network from a folder; weights that are missing, surplus or damaged are refused, never filled in at random."""
    files.weight_files(folder)
    try:
        network, found = kind.from_pretrained(folder, local_files_only=True, output_loading_info=True, use_safetensors=True)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder} cannot be loaded: {' '.join(str(error).split())[:300]}") from None
    wrong = [f"{word} {key}" for word in ("missing", "unexpected", "mismatched") for key in sorted(map(str, found[f"{word}_keys"]))]
    if wrong:
        raise ConfigError(f"{folder} does not hold the whole network ({len(wrong)} keys): {'; '.join(wrong[:20])}")
    return _ready(network, folder)


def _ready(network: Any, folder: Path) -> Any:
    """A network that only evaluates, in float32.

    Raises:
        ConfigError: weights that are not finite.
    """
    files.check_finite(network.state_dict(), f"{folder} holds weights that are")
    return network.float().eval().requires_grad_(False)


def load_tokenizers(folder: Path) -> tuple[list[CLIPTokenizer], int]:
    """The tokenizers of a folder of frozen parts, and the number of tokens that its text encoders read.

    Raises:
        ConfigError: one cannot be loaded.
    """
    length = int(places.fact(CLIPTextConfig, places.stored_configs(folder)[1][0], "max_position_embeddings"))
    return [_load_tokenizer(folder / part, length) for part in places.names(folder) if part in files.TOKENIZERS], length


def _load_tokenizer(folder: Path, length: int) -> CLIPTokenizer:
    try:
        return CLIPTokenizer.from_pretrained(folder, local_files_only=True, model_max_length=length)
    except Exception as error:  # the library raises nearly every kind of exception
        raise ConfigError(f"{folder} cannot be loaded: {captions.error_line(error)}") from None


def _check_vocabulary(folder: Path, known: int, tokenizer: CLIPTokenizer) -> None:
    if len(tokenizer) != known:
        raise ConfigError(f"{folder} knows {known:,} tokens, and its tokenizer {len(tokenizer):,}: they do not match")
