import threading
import warnings

import numpy as np
import pytest
from matplotlib import _pylab_helpers

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


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_a_loss_curve_of_any_length_can_be_drawn(count):
    rows = [{"step": step, "loss": 1 / step, "val_loss": None} for step in range(1, count + 1)]
    figure = plots.loss_curve(rows, "a stage")
    assert "lower is better" in figure.axes[0].get_ylabel()
    assert is_png(figure)


def test_a_loss_that_is_not_finite_is_left_out():
    axes = plots.loss_curve([{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 0.5}]).axes[0]
    assert list(axes.lines[0].get_ydata()) == [0.5]


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
