"""From the items and tools of a Response to the messages and functions that chat templates know.

tool         a model sees                        an answer has
function     a function                          function_call
custom       a function of one text, `input`     custom_tool_call
local_shell  a function of a command's words     local_shell_call
namespace    its tools, as `namespace.name`      the same, with the namespace
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json

from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.server.errors import ApiError
from headstart.server.hosted import HostedTool
from headstart.server.messages import chat_content
from headstart.server.responses.schema import (
    AllowedChoice,
    ClientSide,
    CustomCall,
    FunctionCall,
    FunctionOutput,
    InputImage,
    InputTokensRequest,
    Item,
    JsonFormat,
    Message,
    NamedChoice,
    NamespaceTool,
    ReasoningItem,
    ResponseFunctionTool,
    ResponsesRequest,
    ShellCall,
    ShellOutput,
    ShellTool,
)
from headstart.server.tools import Tool, ToolUse, make_tools

__all__ = [
    "CallKind",
    "call_kinds",
    "encode_reasoning",
    "extend",
    "read_input",
    "read_partial",
    "read_sampling",
    "read_template",
    "read_tools",
]

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_COMMAND = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "integer"},
    },
    "required": ["command"],
}


_CALLS = {
    "function": "function_call",
    "custom": "custom_tool_call",
    "local_shell": "local_shell_call",
}
"""The type of the items that have calls, by the type of the tool."""


class CallKind(NamedTuple):
    """The type, name and namespace of the items that have calls of a tool."""

    type: str
    name: str
    namespace: str | None = None


def spell_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool as the model sees it."""
    return f"{namespace}.{name}" if namespace else name


def read_tools(body: InputTokensRequest) -> ToolUse:
    """Return the tools of a request, but for hosted ones. Raises RequestError."""
    tools = make_tools([*_flat(body)], lambda item: _as_tool(*item))
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, NamedChoice):
        name = spell_name(choice.name, choice.namespace)
        return ToolUse(tools, "required", name, parallel)
    if isinstance(choice, AllowedChoice):
        names = {spell_name(tool.name or tool.type, tool.namespace) for tool in choice.tools}
        return ToolUse(tools, choice.mode, None, parallel, frozenset(names))
    return ToolUse(tools, choice or "auto", None, parallel)


def call_kinds(body: InputTokensRequest) -> dict[str, CallKind]:
    """Return the kind of calls of each tool, by its name for the model."""
    return {spell_name(kind.name, kind.namespace): kind for kind, _ in _flat(body)}


def _flat(body: InputTokensRequest) -> Iterator[tuple[CallKind, ClientSide]]:
    """Yield the client's tools, those in namespaces too."""
    for tool in body.tools or ():
        if isinstance(tool, NamespaceTool):
            for inner in tool.tools:
                yield CallKind(_CALLS[inner.type], inner.name, tool.name), inner
        elif not isinstance(tool, HostedTool):
            name = "local_shell" if isinstance(tool, ShellTool) else tool.name
            yield CallKind(_CALLS[tool.type], name), tool


def _as_tool(kind: CallKind, tool: ClientSide) -> Tool:
    name = spell_name(kind.name, kind.namespace)
    if isinstance(tool, ShellTool):
        return Tool(name, "Run a command in the user's shell.", _COMMAND)
    if isinstance(tool, ResponseFunctionTool):
        return Tool(name, tool.description, tool.parameters)
    texts = [tool.description] if tool.description else []
    if tool.format is not None and tool.format.definition:
        syntax = tool.format.syntax or "a"
        texts.append(f"The input follows this {syntax} grammar:\n{tool.format.definition}")
    return Tool(name, "\n\n".join(texts) or None, _INPUT)


def read_partial(arguments: str) -> Mapping[str, Any]:
    """Return a call's arguments as far as they are written; empty if they are no JSON object.

    >>> read_partial('{"input": "a')
    {'input': 'a'}
    """
    try:
        read = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def read_input(
    body: InputTokensRequest, earlier: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the conversation after `earlier` messages, and the field that each came from.

    Raises ApiError.
    """
    if isinstance(body.input, str):
        messages = [*earlier, {"role": "user", "content": body.input}]
        return messages, [*("previous_response_id" for _ in earlier), "input"]
    if not body.input and not earlier:
        raise ApiError(400, "input is empty; allowed: a text, or a list of items", param="input")
    return extend(earlier, body.input)


def extend(
    earlier: Sequence[dict[str, Any]], items: Iterable[Item]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages with items after them, and the field that each came from.

    Reasoning, text and calls of the assistant in a row are one message.
    """
    messages, places = list(earlier), ["previous_response_id"] * len(earlier)
    for number, item in enumerate(items):
        message = _read(item)
        last = messages[-1] if messages else {}
        if message["role"] == "assistant" == last.get("role"):
            messages[-1] = _together(last, message)
        else:
            messages.append(message)
            places.append(f"input[{number}]")
    return messages, places


def _read(item: Item) -> dict[str, Any]:
    if isinstance(item, Message):
        content = _content(item.content)
        if item.role == "assistant" and not isinstance(content, str):
            if any(part["type"] != "text" for part in content):
                text = "a message of the assistant has an image; allowed: text"
                raise ApiError(400, text, param="input")
            content = "".join(part["text"] for part in content)
        return {"role": item.role, "content": content}
    if isinstance(item, FunctionOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if isinstance(item, ShellOutput):
        return {"role": "tool", "tool_call_id": item.id, "content": item.output}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if isinstance(item, ReasoningItem):
        text = "\n".join(part.text for part in item.content or item.summary)
        text = text or decode_reasoning(item.encrypted_content or "")
        return message | {"reasoning_content": text}
    if isinstance(item, FunctionCall):
        name, arguments = spell_name(item.name, item.namespace), item.arguments
    elif isinstance(item, CustomCall):
        name = spell_name(item.name, item.namespace)
        arguments = json.dumps({"input": item.input}, ensure_ascii=False)
    else:
        assert isinstance(item, ShellCall)
        name = "local_shell"
        action = item.action.model_dump(exclude_none=True, exclude={"type"})
        arguments = json.dumps({k: v for k, v in action.items() if v != {}}, ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    return message | {"tool_calls": [call]}


_PREFIX = "headstart:"


def encode_reasoning(text: str) -> str:
    """Return reasoning as an item's `encrypted_content`: encoded, since the item shows it too."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def decode_reasoning(content: str) -> str:
    """Return the reasoning in an item's `encrypted_content`; empty for another server's."""
    if not content.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return ""


def _together(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": first["content"] + second["content"]}
    thoughts = [
        message["reasoning_content"]
        for message in (first, second)
        if "reasoning_content" in message
    ]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | {"tool_calls": calls} if calls else message


def _content(content: Any) -> Any:
    """Return a text, or parts as a chat has them."""
    if isinstance(content, str):
        return content
    return chat_content(
        [
            {"type": "image_url", "image_url": {"url": part.image_url}}
            if isinstance(part, InputImage)
            else {"type": "text", "text": part.text}
            for part in content
        ]
    )


def read_sampling(body: ResponsesRequest) -> dict[str, Any]:
    """Return the sampling of an answer. Raises RequestError."""
    return {
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "structured_outputs": _read_form(body),
        **body.cache_sampling,
    }


def _read_form(body: InputTokensRequest) -> StructuredOutputsParams | None:
    given = body.text.format if body.text is not None else None
    if isinstance(given, JsonFormat):
        return StructuredOutputsParams(json=given.schema_, disable_any_whitespace=True)
    if given is not None and given.type == "json_object":
        return StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    return None


def read_template(body: InputTokensRequest) -> dict[str, Any]:
    """Return the template options."""
    if body.reasoning is None or body.reasoning.effort is None:
        return {}
    return {"chat_template_kwargs": {"reasoning_effort": body.reasoning.effort}}
