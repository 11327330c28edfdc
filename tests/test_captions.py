"""What text becomes a caption, and what is said of text that does not."""

import math

import pytest

from sdlab import captions
from sdlab.captions import Caption

TEXT = "a café „naïve“ €5"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_caption_files_are_read_in_the_encodings_people_have(encoding):
    assert captions.decode(TEXT.encode(encoding)) == (TEXT, ("caption_cp1252",) if encoding == "cp1252" else ())


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_without_a_mark_is_known_by_its_nuls(encoding):
    assert captions.decode("a red balloon".encode(encoding)) == ("a red balloon", ())
    assert captions.decode("a red balloon".encode(encoding)[:-1])[0] != "a red balloon"


def test_captions_become_one_line_without_nuls_and_survive_other_scripts():
    assert captions.one_line(" a\x00b\r\n\tc\u2028d ") == "a b c d"
    assert captions.one_line("قطة على القمر 🚀") == "قطة على القمر 🚀"
    assert captions.one_line("half \ud83d pair").encode() == b"half ? pair"


@pytest.mark.parametrize(
    ("text", "marks"),
    [
        ("plain  \t text\n", ()),
        ("two\nlines", ("caption_line_breaks",)),
        ("two\u2028lines", ("caption_line_breaks",)),
        ("a\0b", ("caption_nul",)),
        ("a\0b\nc", ("caption_nul", "caption_line_breaks")),
    ],
)
def test_what_was_not_plain_is_marked(text, marks):
    assert captions.clean(text) == Caption(captions.one_line(text), "", marks)
    assert set(marks) <= set(captions.MARKS)


@pytest.mark.parametrize(
    ("texts", "column", "expected"),
    [
        ({".json": b'{"caption": "c"}', ".caption": b"b", ".txt": b"a"}, None, "a"),
        ({".json": b'{"caption": "c"}', ".caption": b"b"}, None, "b"),
        ({".json": b'{"caption": "c"}', ".txt": b" \n", ".caption": b"\0"}, None, "c"),
        ({".json": b"{broken", ".txt": b" \n"}, None, ""),
        ({".json": b'{"caption": "c", "alt": "d"}', ".txt": b"a"}, "alt", "d"),
        ({".txt": b"a"}, "alt", None),
        ({".txt": None, ".caption": b"b"}, None, "b"),
        ({}, None, None),
    ],
)
def test_the_first_file_that_holds_text_wins_unless_a_field_is_asked_for(texts, column, expected):
    assert captions.from_files(texts, column).text == expected


@pytest.mark.parametrize(
    ("fields", "column", "expected"),
    [
        ({"text": "b", "caption": "a"}, None, "a"),
        ({"text": "b", "caption": " "}, None, "b"),
        ({"text": "b", "caption": 5}, None, "b"),
        ({"text": "b"}, None, "b"),
        ({"text": b"caf\xe9"}, None, "café"),
        ({"text": "b", "alt": "c"}, "alt", "c"),
        ({"text": "b", "alt": ""}, "alt", ""),
    ],
)
def test_a_row_holds_its_caption_in_caption_then_text_or_the_field_asked_for(fields, column, expected):
    assert captions.from_fields(fields, column, where="x").text == expected


@pytest.mark.parametrize(
    ("fields", "column", "note"),
    [
        ({"title": "a", "id": 5}, None, "x has no field 'caption' or 'text'; it has title, id"),
        ({"text": "a"}, "alt", "x has no field 'alt'; it has text"),
        ({}, "alt", "x has no field 'alt'; it has none"),
        ({"caption": 5}, None, "the field 'caption' of x holds int, not text"),
        ({"caption": None, "text": ["a"]}, None, "the field 'caption' of x is empty; the field 'text' of x holds list, not text"),
    ],
)
def test_a_row_without_a_caption_says_why(fields, column, note):
    assert captions.from_fields(fields, column, where="x") == Caption(None, note)


@pytest.mark.parametrize(("value", "number"), [(5, 5.0), (0.5, 0.5), ("5e-1", 0.5), ("inf", math.inf)])
def test_numbers_are_read_as_numbers_and_from_text(value, number):
    assert captions.number(value) == number


@pytest.mark.parametrize("value", [None, True, "", "five", [5], {"x": 5}, 10**400])
def test_what_is_no_number_is_nan(value):
    assert math.isnan(captions.number(value))


def test_labels_and_errors_can_be_written_anywhere():
    assert captions.label("caf\udce9.png") == "caf\\udce9.png"
    assert captions.label("猫\n.png") == "猫\n.png"
    assert captions.error_line(ValueError("a\n\ud83d" + "b" * 500)) == ("ValueError: a ?" + "b" * 500)[:200]
