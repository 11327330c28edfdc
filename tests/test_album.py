"""Pictures in a folder: drawn once, on any number of ranks, along any two settings; and one image followed on its way."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import in_ci
from pipelines import change
from safetensors.torch import load_file, save_file

from sdlab import album, drawing, guidance, models, places, plots, sample, settings, solvers, stages, train, trajectory
from sdlab.config import ConfigError

PROMPTS = ["a large owl on a pink background", "a cat above a rocket on a yellow background"]
QUICK = {"prompts": PROMPTS, "num_inference_steps": 2, "batch_size": 2, "devices": 1, "seed": 5}


@pytest.fixture(scope="module")
def model():
    return models.load("tiny")


def configure(folder, **more):
    return album.configure(**{**QUICK, **more}, study_dir=str(folder))


def drawn_files(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / album.PICTURES).iterdir()}


def test_a_grid_is_what_its_settings_draw_and_keeps_each_prompts_noise_over_all_scales(model, tmp_path):
    grid = album.draw_grid(configure(tmp_path, guidance_scales=[1, 4.0]))
    assert grid.images.shape == (2, 2, 3, 64, 64)
    assert (grid.row_labels, grid.column_labels) == (PROMPTS, ["guidance 1", "guidance 4"])
    for column, scale in enumerate([1, 4.0]):
        alone = sample.sample(model, PROMPTS, guidance_scale=scale, seeds=[5, 6], num_inference_steps=2, batch_size=2)
        assert np.array_equal(grid.images[:, column], alone)


def test_every_picture_says_in_its_file_how_it_was_drawn_and_the_results_list_it(tmp_path):
    grid = album.draw_grid(configure(tmp_path, guidance_scales=[1, 4.0], negative_prompt="a frog"))
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["schema"], results["study"], len(results["rows"])) == (1, "sample", 4)
    for row, told in zip(results["rows"], [one for line in grid.settings for one in line], strict=True):
        assert settings.read_png(tmp_path / row["picture"]) == told
        assert (row["prompt"], row["negative_prompt"], row["seed"]) == (told.prompt, "a frog", told.seed)
        assert (row["unet_evaluations"], row["unet_rows"]) == (2, 2 if row["guidance_scale"] == 1 else 4)
        assert (told.model, told.weights, told.width, told.height) == ("tiny", "ema", 64, 64)


def test_only_what_is_missing_or_damaged_is_drawn_again_and_comes_out_the_same(tmp_path):
    config = configure(tmp_path, guidance_scales=[1, 2.0, 4.0])
    first = album.draw_grid(config)
    before = drawn_files(tmp_path)
    gone, cut, *_ = sorted(before)
    (tmp_path / album.PICTURES / gone).unlink()
    data = (tmp_path / album.PICTURES / cut).read_bytes()
    (tmp_path / album.PICTURES / cut).write_bytes(data[: len(data) // 2])
    again = album.draw_grid(config)
    after = drawn_files(tmp_path)
    assert np.array_equal(again.images, first.images) and after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} == {gone, cut}


@pytest.mark.parametrize(
    "change", [{"seed": 6}, {"num_inference_steps": 3}, {"batch_size": 4}, {"spacing": "linspace"}, {"guidance": "rescale"}]
)
def test_what_is_drawn_in_another_way_is_another_picture(tmp_path, change):
    album.draw_grid(configure(tmp_path, guidance_scales=[2.0], prompts=PROMPTS[:1]))
    album.draw_grid(configure(tmp_path, guidance_scales=[2.0], prompts=PROMPTS[:1], **change))
    assert len(drawn_files(tmp_path)) == 2


AXES = {
    "solver": ["ddim", "plms"],
    "num_inference_steps": [1, 3],
    "seed": [0, 9],
    "negative_prompt": ["", "a cat"],
    "guidance": ["constant", "interval(0.5, 20)"],
    "guidance_scale": [1.0, 3.0],
    "prompt": [PROMPTS[0], "an owl"],
}


@pytest.mark.parametrize(("rows", "columns"), [("solver", "num_inference_steps"), ("seed", "negative_prompt"), ("guidance", "prompt")])
def test_any_two_settings_span_a_grid(model, tmp_path, rows, columns):
    grid = album.draw_grid(configure(tmp_path), {rows: AXES[rows], columns: AXES[columns]})
    fixed = {
        "solver": "dpmpp_2m",
        "num_inference_steps": 2,
        "seed": 5,
        "negative_prompt": "",
        "guidance": "constant",
        "guidance_scale": 2.0,
    }
    for row, one in enumerate(AXES[rows]):
        for column, other in enumerate(AXES[columns]):
            asked = {"prompt": PROMPTS[0], **fixed, rows: one, columns: other}
            shot, seed = [asked.pop("prompt")], [asked.pop("seed") + {rows: row, columns: column}.get("prompt", 0)]
            assert np.array_equal(grid.images[row, column], sample.sample(model, shot, seeds=seed, batch_size=2, **asked)[0])
    figure = plots.image_grid(grid.images, grid.row_labels, grid.column_labels, grid.title)
    assert {text.get_text() for text in figure.axes[0].texts} >= {label for label in grid.column_labels if len(label) <= 16}


def test_checkpoints_of_a_run_are_an_axis_along_which_it_learns(scenes_dir, tmp_path):
    counts = {"max_steps": 4, "save_every": 2, "log_every": 1, "preview_every": 0, "global_batch_size": 4, "micro_batch_size": 4}
    train.train(stages.configure(preset="tiny", stage="stage2_64", data_dir=str(scenes_dir), init_from="tiny", **counts), tmp_path / "run")
    config = configure(tmp_path / "study", model=str(tmp_path / "run"))
    grid = album.draw_grid(config, {"checkpoint": [2, "latest"], "guidance_scale": [1, 3]})
    assert grid.row_labels == ["step 2", "step 4"] and [line[0].step for line in grid.settings] == [2, 4]
    alone = models.load(str(tmp_path / "run"), weights="auto", checkpoint=2)
    theirs = sample.sample(alone, PROMPTS[:1] * 2, guidance_scale=[1, 3], seeds=[5, 5], num_inference_steps=2, batch_size=2)
    assert np.array_equal(grid.images[0], theirs)
    with pytest.raises(ConfigError, match=r"no valid checkpoint 3 \(steps there: 2, 4"):
        album.draw_grid(config, {"checkpoint": [2, 3], "guidance_scale": [1, 3]})
    (tmp_path / "run" / "checkpoints" / "step-00000002" / "ema.safetensors").write_bytes(b"half")
    with pytest.raises(ConfigError, match="not valid: step-00000002"):
        album.draw_grid(config, {"checkpoint": [2], "guidance_scale": [1, 3]})


def test_a_function_of_the_notebook_draws_every_time_and_its_source_is_recorded(model, tmp_path):
    strength = [1.0]
    mine = lambda cond, uncond, scale, at: uncond + strength[0] * (cond - uncond)  # noqa: E731
    config = configure(tmp_path, guidance_scales=[3.0])
    first = album.draw_grid(config, guidance=mine)
    strength[0] = 4.0
    second = album.draw_grid(config, guidance=mine)
    assert not np.array_equal(first.images, second.images)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert all(len(row["guidance_source"]) == 64 and row["guidance"] == "own function" for row in rows)


@in_ci
@pytest.mark.parametrize("devices", [2, 3])
def test_ranks_share_the_pictures_and_draw_the_same(tmp_path, monkeypatch, devices):
    monkeypatch.chdir(tmp_path)
    Path("mine_on_ranks.py").write_text("def half(cond, uncond, guidance_scale, at):\n    return (cond + uncond) / 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_on_ranks", raising=False)
    asked = {"guidance_scales": [1, 2.0, 4.0], "prompts": [*PROMPTS, "an owl"], "guidance": "mine_on_ranks:half"}
    alone = album.draw_grid(configure(tmp_path / "alone", **asked))
    shared = album.draw_grid(configure(tmp_path / "shared", devices=devices, **asked))
    assert np.array_equal(alone.images, shared.images)
    assert drawn_files(tmp_path / "alone").keys() == drawn_files(tmp_path / "shared").keys()
    for name in sorted(drawn_files(tmp_path / "shared"))[:2]:
        (tmp_path / "shared" / album.PICTURES / name).unlink()
    again = album.draw_grid(configure(tmp_path / "shared", devices=devices, **asked))
    assert np.array_equal(again.images, alone.images)


def test_a_function_of_the_notebook_draws_here_whatever_the_number_of_ranks_and_says_so(tmp_path, capsys):
    mine = lambda cond, uncond, scale, at: uncond + 3 * (cond - uncond)  # noqa: E731
    one, two = (album.draw_grid(configure(tmp_path / str(ranks), devices=ranks, guidance_scales=[3.0]), guidance=mine) for ranks in (1, 2))
    assert np.array_equal(one.images, two.images)
    assert "named in guidance, as 'module:function', it draws on all ranks" in capsys.readouterr().out


def test_a_guidance_of_another_name_than_its_own_never_takes_the_place_of_the_built_in_one(tmp_path):
    config = configure(tmp_path, guidance_scales=[3.0])
    theirs = album.draw_grid(config, guidance=guidance.Guidance(scale_at=lambda scale, at: scale * at.progress))
    assert not np.array_equal(album.draw_grid(config).images, theirs.images)


def test_another_prediction_type_of_the_same_weights_is_another_picture(tmp_path):
    folder = tmp_path / "pipeline"
    shutil.copytree(places.TINY_DIR, folder, ignore=shutil.ignore_patterns("judge", "sdlab.json", "components.json"))
    config = configure(tmp_path / "study", model=str(folder), prompts=PROMPTS[:1], guidance_scales=[3.0])
    first = album.draw_grid(config)
    change(folder / "scheduler/scheduler_config.json", prediction_type="epsilon")
    assert not np.array_equal(album.draw_grid(config).images, first.images)


def test_the_same_prompt_twice_is_drawn_from_two_seeds(tmp_path):
    grid = album.draw_grid(configure(tmp_path, prompts=["an owl", "an owl"], guidance_scales=[2.0]))
    assert [line[0].seed for line in grid.settings] == [5, 6] and not np.array_equal(grid.images[0], grid.images[1])


def test_weights_that_change_between_laying_out_and_drawing_are_named(tmp_path):
    folder = tmp_path / "pipeline"
    shutil.copytree(places.TINY_DIR, folder, ignore=shutil.ignore_patterns("judge", "components.json"))
    laid_out = album.Album(configure(tmp_path / "study", model=str(folder)), {"seed": [1], "prompt": ["an owl"]})
    [file] = (folder / "unet").glob("*.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ConfigError, match="holds other weights than a moment ago"):
        laid_out.draw(laid_out.missing())


BAD = {
    "guidance is an axis already": {"axes": {"guidance": ["constant"], "seed": [1]}, "own": lambda cond, uncond, scale, at: cond},
    r"holds half of a character": {"prompts": ["\ud800"]},
    "axis 'solvr' is not known.*did you mean 'solver'": {"axes": {"solvr": ["ddim"], "seed": [1]}},
    "give two of checkpoint, prompt": {"axes": {"seed": [1]}},
    r"axis seed=\[\]; give a list of values": {"axes": {"seed": [], "prompt": ["x"]}},
    "axis seed: '1' is str; it has to be a whole number": {"axes": {"seed": ["1"], "prompt": ["x"]}},
    "axis guidance_scale: True is bool": {"axes": {"guidance_scale": [True], "prompt": ["x"]}},
    "axis prompt=.*; give a list of values": {"axes": {"prompt": "an owl", "seed": [1]}},
    "solver 'dim' is not known": {"axes": {"solver": ["ddim", "dim"], "seed": [1]}},
    "num_inference_steps=0": {"axes": {"num_inference_steps": [2, 0], "seed": [1]}},
    "guidance_scale=-1": {"guidance_scales": [1, -1]},
    "guidance_scales.0: .*finite": {"guidance_scales": [float("nan")]},
    "seed -1 cannot be used": {"axes": {"seed": [-1], "prompt": ["x"]}},
    "resolution=36": {"resolution": 36},
    "there is no model at": {"model": "nowhere at all"},
    "is no run folder, so it has no checkpoint 3": {"checkpoint": 3},
    "guidance 'intervall' is not known": {"guidance": "intervall"},
    "prompts": {"prompts": []},
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_drawn_is_refused_before_anything_is_and_nothing_is_left(tmp_path, message):
    more = dict(BAD[message])
    axes, own = more.pop("axes", None), more.pop("own", None)
    with pytest.raises(ConfigError, match=message):
        album.draw_grid(configure(tmp_path / "study", **more), axes, guidance=own)
    assert not (tmp_path / "study").exists()


def test_what_a_notebook_asks_is_checked_whole_before_its_first_grid(tmp_path):
    config = configure(
        tmp_path / "study", axes={"solver": ["ddim", "plms"], "seed": [1]}, guidance="cfgpp", solver="ddim", guidance_scale=0.5
    )
    with pytest.raises(
        ConfigError, match=r"grid of prompt and guidance_scale: guidance_scale=1\.5; it has to be a finite number from 0 to 1 with"
    ):
        album.check(config)
    with pytest.raises(
        ConfigError, match=r"grid of solver and seed: guidance 'cfgpp' reads picture and noise .* use it with solver ddim or euler"
    ):
        album.check(config.model_copy(update={"guidance_scales": [0.5]}))
    assert not (tmp_path / "study").exists()


# One image on its way


def test_the_trajectory_ends_in_the_picture_that_is_drawn_and_shows_each_evaluation(model):
    how = drawing.configure(model, num_inference_steps=4, batch_size=1)
    shot = drawing.Shot(PROMPTS[0], 3, 5.0)
    followed = trajectory.follow(model, how, shot)
    drawn = next(sample.stream(model, how, [shot]))[1][0]
    assert [at.timestep for at in followed.at] == solvers.trailing(4, 1000)
    assert followed.guided.shape == followed.unguided.shape == (4, 3, 64, 64) and followed.direction.shape == (4, 8, 8)
    assert np.abs(followed.guided[-1].astype(int) - drawn).max() <= 1
    assert (followed.direction > 0).all() and not np.array_equal(followed.guided[0], followed.unguided[0])


def test_where_the_prompt_is_the_negative_one_guidance_moves_nothing(model):
    how = drawing.configure(model, num_inference_steps=2)
    followed = trajectory.follow(model, how, drawing.Shot(PROMPTS[0], 3, 5.0, PROMPTS[0]))
    assert followed.direction.max() < 1e-4 and np.abs(followed.guided.astype(int) - followed.unguided).max() <= 1


def test_a_long_trajectory_is_shown_at_ten_points_from_the_first_to_the_last(model):
    how = drawing.configure(model, solver="plms", num_inference_steps=14)
    followed = trajectory.follow(model, how, drawing.Shot(PROMPTS[0], 3, 2.0))
    figure = plots.trajectory(followed, "an owl")
    labels = [text.get_text() for text in figure.axes[0].texts if text.get_text().startswith("\u03c3")]
    assert len(followed.at) == 15 and len(labels) == 10
    assert labels[0] == f"\u03c3 {followed.at[0].sigma:.2g}" and labels[-1] == f"\u03c3 {followed.at[-1].sigma:.2g}"


def test_a_scale_that_cannot_be_used_is_refused_before_the_trajectory_begins(model):
    with pytest.raises(ConfigError, match="guidance_scale=inf"):
        trajectory.follow(model, drawing.configure(model), drawing.Shot(PROMPTS[0], 3, float("inf")))
    assert torch.is_grad_enabled()
