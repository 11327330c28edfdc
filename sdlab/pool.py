"""Processes that share out work on batches: fresh ones that import no torch, whatever the starting process has run.

An argument that ends the process that works on it ends no run, and no process outlives the one that started it.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sdlab.config import ConfigError

BATCH = 32
"""Pictures a process takes at a time."""
CORES = "SDLAB_CORES"
"""The environment variable that says how many cores are this rank's share of its node."""
Context = TypeVar("Context")
Argument = TypeVar("Argument")
Result = TypeVar("Result")


def workers(asked: int | str, count: int) -> int:
    """How many processes decode `count` pictures: what was asked for, or one a core where each has something to do."""
    if isinstance(asked, int):
        return asked
    return 0 if count < 8 * BATCH else min(cores(), int(os.environ.get(CORES, cores())))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def map_batches(
    work: Callable[[list[Argument]], Result],
    batches: Iterable[tuple[Context, list[Argument]]],
    *,
    num_workers: int = 0,
    dead: Callable[[Argument], Result] | None = None,
) -> Iterator[tuple[Context, Result]]:
    """What `work` makes of each batch, in order; only a few batches are under way at a time.

    Args:
        work: a function of an importable module, or a partial of one.
        batches: any number, with something to tell each by.
        num_workers: processes that share the work, started afresh; 0 works in this process.
        dead: what stands for an argument that ends the process that works on it, as a batch of one; without it, that is an error.

    Raises:
        ConfigError: a process died and there is no `dead`.
    """
    if num_workers == 0:
        yield from ((context, work(batch)) for context, batch in batches)
        return
    stream = iter(batches)
    waiting: deque[_Sent[Context, Argument]] = deque()
    while True:
        try:
            with _pool(num_workers) as pool:
                for sent in waiting:
                    sent.future = pool.submit(work, sent.batch)
                for context, batch in stream:
                    waiting.append(_Sent(context, batch))
                    waiting[-1].future = pool.submit(work, batch)
                    if len(waiting) > 3 * num_workers:
                        yield waiting[0].context, waiting[0].result()
                        waiting.popleft()
                while waiting:
                    yield waiting[0].context, waiting[0].result()
                    waiting.popleft()
                return
        except BrokenProcessPool:
            if dead is None:
                raise ConfigError("a decoding process died (out of memory?); use fewer num_workers, or num_workers=0") from None
            _check_start()
            while waiting and waiting[0].is_done():
                yield waiting[0].context, waiting.popleft().result()
            if waiting:
                first = waiting.popleft()
                yield first.context, _one_by_one(work, first.batch, dead)


@dataclass
class _Sent(Generic[Context, Argument]):
    context: Context
    batch: list[Argument]
    future: Any = None

    def is_done(self) -> bool:
        """Whether its result was handed back before the process of another one died."""
        return self.future is not None and self.future.done() and not self.future.cancelled() and self.future.exception() is None

    def result(self) -> Any:
        return self.future.result()


class _Fresh(multiprocessing.context.ForkServerProcess):
    """A process that does not run a user's script again from its top, whenever it is started."""

    def start(self) -> None:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class _FreshContext(multiprocessing.context.ForkServerContext):
    Process = _Fresh


@contextmanager
def _pool(num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of fresh processes; whatever is still waiting when it is left is dropped."""
    context = _FreshContext()
    context.set_forkserver_preload(["sdlab.pictures"])
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_leave_with_the_starter)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_with_the_starter() -> None:
    """End this process when the one that started it has ended, however that went; an interrupt is for that one to answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    starter = multiprocessing.parent_process()
    assert starter is not None
    threading.Thread(target=_follow, args=[starter], daemon=True).start()


def _follow(starter: multiprocessing.process.BaseProcess) -> None:
    starter.join()
    os._exit(1)


def _check_start() -> None:
    try:
        with _pool(1) as pool:
            pool.submit(os.getpid).result()
    except BrokenProcessPool:
        raise ConfigError("the decoding processes end as soon as they are started; use num_workers=0") from None


def _one_by_one(work: Callable[[list[Argument]], Any], batch: list[Argument], dead: Callable[[Argument], Any]) -> Any:
    """A batch whose process died, one argument after another, in a fresh process after each that dies."""
    results: list[Any] = []
    left = deque(batch)
    while left:
        try:
            with _pool(1) as pool:
                while left:
                    results += pool.submit(work, [left[0]]).result()
                    left.popleft()
        except BrokenProcessPool:
            results += dead(left.popleft())
    return results
