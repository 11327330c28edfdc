"""One real optimizer step of the full SD 1.5 UNet on this machine: `python benchmarks/full_step.py --out FILE.json [--quick]`.

All 860 M parameters in float32, with gradients, both Adam moments and the moving average, at 256 pixels with one picture a step; weights,
moments and text states are random. It needs about 18 GiB and a machine of its own; `--quick` takes five steps of the family's small twin.

It fails when the loss is not finite, when the step took more memory than it may, or when there is not enough to begin with.
"""

from __future__ import annotations

import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from measuring import parse, tell

from sdlab import engine, launch, models, presets, state, train
from sdlab.batches import Batches
from sdlab.cache import Bucket
from sdlab.config import Stage, TrainConfig
from sdlab.places import vae_factor
from sdlab.report import Outcome

MOST_GIB = 22.0
"""Memory that the step may take at its peak."""
BYTES_A_PARAMETER = 20
"""Weight, gradient, two Adam moments and the average, in float32."""
BESIDE_GIB = 2.0
"""Memory that is asked for beside these: activations, and what is imported."""
NOTES = {"step_vs_parts": "the whole step (loss, clipping, checks, average); its forward, backward and AdamW alone, timed within it"}


@dataclass(frozen=True)
class Sizes:
    """What is trained, and how often."""

    preset: str = "sd15"
    resolution: int = 256
    steps: int = 1


class RandomCache:
    """Prepared data of one picture that nobody has prepared: random moments and text states."""

    has_text_states = True

    def __init__(self, networks: Any, resolution: int) -> None:
        encoder, side, random = networks.text_encoders[0], resolution // vae_factor(networks), torch.Generator().manual_seed(0)
        length, width = encoder.get("max_position_embeddings", 77), encoder["hidden_size"]
        self.moments = torch.randn(2 * networks.vae["latent_channels"], side, side, generator=random)
        self.states = torch.randn(length, width, generator=random)
        self.buckets, self.text_widths = (Bucket(resolution, resolution, 0, 1),), (width,)
        self.null = {"prompt_embeds": torch.zeros(1, length, width)}

    def shard_rows(self, bucket: Bucket) -> list[range]:
        """The only row."""
        return [range(bucket.count)]

    def rows(self, indices: Sequence[int]) -> dict[str, Any]:
        """As `Cache.rows`."""
        sizes = np.zeros((len(indices), 2), np.int32)
        tensors = {"moments": self.moments, "prompt_embeds": self.states}
        return {
            **{name: tensor.expand(len(indices), *tensor.shape) for name, tensor in tensors.items()},
            **dict.fromkeys(("original_size", "crop", "target_size"), sizes),
        }

    def keys(self, indices: Sequence[int]) -> list[str]:
        """What names the picture."""
        return ["random"] * len(indices)

    captions = keys


class Clock:
    """Seconds of calls, by name."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def of(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return work(*given, **named)
            finally:
                self.seconds[name].append(time.perf_counter() - start)

        return timed


def configure(sizes: Sizes) -> TrainConfig:
    """One picture a step, with an average, in float32, with activations that are computed again in the backward pass."""
    networks = presets.get(sizes.preset).networks
    figures: dict[str, Any] = {"learning_rate": 1e-4, "schedule_steps": 1000, "ema_decay": 0.9999}
    recipe = Stage(resolution=sizes.resolution, global_batch_size=1, micro_batch_size=1, **figures)
    counts: dict[str, Any] = {"max_steps": sizes.steps, "micro_batch_size": 1, "save_every": 1000, "log_every": 1, "preview_every": 0}
    about: dict[str, Any] = {
        "preset": sizes.preset,
        "stage": "full",
        "networks": networks,
        "recipe": recipe,
        "data_key": "",
        "data_dir": "",
    }
    return TrainConfig(**about, **counts, gradient_checkpointing=True)


def train_steps(config: TrainConfig, clock: Clock) -> Outcome:
    """Make the whole state of a run once and take its steps; what the last one gave."""
    with tempfile.TemporaryDirectory() as nothing:
        made = clock.of("build", state.restore)(config, state.make_fabric(config), Path(nothing))
    cache: Any = RandomCache(config.networks, config.recipe.resolution)
    scaling_factor = config.networks.vae["scaling_factor"]
    batches = Batches(cache, config.recipe, config.networks, scaling_factor=scaling_factor, micro_batch_size=1, seed=config.seed)
    made.fabric.clip_gradients = clock.of("clip", made.fabric.clip_gradients)
    made.optimizer.step = clock.of("adamw", made.optimizer.step)
    made.ema.update = clock.of("average", made.ema.update)
    train._accumulate = clock.of("forward_backward", train._accumulate)
    update = clock.of("step", train._update)
    with launch.attention(made.fabric.device):
        for number in range(1, config.max_steps + 1):
            outcome = update(made, clock.of("batch", batches.step)(number), config, cache, asked=False)
    return outcome


def measure(sizes: Sizes) -> dict[str, Any]:
    config, clock = configure(sizes), Clock()
    parameters = models.count_unet(config.networks)
    check_memory(parameters)
    outcome = train_steps(config, clock)
    seconds = {name: statistics.median(times) for name, times in clock.seconds.items()}
    alone = [sum(pair) for pair in zip(clock.seconds["forward_backward"], clock.seconds["adamw"], strict=True)]
    shares = [one / whole for one, whole in zip(alone, clock.seconds["step"], strict=True)]
    ours, baseline = 1 / seconds["step"], 1 / statistics.median(alone)
    spread = (max(shares) - min(shares)) / 2 / statistics.median(shares)
    ratio = {"ratio": ours / baseline, "baseline": baseline, "ours": ours, "unit": "steps/s", "repeats": sizes.steps, "spread": spread}
    figures = {
        "parameters_million": parameters / 1e6,
        **{"loss": outcome.loss, "gradient_norm": outcome.grad_norm},
        **{f"{name}_s": value for name, value in seconds.items()},
        **{"states_gib": BYTES_A_PARAMETER * parameters / 2**30, "peak_gib": peak_gib()},
    }
    return {"ratios": {"step_vs_parts": ratio}, "figures": figures}


def check_memory(parameters: int) -> None:
    """Leave the machine alone where the step would not fit."""
    needed, there = BYTES_A_PARAMETER * parameters / 2**30 + BESIDE_GIB, psutil.virtual_memory().available / 2**30
    if there < needed:
        sys.exit(f"the step needs about {needed:.1f} GiB, and {there:.1f} GiB are free; end other programs, or use --quick")


def peak_gib() -> float:
    """Most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    if "SDLAB_HEADLESS" not in os.environ:  # glibc and OpenMP read theirs once, at the start
        os.execve(sys.executable, [sys.executable, *sys.argv], engine.kernel_environment(os.environ))
    arguments = parse("One real optimizer step of the full SD 1.5 UNet on this machine.")
    sizes = Sizes("sd15_tiny", resolution=64, steps=5) if arguments.quick else Sizes()
    measured = measure(sizes)
    tell(arguments.out, "step_vs_parts", measured, sizes=vars(sizes), notes=NOTES)
    figures = measured["figures"]
    wrong = [f"{name} is {figures[name]}" for name in ("loss", "gradient_norm") if not math.isfinite(figures[name])]
    if figures["peak_gib"] > MOST_GIB:
        wrong.append(f"the peak of {figures['peak_gib']:.1f} GiB is more than {MOST_GIB:g}")
    if wrong:
        sys.exit("; ".join(wrong))


if __name__ == "__main__":
    main()
