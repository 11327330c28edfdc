"""Families and their stages as readable tables: the built-in ones in `assets/presets`, a user's own in any YAML file."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sdlab.config import ConfigError, Preset, Stage, build, hint, nearest, resolve_path

PRESET_DIR = Path(__file__).parent / "assets" / "presets"


def names() -> list[str]:
    """Names of the built-in presets."""
    return sorted(path.stem for path in PRESET_DIR.glob("*.yaml"))


def get(name: str) -> Preset:
    """The preset of a built-in name, or of a YAML file in the same schema, which may say `extends: NAME` and give only what differs.

    Raises:
        ConfigError: no such preset or file, no valid YAML, or fields that do not fit.
    """
    return build(Preset, _table(name, seen=()), where=f"preset {name!r}")


def stage(preset: Preset, name: str, overrides: Mapping[str, Any] | None = None) -> Stage:
    """The recipe of a stage, with `overrides` of its fields put in.

    Args:
        preset: the family.
        name: a stage of it.
        overrides: new values by field name, as in {"learning_rate": 1e-4}.

    Raises:
        ConfigError: unknown stage or field, or a value that does not fit.
    """
    if name not in preset.stages:
        known = ", ".join(preset.stages)
        raise ConfigError(f"stage {name!r} is not in preset {preset.name!r}, which has {known}{nearest(name, preset.stages)}")
    fields = {**preset.stages[name].model_dump(), **(overrides or {})}
    return build(Stage, fields, where=f"overrides of {preset.name}/{name}" if overrides else f"stage {name!r}")


def label(preset: str, stage_name: str, overrides: Mapping[str, Any] | None = None) -> str:
    """How a recipe is named in tables: "sd15/v1_2_512 + learning_rate"."""
    family = Path(preset).stem if preset.endswith((".yaml", ".yml")) else preset
    return " + ".join([f"{family}/{stage_name}", *sorted(overrides or {})])


def _table(name: str, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = _find(name, beside=seen[-1].parent if seen else None)
    if path in seen:
        raise ConfigError(f"preset file {path} extends itself through {' -> '.join(str(p) for p in seen)}")
    table = read_yaml(path, where=f"preset file {path}", fields="fields such as 'extends' and 'stages'")
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise ConfigError(f"preset file {path}: 'extends' is {base!r}; give the name or path of one preset")
    return _merge(_table(base, (*seen, path)), {"name": path.stem, **table})


def read_yaml(path: Path, *, where: str, fields: str) -> dict[str, Any]:
    """The table in a YAML file.

    Args:
        path: the file.
        where: what it is, as in "job file /a/b.yaml"; it opens the message.
        fields: what it has to hold, in words.

    Raises:
        ConfigError: no valid YAML, or no table.
    """
    try:
        table = yaml.load(path.read_text(encoding="utf-8"), Loader=YamlLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{where} holds {type(table).__name__}; it has to hold {fields}")
    return table


def _find(name: str, beside: Path | None) -> Path:
    if not name.endswith((".yaml", ".yml")):
        if name not in names():
            raise ConfigError(f"preset {name!r} is not built in{hint(name, names())} (your own: the path of a .yaml file)")
        return PRESET_DIR / f"{name}.yaml"
    path = (beside / name).resolve() if beside is not None else resolve_path(name)
    if not path.is_file():
        raise ConfigError(f"preset file {path} is not there; give the path of a .yaml file or one of {', '.join(names())}")
    return path


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


class YamlLoader(yaml.SafeLoader):
    """YAML as people mean it: 1e-5 is a number (plain YAML 1.1 reads it as text)."""


YamlLoader.yaml_implicit_resolvers = copy.deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)
_FLOAT = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
for _first in "-+.0123456789":
    YamlLoader.yaml_implicit_resolvers.setdefault(_first, []).insert(0, ("tag:yaml.org,2002:float", _FLOAT))
