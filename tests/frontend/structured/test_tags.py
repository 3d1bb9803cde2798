"""Structural tags: free text in which a trigger begins a constrained part."""

import json
import re
from typing import Any

import pytest

from headstart import LLM, SamplingParams, StructuredOutputsParams
from headstart.engine.logits import Vocabulary
from headstart.errors import RequestError
from headstart.frontend.grammar import GrammarCompiler
from tests.tiny_tokenizers import TINY_TOKENIZERS

TOKENIZER = TINY_TOKENIZERS["byte_level"]()
COMPILER = GrammarCompiler(Vocabulary(TOKENIZER, len(TOKENIZER), frozenset()))
SPECIAL = next(text for text in TOKENIZER.all_special_tokens if text != TOKENIZER.eos_token)


def schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


CITY = {"begin": "<f=city>", "schema": schema(name={"enum": ["Oslo", "Rome"]}), "end": "</f>"}
DAY = {"begin": "<f=day>", "schema": schema(warm={"type": "boolean"}), "end": "</f>"}
TAGS: dict[str, Any] = {"structures": [CITY, DAY], "triggers": ["<f="]}


def accepts(tags: Any, *pieces: str | int) -> bool:
    """Return True if the tags allow these texts and tokens as a complete answer."""
    matcher = COMPILER.matcher(StructuredOutputsParams(structural_tag=tags).constraint)
    for piece in pieces:
        ids = (
            [piece] if isinstance(piece, int) else TOKENIZER.encode(piece, add_special_tokens=False)
        )
        if matcher.try_consume_tokens(ids) != len(ids):
            return False
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", True),
        ("just text", True),
        ("a < b, and <f is no trigger", True),
        ('I ask <f=city>{"name": "Oslo"}</f>', True),
        ('<f=day>{"warm":true}</f> and <f=city>{"name":"Rome"}</f>.', True),
        ("<f=other>", False),
        ("<f=city>Oslo", False),
        ('<f=city>{"name": "Paris"}</f>', False),
        ('<f=city>{"name": "Oslo"}', False),
    ],
)
@pytest.mark.parametrize("spell", [dict, json.dumps])
def test_text_after_a_trigger_is_complete(text: str, allowed: bool, spell: Any) -> None:
    assert accepts(spell({"type": "structural_tag", **TAGS}), text) is allowed


def test_a_special_token_may_be_the_trigger() -> None:
    special = TOKENIZER.convert_tokens_to_ids(SPECIAL)
    assert isinstance(special, int)
    tag = {"begin": f"{SPECIAL}call ", "schema": DAY["schema"], "end": SPECIAL}
    tags = {"structures": [tag], "triggers": [f"{SPECIAL}ca"]}
    called = (special, 'call {"warm": true}', special)
    assert accepts(tags, "Wait. ", *called, " Done.")
    assert not accepts(tags, special, "other")
    assert not accepts(tags, *called[:2])
    late = {"structures": [{**tag, "begin": f"x{SPECIAL}"}], "triggers": [f"x{SPECIAL}"]}
    with pytest.raises(RequestError, match="allowed: a trigger that begins with its special token"):
        accepts(late, "x")


def test_every_trigger_of_an_answer_starts_a_complete_part(writer: LLM) -> None:
    tag = {"begin": "e:", "schema": schema(n={"enum": [1, 2]}), "end": "!"}
    form = StructuredOutputsParams(
        structural_tag={"structures": [tag], "triggers": ["e"]}, disable_any_whitespace=True
    )
    params = [
        SamplingParams(max_tokens=60, min_tokens=20, seed=seed, structured_outputs=form)
        for seed in range(8)
    ]
    outputs = writer.generate(["the other day"] * 8, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert any("e" in text for text in texts)
    for text in texts:  # an answer that max_tokens cut may end within a part
        assert re.fullmatch(r'([^e]|e:\{"n":[12]\}!)*(e[^e!]*)?', text, re.DOTALL)


@pytest.mark.parametrize(
    "wrong",
    [
        5,
        "{",
        [],
        {"structures": [], "triggers": ["<"]},
        {"structures": [CITY]},
        {"structures": [CITY], "triggers": ["<g="]},
        {"structures": [CITY], "triggers": [""]},
        {"structures": [{**CITY, "schema": 3}], "triggers": ["<f="]},
        {"structures": [{**CITY, "end": None}], "triggers": ["<f="]},
        {"type": "structural_tag", "format": {"type": "triggered_tags"}},
    ],
)
def test_invalid_tags_are_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs.structural_tag is .*; allowed: "):
        StructuredOutputsParams(structural_tag=wrong)


def test_an_unsupported_schema_of_a_tag_is_refused() -> None:
    odd = {**CITY, "schema": {"not": {"type": "string"}}}
    with pytest.raises(RequestError, match=r'structural_tag cannot be followed: .*keys: ."not"'):
        accepts({"structures": [odd], "triggers": ["<f="]}, "")
