"""`sdlab-run`: one notebook, or a job file of notebooks that need one another, run headless with a line of progress each."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from sdlab.config import ConfigError, hint, near_path
from sdlab.engine import Progress, Stopped
from sdlab.page import PageStep, clock, traceback_end, write_page
from sdlab.plan import Job, Step, plan, plan_notebook

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 3
"""Exit codes; where a kernel had to be killed after a signal it is 130 (INT), 143 (TERM) or 129 (HUP)."""
BAR = re.compile(r"(\d+%)\|.*\[([\d:]+<[^\]]*)\]")


@dataclass(frozen=True)
class Record:
    """What became of a step, kept in `OUT/steps/NAME.json`."""

    digest: str
    status: str
    duration_s: float
    notebook: str
    parameters: dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line says and return the exit code."""
    options = _options(argv)
    try:
        job = _job(options)
        chosen = _chosen(job, only=options.only, start=options.start)
    except ConfigError as error:
        for problem in str(error).splitlines():
            print(f"sdlab-run: {problem}", file=sys.stderr)
        return REFUSED
    if options.dry_run:
        _show(job, chosen)
        return DONE
    try:
        return run(job, chosen)
    except KeyboardInterrupt:
        return 130


def run(job: Job, chosen: Sequence[Step]) -> int:
    """Run the chosen steps that are not done yet, stop at the first failure, write `index.html`; returns the exit code."""
    logging.getLogger("papermill").setLevel(logging.CRITICAL)
    code = DONE
    for step in chosen:
        if not job.always and is_done(job, step):
            print(f"{_title(job, step)}  already done (to run it again, delete {near_path(step.output)})", flush=True)
            continue
        code = _run_step(job, step)
        if code != DONE:
            break
    page = write_page(job.out, title=job.title, subtitle=_subtitle(code), steps=[_page_step(job, step) for step in job.steps])
    print(f"executed notebooks: {near_path(job.out)}\npictures, all in one page: {near_path(page)}")
    if code == STOPPED:
        print("stopped; the same command goes on from here")
    return code


def is_done(job: Job, step: Step) -> bool:
    """Whether the step's notebook ended well from just this source and these parameters, and the folders that it names are there."""
    record = _read_record(job, step)
    folders = [value for name, value in step.effective.items() if name.endswith("_dir") and isinstance(value, str)]
    return (
        record is not None
        and (record.status, record.digest) == ("done", step.digest)
        and _ended_well(step.output)
        and all((job.cwd / Path(folder).expanduser()).is_dir() for folder in folders)
    )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sdlab-run", description="Run a notebook or a job file headless.")
    parser.add_argument("target", help="a notebook (.ipynb) or a job file (.yaml)")
    parser.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="given", help="a notebook's parameter")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="sets", help="change one of a job file's values")
    parser.add_argument("--out", metavar="DIR", help="folder of the executed notebooks")
    parser.add_argument("--dry-run", action="store_true", help="check everything and show what would run")
    parser.add_argument("--only", metavar="STEP", help="run this step alone")
    parser.add_argument("--from", metavar="STEP", dest="start", help="run this step and those after it")
    return parser.parse_args(argv)


def _job(options: argparse.Namespace) -> Job:
    suffix = Path(options.target).suffix
    if suffix == ".ipynb":
        if options.sets or options.only or options.start:
            raise ConfigError("--set, --only and --from are for job files; give a notebook's parameters as -p NAME VALUE")
        return plan_notebook(options.target, dict(options.given), out=options.out)
    if suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{options.target!r} is neither a notebook (.ipynb) nor a job file (.yaml)")
    if options.given:
        raise ConfigError("-p is for a notebook; change a job file's values with --set NAME=VALUE")
    return plan(options.target, out=options.out, sets=options.sets)


def _chosen(job: Job, *, only: str | None, start: str | None) -> Sequence[Step]:
    """The steps that the command line asks for.

    Raises:
        ConfigError: no such step, or one that needs a step which is neither asked for nor done.
    """
    asked = only or start
    names = [step.name for step in job.steps]
    if asked is None:
        return job.steps
    matching = [index for index, step in enumerate(job.steps) if asked in (step.name, step.entry)]
    if not matching:
        raise ConfigError(f"{asked!r} is no step of {job.title}{hint(asked, names)}")
    chosen = [job.steps[index] for index in matching] if only else job.steps[matching[0] :]
    for step in chosen:
        for need in step.needs:
            needed = job.steps[names.index(need)]
            if needed not in chosen and not is_done(job, needed):
                raise ConfigError(f"step {step.name!r} needs {need!r}, which is not done; run it first (--from {need})")
    return chosen


def _show(job: Job, chosen: Sequence[Step]) -> None:
    for step in chosen:
        state = "already done" if is_done(job, step) else "to run"
        print(f"{_title(job, step)}  {state}: {near_path(step.notebook)} -> {near_path(step.output)}")
        for name, value in step.given.items():
            print(f"    {name} = {value!r}")


def _run_step(job: Job, step: Step) -> int:
    step.output.parent.mkdir(parents=True, exist_ok=True)
    _record_path(job, step).unlink(missing_ok=True)
    line = _Line(_title(job, step))
    code, trouble = _execute(job, step, line)
    if code == DONE and _run_was_stopped(job, step):
        code = STOPPED
    status = {DONE: "done", FAILED: "failed"}.get(code, "stopped")
    line.end("done in" if code == DONE else f"{status} after")
    _write_record(job, step, Record(step.digest, status, round(line.elapsed(), 1), str(step.notebook), step.effective))
    if trouble:
        print("\n".join(f"    {text}" for text in trouble))
    if code != DONE:
        print(f"    executed as far as it came: {near_path(step.output)}", flush=True)
    return code


def _run_was_stopped(job: Job, step: Step) -> bool:
    """Whether the run that the step trained was asked to stop before its end; its notebook ends well all the same."""
    run_dir = step.effective.get("run_dir")
    result = job.cwd / Path(run_dir).expanduser() / "result.json" if isinstance(run_dir, str) else None
    try:
        return result is not None and json.loads(result.read_text(encoding="utf-8"))["status"] == "stopped"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _execute(job: Job, step: Step, line: _Line) -> tuple[int, list[str]]:
    """Run a step's notebook; the exit code, and lines that say what went wrong."""
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from papermill.execute import execute_notebook

    kernel = {"kernel_name": "python3", "language": "python", "cwd": str(job.cwd), "start_timeout": 180}
    try:
        with line:
            execute_notebook(
                _literal(step.notebook),
                _literal(step.output),
                parameters=step.given,
                engine_name="sdlab",
                progress_bar=False,
                report=line.update,
                **kernel,
            )
    except PapermillExecutionError as error:
        code = STOPPED if error.ename == "KeyboardInterrupt" else FAILED
        return code, [f"cell [{error.exec_count}]: {error.ename}: {error.evalue}", *traceback_end(error.traceback)]
    except Stopped as stop:
        return (128 + stop.signum if stop.killed else STOPPED), []
    except DeadKernelError:
        return FAILED, ["the kernel died (killed by the system, out of memory?)"]
    except (OSError, RuntimeError) as error:
        return FAILED, [f"{type(error).__name__}: {error}"]
    return DONE, []


class _Line:
    """One line of progress: rewritten in place on a terminal, else a new line every ten seconds."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._place = self._bar = ""
        self._started = time.monotonic()
        self._terminal = sys.stdout.isatty()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._ticker.join()

    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def update(self, progress: Progress) -> None:
        place = f"cell {progress.cell}/{progress.cells}"
        bar = BAR.search(progress.text)
        if place != self._place:
            self._place, self._bar = place, ""
        if bar is not None:
            self._bar = f"{bar[1]} [{bar[2]}]"

    def text(self) -> str:
        return f"{self._title}  {self._place}  {self._bar or f'[{clock(self.elapsed())}]'}"

    def end(self, word: str) -> None:
        self._print(f"{self._title}  {word} {clock(self.elapsed())}", last=True)

    def _tick(self) -> None:
        while not self._ended.wait(0.5 if self._terminal else 10):
            self._print(self.text(), last=False)

    def _print(self, text: str, *, last: bool) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:{width}}", end="\n" if last else "", flush=True)
        else:
            print(text, flush=True)


def _page_step(job: Job, step: Step) -> PageStep:
    record = _read_record(job, step)
    if record is None:
        return PageStep(step.name, step.notebook.name, step.output, "not run", None)
    status = record.status if record.digest == step.digest else "out of date"
    return PageStep(step.name, step.notebook.name, step.output, status, record.duration_s)


def _record_path(job: Job, step: Step) -> Path:
    return job.out / "steps" / f"{step.name}.json"


def _write_record(job: Job, step: Step, record: Record) -> None:
    path = _record_path(job, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _read_record(job: Job, step: Step) -> Record | None:
    try:
        return Record(**json.loads(_record_path(job, step).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _ended_well(output: Path) -> bool:
    try:
        run_metadata = json.loads(output.read_text(encoding="utf-8"))["metadata"]["papermill"]
    except (FileNotFoundError, ValueError, KeyError):
        return False
    return bool(run_metadata["end_time"]) and not run_metadata["exception"]


def _title(job: Job, step: Step) -> str:
    return f"[{job.steps.index(step) + 1}/{len(job.steps)}] {step.name}"


def _subtitle(code: int) -> str:
    ending = {DONE: "done", FAILED: "a step failed"}.get(code, "stopped")
    return f"{time.strftime('%Y-%m-%d %H:%M')}, {ending}"


def _literal(path: Path) -> str:
    """A path that papermill, which fills in `{name}`, leaves as it is."""
    return str(path).replace("{", "{{").replace("}", "}}")


if __name__ == "__main__":
    sys.exit(main())
