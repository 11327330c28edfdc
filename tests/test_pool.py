"""Processes share out work in order, start fresh, cost only their own argument when they die, and outlive nobody."""

import itertools
import os
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from made import plain, write_files

from sdlab import pictures, pool, scenes
from sdlab.config import ConfigError
from sdlab.crops import View
from sdlab.items import Broken, Span

VIEW = View((16, 16), "center", 0, 0, False)


def doubled(batch: list[int], deadly: int | None = None) -> list[int]:
    """Twice each number, in a time of its own; a deadly one ends the process."""
    if deadly in batch:
        os._exit(1)
    time.sleep(0.01 * (batch[0] % 3))
    return [2 * number for number in batch]


def stand_in(number: int) -> list[int]:
    return [-number]


def process(batch: list[int]) -> tuple[int, bool]:
    """Which process this is, and whether it knows torch."""
    return os.getpid(), "torch" in sys.modules


def end_at_once() -> None:
    os._exit(1)


def works(process: psutil.Process) -> bool:
    """Whether a process is neither gone nor waiting to be buried."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(("asked", "count", "expected"), [(3, 1, 3), (0, 10**9, 0), ("auto", 8 * pool.BATCH - 1, 0)])
def test_there_are_as_many_workers_as_asked_for_and_none_for_a_few_pictures(asked, count, expected):
    assert pool.workers(asked, count) == expected
    assert pool.workers("auto", 8 * pool.BATCH) >= 1


def test_worker_processes_give_the_same_as_this_process(tmp_path):
    files = {f"{i}.png": plain(3 + i) for i in range(5)} | {"bad.png": b"broken"}
    write_files(tmp_path, files)
    handles = [*(Span(os.fsencode(tmp_path / name), 0, -1) for name in files), plain(), Broken("a reason"), *scenes.draw(40, seed=0)]
    batches = [(start, handles[start : start + 8]) for start in range(0, 48, 8)]
    here, there = (list(pool.map_batches(pictures.check_batch, batches, num_workers=n)) for n in (0, 2))
    assert here == there and sum(len(batch) for _, batch in here) == 48


def test_results_come_in_order_and_only_a_few_batches_are_under_way():
    pulled = []
    batches = ((pulled.append(number), (number, [number, -number]))[1] for number in range(40))
    for number, result in enumerate(pool.map_batches(doubled, batches, num_workers=2)):
        assert result == (number, [2 * number, -2 * number])
        assert len(pulled) <= number + 7
    assert number == 39


def test_who_stops_early_has_what_was_taken_and_leaves_no_process_behind():
    results = pool.map_batches(process, ((number, []) for number in itertools.count()), num_workers=2)
    taken = list(itertools.islice(results, 5))
    results.close()
    assert [context for context, _ in taken] == [0, 1, 2, 3, 4]
    pids = {pid for _, (pid, _) in taken}
    assert os.getpid() not in pids and not any(map(psutil.pid_exists, pids))


def test_a_process_that_dies_costs_only_its_argument():
    batches = [(number, [2 * number, 2 * number + 1]) for number in range(3)]
    found = list(pool.map_batches(partial(doubled, deadly=3), batches, num_workers=2, dead=stand_in))
    assert found == [(0, [0, 2]), (1, [4, -3]), (2, [8, 10])]


def test_a_process_that_dies_is_an_error_where_nothing_stands_for_its_argument():
    with pytest.raises(ConfigError, match="a decoding process died"):
        list(pool.map_batches(partial(doubled, deadly=3), [(0, [1, 2]), (1, [3])], num_workers=1))


def test_processes_that_end_as_soon_as_they_start_are_an_error(monkeypatch):
    monkeypatch.setattr(pool, "_leave_with_the_starter", end_at_once)
    with pytest.raises(ConfigError, match="end as soon as they are started"):
        list(pool.map_batches(doubled, [(0, [1])], num_workers=1, dead=stand_in))


def test_an_error_of_the_work_or_of_the_batches_arrives_as_it_is():
    with pytest.raises(pictures.BadPicture) as bad:
        list(pool.map_batches(partial(pictures.load_batch, background=pictures.WHITE), [(0, [(b"", VIEW)])], num_workers=1))
    assert (bad.value.reason, bad.value.detail) == ("empty_file", "0 bytes")
    with pytest.raises(ZeroDivisionError):
        list(pool.map_batches(doubled, ((0, [1 // number]) for number in (1, 0)), num_workers=1))


def test_workers_start_afresh_after_this_process_has_run_threads_of_torch():
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.ones(300, 300).matmul(torch.ones(300, 300)).mean() == 300
        (_, (pid, knows_torch)), *_ = pool.map_batches(process, [(0, [1])], num_workers=1)
        assert pid != os.getpid() and not knows_torch
    finally:
        torch.set_num_threads(threads)


def test_importing_what_workers_need_does_not_import_torch():
    code = "import sys, sdlab.pictures, sdlab.pool; sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SCRIPT = """
import sys, time
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from sdlab import pool
with Path("runs").open("a") as file:
    file.write("once ")
if "slow" in sys.argv:  # the first process is ready before the second is asked for
    submit = ProcessPoolExecutor.submit
    def slowly(*arguments):
        future = submit(*arguments)
        wait([future], timeout=10)
        time.sleep(0.2)
        ProcessPoolExecutor.submit = submit
        return future
    ProcessPoolExecutor.submit = slowly
print(sum(result for _, result in pool.map_batches(sum, [(number, [1, 2]) for number in range(6)], num_workers=2)))
"""


@pytest.mark.parametrize(
    "pace",
    ["quick", "slow"],
)
def test_a_script_is_not_run_again_in_the_processes_that_it_starts(tmp_path, pace):
    write_files(tmp_path, {"script.py": SCRIPT})
    ended = subprocess.run([sys.executable, "script.py", pace], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.stdout, (tmp_path / "runs").read_text()) == ("18\n", "once "), ended.stderr


def test_no_process_outlives_the_one_that_started_it_even_when_that_is_killed(tmp_path):
    lines = ["import time", "from sdlab import pool", "batches = ((number, 60 if number else 0) for number in range(9))"]
    lines += ["results = pool.map_batches(time.sleep, batches, num_workers=2)", "print(next(results), flush=True)", "next(results)"]
    script = write_files(tmp_path, {"script.py": "\n".join(lines)}) / "script.py"
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdout.readline() == b"(0, None)\n"
        others = psutil.Process(started.pid).children(recursive=True)
        started.kill()
    try:
        assert len(others) >= 3
        end = time.monotonic() + 20
        while left := list(filter(works, others)):
            assert time.monotonic() < end, left
            time.sleep(0.05)
    finally:
        for one in filter(works, others):
            one.kill()
