"""Job files: values, steps and references become a list of checked steps, before anything runs."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from sdlab import parameters
from sdlab.config import ConfigError, Model, build, hint, resolve_path
from sdlab.presets import YamlLoader, read_yaml

PACKAGE = Path(__file__).parent
REFERENCE = re.compile(r"\$\{([^${}]*)\}")


class StepSpec(Model):
    """One entry of a job file's `steps`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    notebook: str
    parameters: dict[str, Any] = Field(default_factory=dict)
    needs: list[str] = Field(default_factory=list)
    matrix: dict[str, list[Any] | str] = Field(default_factory=dict)
    """Notebook parameters with a list of values each: one step for every combination; `${matrix.x}` is a step's value."""


class JobSpec(Model):
    """A job file."""

    values: dict[str, Any] = Field(default_factory=dict)
    steps: list[StepSpec] = Field(min_length=1)


@dataclass(frozen=True)
class Step:
    """One notebook to run, checked."""

    name: str
    entry: str
    """The name in the job file; `name` is longer where a matrix made several steps of one entry."""
    notebook: Path
    output: Path
    """Where the executed notebook is written."""
    given: dict[str, Any]
    effective: dict[str, Any]
    needs: tuple[str, ...]
    digest: str
    """Changes with the notebook's source, the effective parameters, the needed steps and this package."""


@dataclass(frozen=True)
class Job:
    """Checked steps in the order in which they run."""

    title: str
    out: Path
    cwd: Path
    """Where kernels run: relative parameters start here."""
    steps: tuple[Step, ...]
    always: bool = False
    """Run also what is done."""


def plan(job_file: str | Path, *, out: str | Path | None = None, sets: Sequence[str] = ()) -> Job:
    """Read and check a job file; no kernel is started.

    Args:
        job_file: a YAML file with `values` and `steps`.
        out: folder of the executed notebooks; default `papermill_runs/out/NAME` in the project.
        sets: "NAME=VALUE" changes of `values`; dotted names reach into tables.

    Raises:
        ConfigError: one line a problem, of all steps together.
    """
    path = resolve_path(job_file)
    spec = _read(path)
    root = project(path)
    folder = resolve_path(out) if out is not None else root / "papermill_runs" / "out" / path.stem
    names = {"values": _with_sets(spec.values, sets, where=str(path)), "out": str(folder)}
    entries = _ordered(_multiplied(spec.steps, names, where=f"job file {path}"), where=f"job file {path}")
    return Job(path.stem, folder, root, _checked(entries, folder=folder, roots=(root, path.parent)))


def plan_notebook(notebook: str | Path, given: Mapping[str, Any], *, out: str | Path | None = None) -> Job:
    """A job of one notebook, run where the user is.

    Raises:
        ConfigError: no such notebook, unknown parameters or wrong types.
    """
    path = resolve_path(notebook)
    folder = resolve_path(out) if out is not None else project(path) / "papermill_runs" / "out" / path.stem / time.strftime("%Y%m%d-%H%M%S")
    entry = _Entry(path.stem, path.stem, str(path), dict(given), ())
    return Job(path.stem, folder, Path.cwd(), (_step(entry, path, folder=folder, cwd=Path.cwd(), digests={}),), always=True)


def project(path: Path) -> Path:
    """The folder above `papermill_runs` or `notebooks` that `path` lies in, else the folder of `path`."""
    return next((parent.parent for parent in path.parents if parent.name in ("papermill_runs", "notebooks")), path.parent)


def expand(value: Any, names: Mapping[str, Any], *, seen: tuple[str, ...] = ()) -> Any:
    """Put values in place of `${a.b}`, inner references first; a text that is one reference only keeps its type.

    Raises:
        ConfigError: unknown names, references in a circle, or a table within a text.
    """
    if isinstance(value, Mapping):
        return {key: expand(item, names, seen=seen) for key, item in value.items()}
    if isinstance(value, list):
        return [expand(item, names, seen=seen) for item in value]
    if not isinstance(value, str):
        return value
    while (match := REFERENCE.search(value)) is not None:
        found = _look_up(match[1].strip(), names, seen)
        if match[0] == value:
            return found
        value = value[: match.start()] + _as_text(found, match[0]) + value[match.end() :]
    if "${" in value:
        raise ConfigError(f"{value!r}: '${{' is not closed; write ${{values.NAME}}")
    return value


@dataclass(frozen=True)
class _Entry:
    name: str
    entry: str
    notebook: str
    given: dict[str, Any]
    needs: tuple[str, ...]


def _read(path: Path) -> JobSpec:
    if not path.is_file():
        raise ConfigError(f"job file {path} is not there; give the path of a .yaml file")
    where = f"job file {path}"
    return build(JobSpec, read_yaml(path, where=where, fields="'values' and 'steps'"), where=where)


def _with_sets(values: Mapping[str, Any], sets: Sequence[str], *, where: str) -> dict[str, Any]:
    changed = copy.deepcopy(dict(values))
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: write NAME=VALUE, with a name of 'values' in {where}")
        *path, last = name.strip().split(".")
        table = changed
        for part in path:
            table = _member(table, part, name)
        _member(table, last, name)
        table[last] = _read_value(value)
    return changed


def _member(table: Any, part: str, name: str) -> Any:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name!r}: there is no {part!r} in {table!r}, which is not a table")
    if part not in table:
        raise ConfigError(f"{name!r}: {part!r} is not a known name{hint(part, map(str, table))}")
    return table[part]


def _read_value(text: str) -> Any:
    try:
        return yaml.load(text, Loader=YamlLoader)
    except yaml.YAMLError:
        return text


def _look_up(reference: str, names: Mapping[str, Any], seen: tuple[str, ...]) -> Any:
    if reference in seen:
        raise ConfigError(f"${{{reference}}} refers to itself through {' -> '.join([*seen, reference])}")
    found: Any = names
    for part in reference.split("."):
        found = _member(found, part, f"${{{reference}}}")
    return expand(copy.deepcopy(found), names, seen=(*seen, reference))


def _as_text(value: Any, reference: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{reference} is {value!r}, which cannot stand within a text; use the reference alone")
    return str(value)


def _multiplied(specs: Sequence[StepSpec], names: Mapping[str, Any], *, where: str) -> list[_Entry]:
    """The job file's entries with references filled in, one for each combination of their matrix."""
    entries, problems = [], []
    for spec in specs:
        try:
            entries += _combinations(spec, names)
        except ConfigError as error:
            problems.append(f"{where}, step {spec.name!r}: {error}")
    _raise(problems)
    return entries


def _combinations(spec: StepSpec, names: Mapping[str, Any]) -> list[_Entry]:
    matrix = expand(spec.matrix, names)
    for name, values in matrix.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"matrix: {name!r} is {values!r}; give a list of values")
    labels = [[f"-{name}-{label}" for label in _labels(values)] for name, values in matrix.items()]
    entries = []
    for suffixes, values in zip(itertools.product(*labels), itertools.product(*matrix.values()), strict=True):
        chosen = dict(zip(matrix, values, strict=True))
        here = {**names, "matrix": chosen}
        given = {**chosen, **expand(spec.parameters, here)}
        entries.append(_Entry("".join([spec.name, *suffixes]), spec.name, str(expand(spec.notebook, here)), given, tuple(spec.needs)))
    return entries


def _labels(values: Sequence[Any]) -> list[str]:
    """Short different names for a matrix's values: the values themselves where they can be names, else 1, 2, ..."""
    labels = [str(value) for value in values]
    fit = all(re.fullmatch(r"[A-Za-z0-9._-]{1,40}", label) for label in labels) and len(set(labels)) == len(labels)
    return labels if fit else [str(number) for number in range(1, len(labels) + 1)]


def _ordered(entries: Sequence[_Entry], *, where: str) -> list[_Entry]:
    """In file order as far as needs allow; needs are replaced by the names of all steps that they stand for."""
    stand_for: dict[str, list[str]] = {}
    for entry in entries:
        for name in dict.fromkeys((entry.entry, entry.name)):
            stand_for.setdefault(name, []).append(entry.name)
    names = [entry.name for entry in entries]
    problems = [f"{where}: step name {name!r} is used twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    problems += [
        f"{where}, step {entry.name!r}: needs {need!r}, which is no step{hint(need, stand_for)}"
        for entry in entries
        for need in entry.needs
        if need not in stand_for
    ]
    _raise(problems)
    waiting = {entry.name: [name for need in entry.needs for name in stand_for[need]] for entry in entries}
    ordered: list[_Entry] = []
    while len(ordered) < len(entries):
        placed = {entry.name for entry in ordered}
        free = next((entry for entry in entries if entry.name not in placed and placed.issuperset(waiting[entry.name])), None)
        if free is None:
            raise ConfigError(f"{where}: the needs of {', '.join(name for name in names if name not in placed)} go round in a circle")
        ordered.append(_Entry(free.name, free.entry, free.notebook, free.given, tuple(waiting[free.name])))
    return ordered


def _checked(entries: Sequence[_Entry], *, folder: Path, roots: Sequence[Path]) -> tuple[Step, ...]:
    steps: dict[str, Step] = {}
    problems = []
    for entry in entries:
        try:
            digests = {need: steps[need].digest for need in entry.needs if need in steps}
            steps[entry.name] = _step(entry, _find(entry.notebook, roots), folder=folder, cwd=roots[0], digests=digests)
        except ConfigError as error:
            problems.append(f"step {entry.name!r}: {error}")
    _raise(problems)
    return tuple(steps.values())


def _find(notebook: str, roots: Sequence[Path]) -> Path:
    tried = list(dict.fromkeys((root / notebook).resolve() for root in roots))
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise ConfigError(f"notebook {notebook!r} is not there (looked at {' and '.join(map(str, tried))})")
    return found


def _step(entry: _Entry, notebook: Path, *, folder: Path, cwd: Path, digests: Mapping[str, str]) -> Step:
    given = parameters.check(notebook, entry.given)
    effective = {**parameters.defaults_of(notebook), **given}
    digest = _sha256([_notebook_source(notebook), effective, _preset_files(effective, cwd), dict(digests), package_digest()])
    return Step(entry.name, entry.entry, notebook, folder / f"{entry.name}.ipynb", given, effective, entry.needs, digest)


def _notebook_source(notebook: Path) -> list[Any]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [[cell["cell_type"], "".join(cell["source"])] for cell in cells]


def _preset_files(effective: Mapping[str, Any], cwd: Path) -> list[str]:
    """Contents of the YAML files that parameters name: a changed recipe makes a changed step."""
    paths = [cwd / Path(value).expanduser() for value in effective.values() if isinstance(value, str) and value.endswith((".yaml", ".yml"))]
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


@functools.cache
def package_digest() -> str:
    """SHA-256 of the version and every file of this package."""
    files = [path for path in sorted(PACKAGE.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return _sha256([version("sdlab"), [[str(path.relative_to(PACKAGE)), hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]])


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))
