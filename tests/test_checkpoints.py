"""A checkpoint is whole or not there, holds what was given, and costs no other one before it is proven."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from sdlab import checkpoints, runs
from sdlab.checkpoints import Checkpoints, DamagedCheckpoint, NoSpace


def groups(step: int) -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return {name: {"b": torch.randn(3, 2, generator=generator), "a": torch.randn(5, generator=generator)} for name in ("weights", "ema")}


def save(folder: Path, *steps: int, keep_every: int = 0) -> None:
    with Checkpoints(folder, keep_every=keep_every) as written:
        for step in steps:
            written.save(step, groups(step), {})


def steps(folder: Path) -> list[int]:
    return [runs.checkpoint_step(path) for path in reversed(runs.checkpoints(folder))]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fail_at(number: int, real: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """A stand-in for `real` whose call of that number, counted from 1, raises."""
    calls: list[None] = []

    def stand_in(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == number:
            raise error
        return real(*arguments, **options)

    return stand_in


# What is in the files


def test_every_tensor_comes_back_bit_for_bit_under_its_name_and_in_its_order(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    group = {
        "z.weight": torch.randn(3, 5, generator=generator).bfloat16(),  # an odd number of half words: what follows is not aligned
        "a.bias": torch.randn(7, generator=generator),
        "turned": torch.randn(4, 6, generator=generator).T,
        "every second": torch.randn(8, generator=generator)[::2],
        "half": torch.randn(3, generator=generator).half(),
        "count": torch.tensor(12345678901),
        "nothing": torch.zeros(0, 4),
        "ümlaut": torch.tensor([True, False, True]),
        "large": torch.randn(300, 301, generator=generator, dtype=torch.float64),
        "parameter": torch.nn.Parameter(torch.randn(2, generator=generator)),
    }
    with Checkpoints(tmp_path) as written:
        file = written.save(1, {"weights": group}, {}) / "weights.safetensors"
    with safe_open(file, framework="pt") as opened:
        assert opened.offset_keys() == list(group)
        assert all(torch.equal(opened.get_tensor(name), tensor) for name, tensor in group.items())
    loaded = load_file(file)
    assert all(torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in group.items())


def test_a_group_is_a_file_and_the_state_lies_beside_under_a_manifest_of_sizes_and_hashes(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as written:
        checkpoint = written.save(7, {**groups(7), "exp_avg": {}}, {"scaler": {"scale": 2.0}})
    names = {"weights.safetensors", "ema.safetensors", "exp_avg.safetensors", "state.json"}
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert checkpoint == tmp_path / "checkpoints" / "step-00000007"
    assert set(manifest) == names and {path.name for path in checkpoint.iterdir()} == names | {"manifest.json"}
    assert all(
        about == {"bytes": (checkpoint / name).stat().st_size, "sha256": runs.file_hash(checkpoint / name)}
        for name, about in manifest.items()
    )
    assert runs.read_state(checkpoint) == {"step": 7, "scaler": {"scale": 2.0}}
    assert load_file(checkpoint / "exp_avg.safetensors") == {}
    for path in checkpoint.glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


def sharded(seed: int, *, size: int = 100_000) -> Any:
    """What a DTensor shows: the shape and type of the whole; only `gather` has the rest."""
    whole = torch.empty(size, device="meta")
    return SimpleNamespace(shape=whole.shape, dtype=whole.dtype, numel=whole.numel, seed=seed)


def test_shards_are_gathered_one_at_a_time_and_in_order(tmp_path: Path) -> None:
    alive: list[int] = []
    held, order = [], []

    class Counted(np.ndarray):
        pass

    def gather(shard: Any) -> Tensor:
        held.extend(alive)
        order.append(shard.seed)
        whole = np.full(shard.shape, shard.seed, np.float32).view(Counted)
        alive.append(shard.seed)
        weakref.finalize(whole, alive.remove, shard.seed)
        return torch.from_numpy(whole)

    tensors = {name: {str(seed): sharded(seed) for seed in seeds} for name, seeds in (("weights", (3, 1, 2)), ("ema", (5, 4)))}
    with Checkpoints(tmp_path) as written:
        checkpoint = written.save(1, tensors, {}, gather=gather)
    assert order == [3, 1, 2, 5, 4] and held == alive == []
    for name, group in tensors.items():
        loaded = load_file(checkpoint / f"{name}.safetensors")
        assert all(torch.equal(loaded[key], torch.full((100_000,), float(shard.seed))) for key, shard in group.items())


@pytest.mark.parametrize("wrong", [torch.zeros(2), torch.zeros(3, dtype=torch.float16)])
def test_a_tensor_gathered_to_another_shape_or_type_is_refused(tmp_path: Path, wrong: Tensor) -> None:
    with Checkpoints(tmp_path) as written, pytest.raises(ValueError, match=r"w is .* once gathered"):
        written.save(1, {"weights": {"w": torch.zeros(3)}}, {}, gather=lambda tensor: wrong)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_the_hash_of_a_large_tensor_is_taken_beside_its_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[bool, set[threading.Thread]] = {False: set(), True: set()}
    real = checkpoints.hashlib.sha256

    class Watched:
        def __init__(self) -> None:
            self.digest = real()
            self.hexdigest = self.digest.hexdigest

        def update(self, piece: memoryview) -> None:
            threads[piece.nbytes > checkpoints._SMALL].add(threading.current_thread())
            self.digest.update(piece)

    monkeypatch.setattr(checkpoints.hashlib, "sha256", Watched)
    with Checkpoints(tmp_path) as written:
        written.save(1, {"weights": {"small": torch.zeros(3), "large": torch.zeros(checkpoints._SMALL)}}, {})
    assert threads[False] == {threading.current_thread()} and threading.current_thread() not in threads[True] != set()


def test_all_is_on_the_disk_before_the_one_rename_and_the_manifest_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    before_rename: list[str] = []
    sync, replace = checkpoints._sync, os.replace

    def watched_replace(source: Path, target: Path) -> None:
        if Path(target).name == "step-00000001":
            before_rename.extend(synced)
        replace(source, target)

    monkeypatch.setattr(checkpoints, "_sync", lambda path: (sync(path), synced.append(path.name)))
    monkeypatch.setattr(checkpoints.os, "replace", watched_replace)
    save(tmp_path, 1)
    assert set(before_rename[:3]) == {"weights.safetensors", "ema.safetensors", "state.json"}
    assert before_rename[3] == "manifest.json" and before_rename[4].startswith(".step-00000001")
    assert synced[5:] == ["checkpoints"]


# What is there already


def test_a_valid_checkpoint_of_the_step_is_left_and_nothing_is_gathered(tmp_path: Path) -> None:
    save(tmp_path, 4)
    before = everything(tmp_path)
    with Checkpoints(tmp_path) as written:
        assert written.save(4, groups(5), {}, gather=lambda tensor: pytest.fail("gathered")) == runs.find_checkpoint(tmp_path, 4)
    assert everything(tmp_path) == before


def test_an_invalid_checkpoint_of_the_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 3, 4)
    damage(tmp_path / "checkpoints" / "step-00000004" / "ema.safetensors")
    save(tmp_path, 4)
    assert runs.is_valid(tmp_path / "checkpoints" / "step-00000004")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000003", "step-00000004"]


# A full disk, and other ends on the way


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda folder: SimpleNamespace(free=size))


def test_a_checkpoint_that_does_not_fit_with_some_to_spare_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    before = everything(tmp_path)
    tensors = {name: {"w": torch.zeros(1000)} for name in ("weights", "exp_avg")}
    needed = 8000 + 400 + (16 << 20)
    with Checkpoints(tmp_path) as written:
        free(monkeypatch, needed)
        with pytest.raises(NoSpace, match=f"run_dir {tmp_path} .*{needed:,} bytes are free and {needed:,} are needed"):
            written.save(2, tensors, {}, gather=lambda tensor: pytest.fail("gathered"))
        assert everything(tmp_path) == before
        free(monkeypatch, needed + 1)
        written.save(2, tensors, {})
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["_write", "_sync"])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_disk_that_gets_full_on_the_way_costs_nothing_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str, count: int
) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "checkpoints" / "step-00000002" / "ema.safetensors")
    before = everything(tmp_path)
    with Checkpoints(tmp_path) as written:
        with monkeypatch.context() as patched, pytest.raises(NoSpace, match=os.strerror(number)) as raised:
            patched.setattr(checkpoints, call, fail_at(count, getattr(checkpoints, call), OSError(number, os.strerror(number))))
            written.save(2, groups(2), {})
        assert str(tmp_path) in str(raised.value) and "bytes are free" in str(raised.value)
        assert everything(tmp_path) == before and len(list((tmp_path / "checkpoints").iterdir())) == 2
        written.save(2, groups(2), {})
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path)) == 2


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken disk"), KeyboardInterrupt(), RuntimeError("a rank died")])
def test_any_other_error_leaves_no_scratch_and_comes_through(tmp_path: Path, error: BaseException) -> None:
    save(tmp_path, 1)
    before = everything(tmp_path)
    with Checkpoints(tmp_path) as written, pytest.raises(type(error)) as raised:
        written.save(2, groups(2), {}, gather=fail_at(3, lambda tensor: tensor, error))
    assert raised.value is error and everything(tmp_path) == before and len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_a_state_that_json_does_not_know_is_refused_and_not_turned_into_text(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as written, pytest.raises(TypeError, match="not JSON serializable"):
        written.save(1, groups(1), {"scaler": torch.zeros(1)})
    assert list((tmp_path / "checkpoints").iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from sdlab import checkpoints

replace, move = os.replace, checkpoints._move_aside

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def save(folder, moment):
    seen = []
    def gather(tensor):
        seen.append(tensor)
        if moment == "between tensors" and len(seen) == 5: die()
        return tensor
    def replacing(source, target):
        if moment == "before the rename" and Path(target).name == "step-00000005": die()
        replace(source, target)
    def moving(checkpoint):
        aside = move(checkpoint)
        if moment == "while pruning" and checkpoint.name == "step-00000002": die()
        return aside
    os.replace, checkpoints._move_aside = replacing, moving
    with checkpoints.Checkpoints(folder) as written:
        written.save(5, {name: {key: torch.zeros(4) for key in "abc"} for name in ("weights", "ema")}, {}, gather=gather)

for folder in Path(sys.argv[1]).iterdir():  # one import of torch for all
    child = os.fork()
    if child == 0:
        save(folder, folder.name)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, folder
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders with the checkpoints 2, 3 and 4, named after the moment in which the process that saved 5 was killed."""
    root = tmp_path_factory.mktemp("killed")
    for moment in ("between tensors", "before the rename", "while pruning"):
        save(root / moment, 2, 3, 4)
    invalid = root / "before the rename" / "checkpoints" / "step-00000005"  # out of the way by then
    shutil.copytree(invalid.with_name("step-00000004"), invalid)
    damage(invalid / "state.json")
    done = subprocess.run([sys.executable, "-c", KILLED, str(root)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize(
    ("moment", "there"), [("between tensors", [2, 3, 4]), ("before the rename", [2, 3, 4]), ("while pruning", [3, 4, 5])]
)
def test_a_kill_leaves_whole_checkpoints_and_scratch(killed: Path, moment: str, there: list[int]) -> None:
    folder = killed / moment
    assert steps(folder) == there and all(runs.is_valid(path) for path in runs.checkpoints(folder))
    assert list((folder / "checkpoints").glob(".step-*"))
    save(folder, 5)
    assert steps(folder) == [3, 4, 5] and runs.checkpoint_step(runs.find_checkpoint(folder)) == 5


# What is read again, and what goes then


def damage_in_place(monkeypatch: pytest.MonkeyPatch, name: str, step: int) -> None:
    """Let the disk lose a bit of a file once the checkpoint of a step is in place."""
    real = checkpoints._put_in_place

    def losing(scratch: Path, final: Path) -> None:
        real(scratch, final)
        if runs.checkpoint_step(final) == step:
            damage(final / name)

    monkeypatch.setattr(checkpoints, "_put_in_place", losing)


def test_a_checkpoint_that_reads_differently_is_set_aside_and_nothing_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2, 3)
    damage_in_place(monkeypatch, "ema.safetensors", 4)
    (tmp_path / "checkpoints" / ".bad-step-00000004" / "of before").mkdir(parents=True)
    with Checkpoints(tmp_path) as written:
        written.save(4, groups(4), {})
        with pytest.raises(DamagedCheckpoint, match=r"step-00000004/ema\.safetensors .*\.bad-step-00000004"):
            written.wait()
        written.wait()
    assert steps(tmp_path) == [1, 2, 3] and runs.checkpoint_step(runs.find_checkpoint(tmp_path)) == 3
    assert (tmp_path / "checkpoints" / ".bad-step-00000004" / "ema.safetensors").is_file()


def test_the_next_save_tells_of_a_damaged_checkpoint_in_one_line_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_in_place(monkeypatch, "weights.safetensors", 1)
    with Checkpoints(tmp_path) as written:
        written.save(1, groups(1), {})
        written.save(2, groups(2), {})
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-00000001/weights.safetensors" in line and steps(tmp_path) == [2]


def test_the_end_raises_for_a_damaged_checkpoint_but_never_over_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage_in_place(monkeypatch, "weights.safetensors", 1)
    written = Checkpoints(tmp_path)
    written.save(1, groups(1), {})
    with pytest.raises(DamagedCheckpoint):
        written.close()
    with pytest.raises(RuntimeError, match="cannot schedule"):
        written._reader.submit(print)
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path) as written:
        written.save(1, groups(1), {})
        raise ZeroDivisionError
    assert "weights.safetensors" in capsys.readouterr().err


def test_reading_again_happens_beside_the_training_and_pruning_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2, 3)
    go, real = threading.Event(), runs.damaged_file
    started = threading.Event()

    def slow(checkpoint: Path) -> str | None:
        if threading.current_thread() is not threading.main_thread():
            started.set()
            assert go.wait(60)
        return real(checkpoint)

    monkeypatch.setattr(runs, "damaged_file", slow)
    with Checkpoints(tmp_path) as written:
        written.save(4, groups(4), {})
        assert started.wait(60) and steps(tmp_path) == [1, 2, 3, 4]
        threading.Timer(0.2, go.set).start()
        written.save(5, groups(5), {})  # waits for the one before
        assert go.is_set() and 1 not in steps(tmp_path)
    assert steps(tmp_path) == [3, 4, 5]


def test_the_newest_by_number_stay_and_milestones_for_ever(tmp_path: Path) -> None:
    save(tmp_path, 4, 8, 99_999_996, 99_999_998, 100_000_002, keep_every=8)
    assert steps(tmp_path) == [8, 99_999_996, 99_999_998, 100_000_002]
    save(tmp_path, 100_000_004)
    assert steps(tmp_path) == [99_999_998, 100_000_002, 100_000_004]


def test_only_valid_checkpoints_count_among_those_that_stay(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    damage(tmp_path / "checkpoints" / "step-00000003" / "weights.safetensors")
    save(tmp_path, 4)
    assert steps(tmp_path) == [1, 2, 3, 4]
    save(tmp_path, 5, 6)
    assert steps(tmp_path) == [4, 5, 6]


def test_a_file_is_read_again_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    real = runs.file_hash
    monkeypatch.setattr(runs, "file_hash", lambda path: (read.append(path), real(path))[1])
    save(tmp_path, 1, 2, 3, 4, 5)
    assert len(read) == len(set(read)) == 5 * 3


# What is said about it


def test_the_last_save_is_told_and_gives_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 130.0])
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: next(clock))
    with Checkpoints(tmp_path) as written:
        checkpoint = written.save(3, groups(3), {})
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert json.loads((tmp_path / runs.LAST_SAVE).read_text()) == {"step": 3, "seconds": 30.0, "bytes": size}
    assert runs.grace_s(tmp_path, None) == 90


def test_the_bytes_of_a_checkpoint_are_those_of_its_tensors() -> None:
    assert checkpoints.checkpoint_bytes(1000, ema=False) == 12_000
    assert checkpoints.checkpoint_bytes(1000, ema=True) == 16_000


@pytest.mark.parametrize(
    ("there", "steps_left", "save_every", "keep_every", "expected"),
    [
        (0, 1000, 100, 0, 4),
        (2, 1000, 100, 0, 2),
        (9, 1000, 100, 0, 1),
        (0, 1000, 100, 500, 4 + 2),
        (3, 1001, 100, 500, 1 + 3),
        (3, 1000, 100, 250, 1 + 3),  # every second milestone falls between saves; the last step is saved whatever it is
        (3, 1000, 100, 10, 1 + 11),
        (3, 0, 100, 500, 1),
    ],
)
def test_a_run_needs_room_for_what_comes_and_goes_and_for_what_stays(
    there: int, steps_left: int, save_every: int, keep_every: int, expected: int
) -> None:
    options = {"steps_left": steps_left, "save_every": save_every, "keep_every": keep_every, "there": there}
    assert checkpoints.disk_needed(1000, ema=True, **options) == expected * 16_000
    assert checkpoints.disk_needed(1000, ema=False, **options) == expected * 12_000
