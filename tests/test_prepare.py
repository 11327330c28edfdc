import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from sdlab import cache, models, preflight, prepare, scenes
from sdlab.config import ConfigError
from sdlab.pictures import PIXEL_VERSION, psnr

pytestmark = pytest.mark.usefixtures("loaded_once")
EMOJI = sorted(scenes.EMOJI_DIR.glob("*.png"))


def run(source: object, data_dir: Path, **options: object) -> dict:
    return prepare.prepare(prepare.configure(**{"source": str(source), "data_dir": str(data_dir), "resolution": 32, **options}))


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


# What goes into the cache


def test_the_cache_holds_the_moments_and_text_states_of_the_very_pictures(scenes_dir, frozen):
    opened, drawn = cache.open_cache(scenes_dir, 64), scenes.draw(40, seed=0)
    rows = opened.rows(range(40))
    moments = frozen.encode_moments(torch.from_numpy(scenes.render(drawn)).float() / 127.5 - 1)
    assert opened.captions == [scene.caption for scene in drawn]
    assert torch.allclose(rows["moments"], moments, atol=0.01, rtol=1e-3)
    assert torch.allclose(rows["prompt_embeds"], frozen.encode_text(frozen.tokenize(opened.captions)), atol=5e-3, rtol=1e-3)
    assert torch.allclose(opened.null_embeds, frozen.encode_text(frozen.tokenize([""]))[0], atol=5e-3, rtol=1e-3)
    assert opened.num_tokens.tolist() == frozen.count_tokens(opened.captions)
    assert (rows["original_size"] == 64).all() and (rows["crop"] == 0).all()


def test_one_folder_holds_several_resolutions_of_the_same_pictures(scenes_dir):
    small, large = (cache.open_cache(scenes_dir, r) for r in (32, 64))
    assert small.captions == large.captions and small.key != large.key
    assert small.rows([0])["moments"].shape == (1, 16, 4, 4)
    assert set(small.manifest["resolutions"]) == {"32", "64"}


def test_the_manifest_says_what_was_made_from_what(scenes_dir, frozen):
    manifest = json.loads((scenes_dir / "manifest.json").read_text())
    entry = manifest["resolutions"]["64"]
    assert manifest["source"] == "scenes drawn from seed 0: 40 pictures"
    assert manifest["encoders"] == frozen.hashes and manifest["pixel_version"] == PIXEL_VERSION
    assert manifest["counts"] == {"scanned": 40, "used": 40, "filtered": {}, "quarantined": {}}
    assert entry["count"] == 40 and entry["upscaled"] == 0
    assert -1 <= entry["range"]["pixel_values"][0] < entry["range"]["pixel_values"][1] <= 1
    kept = prepare.sample_pictures(scenes_dir, 64, n=40)
    assert entry["psnr_db"] == pytest.approx(psnr(kept.images, kept.decoded).mean(), abs=0.01)


def test_tars_of_every_transparent_mode_lose_nothing_and_lie_on_white(tmp_path):
    with tarfile.open(tmp_path / "00000.tar", "w") as tar:
        for index, (path, mode) in enumerate(zip(EMOJI, ["RGBA", "LA", "P"] * 3, strict=False)):
            buffer, picture = io.BytesIO(), Image.open(path).convert("RGBA")
            (picture.quantize(64) if mode == "P" else picture.convert(mode)).save(buffer, "PNG")
            for suffix, data in (("png", buffer.getvalue()), ("txt", path.stem.encode())):
                member = tarfile.TarInfo(f"{index:09d}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    manifest = run(tmp_path / "00000.tar", tmp_path / "data", resolution=64)
    assert manifest["source"] == "webdataset: 1 tar, 9 pictures" and manifest["counts"]["used"] == 9
    kept = prepare.sample_pictures(tmp_path / "data", 64)
    assert kept.captions == [path.stem for path in EMOJI[:9]]
    assert (kept.images[:, :, 0, 0] == 255).all()


def test_original_size_and_crop_are_stored_as_height_width_and_top_left(tmp_path):
    (tmp_path / "pics").mkdir()
    Image.new("RGB", (90, 60)).save(tmp_path / "pics/a.png")
    (tmp_path / "pics/a.txt").write_text("wide")
    run(tmp_path / "pics", tmp_path / "data")
    rows = cache.open_cache(tmp_path / "data", 32).rows([0])
    assert rows["original_size"].tolist() == [[60, 90]] and rows["crop"].tolist() == [[0, 8]]


def test_small_pictures_are_enlarged_and_counted(pictures, tmp_path):
    manifest = run(pictures, tmp_path / "data", resolution=[32, 64])
    assert [manifest["resolutions"][r]["upscaled"] for r in ("32", "64")] == [0, 6]


# Captions


def test_uncaptioned_pictures_can_be_kept_and_get_the_null_condition(pictures, tmp_path):
    (pictures / "apple.txt").unlink()
    manifest = run(pictures, tmp_path / "data", allow_uncaptioned=True)
    opened = cache.open_cache(tmp_path / "data", 32)
    assert manifest["counts"]["used"] == 6 and opened.captions[0] == ""
    assert torch.equal(opened.rows([0])["prompt_embeds"][0], opened.null_embeds)
    assert not torch.equal(opened.rows([1])["prompt_embeds"][0], opened.null_embeds)


def test_the_caption_column_may_be_named(pictures, tmp_path):
    rows = [json.dumps({"file_name": path.name, "alt": f"alt {path.stem}"}) for path in sorted(pictures.glob("*.png"))]
    (pictures / "metadata.jsonl").write_text("\n".join(rows))
    run(pictures, tmp_path / "data", caption_column="alt")
    assert cache.open_cache(tmp_path / "data", 32).captions[0] == "alt apple"


# What is not touched, and what is reused


def test_the_source_is_not_touched(pictures, tmp_path):
    before = tree(pictures)
    run(pictures, tmp_path / "data")
    assert tree(pictures) == before


@pytest.mark.parametrize("inside", [".", "prepared"])
def test_a_data_dir_in_the_source_is_refused(pictures, inside):
    before = tree(pictures)
    with pytest.raises(ConfigError, match="lies in the source"):
        run(pictures, pictures / inside)
    assert tree(pictures) == before and not (pictures / "prepared").exists()


@pytest.mark.parametrize("name", ["manifest.json", "preflight.json"])
def test_a_data_dir_with_files_of_somebody_else_is_refused(pictures, tmp_path, name):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / name).write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=name):
        run(pictures, tmp_path / "data")
    assert (tmp_path / "data" / name).read_text() == '{"mine": 1}'


def test_what_is_prepared_is_kept_and_a_missing_resolution_is_added(pictures, tmp_path, capsys):
    data = tmp_path / "data"
    first = run(pictures, data)
    written = tree(data / "moments_32") | tree(data / "text")
    capsys.readouterr()
    assert run(pictures, data) == first
    assert "already prepared: resolution 32" in capsys.readouterr().out
    both = run(pictures, data, resolution=[32, 64])
    assert "to encode: resolution 64" in capsys.readouterr().out
    assert tree(data / "moments_32") | tree(data / "text") == written
    assert both["resolutions"]["32"] == first["resolutions"]["32"] and cache.open_cache(data, 64).key != cache.open_cache(data, 32).key
    assert set(run(pictures, data, resolution=64)["resolutions"]) == {"32", "64"}


@pytest.mark.parametrize("change", ["caption", "bytes", "limit", "crop", "encoder"])
def test_a_change_of_content_makes_the_cache_anew_under_another_key(pictures, tmp_path, change, monkeypatch, frozen, capsys):
    data = tmp_path / "data"
    key = run(pictures, data, resolution=[32, 64])["resolutions"]["32"]["key"]
    options: dict[str, object] = {"limit": {"limit": 4}, "crop": {"crop": "random"}}.get(change, {})
    if change == "caption":
        (pictures / "cat.txt").write_text("another cat")
    if change == "bytes":
        Image.new("RGB", (40, 40)).save(pictures / "cat.png")
    if change == "encoder":
        monkeypatch.setitem(frozen.hashes, "vae", "another")
    manifest = run(pictures, data, **options)
    assert "removed, made from other pictures or settings: resolution 32, 64" in capsys.readouterr().out
    assert manifest["resolutions"]["32"]["key"] != key
    assert list(manifest["resolutions"]) == ["32"] and not (data / "moments_64").exists()
    assert cache.open_cache(data, 32).captions[1] != "" and len(cache.open_cache(data, 32)) == manifest["counts"]["used"]


def test_equal_content_has_an_equal_key_wherever_it_lies(pictures, tmp_path):
    keys = [run(pictures, tmp_path / name)["resolutions"]["32"]["key"] for name in ("one", "two")]
    assert keys[0] == keys[1]


def test_a_damaged_cache_is_made_anew(pictures, tmp_path):
    run(pictures, tmp_path / "data")
    (tmp_path / "data/moments_32/shard-00000.arrow").write_bytes(b"")
    run(pictures, tmp_path / "data")
    assert len(cache.open_cache(tmp_path / "data", 32)) == 6


def test_an_interrupted_encoding_leaves_no_cache_and_the_next_call_makes_it(pictures, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run(pictures, tmp_path / "data", resolution=64)
    monkeypatch.setattr(models.Frozen, "encode_moments", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(pictures, tmp_path / "data", resolution=[32, 64])
    assert len(cache.open_cache(tmp_path / "data", 64)) == 6
    with pytest.raises(ConfigError, match="holds resolution 64, not 32"):
        cache.open_cache(tmp_path / "data", 32)
    monkeypatch.undo()
    run(pictures, tmp_path / "data", resolution=[32, 64])
    assert len(cache.open_cache(tmp_path / "data", 32)) == 6


def test_a_picture_that_changes_while_it_is_read_is_noticed(pictures, tmp_path, monkeypatch):
    whole = preflight.judge

    def meddle(*args: object) -> None:
        whole(*args)
        Image.new("RGB", (40, 40)).save(pictures / "cat.png")

    monkeypatch.setattr(preflight, "judge", meddle)
    with pytest.raises(ConfigError, match="changed while they were read"):
        run(pictures, tmp_path / "data")
    with pytest.raises(ConfigError, match="holds resolution none"):
        cache.open_cache(tmp_path / "data", 32)


def test_values_beyond_float16_are_refused(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(models.Frozen, "encode_moments", lambda self, pixels: torch.full((len(pixels), 16, 4, 4), 1e5))
    with pytest.raises(ConfigError, match=r"moments at resolution 32 reach 100000"):
        run(pictures, tmp_path / "data")


def test_worker_processes_make_the_same_cache(pictures, tmp_path):
    keys = [run(pictures, tmp_path / str(n), num_workers=n)["content"] for n in (0, 2)]
    assert keys[0] == keys[1]
    assert torch.equal(*(cache.open_cache(tmp_path / str(n), 32).rows(range(6))["moments"] for n in (0, 2)))


# What a person may ask for


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sorce": "x"}, r"'sorce' is not a known name; did you mean 'source'"),
        ({"filters": {"max_aspct": 2}}, r"'max_aspct' is not a known filter; did you mean 'max_aspect'"),
        ({"filters": {"min_aspect": 0}}, r"min_aspect = 0.*above 0"),
        ({"crop": "middle"}, r"crop.*'center' or 'random'.*'middle'"),
        ({"limit": 0, "max_bad_fraction": 2}, r"(?s)limit.*greater than 0.*max_bad_fraction|max_bad_fraction.*limit"),
        ({"resolution": []}, r"resolution.*at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_was_given(given, said):
    with pytest.raises(ConfigError, match=said):
        prepare.configure(data_dir="d", **given)


def test_resolutions_are_one_or_several_sorted_and_each_once():
    assert prepare.configure(data_dir="d", resolution=64).resolution == [64]
    assert prepare.configure(data_dir="d", resolution=[64, 32, 64]).resolution == [32, 64]


def test_a_resolution_that_cannot_be_halved_is_refused_before_the_source_is_read(tmp_path):
    with pytest.raises(ConfigError, match=r"resolution=40 cannot be halved evenly.*multiple of 16"):
        run(tmp_path / "not there", tmp_path / "data", resolution=[32, 40])
    with pytest.raises(ConfigError, match="is not there"):
        run(tmp_path / "not there", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_too_little_disk_is_refused_before_encoding(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(ConfigError, match=r"GB are free there"):
        run(pictures, tmp_path / "data")
    assert not (tmp_path / "data/moments_32").exists()
