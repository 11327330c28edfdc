"""Families, stages, a user's own preset files, and overrides."""

from pathlib import Path

import pytest

from sdlab import presets
from sdlab.config import ConfigError


def test_the_tiny_family_has_two_stages_and_the_second_grows_from_the_first() -> None:
    tiny = presets.get("tiny")
    assert list(tiny.stages) == ["stage1_32", "stage2_64"]
    assert (tiny.stages["stage1_32"].resolution, tiny.stages["stage2_64"].resolution) == (32, 64)
    assert (tiny.stages["stage1_32"].parent, tiny.stages["stage2_64"].parent) == (None, "stage1_32")


def test_a_users_file_changes_only_what_it_names(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: tiny\nstages:\n  stage1_32: {learning_rate: 1e-4}\n")
    preset, tiny = presets.get(str(mine)), presets.get("tiny")
    assert preset.name == "mine"
    assert preset.stages["stage1_32"] == tiny.stages["stage1_32"].model_copy(update={"learning_rate": 1e-4})
    assert preset.stages["stage2_64"] == tiny.stages["stage2_64"]


def test_a_users_file_extends_another_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: tiny\nstages: {stage1_32: {warmup_steps: 7}}\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\nstages: {stage1_32: {weight_decay: 0.5}}\n")
    stage = presets.get(str(tmp_path / "b.yaml")).stages["stage1_32"]
    assert (stage.warmup_steps, stage.weight_decay) == (7, 0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("extends: mine.yaml\n", "extends itself"),
        ("extends: tini\n", "did you mean 'tiny'"),
        ("extends: tiny\nstages: {stage1_32: {learning_rat: 1}}\n", "did you mean 'learning_rate'"),
        ("extends: tiny\nstages: {mine: {resolution: 64}}\n", "stages.mine.learning_rate' is missing"),
        ("extends: tiny\nstages: {stage1_32: {parent: stage3}}\n", "has parent 'stage3'"),
        ("extends: [tiny]\n", "name or path of one preset"),
        ("just text", "has to hold fields"),
        ("a: [1\n", "not valid YAML"),
        ("extends: tiny\nstages: {stage1_32: {learning_rate: fast}}\n", "given: 'fast'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, content: str, message: str) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        presets.get(str(mine))
    assert "mine.yaml" in str(caught.value) or "tini" in content


def test_a_missing_file_and_an_unknown_name_say_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml is not there"):
        presets.get(str(tmp_path / "nowhere.yaml"))
    with pytest.raises(ConfigError, match="did you mean 'tiny'"):
        presets.get("tinny")


def test_overrides_change_the_recipe_and_show_in_its_label() -> None:
    tiny = presets.get("tiny")
    assert presets.stage(tiny, "stage1_32", {"learning_rate": 5e-4}).learning_rate == 5e-4
    assert presets.label("tiny", "stage1_32", {"learning_rate": 5e-4}) == "tiny/stage1_32 + learning_rate"
    with pytest.raises(ConfigError, match="did you mean 'stage1_32'"):
        presets.stage(tiny, "stage1")
    with pytest.raises(ConfigError, match="did you mean 'warmup_steps'"):
        presets.stage(tiny, "stage1_32", {"warmup_step": 3})
