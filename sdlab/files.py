"""Files of networks: safetensors read tensor by tensor, tables beside them, and repositories of the hub."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.constants import HF_HOME
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sdlab import captions
from sdlab.config import ConfigError

NAMES = ("diffusion_pytorch_model", "model")
"""How diffusers and transformers name files of weights."""
ENCODERS, TOKENIZERS = ("text_encoder", "text_encoder_2"), ("tokenizer", "tokenizer_2")
"""diffusers' names of text encoders and of their tokenizers."""
PICKLES = (".bin", ".ckpt", ".pt", ".pth")
KEPT = Path(HF_HOME) / "sdlab"
"""Where parts are kept that were made from something else: drawn at random, or taken out of a single file."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/\w[\w.-]*")
HUB_WEIGHTS = ("config.json", "*model.safetensors", "*model-*-of-*.safetensors", "*model.safetensors.index.json")
"""What is fetched of a network: no pickles, and one copy of the weights where there are several."""
HUB_PARTS = (
    *(f"{part}/{name}" for part in ("vae", *ENCODERS) for name in HUB_WEIGHTS),
    *(f"{part}/open_clip*" for part in ENCODERS),
    *(f"{part}/*.{kind}" for part in TOKENIZERS for kind in ("json", "txt")),
)
"""What is fetched of frozen parts."""


class Shaped(Mapping[str, Tensor]):
    """Tensors by name that are made or read when they are asked for, and whose shapes are known before."""

    @abstractmethod
    def shapes(self) -> dict[str, Tensor]:
        """The tensors without data."""


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without data; a mapping that offers `shapes()` is asked for them, any other is read tensor by tensor."""
    offered = getattr(tensors, "shapes", None)
    return offered() if offered else {name: torch.empty_like(tensors[name], device="meta") for name in tensors}


def check_shapes(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], said: str) -> None:
    """Refuse tensors whose names and shapes are not the wanted ones.

    Args:
        tensors: by name.
        wanted: shapes by name.
        said: what is wrong then, which opens the message.

    Raises:
        ConfigError: missing, surplus or misshapen names, the first twenty of them listed.
    """
    problems = [f"missing {key}" for key in wanted if key not in tensors]
    problems += [f"unknown {key}" for key in tensors if key not in wanted]
    given = {key: tuple(tensors[key].shape) for key in wanted if key in tensors}
    problems += [f"{key} is {shape}, not {wanted[key]}" for key, shape in given.items() if shape != wanted[key]]
    if problems:
        listed = "; ".join(problems[:20]) + ("; ..." if len(problems) > 20 else "")
        raise ConfigError(f"{said} ({len(problems)} keys): {listed}")


def check_finite(tensors: Mapping[str, Tensor], said: str) -> None:
    """Refuse numbers that are not finite.

    Args:
        tensors: by name.
        said: of what, as in "the weights of x are"; it opens the message.

    Raises:
        ConfigError: with the first names that hold some.
    """
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ConfigError(f"{said} not finite, as float16 makes of large ones: {', '.join(broken[:5])}")


def keep(kind: str, made_from: str, make: Callable[[Path], object]) -> Path:
    """A folder that is made once and kept for as long as nobody removes it.

    Args:
        kind: of what, the name of the folder above.
        made_from: what it depends on.
        make: writes into an empty folder; when it fails nothing is left.
    """
    kept = KEPT / kind / hashlib.sha256(made_from.encode()).hexdigest()[:16]
    if not any(kept.glob("*")):
        kept.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=kept.parent))
        try:
            make(scratch)
            with suppress(OSError):  # somebody else was first
                scratch.rename(kept)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return kept


class Tensors(Shaped):
    """The tensors of safetensors files by name, each read when it is asked for, in float32 or, with `as_stored`, in the file's format."""

    def __init__(self, files: Iterable[Path], *, as_stored: bool = False) -> None:
        self._as_stored = as_stored
        self._files = {key: opened for path in files for opened in [_open(path)] for key in opened.keys()}  # noqa: SIM118 (it is no dict)

    def __getitem__(self, key: str) -> Tensor:
        tensor = self._files[key].get_tensor(key)
        return tensor if self._as_stored else tensor.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shapes(self) -> dict[str, Tensor]:
        """The tensors without data: nothing is read but the files' headers."""
        return {key: torch.empty(opened.get_slice(key).get_shape(), device="meta") for key, opened in self._files.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be loaded, it is cut off or no safetensors file: {captions.error_line(error)}") from None


def metadata(path: Path) -> dict[str, str]:
    """What a safetensors file says of itself.

    Raises:
        ConfigError: it is missing, or no safetensors file.
    """
    return dict(_open(path).metadata() or {})


def hash_files(files: Iterable[Path]) -> str:
    """SHA-256 over the bytes of files, one after the other."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def hash_weights(folder: Path, pattern: str = "*.safetensors") -> str:
    """SHA-256 over some files of a folder, in order of their names."""
    return hash_files(sorted(folder.glob(pattern)))


def read_json(path: Path) -> dict[str, Any]:
    """A table of a pipeline folder.

    Raises:
        ConfigError: it is missing or damaged.
    """
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); give a whole pipeline folder") from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights of one part of a pipeline: one, or the shards that an index names.

    Raises:
        ConfigError: there are none, or only pickled ones, which are never read.
    """
    for name in NAMES:
        index, whole = folder / f"{name}.safetensors.index.json", folder / f"{name}.safetensors"
        if index.is_file():
            return _shards(index)
        if whole.is_file():
            return [whole]
    there = ", ".join(sorted(path.name for path in folder.glob("*"))[:10]) or "nothing"
    raise ConfigError(
        f"{folder} has no {' or '.join(f'{name}.safetensors' for name in NAMES)} ({there}): {refuse_pickles('from_pretrained')}"
    )


def _shards(index: Path) -> list[Path]:
    named = read_json(index).get("weight_map")
    names = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
    wrong = [name for name in names if Path(name).name != name or not (index.parent / name).is_file()]
    if wrong or not names:
        raise ConfigError(f"{index} names {', '.join(wrong[:5]) or 'no files'}, not there; give a whole pipeline folder")
    return [index.parent / name for name in names]


def refuse_pickles(loader: str) -> str:
    """Why pickled weights are not read, and how a user converts them with a loader of diffusers."""
    convert = f"from diffusers import StableDiffusionPipeline as P; P.{loader}('OLD').save_pretrained('NEW')"
    return f'pickled weights can run code and are never read; convert them where you trust them: python -c "{convert}"'


def fetch(repository: str, patterns: Sequence[str], *, commit: str | None = None, here: Path) -> Path:
    """Bring files of a hub repository into the hub's cache, where they are not yet there, and return their folder, named by commit.

    Args:
        repository: its id, as in "owner/name".
        patterns: which files.
        commit: of which version; None for the newest.
        here: the path that was looked at before, for the message.

    Raises:
        ConfigError: it is not there or cannot be reached.
    """
    try:
        return Path(huggingface_hub.snapshot_download(repository, revision=commit, allow_patterns=list(patterns)))
    except Exception as error:  # its own errors, those of its HTTP library and those of the disk
        offline = huggingface_hub.is_offline_mode()
        told = " (HF_HUB_OFFLINE is set: only in its cache), where it is not" if offline else f": {captions.error_line(error)}"
        raise ConfigError(
            f"model {repository!r} is no path here ({here}), and the hub was asked for a repository of this name{told}; "
            f"correct the name, or fetch it where there is a network: HF_HUB_OFFLINE=0 hf download {repository}"
        ) from None
