"""Networks load strictly from what is shipped, and bad folders are named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sdlab import files, models, parts, places, presets
from sdlab.config import ConfigError

TINY = presets.get("tiny")


def test_parameters_are_counted_without_allocating_and_are_right(frozen: parts.Frozen) -> None:
    counted = models.count_parameters(TINY)
    unet = models.build_unet(TINY.networks)
    real = {"unet": unet, "vae": frozen.vae, "text_encoders": frozen.text_encoders[0]}
    assert counted == {name: sum(p.numel() for p in module.parameters()) for name, module in real.items()}


def test_a_seed_fixes_the_random_unet_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one, same, other = (models.build_unet(TINY.networks, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one["conv_in.weight"], same["conv_in.weight"]) and not torch.equal(one["conv_in.weight"], other["conv_in.weight"])


def test_frozen_parts_have_the_shapes_of_the_contract(frozen: parts.Frozen) -> None:
    moments = frozen.encode_moments(torch.zeros(2, 3, 64, 64))
    ids = frozen.tokenize(["a cat", ""])
    assert (frozen.vae_factor, places.vae_factor(TINY.networks)) == (8, 8)
    assert moments.shape == (2, 16, 8, 8) and ids.shape == (2, 24) and ids.dtype == torch.int64
    assert frozen.encode_text(ids).prompt_embeds.shape == (2, 24, 128)
    images = frozen.decode(moments[:, :8] * frozen.scaling_factor)
    assert images.shape == (2, 3, 64, 64) and images.dtype == torch.uint8


def test_long_captions_are_cut_and_counted(frozen: parts.Frozen) -> None:
    long = "cat " * 60
    assert frozen.count_tokens([long, "cat"]) == [62, 3]
    ids = frozen.tokenize([long])
    assert ids.shape == (1, 24) and int(ids[0, -1]) == frozen.tokenizers[0].eos_token_id


def test_the_built_in_model_loads_and_says_what_it_is() -> None:
    model = models.load("tiny")
    assert (model.name, model.weights, model.resolution) == ("tiny", "ema", 64)
    asked = {name: model.unet.config[name] for name in TINY.networks.unet}
    assert json.loads(json.dumps(asked)) == TINY.networks.unet
    assert model.networks.noise_schedule == TINY.networks.noise_schedule
    assert model.networks.prediction_type == TINY.networks.prediction_type


def test_hand_over_lists_every_key_that_does_not_fit() -> None:
    unet = models.build_unet(TINY.networks)
    weights = unet.state_dict()
    moved = weights.pop("conv_in.bias")
    weights["conv_inn.bias"] = moved
    weights["conv_out.bias"] = torch.zeros(3)
    with pytest.raises(
        ConfigError, match=r"\(3 keys\): missing conv_in\.bias; unknown conv_inn\.bias; conv_out\.bias is \(3,\), not \(8,\)"
    ):
        models.hand_over(unet, weights, source="x")


def test_weights_that_are_not_finite_are_refused_with_their_names() -> None:
    unet = models.build_unet(TINY.networks)
    weights = {**unet.state_dict(), "conv_in.bias": unet.state_dict()["conv_in.bias"] / 0}
    with pytest.raises(ConfigError, match=r"the weights of x are not finite.*: conv_in\.bias"):
        models.hand_over(unet, weights, source="x")


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is neither a run folder, a pipeline folder nor a \.safetensors file"):
        models.load(str(tmp_path))
    with pytest.raises(ConfigError, match="weights='best'; allowed are"):
        models.load("tiny", weights="best")
    with pytest.raises(ConfigError, match="lacks vae, text_encoder, tokenizer"):
        parts.load_frozen(TINY.networks.model_copy(update={"frozen": str(tmp_path)}))
    with pytest.raises(ConfigError, match="does not make a UNet"):
        models.build_unet(TINY.networks.model_copy(update={"unet": {"block_channels": 3}}))


def test_a_pipeline_of_our_own_parts_can_be_named_in_a_preset(tmp_path: Path) -> None:
    shutil.copytree(places.TINY_DIR, tmp_path / "parts")
    networks = TINY.networks.model_copy(update={"frozen": str(tmp_path / "parts")})
    assert parts.load_frozen(networks).hashes == parts.load_frozen(TINY.networks).hashes


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_a_network_with_missing_or_damaged_weights_is_never_filled_in(tmp_path: Path, part: str) -> None:
    shutil.copytree(places.TINY_DIR, tmp_path / "parts")
    path = next((tmp_path / "parts" / part).glob("*.safetensors"))
    weights = load_file(path)
    weights.popitem()
    save_file(weights, path)
    with pytest.raises(ConfigError, match=r"(does not hold the whole network|do not fit the UNet) \(1 keys\): missing"):
        models.load(str(tmp_path / "parts"))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=rf"{part}\S* cannot be loaded"):
        models.load(str(tmp_path / "parts"))


def test_only_a_run_folder_has_checkpoints() -> None:
    with pytest.raises(ConfigError, match="has no checkpoint 5"):
        models.load("tiny", checkpoint=5)


def test_the_shipped_weights_have_the_hashes_of_their_card() -> None:
    about = json.loads((places.TINY_DIR / "components.json").read_text())
    assert {part: files.hash_weights(places.TINY_DIR / part) for part in about["sha256"]} == about["sha256"]


@pytest.mark.parametrize(
    ("networks", "message"),
    [
        ({"frozen": "random"}, "have to say what to draw"),
        ({"frozen": "random", "vae": {"bogus": 3}, "text_encoders": [{"hidden_size": 32}]}, "do not make frozen parts.*bogus"),
        ({"frozen": "/nowhere/at/all"}, "there is nothing at /nowhere/at/all"),
    ],
)
def test_frozen_parts_that_cannot_be_had_are_told_and_leave_nothing(
    networks: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "KEPT", tmp_path / "kept")
    with pytest.raises(ConfigError, match=message):
        parts.load_frozen(TINY.networks.model_copy(update=networks))
    assert not list((tmp_path / "kept").rglob("*.*")) and not list((tmp_path / "kept" / "random").glob("*"))
