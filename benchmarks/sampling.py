"""What drawing pictures costs: `python benchmarks/sampling.py --out FILE.json [--quick]`.

Each ratio sets sdlab against diffusers' own pipeline on the same weights, prompts, noise and number format, in turns; above 1 sdlab is
faster. The ladder goes on from there with what changes the pictures, and says whether their Frechet distance stays what it was.
It draws with the built-in model, in the environment that a headless kernel has.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import numpy as np
import torch
from measuring import in_turns, parse, rate, tell

from sdlab import engine, evaluate, features, models, predictor, sample, scenes, solvers
from sdlab.statistics import Reference, Statistics, frechet_distance, frechet_influence

NOTES = {
    "one_scale_vs_diffusers": "text, UNet, VAE and uint8 at one guidance scale, dpmpp_2m; StableDiffusionPipeline, DPM++ scheduler",
    "sweep_vs_diffusers": "the same prompts and noise at all scales; the pipeline is called once a scale",
    "ladder_...": "pictures/s against diffusers' pipeline with 50 DDIM steps; each rung adds one thing to the one before",
    "ladder": "Frechet distance of each rung, its difference to the first, and the standard error of that, which shares prompts and noise",
    "largest_difference": "of a pixel value in [0, 1] before rounding, ours against diffusers'",
}
SCALES = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
RUNGS: dict[str, dict[str, Any]] = {
    "ladder_ddim_50": {"solver": "ddim", "num_inference_steps": 50},
    "ladder_dpmpp_2m_15": {"solver": "dpmpp_2m", "num_inference_steps": 15},
    "ladder_dpmpp_2m_8": {"solver": "dpmpp_2m", "num_inference_steps": 8},
    "ladder_interval": {"solver": "dpmpp_2m", "num_inference_steps": 8, "guidance": "interval(0.38, 10)"},
    "ladder_bf16": {"solver": "dpmpp_2m", "num_inference_steps": 8, "guidance": "interval(0.38, 10)", "precision": "bf16-mixed"},
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and how often."""

    pictures: int = 64
    batch_size: int = 32
    steps: int = 10
    guidance_scale: float = 2.0
    judged: int = 320
    references: int = 4096
    most_steps: int = 50
    """Of a rung of the ladder."""
    repeats: int = 5


class Pair:
    """The same drawing by both."""

    def __init__(self, model: models.TextToImage, sizes: Sizes) -> None:
        self.model, self.sizes = model, sizes
        self.prompts = [scene.caption for scene in scenes.draw(sizes.pictures, seed=evaluate.PROMPT_SEED)]
        frozen = model.frozen
        parts = {"text_encoder": frozen.text_encoders[0], "tokenizer": frozen.tokenizers[0]}
        for name, network in (("vae", frozen.vae), ("unet", model.unet)):  # as diffusers loads them
            parts[name] = copy.deepcopy(network).to(memory_format=torch.contiguous_format)
        none = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
        self.pipeline = diffusers.StableDiffusionPipeline(**parts, scheduler=self.scheduler("dpmpp_2m"), **none)
        self.pipeline.set_progress_bar_config(disable=True)

    def scheduler(self, solver: str) -> Any:
        """diffusers' own, which visits the same timesteps."""
        schedule = self.model.networks.noise_schedule.model_dump()
        known = {**schedule, "prediction_type": self.model.networks.prediction_type, "steps_offset": 1}
        if solver == "ddim":
            return diffusers.DDIMScheduler(**known, clip_sample=False, set_alpha_to_one=False)
        return diffusers.DPMSolverMultistepScheduler(**known, timestep_spacing=solvers.default_spacing(solver))

    def theirs(self, scales: tuple[float, ...], solver: str = "dpmpp_2m", steps: int | None = None) -> np.ndarray:
        """Float pictures (S, B, H, W, 3) in [0, 1]."""
        self.pipeline.scheduler = self.scheduler(solver)
        asked = {"num_inference_steps": steps or self.sizes.steps, "output_type": "np"}
        noise, size = predictor.draw_noise(self.model, range(self.sizes.pictures)), self.sizes.batch_size
        batches = [(self.prompts[start : start + size], noise[start : start + size]) for start in range(0, len(noise), size)]
        drawn = [self.pipeline(prompts, latents=some, guidance_scale=scale, **asked) for scale in scales for prompts, some in batches]
        return np.concatenate([one.images for one in drawn]).reshape(len(scales), len(noise), *drawn[0].images.shape[1:])

    def ours(self, scales: tuple[float, ...], **settings: Any) -> np.ndarray:
        """Pictures, uint8 (S, B, 3, H, W)."""
        count, sizes = len(scales), self.sizes
        settings = {"num_inference_steps": sizes.steps, "batch_size": sizes.batch_size, **settings}
        each = [scale for scale in scales for _ in self.prompts]
        seeds = [*range(sizes.pictures)] * count
        drawn = sample.sample(self.model, self.prompts * count, guidance_scale=each, seeds=seeds, **settings)
        return drawn.reshape(count, sizes.pictures, *drawn.shape[1:])

    def largest_difference(self) -> float:
        """Of pixels in [0, 1], before they are rounded to uint8."""
        vae, seen = self.model.frozen.vae, []
        decode = vae.decode
        vae.decode = lambda latents: seen.append(decode(latents)) or seen[-1]
        self.ours((self.sizes.guidance_scale,), batch_size=self.sizes.pictures)  # one batch, whose pictures come in order
        vae.decode = decode
        ours = torch.cat([one.sample for one in seen]).clamp(-1, 1).numpy() / 2 + 0.5
        return float(np.abs(ours - self.theirs((self.sizes.guidance_scale,))[0].transpose(0, 3, 1, 2)).max())


def judged(pair: Pair, settings: dict[str, Any], judge: features.Judge) -> np.ndarray:
    """Features of pictures of as many prompts as the distance is taken over."""
    count, batch = pair.sizes.judged, pair.sizes.batch_size
    prompts = [scene.caption for scene in scenes.draw(count, seed=evaluate.PROMPT_SEED)]
    drawn = sample.sample(pair.model, prompts, guidance_scale=pair.sizes.guidance_scale, seeds=range(count), batch_size=batch, **settings)
    return judge.image_features(drawn)


def ladder(pair: Pair) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How fast each rung is against diffusers' 50 steps, and how far its pictures are from real ones."""
    judge, scale = features.load_judge(pair.model.frozen.device), (pair.sizes.guidance_scale,)
    pictures = scenes.render(scenes.draw(pair.sizes.references, seed=evaluate.REFERENCE_SEED))
    reference = Reference.of(Statistics.of(judge.image_features(pictures)))
    ratios, rungs, influences = {}, [], []
    for name, rung in RUNGS.items():
        settings = {**rung, "num_inference_steps": min(rung["num_inference_steps"], pair.sizes.most_steps)}
        found = judged(pair, settings, judge)
        influences.append(frechet_influence(found, reference))
        error = float((influences[-1] - influences[0]).std() / len(found) ** 0.5)
        rungs.append({"rung": name, **settings, "frechet": frechet_distance(Statistics.of(found), reference)})
        rungs[-1] |= {"above_first": rungs[-1]["frechet"] - rungs[0]["frechet"], "above_first_se": error}
        ratios[name] = in_turns(*timed(pair, scale, settings), pair.sizes.repeats, "pictures/s")
        print(f"{name}: {rungs[-1]['frechet']:.4f}, above the first by {rungs[-1]['above_first']:.4f} +- {error:.4f}", flush=True)
    return ratios, rungs


def timed(pair: Pair, scales: tuple[float, ...], settings: dict[str, Any]) -> tuple[Callable[[], float], Callable[[], float]]:
    count = len(scales) * pair.sizes.pictures
    return lambda: rate(count, lambda: pair.theirs(scales, "ddim", pair.sizes.most_steps)), lambda: rate(
        count, lambda: pair.ours(scales, **settings)
    )


def measure(sizes: Sizes) -> dict[str, Any]:
    pair = Pair(models.load("tiny"), sizes)
    figures = {"largest_difference": pair.largest_difference()}
    ratios = {}
    for name, scales in (("one_scale_vs_diffusers", (sizes.guidance_scale,)), ("sweep_vs_diffusers", SCALES)):
        turns = (partial(rate, len(scales) * sizes.pictures, partial(draw, scales)) for draw in (pair.theirs, pair.ours))
        ratios[name] = in_turns(*turns, sizes.repeats, "pictures/s")
    climbed, rungs = ladder(pair)
    return {"ratios": ratios | climbed, "figures": figures, "ladder": rungs}


def main() -> None:
    if "SDLAB_HEADLESS" not in os.environ:  # glibc and OpenMP read theirs once, at the start
        os.execve(sys.executable, [sys.executable, *sys.argv], engine.kernel_environment(os.environ))
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    arguments = parse("What drawing pictures costs, against diffusers' own pipeline.")
    sizes = Sizes(pictures=4, batch_size=2, steps=2, judged=8, references=64, most_steps=2) if arguments.quick else Sizes()
    tell(arguments.out, "sweep_vs_diffusers", measure(sizes), sizes=vars(sizes), notes=NOTES)


if __name__ == "__main__":
    main()
