"""The 2015 Inception beside each tool's own code, all with the same random weights, and files of weights that are refused."""

import hashlib
import importlib
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import needs
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from sdlab import inception, parts, pixels
from sdlab.config import ConfigError
from sdlab.inception import Extractor
from sdlab.pixels import PATHS

EMOJI = Path(pixels.__file__).parent / "assets" / "emoji"
SIZES = (512, 256, 96)
WIDTHS = (64, 192, 768, 2048)


def tool(name: str):
    """A module of another tool, which only the extra `parity` installs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        needs(name, False)


@pytest.fixture(scope="module")
def network() -> Extractor:
    return inception.seeded(7, batch_size=2)


@pytest.fixture(scope="module")
def weights(network: Extractor) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in network.network.state_dict().items()}


@pytest.fixture(scope="module")
def weights_file(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "inception.pth"
    torch.save(weights, path)
    return path


@pytest.fixture
def ported(weights, monkeypatch):
    """pytorch-fid's module, which gets the random weights where it would fetch the published ones."""
    module = tool("pytorch_fid.inception")
    monkeypatch.setattr(module, "load_state_dict_from_url", lambda *_, **__: weights)
    return module


@pytest.fixture(scope="module")
def photographs() -> list[np.ndarray]:
    """Two pictures of each size, uint8 (2, 3, side, side): an emoji on a colour, and noise."""
    made = []
    for side, path in zip(SIZES, sorted(EMOJI.glob("*.png")), strict=False):
        emoji = Image.open(path).convert("RGBA").resize((side, side), Image.Resampling.LANCZOS)
        picture = Image.new("RGB", (side, side), (40, 120, 200))
        picture.paste(emoji, mask=emoji)
        noise = np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8)
        made.append(np.stack([np.asarray(picture), noise]).transpose(0, 3, 1, 2).copy())
    return made


def files_of(images: list[np.ndarray], folder: Path) -> list[str]:
    paths = []
    for image in (image for batch in images for image in batch):
        paths.append(str(folder / f"{len(paths):02d}.png"))
        Image.fromarray(image.transpose(1, 2, 0)).save(paths[-1])
    return paths


def assert_near(ours: np.ndarray, theirs: np.ndarray, within: float = 1e-5) -> None:
    """Every feature of every picture, against its own size."""
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=within, atol=within * float(np.abs(theirs).mean()))


def test_pytorch_fid_finds_the_same_features_in_files(network, ported, photographs, tmp_path):
    paths, score = files_of(photographs, tmp_path), tool("pytorch_fid.fid_score")
    taps = tuple(map(str, WIDTHS))
    ours = [network.features(PATHS["pytorchfid"].generated(images), taps=taps) for images in photographs]
    for width in WIDTHS:
        model = ported.InceptionV3([ported.InceptionV3.BLOCK_INDEX_BY_DIM[width]])
        theirs = score.get_activations(paths, model, batch_size=1, dims=width, num_workers=0)
        assert_near(np.concatenate([features[str(width)] for features in ours]), theirs)


def test_torch_fidelity_finds_the_same_features_and_scores(network, weights_file, photographs):
    module = tool("torch_fidelity.feature_extractor_inceptionv3")
    taps = tuple(inception.WIDTHS)
    theirs = module.FeatureExtractorInceptionV3("seeded", list(taps), feature_extractor_weights_path=str(weights_file))
    for images in photographs:
        ours = network.features(PATHS["tf1"].reference(images), taps=taps)
        with torch.no_grad():
            found = dict(zip(taps, theirs(torch.from_numpy(images)), strict=True))
        for tap in taps:
            assert_near(ours[tap], found[tap].numpy())


def test_clean_fid_finds_the_same_features_in_a_folder(network, ported, photographs, tmp_path, monkeypatch):
    module, fid = tool("cleanfid.inception_torchscript"), tool("cleanfid.fid")
    trunk = ported.InceptionV3([3], resize_input=False, normalize_input=False)

    class Scripted(nn.Module):
        """In place of NVIDIA's TorchScript file, which cannot be had offline: the same layers, in pytorch-fid's code."""

        layers = types.SimpleNamespace(forward=lambda inputs: trunk.eval()(inputs)[0])

    monkeypatch.setattr(torch.jit, "load", lambda _: Scripted())
    files_of(photographs, tmp_path)
    theirs = fid.get_folder_features(
        str(tmp_path), module.InceptionV3W("", download=False), num_workers=0, device=torch.device("cpu"), mode="clean", verbose=False
    )
    ours = np.concatenate([network.features(PATHS["cleanfid"].generated(images))["2048"] for images in photographs])
    assert_near(ours, theirs)


def test_mlperf_finds_the_same_features_in_floats(network, ported, photographs):
    model = ported.InceptionV3([3]).eval()
    for images in photographs:
        values = parts.to_pixel_values(images) * 1.03 + 0.001
        with torch.no_grad():
            theirs = model(((values + 1.0) / 2.0).clamp(0.0, 1.0))[0].squeeze(3).squeeze(2)
        assert_near(network.features(PATHS["mlperf"].generated(values))["2048"], theirs.numpy())


def test_nemo_finds_the_same_features_in_files(network, ported, photographs, tmp_path):
    model = ported.InceptionV3([3], resize_input=False, normalize_input=False).eval()
    values = []
    for path in files_of(photographs, tmp_path):
        picture = Image.open(path).convert("RGB").resize((256, 256), resample=Image.BICUBIC)
        values.append(2 * (torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1).float() / 255) - 1)
    with torch.no_grad():
        theirs = model(F.interpolate(torch.stack(values), size=(299, 299), mode="bicubic", align_corners=True))[0]
    ours = np.concatenate([network.features(PATHS["nemo"].generated(images))["2048"] for images in photographs])
    assert_near(ours, theirs.squeeze(3).squeeze(2).numpy())


def test_features_do_not_depend_on_their_neighbours_or_on_other_taps(network, photographs):
    inputs = torch.cat([PATHS["pytorchfid"].generated(images) for images in photographs])[:5]
    whole = network.features(inputs, taps=("192", "2048"))
    np.testing.assert_array_equal(network.features(inputs[3:])["2048"], whole["2048"][3:])
    np.testing.assert_array_equal(network.features(inputs[:1], taps=("192",))["192"], whole["192"][:1])
    assert {tap: found.shape for tap, found in network.features(inputs[:0], taps=("64", "logits")).items()} == {
        "64": (0, 64),
        "logits": (0, 1008),
    }


def test_every_forward_has_the_same_number_of_rows(network):
    rows = []
    hook = network.network.Conv2d_1a_3x3.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    try:
        network.features(torch.zeros(3, 3, 299, 299), taps=("64",))
    finally:
        hook.remove()
    assert rows == [2, 2]


def test_what_lies_behind_the_last_tap_is_not_run(network):
    def fail(*_):
        raise AssertionError("it was run")

    hook = network.network.Mixed_5b.register_forward_pre_hook(fail)
    try:
        found = network.features(torch.zeros(1, 3, 299, 299), taps=("192", "64"))
    finally:
        hook.remove()
    assert list(found) == ["192", "64"]


def test_autocast_and_tf32_around_it_change_nothing(network, monkeypatch):
    inputs, seen = torch.linspace(-1, 1, 3 * 299 * 299).view(1, 3, 299, 299), []
    plain = network.features(inputs, taps=("64",))["64"]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    hook = network.network.Conv2d_1a_3x3.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(network.features(inputs, taps=("64",))["64"], plain)
    hook.remove()
    assert (seen, torch.backends.cudnn.allow_tf32) == ([False], True)


def test_seeded_networks_repeat_and_cannot_be_taken_for_fid(network):
    again, other = inception.seeded(7), inception.seeded(8)
    assert again.weights_hash == network.weights_hash
    assert other.weights_hash != network.weights_hash
    assert network.identity() == {"extractor": "random Inception of seed 7", "weights_hash": network.weights_hash}
    assert not network.is_fid
    assert not network.network.training


@pytest.mark.parametrize(
    ("inputs", "taps", "said"),
    [
        (torch.zeros(1, 3, 256, 256), ("2048",), r"\(1, 3, 256, 256\); make its input with a pixel path"),
        (torch.zeros(1, 3, 299, 299, dtype=torch.float16), ("2048",), "torch.float16"),
        (torch.zeros(1, 3, 299, 299), ("1024",), "no tap '1024'; choose from 64, 192"),
        (torch.zeros(1, 3, 299, 299), (), "choose from 64, 192"),
    ],
)
def test_other_inputs_and_taps_are_refused(network, inputs, taps, said):
    with pytest.raises(ConfigError, match=said):
        network.features(inputs, taps=taps)


def test_a_file_with_another_hash_is_refused_with_both_unless_it_is_named(weights_file, weights, network, tmp_path):
    given = hashlib.sha256(weights_file.read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=rf"{given} and the FID Inception has {inception.FID_SHA256}.*extractor="):
        inception.load(weights_file)
    for taken in ("my fid", inception.FID_NAME.lower()):
        with pytest.raises(ConfigError, match="could be taken for FID"):
            inception.load(weights_file, extractor=taken)
    named = inception.load(weights_file, extractor="mine")
    assert (named.name, named.weights_hash, named.is_fid, named.batch_size) == ("mine", given, False, 8)
    counted = {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    save_file(counted, tmp_path / "inception.safetensors")
    safe = inception.load(tmp_path / "inception.safetensors", extractor="mine", batch_size=2)
    inputs = torch.linspace(-1, 1, 3 * 299 * 299).view(1, 3, 299, 299)
    np.testing.assert_array_equal(safe.features(inputs, taps=("192",))["192"], network.features(inputs, taps=("192",))["192"])


@pytest.mark.parametrize("kind", ["sha256", "sha1"])
def test_the_published_file_is_found_in_torchs_cache_and_is_fid(kind, weights_file, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(ConfigError, match=r"not in .*checkpoints .*curl -L -o \S+/checkpoints/pt_inception\S+ https://github.com/mseitzer"):
        inception.load()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth").symlink_to(weights_file)
    with pytest.raises(ConfigError, match=r"weights-inception-2015-12-05-6726825d.pth has SHA-256"):
        inception.load()
    monkeypatch.setattr(inception, f"FID_{kind.upper()}", hashlib.new(kind, weights_file.read_bytes()).hexdigest())
    found = inception.load()
    assert (found.name, found.is_fid) == (inception.FID_NAME, True)
    with pytest.raises(ConfigError, match="cannot be called 'mine'; leave extractor out"):
        inception.load(extractor="mine")


def test_torchvisions_network_is_refused_with_the_reason(weights, tmp_path, monkeypatch):
    path = tmp_path / "inception_v3_google.pth"
    torch.save(weights | {"fc.bias": torch.zeros(1000), "fc.weight": torch.zeros(1000, 2048)}, path)
    with pytest.raises(ConfigError, match=r"torchvision's ImageNet Inception.*1000 classes"):
        inception.load(path, extractor="mine")
    torch.save({"AuxLogits.conv0.conv.weight": torch.zeros(1)}, path)
    with pytest.raises(ConfigError, match=r"torchvision's ImageNet Inception"):
        inception.load(path, extractor="mine")
    monkeypatch.setattr(inception, "TORCHVISION", (hashlib.sha256(path.read_bytes()).hexdigest()[:8],))
    with pytest.raises(ConfigError, match=r"torchvision's ImageNet Inception"):
        inception.load(path)


class Touch:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_damaged_files_and_pickled_code_are_refused(weights, tmp_path):
    path = tmp_path / "one.pth"
    with pytest.raises(ConfigError, match=r"one.pth cannot be read \(FileNotFoundError"):
        inception.load(path)
    for content, said in (
        ({"code": Touch(tmp_path / "touched")}, "no file of tensors by name"),
        ([torch.zeros(1)], "holds no tensors by name"),
        ({"fc.bias": torch.zeros(1008)}, r"\(471 keys\): missing Conv2d_1a_3x3.conv.weight"),
        (weights | {"fc.bias": torch.zeros(7)}, r"fc.bias is \(7,\), not \(1008,\)"),
        (weights | {"fc.bias": torch.full((1008,), torch.nan)}, "not finite.*fc.bias"),
    ):
        torch.save(content, path)
        with pytest.raises(ConfigError, match=said):
            inception.load(path, extractor="mine")
    assert not (tmp_path / "touched").exists()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cut off"):
        inception.load(path, extractor="mine")
