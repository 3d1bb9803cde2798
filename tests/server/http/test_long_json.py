"""Long JSON is read as `json.loads` reads it, and refused before it has taken too much."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.server.http import long_json
from headstart.server.http.long_json import MAX_OBJECTS, MAX_VALUES, TooManyError, read_json

ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud83d")
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.lists(st.integers(-5, 70_000), max_size=50)
    ),
)
# What a text of JSON is made of, in any order.
SCRAPS = st.lists(
    st.sampled_from(
        [
            *('"', "\\", '\\"', "\\u00e9", "\\ud83d", "\\ude00", "\\ud83", "\\x", "a", "é", "😀"),
            *("[", "]", "{", "}", ",", ":", " ", "\n", "\t", "\x00", "\x1f", "\x7f", "\u2028"),
            *("1", "0", "-", "-1", "1.5", "1e9", "1e999", "E", "+", ".", "²"),
            *("null", "true", "NaN", "-Infinity", '{"a":', '"b":', "[1,2,", '["', '"]'),
        ]
    )
).map("".join)


def outcome(read: Any, text: str) -> str:
    """What is read, in a form that tells NaN and -0.0 apart from others; or that it is wrong."""
    try:
        return repr(read(text.encode("utf-8", "surrogatepass")))
    except ValueError as error:
        return type(error).__name__


@pytest.fixture(autouse=True, params=[16, 1 << 15])
def _parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in parts so short that each of these texts has many."""
    monkeypatch.setattr(long_json, "_PART", request.param)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_it_reads_what_json_reads(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert outcome(read_json, text) == outcome(json.loads, text)


@given(SCRAPS)
def test_it_refuses_what_json_refuses(text: str) -> None:
    assert outcome(read_json, text) == outcome(json.loads, text)
    assert outcome(read_json, f'{{"a": [{text}]}}') == outcome(json.loads, f'{{"a": [{text}]}}')
    assert outcome(read_json, f'["{text}"]') == outcome(json.loads, f'["{text}"]')


HALVES = [r"\ud83d\ude00", r"\\ud83d", r"\\\ud83d\ude00", r"\\\\ud83d", r"\ud83d\ud83d\ude00"]


@pytest.mark.parametrize("halves", HALVES)
def test_a_character_of_two_halves_is_whole_wherever_a_part_ends(halves: str) -> None:
    """Where a part ended with a backslash that is text and `ud83d`, the whole text was refused."""
    for length in range(max(0, long_json._PART - 22), long_json._PART):
        text = f'["\\n{"a" * length}{halves}"]'
        assert outcome(read_json, text) == outcome(json.loads, text)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-le"])
def test_encodings_that_json_may_have(encoding: str) -> None:
    value = {"é": ["漢😀" * 300_000, 1]}
    assert read_json(json.dumps(value, ensure_ascii=False).encode(encoding)) == value


def test_a_broken_text_is_told_where() -> None:
    for text in ('{"a": [1, 2,, 3]}', '{"a": [1, 2, x]}', '{"a" 1}', '{"a": 1 2}', "[1] 2"):
        with pytest.raises(json.JSONDecodeError) as ours:
            read_json(text.encode())
        with pytest.raises(json.JSONDecodeError) as theirs:
            json.loads(text)
        assert (ours.value.msg, ours.value.pos) == (theirs.value.msg, theirs.value.pos)


def test_brackets_without_end_are_no_crash() -> None:
    with pytest.raises(RecursionError):
        read_json(b"[" * 1_000_000)


def test_numbers_of_a_list_are_bounded() -> None:
    whole = b'{"model": "a", "stop_token_ids": [%s]}'
    assert len(read_json(whole % b",".join([b"7"] * 100), 100)["stop_token_ids"]) == 100
    with pytest.raises(TooManyError, match="stop_token_ids has more than 99 numbers") as raised:
        read_json(whole % b",".join([b"7"] * 100_000), 99)
    assert raised.value.name == "stop_token_ids"


@pytest.mark.parametrize(
    ("entry", "times", "said"),
    [
        (b"null", MAX_VALUES, "1,048,576 values"),
        (b"[]", MAX_OBJECTS, "20,000 lists"),
        (b"{}", MAX_OBJECTS + 1, "20,000 objects"),
    ],
)
def test_values_of_a_text_are_bounded(entry: bytes, times: int, said: str) -> None:
    most = read_json(b"[%s]" % b",".join([entry] * (times - 1)))
    assert len(most) == times - 1
    with pytest.raises(TooManyError, match=said):
        read_json(b"[%s]" % b",".join([entry] * times))


def test_fields_of_an_object_are_bounded() -> None:
    fields = [b'"%d":1' % at for at in range(MAX_OBJECTS + 1)]
    assert len(read_json(b"{%s}" % b",".join(fields[1:]))) == MAX_OBJECTS
    with pytest.raises(TooManyError, match="an object has more than 20,000 fields"):
        read_json(b"{%s}" % b",".join(fields))
