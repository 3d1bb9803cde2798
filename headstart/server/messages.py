"""Messages as clients send them, checked: their roles, and their fields as strictly as a body's.

A field that is null is absent. A field that nothing reads is refused, unless the chat template
names it. `headstart.frontend.chat.messages` brings the messages into the form of templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from headstart.server.bodies import hint
from headstart.server.errors import ApiError
from headstart.validation import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Claude Code begins its system prompt with a line that has a digest of each request. It means
# nothing to a model, and no prefix would ever be found behind it.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")

# Fields that clients add to an answer that they send back, and hints to a cache that needs none.
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
    "function": _FUNCTION,
    "function_call": _FUNCTION,
    "image_url": frozenset({"url", "detail", "format"}),
    "audio_url": frozenset({"url"}),
    "input_audio": frozenset({"data", "format"}),
}
"""Fields of objects within messages, calls and parts, by the field that has them."""


def read_roles(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Any],
    chat_template: str | None = None,
    *,
    with_tools: bool = False,
) -> list[Any]:
    """Return the messages with roles that templates know: OpenAI's `developer` is the system.

    Claude Code's billing line is removed from system messages. chat_template: in place of the
    tokenizer's. Raises ApiError for a role that neither OpenAI nor the template knows: most
    templates write any role into the prompt, and models do not know what it means. Raises it also
    for a field that nothing reads.
    """
    template = "" if tokenizer is None else template_text(tokenizer, chat_template, with_tools)
    read = (_read_role(place, message, template) for place, message in enumerate(messages))
    return [message for message in read if message is not None]


def _read_role(place: int, message: Any, template: str) -> Any:
    """Return the message for the template; None if nothing of it is left."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        return message  # the engine refuses it
    message = check_fields(message, place, template)
    if role in ("system", "developer"):
        return _without_billing({**message, "role": "system"})
    is_known = role in _ROLES or f"'{role}'" in template or f'"{role}"' in template
    if template and not is_known:
        raise ApiError(
            400,
            f"message {place} has the role {shorten(repr(role))}; allowed: "
            f"{', '.join(_ROLES)}, or one that the model's chat template names",
            param=f"messages[{place}].role",
        )
    return message


def _without_billing(message: dict[str, Any]) -> dict[str, Any] | None:
    content = message.get("content")
    left: Any = []
    if isinstance(content, str):
        left = _BILLING.sub("", content)
    elif not isinstance(content, list):
        return message
    else:
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if not isinstance(text, str) or not _BILLING.match(text):
                left.append(part)
            elif rest := _BILLING.sub("", text):
                left.append({**part, "text": rest})
    return {**message, "content": left} if left or not content else None


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
            _check(call, _CALL, f"{where}.tool_calls[{i}]", template)
            if isinstance(call, Mapping)
            else call
            for i, call in enumerate(calls)
        ]
    return read


def _check_part(part: Any, where: str, template: str) -> Any:
    """Return a part; a part of type "a" has its value in the field "a"."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return part
    known = _PART | ({kind, "uuid"} if kind in _IMAGES else {kind})
    return _check(part, known, where, template)


def _check(fields: Mapping[str, Any], known: Set[str], where: str, template: str) -> dict[str, Any]:
    read = {name: value for name, value in fields.items() if value is not None}
    for name in sorted(read.keys() - known):
        if not re.search(rf"[.'\"]{re.escape(str(name))}\b", template):
            text = f"{where} knows no {shorten(repr(name))}{hint(str(name), known)}"
            raise ApiError(400, text, param=shorten(f"{where}.{name}"))
    for name, value in read.items():
        if isinstance(value, Mapping) and name in _VALUES and name in known:
            read[name] = _check(value, _VALUES[name], f"{where}.{name}", template)
    return read


def template_text(
    tokenizer: PreTrainedTokenizerBase, chat_template: str | None, with_tools: bool
) -> str:
    """Return the text of the chat template; empty if there is none, which the engine reports."""
    try:
        text: str = tokenizer.get_chat_template(chat_template, [{}] if with_tools else None)
    except ValueError:
        return ""
    return text


def chat_content(parts: Sequence[dict[str, Any]]) -> Any:
    """Return parts, or a single text: so a text and a list of one text are the same prompt."""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
