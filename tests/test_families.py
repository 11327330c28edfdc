"""The families beside the built-in one train, draw and refuse as they should: on twins, which differ from them in nothing but size."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from conftest import in_ci
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.training_utils import compute_snr
from PIL import Image
from pipelines import change, rewrite
from safetensors.torch import load_file
from test_launch import left, mark
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sdlab import batches, drawing, models, parts, places, predictor, prepare, presets, runs, sample, stages, state, stored, train
from sdlab.cache import open_cache
from sdlab.config import ConfigError, Networks, TrainConfig

__all__ = ["mark"]
FAMILIES = ("sd15_tiny", "sd20_tiny", "sdxl_tiny")
FIRST = {"sd15_tiny": "pretrain_256", "sd20_tiny": "pretrain_256", "sdxl_tiny": "stage1_256"}
PROMPTS = ["a large owl on a pink background", "a cat above a rocket on a yellow background"]
QUICK = {"max_steps": 2, "log_every": 1, "precision": "32-true", "global_batch_size": 8, "micro_batch_size": 8}
WIDTHS = [encoder["hidden_size"] for encoder in presets.get("sdxl_tiny").networks.text_encoders]
POOLED_WIDTH = presets.get("sdxl_tiny").networks.text_encoders[1]["projection_dim"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def loaded_once() -> Iterator[None]:
    """Loading the same frozen parts for every test would be most of the time."""
    with pytest.MonkeyPatch.context() as patched:
        load, loaded = parts.load_frozen, {}

        def once(networks: Networks) -> parts.Frozen:
            name = networks.model_dump_json(exclude={"prediction_type"})
            if name not in loaded:
                loaded[name] = load(networks)
            return loaded[name]

        patched.setattr(parts, "load_frozen", once)
        yield


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A folder of scenes for a family, made when it is first asked for."""

    @functools.cache
    def folder(family: str, resolutions: tuple[int, ...], limit: int, text_states: bool) -> str:
        data_dir = tmp_path_factory.mktemp("data") / "scenes"
        given = {"preset": family, "source": "scenes", "resolution": list(resolutions), "limit": limit, "text_states": text_states}
        prepare.prepare(prepare.configure(**given, data_dir=str(data_dir), num_workers=0))
        return str(data_dir)

    def of(family: str, *, resolutions: tuple[int, ...] = (64,), limit: int = 12, text_states: bool = True) -> str:
        return folder(family.replace("_original", ""), resolutions, limit, text_states)

    return of


@pytest.fixture(scope="module")
def trained(prepared: Callable[..., str], scratch: Path) -> Callable[[str], Path]:
    """The run of a family's first stage, made when it is first asked for."""

    @functools.cache
    def run(family: str) -> Path:
        overrides = {"learning_rate": 1e-3, "warmup_steps": 0}
        config = stages.configure(preset=family, stage=FIRST[family], data_dir=prepared(family), overrides=overrides, **QUICK)
        folder = scratch / "trained" / family
        assert train.train(config, folder)["status"] == "done"
        return folder

    return run


def start(config: TrainConfig, folder: Path) -> state.State:
    """What a run holds before its first step."""
    return state.restore(config, state.make_fabric(config), folder)


def data_of(config: TrainConfig) -> batches.Batches:
    """What a run trains on."""
    frozen = parts.load_frozen(config.networks)
    cache = open_cache(config.data_dir, config.recipe.resolution)
    asked: dict[str, Any] = {"micro_batch_size": config.micro_batch_size, "seed": config.seed}
    return batches.Batches(
        cache, config.recipe, config.networks, scaling_factor=frozen.scaling_factor, encode_text=frozen.encode_text, **asked
    )


# As diffusers' training scripts


@pytest.mark.parametrize(
    ("family", "stage", "prediction_type", "min_snr_gamma"),
    [
        *((family, FIRST[family], "epsilon", None) for family in FAMILIES),
        ("sd20_original_tiny", "v_768", "v_prediction", None),
        ("sd15_tiny", FIRST["sd15_tiny"], "epsilon", 5.0),
        ("sd20_original_tiny", "v_768", "v_prediction", 5.0),
    ],
)
def test_the_loss_is_that_of_diffusers_training_scripts(
    family: str, stage: str, prediction_type: str, min_snr_gamma: float | None, prepared: Callable[..., str], tmp_path: Path
) -> None:
    overrides = {"parent": None, "resolution": 64, "caption_drop_prob": 0.5, "condition_drop": "together", "min_snr_gamma": min_snr_gamma}
    config = stages.configure(preset=family, stage=stage, data_dir=prepared(family, text_states=False), overrides=overrides, **QUICK)
    assert config.networks.prediction_type == prediction_type
    made, data = start(config, tmp_path / "run"), data_of(config)
    [batch] = data.step(3)
    assert batch.dropped.any() and not batch.dropped.all()
    with torch.no_grad():
        ours, theirs = train._losses(made, batch).mean(), scripts_loss(config, made.module, batch, data)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-6)


def scripts_loss(config: TrainConfig, ours: torch.nn.Module, batch: batches.Batch, data: batches.Batches) -> torch.Tensor:
    """The mean loss of a batch with the same rows, noise, timesteps and dropped captions, in diffusers' words and classes."""
    networks = config.networks
    unet = diffusers.UNet2DConditionModel(**networks.unet)
    unet.load_state_dict(ours.state_dict())
    noise_scheduler = diffusers.DDPMScheduler(**networks.noise_schedule.model_dump(), prediction_type=networks.prediction_type)
    rows, captions = data.cache.rows(batch.indices.numpy()), data.cache.captions(batch.indices.tolist())
    shape = (2, networks.unet["in_channels"], 8, 8)
    drawn = [batches.slot_generator(config.seed, 3, slot).standard_normal(shape, np.float32) for slot in range(len(captions))]
    posterior_noise, noise = torch.from_numpy(np.stack(drawn, axis=1))
    posterior = DiagonalGaussianDistribution(rows["moments"])
    latents = (posterior.mean + posterior.std * posterior_noise) * networks.vae["scaling_factor"]
    captions = ["" if dropped else caption for dropped, caption in zip(batch.dropped[:, 0], captions, strict=True)]
    prompt_embeds, pooled = scripts_text(networks, captions)
    add_time_ids = torch.tensor(np.concatenate([rows[name] for name in ("original_size", "crop", "target_size")], axis=1))
    added = None if pooled is None else {"text_embeds": pooled, "time_ids": add_time_ids}
    noisy_latents = noise_scheduler.add_noise(latents, noise, batch.timesteps)
    model_pred = unet(noisy_latents, batch.timesteps, prompt_embeds, added_cond_kwargs=added, return_dict=False)[0]
    velocity = networks.prediction_type == "v_prediction"
    target = noise_scheduler.get_velocity(latents, noise, batch.timesteps) if velocity else noise
    loss = torch.nn.functional.mse_loss(model_pred.float(), target.float(), reduction="none").mean(dim=(1, 2, 3))
    if config.recipe.min_snr_gamma is None:
        return loss.mean()
    snr = compute_snr(noise_scheduler, batch.timesteps)
    return (loss * snr.clamp(max=config.recipe.min_snr_gamma) / (snr + 1 if velocity else snr)).mean()


def scripts_text(networks: Networks, captions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Text states as the scripts for SD 1 and 2 and for SDXL take them from the encoders; zeros for "" as SDXL's pipeline wants them."""
    tokenizers, encoders = loaded_plainly(places.frozen_folder(networks))
    options: dict[str, Any] = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    ids = [one(list(captions), max_length=one.model_max_length, **options).input_ids for one in tokenizers]
    if len(encoders) == 1:
        return encoders[0](ids[0], return_dict=False)[0], None
    said = [encoder(some, output_hidden_states=True) for encoder, some in zip(encoders, ids, strict=True)]
    given = torch.tensor([bool(caption) for caption in captions])
    prompt_embeds = torch.cat([one.hidden_states[-2] for one in said], dim=-1)
    return prompt_embeds * given[:, None, None], said[1][0] * given[:, None]


@functools.cache
def loaded_plainly(folder: Path) -> tuple[list[Any], list[Any]]:
    """The tokenizers and text encoders in a folder."""
    ends = ["", "_2"] if (folder / "text_encoder_2").is_dir() else [""]
    kinds = zip((CLIPTextModel, CLIPTextModelWithProjection), ends, strict=False)
    encoders = [kind.from_pretrained(folder / f"text_encoder{end}") for kind, end in kinds]
    return [CLIPTokenizer.from_pretrained(folder / f"tokenizer{end}") for end in ends], encoders


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_text_states_are_those_of_the_encoders_to_float16(family: str, prepared: Callable[..., str]) -> None:
    config = stages.configure(preset=family, stage=FIRST[family], data_dir=prepared(family), **QUICK)
    data = data_of(config)
    cached = data.cache.rows(range(12))
    with torch.no_grad():
        prompt_embeds, pooled = scripts_text(config.networks, data.cache.captions(range(12)))
    assert torch.allclose(cached["prompt_embeds"], prompt_embeds, atol=1e-5, rtol=1e-3)
    assert ("pooled_prompt_embeds" in cached) == (family == "sdxl_tiny")
    assert pooled is None or torch.allclose(cached["pooled_prompt_embeds"], pooled, atol=1e-5, rtol=1e-3)


# The sizes of SDXL


def test_odd_sizes_reach_the_unet_unchanged_in_mixed_precision(prepared: Callable[..., str], tmp_path: Path) -> None:
    """In bfloat16, 1365 would be 1368."""
    config = stages.configure(
        preset="sdxl_tiny", stage="stage1_256", data_dir=prepared("sdxl_tiny"), **{**QUICK, "precision": "bf16-mixed"}
    )
    made, data = start(config, tmp_path / "run"), data_of(config)
    sizes = torch.tensor([[1365, 1021, 37, 101, 64, 64], [1021, 1365, 0, 3, 2047, 1023]]).repeat(4, 1)
    seen = []
    made.module.add_time_proj.register_forward_hook(lambda module, given, embedded: seen.append((given[0], embedded)))
    train._losses(made, dataclasses.replace(data.step(1)[0], add_time_ids=sizes))
    [(given, embedded)] = seen
    assert torch.equal(given, sizes.flatten())
    width = config.networks.unet["addition_time_embed_dim"]
    angles = sizes.flatten()[:, None] * torch.exp(-math.log(10_000) * torch.arange(width // 2) / (width // 2))
    assert embedded.dtype == torch.float32 and torch.allclose(embedded, torch.cat([angles.cos(), angles.sin()], dim=1), atol=1e-3)


@pytest.mark.parametrize(("crop", "targets"), [("random", {(64, 64)}), ("buckets", {(128, 32), (32, 128)})])
def test_sizes_are_height_before_width_of_the_original_the_crop_and_the_target(
    crop: str, targets: set[tuple[int, int]], tmp_path: Path
) -> None:
    shapes = {"random": [(1365, 1021), (1021, 1365)], "buckets": [(1365, 500), (500, 1365)]}[crop]
    (tmp_path / "pictures").mkdir()
    for number, (height, width) in enumerate(4 * shapes):
        Image.new("RGB", (width, height), (number, 0, 0)).save(tmp_path / "pictures" / f"{number}.png")
        (tmp_path / "pictures" / f"{number}.txt").write_text("a picture")
    given = {"preset": "sdxl_tiny", "source": str(tmp_path / "pictures"), "data_dir": str(tmp_path / "data"), "resolution": [64]}
    prepare.prepare(prepare.configure(**given, crop=crop, num_workers=0))
    overrides = {"condition_drop": "together"}
    config = stages.configure(preset="sdxl_tiny", stage="stage1_256", data_dir=str(tmp_path / "data"), overrides=overrides, **QUICK)
    data = data_of(config)
    steps = [batch for step in range(1, 5) for batch in data.step(step)]
    for batch in steps:
        rows = data.cache.rows(batch.indices.numpy())
        named = [torch.tensor(rows[name]) for name in ("original_size", "crop", "target_size")]
        assert batch.add_time_ids.dtype == torch.int64 and torch.equal(batch.add_time_ids, torch.cat(named, dim=1).long())
        assert [8 * side for side in batch.noisy_latents.shape[2:]] == batch.add_time_ids[0, 4:].tolist()
    sizes = torch.cat([batch.add_time_ids for batch in steps])
    (height, width), (top, left), (target_height, target_width) = sizes.T.view(3, 2, -1)
    assert {*zip(height.tolist(), width.tolist(), strict=True)} == set(shapes)
    assert {*zip(target_height.tolist(), target_width.tolist(), strict=True)} == targets
    assert not torch.where(height * target_width > width * target_height, left, top).any()
    assert top.any() and left.any()


# What is dropped


def many(prepared: Callable[..., str], *, steps: int, **recipe: Any) -> tuple[Any, batches.Batches]:
    """Many batches of SDXL's first stage as one, and where they come from."""
    config = stages.configure(preset="sdxl_tiny", stage="stage1_256", data_dir=prepared("sdxl_tiny"), overrides=recipe, **QUICK)
    larger = config.recipe.model_copy(update={"global_batch_size": 96})
    data = data_of(config.model_copy(update={"recipe": larger, "micro_batch_size": 96}))
    drawn = [data.step(step)[0] for step in range(1, steps + 1)]
    told = {name: torch.cat([getattr(batch, name) for batch in drawn]) for name in ("dropped", "add_time_ids", "indices")}
    return {**told, "text": parts.join([batch.text for batch in drawn])}, data


def test_dropping_each_leaves_out_every_condition_on_its_own_as_often_as_asked(prepared: Callable[..., str]) -> None:
    told, data = many(prepared, steps=20, caption_drop_prob=0.3, condition_drop="each")
    gone = told["add_time_ids"] < 0
    assert torch.equal(gone[:, ::2], gone[:, 1::2]) and (told["add_time_ids"][gone] == -1).all()
    dropped = torch.cat([told["dropped"], gone[:, ::2]], dim=1).double()
    deviation = math.sqrt(0.3 * 0.7 / len(dropped))
    assert dropped.shape == (1920, 5) and (dropped.mean(dim=0) - 0.3).abs().max() < 4 * deviation
    correlation = torch.corrcoef(dropped.T) - torch.eye(5, dtype=torch.double)
    assert correlation.abs().max() < 4 / math.sqrt(len(dropped))
    rows = data.cache.rows(told["indices"].numpy())
    assert_dropped(told["text"], rows, first=told["dropped"][:, 0], second=told["dropped"][:, 1])


def assert_dropped(text: parts.TextStates, rows: dict[str, torch.Tensor], *, first: torch.Tensor, second: torch.Tensor) -> None:
    """The states of each encoder are zero exactly where they were dropped; the pooled ones go with the second."""
    kept = torch.stack([~first, ~second], dim=1).repeat_interleave(torch.tensor(WIDTHS), dim=1)
    assert torch.equal(text.prompt_embeds, rows["prompt_embeds"] * kept[:, None])
    assert torch.equal(text.pooled_prompt_embeds, rows["pooled_prompt_embeds"] * ~second[:, None])


def test_dropping_together_leaves_out_the_whole_caption_and_no_sizes(prepared: Callable[..., str]) -> None:
    told, data = many(prepared, steps=4, caption_drop_prob=0.3, condition_drop="together")
    assert (told["add_time_ids"] >= 0).all()
    first, second = told["dropped"].T
    assert torch.equal(first, second) and 0.2 < first.double().mean() < 0.4
    assert_dropped(told["text"], data.cache.rows(told["indices"].numpy()), first=first, second=second)


@pytest.mark.parametrize("kind", ["built", "loaded"])
def test_dropped_sizes_are_zeros_to_the_unet_and_not_the_embedding_of_zero(kind: str, trained: Callable[[str], Path]) -> None:
    networks = presets.get("sdxl_tiny").networks
    unet = models.build_unet(networks) if kind == "built" else models.load(str(trained("sdxl_tiny")), weights="auto").unet
    add_time_ids = torch.tensor([[-1, -1, 0, 0, 64, 64], [1365, 1021, -1, -1, -1, -1]])
    seen = []
    unet.add_embedding.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    text = parts.TextStates(torch.zeros(2, 77, sum(WIDTHS)), torch.zeros(2, POOLED_WIDTH))
    with torch.no_grad():
        unet(torch.zeros(2, 4, 8, 8), torch.tensor([1, 2]), **text.conditioning(add_time_ids))
    embedded = seen[0][:, POOLED_WIDTH:].view(2, 6, -1)
    plain = get_timestep_embedding(add_time_ids.flatten(), embedded.shape[2], flip_sin_to_cos=True, downscale_freq_shift=0)
    said = add_time_ids >= 0
    assert torch.equal(embedded[said], plain.view_as(embedded)[said]) and embedded[said].any(dim=1).all()
    assert not embedded[~said].any()


# What stands for no caption


@pytest.mark.parametrize("text_states", [True, False], ids=["cached", "encoded in training"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dropped_caption_is_zeros_for_sdxl_and_what_is_said_of_the_empty_text_for_others(
    family: str, text_states: bool, prepared: Callable[..., str]
) -> None:
    data_dir = prepared(family, text_states=text_states)
    overrides = {"caption_drop_prob": 1.0, "condition_drop": "together"}
    config = stages.configure(preset=family, stage=FIRST[family], data_dir=data_dir, overrides=overrides, **QUICK)
    data = data_of(config)
    assert data.cache.has_text_states == text_states == ("prompt_embeds" in data.cache.null)
    text = data.step(1)[0].text
    assert_null(text, config.networks, family)


def assert_null(text: parts.TextStates, networks: Networks, family: str) -> None:
    if family == "sdxl_tiny":
        assert text.pooled_prompt_embeds.shape[1:] == (POOLED_WIDTH,) and text.prompt_embeds.shape[1:] == (77, sum(WIDTHS))
        assert not text.prompt_embeds.any() and not text.pooled_prompt_embeds.any()
    else:
        with torch.no_grad():
            empty, _ = scripts_text(networks, [""])
        assert text.pooled_prompt_embeds is None and empty.any()
        assert torch.allclose(text.prompt_embeds, empty.expand_as(text.prompt_embeds), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_empty_negative_prompt_is_what_a_dropped_caption_was(family: str, trained: Callable[[str], Path]) -> None:
    model = models.load(str(trained(family)), weights="auto")
    shots = [drawing.Shot("a cat", seed, 2.0) for seed in (0, 1)]
    text = predictor.Forward(model, drawing.configure(model, batch_size=2), shots).text(shots, predictor.BOTH)
    assert_null(text[[2, 3]], model.networks, family)
    assert text.prompt_embeds[0].any(dim=1).all()


# Pictures and pipelines


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_those_of_diffusers_own_pipeline_on_the_exported_folder(family: str, trained: Callable[[str], Path]) -> None:
    folder = trained(family) / "export"
    kind = diffusers.StableDiffusionXLPipeline if family == "sdxl_tiny" else diffusers.StableDiffusionPipeline
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    assert type(pipeline) is kind and type(pipeline.scheduler) is diffusers.DDIMScheduler
    pipeline.set_progress_bar_config(disable=True)
    run, export = (models.load(str(source), weights="auto") for source in (trained(family), folder))
    settings = {"guidance_scale": 3.0, "num_inference_steps": 3}
    asked = {"latents": predictor.draw_noise(run, [5, 3]), "height": run.resolution, "width": run.resolution, **settings}
    latents = pipeline(PROMPTS, output_type="latent", **asked).images
    with torch.no_grad():
        images = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample / 2 + 0.5
    for model in (run, export):
        our_images, our_latents = drawn(model, settings)
        assert (our_latents - latents).abs().max() < 1e-3 * latents.std()
        assert np.abs(our_images / 255 - images.clamp(0, 1).numpy()).max() < 0.5 / 255 + 1e-3


def drawn(model: models.TextToImage, settings: dict[str, Any]) -> tuple[np.ndarray, torch.Tensor]:
    """Pictures of two prompts, and the latents that they were made of."""
    latents = []
    hook = model.frozen.vae.post_quant_conv.register_forward_pre_hook(lambda module, given: latents.append(given[0]))
    images = sample.sample(model, PROMPTS, seeds=[5, 3], solver="ddim", batch_size=2, **settings)
    hook.remove()
    return images, latents[0] * model.frozen.scaling_factor


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_text_encoders_have_the_key_names_that_older_loaders_need(family: str, trained: Callable[[str], Path]) -> None:
    folders = sorted((trained(family) / "export").glob("text_encoder*"))
    assert [folder.name for folder in folders] == ["text_encoder", "text_encoder_2"][: 2 if family == "sdxl_tiny" else 1]
    for folder in folders:
        keys = set(load_file(folder / "model.safetensors"))
        assert "text_model.embeddings.token_embedding.weight" in keys
        others = {key for key in keys if not key.startswith("text_model.")}
        assert others == ({"text_projection.weight"} if folder.name == "text_encoder_2" else set())


# Stages


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """What the next stage starts from: the average where there is one."""
    found = runs.find_checkpoint(run)
    return load_file(next(path for path in (found / "ema.safetensors", found / "weights.safetensors") if path.is_file()))


CHAINS = {
    "sd15_tiny": [("v1_1_512", 128, "epsilon")],
    "sd20_original_tiny": [("base_512", 128, "epsilon"), ("v_768_start", 192, "v_prediction"), ("v_768", 192, "v_prediction")],
    "sdxl_tiny": [("stage2_512", 128, "epsilon")],
}


@pytest.fixture(scope="module")
def chained(prepared: Callable[..., str], trained: Callable[[str], Path], scratch: Path) -> Callable[[str], list[Path]]:
    """The runs of a family's stages, each from the one before, in steps that move next to nothing."""

    @functools.cache
    def follow(family: str) -> list[Path]:
        made = [trained(family.replace("_original", ""))]
        still = {"learning_rate": 1e-12, "weight_decay": 0.0, "warmup_steps": 0}
        counts = {**QUICK, "max_steps": 1, "global_batch_size": 2, "micro_batch_size": 2}
        data_dir = prepared(family, resolutions=tuple(sorted({resolution for _, resolution, _ in CHAINS[family]})), limit=2)
        for stage, *_ in CHAINS[family]:
            given = {"preset": family, "stage": stage, "data_dir": data_dir, "init_from": str(made[-1]), "overrides": still}
            made.append(scratch / "chained" / family / stage)
            assert train.train(stages.configure(**given, **counts), made[-1])["status"] == "done"
        return made

    return follow


@pytest.mark.parametrize("family", CHAINS)
def test_stages_follow_each_other_through_resolutions_and_prediction_types(family: str, chained: Callable[[str], list[Path]]) -> None:
    made = chained(family)
    for (stage, resolution, prediction_type), before, run in zip(CHAINS[family], made, made[1:], strict=False):
        parent, child = weights_of(before), load_file(runs.find_checkpoint(run) / "weights.safetensors")
        assert parent.keys() == child.keys() and all(torch.allclose(parent[name], child[name], atol=1e-6) for name in parent)
        for found in (stored.find(str(run)), stored.find(str(run / "export"))):
            assert (found.step, found.resolution, found.networks.prediction_type) == (1, resolution, prediction_type)
        assert runs.read_config(run).stage == stage


def test_a_parent_has_to_say_what_the_stage_before_learned(prepared: Callable[..., str], chained: Callable[[str], list[Path]]) -> None:
    """The first stage that says v starts from one that says epsilon; the next one does not."""
    _, base, *_, last = chained("sd20_original_tiny")
    given = {"preset": "sd20_original_tiny", "data_dir": prepared("sd20_original_tiny", resolutions=(128, 192), limit=2)}
    for stage, parent, there, here in (("v_768_start", last, "v_prediction", "epsilon"), ("v_768", base, "epsilon", "v_prediction")):
        with pytest.raises(ConfigError, match=f"prediction_type: '{there}' in the parent, '{here}' in the stage"):
            stages.configure(stage=stage, init_from=str(parent), **given, **QUICK)


EVERY = [(name, stage) for name in presets.names() if name.endswith("_tiny") for stage in presets.get(name).stages]


@pytest.fixture(scope="module")
def stepped(prepared: Callable[..., str], scratch: Path) -> Callable[[str, str], Path]:
    """A run of one step of a stage, which starts from one of the stage before it."""

    @functools.cache
    def run(family: str, stage: str) -> Path:
        plain = family.replace("_finetune", "")
        if stage in presets.get(plain).stages and plain != family:
            return run(plain, stage)
        recipe = presets.get(family).stages[stage]
        parent = {} if recipe.parent is None else {"init_from": str(run(family, recipe.parent))}
        folder = scratch / "stepped" / family / stage
        data_dir = prepared(plain, resolutions=(recipe.resolution,), limit=2)
        counts = {**QUICK, "max_steps": 1, "global_batch_size": 2, "micro_batch_size": 1}
        config = stages.configure(preset=family, stage=stage, data_dir=data_dir, **parent, **counts)
        assert train.train(config, folder)["status"] == "done"
        shutil.rmtree(folder / "export")  # a third of a run's bytes
        return folder

    return run


@in_ci
@pytest.mark.parametrize(("family", "stage"), EVERY)
def test_every_stage_trains_a_step_and_hands_on(family: str, stage: str, stepped: Callable[[str, str], Path]) -> None:
    assert stored.find(str(stepped(family, stage))).step == 1


@in_ci
def test_two_ranks_change_no_more_than_rounding(prepared: Callable[..., str], tmp_path: Path, mark: str) -> None:
    given = {"preset": "sdxl_tiny", "stage": "stage1_256", "data_dir": prepared("sdxl_tiny"), **QUICK, "micro_batch_size": 2}
    for devices in (1, 2):
        train.train(stages.configure(**given, devices=devices), tmp_path / str(devices))
    one, two = ([(row["loss"], row["caption_drop_rate"]) for row in runs.read_metrics(tmp_path / name)] for name in "12")
    assert np.array(two) == pytest.approx(np.array(one), rel=1e-5)
    ours, theirs = (weights_of(tmp_path / name) for name in "12")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)
    assert not left(mark)


# What does not fit


def of_another_family(family: str, part: str) -> Callable[[Path], None]:
    """Puts a part of another family in its place."""

    def spoil(folder: Path) -> None:
        shutil.rmtree(folder / part)
        shutil.copytree(places.frozen_folder(presets.get(family).networks) / part, folder / part)

    return spoil


def in_config(part: str, **values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / part / "config.json", **values)


def without(*names: str) -> Callable[[Path], None]:
    return lambda folder: [shutil.rmtree(folder / name) for name in names]


def spoiled(family: str, folder: Path, spoil: Callable[[Path], Any]) -> str:
    """A preset file of a family whose frozen parts were spoiled."""
    shutil.copytree(places.frozen_folder(presets.get(family).networks), folder / "parts")
    spoil(folder / "parts")
    (folder / "mine.yaml").write_text(json.dumps({"extends": family, "networks": {"frozen": str(folder / "parts")}}))
    return str(folder / "mine.yaml")


@pytest.fixture
def nothing_built(prepared: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no network may be loaded, and no UNet made but for its shapes; the data are there already."""
    for family in FAMILIES:
        prepared(family)
    build = models.build_unet

    def only_shapes(networks: Networks, **given: Any) -> Any:
        assert torch.get_default_device().type == "meta", "a UNet was made"
        return build(networks, **given)

    monkeypatch.setattr(models, "build_unet", only_shapes)
    for kind in (diffusers.AutoencoderKL, CLIPTextModel, CLIPTextModelWithProjection):
        monkeypatch.setattr(kind, "from_pretrained", lambda folder, **given: pytest.fail(f"{folder} was loaded"))


WRONG = {
    "a VAE of another family": ("sd15_tiny", of_another_family("tiny", "vae"), r"vae\.latent_channels is 8, not 4"),
    "a VAE of a sister family": ("sd15_tiny", of_another_family("sdxl_tiny", "vae"), r"vae\.scaling_factor is 0\.13025, not 0\.18215"),
    "a wrong scaling factor": ("sdxl_tiny", in_config("vae", scaling_factor=0.18215), r"vae\.scaling_factor is 0\.18215, not 0\.13025"),
    "no scaling factor": ("sdxl_tiny", in_config("vae", scaling_factor=None), r"vae\.scaling_factor is 0\.18215, not 0\.13025"),
    "a shift": ("sd15_tiny", in_config("vae", shift_factor=0.1), r"vae\.shift_factor is 0\.1, not None"),
    "another activation": (
        "sd15_tiny",
        in_config("text_encoder", hidden_act="gelu"),
        "text_encoder.hidden_act is 'gelu', not 'quick_gelu'",
    ),
    "another activation of the second": (
        "sdxl_tiny",
        in_config("text_encoder_2", hidden_act="quick_gelu"),
        "text_encoder_2.hidden_act is 'quick_gelu', not 'gelu'",
    ),
    "another text encoder": ("sd20_tiny", of_another_family("sd15_tiny", "text_encoder"), "hidden_act is 'quick_gelu', not 'gelu'"),
    "one text encoder of two": ("sdxl_tiny", without("text_encoder_2", "tokenizer_2"), "1 text encoders, not 2"),
    "the second tokenizer missing": ("sdxl_tiny", without("tokenizer_2"), "lacks tokenizer_2"),
    "two text encoders for one": (
        "sd15_tiny",
        lambda folder: [doubled(folder, name) for name in ("text_encoder", "tokenizer")],
        "2 .*, not 1",
    ),
}


def doubled(folder: Path, name: str) -> None:
    shutil.copytree(folder / name, folder / f"{name}_2")


@pytest.mark.parametrize("door", ["prepare", "train"])
@pytest.mark.parametrize("what", WRONG)
def test_frozen_parts_that_are_not_the_presets_are_refused_before_anything_is_built(
    what: str, door: str, prepared: Callable[..., str], nothing_built: None, tmp_path: Path
) -> None:
    family, spoil, said = WRONG[what]
    preset = spoiled(family, tmp_path, spoil)
    with pytest.raises(ConfigError, match=said):
        if door == "train":
            stages.configure(preset=preset, stage=FIRST[family], data_dir=prepared(family), **QUICK)
        else:
            prepare.prepare(prepare.configure(preset=preset, source="scenes", data_dir=str(tmp_path / "data"), resolution=64, limit=8))


@pytest.mark.parametrize(
    ("family", "unet", "said"),
    [
        ("sd15_tiny", {"in_channels": 16, "out_channels": 16}, "in_channels=16 has to be 4; out_channels=16 has to be 4"),
        ("sd20_tiny", {"cross_attention_dim": 64}, "cross_attention_dim=64 has to be 32"),
        ("sdxl_tiny", {"projection_class_embeddings_input_dim": 64}, "projection_class_embeddings_input_dim=64 has to be 112"),
        ("sdxl_tiny", {"addition_embed_type": None}, "addition_embed_type=None does not go with 2 text encoders"),
    ],
)
def test_a_unet_that_does_not_fit_its_frozen_parts_is_refused_before_anything_is_built(
    family: str, unet: dict[str, Any], said: str, prepared: Callable[..., str], nothing_built: None, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(json.dumps({"extends": family, "networks": {"unet": unet}}))
    with pytest.raises(ConfigError, match=said):
        stages.configure(preset=str(tmp_path / "mine.yaml"), stage=FIRST[family], data_dir=prepared(family), **QUICK)


@pytest.mark.parametrize(("family", "end"), [("sd15_tiny", ""), ("sdxl_tiny", "_2")])
def test_a_tokenizer_of_another_vocabulary_is_refused_before_anything_is_built(
    family: str, end: str, nothing_built: None, tmp_path: Path
) -> None:
    preset = spoiled(family, tmp_path, lambda folder: shrink_vocabulary(folder / f"tokenizer{end}"))
    with pytest.raises(ConfigError, match=rf"text_encoder{end} knows 8,706 tokens, and its tokenizer 8,705"):
        parts.load_frozen(presets.get(preset).networks)


def shrink_vocabulary(folder: Path) -> None:
    """Takes a tokenizer's last merge away, and the token that it makes."""
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["vocab"].pop("".join(table["model"]["merges"].pop()))
    (folder / "tokenizer.json").write_text(json.dumps(table))


@pytest.mark.parametrize(("part", "file"), [("vae", "diffusion_pytorch_model"), ("text_encoder", "model")])
def test_weights_that_float16_could_not_hold_are_refused_and_named(part: str, file: str, tmp_path: Path) -> None:
    preset = spoiled("sdxl_tiny", tmp_path, lambda folder: rewrite(folder / part / f"{file}.safetensors", convert=overflown))
    with pytest.raises(ConfigError, match=rf"parts/{part} holds weights that are not finite, as float16 makes of large ones: \w+"):
        parts.load_frozen(presets.get(preset).networks)


def overflown(tensor: torch.Tensor) -> torch.Tensor:
    """In float16, of which one number was too large."""
    large = tensor.clone()
    large.view(-1)[0] = 1e5
    return large.half()


def test_a_pipeline_whose_vae_does_not_fit_its_unet_is_refused_when_it_is_loaded(trained: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(trained("sd15_tiny") / "export", tmp_path / "export")
    of_another_family("tiny", "vae")(tmp_path / "export")
    with pytest.raises(ConfigError, match="in_channels=4 has to be 8"):
        models.load(str(tmp_path / "export"), weights="auto")
