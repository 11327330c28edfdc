"""Whatever ends a training, at whatever moment: run again, it ends bit for bit as if nothing had been, or stops with a clear word."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
import torch
from conftest import in_ci
from faulty import SERVE
from safetensors.torch import load_file
from test_launch import left, mark, until
from test_ranks import SLOW_SAVE, trained

from sdlab import runs, stages
from sdlab.config import TrainConfig

__all__ = ["mark"]
KILLS = 50 if os.environ.get("CI") == "true" else 6
STEPS = 24
SERVER = (
    SERVE
    + """
import sdlab
import torch
from sdlab import parts, presets, train
from sdlab.config import TrainConfig

frozen = parts.load_frozen(presets.get("tiny").networks)
parts.load_frozen = lambda networks: frozen


def work(order):
    torch.set_num_threads(1)
    train.train(TrainConfig.model_validate(order["config"]), order["run"])


serve(work)
"""
)
"""Imports once and trains in a process of its own for each order, that ends, or finds the disk full, right before a call on a path."""
MOMENTS = [
    ("fsync", "*/checkpoints/.step-*/weights.safetensors"),
    ("fsync", "*/checkpoints/.step-*/exp_avg_sq.safetensors"),
    ("fsync", "*/checkpoints/.step-*/manifest.json"),
    ("replace", "*/checkpoints/step-*"),
    ("replace", "*/checkpoints/.step-*.old.*"),
    ("replace", "*/last_save.json"),
    ("replace", "*/metrics.jsonl"),
    ("replace", "*/config.json"),
    ("replace", "*/result.json"),
]
"""Calls that a save, a start and an end are made of."""


class Trainer:
    """Starts trainings of one config, quickly."""

    def __init__(self, process: "subprocess.Popen[str]", config: TrainConfig, logs: Path) -> None:
        self.process, self.config, self.log = process, config, logs / "log"

    def start(self, run: Path, *events: tuple[str, str, int, Any]) -> int:
        order = {"config": self.config.model_dump(mode="json"), "run": str(run), "log": str(self.log), "events": events}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def wait(self, pid: int) -> str:
        until(lambda: not psutil.pid_exists(pid))
        return self.log.read_text(errors="replace")

    def finish(self, run: Path) -> dict[str, Any]:
        """Train to the end, and what the result says."""
        said = self.wait(self.start(run))
        assert (run / "result.json").is_file(), said
        return json.loads((run / "result.json").read_text())


@pytest.fixture(scope="module")
def trainer(scenes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    running = {"max_steps": STEPS, "log_every": 1, "save_every": 3, "global_batch_size": 2, "preview_every": 10, "keep_every": 9}
    validated = {"val_data_dir": str(scenes_dir), "val_every": 8}
    config = stages.configure(preset="tiny", stage="stage1_32", data_dir=str(scenes_dir), **running, **validated)
    command = [sys.executable, "-c", SERVER]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield Trainer(process, config, tmp_path_factory.mktemp("logs"))
        process.kill()


@pytest.fixture(scope="module")
def reference(trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happened to."""
    run = tmp_path_factory.mktemp("reference") / "run"
    assert trainer.finish(run)["status"] == "done"
    return run


def assert_equal(run: Path, reference: Path) -> None:
    """Every loss, rate and validation, every weight, average and moment, and every kept checkpoint's place."""
    names = ("step", "loss", "learning_rate", "grad_norm", "val_loss")
    told = [[[row.get(name) for name in names] for row in runs.read_metrics(path)] for path in (run, reference)]
    assert told[0] == told[1]
    ours, theirs = ({path.name: load_file(path) for path in runs.find_checkpoint(one).glob("*.safetensors")} for one in (run, reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[file][name], theirs[file][name]) for file in theirs for name in theirs[file])
    assert [path.name for path in runs.checkpoints(run)] == [path.name for path in runs.checkpoints(reference)]
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".step")]


def spoil(run: Path, chance: random.Random) -> None:
    """Change a byte of the newest checkpoint, where there is an older one to fall back on."""
    newest, *others = runs.checkpoints(run)
    if others and all(map(runs.is_valid, others[:1])):
        path = chance.choice(sorted(newest.iterdir()))
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 0x55
        path.write_bytes(content)


@pytest.mark.parametrize("seed", [0, 1] if KILLS >= 50 else [0])
def test_kills_full_disks_and_damage_at_random_moments_change_nothing(trainer: Trainer, reference: Path, tmp_path: Path, seed: int) -> None:
    chance, killed, number = random.Random(seed), 0, 0
    while killed < KILLS // (2 if KILLS >= 50 else 1):
        number += 1
        run = tmp_path / f"run-{number}"
        for _ in range(12):
            kind = chance.choice(["moment", "moment", "delay", "delay", "full", "damage"])
            if kind == "damage" and runs.checkpoints(run):
                spoil(run, chance)
            event = (*chance.choice(MOMENTS), chance.randint(1, 2), "full" if kind == "full" else signal.SIGKILL)
            pid = trainer.start(run, *([event] if kind in ("moment", "full") else []))
            if kind == "delay":
                time.sleep(chance.uniform(0.1, 1.5))
                if psutil.pid_exists(pid):
                    os.kill(pid, signal.SIGKILL)
            said = trainer.wait(pid)
            assert kind == "full" or "Error" not in said, said
            finished = (run / "result.json").is_file() and json.loads((run / "result.json").read_text())["status"] == "done"
            killed += kind in ("moment", "delay") and not finished
            if finished:
                break
        assert trainer.finish(run)["status"] == "done"
        assert_equal(run, reference)
        shutil.rmtree(run)


@pytest.mark.parametrize(("call", "path"), MOMENTS, ids=[path for _, path in MOMENTS])
def test_a_disk_that_is_full_for_a_moment_ends_the_run_in_order(
    trainer: Trainer, reference: Path, tmp_path: Path, call: str, path: str
) -> None:
    said = trainer.wait(trainer.start(tmp_path / "run", (call, path, 2 if "json" not in path or "manifest" in path else 1, "full")))
    result = tmp_path / "run/result.json"
    if result.is_file() and json.loads(result.read_text())["status"] == "stopped":
        assert "make room and run again" in json.loads(result.read_text())["error"]
    else:
        assert result.is_file() or "no space left on device" in said
    assert trainer.finish(tmp_path / "run")["status"] == "done"
    assert_equal(tmp_path / "run", reference)


CELLS = """
from pathlib import Path
from sdlab import stages, train
from sdlab.config import TrainConfig
SLOW
config = TrainConfig.model_validate_json(Path("config.json").read_text())
train.train(config, "run")
"""


@in_ci
def test_a_stop_through_papermill_waits_for_a_save_of_twenty_seconds(scenes_dir: Path, tmp_path: Path, mark: str) -> None:
    running = {"max_steps": 10_000, "log_every": 1, "save_every": 10_000, "global_batch_size": 2}
    config = stages.configure(preset="tiny", stage="stage1_32", data_dir=str(scenes_dir), **running)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELLS.replace("SLOW", textwrap.dedent(SLOW_SAVE)))])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "in.ipynb")
    command = [str(Path(sys.executable).with_name("papermill")), "--engine", "sdlab", "in.ipynb", "out.ipynb"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: trained(tmp_path / "run", 2))
    process.terminate()
    assert process.wait(120) == 143
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "stopped" and runs.checkpoint_step(runs.find_checkpoint(tmp_path / "run")) == result["step"]
    assert "stopping after this step" in nbformat.read(tmp_path / "out.ipynb", 4).cells[0].outputs[0].text
    until(lambda: not left(mark))
