"""What a model is written as: a pipeline folder and a single file that others read, and what is said of it."""

import json
import re
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sdlab import diffusion, export, files, models, parents, parts, predictor, presets, sample, single, stored
from sdlab.config import ConfigError

FAMILIES = ("sd15_tiny", "sd20_tiny", "sdxl_tiny")
ORIGIN = export.Origin("mine/stage | 1", "random weights", "openrail++", "scenes: 24 used", "step 3, loss 1", "0" * 64)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, models.TextToImage]]:
    """A small model with random weights of each family, and where it was written."""
    made = {}
    for name in FAMILIES:
        networks = presets.get(name).networks
        unet = models.build_unet(networks, seed=1).eval().requires_grad_(False)
        model = models.TextToImage(parts.load_frozen(networks), unet, networks, name, "ema", 3, "", resolution=64)
        folder = tmp_path_factory.mktemp(name)
        export.write(folder, model, ORIGIN)
        made[name] = (folder, model)
    return made


def pipeline_of(folder: Path, **options: object) -> diffusers.DiffusionPipeline:
    kind = getattr(diffusers, json.loads((folder / "model_index.json").read_text())["_class_name"])
    if "single" in options:
        pipeline = kind.from_single_file(str(folder / export.SINGLE_FILE), config=str(folder), local_files_only=True)
        pipeline.scheduler = diffusers.DDIMScheduler.from_pretrained(folder / "scheduler")  # the importer takes one of its own choice
    else:
        pipeline = kind.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("how", [{}, {"single": True}], ids=["folder", "single file"])
@pytest.mark.parametrize("family", FAMILIES)
def test_diffusers_draws_from_either_what_we_draw(drawn, family, how) -> None:
    folder, model = drawn[family]
    prompt = "a large owl on a pink background"
    settings = {"num_inference_steps": 3, "guidance_scale": 4.0}
    ours = sample.sample(model, [prompt], seeds=[7], solver="ddim", **settings)
    noise = predictor.draw_noise(model, [7])
    theirs = pipeline_of(folder, **how)(prompt, latents=noise, height=64, width=64, output_type="np", **settings).images
    assert np.abs(theirs[0].transpose(2, 0, 1) * 255 - ours[0]).max() <= 0.51 + 255 * 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_file_is_the_model_again(drawn, family) -> None:
    folder, model = drawn[family]
    loaded = models.load(str(folder / export.SINGLE_FILE), weights="auto")
    assert (loaded.weights, loaded.step, loaded.resolution) == ("ema", 3, 64)
    assert loaded.networks.prediction_type == model.networks.prediction_type
    for ours, theirs in ((model.unet, loaded.unet), (model.frozen.vae, loaded.frozen.vae)):
        assert all(torch.equal(tensor, theirs.state_dict()[key]) for key, tensor in ours.state_dict().items())
    assert torch.equal(loaded.frozen.tokenize(["a cat", ""]), model.frozen.tokenize(["a cat", ""]))
    one, other = (some.encode_text(some.tokenize(["a cat"])) for some in (model.frozen, loaded.frozen))
    assert torch.equal(one.prompt_embeds, other.prompt_embeds)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_encoders_have_the_names_that_all_versions_read(drawn, family) -> None:
    folder, _ = drawn[family]
    for name in files.ENCODERS[: 1 + (family == "sdxl_tiny")]:
        keys = set(load_file(folder / name / "model.safetensors"))
        assert all(key.startswith(("text_model.", "text_projection.")) for key in keys)


def test_diffusers_draws_in_the_size_that_was_trained_unless_it_is_asked_for_another(drawn) -> None:
    folder, _ = drawn["sd15_tiny"]
    drawn_size = pipeline_of(folder)("a cat", num_inference_steps=1, output_type="np").images.shape[1:3]
    assert drawn_size == (64, 64) and models.load(str(folder / export.SINGLE_FILE), weights="auto").unet.config.sample_size == 8


def test_a_single_file_says_what_it_is(drawn) -> None:
    folder, _ = drawn["sd20_tiny"]
    about = files.metadata(folder / export.SINGLE_FILE)
    assert about["modelspec.prediction_type"] == "epsilon" and about["modelspec.resolution"] == "64x64"
    assert about["modelspec.sai_model_spec"] == "1.0.0" and about["modelspec.title"] == ORIGIN.title
    assert json.loads(about["sdlab.note"]) == {"weights": "ema", "step": 3, "resolution": 64, "prediction_type": "epsilon"}
    assert about["sdlab.lineage_sha256"] == "0" * 64
    assert "/" not in json.loads(about["sdlab.networks"])["frozen"]


def test_the_readme_tells_lineage_data_licence_and_results(drawn) -> None:
    text = (drawn["sdxl_tiny"][0] / "README.md").read_text()
    told = ("StableDiffusionXLPipeline", export.SINGLE_FILE, r"mine/stage \| 1", "random weights", "scenes: 24 used", "step 3, loss 1")
    assert all(part in text for part in (*told, "openrail++", "0" * 64, "moving average"))
    assert stored.find(str(drawn["sdxl_tiny"][0])).licence == "openrail++"


def test_files_can_be_read_by_others(drawn) -> None:
    folder, _ = drawn["sd15_tiny"]
    like = (folder / "README.md").stat().st_mode
    assert all(path.stat().st_mode == like for path in folder.rglob("*.safetensors"))


def test_the_built_in_family_has_no_single_file_and_the_readme_says_why(tmp_path: Path) -> None:
    export.write(tmp_path, models.load("tiny"), ORIGIN)
    assert not (tmp_path / export.SINGLE_FILE).exists()
    assert re.search(r"no single file: .*addition_embed_type", (tmp_path / "README.md").read_text())


def test_what_was_written_wrongly_is_noticed(drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(tensors, path, metadata):
        save_file({key: tensor.half() for key, tensor in tensors.items()}, path, metadata=metadata)

    monkeypatch.setattr(single, "save_file", lossy)
    with pytest.raises(RuntimeError, match=r"single_file\.safetensors: vae does not hold what was written"):
        export.write(tmp_path, drawn["sd15_tiny"][1], ORIGIN)


# Files of others


def foreign(folder: Path, path: Path, **changes: object) -> Path:
    """A single file as others write it: nothing of sdlab in its metadata."""
    tensors = load_file(folder / export.SINGLE_FILE)
    for key, value in changes.items():
        tensors.pop(key, None) if value is None else tensors.update({key: value})
    save_file(tensors, path)
    return path


def test_a_file_of_no_known_sizes_is_refused_by_what_does_not_fit(drawn, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.safetensors: .*Stable Diffusion 1\.x"):
        stored.find(str(foreign(drawn["sd15_tiny"][0], tmp_path / "mine.safetensors")))


def describes(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Take the small files for the published family that they are twins of."""
    monkeypatch.setattr(single.ldm, "family", lambda tensors: family.removesuffix("_tiny"))
    twin = presets.get(family)
    monkeypatch.setattr(single.presets, "get", lambda name: twin)


@pytest.mark.parametrize(("family", "kind"), [("sd15_tiny", "epsilon"), ("sdxl_tiny", "epsilon")])
def test_a_published_file_loads_and_predicts_noise(drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family, kind) -> None:
    describes(monkeypatch, family)
    found = stored.find(str(foreign(drawn[family][0], tmp_path / "x.safetensors")))
    assert (found.networks.prediction_type, found.weights, found.step) == (kind, "raw", 0)
    assert found.networks.null_condition == presets.get(family).networks.null_condition


def test_a_file_of_sd_2_has_to_say_what_it_predicts(drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describes(monkeypatch, "sd20_tiny")
    path = foreign(drawn["sd20_tiny"][0], tmp_path / "v2.safetensors")
    with pytest.raises(ConfigError, match=r"does not say whether its UNet predicts noise or v: put .* beside it as v2\.yaml"):
        stored.find(str(path))
    path.with_suffix(".yaml").write_text(yaml.safe_dump({"model": {"params": {"parameterization": "v"}}}))
    assert stored.find(str(path)).networks.prediction_type == "v_prediction"


def test_a_file_that_says_one_prediction_and_a_config_beside_it_that_says_another_are_refused(drawn, tmp_path: Path, monkeypatch) -> None:
    describes(monkeypatch, "sd20_tiny")
    path = foreign(drawn["sd20_tiny"][0], tmp_path / "v2.safetensors")
    save_file(load_file(path), path, metadata={"modelspec.prediction_type": "epsilon"})
    path.with_suffix(".yaml").write_text(yaml.safe_dump({"model": {"params": {"parameterization": "v"}}}))
    with pytest.raises(ConfigError, match=r"says that its UNet predicts 'epsilon', and v2\.yaml beside it 'v': one of them is wrong"):
        stored.find(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_stage_model.decoder.conv_in.weight": None}, r"missing first_stage_model\.decoder\.conv_in\.weight"),
        ({"model.diffusion_model.more": torch.zeros(1)}, r"model\.diffusion_model\.more"),
        ({"model.diffusion_model.out.2.bias": torch.zeros(9)}, r"model\.diffusion_model\.out\.2\.bias"),
    ],
)
def test_a_file_that_is_not_whole_leaves_nothing_behind(drawn, tmp_path: Path, monkeypatch, changes, message) -> None:
    describes(monkeypatch, "sd15_tiny")
    monkeypatch.setattr(files, "KEPT", tmp_path / "kept")
    path = foreign(drawn["sd15_tiny"][0], tmp_path / "x.safetensors", **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        stored.find(str(path))
    assert "x.safetensors" in str(caught.value) and not list((tmp_path / "kept").rglob("*.*"))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sdlab.networks", "{", r"x\.safetensors: its metadata sdlab\.networks is damaged"),
        ("sdlab.networks", "[" * 100_000, r"x\.safetensors: its metadata sdlab\.networks is damaged"),
        ("sdlab.networks", "[1, 2]", r"x\.safetensors: its metadata sdlab\.networks is damaged"),
        ("sdlab.note", "5", r"x\.safetensors: its metadata sdlab\.note is damaged"),
        ("sdlab.note", '{"weights": "ema", "step": -5, "resolution": 64}', r"x\.safetensors: sdlab\.note: step: .*given: -5"),
    ],
)
def test_metadata_that_is_damaged_is_named_with_its_file(drawn, tmp_path: Path, key: str, value: str, message: str) -> None:
    source = drawn["sd15_tiny"][0] / export.SINGLE_FILE
    save_file(load_file(source), tmp_path / "x.safetensors", metadata={**files.metadata(source), key: value})
    with pytest.raises(ConfigError, match=message):
        stored.find(str(tmp_path / "x.safetensors"))


def test_sizes_in_metadata_that_are_none_are_named_with_the_file(drawn, tmp_path: Path) -> None:
    source = drawn["sd15_tiny"][0] / export.SINGLE_FILE
    about = files.metadata(source)
    networks = json.loads(about["sdlab.networks"])
    networks["vae"]["block_out_channels"] = "wide"
    save_file(load_file(source), tmp_path / "x.safetensors", metadata={**about, "sdlab.networks": json.dumps(networks)})
    with pytest.raises(ConfigError, match=r"x\.safetensors"):
        stored.find(str(tmp_path / "x.safetensors"))


def test_a_parent_of_another_family_is_refused_in_both_directions(drawn) -> None:
    for parent, stage in (("sd15_tiny", "sdxl_tiny"), ("sdxl_tiny", "sd15_tiny")):
        found = parents.load_parent(str(drawn[parent][0]))
        with pytest.raises(ConfigError, match=r"text_encoder_2: .* in the parent, .* in the stage"):
            parents.check_parent_fits(found, presets.get(stage).networks)


def test_what_is_no_safetensors_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match=r"x\.safetensors cannot be loaded"):
        stored.find(str(tmp_path / "x.safetensors"))


def test_a_file_that_changes_is_unpacked_again(drawn, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    source = drawn["sd15_tiny"][0] / export.SINGLE_FILE
    with safe_open(source, framework="pt") as opened:
        about = opened.metadata()
    tensors = load_file(source)
    save_file(tensors, path, metadata=about)
    first = stored.find(str(path)).weights_hash
    tensors["model.diffusion_model.out.2.bias"] += 1
    save_file(tensors, path, metadata=about)
    assert stored.find(str(path)).weights_hash != first


def test_a_known_noise_schedule_comes_back(drawn) -> None:
    found = stored.find(str(drawn["sdxl_tiny"][0] / export.SINGLE_FILE))
    assert torch.equal(
        diffusion.alphas_cumprod(found.networks.noise_schedule), diffusion.alphas_cumprod(drawn["sdxl_tiny"][1].networks.noise_schedule)
    )
