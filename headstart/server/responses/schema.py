"""Request bodies of OpenAI's Responses API, and their conversion to chats.

Fields that are not declared here, such as `conversation`, are refused. Fields without meaning for a
server of one model are accepted without effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.server.bodies import Body, Flag, Label, Many, Real, Whole, at_most, refusals
from headstart.server.chats import ChatFields
from headstart.server.errors import ApiError
from headstart.server.responses.items import AnyTool, CallKind, Item, NamespaceTool, qualified_name
from headstart.server.tools import HostedTool, Tool, ToolUse, make_tools


class NamedChoice(Body):
    """The answer must call this tool."""

    type: Literal["function", "custom"]
    name: str
    namespace: Label | None = None


class AllowedTool(Body):
    """A tool that an answer may call."""

    type: Literal["function", "custom", "local_shell"]
    name: str | None = None
    namespace: Label | None = None


class AllowedChoice(Body):
    """The answer may, or must, call one of these tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Many[AllowedTool]


Choice = Annotated[NamedChoice | AllowedChoice, Field(discriminator="type")]


class PlainFormat(Body):
    """The format of an answer: any text, or any JSON object."""

    type: Literal["text", "json_object"]

    def read(self) -> StructuredOutputsParams | None:
        """Return the constraints on the answer; None for any text."""
        if self.type == "text":
            return None
        return StructuredOutputsParams(json_object=True, disable_any_whitespace=True)


class JsonFormat(Body):
    """The format of an answer: JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: Flag | None = None

    def read(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(json=self.schema_, disable_any_whitespace=True)


class TextConfig(Body):
    """The format of the answer's text."""

    format: Annotated[PlainFormat | JsonFormat, Field(discriminator="type")] | None = None
    verbosity: Label | None = None


class Reasoning(Body):
    """Options of reasoning. `effort` is passed to the chat template; there are no summaries."""

    effort: Label | None = None
    summary: Label | None = None
    generate_summary: Label | None = None
    context: Label | None = None
    mode: Label | None = None


class ResponseStreamOptions(Body):
    """Options of a stream. `include_obfuscation` has no effect: events are not padded."""

    include_obfuscation: Flag | None = None


Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    at_most("metadata", 16),
]
"""Metadata of the client, which the response repeats; OpenAI's limits apply."""


Include = Literal[
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
]
"""Optional parts of an answer. Only encrypted reasoning has an effect."""


class PromptCacheOptions(Body):
    """Options of the cache. `ttl` retains the prompt for 30 minutes after each use.

    Every full block of a prompt is cached, in every mode.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


_RENAMED = refusals(
    {
        "use `max_output_tokens`": "max_tokens max_completion_tokens",
        "use `input`": "messages prompt",
        'use `text`: {"format": ...}': "response_format",
        'use `reasoning`: {"effort": ...}': "reasoning_effort",
    }
)


class InputTokensRequest(ChatFields):
    """`POST /v1/responses/input_tokens`. `POST /v1/responses` has these fields too."""

    refused = _RENAMED
    input: str | Many[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Many[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: Flag | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None

    def read_messages(
        self, earlier: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return the `earlier` messages and the messages of this input.

        Also return the name of the body's field that each message comes from. Raises ApiError.
        """
        if isinstance(self.input, str):
            messages = [*earlier, {"role": "user", "content": self.input}]
            return messages, [*("previous_response_id" for _ in earlier), "input"]
        if not self.input and not earlier:
            text = "input is empty; allowed: a string, or a list of items"
            raise ApiError(400, text, param="input")
        return extend(earlier, self.input)

    def read_tools(self) -> ToolUse:
        tools = make_tools([*self._tool_readers()], lambda read: read()[1])
        parallel = self.parallel_tool_calls is not False
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            name = qualified_name(choice.name, choice.namespace)
            return ToolUse(tools, "required", name, parallel)
        if isinstance(choice, AllowedChoice):
            names = {
                qualified_name(tool.name or tool.type, tool.namespace) for tool in choice.tools
            }
            return ToolUse(tools, choice.mode, None, parallel, frozenset(names))
        return ToolUse(tools, choice or "auto", None, parallel)

    def call_kinds(self) -> dict[str, CallKind]:
        """Return the kind of each tool's calls, by the name that the model sees."""
        return {tool.name: kind for kind, tool in (read() for read in self._tool_readers())}

    def _tool_readers(self) -> Iterator[Callable[[], tuple[CallKind, Tool]]]:
        """Yield the `read` method of each tool of the client.

        So `make_tools` can refuse too many tools before it makes any.
        """
        for tool in self.tools or ():
            if isinstance(tool, NamespaceTool):
                yield from (partial(inner.read, tool.name) for inner in tool.tools)
            elif not isinstance(tool, HostedTool):
                yield tool.read

    def read_template(self) -> dict[str, Any]:
        if self.reasoning is None or self.reasoning.effort is None:
            return {}
        return {"chat_template_kwargs": {"reasoning_effort": self.reasoning.effort}}


class ResponsesRequest(InputTokensRequest):
    """`POST /v1/responses`."""

    model: str
    store: Flag | None = True
    stream: Flag | None = False
    max_output_tokens: Whole | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    metadata: Metadata | None = None
    client_metadata: dict[str, Any] | None = None
    include: Many[Include] | None = None
    background: Literal[False] | None = None
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Whole | None = None
    top_logprobs: Literal[0] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    safety_identifier: Label | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    user: Label | None = None

    @property
    def names(self) -> dict[str, str]:
        return {"structured_outputs": "text.format", "max_tokens": "max_output_tokens"}

    @property
    def retention(self) -> float:
        options = self.prompt_cache_options
        has_ttl = options is not None and options.ttl is not None
        return max(super().retention, 1800.0 if has_ttl else 0.0)

    def read_sampling(self) -> dict[str, Any]:
        form = self.text.format if self.text is not None else None
        return {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "structured_outputs": form and form.read(),
            **self.cache_sampling,
        }


def extend(
    earlier: Sequence[dict[str, Any]], items: Iterable[Item]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the `earlier` messages and the items as messages.

    Also return the name of the body's field that each message comes from. Consecutive reasoning,
    text and calls of the assistant become one message.
    """
    messages, paths = list(earlier), ["previous_response_id"] * len(earlier)
    for index, item in enumerate(items):
        message = item.as_message()
        last = messages[-1] if messages else {}
        if message["role"] == "assistant" == last.get("role"):
            messages[-1] = _join(last, message)
        else:
            messages.append(message)
            paths.append(f"input[{index}]")
    return messages, paths


def _join(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    joined = {"role": "assistant", "content": first["content"] + second["content"]}
    name = "reasoning_content"
    thoughts = [message[name] for message in (first, second) if name in message]
    if thoughts:
        joined[name] = "\n".join(thoughts)
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return joined | {"tool_calls": calls} if calls else joined
