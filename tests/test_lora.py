"""A low-rank change starts as none, is all that trains, and draws the same put in, loaded by diffusers, and read from kohya's names."""

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdlab import ldm, lora, models, places, presets, runs, stages, train
from sdlab.config import ConfigError, Lora, Networks
from sdlab.files import Tensors

WIDE = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"]
PLAIN, STRONG = Lora(rank=4), Lora(rank=4, alpha=10.0, targets=WIDE)
PIPELINES = {"sd15_tiny": StableDiffusionPipeline, "sd20_tiny": StableDiffusionPipeline, "sdxl_tiny": StableDiffusionXLPipeline}


@pytest.fixture(params=PIPELINES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def networks(family: str) -> Networks:
    return presets.get(family).networks


def predict(unet: UNet2DConditionModel) -> Tensor:
    """What a UNet says of two noisy latents."""
    drawn = torch.Generator().manual_seed(0)
    config = unet.config
    added = {}
    if config.addition_embed_type == "text_time":
        width = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        added = {"text_embeds": torch.randn(2, width, generator=drawn), "time_ids": torch.full((2, 6), 64)}
    noisy_latents = torch.randn(2, config.in_channels, 8, 8, generator=drawn)
    prompt_embeds = torch.randn(2, 5, config.cross_attention_dim, generator=drawn)
    return unet(noisy_latents, torch.tensor([10, 700]), prompt_embeds, added_cond_kwargs=added).sample


def trained(networks: Networks, change: Lora) -> UNet2DConditionModel:
    """A UNet with a change that is no longer none."""
    unet = models.build_unet(networks).eval()
    lora.add(unet, change, seed=1)
    drawn = torch.Generator().manual_seed(2)
    for parameter in adapter(unet).values():
        parameter.data = torch.randn(parameter.shape, generator=drawn) / 16  # much more, and attention blows rounding up
    return unet


def adapter(unet: UNet2DConditionModel) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in unet.named_parameters() if parameter.requires_grad}


def plain(unet: UNet2DConditionModel) -> dict[str, Tensor]:
    return {name.replace(".base_layer.", "."): parameter for name, parameter in unet.named_parameters() if not parameter.requires_grad}


def near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_new_change_says_what_the_unet_said_bit_for_bit(networks: Networks) -> None:
    unet = models.build_unet(networks).eval().requires_grad_(False)  # trainable weights go through other kernels
    before = predict(unet)
    lora.add(unet, STRONG, seed=0)
    assert torch.equal(predict(unet), before)


def test_only_the_change_is_trained_and_the_rest_keeps_its_plain_names(networks: Networks) -> None:
    base = models.build_unet(networks)
    shapes = {name: parameter.shape for name, parameter in base.named_parameters()}
    lora.add(base, PLAIN, seed=0)
    assert {name: parameter.shape for name, parameter in plain(base).items()} == shapes
    changed = lora.layers(plain(base), PLAIN)
    assert set(adapter(base)) == {f"{layer}{half}" for layer in changed for half in (lora.DOWN, lora.UP)}
    assert all(any(layer.endswith(target) for target in PLAIN.targets) for layer in changed)


def test_the_change_is_kept_in_float32_whatever_the_unet_is_kept_in() -> None:
    unet = models.build_unet(presets.get("sd15_tiny").networks).to(torch.bfloat16)
    lora.add(unet, PLAIN, seed=0)
    assert {parameter.dtype for parameter in adapter(unet).values()} == {torch.float32}
    assert {parameter.dtype for parameter in plain(unet).values()} == {torch.bfloat16}


def test_a_change_is_counted_without_memory() -> None:
    networks = presets.get("sd15_tiny").networks
    with torch.device("meta"):
        unet = models.build_unet(networks)
        lora.add(unet, PLAIN, seed=0)
    assert all(parameter.is_meta for parameter in unet.parameters())
    assert sum(map(Tensor.numel, adapter(unet).values())) == sum(map(Tensor.numel, adapter(trained(networks, PLAIN)).values()))


def test_the_seed_draws_the_change_and_leaves_the_global_random_state() -> None:
    networks = presets.get("sd15_tiny").networks
    unets = [models.build_unet(networks) for _ in range(3)]
    state = torch.get_rng_state()
    for unet, seed in zip(unets, (5, 5, 6), strict=True):
        lora.add(unet, PLAIN, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    one, same, other = (torch.cat([parameter.flatten() for parameter in adapter(unet).values()]) for unet in unets)
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize(("family", "checkpointing"), [("sd15_tiny", False), ("sd15_tiny", True), ("sdxl_tiny", False)])
def test_a_few_steps_lower_the_loss_and_move_nothing_else(family: str, checkpointing: bool) -> None:
    unet = models.build_unet(presets.get(family).networks).train()
    lora.add(unet, STRONG, seed=0)
    if checkpointing:
        unet.enable_gradient_checkpointing()
    before = {name: parameter.clone() for name, parameter in plain(unet).items()}
    optimizer = torch.optim.AdamW(adapter(unet).values(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = predict(unet).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(torch.equal(parameter, before[name]) for name, parameter in plain(unet).items())


@pytest.mark.parametrize("change", [PLAIN, STRONG], ids=["plain", "strong"])
def test_the_change_put_into_the_weights_draws_what_the_change_beside_them_draws(networks: Networks, change: Lora) -> None:
    unet, whole = trained(networks, change), models.build_unet(networks).eval()
    before = predict(whole)
    models.hand_over(whole, lora.merged(plain(unet), adapter(unet), change), source="a test")
    assert near(predict(whole), predict(unet)) and not near(predict(whole), before)


def test_weights_on_disk_are_read_one_by_one_when_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unet = trained(presets.get("sd15_tiny").networks, PLAIN)
    save_file(plain(unet), tmp_path / "base.safetensors")
    base = Tensors([tmp_path / "base.safetensors"])
    read: list[str] = []
    take: Callable[[Tensors, str], Tensor] = Tensors.__getitem__
    monkeypatch.setattr(Tensors, "__getitem__", lambda self, name: read.append(name) or take(self, name))
    merged: Any = lora.merged(base, adapter(unet), PLAIN)
    shapes = merged.shapes()
    assert list(merged) == list(base) and {name: tensor.shape for name, tensor in shapes.items()} == {
        name: tensor.shape for name, tensor in base.shapes().items()
    }
    assert not read
    name = f"{lora.layers(shapes, PLAIN)[0]}.weight"
    assert not torch.equal(merged[name], take(base, name)) and torch.equal(merged["conv_in.weight"], take(base, "conv_in.weight"))
    assert read == [name, "conv_in.weight"]


def test_a_change_of_another_unet_is_refused_with_its_keys() -> None:
    unet = trained(presets.get("sd15_tiny").networks, PLAIN)
    first, *_, last = adapter(unet)
    spoilt = {**adapter(unet), first: torch.zeros(8, 32), "nowhere.to_q.lora_A.default.weight": torch.zeros(4, 32)}
    del spoilt[last]
    with pytest.raises(ConfigError) as refused:
        lora.merged(plain(unet), spoilt, PLAIN)
    assert "(3 keys)" in str(refused.value)
    assert all(part in str(refused.value) for part in (f"missing {last}", "unknown nowhere.to_q", f"{first} is (8, 32), not (4, 32)"))
    with pytest.raises(ConfigError, match="does not fit"):
        lora.merged(plain(unet), adapter(unet), Lora(rank=8))


@pytest.mark.parametrize(
    ("target", "told"), [("to_qq", "did you mean 'to_q'"), ("conv1", "known are"), ("to_out", "did you mean 'to_out.0'")]
)
def test_a_target_that_is_no_layer_is_refused_with_the_nearest(target: str, told: str) -> None:
    unet = models.build_unet(presets.get("sd15_tiny").networks)
    with pytest.raises(ConfigError, match=f"{target!r} is no layer.*{told}"):
        lora.add(unet, Lora(targets=["to_k", target]), seed=0)
    assert all(parameter.requires_grad for parameter in unet.parameters())


def test_both_files_loaded_by_diffusers_draw_what_was_trained(family: str, networks: Networks, tmp_path: Path) -> None:
    unet = trained(networks, STRONG)
    files = lora.write(tmp_path / "lora", adapter(unet), STRONG, networks=networks, metadata={"modelspec.title": "a test"})
    assert [path.name for path in files] == ["pytorch_lora_weights.safetensors", "kohya.safetensors"]
    for given in ({}, {"weight_name": files[1].name}):
        base = models.build_unet(networks).eval()
        before = predict(base)
        pipeline = PIPELINES[family]
        others = {name: None for name, part in inspect.signature(pipeline).parameters.items() if part.default is part.empty}
        pipeline(**{**others, "unet": base}).load_lora_weights(tmp_path / "lora", **given)
        assert near(predict(base), predict(unet)) and not near(predict(base), before)


def test_the_files_say_what_they_are(networks: Networks, family: str, tmp_path: Path) -> None:
    files = lora.write(tmp_path, adapter(trained(networks, STRONG)), STRONG, networks=networks, metadata={"modelspec.title": "a test"})
    peft, kohya = (safe_open(path, framework="pt").metadata() for path in files)
    assert json.loads(peft["lora_adapter_metadata"]) == {"unet.r": 4, "unet.lora_alpha": 10.0, "unet.target_modules": WIDE}
    assert kohya["ss_network_module"] == "networks.lora" and (kohya["ss_network_dim"], kohya["ss_network_alpha"]) == ("4", "10.0")
    told = {"sd15_tiny": ("sd_v1", "False"), "sd20_tiny": ("sd_v2", "True"), "sdxl_tiny": ("sdxl_base_v1-0", "False")}
    assert (kohya["ss_base_model_version"], kohya["ss_v2"]) == told[family]
    assert peft["modelspec.title"] == kohya["modelspec.title"] == "a test"


def test_kohyas_names_are_those_of_the_published_unets(tmp_path: Path) -> None:
    blocks = {}
    for family in ("sd15_tiny", "sdxl_tiny"):
        networks = presets.get(family).networks
        _, path = lora.write(tmp_path / family, adapter(trained(networks, PLAIN)), PLAIN, networks=networks)
        tensors = load_file(path)
        assert all(tensor == 4 for name, tensor in tensors.items() if name.endswith(".alpha"))
        blocks[family] = {name.split("_transformer_blocks")[0] for name in tensors}
    of_sdxl = ["input_blocks_4_1", "input_blocks_5_1", "input_blocks_7_1", "input_blocks_8_1", "middle_block_1"]
    assert blocks["sdxl_tiny"] == {f"lora_unet_{block}" for block in (*of_sdxl, *(f"output_blocks_{number}_1" for number in range(6)))}
    of_sd = [f"down_blocks_{block}_attentions_{place}" for block in (0, 1, 2) for place in (0, 1)]
    of_sd += [f"up_blocks_{block}_attentions_{place}" for block in (1, 2, 3) for place in (0, 1, 2)]
    assert blocks["sd15_tiny"] == {f"lora_unet_{block}" for block in (*of_sd, "mid_block_attentions_0")}


def test_kohyas_names_of_sdxl_are_those_of_a_single_file_however_deep_the_blocks(tmp_path: Path) -> None:
    family = presets.get("sdxl_tiny").networks
    networks = family.model_copy(update={"unet": {**family.unet, "layers_per_block": [2, 1, 3]}})
    unet = trained(networks, PLAIN)
    layers = {plain(unet)[f"{layer}.weight"].data_ptr(): layer for layer in lora.layers(plain(unet), PLAIN)}
    kohya = load_file(lora.write(tmp_path, adapter(unet), PLAIN, networks=networks)[1])
    for name, weight in ldm.to_ldm("unet", plain(unet), networks=networks).items():
        if weight.data_ptr() in layers:
            theirs = f"lora_unet_{name.removeprefix('model.diffusion_model.').removesuffix('.weight').replace('.', '_')}"
            assert torch.equal(kohya.pop(f"{theirs}.lora_down.weight"), adapter(unet)[layers[weight.data_ptr()] + lora.DOWN])
    assert not any("lora_down" in name for name in kohya)


# Runs


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, scenes_dir: Path) -> tuple[Path, Callable[..., dict[str, Any]]]:
    """A run of three steps that changes the built-in model, and how to run some in other folders."""
    mine = tmp_path_factory.mktemp("preset") / "mine.yaml"
    mine.write_text(
        "extends: tiny\nstages: {lora_32: {resolution: 32, parent: stage1_32, global_batch_size: 4, micro_batch_size: 4, "
        "learning_rate: 1e-2, schedule_steps: 9, ema_decay: 0.9, lora: {rank: 2, alpha: 4}}}\n"
    )

    def run(folder: Path, **changes: Any) -> dict[str, Any]:
        given = {"preset": str(mine), "stage": "lora_32", "data_dir": str(scenes_dir), "init_from": "tiny", "max_steps": 3, "log_every": 1}
        return train.train(stages.configure(**{**given, **changes}), folder)

    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(folder)["status"] == "done"
    return folder, run


def test_a_run_keeps_its_change_alone_and_resumes_bit_for_bit(tuned, tmp_path: Path) -> None:
    whole, run = tuned
    for steps in (1, 2, 3):
        run(tmp_path / "run", max_steps=steps)
    ours, theirs = (runs.find_checkpoint(folder) for folder in (tmp_path / "run", whole))
    for name in ("weights", "ema", "exp_avg", "exp_avg_sq"):
        one, other = load_file(ours / f"{name}.safetensors"), load_file(theirs / f"{name}.safetensors")
        assert one.keys() == other.keys() and all(key.endswith((lora.DOWN, lora.UP)) for key in one)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_its_export_and_its_change_put_into_the_parent_are_one_model(tuned) -> None:
    whole, _ = tuned
    loaded, exported = models.load(str(whole), weights="ema"), models.load(str(whole / "export"), weights="ema")
    assert all(torch.equal(tensor, exported.unet.state_dict()[key]) for key, tensor in loaded.unet.state_dict().items())
    parent = models.load("tiny", weights="ema").unet
    others = {name: None for name, part in inspect.signature(StableDiffusionPipeline).parameters.items() if part.default is part.empty}
    StableDiffusionPipeline(**{**others, "unet": parent}).load_lora_weights(whole / "export/lora")
    torch.testing.assert_close(predict(parent), predict(loaded.unet), rtol=0, atol=1e-5)
    assert not torch.equal(predict(models.load("tiny").unet), predict(loaded.unet))


def test_a_change_of_a_parent_that_is_another_one_now_is_refused(tuned, tmp_path: Path) -> None:
    _, run = tuned
    parent = shutil.copytree(places.TINY_DIR, tmp_path / "parent")
    run(tmp_path / "run", init_from=str(parent), max_steps=1)
    path = parent / "unet/diffusion_pytorch_model.safetensors"
    save_file({key: tensor + 1 for key, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"low-rank change of .*parent, which holds other weights by now; its export/ is whole"):
        models.load(str(tmp_path / "run"), weights="auto")
    assert models.load(str(tmp_path / "run/export"), weights="auto").step == 1


@pytest.mark.parametrize("name", [lora.PEFT_FILE, lora.KOHYA_FILE])
def test_a_change_alone_is_no_model(tuned, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is a low-rank change alone; give the model that it changes"):
        models.load(str(tuned[0] / "export/lora" / name), weights="auto")


def test_a_change_without_something_to_change_is_refused(tuned, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give init_from"):
        tuned[1](tmp_path / "run", init_from=None)
