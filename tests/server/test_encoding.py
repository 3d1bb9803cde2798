"""JSON is parsed as by `json.loads`, and encoded so that it parses to the same value."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.server.bodies import decode, encode

ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud83d")
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(), inner)
        | st.lists(st.integers(-5, 70_000), max_size=50)
    ),
)
# Pieces of JSON text, in any order.
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
    """Return the parsed value as text, which distinguishes NaN and -0.0, or the error's name."""
    try:
        return repr(read(text.encode("utf-8", "surrogatepass")))
    except ValueError as error:
        return type(error).__name__


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_it_parses_what_json_parses(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert outcome(decode, text) == outcome(json.loads, text)


@given(SCRAPS)
def test_it_refuses_what_json_refuses(text: str) -> None:
    assert outcome(decode, text) == outcome(json.loads, text)
    assert outcome(decode, f'{{"a": [{text}]}}') == outcome(json.loads, f'{{"a": [{text}]}}')
    assert outcome(decode, f'["{text}"]') == outcome(json.loads, f'["{text}"]')


@given(VALUES)
def test_encoded_values_parse_to_the_same_value(value: Any) -> None:
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        return
    assert repr(json.loads(encode(value))) == repr(json.loads(text))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-le"])
def test_every_encoding_of_json_is_accepted(encoding: str) -> None:
    value = {"é": ["漢😀" * 300_000, 1]}
    assert decode(json.dumps(value, ensure_ascii=False).encode(encoding)) == value


def test_an_error_has_its_position() -> None:
    for text in ('{"a": [1, 2,, 3]}', '{"a": [1, 2, x]}', '{"a" 1}', '{"a": 1 2}', "[1] 2"):
        with pytest.raises(json.JSONDecodeError) as ours:
            decode(text.encode())
        with pytest.raises(json.JSONDecodeError) as theirs:
            json.loads(text)
        assert (ours.value.msg, ours.value.pos) == (theirs.value.msg, theirs.value.pos)


def test_deep_nesting_does_not_crash() -> None:
    with pytest.raises(RecursionError):
        decode(b"[" * 1_000_000)
