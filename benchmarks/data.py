"""How fast data come: `python benchmarks/data.py --out FILE.json [--quick]`.

Each ratio sets sdlab against the plain way to the same, in turns, and lies above 1 where sdlab is faster. Both sides find their files in
the page cache, and both have had a turn before the first that counts. Temporary files take 2 GB of TMPDIR.

Worker processes import this module, and those of the plain pool should start quickly: all but Pillow is imported where it is used.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import statistics
import tarfile
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import CORES, in_turns, parse, rate, tell
from PIL import Image

NOTES = {
    "random_batches_vs_tar": "Cache.rows of random batches (16 KB a row, token ids alone); tarfile and Pillow on JPEGs of 256 px in order",
    "preflight_vs_pillow": "checks.check; Image.load in a forkserver pool of as many processes; JPEGs of 768 px, and both start their pool",
    "anonymous_mb": "RssAnon of a fresh process with torch that has read random rows out of so many; rows of 1m have 16 bytes",
    "decide_mb": "most that preflight.decide takes for so many pictures, by tracemalloc",
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the last two are how often."""

    rows: int = 100_000
    few_rows: int = 10_000
    many_rows: int = 1_000_000
    read: int = 20_480
    jpegs: int = 2_000
    pictures: int = 600
    decided: int = 10_240
    repeats: int = 7
    processes: int = 5


# What is measured on


def write_cache(folder: Path, rows: int, shape: tuple[int, ...]) -> Path:
    """A prepared folder of random moments at resolution 256, without text states and with one caption."""
    import numpy as np

    from sdlab import cache, runs

    random = np.random.default_rng(0)
    moments = random.standard_normal((cache.ROWS, int(np.prod(shape)))).astype(np.float16)

    def chunks(count: int) -> Iterator[dict[str, Any]]:
        for start in range(0, count, cache.CHUNK):
            part = moments[start : min(start + cache.CHUNK, count)]
            places, keys = np.zeros((len(part), 2), np.int32), np.frombuffer(random.bytes(16 * len(part)), cache.KEY)
            yield {"moments": part, "original_size": places, "crop": places, "key": keys, "text": places}

    def write(place: str, number: int, content: Iterator[dict[str, Any]]) -> Any:
        cache.write_shard(folder / place, f"{number:032x}", content, {})
        return cache.find_shard(folder / place, f"{number:032x}", hashes=False)

    null = {"key": np.zeros(1, cache.KEY), "input_ids": np.zeros((1, 77), np.int32), "caption": [""], "num_tokens": [2]}
    text = {"count": 1, "length": 77, "widths": [0], "pooled_width": 0, "states": False, "shards": [write(cache.TEXT, 0, iter([null]))]}
    starts = range(0, rows, cache.ROWS)
    shards = [write(cache.moments_folder(256), start, chunks(min(cache.ROWS, rows - start))) for start in starts]
    bucket = {"height": 256, "width": 256, "shape": list(shape), "count": rows, "shards": shards}
    resolutions = {"256": {"key": "random", "count": rows, "buckets": [bucket]}}
    runs.write_json(folder / cache.MANIFEST, {"schema": cache.SCHEMA, "text": text, "resolutions": resolutions})
    return folder


def write_pictures(folder: Path, count: int, side: int) -> Path:
    """Different JPEGs with about the spectrum and the size of photographs, cut from three fields of noise, and their captions."""
    import numpy as np

    random, size = np.random.default_rng(0), side + 256
    falling = (np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size)[None]) + 1 / size) ** -1.3
    noise = [np.fft.irfft2(np.fft.rfft2(random.standard_normal((size, size))) * falling) for _ in range(6)]
    grey, *colours = [(field / field.std()).astype(np.float32) for field in noise]
    fields = [45 * grey[..., None] + 15 * np.stack(colours[n : n + 3], -1) + 120 for n in range(3)]
    folder.mkdir()
    for number in range(count):
        top, left = random.integers(0, 256, 2)
        pixels = fields[number % 3][top : top + side, left : left + side].clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:06d}.jpg", quality=90)
        (folder / f"{number:06d}.txt").write_text(f"a photograph of number {number}, in colours of its own")
    return folder


def write_tar(path: Path, pictures: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        for picture in sorted(pictures.glob("*.jpg")):
            tar.add(picture, picture.name)
    return path


# Measuring


def fresh(work: Callable[..., float], *arguments: Any, processes: int) -> float:
    """Median of what a function says in processes of its own."""
    said = []
    for _ in range(processes):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            said.append(pool.submit(work, *arguments).result())
    return statistics.median(said)


def reader(folder: Path, count: int) -> Callable[[], None]:
    """Reads random batches of 64 rows, other ones each time."""
    import numpy as np

    from sdlab.cache import open_cache

    opened, random = open_cache(folder, 256), np.random.default_rng(0)

    def read() -> None:
        for batch in random.integers(0, len(opened), (count // 64, 64)):
            opened.rows(batch)

    return read


def read_tar(path: Path) -> None:
    with tarfile.open(path) as tar:
        for member in tar:
            Image.open(io.BytesIO(tar.extractfile(member).read())).load()


def load(path: Path) -> None:
    Image.open(path).load()


def load_all(paths: list[Path]) -> None:
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("forkserver")) as pool:
        list(pool.map(load, paths, chunksize=32))


def looking(source: Path, scratch: Path) -> tuple[Callable[[], None], Callable[[], Any]]:
    """The decoding pass over a source and what is decided after it, in a new data folder: nothing has been decoded before."""
    from sdlab import checks, index, parts, preflight, prepare, presets, sources

    folder, frozen = Path(tempfile.mkdtemp(dir=scratch)), parts.load_frozen(presets.get("tiny").networks)
    config = prepare.configure(source=str(source), data_dir=str(folder), num_workers=CORES)
    listed = index.write(sources.open_source(config.source, columns=[]), folder, columns=[], seed=0)
    checks.gather_known(folder, listed.about["run"])
    return lambda: checks.check(config, listed, frozen, folder), lambda: preflight.decide(config, listed, frozen.max_tokens, folder)


def open_seconds(folder: Path) -> float:
    from sdlab.cache import open_cache

    return 1 / rate(1, lambda: open_cache(folder, 256))


def anonymous_mb(folder: Path, count: int) -> float:
    reader(folder, count)()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1000


def decide_mb(scratch: Path, count: int) -> float:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    table = {"image": [{"bytes": file.getvalue()}] * count, "caption": [f"number {row}" for row in range(count)]}
    pq.write_table(pa.table(table), scratch / f"{count}.parquet")
    check, decide = looking(scratch / f"{count}.parquet", scratch)
    check()
    tracemalloc.start()
    decide()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / 1e6


def measure(scratch: Path, sizes: Sizes) -> dict[str, Any]:
    few, rows = (write_cache(scratch / f"{count}-rows", count, (8, 32, 32)) for count in (sizes.few_rows, sizes.rows))
    many = write_cache(scratch / "many-rows", sizes.many_rows, (8, 1, 1))
    tar, read = write_tar(scratch / "small.tar", write_pictures(scratch / "small", sizes.jpegs, 256)), reader(rows, sizes.read)
    source = write_pictures(scratch / "pictures", sizes.pictures, 768)
    paths = sorted(source.glob("*.jpg"))
    batches = (lambda: rate(sizes.jpegs, lambda: read_tar(tar)), lambda: rate(sizes.read, read))
    decoding = (lambda: rate(len(paths), lambda: load_all(paths)), lambda: rate(len(paths), looking(source, scratch)[0]))
    ratios = {
        "random_batches_vs_tar": in_turns(*batches, sizes.repeats, "samples/s"),
        "preflight_vs_pillow": in_turns(*decoding, sizes.repeats, "pictures/s"),
    }
    figures = {"open_seconds_1m": fresh(open_seconds, many, processes=sizes.processes)}
    for name, folder in (("10k", few), ("100k", rows), ("1m", many)):
        figures[f"anonymous_mb_{name}"] = fresh(anonymous_mb, folder, sizes.read, processes=sizes.processes)
    figures |= {f"decide_mb_{name}": decide_mb(scratch, times * sizes.decided) for name, times in (("10k", 1), ("40k", 4))}
    return {"ratios": ratios, "figures": figures}


def main() -> None:
    arguments = parse("How fast data come.")
    os.environ["SDLAB_HEADLESS"] = "1"
    sizes = Sizes(10_000, 1_000, 100_000, 2_048, 200, 60, 1_024, repeats=5, processes=1) if arguments.quick else Sizes()
    with tempfile.TemporaryDirectory() as scratch:
        measured = measure(Path(scratch), sizes)
    tell(arguments.out, "random_batches_vs_tar", measured, sizes=vars(sizes), notes=NOTES)


if __name__ == "__main__":
    main()
