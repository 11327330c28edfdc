"""A stage's parent is compared with the stage by what it holds and does, whoever wrote it, and nothing is built for it."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from pipelines import SMALL, TINY, change, make_plain, make_run, rewrite, same, shard
from safetensors.torch import load_file, save_file

from sdlab import export, files, models, parents, parts, places, stored
from sdlab.config import ConfigError, Networks


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_plain(tmp_path / "plain")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model as a run would export it: float32, today's headers."""
    folder = tmp_path_factory.mktemp("export")
    export.save_pipeline(folder, models.load("tiny"))
    return folder


def test_a_parent_is_what_is_stored(plain: Path, tmp_path: Path) -> None:
    for given, weights in (("tiny", "auto"), (str(plain), "raw"), (str(make_run(tmp_path / "run")), "ema")):
        assert vars(parents.load_parent(given, weights=weights)) == vars(stored.find(given, weights=weights))


def test_no_network_is_built_to_describe_compare_and_read_a_parent(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(real: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(real)
        def build(self: Any, *args: Any, **options: Any) -> None:
            assert torch.empty(0).is_meta, "a network was built"
            real(self, *args, **options)

        return build

    for kind in (diffusers.UNet2DConditionModel, diffusers.AutoencoderKL, transformers.CLIPTextModel):
        monkeypatch.setattr(kind, "__init__", watch(kind.__init__))
    for given in ("tiny", str(exported)):
        parent = parents.load_parent(given)
        parents.check_parent_fits(parent, TINY)
        assert set(parent.state_dict()) == set(models.unet_shapes(TINY))
    with pytest.raises(AssertionError, match="a network was built"):
        parts.load_frozen(TINY)


# Frozen parts


def test_an_export_holds_the_parts_that_it_was_made_from(exported: Path) -> None:
    mine, shipped = parents.load_parent(str(exported)), parents.load_parent("tiny")
    assert places.hash_frozen(mine.networks)["vae"] != places.hash_frozen(TINY)["vae"]
    assert mine.frozen_hashes == shipped.frozen_hashes and set(mine.frozen_hashes) == {"vae", "text_encoder", "tokenizer"}
    parents.check_parent_fits(mine, TINY)


def test_a_half_precision_copy_with_names_of_old_is_the_same_vae(plain: Path) -> None:
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=2)
    shutil.rmtree(plain / "vae")
    vae.save_pretrained(plain / "vae")
    path = plain / "vae" / "diffusion_pytorch_model.safetensors"
    before = parents.hash_content(plain)
    new, old = (".to_q.", ".to_k.", ".to_v.", ".to_out.0."), (".query.", ".key.", ".value.", ".proj_attn.")

    def of_old(key: str) -> str:
        for pair in zip(new, old, strict=True):
            key = key.replace(*pair)
        return key

    rewrite(path, of_old, torch.Tensor.half)
    assert sum(".query." in key for key in load_file(path)) == 4
    assert parents.hash_content(plain) == before
    rewrite(path, convert=lambda value: value * 1.002)
    assert parents.hash_content(plain)["vae"] != before["vae"]


def test_a_text_encoder_with_names_of_old_is_the_same_and_loads(plain: Path) -> None:
    path = plain / "text_encoder" / "model.safetensors"
    before = parents.hash_content(plain)
    rewrite(path, "text_model.{}".format)
    save_file({**load_file(path), "text_model.embeddings.position_ids": torch.arange(24)[None]}, path, metadata={"format": "pt"})
    assert parents.hash_content(plain) == before
    ids = torch.tensor([[8704, 320, 8705]])
    ours, theirs = (parts.load_frozen(TINY.model_copy(update={"frozen": str(at)})) for at in (plain, places.TINY_DIR))
    assert torch.equal(ours.encode_text(ids).prompt_embeds, theirs.encode_text(ids).prompt_embeds)


def test_weights_in_shards_are_the_same(plain: Path) -> None:
    before = parents.hash_content(plain)
    shard(plain / "vae")
    assert parents.hash_content(plain) == before


def test_where_a_value_stands_and_how_it_is_shaped_counts(plain: Path) -> None:
    path = plain / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({"a": torch.zeros(2, 3)}, path)
    found = {parents.hash_content(plain)["vae"]}
    for key, shape in (("a", (3, 2)), ("b", (2, 3))):
        save_file({key: torch.zeros(shape)}, path)
        found.add(parents.hash_content(plain)["vae"])
    assert len(found) == 3


def test_a_tokenizer_counts_by_what_it_does(plain: Path) -> None:
    before = parents.hash_content(plain)["tokenizer"]
    table = json.loads((plain / "tokenizer" / "tokenizer.json").read_text())
    model = table["model"]
    (plain / "tokenizer" / "vocab.json").write_text(json.dumps(model["vocab"]))
    (plain / "tokenizer" / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
    (plain / "tokenizer" / "tokenizer.json").unlink()
    assert parents.hash_content(plain)["tokenizer"] == before
    vocabulary = model["vocab"]
    vocabulary["cat</w>"], vocabulary["dog</w>"] = vocabulary["dog</w>"], vocabulary["cat</w>"]
    (plain / "tokenizer" / "vocab.json").write_text(json.dumps(vocabulary))
    assert parents.hash_content(plain)["tokenizer"] != before


def test_frozen_parts_are_read_once_as_long_as_their_files_stay(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(files, "Tensors", lambda paths, real=files.Tensors: read.append(1) or real(paths))
    first = parents.load_parent(str(plain)).frozen_hashes
    assert parents.load_parent(str(plain)).frozen_hashes == first and len(read) == 2
    rewrite(plain / "vae" / "diffusion_pytorch_model.safetensors", convert=lambda value: value + 1)
    assert parents.load_parent(str(plain)).frozen_hashes["vae"] != first["vae"] and len(read) == 3


# Does it fit?


def fitting(plain: Path) -> Networks:
    """What a stage's networks have to be for `plain` to be its parent."""
    return parents.load_parent(str(plain)).networks.model_copy(update={"frozen": "tiny", "unet": TINY.unet})


def _add_one(path: str) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / path, convert=lambda value: value + 1)


def _swap_padding(folder: Path) -> None:
    change(folder / "tokenizer" / "tokenizer_config.json", pad_token="!")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda at: change(at / "scheduler/scheduler_config.json", prediction_type="sample"), "prediction_type: 'sample' in.*'epsilon' in"),
        (lambda at: change(at / "scheduler/scheduler_config.json", beta_end=0.02), r"beta_end: 0\.02 in the parent, 0\.012 in the stage"),
        (lambda at: change(at / "scheduler/scheduler_config.json", num_train_timesteps=500), "num_train_timesteps: 500 in.*1000 in"),
        (
            lambda at: change(at / "scheduler/scheduler_config.json", beta_schedule="linear"),
            "beta_schedule: 'linear' in.*'scaled_linear' in",
        ),
        (lambda at: change(at / "vae/config.json", scaling_factor=0.5), r"vae\.scaling_factor: 0\.5 in the parent, 0\.79567 in the stage"),
        (lambda at: change(at / "vae/config.json", shift_factor=0.5), r"vae\.shift_factor: 0\.5 in the parent, None in the stage"),
        (
            lambda at: change(at / "text_encoder/config.json", hidden_act="gelu"),
            "hidden_act: 'gelu' in the parent, 'quick_gelu' in the stage",
        ),
        (lambda at: change(at / "text_encoder/config.json", num_attention_heads=2), "num_attention_heads: '?2'? in the parent, '?4'? in"),
        (lambda at: change(at / "unet/config.json", attention_head_dim=8), r"unet\.attention_heads: \[8, 8\] in the parent, \[4, 4\] in"),
        (lambda at: change(at / "unet/config.json", act_fn="gelu"), r"unet\.act_fn: 'gelu' in the parent, 'silu' in the stage"),
        (_add_one("vae/diffusion_pytorch_model.safetensors"), "vae: [0-9a-f]{16} in the parent, [0-9a-f]{16} in the stage"),
        (_add_one("text_encoder/model.safetensors"), "text_encoder: [0-9a-f]{16} in the parent, [0-9a-f]{16} in the stage"),
        (_swap_padding, "tokenizer: [0-9a-f]{16} in.*null condition: 8704, 8705, 0 x 22 in the parent, 8704, 8705 x 23 in the stage"),
    ],
)
def test_what_differs_is_told_with_both_values(plain: Path, spoil: Callable[[Path], None], message: str) -> None:
    stage = fitting(plain)
    spoil(plain)
    with pytest.raises(ConfigError, match=message):
        parents.check_parent_fits(parents.load_parent(str(plain)), stage)


def test_a_pipeline_of_the_same_parts_fits(plain: Path) -> None:
    parents.check_parent_fits(parents.load_parent(str(plain)), fitting(plain))
    with pytest.raises(
        ConfigError, match=r"^init_from '.*plain' does not fit this stage: prediction_type: 'epsilon' in [^;]*; give another"
    ):
        parents.check_parent_fits(parents.load_parent(str(plain)), TINY)


def test_everything_that_differs_is_told_together(plain: Path) -> None:
    wide = TINY.model_copy(update={"unet": {**TINY.unet, "block_out_channels": [96, 192]}})
    _add_one("vae/diffusion_pytorch_model.safetensors")(plain)
    with pytest.raises(ConfigError) as caught:
        parents.check_parent_fits(parents.load_parent(str(plain)), wide)
    told = str(caught.value)
    assert all(
        word in told for word in ("prediction_type: 'epsilon' in the parent, 'v_prediction' in the stage", "; vae: ", "; the weights of")
    )
    assert "do not fit the UNet (" in told and "text_encoder" not in told and "noise_schedule" not in told


def test_parts_in_one_folder_are_not_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parents, "hash_content", lambda folder: pytest.fail("the parts were hashed"))
    parents.check_parent_fits(parents.load_parent(str(make_run(tmp_path / "run"))), SMALL)
    parents.check_parent_fits(parents.load_parent("tiny"), TINY)


def test_a_parent_hands_over_all_of_its_weights_or_none(plain: Path) -> None:
    unet = models.build_unet(TINY)
    models.hand_over(unet, parents.load_parent(str(plain)).state_dict(), source="x")
    assert same(unet.state_dict(), parents.load_parent("tiny").state_dict())
    path = plain / "unet" / "diffusion_pytorch_model.safetensors"
    rewrite(path, lambda key: key.replace("conv_in.bias", "conv_inn.bias"), torch.zeros_like)
    with pytest.raises(ConfigError, match=r"\(2 keys\): missing conv_in\.bias; unknown conv_inn\.bias"):
        models.hand_over(unet, parents.load_parent(str(plain)).state_dict(), source="x")
    assert same(unet.state_dict(), parents.load_parent("tiny").state_dict())
