"""`kill -9` of `prepare` at any moment costs at most one shard's work, leaves a valid cache or none, and no process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from faulty import SERVE
from made import check_hashes
from PIL import Image
from test_launch import SMALL, left, mark, shards, stand_in, until, work

from sdlab import cache, runs

__all__ = ["mark"]
SERVER = (
    SMALL
    + SERVE
    + """
import torch
from sdlab import parts, prepare, presets

frozen = parts.load_frozen(presets.get("tiny").networks)
parts.load_frozen = lambda networks: frozen


def work(order):
    os.environ["TEST_MARK"] = order["mark"]
    sys.executable = order["executable"]
    if order["threads"] > 1:
        torch.set_num_threads(order["threads"])
        torch.randn(2000, 2000) @ torch.randn(2000, 2000)
    getattr(prepare, order["verb"])(prepare.configure(**order["config"]))
    print("done")


serve(work)
"""
)
"""Imports once and runs each order in a process of its own, that a signal ends or stops right before a call on a path."""


@dataclass
class Started:
    """A `prepare` under way."""

    pid: int
    log: Path

    def wait(self) -> str:
        """What it said until it ended."""
        until(lambda: not psutil.pid_exists(self.pid))
        return self.log.read_text()

    def kill(self) -> None:
        """`kill -9`, and wait until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


class Starter:
    """Starts `prepare` on small shards, quickly."""

    def __init__(self, process: "subprocess.Popen[str]", logs: Path) -> None:
        self.process, self.logs, self.count = process, logs, 0

    def start(self, source: Path, data: Path, *events: tuple[str, str, int, int], **given: Any) -> Started:
        self.count += 1
        log = self.logs / f"{self.count}.log"
        order = {"verb": "prepare", "threads": 1, "mark": "", "executable": sys.executable, "events": events, "log": str(log)}
        order |= {name: given.pop(name) for name in order.keys() & given.keys()}
        order["config"] = {"source": str(source), "data_dir": str(data), "resolution": 32, "num_workers": 0, **given}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return Started(int(self.process.stdout.readline()), log)

    def run(self, source: Path, data: Path, **given: Any) -> dict[str, Any]:
        """An uninterrupted call and its manifest."""
        said = self.start(source, data, **given).wait()
        assert said.endswith("done\n"), said
        return json.loads((data / "manifest.json").read_text())


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    command = [sys.executable, "-c", f"import sys\n{SERVER}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Starter(process, tmp_path_factory.mktemp("logs"))
        for left_over in psutil.Process(process.pid).children(recursive=True):
            left_over.kill()
        process.kill()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 different pictures with captions of which some are equal."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(100):
        write_picture(folder / f"{number:03}.png", seed=number)
        (folder / f"{number:03}.txt").write_text(f"picture {number % 90}")
    return folder


def write_picture(path: Path, *, seed: int) -> None:
    Image.fromarray(np.random.default_rng(seed).integers(256, size=(40, 48, 3), dtype=np.uint8)).save(path)


@pytest.fixture(scope="module")
def reference(starter: Starter, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was prepared without a fault."""
    folder = tmp_path_factory.mktemp("reference") / "data"
    starter.run(source, folder)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads here knows of the small batches."""
    monkeypatch.setattr(cache, "CHUNK", 8)


def names(data: Path) -> set[str]:
    """All files where shards lie."""
    return {f"{path.parent.name}/{path.name}" for place in ("text", "moments_32") for path in (data / place).iterdir()}


def whole(data: Path) -> dict[str, tuple[int, int, str]]:
    """Shards that are there whole: inode, time of writing, and hash."""
    found = {}
    for about in [*(data / "text").glob("[!.]*.json"), *(data / "moments_32").glob("[!.]*.json")]:
        path, said = about.with_suffix(".arrow"), json.loads(about.read_text())
        assert runs.file_hash(path) == said["sha256"]
        found[f"{path.parent.name}/{path.name}"] = (path.stat().st_ino, path.stat().st_mtime_ns, said["sha256"])
    return found


def check(data: Path) -> None:
    """What the manifest names, if there is one, is whole and can be read."""
    manifest = cache.read_manifest(data)
    if manifest is not None:
        check_hashes(data, manifest, 32)
        opened = cache.open_cache(data, 32)
        assert len(opened.captions(range(len(opened)))) == len(opened.rows(range(len(opened)))["moments"]) == 100


def test_what_was_whole_before_a_kill_is_kept_and_one_shard_is_lost(
    starter: Starter, source: Path, reference: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    before: dict[str, tuple[int, int, str]] = {}
    for call, path, number, count in [
        ("replace", "index/items.arrow", 1, 0),
        ("replace", "checked/unit-*", 3, 0),
        ("replace", "preflight.json", 1, 0),
        ("fsync", "text/*.partial", 2, 1),
        ("replace", "text/*.json", 2, 2),
        ("fsync", "moments_32/*.partial", 1, 8),
        ("replace", "moments_32/*.json", 2, 9),
        ("replace", "moments_32/*.arrow", 3, 11),
        ("rename", "moments_32/samples-*", 1, 15),
        ("replace", "manifest.json", 1, 15),
    ]:
        said = starter.start(source, data, (call, f"{data}/{path}", number, signal.SIGKILL)).wait()
        assert not said.endswith("done\n") and "Traceback" not in said, (path, said)
        after = whole(data)
        assert len(after) == count and after.items() >= before.items(), path
        assert not (data / "manifest.json").exists()
        if path == "preflight.json":
            assert sum(len(np.load(rows)) for rows in data.glob("checked/known-*/rows.npy")) == 32
        before = after
    manifest = starter.run(source, data)
    assert shards(manifest) == shards(json.loads((reference / "manifest.json").read_text()))
    assert whole(data) == before and names(data) == names(reference)
    assert manifest["entries"]["32"] == {"hits": 100, "misses": 0, "stale": 0}
    check(data)


def test_kills_at_growing_delays_leave_no_process_and_the_same_cache(
    starter: Starter, source: Path, reference: Path, tmp_path: Path, mark: str
) -> None:
    data = tmp_path / "data"
    before: dict[str, tuple[int, int, str]] = {}
    for delay in (0.1, 0.2, 0.4, 0.7, 1.0, 1.4):
        started = starter.start(source, data, mark=mark, num_workers=2)
        time.sleep(delay)
        with suppress(ProcessLookupError):  # a fast machine may be done with what was left
            started.kill()
        until(lambda: not left(mark))
        assert whole(data).items() >= before.items()
        before = whole(data)
        check(data)
    assert shards(starter.run(source, data)) == shards(json.loads((reference / "manifest.json").read_text()))
    assert names(data) == names(reference)


@pytest.mark.parametrize("change", ["crop", "picture"])
def test_a_kill_of_a_second_call_leaves_the_cache_of_the_first_until_the_new_manifest(
    starter: Starter, source: Path, reference: Path, tmp_path: Path, change: str
) -> None:
    data = shutil.copytree(reference, tmp_path / "data")
    source = shutil.copytree(source, tmp_path / "source")
    given = {"crop": "random"} if change == "crop" else {}
    if change == "picture":
        write_picture(source / "050.png", seed=1000)
    old, new = (data / "manifest.json").read_bytes(), 7 if change == "crop" else 1
    for call, path, number, count in [
        ("replace", "moments_32/*.json", 1, 0),
        ("rename", "moments_32/samples-*", 1, new),
        ("replace", "manifest.json", 1, new),
    ]:
        starter.start(source, data, (call, f"{data}/{path}", number, signal.SIGKILL), **given).wait()
        assert (data / "manifest.json").read_bytes() == old and len(whole(data)) == 15 + count
        check(data)
    starter.start(source, data, ("unlink", f"{data}/moments_32/*", 1, signal.SIGKILL), **given).wait()
    assert (data / "manifest.json").read_bytes() != old and len(whole(data)) == 15 + new
    check(data)
    first, second = json.loads(old), starter.run(source, data, **given)
    assert second["resolutions"]["32"]["key"] != first["resolutions"]["32"]["key"] and second["text"] == first["text"]
    assert len(whole(data)) == 15 and len(names(data)) == 31


def test_a_second_call_at_once_is_refused_and_works_afterwards(starter: Starter, source: Path, reference: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    slow = starter.start(source, data, ("replace", f"{data}/moments_32/*.json", 3, signal.SIGSTOP))
    until(lambda: psutil.Process(slow.pid).status() == psutil.STATUS_STOPPED)
    assert f"ConfigError: data_dir {data} is being prepared by another process" in starter.start(source, data).wait()
    os.kill(slow.pid, signal.SIGCONT)
    assert slow.wait().endswith("done\n")
    before = whole(data)
    assert shards(starter.run(source, data)) == shards(json.loads((reference / "manifest.json").read_text())) and whole(data) == before


def test_a_killed_call_takes_its_ranks_and_their_decoding_processes_along(
    starter: Starter, source: Path, tmp_path: Path, mark: str
) -> None:
    (tmp_path / "asleep.py").write_text("import time\ndef work(batch):\n    open(batch[0], 'w').close()\n    time.sleep(1000)\n")
    sleep = f"""
    sys.path.append({str(tmp_path)!r})
    import asleep
    from sdlab import pool
    batches = [(number, [f"{tmp_path}/asleep-{{rank}}-{{number}}"]) for number in range(2)]
    list(pool.map_batches(asleep.work, batches, num_workers=2))
    """
    executable = stand_in(tmp_path / "python", work(sleep))
    started = starter.start(source, tmp_path / "data", mark=mark, executable=executable, devices=2)
    until(lambda: len([*tmp_path.glob("asleep-*")]) == 4)
    assert len(left(mark)) >= 6
    started.kill()
    until(lambda: not left(mark))


def test_an_interrupted_call_takes_its_decoding_processes_along(starter: Starter, source: Path, tmp_path: Path, mark: str) -> None:
    data = tmp_path / "data"
    stopped = starter.start(source, data, ("replace", f"{data}/checked/unit-*", 1, signal.SIGSTOP), mark=mark, num_workers=2)
    until(lambda: psutil.Process(stopped.pid).status() == psutil.STATUS_STOPPED)
    assert len(left(mark)) >= 3
    os.killpg(stopped.pid, signal.SIGINT)
    os.kill(stopped.pid, signal.SIGCONT)
    said = stopped.wait()
    assert "KeyboardInterrupt" in said and not said.endswith("done\n")
    until(lambda: not left(mark))


def test_decoding_is_shared_out_by_a_process_that_has_run_threaded_operations(starter: Starter, source: Path, tmp_path: Path) -> None:
    assert starter.start(source, tmp_path / "data", verb="inspect", threads=2, num_workers=2).wait().endswith("done\n")
    report = json.loads((tmp_path / "data/preflight.json").read_text())
    assert (report["scanned"], report["used"]) == (100, 100)
