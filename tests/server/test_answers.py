"""Answers in every format, parsed whole and split at any position."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.server.answers import (
    HERMES,
    LLAMA,
    MISTRAL,
    AnswerParser,
    CallFormat,
    CharacterSource,
    Part,
    Reading,
    choose_format,
    join,
    read_reasoning,
)

FORMATS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL}
NAMES = {"f", "get_weather"}
A, B = '{"city": "Rome, {it}", "n": [1, "]\\""]}', '{"x": null}'


def reader(
    form: CallFormat, *, is_open: bool = False
) -> Callable[[CharacterSource], Reading[None]]:
    def read(source: CharacterSource) -> Reading[None]:
        yield from read_reasoning(source, is_open=is_open)
        yield from form.read(source, NAMES)

    return read


def parts_of(form: CallFormat, *pieces: str, is_open: bool = False) -> list[Part]:
    parser = AnswerParser(reader(form, is_open=is_open), ("<|eot|>", "<|x|>"))
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return join([*parts, *parser.feed("", is_last=True)])


def content(text: str) -> Part:
    return Part("content", text)


def reasoning(text: str) -> Part:
    return Part("reasoning", text)


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [Part("call", "", index, name), Part("call", arguments, index)]


F = [*call(0, "f", A)]
G = [*call(0, "f", A), *call(1, "get_weather", B)]
NO_ARGUMENTS = call(0, "f", "{}")
CASES: list[tuple[str, str, list[Part]]] = [
    ("hermes", "Hello.\n", [content("Hello.\n")]),
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>\n', F),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {A}}}', F),
    ("hermes", f'<tool_call>{{"id": "1", "arguments": {A}, "name": "f"}}</tool_call>', F),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {json.dumps(A)}}}</tool_call>', F),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>\n'
        f'<tool_call>{{"name":"get_weather","arguments":{B}}}</tool_call>',
        [content("Let me see."), *G],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f"}\nSo', [*NO_ARGUMENTS, content("\nSo")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', call(0, "f", "{}")),
    ("hermes", '<tool_call>{"name": "f", "arguments": }</tool_call>', NO_ARGUMENTS),
    ("hermes", '<tool_call>{"arguments": , "name": "f"}</tool_call>', NO_ARGUMENTS),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', call(0, "f", '{"a')),
    ("hermes", '<tool_call>{"name": "f", "arguments": ["1\n2"]}', call(0, "f", '["1\\n2"]')),
    ("hermes", "<tool_call>f(1)</tool_call> so", [content("<tool_call>f(1)</tool_call> so")]),
    ("hermes", '<tool_call>{"name": ', [content('<tool_call>{"name": ')]),
    ("hermes", 'So:\n<tool_call>{"name": ', [content('So:\n<tool_call>{"name": ')]),
    ("hermes", "a <tool_ca", [content("a <tool_ca")]),
    ("hermes", "a < b <|eot|>and <|e", [content("a < b and <|e")]),
    ("hermes", "<think>\nHm.\n</think>\n\nHi", [reasoning("Hm."), content("Hi")]),
    ("hermes", "<think>Hm. <tool_call>", [reasoning("Hm. <tool_call>")]),
    (
        "hermes",
        f'<think>\n\n</think>\n\n<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>',
        F,
    ),
    ("hermes", "I <think> so", [content("I <think> so")]),
    ("llama", "Hello.", [content("Hello.")]),
    ("llama", " \nHello. ", [content(" \nHello. ")]),
    ("llama", f'{{"name": "f", "parameters": {A}}}', F),
    ("llama", f' <|python_tag|>{{"type": "function", "name": "f", "parameters": {A}}}', F),
    (
        "llama",
        f'{{"name": "f", "parameters": {A}}}; {{"name": "get_weather", "parameters": {B}}}\n',
        G,
    ),
    ("llama", '{"name": "Ben", "age": 4} ', [content('{"name": "Ben", "age": 4} ')]),
    ("llama", '{"age": 4}', [content('{"age": 4}')]),
    ("llama", f'See: <|python_tag|>{{"name": "f", "parameters": {A}}}', [content("See:"), *F]),
    ("llama", "<|python_tag|>f.call(1)", [content("<|python_tag|>f.call(1)")]),
    ("mistral", "Hello [TOOL].", [content("Hello [TOOL].")]),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {A}}}]', F),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {A}}}, '
        f'{{"name": "get_weather", "arguments": {B}}}]',
        G,
    ),
    ("mistral", f"Well, [TOOL_CALLS]f[ARGS]{A}[TOOL_CALLS]get_weather{B}", [content("Well,"), *G]),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{A}", F),
    ("mistral", "[TOOL_CALLS][1, 2]", [content("[TOOL_CALLS][1, 2]")]),
    ("mistral", "[TOOL_CALLS]what\nelse", [content("[TOOL_CALLS]what\nelse")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "parts"), CASES)
def test_an_answer_has_its_parts(name: str, text: str, parts: list[Part]) -> None:
    assert parts_of(FORMATS[name], text) == parts
    assert parts_of(FORMATS[name], *text) == parts


def test_a_prompt_may_start_the_reasoning() -> None:
    expected = [reasoning("Hm."), content("Hi")]
    assert parts_of(HERMES, "Hm.\n</think>\n\nHi", is_open=True) == expected
    assert parts_of(HERMES, "<think>Hm.</think>Hi", is_open=True) == expected


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]"),
        *("[ARGS]", "[CALL_ID]", "<|eot|>", "<|x|>", '{"name": "f", ', '"arguments": ', A, B, "}"),
        *('"parameters": ', '"f"', "[", "]", ", ", "; ", "\n", " ", "text", '"', "\\", "{", "<"),
    ]
)  # fmt: skip


@given(st.sampled_from(sorted(FORMATS)), st.lists(PIECES, max_size=12), st.booleans(), st.data())
def test_the_result_does_not_depend_on_the_splits(
    name: str, pieces: list[str], is_open: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parts_of(FORMATS[name], text, is_open=is_open)
    assert parts_of(FORMATS[name], *parts, is_open=is_open) == whole
    begun = [part.number for part in whole if part.name]
    assert begun == list(range(len(begun)))


@given(st.text("ab <|{[", max_size=20))
def test_text_without_markers_is_content(text: str) -> None:
    for form in FORMATS.values():
        assert parts_of(form, *text) == ([content(text)] if text else [])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }} <tool_call>", HERMES),
        ("{{ tools }} [TOOL_CALLS]", MISTRAL),
        ("{{ tools }} <|python_tag|>", LLAMA),
        ("{{ messages }}", None),
        ("{{ tools }} <tool_call><function=f>", None),
    ],
)
def test_the_template_selects_the_format(template: str, form: CallFormat | None) -> None:
    assert choose_format(template) is form
