"""A run folder is followed from its files alone: what they say is shown, what they do not say is not, and nothing in them is trusted."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from sdlab import presets, runs, watch
from sdlab.config import ConfigError, TrainConfig

HOSTILE = "<img src=x onerror=alert(1)> & 'quotes'"
TINY = presets.get("tiny")
SLOW_S = 600.0


def write_config(folder: Path, **changes: object) -> None:
    recipe = TINY.stages["stage1_32"].model_copy(update={"global_batch_size": 32})
    values = {
        **{"preset": "tiny", "stage": "stage1_32", "networks": TINY.networks, "recipe": recipe, "data_key": "k", "data_dir": "/d"},
        **{"max_steps": 200, "micro_batch_size": 8, "save_every": 50, "log_every": 50, "preview_every": 0},
    }
    runs.write_json(folder / "config.json", TrainConfig.model_validate({**values, **changes}).model_dump(mode="json"))


def add_row(folder: Path, step: int, elapsed_s: float = 20.0, **more: object) -> None:
    row = {"step": step, "samples_seen": 32 * step, "loss": 1 / step, "samples_per_second": 85.2, "elapsed_s": elapsed_s}
    runs.append_metrics(folder, {**row, **more})


def add_preview(folder: Path, step: int, shade: int = 0) -> Path:
    path = folder / "previews" / f"step-{step:08d}.png"
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(path)
    return path


def finish(folder: Path, status: str = "done", step: int = 200, error: str | None = None) -> None:
    runs.write_json(folder / "result.json", {"status": status, "step": step, "error": error})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder whose training is not running, 100 steps in."""
    write_config(tmp_path)
    add_row(tmp_path, 50)
    add_row(tmp_path, 100, elapsed_s=39.6)
    return tmp_path


@pytest.fixture
def lock(folder: Path):
    """Somebody trains in the folder."""
    with FileLock(folder / ".lock") as held:
        yield held


@pytest.fixture
def open_panel():
    """Panels that look by themselves only when told to, closed in the end."""
    with contextlib.ExitStack() as stack:

        def open_one(folder: Path, every_s: float = SLOW_S) -> watch.RunPanel:
            panel = watch.watch(folder, every_s=every_s)
            stack.callback(panel.close)
            return panel

        yield open_one


def test_the_line_of_a_running_training_says_all_there_is(folder, lock):
    expected = "stage1_32: 3,200 of 6,400 samples (step 100 of 200), 85 samples/s, about 0:38 left, 0.011 device-hours, running"
    assert watch.status_line(folder) == expected


def test_whoever_holds_the_lock_decides_whether_it_runs(folder):
    assert watch.status_line(folder).endswith("0.011 device-hours, not running") and not (folder / ".lock").exists()
    with FileLock(folder / ".lock"):
        assert watch.status_line(folder).endswith(", running")
    assert watch.status_line(folder).endswith(", not running")
    with FileLock(folder / ".lock", timeout=0):
        pass


def test_time_left_is_said_only_while_it_runs_on(folder):
    assert "left" not in watch.status_line(folder)
    with FileLock(folder / ".lock"):
        assert "about 0:38 left" in watch.status_line(folder)
        (folder / "stop").touch()
        assert watch.status_line(folder).endswith("0.011 device-hours, stopping after this step")
        assert "left" not in watch.status_line(folder)


def test_an_ended_training_says_how_and_at_which_step(folder):
    finish(folder, "stopped", step=120)
    assert watch.status_line(folder).startswith("stage1_32: 3,840 of 6,400 samples (step 120 of 200)")
    assert watch.status_line(folder).endswith(", stopped")
    finish(folder, "failed", error="TrainingFailed: loss nan")
    assert watch.status_line(folder).endswith(", failed: TrainingFailed: loss nan")


def test_before_the_first_row_the_line_starts_at_zero(tmp_path):
    write_config(tmp_path)
    assert watch.status_line(tmp_path) == "stage1_32: 0 of 6,400 samples (step 0 of 200), 0.000 device-hours, not running"


def test_device_hours_count_every_device_and_every_call(folder):
    write_config(folder, devices=4, num_nodes=1, micro_batch_size=8)
    add_row(folder, 150, elapsed_s=3600.0)
    assert ", 4.000 device-hours, " in watch.status_line(folder)
    add_row(folder, 160, elapsed_s=1800.0)
    assert ", 6.000 device-hours, " in watch.status_line(folder)


def test_device_hours_that_were_logged_are_believed(folder):
    add_row(folder, 150, device_hours=1.5)
    assert ", 1.500 device-hours, " in watch.status_line(folder)
    runs.write_json(folder / "result.json", {"status": "done", "step": 200, "device_hours": 1.75})
    assert ", 1.750 device-hours, " in watch.status_line(folder)


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (37.2, "0:38"), (60, "1:00"), (3599.5, "1:00:00"), (90061, "25:01:01")])
def test_durations_are_rounded_up_and_read_like_a_clock(seconds, text):
    assert watch._clock(seconds) == text


@pytest.mark.parametrize("look", [watch.status_line, watch.loss_curve, watch.watch])
def test_a_folder_that_is_no_run_folder_is_named(tmp_path, look):
    with pytest.raises(ConfigError, match=f"{tmp_path} is no run folder"):
        look(tmp_path)


def test_half_written_files_are_no_end_and_no_error(folder, lock, open_panel):
    panel = open_panel(folder)
    (folder / "result.json").write_text('{"status": "do')
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 150, "lo')
    panel.refresh()
    assert "step 100 of 200" in panel.status.value and panel.status.value.endswith(", running")
    assert panel.errors.value == ""


def test_the_panel_shows_what_the_folder_holds(folder, lock, open_panel):
    add_preview(folder, 50, shade=1)
    newest = add_preview(folder, 100, shade=2)
    (folder / "previews" / "zzz.png").write_bytes(b"not ours")
    (folder / "previews" / "captions.json").write_text(json.dumps(["an owl", "a tulip"]))
    panel = open_panel(folder)
    assert (panel.bar.value, panel.bar.max) == (3200, 6400)
    assert panel.status.value == watch.status_line(folder)
    assert panel.curve.value == watch.loss_curve(folder)._repr_png_()
    assert panel.preview_image.value == newest.read_bytes()
    assert "step 100" in panel.preview_title.value and panel.preview.layout.display == ""
    assert panel.captions.value == "<ol><li>an owl</li><li>a tulip</li></ol>"


def test_without_a_preview_there_is_no_empty_frame(folder, open_panel):
    assert open_panel(folder).preview.layout.display == "none"


def test_nothing_is_drawn_again_until_a_file_changes(folder, lock, open_panel, monkeypatch):
    add_preview(folder, 100)
    panel = open_panel(folder)
    with monkeypatch.context() as patched:
        for name in ("loss_curve", "_look", "_whole_png"):
            patched.setattr(watch, name, lambda *_: pytest.fail("read again"))
        panel.refresh()
    assert panel.errors.value == ""
    before = panel.curve.value
    add_row(folder, 150, loss=9.0)
    newer = add_preview(folder, 150, shade=3)
    panel.refresh()
    assert panel.curve.value != before and panel.bar.value == 4800
    assert panel.preview_image.value == newer.read_bytes()


def test_a_training_that_dies_without_a_word_is_seen(folder, lock, open_panel):
    panel = open_panel(folder)
    assert panel.status.value.endswith(", running")
    lock.release()
    panel.refresh()
    assert panel.status.value.endswith(", not running") and panel.stop_button.disabled


def test_the_thread_follows_by_itself_and_ends_with_the_training(folder, lock, open_panel):
    panel = open_panel(folder, every_s=0.01)
    assert panel._worker.daemon
    add_row(folder, 200)
    finish(folder)
    panel.wait(20)
    assert not panel._worker.is_alive()
    assert panel.status.value.endswith(", done") and panel.bar.bar_style == "success" and panel.stop_button.disabled


def test_closing_ends_the_thread_and_not_the_training(folder, lock, open_panel):
    panel = open_panel(folder)
    assert panel._worker.is_alive()
    panel.close()
    panel.wait(20)
    assert not panel._worker.is_alive() and not runs.stop_requested(folder)


def test_stop_asks_the_training_and_says_so_at_once(folder, lock, open_panel):
    panel = open_panel(folder)
    assert not panel.stop_button.disabled
    panel.stop_button.click()
    assert runs.stop_requested(folder)
    assert panel.status.value.endswith(", stopping after this step") and panel.stop_button.disabled


def test_where_nothing_runs_there_is_nothing_to_stop(folder, open_panel):
    assert open_panel(folder).stop_button.disabled


def test_a_stop_that_cannot_be_written_is_said_and_stays_said(folder, lock, open_panel, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} <b>")

    panel = open_panel(folder)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "touch", refuse)
        panel.stop_button.click()
    panel.refresh()
    assert "PermissionError" in panel.errors.value and "stop &lt;b&gt;" in panel.errors.value
    assert not panel.stop_button.disabled
    panel.stop_button.click()
    assert panel.errors.value == "" and runs.stop_requested(folder)


def test_a_lock_that_cannot_be_tried_is_not_taken_for_an_answer(folder, lock, monkeypatch):
    def refuse(lock: Path) -> bool:
        raise PermissionError("not yours")

    monkeypatch.setattr(watch, "_is_held", refuse)
    assert watch.status_line(folder).endswith("not known to be running or not (not yours)")


@pytest.mark.parametrize("content", [b"", b"\x89PNG", "half"])
def test_a_preview_that_is_not_whole_leaves_the_last_one_until_it_is(folder, open_panel, content):
    shown = add_preview(folder, 50, shade=1).read_bytes()
    panel = open_panel(folder)
    newer = add_preview(folder, 100, shade=2)
    whole = newer.read_bytes()
    newer.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    panel.refresh()
    assert panel.preview_image.value == shown and newer.name in panel.errors.value
    newer.write_bytes(whole)
    panel.refresh()
    assert panel.preview_image.value == whole and panel.errors.value == ""


@pytest.mark.parametrize("content", ['["an ow', '{"a": 1}', "[1]"])
def test_captions_that_cannot_be_read_are_named_beside_the_picture(folder, open_panel, content):
    whole = add_preview(folder, 50).read_bytes()
    (folder / "previews" / "captions.json").write_text(content)
    panel = open_panel(folder)
    assert panel.preview_image.value == whole and panel.captions.value == ""
    assert "captions.json" in panel.errors.value


def test_an_error_in_one_part_is_shown_and_stops_no_other(folder, lock, open_panel, monkeypatch):
    def broken(_: object) -> None:
        raise RuntimeError(HOSTILE)

    panel = open_panel(folder)
    add_row(folder, 150)
    whole = add_preview(folder, 150).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(watch, "loss_curve", broken)
        panel.refresh()
    assert "curve: RuntimeError: &lt;img src=x" in panel.errors.value and "<img" not in panel.errors.value
    assert panel.bar.value == 4800 and panel.preview_image.value == whole
    panel.refresh()
    assert panel.errors.value == ""


def test_a_folder_that_goes_away_is_said_and_does_not_end_the_thread(folder, open_panel):
    panel = open_panel(folder)
    (folder / "config.json").rename(folder / "elsewhere.json")
    panel.refresh()
    assert "is no run folder" in panel.errors.value and panel._worker.is_alive()
    (folder / "elsewhere.json").rename(folder / "config.json")
    panel.refresh()
    assert panel.errors.value == ""


def test_no_text_of_a_file_is_taken_for_html(tmp_path, open_panel):
    folder = tmp_path / "<b>run"
    folder.mkdir()
    write_config(folder, stage="<i>s")
    add_preview(folder, 1)
    (folder / "previews" / "captions.json").write_text(json.dumps([HOSTILE]))
    finish(folder, "failed", error=HOSTILE)
    panel = open_panel(folder)
    for text in (panel.status.value, panel.captions.value, panel.children[0].value.removeprefix("<b>")):
        assert "&lt;" in text and not any(tag in text for tag in ("<img", "<i>", "<b>"))


def test_the_loss_curve_names_the_quarters_of_its_own_noise_schedule(folder):
    add_row(folder, 150, val_loss=0.5, val_loss_quartiles=[0.8, 0.6, 0.4, 0.2])
    labels = [text.get_text() for text in watch.loss_curve(folder).axes[1].get_legend().get_texts()]
    last = TINY.networks.noise_schedule.num_train_timesteps - 1
    assert labels[-1].endswith(f"-{last}")


def test_pictures_arrive_as_they_were_drawn(folder, open_panel):
    add_preview(folder, 7, shade=200)
    pixels = np.asarray(Image.open(io.BytesIO(open_panel(folder).preview_image.value)))
    assert (pixels[..., 0] == 200).all()
