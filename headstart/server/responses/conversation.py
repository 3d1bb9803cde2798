"""From the items of a Response to the messages that chat templates know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from headstart.engine.structured.params import StructuredOutputsParams
from headstart.server.bodies import read_keeping
from headstart.server.errors import ApiError
from headstart.server.responses.schema import (
    FunctionCall,
    FunctionOutput,
    InputImage,
    Item,
    JsonFormat,
    Message,
    NamedChoice,
    ResponseRequest,
)
from headstart.server.tools import Tool, ToolUse, make_tools

__all__ = ["extend", "read_input", "read_sampling", "read_template", "read_tools"]


def read_input(body: ResponseRequest, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation after `earlier` messages, without instructions. Raises ApiError."""
    if isinstance(body.input, str):
        return [*earlier, {"role": "user", "content": body.input}]
    if not body.input and not earlier:
        raise ApiError(400, "input is empty; allowed: a text, or a list of items", param="input")
    return extend(earlier, body.input)


def extend(earlier: Sequence[dict[str, Any]], items: Iterable[Item]) -> list[dict[str, Any]]:
    """Messages with items after them.

    What the assistant thought, said and called in a row is one message.
    """
    messages = list(earlier)
    for item in items:
        message = _read(item)
        last = messages[-1] if messages else {}
        if message["role"] == "assistant" == last.get("role"):
            messages[-1] = _together(last, message)
        else:
            messages.append(message)
    return messages


def _read(item: Item) -> dict[str, Any]:
    if isinstance(item, Message):
        is_answer = item.role == "assistant"
        content = _text(item.content) if is_answer else _content(item.content)
        return {"role": item.role, "content": content}
    if isinstance(item, FunctionOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if isinstance(item, FunctionCall):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        return message | {"tool_calls": [call]}
    shown = item.content or item.summary
    return message | {"reasoning_content": "\n".join(one.text for one in shown)}


def _together(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": first["content"] + second["content"]}
    thoughts = [one["reasoning_content"] for one in (first, second) if "reasoning_content" in one]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | {"tool_calls": calls} if calls else message


def _text(content: Any) -> str:
    """What the assistant said. Raises ApiError for an image."""
    parts = [content] if isinstance(content, str) else content
    if any(isinstance(part, InputImage) for part in parts):
        raise ApiError(400, "a message of the assistant has an image; allowed: text", param="input")
    return "".join(part if isinstance(part, str) else part.text for part in parts)


def _content(content: Any) -> Any:
    """A text, or parts as a chat has them."""
    if isinstance(content, str):
        return content
    parts = [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, InputImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def read_tools(body: ResponseRequest) -> ToolUse:
    """The tools of a Response. Raises RequestError."""
    given = body.tools or ()
    tools = make_tools(given, lambda one: Tool(one.name, one.description, one.parameters))
    parallel = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, NamedChoice):
        return ToolUse(tools, "required", body.tool_choice.name, parallel)
    return ToolUse(tools, body.tool_choice or "auto", None, parallel)


def read_sampling(body: ResponseRequest) -> dict[str, Any]:
    """The sampling of an answer. Raises RequestError."""
    return {
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "structured_outputs": _read_form(body),
    } | read_keeping(body)


def _read_form(body: ResponseRequest) -> StructuredOutputsParams | None:
    given = body.text.format if body.text is not None else None
    if isinstance(given, JsonFormat):
        return StructuredOutputsParams(json=given.schema_, disable_any_whitespace=True)
    if given is not None and given.type == "json_object":
        return StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    return None


def read_template(body: ResponseRequest) -> dict[str, Any]:
    """How the prompt is rendered."""
    if body.reasoning is None or body.reasoning.effort is None:
        return {}
    return {"chat_template_kwargs": {"reasoning_effort": body.reasoning.effort}}
