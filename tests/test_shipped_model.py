"""What the shipped model draws: the shape of its FID-CLIP curve and how often it is right."""

import os

import pytest

from sdlab import config, evaluate, features, models, sample, scenes, statistics

SCALES = [1, 1.5, 2, 3, 8]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> dict:
    settings = {"models": ["tiny"], "guidance_scales": SCALES, "num_images": 160, "num_inference_steps": 8, "batch_size": 40}
    folder = str(tmp_path_factory.mktemp("study"))
    return evaluate.evaluate(config.build(evaluate.EvaluateConfig, {**settings, "study_dir": folder}, where="test"))


def test_the_frechet_distance_is_clearly_above_its_minimum_with_much_guidance(study):
    row = next(row for row in study["rows"] if row["guidance_scale"] == 8)
    assert row["frechet_above_lowest"] > 2 * row["frechet_above_lowest_se"] > 0


def test_the_frechet_distance_is_clearly_above_its_minimum_without_guidance():
    if os.environ.get("CI") != "true":
        pytest.skip("draws 12,000 pictures: what guidance gains in distance is too little to be seen in fewer; CI runs it")
    model, judge, count = models.load("tiny"), features.load_judge(), 6000
    real = judge.image_features(scenes.render(scenes.draw(count, seed=evaluate.REFERENCE_SEED)))
    prompts = [scene.caption for scene in scenes.draw(count, seed=evaluate.PROMPT_SEED)]
    reference, distances, influences = statistics.Reference.of(statistics.Statistics.of(real)), [], []
    for scale in (1, 1.5):
        drawn = sample.sample(model, prompts, guidance_scale=scale, seeds=range(count), num_inference_steps=8, batch_size=40)
        found = judge.image_features(drawn)
        distances.append(statistics.frechet_distance(statistics.Statistics.of(found), reference))
        influences.append(statistics.frechet_influence(found, reference))
    standard_error = (influences[0] - influences[1]).std(ddof=1) / count**0.5
    assert distances[0] - distances[1] > 2 * standard_error


def test_the_clip_score_rises_from_no_guidance_to_its_peak(study):
    scores = [row["clip_score"] for row in study["rows"]]
    to_the_peak = scores[: scores.index(max(scores)) + 1]
    assert len(to_the_peak) > 1
    assert to_the_peak == sorted(to_the_peak)


def test_held_out_pictures_follow_their_prompts(study):
    held_out = study["held_out"]
    assert held_out["background_right"] >= 0.98
    assert held_out["strict_one"] >= 0.98
    assert held_out["strict_two"] >= 0.50


def test_real_pictures_are_read_right_and_lie_nearer_than_any_drawn_ones(study):
    real, reconstructed = study["references"]
    assert real["strict_one"] == real["strict_two"] == 1
    assert reconstructed["strict_one"] == reconstructed["strict_two"] == 1
    assert real["frechet_distance"] < min(row["frechet_distance"] for row in study["rows"])
    assert real["clip_score"] > max(row["clip_score"] for row in study["rows"])
