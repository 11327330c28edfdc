"""The panel without a kernel: knobs and buttons are moved from Python, as a browser would."""

import io
import threading
import time

import numpy as np
import pytest
from PIL import Image

from sdlab import guidance, models, panel, sample, settings
from sdlab.config import ConfigError

FIRST = panel.Request("a large owl on a pink background", num_inference_steps=2, pictures=2)
HOSTILE = "<img src=x onerror=alert(1)> & 'quotes' \ud800"


@pytest.fixture(scope="module")
def model():
    return models.load("tiny")


@pytest.fixture
def made(model, tmp_path):
    shown = panel.Panel(model, FIRST, folder=tmp_path)
    shown.wait()
    return shown


@pytest.fixture
def held(model, monkeypatch, tmp_path):
    """A panel whose drawing waits before its first evaluation until `release` is set; `seen` lists the scales of what was begun."""
    release, seen, begun = threading.Event(), [], threading.Semaphore(0)
    real = sample.sample

    def slow(*arguments, on_evaluation=None, **values):
        if on_evaluation is not None:
            seen.append(values["guidance_scale"][0])
            begun.release()
            assert release.wait(20)
        return real(*arguments, on_evaluation=on_evaluation, **values)

    monkeypatch.setattr(sample, "sample", slow)
    shown = panel.Panel(model, FIRST, folder=tmp_path)
    assert begun.acquire(timeout=20)
    return shown, release, seen


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png) if isinstance(png, bytes) else png)).transpose(2, 0, 1)


def shows(made, model, request):
    """Whether the gallery holds exactly what `request` draws."""
    expected = panel.images_of(model, request)
    return made.gallery.captions == request.captions and np.array_equal([pixels(png) for png in made.gallery.pictures], expected)


def count_draws(monkeypatch):
    """A list that gets the scales of each drawing from now on."""
    drawn, real = [], sample.sample

    def counted(*arguments, **values):
        drawn.append(values["guidance_scale"][0])
        return real(*arguments, **values)

    monkeypatch.setattr(sample, "sample", counted)
    return drawn


def test_the_panel_opens_with_pictures_and_says_what_they_are(model, made):
    assert shows(made, model, FIRST)
    assert made.gallery.captions == ["seed 0, guidance 2", "seed 1, guidance 2"]
    for part in ("a large owl", "guidance 2", "dpmpp_2m", "2 steps", "2 UNet evaluations", "seeds 0 to 1", " s"):
        assert part in made.status.value
    assert "tiny, ema weights" in made.title.value and "64 x 64 pixels" in made.title.value
    assert made.stop_button.disabled and made.bar.layout.visibility == "hidden"


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
def test_every_knob_draws_again_with_its_value(model, made, knob, value):
    made.knobs[knob].value = value
    made.wait()
    assert getattr(made.request, knob) == value
    assert shows(made, model, made.request)


def test_sliders_tell_only_at_rest_and_their_drift_is_rounded_away(made):
    assert not made.knobs["guidance_scale"].continuous_update
    made.knobs["guidance_scale"].value = 9.500000000000002
    assert made.request.guidance_scale == 9.5
    made.wait()


def test_moves_within_the_pause_are_one_draw_with_the_last_value(model, made, monkeypatch):
    drawn, start = count_draws(monkeypatch), time.monotonic()
    monkeypatch.setattr(panel, "PAUSE_S", 1.0)
    for scale in (3.0, 4.0, 5.0):
        made.knobs["guidance_scale"].value = scale
    assert drawn == [] and not made.stop_button.disabled
    made.wait()
    assert drawn == [5.0] and time.monotonic() - start >= 1.0


def test_a_knob_that_comes_back_within_the_pause_draws_nothing(made, monkeypatch):
    drawn, before = count_draws(monkeypatch), made.status.value
    monkeypatch.setattr(panel, "PAUSE_S", 1.0)
    made.knobs["guidance_scale"].value = 3.0
    made.knobs["guidance_scale"].value = 2.0
    made.wait()
    assert drawn == [] and made.status.value == before and made.earlier.value == 1


def test_the_draw_button_draws_at_once_and_the_same_pictures(made, monkeypatch):
    drawn, before = count_draws(monkeypatch), made.gallery.pictures
    monkeypatch.setattr(panel, "PAUSE_S", 1000.0)
    made.knobs["seed"].value = 5
    made.knobs["seed"].value = 0
    made.draw_button.click()
    made.wait()
    assert drawn == [2.0] and made.gallery.pictures == before


def test_stale_work_is_dropped_and_the_last_request_wins(model, held):
    made, release, seen = held
    for scale in (3.0, 4.0, 5.0):
        made.knobs["guidance_scale"].value = scale
    release.set()
    made.wait()
    assert seen == [2.0, 5.0]
    assert shows(made, model, made.request) and len(made.earlier.options) == 1


def test_asking_again_for_what_is_being_drawn_does_not_start_it_anew(held):
    made, release, seen = held
    made.draw_button.click()
    made.knobs["compare_scale"].value = 6.0
    release.set()
    made.wait()
    assert seen == [2.0]


def test_stop_drops_the_drawing_and_the_panel_stays_usable(model, held):
    made, release, _ = held
    assert not made.stop_button.disabled
    made.stop_button.click()
    assert made.status.value == "stopped"
    release.set()
    made.wait()
    assert made.status.value == "stopped" and made.gallery.pictures == [] and made.stop_button.disabled
    made.draw_button.click()
    made.wait()
    assert shows(made, model, FIRST)


def test_stop_within_the_pause_draws_nothing(made, monkeypatch):
    drawn = count_draws(monkeypatch)
    monkeypatch.setattr(panel, "PAUSE_S", 1000.0)
    made.knobs["seed"].value = 7
    made.stop_button.click()
    made.wait()
    assert drawn == [] and made.status.value == "stopped" and made.stop_button.disabled


def test_progress_says_evaluations_and_the_time_left(made):
    said = []
    made.status.observe(lambda change: said.append((change["new"], made.bar.value, made.bar.max)), names="value")
    made.knobs["num_inference_steps"].value = 4
    made.wait()
    texts = [text for text, _, _ in said]
    assert "drawing: UNet evaluation 1 of 4" in texts
    assert any(text.startswith("drawing: UNet evaluation 3 of 4, about ") and text.endswith(" s left") for text in texts)
    assert [(value, most) for text, value, most in said if "evaluation 3" in text] == [(2, 4)]


def test_events_from_many_threads_end_with_what_the_knobs_say(model, made):
    clicks = [threading.Thread(target=setattr, args=(made.knobs["seed"], "value", seed)) for seed in range(1, 9)]
    for thread in clicks:
        thread.start()
    for thread in clicks:
        thread.join()
    made.draw()
    made.wait()
    assert shows(made, model, made.request)


def test_two_scales_are_drawn_side_by_side_from_the_same_seeds_in_one_call(model, made, monkeypatch):
    calls, real = [], sample.sample
    monkeypatch.setattr(sample, "sample", lambda *some, **values: calls.append(values) or real(*some, **values))
    assert made.knobs["compare_scale"].layout.display == "none"
    made.knobs["compare"].value, made.knobs["compare_scale"].value = True, 6.0
    made.wait()
    assert made.knobs["compare_scale"].layout.display == ""
    assert [(call["guidance_scale"], call["seeds"]) for call in calls] == [((2.0, 6.0, 2.0, 6.0), (0, 0, 1, 1))]
    assert made.gallery.captions[:2] == ["seed 0, guidance 2", "seed 0, guidance 6"] and "guidance 2 and 6" in made.status.value
    assert shows(made, model, made.request)


def test_re_roll_draws_with_another_seed(model, made):
    made.reroll_button.click()
    made.wait()
    assert made.request.seed != 0 and shows(made, model, made.request)


def test_recall_turns_the_knobs_back_and_shows_the_pictures_without_drawing(made, monkeypatch):
    first = made.gallery.pictures
    made.knobs["compare"].value, made.knobs["prompt"].value = True, "a cat"
    made.wait()
    second, drawn = made.gallery.pictures, count_draws(monkeypatch)
    assert [number for _, number in made.earlier.options] == [2, 1] and made.earlier.value == 2
    made.earlier.value = 1
    assert made.request == FIRST and made.gallery.pictures == first and "a large owl" in made.status.value
    made.earlier.value = 2
    assert made.request.compare_scale == 1.0 and made.gallery.pictures == second and made.earlier.value == 2
    made.wait()
    assert drawn == [] and made.stop_button.disabled


def test_recall_brings_the_shown_draw_back_after_a_stop(made):
    made.knobs["seed"].value = 7
    made.stop()
    made.wait()
    assert made.earlier.value is None
    made.earlier.value = 1
    assert made.request == FIRST and "seeds 0 to 1" in made.status.value


def test_recall_drops_the_drawing_in_progress(made, monkeypatch):
    release, begun, real = threading.Event(), threading.Event(), sample.sample

    def slow(*arguments, **values):
        begun.set()
        assert release.wait(20)
        return real(*arguments, **values)

    monkeypatch.setattr(sample, "sample", slow)
    before = made.gallery.pictures
    made.knobs["seed"].value = 7
    assert begun.wait(20)
    made.earlier.value = 1
    release.set()
    made.wait()
    assert made.request == FIRST and made.gallery.pictures == before and len(made.earlier.options) == 1


def test_the_last_twenty_draws_are_kept_and_equal_ones_once(made, monkeypatch):
    image = np.zeros((1, 3, 8, 8), np.uint8)
    monkeypatch.setattr(panel, "images_of", lambda *some, **values: image)
    made.knobs["pictures"].value = 1
    for seed in [*range(25), 24]:
        made.knobs["seed"].value = seed
        made.draw()
        made.wait()
    assert [label.split(", ")[-2] for label, _ in made.earlier.options] == [f"seed {seed}" for seed in range(24, 4, -1)]


def test_save_writes_the_selected_picture_or_all_with_their_settings(model, made, tmp_path):
    made.gallery.selected = 1
    assert made.save_button.description == "Save PNG: seed 1, guidance 2"
    made.save_button.click()
    (path,) = tmp_path.glob("*.png")
    assert str(path) in made.saved.value and np.array_equal(pixels(path), panel.images_of(model, FIRST)[1])
    read = settings.read_png(path)
    assert (read.prompt, read.seed, read.guidance_scale, read.guidance) == (FIRST.prompt, 1, 2.0, "constant")
    assert (read.model, read.weights, read.step, read.weights_hash) == (model.name, model.weights, model.step, model.weights_hash)
    assert (read.width, read.height, read.batch_size, read.solver, read.num_inference_steps) == (64, 64, 2, "dpmpp_2m", 2)
    assert Image.open(path).info["parameters"].startswith(FIRST.prompt)
    made.gallery.selected = -1
    made.save_button.click()
    assert len(list(tmp_path.glob("*.png"))) == 2 and made.saved.value.count(".png") == 2


def test_the_same_seed_with_another_prompt_is_another_file(made, tmp_path):
    for prompt in ("a cat", "a dog"):
        made.knobs["prompt"].value = prompt
        made.wait()
        made.save_button.click()
    assert len(list(tmp_path.glob("*.png"))) == 4


def test_a_folder_that_cannot_be_written_is_said_in_place(model, tmp_path):
    (tmp_path / "file").write_text("in the way")
    made = panel.Panel(model, FIRST, folder=tmp_path / "file")
    made.save_button.click()
    assert "there is no picture to save yet" in made.status.value or made.gallery.pictures
    made.wait()
    made.save_button.click()
    assert "cannot be written" in made.status.value and panel.RED in made.status.value and made.saved.value == ""


def test_the_selection_stays_with_its_seed_and_goes_with_it(made):
    made.gallery.selected = 1
    made.knobs["guidance_scale"].value = 4.0
    made.wait()
    assert made.gallery.selected == 1 and made.save_button.description == "Save PNG: seed 1, guidance 4"
    made.knobs["seed"].value = 4
    made.wait()
    assert made.gallery.selected == -1 and made.save_button.description == "Save PNG"


def test_hostile_prompts_are_escaped_in_html_and_may_be_half_characters(made):
    made.knobs["prompt"].value = HOSTILE.removesuffix(" \ud800")
    made.wait()
    assert "<img" not in made.status.value and "&lt;img src=x onerror=alert(1)&gt; &amp;" in made.status.value
    made.knobs["prompt"].value = HOSTILE
    made.wait()
    shown = [made.status.value, *(label for label, _ in made.earlier.options)]
    assert "<img" not in made.status.value and all(text.encode() for text in shown)


def test_a_long_prompt_is_noted_in_red_beside_its_pictures(made):
    made.knobs["prompt"].value = "an owl " * 100
    made.wait()
    assert (
        "seeds 0 to 1" in made.status.value
        and panel.RED in made.status.value
        and "start and end included, and are cut" in made.status.value
    )
    assert "owl an\u2026\u201d: guidance" in made.status.value


@pytest.mark.parametrize("raised", [RuntimeError("<b>no</b>"), SystemExit("<b>no</b>"), type("Odd", (BaseException,), {"__str__": None})()])
def test_whatever_a_guidance_function_raises_is_said_in_place_and_the_panel_stays_usable(model, raised):
    broken = [raised]

    def own(cond, uncond, guidance_scale, at):
        if broken:
            raise broken[0]
        return cond

    made = panel.Panel(model, FIRST, guidance=own)
    made.wait()
    name = type(raised).__name__
    assert (
        name in made.status.value and "of own)" in made.status.value and panel.RED in made.status.value and "<b>" not in made.status.value
    )
    broken.clear()
    made.draw_button.click()
    made.wait()
    assert len(made.gallery.pictures) == 2 and panel.RED not in made.status.value


def test_what_a_guidance_function_must_not_give_is_said_in_one_sentence(model):
    made = panel.Panel(model, FIRST, guidance=lambda cond, uncond, guidance_scale, at: None)
    made.wait()
    assert "guidance gave NoneType; it has to give a tensor" in made.status.value


def test_settings_that_do_not_go_together_are_said_in_place_and_the_pictures_stay(model):
    made = panel.Panel(
        model, panel.Request("an owl", guidance_scale=0.6, solver="ddim", num_inference_steps=2, pictures=1), guidance="cfgpp"
    )
    made.wait()
    before = made.gallery.pictures
    assert made.knobs["guidance_scale"].max == 1.0 and len(before) == 1
    made.knobs["solver"].value = "plms"
    made.wait()
    assert "use it with solver ddim or euler" in made.status.value and made.gallery.pictures == before
    made.knobs["solver"].value = "ddim"
    made.wait()
    assert "ddim, 2 steps" in made.status.value and panel.RED not in made.status.value


def test_another_checkpoint_is_loaded_once_and_its_errors_stay_in_place(model, tmp_path):
    asked = []

    def load(checkpoint):
        asked.append((checkpoint, threading.current_thread() is threading.main_thread()))
        if checkpoint == 300:
            raise ConfigError("no valid checkpoint <300>")
        return models.TextToImage(**{**vars(model), "step": int(checkpoint)})

    made = panel.Panel(model, FIRST, checkpoints=("latest", 100, 200, 300), load=load, folder=tmp_path)
    made.wait()
    assert made.knobs["checkpoint"].layout.display == "" and asked == []
    for checkpoint in (100, "latest", 100, 300, 100, 200, "latest"):
        made.knobs["checkpoint"].value = checkpoint
        made.wait()
        if checkpoint == 300:
            assert "no valid checkpoint &lt;300&gt;" in made.status.value and "after 100 steps" in made.title.value
    assert asked == [(100, False), (300, False), (200, False), ("latest", False)]
    made.earlier.value = next(number for label, number in made.earlier.options if "checkpoint 200" in label)
    assert made.request.checkpoint == 200 and "after 200 steps" in made.title.value
    made.save_button.click()
    assert {settings.read_png(path).step for path in tmp_path.glob("*.png")} == {200}


def test_one_checkpoint_is_no_choice(made):
    assert made.knobs["checkpoint"].layout.display == "none" and "checkpoint" not in made.status.value


@pytest.mark.parametrize(
    ("request_", "options", "reason"),
    [
        (panel.Request("an owl", solver="eulr"), {}, "did you mean 'euler'"),
        (panel.Request("an owl", num_inference_steps=0), {}, "num_inference_steps"),
        (panel.Request("an owl", pictures=17), {}, "pictures=17; the panel draws 1 to 16"),
        (panel.Request("an owl", seed=-1), {}, "seed=-1; the panel takes 0"),
        (panel.Request("an owl", guidance_scale=2.0), {"guidance": "cfgpp"}, "0 to 1 with guidance 'cfgpp'"),
        (panel.Request("an owl", guidance_scale=float("nan")), {}, "guidance_scale=nan"),
        (panel.Request("an owl"), {"guidance": lambda cond, uncond: cond}, "has to take four arguments"),
        (panel.Request("an owl"), {"checkpoints": ("latest", 5)}, "need load"),
    ],
)
def test_what_no_knob_can_show_is_refused_before_there_is_a_panel(model, request_, options, reason):
    with pytest.raises(ConfigError, match=reason):
        panel.Panel(model, request_, **options)


def test_ones_own_guidance_is_named_in_the_saved_settings(model, tmp_path):
    def gentle(cond, uncond, guidance_scale, at):
        return guidance.constant(cond, uncond, guidance_scale)

    made = panel.Panel(model, FIRST, guidance=gentle, folder=tmp_path)
    made.wait()
    made.save_button.click()
    assert {settings.read_png(path).guidance for path in tmp_path.glob("*.png")} == {"own function gentle"}
