"""The panel without a kernel: knobs and buttons are moved from Python, as a browser would."""

import io
import json
import threading

import ipywidgets
import numpy as np
import pytest
from PIL import Image

from sdlab import models, plots, presets, sample, widgets
from sdlab.config import ConfigError

FIRST = widgets.Request("a large owl on a pink background", num_inference_steps=2, pictures=2)


@pytest.fixture(scope="module")
def model():
    return models.load("tiny")


@pytest.fixture
def panel(model):
    made = widgets.panel(model, FIRST)
    made.wait()
    return made


@pytest.fixture
def held(model, monkeypatch):
    """A panel whose drawing waits before its first evaluation until `release` is set; `seen` lists what was begun."""
    release, seen, begun = threading.Event(), [], threading.Semaphore(0)
    real = sample.sample

    def slow(*arguments, on_evaluation=None, **settings):
        if on_evaluation is not None:
            seen.append(settings["guidance_scale"])
            begun.release()
            assert release.wait(20)
        return real(*arguments, on_evaluation=on_evaluation, **settings)

    monkeypatch.setattr(sample, "sample", slow)
    made = widgets.panel(model, FIRST)
    assert begun.acquire(timeout=20)
    return made, release, seen


def expected(model, request):
    seeds = range(request.seed, request.seed + request.pictures)
    settings = {"guidance_scale": request.guidance_scale, "solver": request.solver, "num_inference_steps": request.num_inference_steps}
    prompts = [request.prompt] * request.pictures
    images = sample.sample(model, prompts, seeds=seeds, negative_prompt=request.negative_prompt, batch_size=request.pictures, **settings)
    return np.asarray(sample.tile(images, columns=4))


def shown(panel):
    return np.asarray(Image.open(io.BytesIO(panel.picture.value)))


def test_the_panel_opens_with_a_picture_and_says_what_it_shows(model, panel):
    assert np.array_equal(shown(panel), expected(model, FIRST))
    for part in ("a large owl", "guidance 2", "dpmpp_2m", "2 steps", "2 UNet evaluations", "seeds 0 to 1", " s<"):
        assert part in panel.status.value
    assert panel.stop_button.disabled


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("prompt", "a small tulip on a white background"),
        ("negative_prompt", "a cat"),
        ("guidance_scale", 7.3),
        ("num_inference_steps", 3),
        ("solver", "plms"),
        ("seed", 9),
        ("pictures", 5),
    ],
)
def test_every_knob_draws_again_with_its_value(model, panel, knob, value):
    panel.knobs[knob].value = value
    panel.wait()
    assert getattr(panel.request, knob) == value
    assert np.array_equal(shown(panel), expected(model, panel.request))


def test_the_draw_button_draws_and_leaves_the_same_picture(panel):
    before = panel.picture.value
    panel.picture.value = b""
    panel.draw_button.click()
    panel.wait()
    assert panel.picture.value == before


def test_the_slider_tells_only_at_rest_and_its_drift_is_rounded_away(panel):
    assert not panel.knobs["guidance_scale"].continuous_update
    panel.knobs["guidance_scale"].value = 9.500000000000002
    assert panel.request.guidance_scale == 9.5
    panel.wait()


def test_the_last_request_wins_and_stale_ones_are_never_begun(model, held):
    panel, release, seen = held
    for scale in (3.0, 4.0, 5.0):
        panel.knobs["guidance_scale"].value = scale
    release.set()
    panel.wait()
    assert seen == [2.0, 5.0]
    assert np.array_equal(shown(panel), expected(model, panel.request))


def test_asking_again_for_what_is_being_drawn_does_not_start_it_anew(held):
    panel, release, seen = held
    panel.draw_button.click()
    release.set()
    panel.wait()
    assert seen == [2.0]


def test_stop_drops_the_drawing_and_the_panel_stays_usable(model, held):
    panel, release, _ = held
    before = panel.picture.value
    assert not panel.stop_button.disabled
    panel.stop_button.click()
    release.set()
    panel.wait()
    assert "stopped" in panel.status.value and panel.picture.value == before and panel.stop_button.disabled
    panel.draw_button.click()
    panel.wait()
    assert np.array_equal(shown(panel), expected(model, FIRST))


def test_events_from_many_threads_end_with_what_the_knobs_say(model, panel):
    clicks = [threading.Thread(target=setattr, args=(panel.knobs["seed"], "value", seed)) for seed in range(1, 9)]
    for thread in clicks:
        thread.start()
    for thread in clicks:
        thread.join()
    panel.draw()
    panel.wait()
    assert np.array_equal(shown(panel), expected(model, panel.request))


def test_hostile_prompts_are_shown_escaped(panel):
    panel.knobs["prompt"].value = "<img src=x onerror=alert(1)> & 'quotes'"
    panel.wait()
    assert "<img" not in panel.status.value
    assert "&lt;img src=x onerror=alert(1)&gt; &amp;" in panel.status.value


def test_errors_of_ones_own_guidance_are_shown_in_the_panel_escaped(model):
    def broken(cond, uncond, guidance_scale):
        raise RuntimeError("<b>no</b>")

    panel = widgets.panel(model, FIRST, guidance=broken)
    panel.wait()
    assert "RuntimeError: &lt;b&gt;no&lt;/b&gt;" in panel.status.value
    panel.knobs["guidance_scale"].value = 1.0
    panel.wait()
    assert "RuntimeError" in panel.status.value


def test_a_refused_setting_is_shown_as_its_one_sentence(model):
    panel = widgets.panel(model, FIRST, guidance=lambda cond, uncond, guidance_scale: None)
    panel.wait()
    assert "guidance gave NoneType; it has to give a tensor" in panel.status.value


def test_an_unknown_solver_is_refused_before_there_is_a_panel(model):
    with pytest.raises(ConfigError, match="did you mean 'euler'"):
        widgets.panel(model, widgets.Request("an owl", solver="eulr"))


def test_where_nobody_can_click_the_panels_first_picture_takes_its_place(model):
    picture = widgets.panel_or_grid(model, FIRST, interactive="auto")
    assert isinstance(picture, Image.Image)
    assert np.array_equal(np.asarray(picture), expected(model, FIRST))


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
