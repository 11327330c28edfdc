"""Training on several ranks gives what one process gives, survives what happens to a rank, and leaves no process behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import in_ci
from safetensors.torch import load_file
from test_launch import left, mark, stand_in, until

from sdlab import prepare, runs, stages, train
from sdlab.config import ConfigError, TrainConfig

__all__ = ["mark"]
STEPS = 4


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def configure(data: Path, **changes: Any) -> TrainConfig:
    small = {"preset": "tiny", "stage": "stage1_32", "data_dir": str(data), "global_batch_size": 8, "micro_batch_size": 2}
    return stages.configure(**{**small, "max_steps": STEPS, "log_every": 1, "save_every": 2, **changes})


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in runs.read_metrics(run)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.stem}/{name}": value for path in runs.find_checkpoint(run).glob("*.safetensors") for name, value in load_file(path).items()
    }


def assert_equal(run: Path, other: Path) -> None:
    """Bit for bit: every logged loss, rate and drop, and every weight, average and moment."""
    told = [
        [{name: row[name] for name in ("step", "loss", "learning_rate", "caption_drop_rate")} for row in runs.read_metrics(path)]
        for path in (run, other)
    ]
    assert told[0] == told[1]
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def whole(scenes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The uninterrupted run on some ranks, made when first asked for."""
    made: dict[str, Path] = {}

    def run(**changes: Any) -> Path:
        name = json.dumps(changes)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("whole") / "run"
            torch.set_num_threads(1)
            assert train.train(configure(scenes_dir, **changes), made[name])["status"] == "done"
        return made[name]

    return run


@pytest.mark.parametrize(
    "changes",
    [{"devices": 2}, pytest.param({"devices": 4}, marks=in_ci), {"devices": 2, "strategy": "fsdp"}, {"micro_batch_size": 4}],
    ids=["2 ranks", "4 ranks", "2 ranks, sharded", "larger micro-batches"],
)
def test_ranks_and_micro_batches_change_no_more_than_rounding(whole: Callable[..., Path], changes: dict[str, Any], mark: str) -> None:
    one, several = whole(), whole(**changes)
    rows, others = runs.read_metrics(one), runs.read_metrics(several)
    assert [row["caption_drop_rate"] for row in rows] == [row["caption_drop_rate"] for row in others]
    assert losses(several) == pytest.approx(losses(one), rel=1e-5)
    ours, theirs = weights(several), weights(one)
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours if name.startswith("weights"))
    assert not left(mark)


@pytest.mark.parametrize(
    "changes",
    [{"devices": 2}, pytest.param({"devices": 4}, marks=in_ci), pytest.param({"devices": 2, "strategy": "fsdp"}, marks=in_ci)],
    ids=["2 ranks", "4 ranks", "2 ranks, sharded"],
)
def test_resumed_on_ranks_equals_uninterrupted_bit_for_bit(
    scenes_dir: Path, whole: Callable[..., Path], changes: dict[str, Any], tmp_path: Path
) -> None:
    for steps in (1, STEPS):
        train.train(configure(scenes_dir, max_steps=steps, **changes), tmp_path / "run")
    assert_equal(tmp_path / "run", whole(**changes))


@in_ci
def test_a_run_moves_from_one_process_to_two_ranks_and_to_sharded_ones(
    scenes_dir: Path, whole: Callable[..., Path], tmp_path: Path
) -> None:
    for steps, changes in ((1, {}), (2, {"devices": 2}), (3, {"devices": 2, "strategy": "fsdp"}), (4, {"micro_batch_size": 8})):
        train.train(configure(scenes_dir, max_steps=steps, **changes), tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(whole()), rel=1e-5)
    history = [json.loads(line)["changes"] for line in (tmp_path / "run/config_history.jsonl").read_text().splitlines()]
    assert [change["max_steps"] for change in history] == [[1, 2], [2, 3], [3, 4]] and history[1]["strategy"] == ["auto", "fsdp"]


def test_data_that_do_not_divide_among_ranks_are_trained_on_to_the_end(tmp_path: Path) -> None:
    prepare.prepare(prepare.configure(source="scenes", data_dir=str(tmp_path / "data"), resolution=32, limit=13))
    config = configure(tmp_path / "data", devices=2, max_steps=3)
    assert train.train(config, tmp_path / "run")["status"] == "done"
    assert len(losses(tmp_path / "run")) == 3


# What happens to ranks


def rank_process(mark: str, rank: int) -> psutil.Process | None:
    """The process of a rank that was started with a mark in its environment."""
    ranks = [one for one in left(mark) if one.environ().get("RANK") == str(rank) and "sdlab.worker" in one.cmdline()]
    return ranks[0] if ranks else None


def start(tmp_path: Path, config: TrainConfig, body: str = "", **given: Any) -> "subprocess.Popen[str]":
    """Train in another process, whose ranks do something before they start; what it says ends with the result."""
    (tmp_path / "config.json").write_text(config.model_dump_json())
    lines = f"""
    import json, sys
    from pathlib import Path
    from sdlab import train
    from sdlab.config import ConfigError, TrainConfig
    sys.executable = {stand_in(tmp_path / "python", textwrap.dedent(body))!r}
    config = TrainConfig.model_validate_json(Path({str(tmp_path / "config.json")!r}).read_text())
    print(json.dumps(train.train(config, {str(tmp_path / "run")!r}, **{given!r})))
    """
    command = [sys.executable, "-c", textwrap.dedent(lines)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def said(process: "subprocess.Popen[str]") -> str:
    out, _ = process.communicate(timeout=300)
    return out


def trained(run: Path, step: int) -> bool:
    """Whether a run has logged a step."""
    rows = runs.read_metrics(run)
    return bool(rows) and rows[-1]["step"] >= step


SLOW_SAVE = """
import sys, time
from sdlab import checkpoints
write = checkpoints._put_in_place
def slowly(*arguments):
    time.sleep(20)
    write(*arguments)
checkpoints._put_in_place = slowly
"""


def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_nothing_had_been(
    scenes_dir: Path, whole: Callable[..., Path], tmp_path: Path, mark: str
) -> None:
    process = start(tmp_path, configure(scenes_dir, devices=2, save_every=1, max_restarts=1))
    until(lambda: trained(tmp_path / "run", 2))
    killed = until(lambda: rank_process(mark, 1))
    killed.kill()
    out = said(process)
    assert json.loads(out.splitlines()[-1])["status"] == "done", out
    assert_equal(tmp_path / "run", whole(devices=2))
    until(lambda: not left(mark))


def test_a_killed_rank_ends_the_run_with_how_it_was_killed(scenes_dir: Path, tmp_path: Path, mark: str) -> None:
    process = start(tmp_path, configure(scenes_dir, devices=2, max_steps=10_000))
    until(lambda: trained(tmp_path / "run", 2))
    until(lambda: rank_process(mark, 1)).kill()
    assert "RuntimeError: rank 1 was ended by SIGKILL (out of memory?)" in said(process)
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "failed"
    until(lambda: not left(mark))


@pytest.mark.parametrize("told", ["starter", "supervisor", pytest.param("starter's death", marks=in_ci)])
def test_a_stop_waits_for_a_save_of_twenty_seconds(scenes_dir: Path, tmp_path: Path, told: str, mark: str) -> None:
    process = start(tmp_path, configure(scenes_dir, devices=2, max_steps=10_000, save_every=10_000), SLOW_SAVE)
    until(lambda: trained(tmp_path / "run", 2))
    if told == "supervisor":
        next(one for one in left(mark) if "--supervise" in one.cmdline()).terminate()
    elif told == "starter":
        process.terminate()
    else:
        process.kill()
    out = said(process)
    until(lambda: (tmp_path / "run/result.json").is_file())
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "stopped" and result["step"] < 10_000, out
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path / "run")) == result["step"]
    assert told == "starter's death" or process.returncode == 0
    until(lambda: not left(mark))


@in_ci
def test_a_killed_supervisor_takes_its_ranks_along(scenes_dir: Path, tmp_path: Path, mark: str) -> None:
    process = start(tmp_path, configure(scenes_dir, devices=2, max_steps=10_000))
    until(lambda: trained(tmp_path / "run", 1))
    next(one for one in left(mark) if "--supervise" in one.cmdline()).kill()
    assert "what supervises the ranks was ended by SIGKILL" in said(process)
    until(lambda: not left(mark))


@in_ci
def test_a_second_interrupt_ends_at_once(scenes_dir: Path, tmp_path: Path, mark: str) -> None:
    process = start(tmp_path, configure(scenes_dir, devices=2, max_steps=10_000), SLOW_SAVE.replace("20", "1000"))
    until(lambda: trained(tmp_path / "run", 1))
    process.send_signal(signal.SIGINT)
    until(lambda: (tmp_path / "run/stop").exists())
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in said(process)
    until(lambda: not left(mark))


def test_a_rank_that_waits_too_long_says_who_waited_and_where(scenes_dir: Path, tmp_path: Path, mark: str) -> None:
    body = """
    import os, time
    from sdlab import state, train
    state.TIMEOUT_MINUTES = 0.1
    update = train._update
    def stuck(state, *arguments, **given):
        if os.environ["RANK"] == "1" and state.step == 1:
            time.sleep(1000)
        return update(state, *arguments, **given)
    train._update = stuck
    """
    out = said(start(tmp_path, configure(scenes_dir, devices=2), body))
    assert "rank 0 failed" in out and "on rank 0 of 2, after step 1" in out
    until(lambda: not left(mark))


def test_a_run_outlives_what_has_started_it_and_can_be_stopped_by_its_file(scenes_dir: Path, tmp_path: Path, mark: str) -> None:
    process = start(tmp_path, configure(scenes_dir, max_steps=10_000), detach=True)
    assert json.loads(said(process).splitlines()[-1])["status"] == "started"
    until(lambda: trained(tmp_path / "run", 1))
    (tmp_path / "run/stop").touch()
    until(lambda: (tmp_path / "run/result.json").is_file())
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "stopped"
    until(lambda: not left(mark))


def test_a_folder_is_held_from_the_start_of_ranks_to_their_end(scenes_dir: Path, tmp_path: Path, mark: str) -> None:
    """A second call is refused also before the ranks of a detached run have come up, and harms nothing."""
    process = start(tmp_path, configure(scenes_dir, max_steps=3), detach=True)
    assert json.loads(said(process).splitlines()[-1])["status"] == "started"
    with pytest.raises(ConfigError, match="is being trained by another process"):
        train.train(configure(scenes_dir, max_steps=2), tmp_path / "run")
    until(lambda: (tmp_path / "run/result.json").is_file())
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["status"], result["max_steps"], len(losses(tmp_path / "run"))) == ("done", 3, 3)
    until(lambda: not left(mark))


def test_a_detached_run_that_dies_says_why(scenes_dir: Path, tmp_path: Path, mark: str) -> None:
    process = start(tmp_path, configure(scenes_dir, max_steps=10_000), detach=True)
    said(process)
    until(lambda: trained(tmp_path / "run", 1))
    until(lambda: rank_process(mark, 0)).kill()
    until(lambda: (tmp_path / "run/result.json").is_file())
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["status"] == "failed" and "rank 0 was ended by SIGKILL" in result["error"]
    until(lambda: not left(mark))


@in_ci
def test_a_stop_that_was_asked_for_is_not_undone_by_the_death_of_the_starter(scenes_dir: Path, tmp_path: Path, mark: str) -> None:
    process = start(tmp_path, configure(scenes_dir, devices=2, max_steps=10_000, save_every=10_000), SLOW_SAVE)
    until(lambda: trained(tmp_path / "run", 1))
    (tmp_path / "run/stop").touch()
    process.kill()
    until(lambda: (tmp_path / "run/result.json").is_file())
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "stopped"
    until(lambda: not left(mark))


@in_ci
def test_two_nodes_meet_where_they_are_told_to(scenes_dir: Path, whole: Callable[..., Path], tmp_path: Path, mark: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = start(tmp_path, configure(scenes_dir, num_nodes=2, rendezvous=f"127.0.0.1:{port}"))
    until(lambda: (tmp_path / "run/job/job.json").is_file())
    other = subprocess.Popen(
        [sys.executable, "-m", "sdlab.worker", "--supervise", str(tmp_path / "run/job")], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    out = said(process)
    assert json.loads(out.splitlines()[-1])["status"] == "done", out
    assert "start on each of the other 1 nodes" in out and other.wait(60) == 0
    assert_equal(tmp_path / "run", whole(devices=2))
