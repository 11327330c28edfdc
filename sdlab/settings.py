"""What a picture was drawn with, written into its PNG twice: exactly, and as A1111's web UI does, where a prompt can look like the rest."""

from __future__ import annotations

import json
import os
import re
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdlab.config import ConfigError, resolve_path

SAMPLERS = {"plms": "PLMS", "ddim": "DDIM", "dpmpp_2m": "DPM++ 2M", "euler": "Euler"}
"""A1111's names of the solvers."""
_CHOICES: dict[str, list[Any]] = {"solver": list(SAMPLERS), "spacing": ["leading", "trailing", "linspace", None]}
_NEGATIVE = "Negative prompt:"
_NAMES = {
    **{"num_inference_steps": "Steps", "solver": "Sampler", "guidance_scale": "CFG scale", "seed": "Seed", "size": "Size"},
    **{"weights_hash": "Model hash", "model": "Model", "spacing": "Timestep spacing", "guidance": "Guidance", "weights": "Weights"},
    **{"step": "Step", "precision": "Precision", "batch_size": "Batch size", "guidance_source": "Guidance source"},
}
_QUOTED = re.compile(r'[,:"\n]|^\s|\s\Z')
_PAIR = re.compile(r'(?:^|,)([^:,"]+):\s*("(?:[^"\\]|\\.)*(?:"|\\?$)|[^,]*)')


@dataclass(frozen=True)
class Settings:
    """Everything one picture was drawn with; from `model` on "" and 0 are not known; ConfigError for a field of a wrong type or range."""

    prompt: str
    negative_prompt: str = ""
    guidance_scale: float = 2.0
    guidance: str = "constant"
    solver: str = "dpmpp_2m"
    spacing: str | None = None
    num_inference_steps: int = 10
    seed: int = 0
    model: str = ""
    weights: str = ""
    step: int = 0
    weights_hash: str = ""
    width: int = 0
    height: int = 0
    batch_size: int = 0
    precision: str = "32-true"
    guidance_source: str = ""
    """SHA-256 of the source of a guidance function of one's own."""

    def __post_init__(self) -> None:
        for name, kind in Settings.__annotations__.items():
            if wanted := _wanted(name, kind, getattr(self, name)):
                raise ConfigError(f"{name} has to be {wanted} (given: {getattr(self, name)!r:.80})")


def _wanted(name: str, kind: str, value: Any) -> str:
    """What a field has to be, "" where it is."""
    if name in _CHOICES:
        return "" if value in _CHOICES[name] else f"one of {', '.join(map(str, _CHOICES[name]))}"
    if kind == "str":
        return "" if isinstance(value, str) else "text"
    least, number = int(name == "num_inference_steps"), (int if kind == "int" else int | float)
    fits = isinstance(value, number) and not isinstance(value, bool) and least <= value < 2**63
    return "" if fits else f"{'a whole' if kind == 'int' else 'a'} number from {least} to 2^63"


def to_text(settings: Settings) -> str:
    """The text that A1111's web UI keeps with a picture: the prompts, then a line of what is known, also under names of our own."""
    said: dict[str, Any] = asdict(settings)
    said |= {
        "model": Path(settings.model).name,
        "solver": SAMPLERS[settings.solver],
        "seed": str(settings.seed),
        "weights_hash": settings.weights_hash[:10],
    }
    said["guidance_source"] = settings.guidance_source[:10]
    said["guidance_scale"] = repr(float(settings.guidance_scale)).removesuffix(".0")
    said["size"] = f"{settings.width}x{settings.height}" if settings.width and settings.height else ""
    pairs = {name: str(said[field]) for field, name in _NAMES.items() if said[field]} | {"Version": f"sdlab {version('sdlab')}"}
    lines = [settings.prompt] * bool(settings.prompt) + [f"{_NEGATIVE} {settings.negative_prompt}"] * bool(settings.negative_prompt)
    texts = {name: json.dumps(value, ensure_ascii=False) if _QUOTED.search(value) else value for name, value in pairs.items()}
    return "\n".join([*lines, ", ".join(f"{name}: {value}" for name, value in texts.items())])


def from_text(text: str) -> Settings:
    """Settings from a text of `to_text` or of A1111; what it does not say keeps its default, and names not known are ignored.

    Raises:
        ConfigError: no steps or sampler in the last line, a sampler or schedule that sdlab does not have, a broken number or quote.
    """
    *lines, last = text.replace("\r\n", "\n").rstrip().split("\n")
    pairs = {name.strip(): value.strip() for name, value in _PAIR.findall(last)}
    if missing := [name for name in ("Steps", "Sampler") if name not in pairs]:
        raise ConfigError(f"the last line has no {' and no '.join(missing)}, as in 'Steps: 20, Sampler: Euler' (found: {last!r:.80})")
    said: dict[str, Any] = {field: _value(field, pairs[name]) for field, name in _NAMES.items() if name in pairs}
    said["solver"] = _solver(said["solver"], pairs.get("Schedule type", "Uniform"))
    said["width"], said["height"] = said.pop("size", (0, 0))
    prompt, _, negative_prompt = "\n".join(["", *lines]).partition(f"\n{_NEGATIVE}")
    return Settings(prompt[1:], negative_prompt.removeprefix(" "), **said)


def _value(field: str, value: str) -> Any:
    """A value as its field wants it; the size, which is no field, as (width, height)."""
    try:
        value = str(json.loads(value)) if value.startswith('"') else value
        width, _, height = value.partition("x")
        read = {"int": int, "float": float}.get(Settings.__annotations__.get(field, ""), str)
        return (int(width), int(height)) if field == "size" else read(value)
    except ValueError:
        raise ConfigError(f"{_NAMES[field]} is broken (found: {value!r:.80})") from None


def _solver(sampler: str, schedule: str) -> str:
    """The solver of A1111's name, to which a schedule belongs that is not even, as Karras' is, the automatic one with DPM++ 2M."""
    even = schedule == "Uniform" or (schedule == "Automatic" and sampler != "DPM++ 2M")
    name = sampler if even else f"{sampler} {schedule}"
    if name not in SAMPLERS.values():
        raise ConfigError(f"Sampler {name!r:.80} is no solver of sdlab; known are {', '.join(SAMPLERS.values())}")
    return next(solver for solver, known in SAMPLERS.items() if known == name)


def png_bytes(image: NDArray[np.uint8], settings: Settings) -> bytes:
    """A PNG of `image`, uint8 (3, H, W), with `settings` of its own width and height; ConfigError where the array is no picture."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[0] != 3 or 0 in image.shape:
        raise ConfigError(f"a picture is uint8 (3, H, W), not {image.dtype} {image.shape}")
    settings = replace(settings, width=image.shape[2], height=image.shape[1])
    chunks, file = PngInfo(), BytesIO()
    chunks.add_text("parameters", to_text(settings).replace("\0", "?").encode("utf-8", "replace").decode("utf-8"))
    chunks.add_text("sdlab", json.dumps(asdict(settings)))
    Image.fromarray(np.ascontiguousarray(image.transpose(1, 2, 0))).save(file, format="PNG", pnginfo=chunks)
    return file.getvalue()


def save_png(image: NDArray[np.uint8], settings: Settings, path: str | Path) -> Path:
    """Write `png_bytes` as `write` does."""
    return write(png_bytes(image, settings), path)


def write(png: bytes, path: str | Path) -> Path:
    """Write a PNG whole or not at all, in folders made for it, and return the absolute path; ConfigError where that fails."""
    target = resolve_path(path)
    partial = target.parent / f"{target.name}.{os.getpid()}.partial"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(png)
        os.replace(partial, target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"{target} cannot be written: {error}") from None
    return target


def read_png(path: str | Path) -> Settings:
    """Settings of a PNG, from its text `sdlab`, else A1111's `parameters`; ConfigError, which names the file, where that fails."""
    file = resolve_path(path)
    try:
        with warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning), Image.open(file, formats=["PNG"]) as image:
            image.load()  # texts may follow the pixels
        return _from_texts(image.info)
    except Exception as error:  # Pillow's readers raise nearly every kind of exception on damaged files
        raise ConfigError(f"{file} is not there, damaged or without settings: {error}") from None


def _from_texts(texts: dict[Any, Any]) -> Settings:
    if not texts.keys() & {"sdlab", "parameters"}:
        raise ConfigError("it has neither a text 'sdlab' nor 'parameters'")
    if "sdlab" not in texts:
        return from_text(str(texts["parameters"]))
    said = dict(json.loads(texts["sdlab"]))
    if wrong := sorted(Settings.__annotations__.keys() ^ said.keys()):
        raise ConfigError(f"its text 'sdlab' has unknown fields, or lacks some: {', '.join(wrong[:20])!r:.400}")
    return Settings(**said)
