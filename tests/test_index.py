"""The listing on disk gives back what was listed, row by row."""

import dataclasses
import math
import os
from collections.abc import Iterator

import numpy as np
import pytest
from made import bytes_of, indexed, items_of, listing, parquet, plain, write_files, write_tar

from sdlab import index, scenes
from sdlab.captions import Caption
from sdlab.config import ConfigError
from sdlab.index import CHUNK, Index
from sdlab.items import Broken, Item, Part, Span, Tally
from sdlab.sources import Source

KINDS = [
    Item("a.png", Caption("one"), file=b"deep/caf\xe9.png"),
    Item("t.tar::b.png", Caption("two 猫\U0001f680", "", ("caption_nul", "caption_line_breaks")), offset=2**40, size=12),
    Item("t.parquet:3", Caption(None, "why there is none"), row=2),
    Item("c.png", Caption(""), problem=("outside_root", "a detail")),
]


def synthetic(count: int) -> Source:
    """A source of items of every kind, with a number that is the row and one that is missing in every third."""

    def read(tally: Tally) -> Iterator[Item]:
        tally.columns.update(["row", "thirds"])
        for row in range(count):
            yield dataclasses.replace(KINDS[row % len(KINDS)], fields={"row": float(row)} | ({"thirds": 0.5} if row % 3 else {}))

    return Source((Part("image folder", "/root", "root", "given", read),), None)


@pytest.mark.parametrize("count", [0, 1, CHUNK, 2 * CHUNK + 5])
def test_items_come_back_as_they_were_in_whatever_order_they_are_asked_for(tmp_path, count):
    index.write(synthetic(count), tmp_path, columns=["row", "thirds"], seed=0)
    listed = Index(tmp_path)
    assert len(listed) == count
    for rows in (np.arange(count), np.random.default_rng(0).permutation(count)[:20], range(count - 1, -1, -CHUNK + 1)):
        assert list(listed.items(rows)) == [(0, KINDS[row % len(KINDS)]) for row in rows]


def test_numbers_come_back_by_row_and_nan_where_there_is_none(tmp_path):
    listed = index.write(synthetic(2 * CHUNK + 5), tmp_path, columns=["row", "thirds"], seed=0)
    for start, stop in ((0, CHUNK), (CHUNK, 2 * CHUNK), (CHUNK + 7, CHUNK + 11), (2 * CHUNK, 2 * CHUNK + 5)):
        fields, rows = listed.fields(start, stop), np.arange(start, stop)
        assert fields["row"].tolist() == rows.tolist()
        assert np.array_equal(fields["thirds"], np.where(rows % 3, 0.5, math.nan), equal_nan=True)


def test_the_bytes_of_a_mixed_source_are_found_wherever_they_lie(tmp_path):
    pictures = [plain(3 + i) for i in range(7)]
    tar = write_tar(tmp_path / "t.tar", {"0.png": pictures[0], "1.png": pictures[1]})
    folder = write_files(tmp_path / "café", {"a.png": pictures[5], "deep/b.png": pictures[6]})
    write_files(folder, {"0.parquet": parquet({"image": pictures[3:5]})})
    write_tar(folder / "deep/0.tar", {"2.png": pictures[2]})
    listed = indexed([str(tar), str(folder), "scenes"], tmp_path / "data", limit=10, seed=3)
    expected = [*pictures[:2], *pictures[3:5], pictures[2], *pictures[5:], *scenes.draw(3, seed=3)]
    assert bytes_of(listed) == bytes_of(Index(tmp_path / "data")) == expected
    assert bytes_of(listed, [9, 3, 0, 5]) == [expected[row] for row in (9, 3, 0, 5)]
    kinds = [part["kind"] for part in listed.about["parts"]]
    assert kinds == ["webdataset", "parquet", "webdataset", "image folder", "scenes"]


def test_a_handle_opens_nothing_and_what_cannot_be_read_says_so(tmp_path):
    write_files(tmp_path / "in", {"a.png": plain(), "t.parquet": parquet({"image": [plain()]})})
    listed = indexed(str(tmp_path / "in"), tmp_path / "data")
    for file in ("a.png", "t.parquet"):
        (tmp_path / "in" / file).unlink()
    (table, row), (folder, picture) = listed.items([0, 1])
    assert listed.handle(folder, picture) == Span(os.fsencode(tmp_path / "in/a.png"), 0, -1)
    broken = listed.handle(table, row)
    assert isinstance(broken, Broken) and "t.parquet" in broken.detail


def test_the_listing_says_what_it_is_of(tmp_path):
    root = write_files(tmp_path / "in", {"a.png": plain(), "b.txt": "orphan", "notes.md": "x", "t.parquet": parquet({"image": [plain()]})})
    listed = indexed([str(root)], tmp_path / "data", seed=5)
    _, name, tallies = listing([str(root)])
    assert listed.name == name == "parquet: 1 file, 1 picture; image folder: 1 picture"
    assert listed.tallies == [{**vars(tally), "columns": sorted(tally.columns)} for tally in tallies]
    assert listed.about["seed"] == 5 and {part["source"] for part in listed.about["parts"]} == {str(root)}
    again = indexed([str(root)], tmp_path / "data", seed=5)
    assert again.about["run"] != listed.about["run"] and list(again.items(range(2))) == list(listed.items(range(2)))


def test_a_filter_column_that_is_nowhere_is_refused_with_the_nearest_name(tmp_path):
    root = str(write_files(tmp_path / "in", {"a.png": plain(), "a.json": '{"caption": "a", "aesthetic_score": 5.5}'}))
    with pytest.raises(ConfigError, match="filters: no picture has a column 'aesthetic' in its metadata; did you mean 'aesthetic_score'"):
        indexed(root, tmp_path / "data", columns=("aesthetic",))
    assert not (tmp_path / "data" / index.FOLDER / index.ITEMS).exists()
    with pytest.raises(ConfigError, match="known are none"):
        indexed("scenes", tmp_path / "data", columns=("aesthetic",), limit=3)
    listed = indexed(root, tmp_path / "data", columns=("aesthetic_score", "width"))
    assert listed.fields(0, 1)["aesthetic_score"] == [5.5] and np.isnan(listed.fields(0, 1)["width"])
    assert next(iter(items_of(root, columns=["width"]).values())).fields.keys() == {"width"}
