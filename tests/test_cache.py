import time
from pathlib import Path

import numpy as np
import pytest

from sdlab import cache, runs
from sdlab.config import ConfigError

ROWS = 150
MOMENTS = np.random.default_rng(0).standard_normal((ROWS, 16, 8, 8)).astype(np.float16)
EMBEDS = np.random.default_rng(1).standard_normal((7, 6, 8)).astype(np.float16)
SIZES = np.arange(2 * ROWS, dtype=np.int32).reshape(ROWS, 2)


def write_moments(folder: Path, *, shard_bytes: int = 50_000) -> dict[str, int]:
    lists = {"moments": ("float16", 1024), "original_size": ("int32", 2), "crop": ("int32", 2)}
    writer = cache.ShardWriter(folder / "moments_64", lists=lists, values={"text": "int32", "path": "string"}, shard_bytes=shard_bytes)
    for start in range(0, ROWS, 8):
        part = slice(start, start + 8)
        ids = [row % 7 for row in range(ROWS)][part]
        columns = {"moments": MOMENTS[part], "original_size": SIZES[part], "crop": SIZES[part] + 1, "text": ids}
        writer.write({**columns, "path": [str(i) for i in ids]})
    return writer.publish()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 rows in several shards, seven captions."""
    folder = tmp_path_factory.mktemp("cache")
    lists = {"prompt_embeds": ("float16", 48), "input_ids": ("int32", 6)}
    texts = cache.ShardWriter(folder / "text", lists=lists, values={"caption": "string", "num_tokens": "int32"})
    captions = ["", *(f"caption {i}" for i in range(1, 7))]
    texts.write({"prompt_embeds": EMBEDS, "input_ids": np.zeros((7, 6)), "caption": captions, "num_tokens": range(2, 9)})
    entry = {"key": "a key", "shape": [16, 8, 8], "shards": write_moments(folder)}
    manifest = {"schema": cache.SCHEMA, "resolutions": {"64": entry}, "text": {"shape": [6, 8], "shards": texts.publish()}}
    runs.write_json(folder / "manifest.json", manifest)
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    import shutil

    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_rows_come_back_exactly_in_the_order_asked_for_across_shards(folder):
    opened = cache.open_cache(folder, 64)
    order = [149, 0, 77, 77, 3]
    rows = opened.rows(order)
    assert len(opened) == ROWS and len(list((folder / "moments_64").iterdir())) > 3
    assert (rows["moments"].numpy() == MOMENTS[order].astype(np.float32)).all()
    assert (rows["prompt_embeds"].numpy() == EMBEDS[[i % 7 for i in order]].astype(np.float32)).all()
    assert rows["original_size"].tolist() == SIZES[order].tolist() and rows["crop"].tolist() == (SIZES[order] + 1).tolist()
    assert str(rows["moments"].dtype) == str(rows["prompt_embeds"].dtype) == "torch.float32"


def test_captions_lengths_null_condition_and_key_are_at_hand(folder):
    opened = cache.open_cache(folder, 64)
    assert opened.captions[:8] == ["", *(f"caption {i}" for i in range(1, 7)), ""]
    assert opened.num_tokens[:8].tolist() == [2, 3, 4, 5, 6, 7, 8, 2]
    assert (opened.null_embeds.numpy() == EMBEDS[0].astype(np.float32)).all()
    assert opened.key == "a key" and opened.manifest["resolutions"]["64"]["key"] == "a key"


@pytest.mark.parametrize("indices", [[ROWS], [-1], [0, 10**9]])
def test_rows_outside_the_cache_are_refused(folder, indices):
    with pytest.raises(IndexError, match="0 to 149"):
        cache.open_cache(folder, 64).rows(indices)


def test_no_rows_are_an_empty_batch(folder):
    assert cache.open_cache(folder, 64).rows([])["moments"].shape == (0, 16, 8, 8)


def test_random_batches_come_at_thousands_of_rows_a_second(folder):
    opened = cache.open_cache(folder, 64)
    batches = np.random.default_rng(0).integers(0, ROWS, (200, 32)).tolist()
    start = time.perf_counter()
    for batch in batches:
        opened.rows(batch)
    assert 200 * 32 / (time.perf_counter() - start) > 5_000


def test_the_shards_open_with_the_datasets_library_too(folder):
    from datasets import Dataset

    first = Dataset.from_file(str(folder / "moments_64" / "shard-00000.arrow"))
    assert first[3]["text"] == 3
    assert np.array_equal(np.array(first[3]["moments"], np.float16), MOMENTS[3].reshape(-1))


def test_what_is_not_there_is_refused_with_what_is_and_how_to_make_it(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere holds no prepared data .*01_prepare_data.*resolution=32"):
        cache.open_cache(tmp_path / "nowhere", 32)
    with pytest.raises(ConfigError, match=r"holds resolution 64, not 32; make it with .*01_prepare_data.*resolution=32"):
        cache.open_cache(folder, 32)


@pytest.mark.parametrize("damage", ["cut", "removed"])
@pytest.mark.parametrize("part", ["moments_64", "text"])
def test_a_damaged_shard_is_noticed_when_the_cache_is_opened(copy, part, damage):
    shard = sorted((copy / part).iterdir())[-1]
    if damage == "removed":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=rf"{shard.name}.*prepare the folder again"):
        cache.open_cache(copy, 64)


@pytest.mark.parametrize("text", ["{broken", "[]", '{"name": "my app", "icons": []}'])
def test_a_manifest_of_somebody_else_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        cache.open_cache(tmp_path, 64)
    assert (tmp_path / "manifest.json").read_text() == text


def test_a_writer_that_was_killed_leaves_nothing_that_is_taken_for_a_cache(copy):
    lists = {"moments": ("float16", 4)}
    killed = cache.ShardWriter(copy / "moments_32", lists=lists, values={}, shard_bytes=1)
    killed.write({"moments": np.ones((3, 4))})
    assert not (copy / "moments_32").exists()
    with pytest.raises(ConfigError, match="holds resolution 64, not 32"):
        cache.open_cache(copy, 32)
    again = cache.ShardWriter(copy / "moments_32", lists=lists, values={})
    again.write({"moments": np.zeros((2, 4))})
    assert list(again.publish()) == ["shard-00000.arrow"]


def test_an_old_folder_is_replaced_and_a_foreign_one_refused(copy):
    sizes = write_moments(copy, shard_bytes=1 << 30)
    assert list(sizes) == ["shard-00000.arrow"] == [path.name for path in (copy / "moments_64").iterdir()]
    (copy / "moments_64" / "diary.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"diary\.txt"):
        write_moments(copy)
    assert (copy / "moments_64" / "diary.txt").read_text() == "mine"


def test_too_little_disk_is_refused_before_anything_is_written(tmp_path):
    cache.check_disk(tmp_path / "not/yet/there", 1)
    with pytest.raises(ConfigError, match=r"needs about 1000000.00 GB and .* GB are free"):
        cache.check_disk(tmp_path / "not/yet/there", 10**15)
    assert list(tmp_path.iterdir()) == []
