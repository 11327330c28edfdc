"""The papermill engine `sdlab`: checked parameters, merged streams, signals that stop a notebook instead of breaking it, honest statuses.

papermill imports every registered engine while it imports itself, so only the standard library and papermill.engines are imported here.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any


def __getattr__(name: str) -> Any:
    """papermill's own engine in the place of ours, while papermill is being imported from here and this module is half read."""
    if name == "SdlabEngine" and "papermill.engines" in sys.modules:
        return sys.modules["papermill.engines"].NBClientEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


from papermill.engines import NBClientEngine, NotebookExecutionManager, PapermillNotebookClient, logger, papermill_engines  # noqa: E402

STOP_GRACE_S = 60.0
"""Seconds that an interrupted cell has to finish what it does before its kernel is killed, if the cell does not ask for more or less."""
GRACE_FILE = "SDLAB_GRACE"
"""The environment variable that names a file in which a cell says how many seconds a stop may take."""


@dataclass(frozen=True)
class Progress:
    """Where a running notebook is."""

    cell: int
    """The running code cell, counted from 1."""
    cells: int
    text: str
    """The last line that the cell printed, a bar as a rule; empty if it printed none."""


class Stopped(SystemExit):
    """A signal ended the notebook; `killed` if its kernel had to be killed, else the cell had time to leave in order."""

    def __init__(self, signum: int, *, killed: bool) -> None:
        super().__init__(128 + signum)
        self.signum = signum
        self.killed = killed


class SdlabEngine(NBClientEngine):
    """`papermill --engine sdlab`."""

    @classmethod
    def execute_notebook(
        cls,
        nb: Any,
        kernel_name: str,
        output_path: str | None = None,
        progress_bar: bool | dict[str, Any] = True,
        log_output: bool = False,
        autosave_cell_every: int = 30,
        **kwargs: Any,
    ) -> Any:
        """Run a notebook that papermill has put its parameters into; papermill's arguments, and `report: Callable[[Progress], None]`.

        Raises:
            ConfigError: an unknown parameter or one of the wrong type; no kernel has been started.
            Stopped: SIGINT, SIGTERM or SIGHUP came; the notebook is saved.
        """
        check_parameters(nb)
        manager = _Manager(nb, output_path, log_output, progress_bar, autosave_cell_every)
        manager.notebook_start()
        stop = _Stop()
        try:
            with stop:
                cls.execute_managed_notebook(manager, kernel_name, stop=stop, log_output=log_output, **kwargs)
            stop.raise_if_signalled()
        except BaseException:
            nb.metadata.papermill["exception"] = True
            stop.raise_if_signalled()
            raise
        finally:
            manager.cleanup_pbar()
            manager.notebook_complete()
        return manager.nb

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        log_output: bool = False,
        stdout_file: Any = None,
        stderr_file: Any = None,
        start_timeout: int = 60,
        execution_timeout: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the managed notebook's cells in a new kernel."""
        client = _Client(
            nb_man,
            kernel_name=kernel_name,
            timeout=execution_timeout,
            startup_timeout=start_timeout,
            log=logger,
            log_output=log_output,
            stdout_file=stdout_file,
            stderr_file=stderr_file,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
        )
        client.stop, client.report = kwargs["stop"], kwargs.get("report")
        return client.execute(env={**kernel_environment(os.environ), GRACE_FILE: client.stop.asked})


def kernel_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a headless kernel: plain progress bars, OpenMP threads that do not spin for long, and freed memory that is kept.

    Without the last, glibc gives a step's memory back to the system and asks for it again, a seventh of the step's time on a CPU.
    """
    kept = {"MALLOC_TRIM_THRESHOLD_": str(256 * 2**20), "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
    defaults = {"GOMP_SPINCOUNT": "2000", "PYDEVD_DISABLE_FILE_VALIDATION": "1", **kept}
    return {**defaults, **environment, "SDLAB_HEADLESS": "1"}


def check_parameters(nb: Any) -> None:
    """Refuse what papermill injected if the notebook's tagged cell does not know it.

    Raises:
        ConfigError: no tagged cell, unknown names, wrong types.
    """
    given = nb.metadata.get("papermill", {}).get("parameters")
    if not given:
        return
    from sdlab import parameters
    from sdlab.config import ConfigError

    source = parameters.tagged_source(nb.cells)
    if source is None:
        raise ConfigError(
            f"the notebook has no cell tagged 'parameters', so it cannot take {', '.join(sorted(given))}; tag the cell of its defaults"
        )
    defaults = parameters.read_defaults(source, where="the cell tagged 'parameters'")
    parameters.fit(given, defaults, where="notebook parameters")


class _Manager(NotebookExecutionManager):
    """Leaves cells that never ran "pending"; papermill calls them completed after an interrupt or when the kernel has died."""

    def notebook_complete(self, **kwargs: Any) -> None:
        pending = [cell for cell in self.nb.cells if cell.metadata.papermill["status"] == self.PENDING]
        super().notebook_complete(**kwargs)
        for cell in pending:
            cell.metadata.papermill["status"] = self.PENDING
        self.save()


class _Client(PapermillNotebookClient):
    """Runs the cells until one fails or a signal came, and tells how far it is."""

    stop: _Stop
    report: Callable[[Progress], None] | None

    def papermill_execute_cells(self) -> None:
        self.stop.group = getattr(self.km.provisioner, "pgid", None)
        for index, cell in enumerate(self.nb.cells):
            if self.stop.signum is not None or not self._run(cell, index):
                break

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        output = super().process_message(msg, cell, cell_index)
        if msg["msg_type"] == "stream":
            self._tell(cell_index, last_line(msg["content"]["text"]))
        return output

    def _run(self, cell: Any, index: int) -> bool:
        """Run one cell; False if it raised."""
        from nbclient.exceptions import CellExecutionError

        self.nb_man.cell_start(cell, index)
        if cell.cell_type == "code":
            self._tell(index, "")
        try:
            self.execute_cell(cell, index)
        except BaseException as error:
            self.nb_man.cell_exception(self.nb.cells[index], cell_index=index, exception=error)
            if not isinstance(error, CellExecutionError):
                raise
            return False
        finally:
            self.nb_man.cell_complete(self.nb.cells[index], cell_index=index)
        return True

    def _tell(self, index: int, text: str) -> None:
        if self.report is not None:
            before = sum(cell.cell_type == "code" for cell in self.nb.cells[: index + 1])
            self.report(Progress(before, sum(cell.cell_type == "code" for cell in self.nb.cells), text))


class _Stop:
    """Signals while a notebook runs: the first interrupts the running cell, a second one or too long a wait kills the kernel."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.killed = False
        self.group: int | None = None
        self.over = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="sdlab-")
        self.asked = os.path.join(self._folder.name, "grace")
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._on_signal) for number in heard}

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._folder.cleanup()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def raise_if_signalled(self) -> None:
        if self.signum is not None:
            raise Stopped(self.signum, killed=self.killed)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if self.signum is not None:
            self._kill()
            return
        self.signum = signum
        self._send(signal.SIGINT)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        """Kill the kernel once the cell has had its time."""
        start = time.monotonic()
        while time.monotonic() - start < self._grace_s():
            if self.over.wait(0.2):
                return
        self._kill()

    def _grace_s(self) -> float:
        try:
            with open(self.asked, encoding="utf-8") as said:
                return float(said.read())
        except (OSError, ValueError):
            return STOP_GRACE_S

    def _kill(self) -> None:
        self.killed = True
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        if self.group is not None:
            try:
                os.killpg(self.group, signum)
            except ProcessLookupError:
                logger.debug("the kernel is gone already")


def last_line(text: str) -> str:
    """The last line of `text` that is not blank; a carriage return also ends a line."""
    lines = [line.strip() for line in re.split(r"[\r\n]", text)]
    return next((line for line in reversed(lines) if line), "")


papermill_engines.register("sdlab", SdlabEngine)
