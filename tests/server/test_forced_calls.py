"""The grammar of answers that must call a tool, and the texts that it accepts."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from headstart import RequestError, StructuredOutputsParams
from headstart.server.answers import HERMES, LLAMA, MISTRAL, CallFormat
from headstart.server.tools import (
    Reasoning,
    Tool,
    ToolUse,
    after_reasoning,
    force_calls,
    make_tools,
)
from tests.small_demos import ASSETS

llguidance = pytest.importorskip("llguidance")
hf = pytest.importorskip("llguidance.hf")

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = (Tool("f", "first", SCHEMA), Tool("g"))
F, G = '{"name": "f", "arguments": {"n": 1}}', '{"name": "g", "arguments": {}}'


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ASSETS)


@cache
def guide() -> Any:
    return hf.from_tokenizer(tokenizer())


def takes(form: StructuredOutputsParams, text: str) -> bool:
    assert form.grammar is not None
    grammar = llguidance.grammar_from("grammar", form.grammar)
    matcher = llguidance.LLMatcher(guide(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer().encode(text, add_special_tokens=False)
    num_consumed = matcher.try_consume_tokens(token_ids)
    return bool(num_consumed == len(token_ids) and matcher.is_accepting())


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


@pytest.mark.parametrize(
    ("form", "text", "is_taken"),
    [
        (HERMES, hermes(F), True),
        (HERMES, hermes(F, G, F), True),
        (HERMES, hermes(F) + " And so", False),
        (HERMES, "I will. " + hermes(F), False),
        (HERMES, hermes(F.replace("1", '"1"')), False),
        (HERMES, hermes(F.replace('"n": 1', '"n":  1')), False),
        (HERMES, hermes(F.replace('"f"', '"h"')), False),
        (LLAMA, F.replace("arguments", "parameters"), True),
        (LLAMA, F, False),
        (MISTRAL, f"[TOOL_CALLS][{F}, {G}]", True),
        (MISTRAL, f"[{F}]", False),
    ],
)
def test_a_call_is_one_of_the_tools(form: CallFormat, text: str, is_taken: bool) -> None:
    use = ToolUse(TOOLS, "required")
    assert takes(force_calls(use, form, {}, "none"), text) is is_taken


def test_a_named_tool_is_called_once() -> None:
    form = force_calls(ToolUse(TOOLS, "required", "g"), HERMES, {}, "none")
    assert takes(form, hermes(G))
    assert not takes(form, hermes(F)) and not takes(form, hermes(G, G))
    single = force_calls(ToolUse(TOOLS, "required", parallel=False), HERMES, {}, "none")
    assert takes(single, hermes(F)) and not takes(single, hermes(F, G))


@pytest.mark.parametrize(
    ("reasoning", "before", "is_taken"),
    [
        ("none", "", True),
        ("none", "<think>so</think>\n\n", False),
        ("possible", "", True),
        ("possible", "<think>so</think>\n\n", False),
        ("possible", "so</think>\n\n", False),
        ("begun", "so\n</think>\n\n", True),
        ("begun", "", False),
    ],
)
def test_reasoning_may_precede_a_forced_call(
    reasoning: Reasoning, before: str, is_taken: bool
) -> None:
    form = force_calls(ToolUse(TOOLS, "required"), HERMES, {}, reasoning)
    assert takes(form, before + hermes(F)) is is_taken


def test_special_tokens_are_written_by_their_ids() -> None:
    special = {"<tool_call>": 7, "</tool_call>": 8}
    form = force_calls(ToolUse(TOOLS, "required", "g"), HERMES, special, "none")
    assert form.grammar is not None and "<[7]>" in form.grammar and "<[8]>" in form.grammar


def test_json_follows_the_reasoning() -> None:
    params = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    form = after_reasoning(params, {})
    assert form is not None
    assert takes(form, 'so, {"n"}.</think>\n\n{"n":3}')
    assert not takes(form, '{"n":3}')
    assert after_reasoning(StructuredOutputsParams(regex="a"), {}) is None


def test_names_and_numbers_of_tools() -> None:
    for name in ("", "a b", "x" * 129, 'a"', "\u00e4", "a\n"):
        with pytest.raises(RequestError, match="allowed: 1 to 128"):
            Tool(name)
    assert len(make_tools([f"f{i}" for i in range(128)], Tool)) == 128
    template = json.dumps(Tool("g").for_template())
    assert "description" not in template and '"properties": {}' in template
