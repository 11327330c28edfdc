"""Tars as webdataset and img2dataset write them: what belongs together, where its bytes lie, and what is counted."""

import gzip
import json
import math

import pytest
from made import bytes_of, captions_of, indexed, items_of, listing, plain, write_files, write_tar

from sdlab import index, sources


def test_captions_come_from_txt_else_from_json_else_from_the_field_asked_for(tmp_path):
    tar = write_tar(
        tmp_path / "00000.tar",
        {
            "0.png": plain(),
            "0.txt": b" two\nlines ",
            "0.json": b'{"caption": "not this"}',
            "1.jpg": plain(),
            "1.json": b'{"caption": "from json", "alt": "other"}',
            "2.webp": plain(),
        },
    )
    assert captions_of(str(tar)) == {"00000.tar::0.png": "two lines", "00000.tar::1.jpg": "from json", "00000.tar::2.webp": None}
    found = items_of(str(tar), caption_column="alt")
    assert found["00000.tar::1.jpg"].caption.text == "other"
    assert found["00000.tar::0.png"].caption.note == "the .json file has no field 'alt'; it has caption"


def test_members_that_do_not_lie_together_still_belong_together_and_keep_the_order_of_the_pictures(tmp_path):
    tar = write_tar(tmp_path / "t.tar", {"a.txt": b"A", "b.png": plain(), "a.png": plain(), "b.txt": b"B"})
    assert list(captions_of(str(tar)).items()) == [("t.tar::b.png", "B"), ("t.tar::a.png", "A")]


def test_keys_in_different_folders_of_a_tar_are_different_keys(tmp_path):
    tar = write_tar(tmp_path / "t.tar", {"x/a.png": plain(), "y/a.png": plain(), "x/a.txt": b"in x", "a.txt": b"in none"})
    assert captions_of(str(tar)) == {"t.tar::x/a.png": "in x", "t.tar::y/a.png": None}


def test_bytes_are_read_back_exactly(tmp_path):
    pictures = {f"{i}.png": plain(side=3 + i) for i in range(4)}
    root = write_tar(tmp_path / "in/deep/t.tar", pictures).parent.parent
    assert list(items_of(str(root))) == [f"deep/t.tar::{name}" for name in pictures]
    assert bytes_of(indexed(str(root), tmp_path / "data")) == list(pictures.values())


def test_what_is_passed_over_is_counted_in_the_shard(tmp_path):
    members = {"a.png": plain(), "a.txt": b"A", "b.png": plain(), "c.txt": b"C", "d.json": b"{}", "e.cls": b"3", "._a.png": b"x", "f": b"?"}
    write_tar(tmp_path / "in/0.tar", members, ("a.png", plain(9)), ("a.txt", b"again"))
    write_tar(tmp_path / "in/1.tar", {"z.png": plain(), "z.txt": b"Z"})
    listed = indexed(str(tmp_path / "in"), tmp_path / "data")
    first, second, rest = (json.loads(line) for line in (tmp_path / "data" / index.FOLDER / index.SHARDS).read_text().splitlines())
    counts = ("pictures", "captions", "pictures_without_caption", "captions_without_picture", "duplicates", "unreadable")
    assert [first[name] for name in counts] == [3, 1, 1, 2, 1, 0]
    assert first["ignored"] == {".cls": 1, "hidden": 1, "no suffix": 1, "caption that is a link or comes twice": 1}
    assert first["examples"] == ["e.cls", "._a.png", "f", "a.txt", "0.tar::c"]
    assert [second[name] for name in counts] == [1, 1, 0, 0, 0, 0]
    assert [rest[name] for name in counts] == [0] * 6 and not rest["ignored"]
    assert [one["shard"] for one in listed.tallies] == ["0.tar", "1.tar", "in"]


def test_numbers_for_filters_come_from_the_json_member(tmp_path):
    members = {"0.png": plain(), "0.txt": b"zero", "0.json": b'{"aesthetic": 5.5, "width": "640"}', "1.png": plain(), "1.json": b"[]"}
    tar = write_tar(tmp_path / "t.tar", members)
    found = list(items_of(str(tar), columns=["aesthetic", "width", "pwatermark"]).values())
    assert found[0].fields["aesthetic"] == 5.5 and found[0].fields["width"] == 640
    assert all(map(math.isnan, [found[0].fields["pwatermark"], *found[1].fields.values()])) and len(found[1].fields) == 3
    assert listing(str(tar), columns=["aesthetic"])[2][0].columns == {"aesthetic", "width"}


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".TAR.GZ"])
def test_a_compressed_tar_says_that_it_has_to_be_unpacked(tmp_path, suffix):
    file = write_files(tmp_path / "in", {f"t{suffix}": gzip.compress(plain())}) / f"t{suffix}"
    for given in (file, file.parent):
        (item,), name, _ = listing(str(given))
        assert item.problem == ("damaged_tar", "a compressed tar cannot be read at random; unpack it to a plain .tar")
        assert (item.path, name) == (file.name, "webdataset: 1 tar, 1 picture")


def test_tars_that_were_joined_are_read_to_the_end_and_junk_is_counted(tmp_path):
    parts = [write_tar(tmp_path / f"{name}.tar", {f"{name}.png": plain(), f"{name}.txt": name.encode()}) for name in "ab"]
    (tmp_path / "c.tar").write_bytes(b"".join(part.read_bytes() for part in parts))
    assert captions_of(str(tmp_path / "c.tar")) == {"c.tar::a.png": "a", "c.tar::b.png": "b"}
    (tmp_path / "d.tar").write_bytes(parts[0].read_bytes() + b"junk" * 300)
    tallies: list = []
    assert [item.path for _, item in sources.open_source(str(tmp_path / "d.tar")).items(tallies)] == ["d.tar::a.png"]
    assert tallies[0].ignored == {"bytes behind the end of a tar": 1}


def test_a_caption_that_the_end_of_a_tar_cuts_is_none(tmp_path):
    tar = write_tar(tmp_path / "t.tar", {"a.png": plain(), "a.txt": b"a red square that is not green at all"})
    data = tar.read_bytes()
    tar.write_bytes(data[: data.index(b"a red") + 11])
    found = {item.path: item for _, item in sources.open_source(str(tar)).items([])}
    assert found["t.tar::a.png"].caption.text is None and found["t.tar"].problem[0] == "damaged_tar"
