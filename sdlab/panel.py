"""A panel that draws again whenever a knob is turned: knobs, a gallery, recall of earlier draws, pictures saved with their settings."""

from __future__ import annotations

import html
import itertools
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets

from sdlab import drawing, models, solvers
from sdlab.config import ConfigError, near_path, resolve_path
from sdlab.gallery import Checkpoint, Drawn, Gallery, Request, finish, images_of, quoted
from sdlab.guidance import CONSTANT, Combine, Guidance, read

Load = Callable[[Checkpoint], models.TextToImage]
MOST_PICTURES, MOST_SEED, MOST_DRAWS = 16, 2**53 - 1, 20
COLUMNS = 4
PAUSE_S = 0.2
"""Seconds without a further move after which a turned knob draws."""
FOLDER = "papermill_runs/out/panel"
RED = "var(--jp-error-color1, #b00020)"
_WIDE = {"style": {"description_width": "110px"}, "layout": {"width": "auto"}}
_NARROW = {"style": {"description_width": "85px"}, "layout": {"width": "290px"}}


class _Dropped(Exception):
    """The drawing in progress is not wanted any more."""


class Panel(ipywidgets.VBox):
    """Knobs, a status line and a gallery; the first draw starts when it is made.

    Events only note what is wanted and one worker thread draws, because a kernel delivers events on several threads, also while cells run.
    """

    def __init__(
        self,
        model: models.TextToImage,
        request: Request,
        *,
        guidance: Guidance | Combine | str = CONSTANT,
        checkpoints: Sequence[Checkpoint] = ("latest",),
        load: Load | None = None,
        folder: str | Path = FOLDER,
    ) -> None:
        """Draw `request` in the background; every knob turned draws again, and the last request wins.

        Args:
            model: what draws.
            request: where the knobs stand at first.
            guidance: as `sdlab.guidance` has it: a name, or one's own function.
            checkpoints: what can be chosen besides the request's own.
            load: loads one of them; the last two stay loaded.
            folder: where pictures are saved.

        Raises:
            ConfigError: a guidance that is none, or a value of `request` that no knob can show.
        """
        self.guidance, self.folder = read(guidance), resolve_path(folder)
        offered = list(dict.fromkeys([*([] if request.checkpoint in checkpoints else [request.checkpoint]), *checkpoints]))
        _check(model, request, self.guidance, offered, load)
        self._asked, self._load, self._models = request, load, {request.checkpoint: model}
        self._changed = threading.Condition()
        self._due: float | None = None
        self._running: Request | None = None
        self._answered: Request | None = None
        self._dropped = self._own = False
        self._worker: threading.Thread | None = None
        self._shown: Drawn | None = None
        self._draws: dict[int, Drawn] = {}
        self._numbers = itertools.count(1)
        self._make_knobs(model, request, offered)
        self._make_parts()
        self._name(model.name, model.weights, model.step, (model.resolution, model.resolution))
        super().__init__(self._arranged())
        self._connect()
        self.draw()

    def _make_knobs(self, model: models.TextToImage, request: Request, offered: Sequence[Checkpoint]) -> None:
        late: dict[str, Any] = {"continuous_update": False}
        steps, most_steps = request.num_inference_steps, min(100, model.networks.noise_schedule.num_train_timesteps)
        first, second = request.guidance_scale, request.compare_scale
        second = (min(2.0, self.guidance.largest / 2) if first == 1 else 1.0) if second is None else second
        scale: dict[str, Any] = {"min": 0, "max": max(min(10, self.guidance.largest), first, second), "step": 0.1, **_NARROW, **late}
        names = [(f"step {one}" if isinstance(one, int) else str(one), one) for one in offered]
        self.knobs: dict[str, ipywidgets.ValueWidget] = {
            "prompt": ipywidgets.Text(request.prompt, description="prompt", **_WIDE, **late),
            "negative_prompt": ipywidgets.Text(request.negative_prompt, description="negative prompt", **_WIDE, **late),
            "guidance_scale": ipywidgets.FloatSlider(first, description="guidance", readout_format=".1f", **scale),
            "compare": ipywidgets.Checkbox(request.compare_scale is not None, description="compare with", **_NARROW),
            "compare_scale": ipywidgets.FloatSlider(second, description="guidance", readout_format=".1f", **scale),
            "num_inference_steps": ipywidgets.IntSlider(steps, 1, max(most_steps, steps), description="steps", **_NARROW, **late),
            "solver": ipywidgets.Dropdown(options=list(solvers.SOLVERS), value=request.solver, description="solver", **_NARROW),
            "seed": ipywidgets.BoundedIntText(request.seed, max=MOST_SEED, description="seed", **_NARROW, **late),
            "pictures": ipywidgets.BoundedIntText(request.pictures, 1, MOST_PICTURES, description="pictures", **_NARROW, **late),
            "checkpoint": ipywidgets.Dropdown(options=names, value=request.checkpoint, description="checkpoint", **_NARROW),
        }

    def _make_parts(self) -> None:
        button = partial(ipywidgets.Button, layout={"width": "auto", "flex": "1"})
        self.reroll_button = ipywidgets.Button(description="Re-roll", tooltip="another seed at random", layout={"width": "76px"})
        self.draw_button = button(description="Draw", button_style="primary", tooltip="draw what the knobs say, at once")
        self.stop_button = button(description="Stop", disabled=True, tooltip="drop the drawing in progress")
        how = "with their settings inside; click a picture to save it alone"
        self.save_button = ipywidgets.Button(description="Save PNG", tooltip=how, layout={"width": "max-content", "margin": "0 4px"})
        self.earlier = ipywidgets.Dropdown(options=[], description="earlier", tooltip="earlier draws, with their knobs", **_NARROW)
        self.bar = ipywidgets.IntProgress(layout={"width": "auto", "height": "12px", "visibility": "hidden"})
        self.title, self.status, self.saved = ipywidgets.HTML(), ipywidgets.HTML(), ipywidgets.HTML()
        self.gallery = Gallery(columns=COLUMNS)

    def _arranged(self) -> list[ipywidgets.Widget]:
        knobs = dict(self.knobs)
        prompts = [knobs.pop("prompt"), knobs.pop("negative_prompt")]
        self.knobs["seed"].layout.width, row = "208px", {"width": "294px"}
        knobs["seed"] = ipywidgets.HBox([self.knobs["seed"], self.reroll_button], layout=row)
        buttons = [ipywidgets.HBox([self.draw_button, self.stop_button], layout=row)]
        left = ipywidgets.VBox([*knobs.values(), self.earlier, *buttons], layout={"flex": "0 0 auto", "margin": "0 12px 0 0"})
        right = ipywidgets.VBox([self.gallery, self.save_button, self.saved], layout={"flex": "1 1 540px", "min_width": "0"})
        below = ipywidgets.HBox([left, right], layout={"flex_flow": "row wrap"})
        self._hide_unused()
        return [self.title, *prompts, self.bar, self.status, below]

    def _hide_unused(self, _: object = None) -> None:
        knobs = self.knobs
        knobs["compare_scale"].layout.display = "" if knobs["compare"].value else "none"
        knobs["checkpoint"].layout.display = "" if len(knobs["checkpoint"].options) > 1 else "none"

    def _connect(self) -> None:
        self.draw_button.on_click(self.draw)
        self.stop_button.on_click(self.stop)
        self.save_button.on_click(lambda _: self._guarded(self._save))
        self.reroll_button.on_click(self._reroll)
        self.earlier.observe(partial(self._guarded, self._recall), names="value")
        self.gallery.observe(self._name_save, names="selected")
        self.knobs["compare"].observe(self._hide_unused, names="value")
        for knob in self.knobs.values():
            knob.observe(self._turned, names="value")

    # What events note

    @property
    def request(self) -> Request:
        """What the knobs say now."""
        values = {name: round(knob.value, 2) if "scale" in name else knob.value for name, knob in self.knobs.items()}
        compared = values.pop("compare")
        return replace(self._asked, **{**values, "compare_scale": values["compare_scale"] if compared else None})

    def draw(self, _: object = None) -> None:
        """Draw what the knobs say, at once; a drawing in progress of anything else is dropped."""
        with self._changed:
            self._answered = None
            self._ask(pause=0.0)

    def stop(self, _: object = None) -> None:
        """Drop the drawing in progress and what waits; the last pictures stay."""
        with self._changed:
            if self._worker is not None:
                self._drop()
                self._say("stopped")

    def wait(self, timeout: float = 60) -> None:
        """Wait until nothing is wanted or drawn any more, at most `timeout` seconds."""
        worker = self._worker
        if worker is not None:
            worker.join(timeout)

    def _turned(self, _: object) -> None:
        with self._changed:
            if not self._own:
                self._ask(pause=PAUSE_S)

    def _ask(self, *, pause: float) -> None:
        if self.request == self._running and not self._dropped:
            return
        self._drop()
        self._due = time.monotonic() + pause
        self.earlier.value, self.stop_button.disabled = None, False
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, daemon=True)
            self._worker.start()

    def _drop(self) -> None:
        self._dropped, self._due = True, None
        self._changed.notify_all()

    def _reroll(self, _: object) -> None:
        self.knobs["seed"].value = secrets.randbelow(2**31)

    def _recall(self, change: dict[str, Any]) -> None:
        with self._changed:
            drawn = self._draws.get(change["new"])
            if drawn is not None and not self._own:
                self._drop()
                self._turn_to(drawn.request)
                self._show(drawn)

    def _turn_to(self, request: Request) -> None:
        values = {**asdict(request), "compare": request.compare_scale is not None}
        with self._own_moves():
            for name, knob in self.knobs.items():
                if values[name] is not None:
                    knob.value = values[name]

    @contextmanager
    def _own_moves(self) -> Iterator[None]:
        """What is moved in here is no event; events of other threads wait."""
        with self._changed:
            self._own = True
            try:
                yield
            finally:
                self._own = False

    # What the worker does

    def _work(self) -> None:
        while (request := self._next()) is not None:
            self._guarded(self._serve, request)

    def _next(self) -> Request | None:
        with self._changed:
            while self._due is not None and (left := self._due - time.monotonic()) > 0:
                self._changed.wait(left)
            self._running = None if self._due is None else self.request
            self._due, self._dropped = None, False
            if self._running is None:
                self._worker, self.stop_button.disabled, self.bar.layout.visibility = None, True, "hidden"
            return self._running

    def _serve(self, request: Request) -> None:
        if request == self._answered and self._shown is not None:
            return self._show(self._shown)
        self._say("drawing")
        model, start = self._model_of(request.checkpoint), time.perf_counter()
        images = images_of(model, request, guidance=self.guidance, on_evaluation=partial(self._before_evaluation, start))
        self._keep(finish(model, request, guidance=self.guidance, images=images, seconds=time.perf_counter() - start))

    def _model_of(self, checkpoint: Checkpoint) -> models.TextToImage:
        """The model of a checkpoint, which is loaded unless it is one of the two used last."""
        if checkpoint not in self._models and self._load is not None:
            self._say(f"loading checkpoint {checkpoint}")
            self._models = dict(list(self._models.items())[-1:])
            self._models[checkpoint] = self._load(checkpoint)
        self._models[checkpoint] = self._models.pop(checkpoint)
        return self._models[checkpoint]

    def _before_evaluation(self, start: float, done: int, total: int) -> None:
        with self._changed:
            if self._dropped:
                raise _Dropped
            total = max(total, done + 1)
            self.bar.max, self.bar.value, self.bar.layout.visibility = total, done, "visible"
            left = (time.perf_counter() - start) / max(1, done) * (total - done)
            about = f", about {left:.{0 if left >= 10 else 1}f} s left" if done else ""
            self._say(f"drawing: UNet evaluation {done + 1} of {total}{about}")

    def _keep(self, drawn: Drawn) -> None:
        with self._own_moves():
            if self._dropped:
                raise _Dropped
            others = [(number, draw) for number, draw in self._draws.items() if draw.request != drawn.request]
            self._draws = {**dict(others[1 - MOST_DRAWS :]), next(self._numbers): drawn}
            self.earlier.options = [(_label(number, draw.request), number) for number, draw in reversed(self._draws.items())]
            self._show(drawn)

    # What is shown

    def _show(self, drawn: Drawn) -> None:
        with self._own_moves(), self.gallery.hold_sync():
            alike = self._shown is not None and [its.seed for its in self._shown.settings] == [its.seed for its in drawn.settings]
            self._shown, self._answered = drawn, drawn.request
            self.gallery.pictures, self.gallery.captions = drawn.pngs, drawn.request.captions
            self.gallery.selected = self.gallery.selected if alike else -1
            self._name_save()
            self.earlier.value = next(number for number, draw in self._draws.items() if draw is drawn)
            its = drawn.settings[0]
            self._name(its.model, its.weights, its.step, (its.width, its.height))
            self._say(f"{drawn.request}; {drawn.seconds:.2f} s", drawn.note)

    def _name(self, name: str, weights: str, step: int, size: tuple[int, int]) -> None:
        about = f"{near_path(name)}, {weights} weights after {step} steps, {size[0]} x {size[1]} pixels"
        self.title.value = f"<b>{html.escape(about)}</b>"

    def _name_save(self, _: object = None) -> None:
        captions, selected = self.gallery.captions, self.gallery.selected
        self.save_button.description = f"Save PNG: {captions[selected]}" if 0 <= selected < len(captions) else "Save PNG"

    def _save(self) -> None:
        drawn, selected = self._shown, self.gallery.selected
        if drawn is None:
            raise ConfigError("there is no picture to save yet")
        which = [selected] if 0 <= selected < len(drawn.pngs) else range(len(drawn.pngs))
        paths = [html.escape(_clean(str(drawn.save(one, self.folder)))) for one in which]
        self.saved.value = f'<div style="line-height: 1.5">saved<br>{"<br>".join(paths)}</div>'

    def _guarded(self, action: Callable[..., object], *arguments: object) -> None:
        """Do it, and show what goes wrong; a guidance function of the user's may raise anything."""
        try:
            action(*arguments)
        except _Dropped:
            pass
        except ConfigError as error:
            self._say("", str(error))
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = "".join(traceback.format_exception_only(error)).strip()
            self._say("", f"{reason} (line {where.lineno} of {where.name})")

    def _say(self, text: str, wrong: str = "") -> None:
        red = f'<span style="color: {RED}">{html.escape(_clean(wrong))}</span>'
        self.status.value = html.escape(_clean(text)) + ("<br>" * bool(text) + red) * bool(wrong)


def _check(model: models.TextToImage, request: Request, guidance: Guidance, offered: Sequence[Checkpoint], load: Load | None) -> None:
    """Refuse what no knob can show."""
    solvers.check(request.solver, request.num_inference_steps, networks=model.networks)
    drawing.check_scales(guidance, [scale for _, scale in request.shots])
    if not 1 <= request.pictures <= MOST_PICTURES:
        raise ConfigError(f"pictures={request.pictures!r}; the panel draws 1 to {MOST_PICTURES}")
    if not 0 <= request.seed <= MOST_SEED:
        raise ConfigError(f"seed={request.seed!r}; the panel takes 0 to {MOST_SEED}")
    if len(offered) > 1 and load is None:
        raise ConfigError("checkpoints to choose from need load, a function that loads one of them")


def _label(number: int, request: Request) -> str:
    return _clean(f"{number}: {request.in_short}, {quoted(request.prompt)}")


def _clean(text: str) -> str:
    """Text that can be sent to a browser, half characters replaced."""
    return text.encode("utf-8", "replace").decode()
