"""The run folder stays whole whatever happens, and refuses what does not belong in it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sdlab import presets, runs
from sdlab.checkpoints import Checkpoints
from sdlab.config import ConfigError, TrainConfig

TINY = presets.get("tiny")


def config(**changes: object) -> TrainConfig:
    values = {
        **{"preset": "tiny", "stage": "stage1_32", "networks": TINY.networks, "recipe": TINY.stages["stage1_32"]},
        **{"data_key": "k", "data_dir": "/d", "max_steps": 5, "micro_batch_size": 8, "save_every": 2, "log_every": 1, "preview_every": 0},
    }
    return TrainConfig.model_validate({**values, **changes})


def save(folder: Path, step: int) -> Path:
    with Checkpoints(folder) as checkpoints:
        return checkpoints.save(step, {"weights": {"w": torch.full((3,), float(step))}}, {"note": "x"})


def in_a_process(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code that ends by killing itself; `folder` and `runs` are there."""
    start = "import os, signal, sys\nfrom pathlib import Path\nfrom sdlab import runs\nfolder = Path(sys.argv[1])\n"
    kill = "\nos.kill(os.getpid(), signal.SIGKILL)\n"
    return subprocess.run([sys.executable, "-c", start + code + kill, str(folder)], capture_output=True, text=True, timeout=120)


def test_a_new_folder_holds_config_and_lineage(tmp_path: Path) -> None:
    assert runs.open_run(tmp_path / "run", config(), resume="auto", lineage={"parent": None}) is None
    assert runs.read_config(tmp_path / "run") == config()
    lineage = json.loads((tmp_path / "run" / "lineage.json").read_text())
    assert lineage["parent"] is None and {"commit", "dirty_diff"} == set(lineage["git"])


def test_a_science_field_may_not_change_and_both_values_are_named(tmp_path: Path) -> None:
    runs.open_run(tmp_path, config(), resume="auto", lineage={})
    with pytest.raises(ConfigError, match="seed: there 0, now 7"):
        runs.open_run(tmp_path, config(seed=7), resume="auto", lineage={})
    recipe = TINY.stages["stage1_32"].model_copy(update={"learning_rate": 9.0})
    with pytest.raises(ConfigError, match=r"recipe\.learning_rate: there 0\.0015, now 9\.0"):
        runs.open_run(tmp_path, config(recipe=recipe), resume="auto", lineage={})
    assert runs.read_config(tmp_path) == config()


def test_a_running_field_may_change_and_is_recorded(tmp_path: Path) -> None:
    runs.open_run(tmp_path, config(), resume="auto", lineage={})
    runs.open_run(tmp_path, config(max_steps=9, micro_batch_size=4), resume="auto", lineage={})
    (line,) = (tmp_path / "config_history.jsonl").read_text().splitlines()
    assert json.loads(line)["changes"] == {"max_steps": [5, 9], "micro_batch_size": [8, 4]}


def test_never_refuses_a_used_folder_and_must_refuses_a_fresh_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no valid checkpoint and resume='must'"):
        runs.open_run(tmp_path / "new", config(), resume="must", lineage={})
    assert not (tmp_path / "new").exists()
    runs.open_run(tmp_path / "used", config(), resume="never", lineage={})
    with pytest.raises(ConfigError, match="resume='never'"):
        runs.open_run(tmp_path / "used", config(), resume="never", lineage={})


def test_a_folder_with_somebody_elses_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="holds other files"):
        runs.open_run(tmp_path, config(), resume="auto", lineage={})
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_newest_valid_checkpoint_is_taken_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    for step in (8, 9, 10):
        save(tmp_path, step)
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path)) == 10
    damaged = tmp_path / "checkpoints" / "step-00000010" / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x00")
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path)) == 9
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path, 8)) == 8
    with pytest.raises(ConfigError, match=r"no valid checkpoint 10.*steps there: 8, 9, 10.*not valid: step-00000010"):
        runs.find_checkpoint(tmp_path, 10)


def test_scratch_and_set_aside_folders_are_no_checkpoints_and_only_scratch_is_swept(tmp_path: Path) -> None:
    runs.open_run(tmp_path, config(), resume="auto", lineage={})
    good = save(tmp_path, 3)
    for name in (".step-00000012.99", ".step-00000002.old.99", ".bad-step-00000011", "step-00000013.copy"):
        (tmp_path / "checkpoints" / name).mkdir()
        for path in good.iterdir():
            (tmp_path / "checkpoints" / name / path.name).write_bytes(path.read_bytes())
    assert runs.find_checkpoint(tmp_path) == good and runs.checkpoints(tmp_path) == [good]
    assert runs.open_run(tmp_path, config(), resume="must", lineage={}) == good
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {".bad-step-00000011", "step-00000013.copy", good.name}


@pytest.mark.parametrize(
    "manifest", ["{", "[]", "{}", '{"weights.safetensors": 1, "state.json": 2}', '{"weights.safetensors": {}, "state.json": {}}']
)
def test_a_damaged_manifest_makes_a_checkpoint_invalid(tmp_path: Path, manifest: str) -> None:
    checkpoint = save(tmp_path, 3)
    assert runs.is_valid(checkpoint) and runs.damaged_file(checkpoint) is None
    (checkpoint / "manifest.json").write_text(manifest)
    assert not runs.is_valid(checkpoint)


def test_a_file_without_a_known_hash_or_that_cannot_be_read_makes_a_checkpoint_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(tmp_path, 3)
    other = save(tmp_path, 4)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["weights.safetensors"]["sha256"]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert runs.damaged_file(checkpoint) == "weights.safetensors"

    def broken(path: Path) -> str:
        raise OSError("broken disk")

    monkeypatch.setattr(runs, "file_hash", broken)
    assert runs.damaged_file(other) == "weights.safetensors"


def test_the_state_of_a_checkpoint_is_read_and_damage_is_named(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    assert runs.read_state(checkpoint) == {"step": 3, "note": "x"}
    (checkpoint / "state.json").write_text("[3]")
    assert runs.damaged_file(checkpoint) == "state.json"
    with pytest.raises(ConfigError, match=r"state\.json is damaged: it holds no table"):
        runs.read_state(checkpoint)
    (checkpoint / "state.json").unlink()
    with pytest.raises(ConfigError, match=r"state\.json is damaged"):
        runs.read_state(checkpoint)


def test_one_training_at_a_time_has_a_folder_and_readers_need_not_wait(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with runs.lock(folder):
        assert runs.open_run(folder, config(), resume="never", lineage={}) is None
        with pytest.raises(ConfigError, match="is being trained by another process"), runs.lock(folder):
            pass
        assert runs.read_config(folder) == config() and runs.read_metrics(folder) == []
    with runs.lock(folder):
        pass


def test_the_lock_of_a_killed_training_is_free(tmp_path: Path) -> None:
    killed = in_a_process("held = runs.lock(folder)\nheld.__enter__()\nprint('held', flush=True)", tmp_path)
    assert killed.returncode == -signal.SIGKILL and killed.stdout == "held\n"
    with runs.lock(tmp_path):
        pass


def test_an_error_under_the_lock_is_not_taken_for_a_held_lock(tmp_path: Path) -> None:
    with pytest.raises(BlockingIOError), runs.lock(tmp_path):
        raise BlockingIOError


def test_a_process_that_inherits_the_lock_holds_it_to_its_end(tmp_path: Path) -> None:
    with runs.lock(tmp_path) as held:
        heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[held])
    with pytest.raises(ConfigError, match="is being trained by another process"), runs.lock(tmp_path):
        pass
    heir.communicate(b"\n")
    with runs.lock(tmp_path):
        pass


def test_the_lock_leaves_alone_what_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="holds other files"), runs.lock(tmp_path):
        pass
    with pytest.raises(ConfigError, match="is a file"), runs.lock(tmp_path / "thesis.txt"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_rows_beyond_the_checkpoint_move_aside_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        runs.append_metrics(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4, "lo')
    assert [row["step"] for row in runs.read_metrics(tmp_path)] == [1, 2, 3]
    runs.rewind_metrics(tmp_path, 2)
    assert [row["step"] for row in runs.read_metrics(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "metrics.discarded.jsonl").read_text())["step"] == 3


def test_a_row_is_there_once_it_is_added_whatever_kills_the_process(tmp_path: Path) -> None:
    killed = in_a_process("for step in (1, 2): runs.append_metrics(folder, {'step': step, 'note': 'x' * 100})", tmp_path)
    assert killed.returncode == -signal.SIGKILL
    assert [row["step"] for row in runs.read_metrics(tmp_path)] == [1, 2]


@pytest.mark.parametrize("replaced", [0, 1])
def test_a_kill_while_rewinding_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: int) -> None:
    for step in (1, 2, 3):
        runs.append_metrics(tmp_path, {"step": step})
    (tmp_path / runs.DISCARDED).write_text('{"step": 9}\n{"step": 7, "lo')
    real, left = runs.os.replace, [None] * replaced

    def killing(source: Path, target: Path) -> None:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        real(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(runs.os, "replace", killing)
        runs.rewind_metrics(tmp_path, 1)
    assert [row["step"] for row in runs.read_metrics(tmp_path)] == [1, 2, 3]
    runs.rewind_metrics(tmp_path, 1)
    assert [row["step"] for row in runs.read_metrics(tmp_path)] == [1]
    discarded = [json.loads(line)["step"] for line in (tmp_path / runs.DISCARDED).read_text().splitlines()]
    assert discarded == [9, *[2, 3] * (1 + replaced)]


def test_steps_increase_strictly_after_a_rewind_and_what_does_not_fit_is_kept_aside(tmp_path: Path) -> None:
    for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4), (4, 0.5), (4, 0.6)):
        runs.append_metrics(tmp_path, {"step": step, "loss": loss})
    runs.rewind_metrics(tmp_path, 4)
    assert [row["loss"] for row in runs.read_metrics(tmp_path)] == [0.1, 0.2, 0.3, 0.5]
    assert [json.loads(line)["loss"] for line in (tmp_path / runs.DISCARDED).read_text().splitlines()] == [0.4, 0.6]


def test_the_grace_is_what_was_asked_or_three_times_the_last_save_and_never_under_a_minute(tmp_path: Path) -> None:
    assert runs.grace_s(tmp_path, None) == 60
    for seconds, grace in ((5.0, 60), (50.0, 150)):
        runs.write_json(tmp_path / runs.LAST_SAVE, {"step": 1, "seconds": seconds, "bytes": 1})
        assert (runs.grace_s(tmp_path, None), runs.grace_s(tmp_path, 7)) == (grace, 7)
    for damaged in ("{", "[]", "{}", '{"seconds": null}', '{"seconds": "soon"}'):
        (tmp_path / runs.LAST_SAVE).write_text(damaged)
        assert runs.grace_s(tmp_path, None) == 60


def test_a_damaged_or_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no run folder: it has no config\.json"):
        runs.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is damaged"):
        runs.read_config(tmp_path)


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    runs.write_json(path, {"a": 1})
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(ValueError):
        runs.write_json(path, endless)
    assert json.loads(path.read_text()) == {"a": 1}
