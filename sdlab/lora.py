"""A low-rank change of a UNet's attention: trained with peft, put into its weights, and written in PEFT's and kohya's key names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sdlab.config import ConfigError, Lora, Networks, hint
from sdlab.files import Shaped, check_shapes, shapes
from sdlab.layouts import UNET_PREFIX, table

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel

DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""What peft puts behind a layer's name: first down to the rank, then up again."""
PEFT_FILE, KOHYA_FILE = "pytorch_lora_weights.safetensors", "kohya.safetensors"
ATTENTION = re.compile(r"(down_blocks\.\d+|mid_block|up_blocks\.\d+)\.attentions\..+")


def add(unet: UNet2DConditionModel, lora: Lora, *, seed: int) -> None:
    """Put a change that changes nothing yet into the UNet, and let nothing else be trained.

    Its parameters are float32. Those on the way down are drawn from `seed`, without touching the global random state; those on the way up
    are zero, so that a UNet says the same with it, bit for bit, as without it and frozen.

    Raises:
        ConfigError: a target is no layer of the UNet's attention.
    """
    from peft import LoraConfig

    config = {**_config(lora), "target_modules": layers(dict(unet.named_parameters()), lora)}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        unet.add_adapter(LoraConfig(**config))
    for parameter in unet.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _alpha(lora: Lora) -> float:
    return lora.rank if lora.alpha is None else lora.alpha


def layers(tensors: Mapping[str, Tensor], lora: Lora) -> list[str]:
    """Names of the layers that `lora` changes: linear ones, and convolutions of 1 x 1, of attention blocks.

    Args:
        tensors: a UNet's tensors under their plain names; only shapes are looked at.
        lora: what to change.

    Raises:
        ConfigError: a target is the end of no such layer's name.
    """
    known = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if ATTENTION.fullmatch(name) and name.endswith(".weight") and tensor.ndim > 1
    ]
    found = {target: [layer for layer in known if f".{layer}".endswith(f".{target}")] for target in lora.targets}
    for target, names in found.items():
        if not names:
            endings = {ending for layer in known for ending in re.findall(r"[A-Za-z]\w*(?:\.\d+)*$", layer)}
            raise ConfigError(f"lora.targets: {target!r} is no layer of the UNet's attention{hint(target, endings)}")
    return [layer for layer in known if any(layer in names for names in found.values())]


def merged(base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], lora: Lora) -> Shaped:
    """The UNet's tensors with the change put in, weight + alpha / rank x up @ down, each made when it is asked for.

    Args:
        base: the UNet's tensors under their plain names.
        adapter: the change under the names that peft gives to its parameters.
        lora: what it was trained as.

    Raises:
        ConfigError: keys of `adapter` are missing, unknown or misshapen, the first twenty of them listed.
    """
    plain = shapes(base)
    wanted = {key: size for layer in layers(plain, lora) for key, size in _sizes(layer, plain[f"{layer}.weight"], lora)}
    check_shapes(adapter, wanted, "the low-rank change does not fit the UNet")
    return _Merged(base, plain, adapter, _alpha(lora) / lora.rank)


def _sizes(layer: str, weight: Tensor, lora: Lora) -> Iterator[tuple[str, tuple[int, ...]]]:
    outputs, inputs, *kernel = weight.shape
    yield f"{layer}{DOWN}", (lora.rank, inputs, *kernel)
    yield f"{layer}{UP}", (outputs, lora.rank, *kernel)


class _Merged(Shaped):
    def __init__(self, base: Mapping[str, Tensor], plain: dict[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> None:
        self._base, self._plain, self._adapter, self._scale = base, plain, adapter, scale

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight, layer = self._base[name], name.removesuffix(".weight")
        if f"{layer}{UP}" not in self._adapter:
            return weight
        up, down = (self._adapter[f"{layer}{half}"].float().flatten(1) for half in (UP, DOWN))
        return weight + (self._scale * up @ down).reshape(weight.shape).to(weight)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plain)

    def __len__(self) -> int:
        return len(self._plain)

    def shapes(self) -> dict[str, Tensor]:
        """The tensors without data."""
        return self._plain


def write(
    folder: Path, adapter: Mapping[str, Tensor], lora: Lora, *, networks: Networks, metadata: Mapping[str, str] | None = None
) -> list[Path]:
    """Write a change twice: as diffusers' `load_lora_weights` reads it, and as kohya's sd-scripts do, which other programs read.

    Args:
        folder: where to; it is made.
        adapter: the change under the names that peft gives to its parameters.
        lora: what it was trained as.
        networks: what it was trained in; SDXL's layers go by LDM's names in kohya's file, all others by diffusers'.
        metadata: what else both files say of themselves.

    Returns:
        The two files.
    """
    halves = {key: tensor.detach().cpu().contiguous() for key, tensor in adapter.items()}
    folder.mkdir(parents=True, exist_ok=True)
    peft, kohya = folder / PEFT_FILE, folder / KOHYA_FILE
    said = {f"unet.{key}": value for key, value in _config(lora).items()}
    notes = {"format": "pt", "lora_adapter_metadata": json.dumps(said), **(metadata or {})}
    save_file({f"unet.{key.replace('.default.', '.')}": tensor for key, tensor in halves.items()}, peft, metadata=notes)
    save_file(_kohya(halves, lora, networks), kohya, metadata={"format": "pt", **_kohya_notes(lora, networks), **(metadata or {})})
    return [peft, kohya]


def _config(lora: Lora) -> dict[str, Any]:
    """Arguments of `peft.LoraConfig`: few enough that all its versions know them."""
    return {"r": lora.rank, "lora_alpha": _alpha(lora), "target_modules": lora.targets}


def _kohya(halves: Mapping[str, Tensor], lora: Lora, networks: Networks) -> dict[str, Tensor]:
    theirs = {name: row.theirs for row in table("unet", networks) for name in row.ours} if networks.takes_sizes else {}
    tensors = {}
    for key, tensor in halves.items():
        weight = key.removesuffix(DOWN).removesuffix(UP) + ".weight"
        layer = theirs.get(weight, weight).removeprefix(UNET_PREFIX).removesuffix(".weight")
        name = f"lora_unet_{layer.replace('.', '_')}"
        tensors[f"{name}.lora_{'up' if key.endswith(UP) else 'down'}.weight"] = tensor
        tensors[f"{name}.alpha"] = torch.tensor(float(_alpha(lora)))
    return tensors


def _kohya_notes(lora: Lora, networks: Networks) -> dict[str, str]:
    """What sd-scripts say of a change, by which other programs know which family it is for."""
    second = bool(networks.unet.get("use_linear_projection")) and not networks.takes_sizes
    version = f"sd_v{1 + second}{'_v' if networks.prediction_type == 'v_prediction' else ''}"
    return {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(lora.rank),
        "ss_network_alpha": str(_alpha(lora)),
        "ss_base_model_version": "sdxl_base_v1-0" if networks.takes_sizes else version,
        "ss_v2": str(second),
    }
