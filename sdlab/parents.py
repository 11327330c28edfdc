"""The parent of a stage: a stored model that it starts from, and whether it fits."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig

from sdlab import encoders, files, models, parts, places, stored
from sdlab.config import ConfigError, Networks

TEXTS = ("", "a photo of a cat", "🎈 Crème brûlée, 北京!", "don't  STOP at 3.50 <b>&amp;</b>\n_x_", "word " * 200)
"""What tokenizers are asked to tell whether they do the same."""
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


@dataclass(frozen=True)
class Parent(stored.Stored):
    """A stored model that a stage can start from."""

    @functools.cached_property
    def frozen_hashes(self) -> dict[str, str]:
        """What `vae`, `text_encoder` and `tokenizer` hold, as of `hash_content`; computed when it is first asked for."""
        return hash_content(places.frozen_folder(self.networks))


def load_parent(init_from: str, *, weights: str = "auto") -> Parent:
    """Find what a stage starts from and describe it, without building any of its networks.

    Args:
        init_from: "tiny", a run folder, a diffusers pipeline folder, or the hub id of one.
        weights: "ema" or "raw", or "auto" for EMA where there is one.

    Raises:
        ConfigError: as `stored.find`.
    """
    return Parent(**vars(stored.find(init_from, weights=weights)))


def check_parent_fits(parent: Parent, networks: Networks) -> None:
    """Refuse a parent whose UNet learned from other latents, text, noise or targets than a stage gives it, or has another shape.

    Frozen parts in one and the same folder are not looked at; others are compared by what they hold and do, not by their files.

    Raises:
        ConfigError: everything that differs, each with both values, and the keys that do not fit.
    """
    there, here = _facts(parent.networks), _facts(networks)
    those, these = places.frozen_folder(parent.networks), places.frozen_folder(networks)
    if those != these:
        there |= _frozen_facts(those, parent.frozen_hashes)
        here |= _frozen_facts(these, hash_content(these))
    known = {name: (there.get(name, "none"), here.get(name, "none")) for name in [*here, *there]}
    differing = [f"{name}: {theirs} in the parent, {ours} in the stage" for name, (theirs, ours) in known.items() if theirs != ours]
    try:
        models.check_fit(models.unet_shapes(networks), parent.state_dict().shapes(), source=parent.name)
    except ConfigError as error:
        differing.append(str(error))
    if differing:
        raise ConfigError(f"init_from {parent.name!r} does not fit this stage: {'; '.join(differing)}; give another parent or preset")


def _facts(networks: Networks) -> dict[str, str]:
    """What a UNet is trained to do, and what its shapes do not tell of how it computes."""
    defaults = {name: argument.default for name, argument in inspect.signature(UNet2DConditionModel.__init__).parameters.items()}
    unet = defaults | networks.unet
    heads = unet["num_attention_heads"] or unet["attention_head_dim"]
    facts: dict[str, Any] = {"prediction_type": networks.prediction_type, "null_condition": networks.null_condition}
    facts |= {f"noise_schedule.{key}": value for key, value in networks.noise_schedule.model_dump().items()}
    facts |= {"unet.attention_heads": [heads] * len(unet["block_out_channels"]) if isinstance(heads, int) else list(heads)}
    facts |= {f"unet.{key}": unet[key] for key in ("act_fn", "norm_num_groups", "norm_eps", "flip_sin_to_cos", "freq_shift")}
    return {name: repr(value) for name, value in facts.items()}


def _frozen_facts(folder: Path, hashes: Mapping[str, str]) -> dict[str, str]:
    """What frozen parts hold, in short, and what they do beside."""
    vae, told = places.stored_configs(folder)
    ids = parts.token_ids(*parts.load_tokenizers(folder), [""])[0].tolist()
    counted = ((token, len(list(group))) for token, group in itertools.groupby(ids))
    return {
        **{part: digest[:16] for part, digest in hashes.items()},
        **{f"vae.{name}": repr(places.fact(AutoencoderKL, vae, name)) for name in ("scaling_factor", "shift_factor")},
        **{
            f"{encoder}.{name}": repr(places.fact(CLIPTextConfig, text, name))
            for encoder, text in zip(files.ENCODERS, told, strict=False)
            for name in ("hidden_act", "num_attention_heads")
        },
        "null condition": ", ".join(f"{token} x {count}" if count > 1 else str(token) for token, count in counted),
    }


def hash_content(folder: Path) -> dict[str, str]:
    """SHA-256 of what `vae`, `text_encoder` and `tokenizer` in a folder hold, whoever wrote their files.

    Weights count by name, shape and value in float16, so that a copy in float16 is equal to its float32 original, and so are networks
    that differ by less than that, half a thousandth of a weight; a bfloat16 copy is not. A tokenizer counts by the ids of `TEXTS`.

    Raises:
        ConfigError: a part is missing or damaged.
    """
    tokenizers, length = parts.load_tokenizers(folder)
    ids = {name: parts.token_ids([one], length, TEXTS).tolist() for name, one in zip(files.TOKENIZERS, tokenizers, strict=False)}
    alone = "text_encoder_2" not in places.names(folder)
    weights = {part: _hash_tensors(folder / part, _stamped(folder / part), alone) for part in places.names(folder) if part not in ids}
    return weights | {part: hashlib.sha256(json.dumps(rows).encode()).hexdigest() for part, rows in ids.items()}


Stamped = tuple[tuple[str, int, int], ...]


def _stamped(folder: Path) -> Stamped:
    return tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.glob("*")))


@functools.lru_cache(maxsize=32)
def _hash_tensors(folder: Path, stamped: Stamped, alone: bool) -> str:
    """Remembered, as long as the files stay the same: encoders have gigabytes and are asked about more than once."""
    tensors = encoders.tensors(folder, alone=alone)
    digest = hashlib.sha256()
    # position_ids is a constant that older versions of transformers stored
    for name, key in sorted((_present_name(key), key) for key in tensors if not key.endswith("position_ids")):
        value = tensors[key].half()
        digest.update(f"{name} {list(value.shape)}\n".encode())
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def _present_name(key: str) -> str:
    """A tensor's name as diffusers and transformers write it today."""
    renamed = re.sub(rf"(\.attentions\.\d+)\.({'|'.join(OLD_ATTENTION)})\.", lambda found: f"{found[1]}.{OLD_ATTENTION[found[2]]}.", key)
    return renamed.removeprefix("text_model.")
