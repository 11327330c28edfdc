"""Typed notebook parameters: one vocabulary, text coerced or refused, and what a notebook really ran with."""

from __future__ import annotations

import ast
import copy
import difflib
import functools
import html
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from sdlab.config import ConfigError, hint, resolve_path

TAG = "parameters"
FIRST_LINE = "# Defaults: literals only. papermill puts its own values in a cell below."
PAPERMILL_NAMES = frozenset({"PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH"})
"""What papermill's own `--inject-paths` adds; ignored."""


@dataclass(frozen=True)
class Parameter:
    """A name's type, the same in all notebooks, and what it means."""

    annotation: Any
    help: str = ""


VOCABULARY: dict[str, Parameter] = {
    "allow_uncaptioned": Parameter(bool, "keep pictures that have no caption"),
    "axes": Parameter(
        dict[str, Any],
        "two of checkpoint, prompt, negative_prompt, guidance_scale, guidance, seed, solver and num_inference_steps, each with its values",
    ),
    "background": Parameter(str, "what transparent pictures are laid on: a colour's name or #rrggbb"),
    "batch_size": Parameter(int, "pictures of one forward"),
    "caption_column": Parameter(str | None, "column of the captions; none: found by name"),
    "checkpoint": Parameter(int | Literal["latest"], "latest, or the step of a checkpoint"),
    "crop": Parameter(Literal["center", "random", "buckets"], "the middle square, a random one, or aspect-ratio buckets"),
    "data_dir": Parameter(str | None, "folder of the prepared data; none in 02: scenes, prepared when needed"),
    "detach": Parameter(bool, "return at once and let the run go on without this notebook"),
    "devices": Parameter(int | Literal["auto"], "ranks a node; auto: one a GPU, or one"),
    "expected_samples_per_second": Parameter(
        float | None, "of all devices together, for the plan's time; none: as much of their peak as published trainings reach"
    ),
    "filters": Parameter(
        dict[str, Any] | list[str], "conditions on metadata columns, width, height or aspect, as in {aesthetic: '>= 5.0', aspect: '<= 2'}"
    ),
    "flip": Parameter(bool, "mirror every second view"),
    "global_batch_size": Parameter(int | None, "samples of one optimizer step; none: the stage's"),
    "gradient_checkpointing": Parameter(bool, "compute activations again in the backward pass: less memory, a third more time"),
    "guidance": Parameter(
        str,
        "constant, interval, rising or rescale, also with numbers as in interval(0.4, 3); cfgpp, with ddim or euler, "
        "for scales from 0 to 1; or a function as module:function",
    ),
    "guidance_scale": Parameter(float, "1 is off, 0 unconditional"),
    "guidance_scales": Parameter(list[float], "1 is off, 0 unconditional"),
    "init_from": Parameter(str | None, "run folder, pipeline folder, .safetensors file, hub id or tiny to start from"),
    "init_weights": Parameter(Literal["auto", "ema", "raw"], "which weights of init_from; auto: the average where there is one"),
    "interactive": Parameter(bool | Literal["auto"], "auto: a panel where somebody can click, else a grid"),
    "keep_every": Parameter(int, "checkpoints of multiples of so many steps stay for good; 0: none"),
    "limit": Parameter(int | None, "at most so many pictures; none: all"),
    "log_every": Parameter(int, "steps between rows of metrics"),
    "max_bad_fraction": Parameter(float, "share of unusable pictures above which preparing stops"),
    "max_restarts": Parameter(int, "how often ranks start again, from the newest checkpoint, after one has died"),
    "max_steps": Parameter(int | None, "where this call stops, counted from the run's start; none: the stage's"),
    "micro_batch_size": Parameter(int | None, "samples a device a forward; none: the stage's"),
    "min_resolution": Parameter(int | None, "smallest side of a picture that is taken, pixels; none: any"),
    "model": Parameter(str, "tiny, a run folder, a pipeline folder, a hub id or a .safetensors file"),
    "models": Parameter(list[str], "each as model in 03"),
    "negative_prompt": Parameter(str, "what to steer away from"),
    "num_images": Parameter(int, "pictures a guidance scale"),
    "num_inference_steps": Parameter(int, "steps of the solver"),
    "num_nodes": Parameter(int, "nodes that share the work: of a SLURM allocation, or 02: those that meet at rendezvous"),
    "num_workers": Parameter(int | Literal["auto"], "processes a rank that decode pictures; auto: one a core; 0: none"),
    "out_dir": Parameter(str, "folder of the results"),
    "overrides": Parameter(dict[str, Any], "recipe fields that differ from the stage, as in {learning_rate: 1.0e-4}"),
    "precision": Parameter(Literal["32-true", "bf16-mixed", "16-mixed"] | None, "number format of the forwards; none: the stage's"),
    "preset": Parameter(str, "family: a built-in name or a YAML file"),
    "preview_every": Parameter(int, "steps between preview pictures; 0: none"),
    "price_per_device_hour": Parameter(float | None, "in any currency, for the plan's cost"),
    "prompts": Parameter(list[str], "what to draw"),
    "rendezvous": Parameter(str | None, "host:port of the first node, where several meet outside SLURM"),
    "resolution": Parameter(
        int | list[int] | None, "pixels a side; 01: one or several; 03: one, or height and width; none: the model's own"
    ),
    "resume": Parameter(Literal["auto", "never", "must"], "auto: continue a run folder that holds a checkpoint"),
    "run_dir": Parameter(str | None, "run folder; none: named after the stage"),
    "save_every": Parameter(int, "steps between checkpoints"),
    "seed": Parameter(int, "fixes everything random"),
    "size": Parameter(Literal["smoke", "full"], "smoke: seconds, to see that it works"),
    "solver": Parameter(Literal["plms", "ddim", "dpmpp_2m", "euler"], "how the denoising equation is solved"),
    "source": Parameter(str | list[str], "scenes, a path, a hub id, or a list of these"),
    "spacing": Parameter(
        Literal["leading", "trailing", "linspace"] | None, "which timesteps the solver visits; none: those that it is known with"
    ),
    "stage": Parameter(str, "stage of the preset"),
    "stop_grace_s": Parameter(float | None, "seconds that a stop may take; none: 60, or three times the last save"),
    "strategy": Parameter(
        Literal["auto", "ddp", "fsdp"], "how ranks share the work: ddp, with all weights on each, or fsdp, sharded; auto: ddp"
    ),
    "study_dir": Parameter(str, "folder of the results"),
    "tensorboard": Parameter(bool, "also write the run folder's tensorboard/"),
    "text_states": Parameter(bool, "cache what the text encoder says; false: token ids alone"),
    "val_data_dir": Parameter(str | None, "prepared data that are not trained on; none: no validation, but in 02 without data_dir scenes"),
    "val_every": Parameter(int | None, "steps between validations; none: save_every"),
    "views": Parameter(int, "crops of each picture that are cached"),
    "weights": Parameter(
        Literal["auto", "ema", "raw"], "the average over training, or the last weights themselves; auto: the average where there is one"
    ),
}


class Parameters:
    """Effective parameters of a notebook: frozen, one attribute a name."""

    def __init__(self, values: Mapping[str, Any], *, given: Mapping[str, Any]) -> None:
        self.__dict__["_values"] = dict(values)
        self.__dict__["_given"] = frozenset(given)

    @property
    def values(self) -> dict[str, Any]:
        """A copy of the effective values by name."""
        return copy.deepcopy(self._values)

    def save(self, folder: str | Path) -> Path:
        """Write the effective values to `folder/parameters.json` and return its path."""
        target = resolve_path(folder) / "parameters.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(self._values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(partial, target)
        return target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"no parameter {name!r}{hint(name, self.__dict__.get('_values', {}))}")
        return copy.deepcopy(self._values[name])

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"parameters are frozen; set {name!r} in the cell tagged 'parameters'")

    def __repr__(self) -> str:
        width = max(map(len, self._values), default=0)
        return "\n".join(f"{'*' if name in self._given else ' '} {name:{width}} = {_shown(value)}" for name, value in self._values.items())

    def _repr_html_(self) -> str:
        rows = "".join(self._row(name, value) for name, value in self._values.items())
        head = f"<thead><tr>{_cells('th', 'parameter', 'value', 'meaning')}</tr></thead>"
        return f'<table style="font-size:90%">{head}<tbody>{rows}</tbody></table>'

    def _row(self, name: str, value: Any) -> str:
        style = ' style="font-weight:bold"' if name in self._given else ""
        meaning = VOCABULARY[name].help if name in VOCABULARY else ""
        return f"<tr{style}>{_cells('td', name, _shown(value), meaning)}</tr>"


def resolve() -> Parameters:
    """The running notebook's parameters, displayed: its tagged cell with papermill's values over it, each in its type.

    Raises:
        ConfigError: outside a notebook, before the tagged cell has run, or unknown names or wrong types.
    """
    shell = _shell()
    if shell is None:
        raise ConfigError("parameters.resolve() reads the cells of a running notebook; elsewhere call parameters.check(notebook, values)")
    defaults_source, injected_source = _executed(shell.user_ns["In"])
    defaults = read_defaults(defaults_source, where="the cell tagged 'parameters'")
    given = fit(_assignments(injected_source, where="papermill's cell '# Parameters'"), defaults, where="notebook parameters")
    resolved = Parameters({**defaults, **given}, given=given)
    from IPython.display import display

    display(resolved)
    return resolved


def check(notebook: str | Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` in the types that the notebook's parameters have.

    Raises:
        ConfigError: no such notebook, no tagged cell in it, unknown names (with the nearest known one) or wrong types.
    """
    return fit(values, defaults_of(notebook), where=str(notebook))


def defaults_of(notebook: str | Path) -> dict[str, Any]:
    """The default values in a notebook file's tagged cell.

    Raises:
        ConfigError: no such notebook, or no usable tagged cell in it.
    """
    path = resolve_path(notebook)
    if not path.is_file():
        raise ConfigError(f"notebook {path} is not there; give the path of an .ipynb file")
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        source = tagged_source(cells)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path} is not a notebook; give the path of an .ipynb file (nbformat 4)") from None
    if source is None:
        raise ConfigError(f"notebook {path} has no cell tagged 'parameters'; tag the cell that holds its defaults")
    return read_defaults(source, where=str(path))


def tagged_source(cells: list[Any]) -> str | None:
    """The source of the first code cell tagged `parameters`, None if there is none."""
    for cell in cells:
        if cell["cell_type"] == "code" and TAG in cell["metadata"].get("tags", []):
            return "".join(cell["source"])
    return None


def read_defaults(source: str, *, where: str) -> dict[str, Any]:
    """Names and default values that a tagged cell's source assigns.

    Raises:
        ConfigError: anything but `name = literal` lines, or a default that is not of the vocabulary's type.
    """
    defaults = _assignments(source, where=where)
    taken = sorted(name for name in defaults if name.startswith("_") or hasattr(Parameters, name))
    if taken:
        raise ConfigError(f"{where}: {taken[0]!r} cannot be a parameter's name; choose another")
    return fit(defaults, defaults, where=where)


def fit(values: Mapping[str, Any], defaults: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """`values` coerced to the types that their names have, all problems reported together.

    Args:
        values: what was given, by name.
        defaults: the known names; one that is not in the vocabulary takes its default's type.
        where: what the values came from; it opens the message.

    Raises:
        ConfigError: unknown names, wrong types.
    """
    fitted, problems = {}, []
    for name, value in values.items():
        if name in PAPERMILL_NAMES:
            continue
        if name not in defaults:
            problems.append(f"{name!r} is not a parameter{hint(name, defaults)}")
            continue
        try:
            fitted[name] = coerce(value, annotation(name, defaults[name]))
        except ValueError as error:
            problems.append(f"{name}={value!r}: {error}")
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems))
    return fitted


def annotation(name: str, default: Any) -> Any:
    """The type of a parameter: the vocabulary's, else its default's."""
    if name in VOCABULARY:
        return VOCABULARY[name].annotation
    if isinstance(default, dict):
        return dict[str, Any]
    if isinstance(default, list):
        kinds = {type(item) for item in default}
        return list[kinds.pop() if len(kinds) == 1 else Any]  # type: ignore[misc]
    return Any if default is None else type(default)


def coerce(value: Any, kind: Any) -> Any:
    """`value` as an instance of the annotation `kind`: text such as "false", "1e-5", "[1,2]" or "none" is read, never taken as true.

    Raises:
        ValueError: it is none; the message says what is allowed.
    """
    for candidate in _candidates(value, _members(kind)):
        try:
            return _adapter(kind).validate_python(candidate, strict=True)
        except ValueError:
            continue
    raise ValueError(f"allowed is {_describe(kind)}{_nearest(value, kind)}")


def _candidates(value: Any, members: tuple[Any, ...]) -> Iterator[Any]:
    text = value.strip() if isinstance(value, str) else None
    if text is not None and NoneType in members and text.lower() in ("none", "null", "auto"):
        yield None
    structure = _structure(text) if text is not None else value
    yield from _lists(structure, members)
    if isinstance(structure, dict):
        yield structure
    yield value
    if text is not None and text.lower() in ("true", "false"):
        yield text.lower() == "true"
    yield from _numbers(value)
    if type(value) is int:
        yield str(value)
    yield from _lists([value], members)


def _numbers(value: Any) -> Iterator[int | float]:
    """The number that a value or its text means; a float that is whole also as an int."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return
    try:
        number = int(value) if isinstance(value, str | int) else value
    except ValueError:
        try:
            number = float(value)
        except ValueError:
            return
    if not math.isfinite(number):
        return
    if number == int(number):
        yield int(number)
    yield float(number)


def _lists(value: Any, members: tuple[Any, ...]) -> Iterator[list[Any]]:
    """A list with each item fitted to the items' annotation."""
    kinds = [get_args(member)[0] for member in members if get_origin(member) is list]
    if not kinds:
        return
    if isinstance(value, str) and "," in value and str not in kinds:
        value = value.split(",")
    if isinstance(value, list | tuple):
        try:
            yield [coerce(item, kinds[0]) for item in value]
        except ValueError:
            return


def _structure(text: str) -> Any:
    """The list or table that a text in brackets means, in JSON or YAML; any other text as it is."""
    if not text.startswith(("[", "{")):
        return text
    try:
        return json.loads(text)
    except ValueError:
        import yaml

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))


def _describe(kind: Any) -> str:
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        NoneType: "none",
        Any: "anything",
    }
    return " or ".join(_describe_member(member, words) for member in _members(kind))


def _describe_member(member: Any, words: Mapping[Any, str]) -> str:
    if get_origin(member) is Literal:
        return " or ".join(repr(choice) for choice in get_args(member))
    if get_origin(member) is list:
        example = {int: "[1, 2]", float: "[1.5, 2]"}.get(get_args(member)[0], "[a, b]")
        return f"a list, as in {example}"
    if get_origin(member) is dict:
        return "a table, as in {name: 1}"
    return words.get(member, str(member))


def _nearest(value: Any, kind: Any) -> str:
    choices = [choice for member in _members(kind) if get_origin(member) is Literal for choice in get_args(member)]
    close = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _shell() -> Any:
    """The running IPython shell, None outside one; IPython is not imported for the question."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def _executed(cells: list[str]) -> tuple[str, str]:
    """Sources of the tagged cell and of papermill's cell, as last executed; the latter counts only after the former."""
    tagged = [index for index, source in enumerate(cells) if source.lstrip().startswith("# Defaults:")]
    if not tagged:
        raise ConfigError(f"run the cell tagged 'parameters' first (it begins with {FIRST_LINE!r})")
    injected = [source for source in cells[tagged[-1] + 1 :] if source.lstrip().split("\n")[0].strip() == "# Parameters"]
    return cells[tagged[-1]], injected[-1] if injected else ""


def _assignments(source: str, *, where: str) -> dict[str, Any]:
    """Names and values of a cell of `name = literal` lines."""
    try:
        return dict(_assignment(statement) for statement in ast.parse(source).body)
    except (SyntaxError, ValueError, TypeError) as error:
        line = getattr(error, "text", None) or (error.args[0] if error.args else "")
        raise ConfigError(
            f"{where}: only lines 'name = literal' are allowed, compute in later cells (found: {str(line).strip()!r})"
        ) from None


def _assignment(statement: ast.stmt) -> tuple[str, Any]:
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            try:
                return name, ast.literal_eval(value)
            except ValueError:
                pass
    raise ValueError(ast.unparse(statement))


def _cells(tag: str, *texts: str) -> str:
    return "".join(f'<{tag} style="text-align:left">{html.escape(text)}</{tag}>' for text in texts)


def _shown(value: Any, limit: int = 160) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
