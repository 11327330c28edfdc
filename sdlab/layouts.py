"""The table of names: each tensor of a single file or of an open_clip text tower, and those of ours that hold the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdlab.config import ConfigError, Networks

UNET_PREFIX, VAE_PREFIX = "model.diffusion_model.", "first_stage_model."
TEXT_PREFIXES = {"quick_gelu": "cond_stage_model.transformer.text_model.", "gelu": "cond_stage_model.model."}
"""Of the text encoder of SD1 and SD2, by its activation: OpenAI's weights are in transformers' names, LAION's in open_clip's."""
SDXL_PREFIXES = ("conditioner.embedders.0.transformer.text_model.", "conditioner.embedders.1.model.")
UNNAMED = ("class_embed_type", "encoder_hid_dim_type", "num_class_embeds", "time_cond_proj_dim")
NAMED = {"addition_embed_type": (None, "text_time"), "mid_block_type": ("UNetMidBlock2DCrossAttn",)}
"""Arguments of a UNet for which single files have no names unless they are None, and unless they are one of these."""


class CLIPText(NamedTuple):
    """What the names and shapes of a text encoder depend on; the defaults are those of transformers."""

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    projection_dim: int = 512
    num_hidden_layers: int = 12
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"

    @classmethod
    def of(cls, networks: Networks, index: int) -> CLIPText:
        return cls(**{name: value for name, value in networks.text_encoders[index].items() if name in cls._fields})


@dataclass(frozen=True)
class Layout:
    """How one of their tensors is made from ours, and the i-th of ours from the one of theirs."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[int, Sequence[Tensor]], Tensor]


SAME = Layout(lambda ours: ours[0], lambda i, theirs: theirs[0])
POINTWISE = Layout(lambda ours: ours[0][:, :, None, None], lambda i, theirs: theirs[0][:, :, 0, 0])
"""Their convolution of 1 x 1 is our linear layer."""
TRANSPOSED = Layout(lambda ours: ours[0].T.contiguous(), lambda i, theirs: theirs[0].T.contiguous())
FUSED = Layout(lambda ours: torch.cat(list(ours)), lambda i, theirs: theirs[0].chunk(3)[i].clone())
"""Their one tensor is our three, of queries, keys and values; cloned, because tensors that share memory cannot be saved."""


@dataclass(frozen=True)
class Row:
    """A line of the table of names: a tensor of theirs, and the one or three of ours that hold the same numbers."""

    theirs: str
    ours: tuple[str, ...]
    shape: tuple[int, ...]
    """Of each of ours."""
    layout: Layout = SAME

    def their_shape(self) -> torch.Size:
        return self.layout.join([torch.empty(self.shape, device="meta")] * len(self.ours)).shape


def check_activation(hidden_act: str, *, quick_gelu: bool) -> None:
    """Refuse a text encoder whose activation is not the one that its weights were trained with.

    Args:
        hidden_act: of the encoder, in transformers' words.
        quick_gelu: whether the weights need QuickGELU: OpenAI's ViT-L-14 does, LAION's ViT-H-14 and ViT-bigG-14 do not.

    Raises:
        ConfigError: the two differ.
    """
    needed = "quick_gelu" if quick_gelu else "gelu"
    if hidden_act != needed:
        raise ConfigError(f"a text encoder has hidden_act={hidden_act!r}, but its weights were trained with {needed!r}; give it that")


def named_parts(networks: Networks) -> list[str]:
    return ["unet", "vae", "text_encoder", "text_encoder_2"][: 2 + len(networks.text_encoders)]


def table(part: str, networks: Networks) -> list[Row]:
    """The table of a part: their full names, and ours without the prefix of transformers."""
    if part not in named_parts(networks):
        raise ConfigError(f"part={part!r}; these networks have {', '.join(named_parts(networks))}")
    if part.startswith("text"):
        return _text_rows(networks, index=int(part == "text_encoder_2"))
    given = networks.unet if part == "unet" else networks.vae
    if not given:
        raise ConfigError(f"networks.{part} is empty, so the names of its tensors are not known; give its arguments")
    return _under(UNET_PREFIX, _unet(given)) if part == "unet" else _under(VAE_PREFIX, _vae(given))


def _under(prefix: str, rows: Iterable[Row]) -> list[Row]:
    return [replace(row, theirs=prefix + row.theirs) for row in rows]


def _layer(theirs: str, ours: str, *shape: int, bias: bool = True, layout: Layout = SAME) -> Iterator[Row]:
    yield Row(f"{theirs}.weight", (f"{ours}.weight",), shape, layout)
    if bias:
        yield Row(f"{theirs}.bias", (f"{ours}.bias",), shape[:1])


UNET_RESNET = ("in_layers.0", "in_layers.2", "emb_layers.1", "out_layers.0", "out_layers.3", "skip_connection")
VAE_RESNET = ("norm1", "conv1", "", "norm2", "conv2", "nin_shortcut")


def _resnet(theirs: str, ours: str, channels: int, width: int, *, time: int = 0) -> Iterator[Row]:
    """Two convolutions from `channels` to `width`; `time` is the width of the timestep embedding, which a VAE does not have."""
    norm1, conv1, embed, norm2, conv2, shortcut = (f"{theirs}.{name}" for name in (UNET_RESNET if time else VAE_RESNET))
    yield from _layer(norm1, f"{ours}.norm1", channels)
    yield from _layer(conv1, f"{ours}.conv1", width, channels, 3, 3)
    yield from _layer(embed, f"{ours}.time_emb_proj", width, time) if time else ()
    yield from _layer(norm2, f"{ours}.norm2", width)
    yield from _layer(conv2, f"{ours}.conv2", width, width, 3, 3)
    yield from _layer(shortcut, f"{ours}.conv_shortcut", width, channels, 1, 1) if channels != width else ()


class _Level(NamedTuple):
    """One resolution of a UNet: channels, blocks, transformer layers a block (0 is no attention), width of the conditioning."""

    width: int
    blocks: int
    depth: int
    context: int
    linear: bool


def _unet(given: Mapping[str, Any]) -> Iterator[Row]:
    """The table of a UNet; what is not given is diffusers' default."""
    _check_named(given)
    levels = _levels(given)
    width, time = levels[0].width, 4 * levels[0].width
    yield from _layer("time_embed.0", "time_embedding.linear_1", time, width)
    yield from _layer("time_embed.2", "time_embedding.linear_2", time, time)
    if given.get("addition_embed_type"):
        yield from _layer("label_emb.0.0", "add_embedding.linear_1", time, *_each(given, "projection_class_embeddings_input_dim", None, 1))
        yield from _layer("label_emb.0.2", "add_embedding.linear_2", time, time)
    yield from _layer("input_blocks.0.0", "conv_in", width, given.get("in_channels", 4), 3, 3)
    yield from _unet_down(_attending(levels, given.get("down_block_types", ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"])), time)
    yield from _resnet("middle_block.0", "mid_block.resnets.0", levels[-1].width, levels[-1].width, time=time)
    yield from _transformer("middle_block.1", "mid_block.attentions.0", levels[-1])
    yield from _resnet("middle_block.2", "mid_block.resnets.1", levels[-1].width, levels[-1].width, time=time)
    yield from _unet_up(_attending(levels[::-1], given.get("up_block_types", ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3)), time)
    yield from _layer("out.0", "conv_norm_out", width)
    yield from _layer("out.2", "conv_out", given.get("out_channels", 4), width, 3, 3)


def _check_named(given: Mapping[str, Any]) -> None:
    unnamed = [f"{name}={given[name]!r}" for name in UNNAMED if given.get(name) is not None]
    unnamed += [f"{name}={given[name]!r}" for name, known in NAMED.items() if name in given and given[name] not in known]
    kinds = [*given.get("down_block_types", ()), *given.get("up_block_types", ())]
    unnamed += [f"blocks {kind}" for kind in kinds if kind.removeprefix("CrossAttn") not in ("DownBlock2D", "UpBlock2D")]
    if unnamed:
        raise ConfigError(f"networks.unet has {', '.join(unnamed)}, for which single files have no names; export a pipeline folder")


def _levels(given: Mapping[str, Any]) -> list[_Level]:
    widths, linear = given.get("block_out_channels", (320, 640, 1280, 1280)), bool(given.get("use_linear_projection"))
    defaults = {"layers_per_block": 2, "transformer_layers_per_block": 1, "cross_attention_dim": 1280}
    columns = zip(widths, *(_each(given, name, default, len(widths)) for name, default in defaults.items()), strict=True)
    return [_Level(width, blocks, depth, context, linear) for width, blocks, depth, context in columns]


def _each(given: Mapping[str, Any], name: str, default: int | None, count: int) -> list[int]:
    """A number for each of `count` levels, given once or for each."""
    value = given.get(name, default)
    values = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(values) != count or not all(isinstance(each, int) for each in values):
        raise ConfigError(f"networks.unet has {name}={value!r}; for single files it has to be one whole number, or {count} of them")
    return values


def _attending(levels: Sequence[_Level], kinds: Sequence[str]) -> list[_Level]:
    if len(levels) != len(kinds):
        raise ConfigError(f"networks.unet has {len(levels)} levels by block_out_channels and {len(kinds)} by its block types {list(kinds)}")
    return [level if kind.startswith("CrossAttn") else level._replace(depth=0) for level, kind in zip(levels, kinds, strict=True)]


def _unet_down(levels: Sequence[_Level], time: int) -> Iterator[Row]:
    block, channels = 1, levels[0].width
    for i, level in enumerate(levels):
        for j in range(level.blocks):
            yield from _resnet(f"input_blocks.{block}.0", f"down_blocks.{i}.resnets.{j}", channels, level.width, time=time)
            yield from _transformer(f"input_blocks.{block}.1", f"down_blocks.{i}.attentions.{j}", level)
            block, channels = block + 1, level.width
        if i + 1 < len(levels):
            yield from _layer(f"input_blocks.{block}.0.op", f"down_blocks.{i}.downsamplers.0.conv", channels, channels, 3, 3)
            block += 1


def _unet_up(levels: Sequence[_Level], time: int) -> Iterator[Row]:
    """Each block takes what the one below gives and what one on the way down gave, the last first."""
    last = len(levels) - 1
    skips = [levels[-1].width] + [level.width for i, level in enumerate(levels[::-1]) for _ in range(level.blocks + (i < last))]
    block, channels = 0, levels[0].width
    for i, level in enumerate(levels):
        for j in range(level.blocks + 1):
            yield from _resnet(f"output_blocks.{block}.0", f"up_blocks.{i}.resnets.{j}", channels + skips.pop(), level.width, time=time)
            yield from _transformer(f"output_blocks.{block}.1", f"up_blocks.{i}.attentions.{j}", level)
            block, channels = block + 1, level.width
        if i < last:
            place = f"output_blocks.{block - 1}.{2 if level.depth else 1}.conv"
            yield from _layer(place, f"up_blocks.{i}.upsamplers.0.conv", channels, channels, 3, 3)


def _transformer(theirs: str, ours: str, level: _Level) -> Iterator[Row]:
    """Attention over positions and over the conditioning, which both sides name alike but for its place."""
    width = level.width
    projection = (width, width) if level.linear else (width, width, 1, 1)
    layers: dict[str, tuple[int, ...]] = {"norm": (width,), "proj_in": projection, "proj_out": projection}
    for block in (f"transformer_blocks.{i}" for i in range(level.depth)):
        layers |= {f"{block}.norm{i}": (width,) for i in (1, 2, 3)}
        for name, size in ((f"{block}.attn1", width), (f"{block}.attn2", level.context)):
            layers |= {f"{name}.to_q": (width, width), f"{name}.to_k": (width, size), f"{name}.to_v": (width, size)}
            layers |= {f"{name}.to_out.0": (width, width)}
        layers |= {f"{block}.ff.net.0.proj": (8 * width, width), f"{block}.ff.net.2": (width, 4 * width)}
    for name, shape in layers.items() if level.depth else ():
        yield from _layer(f"{theirs}.{name}", f"{ours}.{name}", *shape, bias=not name.endswith(("to_q", "to_k", "to_v")))


def _vae(given: Mapping[str, Any]) -> Iterator[Row]:
    """The table of an `AutoencoderKL`; what is not given is diffusers' default."""
    widths, blocks, latent = list(given.get("block_out_channels", (64,))), given.get("layers_per_block", 1), given.get("latent_channels", 4)
    ways = (
        ("encoder", widths, blocks, given.get("in_channels", 3), 2 * latent),
        ("decoder", widths[::-1], blocks + 1, latent, given.get("out_channels", 3)),
    )
    for half, path, count, inputs, outputs in ways:
        yield from _layer(f"{half}.conv_in", f"{half}.conv_in", path[0], inputs, 3, 3)
        yield from _vae_levels(half, path, count)
        yield from _vae_middle(half, widths[-1], attention=given.get("mid_block_add_attention", True))
        yield from _layer(f"{half}.norm_out", f"{half}.conv_norm_out", path[-1])
        yield from _layer(f"{half}.conv_out", f"{half}.conv_out", outputs, path[-1], 3, 3)
    for name, size in (("quant_conv", 2 * latent), ("post_quant_conv", latent)):
        yield from _layer(name, name, size, size, 1, 1) if given.get(f"use_{name}", True) else ()


def _vae_levels(half: str, widths: Sequence[int], blocks: int) -> Iterator[Row]:
    """Their decoder counts its levels from the outermost, ours from the innermost."""
    way, sampler = ("down", "downsample") if half == "encoder" else ("up", "upsample")
    channels, last = widths[0], len(widths) - 1
    for i, width in enumerate(widths):
        theirs, ours = f"{half}.{way}.{i if way == 'down' else last - i}", f"{half}.{way}_blocks.{i}"
        for j in range(blocks):
            yield from _resnet(f"{theirs}.block.{j}", f"{ours}.resnets.{j}", channels, width)
            channels = width
        if i < last:
            yield from _layer(f"{theirs}.{sampler}.conv", f"{ours}.{sampler}rs.0.conv", width, width, 3, 3)


def _vae_middle(half: str, width: int, *, attention: bool) -> Iterator[Row]:
    for i in (0, 1):
        yield from _resnet(f"{half}.mid.block_{i + 1}", f"{half}.mid_block.resnets.{i}", width, width)
    if attention:
        theirs, ours = f"{half}.mid.attn_1", f"{half}.mid_block.attentions.0"
        yield from _layer(f"{theirs}.norm", f"{ours}.group_norm", width)
        for their_name, name in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("proj_out", "to_out.0")):
            yield from _layer(f"{theirs}.{their_name}", f"{ours}.{name}", width, width, layout=POINTWISE)


def text_tower(config: CLIPText) -> Iterator[Row]:
    """The table of a text tower in open_clip's names, and ours without a prefix."""
    width = config.hidden_size
    yield Row("token_embedding.weight", ("embeddings.token_embedding.weight",), (config.vocab_size, width))
    yield Row("positional_embedding", ("embeddings.position_embedding.weight",), (config.max_position_embeddings, width))
    for i in range(config.num_hidden_layers):
        theirs, ours = f"transformer.resblocks.{i}", f"encoder.layers.{i}"
        yield from _layer(f"{theirs}.ln_1", f"{ours}.layer_norm1", width)
        for kind, shape in (("weight", (width, width)), ("bias", (width,))):
            yield Row(f"{theirs}.attn.in_proj_{kind}", tuple(f"{ours}.self_attn.{x}_proj.{kind}" for x in "qkv"), shape, FUSED)
        yield from _layer(f"{theirs}.attn.out_proj", f"{ours}.self_attn.out_proj", width, width)
        yield from _layer(f"{theirs}.ln_2", f"{ours}.layer_norm2", width)
        yield from _layer(f"{theirs}.mlp.c_fc", f"{ours}.mlp.fc1", config.intermediate_size, width)
        yield from _layer(f"{theirs}.mlp.c_proj", f"{ours}.mlp.fc2", width, config.intermediate_size)
    yield from _layer("ln_final", "final_layer_norm", width)
    if config.projection_dim:
        yield Row("text_projection", ("text_projection.weight",), (config.projection_dim, width), TRANSPOSED)


def _text_rows(networks: Networks, *, index: int) -> list[Row]:
    """The table of a single file's text encoder, of which only SDXL's second has a projection."""
    config = CLIPText.of(networks, index)
    if len(networks.text_encoders) == 2:
        check_activation(config.hidden_act, quick_gelu=index == 0)
        prefix = SDXL_PREFIXES[index]
    elif config.hidden_act in TEXT_PREFIXES:
        prefix = TEXT_PREFIXES[config.hidden_act]
    else:
        raise ConfigError(f"a text encoder has hidden_act={config.hidden_act!r}; single files have names for {', '.join(TEXT_PREFIXES)}")
    rows = list(text_tower(config if index else config._replace(projection_dim=0)))
    if prefix.endswith("text_model."):
        rows = [Row(name, (name,), row.shape) for row in rows for name in row.ours]
    return _under(prefix, rows)
