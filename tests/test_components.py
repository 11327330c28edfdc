"""The frozen parts can be made again, and the shipped ones are as good as their card says."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import CLIPModel

from sdlab import components, parts, places, presets, scenes
from sdlab.config import ConfigError

ABOUT = json.loads((places.TINY_DIR / "components.json").read_text())["figures"]


def test_the_shipped_vae_reconstructs_scenes_at_34_db_and_the_reader_still_reads_them() -> None:
    figures = components.measure_vae(parts.load_frozen(presets.get("tiny").networks).vae)
    assert figures["psnr_db"] >= 34 and figures["read_right"] == 1
    assert figures["psnr_db"] == pytest.approx(ABOUT["vae"]["psnr_db"], abs=0.1)


def test_the_shipped_judge_finds_the_right_caption() -> None:
    judge = CLIPModel.from_pretrained(places.TINY_DIR / "judge").float().eval()
    figures = components.measure_clip(judge, parts.load_frozen(presets.get("tiny").networks).tokenizers[0], count=512)
    assert figures["top1_of_64"] >= 0.95
    assert figures["cosine_right"] > figures["cosine_wrong"] + 0.5
    assert figures["relation_right"] >= 0.95


def test_the_judge_is_another_and_better_clip_than_the_one_that_conditions() -> None:
    assert ABOUT["judge"]["top1_of_64"] > ABOUT["clip"]["top1_of_64"]
    assert ABOUT["clip"]["relation_right"] >= 0.95


def test_the_tokenizer_marks_start_end_and_padding() -> None:
    ids = components.tokenize(components.make_tokenizer(), ["a cat", ""])
    start, end = 512 + components.MERGES, 513 + components.MERGES
    assert ids[0, 0] == start and ids[0, 3] == end and ids[1].tolist() == [start] + [end] * 23


def test_pictures_are_measured_by_kind_of_prompt() -> None:
    drawn = scenes.draw(40, seed=2)
    captions = [scene.caption for scene in drawn]
    assert set(components.measure_pictures(scenes.render(drawn), captions).values()) == {1.0}
    empty = np.zeros((40, 3, 64, 64), np.uint8)
    assert components.measure_pictures(empty, captions)["one_object_right"] == 0


def test_a_folder_without_its_parts_gets_no_card(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing vae, text_encoder, judge, unet"):
        components.describe(tmp_path, size=components.SIZES["smoke"], seed=0, figures={})
