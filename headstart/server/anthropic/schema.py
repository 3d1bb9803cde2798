"""The bodies of Anthropic's requests.

A field that is not here is an error. Fields without effect, such as `metadata`, take only values
that ask for nothing: docs/apis.md has a table.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headstart.server.bodies import (
    Body,
    CacheFields,
    ClientTool,
    Flag,
    Label,
    Many,
    Real,
    Whole,
    refusals,
)
from headstart.server.hosted import HostedTool, tag_tool


class CacheControl(Body):
    """The prompt up to here is worth keeping for `ttl`; a scope changes nothing here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: Literal["global", "organization", "workspace"] | None = None


class Marked(Body):
    """An object that may carry a breakpoint of the cache."""

    cache_control: CacheControl | None = None


class TextBlock(Marked):
    """A text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class ImageData(Body):
    """An image in base64; nothing is fetched."""

    refused = refusals({"send the image itself, as `data` in base64": "url file_id"})
    type: Literal["base64"]
    media_type: Annotated[str, Field(pattern=r"^image/[a-z0-9.+-]+$", max_length=64)]
    data: str


class ImageBlock(Marked):
    """An image."""

    type: Literal["image"]
    source: ImageData


class Citations(Body):
    """No answer has citations."""

    enabled: Literal[False] = False


class DocumentText(Body):
    """The text of a document."""

    type: Literal["text"]
    media_type: Label | None = None
    data: str


class DocumentContent(Body):
    """The text or the blocks of a document."""

    type: Literal["content"]
    content: str | Many[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]]


class DocumentFile(Body):
    """A file, such as a PDF, which is not shown."""

    type: Literal["base64"]
    media_type: Label | None = None
    data: str


class DocumentUrl(Body):
    """The address of a file, which is not fetched."""

    type: Literal["url"]
    url: str


class DocumentReference(Body):
    """A file on Anthropic's servers, which is not fetched."""

    type: Literal["file"]
    file_id: Label


class DocumentBlock(Marked):
    """A document."""

    type: Literal["document"]
    source: Annotated[
        DocumentText | DocumentContent | DocumentFile | DocumentUrl | DocumentReference,
        Field(discriminator="type"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResultBlock(Marked):
    """A result of the client's search."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Many[TextBlock]
    citations: Citations | None = None


class ToolReferenceBlock(Marked):
    """A tool that the client's search of tools found; all tools are in the prompt already."""

    type: Literal["tool_reference"]
    tool_name: Label


class Caller(Body):
    """The model itself called the tool."""

    type: Literal["direct"]


class ToolUseBlock(Marked):
    """A call that the model made; the input of a call that was cut off may be a text."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str
    caller: Caller | None = None


Shown = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]


class ToolResultBlock(Marked):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[Shown] | None = None
    is_error: Flag | None = None


class ThinkingBlock(Body):
    """Reasoning of an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Reasoning that only another server can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class Turn(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


class ToolDefinition(Marked, ClientTool):
    """A tool of the client."""

    types = (None, "custom")
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: Flag | None = None
    allowed_callers: Many[str] | None = None
    defer_loading: Flag | None = None
    eager_input_streaming: Flag | None = None
    input_examples: Many[dict[str, Any]] | None = None


AnyTool = Annotated[
    Annotated[ToolDefinition, Tag("OwnTool")] | Annotated[HostedTool, Tag("HostedTool")],
    Discriminator(tag_tool),
]


class MessagesToolChoice(Body):
    """A choice: the answer may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag = False


class Thinking(Body):
    """The switch of reasoning; templates without one ignore it.

    A budget is not kept: reasoning ends where the model ends it.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = None
    display: str | None = None


class OutputFormat(Body):
    """A form of JSON."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """The answer's form; `effort` is for templates that read it."""

    effort: str | None = None
    format: OutputFormat | None = None


class ClearThinking(Body):
    """Leaves all reasoning in the prompt; whether a model reads it, its chat template says."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Edits of the conversation; none changes it here."""

    edits: Many[ClearThinking] = Field(default_factory=list)


class Diagnostics(Body):
    """A wish for reasons of cache misses; an answer has none, and `headstart` tells them itself."""

    previous_message_id: Label | None = None


class RequestMetadata(Body):
    """A name of the user, which changes nothing."""

    user_id: Label | None = None


class CountTokensRequest(CacheFields):
    """`POST /v1/messages/count_tokens`, and what messages have in common with it."""

    model: str
    messages: Annotated[Many[Turn], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: Many[AnyTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None
    user_profile_id: Label | None = None
    workspace_id: Label | None = None


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    refused = refusals(
        {
            "the name is `stop_sequences`": "stop",
            "the name is `max_tokens`": "max_completion_tokens",
            'give `output_config`: {"format": ...}': "response_format",
            "no code and no skills run here": "container",
        }
    )
    max_tokens: Whole
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Whole | None = None
    stop_sequences: Many[str] | None = None
    stream: Flag = False
    priority: Whole = 0
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Literal["global"] | None = None
    diagnostics: Diagnostics | None = None
