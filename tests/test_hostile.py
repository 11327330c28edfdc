"""None of the hostile pictures, captions, metadata files and tars crashes, hangs, leaks out of its root or vanishes unreported."""

import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hostile
import pytest

from sdlab import cache, prepare

pytestmark = pytest.mark.usefixtures("loaded_once")
KINDS = hostile.kinds()
PATIENCE_S = 60


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """What takes longer than this is a hang."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"no end after {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_a_hostile_thing_is_used_or_quarantined_with_its_reason_and_harms_nothing(kind: hostile.Kind, tmp_path: Path) -> None:
    try:
        root = hostile.build(kind, tmp_path / "root")
    except OSError as error:
        if kind.picky:
            pytest.skip(f"the file system refuses these names: {error}")
        raise
    before = tree(tmp_path)
    data = tmp_path / "data"
    config = prepare.configure(source=str(root), data_dir=str(data), resolution=16, max_bad_fraction=1.0, num_workers=0)
    manifest = prepare.prepare(config)
    report = json.loads((data / "preflight.json").read_text())
    rows = [json.loads(line) for line in (data / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()]
    assert Counter((row["path"], row["reason"]) for row in rows) >= Counter(
        [(label, reason) for label, reason in kind.expect.items() if reason != "used"] + list(kind.again.items())
    )
    assert not {row["path"] for row in rows} & {label for label, reason in kind.expect.items() if reason == "used"} - set(kind.again)
    assert all(row["detail"] for row in rows)
    assert report["scanned"] == report["used"] + sum(report["filtered"].values()) + sum(report["quarantined"].values())
    assert sum(report["quarantined"].values()) == len(rows) and {row["path"] for row in rows} <= set(kind.expect) | set(kind.again)
    used = cache.open_cache(data, 16)
    assert len(used) == report["used"] == manifest["counts"]["used"] >= sum(reason == "used" for reason in kind.expect.values())
    told = Counter(kind.notes)
    assert all(report["notes"].get(note, 0) >= count for note, count in told.items()), report["notes"]
    captions = {text for text in kind.captions.values() if text is not None}
    assert captions <= set(used.captions(range(len(used))))
    shutil.rmtree(data)
    assert tree(tmp_path) == before
