import pytest

from sdlab import costs, presets, stages, tables
from sdlab.config import ConfigError, TrainConfig
from sdlab.tables import Table

SCALES = [(1.0, 0.027, 0.855), (1.5, 0.020, 0.887), (2.0, 0.0205, 0.886), (8.0, 0.088, 0.780)]


def rows(**fields) -> list[dict]:
    return [
        {
            **{"model": "tiny", "weights": "ema", "step": 1400, "guidance_scale": scale, "extractor": "built-in judge", "num_images": 160},
            **{"frechet_distance": distance, "frechet_low": distance - 0.002, "frechet_high": distance + 0.003, "frechet_se": 0.001},
            **{"clip_score": score, "clip_score_se": 0.004, "background_right": 0.98125, "unet_evaluations": 10, "identity": {}},
            **{"frechet_above_lowest": distance - 0.020, "frechet_above_lowest_se": 0.001},
            **{"clip_below_highest": 0.887 - score, "clip_below_highest_se": 0.002},
            **{"strict_one": 0.75, "strict_two": 0.125, "num_one_object": 96, "num_two_objects": 64, **fields},
        }
        for scale, distance, score in SCALES
    ]


def test_every_cell_is_escaped():
    html = Table(("<i>name</i>",), (("<script>alert(1)</script>",),))._repr_html_()
    assert "<script>" not in html
    assert "<i>" not in html
    assert "&lt;script&gt;" in html


def test_text_and_html_hold_the_same_cells():
    table = Table(("name", "count"), (("owls", 12345), ("cats", None)), frozenset({1}))
    for cell in ("owls", "12,345", "cats", "\u2013"):
        assert cell in repr(table)
        assert cell in table._repr_html_()
    assert "* cats" in repr(table)
    assert "bold" in table._repr_html_()


def test_text_stays_on_one_line_a_row():
    assert repr(Table(("a",), (("x\ny",), ("z",)))).count("\n") == 2


def test_an_empty_table_can_be_shown():
    assert repr(Table(("a", "bb"), ())).split() == ["a", "bb"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "\u2013"), (True, "yes"), (1500, "1,500"), (0.0015, "0.0015"), (1 / 3, "0.3333"), ("a", "a")],
)
def test_values_are_shown_as_people_read_them(value, text):
    assert tables.shown(value) == text


def test_the_preflight_table_accounts_for_every_picture():
    found = {"scanned": 200, "used": 150, "filtered": {"too_small": 30}, "quarantined": {"broken": 20}}
    table = tables.preflight_table({**found, "captions": {"present": 190, "missing": 10, "empty": 0, "truncated": 5}})
    counts = {(row[0], row[1]): row[2] for row in table.rows}
    assert counts["scanned", ""] == counts["used", ""] + counts["filtered", "too_small"] + counts["quarantined", "broken"]
    assert "75.0 %" in repr(table)


def test_nothing_scanned_is_no_division_by_zero():
    empty = {"scanned": 0, "used": 0, "filtered": {}, "quarantined": {}, "captions": {}}
    assert "scanned" in repr(tables.preflight_table(empty))


def test_the_run_table_marks_what_was_overridden():
    preset = presets.get("tiny")
    changed = {"learning_rate": 1e-4}
    running = {"max_steps": 10, "micro_batch_size": 8, "save_every": 5, "log_every": 1, "preview_every": 0}
    recipe = presets.stage(preset, "stage2_64", changed)
    science = {"preset": "tiny", "stage": "stage2_64", "overrides": changed, "networks": preset.networks, "recipe": recipe}
    plan = stages.Plan(
        run_dir="/run",
        step=4,
        parameters=1_234,
        samples=320,
        epochs=0.5,
        memory=costs.Memory(10**9, 0, 10**9, 0, 0, 0, 0),
        available_bytes=24 * 10**9,
        disk_bytes=10**9,
    )
    table = tables.run_table(TrainConfig(**science, data_key="0" * 64, data_dir="/data", **running), plan)
    assert [table.rows[index][0] for index in table.marked] == ["learning_rate"]
    assert "tiny/stage2_64 + learning_rate" in repr(table)
    assert ("run_dir", "/run", "goes on from step 4") in table.rows
    assert ("memory", "2.00", "GB a rank, of 24.0; by estimate") in table.rows
    assert ("samples in all", "320", "samples, 0.50 epochs") in table.rows
    assert ("accumulation_steps", 4, "forwards a rank an optimizer step") in table.rows


def test_the_reader_table_has_a_column_a_scale():
    table = tables.reader_table([{"prompt": "an owl", "1": "right", "8": "wrong: sizes"}])
    assert table.columns == ("prompt", "1", "8")
    assert "scene" in repr(tables.reader_table([]))


def test_the_curve_table_marks_the_best_row_and_ends_with_the_references():
    table = tables.fid_clip_table(rows(), [{**rows()[0], "label": "real pictures"}])
    assert table.marked == {1}
    assert table.rows[-1][0] == "real pictures"
    assert "0.0180 to 0.0230" in repr(table)
    assert "75.0 %" in repr(table)


def test_rows_measured_in_different_ways_share_no_table():
    with pytest.raises(ConfigError, match="solver"):
        tables.fid_clip_table([*rows(identity={"solver": "plms"}), *rows(identity={"solver": "ddim"})])


def test_the_description_says_where_the_extremes_are_and_what_is_clear():
    text = tables.describe_curve(rows())
    assert "lowest at guidance scale 1.5 (0.0200), the CLIP score highest at 1.5 (0.887)" in text
    assert "At 8 the distance is 0.0880 (clearly higher) and the CLIP score is 0.780 (clearly lower)" in text
    assert "not clearly different" in tables.describe_curve(rows()[1:3])
    assert "strictly right at 1.5 (50.0 % of all)" in text


def test_the_description_names_each_model():
    text = tables.describe_curve([*rows(), *rows(model="runs/b")])
    assert text.index("tiny (ema, step 1400):") < text.index("runs/b (ema, step 1400):")


def test_a_model_that_draws_nothing_right_is_described_so():
    assert "No picture is strictly right" in tables.describe_curve(rows(strict_one=0.0, strict_two=0.0))
    assert "strictly" not in tables.describe_curve(rows(strict_one=None, strict_two=None))


def test_held_out_results_come_with_counts():
    text = tables.describe_held_out(rows()[1])
    assert "75.0 % of one-object prompts strictly right (72 of 96)" in text
    assert "12.5 % of two-object prompts strictly right (8 of 64)" in text
    assert "cannot be read" in tables.describe_held_out(rows(strict_one=None, strict_two=None, background_right=None)[0])


SHARD = {"pictures": 3, "captions": 2, "pictures_without_caption": 1, "captions_without_picture": 0, "duplicates": 0, "unreadable": 0}


def test_the_shards_with_the_most_to_tell_are_shown_and_all_are_summed():
    shards = [{"shard": f"{number}.tar", **SHARD, "unreadable": int(number == 30), "ignored": {".md": 2}} for number in range(40)]
    table = tables.shards_table(shards, n=3)
    assert [row[0] for row in table.rows] == ["0.tar", "1.tar", "30.tar", "and 37 more", "all 40"]
    assert table.rows[-1][1:7] == (120, 80, 40, 0, 0, 1) and table.rows[0][-1] == "2 .md"


def test_notes_are_told_in_words():
    ((told, count, example),) = tables.notes_table({"notes": {"icc_broken": 3}, "examples": {"icc_broken": ["a.png", "b.png"]}}).rows
    assert "colour profile" in told and (count, example) == (3, "a.png, b.png")


def test_buckets_say_what_fills_their_last_micro_batch():
    square = {"height": 32, "width": 32, "pictures": 70, "count": 70, "upscaled": 1, "cut_away": 0.25}
    alone = {"config": {"preset": "tiny"}, "resolutions": {"32": {"buckets": [square]}}}
    assert tables.bucket_table(alone).rows == (("32: 32 x 32", 70, 70, 1, "25.0 %", 0, 32, 0),)
    two = {
        "config": {"preset": "tiny"},
        "resolutions": {"32": {"buckets": [square, {**square, "width": 64, "count": 64}]}, "48": {"buckets": [square]}},
    }
    assert [row[-2:] for row in tables.bucket_table(two).rows] == [(32, 26), (32, 0), (None, None)]


def test_recipes_read_like_the_pages_that_they_are_from():
    table = tables.recipes_table("sd15")
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert [row["samples"] for row in rows.values()] == ["675.8 M", "409.6 M", "1.229 B", "1.352 B"]
    assert rows["pretrain_256"]["starts from"] == "random weights" and rows["v1_5_512"]["starts from"] == "v1_2_512"
    assert rows["v1_1_512"]["pictures"] == "1024 pixels and more" and rows["v1_1_512"]["nodes x devices"] == "32 x 8"
    assert rows["v1_1_512"]["learning rate"] == "8.192e-05, constant" and rows["v1_2_512"]["captions dropped"] == "10.0 %"
    assert "675.8 M" in repr(table)


def test_recipes_say_what_makes_a_stage_unlike_others():
    cells = {name: repr(tables.recipes_table(name)) for name in ("sdxl_original", "sd20_original", "sdxl_finetune", "sdxl_tiny")}
    assert all(words in cells["sdxl_original"] for words in ("offset noise 0.05", "buckets", "10.0 % of each"))
    assert "v_prediction" in cells["sd20_original"] and "punsafe < 0.1, aesthetic >= 4.5" in cells["sd20_original"]
    assert "LoRA of rank 4" in cells["sdxl_finetune"] and "40 K" in cells["sdxl_finetune"] and "160" in cells["sdxl_tiny"]


def test_sources_name_the_file_and_what_the_page_says_otherwise():
    rows = {row[0]: row for row in tables.sources_table("sdxl").rows}
    _, pictures, source, note = rows["stage3_1024"]
    assert "1024 pixels" in pictures and "sdxl_base_train_res_1024_stage_3.yaml" in source and "make 512 a step" in note
