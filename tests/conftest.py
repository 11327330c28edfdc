"""What all tests share: quiet threads, a terminal's signals, small sets of pictures and scenes, and the frozen parts."""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator

os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="sdlab-tests-")  # parts that are drawn or unpacked are kept below it
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sdlab.parts import Frozen

atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

# nohup and a shell's background jobs start with these ignored, and what is ignored the engine leaves alone
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)


in_ci = pytest.mark.skipif(os.environ.get("CI") != "true", reason="takes long; runs where CI=true")
"""Marks a test that is left out of a user's quick run."""


def needs(part: str, there: bool) -> None:
    """Skip with a reason where a part is not installed; fail in CI, where it has to be."""
    if not there and os.environ.get("CI") == "true":
        pytest.fail(f"{part} is not there, and CI has to have it")
    if not there:
        pytest.skip(f"{part} is not there")


@pytest.fixture(scope="session")
def scenes_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of 40 scenes at 32 and 64 pixels."""
    from sdlab import prepare

    folder = tmp_path_factory.mktemp("data") / "scenes"
    prepare.prepare(prepare.configure(preset="tiny", source="scenes", data_dir=str(folder), resolution=[32, 64], limit=40))
    return folder


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that goes when the module's tests are done."""
    folder = tmp_path_factory.mktemp("scratch")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def frozen() -> "Frozen":
    """The frozen parts that sdlab ships."""
    from sdlab import parts, presets

    return parts.load_frozen(presets.get("tiny").networks)


@pytest.fixture
def loaded_once(frozen: "Frozen", monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the same weights for every test would be most of the time."""
    from sdlab import parts

    monkeypatch.setattr(parts, "load_frozen", lambda networks: frozen)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Six emoji with captions, at 40 pixels."""
    from PIL import Image

    from sdlab import scenes

    folder = tmp_path / "pictures"
    folder.mkdir()
    for path in sorted(scenes.EMOJI_DIR.glob("*.png"))[:6]:
        Image.open(path).resize((40, 40)).save(folder / path.name)
        (folder / path.with_suffix(".txt").name).write_text(f"an emoji: {path.stem}")
    return folder
