"""The Inception-v3 of December 2015, on whose features FID is defined, and seeded random networks of its shape for tests.

It is not torchvision's ImageNet network: its average pools leave the padding out, its last pool is a maximum, and it has 1008 classes
(Szegedy et al. 2016; Heusel et al. 2017; the ports of pytorch-fid and torch-fidelity). Weights are read from a file and never fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sdlab import captions, files, launch
from sdlab.config import ConfigError
from sdlab.pixels import SIDE

Tap = Literal["64", "192", "768", "2048", "logits_unbiased", "logits"]
WIDTHS: dict[Tap, int] = {"64": 64, "192": 192, "768": 768, "2048": 2048, "logits_unbiased": 1008, "logits": 1008}
"""Numbers a feature of each tap, in the network's order: means of maps, and class scores without and with their bias."""
FID_NAME = "Inception 2015-12-05"
"""What a result whose features came from the published weights may call FID's extractor."""
FID_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
FID_SHA1 = "bd836944fd6db519dfd8d924aa457f5b3c8357ff"
"""Of the published weights; MLPerf checks the second."""
SOURCES = {
    "pt_inception-2015-12-05-6726825d.pth": "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/",
    "weights-inception-2015-12-05-6726825d.pth": "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/",
}
"""The names under which pytorch-fid and torch-fidelity keep them in torch's cache, and where each comes from."""
TORCHVISION = ("0cc3c7bd", "1a9a5a14")
"""How the hashes of torchvision's ImageNet networks begin."""


class Convolution(nn.Module):
    """A convolution without bias, batch normalisation with its stored statistics, and a ReLU."""

    def __init__(self, inputs: int, width: int, kernel: int | tuple[int, int], *, stride: int, padding: int | tuple[int, int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, width, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(width, eps=0.001)

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(maps)), inplace=True)


class _Layer(NamedTuple):
    """A convolution of a branch; with stride 1 it keeps the size of its maps, with stride 2 it has no padding."""

    name: str
    width: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1


_Branch = tuple[tuple[_Layer, ...], ...]
"""Steps one after the other; a step of two layers gives both, one after the other along the channels."""


class Mixed(nn.Module):
    """Branches over the same maps, one after the other along the channels, and last a pool.

    Args:
        inputs: channels that go in.
        branches: the layers of each.
        pool: of 3 x 3 pixels: the mean of those inside the picture, their maximum, or the maximum in steps of 2.
        pooled: channels of the convolution behind the pool; None for none.
    """

    def __init__(
        self, inputs: int, branches: Sequence[_Branch], *, pool: Literal["mean", "maximum", "halved"] = "mean", pooled: int | None = None
    ) -> None:
        super().__init__()
        self._pool = pool
        pooling = () if pooled is None else (((_Layer("branch_pool", pooled),),),)
        self._names = [[[layer.name for layer in step] for step in branch] for branch in (*branches, *pooling)]
        for branch in (*branches, *pooling):
            width = inputs
            for step in branch:
                for name, outputs, kernel, stride in step:
                    padding = (kernel[0] // 2, kernel[1] // 2) if stride == 1 else 0
                    self.add_module(name, Convolution(width, outputs, kernel, stride=stride, padding=padding))
                width = sum(layer.width for layer in step)

    def forward(self, maps: Tensor) -> Tensor:
        if self._pool == "halved":
            return torch.cat([*(self._walk(branch, maps) for branch in self._names), F.max_pool2d(maps, 3, stride=2)], 1)
        *branches, pooling = self._names
        return torch.cat([*(self._walk(branch, maps) for branch in branches), self._walk(pooling, self._pooled(maps))], 1)

    def _pooled(self, maps: Tensor) -> Tensor:
        if self._pool == "maximum":
            return F.max_pool2d(maps, 3, stride=1, padding=1)
        return F.avg_pool2d(maps, 3, stride=1, padding=1, count_include_pad=False)

    def _walk(self, branch: list[list[str]], maps: Tensor) -> Tensor:
        for step in branch:
            found = [self.get_submodule(name)(maps) for name in step]
            maps = found[0] if len(found) == 1 else torch.cat(found, 1)
        return maps


def _line(*layers: _Layer) -> _Branch:
    return tuple((layer,) for layer in layers)


def _a(inputs: int, pooled: int) -> Mixed:
    """35 x 35 pixels."""
    fives = _line(_Layer("branch5x5_1", 48), _Layer("branch5x5_2", 64, (5, 5)))
    threes = _line(_Layer("branch3x3dbl_1", 64), _Layer("branch3x3dbl_2", 96, (3, 3)), _Layer("branch3x3dbl_3", 96, (3, 3)))
    return Mixed(inputs, [_line(_Layer("branch1x1", 64)), fives, threes], pooled=pooled)


def _b() -> Mixed:
    """35 to 17 pixels."""
    threes = _line(_Layer("branch3x3dbl_1", 64), _Layer("branch3x3dbl_2", 96, (3, 3)), _Layer("branch3x3dbl_3", 96, (3, 3), 2))
    return Mixed(288, [_line(_Layer("branch3x3", 384, (3, 3), 2)), threes], pool="halved")


def _c(width: int) -> Mixed:
    """17 x 17 pixels."""
    wide, tall, name = (1, 7), (7, 1), "branch7x7dbl"
    sevens = _line(_Layer("branch7x7_1", width), _Layer("branch7x7_2", width, wide), _Layer("branch7x7_3", 192, tall))
    first = (_Layer(f"{name}_1", width), _Layer(f"{name}_2", width, tall), _Layer(f"{name}_3", width, wide))
    twice = _line(*first, _Layer(f"{name}_4", width, tall), _Layer(f"{name}_5", 192, wide))
    return Mixed(768, [_line(_Layer("branch1x1", 192)), sevens, twice], pooled=192)


def _d() -> Mixed:
    """17 to 8 pixels."""
    name = "branch7x7x3"
    threes = _line(_Layer("branch3x3_1", 192), _Layer("branch3x3_2", 320, (3, 3), 2))
    first = (_Layer(f"{name}_1", 192), _Layer(f"{name}_2", 192, (1, 7)), _Layer(f"{name}_3", 192, (7, 1)))
    return Mixed(768, [threes, _line(*first, _Layer(f"{name}_4", 192, (3, 3), 2))], pool="halved")


def _e(inputs: int, pool: Literal["mean", "maximum"]) -> Mixed:
    """8 x 8 pixels; the second of the two has the maximum where the paper has the mean, and the published weights were trained so."""

    def fork(name: str) -> tuple[_Layer, ...]:
        return _Layer(f"{name}a", 384, (1, 3)), _Layer(f"{name}b", 384, (3, 1))

    threes = ((_Layer("branch3x3_1", 384),), fork("branch3x3_2"))
    twice = (*_line(_Layer("branch3x3dbl_1", 448), _Layer("branch3x3dbl_2", 384, (3, 3))), fork("branch3x3dbl_3"))
    return Mixed(inputs, [_line(_Layer("branch1x1", 320)), threes, twice], pool=pool, pooled=192)


class Inception(nn.Module):
    """The network; its tensors have the names that both ports give them."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2, padding=0)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, stride=1, padding=0)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3, stride=1, padding=1)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1, stride=1, padding=0)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, stride=1, padding=0)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = _a(192, 32), _a(256, 64), _a(288, 64)
        self.Mixed_6a = _b()
        self.Mixed_6b, self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = _c(128), _c(160), _c(160), _c(192)
        self.Mixed_7a = _d()
        self.Mixed_7b, self.Mixed_7c = _e(1280, "mean"), _e(2048, "maximum")
        self.fc = nn.Linear(2048, 1008)

    def forward(self, inputs: Tensor, taps: Sequence[Tap] = ("2048",)) -> dict[Tap, Tensor]:
        """Features by tap, (B, width) each; what lies behind the last of them is not run.

        Args:
            inputs: float32 (B, 3, 299, 299), as a pixel path gives them.
            taps: which.
        """
        found: dict[Tap, Tensor] = {}
        maps, stages = inputs, self._stages()
        for tap in list(WIDTHS)[: max(map(list(WIDTHS).index, taps)) + 1][:4]:
            for stage in stages[tap]:
                maps = stage(maps)
            found[tap] = maps.mean((2, 3))
        if {"logits_unbiased", "logits"} & set(taps):
            scores = found["2048"].double() @ self.fc.weight.T.double()  # which no setting for matrices makes TF32
            found |= {"logits_unbiased": scores.float(), "logits": (scores + self.fc.bias).float()}
        return {tap: found[tap] for tap in taps}

    def _stages(self) -> dict[Tap, tuple[nn.Module, ...]]:
        halve = nn.MaxPool2d(3, stride=2)
        return {
            "64": (self.Conv2d_1a_3x3, self.Conv2d_2a_3x3, self.Conv2d_2b_3x3, halve),
            "192": (self.Conv2d_3b_1x1, self.Conv2d_4a_3x3, halve),
            "768": tuple(self.get_submodule(f"Mixed_{name}") for name in ("5b", "5c", "5d", "6a", "6b", "6c", "6d", "6e")),
            "2048": (self.Mixed_7a, self.Mixed_7b, self.Mixed_7c),
        }


@dataclass(frozen=True)
class Extractor:
    """An Inception in float32 evaluation mode, and what it is."""

    network: Inception
    name: str
    """`FID_NAME` for the published weights alone."""
    weights_hash: str
    """SHA-256 of its file or, for a seeded one, over its tensors."""
    batch_size: int
    """Rows of every forward; a short last batch is filled and cut, so that a feature does not depend on its neighbours."""

    @property
    def is_fid(self) -> bool:
        """Whether a distance of its features may be called FID."""
        return self.name == FID_NAME

    def identity(self) -> dict[str, Any]:
        """Name and hash, as a metric's identity keeps them."""
        return {"extractor": self.name, "weights_hash": self.weights_hash}

    @torch.no_grad()
    def features(self, inputs: Tensor, *, taps: Sequence[Tap] = ("2048",)) -> dict[Tap, np.ndarray]:
        """Features by tap, float32 (B, width) each.

        Args:
            inputs: float32 (B, 3, 299, 299), as a pixel path gives them.
            taps: names out of `WIDTHS`.

        Raises:
            ConfigError: inputs of another shape or type, or an unknown tap.
        """
        _check(inputs, taps)
        done: dict[Tap, list[np.ndarray]] = {tap: [np.empty((0, WIDTHS[tap]), dtype=np.float32)] for tap in taps}
        device = self.network.fc.weight.device
        for batch in inputs.split(self.batch_size) if len(inputs) else ():
            full = launch.filled(batch, self.batch_size).to(device)
            with launch.whole_float32(device):
                found = self.network(full.contiguous(memory_format=torch.channels_last), taps)
            for tap, features in found.items():
                done[tap].append(features[: len(batch)].cpu().numpy())
        return {tap: np.concatenate(parts) for tap, parts in done.items()}


def _check(inputs: Tensor, taps: Sequence[str]) -> None:
    if inputs.dtype != torch.float32 or inputs.shape[1:] != (3, SIDE, SIDE):
        raise ConfigError(
            f"Inception takes float32 (B, 3, {SIDE}, {SIDE}) and was given {inputs.dtype} {tuple(inputs.shape)}; "
            "make its input with a pixel path (sdlab.pixels)"
        )
    unknown = [tap for tap in taps if tap not in WIDTHS]
    if unknown or not taps:
        raise ConfigError(f"Inception has no tap {', '.join(map(repr, unknown)) or 'of no name'}; choose from {', '.join(WIDTHS)}")


def load(
    path: str | Path | None = None, *, extractor: str | None = None, device: torch.device | str = "cpu", batch_size: int | None = None
) -> Extractor:
    """An Inception from a file of weights.

    Args:
        path: of a .pth or .safetensors file with the ports' names; None to look where pytorch-fid and torch-fidelity cache it.
        extractor: a name of your own for weights that are not the published ones, without "FID" or "2015" in it.
        device: where it runs.
        batch_size: rows of every forward; None for 8 on a CPU and 64 elsewhere.

    Raises:
        ConfigError: no file, another hash than the published one and no name for it, torchvision's network, or damaged weights.
    """
    path = _cached() if path is None else Path(path)
    sha256, sha1 = _hashes(path)
    published = sha256 == FID_SHA256 or sha1 == FID_SHA1
    if sha256.startswith(TORCHVISION):
        raise _not_torchvision(path)
    if published != (extractor is None):
        raise _wrong_name(path, sha256, extractor)
    if extractor is not None and any(word in extractor.lower() for word in ("fid", "2015")):
        raise ConfigError(f"extractor={extractor!r} could be taken for FID's, which {path} is not; name it without 'FID' and '2015'")
    return _extractor(_read(path), FID_NAME if extractor is None else extractor, sha256, device, batch_size)


def seeded(seed: int, *, device: torch.device | str = "cpu", batch_size: int | None = None) -> Extractor:
    """An Inception with random weights that keep its features apart: for tests, and of no meaning as a judge.

    Args:
        seed: the same gives the same weights.
        device: where it runs.
        batch_size: as for `load`.
    """
    random = np.random.default_rng(seed)
    tensors = {name: torch.from_numpy(_draw(name, shape, random)) for name, shape in _shapes().items()}
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return _extractor(tensors, f"random Inception of seed {seed}", digest.hexdigest(), device, batch_size)


def _draw(name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Weights that keep the variance of maps (He et al. 2015), and normalisations that are near the identity but not it."""
    if len(shape) > 1:
        return random.standard_normal(shape, dtype=np.float32) * np.float32((2 / np.prod(shape[1:])) ** 0.5)
    if name.endswith(("bn.weight", "running_var")):
        return random.random(shape, dtype=np.float32) + np.float32(0.5)
    return random.standard_normal(shape, dtype=np.float32) * np.float32(0.1)


def _extractor(
    tensors: Mapping[str, Tensor], name: str, weights_hash: str, device: torch.device | str, batch_size: int | None
) -> Extractor:
    with torch.device("meta"):
        network = Inception()
    network.load_state_dict({key: tensor.float() for key, tensor in tensors.items()}, assign=True)
    network = network.eval().requires_grad_(False).to(device).to(memory_format=torch.channels_last)
    return Extractor(network, name, weights_hash, batch_size or (8 if torch.device(device).type == "cpu" else 64))


def _shapes() -> dict[str, tuple[int, ...]]:
    """What a file of weights holds; how many batches a normalisation has seen is not asked for."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Inception().state_dict().items() if not name.endswith("num_batches_tracked")}


def _cached() -> Path:
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    for name in SOURCES:
        if (folder / name).is_file():
            return folder / name
    name, address = next(iter(SOURCES.items()))
    raise ConfigError(
        f"the FID Inception is not in {folder} ({' or '.join(SOURCES)}); fetch it where there is a network and put it there "
        f"(curl -L -o {folder / name} {address}{name}), or give its path"
    )


def _hashes(path: Path) -> tuple[str, str]:
    """SHA-256 and SHA-1 of a file, read once."""
    digests = hashlib.sha256(), hashlib.sha1(usedforsecurity=False)
    try:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                for digest in digests:
                    digest.update(block)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({captions.error_line(error)}); give the file of the FID Inception's weights") from None
    return digests[0].hexdigest(), digests[1].hexdigest()


def _read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, checked against what the network needs."""
    if path.suffix == ".safetensors":
        tensors: Mapping[str, Tensor] = files.Tensors([path])
    else:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch, pickle and zipfile have their own
            raise ConfigError(f"{path} is no file of tensors by name, or is cut off ({captions.error_line(error)}); give a .pth") from None
    if not isinstance(tensors, Mapping) or not all(isinstance(tensors[name], Tensor) for name in tensors):
        raise ConfigError(f"{path} holds no tensors by name; give a state_dict, as pytorch-fid and torch-fidelity publish it")
    if any(name.startswith("AuxLogits.") for name in tensors) or ("fc.bias" in tensors and len(tensors["fc.bias"]) == 1000):
        raise _not_torchvision(path)
    kept = {name: tensors[name] for name in tensors if not name.endswith("num_batches_tracked")}
    files.check_shapes(kept, _shapes(), f"{path} does not hold the weights of the 2015 Inception")
    files.check_finite(kept, f"the weights of {path} are")
    return kept


def _not_torchvision(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is torchvision's ImageNet Inception, on whose features no FID is defined: other weights, 1000 classes and not 1008, "
        f"and pools that count the padding; give {next(iter(SOURCES))}"
    )


def _wrong_name(path: Path, sha256: str, extractor: str | None) -> ConfigError:
    if extractor is not None:
        return ConfigError(f"{path} is the FID Inception itself and cannot be called {extractor!r}; leave extractor out")
    return ConfigError(
        f"{path} has SHA-256 {sha256} and the FID Inception has {FID_SHA256}; fetch {next(iter(SOURCES))} again, "
        "or, if it is meant to be another network of this shape, name it: extractor='...'"
    )
