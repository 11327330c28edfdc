"""The words of sdlab: frozen, checked models of presets, data and runs, and the arithmetic of batches."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

PredictionType = Literal["epsilon", "v_prediction", "sample"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
SamplePrecision = Literal["32-true", "bf16-mixed"]
Strategy = Literal["auto", "ddp", "fsdp"]
Weights = Literal["auto", "ema", "raw"]
Crop = Literal["center", "random", "buckets"]
SIZE_COLUMNS = ("width", "height", "aspect")
"""What a filter can ask of the picture itself: pixels upright before any resize, and width / height."""


Beta = Annotated[float, Field(ge=0, lt=1)]


class ConfigError(ValueError):
    """What a user gave cannot be used; the message says what was given, what is allowed and what to do."""


class Model(BaseModel):
    """A frozen config model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


AnyModel = TypeVar("AnyModel", bound=Model)


def build(model: type[AnyModel], values: Mapping[str, Any], *, where: str) -> AnyModel:
    """Check `values` against `model` and report all problems together.

    Args:
        model: the model to build.
        values: fields by name.
        where: what the values came from, as in "preset file /a/b.yaml"; it opens the message.

    Raises:
        ConfigError: one line a problem; unknown keys with the nearest known name.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors()]
        raise ConfigError(f"{where}: " + "; ".join(problems)) from None


def _problem(model: type[Model], detail: Any) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{place!r} is not a known name{hint(str(detail['loc'][-1]), _names(model, detail['loc'][:-1]))}"
    if detail["type"] == "missing":
        return f"{place!r} is missing"
    message = str(detail["msg"]).removeprefix("Value error, ")
    given = "" if not place or isinstance(detail["input"], dict) else f" (given: {detail['input']!r})"
    return f"{place + ': ' if place else ''}{message}{given}"


def _names(model: Any, path: Iterable[Any]) -> list[str]:
    for part in path:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is not None:
            model = field.annotation
        arguments = [a for a in getattr(model, "__args__", ()) if hasattr(a, "model_fields")]
        model = arguments[0] if arguments else model
    return list(getattr(model, "model_fields", {}))


def hint(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the known name nearest to `name`, else the list of known names."""
    known = sorted(known)
    return nearest(name, known) or f"; known are {', '.join(known) or 'none'}"


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the known name nearest to `name`, nothing where none is near."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def resolve_path(path: str | Path) -> Path:
    """An absolute path: relative ones start where the user is, or at the project's root from inside its notebooks folder."""
    if not str(path).strip():
        raise ConfigError("a path is empty; give a file or folder")
    try:
        return (_base() / Path(path).expanduser()).resolve()
    except (ValueError, OSError, RuntimeError) as error:
        raise ConfigError(f"path {str(path)[:200]!r} cannot be used: {error}") from None


def near_path(path: str | Path) -> str:
    """A path as a person wants to read it: from where relative paths start if it lies below that, else as it is."""
    base = _base()
    return str(Path(path).relative_to(base)) if Path(path).is_relative_to(base) else str(path)


def _base() -> Path:
    here = Path.cwd()
    return here.parent if here.name == "notebooks" and (here.parent / "papermill_runs").is_dir() else here


class NoiseSchedule(Model):
    """The forward process, in diffusers' words; the defaults are Stable Diffusion's."""

    num_train_timesteps: int = Field(1000, ge=1)
    beta_start: float = Field(0.00085, gt=0, lt=1)
    beta_end: float = Field(0.012, gt=0, lt=1)
    beta_schedule: Literal["scaled_linear", "linear"] = "scaled_linear"
    rescale_betas_zero_snr: bool = False
    """Let the last timestep hold no signal at all (Lin et al. 2024); not for epsilon, which says nothing there."""


class Networks(Model):
    """What a family is made of: frozen parts by name or folder, and the UNet as diffusers' `UNet2DConditionModel` arguments."""

    frozen: str
    """"tiny" for the parts that sdlab ships; a folder in diffusers' layout with `vae`, `text_encoder` and `tokenizer` (and `text_encoder_2`
    and `tokenizer_2`); a single .safetensors file; a hub id; or "random" for parts drawn at random as `vae` and `text_encoders` say."""
    vae: dict[str, Any] = {}
    """The VAE as diffusers' `AutoencoderKL` arguments; empty: whatever the frozen parts are."""
    text_encoders: list[dict[str, Any]] = []
    """One or two text encoders as transformers' `CLIPTextConfig` arguments; empty: whatever the frozen parts are."""
    unet: dict[str, Any]
    prediction_type: PredictionType
    noise_schedule: NoiseSchedule = NoiseSchedule()
    null_condition: Literal["empty_text", "zeros"] = "empty_text"
    """What stands for no caption, in training and in guidance: what the encoders say of "", or zeros."""

    @property
    def takes_sizes(self) -> bool:
        """Whether the UNet takes sizes and crops of pictures and pooled text beside the text, as SDXL's does."""
        return self.unet.get("addition_embed_type") == "text_time"

    @model_validator(mode="after")
    def _last_timestep_says_something(self) -> Self:
        if self.noise_schedule.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            raise ValueError(
                "rescale_betas_zero_snr leaves nothing to learn at the last timestep of prediction_type 'epsilon'; use another"
            )
        return self


class Lora(Model):
    """A low-rank change of weights (Hu et al. 2021): weight + alpha / rank x up @ down."""

    rank: int = Field(16, gt=0)
    alpha: float | None = Field(None, gt=0)
    """None: as `rank`, so that the change counts once."""
    targets: list[str] = Field(["to_q", "to_k", "to_v", "to_out.0"], min_length=1)
    """Ends of the names of the layers that are changed."""


PUBLISHED = {"source", "note", "data", "crop", "min_resolution", "filters", "published_nodes", "published_devices"}
"""Fields of a stage that say what was published, and compute nothing."""


class Stage(Model):
    """The recipe of one stage of training."""

    resolution: int = Field(gt=0)
    """Pixels a side of the square training pictures."""
    parent: str | None = None
    """The stage whose weights this one starts from; None for a stage that starts from random weights."""
    prediction_type: PredictionType | None = None
    """What the UNet learns to say from this stage on; None: what the family says."""
    global_batch_size: int = Field(gt=0)
    micro_batch_size: int = Field(gt=0)
    learning_rate: float = Field(gt=0)
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: constant, or half a cosine down to zero at `schedule_steps`."""
    warmup_steps: int = Field(0, ge=0)
    schedule_steps: int = Field(gt=0)
    precision: Precision = "32-true"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    ema_decay: float | None = Field(None, gt=0, lt=1)
    caption_drop_prob: float = Field(0.1, ge=0, le=1)
    condition_drop: Literal["together", "each"] = "together"
    """What `caption_drop_prob` drops: the whole caption, or each text encoder's states and each of the three sizes on its own (SDXL)."""
    noise_offset: float = Field(0.0, ge=0)
    """Standard deviation of a constant that is added to the noise of each channel, for overall brightness; SDXL's last stage used 0.05."""
    min_snr_gamma: float | None = Field(None, gt=0)
    """Weigh down timesteps whose signal-to-noise ratio is above this (Hang et al. 2023, who use 5); None weighs all alike."""
    optimizer_states: Literal["float32", "bfloat16", "8bit"] = "float32"
    """How the Adam moments are kept; 8bit needs the package bitsandbytes and a GPU."""
    lora: Lora | None = None
    """Train a low-rank change of the attention's weights in place of all weights."""
    crop: Crop = "center"
    """Published: how the pictures were cut; what a run trains on is said by its data."""
    min_resolution: int | None = Field(None, gt=0)
    """Published: pixels that the smaller side of a picture had to have."""
    filters: list[str] = []
    """Published: further conditions on the pictures, as notebook 01 takes them."""
    published_nodes: int | None = Field(None, gt=0)
    published_devices: int | None = Field(None, gt=0)
    """Nodes and devices a node that the published batch sizes are for."""
    data: str = ""
    """Published: the pictures, in words."""
    source: str = ""
    """Where the figures come from."""
    note: str = ""
    """Where sources disagree: which is followed, and what the other says."""

    @model_validator(mode="after")
    def _warm_up_fits(self) -> Self:
        if self.warmup_steps > self.schedule_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} is more than schedule_steps={self.schedule_steps}; lower it")
        return self


class Preset(Model):
    """A family: its networks and its stages, which form a tree through `parent`."""

    name: str
    title: str = ""
    networks: Networks
    stages: dict[str, Stage] = Field(min_length=1)

    @model_validator(mode="after")
    def _parts_are_somewhere(self) -> Self:
        if not self.networks.frozen.strip():
            raise ValueError("networks.frozen is empty; give a folder, a .safetensors file, a hub id, 'tiny' or 'random'")
        return self

    @model_validator(mode="after")
    def _parents_make_a_tree(self) -> Self:
        for name, stage in self.stages.items():
            seen, parent = [name], stage.parent
            while parent is not None:
                if parent not in self.stages:
                    raise ValueError(f"stage {seen[-1]!r} has parent {parent!r}{hint(parent, self.stages)}")
                if parent in seen:
                    raise ValueError(f"stage {name!r} descends from itself through {' -> '.join([*seen, parent])}")
                seen, parent = [*seen, parent], self.stages[parent].parent
        return self


class Filter(Model):
    """A condition on a number that belongs to a picture; pictures that do not meet it are left out."""

    column: str
    """Of the metadata, or one of `SIZE_COLUMNS`."""
    operator: Literal[">=", "<=", "==", "!=", ">", "<"]
    value: float

    def __str__(self) -> str:
        return f"{self.column} {self.operator} {self.value:g}"


_CONDITION = re.compile(r"\s*(?P<column>[^\s<>=!]+)\s*(?P<operator>>=|<=|==|!=|>|<)\s*(?P<value>[-+.\deE]+)\s*")


def parse_filters(given: Any) -> Any:
    """Filters from a table {column: "operator number"}, a list of "column operator number", or one such text with commas.

    Raises:
        ValueError: what is no condition.
    """
    if isinstance(given, Mapping):
        given = [f"{column} {condition}" for column, condition in given.items()]
    texts = [given] if isinstance(given, str) else given
    return [_condition(part) for text in texts for part in text.split(",")] if all(isinstance(text, str) for text in texts) else texts


def _condition(text: str) -> dict[str, str]:
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text.strip()!r} is no condition; write one as in 'aesthetic >= 5.0' or {{aesthetic: '>= 5.0'}}")
    return found.groupdict()


class PrepareConfig(Model):
    """What to prepare, from what, and where."""

    preset: str = "tiny"
    source: str | list[str] = "scenes"
    data_dir: str
    resolution: list[int] = Field([32, 64], min_length=1)
    """Pixels a side; one number or several."""
    min_resolution: int | None = Field(None, gt=0)
    """Pictures whose smaller side has fewer pixels, or is said to by `width` and `height` of the metadata, are filtered."""
    filters: list[Filter] = []
    crop: Crop = "center"
    """The middle square, a random one, or the aspect-ratio bucket of about resolution x resolution pixels that loses least."""
    views: int = Field(1, ge=1, le=64)
    """Crops of each picture that are cached."""
    flip: bool = False
    """Mirror every second view."""
    background: str = "white"
    """What transparent pictures are laid on: a colour's name or #rrggbb."""
    text_states: bool = True
    """Cache what the text encoder says; else token ids alone, and training encodes them."""
    caption_column: str | None = None
    num_workers: int | Literal["auto"] = "auto"
    """Processes that decode, on each rank; auto: one a core where there is enough to do; 0 decodes in this one."""
    devices: int | Literal["auto"] = "auto"
    """Ranks on each node; auto: one a GPU, or one."""
    num_nodes: int = Field(1, ge=1)
    max_bad_fraction: float = Field(0.01, ge=0, le=1)
    """Share of quarantined pictures beyond which nothing is encoded."""
    limit: int | None = Field(None, gt=0)
    allow_uncaptioned: bool = False
    """Keep pictures without a caption; they train the null condition."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Of drawn scenes and random crops."""

    @field_validator("resolution", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) else value

    @field_validator("resolution")
    @classmethod
    def _in_order(cls, value: list[int]) -> list[int]:
        return sorted(set(value))

    @field_validator("filters", mode="before")
    @classmethod
    def _conditions(cls, value: Any) -> Any:
        return parse_filters(value)

    @field_validator("num_workers", "devices")
    @classmethod
    def _counts(cls, value: int | str, field: ValidationInfo) -> int | str:
        least = 0 if field.field_name == "num_workers" else 1
        if isinstance(value, int) and value < least:
            raise ValueError(f"it has to be {least} or more, or auto")
        return value

    @model_validator(mode="after")
    def _views_differ(self) -> Self:
        if self.flip and self.views % 2:
            raise ValueError(f"flip mirrors every second view, so views has to be even (given: {self.views})")
        if self.crop != "random" and self.views > 1 + self.flip:
            raise ValueError(f"views={self.views} with crop={self.crop!r} would cache equal pictures; use crop='random'")
        return self


class TrainConfig(Model):
    """One run: what it computes (science fields) and how it is run (running fields)."""

    preset: str
    stage: str
    overrides: dict[str, Any] = {}
    networks: Networks
    recipe: Stage
    seed: int = Field(0, ge=0, lt=2**63)
    data_key: str
    parent_hash: str | None = None
    """SHA-256 of the weights that the run started from."""
    init_from: str | None = None
    init_weights: Weights = "auto"
    """Which weights of `init_from`; auto: the moving average where there is one."""
    data_dir: str
    val_data_dir: str | None = None
    """A prepared folder that the validation loss is measured on."""
    max_steps: int = Field(gt=0)
    devices: int = Field(1, ge=1, strict=True)
    """Ranks on each node."""
    num_nodes: int = Field(1, ge=1)
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    bucketed: bool = False
    """Whether the pictures have several shapes, and the order in which they come depends on the micro-batch size."""
    strategy: Strategy = "auto"
    """How several ranks share the work: ddp keeps the weights on each, fsdp shards them; auto: ddp."""
    rendezvous: str | None = None
    """Where ranks on several nodes meet outside SLURM, as host:port of the first of them."""
    max_restarts: int = Field(0, ge=0)
    """How often ranks start again, from the newest checkpoint, after one of them died."""
    micro_batch_size: int = Field(gt=0)
    save_every: int = Field(gt=0)
    keep_every: int = Field(0, ge=0)
    """Checkpoints of multiples of so many steps stay for good; 0 for none."""
    log_every: int = Field(gt=0)
    val_every: int = Field(0, ge=0)
    preview_every: int = Field(ge=0)
    tensorboard: bool = False
    stop_grace_s: float | None = Field(None, gt=0)
    """Seconds that a stop may take; None for the larger of 60 and three times the last save."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.devices * self.num_nodes

    @property
    def accumulation_steps(self) -> int:
        """Forwards a rank an optimizer step."""
        return accumulation_steps(self.recipe.global_batch_size, self.micro_batch_size, world_size=self.world_size)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        accumulation_steps(self.recipe.global_batch_size, self.micro_batch_size, world_size=self.world_size)
        if self.strategy == "fsdp" and self.recipe.precision == "16-mixed":
            raise ValueError("precision='16-mixed' cannot be used with strategy='fsdp'; use bf16-mixed, or ddp")
        if self.recipe.lr_schedule == "cosine" and self.max_steps > self.recipe.schedule_steps:
            given = f"max_steps={self.max_steps} is more than schedule_steps={self.recipe.schedule_steps}"
            raise ValueError(f"{given}, where the cosine has come down to zero; lower it")
        if self.keep_every % self.save_every:
            raise ValueError(f"keep_every={self.keep_every} has to be a multiple of save_every={self.save_every}")
        if self.val_every and self.val_data_dir is None:
            raise ValueError("val_every needs val_data_dir, a folder that notebook 01 prepared from pictures that are not trained on")
        return self

    @field_validator("devices", mode="before")
    @classmethod
    def _as_once_written(cls, value: Any) -> Any:
        return 1 if value == "auto" else value

    @field_validator("rendezvous")
    @classmethod
    def _host_and_port(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[^\s:]+:\d{1,5}", value):
            raise ValueError("it has to be host:port of the first node, as in node1:29500")
        return value

    def science(self) -> dict[str, Any]:
        """The fields that fix what is computed, flat; they may not change in a run folder."""
        recipe = {f"recipe.{key}": value for key, value in self.recipe.model_dump(exclude={"micro_batch_size", *PUBLISHED}).items()}
        fixed = self.model_dump(include={"preset", "stage", "networks", "seed", "data_key", "parent_hash"})
        return {**fixed, **recipe, **({"micro_batch_size": self.micro_batch_size} if self.bucketed else {})}


def accumulation_steps(global_batch_size: int, micro_batch_size: int, *, world_size: int) -> int:
    """Forwards a device an optimizer step.

    Raises:
        ConfigError: `global_batch_size` is no whole multiple of `micro_batch_size` times `world_size`.
    """
    together = micro_batch_size * world_size
    if global_batch_size % together:
        fitting = [n for n in range(1, global_batch_size + 1) if global_batch_size % (n * world_size) == 0]
        nearest = min(fitting, key=lambda n: abs(n - micro_batch_size), default=None)
        advice = f"use micro_batch_size={nearest}" if nearest else "use fewer devices or a larger global_batch_size"
        raise ConfigError(
            f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size={micro_batch_size} "
            f"x world_size={world_size}; {advice}"
        )
    return global_batch_size // together


def check_resolution(resolution: int, *, vae_factor: int, unet_factor: int) -> None:
    """Refuse a resolution that the VAE and the UNet cannot halve evenly.

    Raises:
        ConfigError: `resolution` is no positive multiple of `vae_factor` times `unet_factor`.
    """
    unit = vae_factor * unet_factor
    if resolution <= 0 or resolution % unit:
        lower = max(unit, resolution // unit * unit)
        raise ConfigError(
            f"resolution={resolution} cannot be halved evenly: it has to be a multiple of {unit} "
            f"(VAE factor {vae_factor} x UNet factor {unet_factor}); use {lower} or {lower + unit}"
        )
