"""Messages of a conversation in the one form, and in an order, that a chat template takes.

Some templates refuse a second system message, two turns of one role in a row, or an assistant that
speaks first; others leave such a message out without a word. A template is rendered with small
conversations to find out, and only what it does not take is changed:

    a system message behind others                text of a user's turn, within <system> tags
    several system messages at the beginning      one message
    a system message, and the template has none   text of the user's first turn
    turns of one role in a row                    one turn
    a user's turn behind a tool's result          text behind the result
    a user's turn behind a call without a result  an empty turn of the assistant between them
    an assistant or a tool that speaks first      an empty turn of the user before it
    a system message alone                        an empty turn of the user after it

Texts are joined by an empty line. A message changes only itself and what comes after it, so a
conversation that grows begins with the text that it had before.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from headstart.errors import RequestError
from headstart.validation import OneOf, check_fields, check_utf8, describe, option

__all__ = [
    "Message",
    "RawArguments",
    "TemplateOptions",
    "TemplateOrder",
    "check_conversation",
    "check_text_content",
    "describe_content",
    "kind_of_part",
    "read_conversation",
    "text_parts",
]


_TAKEN = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "messages",
    "return_dict",
    "tokenize",
    "tools",
}


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Raises RequestError for a value that is none.

    chat_template: None takes the model's. chat_template_content_format: messages are texts
    ("string") or lists of parts ("openai"). continue_final_message: the answer goes on where the
    last message ends. chat_template_kwargs: what else the template reads.
    """

    chat_template: str | None = option(None)
    chat_template_content_format: str = option("auto", allowed=OneOf(("auto", "string", "openai")))
    add_generation_prompt: bool = option(True)
    continue_final_message: bool = option(False)
    tools: Sequence[Mapping[str, Any]] | None = option(None)
    chat_template_kwargs: Mapping[str, Any] | None = option(None)

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both True; allowed: one"
            )
        tools: object = self.tools
        if tools is not None and not (
            isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)
        ):
            raise RequestError(f"tools are {describe(tools)}; allowed: a list of dicts")
        more: object = self.chat_template_kwargs
        if more is not None and not isinstance(more, Mapping):
            raise RequestError(f"chat_template_kwargs is {describe(more)}; allowed: a dict")
        if more is not None and _TAKEN & set(more):
            name = min(_TAKEN & set(more))
            raise RequestError(f"chat_template_kwargs has {name!r}, an argument of its own")

    def arguments(self) -> dict[str, Any]:
        """For `apply_chat_template`."""
        return {
            **(self.chat_template_kwargs or {}),
            "chat_template": self.chat_template,
            "tools": list(self.tools) if self.tools else None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


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


Render = Callable[[list[dict[str, Any]]], str]

_ROLES = {"S": "system", "U": "user", "A": "assistant", "C": "assistant", "T": "tool"}
_LETTERS = {"system": "S", "user": "U", "tool": "T"}
_CALL_ID = "call00001"  # Mistral's templates want 9 letters
_PAIRS = {
    "SS": "SSU",
    "UU": "UU",
    "AA": "UAAU",
    "AC": "UACTAU",
    "CA": "UCAU",
    "CC": "UCCT",
    "CU": "UCU",
    "TU": "UCTU",
}
"""Neighbours that some templates refuse, by letters for their roles (C is an assistant's call), and
a conversation in which they stand."""


class TemplateOrder:
    """Puts conversations into an order that one template takes.

    render: applies the template, and raises an exception for what it refuses. in_parts: contents
    are lists of parts.
    """

    def __init__(self, render: Render, *, in_parts: bool) -> None:
        self._render = render
        self._in_parts = in_parts
        self._pairs: dict[str, bool] = {}  # whether the template takes them

    def arrange(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as the template takes them."""
        arranged: list[dict[str, Any]] = []
        is_beginning = True  # only system messages so far
        for message in map(dict, messages):
            role = message["role"]
            if role == "system":
                message = self._place_system(message, is_beginning=is_beginning)
            elif is_beginning:
                is_beginning = False
                if role in ("assistant", "tool") and self._needs_user(arranged):
                    arranged.append(self._empty("user"))
            self._append(arranged, message)
        if is_beginning and self._needs_user(arranged):
            arranged.append(self._empty("user"))
        return arranged

    def _needs_user(self, beginning: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if the user has to speak behind such a beginning, before an assistant."""
        if not beginning:
            return not self._takes_assistant_first
        return beginning[-1]["role"] == "system" and not self._takes_system_alone

    def _place_system(self, message: dict[str, Any], *, is_beginning: bool) -> dict[str, Any]:
        if is_beginning:
            return message if self._takes_system else {**message, "role": "user"}
        if self._takes_late_system:
            return message
        begin, end = self._content("<system>\n"), self._content("\n</system>")
        return {**message, "role": "user", "content": begin + message["content"] + end}

    def _append(self, arranged: list[dict[str, Any]], message: dict[str, Any]) -> None:
        if not arranged or self._takes_after(arranged[-1], message):
            arranged.append(message)
        elif arranged[-1]["role"] == "assistant" != message["role"]:  # a call without its result
            arranged += [self._empty("assistant"), message]
        else:
            arranged[-1] = self._merge(arranged[-1], message)

    def _takes_after(self, last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
        pair = _letter(last) + _letter(message)
        if pair not in _PAIRS:
            return True
        if pair not in self._pairs:
            but_for = "UCTAU" if "C" in pair or "T" in pair else "UAU"
            self._pairs[pair] = self._takes(_PAIRS[pair], but_for)
        return self._pairs[pair]

    def _merge(self, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
        merged = {**second, **first}
        gaps = {"content": self._content("\n\n"), "reasoning_content": "\n\n", "tool_calls": []}
        for name, gap in gaps.items():
            values = [value for value in (first.get(name), second.get(name)) if value]
            if values:
                merged[name] = values[0] if not values[1:] else values[0] + gap + values[1]
        return merged

    def _empty(self, role: str) -> dict[str, Any]:
        return {"role": role, "content": self._content("")}

    def _content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self._in_parts else text

    @cached_property
    def _takes_system(self) -> bool:
        return self._takes("SUAU")

    @cached_property
    def _takes_system_alone(self) -> bool:
        return self._takes("S") and self._takes("SAU")

    @cached_property
    def _takes_late_system(self) -> bool:
        return self._takes("UASU") and self._takes("US")

    @cached_property
    def _takes_assistant_first(self) -> bool:
        return self._takes("AU")

    def _takes(self, roles: str, but_for: str = "UAU") -> bool:
        """Return True if the template shows turns of these roles, all of them and in their order.

        Also if it does not show `but_for`: it is then not the order that it refuses.
        """
        return self._shows(roles) or not self._shows(but_for)

    def _shows(self, roles: str) -> bool:
        messages = [self._example(role, f"turn{place}") for place, role in enumerate(roles)]
        try:
            shown = self._render(messages)
        except Exception:  # a template is a program, which may raise anything
            return False
        places = [shown.find(f"turn{place}") for place in range(len(roles))]
        return -1 not in places and all(one < other for one, other in pairwise(places))

    def _example(self, role: str, text: str) -> dict[str, Any]:
        if role == "C":  # its content is left out by some templates
            function = {"name": "look", "arguments": {"at": text}}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            return {"role": "assistant", "content": self._content(""), "tool_calls": [call]}
        message = {"role": _ROLES[role], "content": self._content(text)}
        return message | {"tool_call_id": _CALL_ID, "name": "look"} if role == "T" else message


def _letter(message: Mapping[str, Any]) -> str:
    if message["role"] == "assistant":
        return "C" if message.get("tool_calls") else "A"
    return _LETTERS.get(message["role"], "-")
