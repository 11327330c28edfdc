"""The pass that decodes every picture whole, in units of `CHUNK` rows of the index that are shared out to ranks and processes.

What it has shown lies in `checked/`, and is used again by the digest of a file's bytes: those are read, but not decoded again.
"""

from __future__ import annotations

import math
import operator
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from sdlab import launch, pictures, pool
from sdlab.config import SIZE_COLUMNS, PrepareConfig
from sdlab.index import CHUNK, Index
from sdlab.items import Handle
from sdlab.parts import Frozen
from sdlab.pictures import Checked, Known

FOLDER = "checked"
COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt}
_UNIT = pa.schema(
    [
        pa.field("digest", pa.binary()),
        pa.field("height", pa.int32()),
        pa.field("width", pa.int32()),
        pa.field("format", pa.string()),
        pa.field("marks", pa.int32()),
        pa.field("num_tokens", pa.int32()),
        pa.field("filtered", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("detail", pa.string()),
    ]
)


def gather_known(folder: Path, run: str) -> None:
    """Put what earlier calls have learned of good pictures, finished or killed, where the workers of this one find it."""
    checked = folder / FOLDER
    checked.mkdir(parents=True, exist_ok=True)
    rows = [_known_rows(table) for path in sorted(checked.glob("unit-*.arrow")) if (table := read_unit(path)) is not None]
    rows += [known for path in checked.glob(f"{_known_name('*')}/rows.npy") if (known := _read_known(path)) is not None]
    there = np.concatenate([np.empty(0, Known.ROW), *rows])
    _, first = np.unique(there["digest"], return_index=True)
    store = checked / _known_name(run)
    store.mkdir(exist_ok=True)
    Known.write(store, there[first])
    for old in checked.glob("known-*"):
        if old != store:
            shutil.rmtree(old)


def _read_known(path: Path) -> np.ndarray | None:
    try:
        known = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    return known if known.dtype == Known.ROW else None


def _known_name(run: str) -> str:
    return f"known-{pictures.pixel_code().replace(' ', '-')}-{run}"


def _known_rows(table: pa.Table) -> np.ndarray:
    if (table.schema.metadata or {}).get(b"pixels") != pictures.pixel_code().encode():
        return np.empty(0, Known.ROW)
    good = table.filter(pa.compute.greater(table.column("height"), 0))
    rows = np.empty(len(good), Known.ROW)
    rows["digest"] = np.frombuffer(b"".join(good.column("digest").to_pylist()), "V16")
    for name in ("height", "width", "marks"):
        rows[name] = good.column(name).to_numpy()
    rows["format"] = [kind.encode() for kind in good.column("format").to_pylist()]
    return rows


def check(config: PrepareConfig, index: Index, frozen: Frozen, folder: Path, *, rank: int = 0, world_size: int = 1) -> None:
    """Decode every picture of this rank's units whole, and write what was found to `folder/checked`."""
    units = range(rank, math.ceil(len(index) / CHUNK), world_size)
    plans: dict[int, _Unit] = {}
    mine = sum(min(CHUNK, len(index) - unit * CHUNK) for unit in units)
    known = str(folder / FOLDER / _known_name(index.about["run"]))
    work, batches = partial(pictures.check_batch, known=known), _batches(index, units, config, plans)
    results = pool.map_batches(work, batches, num_workers=pool.workers(config.num_workers, mine), dead=_died)
    with launch.progress(total=mine, title="Preflight", unit=" pictures") as bar:
        for (unit, rows), checked in results:
            plan = plans[unit]
            plan.add(rows, checked)
            bar.update(len(rows))
            if plan.done:
                bar.update(plan.passed_over)
                _write_unit(plans.pop(unit), index, frozen, folder)


class _Unit:
    """What becomes known of the pictures of one unit."""

    def __init__(self, index: Index, number: int, config: PrepareConfig) -> None:
        self.number, self.start = number, number * CHUNK
        self.rows = range(self.start, min(self.start + CHUNK, len(index)))
        numbered = list(index.items(self.rows))
        self.items = [item for _, item in numbered]
        self.parts = [part for part, _ in numbered]
        self.filtered = _by_metadata(config, index.fields(self.start, self.rows.stop), len(self.rows))
        self.checked: list[Checked | None] = [
            Checked(b"", problem=item.problem) if item.problem else Checked(b"") if lost else None
            for item, lost in zip(self.items, self.filtered, strict=True)
        ]
        self.passed_over = len(self.rows) - len(self.waiting())

    @property
    def done(self) -> bool:
        return all(checked is not None for checked in self.checked)

    def waiting(self) -> list[int]:
        """Rows that have to be decoded."""
        return [row for row, checked in zip(self.rows, self.checked, strict=True) if checked is None]

    def add(self, rows: Sequence[int], checked: Sequence[Checked]) -> None:
        for row, one in zip(rows, checked, strict=True):
            self.checked[row - self.start] = one


def _batches(
    index: Index, units: Iterable[int], config: PrepareConfig, plans: dict[int, _Unit]
) -> Iterator[tuple[tuple[int, list[int]], list[Handle]]]:
    for number in units:
        plan = plans[number] = _Unit(index, number, config)
        waiting = plan.waiting()
        for start in range(0, max(1, len(waiting)), pool.BATCH):
            rows = waiting[start : start + pool.BATCH]
            yield (number, rows), [index.handle(plan.parts[row - plan.start], plan.items[row - plan.start]) for row in rows]


def _died(handle: Handle) -> list[Checked]:
    return [Checked(b"", problem=("unreadable", "decoding it ended the process (out of memory?)"))]


def _by_metadata(config: PrepareConfig, fields: dict[str, np.ndarray], count: int) -> list[str]:
    """Which filter takes each picture already by its metadata, "" for none."""
    lost = np.full(count, "", dtype=object)
    if config.min_resolution is not None and {"width", "height"} <= set(fields):
        lost[np.fmin(fields["width"], fields["height"]) < config.min_resolution] = "min_resolution"
    for one in config.filters:
        if one.column not in SIZE_COLUMNS:
            values = fields[one.column]
            lost[(lost == "") & np.isnan(values)] = f"{one.column}_missing"
            lost[(lost == "") & ~COMPARE[one.operator](values, one.value)] = one.column
    return list(lost)


def _write_unit(unit: _Unit, index: Index, frozen: Frozen, folder: Path) -> None:
    texts = [item.caption.text or "" for item in unit.items]
    checked = [one or Checked(b"") for one in unit.checked]
    columns = {
        "digest": [one.digest for one in checked],
        "height": [one.size[0] for one in checked],
        "width": [one.size[1] for one in checked],
        "format": [one.format for one in checked],
        "marks": [pictures.bits_of(one.marks) for one in checked],
        "num_tokens": frozen.count_tokens(texts),
        "filtered": unit.filtered,
        "reason": [one.problem[0] if one.problem else "" for one in checked],
        "detail": [one.problem[1] if one.problem else "" for one in checked],
    }
    schema = _UNIT.with_metadata({"run": index.about["run"], "pixels": pictures.pixel_code()})
    path = unit_path(folder, unit.number)
    partial_path = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with pa.OSFile(str(partial_path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    os.replace(partial_path, path)


def unit_path(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"unit-{number:06d}.arrow"


def read_unit(path: Path) -> pa.Table | None:
    try:
        with pa.memory_map(str(path)) as mapped:
            return pa.ipc.open_file(mapped).read_all()
    except (pa.ArrowInvalid, OSError):
        return None


def sweep(folder: Path, index: Index) -> None:
    """Remove what earlier calls have left in `checked` and the units of this one cover."""
    count = math.ceil(len(index) / CHUNK)
    for path in (folder / FOLDER).glob("unit-*"):
        if path.suffix == ".partial" or int(path.stem.split("-")[1]) >= count:
            path.unlink()
