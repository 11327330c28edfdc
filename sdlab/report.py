"""What is seen of a run while it goes on: rows of metrics, a bar with rate, ETA and cost, and the result at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdlab import launch, runs
from sdlab.config import TrainConfig

MEASURED_STEPS = 5
"""Steps after the first one that the expected time is told from."""
SCALARS = ("loss", "val_loss", "learning_rate", "grad_norm", "samples_per_second")
"""What TensorBoard is told."""
Rows = Sequence[Mapping[str, Any]]
OnRows = Callable[[Rows], None]


@dataclass(frozen=True)
class Outcome:
    """What one step has shown, over all ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    dropped: float
    skipped: bool
    stop: bool


class Report:
    """Rows of metrics, a bar in samples with rate, ETA and cost, and the result; on the first rank."""

    def __init__(self, config: TrainConfig, folder: Path, step: int, *, shown: bool, follow: Callable[[], None]) -> None:
        self.config, self.folder, self.size, self.follow = config, folder, config.recipe.global_batch_size, follow
        self.first_step = self.last_step = step
        self.started = self.last_time = self.measured = time.monotonic()
        self.spent = _device_hours(runs.read_metrics(folder))
        self.dropped = 0.0
        self.unwritten: list[Mapping[str, Any]] = []
        self.bar: Any = None
        self.writer: Any = None
        if shown:
            self.bar = launch.progress(total=config.max_steps * self.size, initial=step * self.size, title=config.stage, unit=" samples")
            self.writer = _tensorboard(config, folder, step)

    def __call__(self, step: int, outcome: Outcome, losses: list[float | None] | None) -> None:
        if self.bar is None:
            return
        self.bar.update(self.size)
        self.dropped += outcome.dropped
        self._expect(step)
        last = outcome.stop or step == self.config.max_steps
        if step % self.config.log_every == 0 or last or losses or outcome.skipped:
            self._write(step, outcome, losses)
        self.follow()

    def _write(self, step: int, outcome: Outcome, losses: list[float | None] | None) -> None:
        now, samples = time.monotonic(), (step - self.last_step) * self.size
        row: dict[str, Any] = {
            "step": step,
            "samples_seen": step * self.size,
            "loss": outcome.loss if math.isfinite(outcome.loss) else None,
            "learning_rate": outcome.learning_rate,
            "grad_norm": outcome.grad_norm if math.isfinite(outcome.grad_norm) else None,
            "caption_drop_rate": self.dropped / samples,
            "samples_per_second": samples / (now - self.last_time),
            "elapsed_s": now - self.started,
            "device_hours": self.spent + self._hours(now),
        }
        if outcome.skipped:
            row["skipped"] = True
        if losses:
            known = [loss for loss in losses if loss is not None]
            row |= {"val_loss": sum(known) / len(known), "val_loss_quartiles": losses}
        self._append(row)
        for name in SCALARS if self.writer is not None else ():
            if row.get(name) is not None:
                self.writer.add_scalar(name, row[name], step)
        self.bar.set_postfix_str(f"loss={outcome.loss:.4f}, {row['device_hours']:.3g} device-hours", refresh=False)
        self.last_step, self.last_time, self.dropped = step, now, 0.0

    def _append(self, row: Mapping[str, Any]) -> None:
        """Write a row, or keep it for the next time where the disk is full: the next checkpoint stops the run in order."""
        self.unwritten.append(row)
        try:
            while self.unwritten:
                runs.append_metrics(self.folder, self.unwritten[0])
                self.unwritten.pop(0)
        except OSError as error:
            self.bar.write(f"metrics of step {row['step']} cannot be written: {error}")

    def _expect(self, step: int) -> None:
        """Say what the rest will take, once a few steps have been measured; the first is left out, since it is slower."""
        done, now = step - self.first_step, time.monotonic()
        if done == 1:
            self.measured = now
        if done == 1 + MEASURED_STEPS and step < self.config.max_steps:
            left = (self.config.max_steps - step) * (now - self.measured) / MEASURED_STEPS
            hours = left * self.config.world_size / 3600
            self.bar.write(f"{self.config.max_steps - step:,} steps to go: about {_clock(left)}, {hours:.3g} device-hours")

    def _hours(self, now: float) -> float:
        return (now - self.started) * self.config.world_size / 3600

    def close(self) -> None:
        """Leave the bar as it is."""
        if self.bar is not None:
            self.bar.close()
        if self.writer is not None:
            self.writer.close()

    def result(self, status: str, step: int, *, error: str) -> dict[str, Any]:
        """Write `result.json`, and return what it holds."""
        self.close()
        rows = runs.read_metrics(self.folder)
        result = {
            "status": status,
            "step": step,
            "max_steps": self.config.max_steps,
            "samples_seen": step * self.size,
            "loss": rows[-1]["loss"] if rows else None,
            "elapsed_s": round(time.monotonic() - self.started, 3),
            "device_hours": round(self.spent + self._hours(time.monotonic()), 6),
            "run_dir": str(self.folder),
            "export": str(self.folder / "export") if not error and step else None,
            "error": error or None,
        }
        runs.write_json(self.folder / "result.json", result)
        return result


def _device_hours(rows: Rows) -> float:
    return float(rows[-1].get("device_hours", 0.0)) if rows else 0.0


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def _tensorboard(config: TrainConfig, folder: Path, step: int) -> Any:
    if not config.tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)


class Follow:
    """Hands on the rows of metrics whenever there are new ones."""

    def __init__(self, folder: Path, on_rows: OnRows) -> None:
        self.path, self.on_rows, self.seen = folder / "metrics.jsonl", on_rows, 0

    def __call__(self) -> None:
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size != self.seen:
            self.seen = size
            try:
                self.on_rows(runs.read_metrics(self.path.parent))
            except Exception as error:
                print(f"metrics cannot be shown: {type(error).__name__}: {error}")
