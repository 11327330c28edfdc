import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import papermill
import pytest
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from tiny_notebooks import RESOLVE, write_notebook

import sdlab
from sdlab import engine
from sdlab.config import ConfigError
from sdlab.engine import Progress, Stopped, kernel_environment, last_line

PAPERMILL = [sys.executable, "-m", "papermill", "--engine", "sdlab", "--no-progress-bar"]


def statuses(path):
    return [cell.metadata.papermill.status for cell in notebook(path).cells]


def notebook(path):
    return nbformat.read(path, as_version=4)


def execute(source, out, **given):
    papermill.execute_notebook(source, out, engine_name="sdlab", progress_bar=False, **given)


def run_and_signal(source, out, send):
    """Execute here, with `send` in another thread; what the engine raised."""
    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(Stopped) as stopped:
        execute(source, out)
    sender.join()
    return stopped.value


def wait_for(path, seconds=180):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


@pytest.mark.parametrize(("given", "problem"), [({"sede": 1}, "did you mean 'seed'"), ({"seed": "one"}, "a whole number")])
def test_unknown_or_wrongly_typed_parameters_are_refused_before_a_kernel_starts(tmp_path, given, problem):
    source = write_notebook(tmp_path / "in.ipynb", f"open({str(tmp_path / 'ran')!r}, 'w')", defaults="seed = 0")
    with pytest.raises(ConfigError, match=problem):
        execute(source, tmp_path / "out.ipynb", parameters=given)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out.ipynb").exists()


def test_parameters_for_a_notebook_without_a_tagged_cell_are_refused(tmp_path):
    source = write_notebook(tmp_path / "in.ipynb", "seed = 0", defaults=None)
    with pytest.raises(ConfigError, match="no cell tagged 'parameters'"):
        execute(source, tmp_path / "out.ipynb", parameters={"seed": 1})


def test_a_run_merges_streams_resolves_text_reports_progress_and_is_headless(tmp_path):
    bar = "import sys, time\nfor i in range(20):\n    print(f'\\r{i}', end='', file=sys.stderr, flush=True)\n    time.sleep(0.02)"
    report = f"import os\np.save({str(tmp_path)!r})\nprint(os.environ['SDLAB_HEADLESS'], os.environ['GOMP_SPINCOUNT'], p.interactive)"
    source = write_notebook(tmp_path / "in.ipynb", RESOLVE, bar, report, "# Title", defaults="seed = 0\ninteractive = 'auto'")
    seen: list[Progress] = []
    given = {"seed": "7", "interactive": "false"}
    out = tmp_path / "out.ipynb"
    execute(source, out, parameters=given, report=seen.append)
    outputs = [cell.outputs for cell in notebook(out).cells if cell.cell_type == "code"]
    assert "<td" in outputs[2][0].data["text/html"] and "* seed" in outputs[2][0].data["text/plain"]
    assert [(o.name, o.text.strip()) for o in outputs[3]] == [("stderr", "19")]
    assert outputs[4][0].text == "1 2000 False\n"
    assert json.loads((tmp_path / "parameters.json").read_text()) == {"seed": 7, "interactive": False}
    assert Progress(4, 5, "19") in seen and seen[-1].cell == 5
    assert statuses(out) == ["completed"] * 6


def test_a_failed_cell_leaves_the_cells_after_it_pending(tmp_path):
    source = write_notebook(tmp_path / "in.ipynb", "1 / 0", "n = 2")
    with pytest.raises(PapermillExecutionError, match="division by zero"):
        execute(source, tmp_path / "out.ipynb")
    executed = notebook(tmp_path / "out.ipynb")
    ran = [cell.metadata.papermill.status for cell in executed.cells if "papermill" in cell.metadata]
    assert ran == ["completed", "failed", "pending"]
    assert executed.metadata.papermill.exception is True


BUSY = "import os, time\nopen(FOLDER + '/busy', 'w').write(str(os.getpid()))\n"


def test_sigterm_interrupts_the_cell_saves_the_notebook_and_tells_the_truth(tmp_path):
    source = write_notebook(
        tmp_path / "in.ipynb",
        "print('kept')",
        BUSY + "for _ in range(600):\n    time.sleep(0.1)",
        "n = 2",
        defaults=f"FOLDER = {str(tmp_path)!r}",
    )
    process = subprocess.Popen([*PAPERMILL, str(source), str(tmp_path / "out.ipynb")])
    wait_for(tmp_path / "busy")
    process.send_signal(signal.SIGTERM)
    assert process.wait(180) == 143
    executed = notebook(tmp_path / "out.ipynb")
    assert statuses(tmp_path / "out.ipynb") == ["completed", "completed", "failed", "pending"]
    assert executed.cells[2].outputs[0].ename == "KeyboardInterrupt"
    assert executed.cells[1].outputs[0].text == "kept\n"
    assert executed.metadata.papermill.exception is True


@pytest.fixture
def deferring(tmp_path):
    """A notebook whose cell notes an interrupt and works on until the file `go` is there."""
    note = "import signal\nsignal.signal(signal.SIGINT, lambda *_: open(FOLDER + '/told', 'w').close())\n"
    wait = "while not os.path.exists(FOLDER + '/go'):\n    time.sleep(0.02)"
    return write_notebook(tmp_path / "in.ipynb", note + BUSY + wait, "n = 2", defaults=f"FOLDER = {str(tmp_path)!r}")


def test_a_cell_may_finish_its_work_after_a_signal_but_no_other_cell_begins(tmp_path, deferring):
    def interrupt():
        wait_for(tmp_path / "busy")
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(tmp_path / "told")
        (tmp_path / "go").touch()

    stopped = run_and_signal(deferring, tmp_path / "out.ipynb", interrupt)
    assert (stopped.code, stopped.killed) == (129, False)
    assert statuses(tmp_path / "out.ipynb") == ["completed", "completed", "pending"]
    assert notebook(tmp_path / "out.ipynb").metadata.papermill.exception is True
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_second_signal_kills_the_kernel(tmp_path, deferring):
    def interrupt_twice():
        wait_for(tmp_path / "busy")
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(tmp_path / "told")
        os.kill(os.getpid(), signal.SIGINT)

    stopped = run_and_signal(deferring, tmp_path / "out.ipynb", interrupt_twice)
    assert (stopped.code, stopped.killed) == (130, True)
    assert statuses(tmp_path / "out.ipynb") == ["completed", "failed", "pending"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "busy").read_text()), 0)


def test_a_cell_that_does_not_stop_in_time_is_killed(tmp_path, deferring, monkeypatch):
    monkeypatch.setattr(engine, "STOP_GRACE_S", 0.2)

    def interrupt():
        wait_for(tmp_path / "busy")
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_and_signal(deferring, tmp_path / "out.ipynb", interrupt).killed


def test_a_kernel_that_dies_leaves_a_failed_notebook(tmp_path):
    source = write_notebook(tmp_path / "in.ipynb", "import os\nos.kill(os.getpid(), 9)", "n = 2")
    with pytest.raises(DeadKernelError):
        execute(source, tmp_path / "out.ipynb")
    assert statuses(tmp_path / "out.ipynb") == ["completed", "failed", "pending"]
    assert notebook(tmp_path / "out.ipynb").metadata.papermill.exception is True


def test_papermill_works_when_sdlab_is_broken(tmp_path):
    copy = tmp_path / "sdlab"
    shutil.copytree(Path(sdlab.__file__).parent, copy, ignore=shutil.ignore_patterns("assets", "__pycache__"))
    (copy / "config.py").write_text("this is = not Python\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import papermill, runpy, sys; print(sys.modules['sdlab.engine'].__file__); runpy.run_module('papermill', run_name='__main__')"
    shown = subprocess.run([sys.executable, "-c", code, "--version"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith(str(copy)) and "papermill" in shown.stdout


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_a_users_own_setting_of_threads_and_memory_is_kept(name):
    assert int(kernel_environment({"HOME": "/h"})[name]) > 9
    assert kernel_environment({name: "9", "HOME": "/h"})[name] == "9"


def test_the_last_line_is_found_behind_carriage_returns():
    assert last_line("a\n\r 5%\r 6% \n\n") == "6%"
    assert last_line(" \n") == ""
