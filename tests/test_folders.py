"""Folders of pictures: captions from the files beside them, from metadata files, or from the names of folders."""

import json
import math
import os
from pathlib import Path

import pytest
from made import captions_of, indexed, items_of, listing, parquet, plain, write_files

from sdlab import sources
from sdlab.config import ConfigError


def metadata(kind: str, *rows: dict[str, object]) -> dict[str, bytes]:
    """A metadata file by its name."""
    lines = [json.dumps(row) for row in rows]
    if kind == "csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {f"metadata.{kind}": parquet(columns) if kind == "parquet" else "\n".join(lines).encode()}


# Files beside the pictures


def test_captions_come_from_the_files_beside_the_pictures(tmp_path):
    root = write_files(
        tmp_path / "pics",
        {
            "a.png": plain(),
            "a.txt": "one",
            "deep/b.JPG": plain(),
            "deep/b.caption": "two",
            "deep/deeper/c.webp": plain(),
            "deep/deeper/c.json": '{"text": "three", "alt": "four"}',
            "d.png": plain(),
            "e.png": plain(),
            "e.txt": "   ",
            ".hidden/f.png": plain(),
        },
    )
    expected = {"a.png": "one", "deep/b.JPG": "two", "deep/deeper/c.webp": "three", "d.png": None, "e.png": ""}
    assert captions_of(str(root)) == expected
    assert captions_of(str(root), caption_column="alt") == {**dict.fromkeys(expected), "deep/deeper/c.webp": "four"}


def test_a_broken_caption_file_says_why_there_is_no_caption(tmp_path):
    root = write_files(tmp_path, {"a.png": plain(), "a.json": "{broken", "b.png": plain(), "b.json": '{"caption": 5}', "c.png": plain()})
    assert {path: (item.caption.text, item.caption.note) for path, item in items_of(str(root)).items()} == {
        "a.png": (None, "the .json file is not a JSON object"),
        "b.png": (None, "the field 'caption' of the .json file holds int, not text"),
        "c.png": (None, ""),
    }


def test_what_is_passed_over_is_counted(tmp_path):
    files = {"a.png": plain(), "a.txt": "A", "b.png": plain(), "deep/a.txt": "no picture here", "notes.md": "x", "README": "x"}
    root = write_files(tmp_path, files | {".DS_Store": "x", "more.md": "x", "._a.txt": "x"})
    (tmp_path / "album").symlink_to(tmp_path / "deep")
    items, _, (tally,) = listing(str(root))
    assert len(items) == tally.pictures == 2
    assert (tally.captions, tally.pictures_without_caption, tally.captions_without_picture) == (1, 1, 1)
    assert tally.ignored == {".md": 2, "hidden": 2, "no suffix": 1, "link to a folder": 1}
    assert tally.examples == [".DS_Store", "._a.txt", "README", "album", "more.md"]


# Metadata files


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_metadata_rows_give_captions_and_every_row_and_picture_is_accounted_for(tmp_path, kind):
    rows = [("deep/a.png", "one"), ("b.png", "two"), ("gone.png", "three"), ("../secret.png", "four"), ("/etc/x.png", "five")]
    write_files(tmp_path, {"secret.png": plain()})
    listed = metadata(kind, *({"file_name": name, "text": text, "alt": text.upper()} for name, text in rows))
    pictures = {"deep/a.png": plain(), "b.png": plain(), "b.txt": "not this", "unlisted.png": plain()}
    root = write_files(tmp_path / "pics", pictures | listed)
    found = items_of(str(root))
    good = {path: item.caption.text for path, item in found.items() if item.problem is None}
    assert good == {"deep/a.png": "one", "b.png": "two", "unlisted.png": None}
    bad = {path: item.problem[0] for path, item in found.items() if item.problem}
    assert bad == {"gone.png": "missing_file", "../secret.png": "outside_root", "/etc/x.png": "outside_root"}
    assert captions_of(str(root), caption_column="alt")["b.png"] == "TWO"
    tally = listing(str(root))[2][0]
    assert (tally.captions_without_picture, tally.unreadable, tally.ignored) == (0, 3, {})


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_different_captions_of_one_picture_are_several_pairs_and_equal_rows_are_one(tmp_path, kind):
    rows = [("a.png", "one"), ("a.png", "two"), ("./a.png", "one"), ("a.png", "one")]
    listed = metadata(kind, *({"file_name": name, "caption": text} for name, text in rows))
    root = write_files(tmp_path, {"a.png": plain(), **listed})
    assert [(item.path, item.caption.text) for item in listing(str(root))[0]] == [("a.png", "one"), ("a.png", "two")]


def test_metadata_lists_the_pictures_of_its_own_folder(tmp_path):
    for name in ("x", "y"):
        write_files(tmp_path / name, {"a.png": plain(), **metadata("jsonl", {"file_name": "a.png", "text": name})})
    assert captions_of(str(tmp_path)) == {"x/a.png": "x", "y/a.png": "y"}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_metadata_without_the_column_of_names_is_refused_with_the_nearest_one(tmp_path, kind):
    write_files(tmp_path, {"a.png": plain(), **metadata(kind, {"filename": "a.png", "text": "one"})})
    with pytest.raises(ConfigError, match=rf"metadata\.{kind} has no column 'file_name'; did you mean 'filename'"):
        listing(str(tmp_path))


# Numbers for filters


def scores(tmp_path: Path, kind: str, *values: object) -> list[float]:
    """What becomes of numbers that the metadata holds, the files beside the pictures for the kind "beside"."""
    rows = [{"file_name": f"{number}.png", "text": "x", "score": value} for number, value in enumerate(values)]
    files = {f"{number}.json": json.dumps(row) for number, row in enumerate(rows)} if kind == "beside" else metadata(kind, *rows)
    root = write_files(tmp_path / "pics", {row["file_name"]: plain() for row in rows} | {"without.png": plain(), **files})
    found = indexed(str(root), tmp_path / "data", columns=("score",)).fields(0, len(values) + 1)
    assert list(found) == ["score"] and math.isnan(found["score"][-1])
    return found["score"][:-1].tolist()


KINDS = ["beside", "jsonl", "csv", "parquet"]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_for_filters_come_from_the_files_beside_the_pictures_and_from_metadata(tmp_path, kind):
    first, second, third = scores(tmp_path, kind, 5.5, -2.0, None)
    assert (first, second) == (5.5, -2) and math.isnan(third)


@pytest.mark.parametrize("kind", [*KINDS[:3], "parquet"])
def test_numbers_that_are_written_as_text_are_numbers(tmp_path, kind):
    assert scores(tmp_path, kind, "5.5", "1e3") == [5.5, 1000]


# Folders that name their concept


@pytest.mark.parametrize(("given", "labels"), [("", ["10_a red_fox/a.png", "10_a red_fox/b.png"]), ("10_a red_fox", ["a.png", "b.png"])])
def test_a_folder_that_names_its_concept_gives_the_captions_that_are_missing(tmp_path, given, labels):
    root = write_files(tmp_path / "train/10_a red_fox", {"a.png": plain(), "b.png": plain(), "b.txt": "its own"}).parent
    (first, second), name, _ = listing(str(root / given))
    assert [first.path, second.path] == labels
    assert (first.caption.text, first.caption.marks) == ("a red fox", ("caption_from_folder",))
    assert (second.caption.text, second.caption.marks) == ("its own", ())
    assert name == "image folder (folders 10_a red_fox name their concept; repeats are not applied): 2 pictures"


def test_concepts_stand_back_behind_every_other_word_on_captions(tmp_path):
    listed = metadata("jsonl", {"file_name": "5_x/listed.png", "text": "listed"})
    files = {"5_x/listed.png": plain(), "5_x/empty.png": plain(), "5_x/empty.txt": "", "x_5/a.png": plain(), "5_x/deep/b.png": plain()}
    root = write_files(tmp_path, files | listed)
    assert captions_of(str(root)) == {"5_x/listed.png": "listed", "5_x/empty.png": "", "x_5/a.png": None, "5_x/deep/b.png": None}
    assert set(captions_of(str(root / "5_x"), caption_column="alt").values()) == {None}


def test_only_the_first_folders_that_name_concepts_are_told(tmp_path):
    root = write_files(tmp_path, {f"{i}_c{i}/a.png": plain() for i in range(1, 8)} | {"8_without pictures/a.txt": "x"})
    assert "(folders 1_c1, 2_c2, 3_c3, 4_c4, 5_c5 ... name their concept; repeats" in listing(str(root))[1]


def test_caption_files_are_found_whatever_the_case_of_their_suffix_and_a_second_one_is_counted(tmp_path):
    root = write_files(tmp_path, {"a.png": plain(), "a.Txt": "one", "b.png": plain(), "b.TXT": "two", "b.txt": "three"})
    tallies: list = []
    found = {item.path: item.caption.text for _, item in sources.open_source(str(root)).items(tallies)}
    assert found == {"a.png": "one", "b.png": "two"} and tallies[0].ignored == {"caption that comes twice": 1}


def test_equal_rows_of_metadata_are_one_pair_and_the_others_are_counted(tmp_path):
    rows = "\n".join(['{"file_name": "a.png", "text": "one"}'] * 5)
    root = write_files(tmp_path, {"a.png": plain(), "metadata.jsonl": rows})
    tallies: list = []
    assert len(list(sources.open_source(str(root)).items(tallies))) == 1 and tallies[0].duplicates == 4


def test_a_pipe_with_the_name_of_a_metadata_file_is_not_waited_for(tmp_path):
    root = write_files(tmp_path, {"a.png": plain(), "a.txt": "one"})
    os.mkfifo(root / "metadata.jsonl")
    problems = {item.path: item.problem for _, item in sources.open_source(str(root)).items([]) if item.problem}
    assert problems["metadata.jsonl"][0] == "not_a_file"


def test_roots_within_one_another_are_refused(tmp_path):
    root = write_files(tmp_path, {"a.png": plain(), "deep/b.png": plain()})
    for inner in (root / "deep", f"{root}/"):
        with pytest.raises(ConfigError, match="which lies in"):
            sources.open_source([str(root), str(inner)])
