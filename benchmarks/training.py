"""What a training step and a checkpoint cost beside the plain work: `python benchmarks/training.py --out FILE.json [--quick]`.

Each ratio sets sdlab against the plain way to the same, in turns; above 1 sdlab is faster. It trains the built-in family on a CPU, in the
environment that a headless kernel has.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import in_turns, parse, rate, tell

from sdlab import checkpoints, engine, launch, models, optim, places, prepare, presets, runs, stages, state, train
from sdlab.config import TrainConfig

NOTES = {
    "step_vs_plain": "the whole loop (batches, noise, clipping, checks, average, metrics); the same UNet's forward, backward, AdamW alone",
    "save_vs_plain": "Checkpoints.save of weights, average and moments, hashed and synced; the same bytes in as many files, synced",
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured, and how often."""

    steps: int = 10
    global_batch_size: int = 32
    repeats: int = 7


def training(config: TrainConfig, scratch: Path, sizes: Sizes) -> Callable[[], float]:
    """Samples a second of the second half of a run, from its metrics."""

    def measure() -> float:
        run = Path(tempfile.mkdtemp(dir=scratch)) / "run"
        train.train(config, run)
        return float(runs.read_metrics(run)[1]["samples_per_second"])

    return measure


def plain_steps(config: TrainConfig, sizes: Sizes) -> Callable[[], float]:
    """Samples a second of nothing but forward, backward and optimizer on one batch."""
    unet = models.build_unet(config.networks).train()
    optimizer = optim.make_optimizer(unet, config.recipe)
    side = config.recipe.resolution // places.vae_factor(config.networks)
    channels, width = config.networks.unet["in_channels"], config.networks.unet["cross_attention_dim"]
    noisy, target = torch.randn(2, sizes.global_batch_size, channels, side, side)
    timesteps, text = torch.randint(1000, (sizes.global_batch_size,)), torch.randn(sizes.global_batch_size, 24, width)

    def steps() -> None:
        for _ in range(sizes.steps):
            optimizer.zero_grad()
            predicted = unet(noisy, timesteps, encoder_hidden_states=text, return_dict=False)[0]
            torch.nn.functional.mse_loss(predicted, target).backward()
            optimizer.step()

    def measure() -> float:
        with launch.attention(torch.device("cpu")):
            return rate(sizes.steps * sizes.global_batch_size, steps)

    return measure


def saving(config: TrainConfig, scratch: Path) -> tuple[Callable[[], float], Callable[[], float]]:
    """Megabytes a second of plain writing, and of saving a state."""
    saved = state.restore(config, state.make_fabric(config), Path(tempfile.mkdtemp(dir=scratch)))
    groups = state.tensors(saved)
    size = sum(tensor.numel() * tensor.element_size() for group in groups.values() for tensor in group.values()) / 1e6

    def plain() -> None:
        folder = Path(tempfile.mkdtemp(dir=scratch))
        for name, group in groups.items():
            with (folder / name).open("wb") as file:
                for tensor in group.values():
                    file.write(tensor.contiguous().numpy())
                file.flush()
                os.fsync(file.fileno())

    def ours() -> float:
        with checkpoints.Checkpoints(Path(tempfile.mkdtemp(dir=scratch))) as written:
            return rate(size, lambda: written.save(1, groups, {}))

    return lambda: rate(size, plain), ours


def measure(scratch: Path, sizes: Sizes) -> dict[str, Any]:
    prepare.prepare(prepare.configure(source="scenes", data_dir=str(scratch / "data"), resolution=64, limit=256))
    networks = presets.get("tiny").networks
    mine = scratch / "mine.yaml"
    mine.write_text(
        "extends: tiny\nstages: {only_64: {resolution: 64, global_batch_size: 32, micro_batch_size: 32, learning_rate: 1e-4, "
        "schedule_steps: 1000, ema_decay: 0.998}}\n"
    )
    steps = {"max_steps": 2 * sizes.steps, "log_every": sizes.steps, "save_every": 10_000, "global_batch_size": sizes.global_batch_size}
    config = stages.configure(preset=str(mine), stage="only_64", data_dir=str(scratch / "data"), **steps)
    ratios = {
        "step_vs_plain": in_turns(plain_steps(config, sizes), training(config, scratch, sizes), sizes.repeats, "samples/s"),
        "save_vs_plain": in_turns(*saving(config, scratch), max(5, sizes.repeats), "MB/s"),
    }
    return {"ratios": ratios, "figures": {"parameters_million": models.count_unet(networks) / 1e6}}


def main() -> None:
    if "SDLAB_HEADLESS" not in os.environ:  # glibc and OpenMP read theirs once, at the start
        os.execve(sys.executable, [sys.executable, *sys.argv], engine.kernel_environment(os.environ))
    arguments = parse("What a training step and a checkpoint cost beside the plain work.")
    sizes = Sizes(steps=2, global_batch_size=4, repeats=5) if arguments.quick else Sizes()
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure(Path(scratch), sizes)
    tell(arguments.out, "step_vs_plain", measured, sizes=vars(sizes), notes=NOTES)


if __name__ == "__main__":
    main()
