"""Small random CLIPs and DINOv2s in files, beside what open_clip and transformers make of them, and files that are refused."""

import json
import math
import pickle
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from open_clip.pretrained import _pcfg
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import Dinov2Config, Dinov2ForImageClassification, Dinov2Model

from sdlab import distances, encoders, openclip, protocols, scorers
from sdlab.config import ConfigError

VISION = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
CAPTIONS = ["a red owl on a lake", "two cups", "", "owl " * 40, "a red owl on a lake"]
EOT = 49407
QUICK = "ViT-L-14-quickgelu/openai"


def write_clip(folder: Path, *, quick_gelu: bool = True, seed: int = 3, file: str = encoders.OPEN_CLIP, **preprocess: object) -> CLIP:
    """A small CLIP as open_clip writes it for the hub, whose weights are large enough that all of it matters."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = CLIP(24, CLIPVisionCfg(**VISION), CLIPTextCfg(**TEXT), quick_gelu=quick_gelu).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0 if name == "logit_scale" else 0.1))
    save_file({key: tensor.contiguous() for key, tensor in model.state_dict().items()}, folder / file)
    write_config(folder, quick_gelu=quick_gelu, **preprocess)
    return model


def write_config(
    folder: Path, *, quick_gelu: bool = True, vision: dict | None = None, text: dict | None = None, **preprocess: object
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model = {"embed_dim": 24, "quick_gelu": quick_gelu, "vision_cfg": vision or VISION, "text_cfg": text or TEXT}
    (folder / encoders.OPEN_CLIP_CONFIG).write_text(json.dumps({"model_cfg": model, "preprocess_cfg": preprocess}))


def pictures(count: int, *, side: int = 48, wide: int = 0) -> np.ndarray:
    return np.random.default_rng(side).integers(0, 256, (count, 3, side, side + wide), dtype=np.uint8)


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CLIP]:
    folder = tmp_path_factory.mktemp("clip")
    return folder, write_clip(folder)


@pytest.fixture(scope="module")
def clip(there: tuple[Path, CLIP]) -> scorers.Clip:
    return scorers.load_clip("tiny/random", there[0], batch_size=4)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> str:
    """An architecture and weights that open_clip knows, of the size of the small ones."""
    sizes = {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": TEXT}
    for name, quick in (("small", {}), ("small-quickgelu", {"quick_gelu": True})):
        monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, name, {**sizes, **quick})
        monkeypatch.setitem(open_clip.pretrained._PRETRAINED, name, {"seed3": _pcfg(hf_hub="sdlab-tests/small/", quick_gelu=True)})
    return "small-quickgelu/seed3"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(openclip, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("something was fetched"))
    return tmp_path / "hub"


def small_cache(cache: Path) -> Path:
    """The folder of a snapshot in the cache."""
    snapshot = cache / "models--sdlab-tests--small" / "snapshots" / ("0" * 40)
    (cache / "models--sdlab-tests--small" / "refs").mkdir(parents=True)
    (cache / "models--sdlab-tests--small" / "refs" / "main").write_text("0" * 40)
    return snapshot


@pytest.mark.parametrize(("side", "wide"), [(48, 0), (32, 0), (20, 0), (40, 17)])
def test_image_features_are_open_clips_own_through_its_own_preprocess(there, clip, side, wide):
    images = pictures(5, side=side, wide=wide)
    _, transform = there[1], open_clip.image_transform(32, is_train=False)
    with torch.no_grad():
        inputs = torch.stack([transform(Image.fromarray(image)) for image in images.transpose(0, 2, 3, 1)])
        wanted = there[1].encode_image(inputs, normalize=True).numpy()
    found = clip.image_features(images)
    assert found.dtype == np.float32 and found.shape == (5, clip.width)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-6)


def test_features_are_those_of_open_clips_own_loader(there, clip):
    model, transform = open_clip.create_model_from_pretrained(f"local-dir:{there[0]}")
    tokens = open_clip.get_tokenizer(f"local-dir:{there[0]}")(CAPTIONS)
    images = pictures(3)
    with torch.no_grad():
        inputs = torch.stack([transform(Image.fromarray(image)) for image in images.transpose(0, 2, 3, 1)])
        wanted = model.eval().encode_image(inputs, normalize=True).numpy(), model.encode_text(tokens, normalize=True).numpy()
    np.testing.assert_allclose(clip.image_features(images), wanted[0], rtol=0, atol=1e-6)
    np.testing.assert_allclose(clip.text_features(CAPTIONS), wanted[1], rtol=0, atol=1e-6)


def test_a_config_says_how_pictures_are_prepared(tmp_path):
    model = write_clip(tmp_path, mean=[0.5] * 3, std=[0.25] * 3, interpolation="bilinear", resize_mode="squash")
    found = scorers.load_clip("tiny/random", tmp_path)
    transform = open_clip.image_transform(32, False, (0.5,) * 3, (0.25,) * 3, resize_mode="squash", interpolation="bilinear")
    images = pictures(2, wide=9)
    with torch.no_grad():
        inputs = torch.stack([transform(Image.fromarray(image)) for image in images.transpose(0, 2, 3, 1)])
        np.testing.assert_allclose(found.image_features(images), model.encode_image(inputs, normalize=True), rtol=0, atol=1e-6)
    assert "bilinear" in found.pixel_path(48) and "squash" in found.pixel_path(48)


def test_features_do_not_depend_on_their_neighbours_and_none_are_none(clip):
    images = pictures(7)
    np.testing.assert_array_equal(clip.image_features(images[4:]), clip.image_features(images)[4:])
    np.testing.assert_array_equal(clip.image_features(images[5:6]), clip.image_features(images)[5:6])
    assert clip.image_features(images[:0]).shape == (0, clip.width) == clip.text_features([]).shape


def test_a_text_has_the_same_features_alone_and_each_different_one_is_encoded_once(clip, monkeypatch):
    shown = []
    encode = clip.model.encode_text
    monkeypatch.setattr(clip.model, "encode_text", lambda tokens, **given: (shown.append(tokens), encode(tokens, **given))[1])
    found = clip.text_features(CAPTIONS * 3)
    assert len(shown) == 1 and len(shown[0]) == 4
    np.testing.assert_array_equal(clip.text_features(CAPTIONS[1:2]), found[1:2])
    np.testing.assert_array_equal(found[0], found[4])


def test_a_text_beyond_the_context_is_cut_and_keeps_its_end(there, clip):
    (tokens,) = clip.tokens(["owl " * 40])
    assert tokens.shape == (16,) and tokens[-1] == EOT and (tokens == EOT).sum() == 1
    whole = clip.tokens(["owl " * 14])[0]
    assert whole.tolist() == tokens.tolist()
    with torch.no_grad():
        states = []
        hook = there[1].ln_final.register_forward_hook(lambda *called: states.append(called[2]))
        there[1].encode_text(tokens[None])
        hook.remove()
        last = F.normalize(states[0][0, 15] @ there[1].text_projection, dim=0)
    np.testing.assert_allclose(clip.text_features(["owl " * 40])[0], last, rtol=0, atol=1e-6)


def test_cut_texts_are_counted_with_their_prefix(there, clip):
    captions = ["owl " * 13, "owl " * 14, "owl " * 15, "", "owl " * 14]
    assert clip.truncated(captions) == 1
    assert scorers.load_clip("tiny/random", there[0], prefix="A photo depicts ").truncated(captions) == 4


def test_a_prefix_is_put_before_each_text_and_is_part_of_what_it_is(there, clip):
    other = scorers.load_clip("tiny/random", there[0], prefix="A photo depicts ", batch_size=4)
    wanted = clip.text_features(["A photo depicts " + caption for caption in CAPTIONS[:3]])
    np.testing.assert_array_equal(other.text_features(CAPTIONS[:3]), wanted)
    assert np.abs(other.text_features(CAPTIONS[:3]) - clip.text_features(CAPTIONS[:3])).max() > 0.01
    assert other.identity() != clip.identity() and other.pixel_path(48) != clip.pixel_path(48)
    assert other.weights_hash == clip.weights_hash


def test_a_score_is_the_raw_cosine_and_its_mean_has_an_error(clip):
    scores = (clip.image_features(pictures(3)) * clip.text_features(CAPTIONS[:3])).sum(1)
    np.testing.assert_array_equal(scorers.cosines(clip.image_features(pictures(3)), clip.text_features(CAPTIONS[:3])), scores)
    np.testing.assert_allclose(scorers.cosines(np.array([[1.0, 0]]), np.array([[-1.0, 0]])), -1)
    assert scorers.mean(np.array([1.0, 2, 6])) == distances.Estimate(3, pytest.approx(math.sqrt(7 / 3)))
    with pytest.raises(ConfigError, match="no standard error"):
        scorers.mean(np.array([1.0]))
    with pytest.raises(ConfigError, match="no pairs"):
        scorers.cosines(np.ones((1, 2)), np.ones((2, 2)))


def test_the_hash_is_the_files_and_changes_with_the_weights(tmp_path, clip):
    write_clip(tmp_path, seed=4)
    other = scorers.load_clip("tiny/random", tmp_path)
    assert len(clip.weights_hash) == 64 and other.weights_hash != clip.weights_hash
    assert other.identity()["weights_hash"] == other.weights_hash


@pytest.mark.parametrize(
    "wrap", [lambda state: state, lambda state: {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in state.items()}}]
)
def test_a_bare_file_of_tensors_gives_the_same_features(tmp_path, there, clip, wrap):
    torch.save(wrap(there[1].state_dict()), tmp_path / "clip.pt")
    write_config(tmp_path)
    found = scorers.load_clip("tiny/random", tmp_path / "clip.pt", batch_size=4)
    np.testing.assert_array_equal(found.image_features(pictures(2)), clip.image_features(pictures(2)))


def test_half_precision_weights_are_run_in_float32(tmp_path):
    write_clip(tmp_path)
    path = tmp_path / encoders.OPEN_CLIP
    save_file({key: tensor.half() for key, tensor in load_file(path).items()}, path)
    assert {tensor.dtype for tensor in scorers.load_clip("tiny/random", tmp_path).model.parameters()} == {torch.float32}


class Evil:
    def __reduce__(self):
        return (pytest.fail, ("a pickle ran code",))


def test_what_can_run_code_is_refused(tmp_path):
    write_config(tmp_path)
    (tmp_path / "clip.pt").write_bytes(pickle.dumps({"visual.proj": Evil()}))
    with pytest.raises(ConfigError, match=r"clip\.pt is no file of nothing but tensors.*open_clip_model\.safetensors"):
        scorers.load_clip("tiny/random", tmp_path / "clip.pt")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "ViT-L-14.pt")  # as OpenAI publishes it
    with pytest.raises(ConfigError, match="TorchScript"):
        scorers.load_clip("tiny/random", tmp_path / "ViT-L-14.pt")


def test_quick_gelu_matters_and_is_built_where_a_config_says_so(tmp_path, clip):
    write_clip(tmp_path)
    write_config(tmp_path, quick_gelu=False)
    other = scorers.load_clip("tiny/random", tmp_path)
    assert np.abs(other.image_features(pictures(2)) - clip.image_features(pictures(2))).max() > 1e-5
    assert other.weights_hash == clip.weights_hash and other.identity() != clip.identity()


def test_open_clips_own_mismatch_is_refused_with_the_name_that_is_right(tmp_path, published):
    write_clip(tmp_path)
    (tmp_path / encoders.OPEN_CLIP_CONFIG).unlink()
    with pytest.raises(
        ConfigError, match=r"ViT-L-14/openai was trained with QuickGELU and open_clip's ViT-L-14 builds GELU.*ViT-L-14-quickgelu"
    ):
        scorers.load_clip("ViT-L-14/openai", tmp_path)
    with pytest.raises(ConfigError, match="name it small-quickgelu/seed3"):
        scorers.load_clip("small/seed3", tmp_path)
    assert scorers.load_clip(published, tmp_path).sizes["quick_gelu"]


def test_a_config_with_another_activation_than_the_weights_is_refused(tmp_path, published):
    write_clip(tmp_path)
    write_config(tmp_path, quick_gelu=False)
    with pytest.raises(ConfigError, match=r"trained with QuickGELU and .*open_clip_config\.json builds GELU"):
        scorers.load_clip(published, tmp_path)
    with pytest.raises(ConfigError, match=r"trained with GELU and open_clip's small-quickgelu builds QuickGELU.*name it small/mine"):
        scorers.load_clip("small-quickgelu/mine", tmp_path)


def test_a_network_that_open_clip_builds_otherwise_is_refused(tmp_path, monkeypatch):
    write_clip(tmp_path)
    monkeypatch.setattr(openclip, "CLIP", lambda **sizes: CLIP(**{**sizes, "quick_gelu": False}))
    with pytest.raises(ConfigError, match="with another activation"):
        scorers.load_clip("tiny/random", tmp_path)


def test_the_config_of_another_model_is_refused_with_what_differs(tmp_path, published):
    write_clip(tmp_path)
    write_config(tmp_path, vision={**VISION, "head_width": 16})
    with pytest.raises(ConfigError, match=r"is not of small-quickgelu/seed3, it has vision_cfg\.head_width 16 and not 32"):
        scorers.load_clip(published, tmp_path)
    write_config(tmp_path, mean=[0.5] * 3)
    with pytest.raises(ConfigError, match=r"preprocess\.mean \(0\.5, 0\.5, 0\.5\) and not"):
        scorers.load_clip(published, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "describes no CLIP"),
        ("[]", "describes no CLIP"),
        ('{"model_cfg": {"embed_dim": 24}}', "describes no CLIP.*vision_cfg"),
        (json.dumps({"model_cfg": {"embed_dim": 24, "vision_cfg": {**VISION, "colour": 1}, "text_cfg": TEXT}}), "colour"),
        (json.dumps({"model_cfg": {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": {**TEXT, "heads": 3}}}), "describes no CLIP"),
        (json.dumps({"model_cfg": {"embed_dim": 24, "vision_cfg": VISION, "text_cfg": {**TEXT, "vocab_size": 99}}}), "vocab_size 99"),
        (
            json.dumps({"model_cfg": {"embed_dim": 24, "vision_cfg": {**VISION, "timm_model_name": "x"}, "text_cfg": TEXT}}),
            "timm_model_name",
        ),
    ],
)
def test_a_wrong_config_is_named(tmp_path, text, said):
    write_clip(tmp_path)
    (tmp_path / encoders.OPEN_CLIP_CONFIG).write_text(text)
    with pytest.raises(ConfigError, match=rf"open_clip_config\.json .*{said}"):
        scorers.load_clip("tiny/random", tmp_path)


def test_missing_and_misshapen_weights_are_named(tmp_path):
    write_clip(tmp_path)
    path = tmp_path / encoders.OPEN_CLIP
    tensors = load_file(path)
    del tensors["ln_final.weight"]
    save_file({**tensors, "visual.proj": tensors["visual.proj"][:, :5].contiguous()}, path)
    with pytest.raises(ConfigError, match=r"weights of tiny/random \(2 keys\): missing ln_final\.weight; visual\.proj is \(64, 5\)"):
        scorers.load_clip("tiny/random", tmp_path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cut off"):
        scorers.load_clip("tiny/random", tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path):
    write_clip(tmp_path)
    path = tmp_path / encoders.OPEN_CLIP
    tensors = load_file(path)
    save_file({**tensors, "visual.proj": tensors["visual.proj"] * float("inf")}, path)
    with pytest.raises(ConfigError, match=r"not finite.*visual\.proj"):
        scorers.load_clip("tiny/random", tmp_path)


def test_missing_pieces_are_named_with_where_they_go(tmp_path, cache):
    with pytest.raises(
        ConfigError, match=rf"not in the hub's cache.*hub.*{encoders.OPEN_CLIP}.*hf download timm/vit_large_patch14_clip_224"
    ):
        scorers.load_clip(QUICK)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"not in .*empty \(nothing\); put open_clip_model\.safetensors or open_clip_pytorch_model"):
        scorers.load_clip(QUICK, tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"not in .*nowhere"):
        scorers.load_clip(QUICK, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="did you mean 'ViT-H-14/laion2b_s32b_b79k'"):
        scorers.load_clip("ViT-H-14/laion2b_s32b_b79")
    write_clip(tmp_path / "own")
    (tmp_path / "own" / encoders.OPEN_CLIP_CONFIG).unlink()
    with pytest.raises(ConfigError, match=r"own.open_clip_config\.json is not there, and open_clip has no weights 'tiny/random'"):
        scorers.load_clip("tiny/random", tmp_path / "own")


def test_open_clips_other_file_name_is_found(tmp_path, clip):
    write_clip(tmp_path, file="open_clip_pytorch_model.safetensors")
    assert scorers.load_clip("tiny/random", tmp_path).weights_hash == clip.weights_hash


def test_weights_in_the_hubs_cache_are_found_and_nothing_is_fetched(cache, published, clip):
    with pytest.raises(ConfigError, match="hf download sdlab-tests/small"):
        scorers.load_clip(published)
    write_clip(small_cache(cache))
    assert scorers.load_clip(published).weights_hash == clip.weights_hash


def test_the_protocols_name_judges_that_are_here_and_that_open_clip_has():
    named = {protocols.get(name).clip_judge for name in protocols.names()} - {"built-in judge"}
    assert named == set(openclip.JUDGES)
    for name in named:
        found = openclip.describe(name, Path("nowhere"))
        assert found.quick_gelu == (name == QUICK) and found.preprocess.size == 224


@pytest.mark.parametrize("images", [np.zeros((1, 8, 8, 3), np.uint8), np.zeros((1, 3, 8, 8), np.float32), np.zeros((3, 8, 8), np.uint8)])
def test_pictures_of_another_kind_are_refused(clip, images):
    with pytest.raises(ConfigError, match=r"give uint8 \(B, 3, H, W\)"):
        clip.image_features(images)


def test_float32_is_whole_whatever_is_set_outside(clip):
    images = pictures(2)
    wanted = clip.image_features(images)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            np.testing.assert_array_equal(clip.image_features(images), wanted)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


# DINOv2


def write_dino(folder: Path, *, kind: type = Dinov2Model, seed: int = 3, side: int = 224) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = kind(Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=side, patch_size=14))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    return model


def inputs(images: np.ndarray) -> torch.Tensor:
    pixels = F.interpolate(torch.from_numpy(images).float(), (224, 224), mode="bicubic", antialias=True) / 255
    return (pixels - torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)) / torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> tuple[scorers.Dino, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("dino") / "dinov2-small"
    model = write_dino(folder)
    return scorers.load_dino(folder, batch_size=2), model


@pytest.mark.parametrize("side", [64, 224, 300])
def test_dino_features_are_the_class_token_of_transformers_own(dino, side):
    found, model = dino
    images = pictures(3, side=side)
    with torch.no_grad():
        wanted = model(pixel_values=inputs(images)).last_hidden_state[:, 0].numpy()
    features = found.image_features(images)
    assert features.dtype == np.float32 and features.shape == (3, found.width) == (3, 32)
    np.testing.assert_allclose(features, wanted, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found.image_features(images[2:]), features[2:])
    assert ("bicubic" in found.pixel_path(side)) == (side != 224)


def test_position_embeddings_of_another_size_are_resized_as_dinov2s_own_code_does(tmp_path):
    model = write_dino(tmp_path / "dino", side=518)
    found = scorers.load_dino(tmp_path / "dino")
    kept = model.embeddings.position_embeddings.detach()
    scaled = F.interpolate(kept[:, 1:].reshape(1, 37, 37, 32).permute(0, 3, 1, 2), scale_factor=(16 + 0.1) / 37, mode="bicubic")
    own = torch.cat([kept[:, :1], scaled.permute(0, 2, 3, 1).reshape(1, 256, 32)], 1)
    torch.testing.assert_close(found.model.embeddings.position_embeddings, own, rtol=0, atol=0)
    with torch.no_grad():
        theirs = model(pixel_values=inputs(pictures(1))).pooler_output.numpy()
        model.embeddings.interpolate_pos_encoding = lambda *_: own
        np.testing.assert_allclose(
            found.image_features(pictures(1)), model(pixel_values=inputs(pictures(1))).pooler_output, rtol=0, atol=1e-5
        )
    assert np.abs(found.image_features(pictures(1)) - theirs).max() > 1e-5


def test_a_head_is_left_out_and_the_hash_changes_with_the_weights(tmp_path, dino):
    model = write_dino(tmp_path / "head", kind=Dinov2ForImageClassification, seed=4)
    found = scorers.load_dino(tmp_path / "head", name="mine")
    with torch.no_grad():
        wanted = model.dinov2(pixel_values=inputs(pictures(2))).pooler_output.numpy()
    np.testing.assert_allclose(found.image_features(pictures(2)), wanted, rtol=0, atol=1e-5)
    assert found.name == "mine" and dino[0].name == "dinov2-small"
    assert found.weights_hash != dino[0].weights_hash and found.identity() != dino[0].identity()


def test_what_is_missing_or_wrong_of_a_dino_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json is not there; put config\.json and model\.safetensors of facebook/dinov2-large"):
        scorers.load_dino(tmp_path)
    write_dino(tmp_path / "dino")
    config, weights = tmp_path / "dino" / "config.json", tmp_path / "dino" / "model.safetensors"
    table, tensors = json.loads(config.read_text()), load_file(weights)
    for changes, said in (
        ({"model_type": "vit"}, "model_type 'vit'"),
        ({"hidden_size": "wide"}, "do not fit"),
        ({"num_hidden_layers": 3, "out_features": None, "out_indices": None}, r"missing encoder\.layer\.2"),
        ({"num_hidden_layers": 1, "out_features": None, "out_indices": None}, r"unexpected encoder\.layer\.1"),
        ({"image_size": 518}, "do not fit"),
    ):
        config.write_text(json.dumps({**table, **changes}))
        with pytest.raises(ConfigError, match=said):
            scorers.load_dino(tmp_path / "dino")
    config.write_text(json.dumps(table))
    del tensors["layernorm.weight"]
    save_file(tensors, weights)
    with pytest.raises(ConfigError, match=r"missing layernorm\.weight"):
        scorers.load_dino(tmp_path / "dino")
    weights.unlink()
    torch.save(tensors, tmp_path / "dino" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="never read"):
        scorers.load_dino(tmp_path / "dino")
