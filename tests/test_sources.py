import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from sdlab import scenes, sources
from sdlab.config import ConfigError

RED, WHITE = (255, 0, 0), (255, 255, 255)


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
    assert all(checked.size == (8, 8) for checked in sources.check_batch(list(found.values())))
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
    assert sources.check_batch([found["linked.png"]])[0].digest == ""


# Text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_caption_files_are_read_in_the_encodings_people_have(encoding):
    assert sources.decode_text("a café „naïve“ €5".encode(encoding)) == "a café „naïve“ €5"


def test_captions_become_one_line_without_nuls_and_survive_other_scripts():
    assert sources.one_line(" a\x00b\r\n\tc\u2028d ") == "a b c d"
    assert sources.one_line("قطة على القمر 🚀") == "قطة على القمر 🚀"
    assert sources.one_line("half \ud83d pair").encode() == b"half ? pair"


# Pixels


def half_clear(mode: str) -> bytes:
    """A 4 x 4 picture of which the right half is transparent black, as PNG in `mode`."""
    picture = Image.new("RGBA", (4, 4), (*RED, 255))
    picture.paste((0, 0, 0, 0), (2, 0, 4, 4))
    if mode == "P":
        palette = Image.new("P", (4, 4), 0)
        palette.putpalette([*RED, 0, 0, 0])
        palette.paste(1, (2, 0, 4, 4))
        return encoded(palette, transparency=1)
    if mode in ("RGB", "L"):
        return encoded(picture.convert(mode), transparency=(0, 0, 0) if mode == "RGB" else 0)
    return encoded(picture.convert(mode))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB", "L"])
def test_transparency_of_every_mode_lies_on_white(mode):
    picture = sources.decode(half_clear(mode))
    left = RED if mode in ("RGBA", "P", "RGB") else (76, 76, 76)
    assert picture.mode == "RGB"
    assert [picture.getpixel((x, 1)) for x in range(4)] == [left, left, WHITE, WHITE]


def test_half_transparent_red_on_white_is_pink():
    assert sources.decode(encoded(Image.new("RGBA", (2, 2), (255, 0, 0, 128)))).getpixel((0, 0)) == (255, 127, 127)


def test_16_bit_values_are_scaled_and_not_clipped():
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None].repeat(2, 0)
    grey = np.asarray(sources.decode(encoded(Image.fromarray(ramp))))
    assert np.abs(grey[0, :, 0].astype(int) - np.arange(256)).max() == 0
    floats = np.asarray(sources.decode(encoded(Image.fromarray(ramp.astype(np.float32) / 65535), "TIFF")))
    assert (floats == grey).all()


def test_values_without_a_known_range_are_refused_and_not_guessed():
    with pytest.raises(sources.BadPicture) as bad:
        sources.decode(encoded(Image.fromarray(np.full((4, 4), 300.0, np.float32)), "TIFF"))
    assert bad.value.reason == "unknown_range"


def test_cmyk_and_bilevel_become_rgb():
    cmyk = sources.decode(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(np.array(cmyk.getpixel((3, 3))) - np.array(RED)).max() <= 3
    assert sources.decode(encoded(Image.new("1", (8, 8), 1))).getpixel((3, 3)) == WHITE


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_every_exif_orientation_comes_out_upright(orientation, kind):
    upright = Image.new("RGB", (48, 32), WHITE)
    upright.paste(RED, (0, 0, 16, 16))
    upright.paste((0, 0, 255), (32, 0, 48, 16))
    turn = sources._TURNS.get(orientation)
    back = {Image.Transpose.ROTATE_90: Image.Transpose.ROTATE_270, Image.Transpose.ROTATE_270: Image.Transpose.ROTATE_90}
    stored = upright if turn is None else upright.transpose(back.get(turn, turn))
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = sources.decode(encoded(stored, kind, exif=exif, quality=95))
    assert picture.size == (48, 32)
    assert np.abs(np.asarray(picture).astype(int) - np.asarray(upright)).mean() < 3


def with_huge_text() -> bytes:
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * (2 << 20), zip=True)
    return encoded(Image.new("RGB", (8, 8)), pnginfo=text)


def bomb() -> bytes:
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def animated() -> bytes:
    return encoded(Image.new("L", (8, 8), 0), "GIF", save_all=True, append_images=[Image.new("L", (8, 8), 255)])


def noise_jpeg() -> bytes:
    return encoded(Image.effect_noise((128, 128), 80).convert("RGB"), "JPEG")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty_file"),
        (b"<html>not a picture</html>", "unreadable"),
        (noise_jpeg()[:4000], "unreadable"),
        (encoded(Image.effect_noise((128, 128), 80))[:-3000], "unreadable"),
        (with_huge_text(), "unreadable"),
        (bomb(), "too_large"),
        (animated(), "animated"),
    ],
    ids=["empty", "html", "cut jpeg", "cut png", "huge text", "bomb", "animated"],
)
def test_pictures_that_cannot_be_used_are_refused_with_a_reason(data, reason):
    with pytest.raises(sources.BadPicture) as bad:
        sources.decode(data)
    assert bad.value.reason == reason
    assert bad.value.detail


def test_any_cut_of_a_picture_is_decoded_whole_or_refused():
    data = noise_jpeg()
    for end in range(0, len(data) - 2, 997):
        with pytest.raises(sources.BadPicture):
            sources.decode(data[:end])


# Resizing and cropping


def test_the_square_is_cut_where_it_says():
    picture = Image.new("RGB", (200, 100), WHITE)
    picture.paste(RED, (0, 0, 50, 100))
    square, corner = sources.square_crop(picture, 50)
    assert square.shape == (3, 50, 50) and square.dtype == np.uint8
    assert corner == (0, 25)
    assert (square[0] == 255).all() and (square[1:, :, 1:] >= 250).all()
    left, corner = sources.square_crop(picture, 50, place=(0.0, 0.0))
    assert corner == (0, 0)
    assert (left[1, :, :23] <= 5).all() and (left[1, :, 27:] >= 250).all()


def test_cropping_while_resizing_equals_resizing_then_cropping():
    picture = Image.effect_noise((150, 100), 60).resize((301, 200), Image.Resampling.BICUBIC).convert("RGB")
    square, (top, left) = sources.square_crop(picture, 64)
    whole = np.asarray(picture.resize((96, 64), Image.Resampling.LANCZOS)).transpose(2, 0, 1)
    assert np.abs(square.astype(int) - whole[:, top : top + 64, left : left + 64]).max() <= 1


def test_a_very_long_picture_costs_no_more_than_another():
    square, (top, left) = sources.square_crop(Image.new("RGB", (20_000, 1), RED), 64)
    assert (top, left) == (0, (20_000 * 64 - 64) // 2)
    assert (square[0] == 255).all() and (square[1:] == 0).all()


def test_random_crops_depend_on_seed_and_bytes_alone(tmp_path):
    root = write_files(tmp_path, {f"{i}.png": encoded(Image.effect_noise((96, 32), 50)) for i in range(12)})
    items = list(sources.open_source(str(root)).items())
    load = partial(sources.load_batch, resolutions=[16, 32], crop="random")
    first, again, other = load(items, seed=1), load(items[::-1], seed=1), load(items, seed=2)
    assert (first.crop[32] == again.crop[32][::-1]).all() and (first.images[32] == again.images[32][::-1]).all()
    assert (first.crop[32] != other.crop[32]).any()
    assert len(set(first.crop[32][:, 1].tolist())) > 4 and (first.crop[32][:, 0] == 0).all()
    assert np.abs(first.crop[32] - 2 * first.crop[16]).max() <= 2


def test_sizes_are_those_before_the_resize_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    root = write_files(tmp_path, {"a.jpg": encoded(Image.new("RGB", (90, 60)), "JPEG", exif=exif)})
    items = list(sources.open_source(str(root)).items())
    assert sources.check_batch(items)[0].size == (90, 60)
    assert sources.load_batch(items, resolutions=[32], crop="center", seed=0).original_size.tolist() == [[90, 60]]


def test_scenes_keep_their_pixels_at_their_own_size():
    items = list(sources.open_source("scenes", limit=5, seed=7).items())
    drawn = scenes.draw(5, seed=7)
    pixels = sources.load_batch(items, resolutions=[64], crop="center", seed=0)
    assert (pixels.images[64] == scenes.render(drawn)).all()
    assert [item.caption for item in items] == [scene.caption for scene in drawn]


# Workers


def test_worker_processes_give_the_same_as_this_process(tmp_path):
    root = write_files(tmp_path, {f"{i}.png": plain(3 + i) for i in range(5)} | {"bad.png": b"broken"})
    items = [item for source in (str(root), "scenes") for item in sources.open_source(source, limit=90).items()]
    here, there = (list(sources.map_batches(sources.check_batch, items, num_workers=n)) for n in (0, 2))
    assert here == there
    assert sum(len(batch) for batch, _ in here) == len(items) == 96


def test_importing_sources_does_not_import_torch():
    code = "import sys, sdlab.sources; sys.exit('torch' in sys.modules or 'diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
