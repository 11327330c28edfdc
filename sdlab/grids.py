"""Pictures laid out in rows, and what the exact reader of scenes says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from sdlab import scenes


def read_grid(images: np.ndarray, prompts: Sequence[str], guidance_scales: Sequence[float]) -> list[dict[str, str]]:
    """What the exact reader says of a grid (P, S, 3, 64, 64): a row a prompt that is a scene's caption, a column a scale.

    A cell says "right", or what is wrong: "background", "objects" (then sizes and places are not compared), "sizes", "places".
    Pictures of another size have no rows.
    """
    if images.shape[-1] != scenes.SIDE:
        return []
    rows = []
    for prompt, line in zip(prompts, images, strict=True):
        if scenes.parse(prompt) is not None:
            verdict = scenes.check(line, [prompt] * len(line))
            cells = {f"{scale:g}": _faults(verdict, index) for index, scale in enumerate(guidance_scales)}
            rows.append({"prompt": prompt, **cells})
    return rows


def _faults(verdict: dict[str, np.ndarray], index: int) -> str:
    compared = ["background", "objects"] + (["sizes", "places"] if verdict["objects"][index] else [])
    wrong = [part for part in compared if not verdict[part][index]]
    return "wrong: " + ", ".join(wrong) if wrong else "right"


def tile(images: np.ndarray, *, columns: int, min_side: int = 128) -> Image.Image:
    """Lay pictures uint8 (B, 3, H, W) out in rows, each enlarged by a whole factor to at least `min_side` pixels, without smoothing."""
    number, _, height, width = images.shape
    zoom, gap = max(1, math.ceil(min_side / width)), 4
    columns = min(columns, number)
    sheet = Image.new("RGB", (columns * (width * zoom + gap) - gap, math.ceil(number / columns) * (height * zoom + gap) - gap), "white")
    for index, image in enumerate(images):
        picture = Image.fromarray(image.transpose(1, 2, 0)).resize((width * zoom, height * zoom), Image.Resampling.NEAREST)
        sheet.paste(picture, (index % columns * (width * zoom + gap), index // columns * (height * zoom + gap)))
    return sheet
