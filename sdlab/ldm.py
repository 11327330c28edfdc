"""Names and layouts of single-file (LDM) checkpoints and of open_clip text towers, to those of diffusers and transformers and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from sdlab.config import ConfigError, Networks
from sdlab.files import Shaped, shapes
from sdlab.layouts import SAME, TEXT_PREFIXES, UNET_PREFIX, CLIPText, Row, check_activation, named_parts, table, text_tower

LEFT_OUT = re.compile(
    r"model_ema\..+|betas|alphas_cumprod(_prev)?|logvar|(sqrt|log_one_minus|posterior)_\w+|denoiser\.sigmas"
    r"|((cond_stage_model|conditioner\.embedders\.\d+)\.((transformer|model)\.)?)?"
    r"((text_model\.)?embeddings\.position_ids|attn_mask|logit_scale|visual\..+)"
)
"""What files carry beside the networks: averages, the noise schedule, positions, masks, temperatures and picture towers."""
FAMILIES = {(768, False): "sd15", (1024, False): "sd20", (2048, True): "sdxl"}
OTHER_FAMILIES = {(1280, True): "an SDXL refiner", (1024, True): "a Stable Diffusion 2.1 unCLIP model"}
"""By the width of their conditioning, and whether more is added to the timestep (`label_emb`)."""
OTHER_CHANNELS = {5: "a depth model", 7: "an upscaler", 8: "an instruct-pix2pix model", 9: "an inpainting model"}
"""By the channels that their UNet takes."""


class Lazy(Shaped):
    """Tensors by name, each made from some of another mapping when it is asked for."""

    def __init__(
        self, source: Mapping[str, Tensor], recipes: Mapping[str, tuple[Sequence[str], Callable[[Sequence[Tensor]], Tensor]]]
    ) -> None:
        self._source, self._recipes = source, recipes

    def __getitem__(self, name: str) -> Tensor:
        return self._make(name, self._source)

    def __iter__(self) -> Iterator[str]:
        return iter(self._recipes)

    def __len__(self) -> int:
        return len(self._recipes)

    def shapes(self) -> dict[str, Tensor]:
        """The tensors without data, made from those of the source."""
        source = shapes(self._source)
        return {name: self._make(name, source) for name in self}

    def _make(self, name: str, source: Mapping[str, Tensor]) -> Tensor:
        names, make = self._recipes[name]
        return make([source[each] for each in names])


def to_ldm(part: str, tensors: Mapping[str, Tensor], *, networks: Networks) -> Mapping[str, Tensor]:
    """One part of a model under the names of a single file, each tensor made when it is asked for.

    An SD2 text encoder of 23 layers is written as 23: the last block and the projection of published files are in no encoder that
    diffusers keeps, and no loader needs them.

    Args:
        part: "unet", "vae", "text_encoder" or, of two text encoders, "text_encoder_2".
        tensors: its state dict in diffusers' or transformers' names; of a text encoder with the prefix `text_model.` or without.
        networks: what it was made from; one text encoder with `quick_gelu` is named as in SD1, one with `gelu` as in SD2, two as in SDXL.

    Raises:
        ConfigError: names or shapes are not those that `networks` makes, or single files have no names for what it asks.
    """
    return _to_theirs(tensors, table(part, networks), where=part)


def from_ldm(tensors: Mapping[str, Tensor], *, networks: Networks) -> dict[str, Mapping[str, Tensor]]:
    """The parts of a single file by part, in diffusers' and transformers' names, each tensor made when it is asked for.

    `text_encoder` is named as `CLIPTextModel` names it, `text_encoder_2` as `CLIPTextModelWithProjection`. What a file carries beside the
    networks (`LEFT_OUT`) is left out. So are an SD2 file's text projection and the one block after the last that `networks` asks for: SD2
    is conditioned on the state before the last of 24 blocks, so diffusers' encoder is the first 23.

    Args:
        tensors: the whole file.
        networks: what it holds, as for `to_ldm`.

    Raises:
        ConfigError: any other key is unknown, one is missing, a shape does not fit, or the activation is not that of the file's encoder.
    """
    if not networks.text_encoders:
        raise ConfigError("networks.text_encoders is empty, so the names of a file's text encoders are not known; give their arguments")
    rows_of = {part: table(part, networks) for part in named_parts(networks)}
    _check_naming(tensors, networks)
    named = _renamed(tensors, _full_name, surplus=_sd2_surplus(networks))
    _check(named, {row.theirs: row.their_shape() for rows in rows_of.values() for row in rows}, where="the single file")
    return {part: _to_ours(named, rows) for part, rows in rows_of.items()}


def to_open_clip(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A text tower of transformers, with a projection or without, in open_clip's names.

    Raises:
        ConfigError: it is not a whole text tower, or holds more.
    """
    names = ("embeddings.token_embedding.weight", "embeddings.position_embedding.weight", "encoder.layers.0.mlp.fc1.weight")
    rows = _tower(_renamed(tensors, _without_prefix).shapes(), (*names, "text_projection.weight"))
    return _to_theirs(tensors, rows, where="the text tower")


def from_open_clip(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The text tower of an open_clip model as `CLIPTextModelWithProjection` names it, or without a projection as `CLIPTextModel` does.

    The picture tower and the temperature are left out. The weights do not say their activation: see `check_activation`.

    Raises:
        ConfigError: it is not a whole text tower, or holds more.
    """
    named = _renamed(tensors, str)
    names = ("token_embedding.weight", "positional_embedding", "transformer.resblocks.0.mlp.c_fc.weight", "text_projection")
    rows = _tower(named.shapes(), names)
    _check(named, {row.theirs: row.their_shape() for row in rows}, where="the open_clip text tower")
    return _to_ours(named, rows)


def family(tensors: Mapping[str, Tensor]) -> str:
    """The published family of a single file: "sd15" (1.x), "sd20" (2.0 and 2.1, whatever their UNet predicts) or "sdxl" (base).

    Raises:
        ConfigError: it is of another family, named where it is a known one, or no single file at all.
    """
    names = {name.removeprefix(UNET_PREFIX): name for name in tensors}
    cross = next((name for short, name in names.items() if short.endswith(".attn2.to_k.weight")), "")
    first = names.get("input_blocks.0.0.weight", "")
    for start, kind in (("joint_blocks.", "a Stable Diffusion 3 model"), ("double_blocks.", "a Flux model")):
        if any(short.startswith(start) for short in names):
            raise _refused(kind)
    if not (first.startswith(UNET_PREFIX) and cross.startswith(UNET_PREFIX)):
        raise ConfigError(f"this is no single-file checkpoint: it has no UNet under {UNET_PREFIX!r}; give a whole one in LDM's names")
    channels, width, more = tensors[first].shape[1], tensors[cross].shape[-1], any(short.startswith("label_emb.") for short in names)
    if channels != 4:
        raise _refused(f"{OTHER_CHANNELS.get(channels, 'a model')} whose UNet takes {channels} channels")
    if (width, more) not in FAMILIES:
        kind = OTHER_FAMILIES.get((width, more), "of an unknown family")
        raise _refused(f"{kind} with conditioning {width} wide {'and' if more else 'without'} label_emb")
    return FAMILIES[width, more]


def _refused(kind: str) -> ConfigError:
    return ConfigError(f"the file is {kind}, not supported; give one of Stable Diffusion 1.x, 2.0, 2.1 or SDXL base")


def _tower(found: Mapping[str, Tensor], names: Sequence[str]) -> list[Row]:
    """The table of a text tower, whose sizes are those of the tensors of four names: tokens, positions, first wide layer, projection."""
    lacking = [name for name in names[:3] if name not in found or found[name].ndim != 2]
    if lacking:
        raise ConfigError(f"this is no text tower: it has no matrix {', '.join(lacking)}")
    (vocabulary, width), (length, _), (wide, _) = (found[name].shape for name in names[:3])
    layers = [name for name in found if name.endswith(names[2].partition(".0.")[2])]
    projection = found[names[3]].numel() // width if names[3] in found else 0
    return list(text_tower(CLIPText(vocabulary, width, wide, projection, len(layers), length)))


def _without_prefix(name: str) -> str:
    return name.removeprefix("text_model.")


def _full_name(name: str) -> str:
    """Some writers leave `text_model.` out of the names of OpenAI's encoder."""
    return re.sub(r"^(cond_stage_model|conditioner\.embedders\.0)\.transformer\.(?=embeddings|encoder|final)", r"\g<0>text_model.", name)


def _renamed(tensors: Mapping[str, Tensor], rename: Callable[[str], str], *, surplus: str = "") -> Lazy:
    """The tensors under the names of the table, without those that mean nothing here."""
    kept = [name for name in tensors if not LEFT_OUT.fullmatch(rename(name)) and not re.fullmatch(surplus, name)]
    given = {rename(name): name for name in kept}
    twice = [name for name in kept if given[rename(name)] != name]
    if twice:
        raise ConfigError(f"{len(twice)} tensors are there twice, with and without 'text_model.': {', '.join(twice[:20])}")
    return Lazy(tensors, {name: ((own,), SAME.join) for name, own in given.items()})


def _sd2_surplus(networks: Networks) -> str:
    """What names the tensors of an SD2 file that its encoder does not have; nothing in other families."""
    last = CLIPText.of(networks, 0).num_hidden_layers
    return rf"cond_stage_model\.model\.(text_projection|transformer\.resblocks\.{last}\..+)" if len(networks.text_encoders) == 1 else ""


def _check_naming(names: Iterable[str], networks: Networks) -> None:
    """Refuse a file of SD1 or SD2 whose encoder needs another activation than the one that is given."""
    full = [_full_name(name) for name in names if not LEFT_OUT.fullmatch(name)]
    kinds = [kind for kind, prefix in TEXT_PREFIXES.items() if any(name.startswith(prefix) for name in full)]
    for kind in kinds if len(networks.text_encoders) == 1 else ():
        check_activation(CLIPText.of(networks, 0).hidden_act, quick_gelu=kind == "quick_gelu")


def _check(named: Lazy, wanted: Mapping[str, torch.Size], *, where: str) -> None:
    found = named.shapes()
    wrong = [f"missing {name}" for name in wanted if name not in found]
    wrong += [f"unknown {name}" for name in found if name not in wanted]
    misfits = [name for name, shape in wanted.items() if name in found and found[name].shape != shape]
    wrong += [f"{name} is {tuple(found[name].shape)} and has to be {tuple(wanted[name])}" for name in misfits]
    if wrong:
        more = "; ..." if len(wrong) > 20 else ""
        raise ConfigError(f"{where} does not hold what was asked for ({len(wrong)} keys do not fit): {'; '.join(wrong[:20])}{more}")


def _to_theirs(tensors: Mapping[str, Tensor], rows: Sequence[Row], *, where: str) -> Lazy:
    named = _renamed(tensors, _without_prefix)
    _check(named, {name: torch.Size(row.shape) for row in rows for name in row.ours}, where=where)
    return Lazy(named, {row.theirs: (row.ours, row.layout.join) for row in rows})


def _to_ours(named: Lazy, rows: Sequence[Row]) -> Lazy:
    """Under transformers' own names, which have a prefix where there is a projection."""
    recipes = {name: ((row.theirs,), partial(row.layout.split, i)) for row in rows for i, name in enumerate(row.ours)}
    prefix = "text_model." if "text_projection.weight" in recipes else ""
    return Lazy(named, {name if name == "text_projection.weight" else prefix + name: recipe for name, recipe in recipes.items()})
