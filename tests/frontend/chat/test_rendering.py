"""Messages to a prompt's text: rendering by the model's template, and refused messages."""

import json
from typing import Any

import pytest

from headstart.errors import RequestError
from headstart.frontend.chat.conversation import ConversationMemory
from tests.tiny_tokenizers import TINY_TOKENIZERS

BYTES = TINY_TOKENIZERS["byte_level"]()
MESSAGES = [{"role": "user", "content": "hello there"}]


def test_a_conversation_is_rendered_by_the_models_template() -> None:
    memory = ConversationMemory(BYTES)
    system = {"role": "system", "content": "be kind"}
    assert memory.render([system, *MESSAGES]) == (
        "<|im_start|>system\nbe kind<|im_end|>\n"
        "<|im_start|>user\nhello there<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_text_parts_are_joined_by_line_feeds() -> None:
    memory = ConversationMemory(BYTES)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert memory.render([{"role": "user", "content": parts}]) == memory.render(
        [{"role": "user", "content": "one\ntwo"}]
    )


def test_other_fields_of_a_message_reach_the_template() -> None:
    memory = ConversationMemory(
        TINY_TOKENIZERS["byte_level"](chat_template="{{ messages[0]['name'] }}")
    )
    assert memory.render([{"role": "user", "content": "", "name": "Ada"}]) == "Ada"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ("hello", "str"),
        ({"role": "user", "content": "hello"}, "dict"),
        (["hello"], "message 0 is a str"),
        ([*MESSAGES, {"content": "hello"}], "message 1 has the role None"),
        ([{"role": "", "content": "hello"}], "role ''"),
        ([{"role": 3, "content": "hello"}], "role 3"),
        ([{"role": "user"}], "content None"),
        ([{"role": "user", "content": 7}], "content 7"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "takes only text"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "'audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "'text'"),
        ([{"role": "user", "content": ["hello"]}], "'str'"),
    ],
)
def test_an_invalid_conversation_is_refused(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ConversationMemory(BYTES).render(messages)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses this: roles must alternate"),
        ("{{ messages[0]['a']['b'] }}", "refuses this: .*no attribute"),
        ("{{ 1 // 0 }}", "failed: ZeroDivisionError"),
        ("{% for %}", "refuses this: "),
        (None, "no chat template"),
    ],
)
def test_a_templates_refusal_is_a_request_error(template: str | None, message: str) -> None:
    memory = ConversationMemory(TINY_TOKENIZERS["byte_level"](chat_template=template))
    with pytest.raises(RequestError, match=message):
        memory.render(MESSAGES)


def test_a_model_without_a_tokenizer_cannot_chat() -> None:
    memory = ConversationMemory(None)
    with pytest.raises(RequestError, match="has no tokenizer"):
        memory.render(MESSAGES)
    with pytest.raises(RequestError, match="has no tokenizer"):
        memory.encode("hello")


TOJSON = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
IF_TEXT = (
    "{% set given = messages[0].tool_calls[0].function.arguments %}"
    "{{ given if given is string else given | tojson }}"
)
ITEMS = (
    "{% for name, value in messages[0].tool_calls[0].function.arguments.items() %}"
    "{{ value }}{% endfor %}"
)


@pytest.mark.parametrize("template", [TOJSON, IF_TEXT, ITEMS])
@pytest.mark.parametrize("arguments", ['{"text": "Once', "{", '["a"]', '"a', "nul", "\t{"])
def test_arguments_that_are_not_json_are_rendered_unchanged(template: str, arguments: str) -> None:
    """Earlier, they were refused, so a conversation with a cut-off call could not continue."""
    memory = ConversationMemory(TINY_TOKENIZERS["byte_level"](chat_template=template))
    call = {"type": "function", "function": {"name": "write", "arguments": arguments}}
    assert memory.render([{"role": "assistant", "tool_calls": [call]}]) == arguments


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [('{"a": "x\ny"}', '{"a": "x\\ny"}'), ("", "{}"), (None, "{}"), ({"a": 1}, '{"a": 1}')],
)
def test_arguments_of_json_are_an_object(arguments: object, rendered: str) -> None:
    memory = ConversationMemory(TINY_TOKENIZERS["byte_level"](chat_template=TOJSON))
    call = {"function": {"name": "write", "arguments": arguments}}
    assert memory.render([{"role": "assistant", "content": None, "tool_calls": [call]}]) == rendered


PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("message", "rendered"),
    [
        ({"role": "assistant"}, "assistant::;"),
        ({"role": "assistant", "content": None}, "assistant::;"),
        ({"role": "user", "content": None}, "user::;"),
        ({"role": "user", "content": []}, "user::;"),
        ({"role": "assistant", "content": None, "refusal": "No."}, "assistant::No.;"),
        ({"role": "assistant", "content": "A", "refusal": None}, "assistant::A;"),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            "assistant::No.;",
        ),
        ({"role": "assistant", "content": "A", "reasoning": "R"}, "assistant:R:A;"),
        (
            {"role": "assistant", "content": "A", "reasoning_content": "R", "reasoning": "x"},
            "assistant:R:A;",
        ),
        (
            {
                "role": "assistant",
                "content": "A",
                "reasoning_details": [
                    {"type": "reasoning.text", "text": "R", "signature": None},
                    {"type": "reasoning.summary", "summary": "S"},
                    {"type": "reasoning.encrypted", "data": "x"},
                ],
            },
            "assistant:RS:A;",
        ),
    ],
)
def test_messages_of_clients_histories(message: dict[str, Any], rendered: str) -> None:
    memory = ConversationMemory(TINY_TOKENIZERS["byte_level"](chat_template=PLAIN))
    sent = dict(message)
    assert memory.render([message]) == rendered
    assert message == sent


def test_a_function_call_of_the_legacy_form_is_a_tool_call() -> None:
    memory = ConversationMemory(
        TINY_TOKENIZERS["byte_level"](chat_template="{{ messages | tojson }}")
    )
    call = {"name": "look", "arguments": '{"at": 1}'}
    legacy = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "look", "content": "rain"},
    ]
    [turn, result] = json.loads(memory.render(legacy))
    assert turn["tool_calls"][0]["function"] == {"name": "look", "arguments": {"at": 1}}
    assert "function_call" not in turn and result["role"] == "tool"
    assert result["tool_call_id"] == turn["tool_calls"][0]["id"]
