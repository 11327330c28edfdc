import dataclasses
import json

import numpy as np
import pytest
from conftest import in_ci

from sdlab import config, evaluate, features, measure, models, places, sample, scenes, stored
from sdlab.config import ConfigError

SMALL = {"num_images": 12, "guidance_scales": [1, 2, 4], "num_inference_steps": 2, "batch_size": 4}


class Painter:
    """Stands in for the sampler: draws each prompt's nominal scene, with more noise at higher guidance; notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[float], list[int], list[str]]] = []
        self.dies_at = -1

    def __call__(self, model, how, shots, *, report):
        if len(self.asked) == self.dies_at:
            raise KeyboardInterrupt
        scales = list(dict.fromkeys(shot.guidance_scale for shot in shots))
        once = [shot for shot in shots if shot.guidance_scale == scales[0]]
        self.asked.append((scales, [shot.seed for shot in once], [shot.prompt for shot in once]))
        assert [(shot.seed, shot.prompt) for shot in shots] == [(shot.seed, shot.prompt) for shot in once] * len(scales)
        for which, shot in enumerate(shots):
            image = scenes.render([scenes.parse(shot.prompt)]).astype(int)
            noise = np.random.default_rng(shot.seed).normal(size=image.shape[1:])
            report(1)
            yield [which], (image + 12 * (shot.guidance_scale - 1) * noise).clip(0, 255).astype(np.uint8)[..., : how.size[0], : how.size[1]]


@pytest.fixture(scope="module")
def tiny() -> models.TextToImage:
    return models.load("tiny")


@pytest.fixture(scope="module")
def judge() -> features.Judge:
    return features.load_judge()


@pytest.fixture
def painter(monkeypatch, tiny, judge) -> Painter:
    painter = Painter()
    monkeypatch.setattr(sample, "stream", painter)
    monkeypatch.setattr(models, "load", lambda name, **settings: dataclasses.replace(tiny, name=name))
    monkeypatch.setattr(features, "load_judge", lambda device: judge)
    monkeypatch.setattr(evaluate, "MIN_REFERENCE", 64)
    return painter


def configure(folder, **values) -> evaluate.EvaluateConfig:
    return config.build(evaluate.EvaluateConfig, {**SMALL, "study_dir": str(folder), **values}, where="test")


def test_a_real_study_writes_every_named_field(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "MIN_REFERENCE", 64)
    results = evaluate.evaluate(configure(tmp_path, num_images=4, guidance_scales=[1, 2], num_inference_steps=1))
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert {"schema", "study", "created", "machine", "identity", "rows", "references", "held_out", "notes"} <= results.keys()
    named = ("model", "weights", "step", "guidance_scale", "frechet_distance", "frechet_low", "frechet_high", "frechet_se", "clip_score")
    more = ("clip_score_se", "num_images", "identity_hash", "solver", "num_inference_steps", "unet_evaluations", "strict_one", "strict_two")
    for row in results["rows"]:
        assert {*named, *more, "background_right"} <= row.keys()
        assert 0 <= row["frechet_low"] <= row["frechet_distance"] <= row["frechet_high"]
        assert row["identity_hash"] == evaluate.identity_hash(results["identity"])
    assert [row["guidance_scale"] for row in results["rows"]] == [1, 2]


def test_pictures_that_are_right_are_found_right(tmp_path, painter):
    results = evaluate.evaluate(configure(tmp_path))
    right = results["rows"][0]
    assert (right["strict_one"], right["strict_two"], right["background_right"]) == (1, 1, 1)
    assert right["num_one_object"] + right["num_two_objects"] == 12
    real = results["references"][0]
    assert real["kind"] == "real"
    assert (real["strict_one"], real["strict_two"], real["background_right"]) == (1, 1, 1)


def test_all_scales_share_prompts_and_noise_and_held_out_prompts_share_neither(tmp_path, painter):
    results = evaluate.evaluate(configure(tmp_path))
    (scales, seeds, prompts), held_out = painter.asked
    assert scales == [1, 2, 4] and len(set(seeds)) == 12
    assert not set(seeds) & set(held_out[1]) and prompts != held_out[2]
    assert held_out[0] == [results["held_out"]["guidance_scale"]] == [evaluate.best(results["rows"])["guidance_scale"]]


def test_differences_to_the_best_point_are_surer_than_their_ends(tmp_path, painter):
    rows = evaluate.evaluate(configure(tmp_path))["rows"]
    lowest = min(rows, key=lambda row: row["frechet_distance"])
    highest = max(rows, key=lambda row: row["clip_score"])
    assert (lowest["frechet_above_lowest"], lowest["frechet_above_lowest_se"]) == (0, 0)
    for row in rows:
        assert row["frechet_above_lowest"] == row["frechet_distance"] - lowest["frechet_distance"]
        assert row["frechet_above_lowest_se"] < row["frechet_se"]
        assert row["clip_below_highest"] == highest["clip_score"] - row["clip_score"]
        assert row["clip_below_highest_se"] < (row["clip_score_se"] ** 2 + highest["clip_score_se"] ** 2) ** 0.5


def test_shards_of_the_prompts_make_the_same_row_as_the_whole(tmp_path, painter, monkeypatch):
    whole = evaluate.evaluate(configure(tmp_path / "whole", guidance_scales=[2]))
    monkeypatch.setattr(measure, "SHARD", 8)
    parts = evaluate.evaluate(configure(tmp_path / "parts", guidance_scales=[2]))
    assert [len(prompts) for _, _, prompts in painter.asked] == [12, 12, 8, 4, 8, 4]
    assert parts["rows"] == whole["rows"] and parts["held_out"] == whole["held_out"]


def test_a_killed_study_goes_on_where_it_was_and_ends_with_the_same_rows(tmp_path, painter, monkeypatch):
    monkeypatch.setattr(measure, "SHARD", 4)
    whole = evaluate.evaluate(configure(tmp_path / "whole"))
    painter.asked.clear()
    painter.dies_at = 2
    with pytest.raises(KeyboardInterrupt):
        evaluate.evaluate(configure(tmp_path / "killed"))
    painter.asked.clear()
    painter.dies_at = -1
    resumed = evaluate.evaluate(configure(tmp_path / "killed"))
    best = whole["held_out"]["guidance_scale"]
    assert [scales for scales, _, _ in painter.asked] == [[1, 2, 4], [best], [best], [best]]
    assert resumed["rows"] == whole["rows"] and resumed["held_out"] == whole["held_out"]


def test_a_further_scale_draws_nothing_else_and_a_damaged_shard_is_drawn_again(tmp_path, painter):
    first = evaluate.evaluate(configure(tmp_path, guidance_scales=[1, 2]))
    painter.asked.clear()
    more = evaluate.evaluate(configure(tmp_path, guidance_scales=[1, 2, 4]))
    assert [scales for scales, _, _ in painter.asked] == [[4]]
    alike = ("frechet_distance", "clip_score", "strict_one")
    assert [[row[name] for name in alike] for row in more["rows"][:2]] == [[row[name] for name in alike] for row in first["rows"]]
    [damaged, *_] = sorted((tmp_path / "shards").glob("guidance-2-*/00000.npz"))
    damaged.write_bytes(damaged.read_bytes()[:-200])
    painter.asked.clear()
    again = evaluate.evaluate(configure(tmp_path, guidance_scales=[1, 2, 4]))
    assert next(scales for scales, _, _ in painter.asked) == [2] and again["rows"] == more["rows"]


@in_ci
def test_ranks_share_the_shards_and_make_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "MIN_REFERENCE", 64)
    settings = {"num_images": 130, "guidance_scales": [1, 3], "num_inference_steps": 1}
    one, two = (evaluate.evaluate(configure(tmp_path / str(ranks), devices=ranks, **settings)) for ranks in (1, 2))
    assert one["rows"] == two["rows"] and one["held_out"] == two["held_out"]


@pytest.mark.parametrize("change", [{"seed": 1}, {"num_inference_steps": 3}, {"num_images": 13}, {"solver": "ddim"}])
def test_another_way_to_measure_draws_anew_and_has_another_identity(tmp_path, painter, change):
    before = evaluate.evaluate(configure(tmp_path, guidance_scales=[1]))
    painter.asked.clear()
    after = evaluate.evaluate(configure(tmp_path, guidance_scales=[1], **change))
    assert len(painter.asked) == 2
    assert evaluate.explain(before["rows"][0], after["rows"][0])
    with pytest.raises(ConfigError, match="not measured alike"):
        evaluate.refuse_mixed([*before["rows"], *after["rows"]])


def test_explain_names_each_differing_field_with_both_values():
    assert evaluate.explain({"solver": "ddim", "num_images": 4}, {"solver": "plms", "num_images": 4}) == {"solver": ("ddim", "plms")}


def test_rows_of_several_models_and_scales_are_comparable(tmp_path, painter):
    results = evaluate.evaluate(configure(tmp_path, models=["tiny", str(places.TINY_DIR)], guidance_scales=[1, 2]))
    assert len(results["rows"]) == 4
    assert {row["model"] for row in results["rows"]} == {"tiny", str(places.TINY_DIR)}
    evaluate.refuse_mixed([*results["rows"], *results["references"]])


def test_pictures_of_another_size_than_the_readers_are_measured_without_it(tmp_path, painter, monkeypatch, tiny):
    found = stored.find("tiny")
    monkeypatch.setattr(stored, "find", lambda *arguments, **settings: dataclasses.replace(found, resolution=32))
    results = evaluate.evaluate(configure(tmp_path))
    assert results["rows"][0]["strict_one"] is None
    assert results["held_out"]["guidance_scale"] == min(results["rows"], key=lambda row: row["frechet_distance"])["guidance_scale"]


def test_the_first_pictures_of_a_scale_are_kept_with_their_prompts(tmp_path, painter):
    results = evaluate.evaluate(configure(tmp_path))
    images, prompts = evaluate.pictures(tmp_path, results["rows"], count=3)
    assert images.shape == (3, 3, 3, 64, 64)
    assert prompts == painter.asked[0][2][:3]
    np.testing.assert_array_equal(images[:, 0], scenes.render([scenes.parse(prompt) for prompt in prompts]))
    assert all((tmp_path / row["contact_sheet"]).is_file() for row in results["rows"])


def test_few_pictures_are_called_few(tmp_path, painter):
    results = evaluate.evaluate(configure(tmp_path, guidance_scales=[1]))
    assert "12 pictures" in results["notes"][0]
    assert any("120 different captions" in note for note in results["notes"])


def test_the_best_row_has_most_strictly_right_pictures_then_the_lowest_distance():
    def row(strict, distance):
        return {"strict_one": strict, "num_one_object": 8, "strict_two": 0.0, "num_two_objects": 8, "frechet_distance": distance}

    rows = [row(0.5, 0.1), row(0.75, 0.3), row(0.75, 0.2)]
    assert evaluate.best(rows) is rows[2]
    assert evaluate.strict_share(rows[2]) == pytest.approx(0.375)
    unread = [{**row(None, 0.3), "strict_two": None}, {**row(None, 0.2), "strict_two": None}]
    assert evaluate.best(unread) is unread[1]
    with pytest.raises(ConfigError, match="no rows"):
        evaluate.best([])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_images": 1}, "num_images"),
        ({"guidance_scales": []}, "guidance_scales"),
        ({"guidance_scales": [1, 1.0]}, "more than once"),
        ({"guidance_scales": [-1]}, "0 or more"),
        ({"solver": "dpmpp"}, "dpmpp_2m"),
        ({"num_inference_steps": 0}, "num_inference_steps"),
        ({"models": []}, "models"),
        ({"weights": "average"}, "weights"),
        ({"num_image": 4}, "did you mean 'num_images'"),
    ],
)
def test_values_that_cannot_be_used_are_refused_before_work(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path, **values)


def test_models_of_different_resolution_are_refused_with_both(tmp_path, painter, monkeypatch, tiny):
    sides, found = {"a": 64, "b": 32}, stored.find("tiny")
    monkeypatch.setattr(stored, "find", lambda name, **settings: dataclasses.replace(found, name=name, resolution=sides[name]))
    with pytest.raises(ConfigError, match=r"64.*32"):
        evaluate.evaluate(configure(tmp_path, models=["a", "b"]))


def test_a_missing_model_is_named_before_anything_is_drawn(tmp_path):
    with pytest.raises(ConfigError, match="no_such_run"):
        evaluate.evaluate(configure(tmp_path, models=["tiny", str(tmp_path / "no_such_run")]))
    assert not any(tmp_path.iterdir())
