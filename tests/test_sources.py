import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from sdlab import pictures, sources
from sdlab.config import ConfigError

RED = (255, 0, 0)


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(side: int = 8) -> bytes:
    return encoded(Image.new("RGB", (side, side), RED))


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_files(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return root


def items_of(source: object, **options: object) -> dict[str, sources.Item]:
    return {item.path: item for item in sources.open_source(source, **options).items()}


def captions_of(source: object, **options: object) -> dict[str, str | None]:
    return {path: item.caption for path, item in items_of(source, **options).items()}


# Detection


def test_a_source_is_named_back_with_its_kind_and_counts(tmp_path):
    write_tar(tmp_path / "tars/00000.tar", {"0.png": plain(), "0.txt": b"a"})
    write_tar(tmp_path / "tars/00001.tar", {"0.png": plain(), "1.jpg": plain()})
    write_files(tmp_path / "pics", {"deep/a.png": plain()})
    assert sources.open_source(str(tmp_path / "tars")).name == "webdataset: 2 tars, 3 pictures"
    assert sources.open_source(str(tmp_path / "tars/00000.tar")).name == "webdataset: 1 tar, 1 picture"
    assert sources.open_source(str(tmp_path / "pics")).name == "image folder: 1 picture"
    assert sources.open_source("scenes", limit=1200, seed=3).name == "scenes drawn from seed 3: 1,200 pictures"


def test_roots_of_different_kinds_are_read_one_after_another(tmp_path):
    tar = write_tar(tmp_path / "t.tar", {"0.png": plain(), "0.txt": b"zero"})
    folder = write_files(tmp_path / "pics", {"a.png": plain(), "a.txt": "one"})
    source = sources.open_source([str(folder), str(tar)])
    assert source.name == "image folder: 1 picture; webdataset: 1 tar, 1 picture"
    assert [item.caption for item in source.items()] == ["one", "zero"]


def test_a_limit_takes_the_first_pictures_and_says_so(tmp_path):
    tar = write_tar(tmp_path / "t.tar", {f"{i}.png": plain() for i in range(5)})
    source = sources.open_source(str(tar), limit=2)
    assert source.count == len(list(source.items())) == 2
    assert source.name == "webdataset: 1 tar, 5 pictures; the first 2 are taken"


def test_a_missing_path_and_an_unknown_kind_are_refused_with_what_is_understood(tmp_path):
    write_files(tmp_path / "docs", {"notes.md": "nothing here"})
    for given in ("nowhere", str(tmp_path / "docs"), str(tmp_path / "docs/notes.md")):
        with pytest.raises(ConfigError, match=r"(?s)source .*(nowhere|docs).*folder of \.tar files.*scenes"):
            sources.open_source(given)
    with pytest.raises(ConfigError, match="empty list"):
        sources.open_source([])


# Tars


def test_tar_captions_come_from_txt_else_from_json(tmp_path):
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
    assert captions_of(str(tar), caption_column="alt")["00000.tar::1.jpg"] == "other"
    assert "no field 'alt'" in items_of(str(tar), caption_column="alt")["00000.tar::0.png"].note


def test_members_that_do_not_lie_together_still_belong_together(tmp_path):
    tar = write_tar(tmp_path / "t.tar", {"a.txt": b"A", "b.png": plain(), "a.png": plain(), "b.txt": b"B"})
    assert captions_of(str(tar)) == {"t.tar::b.png": "B", "t.tar::a.png": "A"}


def test_tar_bytes_are_read_back_exactly(tmp_path):
    pictures = {f"{i}.png": plain(side=3 + i) for i in range(4)}
    tar = write_tar(tmp_path / "t.tar", pictures)
    assert {path.split("::")[1]: item.read() for path, item in items_of(str(tar)).items()} == pictures


def test_hostile_member_names_are_labels_and_links_are_passed_over(tmp_path):
    tar_path = write_tar(tmp_path / "in/t.tar", {"../../outside.png": plain(), "/etc/absolute.png": plain()})
    with tarfile.open(tar_path, "a") as tar:
        for name, kind in (("link.png", tarfile.SYMTYPE), ("hard.png", tarfile.LNKTYPE), ("device.png", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    before = sorted(tmp_path.rglob("*"))
    found = items_of(str(tar_path))
    assert list(found) == ["t.tar::../../outside.png", "t.tar::/etc/absolute.png"]
    assert all(checked.size == (8, 8) for checked in pictures.check_batch(list(found.values())))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_pictures_before_the_damage_of_a_tar_survive_and_the_damage_is_reported(tmp_path, damage):
    tar = write_tar(tmp_path / "t.tar", {f"{i}.png": encoded(Image.effect_noise((64, 64), 50)) for i in range(4)})
    data = tar.read_bytes()
    last = data.rindex(b"3.png")
    tar.write_bytes(data[: last + 700] if damage == "cut" else data[:last] + b"\xff" * 2000)
    found = items_of(str(tar))
    assert list(found)[:3] == ["t.tar::0.png", "t.tar::1.png", "t.tar::2.png"]
    assert found["t.tar"].problem[0] == "damaged_tar"


def test_a_tar_that_is_none_is_one_damaged_item(tmp_path):
    (tmp_path / "t.tar").write_bytes(b"no tar at all" * 100)
    assert [item.problem[0] for item in items_of(str(tmp_path / "t.tar")).values()] == ["damaged_tar"]


# Folders


def test_folder_captions_come_from_the_files_beside_the_pictures(tmp_path):
    root = write_files(
        tmp_path / "pics",
        {
            "a.png": plain(),
            "a.txt": "one",
            "deep/b.JPG": plain(),
            "deep/b.caption": "two",
            "deep/deeper/c.webp": plain(),
            "deep/deeper/c.json": '{"text": "three"}',
            "d.png": plain(),
            "e.png": plain(),
            "e.txt": "   ",
            ".hidden/f.png": plain(),
        },
    )
    expected = {"a.png": "one", "deep/b.JPG": "two", "deep/deeper/c.webp": "three", "d.png": None, "e.png": ""}
    assert captions_of(str(root)) == expected


def test_a_broken_caption_file_says_why_there_is_no_caption(tmp_path):
    root = write_files(
        tmp_path / "pics",
        {"a.png": plain(), "a.json": "{broken", "b.png": plain(), "b.json": '{"caption": 5}', "c.png": plain(), "c.json": "[" * 100_000},
    )
    found = items_of(str(root))
    assert all(item.caption is None for item in found.values())
    assert [found[name].note for name in ("a.png", "b.png", "c.png")] == [
        "the .json file is not a JSON object",
        "the field 'caption' of the .json file holds int, not text",
        "the .json file is not a JSON object",
    ]


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_metadata_rows_give_captions_and_every_row_and_picture_is_accounted_for(tmp_path, kind):
    rows = [("deep/a.png", "one"), ("b.png", "two"), ("gone.png", "three"), ("../secret.png", "four"), ("/etc/x.png", "five")]
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in rows]
    text = "\n".join(lines) if kind == "jsonl" else "\n".join(["file_name,text", *(",".join(row) for row in rows)])
    write_files(tmp_path, {"secret.png": plain()})
    root = write_files(tmp_path / "pics", {"deep/a.png": plain(), "b.png": plain(), "unlisted.png": plain(), f"metadata.{kind}": text})
    found = items_of(str(root))
    good = {path: item.caption for path, item in found.items() if item.problem is None}
    assert good == {"deep/a.png": "one", "b.png": "two", "unlisted.png": None}
    bad = {path: item.problem[0] for path, item in found.items() if item.problem}
    assert bad == {"gone.png": "missing_file", "../secret.png": "outside_root", "/etc/x.png": "outside_root"}


def test_several_captions_of_one_picture_are_several_pairs(tmp_path):
    rows = "\n".join(json.dumps({"file_name": "a.png", "caption": text}) for text in ("one", "two"))
    root = write_files(tmp_path / "pics", {"a.png": plain(), "metadata.jsonl": rows})
    assert [item.caption for item in sources.open_source(str(root)).items()] == ["one", "two"]


def test_metadata_that_cannot_be_used_is_reported_row_by_row_or_refused(tmp_path):
    lines = [
        "not json",
        '{"caption": "no file"}',
        '{"file_name": "a\\u0000.png"}',
        '{"file_name": "\\ud800.png"}',
        '{"file_name": "' + "x" * 5000 + '"}',
    ]
    root = write_files(tmp_path / "rows", {"a.png": plain(), "metadata.jsonl": "\n".join(lines)})
    problems = [item.problem[0] for item in items_of(str(root)).values() if item.problem]
    assert problems == ["bad_metadata", "bad_metadata", "outside_root", "outside_root", "missing_file"]
    write_files(tmp_path / "csv", {"a.png": plain(), "metadata.csv": "filename,text\na.png,one"})
    with pytest.raises(ConfigError, match=r"metadata\.csv has no column 'file_name'; did you mean 'filename'"):
        sources.open_source(str(tmp_path / "csv"))


def test_links_that_leave_the_root_are_reported_and_not_read(tmp_path):
    write_files(tmp_path, {"secret.png": plain(), "secret.txt": "a secret"})
    root = write_files(tmp_path / "pics", {"own.png": plain(), "own.txt": "mine", "b.png": plain()})
    os.symlink(tmp_path / "secret.png", root / "linked.png")
    os.symlink(tmp_path / "secret.txt", root / "b.txt")
    os.symlink(root / "own.png", root / "inside.png")
    found = items_of(str(root))
    assert found["linked.png"].problem[0] == "outside_root"
    assert found["b.png"].caption is None
    assert found["inside.png"].problem is None
    assert pictures.check_batch([found["linked.png"]])[0].digest == ""


# Text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_caption_files_are_read_in_the_encodings_people_have(encoding):
    assert sources.decode_text("a café „naïve“ €5".encode(encoding)) == "a café „naïve“ €5"


def test_captions_become_one_line_without_nuls_and_survive_other_scripts():
    assert sources.one_line(" a\x00b\r\n\tc\u2028d ") == "a b c d"
    assert sources.one_line("قطة على القمر 🚀") == "قطة على القمر 🚀"
    assert sources.one_line("half \ud83d pair").encode() == b"half ? pair"
