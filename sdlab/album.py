"""Pictures in a folder: drawn on any number of ranks, each kept with its settings, and laid out along any two of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from pydantic import Field

from sdlab import drawing, launch, models, pictures, runs, sample, stored
from sdlab import guidance as guidances
from sdlab.axes import AXES, Axis, label
from sdlab.axes import read as read_axes
from sdlab.config import ConfigError, Model, SamplePrecision, build, near_path, resolve_path
from sdlab.guidance import Combine, Guidance
from sdlab.settings import Settings, read_png, save_png

_Item = TypeVar("_Item")
PICTURES = "pictures"
"""Where they are kept in a study's folder."""
JOB = "job"


class SampleConfig(Model):
    """What notebook 03 asks."""

    model: str = "tiny"
    """"tiny", a run folder, a pipeline folder, a hub id or a single .safetensors file."""
    weights: Literal["auto", "ema", "raw"] = "auto"
    checkpoint: int | Literal["latest"] = "latest"
    prompts: list[str] = Field(min_length=1)
    negative_prompt: str = ""
    guidance_scales: list[float] = Field([1.0, 1.5, 2.0, 3.0, 5.0, 8.0], min_length=1)
    """Columns of the first grid."""
    guidance_scale: float = 2.0
    """Where the scale is no axis."""
    guidance: str = "constant"
    """As `guidance.named` reads it."""
    solver: str = "dpmpp_2m"
    spacing: str | None = None
    num_inference_steps: int = 10
    seed: int = Field(0, ge=0)
    """Of the first prompt; each next one has the next."""
    resolution: int | list[int] | None = None
    batch_size: int = Field(4, ge=1)
    precision: SamplePrecision = "32-true"
    devices: int | Literal["auto"] = "auto"
    num_nodes: int = Field(1, ge=1)
    axes: dict[str, list[Any]] = Field({})
    """Two of `AXES` with their values, for a grid of one's own."""
    study_dir: str = "papermill_runs/out/studies/sample_guidance"


@dataclass(frozen=True)
class Grid:
    """Pictures along two axes, and what each was drawn with."""

    rows: Axis
    columns: Axis
    images: np.ndarray
    """uint8 (R, C, 3, H, W)."""
    settings: list[list[Settings]]
    work: list[list[drawing.Work]]
    """UNet evaluations and rows of each."""

    @property
    def title(self) -> str:
        """What all its pictures share, in a line."""
        first, axes = self.settings[0][0], {self.rows[0], self.columns[0]}
        shared = {"guidance": f"guidance {first.guidance}", "guidance_scale": f"scale {first.guidance_scale:g}", "solver": first.solver}
        shared |= {"num_inference_steps": f"{first.num_inference_steps} steps", "weights": f"{first.weights} weights"}
        shared |= {"checkpoint": f"after {first.step} steps of training"}
        shared |= {"negative_prompt": f"away from \u201c{first.negative_prompt}\u201d"} if first.negative_prompt else {}
        told = ", ".join(text for name, text in shared.items() if name not in axes)
        return told if "prompt" in axes else f"{first.prompt}: {told}"

    @property
    def row_labels(self) -> list[str]:
        """Of the rows, as a figure says them."""
        return [label(self.rows[0], line[0]) for line in self.settings]

    @property
    def column_labels(self) -> list[str]:
        """Of the columns."""
        return [label(self.columns[0], settings) for settings in self.settings[0]]


def configure(**values: Any) -> SampleConfig:
    """A checked config; names and meanings are those of `SampleConfig`.

    Raises:
        ConfigError: unknown names or values that cannot be used.
    """
    return build(SampleConfig, values, where="sampling")


def check(config: SampleConfig) -> None:
    """Refuse what cannot be drawn of the first grid and of the one that the config's axes span, before anything is.

    Raises:
        ConfigError: as `draw_grid`.
    """
    for axes in filter(None, (first_axes(config), config.axes)):
        try:
            Album(config, axes)
        except ConfigError as error:
            raise ConfigError(f"grid of {' and '.join(axes)}: {error}") from None


def first_axes(config: SampleConfig) -> dict[str, list[Any]]:
    """Prompts down, guidance scales to the right."""
    return {"prompt": list(config.prompts), "guidance_scale": list(config.guidance_scales)}


def draw_grid(
    config: SampleConfig,
    axes: Mapping[str, Sequence[Any]] | None = None,
    *,
    guidance: Combine | Guidance | None = None,
    model: models.TextToImage | None = None,
) -> Grid:
    """Draw what two axes span, rows first, and keep each picture in `study_dir/pictures` with its settings inside.

    What is there already with the same settings, weights and batch size is not drawn again. Where the prompt is no axis, the first one is
    drawn; where the seed is none, prompt i has `seed` + i. `study_dir/results.json` lists all pictures there.

    Args:
        config: what does not change.
        axes: two names of `AXES` with their values, as in {"solver": ["ddim", "plms"], "num_inference_steps": [5, 10]}; by default the
            config's prompts and guidance scales.
        guidance: one's own, in place of the config's; this process alone draws with it. For several ranks it has to be named in the config,
            as "module:function".
        model: the config's, where it is loaded already.

    Raises:
        ConfigError: a value that cannot be used, before anything is drawn.
    """
    album = Album(config, axes or first_axes(config), guidance)
    ranks, missing = launch.Ranks(launch.devices(config.devices), config.num_nodes), album.missing()
    several = ranks.devices * ranks.num_nodes > 1
    if several and guidance is not None:
        print("a function of this notebook draws in its own process alone; named in guidance, as 'module:function', it draws on all ranks")
    if missing and several and guidance is None:
        job = {"verb": "sample", "config": album.config.model_dump(mode="json"), "axes": dict(album.axes)}
        launch.run_ranks(album.folder / JOB, {**job, "missing": [picture.path.name for picture in missing]}, ranks)
    elif missing:
        album.draw(missing, model)
    else:
        print(f"all {len(album.unique)} pictures are there already")
    return album.finish()


def work(job: Mapping[str, Any], *, rank: int, world_size: int) -> None:
    """What one rank draws: every `world_size`-th of the missing pictures."""
    album = Album(SampleConfig.model_validate(job["config"]), job["axes"])
    there = {picture.path.name: picture for picture in album.unique}
    album.draw([there[name] for name in job["missing"][rank::world_size]])


@dataclass(frozen=True)
class Picture:
    """One picture of a grid: where it is kept, and what it is drawn with."""

    path: Path
    checkpoint: int | str
    how: drawing.Drawing
    settings: Settings

    @property
    def work(self) -> drawing.Work:
        """What it takes of the UNet."""
        return self.how.work(self.settings.guidance_scale)


class Album:
    """A grid and the folder that its pictures are kept in."""

    def __init__(self, config: SampleConfig, axes: Mapping[str, Sequence[Any]], guidance: Combine | Guidance | None = None) -> None:
        self.own = None if guidance is None else guidances.read(guidance)
        self.axes, self.folder = read_axes(axes), resolve_path(config.study_dir)
        if guidance is not None and "guidance" in dict(self.axes):
            raise ConfigError("guidance is an axis already, so that a function of one's own has no place; leave one of them out")
        self._found: dict[int | str, stored.Stored] = {}
        self.config = config.model_copy(update={"checkpoint": self._pinned(config, config.checkpoint)})
        pinned = [self._pinned(config, value) for value in dict(self.axes).get("checkpoint", [])]
        (rows, row_values), (columns, column_values) = ((name, pinned if name == "checkpoint" else values) for name, values in self.axes)
        self.axes = (rows, row_values), (columns, column_values)
        fixed = {"prompt": config.prompts[0], **{name: getattr(self.config, name) for name in AXES if name != "prompt"}}
        self.pictures = []
        for row, row_value in enumerate(row_values):
            line = []
            for column, column_value in enumerate(column_values):
                values = {**fixed, rows: row_value, columns: column_value}
                if "seed" not in (rows, columns):
                    values["seed"] += {rows: row, columns: column}.get("prompt", 0)
                line.append(self._picture(values))
            self.pictures.append(line)

    def _pinned(self, config: SampleConfig, checkpoint: int | str) -> int | str:
        """The step that "latest" is at present, of a run that may go on."""
        if checkpoint != "latest" or len(stored.checkpoints(config.model)) == 1:
            return checkpoint
        found = stored.find(config.model, weights=config.weights)
        self._found.setdefault(found.step, found)
        return found.step

    def _picture(self, values: dict[str, Any]) -> Picture:
        """What is kept of one picture; everything about it is checked."""
        checkpoint, named = values.pop("checkpoint"), values.pop("guidance")
        found, shared = self._stored(checkpoint), {name: getattr(self.config, name) for name in ("spacing", "batch_size", "precision")}
        steps = {name: values[name] for name in ("solver", "num_inference_steps")}
        how = drawing.configure(found, guidance=self.own or named, resolution=self.config.resolution, **steps, **shared)
        one = {"seeds": [values["seed"]], "guidance_scale": values["guidance_scale"], "negative_prompt": values["negative_prompt"]}
        drawing.check_scales(how.guidance, [shot.guidance_scale for shot in drawing.shots_of([values["prompt"]], **one)])
        about = {"model": near_path(found.name), "weights": found.weights, "step": found.step, "weights_hash": found.weights_hash}
        guided = {"guidance": how.guidance.name, "guidance_source": how.guidance.source_hash or ""}
        settings = Settings(**values | about | shared | guided, height=how.size[0], width=how.size[1])
        key = {**asdict(settings), "model": "", "own": self.own is not None, "frozen": found.frozen_hashes}
        key |= {"networks": found.networks.model_dump(mode="json", exclude={"frozen"})}
        name = f"seed-{settings.seed}-guidance-{settings.guidance_scale:g}-{runs.digest(key)[:16]}.png"
        return Picture(self.folder / PICTURES / name, checkpoint, how, settings)

    def _stored(self, checkpoint: int | str) -> stored.Stored:
        if checkpoint not in self._found:
            self._found[checkpoint] = stored.find(self.config.model, weights=self.config.weights, checkpoint=checkpoint)
        return self._found[checkpoint]

    @property
    def unique(self) -> list[Picture]:
        """All pictures, each once, in the order of the grid."""
        return list({picture.path: picture for line in self.pictures for picture in line}.values())

    def missing(self) -> list[Picture]:
        """Pictures that are not there whole; with a function of a notebook all, since nothing tells what it depends on."""
        return [picture for picture in self.unique if self.own is not None or not _is_whole(picture)]

    def draw(self, wanted: Sequence[Picture], model: models.TextToImage | None = None) -> None:
        """Draw some of the pictures in this process, and keep each as soon as it is drawn; `model` is one that is loaded already."""
        with launch.progress(total=len(wanted), title="sample", unit=" pictures") as bar:
            for checkpoint, of_checkpoint in _grouped(wanted, lambda one: one.checkpoint):
                model = models.load_again(self._stored(checkpoint), checkpoint=checkpoint, loaded=model)
                for _, alike in _grouped(of_checkpoint, lambda one: _shared(one.settings)):
                    shots = [_shot(one.settings) for one in alike]
                    for which, images in sample.stream(model, alike[0].how, shots, report=bar.update):
                        for place, image in zip(which, images, strict=True):
                            save_png(image, alike[place].settings, alike[place].path)

    def finish(self) -> Grid:
        """The grid with its pictures, read from the folder; `results.json` is written.

        Raises:
            OSError: a picture is not there.
        """
        images = np.stack([np.stack([_read(picture.path) for picture in line]) for line in self.pictures])
        settings, work = ([[getattr(picture, name) for picture in line] for line in self.pictures] for name in ("settings", "work"))
        made = Grid(*self.axes, images, settings, work)
        rows = self._told() | {row["picture"]: row for row in (self._row(picture) for line in self.pictures for picture in line)}
        identity = {"frozen": self._stored(self.pictures[0][0].checkpoint).frozen_hashes}
        content = {"schema": 1, "study": "sample", "created": runs.now(), "machine": launch.machine(), "identity": identity}
        runs.write_json(self.folder / "results.json", {**content, "rows": list(rows.values())})
        return made

    def _told(self) -> dict[str, dict[str, Any]]:
        """What `results.json` says already of pictures that are there."""
        try:
            rows = json.loads((self.folder / "results.json").read_text(encoding="utf-8"))["rows"]
            return {row["picture"]: row for row in rows if (self.folder / row["picture"]).is_file()}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _row(self, picture: Picture) -> dict[str, Any]:
        work = picture.work
        return {
            "picture": str(picture.path.relative_to(self.folder)),
            **asdict(picture.settings),
            "unet_evaluations": work.evaluations,
            "unet_rows": work.rows,
        }


def _shared(settings: Settings) -> tuple[Any, ...]:
    """What pictures of one batch have in common."""
    return settings.solver, settings.num_inference_steps, settings.guidance


def _shot(settings: Settings) -> drawing.Shot:
    return drawing.Shot(settings.prompt, settings.seed, settings.guidance_scale, settings.negative_prompt)


def _grouped(items: Iterable[_Item], key: Callable[[_Item], Any]) -> list[tuple[Any, list[_Item]]]:
    """Items of equal key together, in the order in which the keys come."""
    groups: dict[Any, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


def _is_whole(picture: Picture) -> bool:
    if picture.path.is_dir():
        raise ConfigError(f"{picture.path} is a folder where a picture has to lie; move it away")
    try:
        return read_png(picture.path) == picture.settings and _read(picture.path).size > 0
    except ValueError:
        return False


def _read(path: Path) -> np.ndarray:
    """A kept picture, uint8 (3, H, W)."""
    return np.asarray(pictures.decode(path.read_bytes()).picture).transpose(2, 0, 1)
