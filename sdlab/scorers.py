"""Judges that published curves name: CLIPs by open_clip, and DINOv2; their weights are read from files and never fetched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from open_clip.tokenizer import SimpleTokenizer
from open_clip.transform import PreprocessCfg, image_transform_v2
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Dinov2Model

from sdlab import captions, files, launch, openclip, statistics
from sdlab.config import ConfigError
from sdlab.distances import Estimate

DINO_SIDE, DINO_OFFSET = 224, 0.1
"""Pixels a side that DINOv2 is shown, and what its own code adds to a number of patches before it resizes position embeddings to it."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, of DINOv2."""


@dataclass(frozen=True)
class Clip:
    """A CLIP by open_clip, in float32; a score is the raw cosine of its features, neither scaled nor cut at 0."""

    model: Any
    """open_clip's `CLIP`."""
    tokenizer: SimpleTokenizer
    preprocess: PreprocessCfg
    name: str
    """Architecture / weights."""
    weights_hash: str
    """SHA-256 of the file of weights."""
    prefix: str
    """Put before each caption, as in "A photo depicts "."""
    sizes: Mapping[str, Any]
    """What the network was built from, by field."""
    batch_size: int
    """Rows of every forward; a short last batch is filled and cut, so that a feature does not depend on its neighbours."""

    @property
    def width(self) -> int:
        """Numbers a feature."""
        return int(self.sizes["embed_dim"])

    def pixel_path(self, resolution: int) -> str:
        """In words, how pictures of `resolution` pixels a side become its input, and what is put before texts."""
        made = self.preprocess
        said = f"uint8 RGB {resolution} px, PIL {made.interpolation} to {made.size} by open_clip's resize_mode {made.resize_mode}"
        said += f", mean {list(made.mean)}, std {list(made.std)}"
        return said + (f"; texts behind {self.prefix!r}" if self.prefix else "")

    def identity(self) -> dict[str, Any]:
        """All that a score depends on beside picture and caption."""
        told = {"scorer": self.name, "weights_hash": self.weights_hash, "prefix": self.prefix}
        return {**told, "sizes": dict(self.sizes), "preprocess": asdict(self.preprocess)}

    def image_features(self, images: np.ndarray) -> np.ndarray:
        """Normalised features, float32 (B, width), of `images`, uint8 (B, 3, H, W).

        Raises:
            ConfigError: images of another shape or type.
        """
        _check_images(images)
        transform = image_transform_v2(self.preprocess, is_train=False)

        def prepare(which: slice) -> Tensor:
            return torch.stack([transform(Image.fromarray(image)) for image in images[which].transpose(0, 2, 3, 1)])

        return self._in_batches(lambda batch: self.model.encode_image(batch, normalize=True), prepare, len(images))

    def text_features(self, captions: Sequence[str]) -> np.ndarray:
        """Normalised features, float32 (B, width), of `captions` behind the prefix, each different one encoded once.

        Those beyond the context are cut, and end with the end of text all the same.
        """
        different = list(dict.fromkeys(captions))
        tokens = self.tokens(different)
        found = self._in_batches(lambda batch: self.model.encode_text(batch, normalize=True), tokens.__getitem__, len(different))
        places = {caption: place for place, caption in enumerate(different)}
        return found[[places[caption] for caption in captions]]

    def tokens(self, captions: Sequence[str]) -> Tensor:
        """What the text tower is shown, (B, context)."""
        if not captions:
            return torch.empty((0, self.model.context_length), dtype=torch.long)
        return self.tokenizer([self.prefix + caption for caption in captions], context_length=self.model.context_length)

    def truncated(self, captions: Sequence[str]) -> int:
        """How many of `captions` are cut: behind the prefix, and between start and end of text, they are longer than the context."""
        room = self.model.context_length - 2
        return sum(len(self.tokenizer.encode(self.prefix + caption)) > room for caption in captions)

    def _in_batches(self, forward: Callable[[Tensor], Tensor], prepare: Callable[[slice], Tensor], count: int) -> np.ndarray:
        return _in_batches(forward, prepare, count, rows=self.batch_size, width=self.width, device=self.model.positional_embedding.device)


@dataclass(frozen=True)
class Dino:
    """A DINOv2, in float32; its features are those of the class token after the last norm, of no fixed length."""

    model: Any
    """transformers' `Dinov2Model`."""
    name: str
    weights_hash: str
    """SHA-256 over its files of weights."""
    batch_size: int
    """As of `Clip`."""

    @property
    def width(self) -> int:
        """Numbers a feature."""
        return int(self.model.config.hidden_size)

    def pixel_path(self, resolution: int) -> str:
        """In words, how pictures of `resolution` pixels a side become its input."""
        resized = "" if resolution == DINO_SIDE else f", torch bicubic antialiased to {DINO_SIDE} x {DINO_SIDE}"
        return f"uint8 RGB {resolution} px{resized}, mean {list(MEAN)}, std {list(STD)}"

    def identity(self) -> dict[str, Any]:
        """All that a feature depends on beside the picture."""
        sizes = {name: getattr(self.model.config, name) for name in ("num_attention_heads", "layer_norm_eps", "hidden_act")}
        return {"scorer": self.name, "weights_hash": self.weights_hash, "sizes": sizes}

    def image_features(self, images: np.ndarray) -> np.ndarray:
        """Features, float32 (B, width), of `images`, uint8 (B, 3, H, W).

        Raises:
            ConfigError: images of another shape or type.
        """
        _check_images(images)
        device = self.model.device
        mean, std = (torch.tensor(values, device=device).reshape(3, 1, 1) for values in (MEAN, STD))

        def forward(batch: Tensor) -> Tensor:
            pixels = batch.float()
            if pixels.shape[-2:] != (DINO_SIDE, DINO_SIDE):
                pixels = F.interpolate(pixels, (DINO_SIDE, DINO_SIDE), mode="bicubic", antialias=True)
            return self.model(pixel_values=(pixels / 255 - mean) / std).pooler_output

        def prepare(which: slice) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(images[which]))

        return _in_batches(forward, prepare, len(images), rows=self.batch_size, width=self.width, device=device)


def cosines(image_features: np.ndarray, text_features: np.ndarray) -> np.ndarray:
    """Raw cosines (B,) of features of length 1 in pairs, from -1 to 1.

    Raises:
        ConfigError: they are no pairs.
    """
    if image_features.shape != text_features.shape or image_features.ndim != 2:
        raise ConfigError(f"features {image_features.shape} and {text_features.shape} are no pairs; give one caption a picture")
    return (image_features * text_features).sum(1)


def mean(scores: np.ndarray) -> Estimate:
    """The mean of scores (n,), n at least 2, and its standard error.

    Raises:
        ConfigError: too few, or of another shape.
    """
    if scores.ndim != 1 or len(scores) < 2:
        raise ConfigError(f"scores {scores.shape} have no standard error; give a row of at least 2")
    return Estimate(float(scores.mean(dtype=np.float64)), statistics.standard_error(scores))


def load_clip(
    name: str, path: str | Path | None = None, *, prefix: str = "", device: torch.device | str = "cpu", batch_size: int | None = None
) -> Clip:
    """A CLIP from a file of weights.

    Args:
        name: architecture / weights, one of open_clip's or one of your own, for which open_clip_config.json has to lie beside the weights.
        path: of a folder as open_clip writes it, or a .safetensors or .pt file; None to look in the hub's cache under open_clip's id.
        prefix: put before each caption.
        device: where it runs.
        batch_size: rows of every forward; None for 8 on a CPU and 64 elsewhere.

    Raises:
        ConfigError: no weights there, a config that is not this model's, another activation than the weights were trained with, or
            damaged weights.
    """
    weights = openclip.find(name, path)
    made = openclip.describe(name, weights.parent)
    text, network = made.sizes["text_cfg"], openclip.build(made)
    tokenizer = SimpleTokenizer(context_length=text["context_length"], **(text["tokenizer_kwargs"] or {}))
    if tokenizer.vocab_size != text["vocab_size"]:
        raise ConfigError(f"{made.where} has vocab_size {text['vocab_size']}, and open_clip's tokenizer {tokenizer.vocab_size}; correct it")
    wanted = {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
    network.load_state_dict(openclip.read(weights, wanted, f"{weights} does not hold the weights of {name}"), assign=True)
    network = network.eval().requires_grad_(False).to(device)
    hashed = files.hash_files([weights])
    return Clip(network, tokenizer, made.preprocess, name, hashed, prefix, made.sizes, batch_size or _rows(device))


def load_dino(folder: str | Path, *, name: str | None = None, device: torch.device | str = "cpu", batch_size: int | None = None) -> Dino:
    """A DINOv2 from a folder as transformers writes it, whole or with a head, which is left out.

    Position embeddings of another size are resized to its 16 x 16 patches as DINOv2's own code does it, by a scale with an offset, and
    not as transformers does.

    Args:
        folder: with config.json and model.safetensors.
        name: what it is called; None for the folder's name.
        device: where it runs.
        batch_size: as for `load_clip`.

    Raises:
        ConfigError: something is missing, of another kind of network, or damaged.
    """
    folder = Path(folder)
    where = folder / "config.json"
    if not where.is_file():
        raise ConfigError(f"{where} is not there; put config.json and model.safetensors of facebook/dinov2-large or -base there")
    table = files.read_json(where)
    if table.get("model_type") != "dinov2":
        raise ConfigError(f"{where} has model_type {table.get('model_type')!r}, not 'dinov2'; give a folder of facebook/dinov2-large")
    weights = files.weight_files(folder)
    try:
        asked = {"local_files_only": True, "use_safetensors": True, "dtype": torch.float32, "output_loading_info": True}
        network, found = Dinov2Model.from_pretrained(folder, **asked)
    except Exception as error:  # transformers, safetensors and torch have their own
        raise ConfigError(f"{folder} cannot be loaded, its config.json and weights do not fit ({captions.error_line(error)})") from None
    wrong = [f"{word} {key}" for word in ("missing", "unexpected", "mismatched") for key in sorted(map(str, found[f"{word}_keys"]))]
    wrong = [problem for problem in wrong if not problem.startswith("unexpected classifier.")]
    if wrong:
        raise ConfigError(f"{folder} does not hold the weights that its config.json describes ({len(wrong)} keys): {'; '.join(wrong[:20])}")
    files.check_finite(network.state_dict(), f"the weights of {folder} are")
    resized = _resize_positions(network.embeddings.position_embeddings.detach(), DINO_SIDE // network.config.patch_size)
    network.embeddings.position_embeddings = nn.Parameter(resized)
    network = network.eval().requires_grad_(False).to(device)
    return Dino(network, folder.name if name is None else name, files.hash_files(weights), batch_size or _rows(device))


def _resize_positions(positions: Tensor, patches: int) -> Tensor:
    """Position embeddings (1, 1 + n * n, D) of so many patches a side, bicubic at DINOv2's scale; its output size leaves the offset out."""
    old = round((positions.shape[1] - 1) ** 0.5)
    if old == patches:
        return positions
    grid = positions[:, 1:].reshape(1, old, old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, scale_factor=(patches + DINO_OFFSET) / old, mode="bicubic")
    return torch.cat([positions[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)], 1)


def _check_images(images: np.ndarray) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ConfigError(f"pictures are {images.dtype} {images.shape}; give uint8 (B, 3, H, W)")


def _rows(device: torch.device | str) -> int:
    return 8 if torch.device(device).type == "cpu" else 64


@torch.no_grad()
def _in_batches(
    forward: Callable[[Tensor], Tensor], prepare: Callable[[slice], Tensor], count: int, *, rows: int, width: int, device: torch.device
) -> np.ndarray:
    done = [np.empty((0, width), dtype=np.float32)]
    for start in range(0, count, rows):
        batch = prepare(slice(start, start + rows))
        with launch.whole_float32(device):
            done.append(forward(launch.filled(batch, rows).to(device))[: len(batch)].cpu().numpy())
    return np.concatenate(done)
