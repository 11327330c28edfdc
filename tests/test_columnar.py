"""Tables with the pictures themselves in a column: Parquet files, saved data sets and those of the hub."""

import functools
import itertools
import math
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from made import bytes_of, captions_of, encoded, indexed, items_of, listing, noise, parquet, plain, write_files, write_tar

from sdlab import columnar
from sdlab.config import ConfigError

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@functools.cache
def files(count: int) -> list[bytes]:
    """Different pictures."""
    return [encoded(noise(seed)) for seed in range(count)]


def column(cells: list[bytes], kind: pa.DataType) -> pa.Array:
    return pa.array([{"bytes": cell, "path": f"{i}.png"} if kind == STRUCT else cell for i, cell in enumerate(cells)], kind)


# Parquet


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), STRUCT], ids=str)
@pytest.mark.parametrize("rows_a_group", [1, 70, 200])
def test_pictures_in_parquet_are_read_back_exactly_by_row_in_any_order(tmp_path, kind, rows_a_group):
    cells = files(150)
    table = {"text": list(map(str, range(150))), "image": column(cells, kind)}
    file = write_files(tmp_path / "in", {"train.parquet": parquet(table, row_group_size=rows_a_group)}) / "train.parquet"
    items = items_of(str(file))
    assert {path: item.caption.text for path, item in items.items()} == {f"train.parquet:{row + 1}": str(row) for row in range(150)}
    listed = indexed(str(file), tmp_path / "data")
    assert listed.name == "parquet: 1 file, 150 pictures"
    assert bytes_of(listed) == cells
    order = np.random.default_rng(0).permutation(150)
    assert bytes_of(listed, order) == [cells[row] for row in order]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"hash": pa.binary(), "image": STRUCT}, "image"),
        ({"hash": pa.binary(), "image_bytes": pa.binary()}, "image_bytes"),
        ({"image": pa.string(), "jpg": pa.binary()}, "jpg"),
        ({"image": pa.struct([("path", pa.string())]), "odd name": STRUCT}, "odd name"),
        ({"url": pa.string(), "sha256": pa.binary()}, None),
        ({"url": pa.string(), "width": pa.int64()}, None),
    ],
)
def test_the_column_of_pictures_is_known_by_its_name_then_by_what_it_holds(columns, expected):
    assert columnar.image_column(pa.schema(columns)) == expected


def test_captions_and_numbers_come_from_the_columns_of_the_row(tmp_path):
    table = {"image": files(2), "text": ["a", "b"], "alt": ["c", None], "score": [5.5, None], "width": ["640", "x"], "flag": [True, False]}
    given = str(write_files(tmp_path, {"x.parquet": parquet(table)}))
    assert list(captions_of(given).values()) == ["a", "b"]
    assert list(captions_of(given, caption_column="alt").values()) == ["c", None]
    first, second = items_of(given, columns=["score", "flag"]).values()
    assert first.fields["score"] == 5.5 and all(map(math.isnan, [second.fields["score"], first.fields["flag"]]))
    note = items_of(given, caption_column="captions")["x.parquet:1"].caption.note
    assert note == "x.parquet has no field 'captions'; it has image, text, alt, score, width, flag"


def test_a_table_without_pictures_is_passed_over_and_counted(tmp_path):
    urls = {"url": ["http://a", "http://b"], "caption": ["a", "b"], "status": ["success"] * 2}
    write_tar(tmp_path / "00000.tar", {"0.png": plain(), "0.txt": b"zero"})
    write_files(tmp_path, {"00000.parquet": parquet(urls), "deep/0.parquet": parquet(urls), "00000_stats.json": "{}"})
    items, name, tallies = listing(str(tmp_path))
    assert [item.path for item in items] == ["00000.tar::0.png"] and name == "webdataset: 1 tar, 1 picture"
    assert tallies[-1].ignored == {".parquet": 2, "statistics of img2dataset": 1} and not tallies[-1].captions_without_picture
    with pytest.raises(ConfigError, match=r"no pictures, \.tar or .parquet files are recognised"):
        listing(str(tmp_path / "deep"))


def test_a_table_without_pictures_that_is_given_itself_is_refused(tmp_path):
    file = write_files(tmp_path, {"x.parquet": parquet({"url": ["http://a"], "caption": ["a"]})}) / "x.parquet"
    with pytest.raises(ConfigError, match="pictures"):
        bytes_of(indexed(str(file), tmp_path / "data"))


def test_a_table_below_a_folder_whose_name_is_no_unicode_is_read(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    write_files(folder, {"t.parquet": parquet({"image": files(2), "text": ["a", "b"]})})
    assert bytes_of(indexed(str(tmp_path), tmp_path / "data")) == files(2)


# Data sets


def made(count: int = 6, image: Any = None) -> datasets.Dataset:
    """A data set of pictures, in `image` an Image() or what holds bytes."""
    kinds = {"image": image or datasets.Image(), "text": datasets.Value("string"), "score": datasets.Value("int64")}
    cells = files(count) if image else [{"bytes": data, "path": None} for data in files(count)]
    rows = {"image": cells, "text": list(map(str, range(count))), "score": list(range(count))}
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def read_back(given: str, folder: Path) -> tuple[list[str | None], list[float], list[bytes]]:
    """Captions, scores and bytes of a source."""
    listed = indexed(given, folder, columns=("score",))
    captions = [item.caption.text for _, item in listed.items(range(len(listed)))]
    return captions, listed.fields(0, len(listed))["score"].tolist(), bytes_of(listed)


CHANGES = {
    "whole": (lambda one: one, [0, 1, 2, 3, 4, 5]),
    "selected": (lambda one: one.select([4, 1, 3]), [4, 1, 3]),
    "shuffled": (lambda one: one.shuffle(seed=3), np.random.default_rng(3).permutation(6).tolist()),
}


@pytest.mark.parametrize("image", [None, datasets.Value("binary")], ids=["Image", "binary"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("place", ["disk", "hub"])
def test_a_data_set_is_read_row_by_row_as_it_is(tmp_path, monkeypatch, place, change, image):
    make, rows = CHANGES[change]
    dataset, given = make(made(image=image)), "owner/name"
    if place == "disk":
        dataset.save_to_disk(given := str(tmp_path / "saved"))
    else:
        monkeypatch.setattr(datasets, "load_dataset", lambda asked: {"owner/name": dataset}[asked])
    assert read_back(given, tmp_path / "data") == (list(map(str, rows)), rows, [files(6)[row] for row in rows])
    assert listing(given)[1] == f"data set (split 'all' of {given}): {len(rows)} pictures"


@pytest.mark.parametrize(
    ("splits", "taken"), [(["test", "train"], "train"), (["test"], "test"), (["test", "validation"], None), ([], None)]
)
@pytest.mark.parametrize("place", ["disk", "hub"])
def test_of_several_splits_train_is_taken_and_a_choice_without_it_is_refused(tmp_path, monkeypatch, place, splits, taken):
    dataset = datasets.DatasetDict({split: made(number + 1) for number, split in enumerate(splits)})
    given = str(tmp_path / "saved") if place == "disk" else "owner/name"
    dataset.save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setattr(datasets, "load_dataset", lambda asked: dataset)
    if taken is None:
        with pytest.raises(ConfigError, match=f"has the splits {', '.join(splits) or 'none'} and no 'train'"):
            listing(given)
    else:
        items, name, _ = listing(given)
        assert [item.path for item in items] == [f"{taken}:{row + 1}" for row in range(splits.index(taken) + 1)]
        assert f"split '{taken}' of {given}" in name


@pytest.mark.parametrize(
    "form",
    [{"type": "numpy"}, {"type": "pandas"}, {"columns": ["text"]}],
    ids=str,
)
def test_a_data_set_that_was_saved_in_a_form_of_its_own_is_read_all_the_same(tmp_path, form):
    dataset = made()
    dataset.set_format(**form)
    dataset.save_to_disk(str(tmp_path / "saved"))
    assert read_back(str(tmp_path / "saved"), tmp_path / "data") == (list("012345"), list(range(6)), files(6))


def test_a_data_set_that_cannot_be_used_is_refused_in_a_clear_way(tmp_path, monkeypatch):
    refused = functools.partial(pytest.raises, ConfigError)
    with refused(match=r"source 'owner/name' is no path here, and no data set of the hub that can be fetched.*OfflineModeIsEnabled"):
        listing("owner/name")
    made().rename_column("image", "images").remove_columns("images").save_to_disk(str(tmp_path / "texts"))
    with refused(match=r"has no column of pictures; known are score, text"):
        listing(str(tmp_path / "texts"))
    write_files(tmp_path / "broken", {"state.json": "{", "dataset_info.json": "{}"})
    with refused(match=r"broken' looks like a saved data set, and cannot be opened"):
        listing(str(tmp_path / "broken"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with refused(match=r"\(HF_HUB_OFFLINE is set\)"):
        listing("owner/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with refused(match=r"that can be fetched: "):
        listing("owner/name")


def test_rows_after_an_unreadable_one_are_counted_one_by_one(tmp_path, monkeypatch):
    write_files(tmp_path, {"t.parquet": parquet({"image": files(5), "text": list("abcde")})})
    rows_of = columnar.rows_of

    def broken(batch):
        yield from itertools.islice(rows_of(batch), 2)
        raise OverflowError("date value out of range")

    monkeypatch.setattr(columnar, "rows_of", broken)
    found = items_of(str(tmp_path / "t.parquet"))
    assert [item.problem and item.problem[0] for item in found.values()] == [None, None, *["bad_metadata"] * 3]
