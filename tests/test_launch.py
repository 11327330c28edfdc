"""Ranks share a job, what goes wrong in one of them is told, and none outlives the process that started it."""

import inspect
import json
import os
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from made import check_hashes

from sdlab import launch
from sdlab.config import ConfigError

PATIENCE_S = 120
PYTHON = sys.executable
STAND_IN = """\
#!{python}
import os, runpy, signal, sys, time, types
from pathlib import Path
if "--supervise" in sys.argv:
    sys.executable = {path!r}
    exec({supervisor!r})
else:
    exec({body!r})
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""What is started instead of Python, to do something before `sdlab.worker` starts on a rank."""
WORK = """\
import sdlab
from sdlab.config import ConfigError
def work(job, *, rank, world_size):
    folder = Path(sys.argv[-1])
{lines}
sdlab.prepare = types.SimpleNamespace(work=work)
"""
Run = Callable[..., None]


def stand_in(path: Path, body: str, supervisor: str = "") -> str:
    """Write what is to be started instead of Python."""
    path.write_text(STAND_IN.format(python=PYTHON, path=str(path), body=body, supervisor=supervisor))
    path.chmod(0o755)
    return str(path)


def shrink(change: Callable[[Any, str, int], None]) -> None:
    """Small shards and units, so that a few pictures make several."""
    from sdlab import cache, index, prepare  # noqa: F401

    change(cache, "ROWS", 16)
    change(cache, "CHUNK", 8)
    chunk = index.CHUNK
    for module in [module for name, module in sys.modules.items() if name.startswith("sdlab.")]:
        if getattr(module, "CHUNK", None) == chunk:
            change(module, "CHUNK", 16)


SMALL = f"from collections.abc import Callable\nfrom typing import Any\n{inspect.getsource(shrink)}\nshrink(setattr)"


def work(lines: str) -> str:
    """The body of a stand-in whose ranks do some lines of Python; `prepare` takes long to import."""
    return WORK.format(lines=textwrap.indent(textwrap.dedent(lines).strip(), "    "))


def until(true: Callable[[], Any]) -> Any:
    """Wait until something is true, and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := true()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
    return value


def left(mark: str) -> list[psutil.Process]:
    """The processes that were started with a mark in their environment, and what came from them."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def shards(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says of the shards: their names and hashes too."""
    return {"text": manifest["text"], "resolutions": manifest["resolutions"]}


class Watcher:
    """What is written to it makes a file once it is half of a progress bar; what shows that waits for the file."""

    SHOW = """
    print("\\rhalf", end="", file=sys.stderr)
    deadline = time.monotonic() + 30
    while not (folder.parent / "seen").exists():
        assert time.monotonic() < deadline, "it is not shown"
        time.sleep(0.01)
    """

    def __init__(self, seen: Path) -> None:
        self.seen = seen

    def write(self, text: str) -> None:
        if "half" in text:
            self.seen.touch()

    def flush(self) -> None:
        pass


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """What all processes that come from this test have in their environment."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("TEST_MARK", mark)
    return mark


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> Iterator[Run]:
    """Run ranks that do some lines of Python; they know `folder`, `rank` and `world_size`."""

    def run(lines: str, *, devices: int = 2) -> None:
        monkeypatch.setattr(sys, "executable", stand_in(tmp_path / "python", work(lines)))
        launch.run_ranks(tmp_path / "job", {"verb": "prepare"}, launch.Ranks(devices))

    yield run
    assert not left(mark)


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_two_ranks_prepare_what_one_process_prepares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, capsys: pytest.CaptureFixture[str], loaded_once: None, one_thread: None
) -> None:
    from sdlab import prepare

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path / "python", SMALL))
    shrink(monkeypatch.setattr)
    given = {"source": "scenes", "resolution": 16, "limit": 60}
    one = prepare.prepare(prepare.configure(**given, data_dir=str(tmp_path / "one"), devices=1))
    found = prepare.inspect(prepare.configure(**given, data_dir=str(tmp_path / "two"), devices=1))
    capsys.readouterr()
    two = prepare.prepare(prepare.configure(**given, data_dir=str(tmp_path / "two"), devices=2), found)
    assert shards(two) == shards(one) and two["counts"] == one["counts"] and two["entries"] == one["entries"]
    check_hashes(tmp_path / "two", two, 16)
    assert "Encode 16" in capsys.readouterr().err and "Encode 16" in (tmp_path / "two/index/job/rank-1.log").read_text()
    assert not left(mark)


def test_each_rank_knows_which_it_is_and_only_the_first_is_shown(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    run('print(rank, world_size, os.environ["LOCAL_RANK"]); print(f"rank {rank} says €", file=sys.stderr)', devices=3)
    assert capsys.readouterr().err == "0 3 0\nrank 0 says €\n"
    assert [(tmp_path / f"job/rank-{rank}.log").read_text() for rank in (1, 2)] == [
        f"{rank} 3 {rank}\nrank {rank} says €\n" for rank in (1, 2)
    ]


def test_progress_of_the_first_rank_is_shown_while_it_works(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Watcher(tmp_path / "seen"))
    run(Watcher.SHOW)


def test_a_config_error_of_a_rank_comes_out_as_one_and_ends_the_others(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"^the sentence$"):
        run("if rank: raise ConfigError('the sentence')\ntime.sleep(1000)")


def test_another_error_comes_out_with_rank_and_traceback(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)^rank 1 failed:\nTraceback .*ZeroDivisionError"):
        run("if rank: 1 / 0\ntime.sleep(1000)")


def test_the_first_of_several_errors_is_told(run: Run) -> None:
    with pytest.raises(ConfigError, match="first"):
        run(
            """
            while not rank and not (folder / "error-1.json").exists():
                time.sleep(0.01)
            raise ConfigError("first" if rank else "second")
            """
        )


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", r"rank 1 was ended by SIGKILL \(out of memory\?\)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "rank 1 was ended by SIGSEGV;"),
        ("os._exit(3)", "rank 1 left with exit code 3;"),
    ],
    ids=["SIGKILL", "SIGSEGV", "exit code"],
)
def test_a_rank_that_dies_is_told_with_how_it_died_and_what_it_said_last(run: Run, end: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=rf"(?s)^{told}.*last words"):
        run(f"if rank:\n    print('last words')\n    {end}\ntime.sleep(1000)")


def test_an_error_that_cannot_be_written_down_is_told_too(run: Run) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)what supervises the ranks .*OSError: the disk is full"):
        run("import shutil\nshutil.rmtree(folder)\nraise OSError('the disk is full')", devices=1)


def test_a_rank_that_does_not_see_the_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path / "python", 'sys.argv[-1] = "/nowhere/job"'))
    with pytest.raises(RuntimeError, match=r"/nowhere/job is not there on .*; it has to lie where all nodes see it"):
        launch.run_ranks(tmp_path / "job", {"verb": "prepare"}, launch.Ranks())


def test_more_nodes_than_there_are_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    with pytest.raises(ConfigError, match="num_nodes=2, and this process may use 1: start it inside a SLURM allocation of that many nodes"):
        launch.run_ranks(tmp_path / "job", {"verb": "prepare"}, launch.Ranks(num_nodes=2))
    assert not (tmp_path / "job").exists()


def test_an_interrupt_ends_all_ranks_also_those_that_do_not_want_to(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 1)
    monkeypatch.setenv("STARTER", str(os.getpid()))
    with pytest.raises(KeyboardInterrupt):
        run(
            """
            if rank:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                (folder / "ready").touch()
            while not (folder / "ready").exists():
                time.sleep(0.01)
            if not rank:
                os.kill(int(os.environ["STARTER"]), signal.SIGINT)
            time.sleep(1000)
            """
        )


def test_what_an_earlier_job_left_says_nothing_of_this_one(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        run("raise ConfigError('the sentence')")
    run("assert not (folder / 'error-0.json').exists() and not (folder / 'error-1.json').exists()")
    assert json.loads((tmp_path / "job/job.json").read_text())["verb"] == "prepare"
