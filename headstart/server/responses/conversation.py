"""From the items of a Response to the messages that chat templates know."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headstart.errors import RequestError
from headstart.frontend.structured.params import StructuredOutputsParams
from headstart.server.bodies import read_keeping
from headstart.server.errors import ApiError, as_api_error
from headstart.server.responses.items import decode_reasoning
from headstart.server.responses.schema import (
    CustomCall,
    FunctionCall,
    FunctionOutput,
    InputImage,
    InputTokensRequest,
    Item,
    JsonFormat,
    Message,
    ReasoningItem,
    ResponsesRequest,
    ShellCall,
    ShellOutput,
)
from headstart.server.responses.tools import spell_name

__all__ = ["extend", "read_input", "read_sampling", "read_template", "telling_items"]


def read_input(body: InputTokensRequest, earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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


@contextmanager
def telling_items(
    body: InputTokensRequest, earlier: Callable[[], Sequence[dict[str, Any]]]
) -> Iterator[None]:
    """Have errors of a message name the item that it was read from.

    earlier: returns the messages before the input, without instructions.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        refusal = as_api_error(error)
        number = _NUMBER.match(refusal.param or "")
        if number is None:
            raise
        field = _field_of(body, earlier(), int(number[1])) + number[2]
        text = _PLACE.sub(field, str(refusal), count=1)
        raise ApiError(refusal.status, text, param=field, code=refusal.code) from error


_NUMBER = re.compile(r"messages\[(\d+)\](.*)")
_PLACE = re.compile(r"^(message \d+|messages\[\d+\][\w.\[\]]*)")


def _field_of(body: InputTokensRequest, earlier: Sequence[dict[str, Any]], number: int) -> str:
    """Return the field that the message of this number was read from."""
    if body.instructions and number == 0:
        return "instructions"
    number -= bool(body.instructions)
    if number < len(earlier):
        return "previous_response_id"
    if isinstance(body.input, str):
        return "input"
    count, last = len(earlier), earlier[-1]["role"] if earlier else None
    for place, item in enumerate(body.input):
        role = _role(item)
        count += not role == "assistant" == last
        last = role
        if count > number:
            return f"input[{place}]"
    return "input"


def _role(item: Item) -> str:
    if isinstance(item, Message):
        return item.role
    return "tool" if isinstance(item, FunctionOutput | ShellOutput) else "assistant"


def _read(item: Item) -> dict[str, Any]:
    if isinstance(item, Message):
        is_answer = item.role == "assistant"
        content = _text(item.content) if is_answer else _content(item.content)
        return {"role": item.role, "content": content}
    if isinstance(item, FunctionOutput):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if isinstance(item, ShellOutput):
        return {"role": "tool", "tool_call_id": item.id, "content": item.output}
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if isinstance(item, ReasoningItem):
        shown = item.content or item.summary
        text = "\n".join(one.text for one in shown)
        text = text or decode_reasoning(item.encrypted_content or "")
        return message | {"reasoning_content": text}
    return message | {"tool_calls": [_read_call(item)]}


def _read_call(item: Item) -> dict[str, Any]:
    """Return a call as a chat has it."""
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
    return {"id": item.call_id, "type": "function", "function": function}


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


def read_sampling(body: ResponsesRequest) -> dict[str, Any]:
    """The sampling of an answer. Raises RequestError."""
    return {
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "structured_outputs": _read_form(body),
    } | read_keeping(body)


def _read_form(body: InputTokensRequest) -> StructuredOutputsParams | None:
    given = body.text.format if body.text is not None else None
    if isinstance(given, JsonFormat):
        return StructuredOutputsParams(json=given.schema_, disable_any_whitespace=True)
    if given is not None and given.type == "json_object":
        return StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    return None


def read_template(body: InputTokensRequest) -> dict[str, Any]:
    """How the prompt is rendered."""
    if body.reasoning is None or body.reasoning.effort is None:
        return {}
    return {"chat_template_kwargs": {"reasoning_effort": body.reasoning.effort}}
