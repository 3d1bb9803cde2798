"""Fields of the messages of a chat, which are as strict as those of a body.

A field that is null is absent. A field that nothing reads is refused, unless the chat template
names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from headstart.errors import RequestError
from headstart.server.errors import ApiError
from headstart.server.field_rows import JsonNames
from headstart.validation import shorten

__all__ = ["check_fields"]

# What clients add to an answer that they send back, and hints to a cache that needs none.
_ECHOED = frozenset({"provider_specific_fields", "cache_control", "prompt_cache_breakpoint"})
_MESSAGE = _ECHOED | {
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"),
    *("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks", "is_error"),
    *("annotations", "parsed", "id"),
}
_CALL = _ECHOED | {"id", "type", "function", "index"}
_FUNCTION = _ECHOED | {"name", "arguments", "parsed_arguments"}
_PART = _ECHOED | {"type", "annotations", "logprobs"}
_IMAGES = frozenset({"image_url", "image", "image_pil"})
_VALUES = {
    "image_url": frozenset({"url", "detail", "format"}),
    "audio_url": frozenset({"url"}),
    "input_audio": frozenset({"data", "format"}),
}
"""Fields of a part's value, by the type of the part."""


def check_fields(message: Mapping[str, Any], place: int, template: str) -> dict[str, Any]:
    """Return a message without nulls, but for its content. Raises ApiError for other fields."""
    where = f"messages[{place}]"
    read = _check(message, _MESSAGE, where, template)
    if "content" in message:
        read["content"] = content = message["content"]
        if isinstance(content, list):
            read["content"] = [
                _check_part(part, f"{where}.content[{i}]", template)
                for i, part in enumerate(content)
            ]
    calls = read.get("tool_calls")
    if isinstance(calls, list):
        read["tool_calls"] = [
            _check_call(call, f"{where}.tool_calls[{i}]", template) for i, call in enumerate(calls)
        ]
    if isinstance(read.get("function_call"), Mapping):
        field = f"{where}.function_call"
        read["function_call"] = _check(read["function_call"], _FUNCTION, field, template)
    return read


def _check_part(part: Any, where: str, template: str) -> Any:
    """Return a part; a part of type "a" has its value in the field "a"."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return part
    known = _PART | ({kind, "uuid"} if kind in _IMAGES else {kind})
    read = _check(part, known, where, template)
    if kind in _VALUES and isinstance(read.get(kind), Mapping):
        read[kind] = _check(read[kind], _VALUES[kind], f"{where}.{kind}", template)
    return read


def _check_call(call: Any, where: str, template: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    read = _check(call, _CALL, where, template)
    if isinstance(read.get("function"), Mapping):
        read["function"] = _check(read["function"], _FUNCTION, f"{where}.function", template)
    return read


def _check(given: Mapping[str, Any], known: Set[str], where: str, template: str) -> dict[str, Any]:
    read = {name: value for name, value in given.items() if value is not None}
    for name in sorted(read.keys() - known):
        if not re.search(rf"[.'\"]{re.escape(str(name))}\b", template):
            hint = JsonNames(where, {}, RequestError, own=known).hint(str(name))
            told = f"{where} knows no {shorten(repr(name))}{hint}"
            raise ApiError(400, told, param=shorten(f"{where}.{name}"))
    return read
