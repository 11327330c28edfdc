"""What a person clicks: a panel that draws again whenever a knob is turned, and one that watches a training."""

from __future__ import annotations

import html
import io
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ipywidgets
import numpy as np
from IPython.core.getipython import get_ipython
from PIL import Image

from sdlab import diffusion, models, plots, sample, solvers
from sdlab.config import ConfigError
from sdlab.watch import RunPanel, loss_curve, status_line, watch

Interactive = Literal["auto"] | bool
MOST_PICTURES = 16
COLUMNS = 4
KNOB_WIDTH = "270px"


def interactive_wanted(interactive: Interactive) -> bool:
    """Whether to show what can be clicked; "auto" says yes where a person is at the other end of a notebook's kernel.

    JupyterLab and its like let a cell ask for input; papermill and nbconvert do not, and a script has no kernel.
    """
    if interactive != "auto":
        return interactive
    kernel = getattr(get_ipython(), "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", False)) and not os.environ.get("SDLAB_HEADLESS")


@dataclass(frozen=True)
class Request:
    """What the panel is asked to draw: `pictures` of one prompt, with seeds from `seed` up."""

    prompt: str
    negative_prompt: str = ""
    guidance_scale: float = 2.0
    solver: str = "dpmpp_2m"
    num_inference_steps: int = 10
    seed: int = 0
    pictures: int = 8

    def __str__(self) -> str:
        evaluations = solvers.evaluations(self.solver, self.num_inference_steps)
        seeds = f"seed {self.seed}" if self.pictures == 1 else f"seeds {self.seed} to {self.seed + self.pictures - 1}"
        steps = f"{self.num_inference_steps} step{'s' if self.num_inference_steps > 1 else ''}"
        negative = f", away from \u201c{self.negative_prompt}\u201d" if self.negative_prompt else ""
        return (
            f"\u201c{self.prompt}\u201d{negative}: guidance {self.guidance_scale:g}, {self.solver}, {steps} "
            f"({evaluations} UNet evaluation{'s' if evaluations > 1 else ''}), {seeds}"
        )


def panel(model: models.TextToImage, request: Request, *, guidance: sample.Guidance = diffusion.constant_guidance) -> Panel:
    """A panel that starts with `request`, drawn in the background; every knob turned draws again, and the last request wins.

    Args:
        model: what draws.
        request: where the knobs stand at first.
        guidance: one's own guidance function, if wanted.

    Raises:
        ConfigError: the solver or the number of steps of `request` cannot be used.
    """
    solvers.check(request.solver, request.num_inference_steps, num_train_timesteps=model.networks.noise_schedule.num_train_timesteps)
    made = Panel(model, request, guidance)
    made.draw()
    return made


def panel_or_grid(
    model: models.TextToImage, request: Request, *, interactive: Interactive, guidance: sample.Guidance = diffusion.constant_guidance
) -> Panel | Image.Image:
    """The panel where somebody can click, else the picture that it would show first, with a printed line that says what it is.

    Raises:
        ConfigError: as `panel` or `sample.sample`.
    """
    if interactive_wanted(interactive):
        return panel(model, request, guidance=guidance)
    print(request)
    return sample.tile(_draw(model, request, guidance), columns=COLUMNS)


def watch_or_picture(run_dir: str | Path, *, interactive: Interactive = "auto") -> RunPanel | plots.Picture:
    """The panel of `watch` where somebody can click, else the loss curve, with a printed line that says how far the training is.

    Raises:
        ConfigError: `run_dir` is no run folder, or its config is damaged.
    """
    if interactive_wanted(interactive):
        return watch(run_dir)
    print(status_line(run_dir))
    return loss_curve(run_dir)


def _draw(
    model: models.TextToImage, request: Request, guidance: sample.Guidance, on_evaluation: sample.OnEvaluation | None = None
) -> np.ndarray:
    return sample.sample(
        model,
        [request.prompt] * request.pictures,
        guidance_scale=request.guidance_scale,
        seeds=range(request.seed, request.seed + request.pictures),
        solver=request.solver,
        num_inference_steps=request.num_inference_steps,
        negative_prompt=request.negative_prompt,
        batch_size=request.pictures,
        guidance=guidance,
        on_evaluation=on_evaluation,
    )


class _Dropped(Exception):
    """The drawing in progress is not wanted any more."""


class Panel(ipywidgets.VBox):
    """Knobs, a status line and a picture; made by `panel`.

    Events only note what is wanted and one worker thread draws, because a kernel delivers events on several threads, also while cells run.
    """

    def __init__(self, model: models.TextToImage, request: Request, guidance: sample.Guidance) -> None:
        self.model, self.guidance = model, guidance
        self._lock = threading.Lock()
        self._wanted: Request | None = None
        self._running: Request | None = None
        self._worker: threading.Thread | None = None
        self._stopped = False
        self._make_knobs(request)
        self.draw_button = ipywidgets.Button(description="Draw", button_style="primary", layout={"width": "auto", "flex": "1"})
        self.stop_button = ipywidgets.Button(description="Stop", disabled=True, layout={"width": "auto", "flex": "1"})
        self.status = ipywidgets.HTML()
        self.picture = ipywidgets.Image(value=_png(Image.new("RGB", (524, 260), "white")), format="png", layout={"max_width": "100%"})
        self.draw_button.on_click(self.draw)
        self.stop_button.on_click(self.stop)
        for knob in self.knobs.values():
            knob.observe(self.draw, names="value")
        super().__init__([self._title(), *self._arranged()])

    def _make_knobs(self, request: Request) -> None:
        wide = {"style": {"description_width": "110px"}, "layout": {"width": "auto"}}
        narrow = {"style": {"description_width": "70px"}, "layout": {"width": KNOB_WIDTH}}
        late = {"continuous_update": False}
        most_steps = min(100, self.model.networks.noise_schedule.num_train_timesteps)
        scale, steps = request.guidance_scale, request.num_inference_steps
        self.knobs: dict[str, ipywidgets.ValueWidget] = {
            "prompt": ipywidgets.Text(request.prompt, description="prompt", **wide, **late),
            "negative_prompt": ipywidgets.Text(request.negative_prompt, description="negative prompt", **wide, **late),
            "guidance_scale": ipywidgets.FloatSlider(scale, min=0, max=max(10, scale), step=0.1, description="guidance", **narrow, **late),
            "num_inference_steps": ipywidgets.IntSlider(steps, min=1, max=max(most_steps, steps), description="steps", **narrow, **late),
            "solver": ipywidgets.Dropdown(options=list(solvers.SOLVERS), value=request.solver, description="solver", **narrow),
            "seed": ipywidgets.BoundedIntText(request.seed, min=0, max=2**31 - 1, description="seed", **narrow, **late),
            "pictures": ipywidgets.BoundedIntText(request.pictures, min=1, max=MOST_PICTURES, description="pictures", **narrow, **late),
        }

    def _title(self) -> ipywidgets.HTML:
        model = self.model
        about = f"{model.name}, {model.weights} weights after {model.step} steps, {model.resolution} x {model.resolution} pixels"
        return ipywidgets.HTML(f"<b>{html.escape(about)}</b>")

    def _arranged(self) -> list[ipywidgets.Widget]:
        prompt, negative_prompt, *others = self.knobs.values()
        buttons = ipywidgets.HBox([self.draw_button, self.stop_button], layout={"width": KNOB_WIDTH})
        left = ipywidgets.VBox([*others, buttons], layout={"flex": "0 0 auto", "margin": "0 12px 0 0"})
        return [prompt, negative_prompt, self.status, ipywidgets.HBox([left, self.picture], layout={"flex_flow": "row wrap"})]

    @property
    def request(self) -> Request:
        """What the knobs say now."""
        values = {name: knob.value for name, knob in self.knobs.items()}
        return Request(**{**values, "guidance_scale": round(values["guidance_scale"], 2)})

    def draw(self, _: object = None) -> None:
        """Ask for what the knobs say; a drawing in progress of anything else is dropped."""
        with self._lock:
            if self.request == self._running and self._wanted is None and not self._stopped:
                return
            self._wanted, self._stopped = self.request, False
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, daemon=True)
                self._worker.start()

    def stop(self, _: object = None) -> None:
        """Drop the drawing in progress and what waits; the last picture stays."""
        with self._lock:
            self._wanted, self._stopped = None, True

    def wait(self, timeout: float = 60) -> None:
        """Wait for the drawing in progress, at most `timeout` seconds."""
        worker = self._worker
        if worker is not None:
            worker.join(timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._running, self._wanted = self._wanted, None
                if self._running is None:
                    self._worker = None
                    self.stop_button.disabled = True
                    return
                request = self._running
            self.stop_button.disabled = False
            self._attempt(request)

    def _attempt(self, request: Request) -> None:
        start = time.perf_counter()
        try:
            images = _draw(self.model, request, self.guidance, self._before_evaluation)
            self.picture.value = _png(sample.tile(images, columns=COLUMNS))
            self._say(f"{request}; {time.perf_counter() - start:.2f} s")
        except _Dropped:
            self._say("stopped")
        except ConfigError as error:
            self._say(str(error), colour="#b00020")
        except Exception as error:
            self._say(f"{type(error).__name__}: {error}", colour="#b00020")

    def _before_evaluation(self, done: int, total: int) -> None:
        if self._stopped or self._wanted is not None:
            raise _Dropped
        self._say(f"drawing: UNet evaluation {done + 1} of {total}")

    def _say(self, text: str, colour: str = "inherit") -> None:
        self.status.value = f'<span style="color: {colour}">{html.escape(text)}</span>'


def _png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "png")
    return buffer.getvalue()
