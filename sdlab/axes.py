"""What may change along a grid of pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdlab.config import ConfigError, nearest
from sdlab.settings import Settings

AXES: dict[str, type] = {
    "checkpoint": int,
    "prompt": str,
    "negative_prompt": str,
    "guidance_scale": float,
    "guidance": str,
    "seed": int,
    "solver": str,
    "num_inference_steps": int,
}
"""What may change along a grid, with its type; a checkpoint may also be "latest"."""
Axis = tuple[str, list[Any]]
"""A name of `AXES` and its values."""


def read(given: Mapping[str, Sequence[Any]]) -> tuple[Axis, Axis]:
    """Rows and columns, with their values in their types."""
    if len(given) != 2:
        raise ConfigError(f"axes {list(given)}: give two of {', '.join(AXES)}, each with its values")
    for name, values in given.items():
        if name not in AXES:
            raise ConfigError(f"axis {name!r} is not known; known are {', '.join(AXES)}{nearest(name, AXES)}")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"axis {name}={values!r}; give a list of values")
    rows, columns = ((name, [_value(name, value) for value in values]) for name, values in given.items())
    return rows, columns


def _value(name: str, value: Any) -> Any:
    kind = AXES[name]
    if (name, value) == ("checkpoint", "latest"):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ConfigError(f"axis {name}: {value!r} is {type(value).__name__}; it has to be {_KINDS[kind]}")
    return kind(value)


_KINDS = {int: "a whole number", float: "a number", str: "text"}
_LABELS = {
    "checkpoint": lambda settings: f"step {settings.step}",
    "negative_prompt": lambda settings: (
        f"away from \u201c{settings.negative_prompt}\u201d" if settings.negative_prompt else "nothing negative"
    ),
    "guidance_scale": lambda settings: f"guidance {settings.guidance_scale:g}",
    "seed": lambda settings: f"seed {settings.seed}",
    "num_inference_steps": lambda settings: f"{settings.num_inference_steps} steps",
}
"""How a value of an axis is said in a figure, where not by itself."""


def label(name: str, settings: Settings) -> str:
    return _LABELS[name](settings) if name in _LABELS else str(getattr(settings, name))
