"""Messages of a conversation in a form and an order that a chat template supports.

Some templates refuse a second system message, two turns of one role in a row, or a first turn of
the assistant; others silently drop these messages. Small test conversations show the orders that a
template supports. Other orders are changed:

    a system message after other messages         text of a user's turn, within <system> tags
    several system messages at the beginning      one message
    a system message, if none is supported        text of the user's first turn
    turns of one role in a row                    one turn
    a user's turn after a tool's result           text at the end of the result
    a user's turn after a call without a result   an empty turn of the assistant between them
    a first turn of the assistant or a tool       an empty turn of the user before it
    a system message alone                        an empty turn of the user after it

Texts are joined by an empty line. A message never changes the text of earlier messages, so the
prompt of the next turn begins with the prompt of this turn.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from itertools import pairwise
from typing import Any

from headstart.errors import RequestError
from headstart.validation import OneOf, check_fields, check_utf8, describe, option

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`; content is a string or a list of OpenAI's parts."""

# Arguments of `apply_chat_template` that callers cannot set by `chat_template_kwargs`.
_RESERVED = {
    *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
    *("messages", "return_dict", "tokenize", "tools"),
}


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Options of a chat template, as in vLLM's `LLM.chat`. Raises RequestError.

    chat_template: None for the model's. chat_template_content_format: the template gets contents as
    texts ("string") or as lists of parts ("openai"); "auto" selects lists for a model with vision
    if the template supports them. continue_final_message: the answer continues the last message.
    chat_template_kwargs: further variables of the template.
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
                "continue_final_message and add_generation_prompt are both True; allowed: one of "
                "them"
            )
        tools: object = self.tools
        if tools is not None and not (
            isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)
        ):
            raise RequestError(f"tools are {describe(tools)}; allowed: a list of dicts")
        variables: object = self.chat_template_kwargs or {}
        if not isinstance(variables, Mapping):
            raise RequestError(f"chat_template_kwargs is {describe(variables)}; allowed: a dict")
        if reserved := _RESERVED & set(variables):
            raise RequestError(f"chat_template_kwargs has {min(reserved)!r}; pass it separately")

    @classmethod
    def pick(cls, arguments: Mapping[str, Any]) -> TemplateOptions:
        """Return the options among the arguments of a call. Raises RequestError."""
        return cls(**{field.name: arguments[field.name] for field in fields(cls)})

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `apply_chat_template`."""
        return {
            **(self.chat_template_kwargs or {}),
            "chat_template": self.chat_template,
            "tools": list(self.tools) if self.tools else None,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }


def read_conversation(messages: object) -> list[dict[str, Any]]:
    """Return the messages of a conversation in the form that templates expect.

    Arguments of tool calls become a dict; for arguments that are not a JSON object, see
    `render_arguments`. Missing, null or empty content becomes an empty text. A refusal becomes a
    text. `reasoning` and OpenRouter's `reasoning_details` become `reasoning_content`. A
    `function_call` and its result become a tool call and a tool's result. Raises RequestError.
    """
    if isinstance(messages, (str, bytes, bytearray)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages are a {type(messages).__name__}; allowed: a list of dicts")
    if not messages:
        raise RequestError("messages are empty; allowed: at least one message")
    converted = []
    call_id = ""  # id of the last function_call, as its result has none
    for index, original in enumerate(messages):
        if not isinstance(original, Mapping):
            raise RequestError(f"message {index} is a {type(original).__name__}; allowed: a dict")
        message = dict(original)
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(f"message {index} has the role {describe(role)}; allowed: a name")
        check_utf8(f"the role of message {index}", role)
        function = message.pop("function_call", None)
        if function is not None and not message.get("tool_calls"):
            call_id = f"call{index:05}"  # nine characters, as Mistral's templates require
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        if role == "function":
            message |= {"role": "tool", "tool_call_id": call_id}
        _read_message(message)
        converted.append(message)
    return converted


def _read_message(message: dict[str, Any]) -> None:
    """Convert tool calls, reasoning, refusal and content to the form that templates expect."""
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, (list, tuple)):
        raise RequestError(f"tool_calls are a {type(calls).__name__}; allowed: a list of dicts")
    if calls:
        message["tool_calls"] = [_read_tool_call(call) for call in calls]
    reasoning, details = message.get("reasoning"), message.pop("reasoning_details", None)
    if not reasoning and isinstance(details, list):
        parts = [part for part in details if isinstance(part, Mapping)]
        texts = [part.get("text") or part.get("summary") for part in parts]
        reasoning = "".join(text for text in texts if isinstance(text, str))
    if isinstance(reasoning, str) and reasoning and not message.get("reasoning_content"):
        message["reasoning_content"] = reasoning
    refusal, content = message.pop("refusal", None), message.get("content")
    if content in (None, "", [], ()):
        if isinstance(refusal, str):
            message["content"] = refusal
        elif "content" in message or message["role"] == "assistant" or calls:
            message["content"] = ""
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
            parsed = json.loads(arguments, strict=False)  # accepts raw line breaks in strings
            arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


Render = Callable[[list[dict[str, Any]]], str]


def render_arguments(messages: Sequence[Message], render: Render) -> str:
    """Render messages whose tool calls may have arguments that are not a JSON object.

    The arguments of a call that was cut off are a string, which the filter `tojson` of templates
    would quote. So the template gets a marker instead. A template that iterates over arguments gets
    a dict with the marker. In the prompt, the text then replaces the marker.
    """
    texts: dict[str, str] = {}  # by marker

    def mark(call: dict[str, Any], *, as_dict: bool) -> dict[str, Any]:
        function = call["function"]
        if not isinstance(function["arguments"], str):
            return call
        marker = secrets.token_hex(16)
        texts[marker] = function["arguments"]
        arguments = {"arguments": marker} if as_dict else marker
        return {**call, "function": {**function, "arguments": arguments}}

    def render_marked(*, as_dict: bool) -> str:
        marked = [dict(message) for message in messages]
        for message in marked:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [mark(call, as_dict=as_dict) for call in calls]
        return render(marked)

    try:
        prompt = render_marked(as_dict=False)
    except Exception:
        if not texts:
            raise
        prompt = render_marked(as_dict=True)
    for marker, text in texts.items():
        prompt = prompt.replace(f'"{marker}"', text).replace(marker, text)
    return prompt


TakeImage = Callable[[int, Mapping[str, Any]], dict[str, Any]]
"""Takes a message's index and a part with an image; returns the part to pass to the template."""


def read_content(
    index: int, message: Message, take_image: TakeImage | None = None
) -> list[dict[str, Any]]:
    """Return the parts of a message: texts and results of `take_image`. Raises RequestError."""
    content = message.get("content")
    if not isinstance(content, (str, list, tuple)):
        raise RequestError(
            f"message {index} has {describe_content(content)}; allowed: a string or a list of parts"
        )
    parts = []
    for part in text_parts(message) if isinstance(content, str) else content:
        kind = kind_of_part(part)
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(text, str):
            check_utf8(f"message {index}", text)
            parts.append({"type": "text", "text": text})
        elif kind in ("image", "image_pil", "image_url") and isinstance(part, Mapping):
            if take_image is None:
                raise RequestError(f"message {index} has an image, and the model takes only text")
            parts.append(take_image(index, part))
        else:
            raise RequestError(
                f"message {index} has a part of type {describe(kind)}; allowed: "
                '{"type": "text", "text": "..."}, and image_url or image for a model with vision'
            )
    return parts


def text_parts(message: Message) -> list[dict[str, Any]]:
    """Return a message's text as a list of parts, which is empty for tool calls without text.

    After an empty part, templates would write a line break before the calls.
    """
    if not message["content"] and message.get("tool_calls"):
        return []
    return [{"type": "text", "text": message["content"]}]


def describe_content(content: object) -> str:
    """Describe a message's content for an error, without its text: errors are logged.

    >>> describe_content([]), describe_content({"text": "Hi"})
    ('the content []', 'a dict as its content')
    """
    if isinstance(content, Mapping) and content:
        return f"a {type(content).__name__} as its content"
    return f"the content {describe(content)}"


def kind_of_part(part: object) -> str:
    """Return the type that a content part declares; without one, its Python type."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else type(part).__name__


_ROLES = {"S": "system", "U": "user", "A": "assistant", "C": "assistant", "T": "tool"}
_LETTERS = {"system": "S", "user": "U", "tool": "T"}
_CALL_ID = "call00001"  # nine characters, as Mistral's templates require
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
"""Test conversations by pair of roles. Some templates refuse these two roles one after the other.
C is an assistant's message with a tool call; the other letters are the first letters of the roles.
"""


class TemplateOrder:
    """Converter of conversations to an order that a template supports.

    render: applies the template; raises any exception if the template refuses a conversation.
    in_parts: contents are lists of parts.
    """

    def __init__(self, render: Render, *, in_parts: bool) -> None:
        self._render = render
        self._in_parts = in_parts
        self._supports = cache(self._try)

    def arrange(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages in an order that the template supports."""
        arranged: list[dict[str, Any]] = []
        is_beginning = True  # True while all earlier messages are system messages
        for message in map(dict, messages):
            role = message["role"]
            if role == "system":
                if is_beginning and not self._supports("SUAU"):
                    message["role"] = "user"
                elif not is_beginning and not (self._supports("UASU") and self._supports("US")):
                    begin, end = self._content("<system>\n"), self._content("\n</system>")
                    message |= {"role": "user", "content": begin + message["content"] + end}
            elif is_beginning:
                is_beginning = False
                if role in ("assistant", "tool") and self._needs_user(arranged):
                    arranged.append(self._empty("user"))
            pair = _letter(arranged[-1]) + _letter(message) if arranged else ""
            baseline = "UCTAU" if "C" in pair or "T" in pair else "UAU"
            if pair not in _PAIRS or self._supports(_PAIRS[pair], baseline):
                arranged.append(message)
            elif arranged[-1]["role"] == "assistant" != message["role"]:  # a call without a result
                arranged += [self._empty("assistant"), message]
            else:
                arranged[-1] = self._merge(arranged[-1], message)
        if is_beginning and self._needs_user(arranged):
            arranged.append(self._empty("user"))
        return arranged

    def _needs_user(self, beginning: Sequence[Message]) -> bool:
        """Return True if the template requires a user's turn after `beginning`."""
        if not beginning:
            return not self._supports("AU")
        is_system = beginning[-1]["role"] == "system"
        return is_system and not (self._supports("S") and self._supports("SAU"))

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

    def _try(self, roles: str, baseline: str = "UAU") -> bool:
        """Return True if the template shows all turns of these roles in order.

        Also return True if the template does not even show the turns of `baseline`: then the order
        of the roles is not the cause.
        """
        return self._shows(roles) or not self._shows(baseline)

    def _shows(self, roles: str) -> bool:
        messages = [self._example(role, f"turn{index}") for index, role in enumerate(roles)]
        try:
            rendered = self._render(messages)
        except Exception:  # a template is a program, which may raise anything
            return False
        positions = [rendered.find(f"turn{index}") for index in range(len(roles))]
        return -1 not in positions and all(first < second for first, second in pairwise(positions))

    def _example(self, role: str, text: str) -> dict[str, Any]:
        if role == "C":  # some templates drop the content of a call
            function = {"name": "look", "arguments": {"at": text}}
            call = {"id": _CALL_ID, "type": "function", "function": function}
            return {"role": "assistant", "content": self._content(""), "tool_calls": [call]}
        message = {"role": _ROLES[role], "content": self._content(text)}
        return message | {"tool_call_id": _CALL_ID, "name": "look"} if role == "T" else message


def _letter(message: Message) -> str:
    if message["role"] == "assistant":
        return "C" if message.get("tool_calls") else "A"
    return _LETTERS.get(message["role"], "-")
