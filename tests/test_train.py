"""A run can be stopped, resumed and handed over without changing a bit, and what does not fit stops before work."""

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import MixedPrecision
from PIL import Image
from safetensors.torch import load_file, save_file

from sdlab import checkpoints, export, models, optim, places, prepare, presets, runs, stages, train
from sdlab.checkpoints import Checkpoints
from sdlab.config import ConfigError, TrainConfig


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def configure(data: Path, **changes: Any) -> TrainConfig:
    small = {"preset": "tiny", "stage": "stage1_32", "data_dir": str(data), "global_batch_size": 4, "max_steps": 4, "log_every": 1}
    return stages.configure(**{**small, **changes})


def tensors(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = runs.find_checkpoint(run)
    return {f"{path.stem}/{key}": value for path in checkpoint.glob("*.safetensors") for key, value in load_file(path).items()}


def losses(run: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["learning_rate"]) for row in runs.read_metrics(run)]


@pytest.fixture(scope="module")
def whole(scenes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "whole"
    torch.set_num_threads(1)
    assert train.train(configure(scenes_dir), run)["status"] == "done"
    return run


def test_resumed_twice_equals_uninterrupted_bit_for_bit(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    for steps in (1, 3, 4):
        result = train.train(configure(scenes_dir, max_steps=steps), tmp_path / "run")
        assert (result["status"], result["step"]) == ("done", steps)
    assert losses(tmp_path / "run") == losses(whole)
    there, here = tensors(whole), tensors(tmp_path / "run")
    assert there.keys() == here.keys() and all(torch.equal(there[key], here[key]) for key in there)


def test_activations_that_are_computed_again_change_no_bit(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    train.train(configure(scenes_dir, gradient_checkpointing=True), tmp_path / "run")
    there, here = tensors(whole), tensors(tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole) and all(torch.equal(there[key], here[key]) for key in there)


def test_short_moments_resume_bit_for_bit_too(scenes_dir: Path, tmp_path: Path) -> None:
    for folder, stops in (("whole", (4,)), ("parts", (1, 2, 4))):
        for steps in stops:
            train.train(configure(scenes_dir, max_steps=steps, overrides={"optimizer_states": "bfloat16"}), tmp_path / folder)
    there, here = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert here["exp_avg_sq/conv_in.weight"].dtype == torch.bfloat16
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts") and all(torch.equal(there[key], here[key]) for key in there)


def test_a_kill_after_a_checkpoint_computes_the_lost_steps_again(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    train.train(configure(scenes_dir, max_steps=2), tmp_path / "run")
    for step in (3, 4):
        runs.append_metrics(tmp_path / "run", {"step": step, "loss": 0.0, "learning_rate": 0.0})
    train.train(configure(scenes_dir), tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole)
    assert len((tmp_path / "run" / "metrics.discarded.jsonl").read_text().splitlines()) == 2


def test_a_damaged_newest_checkpoint_is_computed_and_written_again(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    train.train(configure(scenes_dir, save_every=2), tmp_path / "run")
    weights = runs.find_checkpoint(tmp_path / "run", 4) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    train.train(configure(scenes_dir, save_every=2), tmp_path / "run")
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path / "run")) == 4
    assert losses(tmp_path / "run") == losses(whole)


def test_smaller_micro_batches_train_the_same_up_to_rounding(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    train.train(configure(scenes_dir, micro_batch_size=2, max_steps=2), tmp_path / "run")
    ours, theirs = losses(tmp_path / "run"), losses(whole)[:2]
    assert [row[1] for row in ours] == pytest.approx([row[1] for row in theirs], rel=2e-2)


def test_every_row_of_metrics_says_what_readers_rely_on(whole: Path) -> None:
    rows = runs.read_metrics(whole)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["samples_seen"] for row in rows] == [4, 8, 12, 16]
    assert all(row["loss"] > 0 and row["samples_per_second"] > 0 and row["learning_rate"] > 0 for row in rows)


def test_the_average_lags_behind_the_weights(whole: Path) -> None:
    saved = tensors(whole)
    pairs = [(saved[f"weights/{key}"], saved[f"ema/{key}"]) for key in load_file(runs.find_checkpoint(whole) / "ema.safetensors")]
    assert any(not torch.equal(raw, average) for raw, average in pairs)


def test_the_second_stage_starts_from_the_first_ones_average_and_says_so(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    config = configure(scenes_dir, stage="stage2_64", init_from=str(whole), max_steps=1, overrides={"learning_rate": 1e-12})
    train.train(config, tmp_path / "run")
    parent, child = tensors(whole), tensors(tmp_path / "run")
    names = load_file(runs.find_checkpoint(whole) / "ema.safetensors")
    assert all(torch.allclose(parent[f"ema/{name}"], child[f"weights/{name}"], atol=1e-6) for name in names)
    lineage = json.loads((tmp_path / "run" / "lineage.json").read_text())["parent"]
    assert (lineage["path"], lineage["weights"], lineage["step"]) == (str(whole), "ema", 4)
    assert lineage["sha256"] == runs.file_hash(runs.find_checkpoint(whole) / "ema.safetensors")


def test_the_export_is_a_pipeline_that_loads_again(whole: Path, tmp_path: Path) -> None:
    from diffusers import StableDiffusionPipeline

    model = models.load(str(whole / "export"))
    assert (model.weights, model.step, model.resolution) == ("ema", 4, 32)
    saved = load_file(runs.find_checkpoint(whole) / "ema.safetensors")
    assert all(torch.equal(value, saved[key]) for key, value in model.unet.state_dict().items())
    pipeline = StableDiffusionPipeline.from_pretrained(whole / "export")
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    pipeline.save_pretrained(tmp_path)
    written, theirs = (json.loads((folder / "model_index.json").read_text()) for folder in (whole / "export", tmp_path))
    assert written == {name: part for name, part in theirs.items() if name != "_name_or_path"}
    assert all(str(places.TINY_DIR) not in path.read_text() for path in (whole / "export").rglob("*.json"))


def test_an_interrupt_stops_after_the_step_with_a_checkpoint_and_the_run_goes_on(scenes_dir: Path, tmp_path: Path) -> None:
    def interrupt() -> None:
        while not runs.read_metrics(tmp_path / "run"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    result = train.train(configure(scenes_dir, max_steps=10_000), tmp_path / "run")
    assert result["status"] == "stopped" and 0 < result["step"] < 10_000
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path / "run")) == result["step"]
    again = train.train(configure(scenes_dir, max_steps=result["step"] + 1), tmp_path / "run", resume="must")
    assert (again["status"], again["step"]) == ("done", result["step"] + 1)


def poison(monkeypatch: pytest.MonkeyPatch, row: int, after: int = 0) -> None:
    """Make the loss of one row of the data not a number, from some step on."""
    plain = train._losses

    def losses(state: Any, batch: Any) -> torch.Tensor:
        bad = (batch.indices == row) & (state.step >= after)
        return plain(state, batch) + torch.where(bad, float("nan"), 0.0)

    monkeypatch.setattr(train, "_losses", losses)


def test_a_stop_file_and_then_a_signal_still_end_with_a_checkpoint(
    scenes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = train.save

    def signalled(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        save(*arguments)

    monkeypatch.setattr(train, "save", signalled)
    requested = runs.stop_requested
    monkeypatch.setattr(runs, "stop_requested", lambda folder: (folder / "stop").touch() or requested(folder))
    result = train.train(configure(scenes_dir, max_steps=100), tmp_path / "run")
    assert (result["status"], result["step"]) == ("stopped", 1)
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path / "run")) == 1


def test_an_export_that_fails_is_told_in_the_result_and_made_by_the_next_call(
    scenes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(export, "save_pipeline", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train.train(configure(scenes_dir, max_steps=1), tmp_path / "run")
    assert json.loads((tmp_path / "run/result.json").read_text())["status"] == "failed"
    assert train.train(configure(scenes_dir, max_steps=1), tmp_path / "run")["status"] == "done"
    assert (tmp_path / "run/export/model_index.json").is_file()


def test_a_refused_call_leaves_a_finished_run_as_it_was(scenes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    train.train(configure(scenes_dir, max_steps=1), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json")}
    with pytest.raises(ConfigError, match="num_nodes=2, and this process may use 1"):
        train.train(configure(scenes_dir, max_steps=1, num_nodes=2), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.json")} == before


def test_what_fails_to_show_rows_does_not_stop_the_run(scenes_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.train(configure(scenes_dir, max_steps=1), tmp_path / "run", on_rows=lambda rows: 1 / 0)
    assert "metrics cannot be shown: ZeroDivisionError" in capsys.readouterr().out


def test_bucketed_data_keep_their_micro_batch_size_within_a_run(scenes_dir: Path, tmp_path: Path) -> None:
    config = configure(scenes_dir, max_steps=1, micro_batch_size=2)
    bucketed = config.model_copy(update={"bucketed": True})
    assert {**bucketed.science(), "micro_batch_size": 0} == {**config.science(), "micro_batch_size": 0} != config.science()


def test_a_loss_that_is_not_finite_stops_at_once_names_the_sample_and_keeps_the_checkpoint(
    scenes_dir: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 7)
    sample = r"not finite at rows 7 \([0-9a-f]{32}: '.+'\) of the data"
    message = rf"step \d+: loss nan.*{sample}; the checkpoint of step \d+ is good; give a new run_dir"
    with pytest.raises(train.TrainingFailed, match=message):
        train.train(configure(scenes_dir, max_steps=20, save_every=1), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    checkpoint = runs.find_checkpoint(tmp_path / "run")
    assert result["status"] == "failed" and f"step {result['step'] + 1}: loss nan" in result["error"]
    assert runs.checkpoint_step(checkpoint) == result["step"] and all(
        torch.isfinite(value).all() for value in tensors(tmp_path / "run").values()
    )


def test_weights_that_are_not_finite_are_noticed_too(scenes_dir: Path, tmp_path: Path) -> None:
    train.train(configure(scenes_dir, max_steps=1), tmp_path / "run")
    weights = runs.find_checkpoint(tmp_path / "run") / "weights.safetensors"
    broken = {key: torch.full_like(value, float("nan")) for key, value in load_file(weights).items()}
    state = {**{name: load_file(weights.with_name(f"{name}.safetensors")) for name in ("ema", "exp_avg", "exp_avg_sq")}, "weights": broken}
    with Checkpoints(tmp_path / "run") as written:
        written.save(2, state, {})
    with pytest.raises(train.TrainingFailed, match=r"step 3: loss nan"):
        train.train(configure(scenes_dir, max_steps=4), tmp_path / "run")


class Scaled:
    """16-mixed on a CPU, which sdlab refuses, with a scaler that starts high enough to overflow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data: Path, scale: float) -> None:
        def make_fabric(config: TrainConfig) -> Fabric:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)
            return Fabric(accelerator="cpu", devices=1, plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler)])

        monkeypatch.setattr(train, "make_fabric", make_fabric)
        self.config = configure(data, overrides={"warmup_steps": 10})
        self.recipe = self.config.recipe.model_copy(update={"precision": "16-mixed"})

    def train(self, run: Path, steps: int) -> list[dict[str, Any]]:
        train.train(self.config.model_copy(update={"recipe": self.recipe, "max_steps": steps, "save_every": 1}), run)
        return runs.read_metrics(run)


def test_a_step_whose_gradients_overflow_counts_but_moves_nothing(
    scenes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = Scaled(monkeypatch, scenes_dir, scale=2.0**24)
    rows = scaled.train(tmp_path / "run", 12)
    skipped = [row["step"] for row in rows if row.get("skipped")]
    assert skipped == list(range(1, len(skipped) + 1)) and 0 < len(skipped) < 12
    first = len(skipped) + 1
    assert [row["learning_rate"] for row in rows[first - 1 :]] == [
        optim.learning_rate(scaled.recipe, step) for step in range(1, 14 - first)
    ]
    state = runs.read_state(runs.find_checkpoint(tmp_path / "run"))
    assert (state["step"], state["skipped"], state["ema_updates"]) == (12, len(skipped), 12 - len(skipped))
    assert state["scaler"]["scale"] == 2.0 ** (24 - len(skipped))


def test_skipped_steps_leave_weights_and_average_alone(scenes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Scaled(monkeypatch, scenes_dir, scale=2.0**40).train(tmp_path / "run", 2)
    start = models.build_unet(presets.get("tiny").networks, seed=0).state_dict()
    saved = tensors(tmp_path / "run")
    assert all(torch.equal(saved[f"{group}/{name}"], start[name]) for name in start for group in ("weights", "ema"))
    assert not any(saved[name].any() for name in saved if name.startswith("exp_avg"))


def test_the_scaler_goes_on_where_it_was(scenes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = Scaled(monkeypatch, scenes_dir, scale=2.0**24)
    scaled.train(tmp_path / "whole", 12)
    for steps in (2, 9, 12):
        scaled.train(tmp_path / "run", steps)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    ours, theirs = tensors(tmp_path / "run"), tensors(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_twenty_skipped_steps_in_a_row_stop_the_run_also_over_a_resume(
    scenes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = Scaled(monkeypatch, scenes_dir, scale=2.0**100)
    scaled.train(tmp_path / "run", 15)
    with pytest.raises(train.TrainingFailed, match="step 20: the gradients of the last 20 steps were not finite"):
        scaled.train(tmp_path / "run", 40)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_16_mixed_trains_and_resumes_on_a_gpu(scenes_dir: Path, tmp_path: Path) -> None:
    changes = {"precision": "16-mixed", "save_every": 2}
    train.train(configure(scenes_dir, max_steps=8, **changes), tmp_path / "whole")
    for steps in (3, 8):
        train.train(configure(scenes_dir, max_steps=steps, **changes), tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-3)
    assert runs.read_state(runs.find_checkpoint(tmp_path / "run"))["scaler"]["scale"] > 0


def test_a_disk_that_fills_up_stops_the_run_in_order_and_it_goes_on_when_there_is_room(
    scenes_dir: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage
    full = usage("/")._replace(free=1_000)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: full if trained(tmp_path / "run", 3) else usage(path))
    result = train.train(configure(scenes_dir, save_every=2), tmp_path / "run")
    assert result["status"] == "stopped" and "the checkpoint of step 2 is good; make room and run again" in result["error"]
    assert runs.checkpoint_step(runs.find_checkpoint(tmp_path / "run")) == 2
    monkeypatch.undo()
    assert train.train(configure(scenes_dir, save_every=2), tmp_path / "run")["status"] == "done"
    assert losses(tmp_path / "run") == losses(whole)
    ours, theirs = tensors(tmp_path / "run"), tensors(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_metrics_that_cannot_be_written_are_written_later(
    scenes_dir: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = runs.append_metrics

    def append(folder: Path, row: Any) -> None:
        if row["step"] == 2 and not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            raise OSError(errno.ENOSPC, "no space left")
        write(folder, row)

    monkeypatch.setattr(runs, "append_metrics", append)
    train.train(configure(scenes_dir), tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole) and (tmp_path / "tried").exists()


def test_a_disk_without_room_is_refused_before_the_run(scenes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil.disk_usage("/")._replace(free=1_000)
    monkeypatch.setattr(stages.shutil, "disk_usage", lambda path: full)
    with pytest.raises(ConfigError, match=r"0\.0 GB are free and the checkpoints need"):
        train.train(configure(scenes_dir), tmp_path / "run")
    assert not (tmp_path / "run/config.json").exists()


def test_two_trainings_of_one_folder_at_once_are_refused(scenes_dir: Path, tmp_path: Path) -> None:
    with runs.lock(tmp_path / "run"), pytest.raises(ConfigError, match="is being trained by another process"):
        train.train(configure(scenes_dir), tmp_path / "run")


def test_the_validation_loss_is_logged_by_quarter_and_leaves_the_run_unchanged(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    train.train(configure(scenes_dir, val_data_dir=str(scenes_dir), val_every=2), tmp_path / "run")
    rows = runs.read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4]
    quarters = rows[-1]["val_loss_quartiles"]
    assert len(quarters) == 4 and rows[-1]["val_loss"] == pytest.approx(sum(quarters) / 4)
    assert losses(tmp_path / "run") == losses(whole)


def test_tensorboard_gets_the_same_numbers(scenes_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not there")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (2, 4):
        train.train(configure(scenes_dir, tensorboard=True, max_steps=steps), tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([loss for _, loss, _ in losses(tmp_path / "run")])


def test_a_step_costs_one_forward_a_micro_batch_and_nothing_that_was_saved_is_computed_again(
    scenes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forwards, steps = [], []
    losses, step = train._losses, torch.optim.AdamW.step
    monkeypatch.setattr(train, "_losses", lambda state, batch: forwards.append(len(batch.indices)) or losses(state, batch))
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *arguments, **given: steps.append(1) or step(*arguments, **given))
    for last in (3, 5):
        train.train(configure(scenes_dir, micro_batch_size=2, max_steps=last, save_every=3), tmp_path / "run")
    assert (forwards, len(steps)) == ([2] * 10, 5)
    train.train(configure(scenes_dir, max_steps=6, val_data_dir=str(scenes_dir), val_every=6), tmp_path / "run")
    assert (forwards[10:], len(steps)) == ([4] * 11, 6)


def test_new_rows_are_handed_on_while_it_trains(scenes_dir: Path, tmp_path: Path) -> None:
    seen: list[list[int]] = []
    train.train(configure(scenes_dir), tmp_path / "run", on_rows=lambda rows: seen.append([row["step"] for row in rows]))
    assert seen == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_what_the_rest_will_take_is_said_once_it_was_measured(
    scenes_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDLAB_HEADLESS", "1")
    train.train(configure(scenes_dir, max_steps=8), tmp_path / "run")
    said = capsys.readouterr()
    assert re.search(r"2 steps to go: about 0:0\d:\d\d, \S+ device-hours", said.out + said.err)
    assert runs.read_metrics(tmp_path / "run")[-1]["device_hours"] > 0


def trained(run: Path, step: int) -> bool:
    rows = runs.read_metrics(run)
    return bool(rows) and rows[-1]["step"] >= step


def test_previews_are_drawn_and_leave_the_run_unchanged(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    train.train(configure(scenes_dir, preview_every=2), tmp_path / "run")
    assert [path.name for path in sorted((tmp_path / "run" / "previews").glob("*.png"))] == ["step-00000002.png", "step-00000004.png"]
    assert losses(tmp_path / "run") == losses(whole)


def test_a_users_preset_file_and_overrides_reach_the_run(scenes_dir: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: tiny\nstages: {stage1_32: {warmup_steps: 0}}\n")
    config = configure(scenes_dir, preset=str(mine), overrides={"learning_rate": 1e-4}, max_steps=1)
    train.train(config, tmp_path / "run")
    assert runs.read_metrics(tmp_path / "run")[0]["learning_rate"] == 1e-4
    assert runs.read_config(tmp_path / "run").overrides == {"learning_rate": 1e-4, "global_batch_size": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "tinny"}, "did you mean 'tiny'"),
        ({"stage": "stage1"}, "did you mean 'stage1_32'"),
        ({"overrides": {"learning_rat": 1}}, "did you mean 'learning_rate'"),
        ({"overrides": {"learning_rate": "fast"}}, "learning_rate.*given: 'fast'"),
        ({"global_batch_size": 32, "micro_batch_size": 5}, "is not a multiple of micro_batch_size=5"),
        ({"overrides": {"resolution": 40}}, "resolution=40 cannot be halved evenly"),
        ({"overrides": {"resolution": 48}}, "48"),
        ({"data_dir": "/nowhere"}, "/nowhere"),
        ({"stage": "stage2_64"}, "starts from 'stage1_32': give init_from"),
        ({"init_from": "tiny"}, "starts from random weights"),
        ({"stage": "stage2_64", "init_from": "/nowhere"}, "there is no model at '/nowhere'"),
        ({"precision": "16-true"}, "precision.*given: '16-true'"),
        ({"devices": 3}, "global_batch_size=4 is not a multiple of micro_batch_size=1 x world_size=3"),
        ({"devices": 0}, "devices.*given: 0"),
        ({"precision": "16-mixed"}, "needs a GPU"),
        ({"precision": "16-mixed", "strategy": "fsdp"}, "cannot be used with strategy='fsdp'"),
        ({"keep_every": 3}, "keep_every=3 has to be a multiple of save_every=200"),
        ({"rendezvous": "node1"}, "host:port.*given: 'node1'"),
        ({"num_nodes": None}, "num_nodes.*given: None"),
        ({"devices": "2"}, "micro_batch_size|devices"),
        ({"overrides": {"lr_schedule": "cosine"}, "max_steps": 101}, "max_steps=101 is more than schedule_steps=100"),
        ({"val_every": 2}, "val_every needs val_data_dir"),
        ({"val_data_dir": "/nowhere"}, "/nowhere"),
        ({"overrides": {"learning_rate": float("inf")}}, "learning_rate"),
        ({"overrides": {"betas": [1.5, 0.9]}}, "betas"),
        ({"overrides": {"warmup_steps": 500}}, "warmup_steps=500 is more than schedule_steps"),
        ({"micro_batch_size": 0}, "micro_batch_size.*given: 0"),
        ({"max_steps": 0}, "max_steps.*given: 0"),
    ],
)
def test_what_does_not_fit_is_refused_before_work(scenes_dir: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(scenes_dir, **changes)


def test_a_folder_of_another_science_is_refused_unchanged(scenes_dir: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="seed: there 0, now 1"):
        train.train(configure(scenes_dir, seed=1), whole)
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*") if path.is_file()} == before


def test_the_plan_says_where_the_run_goes_on_and_refuses_a_folder_of_another_science(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    config = configure(scenes_dir, max_steps=10)
    planned = stages.plan(config, whole)
    assert (planned.step, planned.samples, planned.epochs) == (4, 40, 1.0) and planned.disk_bytes > planned.parameters * 16
    assert stages.plan(config, tmp_path / "new").step == 0 and not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="seed: there 0, now 1"):
        stages.plan(configure(scenes_dir, seed=1), whole)


def test_a_unet_of_another_shape_is_not_taken_over(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    mine = tmp_path / "wide.yaml"
    mine.write_text("extends: tiny\nnetworks: {unet: {block_out_channels: [96, 192]}}\n")
    with pytest.raises(ConfigError, match="do not fit the UNet"):
        configure(scenes_dir, preset=str(mine), stage="stage2_64", init_from=str(whole))


@pytest.mark.parametrize(
    ("unet", "message"),
    [
        ("in_channels: 3", "in_channels=3 has to be 8"),
        ("cross_attention_dim: 33", "has to be 128"),
        ("norm_num_groups: 7", "does not make a UNet"),
    ],
)
def test_a_unet_that_does_not_fit_its_frozen_parts_is_refused(scenes_dir: Path, tmp_path: Path, unet: str, message: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: tiny\nnetworks: {{unet: {{{unet}}}}}\n")
    with pytest.raises(ConfigError, match=message):
        configure(scenes_dir, preset=str(mine))


def test_data_of_another_vae_is_refused(scenes_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(places.TINY_DIR, tmp_path / "parts")
    vae = next((tmp_path / "parts" / "vae").glob("*.safetensors"))
    save_file({key: value + 0.01 for key, value in load_file(vae).items()}, vae)
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: tiny\nnetworks: {{frozen: {tmp_path / 'parts'}}}\n")
    with pytest.raises(ConfigError, match="was encoded by another vae"):
        configure(scenes_dir, preset=str(mine))


def test_the_tiny_stages_keep_an_average() -> None:
    assert all(stage.ema_decay for stage in presets.get("tiny").stages.values())


def test_token_ids_alone_train_like_cached_text_states(scenes_dir: Path, whole: Path, tmp_path: Path) -> None:
    values = {"source": "scenes", "data_dir": str(tmp_path / "data"), "resolution": 32, "limit": 40, "text_states": False}
    prepare.prepare(prepare.configure(**values))
    train.train(configure(tmp_path / "data"), tmp_path / "run")
    assert [loss for _, loss, _ in losses(tmp_path / "run")] == pytest.approx([loss for _, loss, _ in losses(whole)], rel=1e-2)


def test_buckets_train_with_micro_batches_of_one_shape_each(tmp_path: Path) -> None:
    (tmp_path / "pics").mkdir()
    for number, size in enumerate([(64, 64), (64, 66), (30, 120), (120, 30), (62, 64)]):
        Image.effect_noise(size, 60).convert("RGB").save(tmp_path / "pics" / f"{number}.png")
        (tmp_path / "pics" / f"{number}.txt").write_text(f"noise {number}")
    values = {"source": str(tmp_path / "pics"), "data_dir": str(tmp_path / "data"), "resolution": 32, "crop": "buckets"}
    manifest = prepare.prepare(prepare.configure(**values))
    assert len(manifest["resolutions"]["32"]["buckets"]) == 3
    result = train.train(configure(tmp_path / "data", micro_batch_size=2, max_steps=3), tmp_path / "run")
    assert (result["status"], result["samples_seen"]) == ("done", 12)
    train.train(configure(tmp_path / "data", micro_batch_size=2, max_steps=2), tmp_path / "other")
    resumed = train.train(configure(tmp_path / "data", micro_batch_size=2, max_steps=3), tmp_path / "other")
    assert resumed["status"] == "done" and losses(tmp_path / "other") == losses(tmp_path / "run")


def test_the_share_of_dropped_captions_is_logged(scenes_dir: Path, tmp_path: Path) -> None:
    for probability in (0.0, 1.0):
        config = configure(scenes_dir, overrides={"caption_drop_prob": probability}, max_steps=2)
        train.train(config, tmp_path / str(probability))
        assert [row["caption_drop_rate"] for row in runs.read_metrics(tmp_path / str(probability))] == [probability] * 2
