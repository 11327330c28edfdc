import threading
import warnings

import nbformat
import numpy as np
import pytest
from matplotlib import _pylab_helpers
from nbclient import NotebookClient

from sdlab import plots, scenes
from sdlab.config import ConfigError

HOSTILE = "$\\frac{1}{$ <script>\x00\n" + "long " * 200 + "\U0001f680"


def curve(model: str = "tiny", **identity) -> list[dict]:
    """Rows of the shape that an under-trained model gives."""
    points = [(1, 0.027, 0.855), (1.5, 0.020, 0.887), (2, 0.022, 0.886), (5, 0.049, 0.843), (8, 0.088, 0.780)]
    return [
        {
            **{"model": model, "weights": "ema", "step": 1400, "guidance_scale": scale, "extractor": "built-in judge", "num_images": 160},
            **{"frechet_distance": distance, "frechet_low": distance - 0.002, "frechet_high": distance + 0.003, "frechet_se": 0.001},
            **{"clip_score": score, "clip_score_se": 0.004, "background_right": 1.0, "unet_evaluations": 10},
            **{"strict_one": 0.9, "strict_two": 0.1, "num_one_object": 96, "num_two_objects": 64},
            **{"identity": {"solver": "dpmpp_2m", **identity}, "identity_hash": "deadbeef00"},
        }
        for scale, distance, score in points
    ]


def reference(distance: float = 0.013, score: float = 0.956) -> dict:
    around = {"frechet_low": distance, "frechet_high": distance}
    return {**curve()[0], "label": "real pictures", "frechet_distance": distance, "clip_score": score, **around}


def texts(axes) -> list[str]:
    return [text.get_text() for text in (*axes.texts, *(axes.get_legend().get_texts() if axes.get_legend() else ()))]


def is_png(picture: plots.Picture) -> bool:
    return picture._repr_png_().startswith(b"\x89PNG")


def test_the_curve_says_what_its_axes_mean_and_never_fid():
    main, strict = plots.fid_clip_curve(curve(), references=[reference()], title="A title").axes
    assert main.get_xlabel() == "CLIP score (built-in judge, mean cosine, higher is better)"
    assert main.get_ylabel() == "Frechet distance (built-in judge, lower is better)"
    assert "higher is better" in strict.get_ylabel()
    assert "deadbee" in main.get_title()
    assert "FID" not in main.get_title() + main.get_ylabel()


def test_each_point_carries_its_guidance_scale_and_the_best_is_ringed():
    main = plots.fid_clip_curve(curve()).axes[0]
    assert [text for text in texts(main) if text in ("1", "1.5", "2", "5", "8")] == ["1", "1.5", "2", "5", "8"]
    assert any("most strictly right" in text for text in texts(main))


def test_error_bars_stand_on_both_axes():
    container = plots.fid_clip_curve(curve()).axes[0].containers[0]
    assert container.has_xerr and container.has_yerr


def test_a_reference_that_would_crush_the_curve_is_named_with_its_numbers():
    near = plots.fid_clip_curve(curve(), references=[reference()]).axes[0]
    far = plots.fid_clip_curve(curve(), references=[reference(distance=2.0)]).axes[0]
    assert any(text == "real pictures (0.956, 0.0130)" for text in texts(near))
    assert any("2.0000" in text and "outside this view" in text for text in texts(far))
    assert far.get_ylim()[1] < 0.2


def test_rows_measured_in_different_ways_share_no_axis():
    with pytest.raises(ConfigError, match=r"solver.*dpmpp_2m.*plms"):
        plots.fid_clip_curve([*curve(), *curve(solver="plms")])


def test_several_models_are_several_lines():
    main = plots.fid_clip_curve([*curve(), *curve("runs/other")]).axes[0]
    assert {"tiny (ema, step 1400)", "runs/other (ema, step 1400)"} <= set(texts(main))


def test_unreadable_pictures_have_no_second_panel():
    unread = [{**row, "strict_one": None, "strict_two": None, "background_right": None} for row in curve()]
    assert len(plots.fid_clip_curve(unread).axes) == 1


def test_legends_lie_below_the_data():
    figure = plots.fid_clip_curve(curve(), references=[reference()])
    figure._repr_png_()
    for axes in figure.axes:
        assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0


def losses(count: int, *, every: int = 1, validated: bool = False) -> list[dict]:
    rows = [{"step": every * (i + 1), "samples_seen": 32 * every * (i + 1), "loss": 1 / (i + 1), "val_loss": None} for i in range(count)]
    measured = {"val_loss": 0.5, "val_loss_quartiles": [2.0, 0.6, 0.3, 0.05]}
    return [{**row, **measured} for row in rows] if validated else rows


def ticks(axes) -> list[float]:
    low, high = axes.get_xlim()
    return [tick for tick in axes.get_xticks() if low <= tick <= high]


def by_label(axes) -> dict:
    return {line.get_label(): line for line in axes.lines}


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize(("count", "every"), [(0, 1), (1, 1), (1, 5), (2, 1), (3, 1), (5, 1), (40, 10), (200, 1)])
def test_a_loss_curve_of_any_length_has_a_direction_and_ticks_at_whole_steps(count, every, validated):
    figure = plots.loss_curve(losses(count, every=every, validated=validated), "a stage")
    assert is_png(figure)
    for axes in figure.axes:
        assert "lower is better" in axes.get_ylabel() and axes.get_xlabel().startswith("optimizer step")
        assert all(tick == int(tick) for tick in ticks(axes))
        assert 0 in ticks(axes) and len(ticks(axes)) >= 2
        assert not axes.get_legend() or axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0


def test_few_values_are_written_beside_their_points():
    assert texts(plots.loss_curve(losses(3)).axes[0])[:3] == ["1", "0.5", "0.333"]
    assert len(plots.loss_curve(losses(6)).axes[0].texts) == 0


def test_the_x_axis_says_how_many_samples_the_steps_are():
    assert "(6,400 samples seen after step 200)" in plots.loss_curve(losses(200)).axes[0].get_xlabel()


def test_a_loss_that_is_not_finite_is_left_out_and_zero_is_not():
    axes = plots.loss_curve([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.0}, {"step": 4}]).axes[0]
    assert list(axes.lines[0].get_ydata()) == [0.5, 0.0]


def test_the_running_mean_stands_at_the_middle_of_what_it_averages():
    lines = by_label(plots.loss_curve([{"step": step, "loss": step} for step in range(1, 41)]).axes[0])
    mean = lines["mean of 5 neighbouring values"]
    np.testing.assert_allclose(mean.get_xdata(), range(3, 39))
    np.testing.assert_allclose(mean.get_ydata(), range(3, 39))


def test_validation_is_drawn_beside_training_and_by_quarter_of_the_timesteps():
    rows = [*losses(3), {"step": 4, "val_loss": 0.25, "val_loss_quartiles": [0.4, 0.3, None, float("nan")]}]
    main, quarters = plots.loss_curve(rows, num_train_timesteps=500).axes
    assert list(by_label(main)["validation"].get_xydata()[0]) == [4, 0.25]
    assert {label: list(line.get_ydata()) for label, line in by_label(quarters).items()} == {
        "timesteps 0-124": [0.4],
        "timesteps 125-249": [0.3],
    }
    assert quarters.get_yscale() == "linear"


def test_all_quarters_are_named_and_far_apart_they_get_a_logarithmic_axis():
    quarters = plots.loss_curve(losses(3, validated=True)).axes[1]
    assert list(by_label(quarters)) == ["timesteps 0-249", "timesteps 250-499", "timesteps 500-749", "timesteps 750-999"]
    assert quarters.get_yscale() == "log" and "log" in quarters.get_ylabel()


def test_without_quarters_there_is_one_panel():
    assert len(plots.loss_curve([{"step": 1, "loss": 1.0, "val_loss": 0.9}]).axes) == 1


def test_skipped_steps_are_marked_on_the_x_axis_even_without_a_loss():
    rows = [
        {"step": 1, "loss": None, "skipped": True},
        {"step": 2, "loss": 0.5, "skipped": False},
        {"step": 3, "loss": 0.4, "skipped": True},
    ]
    axes = plots.loss_curve(rows).axes[0]
    marks = by_label(axes)["skipped by the gradient scaler (2)"]
    assert list(marks.get_xdata()) == [1, 3] and set(marks.get_ydata()) == {0}
    assert marks.get_transform().transform((1, 0))[1] == pytest.approx(axes.get_window_extent().y0)


class Cell:
    """A running cell: keeps what is displayed, and what each display was replaced by."""

    def __init__(self) -> None:
        self.displayed: list[list[plots.Picture]] = []

    def display(self, picture: plots.Picture, *, display_id: bool) -> "Cell":
        assert display_id
        self.displayed.append([picture])
        return self

    def update(self, picture: plots.Picture) -> None:
        self.displayed[-1].append(picture)

    def last_steps(self) -> list[list[int]]:
        """Of each display the last step in each of its pictures."""
        return [[int(picture.axes[0].lines[0].get_xdata()[-1]) for picture in pictures] for pictures in self.displayed]


@pytest.fixture
def cell(monkeypatch) -> Cell:
    there = Cell()
    monkeypatch.setattr(plots, "display", there.display)
    monkeypatch.setattr(plots, "get_ipython", object)
    monkeypatch.delenv("SDLAB_HEADLESS", raising=False)
    return there


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(plots.time, "monotonic", lambda: now[0])
    return now


def test_a_live_curve_replaces_itself_at_most_every_two_seconds_and_ends_with_the_last_rows(cell, clock):
    live = plots.LiveLoss("a stage")
    live([])
    for count, now in ((1, 100.0), (2, 101.9), (3, 102.0), (4, 103.0), (5, 103.9)):
        clock[0] = now
        live(losses(count))
    assert cell.last_steps() == [[1, 3]]
    live.close()
    live.close()
    assert cell.last_steps() == [[1, 3, 5]]
    assert cell.displayed[0][0].get_suptitle() == "a stage"


def test_rows_that_are_shown_already_are_not_drawn_again(cell, clock):
    live = plots.LiveLoss()
    for _ in range(3):
        live(losses(2))
        clock[0] += 10
    live.close()
    assert cell.last_steps() == [[2]]


def test_headless_a_live_curve_is_drawn_once_in_the_end(cell, clock, monkeypatch):
    monkeypatch.setenv("SDLAB_HEADLESS", "1")
    live = plots.LiveLoss()
    for count in (1, 2, 3):
        clock[0] += 10
        live(losses(count))
    assert cell.displayed == []
    live.close()
    assert cell.last_steps() == [[3]]


def test_outside_of_ipython_a_live_curve_draws_nothing(cell, monkeypatch):
    monkeypatch.setattr(plots, "get_ipython", lambda: None)
    monkeypatch.setattr(plots, "loss_curve", lambda *_, **__: pytest.fail("drawn for nobody"))
    live = plots.LiveLoss()
    live(losses(2))
    live.close()


def test_a_live_curve_stays_in_the_saved_notebook_once_and_with_its_last_state(monkeypatch):
    monkeypatch.delenv("SDLAB_HEADLESS", raising=False)
    source = "from sdlab import plots; plots.LIVE_EVERY_S = 0; live = plots.LiveLoss()\nfor n in (1, 2, 3):\n"
    source += "    live([{'step': 1, 'loss': float(n)}])\nlive.close(); last = plots.loss_curve(live._rows)._repr_png_()\n"
    source += "import base64; print(base64.b64encode(last).decode())"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    pictures = [output.data["image/png"] for output in notebook.cells[0].outputs if output.output_type == "display_data"]
    (printed,) = [output.text for output in notebook.cells[0].outputs if output.output_type == "stream"]
    assert ["".join(picture.split()) for picture in pictures] == [printed.strip()]


REPORT = {
    "scanned": 12,
    "used": 6,
    "filtered": {"aspect": 2},
    "quarantined": {"no_caption": 3, HOSTILE: 1},
    "captions": {"present": 10, "missing": 1, "empty": 1, "truncated": 1},
    "shapes": {
        "used_smaller_side": {"40": 4, "1024": 2},
        "filtered_smaller_side": {"100": 2},
        "used_aspect": {"1.00": 5, "0.50": 1},
        "filtered_aspect": {"4.00": 2},
        "used_tokens": {"7": 6},
        "filtered_tokens": {"9": 1, "30": 1},
    },
}


def test_every_counted_picture_is_in_the_histograms_of_its_shape():
    figure = plots.shapes(REPORT, 24)
    for axes in figure.axes:
        assert [sum(bar.get_height() for bar in bars.patches) for bars in axes.containers] == [6, 2]
    assert "1 of 10 are longer than 24 tokens" in figure.axes[2].get_title()
    assert is_png(plots.shapes({**REPORT, "shapes": {}}, 24))


def test_losses_show_the_share_of_every_reason():
    figure = plots.losses(REPORT)
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx([50, 100 / 6, 25, 100 / 12])
    assert "3 (25.0 %)" in texts(figure.axes[0])


def test_a_grid_shows_every_pixel_as_it_is():
    images = scenes.render(scenes.draw(6, seed=1)).reshape(2, 3, 3, 64, 64)
    shown = plots.image_grid(images, ["a", "b"], [1, 2, 3], "title").axes[0].images[0]
    assert shown.get_interpolation() == "nearest"
    np.testing.assert_array_equal(np.asarray(shown.get_array())[-64:, -64:], images[1, 2].transpose(1, 2, 0))


def test_hostile_text_is_cut_and_never_parsed():
    images = scenes.render(scenes.draw(4, seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sheet = plots.contact_sheet(images, [HOSTILE, "", "$", "\u732b"], HOSTILE)
        grid = plots.image_grid(images.reshape(2, 2, 3, 64, 64), [HOSTILE, "$x$"], [HOSTILE, "_"], HOSTILE)
        line = plots.fid_clip_curve(curve(HOSTILE), title=HOSTILE, note=HOSTILE)
        assert all(is_png(figure) for figure in (sheet, grid, line, plots.loss_curve([], HOSTILE), plots.losses(REPORT)))
    assert all(len(text) < 150 for axes in sheet.axes for text in texts(axes))


def test_plain_text_is_one_line_without_control_characters():
    assert plots.plain("a\x00b\n c", 10) == "a b c"
    assert plots.plain("abcdef", 4) == "abc\u2026"


def test_a_sheet_of_no_pictures_says_so():
    assert texts(plots.contact_sheet(np.empty((0, 3, 8, 8), np.uint8), []).axes[0]) == ["no pictures"]


@pytest.mark.parametrize("images", [np.zeros((2, 3, 8, 8), np.float32), np.zeros((2, 8, 8, 3), np.uint8)])
def test_pictures_of_another_type_or_order_are_refused(images):
    with pytest.raises(ValueError, match="uint8"):
        plots.contact_sheet(images, ["a", "b"])


def test_labels_that_do_not_fit_the_grid_are_refused():
    with pytest.raises(ValueError, match="2 x 1"):
        plots.image_grid(np.zeros((2, 1, 3, 8, 8), np.uint8), ["a"], ["b"])


def test_figures_are_drawn_in_threads_and_unknown_to_pyplot():
    drawn: list[bool] = []
    threads = [threading.Thread(target=lambda: drawn.append(is_png(plots.loss_curve([{"step": 1, "loss": 1.0}])))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drawn == [True] * 3
    assert not _pylab_helpers.Gcf.figs


def test_a_figure_is_saved_where_it_was_asked_with_the_folders_made(tmp_path):
    path = plots.save(plots.losses(REPORT), tmp_path / "new" / "figure.png")
    assert path.read_bytes().startswith(b"\x89PNG")
