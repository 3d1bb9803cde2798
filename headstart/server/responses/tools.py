"""Tools of the Responses API as functions, and the items in which calls of them are answered.

tool         a model sees                        an answer has
function     a function                          function_call
custom       a function of one text, `input`     custom_tool_call
local_shell  a function of a command's words     local_shell_call
namespace    its tools, as `namespace.name`      the same, with the namespace
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import from_json

from headstart.server.responses.schema import (
    AllowedChoice,
    AnyTool,
    CustomTool,
    InputTokensRequest,
    NamedChoice,
    NamespaceTool,
    ResponseFunctionTool,
    ShellTool,
)
from headstart.server.tools import Tool, ToolUse, make_tools

__all__ = ["CallKind", "call_kinds", "read_partial", "read_tools", "spell_name"]

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
    tools = make_tools([*_flat(body.tools or ())], lambda one: _as_tool(*one))
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, NamedChoice):
        name = spell_name(choice.name, choice.namespace)
        return ToolUse(tools, "required", name, parallel)
    if isinstance(choice, AllowedChoice):
        names = frozenset(spell_name(one.name or one.type, one.namespace) for one in choice.tools)
        return ToolUse(tools, choice.mode, None, parallel, names)
    return ToolUse(tools, choice or "auto", None, parallel)


def call_kinds(body: InputTokensRequest) -> dict[str, CallKind]:
    """Return the kind of calls of each tool, by its name for the model."""
    types = {CustomTool: "custom_tool_call", ShellTool: "local_shell_call"}
    kinds = {}
    for tool, namespace in _flat(body.tools or ()):
        name = "local_shell" if isinstance(tool, ShellTool) else tool.name
        kind = CallKind(types.get(type(tool), "function_call"), name, namespace)
        kinds[spell_name(name, namespace)] = kind
    return kinds


def _flat(
    tools: Sequence[AnyTool],
) -> Iterator[tuple[ResponseFunctionTool | CustomTool | ShellTool, str | None]]:
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            yield from ((inner, tool.name) for inner in tool.tools)
        elif isinstance(tool, ResponseFunctionTool | CustomTool | ShellTool):
            yield tool, None


def _as_tool(tool: ResponseFunctionTool | CustomTool | ShellTool, namespace: str | None) -> Tool:
    if isinstance(tool, ShellTool):
        return Tool("local_shell", "Run a command in the user's shell.", _COMMAND)
    name = spell_name(tool.name, namespace)
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
