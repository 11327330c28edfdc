"""What all tests share: quiet threads, and a small set of prepared scenes."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest


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
    prepare.prepare(prepare.PrepareConfig(preset="tiny", source="scenes", data_dir=str(folder), resolution=[32, 64], limit=40))
    return folder
