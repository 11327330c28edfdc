"""What a training does, read from its run folder alone: a status line, and a panel that follows it and can stop it."""

from __future__ import annotations

import html
import io
import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets
from filelock import FileLock, Timeout
from PIL import Image

from sdlab import plots, presets, runs
from sdlab.config import ConfigError, TrainConfig, near_path, resolve_path

EVERY_S = 3.0
"""Seconds between two looks at a run folder."""
BAR_STYLES = {"done": "success", "stopped": "warning", "failed": "danger"}
RED = "#b00020"


def status_line(run_dir: str | Path) -> str:
    """Where a training stands, in a line: samples and steps, rate, time left while it runs, device-hours and state.

    Raises:
        ConfigError: `run_dir` is no run folder, or its config is damaged.
    """
    return str(_look(resolve_path(run_dir)))


def loss_curve(run_dir: str | Path) -> plots.Picture:
    """The loss curve of a run folder.

    Raises:
        ConfigError: `run_dir` is no run folder, or its config is damaged.
    """
    folder = resolve_path(run_dir)
    config = runs.read_config(folder)
    timesteps = config.networks.noise_schedule.num_train_timesteps
    return plots.loss_curve(runs.read_metrics(folder), f"Training loss of {_label(config)}", num_train_timesteps=timesteps)


def watch(run_dir: str | Path, *, every_s: float = EVERY_S) -> RunPanel:
    """A panel that follows a training of any process until it ends or the panel is closed, with a button that stops the training.

    Args:
        run_dir: the run folder.
        every_s: seconds between two looks at it.

    Raises:
        ConfigError: `run_dir` is no run folder, or its config is damaged.
    """
    folder = resolve_path(run_dir)
    runs.read_config(folder)
    return RunPanel(folder, every_s)


@dataclass(frozen=True)
class _Progress:
    """What the files of a run folder say about a training."""

    config: TrainConfig
    step: int
    samples_per_second: float
    device_hours: float
    state: str
    """As in `result.json`, or "running" or "not running"; or why that is not known."""
    stopping: bool
    error: str | None

    @property
    def samples_seen(self) -> int:
        return self.step * self.config.recipe.global_batch_size

    @property
    def samples_wanted(self) -> int:
        return self.config.max_steps * self.config.recipe.global_batch_size

    def __str__(self) -> str:
        samples = f"{self.samples_seen:,} of {self.samples_wanted:,} samples"
        parts = [f"{self.config.stage}: {samples} (step {self.step:,} of {self.config.max_steps:,})"]
        if self.samples_per_second > 0:
            parts.append(f"{self.samples_per_second:,.{0 if self.samples_per_second >= 10 else 2}f} samples/s")
        if self.samples_per_second > 0 and self.state == "running" and not self.stopping:
            parts.append(f"about {_clock((self.samples_wanted - self.samples_seen) / self.samples_per_second)} left")
        parts.append(f"{self.device_hours:,.3f} device-hours")
        state = "stopping after this step" if self.stopping else self.state
        return ", ".join([*parts, f"{state}: {self.error}" if self.error else state])


def _look(folder: Path) -> _Progress:
    config, rows, result = runs.read_config(folder), runs.read_metrics(folder), _read_result(folder)
    last, state = rows[-1] if rows else {}, result["status"] if result else _state(folder)
    return _Progress(
        config=config,
        step=(result or last).get("step") or 0,
        samples_per_second=last.get("samples_per_second") or 0.0,
        device_hours=_device_hours(config, rows, result or {}),
        state=state,
        stopping=state == "running" and runs.stop_requested(folder),
        error=result.get("error") if result else None,
    )


def _read_result(folder: Path) -> dict[str, Any] | None:
    """The content of `result.json`, or None while there is none or only a part of one."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return result if isinstance(result, dict) and "status" in result else None


def _state(folder: Path) -> str:
    """Whether the lock of a run folder is held, in words."""
    lock = folder / runs.LOCK
    try:
        return "running" if lock.exists() and _is_held(lock) else "not running"
    except OSError as error:
        return f"not known to be running or not ({error})"


def _is_held(lock: Path) -> bool:
    probe = FileLock(lock)
    try:
        probe.acquire(timeout=0)
    except Timeout:
        return True
    probe.release()
    return False


def _device_hours(config: TrainConfig, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> float:
    """Hours of all devices as logged last, else from `elapsed_s`, which starts again at zero in each process that takes up the run."""
    logged = [row["device_hours"] for row in (*rows[-1:], result) if row.get("device_hours") is not None]
    if logged:
        return float(logged[-1])
    elapsed = [0.0, *(row.get("elapsed_s") or 0.0 for row in rows)]
    return config.world_size * sum(now - before if now >= before else now for before, now in itertools.pairwise(elapsed)) / 3600


def _clock(seconds: float) -> str:
    """A duration as hours, minutes and seconds, rounded up: "0:38", "1:02:03"."""
    minutes, rest = divmod(max(0, math.ceil(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _label(config: TrainConfig) -> str:
    return presets.label(config.preset, config.stage, config.overrides)


class RunPanel(ipywidgets.VBox):
    """A bar, a status line, the loss curve, the newest preview and a Stop button of one run folder; made by `watch`.

    One daemon thread looks at the folder, and a part of the panel changes only when the files that it shows do.
    """

    def __init__(self, folder: Path, every_s: float) -> None:
        self.folder, self.every_s = folder, every_s
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._shown: dict[str, object] = {}
        self._errors: dict[str, str] = {}
        self._make_parts()
        top = ipywidgets.HBox([self.bar, self.stop_button])
        pictures = ipywidgets.HBox([self.curve, self.preview], layout={"flex_flow": "row wrap"})
        super().__init__([self._title(), top, self.status, self.errors, pictures])
        self.refresh()
        self._worker = threading.Thread(target=self._work, daemon=True)
        self._worker.start()

    def _make_parts(self) -> None:
        self.bar = ipywidgets.IntProgress(layout={"width": "420px"})
        self.stop_button = ipywidgets.Button(description="Stop", disabled=True, tooltip="stop after the present step, with a checkpoint")
        self.stop_button.on_click(self.stop)
        self.status, self.errors, self.captions = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self.curve = ipywidgets.Image(format="png", layout={"max_width": "100%"})
        self.preview_title = ipywidgets.HTML()
        self.preview_image = ipywidgets.Image(format="png", layout={"max_width": "100%", "object_fit": "contain"})
        self.preview = ipywidgets.VBox([self.preview_title, self.preview_image, self.captions], layout={"display": "none"})

    def _title(self) -> ipywidgets.HTML:
        return ipywidgets.HTML(f"<b>{html.escape(near_path(self.folder))}</b>")

    def stop(self, _: object = None) -> None:
        """Ask the training to stop after the present step; it saves a checkpoint first."""
        with self._lock:
            self._attempt("stop", (self.folder / "stop").touch)
            self._refresh()

    def close(self) -> None:
        """Take the panel away and end its thread; the training goes on."""
        self._ended.set()
        super().close()

    def wait(self, timeout: float = 60) -> None:
        """Wait until nothing is followed any more, at most `timeout` seconds."""
        self._worker.join(timeout)

    def _work(self) -> None:
        while not self._ended.wait(self.every_s):
            self.refresh()

    def refresh(self) -> None:
        """Look at the folder once; what cannot be read is said in the panel and tried again the next time."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        for name, update in (("status", self._show_status), ("curve", self._show_curve), ("preview", self._show_preview)):
            self._attempt(name, update)
        self.errors.value = "<br>".join(f'<span style="color: {RED}">{html.escape(text)}</span>' for text in self._errors.values())

    def _attempt(self, name: str, action: Callable[[], object]) -> None:
        try:
            action()
        except ConfigError as error:
            self._errors[name] = str(error)
        except Exception as error:
            self._errors[name] = f"{name}: {type(error).__name__}: {error}"
        else:
            self._errors.pop(name, None)

    def _show_status(self) -> None:
        files = [self.folder / name for name in ("config.json", runs.METRICS, "result.json", "stop")]
        mark = (_state(self.folder), *map(_mark, files))
        if mark == self._shown.get("status"):
            return
        seen = _look(self.folder)
        self.bar.max, self.bar.value = seen.samples_wanted, seen.samples_seen
        self.bar.bar_style = BAR_STYLES.get(seen.state, "")
        self.stop_button.disabled = seen.state != "running" or seen.stopping
        self.status.value = html.escape(str(seen))
        self._shown["status"] = mark
        if _read_result(self.folder) is not None:
            self._ended.set()

    def _show_curve(self) -> None:
        mark = (_mark(self.folder / "config.json"), _mark(self.folder / runs.METRICS))
        if mark != self._shown.get("curve"):
            self.curve.value = loss_curve(self.folder)._repr_png_()
            self._shown["curve"] = mark

    def _show_preview(self) -> None:
        newest, captions = _newest_preview(self.folder), self.folder / "previews" / "captions.json"
        mark = (newest, newest and _mark(newest[1]), _mark(captions))
        if newest is None or mark == self._shown.get("preview"):
            return
        self.preview_image.value = _whole_png(newest[1])
        self.preview_title.value = f"preview after step {newest[0]:,}"
        self.preview.layout.display = ""
        self.captions.value = _caption_list(captions)
        self._shown["preview"] = mark


def _mark(path: Path) -> tuple[int, int] | None:
    """What tells the present content of a file apart from a later one; None where there is no file."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return about.st_mtime_ns, about.st_size


def _newest_preview(folder: Path) -> tuple[int, Path] | None:
    """The step and the path of the newest `previews/step-XXXXXXXX.png`."""
    found = ((re.fullmatch(r"step-(\d+)\.png", path.name), path) for path in (folder / "previews").glob("*.png"))
    return max(((int(match[1]), path) for match, path in found if match), default=None)


def _whole_png(path: Path) -> bytes:
    """The content of a picture file.

    Raises:
        ConfigError: it is not whole, or not yet.
    """
    content = path.read_bytes()
    try:
        Image.open(io.BytesIO(content)).load()
    except (OSError, SyntaxError) as error:
        raise ConfigError(f"{path} cannot be read, or not yet: {error}") from None
    return content


def _caption_list(path: Path) -> str:
    """The captions in a file as an HTML list, or nothing where there is no file.

    Raises:
        ConfigError: it holds no list of texts, or not yet.
    """
    if not path.exists():
        return ""
    try:
        captions = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read, or not yet: {error}") from None
    if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
        raise ConfigError(f"{path} holds no list of texts")
    return "<ol>" + "".join(f"<li>{html.escape(caption)}</li>" for caption in captions) + "</ol>"
