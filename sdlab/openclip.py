"""CLIPs in open_clip's files: found, described, checked and built, and never fetched.

One is built only with the activation that its weights were trained with: open_clip 3 builds GELU for ("ViT-L-14", "openai"), whose
weights want QuickGELU, says so in a warning, and scores on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import open_clip
import torch
from huggingface_hub.constants import HF_HUB_CACHE
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from open_clip.pretrained import get_pretrained_cfg
from open_clip.transform import PreprocessCfg, merge_preprocess_dict
from open_clip.transformer import QuickGELU
from torch import Tensor, nn

from sdlab import captions, encoders, files
from sdlab.config import ConfigError, hint

JUDGES = ("ViT-L-14-quickgelu/openai", "ViT-H-14/laion2b_s32b_b79k", "ViT-g-14/laion2b_s12b_b42k")
"""The CLIPs of the built-in protocols, as open_clip's architecture / weights."""
WEIGHTS = (encoders.OPEN_CLIP, "open_clip_pytorch_model.safetensors")
"""The names under which open_clip keeps weights, first one first."""
UNUSED = ("logit_scale", "logit_bias", "input_resolution", "context_length", "vocab_size")
"""What files of weights hold beside the two towers; a raw cosine has no scale."""
TOWERS = ("vision_cfg", "text_cfg")


class Described(NamedTuple):
    """What a CLIP is built from."""

    where: str
    """Which config said so."""
    sizes: dict[str, Any]
    """Fields of `CLIP`, those of the towers as tables of all their fields."""
    preprocess: PreprocessCfg

    @property
    def quick_gelu(self) -> bool:
        return bool(self.sizes["quick_gelu"])

    def facts(self) -> dict[str, Any]:
        """All of it in one table."""
        towers = {f"{tower}.{key}": value for tower in TOWERS for key, value in self.sizes[tower].items()}
        return {"embed_dim": self.sizes["embed_dim"], **towers, **{f"preprocess.{k}": v for k, v in asdict(self.preprocess).items()}}


def find(name: str, path: str | Path | None) -> Path:
    """The file of weights.

    Args:
        name: architecture / weights.
        path: of it or of its folder; None to look in the hub's cache under open_clip's id.

    Raises:
        ConfigError: it is not there; the message says what to put where.
    """
    repository = str(_published(name).get("hf_hub", "")).rpartition("/")[0]
    fetch = f" (hf download {repository} {WEIGHTS[0]} {encoders.OPEN_CLIP_CONFIG})" if repository else ""
    if path is None:
        if not repository:
            raise ConfigError(f"{name!r} is no model that open_clip has on the hub{hint(name, JUDGES)}; correct it, or give a path")
        cached = [huggingface_hub.try_to_load_from_cache(repository, file) for file in WEIGHTS]
        found, there = [Path(file) for file in cached if isinstance(file, str)], f"the hub's cache ({HF_HUB_CACHE})"
    else:
        path = Path(path)
        found = [path] if path.is_file() else [path / file for file in WEIGHTS if (path / file).is_file()]
        there = f"{path} ({', '.join(sorted(file.name for file in path.glob('*'))[:10]) or 'nothing'})"
    if not found:
        wanted = f"{' or '.join(WEIGHTS)} and {encoders.OPEN_CLIP_CONFIG}"
        raise ConfigError(f"the weights of {name} are not in {there}; put {wanted} there{fetch}, or give the path of a .safetensors or .pt")
    return found[0]


def _published(name: str) -> dict[str, Any]:
    """What open_clip knows of weights; nothing where it does not know them."""
    architecture, _, tag = name.partition("/")
    return get_pretrained_cfg(architecture, tag) if tag in open_clip.list_pretrained_tags_by_model(architecture) else {}


def describe(name: str, folder: Path) -> Described:
    """What a CLIP is built from: the config beside its weights, or open_clip's own; where both are there, they have to agree.

    Args:
        name: architecture / weights.
        folder: of the weights.

    Raises:
        ConfigError: there is no config, it describes no CLIP or another one than the name, or an activation that the weights were not
            trained with.
    """
    (architecture, _, tag), published, path = name.partition("/"), _published(name), folder / encoders.OPEN_CLIP_CONFIG
    found = [_described(str(path), _table(path), published)] if path.is_file() else []
    if architecture in open_clip.list_models() and (published or found):
        found.append(_described(f"open_clip's {architecture}", {"model_cfg": open_clip.get_model_config(architecture)}, published))
    if not found:
        raise ConfigError(f"{path} is not there, and open_clip has no weights {name!r}{hint(name, JUDGES)}; put that file there")
    trained = bool(published.get("quick_gelu", False)) if published else found[0].quick_gelu
    for one in found:
        if one.quick_gelu != trained:
            better = f"{architecture.removesuffix('-quickgelu')}{'-quickgelu' * trained}/{tag}"
            raise ConfigError(
                f"{name} was trained with {_activation(trained).__name__} and {one.where} builds {_activation(not trained).__name__}, "
                f"which scores otherwise; name it {better}, with a config of quick_gelu {str(trained).lower()}"
            )
    there, wanted = found[0].facts(), found[-1].facts()
    differing = [f"{key} {there[key]!r} and not {value!r}" for key, value in wanted.items() if there[key] != value]
    if differing:
        raise ConfigError(
            f"{found[0].where} is not of {name}, it has {', '.join(differing)}; put the one there that lies beside the weights"
        )
    return found[0]


def _table(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _no_clip(str(path), error) from None


def _no_clip(where: str, error: Exception) -> ConfigError:
    return ConfigError(f"{where} describes no CLIP ({captions.error_line(error)}); put the one there that lies beside the weights")


def _described(where: str, table: Any, published: Mapping[str, Any]) -> Described:
    try:
        model = table["model_cfg"]
        vision, text = CLIPVisionCfg(**model["vision_cfg"]), CLIPTextCfg(**model["text_cfg"])
        sizes = {"embed_dim": model["embed_dim"], "quick_gelu": bool(model.get("quick_gelu", False))}
        made = merge_preprocess_dict(PreprocessCfg(), table.get("preprocess_cfg") or dict(published))
        made |= {"size": vision.image_size, "mean": tuple(made["mean"]), "std": tuple(made["std"])}
        other = [key for key in ("custom_text", "multimodal_cfg") if model.get(key)]
    except (KeyError, TypeError, AttributeError) as error:
        raise _no_clip(where, error) from None
    other += [
        key for key in ("timm_model_name", "hf_model_name", "hf_tokenizer_name") if getattr(vision, key, None) or getattr(text, key, None)
    ]
    if other:
        raise ConfigError(f"{where} has {', '.join(other)}, whose networks are not run here; give a CLIP of open_clip's own towers")
    return Described(where, {**sizes, "vision_cfg": asdict(vision), "text_cfg": asdict(text)}, PreprocessCfg(**made))


def _activation(quick: bool) -> type[nn.Module]:
    return QuickGELU if quick else nn.GELU


def build(made: Described) -> Any:
    """The network on no device, with the activation that was asked for.

    Raises:
        ConfigError: the sizes do not fit each other, or open_clip builds something else.
    """
    towers = {"vision_cfg": CLIPVisionCfg(**made.sizes["vision_cfg"]), "text_cfg": CLIPTextCfg(**made.sizes["text_cfg"])}
    try:
        with torch.device("meta"):
            network = CLIP(**{**made.sizes, **towers})
    except Exception as error:  # assertions, and torch's own
        raise _no_clip(made.where, error) from None
    if {type(module) for module in network.modules() if isinstance(module, QuickGELU | nn.GELU)} != {_activation(made.quick_gelu)}:
        raise ConfigError(f"open_clip {open_clip.__version__} builds {made.where} with another activation; install another version of it")
    network.logit_scale = network.logit_bias = None
    if network.attn_mask is not None:
        network.attn_mask = torch.full(network.attn_mask.shape, float("-inf")).triu_(1)
    return network


def read(path: Path, wanted: Mapping[str, tuple[int, ...]], said: str) -> dict[str, Tensor]:
    """The tensors of a file in float32, checked against what the network needs.

    Args:
        path: of a .safetensors file, or of another that holds nothing but tensors: by name, or those below "state_dict".
        wanted: shapes by name.
        said: what is wrong where they are others, which opens the message.

    Raises:
        ConfigError: a file that can run code or is damaged, other tensors, or numbers that are not finite.
    """
    tensors: Any
    if path.suffix == ".safetensors":
        tensors = files.Tensors([path])
    else:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch, pickle and zipfile have their own
            raise ConfigError(
                f"{path} is no file of nothing but tensors, or is cut off ({captions.error_line(error)}), and what can run code is never "
                f"read; give {WEIGHTS[0]}"
            ) from None
        tensors = tensors.get("state_dict", tensors) if isinstance(tensors, Mapping) else {}
    kept = {str(key).removeprefix("module."): tensor for key, tensor in tensors.items() if isinstance(tensor, Tensor)}
    kept = {key: tensor.float() for key, tensor in kept.items() if key not in UNUSED}
    files.check_shapes(kept, wanted, said)
    files.check_finite(kept, f"the weights of {path} are")
    return kept
