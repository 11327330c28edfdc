"""Pictures laid out in rows, and what the exact reader says of them."""

import numpy as np

from sdlab import grids, scenes

PROMPTS = ["a large owl on a pink background", "a cat above a rocket on a yellow background"]


def test_the_reader_says_right_or_what_is_wrong_and_skips_prompts_that_are_no_scene():
    wanted = [scenes.parse(prompt) for prompt in (PROMPTS[0], PROMPTS[1])]
    pictures = scenes.render(wanted)
    grid = np.stack([pictures, pictures[::-1], pictures], axis=1)[[0, 1, 0]]
    rows = grids.read_grid(grid, [PROMPTS[0], PROMPTS[1], "a castle at dawn"], [1, 2.5, 8])
    assert rows == [
        {"prompt": PROMPTS[0], "1": "right", "2.5": "wrong: background, objects", "8": "right"},
        {"prompt": PROMPTS[1], "1": "right", "2.5": "wrong: background, objects", "8": "right"},
    ]


def test_the_reader_has_nothing_to_say_of_pictures_of_another_size():
    assert grids.read_grid(np.zeros((1, 1, 3, 32, 32), np.uint8), PROMPTS[:1], [1]) == []


def test_tiles_are_enlarged_by_whole_factors_and_laid_out_in_rows():
    images = np.arange(3 * 3 * 4 * 4, dtype=np.uint8).reshape(3, 3, 4, 4)
    sheet = grids.tile(images, columns=2, min_side=8)
    assert sheet.size == (2 * 8 + 4, 2 * 8 + 4)
    assert sheet.getpixel((12, 1)) == tuple(images[1, :, 0, 0])
    assert sheet.getpixel((2, 14)) == tuple(images[2, :, 1, 1])
