"""What differs from place to place: how progress is shown, and which attention kernel is used."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def device() -> torch.device:
    """The device of this process: the first GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def progress(*, total: int, title: str, unit: str, initial: int = 0) -> Any:
    """A tqdm bar with rate and ETA: a widget in JupyterLab, plain lines under the sdlab engine and in scripts."""
    if os.environ.get("SDLAB_HEADLESS"):
        from tqdm import tqdm

        return tqdm(total=total, desc=title, unit=unit, initial=initial, file=sys.stderr, mininterval=1.0, ascii=True, ncols=100)
    from tqdm.auto import tqdm as auto

    return auto(total=total, desc=title, unit=unit, initial=initial)


def attention(on: torch.device) -> AbstractContextManager[Any]:
    """The attention kernel to use on a device: on a CPU the plain one, whose backward is several times faster at few tokens."""
    return sdpa_kernel(SDPBackend.MATH) if on.type == "cpu" else nullcontext()
