"""The tools of requests of all APIs, and the grammars of forced calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from headstart.engine.structured_outputs import StructuredOutputsParams, adapt_schema, lark_text
from headstart.errors import RequestError
from headstart.server.answers import THINK_CLOSE, CallFormat
from headstart.server.errors import ApiError
from headstart.validation import describe, shorten

_TYPES = re.compile(
    r"(web_search|web_fetch|code_execution|code_interpreter|tool_search|file_search"
    r"|image_generation)(_[a-z0-9_]{1,64})?"
)


class HostedTool(BaseModel):
    """A tool that OpenAI or Anthropic runs, such as a web search; this server cannot run it.

    If a request also has client tools, its hosted tools are ignored, and a header names them.
    """

    model_config = ConfigDict(extra="allow")
    type: str


def tag_tool(tool: Any, tags: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return "HostedTool" for a tool that OpenAI or Anthropic runs, or else the tag of its type.

    A tag names the model that validates the tool. tags: the tags of client tools by type; a tool of
    any other type has "OwnTool". Error messages leave tags out of the paths of fields, which they
    recognize by the capital.
    """
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    if not isinstance(kind, str):
        return "OwnTool"
    return "HostedTool" if _TYPES.fullmatch(kind) else tags.get(kind, "OwnTool")


def report_hosted(tools: Sequence[Any] | None, request: Request, function_type: str) -> None:
    """List the hosted tools, which are ignored, in the answer's header `x-headstart-ignored`.

    function_type: the type of client tools. Raises ApiError if there are only hosted tools.
    """
    hosted = {i: tool.type for i, tool in enumerate(tools or ()) if isinstance(tool, HostedTool)}
    if hosted and len(hosted) == len(tools or ()):
        index, kind = next(iter(hosted.items()))
        text = f"{describe(kind)} does not run here; allowed: {function_type!r} (your own tool)"
        raise ApiError(400, f"tools[{index}].type: {text}", param=f"tools[{index}].type")
    if hosted:
        names = ", ".join(f"tools[{index}] {kind}" for index, kind in hosted.items())
        request.state.ignored = shorten(names)


Item = TypeVar("Item")

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

# JSON with the white space of chat templates. The next turn's prompt then repeats the tokens of a
# generated call, and these tokens are cached.
_SPELLING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_REASONING = "reasoning gap "

Reasoning = Literal["none", "possible", "begun"]
"""Reasoning of an answer: none, possible at its beginning, or begun in the prompt."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RequestError(
                f"a tool has the name {describe(self.name)}; allowed: 1 to 128 letters, digits "
                "and _ - . :"
            )

    @property
    def schema(self) -> dict[str, Any]:
        return {"type": "object", **(self.parameters or {"properties": {}})}

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        parameters = self.schema if self.parameters is None else self.parameters
        function = {"parameters": parameters, "name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


def make_tools(items: Sequence[Item], make: Callable[[Item], Tool]) -> tuple[Tool, ...]:
    """Return the tools of a request. Raises RequestError if there are more than `MAX_TOOLS`."""
    if len(items) > MAX_TOOLS:
        raise RequestError(f"there are {len(items)} tools; allowed: {MAX_TOOLS} at most")
    return tuple(map(make, items))


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how an answer may use them. Raises RequestError.

    name: the only tool that the answer may call. parallel: True if the answer may have several
    calls. allowed: names of the tools that may be called; None for all. The prompt shows all tools.
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True
    allowed: frozenset[str] | None = None

    def __post_init__(self) -> None:
        names = {tool.name for tool in self.tools}
        if len(names) < len(self.tools):
            raise RequestError("two tools have the same name; allowed: different names")
        if unknown := sorted(self.names - names):
            raise RequestError(
                f"tool_choice has {describe(unknown[0])}; allowed: names of the request's tools"
            )
        if self.choice == "required" and not self.names:
            raise RequestError("tool_choice requires a call, but there are no tools")
        if self.name is not None and self.name not in self.names:
            raise RequestError(
                f"tool_choice is {describe(self.name)}, which is not one of the tools"
            )

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the tools that may be called."""
        return frozenset(t.name for t in self.tools) if self.allowed is None else self.allowed

    @property
    def is_forced(self) -> bool:
        """True if the answer must be a call."""
        return self.choice == "required"

    @property
    def may_call(self) -> bool:
        """True if the answer is parsed for calls."""
        return self.choice != "none" and bool(self.names)


def force_calls(
    use: ToolUse, form: CallFormat, special: Mapping[str, int], reasoning: Reasoning
) -> StructuredOutputsParams:
    """Return the grammar of an answer that must call tools, in the model's own format.

    If the prompt began reasoning, the answer may continue it. Otherwise the answer begins with a
    call, since a model could reason until `max_tokens`. special: ids of the special tokens. Raises
    RequestError.
    """
    names = use.names if use.name is None else {use.name}
    tools = [tool for tool in use.tools if tool.name in names]
    call = "call"
    if use.parallel and use.name is None and form.between is not None:
        call = f"call ({lark_text(form.between, special)} call)*"
    pieces = [lark_text(form.head, special), call, lark_text(form.tail, special)]
    is_begun = reasoning == "begun"
    rules = [f"start: {_REASONING if is_begun else ''}{' '.join(filter(None, pieces))}"]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
    for index, tool in enumerate(tools):
        opening = lark_text(form.opening.replace("{name}", json.dumps(tool.name)), special)
        closing = lark_text(form.closing, special)
        rules.append(f"call_{index}: {opening} arguments_{index} {closing}")
        rules.append(f"arguments_{index}: {_json(tool.schema, _SPELLING)}")
    if is_begun:
        rules += _reasoning_rules(special)
    return StructuredOutputsParams(grammar="\n".join(rules))


def after_reasoning(
    form: StructuredOutputsParams, special: Mapping[str, int]
) -> StructuredOutputsParams | None:
    """Return `form` preceded by the reasoning that the prompt began; None if `form` is not JSON."""
    kind, text, whitespace = form.constraint
    if kind != "json":
        return None
    whitespace_options: dict[str, Any] = {"whitespace_flexible": whitespace != ""}
    if whitespace:
        whitespace_options["whitespace_pattern"] = whitespace
    rules = [
        f"start: {_REASONING}answer",
        f"answer: {_json(json.loads(text), whitespace_options)}",
        *_reasoning_rules(special),
    ]
    return StructuredOutputsParams(grammar="\n".join(rules))


def _json(schema: Mapping[str, Any], whitespace_options: Mapping[str, Any]) -> str:
    try:
        adapted = adapt_schema(schema)
        return "%json " + json.dumps({**adapted, "x-guidance": whitespace_options}, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"a tool's parameters are not a JSON schema: {error}") from error


def _reasoning_rules(special: Mapping[str, int]) -> Iterable[str]:
    if THINK_CLOSE in special:
        rule = f"reasoning: /(?s:.*)/ {lark_text(THINK_CLOSE, special)}"
    else:
        rule = f'reasoning[suffix="{THINK_CLOSE}"]: /(?s:.*)/'
    return (rule, "gap: /\\n{0,2}/")
