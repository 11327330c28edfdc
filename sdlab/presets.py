"""Families and their stages as readable tables: the built-in ones in `assets/presets`, a user's own in any YAML file."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sdlab.config import ConfigError, Networks, Preset, Stage, build, hint, nearest, resolve_path

PRESET_DIR = Path(__file__).parent / "assets" / "presets"
TWIN = "_tiny"
"""A built-in family's name and this: its twin, the same in everything but size."""
TWIN_SCALE, TWIN_BATCH, TWIN_MICRO_BATCH, TWIN_STEPS = 4, 8, 4, 20
"""A twin's pictures are so many times smaller; its batches and schedules are at most so large."""


def names() -> list[str]:
    """Names of the built-in presets, twins among them."""
    files = [path.stem for path in PRESET_DIR.glob("*.yaml")]
    return sorted([*files, *(f"{name}{TWIN}" for name in files if name != "tiny")])


def get(name: str) -> Preset:
    """The preset of a built-in name, or of a YAML file in the same schema.

    A file may say `extends: NAME` and give only what differs; a stage that it sets to null, as in `stages: {pretrain_256: null}`, is
    left out. `sd15_tiny` is the twin of `sd15`: equal in all but the sizes in its table `twin` and those that `_shrunk` makes smaller.

    Raises:
        ConfigError: no such preset or file, no valid YAML, or fields that do not fit.
    """
    table = _table(name, seen=())
    table.pop("twin", None)
    return build(Preset, table, where=f"preset {name!r}")


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


def networks(preset: Preset, recipe: Stage | str) -> Networks:
    """The family's networks as a stage trains them: with the stage's own prediction type where it has one.

    Args:
        preset: the family.
        recipe: of `stage`, or a stage's name.

    Raises:
        ConfigError: unknown stage, or a prediction type that the family's noise schedule leaves nothing to learn for.
    """
    recipe = stage(preset, recipe) if isinstance(recipe, str) else recipe
    fields = {**preset.networks.model_dump(), "prediction_type": recipe.prediction_type or preset.networks.prediction_type}
    return build(Networks, fields, where=f"networks of preset {preset.name!r}")


def label(preset: str, stage_name: str, overrides: Mapping[str, Any] | None = None) -> str:
    """How a recipe is named in tables: "sd15/v1_2_512 + learning_rate"."""
    family = Path(preset).stem if preset.endswith((".yaml", ".yml")) else preset
    return " + ".join([f"{family}/{stage_name}", *sorted(overrides or {})])


def _table(name: str, seen: tuple[Path, ...]) -> dict[str, Any]:
    if name in names() and name.endswith(TWIN):
        return _shrunk(_table(name.removesuffix(TWIN), seen), name)
    path = _find(name, beside=seen[-1].parent if seen else None)
    if path in seen:
        raise ConfigError(f"preset file {path} extends itself through {' -> '.join(str(p) for p in seen)}")
    table = read_yaml(path, where=f"preset file {path}", fields="fields such as 'extends' and 'stages'")
    base = table.pop("extends", None)
    if base is None:
        return table
    if not isinstance(base, str):
        raise ConfigError(f"preset file {path}: 'extends' is {base!r}; give the name or path of one preset")
    inherited = _table(base, (*seen, path))
    merged = _merge(inherited, {"name": path.stem, **table})
    given = (inherited.get("stages", {}), table.get("stages", {}), merged.get("stages", {}))
    if not all(isinstance(stages, Mapping) for stages in given):
        return merged
    return {**merged, "stages": _kept(*given, where=f"preset file {path}")}


def _kept(inherited: Mapping[str, Any], own: Mapping[str, Any], merged: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The stages that a file does not leave out, in its own order where it names all of them.

    Raises:
        ConfigError: a stage that is to be left out was not there.
    """
    unknown = [name for name, fields in own.items() if fields is None and name not in inherited]
    if unknown:
        raise ConfigError(f"{where}: there is no stage {unknown[0]!r} to leave out{hint(unknown[0], inherited)}")
    order = own if own.keys() >= merged.keys() else merged
    return {name: merged[name] for name in order if merged[name] is not None}


def _shrunk(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The twin of a family: sizes of its table `twin`, parts drawn at random, and recipes for a minute on a CPU."""
    sizes, whole = table["twin"], table["networks"]
    encoders = [_merge(*pair) for pair in zip(whole["text_encoders"], sizes["text_encoders"], strict=True)]
    networks = _merge(whole, {**sizes, "text_encoders": encoders, "frozen": "random"})
    made_from = f"{name.removesuffix(TWIN)}, in all but size; there: "
    stages = {stage_name: _shrunk_stage(fields, made_from) for stage_name, fields in table["stages"].items()}
    return {"name": name, "title": f"{table['title']}; small", "networks": networks, "stages": stages}


def _shrunk_stage(fields: Mapping[str, Any], made_from: str) -> dict[str, Any]:
    steps, batch = min(fields["schedule_steps"], TWIN_STEPS), min(fields["global_batch_size"], TWIN_BATCH)
    small = {
        "resolution": fields["resolution"] // TWIN_SCALE,
        "global_batch_size": batch,
        "micro_batch_size": math.gcd(batch, min(fields["micro_batch_size"], TWIN_MICRO_BATCH)),
        "schedule_steps": steps,
        "warmup_steps": math.ceil(fields.get("warmup_steps", 0) * steps / fields["schedule_steps"]),
        "source": made_from + fields["source"],
    }
    if fields.get("min_resolution"):
        small["min_resolution"] = fields["min_resolution"] // TWIN_SCALE
    small |= {name: 1 for name in ("published_nodes", "published_devices") if fields.get(name)}
    return {**fields, **small}


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
    """YAML as people mean it: 1e-5 is a number (plain YAML 1.1 reads it as text), and a key that is given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A table, refused where a key comes twice."""
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        twice = next((key for place, key in enumerate(keys) if key in keys[:place]), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


YamlLoader.yaml_implicit_resolvers = copy.deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)
_FLOAT = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
for _first in "-+.0123456789":
    YamlLoader.yaml_implicit_resolvers.setdefault(_first, []).insert(0, ("tag:yaml.org,2002:float", _FLOAT))
