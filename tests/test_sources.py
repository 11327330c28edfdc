"""What a source is understood to be, and how it is named back."""

import pytest
from made import captions_of, items_of, listing, parquet, plain, write_files, write_tar

from sdlab import scenes, sources
from sdlab.config import ConfigError


def test_a_source_is_named_back_with_its_kind_and_counts(tmp_path):
    write_tar(tmp_path / "tars/00000.tar", {"0.png": plain(), "0.txt": b"a"})
    write_tar(tmp_path / "tars/00001.tar", {"0.png": plain(), "1.jpg": plain()})
    write_files(tmp_path / "pics", {"deep/a.png": plain()})
    write_files(tmp_path / "tables", {"a.parquet": parquet({"image": [plain()] * 2}), "b.PARQUET": parquet({"image": [plain()]})})
    for given, name in {
        "tars": "webdataset: 2 tars, 3 pictures",
        "tars/00000.tar": "webdataset: 1 tar, 1 picture",
        "pics": "image folder: 1 picture",
        "tables": "parquet: 2 files, 3 pictures",
        "": "parquet: 2 files, 3 pictures; webdataset: 2 tars, 3 pictures; image folder: 1 picture",
    }.items():
        assert listing(str(tmp_path / given))[1] == name
    assert listing("scenes", limit=1200, seed=3)[1] == "scenes (drawn from seed 3): 1,200 pictures"


def test_a_label_opens_with_the_place_below_the_root(tmp_path):
    write_tar(tmp_path / "deep/0.tar", {"x/a.png": plain()})
    write_files(tmp_path, {"deep/er/a.png": plain(), "deep/t.parquet": parquet({"image": [plain()]})})
    assert list(items_of(str(tmp_path))) == ["deep/0.tar::x/a.png", "deep/t.parquet:1", "deep/er/a.png"]


def test_roots_of_different_kinds_are_read_one_after_another_and_each_once(tmp_path):
    tar = str(write_tar(tmp_path / "t.tar", {"0.png": plain(), "0.txt": b"zero"}))
    folder = str(write_files(tmp_path / "pics", {"a.png": plain(), "a.txt": "one"}))
    items, name, _ = listing([folder, folder, tar, "scenes", tar], limit=4)
    drawn = scenes.draw(2, seed=0)
    assert [item.caption.text for item in items] == ["one", "zero", *(scene.caption for scene in drawn)]
    assert name == (
        "image folder: 1 picture; webdataset: 1 tar, 1 picture; scenes (drawn from seed 0): 2 pictures; no more than limit=4 are taken"
    )


@pytest.mark.parametrize(("limit", "counts"), [(3, [3]), (7, [5, 2]), (10, [5, 5]), (15, [5, 5, 5])])
def test_a_limit_takes_the_first_pictures_says_so_and_lists_no_further(tmp_path, limit, counts):
    for number in range(3):
        write_tar(tmp_path / f"{number}.tar", {f"{i}.png": plain() for i in range(5)})
    items, name, tallies = listing(str(tmp_path), limit=limit)
    assert [item.path for item in items] == [f"{i // 5}.tar::{i % 5}.png" for i in range(limit)]
    assert [tally.pictures for tally in tallies] == counts
    tars = f"{len(counts)} tar{'s' * (len(counts) > 1)}"
    left = {1: ", 2 more shards are not opened", 2: ", 1 more shard is not opened", 3: ""}[len(counts)]
    assert name == f"webdataset: {tars}, {limit} pictures; no more than limit={limit} are taken{left}"
    assert listing(str(tmp_path), limit=16)[1] == "webdataset: 3 tars, 15 pictures"


def test_scenes_are_as_many_as_the_limit_else_as_many_as_is_usual(monkeypatch):
    items = listing("scenes", limit=5, seed=7)[0]
    assert [(item.path, item.caption.text) for item in items] == [
        (f"scene-{i:06d}", scene.caption) for i, scene in enumerate(scenes.draw(5, seed=7))
    ]
    monkeypatch.setattr(sources, "SCENES", 9)
    assert len(listing("scenes")[0]) == 9


@pytest.mark.parametrize("given", ["nowhere", "docs", "docs/notes.md", "empty"])
def test_what_is_not_there_or_not_understood_is_refused_with_what_is(tmp_path, given):
    write_files(tmp_path / "docs", {"notes.md": "nothing here", "a.txt": "no picture"})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=rf"(?s)source .*{given}.*folder of \.tar files.*scenes"):
        listing(str(tmp_path / given))


def test_an_empty_list_is_refused_and_a_slip_is_told():
    with pytest.raises(ConfigError, match="empty list"):
        listing([])
    with pytest.raises(ConfigError, match="did you mean 'scenes'"):
        listing("scene")


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_the_field_of_captions_is_asked_for_in_every_kind_of_source(tmp_path, kind):
    beside = {"a.png": plain(), "a.txt": b"text", "a.json": b'{"caption": "caption", "alt": "alt"}'}
    if kind == "tar":
        write_tar(tmp_path / "t.tar", beside)
    else:
        table = parquet({"image": [plain()], "caption": ["text"], "alt": ["alt"]})
        write_files(tmp_path, beside if kind == "folder" else {"t.parquet": table})
    assert [list(captions_of(str(tmp_path), caption_column=name).values()) for name in (None, "alt", "no")] == [["text"], ["alt"], [None]]
