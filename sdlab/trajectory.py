"""Denoising made visible: what the UNet sees in one image at each step, with and without the prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdlab import diffusion, models, predictor
from sdlab.drawing import Drawing, Shot, check_scales
from sdlab.guidance import At


@dataclass(frozen=True)
class Trajectory:
    """One image on its way, a row an evaluation of the UNet."""

    at: list[At]
    guided: np.ndarray
    """The picture that guidance makes of both predictions, uint8 (S, 3, H, W)."""
    unguided: np.ndarray
    """The picture without the prompt, uint8 (S, 3, H, W)."""
    direction: np.ndarray
    """How far guidance moves each latent, root mean square over channels, float32 (S, h, w)."""


def follow(model: models.TextToImage, drawing: Drawing, shot: Shot) -> Trajectory:
    """Draw one image, and keep what the UNet sees at each evaluation; both predictions are run everywhere.

    Raises:
        ConfigError: a scale that cannot be used.
    """
    check_scales(drawing.guidance, [shot.guidance_scale])
    unconditional: list[Tensor] = []
    seen: list[tuple[At, Tensor, Tensor]] = []

    def combine(cond: Tensor, uncond: Tensor, guidance_scale: Tensor, at: At) -> Any:
        unconditional.append(uncond)
        return drawing.guidance.combine(cond, uncond, guidance_scale, at)

    def predict(latents: Tensor, timestep: int) -> diffusion.Prediction:
        followed, at = ask(latents, timestep), watched.at(timestep)
        alpha, kind = float(drawing.alphas[timestep]), drawing.networks.prediction_type
        without = diffusion.read_prediction(unconditional[-1], latents, alpha=alpha, prediction_type=kind)
        seen.append((at, followed.denoised, without.denoised))
        return followed

    both = replace(drawing.guidance, combine=combine, one_is_cond=False, zero_is_uncond=False)
    watched = replace(drawing, batch_size=1, guidance=both)
    with torch.inference_mode():
        forward = predictor.Forward(model, watched, [shot])
        ask = predictor.Predictor(forward, [shot])
        drawing.solve(predict, forward.noise([shot]))
        at, followed, without = zip(*seen, strict=True)
        guided, unguided = torch.cat(followed), torch.cat(without)
        moved = (guided - unguided).square().mean(dim=1).sqrt().cpu().numpy()
        return Trajectory(list(at), model.frozen.decode(guided).numpy(), model.frozen.decode(unguided).numpy(), moved)
