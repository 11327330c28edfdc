"""What comes into the cache, in which shape, and what of it is kept when something changes."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sdlab import cache, parts, prepare, scenes
from sdlab import pictures as pixels
from sdlab.config import ConfigError
from sdlab.pictures import psnr

pytestmark = pytest.mark.usefixtures("loaded_once")
EMOJI = sorted(scenes.EMOJI_DIR.glob("*.png"))


def configured(source: object, data_dir: Path, **options: object) -> prepare.PrepareConfig:
    return prepare.configure(**{"source": str(source), "data_dir": str(data_dir), "resolution": 32, "num_workers": 0, **options})


def run(source: object, data_dir: Path, **options: object) -> dict:
    return prepare.prepare(configured(source, data_dir, **options))


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()}


def names_of(manifest: dict, resolution: str = "32") -> list[str]:
    """Shards in their order, of text and of moments."""
    moments = [shard["name"] for bucket in manifest["resolutions"][resolution]["buckets"] for shard in bucket["shards"]]
    return [shard["name"] for shard in manifest["text"]["shards"]] + moments


def moments(data_dir: Path, resolution: int = 32) -> torch.Tensor:
    opened = cache.open_cache(data_dir, resolution)
    return opened.rows(range(len(opened)))["moments"]


# What goes into the cache


def test_the_cache_holds_the_moments_and_text_states_of_the_very_pictures(scenes_dir, frozen):
    opened, drawn = cache.open_cache(scenes_dir, 64), scenes.draw(40, seed=0)
    rows = opened.rows(range(40))
    moments = frozen.encode_moments(torch.from_numpy(scenes.render(drawn)).float() / 127.5 - 1)
    captions = opened.captions(range(40))
    assert captions == [scene.caption for scene in drawn]
    assert torch.allclose(rows["moments"], moments, atol=0.01, rtol=1e-3)
    assert torch.allclose(rows["prompt_embeds"], frozen.encode_text(frozen.tokenize(captions)).prompt_embeds, atol=5e-3, rtol=1e-3)
    assert torch.allclose(opened.null["prompt_embeds"][0], frozen.encode_text(frozen.tokenize([""])).prompt_embeds[0], atol=5e-3, rtol=1e-3)
    assert (rows["original_size"] == 64).all() and (rows["crop"] == 0).all()


def test_one_folder_holds_several_resolutions_of_the_same_pictures(scenes_dir):
    small, large = (cache.open_cache(scenes_dir, r) for r in (32, 64))
    assert small.captions(range(40)) == large.captions(range(40)) and small.key != large.key
    assert small.rows([0])["moments"].shape == (1, 16, 4, 4)
    assert set(small.manifest["resolutions"]) == {"32", "64"}


def test_the_manifest_says_what_was_made_from_what(scenes_dir, frozen):
    manifest = json.loads((scenes_dir / "manifest.json").read_text())
    entry = manifest["resolutions"]["64"]
    assert manifest["source"] == "scenes (drawn from seed 0): 40 pictures"
    assert manifest["encoders"] == frozen.hashes and manifest["pixel_version"] == pixels.PIXEL_VERSION
    assert manifest["counts"] == {"scanned": 40, "used": 40, "filtered": {}, "quarantined": {}}
    assert entry["count"] == 40 and entry["upscaled"] == 0
    assert -1 <= entry["pixel_values"][0] < entry["pixel_values"][1] <= 1
    kept = prepare.sample_pictures(scenes_dir, 64, n=prepare.SAMPLES)
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
    assert manifest["counts"]["used"] == 6 and opened.captions([0]) == [""]
    assert torch.equal(opened.rows([0])["prompt_embeds"][0], opened.null["prompt_embeds"][0])
    assert not torch.equal(opened.rows([1])["prompt_embeds"][0], opened.null["prompt_embeds"][0])


def test_the_caption_column_may_be_named(pictures, tmp_path):
    rows = [json.dumps({"file_name": path.name, "alt": f"alt {path.stem}"}) for path in sorted(pictures.glob("*.png"))]
    (pictures / "metadata.jsonl").write_text("\n".join(rows))
    run(pictures, tmp_path / "data", caption_column="alt")
    assert cache.open_cache(tmp_path / "data", 32).captions([0]) == ["alt apple"]


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
    again = run(pictures, data)
    assert again["resolutions"] == first["resolutions"] and again["text"] == first["text"]
    assert "resolution 32: 6 hits, 0 misses, 0 stale" in capsys.readouterr().out
    both = run(pictures, data, resolution=[32, 64])
    assert "resolution 64: 0 hits, 6 misses, 0 stale" in capsys.readouterr().out
    assert tree(data / "moments_32") | tree(data / "text") == written
    assert both["resolutions"]["32"] == first["resolutions"]["32"] and cache.open_cache(data, 64).key != cache.open_cache(data, 32).key
    assert set(run(pictures, data, resolution=64)["resolutions"]) == {"32", "64"}


CHANGES = {
    "bytes": (1, {}),
    "added": (1, {}),
    "removed": (0, {}),
    "caption": (0, {}),
    "renamed": (0, {}),
    "limit": (0, {"limit": 4}),
    "crop": (6, {"crop": "random"}),
    "background": (6, {"background": "#102030"}),
    "encoder": (6, {}),
    "pixel version": (6, {}),
    "filter": (0, {"filters": "width > 1"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_encodes_exactly_the_entries_that_it_touches(pictures, tmp_path, change, monkeypatch, frozen):
    data, (misses, options) = tmp_path / "data", CHANGES[change]
    before = run(pictures, data)
    if change == "bytes":
        Image.new("RGB", (40, 40)).save(pictures / "cat.png")
    elif change == "added":
        shutil.copy(EMOJI[-1], pictures / "another.png")
        (pictures / "another.txt").write_text("another")
    elif change == "removed":
        (pictures / "cat.png").unlink()
    elif change == "caption":
        (pictures / "cat.txt").write_text("another cat")
    elif change == "renamed":
        (pictures / "cat.png").rename(pictures / "zebra.png")
        (pictures / "cat.txt").rename(pictures / "zebra.txt")
    elif change == "encoder":
        monkeypatch.setitem(frozen.hashes, "vae", "another")
    elif change == "pixel version":
        monkeypatch.setattr(pixels, "PIXEL_VERSION", pixels.PIXEL_VERSION + 1)
    loaded: list[int] = []
    load = pixels.load_batch
    monkeypatch.setattr(pixels, "load_batch", lambda jobs, background: loaded.append(len(jobs)) or load(jobs, background=background))
    after = run(pictures, data, **options)
    used = after["counts"]["used"]
    assert sum(loaded) == misses
    assert after["entries"]["32"] == {"hits": used - misses, "misses": misses, "stale": 6 - (used - misses)}
    assert (after["resolutions"]["32"]["key"] == before["resolutions"]["32"]["key"]) == (change == "filter")
    fresh = run(pictures, tmp_path / "fresh", **options)
    assert after["resolutions"]["32"]["key"] == fresh["resolutions"]["32"]["key"]
    assert names_of(after) == names_of(fresh)
    assert after["text"] == fresh["text"] and after["resolutions"] == fresh["resolutions"]


def test_a_resolution_that_is_not_asked_for_and_has_become_stale_is_removed(pictures, tmp_path, capsys):
    run(pictures, tmp_path / "data", resolution=[32, 64])
    Image.new("RGB", (40, 40)).save(pictures / "cat.png")
    manifest = run(pictures, tmp_path / "data")
    assert "resolution 64: 0 hits, 0 misses, 6 stale" in capsys.readouterr().out
    assert list(manifest["resolutions"]) == ["32"] and not (tmp_path / "data/moments_64").exists()


def test_equal_content_has_an_equal_key_wherever_it_lies(pictures, tmp_path):
    keys = [run(pictures, tmp_path / name)["resolutions"]["32"]["key"] for name in ("one", "two")]
    assert keys[0] == keys[1]


def test_a_damaged_cache_is_made_anew(pictures, tmp_path):
    run(pictures, tmp_path / "data")
    shard = next((tmp_path / "data/moments_32").glob("*.arrow"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    run(pictures, tmp_path / "data")
    assert len(cache.open_cache(tmp_path / "data", 32)) == 6


def test_an_interrupted_encoding_leaves_no_cache_and_the_next_call_makes_it(pictures, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run(pictures, tmp_path / "data", resolution=64)
    monkeypatch.setattr(parts.Frozen, "encode_moments", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(pictures, tmp_path / "data", resolution=[32, 64])
    assert len(cache.open_cache(tmp_path / "data", 64)) == 6
    with pytest.raises(ConfigError, match="holds resolution 64, not 32"):
        cache.open_cache(tmp_path / "data", 32)
    monkeypatch.undo()
    run(pictures, tmp_path / "data", resolution=[32, 64])
    assert len(cache.open_cache(tmp_path / "data", 32)) == 6


def test_a_picture_that_changes_after_it_was_looked_at_is_noticed(pictures, tmp_path):
    config = configured(pictures, tmp_path / "data")
    found = prepare.inspect(config)
    Image.new("RGB", (40, 40)).save(pictures / "cat.png")
    with pytest.raises(ConfigError, match=r"cat\.png was changed after it was looked at"):
        prepare.prepare(config, found)
    (pictures / "cat.png").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="is not any more"):
        prepare.prepare(config, found)
    with pytest.raises(ConfigError, match="holds no prepared data"):
        cache.open_cache(tmp_path / "data", 32)


def test_values_beyond_float16_are_refused(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(parts.Frozen, "encode_moments", lambda self, pixels: torch.full((len(pixels), 16, 4, 4), 1e5))
    with pytest.raises(ConfigError, match=r"moments at resolution 32 reach 100000"):
        run(pictures, tmp_path / "data")


def test_worker_processes_make_the_same_cache(pictures, tmp_path):
    one, two = (run(pictures, tmp_path / str(n), num_workers=n) for n in (0, 2))
    assert one["resolutions"] == two["resolutions"] and one["text"] == two["text"]


# Shapes and views


def shapes_of(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """Pictures of these heights and widths, brighter to the right, named in order."""
    folder.mkdir()
    for number, (height, width) in enumerate(sizes):
        ramp = np.linspace(0, 255, width).round().astype(np.uint8)[None].repeat(height, 0)
        Image.fromarray(ramp).convert("RGB").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"picture {number}")
    return folder


def test_buckets_take_every_picture_in_the_shape_that_is_nearest_to_its_own(tmp_path):
    sizes = [(64, 64), (80, 50), (40, 120), (300, 20), (64, 66)]
    manifest = run(shapes_of(tmp_path / "pics", sizes), tmp_path / "data", resolution=64, crop="buckets")
    buckets = {(one["height"], one["width"]): one for one in manifest["resolutions"]["64"]["buckets"]}
    assert {shape: one["count"] for shape, one in buckets.items()} == {(64, 64): 2, (80, 48): 1, (32, 128): 1, (128, 32): 1}
    assert {shape: one["upscaled"] for shape, one in buckets.items()} == {(64, 64): 0, (80, 48): 0, (32, 128): 1, (128, 32): 1}
    opened = cache.open_cache(tmp_path / "data", 64)
    seen = {}
    for bucket in opened.buckets:
        rows = opened.rows(range(bucket.first, bucket.first + bucket.count))
        assert rows["moments"].shape[2:] == (bucket.height // 8, bucket.width // 8)
        assert (rows["target_size"] == (bucket.height, bucket.width)).all()
        captions = opened.captions(range(bucket.first, bucket.first + bucket.count))
        applied = zip(map(tuple, rows["original_size"].tolist()), map(tuple, rows["crop"].tolist()), strict=True)
        seen |= dict(zip(captions, applied, strict=True))
    assert seen == {
        "picture 0": ((64, 64), (0, 0)),
        "picture 1": ((80, 50), (0, 1)),
        "picture 2": ((40, 120), (5, 0)),
        "picture 3": ((300, 20), (176, 0)),
        "picture 4": ((64, 66), (0, 1)),
    }


def test_views_are_crops_of_their_own_and_every_second_one_may_be_mirrored(tmp_path):
    source = shapes_of(tmp_path / "pics", [(40, 200), (40, 90)])
    manifest = run(source, tmp_path / "data", crop="random", views=4, flip=True)
    opened = cache.open_cache(tmp_path / "data", 32)
    rows = opened.rows(range(8))
    assert manifest["resolutions"]["32"]["count"] == len(opened) == 8 and manifest["counts"]["used"] == 2
    assert len({tuple(corner) for corner in rows["crop"][:4].tolist()}) > 1
    images = prepare.sample_pictures(tmp_path / "data", 32).images.astype(int)
    assert (images[:, 0, 5, -1] > images[:, 0, 5, 0]).tolist() == [True, False] * 4
    assert run(source, tmp_path / "data", crop="random", views=2, flip=True)["entries"]["32"] == {"hits": 4, "misses": 0, "stale": 4}


def test_the_background_is_what_transparent_pictures_lie_on(tmp_path):
    (tmp_path / "pics").mkdir()
    Image.new("RGBA", (32, 32), (0, 0, 0, 0)).save(tmp_path / "pics/clear.png")
    (tmp_path / "pics/clear.txt").write_text("nothing")
    for background, colour in (("white", [255, 255, 255]), ("#204060", [32, 64, 96])):
        run(tmp_path / "pics", tmp_path / background.strip("#"), background=background)
        kept = prepare.sample_pictures(tmp_path / background.strip("#"), 32)
        assert kept.images[0, :, 5, 5].tolist() == colour


def stored(picture: Image.Image, mode: str, orientation: int) -> tuple[str, bytes]:
    """The picture as a file of some mode, turned so that its EXIF orientation makes it upright."""
    backwards = [None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM]
    backwards += [Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_90, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_270]
    turned = picture if backwards[orientation - 1] is None else picture.transpose(backwards[orientation - 1])
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    kind = {"CMYK": "JPEG", "YCbCr": "JPEG"}.get(mode, "PNG")
    ready = turned.quantize(256) if mode == "P" else turned.convert(mode)
    ready.save(buffer, kind, exif=exif, **({"quality": 98, "subsampling": 0} if kind == "JPEG" else {}))
    return {"JPEG": "jpg", "PNG": "png"}[kind], buffer.getvalue()


def test_a_known_picture_comes_back_from_cache_and_vae_at_its_place_and_colour(tmp_path, frozen):
    """For every mode and orientation: nearer to the picture that was meant than to any turned or mirrored one."""
    scene = next(one for one in scenes.draw(50, seed=5) if len(one.objects) == 2)
    meant = scenes.render([scene])[0]
    picture, source = Image.fromarray(meant.transpose(1, 2, 0)), tmp_path / "pics"
    source.mkdir()
    cases = [(mode, orientation) for mode in ("RGB", "RGBA", "P", "CMYK", "YCbCr") for orientation in range(1, 9)]
    for mode, orientation in cases:
        suffix, data = stored(picture, mode, orientation)
        (source / f"{mode}-{orientation}.{suffix}").write_bytes(data)
        (source / f"{mode}-{orientation}.txt").write_text(f"{mode} {orientation}")
    run(source, tmp_path / "data", resolution=64)
    opened = cache.open_cache(tmp_path / "data", 64)
    means = opened.rows(range(len(opened)))["moments"].chunk(2, dim=1)[0]
    decoded = frozen.decode(means * frozen.scaling_factor).numpy()
    wrong = [np.rot90(turned, turns, (1, 2)) for turned in (meant, meant[:, :, ::-1]) for turns in range(4)][1:]
    assert len(decoded) == len(cases)
    for caption, image in zip(opened.captions(range(len(opened))), decoded, strict=True):
        right = psnr(meant[None], image[None])[0]
        assert right > 27 and right > 5 + max(psnr(other[None], image[None])[0] for other in wrong), caption


# Text


def test_without_text_states_the_cache_holds_token_ids_alone(pictures, tmp_path, frozen):
    run(pictures, tmp_path / "ids", text_states=False)
    run(pictures, tmp_path / "states")
    ids, states = (cache.open_cache(tmp_path / name, 32) for name in ("ids", "states"))
    rows = ids.rows(range(6))
    assert "prompt_embeds" not in rows and "prompt_embeds" not in ids.null
    assert torch.allclose(frozen.encode_text(rows["input_ids"]).prompt_embeds, states.rows(range(6))["prompt_embeds"], atol=5e-3, rtol=1e-3)


# What a person may ask for


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sorce": "x"}, r"'sorce' is not a known name; did you mean 'source'"),
        ({"filters": {"aspect": 2}}, r"'aspect 2' is no condition; write one as in 'aesthetic >= 5.0'"),
        ({"filters": ["aesthetic >= good"]}, r"'aesthetic >= good' is no condition"),
        ({"crop": "middle"}, r"crop.*'center', 'random' or 'buckets'.*'middle'"),
        ({"views": 3}, r"views=3 with crop='center' would cache equal pictures"),
        ({"flip": True}, r"flip mirrors every second view, so views has to be even"),
        ({"num_workers": -1}, r"num_workers.*0 or more, or auto"),
        ({"background": "blurple"}, r"background='blurple' is no colour"),
        ({"preset": "tinny"}, r"did you mean 'tiny'"),
        ({"resolution": 40}, r"resolution=40 cannot be halved evenly.*multiple of 16"),
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


def test_filters_may_be_given_as_a_table_a_list_or_one_text():
    given = ({"aesthetic": ">= 5.0", "punsafe": "<0.1"}, ["aesthetic >= 5.0", "punsafe < 0.1"], "aesthetic>=5, punsafe < 1e-1")
    configs = [prepare.configure(data_dir="d", filters=one).filters for one in given]
    assert configs[0] == configs[1] == configs[2]
    assert [str(one) for one in configs[0]] == ["aesthetic >= 5", "punsafe < 0.1"]


def test_a_source_that_is_not_there_leaves_no_data_dir(tmp_path):
    with pytest.raises(ConfigError, match="is not there"):
        run(tmp_path / "not there", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_what_was_found_with_other_settings_is_refused_with_both(pictures, tmp_path):
    found = prepare.inspect(configured(pictures, tmp_path / "data"))
    with pytest.raises(ConfigError, match=r"other settings \(min_resolution: then None, now 9; limit: then None, now 1\)"):
        prepare.prepare(configured(pictures, tmp_path / "data", min_resolution=9, limit=1), found)


def test_files_of_somebody_else_below_the_names_that_are_written_are_safe(pictures, tmp_path):
    (tmp_path / "own/moments_32").mkdir(parents=True)
    (tmp_path / "own/moments_32" / f"{'ab' * 16}.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a moments_32 that sdlab did not write"):
        run(pictures, tmp_path / "own")
    run(pictures, tmp_path / "data")
    shutil.copytree(pictures, tmp_path / "data/text/mine")
    with pytest.raises(ConfigError, match=r"lies where data_dir .* is written"):
        run(tmp_path / "data/text/mine", tmp_path / "data")


def test_a_damaged_sample_or_note_of_a_shard_is_made_anew(pictures, tmp_path):
    first = run(pictures, tmp_path / "data")
    place = tmp_path / "data/moments_32"
    next(place.glob("samples-*")).write_bytes(b"PK broken")
    about = next(place.glob("*.json"))
    about.write_text(about.read_text().replace('"rows": 6', '"rows": 2'))
    for store in (tmp_path / "data/checked").glob("known-*/rows.npy"):
        store.write_bytes(b"broken")
    assert run(pictures, tmp_path / "data")["resolutions"] == first["resolutions"]
    (tmp_path / "data/manifest.json").write_text(json.dumps({"schema": cache.SCHEMA}))
    with pytest.raises(ConfigError, match=r"manifest\.json is damaged"):
        run(pictures, tmp_path / "data")


def test_moments_that_no_manifest_names_are_removed(pictures, tmp_path):
    run(pictures, tmp_path / "data", resolution=[32, 64])
    (tmp_path / "data/manifest.json").unlink()
    run(pictures, tmp_path / "data")
    assert not (tmp_path / "data/moments_64").exists()


def test_too_little_disk_is_refused_before_encoding(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(ConfigError, match=r"GB are free there"):
        run(pictures, tmp_path / "data")
    assert not (tmp_path / "data/moments_32").exists()
