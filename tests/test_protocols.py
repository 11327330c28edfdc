"""Named evaluation protocols: their figures, the sources of these, and names that say what was changed."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sdlab import coco, evaluate, places, presets, protocols, scenes
from sdlab.config import ConfigError

WHOLE = ("card_10k_512", "cleanfid_30k_256", "mlperf_30k_512", "nemo_30k_256", "tiny")


def test_the_built_in_protocols_are_there_and_bear_their_names() -> None:
    assert protocols.names() == list(WHOLE)
    assert [protocols.get(name).name for name in WHOLE] == list(WHOLE)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("nemo_30k_256", ("random_captions", 30_000, "all_images", 40_504, 512, 256, "nemo", "plms", 50, (1.5, 2, 3, 4, 5, 6, 7, 8), 8)),
        ("mlperf_30k_512", ("one_caption_per_image", 30_000, "prompted_images", None, 512, 512, "mlperf", "ddim", 50, (8,), 8)),
        (
            "card_10k_512",
            ("random_captions", 10_000, "all_images", 5_000, 512, 512, "pytorchfid", "plms", 50, (1.5, 2, 3, 4, 5, 6, 7, 8), 8),
        ),
        ("cleanfid_30k_256", ("one_caption_per_image", 30_000, "all_images", 40_504, 512, 256, "gigagan", "ddim", 50, (1.5, 2, 3, 4.5), 8)),
    ],
)
def test_figures_are_the_published_ones(name: str, figures: tuple[Any, ...]) -> None:
    it = protocols.get(name)
    drawn = (it.resolution_drawn, it.resolution_scored, it.pixel_path)
    assert (it.prompts, it.num_images, it.reference, it.reference_images, *drawn) == figures[:7]
    assert (it.solver, it.num_inference_steps, it.guidance_scales, it.batch_size) == figures[7:]
    assert it.extractor == "inception-2015-12-05"


def test_each_protocol_has_its_own_judge_and_data() -> None:
    told = {name: (it.clip_judge, it.clip_prefix, it.dataset) for name in WHOLE for it in [protocols.get(name)]}
    assert told == {
        "nemo_30k_256": ("ViT-L-14-quickgelu/openai", "", "coco_val2014"),
        "mlperf_30k_512": ("ViT-H-14/laion2b_s32b_b79k", "", "coco_val2014"),
        "card_10k_512": ("ViT-L-14-quickgelu/openai", "", "coco_val2017"),
        "cleanfid_30k_256": ("ViT-g-14/laion2b_s12b_b42k", "A photo depicts ", "coco_val2014"),
        "tiny": ("built-in judge", "", "scenes"),
    }
    assert protocols.get("mlperf_30k_512").prompt_seed == 2023


def test_the_tiny_protocol_is_what_notebook_04_does() -> None:
    it, asked = protocols.get("tiny"), evaluate.EvaluateConfig()
    assert (it.num_images, list(it.guidance_scales), it.batch_size) == (asked.num_images, asked.guidance_scales, asked.batch_size)
    assert (it.solver, it.num_inference_steps) == (asked.solver, asked.num_inference_steps)
    assert (it.prompt_seed, it.reference_images) == (evaluate.PROMPT_SEED, evaluate.MIN_REFERENCE)
    assert it.resolution_drawn == it.resolution_scored == scenes.SIDE == max(s.resolution for s in presets.get("tiny").stages.values())
    assert (places.TINY_DIR / "judge").is_dir() and it.extractor == it.clip_judge == "built-in judge"


def test_every_prompt_rule_but_scenes_is_one_that_coco_knows() -> None:
    assert set(protocols.Protocol.model_fields["prompts"].annotation.__args__) == {*coco.RULES, "scenes"}


def test_a_changed_protocol_says_so_in_its_name_and_sources() -> None:
    nemo = protocols.get("nemo_30k_256")
    few = protocols.changed(nemo, num_images=1000)
    assert few.name == "nemo_30k_256 + num_images=1000"
    assert few.num_images == 1000 and nemo.num_images == 30_000
    assert few.sources["num_images"] == "changed; nemo_30k_256 has 30000"
    assert few.sources["solver"] == nemo.sources["solver"]


def test_changes_add_up_in_one_order_and_changing_back_takes_the_name_back() -> None:
    nemo = protocols.get("nemo_30k_256")
    one = protocols.changed(protocols.changed(nemo, solver="ddim"), num_images=10, guidance_scales=[2.0, 3.5])
    other = protocols.changed(nemo, guidance_scales=[2, 3.5], num_images=10, solver="ddim")
    assert one == other
    assert one.name == "nemo_30k_256 + num_images=10 + solver=ddim + guidance_scales=[2, 3.5]"
    back = protocols.changed(one, num_images=30_000, solver="plms", guidance_scales=nemo.guidance_scales)
    assert back == nemo and back.name == "nemo_30k_256"


def test_differences_are_the_figures_with_both_values() -> None:
    nemo = protocols.get("nemo_30k_256")
    assert protocols.differences(nemo, protocols.changed(nemo, resolution_scored=512)) == {"resolution_scored": (256, 512)}
    assert protocols.differences(nemo, nemo) == {}


def test_a_protocol_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        protocols.get("tiny").num_images = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "message"), [("nemo_30k_265", "did you mean 'nemo_30k_256'"), ("fid", "known are card_10k_512, cleanfid")]
)
def test_an_unknown_protocol_is_refused_with_the_nearest_one(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        protocols.get(name)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_image": 10}, "did you mean 'num_images'"),
        ({"base": "tiny"}, "no figure 'base'"),
        ({"num_images": 1}, "num_images: .*greater than or equal to 2.*given: 1"),
        ({"solver": "plm"}, "did you mean 'plms'"),
        ({"guidance_scales": [2, 2]}, "2 comes more than once"),
        ({"guidance_scales": [-1]}, "0 or more"),
        ({"guidance_scales": []}, "guidance_scales"),
        ({"pixel_path": "nvidia"}, "'nemo', 'mlperf'"),
        ({"dataset": "scenes"}, "scenes go with scenes only"),
        ({"reference": "prompted_images"}, "reference_images=40504.*takes none"),
        ({"reference_images": None}, "reference_images=None.*every other rule a number"),
        ({"resolution_scored": 1024}, "resolution_scored=1024 is more than resolution_drawn=512"),
        ({"prompt_seed": 2**32}, "prompt_seed"),
    ],
)
def test_changes_that_do_not_fit_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        protocols.changed(protocols.get("nemo_30k_256"), **overrides)


@pytest.mark.parametrize(
    ("field", "entry", "message"),
    [
        ("solver", "plms", "'solver' is 'plms'; it has to be a table of 'value' and 'source'"),
        ("solver", {"value": "plms", "source": " "}, "sources says nothing of solver"),
        ("solver", None, "'solver' is None"),
        ("sampler", {"value": "plms", "source": "x"}, "'sampler' is not a known name"),
    ],
)
def test_a_table_whose_figures_have_no_sources_or_names_is_refused(tmp_path: Path, field: str, entry: Any, message: str) -> None:
    table = yaml.safe_load((protocols.PROTOCOL_DIR / "nemo_30k_256.yaml").read_text())
    (tmp_path / "nemo_30k_256.yaml").write_text(yaml.safe_dump({**table, field: entry}))
    with pytest.raises(ConfigError, match=message):
        protocols.read(tmp_path / "nemo_30k_256.yaml")
