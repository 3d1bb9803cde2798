"""The messages of a conversation, checked before a template sees them."""

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from headstart.errors import RequestError
from headstart.validation import check_utf8, describe

__all__ = [
    "Message",
    "RawArguments",
    "check_conversation",
    "check_text_content",
    "describe_content",
    "kind_of_part",
    "read_conversation",
    "text_parts",
]

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`; content is a text or a list of OpenAI's parts."""


def check_conversation(messages: object) -> Sequence[Message]:
    """Messages that have a role each; their contents are not looked at. Raises RequestError."""
    if isinstance(messages, (str, bytes, bytearray)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages are a list of dicts, not {type(messages).__name__}")
    if not len(messages):
        raise RequestError("messages are empty; allowed: at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {place} is a {type(message).__name__}, not a dict")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"message {place} has the role {describe(role)}; it must be a name")
        check_utf8(f"the role of message {place}", role)
    return messages


def read_conversation(messages: object) -> list[dict[str, Any]]:
    """Return the messages of a conversation in the one form that templates know.

    Tool calls have a dict of arguments; those that are no JSON object stay a text: see
    `RawArguments`. No content, and a content of null or no parts, is an empty text. A refusal is
    text, `reasoning` and OpenRouter's `reasoning_details` are `reasoning_content`, and a
    `function_call` and its result are a tool call and the tool's result. Raises RequestError.
    """
    read = []
    call_id = ""  # of the last function call, whose result names none
    for place, given in enumerate(check_conversation(messages)):
        message = dict(given)
        function = message.pop("function_call", None)
        if function is not None and not message.get("tool_calls"):
            call_id = f"call{place:05}"  # nine letters, as Mistral's templates want them
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        if message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": call_id}
        _read_calls(message)
        _read_reasoning(message)
        _read_refusal(message)
        if _is_empty(message.get("content")) and (
            "content" in message or message["role"] == "assistant"
        ):
            message["content"] = ""
        read.append(message)
    return read


def _is_empty(content: object) -> bool:
    return content is None or (isinstance(content, (str, list, tuple)) and not content)


def _read_calls(message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise RequestError(f"tool_calls are a {type(calls).__name__}; allowed: a list of dicts")
    if calls:
        message["tool_calls"] = [_read_tool_call(call) for call in calls]
        message.setdefault("content", "")


def _read_reasoning(message: dict[str, Any]) -> None:
    details = message.pop("reasoning_details", None)
    if message.get("reasoning_content"):
        return
    text = message.get("reasoning")
    if not text and isinstance(details, list):
        parts = [part for part in details if isinstance(part, Mapping)]
        texts = [part.get("text") or part.get("summary") for part in parts]
        text = "".join(text for text in texts if isinstance(text, str))
    if isinstance(text, str) and text:
        message["reasoning_content"] = text


def _read_refusal(message: dict[str, Any]) -> None:
    refusal, content = message.pop("refusal", None), message.get("content")
    if isinstance(refusal, str) and _is_empty(content):
        message["content"] = refusal
    elif isinstance(content, (list, tuple)) and message["role"] == "assistant":
        message["content"] = [
            {"type": "text", "text": part.get("refusal")}
            if isinstance(part, Mapping) and part.get("type") == "refusal"
            else part
            for part in content
        ]


def _read_tool_call(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(
            f"a tool call is a {type(call).__name__} without a dict as its function; allowed: "
            '{"function": {"name": ..., "arguments": ...}}'
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments, strict=False)  # raw line breaks are read as escaped
            arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


class RawArguments:
    """Tool calls' arguments that are no JSON object, such as those of a call that was cut off.

    Templates write arguments by `tojson`, which would quote a text. So a template gets a marker in
    place of the text, and the text replaces the marker in the prompt.
    """

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}  # by marker

    def mark(self, messages: Sequence[Message], *, as_dict: bool = False) -> list[dict[str, Any]]:
        """Return messages with markers; `as_dict`: as values, for templates that list these."""
        return [
            {**message, "tool_calls": [self._mark(call, as_dict) for call in message["tool_calls"]]}
            if message.get("tool_calls")
            else dict(message)
            for message in messages
        ]

    def _mark(self, call: dict[str, Any], as_dict: bool) -> dict[str, Any]:
        function = call["function"]
        text = function["arguments"]
        if not isinstance(text, str):
            return call
        marker = secrets.token_hex(16)
        self._texts[marker] = text
        arguments = {"arguments": marker} if as_dict else marker
        return {**call, "function": {**function, "arguments": arguments}}

    def __bool__(self) -> bool:
        return bool(self._texts)

    def restore(self, prompt: str) -> str:
        """Return the prompt with the texts in place of their markers."""
        for marker, text in self._texts.items():
            prompt = prompt.replace(f'"{marker}"', text).replace(marker, text)
        return prompt


def check_text_content(place: int, content: object) -> str:
    """The text of a message of a model without images; several parts stand on lines of their own.

    As in vLLM. Raises RequestError.
    """
    if isinstance(content, str):
        check_utf8(f"message {place}", content)
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f"message {place} has {describe_content(content)}; it must be a text "
            "or a list of text parts"
        )
    texts = []
    for part in content:
        kind = kind_of_part(part)
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind in ("image", "image_pil", "image_url"):
            raise RequestError(f"message {place} has an image, and the model takes text alone")
        if kind != "text" or not isinstance(text, str):
            raise RequestError(
                f"message {place} has a part of type {describe(kind)}; allowed: "
                '{"type": "text", "text": "..."}'
            )
        check_utf8(f"message {place}", text)
        texts.append(text)
    return "\n".join(texts)


def text_parts(message: Message) -> list[dict[str, Any]]:
    """Return a message's text as a list of parts, which is empty for calls without a text.

    Templates write a line break between content and calls: an empty part would count as content.
    """
    if not message["content"] and message.get("tool_calls"):
        return []
    return [{"type": "text", "text": message["content"]}]


def describe_content(content: object) -> str:
    """A message's content for an error; no text, since errors stand in logs.

    >>> describe_content([]), describe_content({"text": "Hi"})
    ('the content []', 'a dict as its content')
    """
    told = f"a {type(content).__name__} as its content"
    return told if isinstance(content, Mapping) and content else f"the content {describe(content)}"


def kind_of_part(part: object) -> str:
    """The type that a part of a content says it has, or that of a value that is no part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else type(part).__name__
