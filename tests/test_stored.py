"""Models are found and described where they lie, whoever wrote them, and no pickle is read for it."""

import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects
from pipelines import TINY, change, make_plain, make_run, same, shard
from safetensors.torch import load_file, save_file

from sdlab import models, parts, places, runs, stored
from sdlab.config import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return make_plain(tmp_path / "plain")


@pytest.mark.parametrize(("weights", "name"), [("auto", "ema"), ("ema", "ema"), ("raw", "weights")])
def test_a_run_is_found_with_its_average_or_its_weights(tmp_path: Path, weights: str, name: str) -> None:
    folder = make_run(tmp_path / "run")
    found, loaded = stored.find(str(folder), weights=weights), models.load(str(folder), weights=weights)
    path = folder / "checkpoints" / "step-00000008" / f"{name}.safetensors"
    assert (found.path, found.weights, found.step, found.resolution) == (str(folder), weights.replace("auto", "ema"), 8, 32)
    assert found.weights_hash == loaded.weights_hash == runs.file_hash(path)
    assert same(found.state_dict(), load_file(path)) and same(loaded.unet.state_dict(), load_file(path))


def test_a_run_without_an_average_has_only_its_weights(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ema_decay=None)
    assert stored.find(str(folder)).weights == "raw"
    with pytest.raises(ConfigError, match="has no EMA weights"):
        stored.find(str(folder), weights="ema")


def test_the_shipped_half_precision_weights_are_read_as_float32() -> None:
    found = stored.find("tiny")
    halves = load_file(places.TINY_DIR / "unet" / "diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in halves.values()} == {torch.float16}
    assert same(found.state_dict(), {key: value.float() for key, value in halves.items()})
    assert (found.path, found.weights, found.step, found.resolution) == ("tiny", "ema", 1200, 64)


def test_a_pipeline_that_sdlab_did_not_write_is_raw_and_draws(plain: Path) -> None:
    found, loaded = stored.find(str(plain)), models.load(str(plain), weights="raw")
    assert (found.path, found.weights, found.step, found.resolution) == (str(plain), "raw", 0, 64)
    assert (found.networks.prediction_type, found.networks.noise_schedule) == ("epsilon", TINY.noise_schedule)
    assert (loaded.weights, loaded.step, loaded.resolution, loaded.weights_hash) == ("raw", 0, 64, found.weights_hash)
    assert same(loaded.unet.state_dict(), stored.find("tiny").state_dict())
    with pytest.raises(ConfigError, match="holds the 'raw' weights only; use weights='raw'"):
        models.load(str(plain), weights="ema")


def test_sharded_weights_are_read_whole(plain: Path) -> None:
    before = stored.find(str(plain)).weights_hash
    shard(plain / "unet")
    shard(plain / "vae")
    found = stored.find(str(plain))
    assert same(found.state_dict(), stored.find("tiny").state_dict())
    assert found.weights_hash != before
    assert same(models.load(str(plain), weights="raw").unet.state_dict(), found.state_dict())


@pytest.mark.parametrize("name", ["../../secret.safetensors", "gone.safetensors"])
def test_an_index_names_nothing_but_files_beside_it(plain: Path, name: str) -> None:
    index = shard(plain / "unet")
    save_file({"x": torch.zeros(1)}, plain.parent / "secret.safetensors")
    change(index, weight_map={"x": name})
    with pytest.raises(ConfigError, match=f"names {name}, not there"):
        stored.find(str(plain))


# The hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the hub, with no way to the hub itself."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "hub"


def cache_in(hub: Path, folder: Path) -> None:
    repository = hub / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, repository / "snapshots" / COMMIT)


def test_a_hub_id_is_taken_from_the_cache(hub: Path, plain: Path) -> None:
    cache_in(hub, plain)
    found = stored.find("owner/name")
    assert (found.name, found.path, found.weights) == ("owner/name", f"hub: owner/name@{COMMIT}", "raw")
    assert found.weights_hash == stored.find(str(plain)).weights_hash
    loaded = models.load("owner/name", weights="auto")
    assert loaded.name == "owner/name" and same(loaded.unet.state_dict(), found.state_dict())


def test_a_hub_id_that_is_a_path_here_is_that_path(hub: Path, plain: Path) -> None:
    (hub.parent / "owner").mkdir()
    plain.rename(hub.parent / "owner" / "name")
    assert stored.find("owner/name").path == str(hub.parent / "owner" / "name")


def test_what_is_neither_here_nor_in_the_cache_is_told_in_one_error(hub: Path) -> None:
    message = r"'owner/name' is no path here \(.*/owner/name\), and the hub was asked .*HF_HUB_OFFLINE is set.*hf download owner/name"
    with pytest.raises(ConfigError, match=message):
        models.load("owner/name")


@pytest.mark.parametrize("error", [OfflineModeIsEnabled("off"), ConnectionError("no route"), ValueError("no such repository")])
def test_whatever_the_hub_says_is_one_error(hub: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ConfigError, match=f"of this name: {type(error).__name__}: {error}; correct the name"):
        stored.find("owner/name")


@pytest.mark.parametrize("given", ["./x", "../x", "/x/y", "~/x", "a/b/c", "name", "a/", "a//b", "-a/b", "a\\b/c"])
def test_the_hub_is_never_asked_for_what_looks_like_a_path(hub: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **options: pytest.fail("the hub was asked"))
    with pytest.raises(ConfigError, match="there is no model at"):
        stored.find(given)


def serve(monkeypatch: pytest.MonkeyPatch, folder: Path, to: Path) -> list[str]:
    """Have the hub hold a folder, and tell what is fetched of it."""
    fetched: list[str] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (to / COMMIT / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name, to / COMMIT / name)
            fetched.append(name)
        assert revision == (None if fetched == ["model_index.json"] else COMMIT)
        return str(to / COMMIT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return fetched


def test_of_a_repository_only_what_is_read_is_fetched(hub: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(plain / "vae")
    needed = {str(path.relative_to(plain)) for path in plain.rglob("*") if path.is_file()}
    network = "diffusion_pytorch_model"
    for name in (
        *(f"unet/{network}{end}" for end in (".bin", ".fp16.bin", ".fp16.safetensors", ".non_ema.safetensors", ".onnx")),
        *("v1-5-pruned.ckpt", "v1-5-pruned.safetensors", "text_encoder/pytorch_model.bin", "text_encoder/model.fp16.safetensors"),
        *(
            "safety_checker/model.safetensors",
            "feature_extractor/preprocessor_config.json",
            f"vae/{network}.fp16-00001-of-00002.safetensors",
        ),
    ):
        (plain / name).parent.mkdir(exist_ok=True)
        (plain / name).touch()
    fetched = serve(monkeypatch, plain, hub)
    assert stored.find("owner/name").path == f"hub: owner/name@{COMMIT}"
    assert sorted(fetched) == sorted(needed)


def third_encoder(folder: Path) -> None:
    change(folder / "model_index.json", _class_name="SomePipeline", text_encoder_3=["transformers", "T5EncoderModel"])


def test_of_a_family_that_is_not_supported_nothing_but_the_index_is_fetched(
    hub: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third_encoder(plain)
    fetched = serve(monkeypatch, plain, hub)
    with pytest.raises(ConfigError, match="not supported"):
        stored.find("owner/name")
    assert fetched == ["model_index.json"]


def test_a_repository_that_is_no_pipeline_is_named(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    cache_in(hub, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"this hub repository has no model_index\.json"):
        stored.find("owner/name")


# What is refused


def test_a_further_text_encoder_is_a_family_that_is_not_supported(plain: Path) -> None:
    third_encoder(plain)
    with pytest.raises(ConfigError, match=r"SomePipeline with text_encoder_3 T5EncoderModel: this family is not supported"):
        models.load(str(plain), weights="raw")


def test_a_second_text_encoder_without_its_tokenizer_is_named(plain: Path) -> None:
    change(plain / "model_index.json", text_encoder_2=["transformers", "CLIPTextModelWithProjection"])
    with pytest.raises(ConfigError, match="with tokenizer_2 None: this family is not supported"):
        models.load(str(plain), weights="raw")


def test_parts_of_other_classes_are_a_family_that_is_not_supported(plain: Path) -> None:
    change(plain / "model_index.json", unet=None, transformer=["diffusers", "FluxTransformer2DModel"])
    shutil.rmtree(plain / "unet")
    with pytest.raises(ConfigError, match="with unet None, transformer FluxTransformer2DModel: this family is not supported"):
        models.load(str(plain), weights="raw")


@pytest.mark.parametrize("part", ["unet", "vae", "text_encoder"])
def test_pickled_weights_are_refused_with_the_way_to_convert_them(plain: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next((plain / part).glob("*.safetensors"))
    pickled = path.with_name("pytorch_model.bin" if part == "text_encoder" else "diffusion_pytorch_model.bin")
    torch.save(load_file(path), pickled)
    path.unlink()
    monkeypatch.setattr(pickle, "Unpickler", None)
    monkeypatch.setattr(torch, "load", lambda *args, **options: pytest.fail("a pickle was read"))
    message = rf"{part} has no .*{pickled.name}.* never read; .*python -c .*P\.from_pretrained\('OLD'\)\.save_pretrained\('NEW'\)"
    with pytest.raises(ConfigError, match=message):
        stored.find(str(plain))
    if part != "unet":
        with pytest.raises(ConfigError, match=message):
            parts.load_frozen(TINY.model_copy(update={"frozen": str(plain)}))


def test_a_pickle_beside_weights_of_another_name_is_not_read(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = plain / "vae" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.rename(path.with_name("model.safetensors"))
    monkeypatch.setattr(torch, "load", lambda *args, **options: pytest.fail("a pickle was read"))
    with pytest.raises(ConfigError, match="vae cannot be loaded"):
        models.load(str(plain), weights="raw")


def test_a_pickled_file_is_refused_with_the_way_to_convert_it(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model.ckpt")
    with pytest.raises(ConfigError, match=r"never read; .*P\.from_single_file\('OLD'\)\.save_pretrained\('NEW'\)"):
        models.load(str(tmp_path / "model.ckpt"))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("scheduler/scheduler_config.json", {"beta_start": None}, "lacks beta_start: this noise schedule is not supported yet"),
        ("scheduler/scheduler_config.json", {"trained_betas": [0.1]}, "gives trained_betas: this noise schedule is not supported yet"),
        ("scheduler/scheduler_config.json", {"prediction_type": "flow"}, "prediction_type.*given: 'flow'"),
        ("scheduler/scheduler_config.json", {"beta_schedule": "squaredcos_cap_v2"}, "beta_schedule.*given: 'squaredcos_cap_v2'"),
        ("unet/config.json", {"sample_size": [64, 96]}, r"sample_size=\[64, 96\]; it has to be one whole number"),
    ],
)
def test_what_a_pipeline_says_has_to_be_usable(plain: Path, name: str, values: dict[str, Any], message: str) -> None:
    change(plain / name, **values)
    with pytest.raises(ConfigError, match=message):
        stored.find(str(plain))


def test_a_damaged_note_of_sdlab_is_named(plain: Path) -> None:
    (plain / "sdlab.json").write_text('{"weights": "ema", "step": 3}')
    with pytest.raises(ConfigError, match=r"sdlab\.json: 'resolution' is missing"):
        stored.find(str(plain))
    (plain / "sdlab.json").write_text("[3]")
    with pytest.raises(ConfigError, match=r"sdlab\.json cannot be read"):
        stored.find(str(plain))


def test_a_scheduler_that_says_another_prediction_type_than_was_learned_is_refused_with_both(plain: Path) -> None:
    (plain / "sdlab.json").write_text('{"weights": "ema", "step": 3, "resolution": 64, "prediction_type": "v_prediction"}')
    change(plain / "scheduler/scheduler_config.json", prediction_type="v_prediction")
    assert stored.find(str(plain)).networks.prediction_type == "v_prediction"
    change(plain / "scheduler/scheduler_config.json", prediction_type="epsilon")
    with pytest.raises(
        ConfigError,
        match=r"scheduler_config\.json says that the UNet predicts 'epsilon', but sdlab\.json says that it has learned 'v_prediction'",
    ):
        stored.find(str(plain))
