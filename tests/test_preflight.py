import json
from pathlib import Path

import pytest
from PIL import Image

from sdlab import models, preflight, prepare
from sdlab.config import ConfigError

pytestmark = pytest.mark.usefixtures("loaded_once")
REPORT = {"scanned", "used", "filtered", "quarantined", "captions"}


def run(source: object, data_dir: Path, **options: object) -> dict:
    return prepare.prepare(prepare.configure(**{"source": str(source), "data_dir": str(data_dir), "resolution": 32, **options}))


def report_of(folder: Path) -> dict:
    report = json.loads((folder / "preflight.json").read_text())
    assert set(report) == REPORT
    assert report["scanned"] == report["used"] + sum(report["filtered"].values()) + sum(report["quarantined"].values())
    captions = report["captions"]
    assert list(captions) == ["present", "missing", "empty", "truncated"]
    assert captions["present"] + captions["missing"] + captions["empty"] == report["scanned"]
    return report


def test_every_picture_is_used_filtered_or_quarantined_with_its_reason(pictures, tmp_path):
    (pictures / "bare.png").write_bytes((pictures / "apple.png").read_bytes())
    (pictures / "blank.png").write_bytes((pictures / "apple.png").read_bytes())
    (pictures / "blank.txt").write_text(" \n")
    (pictures / "deep").mkdir()
    (pictures / "deep/cut.png").write_bytes((pictures / "cat.png").read_bytes()[:600])
    (pictures / "deep/cut.txt").write_text("cut " * 60)
    for name, size in (("wide", (200, 40)), ("thin", (40, 200)), ("small", (20, 20))):
        Image.new("RGB", size).save(pictures / f"{name}.png")
        (pictures / f"{name}.txt").write_text(name)
    filters = {"min_aspect": 0.5, "max_aspect": 2}
    run(pictures, tmp_path / "data", min_resolution=32, filters=filters, max_bad_fraction=0.3)
    report = report_of(tmp_path / "data")
    assert report["scanned"] == 12 and report["used"] == 6
    assert report["filtered"] == {"max_aspect": 1, "min_aspect": 1, "min_resolution": 1}
    assert report["quarantined"] == {"no_caption": 2, "unreadable": 1}
    assert report["captions"] == {"present": 10, "missing": 1, "empty": 1, "truncated": 1}
    rows = preflight.read_quarantine(tmp_path / "data")
    assert [(row["path"], row["reason"]) for row in rows] == [
        ("bare.png", "no_caption"),
        ("blank.png", "no_caption"),
        ("deep/cut.png", "unreadable"),
    ]
    assert all(set(row) == {"path", "reason", "detail"} and row["detail"] for row in rows)
    tiles, reasons = preflight.quarantined_pictures(prepare.configure(source=str(pictures), data_dir=str(tmp_path / "data")))
    assert reasons == ["bare.png: no_caption", "blank.png: no_caption", "deep/cut.png: unreadable"]
    assert (tiles[2] == 160).all() and (tiles[0] != 160).any()


def test_no_captions_at_all_stops_before_anything_is_encoded(pictures, tmp_path, frozen, monkeypatch):
    monkeypatch.setattr(models.Frozen, "encode_moments", lambda *_: pytest.fail("encoded"))
    for path in pictures.glob("*.txt"):
        path.rename(path.with_suffix(".json"))
        path.with_suffix(".json").write_text('{"title": "x"}')
    with pytest.raises(ConfigError, match=r"no captions: none of the 6 pictures in .*it has title.*caption_column.*allow_uncaptioned"):
        run(pictures, tmp_path / "data", max_bad_fraction=1)
    assert report_of(tmp_path / "data")["quarantined"] == {"no_caption": 6}
    assert not (tmp_path / "data/manifest.json").exists()


def test_too_many_bad_pictures_stop_before_anything_is_encoded(pictures, tmp_path, monkeypatch):
    (pictures / "cat.png").write_bytes(b"broken")
    monkeypatch.setattr(models.Frozen, "encode_moments", lambda *_: pytest.fail("encoded"))
    said = r"1 of the 6 pictures in .*cannot be used \(1 unreadable\).*max_bad_fraction=0.1.*quarantine\.jsonl"
    with pytest.raises(ConfigError, match=said):
        run(pictures, tmp_path / "data", max_bad_fraction=0.1)
    monkeypatch.undo()
    assert run(pictures, tmp_path / "data", max_bad_fraction=1 / 6)["counts"]["used"] == 5


def test_filters_that_leave_nothing_are_refused_with_the_counts(pictures, tmp_path):
    with pytest.raises(ConfigError, match=r"no picture is left of the 6 .*min_resolution.*6"):
        run(pictures, tmp_path / "data", min_resolution=4000)
