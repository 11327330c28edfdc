"""Training of one stage: one visible loop, from a checked config to a run folder."""

from __future__ import annotations

import logging
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from sdlab import launch, models, optim, presets, runs, sample
from sdlab.batches import Batch, Batches
from sdlab.cache import Cache, open_cache
from sdlab.config import ConfigError, Networks, Stage, TrainConfig, build, check_resolution, resolve_path

PREVIEW_COUNT = 8

logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message="The `srun` command is available")


class TrainingFailed(RuntimeError):
    """A run that cannot go on; the message names the step and what is left on disk."""


def configure(
    *,
    preset: str,
    stage: str,
    data_dir: str,
    overrides: Mapping[str, Any] | None = None,
    init_from: str | None = None,
    seed: int = 0,
    devices: str | int = "auto",
    max_steps: int | None = None,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    precision: str | None = None,
    save_every: int = 200,
    log_every: int = 10,
    preview_every: int = 0,
) -> TrainConfig:
    """Check everything that a run needs and put it into one config, before any training.

    Args:
        preset: a family's name or file.
        stage: a stage of it.
        data_dir: what notebook 01 wrote.
        overrides: recipe fields to change.
        init_from: a run folder, pipeline folder or "tiny" whose UNet this run starts from; a stage with a parent needs it.
        seed: of weights, order, noise and drops.
        devices: "auto" or 1: the first GPU, or the CPU.
        max_steps: where this call stops; None for the stage's `schedule_steps`.
        global_batch_size: samples an optimizer step; None for the stage's.
        micro_batch_size: samples a forward; None for the stage's, or the global batch size where that is smaller.
        precision: "32-true" or "bf16-mixed"; None for the stage's.
        save_every: optimizer steps between checkpoints.
        log_every: optimizer steps between rows of metrics.
        preview_every: optimizer steps between preview pictures; 0 for none.

    Raises:
        ConfigError: anything that does not fit, before work.
    """
    family = presets.get(preset)
    chosen = {"global_batch_size": global_batch_size, "precision": precision}
    changes = {**(overrides or {}), **{key: value for key, value in chosen.items() if value is not None}}
    recipe = presets.stage(family, stage, changes)
    check_parent(recipe, stage, init_from)
    models.check_networks(family.networks)
    factor = models.vae_factor(family.networks)
    check_resolution(recipe.resolution, vae_factor=factor, unet_factor=models.unet_factor(family.networks))
    cache = open_cache(data_dir, recipe.resolution)
    _check_encoders(cache, family.networks)
    parent = models.load(init_from, weights="auto") if init_from else None
    if parent is not None:
        models.check_fit(models.unet_shapes(family.networks), parent.unet.state_dict(), source=parent.name)
    values = {
        "preset": preset,
        "stage": stage,
        "overrides": changes,
        "networks": family.networks,
        "recipe": recipe,
        "seed": seed,
        "data_key": cache.key,
        "data_dir": str(resolve_path(data_dir)),
        "init_from": init_from,
        "parent_hash": parent.weights_hash if parent is not None else None,
        "devices": devices,
        "max_steps": recipe.schedule_steps if max_steps is None else max_steps,
        "micro_batch_size": min(recipe.micro_batch_size, recipe.global_batch_size) if micro_batch_size is None else micro_batch_size,
        "save_every": save_every,
        "log_every": log_every,
        "preview_every": preview_every,
    }
    return build(TrainConfig, values, where=presets.label(preset, stage, changes))


def check_parent(recipe: Stage, stage: str, init_from: str | None) -> None:
    """Refuse a stage that starts from another one without its weights, and the other way round.

    Raises:
        ConfigError: with what to give.
    """
    if recipe.parent and not init_from:
        raise ConfigError(f"stage {stage!r} starts from {recipe.parent!r}: give init_from, the run folder of a finished {recipe.parent!r}")
    if init_from and not recipe.parent:
        raise ConfigError(f"stage {stage!r} starts from random weights: leave out init_from={init_from!r}")


def _check_encoders(cache: Cache, networks: Networks) -> None:
    """Refuse data that other frozen parts encoded.

    Raises:
        ConfigError: with the parts that differ.
    """
    used = models.hash_frozen(networks)
    other = [part for part, digest in used.items() if cache.manifest["encoders"].get(part) != digest]
    if other:
        parts = " and ".join(other)
        raise ConfigError(f"data_dir {cache.folder} was encoded by another {parts}; prepare it with this preset (notebook 01)")


@dataclass
class _State:
    """What a run carries from step to step."""

    fabric: Fabric
    unet: Any
    optimizer: Any
    ema: optim.Ema | None
    step: int


def train(config: TrainConfig, run_dir: str | Path, *, resume: runs.Resume = "auto") -> dict[str, Any]:
    """Train until `config.max_steps` or until asked to stop, and return the content of `result.json`.

    An interrupt (or a file `stop` in the run folder) ends the run after the present step with a checkpoint and status "stopped".

    Args:
        config: of `configure`.
        run_dir: the run folder; made, or continued from its newest valid checkpoint.
        resume: see `runs.open_run`.

    Raises:
        ConfigError: the folder does not fit, or the disk is too full; nothing is changed then.
        TrainingFailed: the loss stopped being finite.
    """
    folder = resolve_path(run_dir)
    parent = models.load(config.init_from, weights="auto") if config.init_from else None
    _check_disk(folder, config)
    checkpoint = runs.open_run(folder, config, resume=resume, lineage=_lineage(config, parent))
    state = _restore(config, parent, checkpoint)
    runs.rewind_metrics(folder, state.step)
    print(f"{folder}: continues from step {state.step}" if state.step else f"{folder}: starts at step 1")
    frozen = models.load_frozen(config.networks)
    started = time.monotonic()
    try:
        with launch.attention(state.fabric.device), _interrupt_asks_to_stop(folder):
            status = _loop(config, folder, state, frozen)
    except Exception as error:
        _write_result(config, folder, state.step, "failed", started, error=f"{type(error).__name__}: {error}")
        raise
    _export(config, folder, state, frozen)
    return _write_result(config, folder, state.step, status, started)


def _loop(config: TrainConfig, folder: Path, state: _State, frozen: models.Frozen) -> str:
    cache = open_cache(config.data_dir, config.recipe.resolution)
    batches = Batches(
        cache,
        config.recipe,
        config.networks,
        scaling_factor=frozen.scaling_factor,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        encode_text=frozen.encode_text,
    )
    report = _Report(config, folder, state.step)
    stopped = False
    prefetch = state.fabric.device.type != "cpu"
    for micro_batches in batches.steps(state.step + 1, config.max_steps, prefetch=prefetch):
        stopped = runs.stop_requested(folder)
        if stopped:
            break
        rate = optim.learning_rate(config.recipe, state.step + 1)
        loss, norm = _update(state, micro_batches, rate, config.recipe)
        state.step += 1
        if state.ema is not None:
            state.ema.update(state.unet, state.step)
        report(state.step, loss, norm, rate, sum(int(batch.dropped.sum()) for batch in micro_batches))
        if state.step % config.save_every == 0 and state.step < config.max_steps:
            _save(folder, state)
        if config.preview_every and state.step % config.preview_every == 0:
            _preview(config, folder, state, frozen, cache.captions(range(min(PREVIEW_COUNT, len(cache)))))
    report.close()
    _save(folder, state)
    return "stopped" if stopped and state.step < config.max_steps else "done"


def _update(state: _State, micro_batches: list[Batch], rate: float, recipe: Stage) -> tuple[float, float]:
    """One optimizer step: accumulate, clip and check, step; returns the mean loss and the gradient's norm before clipping."""
    total = torch.zeros((), device=state.fabric.device)
    state.optimizer.zero_grad()
    for batch in micro_batches:
        loss = _loss(state, batch) / len(micro_batches)
        state.fabric.backward(loss)
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(state.unet.parameters(), recipe.max_grad_norm)
    if not torch.isfinite(norm) or not torch.isfinite(total):
        raise TrainingFailed(
            f"step {state.step + 1}: loss {total.item()}, gradient norm {norm.item()}; give a new run_dir with a lower learning_rate"
        )
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.optimizer.step()
    return total.item(), norm.item()


def _loss(state: _State, batch: Batch) -> Tensor:
    device = state.fabric.device
    inputs = (batch.noisy_latents.to(device), batch.timesteps.to(device))
    model_pred = state.unet(*inputs, encoder_hidden_states=batch.prompt_embeds.to(device), return_dict=False)[0]
    return F.mse_loss(model_pred.float(), batch.target.to(device))


def _restore(config: TrainConfig, parent: models.TextToImage | None, checkpoint: Path | None) -> _State:
    """Weights, moving average and moments at the start of this call: random, handed over, or of a checkpoint."""
    fabric = Fabric(accelerator=launch.device().type, devices=1, precision=config.recipe.precision)
    unet = models.build_unet(config.networks, seed=config.seed)
    if checkpoint is not None:
        models.hand_over(unet, load_file(checkpoint / "weights.safetensors"), source=str(checkpoint))
    elif parent is not None:
        models.hand_over(unet, parent.unet.state_dict(), source=parent.name)
    unet = unet.train().to(fabric.device)
    ema = optim.Ema(unet, config.recipe.ema_decay) if config.recipe.ema_decay is not None else None
    optimizer = optim.make_optimizer(unet, config.recipe)
    step = 0
    if checkpoint is not None:
        step = runs.checkpoint_step(checkpoint)
        if ema is not None:
            models.hand_over(ema.module, load_file(checkpoint / "ema.safetensors"), source=str(checkpoint))
        moments = {moment: load_file(checkpoint / f"{moment}.safetensors") for moment in ("exp_avg", "exp_avg_sq")}
        optim.restore_optimizer(unet, optimizer, moments, step=step)
    wrapped, optimizer = fabric.setup(unet, optimizer)
    return _State(fabric, wrapped, optimizer, ema, step)


def _save(folder: Path, state: _State) -> None:
    if state.step == 0 or runs.is_valid(folder / "checkpoints" / f"step-{state.step:08d}"):
        return
    module = state.unet.module
    tensors = {"weights": module.state_dict(), **optim.optimizer_tensors(module, state.optimizer)}
    if state.ema is not None:
        tensors["ema"] = state.ema.module.state_dict()
    runs.save_checkpoint(folder, state.step, tensors, {"saved": runs.now()})


def _model(config: TrainConfig, state: _State, frozen: models.Frozen, name: str) -> models.TextToImage:
    unet, weights = (state.unet.module, "raw") if state.ema is None else (state.ema.module, "ema")
    return models.TextToImage(frozen, unet, config.networks, name, weights, state.step, "", config.recipe.resolution)


def _preview(config: TrainConfig, folder: Path, state: _State, frozen: models.Frozen, captions: list[str]) -> None:
    """Draw a few captions into `previews/`; a preview that fails is reported and never stops the run."""
    model = _model(config, state, frozen, str(folder))
    training = model.unet.training
    try:
        images = sample.sample(model, captions, guidance_scale=2.0, seeds=range(len(captions)), batch_size=len(captions))
        Image.fromarray(images.transpose(2, 0, 3, 1).reshape(images.shape[2], -1, 3)).save(
            folder / "previews" / f"step-{state.step:08d}.png"
        )
    except Exception as error:
        print(f"preview of step {state.step} failed: {type(error).__name__}: {error}")
    finally:
        model.unet.train(training)


def _export(config: TrainConfig, folder: Path, state: _State, frozen: models.Frozen) -> None:
    """Write `export/`, a diffusers pipeline with the moving average where the stage keeps one."""
    if state.step == 0:
        return
    scratch = folder / ".export"
    shutil.rmtree(scratch, ignore_errors=True)
    models.save_pipeline(scratch, _model(config, state, frozen, str(folder)))
    shutil.rmtree(folder / "export", ignore_errors=True)
    scratch.rename(folder / "export")


class _Report:
    """Rows of metrics, and a bar in samples with rate and ETA."""

    def __init__(self, config: TrainConfig, folder: Path, step: int) -> None:
        self.config, self.folder, self.size = config, folder, config.recipe.global_batch_size
        self.last_step, self.last_time, self.started = step, time.monotonic(), time.monotonic()
        self.dropped = 0
        title = presets.label(config.preset, config.stage, config.overrides)
        self.bar = launch.progress(total=config.max_steps * self.size, initial=step * self.size, title=title, unit=" samples")

    def __call__(self, step: int, loss: float, norm: float, rate: float, dropped: int) -> None:
        self.bar.update(self.size)
        self.dropped += dropped
        if step % self.config.log_every and step != self.config.max_steps:
            return
        now = time.monotonic()
        row = {
            "step": step,
            "samples_seen": step * self.size,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "caption_drop_rate": self.dropped / ((step - self.last_step) * self.size),
            "samples_per_second": (step - self.last_step) * self.size / (now - self.last_time),
            "elapsed_s": now - self.started,
        }
        runs.append_metrics(self.folder, row)
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.last_step, self.last_time, self.dropped = step, now, 0

    def close(self) -> None:
        self.bar.close()


@contextmanager
def _interrupt_asks_to_stop(folder: Path) -> Iterator[None]:
    """Turn the first interrupt into a request to stop after the step; the second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        if (folder / "stop").exists():
            raise KeyboardInterrupt
        (folder / "stop").touch()
        print("stopping after this step, with a checkpoint; interrupt again to stop at once")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_disk(folder: Path, config: TrainConfig) -> None:
    """Refuse to start where not even two checkpoints fit."""
    parameters = models.count_unet(config.networks)
    needed = 2 * 16 * parameters
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        sizes = f"{free / 1e9:.1f} GB are free and two checkpoints need {needed / 1e9:.1f} GB"
        raise ConfigError(f"run_dir {folder}: {sizes}; make room or give another folder")


def _lineage(config: TrainConfig, parent: models.TextToImage | None) -> dict[str, Any]:
    if parent is None:
        return {"parent": None, "overrides": config.overrides}
    handed = {"path": str(resolve_path(parent.name)) if parent.name != "tiny" else "tiny", "weights": parent.weights, "step": parent.step}
    reset = ["optimizer", "ema", "learning-rate schedule", "step"]
    return {"parent": {**handed, "sha256": parent.weights_hash}, "reset": reset, "overrides": config.overrides}


def _write_result(config: TrainConfig, folder: Path, step: int, status: str, started: float, *, error: str | None = None) -> dict[str, Any]:
    rows = runs.read_metrics(folder)
    result = {
        "status": status,
        "step": step,
        "max_steps": config.max_steps,
        "samples_seen": step * config.recipe.global_batch_size,
        "loss": rows[-1]["loss"] if rows else None,
        "elapsed_s": round(time.monotonic() - started, 3),
        "run_dir": str(folder),
        "export": str(folder / "export") if error is None and step else None,
        "error": error,
    }
    runs.write_json(folder / "result.json", result)
    return result
