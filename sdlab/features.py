"""Features that metrics compare: the built-in judge's, of pictures and of texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPModel, CLIPTokenizer

from sdlab import launch
from sdlab.files import hash_weights
from sdlab.parts import to_pixel_values
from sdlab.places import TINY_DIR

BATCH_SIZE = 64
"""Rows of every forward of the judge; a short last batch is filled and cut, so that a feature does not depend on its neighbours."""


@dataclass(frozen=True)
class Judge:
    """A CLIP that judges pictures, in float32.

    Both metrics use its *normalised* embeddings (length 1): a CLIP score is their dot product, and the Frechet distance of the built-in
    family is defined on them too, which keeps it between 0 and 4, and at a few hundredths for a good model.
    """

    model: Any
    """transformers' `CLIPModel`."""
    tokenizer: CLIPTokenizer
    name: str
    weights_hash: str

    @property
    def side(self) -> int:
        """Pixels a side of the pictures that it takes."""
        return int(self.model.config.vision_config.image_size)

    @property
    def width(self) -> int:
        """Numbers a feature."""
        return int(self.model.config.projection_dim)

    def pixel_path(self, resolution: int) -> str:
        """In words, how pictures of `resolution` pixels a side become its input."""
        resized = "" if resolution == self.side else f", torch bicubic antialiased to {self.side}"
        return f"uint8 RGB {resolution} px{resized}, x / 127.5 - 1"

    @torch.no_grad()
    def image_features(self, images: np.ndarray) -> np.ndarray:
        """Normalised features, float32 (B, width), of `images`, uint8 (B, 3, H, W)."""

        def forward(batch: Tensor) -> Tensor:
            pixels = batch.float()
            if pixels.shape[-2:] != (self.side, self.side):
                pixels = F.interpolate(pixels, (self.side, self.side), mode="bicubic", antialias=True).clamp(0, 255)
            return self.model.visual_projection(self.model.vision_model(pixel_values=to_pixel_values(pixels)).pooler_output)

        return self._in_batches(forward, torch.from_numpy(images))

    @torch.no_grad()
    def text_features(self, captions: Sequence[str]) -> np.ndarray:
        """Normalised features, float32 (B, width), of `captions`, which are cut to the judge's context."""
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.tokenizer(list(captions), padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
        return self._in_batches(lambda batch: self.model.text_projection(self.model.text_model(input_ids=batch).pooler_output), tokens)

    def _in_batches(self, forward: Callable[[Tensor], Tensor], rows: Tensor) -> np.ndarray:
        done = [np.empty((0, self.width), dtype=np.float32)]
        for batch in rows.split(BATCH_SIZE):
            full = launch.filled(batch, BATCH_SIZE).to(self.model.device)
            done.append(F.normalize(forward(full), dim=-1)[: len(batch)].cpu().numpy())
        return np.concatenate(done)


def load_judge(device: torch.device | str = "cpu") -> Judge:
    """The built-in judge, a CLIP trained from another seed than the one that conditions the built-in model."""
    folder = TINY_DIR / "judge"
    model: Any = CLIPModel.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = CLIPTokenizer.from_pretrained(TINY_DIR / "tokenizer", local_files_only=True)
    return Judge(model.eval().requires_grad_(False).to(device), tokenizer, "built-in judge", hash_weights(folder))
