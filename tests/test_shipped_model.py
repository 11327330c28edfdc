"""What the shipped model draws: the shape of its FID-CLIP curve and how often it is right."""

import pytest

from sdlab import config, evaluate

SCALES = [1, 1.5, 2, 3, 8]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> dict:
    settings = {"models": ["tiny"], "guidance_scales": SCALES, "num_images": 160, "num_inference_steps": 8, "batch_size": 32}
    folder = str(tmp_path_factory.mktemp("study"))
    return evaluate.evaluate(config.build(evaluate.EvaluateConfig, {**settings, "study_dir": folder}, where="test"))


@pytest.mark.parametrize(
    "scale", [pytest.param(1, marks=pytest.mark.xfail(strict=True, reason="the shipped UNet is lowest without guidance")), 8]
)
def test_the_frechet_distance_is_clearly_above_its_minimum_without_and_with_much_guidance(study, scale):
    row = next(row for row in study["rows"] if row["guidance_scale"] == scale)
    assert row["frechet_above_lowest"] > 2 * row["frechet_above_lowest_se"] > 0


def test_the_clip_score_rises_from_no_guidance_to_its_peak(study):
    scores = [row["clip_score"] for row in study["rows"]]
    to_the_peak = scores[: scores.index(max(scores)) + 1]
    assert len(to_the_peak) > 1
    assert to_the_peak == sorted(to_the_peak)


def test_held_out_pictures_follow_their_prompts(study):
    held_out = study["held_out"]
    assert held_out["background_right"] >= 0.98
    assert held_out["strict_one"] >= 0.98


@pytest.mark.xfail(strict=True, reason="the shipped UNet places two objects right in a third of its pictures")
def test_held_out_pictures_of_two_objects_follow_their_prompts(study):
    assert study["held_out"]["strict_two"] >= 0.50


def test_real_pictures_are_read_right_and_lie_nearer_than_any_drawn_ones(study):
    real, reconstructed = study["references"]
    assert real["strict_one"] == real["strict_two"] == 1
    assert reconstructed["strict_one"] == reconstructed["strict_two"] == 1
    assert real["frechet_distance"] < min(row["frechet_distance"] for row in study["rows"])
    assert real["clip_score"] > max(row["clip_score"] for row in study["rows"])
