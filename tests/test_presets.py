"""Families, stages, a user's own preset files, and overrides."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sdlab import presets
from sdlab.config import ConfigError, accumulation_steps, check_resolution

FAMILIES = ("sd15", "sd20", "sdxl")
WHOLE = [f"{family}{kind}" for family in FAMILIES for kind in ("", "_original", "_finetune")]


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
        ("extends: tiny\nstages: {stage1_32: {learning_rate: 1, learning_rate: 2}}\n", "'learning_rate' is given twice"),
        ("extends: tiny\nstages: {stage1_32: {learning_rate: fast}}\n", "given: 'fast'"),
        ("extends: tiny\nstages: {stage_32: null}\n", "no stage 'stage_32' to leave out; did you mean 'stage1_32'"),
        ("extends: tiny\nstages: {stage1_32: null}\n", "has parent 'stage1_32'"),
        ("extends: tiny\nstages: [a]\n", "stages: "),
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


def test_a_stage_that_a_file_sets_to_null_is_left_out_and_a_file_that_names_all_stages_orders_them(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: tiny\nstages: {stage1_32: null, stage2_64: {parent: null}}\n")
    assert list(presets.get(str(mine)).stages) == ["stage2_64"]
    mine.write_text("extends: tiny\nstages: {stage2_64: {warmup_steps: 7}}\n")
    assert list(presets.get(str(mine)).stages) == ["stage1_32", "stage2_64"]
    mine.write_text("extends: tiny\nstages: {stage2_64: {warmup_steps: 7}, stage1_32: {warmup_steps: 7}}\n")
    assert list(presets.get(str(mine)).stages) == ["stage2_64", "stage1_32"]


def test_a_users_file_may_start_from_one_that_has_no_stages(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("networks: {frozen: tiny, prediction_type: epsilon, unet: {}}\n")
    stage = "{resolution: 64, global_batch_size: 8, micro_batch_size: 8, learning_rate: 1e-4, schedule_steps: 5}"
    (tmp_path / "mine.yaml").write_text(f"extends: base.yaml\nstages: {{only: {stage}}}\n")
    assert list(presets.get(str(tmp_path / "mine.yaml")).stages) == ["only"]


# What NVIDIA NeMo publishes: resolution, nodes, devices, micro, global, steps, learning rate, warm-up, drop, EMA, smallest side.
PUBLISHED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("sd15", "pretrain_256"): (256, 8, 8, 128, 8192, 82_500, 8.192e-5, 10_000, 0.0, 0.9999, None),
    ("sd15", "v1_1_512"): (512, 32, 8, 32, 8192, 50_000, 8.192e-5, 10_000, 0.0, 0.9999, 1024),
    ("sd15", "v1_2_512"): (512, 32, 8, 32, 8192, 150_000, 8.192e-5, 0, 0.1, 0.9999, 512),
    ("sd15", "v1_5_512"): (512, 32, 8, 32, 8192, 165_000, 8.192e-5, 0, 0.1, 0.9999, 512),
    ("sd20", "pretrain_256"): (256, 8, 8, 128, 8192, 140_000, 8.192e-5, 10_000, 0.0, 0.9999, None),
    ("sd20", "base_512"): (512, 32, 8, 32, 8192, 220_000, 8.192e-5, 0, 0.1, 0.9999, 512),
    ("sdxl", "stage1_256"): (256, 4, 8, 64, 2048, 600_000, 2.048e-5, 10_000, 0.1, None, None),
    ("sdxl", "stage2_512"): (512, 16, 8, 16, 2048, 200_000, 2.048e-5, 10_000, 0.1, None, 512),
    ("sdxl", "stage3_1024"): (1024, 8, 8, 4, 256, 200_000, 2.048e-5, 10_000, 0.1, None, 1024),
}
PARENTS = {
    "sd15": {"pretrain_256": None, "v1_1_512": "pretrain_256", "v1_2_512": "v1_1_512", "v1_5_512": "v1_2_512"},
    "sd20": {"pretrain_256": None, "base_512": "pretrain_256"},
    "sdxl": {"stage1_256": None, "stage2_512": "stage1_256", "stage3_1024": "stage2_512"},
    "sd15_original": {
        **{"v1_1_256": None, "v1_1_512": "v1_1_256", "v1_2_512": "v1_1_512"},
        **{"v1_3_512": "v1_2_512", "v1_4_512": "v1_2_512", "v1_5_512": "v1_2_512"},
    },
    "sd20_original": {
        **{"base_256": None, "base_512": "base_256", "v_768_start": "base_512", "v_768": "v_768_start"},
        **{"v2_1_base_512": "base_512", "v2_1_768_start": "v_768", "v2_1_768": "v2_1_768_start"},
    },
    "sdxl_original": {"stage1_256": None, "stage2_512": "stage1_256", "stage3_1024": "stage2_512"},
}


def test_the_families_are_nvidias_recipes_figure_by_figure() -> None:
    found = {
        (family, name): (
            *(stage.resolution, stage.published_nodes, stage.published_devices, stage.micro_batch_size, stage.global_batch_size),
            *(
                stage.schedule_steps,
                stage.learning_rate,
                stage.warmup_steps,
                stage.caption_drop_prob,
                stage.ema_decay,
                stage.min_resolution,
            ),
        )
        for family in FAMILIES
        for name, stage in presets.get(family).stages.items()
    }
    assert found == PUBLISHED
    for family in FAMILIES:
        for stage in presets.get(family).stages.values():
            fixed = (stage.precision, stage.betas, stage.weight_decay, stage.max_grad_norm, stage.lr_schedule)
            assert fixed == ("bf16-mixed", (0.9, 0.999), 0.0, 1.0, "constant")
            assert "26e42fa" in stage.source and stage.note
            assert (stage.condition_drop, stage.crop) == (("each", "random") if family == "sdxl" else ("together", "center"))


@pytest.mark.parametrize("name", PARENTS)
def test_stages_grow_from_one_another_as_published(name: str) -> None:
    assert [(stage, recipe.parent) for stage, recipe in presets.get(name).stages.items()] == list(PARENTS[name].items())


@pytest.mark.parametrize("name", WHOLE)
def test_published_batches_are_whole_numbers_of_micro_batches_on_the_published_devices(name: str) -> None:
    for stage in presets.get(name).stages.values():
        ranks = (stage.published_nodes or 1) * (stage.published_devices or 1)
        assert accumulation_steps(stage.global_batch_size, stage.micro_batch_size, world_size=ranks) >= 1
        assert stage.source and stage.data


@pytest.mark.parametrize("family", FAMILIES)
def test_an_original_recipe_takes_no_figure_from_nvidias(family: str) -> None:
    theirs, own = (presets.read_yaml(presets.PRESET_DIR / f"{name}.yaml", where="", fields="") for name in (family, f"{family}_original"))
    for name in theirs["stages"].keys() & own["stages"].keys():
        if own["stages"][name] is not None:
            assert theirs["stages"][name].keys() <= own["stages"][name].keys()


def test_the_768_line_of_stable_diffusion_2_says_v_and_its_base_epsilon() -> None:
    preset = presets.get("sd20_original")
    said = {name: presets.networks(preset, name).prediction_type for name in preset.stages}
    assert said == {name: "v_prediction" if "768" in name else "epsilon" for name in preset.stages}
    assert presets.networks(preset, "v_768").unet == preset.networks.unet
    changed = presets.stage(preset, "base_512", {"prediction_type": "sample"})
    assert presets.networks(preset, changed).prediction_type == "sample"
    with pytest.raises(ConfigError, match="did you mean 'v_768'"):
        presets.networks(preset, "v_786")


def test_only_the_original_last_stage_of_sdxl_has_offset_noise_and_buckets() -> None:
    stages = [(name, stage, recipe) for name in WHOLE for stage, recipe in presets.get(name).stages.items()]
    assert [(name, stage) for name, stage, recipe in stages if recipe.noise_offset] == [("sdxl_original", "stage3_1024")]
    assert [(name, stage) for name, stage, recipe in stages if recipe.crop == "buckets"] == [("sdxl_original", "stage3_1024")]


@pytest.mark.parametrize("family", FAMILIES)
def test_fine_tuning_grows_from_the_familys_last_stage(family: str) -> None:
    last = list(presets.get(family).stages)[-1]
    finetune, lora = list(presets.get(f"{family}_finetune").stages.values())[-2:]
    assert (finetune.parent, lora.parent) == (last, last)
    assert finetune.lora is None and lora.lora is not None and lora.lora.rank == 4
    assert (finetune.learning_rate, lora.learning_rate) == (1e-6 if family == "sdxl" else 1e-5, 1e-4)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("family", "unet", "encoders"),
    [
        ("sd15", 859_520_964, [123_060_480]),
        ("sd20", 865_910_724, [340_387_840]),
        ("sdxl", 2_567_463_684, [123_060_480, 694_659_840]),
    ],
)
def test_the_networks_have_as_many_parameters_as_the_published_ones(family: str, unet: int, encoders: list[int]) -> None:
    networks = presets.get(family).networks
    kinds = (CLIPTextModel, CLIPTextModelWithProjection)
    with torch.device("meta"):
        assert parameters(UNet2DConditionModel(**networks.unet)) == unet
        assert parameters(AutoencoderKL(**networks.vae)) == 83_653_863
        texts = [kind(CLIPTextConfig(**fields)) for kind, fields in zip(kinds, networks.text_encoders, strict=False)]
    assert [parameters(text) for text in texts] == encoders


@pytest.mark.parametrize("name", [*WHOLE, *(f"{name}_tiny" for name in WHOLE)])
def test_the_parts_of_a_family_fit_one_another_and_its_resolutions(name: str) -> None:
    preset = presets.get(name)
    unet, texts = preset.networks.unet, preset.networks.text_encoders
    assert unet["cross_attention_dim"] == sum(text["hidden_size"] for text in texts)
    assert unet["in_channels"] == unet["out_channels"] == preset.networks.vae["latent_channels"]
    if "addition_embed_type" in unet:
        assert unet["projection_class_embeddings_input_dim"] == texts[-1]["projection_dim"] + 6 * unet["addition_time_embed_dim"]
    factors = [2 ** (len(sizes["block_out_channels"]) - 1) for sizes in (preset.networks.vae, unet)]
    for stage in preset.stages.values():
        check_resolution(stage.resolution, vae_factor=factors[0], unet_factor=factors[1])


SIZES = {
    "vae": {"sample_size", "block_out_channels"},
    "unet": {
        *("sample_size", "block_out_channels", "cross_attention_dim", "attention_head_dim", "transformer_layers_per_block"),
        *("addition_time_embed_dim", "projection_class_embeddings_input_dim"),
    },
    "text_encoders": {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "projection_dim", "vocab_size"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    },
    "stage": {
        *("resolution", "min_resolution", "global_batch_size", "micro_batch_size", "schedule_steps", "warmup_steps"),
        *("published_nodes", "published_devices", "source"),
    },
}
"""All that a twin may differ in."""


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


@pytest.mark.parametrize("name", WHOLE)
def test_a_twin_differs_in_size_alone(name: str) -> None:
    preset, twin = presets.get(name), presets.get(f"{name}_tiny")
    whole, small = preset.networks.model_dump(), twin.networks.model_dump()
    assert differing(whole, small) == {"frozen", "vae", "unet", "text_encoders"} and small["frozen"] == "random"
    for part in ("vae", "unet"):
        assert differing(whole[part], small[part]) <= SIZES[part]
        assert len(whole[part]["block_out_channels"]) == len(small[part]["block_out_channels"])
    for one, other in zip(whole["text_encoders"], small["text_encoders"], strict=True):
        assert differing(one, other) <= SIZES["text_encoders"]
    assert list(preset.stages) == list(twin.stages)
    for stage in preset.stages:
        assert differing(preset.stages[stage].model_dump(), twin.stages[stage].model_dump()) <= SIZES["stage"]


@pytest.mark.parametrize("name", WHOLE)
def test_a_twins_recipe_is_a_minute_on_a_cpu(name: str) -> None:
    preset, twin = presets.get(name), presets.get(f"{name}_tiny")
    for stage, recipe in preset.stages.items():
        small = twin.stages[stage]
        assert small.resolution * 4 == recipe.resolution and (small.min_resolution or 0) * 4 == (recipe.min_resolution or 0)
        assert small.global_batch_size <= 8 and small.schedule_steps <= 20
        assert (small.warmup_steps > 0) == (recipe.warmup_steps > 0)
        assert accumulation_steps(small.global_batch_size, small.micro_batch_size, world_size=1) >= 1


def test_a_twins_tokens_are_those_of_the_tokenizer_that_sdlab_ships() -> None:
    from transformers import CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(presets.PRESET_DIR.parent / "tiny" / "tokenizer")
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    for family in FAMILIES:
        for text in presets.get(f"{family}_tiny").networks.text_encoders:
            assert text["vocab_size"] == len(tokenizer)
            assert (text["bos_token_id"], text["eos_token_id"], text["pad_token_id"]) == special


def test_twins_have_names_and_can_be_extended(tmp_path: Path) -> None:
    assert {f"{name}_tiny" for name in WHOLE} | {*WHOLE, "tiny"} == set(presets.names())
    with pytest.raises(ConfigError, match="did you mean 'sdxl_tiny'"):
        presets.get("sdxl_tny")
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: sd15_tiny\nstages: {pretrain_256: {schedule_steps: 3}}\n")
    preset = presets.get(str(mine))
    assert (preset.stages["pretrain_256"].schedule_steps, preset.networks.frozen) == (3, "random")
