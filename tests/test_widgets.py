"""What notebooks show: something to click where somebody can, else what stands in its place."""

import json
from dataclasses import replace

import ipywidgets
import numpy as np
import pytest

from sdlab import gallery, models, plots, presets, widgets
from sdlab.config import ConfigError

FIRST = widgets.Request("a large owl on a pink background", num_inference_steps=2, pictures=2)


@pytest.fixture(scope="module")
def model():
    return models.load("tiny")


def test_where_nobody_can_click_the_panels_first_pictures_take_its_place(model, capsys):
    shown = widgets.panel_or_grid(model, FIRST, interactive="auto")
    assert isinstance(shown, plots.Picture)
    pictures = [axes for axes in shown.axes if axes.images]
    assert np.array_equal([axes.images[0].get_array().transpose(2, 0, 1) for axes in pictures], gallery.images_of(model, FIRST))
    assert [axes.texts[0].get_text() for axes in pictures] == ["seed 0, guidance 2", "seed 1, guidance 2"]
    assert capsys.readouterr().out == f"{FIRST}\n"


def test_where_nobody_can_click_a_long_prompt_is_noted_too(model, capsys):
    widgets.panel_or_grid(model, replace(FIRST, prompt="an owl " * 100), interactive=False)
    assert "start and end included, and are cut" in capsys.readouterr().out


def test_a_panel_can_be_insisted_on_or_ruled_out(model, monkeypatch):
    panel = widgets.panel_or_grid(model, FIRST, interactive=True)
    assert isinstance(panel, ipywidgets.VBox)
    panel.wait()
    someone = type("Shell", (), {"kernel": type("Kernel", (), {"_allow_stdin": True})})
    monkeypatch.setattr(widgets, "get_ipython", lambda: someone)
    monkeypatch.delenv("SDLAB_HEADLESS", raising=False)
    assert widgets.interactive_wanted("auto") and not widgets.interactive_wanted(False)
    monkeypatch.setenv("SDLAB_HEADLESS", "1")
    assert not widgets.interactive_wanted("auto") and widgets.interactive_wanted(True)


def test_there_is_nobody_to_click_under_papermill_or_in_a_script(monkeypatch):
    monkeypatch.delenv("SDLAB_HEADLESS", raising=False)
    assert not widgets.interactive_wanted("auto")
    nobody = type("Shell", (), {"kernel": type("Kernel", (), {"_allow_stdin": False})})
    monkeypatch.setattr(widgets, "get_ipython", lambda: nobody)
    assert not widgets.interactive_wanted("auto")


@pytest.fixture
def run_dir(tmp_path):
    tiny = presets.get("tiny")
    networks, recipe = (part.model_dump(mode="json") for part in (tiny.networks, tiny.stages["stage1_32"]))
    values = {"preset": "tiny", "stage": "stage1_32", "networks": networks, "recipe": recipe, "data_key": "k", "data_dir": "/d"}
    intervals = {"save_every": 5, "log_every": 1, "preview_every": 0}
    config = {**values, **intervals, "max_steps": 5, "micro_batch_size": recipe["micro_batch_size"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    return tmp_path


def test_where_nobody_can_click_a_training_is_one_line_and_its_loss_curve(run_dir, capsys):
    shown = widgets.watch_or_picture(run_dir)
    assert isinstance(shown, plots.Picture) and list(shown.axes[0].lines[0].get_ydata()) == [0.5]
    assert capsys.readouterr().out == widgets.status_line(run_dir) + "\n"


def test_where_somebody_can_click_a_training_is_watched(run_dir, capsys):
    shown = widgets.watch_or_picture(run_dir, interactive=True)
    assert isinstance(shown, ipywidgets.VBox) and "step 1 of 5" in shown.status.value
    shown.close()
    shown.wait()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("interactive", [True, False])
def test_watching_what_is_no_run_folder_names_it(tmp_path, interactive):
    with pytest.raises(ConfigError, match=f"{tmp_path} is no run folder"):
        widgets.watch_or_picture(tmp_path, interactive=interactive)
