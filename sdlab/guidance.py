"""Guidance: how what a UNet says with and without the prompt becomes what a solver follows, as plain functions.

A guidance function takes `(cond, uncond, guidance_scale, at)`: two predictions (B, C, h, w) of the UNet's own prediction type, one scale an
image as (B, 1, 1, 1), and where the drawing is. It gives the prediction to follow; or a pair, the one that the picture is read from
and the one that the noise is read from.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import math
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from sdlab.config import ConfigError, nearest


class At(NamedTuple):
    """Where a drawing is."""

    timestep: int
    sigma: float
    """Noise over signal, falling to nearly 0 (Karras et al. 2022)."""
    progress: float
    """Share of the timesteps that lies behind, from 0 to 1."""


Combine = Callable[[Tensor, Tensor, Tensor, At], Any]
"""One's own guidance: see the module."""


def constant(cond: Tensor, uncond: Tensor, guidance_scale: Tensor | float, at: At | None = None) -> Tensor:
    """Classifier-free guidance: uncond + guidance_scale x (cond - uncond) (Ho & Salimans 2022, eq. 6 with w = guidance_scale - 1)."""
    return uncond + guidance_scale * (cond - uncond)


def rescaled(cond: Tensor, uncond: Tensor, guidance_scale: Tensor | float, at: At | None = None, *, mix: float = 0.7) -> Tensor:
    """Constant guidance brought back to the spread of `cond`, a share `mix` of it (Lin et al. 2024, eq. 14 to 16)."""
    guided = constant(cond, uncond, guidance_scale)
    dims = tuple(range(1, guided.ndim))
    wanted, found = (pred.float().std(dim=dims, keepdim=True) for pred in (cond, guided))
    return guided * (mix * (wanted / found) + 1 - mix).to(guided.dtype)


def plus_plus(cond: Tensor, uncond: Tensor, guidance_scale: Tensor | float, at: At | None = None) -> tuple[Tensor, Tensor]:
    """CFG++: the picture from both predictions, the noise from `uncond` (Chung et al. 2025, algorithm 2); scales from 0 to 1."""
    return constant(cond, uncond, guidance_scale), uncond


def _as_it_is(guidance_scale: float, at: At) -> float:
    return guidance_scale


@dataclass(frozen=True)
class Guidance:
    """A guidance function, the scale that it gets at each point, and which rows the UNet may leave out."""

    name: str = "constant"
    """As `named` reads it; of one's own function its name."""
    combine: Combine = constant
    scale_at: Callable[[float, At], float] = _as_it_is
    """The scale of an image where a drawing is."""
    one_is_cond: bool = True
    """At scale 1 it gives `cond`, so that unconditional rows are not run."""
    zero_is_uncond: bool = True
    """At scale 0 it gives `uncond`, so that conditional rows are not run."""
    largest: float = math.inf
    """Of the scales that make sense."""
    splits: bool = False
    """It gives a pair, which first-order solvers alone can follow."""
    source_hash: str | None = None
    """SHA-256 of the source of one's own function."""

    def needs(self, guidance_scale: float, at: At) -> tuple[bool, bool]:
        """Whether the conditional and the unconditional prediction of an image are needed."""
        scale = self.scale_at(guidance_scale, at)
        return not (scale == 0 and self.zero_is_uncond), not (scale == 1 and self.one_is_cond)


CONSTANT = Guidance()


def interval(low: float = 0.38, high: float = 3.22) -> Guidance:
    """Constant guidance for sigma in (low, high], none outside (Kynkaanniemi et al. 2024).

    The defaults are the paper's interval for ImageNet-512, brought from a data spread of 0.5 to that of scaled latents, about 1.
    """
    if not 0 <= low < high:
        raise ConfigError(f"guidance interval({low:g}, {high:g}): sigma falls from high to low, and 0 <= low < high")
    return Guidance(f"interval({low}, {high})", scale_at=functools.partial(_inside, low=low, high=high))


def _inside(guidance_scale: float, at: At, *, low: float, high: float) -> float:
    return guidance_scale if low < at.sigma <= high else 1.0


def rising(least: float = 1.0) -> Guidance:
    """A scale that grows with progress, on average as given, and never below `least` (Wang et al. 2024, clamped linear)."""
    if not least >= 0:
        raise ConfigError(f"guidance rising({least:g}): the least scale is 0 or more")
    return Guidance(f"rising({least})", scale_at=functools.partial(_growing, least=least))


def _growing(guidance_scale: float, at: At, *, least: float) -> float:
    if guidance_scale <= least:
        return guidance_scale
    slope = guidance_scale + math.sqrt(guidance_scale**2 - least**2)  # with which the mean over progress is guidance_scale
    return max(least, slope * at.progress)


def rescale(mix: float = 0.7) -> Guidance:
    """`rescaled` with a share from 0 to 1."""
    if not 0 <= mix <= 1:
        raise ConfigError(f"guidance rescale({mix:g}): the share lies between 0 and 1")
    return Guidance(f"rescale({mix})", functools.partial(rescaled, mix=mix), zero_is_uncond=False)


GUIDANCES: dict[str, Callable[..., Guidance]] = {
    "constant": lambda: CONSTANT,
    "interval": interval,
    "rising": rising,
    "rescale": rescale,
    "cfgpp": lambda: Guidance("cfgpp", plus_plus, one_is_cond=False, largest=1.0, splits=True),
}
"""By name, with their numbers as arguments."""
_CALL = re.compile(r"(?P<name>[\w.]+(?::\w+)?)\s*(?P<arguments>\(.*\))?", re.DOTALL)


def named(text: str) -> Guidance:
    """The guidance that a text names: one of `GUIDANCES`, as in "interval" or "interval(0.4, 3)", or a function as "module:function".

    Raises:
        ConfigError: nothing has that name, or it takes other arguments.
    """
    found = _CALL.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"guidance {text!r} is neither one of {', '.join(GUIDANCES)} nor a function as 'module:function'")
    name, arguments = found["name"], found["arguments"]
    if ":" in name:
        if arguments:
            raise ConfigError(f"guidance {text!r}: a function takes no arguments here; give it as {name!r}")
        return _imported(name)
    if name not in GUIDANCES:
        known = f"{', '.join(GUIDANCES)}, and functions of one's own as 'module:function'"
        raise ConfigError(f"guidance {name!r} is not known; known are {known}{nearest(name, GUIDANCES)}")
    try:
        numbers, settings = _numbers(arguments or "()")
        return GUIDANCES[name](*numbers, **settings)
    except ConfigError:
        raise
    except (TypeError, ValueError, SyntaxError, OverflowError, MemoryError, RecursionError):
        raise ConfigError(
            f"guidance {text!r} cannot be read; its arguments are finite numbers: {name}{_signature(GUIDANCES[name])}"
        ) from None


def _numbers(arguments: str) -> tuple[list[float], dict[str, float]]:
    call = ast.parse(f"f{arguments}", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(arguments)
    numbers = [ast.literal_eval(value) for value in call.args]
    settings = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    if len(settings) < len(call.keywords):
        raise ValueError(arguments)
    for number in (*numbers, *settings.values()):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(number)
    return numbers, settings


def _signature(make: Callable[..., Guidance]) -> str:
    return str(inspect.signature(make)).split(" ->")[0].replace(": 'float' = ", "=")


def _imported(name: str) -> Guidance:
    module, _, function = name.partition(":")
    try:
        importlib.invalidate_caches()
        found = getattr(_fresh(module)[0], function)
        where = inspect.getmodule(found)
        if where is not None and where.__name__ != module and _fresh(where.__name__)[1]:
            importlib.reload(sys.modules[module])
        found = getattr(sys.modules[module], function)
    except (Exception, SystemExit) as error:  # a module of one's own may raise anything
        places = f"looked for in {os.getcwd()} and on PYTHONPATH"
        raise ConfigError(f"guidance {name!r} cannot be imported ({places}): {type(error).__name__}: {error}") from None
    return replace(own(found), name=name, source_hash=_source_hash(found, sys.modules[module]))


_READ: dict[str, bytes] = {}
"""The source of each module of one's own as it was imported for guidance."""


def _fresh(module: str) -> tuple[ModuleType, bool]:
    """A module as its file is now, and whether it had to be read again; what is installed is never read again."""
    known = module in sys.modules
    home = importlib.import_module(module)
    file = Path(getattr(home, "__file__", None) or "")
    installed = any(file.is_relative_to(place) for place in {*sysconfig.get_paths().values(), str(Path(__file__).parent)})
    if file.suffix != ".py" or installed:
        return home, False
    source = file.read_bytes()
    stale = known and _READ.get(module) != source
    _READ[module] = source
    return (importlib.reload(home), True) if stale else (home, False)


def own(function: Combine) -> Guidance:
    """One's own function as a guidance; every row is run, whatever the scale.

    Raises:
        ConfigError: it cannot be called with four arguments.
    """
    called = getattr(function, "__name__", type(function).__name__)
    try:
        inspect.signature(function).bind(None, None, None, None)
    except (TypeError, ValueError):
        raise ConfigError(f"guidance {called} has to take four arguments: cond, uncond, guidance_scale, at") from None
    name = "own function" if called == "<lambda>" else f"own function {called}"
    return Guidance(name, function, one_is_cond=False, zero_is_uncond=False, source_hash=_source_hash(function))


def _source_hash(function: Combine | ModuleType, home: ModuleType | None = None) -> str | None:
    """SHA-256 of the function's source, of the whole module where it has one, so that what it calls there counts too.

    `home` is the module that it was found in, where that may be another one.
    """
    while isinstance(function, functools.partial):
        function = function.func
    where = inspect.getmodule(function)
    origins = [function if where is None or where.__name__ == "__main__" else where]
    if home is not None and home is not where and home.__name__ != "__main__":
        origins.append(home)
    try:
        source = "".join(inspect.getsource(origin) for origin in origins)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(source.encode()).hexdigest()


def read(guidance: Guidance | Combine | str) -> Guidance:
    """A guidance from what a user gives: a text as in `named`, a function of one's own, or a guidance.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(guidance, Guidance):
        return guidance
    if isinstance(guidance, str):
        return named(guidance)
    if callable(guidance):
        return own(guidance)
    raise ConfigError(f"guidance={guidance!r}; give one of {', '.join(GUIDANCES)}, a function, or 'module:function'")
