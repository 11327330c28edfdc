"""COCO from where a user has it: prompts by the published rules, reference images, statistics, and hostile files."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdlab import coco
from sdlab.coco import Coco, Prompt
from sdlab.config import ConfigError


def table(images: int, captions: int, *, seed: int = 0) -> dict[str, Any]:
    """A made-up annotation file: ids out of order, images with several captions or none, and line breaks in captions."""
    rng = random.Random(seed)
    image_ids, caption_ids = rng.sample(range(10 * images), images), rng.sample(range(10 * captions), captions)
    texts = [rng.choice(["a dog\n", "\n a cat\ton a mat ", "two\nbirds", 'a "big" cow', "ein Mädchen 猫"]) for _ in range(captions)]
    return {
        "info": {},
        "images": [{"id": number, "file_name": f"COCO_val2014_{number:012d}.jpg", "height": 1} for number in image_ids],
        "annotations": [
            {"image_id": rng.choice(image_ids), "id": number, "caption": f"{text}{number}"}
            for number, text in zip(caption_ids, texts, strict=True)
        ],
    }


def write(folder: Path, content: dict[str, Any], *, images: bool = False) -> Coco:
    file = folder / "annotations" / "captions_val2014.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
    if images:
        (folder / "val2014").mkdir()
        for record in content["images"]:
            (folder / "val2014" / record["file_name"]).touch()
    return coco.locate(folder)


@pytest.mark.parametrize(("images", "captions", "count"), [(1, 3, 1), (5, 40, 4), (50, 60, 20), (400, 2000, 300), (3000, 15_000, 2500)])
def test_mlperfs_prompts_are_those_that_pandas_chooses(tmp_path: Path, images: int, captions: int, count: int) -> None:
    pandas = pytest.importorskip("pandas")
    content = table(images, captions, seed=images)
    frame = pandas.DataFrame(content["annotations"])
    frame["caption"] = frame["caption"].apply(lambda text: text.replace("\n", "").strip())
    frame = frame.sample(frac=1, random_state=2023).reset_index(drop=True)
    frame = frame.drop_duplicates(subset=["image_id"], keep="first")[:count].sort_values(by=["id"])
    chosen = write(tmp_path, content).choose("one_caption_per_image", count=count, seed=2023)
    assert [(p.image_id, p.caption_id, p.text) for p in chosen] == list(
        frame[["image_id", "id", "caption"]].itertuples(index=False, name=None)
    )
    frame.to_csv(tmp_path / "prompts.tsv", sep="\t", index=False)
    assert coco.read_tsv(tmp_path / "prompts.tsv") == chosen


def test_mlperfs_rule_on_a_file_small_enough_to_read() -> None:
    captions = [Prompt(10, 1, "a\nb "), Prompt(11, 1, "c"), Prompt(12, 2, "d"), Prompt(13, 2, "e")]
    assert list(np.random.RandomState(2023).permutation(4)) == [2, 0, 1, 3]
    assert coco.one_caption_per_image(captions, 2023) == [Prompt(12, 2, "d"), Prompt(10, 1, "ab")]


def test_nemos_prompts_are_random_captions_in_the_order_of_their_files(tmp_path: Path) -> None:
    there = write(tmp_path, table(20, 300))
    chosen = there.choose("random_captions", count=60, seed=5)
    texts = {caption.caption_id: " ".join(caption.text.split()) for caption in there.captions}
    ids = np.random.RandomState(5).choice([caption.caption_id for caption in there.captions], size=60, replace=False)
    names = sorted(f"{number:012d}.txt" for number in ids)
    assert [f"{prompt.caption_id:012d}.txt" for prompt in chosen] == names
    assert [prompt.text for prompt in chosen] == [texts[prompt.caption_id] for prompt in chosen]
    assert len({prompt.image_id for prompt in chosen}) < 60


def test_nemos_own_files_are_read_by_name_and_the_first_ones_only(tmp_path: Path) -> None:
    for number, text in ((300, b"late"), (7, b" two\nlines \n"), (20, "größer".encode())):
        (tmp_path / f"{number:012d}.txt").write_bytes(text)
    (tmp_path / "000000000001.jpg").touch()
    assert coco.read_caption_folder(tmp_path, count=2, image_ids={7: 70}) == [Prompt(7, 70, "two lines"), Prompt(20, None, "größer")]
    (tmp_path / f"{300:012d}.txt").write_bytes(b"\xff")
    assert len(coco.read_caption_folder(tmp_path, count=2)) == 2


def test_nemos_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in range(50):
        (tmp_path / f"{number:012d}.txt").write_text("a")
    assert [prompt.caption_id for prompt in coco.read_caption_folder(tmp_path, count=20)] == list(range(20))
    with pytest.raises(ConfigError, match="has 50 captions, and 51 are asked for"):
        coco.read_caption_folder(tmp_path, count=51)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cat.txt", b"a", "cat.txt is not named by a caption id"),
        ("9.txt", b"a", "more than once"),
        ("000000000008.txt", b"\xff\xfe\xfa", "8.txt cannot be read"),
        ("000000000008.txt", b"a" * (1 << 20) + b"a", "8.txt has more than"),
    ],
)
def test_a_folder_of_captions_that_cannot_be_used_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "000000000009.txt").write_bytes(b"a")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        coco.read_caption_folder(tmp_path, count=2)


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, table(3, 9), images=True)
    reads: list[Path] = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: reads.append(path) or whole(path))
    there = coco.locate(tmp_path)
    assert there.image_dir == tmp_path / "val2014" and reads == []
    assert len(there.captions) == 9 and len(there.file_names) == 3
    assert reads == [there.annotation_file]


def test_images_are_looked_for_in_both_usual_places(tmp_path: Path) -> None:
    assert write(tmp_path, table(1, 1)).image_dir is None
    (tmp_path / "images" / "val2014").mkdir(parents=True)
    assert coco.locate(tmp_path).image_dir == tmp_path / "images" / "val2014"


def test_a_folder_without_annotations_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"captions_val2017.json is not there"):
        coco.locate(tmp_path, split="val2017")


def test_reference_images_come_by_id_and_are_not_opened(tmp_path: Path) -> None:
    content = table(6, 12)
    there = write(tmp_path, content, images=True)
    assert there.image_paths() == {r["id"]: tmp_path / "val2014" / r["file_name"] for r in content["images"]}
    assert list(there.image_paths()) == sorted(there.file_names)
    some = sorted(there.file_names)[:2]
    assert list(there.image_paths(reversed(some))) == some


def test_missing_images_are_counted_and_the_first_named(tmp_path: Path) -> None:
    there = write(tmp_path, table(9, 9), images=True)
    paths = list(there.image_paths().values())
    for path in paths[2:7]:
        path.unlink()
    paths[2].mkdir()
    named = ", ".join(path.name for path in paths[2:5])
    with pytest.raises(ConfigError, match=rf"^5 of 9 images are not in .*val2014 \({named}, ...\)"):
        there.image_paths()
    assert len(there.image_paths(sorted(there.file_names)[:2])) == 2


def test_images_of_another_file_or_without_a_folder_are_refused(tmp_path: Path) -> None:
    there = write(tmp_path, table(3, 3))
    with pytest.raises(ConfigError, match="give the folder of its images"):
        there.image_paths()
    with pytest.raises(ConfigError, match=r"lists no 2 of 2 images \(1000, 2000\)"):
        Coco(there.annotation_file, tmp_path).image_paths([2000, 1000])
    with pytest.raises(ConfigError, match=r"nowhere cannot be read"):
        Coco(there.annotation_file, tmp_path / "nowhere").image_paths()


@pytest.mark.parametrize(
    ("rule", "has"), [("one_caption_per_image", "[345] captions of different images"), ("random_captions", "9 captions")]
)
def test_fewer_captions_than_are_wanted_are_refused_with_both_numbers(tmp_path: Path, rule: str, has: str) -> None:
    there = write(tmp_path, table(5, 9))
    with pytest.raises(ConfigError, match=f"captions_val2014.json has {has}, and 30000 are asked for"):
        there.choose(rule, count=30_000, seed=1)


def test_an_unknown_rule_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'random_captions'"):
        write(tmp_path, table(1, 1)).choose("random_caption", count=1, seed=0)


def _set(key: str, field: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content[key][1].__setitem__(field, value)


def _twin(key: str, field: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: content[key][1].__setitem__(field, content[key][0][field])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.pop("annotations"), "no list 'annotations'"),
        (lambda c: c.pop("images"), "no list 'images'"),
        (lambda c: c.update(annotations={}), "no list 'annotations'"),
        (lambda c: c.update(annotations=[]), "no list 'annotations'"),
        (lambda c: c.update(annotations=[1]), r"annotations\[0\] is None"),
        (lambda c: c["annotations"][1].pop("caption"), r"'caption' of annotations\[1\] is None; it has to be text"),
        (lambda c: c["images"][1].pop("file_name"), r"'file_name' of images\[1\] is None"),
        (_set("annotations", "caption", 3), r"'caption' of annotations\[1\] is 3; it has to be text"),
        (_set("annotations", "caption", "\ud800"), r"'caption' of annotations\[1\]"),
        (_set("annotations", "id", "7"), r"'id' of annotations\[1\] is '7'; it has to be a whole number"),
        (_set("annotations", "id", True), r"'id' of annotations\[1\] is True"),
        (_set("annotations", "id", -1), r"'id' of annotations\[1\] is -1"),
        (_set("annotations", "id", 2**63), r"'id' of annotations\[1\]"),
        (_set("annotations", "id", 1.0), r"'id' of annotations\[1\] is 1.0"),
        (_set("annotations", "image_id", 10**6), r"does not list the images of 1 captions \(1000000 of caption"),
        (_twin("annotations", "id"), "the caption id .* more than once"),
        (_twin("images", "id"), "the image id .* more than once"),
        (_twin("images", "file_name"), "the file name .* more than once"),
        (_set("images", "file_name", "../secret.jpg"), "file name '../secret.jpg'"),
        (_set("images", "file_name", "/etc/passwd"), "file name '/etc/passwd'"),
        (_set("images", "file_name", "..\\x.jpg"), "file name"),
        (_set("images", "file_name", ".."), "file name '..'"),
        (_set("images", "file_name", ""), "file name ''"),
        (_set("images", "file_name", "a\0.jpg"), "file name"),
    ],
)
def test_a_hostile_annotation_file_is_refused_with_its_name(tmp_path: Path, damage: Callable[..., object], message: str) -> None:
    content = table(4, 8)
    damage(content)
    with pytest.raises(ConfigError, match=rf"captions_val2014.json.*{message}"):
        write(tmp_path, content).choose("random_captions", count=2, seed=0)


@pytest.mark.parametrize("content", [b'{"images": [', b"", b"\xff\xff", b"[]", b"[" * 100_000, b"9" * 5000])
def test_a_damaged_annotation_file_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"c\.json"):
        _ = Coco(tmp_path / "c.json").captions


HEADER = "image_id\tid\tcaption\n"


def test_mlperfs_tsv_may_hold_quotes_and_is_cut_to_the_first(tmp_path: Path) -> None:
    (tmp_path / "p.tsv").write_text(f'{HEADER}5\t1\t"a ""red"" car"\n5\t2\tit\'s "new"\n6\t3\tb\n')
    assert coco.read_tsv(tmp_path / "p.tsv", count=2) == [Prompt(1, 5, 'a "red" car'), Prompt(2, 5, 'it\'s "new"')]
    with pytest.raises(ConfigError, match=r"p.tsv has 3 captions, and 4 are asked for"):
        coco.read_tsv(tmp_path / "p.tsv", count=4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with 'nothing'"),
        (b"image_id,id,caption\n1,2,a\n", "first line has to name image_id, id, caption, with tabs"),
        (f"{HEADER}1\t2\n".encode(), "row 1 is"),
        (f"{HEADER}1\t2\ta\tb\n".encode(), "row 1 is"),
        (f"{HEADER}1\t2\ta\nx\t3\ta\n".encode(), "row 2 is"),
        (f"{HEADER}1\t2.0\ta\n".encode(), "row 1 is"),
        (f"{HEADER}1\t2\ta\n3\t2\tb\n".encode(), "caption id 2 more than once"),
        (f'{HEADER}1\t2\t"a'.encode(), "cannot be read"),
        (HEADER.encode() + b"1\t2\t\xff", "cannot be read"),
    ],
)
def test_a_hostile_tsv_is_refused_with_its_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "p.tsv").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"p\.tsv.*{message}"):
        coco.read_tsv(tmp_path / "p.tsv")


def statistics(folder: Path, **arrays: Any) -> Path:
    whole = {"mu": np.arange(3.0, dtype=np.float32), "sigma": np.diag([1.0, 2, 3]), **arrays}
    np.savez(folder / "s.npz", **{name: value for name, value in whole.items() if value is not None})
    return folder / "s.npz"


def test_statistics_are_read_in_float64_with_a_digest_of_their_numbers(tmp_path: Path) -> None:
    read = coco.read_statistics(statistics(tmp_path))
    assert read.mean.dtype == read.covariance.dtype == np.float64 and read.num_images is None
    assert read.mean.tolist() == [0, 1, 2] and read.covariance.diagonal().tolist() == [1, 2, 3]
    other = coco.read_statistics(statistics(tmp_path, mu=np.ones(3), num_images=7))
    assert other.num_images == 7 and len({read.digest, other.digest}) == 2
    assert coco.read_statistics(statistics(tmp_path)).digest == read.digest


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mu": None}, "cannot be read"),
        ({"mu": np.array(["a"])}, "cannot be read"),
        ({"mu": np.array([{}], object)}, "cannot be read"),
        ({"mu": np.zeros(4)}, r"mu \(4,\) and sigma \(3, 3\)"),
        ({"mu": np.array(1.0)}, r"mu \(\)"),
        ({"mu": np.zeros(0), "sigma": np.zeros((0, 0))}, r"mu \(0,\)"),
        ({"sigma": np.full((3, 3), np.nan)}, "not finite"),
        ({"mu": np.array([1, 2, np.inf])}, "not finite"),
        ({"sigma": np.triu(np.ones((3, 3)))}, "no covariance"),
        ({"sigma": -np.eye(3)}, "no covariance"),
    ],
)
def test_hostile_statistics_are_refused_with_their_name(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"s\.npz.*{message}"):
        coco.read_statistics(statistics(tmp_path, **arrays))


def test_damaged_statistics_are_refused_with_their_name(tmp_path: Path) -> None:
    whole = statistics(tmp_path).read_bytes()
    (tmp_path / "one.npy").write_bytes(b"")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for content in (b"", b"text", whole[:200], (tmp_path / "one.npy").read_bytes()):
        (tmp_path / "s.npz").write_bytes(content)
        with pytest.raises(ConfigError, match=r"s\.npz cannot be read"):
            coco.read_statistics(tmp_path / "s.npz")
    with pytest.raises(ConfigError, match=r"none\.npz cannot be read"):
        coco.read_statistics(tmp_path / "none.npz")


def test_prompts_and_statistics_have_to_belong_together(tmp_path: Path) -> None:
    prompts = [Prompt(1, 5, "a"), Prompt(2, 5, "b"), Prompt(3, 6, "c")]
    known, unknown = coco.read_statistics(statistics(tmp_path, num_images=2)), coco.read_statistics(statistics(tmp_path))
    coco.check_together(prompts, known, num_images=3, width=3)
    coco.check_together(prompts, unknown, num_images=3, width=3, reference_images=40_504)
    with pytest.raises(ConfigError, match="3 prompts were given, and the protocol asks 4"):
        coco.check_together(prompts, known, num_images=4, width=3)
    with pytest.raises(ConfigError, match=r"s\.npz is of features of width 3, the extractor's have 2048"):
        coco.check_together(prompts, known, num_images=3, width=2048)
    with pytest.raises(ConfigError, match=r"s\.npz is of 2 images, and the reference has 40504"):
        coco.check_together(prompts, known, num_images=3, width=3, reference_images=40_504)
    with pytest.raises(ConfigError, match=r"s\.npz is of 2 images, and the reference has 1"):
        coco.check_together(prompts[:2], known, num_images=2, width=3)


def test_a_digest_of_prompts_tells_order_ids_and_texts_apart() -> None:
    a, b = Prompt(1, 5, "a"), Prompt(2, 5, "b")
    others = ([b, a], [a], [a, Prompt(2, 6, "b")], [a, Prompt(3, 5, "b")], [a, Prompt(2, 5, "c")])
    assert len({coco.digest(prompts) for prompts in ([a, b], *others)}) == 6
    assert coco.digest([a, b]) == coco.digest([Prompt(1, 5, "a"), Prompt(2, 5, "b")])


def test_a_file_as_large_as_cocos_takes_seconds(tmp_path: Path) -> None:
    there = write(tmp_path, table(40_504, 202_654))
    began = time.process_time()
    assert len(there.choose("one_caption_per_image", count=30_000, seed=2023)) == 30_000
    assert time.process_time() - began < 10
