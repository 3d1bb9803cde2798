"""The bodies of OpenAI's Responses.

A field that is not here is an error, and so is what OpenAI runs itself: its tools, prompts, stored
conversations, background work. Fields that mean nothing to a server of one model are taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from headstart.server.bodies import (
    Body,
    CacheFields,
    ClientTool,
    Flag,
    Label,
    Many,
    Real,
    Whole,
    at_most,
    refusals,
)
from headstart.server.hosted import HostedTool, tag_tool


class CacheBreakpoint(Body):
    """A mark of the cache, which keeps every full block of every prompt anyway."""

    mode: Literal["explicit"]


class InputText(Body):
    """A text, of whoever speaks; `parsed` is a copy of it that OpenAI's client makes."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputImage(Body):
    """An image as a data: URL; nothing is fetched."""

    refused = refusals({"send the image itself, as a data: URL": "file_id"})
    type: Literal["input_image"]
    image_url: str
    detail: str | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class InputFile(Body):
    """A file, of which only the name is shown."""

    type: Literal["input_file"]
    filename: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    file_id: Label | None = None
    detail: Label | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    @property
    def text(self) -> str:
        """Return what a model reads of the file."""
        name = self.filename or self.file_url or "a file"
        return f"[not shown: {name} cannot be read by this model]"


class Refusal(Body):
    """Text by which an assistant refused to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Return the refusal as any other text."""
        return self.refusal


Content = (
    str | Many[Annotated[InputText | InputImage | InputFile | Refusal, Field(discriminator="type")]]
)


class ItemFields(Body):
    """Fields that items of earlier answers have."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class Message(ItemFields):
    """A message; one of the assistant may be an item of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None


class Caller(Body):
    """The model itself called the tool."""

    type: Literal["direct"]


class Called(ItemFields):
    """Fields that calls of tools and their outputs have in common."""

    call_id: str
    caller: Caller | None = None
    namespace: Label | None = None


class FunctionCall(Called):
    """A call that the model made; `parsed_arguments` is a copy that OpenAI's client makes."""

    type: Literal["function_call"]
    name: str
    arguments: str
    parsed_arguments: Any = None


class CustomCall(Called):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    name: str
    input: str


class FunctionOutput(Called):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    output: Content
    name: Label | None = None


class ShellAction(Body):
    """A command for the client's shell."""

    type: Literal["exec"]
    command: Many[str]
    env: dict[str, str] | None = None
    timeout_ms: Whole | None = None
    user: str | None = None
    working_directory: str | None = None


class ShellCall(ItemFields):
    """A call of the client's shell."""

    type: Literal["local_shell_call"]
    call_id: str
    action: ShellAction


class ShellOutput(ItemFields):
    """The result of a call of the client's shell; `id` is the call's."""

    type: Literal["local_shell_call_output"]
    id: str
    output: str


class ItemReference(Body):
    """An item of an earlier answer that the server stores."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class ReasoningText(Body):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ItemFields):
    """Reasoning of an earlier answer; encrypted reasoning of another server is left out."""

    type: Literal["reasoning"]
    summary: Many[ReasoningText] = Field(default_factory=list)
    content: Many[ReasoningText] | None = None
    encrypted_content: str | None = None


def _add_type(item: Any) -> Any:
    """Return an item with a type; without one it is a message, or the reference to an item."""
    if isinstance(item, dict) and not item.get("type"):
        untyped = "message" if "role" in item or "id" not in item else "item_reference"
        return {**item, "type": untyped}
    return item


Item = Annotated[
    Message
    | FunctionCall
    | FunctionOutput
    | CustomCall
    | ShellCall
    | ShellOutput
    | ItemReference
    | ReasoningItem,
    Field(discriminator="type"),
    BeforeValidator(_add_type),
]


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def as_items(told: list[dict[str, Any]]) -> list[Item]:
    """Items of an answer as those of an input, which they may become."""
    return _ITEMS.validate_python(told)


class ResponseFunctionTool(ClientTool):
    """A function of the client."""

    types = ("function",)
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: Many[str] | None = None
    defer_loading: Flag | None = None


class CustomFormat(Body):
    """The form of a custom tool's input; a grammar is shown to the model, and not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool of the client that takes a text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None
    allowed_callers: Many[str] | None = None
    defer_loading: Flag | None = None


class ShellTool(Body):
    """The client's shell."""

    type: Literal["local_shell"]


class NamespaceTool(Body):
    """Tools of the client under one name."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Many[Annotated[ResponseFunctionTool | CustomTool, Field(discriminator="type")]]


def _tool_tag(given: Any) -> str:
    tag = tag_tool(given)
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return _TAGS.get(kind, tag) if isinstance(kind, str) else tag


_TAGS = {"custom": "CustomTool", "local_shell": "ShellTool", "namespace": "NamespaceTool"}


ClientSide = ResponseFunctionTool | CustomTool | ShellTool
_Tool = Annotated[
    Annotated[ResponseFunctionTool, Tag("OwnTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[ShellTool, Tag("ShellTool")]
    | Annotated[NamespaceTool, Tag("NamespaceTool")]
    | Annotated[HostedTool, Tag("HostedTool")],
    Discriminator(_tool_tag),
]


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
    """Any text, or any object of JSON."""

    type: Literal["text", "json_object"]


class JsonFormat(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: Flag | None = None


class TextConfig(Body):
    """The form of the text."""

    format: Annotated[PlainFormat | JsonFormat, Field(discriminator="type")] | None = None
    verbosity: Label | None = None


class Reasoning(Body):
    """`effort` is for templates that read it; reasoning is told whole."""

    effort: Label | None = None
    summary: Label | None = None
    generate_summary: Label | None = None
    context: Label | None = None
    mode: Label | None = None


class ResponseStreamOptions(Body):
    """Nothing is obfuscated here."""

    include_obfuscation: Flag | None = None


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    at_most("metadata", 16),
]
"""Notes of the client on a response, which repeats them; as many as OpenAI takes."""


Include = Literal[
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
]
"""Parts of an answer that no answer here has."""


class CacheOptions(Body):
    """Options of the cache. `ttl` is a time for which the prompt is worth keeping.

    Every full block of a prompt is cached, whatever the mode.
    """

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


_RENAMED = refusals(
    {
        "the name is `max_output_tokens`": "max_tokens max_completion_tokens",
        "the name is `input`": "messages prompt",
        'give `text`: {"format": ...}': "response_format",
        'give `reasoning`: {"effort": ...}': "reasoning_effort",
    }
)


class InputTokensRequest(CacheFields):
    """`POST /v1/responses/input_tokens`, and the fields that responses have in common with it."""

    refused = _RENAMED
    model: str | None = None
    input: str | Many[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Many[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: Flag | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None


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
    priority: Whole = 0
    include: Many[Include] | None = None
    background: Literal[False] | None = None
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Whole | None = None
    top_logprobs: Literal[0] | None = None
    prompt_cache_options: CacheOptions | None = None
    safety_identifier: Label | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    user: Label | None = None
