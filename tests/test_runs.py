"""The run folder stays whole whatever happens, and refuses what does not belong in it."""

import json
from pathlib import Path

import pytest
import torch

from sdlab import presets, runs
from sdlab.config import ConfigError, TrainConfig

TINY = presets.get("tiny")


def config(**changes: object) -> TrainConfig:
    values = {
        **{"preset": "tiny", "stage": "stage1_32", "networks": TINY.networks, "recipe": TINY.stages["stage1_32"]},
        **{"data_key": "k", "data_dir": "/d", "max_steps": 5, "micro_batch_size": 8, "save_every": 2, "log_every": 1, "preview_every": 0},
    }
    return TrainConfig.model_validate({**values, **changes})


def save(folder: Path, step: int) -> Path:
    return runs.save_checkpoint(folder, step, {"weights": {"w": torch.full((3,), float(step))}}, {"note": "x"})


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


def test_only_the_newest_checkpoints_are_kept_and_a_half_written_one_is_no_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 9, 10, 11):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / ".step-00000012.99").mkdir()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == [f"step-{step:08d}" for step in (9, 10, 11)]
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path)) == 11


def test_rows_beyond_the_checkpoint_move_aside_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        runs.append_metrics(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4, "lo')
    assert [row["step"] for row in runs.read_metrics(tmp_path)] == [1, 2, 3]
    runs.rewind_metrics(tmp_path, 2)
    assert [row["step"] for row in runs.read_metrics(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "metrics.discarded.jsonl").read_text())["step"] == 3


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
