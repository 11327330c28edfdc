"""Shards and the cache over them: what is written comes back exactly, and nothing else counts."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from sdlab import cache, runs
from sdlab.config import ConfigError

SHAPES = {(64, 64): (4, 2, 2), (32, 128): (4, 1, 4), (128, 32): (4, 4, 1)}
"""Moments of each bucket."""
COUNTS = (2 * cache.ROWS + 104, 100, 1)
"""Rows of each bucket: the first has three shards, the last of them 40 rows in its second chunk."""
TOTAL = sum(COUNTS)
LENGTH, WIDTH = 6, 8
CAPTIONS = [[""], [f"picture {number}" for number in range(100)], [f"late {number}" for number in range(30)]]
"""By text shard."""
MOMENTS = np.random.default_rng(0).standard_normal((TOTAL, 16)).astype(np.float16)
STATES = [np.random.default_rng(7 + n).standard_normal((len(one), LENGTH, WIDTH)).astype(np.float16) for n, one in enumerate(CAPTIONS)]
IDS = [np.random.default_rng(3 + n).integers(0, 49408, (len(one), LENGTH), np.int32) for n, one in enumerate(CAPTIONS)]
SIZES = np.arange(2 * TOTAL, dtype=np.int32).reshape(TOTAL, 2)
POINTERS = np.array([[shard := row % 3, row % len(CAPTIONS[shard])] for row in range(TOTAL)], np.int32)
KEYS = np.frombuffer(np.random.default_rng(9).bytes(16 * TOTAL), cache.KEY)


def name_of(number: int) -> str:
    return f"{number:032x}"


def chunks(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """Columns in the chunks that a shard is written in."""
    count = len(columns["key"])
    return [{name: values[start : start + cache.CHUNK] for name, values in columns.items()} for start in range(0, count, cache.CHUNK)]


def write(folder: Path, number: int, columns: dict[str, Any]) -> dict[str, Any]:
    cache.write_shard(folder, name_of(number), iter(chunks(columns)), {"range": {}})
    about = cache.find_shard(folder, name_of(number))
    assert about is not None
    return about


def moments_of(rows: slice) -> dict[str, np.ndarray]:
    return {
        "moments": MOMENTS[rows],
        "original_size": SIZES[rows],
        "crop": SIZES[rows] + 1,
        "key": KEYS[rows],
        "text": POINTERS[rows],
    }


def write_cache(folder: Path, *, states: bool = True) -> None:
    """A prepared folder of three buckets at resolution 64, as `prepare` leaves it."""
    texts = []
    for number, captions in enumerate(CAPTIONS):
        columns = {"key": KEYS[: len(captions)], "input_ids": IDS[number], "caption": captions, "num_tokens": [2] * len(captions)}
        columns |= {"prompt_embeds": STATES[number]} if states else {}
        texts.append(write(folder / cache.TEXT, number, columns))
    buckets, first = [], 0
    for (height, width), count in zip(SHAPES, COUNTS, strict=True):
        place = folder / cache.moments_folder(64)
        starts = range(first, first + count, cache.ROWS)
        shards = [write(place, start, moments_of(slice(start, min(start + cache.ROWS, first + count)))) for start in starts]
        buckets.append({"height": height, "width": width, "shape": SHAPES[height, width], "count": count, "shards": shards})
        first += count
    text = {"count": 131, "length": LENGTH, "widths": [WIDTH], "pooled_width": 0, "states": states, "dtype": "float16", "shards": texts}
    resolutions = {"64": {"key": "a key", "count": TOTAL, "buckets": buckets}}
    runs.write_json(folder / cache.MANIFEST, {"schema": cache.SCHEMA, "resolutions": resolutions, "text": text})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    write_cache(folder)
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def maps(folder: Path) -> set[str]:
    """Names of the files below a folder that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if line.endswith(".arrow") and str(folder) in line}


# Rows


@pytest.mark.parametrize("seed", range(3))
def test_rows_come_back_exactly_in_the_order_asked_for_across_shards_and_chunks(folder, seed):
    opened = cache.open_cache(folder, 64)
    border = [cache.ROWS - 1, cache.ROWS, 0, cache.CHUNK, cache.CHUNK - 1, COUNTS[0] - 1, 77, 77]
    order = np.concatenate([border, np.random.default_rng(seed).integers(0, COUNTS[0], 300)])
    rows = opened.rows(order)
    assert len(opened) == TOTAL and len(list((folder / "moments_64").glob("*.arrow"))) == 5
    assert (rows["moments"].numpy() == MOMENTS[order].reshape(-1, 4, 2, 2).astype(np.float32)).all()
    assert (rows["prompt_embeds"].numpy() == np.stack([STATES[s][r] for s, r in POINTERS[order]]).astype(np.float32)).all()
    assert rows["original_size"].tolist() == SIZES[order].tolist() and rows["crop"].tolist() == (SIZES[order] + 1).tolist()
    assert rows["target_size"].tolist() == [[64, 64]] * len(order)
    assert rows["moments"].dtype == rows["prompt_embeds"].dtype == torch.float32
    assert {rows[name].dtype for name in ("original_size", "crop", "target_size")} == {np.dtype(np.int32)}


def test_every_bucket_has_rows_of_its_own_shape(folder):
    opened = cache.open_cache(folder, 64)
    assert [(one.height, one.width, one.first, one.count) for one in opened.buckets] == [
        (64, 64, 0, 4200),
        (32, 128, 4200, 100),
        (128, 32, 4300, 1),
    ]
    for (size, shape), bucket in zip(SHAPES.items(), opened.buckets, strict=True):
        index = np.arange(bucket.first, bucket.first + bucket.count)[::-1]
        rows = opened.rows(index)
        assert (rows["moments"].numpy() == MOMENTS[index].reshape(-1, *shape).astype(np.float32)).all()
        assert rows["target_size"].tolist() == [list(size)] * bucket.count
        assert {opened.bucket(row) for row in index} == {bucket}


def test_rows_of_a_bucket_are_told_by_shard(folder):
    opened = cache.open_cache(folder, 64)
    assert [opened.shard_rows(bucket) for bucket in opened.buckets] == [
        [range(0, 2048), range(2048, 4096), range(4096, 4200)],
        [range(4200, 4300)],
        [range(4300, 4301)],
    ]


@pytest.mark.parametrize("indices", [[4199, 4200], [4300, 0], [4200, 4201, 4300]])
def test_rows_of_different_shapes_are_refused_together(folder, indices):
    with pytest.raises(ValueError, match="different buckets"):
        cache.open_cache(folder, 64).rows(indices)


@pytest.mark.parametrize("indices", [[TOTAL], [-1], [0, 10**9]])
def test_rows_and_captions_outside_the_cache_are_refused(folder, indices):
    opened = cache.open_cache(folder, 64)
    for ask in (opened.rows, opened.captions):
        with pytest.raises(IndexError, match="0 to 4300"):
            ask(indices)


def test_no_rows_are_an_empty_batch(folder):
    opened = cache.open_cache(folder, 64)
    assert opened.rows([])["moments"].shape == (0, 4, 2, 2) and opened.captions([]) == []


def test_captions_null_condition_and_key_are_at_hand(folder):
    opened = cache.open_cache(folder, 64)
    rows = [4299, 0, 1, 2, 4300]
    assert opened.captions(rows) == [CAPTIONS[shard][row] for shard, row in POINTERS[rows]]
    assert opened.captions(range(3)) == ["", "picture 1", "late 2"]
    assert (opened.null["prompt_embeds"][0].numpy() == STATES[0][0].astype(np.float32)).all()
    assert opened.null["input_ids"].dtype == torch.int64 and opened.null["input_ids"][0].tolist() == IDS[0][0].tolist()
    assert opened.key == "a key" and opened.manifest["resolutions"]["64"]["key"] == "a key"


def test_a_cache_without_text_states_gives_token_ids(tmp_path):
    write_cache(tmp_path, states=False)
    opened = cache.open_cache(tmp_path, 64)
    rows = opened.rows([5, 0, 4])
    assert not opened.has_text_states and "prompt_embeds" not in opened.null and "prompt_embeds" not in rows
    assert rows["input_ids"].dtype == torch.int64
    assert rows["input_ids"].tolist() == [IDS[shard][row].tolist() for shard, row in POINTERS[[5, 0, 4]]]
    assert opened.null["input_ids"][0].tolist() == IDS[0][0].tolist()


def test_random_batches_come_at_thousands_of_rows_a_second(folder):
    opened = cache.open_cache(folder, 64)
    batches = np.random.default_rng(0).integers(0, COUNTS[0], (200, 32))
    start = time.perf_counter()
    for batch in batches:
        opened.rows(batch)
    assert 200 * 32 / (time.perf_counter() - start) > 5_000


# What is open


def test_opening_maps_only_the_null_condition_and_reading_only_what_it_needs(folder):
    opened = cache.open_cache(folder, 64)
    assert maps(folder) == {f"{name_of(0)}.arrow"}
    opened.rows([2048])
    assert maps(folder) == {f"{name_of(number)}.arrow" for number in (0, 2048, int(POINTERS[2048][0]))}


def write_many(folder: Path, count: int) -> None:
    """A cache of one-row shards."""
    write_cache(folder, states=False)
    shards = [write(folder / "moments_64", number, moments_of(slice(number, number + 1))) for number in range(count)]
    manifest = json.loads((folder / cache.MANIFEST).read_text())
    bucket = {**manifest["resolutions"]["64"]["buckets"][0], "count": count, "shards": shards}
    manifest["resolutions"]["64"] = {"key": "many", "count": count, "buckets": [bucket]}
    runs.write_json(folder / cache.MANIFEST, manifest)


def test_few_shards_stay_mapped_and_no_files_stay_open(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MAPPED", 3)
    write_many(tmp_path, 200)
    before = len(os.listdir("/proc/self/fd"))
    opened = cache.open_cache(tmp_path, 64)
    order = np.random.default_rng(0).permutation(200)
    for part in order.reshape(-1, 20):
        assert (opened.rows(part)["moments"].numpy().reshape(20, -1) == MOMENTS[part].astype(np.float32)).all()
    assert 0 < len(maps(tmp_path / "moments_64")) <= 3
    assert len(os.listdir("/proc/self/fd")) <= before


def test_shards_that_are_unmapped_while_other_threads_read_harm_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MAPPED", 2)
    write_many(tmp_path, 30)
    opened = cache.open_cache(tmp_path, 64)

    def read(seed: int) -> bool:
        orders = np.random.default_rng(seed).integers(0, 30, (20, 16))
        return all((opened.rows(order)["moments"].numpy().reshape(16, -1) == MOMENTS[order].astype(np.float32)).all() for order in orders)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(8)))


def test_the_shards_open_with_the_datasets_library_too(folder):
    from datasets import Dataset

    first = Dataset.from_file(str(folder / "moments_64" / f"{name_of(0)}.arrow"))
    assert len(first) == cache.ROWS and first[70]["text"] == POINTERS[70].tolist() and first[70]["key"] == KEYS[70].tobytes()
    assert np.array_equal(np.array(first[70]["moments"], np.float16), MOMENTS[70])
    texts = Dataset.from_file(str(folder / "text" / f"{name_of(1)}.arrow"))
    assert texts["caption"][:2] == ["picture 0", "picture 1"]


# What is refused


def test_what_is_not_there_is_refused_with_what_is_and_how_to_make_it(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere holds no prepared data .*01_prepare_data.*resolution=32"):
        cache.open_cache(tmp_path / "nowhere", 32)
    with pytest.raises(ConfigError, match=r"holds resolution 64, not 32; make it with .*01_prepare_data.*resolution=32"):
        cache.open_cache(folder, 32)


@pytest.mark.parametrize("damage", ["cut", "removed", "all removed"])
@pytest.mark.parametrize("part", ["moments_64", "text"])
def test_a_damaged_shard_is_noticed_when_the_cache_is_opened(copy, part, damage):
    shard = sorted((copy / part).glob("*.arrow"))[-1]
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-10])
    elif damage == "removed":
        shard.unlink()
    else:
        shutil.rmtree(copy / part)
    name = shard.name if damage != "all removed" else r"\w+\.arrow"
    said = r"has [\d,]+ bytes, not [\d,]+" if damage == "cut" else "is not there"
    with pytest.raises(ConfigError, match=rf"{part}/{name} {said}.*prepare the folder again"):
        cache.open_cache(copy, 64)


@pytest.mark.parametrize("part", ["moments_64", "text"])
def test_changed_bytes_are_noticed_by_their_hash(copy, part):
    shard = sorted((copy / part).glob("*.arrow"))[-1]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    said = rf"{shard.name} has other content than when it was written; prepare the folder again"
    with pytest.raises(ConfigError, match=said):
        opened = cache.open_cache(copy, 64)
        for bucket in opened.buckets:
            opened.rows(range(bucket.first, bucket.first + bucket.count))


@pytest.mark.parametrize("content", [b"", b"ARROW1 no stream", b"\xff\xff\xff\xff\x10\x00\x00\x00"])
def test_a_shard_that_is_none_is_named(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.arrow is damaged .*prepare the folder again"):
        cache.read_shard(tmp_path / "a.arrow")


@pytest.mark.parametrize("text", ["{broken", "[]", '{"name": "my app", "icons": []}', '{"schema": "sdlab cache 1"}', "\0"])
def test_a_manifest_of_somebody_else_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"manifest\.json.*give another data_dir"):
        cache.open_cache(tmp_path, 64)
    assert (tmp_path / "manifest.json").read_text() == text


def test_too_little_disk_is_refused_before_anything_is_written(tmp_path):
    cache.check_disk(tmp_path / "not/yet/there", 1)
    with pytest.raises(ConfigError, match=r"needs about 1000000.00 GB and .* GB are free"):
        cache.check_disk(tmp_path / "not/yet/there", 10**15)
    assert list(tmp_path.iterdir()) == []


def test_disk_has_to_be_left_over(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2_000, 900, 1_100))
    cache.check_disk(tmp_path, 1_000)
    with pytest.raises(ConfigError, match="free some, or give another data_dir"):
        cache.check_disk(tmp_path, 1_001)


# Writing


def test_a_shard_says_what_it_is_and_is_laid_out_in_chunks(folder, tmp_path):
    about = write(tmp_path, 5, moments_of(slice(0, 150)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name_of(5)}.arrow", f"{name_of(5)}.json"]
    path = tmp_path / about["name"]
    assert about == {**about, "rows": 150, "bytes": path.stat().st_size, "sha256": runs.file_hash(path), "range": {}}
    table = cache.read_shard(path)
    assert [len(chunk) for chunk in table.column("moments").chunks] == [64, 64, 22]
    assert table.schema.field("moments").type == pa.list_(pa.float16(), 16) and table.schema.field("key").type == pa.binary(16)
    assert (cache.keys_of(table) == KEYS[:150]).all()
    write(tmp_path / "again", 5, moments_of(slice(0, 150)))
    assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_what_is_said_of_a_shard_is_asked_for_after_its_last_chunk(tmp_path):
    about: dict[str, Any] = {}

    def batches():
        yield from chunks(moments_of(slice(0, 70)))
        about["range"] = [1, 2]

    cache.write_shard(tmp_path, name_of(1), batches(), about)
    assert cache.find_shard(tmp_path, name_of(1))["range"] == [1, 2]


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def batches():
        yield chunks(moments_of(slice(0, 64)))[0]
        raise ConfigError("no more")

    with pytest.raises(ConfigError, match="no more"):
        cache.write_shard(tmp_path, name_of(1), batches(), {})
    assert list(tmp_path.iterdir()) == [] and cache.whole_shards(tmp_path) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from sdlab import cache, runs

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def batches(moment):
    yield {"moments": np.ones((64, 4), np.float16)}
    if moment == "between chunks":
        die()
    yield {"moments": np.ones((3, 4), np.float16)}

for moment in sys.argv[2:]:
    if os.fork():
        assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL
        continue
    if moment == "before the description":
        runs.write_json = die
    if moment == "in the description":
        os.replace = lambda one, other, replace=os.replace: die() if str(other).endswith(".json") else replace(one, other)
    cache.write_shard(Path(sys.argv[1]) / moment / "moments_64", "0" * 32, batches(moment), {})
"""


def test_a_writer_that_was_killed_leaves_nothing_that_counts(tmp_path):
    moments = ["between chunks", "before the description", "in the description"]
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), *moments], check=True)
    for moment in moments:
        place = tmp_path / moment / "moments_64"
        assert any(place.iterdir()) and cache.whole_shards(place) == [] and cache.find_shard(place, "0" * 32) is None
        with pytest.raises(ConfigError, match="holds no prepared data"):
            cache.open_cache(place.parent, 64)
        write(place, 0, moments_of(slice(0, 64)))
        assert cache.whole_shards(place) == ["0" * 32]
        cache.sweep(place, set())
        assert not place.exists()


@pytest.mark.parametrize("damage", ["cut", "changed", "no description", "other description", "no shard"])
def test_a_shard_that_is_not_whole_does_not_count(tmp_path, damage):
    about = write(tmp_path, 1, moments_of(slice(0, 70)))
    write(tmp_path, 2, moments_of(slice(70, 80)))
    shard, description = tmp_path / about["name"], tmp_path / f"{name_of(1)}.json"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    {
        "cut": lambda: shard.write_bytes(content[:-1]),
        "changed": lambda: shard.write_bytes(content),
        "no description": description.unlink,
        "other description": lambda: description.write_text('["mine"]'),
        "no shard": shard.unlink,
    }[damage]()
    assert cache.find_shard(tmp_path, name_of(1)) is None and cache.whole_shards(tmp_path) == [name_of(2)]
    assert (cache.find_shard(tmp_path, name_of(1), hashes=False) is not None) == (damage == "changed")


def test_no_folder_holds_no_shards(tmp_path):
    assert cache.whole_shards(tmp_path / "nowhere") == []
    cache.sweep(tmp_path / "nowhere", set())


# Taking over and cleaning up


def test_earlier_rows_are_found_by_key_and_copied_exactly(folder):
    place = folder / "moments_64"
    old = cache.Old(place, cache.whole_shards(place))
    order = np.random.default_rng(0).permutation(TOTAL)
    wanted = np.concatenate([KEYS[order], np.frombuffer(bytes(32), cache.KEY)])
    places = old.find(wanted)
    assert (places[:-2] >= 0).all() and places[-2:].tolist() == [-1, -1]
    for row, found in itertools.islice(zip(order.tolist(), places.tolist(), strict=False), 500):
        copied = old.row(found, ["moments", "original_size", "crop", "text", "key"])
        assert (copied["moments"] == MOMENTS[row]).all() and copied["moments"].dtype == np.float16
        assert copied["original_size"].tolist() == SIZES[row].tolist() and copied["crop"].tolist() == (SIZES[row] + 1).tolist()
        assert copied["text"].tolist() == POINTERS[row].tolist() and copied["key"] == KEYS[row].tobytes()
    texts = cache.Old(folder / "text", [name_of(1)])
    assert texts.row(int(texts.find(KEYS[70:71])[0]), ["caption", "num_tokens"]) == {"caption": "picture 70", "num_tokens": 2}


def test_nothing_earlier_has_no_rows(tmp_path):
    assert cache.Old(tmp_path, []).find(KEYS[:3]).tolist() == [-1, -1, -1]


def test_keys_are_told_apart_by_every_byte(tmp_path):
    keys = [bytes(16), bytes(15) + b"\1", b"\1" + bytes(15), b"a" * 15 + b"\0", b"a" * 16]
    columns = {"key": np.frombuffer(b"".join(keys), cache.KEY), "crop": np.arange(10, dtype=np.int32).reshape(5, 2)}
    write(tmp_path, 1, columns)
    old = cache.Old(tmp_path, [name_of(1)])
    assert old.find(columns["key"]).tolist() == [0, 1, 2, 3, 4]
    assert old.find(np.frombuffer(b"a" * 14 + bytes(2), cache.KEY)).tolist() == [-1]


def test_sweeping_removes_only_our_own_files_that_nobody_names(tmp_path):
    for number in (1, 2):
        write(tmp_path, number, moments_of(slice(0, 3)))
    ours = [f"{name_of(3)}.a.host.17.partial", f".{name_of(3)}.json.17", f"samples-{'b' * 16}.npz", f"samples-{'a' * 16}.npz.partial.npz"]
    named = [f"samples-{'a' * 16}.npz"]
    foreign = ["diary.txt", "thesis.partial", "notes.json", "data.arrow", f"{name_of(4)}.txt", f"{name_of(4)[1:]}.arrow", ".hidden.json.3"]
    for name in (*ours, *named, *foreign):
        (tmp_path / name).write_text("x")
    cache.sweep(tmp_path, {name_of(2), *named})
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{name_of(2)}.arrow", f"{name_of(2)}.json", *named, *foreign}


def test_sweeping_removes_a_folder_that_is_empty_then(tmp_path):
    write(tmp_path / "moments_64", 1, moments_of(slice(0, 3)))
    cache.sweep(tmp_path / "moments_64", set())
    assert list(tmp_path.iterdir()) == []


def test_moments_of_any_length_and_shape_come_back(tmp_path):
    """Lengths around the borders of chunks, shapes down to one value."""
    for count, size in itertools.product((1, 63, 64, 65, 128), (1, 3)):
        columns = {"moments": MOMENTS[:count, :size], "key": KEYS[:count]}
        table = cache.read_shard(tmp_path / write(tmp_path, 100 * count + size, columns)["name"])
        flat = np.concatenate([np.asarray(chunk.flatten()) for chunk in table.column("moments").chunks])
        assert (flat.reshape(count, size) == columns["moments"]).all() and len(table.column("moments").chunks) == math.ceil(count / 64)
