"""What a picture says of how it was drawn: A1111's text, the exact chunk, and pictures that lie or are broken."""

import json
import random
import struct
import time
import zlib
from dataclasses import asdict, replace
from importlib.metadata import version

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from sdlab import settings
from sdlab.config import ConfigError
from sdlab.settings import Settings

PICTURE = np.arange(3 * 4 * 6, dtype=np.uint8).reshape(3, 4, 6)
FULL = Settings(
    "a red fox\nin snow",
    "blurry, dark",
    guidance_scale=7.5,
    guidance="interval:0.2,0.8",
    solver="euler",
    spacing="trailing",
    num_inference_steps=25,
    seed=7,
    model='a "small", model',
    weights="ema",
    step=1200,
    weights_hash="0123456789abcdef" * 4,
    width=64,
    height=32,
    batch_size=8,
    precision="bf16-mixed",
)
FROM_A1111 = """a castle, (masterpiece:1.2), <lora:old:0.8>
second line of it
Negative prompt: people, text
watermark
Steps: 20, Sampler: Euler, Schedule type: Automatic, CFG scale: 7, Seed: 965400086, Size: 512x768, Model hash: 6ce0161689, \
Model: v1-5-pruned, Lora hashes: "old: 1a2b3c, new: \\"4d, Steps: 99\\"", Hires upscale: 2, Clip skip: 2, Version: v1.10.1"""
HOSTILE = {
    "empty": "",
    "spaces": "  \t a  ",
    "newlines": "\n\na\n\n",
    "carriage returns": "a\r\nb\rc",
    "a negative prompt": "a fox\nNegative prompt: x\nNegative prompt: y",
    "a settings line": "a fox\nSteps: 3, Sampler: Euler, CFG scale: 1, Seed: 2",
    "only a settings line": "Steps: 3, Sampler: Euler",
    "quotes": '"a\\" \'b\' \\n {"prompt": 1}',
    "a lone backslash": "a\\",
    "other scripts": "żółw 狐 лиса",
    "latin-1": "café ÿ",
    "emoji": "🦊👩‍🚀",
    "right to left": "\u202eabc\u2028d\u2029e\x85f",
    "NUL": "\0a\0\0b\0",
    "all control characters": "".join(map(chr, range(160))),
    "lone surrogates": "\ud800 a \udc00",
    "100 kB": "a fox, " * 15_000,
    "100 kB of emoji": "🦊" * 100_000,
    "random": "".join(random.Random(1).choices('aé🦊\n\r\t ,:"\\\0', k=2000)),
}


def png(path, **texts):
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    Image.new("RGB", (6, 4)).save(path, format="PNG", pnginfo=info)
    return path


def with_chunk(path, kind, data, *, before):
    """A PNG with one more chunk before the first one of kind `before`."""
    whole = png(path).read_bytes()
    at = whole.index(before) - 4
    chunk = struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    path.write_bytes(whole[:at] + chunk + whole[at:])
    return path


def test_the_text_is_laid_out_as_in_a1111():
    assert settings.to_text(FULL).split("\n") == [
        "a red fox",
        "in snow",
        "Negative prompt: blurry, dark",
        'Steps: 25, Sampler: Euler, CFG scale: 7.5, Seed: 7, Size: 64x32, Model hash: 0123456789, Model: "a \\"small\\", model", '
        'Timestep spacing: trailing, Guidance: "interval:0.2,0.8", Weights: ema, Step: 1200, Precision: bf16-mixed, Batch size: 8, '
        f"Version: sdlab {version('sdlab')}",
    ]


def test_what_is_not_known_is_left_out_and_a_seed_of_zero_is_known():
    first, last = settings.to_text(Settings("a fox")).split("\n")
    assert first == "a fox"
    assert last.startswith("Steps: 10, Sampler: DPM++ 2M, CFG scale: 2, Seed: 0, Guidance: constant, Precision: 32-true, Version: ")


@pytest.mark.parametrize(("solver", "name"), [("plms", "PLMS"), ("ddim", "DDIM"), ("dpmpp_2m", "DPM++ 2M"), ("euler", "Euler")])
def test_each_solver_has_its_name_in_a1111_and_is_read_back(solver, name):
    text = settings.to_text(Settings("a fox", solver=solver))
    assert f"Sampler: {name}, " in text and settings.from_text(text).solver == solver


def test_the_text_reads_back_but_for_the_rest_of_the_hash():
    assert settings.from_text(settings.to_text(FULL)) == replace(FULL, weights_hash="0123456789")


@pytest.mark.parametrize("value", ["a, b", "a: b", '"', 'a"b"', "a\nSteps: 1, Sampler: x", " a ", "C:\\a\\b", "a\\b", "🦊", "\\", "a\\"])
def test_values_that_could_be_taken_for_others_read_back(value):
    read = settings.from_text(settings.to_text(replace(FULL, model=value, weights=value, guidance=value)))
    assert (read.model, read.weights, read.guidance, read.step) == (value, value, value, 1200)


@pytest.mark.parametrize("scale", [0, 1, 1.1, 7, 0.1 + 0.2, 1e17, 1e-9])
def test_the_scale_reads_back_to_the_last_bit(scale):
    assert settings.from_text(settings.to_text(Settings("a", guidance_scale=scale))).guidance_scale == scale


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_a_text_of_a1111_is_read(ending):
    text = FROM_A1111.replace("\n", "\r\n") if ending == "\r\n" else FROM_A1111
    assert settings.from_text(text + ending) == Settings(
        "a castle, (masterpiece:1.2), <lora:old:0.8>\nsecond line of it",
        "people, text\nwatermark",
        guidance_scale=7.0,
        solver="euler",
        num_inference_steps=20,
        seed=965400086,
        model="v1-5-pruned",
        weights_hash="6ce0161689",
        width=512,
        height=768,
    )


def test_a_text_without_prompts_is_read():
    assert settings.from_text("Negative prompt: x\nSteps: 3, Sampler: DDIM") == Settings("", "x", solver="ddim", num_inference_steps=3)
    assert settings.from_text("Steps: 3, Sampler: DDIM") == Settings("", solver="ddim", num_inference_steps=3)


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ("Steps: 20, Sampler: DPM++ 2M Karras, CFG scale: 7", r"'DPM\+\+ 2M Karras'.*known are PLMS, DDIM, DPM\+\+ 2M, Euler"),
        ("Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras", r"'DPM\+\+ 2M Karras'"),
        ("Steps: 20, Sampler: DPM++ 2M, Schedule type: Automatic", r"'DPM\+\+ 2M Automatic'"),
        ("Steps: 20, Sampler: Euler a", "'Euler a'"),
        ("Steps: 20, Sampler: ", "''"),
        ("Sampler: Euler, CFG scale: 7, Seed: 1", "no Steps"),
        ("Steps: 20, CFG scale: 7, Seed: 1", "no Sampler"),
        ("a prompt alone", "no Steps and no Sampler.*'a prompt alone'"),
        ("", "no Steps"),
        ("Steps: many, Sampler: Euler", "Steps.*'many'"),
        ("Steps: 2.5, Sampler: Euler", "Steps.*'2.5'"),
        ("Steps: 0, Sampler: Euler", "num_inference_steps.*from 1.*given: 0"),
        (f"Steps: {'9' * 5000}, Sampler: Euler", "Steps.*'999"),
        ("Steps: 20, Sampler: Euler, CFG scale: nan", "guidance_scale.*nan"),
        ("Steps: 20, Sampler: Euler, CFG scale: 1e999", "guidance_scale.*inf"),
        ("Steps: 20, Sampler: Euler, CFG scale: 7;5", "CFG scale.*'7;5'"),
        ("Steps: 20, Sampler: Euler, Seed: -1", "seed.*-1"),
        ("Steps: 20, Sampler: Euler, Seed: ", "Seed.*''"),
        ("Steps: 20, Sampler: Euler, Size: 512", "Size.*'512'"),
        ("Steps: 20, Sampler: Euler, Size: 512x", "Size.*'512x'"),
        ('Steps: 20, Sampler: Euler, Model: "a\\', "Model"),
        ("Steps: 20, Sampler: Euler, Timestep spacing: even", "spacing.*leading, trailing, linspace.*'even'"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_with_what_was_found(last, found):
    with pytest.raises(ConfigError, match=found) as caught:
        settings.from_text(f"a fox\n{last}")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("piece", ["a", " ", ",", ":", "a:", 'a:"\\",', '"', "\\", 'a:"b",', "\n", "\nNegative prompt:", "a: b, "])
def test_a_long_hostile_text_takes_no_long_time(piece):
    start = time.monotonic()
    with pytest.raises(ConfigError):
        settings.from_text(piece * (400_000 // len(piece)))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", HOSTILE)
def test_any_prompt_survives_a_picture(name, tmp_path):
    drawn = replace(FULL, prompt=HOSTILE[name], negative_prompt=HOSTILE[name], model=HOSTILE[name][:1000])
    path = settings.save_png(PICTURE, drawn, tmp_path / "a.png")
    assert settings.read_png(path) == replace(drawn, width=6, height=4)


@pytest.mark.parametrize("name", HOSTILE)
def test_no_prompt_changes_the_numbers_in_the_text(name):
    drawn = replace(FULL, prompt=HOSTILE[name], negative_prompt=HOSTILE[name], weights_hash="")
    read = settings.from_text(settings.to_text(drawn))
    assert replace(read, prompt="", negative_prompt="") == replace(drawn, prompt="", negative_prompt="")


def test_other_programs_find_the_text_and_what_a_png_cannot_hold_is_a_question_mark(tmp_path):
    path = settings.save_png(PICTURE, Settings("a\0b\ud800c 🦊"), tmp_path / "a.png")
    with Image.open(path) as image:
        image.load()
        assert image.info["parameters"].startswith("a?b?c 🦊\nSteps: 10, ") and ", Size: 6x4, " in image.info["parameters"]
        assert json.loads(image.info["sdlab"])["prompt"] == "a\0b\ud800c 🦊"


def test_the_picture_itself_is_kept_and_its_size_is_the_one_that_is_written(tmp_path):
    path = settings.save_png(PICTURE, replace(FULL, width=999, height=999), tmp_path / "a.png")
    with Image.open(path) as image:
        assert np.array_equal(np.asarray(image).transpose(2, 0, 1), PICTURE)
    assert (settings.read_png(path).width, settings.read_png(path).height) == (6, 4)


def test_the_bytes_are_those_of_the_file_and_every_time_the_same(tmp_path):
    data = settings.png_bytes(PICTURE, FULL)
    assert settings.save_png(PICTURE, FULL, tmp_path / "a.png").read_bytes() == data == settings.png_bytes(PICTURE, FULL)


def test_folders_are_made_and_the_path_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = settings.save_png(PICTURE, FULL, "a/b/c.png")
    assert path == tmp_path / "a" / "b" / "c.png" and settings.read_png("a/b/c.png").prompt == FULL.prompt


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    path = settings.save_png(PICTURE, FULL, tmp_path / "a.png")
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(settings.os, "replace", full)
    with pytest.raises(ConfigError, match=r"a\.png cannot be written.*No space"):
        settings.save_png(PICTURE, Settings("another"), path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_places_that_cannot_be_written_are_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/a\.png cannot be written"):
        settings.save_png(PICTURE, FULL, tmp_path / "file" / "a.png")
    with pytest.raises(ConfigError, match="cannot be written"):
        settings.save_png(PICTURE, FULL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "image", [PICTURE.astype(np.float32), PICTURE[0], PICTURE[:1], PICTURE.transpose(1, 2, 0), np.zeros((3, 0, 4), np.uint8)]
)
def test_what_is_no_picture_is_refused(image):
    with pytest.raises(ConfigError, match=r"uint8 \(3, H, W\), not"):
        settings.png_bytes(image, FULL)


def test_a_picture_of_a1111_is_read(tmp_path):
    assert settings.read_png(png(tmp_path / "a.png", parameters=FROM_A1111)) == settings.from_text(FROM_A1111)


def test_a_text_behind_the_pixels_is_found(tmp_path):
    path = with_chunk(tmp_path / "a.png", b"tEXt", b"parameters\0" + FROM_A1111.encode(), before=b"IEND")
    assert settings.read_png(path) == settings.from_text(FROM_A1111)


def test_a_compressed_text_is_read(tmp_path):
    path = with_chunk(tmp_path / "a.png", b"zTXt", b"parameters\0\0" + zlib.compress(FROM_A1111.encode()), before=b"IDAT")
    assert settings.read_png(path).num_inference_steps == 20


@pytest.mark.parametrize("before", [b"IDAT", b"IEND"])
@pytest.mark.parametrize("key", ["parameters", "sdlab"])
def test_a_text_that_swells_is_refused(tmp_path, key, before):
    bomb = key.encode() + b"\0\0" + zlib.compress(b"a" * 50_000_000)
    with pytest.raises(ConfigError, match=r"a\.png.*too large"):
        settings.read_png(with_chunk(tmp_path / "a.png", b"zTXt", bomb, before=before))


def test_a_picture_that_swells_is_refused(tmp_path):
    path = png(tmp_path / "a.png", parameters=FROM_A1111)
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack(">II", 11_000, 11_000)
    data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.png.*decompression bomb"):
        settings.read_png(path)


def test_files_that_are_no_png_are_named(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.jpg")
    (tmp_path / "a.txt").write_text(FROM_A1111)
    (tmp_path / "empty.png").touch()
    for name in ("a.jpg", "a.txt", "empty.png", "none.png", ""):
        with pytest.raises(ConfigError, match=str(tmp_path / name)):
            settings.read_png(tmp_path / name)


def test_a_picture_without_settings_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.png.*neither a text 'sdlab' nor 'parameters'"):
        settings.read_png(png(tmp_path / "a.png", comment="hello"))


def test_a_picture_that_is_cut_short_is_never_misread(tmp_path):
    data, path = settings.png_bytes(np.zeros((3, 64, 64), np.uint8), FULL), tmp_path / "a.png"
    for end in range(0, len(data) - 40, 7):
        path.write_bytes(data[:end])
        with pytest.raises(ConfigError, match=r"a\.png"):
            settings.read_png(path)


def test_a_flipped_bit_gives_the_settings_or_an_error_that_names_the_file(tmp_path):
    data, path, drawn = settings.png_bytes(PICTURE, FULL), tmp_path / "a.png", replace(FULL, width=6, height=4)
    for at in range(0, len(data), 3):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            read = settings.read_png(path)
        except ConfigError as error:
            assert "a.png" in str(error)
        else:
            assert read == drawn


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"surprise": 1}, "surprise"),
        ({"seed": "7"}, "seed has to be a whole number.*'7'"),
        ({"seed": True}, "seed"),
        ({"seed": 7.0}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"prompt": None}, "prompt has to be text"),
        ({"prompt": ["a"]}, "prompt"),
        ({"guidance_scale": "7"}, "guidance_scale has to be a number"),
        ({"guidance_scale": float("nan")}, "guidance_scale"),
        ({"guidance_scale": 10**400}, "guidance_scale"),
        ({"solver": "heun"}, "solver has to be one of plms, ddim, dpmpp_2m, euler"),
        ({"solver": ["euler"]}, "solver"),
        ({"spacing": ""}, "spacing"),
        ({"num_inference_steps": 0}, "num_inference_steps.*from 1"),
    ],
)
def test_an_exact_chunk_with_wrong_fields_is_refused(tmp_path, change, found):
    path = png(tmp_path / "a.png", sdlab=json.dumps(asdict(FULL) | change), parameters=FROM_A1111)
    with pytest.raises(ConfigError, match=rf"a\.png.*{found}"):
        settings.read_png(path)


@pytest.mark.parametrize("field", asdict(FULL))
def test_an_exact_chunk_that_lacks_a_field_is_refused(tmp_path, field):
    said = {name: value for name, value in asdict(FULL).items() if name != field}
    with pytest.raises(ConfigError, match=rf"a\.png.*{field}"):
        settings.read_png(png(tmp_path / "a.png", sdlab=json.dumps(said)))


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"a"', "[[1, 2]]", "[" * 200_000, '{"a": ' + "9" * 5000 + "}", "é🦊"])
def test_a_damaged_exact_chunk_is_refused_though_the_text_could_be_read(tmp_path, text):
    with pytest.raises(ConfigError, match=r"a\.png"):
        settings.read_png(png(tmp_path / "a.png", sdlab=text, parameters=FROM_A1111))


def test_wrong_settings_cannot_be_made():
    with pytest.raises(ConfigError, match="seed has to be a whole number"):
        Settings("a fox", seed=1.5)
