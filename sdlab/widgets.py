"""What a person clicks: a panel that draws again whenever a knob is turned, and one that watches a training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from IPython.core.getipython import get_ipython

from sdlab import models, plots
from sdlab.gallery import Checkpoint, cut_off, images_of
from sdlab.guidance import CONSTANT, Combine, Guidance
from sdlab.panel import COLUMNS, FOLDER, Load, Panel, Request
from sdlab.watch import RunPanel, loss_curve, status_line, watch

Interactive = Literal["auto"] | bool


def interactive_wanted(interactive: Interactive) -> bool:
    """Whether to show what can be clicked; "auto" says yes where a person is at the other end of a notebook's kernel.

    JupyterLab and its like let a cell ask for input; papermill and nbconvert do not, and a script has no kernel.
    """
    if interactive != "auto":
        return interactive
    kernel = getattr(get_ipython(), "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", False)) and not os.environ.get("SDLAB_HEADLESS")


def panel_or_grid(
    model: models.TextToImage,
    request: Request,
    *,
    interactive: Interactive,
    guidance: Guidance | Combine | str = CONSTANT,
    checkpoints: Sequence[Checkpoint] = ("latest",),
    load: Load | None = None,
    folder: str | Path = FOLDER,
) -> Panel | plots.Picture:
    """The panel where somebody can click, else the pictures that it would show first, with a printed line that says what they are.

    Raises:
        ConfigError: as `Panel` or `sample.sample`.
    """
    if interactive_wanted(interactive):
        return Panel(model, request, guidance=guidance, checkpoints=checkpoints, load=load, folder=folder)
    print(*filter(None, [str(request), cut_off(model, request)]), sep="\n")
    return plots.contact_sheet(images_of(model, request, guidance=guidance), request.captions, columns=COLUMNS)


def watch_or_picture(run_dir: str | Path, *, interactive: Interactive = "auto") -> RunPanel | plots.Picture:
    """The panel of `watch` where somebody can click, else the loss curve, with a printed line that says how far the training is.

    Raises:
        ConfigError: `run_dir` is no run folder, or its config is damaged.
    """
    if interactive_wanted(interactive):
        return watch(run_dir)
    print(status_line(run_dir))
    return loss_curve(run_dir)
