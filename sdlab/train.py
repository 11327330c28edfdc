"""Training of one stage: one visible loop, from a checked config to a run folder."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.strategies import DDPStrategy
from PIL import Image
from torch import Tensor

from sdlab import export, launch, optim, parents, parts, runs, sample, stages
from sdlab.batches import Batch, Batches
from sdlab.cache import Cache, open_cache
from sdlab.checkpoints import Checkpoints, NoSpace
from sdlab.config import ConfigError, Stage, TrainConfig, build, resolve_path
from sdlab.report import Follow, OnRows, Outcome, Report
from sdlab.state import State, drawing, make_fabric, restore, save

PREVIEW_COUNT = 8
VALIDATION_COUNT = 256
"""Rows that the validation loss is measured on, at most."""
MOST_SKIPPED = 20
"""Skipped steps in a row that end a run."""


class TrainingFailed(RuntimeError):
    """A run that cannot go on; the message names the step and what is left on disk."""


def train(
    config: TrainConfig, run_dir: str | Path, *, resume: runs.Resume = "auto", detach: bool = False, on_rows: OnRows | None = None
) -> dict[str, Any]:
    """Train until `config.max_steps` or until asked to stop, and return the content of `result.json`.

    On one CPU process this happens here, else on ranks of their own. An interrupt, SIGTERM or a file `stop` in the run folder ends the run
    after the present step with a checkpoint and status "stopped".

    Args:
        config: of `stages.configure`.
        run_dir: the run folder; made, or continued from its newest valid checkpoint.
        resume: see `runs.open_run`.
        detach: leave the run to ranks of its own and return at once, with status "started".
        on_rows: called with the rows of `metrics.jsonl` when there are new ones.

    Raises:
        ConfigError: the folder does not fit, or the disk is too full; nothing is changed then.
        TrainingFailed: the loss stopped being finite.
        RuntimeError: a rank died, with its traceback or how it was ended.
    """
    folder = resolve_path(run_dir)
    follow = Follow(folder, on_rows) if on_rows is not None else _nothing
    alone = config.world_size == 1 and launch.device().type == "cpu" and not detach
    stop, grace_s = folder / "stop", config.stop_grace_s
    ranks = launch.Ranks(config.devices, config.num_nodes, config.rendezvous, config.max_restarts, str(stop), grace_s)
    with runs.lock(folder) as held:
        launch.check(ranks)
        stages.check_disk(config, folder)
        runs.open_run(folder, config, resume=resume, lineage=_lineage(config))
        try:
            if alone:
                with launch.asks_to_stop(stop, grace_s):
                    return _run(config, folder, follow)
            job = {"verb": "train", "run_dir": str(folder), "config": config.model_dump(mode="json")}
            launch.run_ranks(folder / "job", job, ranks, detach=detach, held=[held], meanwhile=follow)
        except Exception as error:
            _tell(folder, error)
            raise
    if detach:
        return {"status": "started", "run_dir": str(folder)}
    return dict(json.loads((folder / "result.json").read_text(encoding="utf-8")))


def _tell(folder: Path, error: Exception) -> None:
    """Write why a run failed to its `result.json`, where that may hold what a rank made of it."""
    path = folder / "result.json"
    told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"run_dir": str(folder)}
    with suppress(OSError):
        runs.write_json(path, {**told, "status": "failed", "error": f"{type(error).__name__}: {error}"})


def work(job: Mapping[str, Any], *, rank: int, world_size: int) -> None:
    """What one rank does."""
    config = build(TrainConfig, job["config"], where="job")
    if config.world_size != world_size:
        raise ConfigError(f"the job is for {config.world_size} ranks, and rank {rank} is one of {world_size}")
    _run(config, Path(job["run_dir"]), _nothing)


def _nothing() -> None:
    pass


def _run(config: TrainConfig, folder: Path, follow: Callable[[], None]) -> dict[str, Any]:
    """Train from where the folder is to where the config wants it, on this rank."""
    fabric = make_fabric(config)
    state = restore(config, fabric, folder)
    if state.is_first:
        (folder / "result.json").unlink(missing_ok=True)
        runs.rewind_metrics(folder, state.step)
        print(f"{folder}: continues from step {state.step}" if state.step else f"{folder}: starts at step 1")
    frozen = parts.load_frozen(config.networks)
    report = Report(config, folder, state.step, shown=state.is_first, follow=follow)
    try:
        with launch.attention(fabric.device), Checkpoints(folder, keep_every=config.keep_every) as written:
            status, reason = _loop(config, folder, state, frozen, report, written)
        if not reason:
            _export(config, folder, state, frozen)
    except Exception as error:
        error.add_note(f"on rank {fabric.global_rank} of {fabric.world_size}, after step {state.step}")
        if state.is_first:
            report.result("failed", state.step, error=f"{type(error).__name__}: {error}")
        raise
    return report.result(status, state.step, error=reason) if state.is_first else {}


def _loop(config: TrainConfig, folder: Path, state: State, frozen: parts.Frozen, report: Report, written: Checkpoints) -> tuple[str, str]:
    """Train until the end or a stop; the status, and why the run was stopped if nobody asked for it."""
    batches, cache = _batches(config, state, frozen, config.data_dir, config.recipe)
    validation = _validation(config, state, frozen)
    _settle(state, batches, config)
    prefetch = state.fabric.device.type != "cpu"
    for micro_batches in batches.steps(state.step + 1, config.max_steps, prefetch=prefetch):
        outcome = _update(state, micro_batches, config, cache, asked=state.is_first and runs.stop_requested(folder))
        at_end = state.step == config.max_steps or outcome.stop
        losses = _validate(state, validation) if validation is not None and (at_end or _is_due(config.val_every, state)) else None
        report(state.step, outcome, losses)
        if (at_end or _is_due(config.save_every, state)) and (reason := _save(state, written)):
            return "stopped", reason
        if _is_due(config.preview_every, state):
            _preview(config, folder, state, frozen, cache)
        if at_end:
            break
    report.close()
    return "stopped" if state.step < config.max_steps else "done", ""


def _is_due(every: int, state: State) -> bool:
    return every > 0 and state.step % every == 0


def _batches(config: TrainConfig, state: State, frozen: parts.Frozen, data_dir: str, recipe: Stage) -> tuple[Batches, Cache]:
    cache = open_cache(data_dir, recipe.resolution)
    batches = Batches(
        cache,
        recipe,
        config.networks,
        scaling_factor=frozen.scaling_factor,
        micro_batch_size=config.micro_batch_size,
        seed=config.seed,
        rank=state.fabric.global_rank,
        world_size=state.fabric.world_size,
        encode_text=frozen.encode_text,
    )
    return batches, cache


def _settle(state: State, batches: Batches, config: TrainConfig) -> None:
    """Let DDP see one backward whose gradients are thrown away: after the first it puts gradients together in another order."""
    if isinstance(state.fabric.strategy, DDPStrategy) and state.step < config.max_steps:
        batch = batches.step(state.step + 1)[0]
        state.fabric.backward(_losses(state, batch).mean())
        state.optimizer.zero_grad()


def _update(state: State, micro_batches: Sequence[Batch], config: TrainConfig, cache: Cache, *, asked: bool) -> Outcome:
    """One optimizer step: accumulate, clip and check, step, average."""
    recipe = config.recipe
    losses = _accumulate(state, micro_batches)
    clipped = state.fabric.clip_gradients(state.unet, state.optimizer, max_norm=recipe.max_grad_norm, error_if_nonfinite=False)
    assert clipped is not None
    norm = optim.whole(clipped).item()
    told = torch.stack([losses.double().sum(), *_counts(micro_batches, asked, losses)])
    total, dropped, stop = _summed(state, told).tolist()
    loss = total / recipe.global_batch_size
    finite = math.isfinite(loss) and math.isfinite(norm)
    if not finite and state.scaler is None:
        raise _not_finite(state, micro_batches, losses, loss, norm, cache)
    rate = optim.learning_rate(recipe, state.updates + 1)
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    state.optimizer.step()
    state.optimizer.zero_grad()
    _count(state, skipped=not finite)
    if state.ema is not None and finite:
        state.ema.update(state.module, state.updates)
    return Outcome(loss, norm, rate, dropped, not finite, stop > 0)


def _accumulate(state: State, micro_batches: Sequence[Batch]) -> Tensor:
    """Gradients of the mean loss over all micro-batches, summed over ranks with the last of them; the loss of each sample."""
    losses = []
    for number, batch in enumerate(micro_batches, 1):
        with (
            state.fabric.no_backward_sync(state.unet, enabled=number < len(micro_batches)) if state.fabric.world_size > 1 else nullcontext()
        ):
            each = _losses(state, batch)
            state.fabric.backward(each.mean() / len(micro_batches))
        losses.append(each.detach())
    return torch.cat(losses)


def _losses(state: State, batch: Batch) -> Tensor:
    """The weighted mean squared error of each sample, float32 (B,)."""
    device = state.fabric.device
    sizes = None if batch.add_time_ids is None else batch.add_time_ids.to(device)
    inputs, conditioning = (batch.noisy_latents.to(device), batch.timesteps.to(device)), batch.text.to(device).conditioning(sizes)
    model_pred = state.unet(*inputs, **conditioning, return_dict=False)[0]
    errors = (model_pred.float() - batch.target.to(device)).square().mean(dim=(1, 2, 3))
    return errors * batch.weights.to(device)


def _summed(state: State, mine: Tensor) -> Tensor:
    """The sum over all ranks."""
    summed = state.fabric.all_reduce(mine, reduce_op="sum")
    assert isinstance(summed, Tensor)
    return summed


def _counts(micro_batches: Sequence[Batch], asked: bool, like: Tensor) -> Tensor:
    dropped = sum(float(batch.dropped.double().mean(dim=1).sum()) for batch in micro_batches)
    return torch.tensor([dropped, asked], dtype=torch.float64, device=like.device)


def _count(state: State, *, skipped: bool) -> None:
    """Count a step, and end the run when nothing but skipped ones come.

    Raises:
        TrainingFailed: the gradients overflow step after step.
    """
    state.step += 1
    state.skipped += skipped
    state.skipped_in_row = state.skipped_in_row + 1 if skipped else 0
    if state.skipped_in_row >= MOST_SKIPPED:
        raise TrainingFailed(
            f"step {state.step}: the gradients of the last {MOST_SKIPPED} steps were not finite; {_last(state)}; "
            "give a new run_dir with a lower learning_rate, or precision='bf16-mixed'"
        )


def _not_finite(state: State, micro_batches: Sequence[Batch], losses: Tensor, loss: float, norm: float, cache: Cache) -> TrainingFailed:
    """What to say of a step whose loss or gradient is not finite; all ranks have to call."""
    rows = torch.cat([batch.indices for batch in micro_batches])
    mine = rows[~torch.isfinite(losses.cpu())].tolist()
    bad = [row for part in _gather(mine, state) for row in part]
    samples = ", ".join(f"{row} ({cache.keys([row])[0]}: {cache.captions([row])[0][:60]!r})" for row in bad[:8])
    more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
    where = f"; not finite at rows {samples}{more} of the data" if bad else ""
    return TrainingFailed(
        f"step {state.step + 1}: loss {loss}, gradient norm {norm}{where}; {_last(state)}; "
        "give a new run_dir with a lower learning_rate or longer warmup_steps, or look at those pictures"
    )


def _gather(mine: list[int], state: State) -> list[list[int]]:
    told: list[Any] = [mine] * state.fabric.world_size
    if state.fabric.world_size > 1:
        torch.distributed.all_gather_object(told, mine)
    return told


def _last(state: State) -> str:
    return f"the checkpoint of step {state.saved_step} is good" if state.saved_step else "there is no checkpoint yet"


def _save(state: State, written: Checkpoints) -> str:
    """Write a checkpoint; why that could not be, where the disk is full."""
    try:
        save(state, written)
    except NoSpace as full:
        return f"{full}; {_last(state)}; make room and run again"
    return ""


# What is seen while it runs


def _validation(config: TrainConfig, state: State, frozen: parts.Frozen) -> Batches | None:
    if config.val_data_dir is None:
        return None
    plain = {"caption_drop_prob": 0.0, "noise_offset": 0.0, "min_snr_gamma": None}
    return _batches(config, state, frozen, config.val_data_dir, config.recipe.model_copy(update=plain))[0]


@torch.no_grad()
def _validate(state: State, batches: Batches) -> list[float | None]:
    """Mean squared error on fixed rows with fixed noise, by quarter of the timesteps from low noise to high; None for an empty quarter."""
    placed, rank, world_size = batches.validation(VALIDATION_COUNT), state.fabric.global_rank, state.fabric.world_size
    sums = torch.zeros(2, 4, dtype=torch.float64, device=state.fabric.device)
    for first in range(0, len(placed), world_size):
        batch = batches.validation_batch(placed[min(first + rank, len(placed) - 1)])  # FSDP wants every rank to take part
        errors = _losses(state, batch).double()
        if first + rank < len(placed):
            quarters = (batch.timesteps * 4 // len(batches.alphas)).to(errors.device)
            sums[0].index_add_(0, quarters, errors)
            sums[1].index_add_(0, quarters, torch.ones_like(errors))
    total, count = _summed(state, sums).tolist()
    return [error / number if number else None for error, number in zip(total, count, strict=True)]


def _preview(config: TrainConfig, folder: Path, state: State, frozen: parts.Frozen, cache: Cache) -> None:
    """Draw a few captions into `previews/`; a preview that fails is reported and never stops the run. All ranks have to call."""
    model = drawing(state, config, frozen, str(folder))
    if model is None:
        return
    try:
        captions = cache.captions(range(min(PREVIEW_COUNT, len(cache))))
        runs.write_json(folder / "previews" / "captions.json", captions)
        images = sample.sample(model, captions, guidance_scale=2.0, seeds=range(len(captions)), batch_size=len(captions))
        row = images.transpose(2, 0, 3, 1).reshape(images.shape[2], -1, 3)
        scratch, final = folder / "previews" / ".preview.png", folder / "previews" / f"step-{state.step:08d}.png"
        Image.fromarray(row).save(scratch)
        scratch.rename(final)
    except Exception as error:
        print(f"preview of step {state.step} failed: {type(error).__name__}: {error}")


def _export(config: TrainConfig, folder: Path, state: State, frozen: parts.Frozen) -> None:
    """Write `export/`, a diffusers pipeline with the moving average where the stage keeps one; all ranks have to call."""
    model = drawing(state, config, frozen, str(folder)) if state.step else None
    if model is None:
        return
    scratch = folder / ".export"
    shutil.rmtree(scratch, ignore_errors=True)
    export.write(scratch, model, export.origin(config, folder), change=config.recipe.lora)
    shutil.rmtree(folder / "export", ignore_errors=True)
    scratch.rename(folder / "export")


def _lineage(config: TrainConfig) -> dict[str, Any]:
    if config.init_from is None:
        return {"parent": None, "overrides": config.overrides}
    parent = parents.load_parent(config.init_from, weights=config.init_weights)
    handed = {"path": parent.path, "weights": parent.weights, "step": parent.step, "sha256": parent.weights_hash, "licence": parent.licence}
    reset = ["optimizer", "ema", "learning-rate schedule", "step"]
    kinds = (parent.networks.prediction_type, config.networks.prediction_type)
    changed = {"prediction_type": kinds} if len(set(kinds)) > 1 else {}
    return {"parent": handed, "reset": reset, "changed": changed, "overrides": config.overrides}
