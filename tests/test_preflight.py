"""Every picture is used, filtered or quarantined with its reason, and nothing is decoded that need not be."""

import json
from pathlib import Path

import pytest
from PIL import Image

from sdlab import parts, pool, preflight, prepare
from sdlab import pictures as pixels
from sdlab.config import ConfigError

pytestmark = pytest.mark.usefixtures("loaded_once")


def configured(source: object, data_dir: Path, **options: object) -> prepare.PrepareConfig:
    return prepare.configure(**{"source": str(source), "data_dir": str(data_dir), "resolution": 32, "num_workers": 0, **options})


def inspected(source: object, data_dir: Path, **options: object) -> dict:
    prepare.inspect(configured(source, data_dir, **options))
    report = preflight.read_preflight(data_dir)
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
    found = prepare.inspect(configured(pictures, tmp_path / "data", min_resolution=32, filters="aspect >= 0.5, aspect <= 2"))
    report = preflight.read_preflight(tmp_path / "data")
    assert report["scanned"] == 12 and report["used"] == 6 == len(found.rows)
    assert report["filtered"] == {"aspect": 2, "min_resolution": 1}
    assert report["quarantined"] == {"no_caption": 2, "unreadable": 1}
    assert report["captions"] == {"present": 10, "missing": 1, "empty": 1, "truncated": 1}
    rows = preflight.read_quarantine(tmp_path / "data")
    assert [(row["path"], row["reason"]) for row in rows] == [
        ("bare.png", "no_caption"),
        ("blank.png", "no_caption"),
        ("deep/cut.png", "unreadable"),
    ]
    assert all(set(row) == {"path", "reason", "detail", "root"} and row["detail"] for row in rows)
    assert {row["root"] for row in rows} == {str(pictures)}
    tiles, reasons = preflight.quarantined_pictures(found)
    assert reasons == ["no_caption: bare.png", "no_caption: blank.png", "unreadable: deep/cut.png"]
    assert (tiles[2] == 160).all() and (tiles[0] != 160).any()


def test_the_shapes_of_used_and_of_filtered_pictures_are_counted_apart(pictures, tmp_path):
    Image.new("RGB", (200, 100)).save(pictures / "wide.png")
    (pictures / "wide.txt").write_text("wide")
    shapes = inspected(pictures, tmp_path / "data", filters={"aspect": "<= 1.5"})["shapes"]
    assert shapes["used_smaller_side"] == {"40": 6} and shapes["filtered_smaller_side"] == {"100": 1}
    assert shapes["used_aspect"] == {"1.00": 6} and shapes["filtered_aspect"] == {"2.00": 1}
    assert sum(shapes["used_tokens"].values()) == 6


def test_what_the_listing_has_counted_is_reported(pictures, tmp_path):
    (pictures / "lost.txt").write_text("no picture")
    (pictures / "notes.md").write_text("ignored")
    (pictures / "twin.png").write_bytes((pictures / "apple.png").read_bytes())
    (pictures / "twin.txt").write_text("another apple")
    report = inspected(pictures, tmp_path / "data")
    assert report["listed"]["captions_without_picture"] == 1 and report["listed"]["ignored"] == {".md": 1}
    assert report["notes"]["same_bytes_as_another"] == 1
    assert report["source"] == "image folder: 7 pictures"


# Filters


def with_scores(folder: Path, scores: dict[str, object]) -> Path:
    lines = [json.dumps({"file_name": f"{name}.png", "text": name, "aesthetic": score}) for name, score in scores.items()]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def test_filters_by_metadata_take_pictures_before_they_are_decoded(pictures, tmp_path, monkeypatch):
    with_scores(pictures, {"apple": 6.5, "cat": "5.0", "balloon": 4.9, "car": None})
    for path in pictures.glob("*.txt"):
        path.unlink()
    (pictures / "balloon.png").write_bytes(b"cannot be decoded, and is not")
    looked_at: list[int] = []
    check = pixels.check_batch
    monkeypatch.setattr(pixels, "check_batch", lambda handles, known: looked_at.append(len(handles)) or check(handles, known=known))
    report = inspected(pictures, tmp_path / "data", filters=["aesthetic >= 5.0"])
    assert report["used"] == 2 and sum(looked_at) == 2
    assert report["filtered"] == {"aesthetic": 1, "aesthetic_missing": 3}


def test_the_smallest_side_may_be_known_from_the_metadata_but_the_picture_has_the_last_word(pictures, tmp_path):
    rows = [{"file_name": path.name, "text": path.stem, "width": 400, "height": 400} for path in sorted(pictures.glob("*.png"))]
    rows[0]["width"] = 10
    (pictures / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (pictures / rows[0]["file_name"]).write_bytes(b"not decoded")
    report = inspected(pictures, tmp_path / "data", min_resolution=41)
    assert report["filtered"] == {"min_resolution": 6} and not report["quarantined"]


def test_a_filter_on_a_column_that_is_nowhere_is_refused_with_the_nearest(pictures, tmp_path):
    with_scores(pictures, {"apple": 6.5})
    with pytest.raises(ConfigError, match=r"no picture has a column 'aestetic' in its metadata; did you mean 'aesthetic'"):
        inspected(pictures, tmp_path / "data", filters={"aestetic": ">= 5"})


# Looking again


def test_a_second_look_reads_the_files_but_decodes_only_what_has_changed(pictures, tmp_path, monkeypatch):
    first = inspected(pictures, tmp_path / "data")
    decoded: list[bytes] = []
    whole = pixels.decode
    monkeypatch.setattr(pixels, "decode", lambda data, *rest: decoded.append(data) or whole(data, *rest))
    assert inspected(pictures, tmp_path / "data") == first and decoded == []
    Image.new("RGB", (50, 50)).save(pictures / "cat.png")
    assert inspected(pictures, tmp_path / "data")["shapes"]["used_smaller_side"] == {"40": 5, "50": 1}
    assert decoded == [(pictures / "cat.png").read_bytes()]
    (pictures / "cat.png").rename(pictures / "moved.png")
    (pictures / "cat.txt").rename(pictures / "moved.txt")
    inspected(pictures, tmp_path / "data", limit=3)
    inspected(pictures, tmp_path / "data")
    assert len(decoded) == 1


def test_another_version_of_the_pixel_code_decodes_everything_again(pictures, tmp_path, monkeypatch):
    inspected(pictures, tmp_path / "data")
    monkeypatch.setattr(pixels, "PIXEL_VERSION", 10_000)
    monkeypatch.setattr(pixels, "decode", lambda *_: pytest.fail("decoded"))
    with pytest.raises(pytest.fail.Exception):
        inspected(pictures, tmp_path / "data")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_worker_processes_find_the_same(pictures, tmp_path, monkeypatch, num_workers):
    (pictures / "cut.png").write_bytes((pictures / "cat.png").read_bytes()[:300])
    monkeypatch.setattr(pool, "BATCH", 2)
    reports = [inspected(pictures, tmp_path / str(n), num_workers=n) for n in (0, num_workers)]
    assert reports[0] == reports[1]
    assert preflight.read_quarantine(tmp_path / "0") == preflight.read_quarantine(tmp_path / str(num_workers))


# Judging


def run(source: object, data_dir: Path, **options: object) -> dict:
    return prepare.prepare(configured(source, data_dir, **options))


def test_no_captions_at_all_stops_before_anything_is_encoded(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(parts.Frozen, "encode_moments", lambda *_: pytest.fail("encoded"))
    for path in pictures.glob("*.txt"):
        path.rename(path.with_suffix(".json"))
        path.with_suffix(".json").write_text('{"title": "x"}')
    with pytest.raises(ConfigError, match=r"no captions: none of the 6 pictures in .*it has title.*beside each picture.*allow_uncaptioned"):
        run(pictures, tmp_path / "data", max_bad_fraction=1)
    assert preflight.read_preflight(tmp_path / "data")["quarantined"] == {"no_caption": 6}
    assert not (tmp_path / "data/manifest.json").exists()


def test_too_many_bad_pictures_stop_before_anything_is_encoded(pictures, tmp_path, monkeypatch):
    (pictures / "cat.png").write_bytes(b"broken")
    monkeypatch.setattr(parts.Frozen, "encode_moments", lambda *_: pytest.fail("encoded"))
    said = r"1 of the 6 pictures in .*cannot be used \(1 unreadable\).*max_bad_fraction=0.1.*quarantine\.jsonl"
    with pytest.raises(ConfigError, match=said):
        run(pictures, tmp_path / "data", max_bad_fraction=0.1)
    monkeypatch.undo()
    assert run(pictures, tmp_path / "data", max_bad_fraction=1 / 6)["counts"]["used"] == 5


def test_filters_that_leave_nothing_are_refused_with_the_counts(pictures, tmp_path):
    with pytest.raises(ConfigError, match=r"no picture is left of the 6 .*min_resolution.*6"):
        run(pictures, tmp_path / "data", min_resolution=4000)
