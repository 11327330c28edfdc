"""Evaluation protocols as readable tables in `assets/protocols`: what is asked, drawn and compared, with the source of each figure.

Two results can be compared only where their protocols are equal, so a protocol's name says whatever was changed in it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sdlab.config import ConfigError, Model, build, hint
from sdlab.presets import read_yaml
from sdlab.settings import SAMPLERS

PROTOCOL_DIR = Path(__file__).parent / "assets" / "protocols"
_TOLD = ("base", "title", "sources")
"""Fields that say something of a protocol, and are no figures."""


class Protocol(Model):
    """What is asked, drawn and compared in one evaluation."""

    base: str
    """The built-in protocol that this one is, or was changed from."""
    title: str
    sources: dict[str, str]
    """Where each figure comes from, by field; "chosen here" where nothing was published."""
    dataset: Literal["coco_val2014", "coco_val2017", "scenes"]
    prompts: Literal["random_captions", "one_caption_per_image", "scenes"]
    """The rule that chooses prompts, one of `coco.RULES` or the built-in scenes."""
    prompt_seed: int = Field(ge=0, lt=2**32)
    num_images: int = Field(ge=2)
    """Prompts, and pictures a guidance scale."""
    reference: Literal["all_images", "prompted_images", "scenes"]
    """Real pictures: all of the data set, or those whose captions are asked."""
    reference_images: int | None = Field(ge=2)
    """How many; None: as many as the prompts have."""
    resolution_drawn: int = Field(gt=0)
    """Pixels a side that a model draws."""
    resolution_scored: int = Field(gt=0)
    """Pixels a side of both sets before the extractor's own resize."""
    pixel_path: Literal["nemo", "mlperf", "cleanfid", "pytorchfid", "tf1", "torchmetrics", "gigagan", "judge"]
    """How pictures become the extractor's input."""
    extractor: Literal["inception-2015-12-05", "built-in judge"]
    """Whose features the Frechet distance is of; only the first makes it a FID."""
    clip_judge: str = Field(min_length=1)
    """The CLIP of the score: open_clip's architecture / weights, or the built-in judge."""
    clip_prefix: str
    """Put before each prompt that the CLIP is shown."""
    solver: str
    num_inference_steps: int = Field(ge=1)
    guidance_scales: tuple[float, ...] = Field(min_length=1)
    batch_size: int = Field(ge=1)
    """Pictures drawn at a time."""

    @property
    def name(self) -> str:
        """The built-in name and whatever differs from it, as in "nemo_30k_256 + num_images=1000"; equal protocols have equal names."""
        named = get(self.base)
        return " + ".join([self.base, *(f"{field}={_shown(getattr(self, field))}" for field in _differing(self, named))])

    @field_validator("solver")
    @classmethod
    def _solver_is_known(cls, value: str) -> str:
        if value not in SAMPLERS:
            raise ValueError(f"no known solver{hint(value, SAMPLERS)}")
        return value

    @field_validator("guidance_scales")
    @classmethod
    def _scales_fit(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        twice = [scale for scale, count in Counter(value).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]:g} comes more than once; give each once")
        if min(value) < 0:
            raise ValueError("a scale is 0 or more (1 is off)")
        return value

    @model_validator(mode="after")
    def _rules_go_together(self) -> Self:
        built_in = {name: getattr(self, name) == "scenes" for name in ("dataset", "prompts", "reference")}
        if len(set(built_in.values())) > 1:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in built_in)
            raise ValueError(f"{given}: scenes go with scenes only; change all three")
        if (self.reference == "prompted_images") != (self.reference_images is None):
            given = f"reference={self.reference} with reference_images={self.reference_images}"
            raise ValueError(f"{given}: prompted_images takes none, and every other rule a number")
        if self.resolution_scored > self.resolution_drawn:
            given = f"resolution_scored={self.resolution_scored} is more than resolution_drawn={self.resolution_drawn}"
            raise ValueError(f"{given}, and enlarged pictures are not what was drawn; lower it")
        return self

    @model_validator(mode="after")
    def _figures_have_sources(self) -> Self:
        without = [field for field in FIGURES if not self.sources.get(field, "").strip()]
        if without:
            raise ValueError(f"sources says nothing of {', '.join(without)}; say where each figure comes from")
        return self


FIGURES = tuple(field for field in Protocol.model_fields if field not in _TOLD)
"""Fields that fix what is measured."""


def names() -> list[str]:
    """Names of the built-in protocols."""
    return sorted(path.stem for path in PROTOCOL_DIR.glob("*.yaml"))


@functools.cache
def get(name: str) -> Protocol:
    """The built-in protocol of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in names():
        raise ConfigError(f"protocol {name!r} is not built in{hint(str(name), names())}")
    return read(PROTOCOL_DIR / f"{name}.yaml")


def read(path: Path) -> Protocol:
    """A protocol from a table {figure: {value: ..., source: ...}} with a title; the file's stem is its name.

    Raises:
        ConfigError: no valid YAML, a figure without value or source, or figures that do not fit.
    """
    where = f"protocol file {path}"
    table = read_yaml(path, where=where, fields="a 'title' and figures with 'value' and 'source'")
    entries = {field: entry for field, entry in table.items() if field != "title"}
    for field, entry in entries.items():
        if not isinstance(entry, Mapping) or set(entry) != {"value", "source"}:
            raise ConfigError(f"{where}: {field!r} is {entry!r:.80}; it has to be a table of 'value' and 'source'")
    told = {"base": path.stem, "sources": {field: entry["source"] for field, entry in entries.items()}}
    told |= {"title": table["title"]} if "title" in table else {}
    return build(Protocol, {**{field: entry["value"] for field, entry in entries.items()}, **told}, where=where)


def changed(protocol: Protocol, **overrides: Any) -> Protocol:
    """Another protocol, whose name says what was changed.

    Args:
        protocol: a built-in one, or one that was changed before.
        overrides: new figures by field name, as in num_images=1000.

    Raises:
        ConfigError: an unknown field, with the nearest one, or a figure that does not fit.
    """
    unknown = next((field for field in overrides if field not in FIGURES), None)
    if unknown is not None:
        raise ConfigError(f"protocol {protocol.base!r} has no figure {unknown!r}{hint(unknown, FIGURES)}")
    named = get(protocol.base)
    fields = {**protocol.model_dump(), **overrides}
    new = build(Protocol, fields, where=f"changes of protocol {protocol.base!r}")
    said = {field: f"changed; {protocol.base} has {_shown(getattr(named, field))}" for field in _differing(new, named)}
    return new.model_copy(update={"sources": {**named.sources, **said}})


def differences(one: Protocol, other: Protocol) -> dict[str, tuple[Any, Any]]:
    """The figures in which two protocols differ, with both values: results compare only where there are none."""
    return {field: (getattr(one, field), getattr(other, field)) for field in _differing(one, other)}


def _differing(one: Protocol, other: Protocol) -> list[str]:
    return [field for field in FIGURES if getattr(one, field) != getattr(other, field)]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return (value or "''") if isinstance(value, str) else repr(value).removesuffix(".0")
