"""The bodies of Anthropic's requests, and their conversion to chats.

A field that is not declared here is refused. Some fields, such as `metadata`, have no effect. Other
fields, such as `speed`, accept only a value that changes nothing. docs/apis.md lists both kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.server.bodies import (
    Body,
    Caller,
    ClientTool,
    Flag,
    Label,
    Many,
    Real,
    Whole,
    refusals,
)
from headstart.server.chats import ChatFields, chat_content
from headstart.server.errors import ApiError
from headstart.server.tools import HostedTool, Tool, ToolUse, make_tools, tag_tool

Parts = list[dict[str, Any]]
"""Parts of a chat's message, in OpenAI's form."""


def text_parts(text: str) -> Parts:
    """Return text as parts."""
    return [{"type": "text", "text": text}]


class CacheControl(Body):
    """A cache breakpoint: the prompt up to here is retained for `ttl`. A scope has no effect."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"
    scope: Literal["global", "organization", "workspace"] | None = None


class Marked(Body):
    """An object that may have a cache breakpoint."""

    cache_control: CacheControl | None = None


class TextBlock(Marked):
    """A block of text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None

    def as_parts(self) -> Parts:
        return text_parts(self.text)


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

    def as_parts(self) -> Parts:
        url = f"data:{self.source.media_type};base64,{self.source.data}"
        return [{"type": "image_url", "image_url": {"url": url}}]


class Citations(Body):
    """The setting of citations. They must be off, because answers have no citations."""

    enabled: Literal[False] = False


class DocumentData(Body):
    """The text of a document, or a file in base64. The model does not see files, such as PDFs."""

    type: Literal["text", "base64"]
    media_type: Label | None = None
    data: str


class DocumentContent(Body):
    """The text or the blocks of a document."""

    type: Literal["content"]
    content: str | Many[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]]


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
        DocumentData | DocumentContent | DocumentUrl | DocumentReference,
        Field(discriminator="type"),
    ]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None

    def as_parts(self) -> Parts:
        """Return the document as parts of a chat's message.

        The model cannot read files, so a note replaces the content of a file.
        """
        head = f"Document: {self.title or 'untitled'}"
        head = f"{head}\n{self.context}" if self.context else head
        name = "a file"
        match self.source:
            case DocumentData(type="text", data=text) | DocumentContent(content=str(text)):
                return text_parts(f"{head}\n{text}")
            case DocumentContent(content=list(blocks)):
                return [*text_parts(head), *all_parts(blocks)]
            case DocumentUrl(url=name) | DocumentData(media_type=str(name)):
                pass
        return text_parts(f"{head}\n[not shown: {name} cannot be read by this model]")


class SearchResultBlock(Marked):
    """A result of the client's search."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Many[TextBlock]
    citations: Citations | None = None

    def as_parts(self) -> Parts:
        texts = "\n".join(block.text for block in self.content)
        return text_parts(f"Search result: {self.title} ({self.source})\n{texts}")


class ToolReferenceBlock(Marked):
    """A tool that the client's tool search found. The prompt contains all tools in any case."""

    type: Literal["tool_reference"]
    tool_name: Label

    def as_parts(self) -> Parts:
        return text_parts(f"The tool {self.tool_name} is available.")


class ToolUseBlock(Marked):
    """A call that the model made. Its input is a string if the call was cut off."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] | str
    caller: Caller | None = None


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock,
    Field(discriminator="type"),
]
"""A block that a tool result may contain."""


def all_parts(blocks: Iterable[ResultBlock]) -> Parts:
    """Return the parts of all blocks."""
    return [part for block in blocks for part in block.as_parts()]


class ToolResultBlock(Marked):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[ResultBlock] | None = None
    is_error: Flag | None = None

    def as_message(self) -> dict[str, Any]:
        content = self.content or ""
        if not isinstance(content, str):
            content = chat_content(all_parts(content))
        message = {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}
        return message | {"is_error": True} if self.is_error else message


class ThinkingBlock(Body):
    """Reasoning of an earlier answer."""

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


class MessageParam(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]

    def as_messages(self) -> Iterator[dict[str, Any]]:
        """Yield the message in OpenAI's form, with each tool result as a separate message.

        Raises ApiError for a block that a message of this role cannot have.
        """
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        if self.role == "assistant":
            yield self._as_answer(self.content)
            return
        parts: Parts = []
        for block in self.content:
            if isinstance(block, ToolResultBlock) and self.role == "user":
                if parts:
                    yield {"role": self.role, "content": chat_content(parts)}
                    parts = []
                yield block.as_message()
            elif isinstance(block, TextBlock | ImageBlock | DocumentBlock | SearchResultBlock):
                parts += block.as_parts()
            else:
                raise self._misplaced(block)
        if parts:
            yield {"role": self.role, "content": chat_content(parts)}

    def _as_answer(self, blocks: Iterable[Block]) -> dict[str, Any]:
        texts, thoughts, calls = [], [], []
        for block in blocks:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif not isinstance(block, RedactedThinkingBlock):
                raise self._misplaced(block)
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        return message | {"tool_calls": calls} if calls else message

    def _misplaced(self, block: Block) -> ApiError:
        return ApiError(400, f"a message of role {self.role!r} has a block of type {block.type!r}")


def count_blocks(messages: Sequence[MessageParam]) -> int:
    """Return the number of messages plus the number of their blocks."""
    contents = (message.content for message in messages)
    return len(messages) + sum(len(blocks) for blocks in contents if isinstance(blocks, list))


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

    def as_tool(self) -> Tool:
        return Tool(self.name, self.description, self.input_schema)


AnyTool = Annotated[
    Annotated[ToolDefinition, Tag("OwnTool")] | Annotated[HostedTool, Tag("HostedTool")],
    Discriminator(tag_tool),
]


class MessagesToolChoice(Body):
    """A rule on tool calls: an answer may, must or must not have one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Flag = False


class Thinking(Body):
    """The setting that turns reasoning on or off, if the chat template has such an option.

    A budget has no effect: the model alone decides where reasoning ends.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = None
    display: str | None = None


class OutputFormat(Body):
    """The JSON schema of an answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """The answer's format. `effort` is passed to the chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class ClearThinking(Body):
    """An edit that removes no reasoning (`keep: all`)."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Edits of the conversation. Only edits without effect are accepted."""

    edits: Many[ClearThinking] = Field(default_factory=list)


class Diagnostics(Body):
    """A request to explain cache misses, which has no effect: `/cache/explain` explains them."""

    previous_message_id: Label | None = None


class RequestMetadata(Body):
    """The client's id of its user, which has no effect."""

    user_id: Label | None = None


class CountTokensRequest(ChatFields):
    """`POST /v1/messages/count_tokens`. `POST /v1/messages` has these fields too."""

    model: str
    messages: Annotated[Many[MessageParam], Field(min_length=1)]
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

    def read_messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat, the system message first. Raises ApiError."""
        system = [self.system] if isinstance(self.system, str) else self.system or []
        texts = [block if isinstance(block, str) else block.text for block in system]
        parts = [part for text in texts if text for part in text_parts(text)]
        messages = [{"role": "system", "content": chat_content(parts)}] if parts else []
        return [*messages, *(message for turn in self.messages for message in turn.as_messages())]

    def read_tools(self) -> ToolUse:
        definitions = [tool for tool in self.tools or () if isinstance(tool, ToolDefinition)]
        tools = make_tools(definitions, ToolDefinition.as_tool)
        choice = self.tool_choice
        if choice is None:
            return ToolUse(tools)
        if (choice.type == "tool") != (choice.name is not None):
            name = "no name" if choice.name is None else "a name"
            allowed = 'a name with type "tool", no name with any other type'
            text = f'tool_choice has type "{choice.type}" and {name}; allowed: {allowed}'
            raise ApiError(400, text)
        parallel = not choice.disable_parallel_tool_use
        if choice.type in ("any", "tool"):
            return ToolUse(tools, "required", choice.name, parallel)
        return ToolUse(tools, "none" if choice.type == "none" else "auto", None, parallel)

    def read_template(self) -> dict[str, Any]:
        """Return the template options. If the last message is the assistant's, continue it."""
        extra: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type != "adaptive":
            extra["enable_thinking"] = self.thinking.type == "enabled"
        if self.output_config is not None and self.output_config.effort is not None:
            extra["reasoning_effort"] = self.output_config.effort
        options: dict[str, Any] = {"chat_template_kwargs": extra} if extra else {}
        if self.messages and self.messages[-1].role == "assistant":
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        return options


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    refused = refusals(
        {
            "use `stop_sequences`": "stop",
            "use `max_tokens`": "max_completion_tokens",
            'use `output_config`: {"format": ...}': "response_format",
            "the server runs no code and no skills": "container",
        }
    )
    max_tokens: Whole
    temperature: Real | None = None
    top_p: Real | None = None
    top_k: Whole | None = None
    stop_sequences: Many[str] | None = None
    stream: Flag = False
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: Literal["global"] | None = None
    diagnostics: Diagnostics | None = None

    @property
    def names(self) -> dict[str, str]:
        return {"structured_outputs": "output_config.format", "stop": "stop_sequences"}

    def read_sampling(self) -> dict[str, Any]:
        form = self.output_config.format if self.output_config is not None else None
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "structured_outputs": form
            and StructuredOutputsParams(json=form.schema_, disable_any_whitespace=True),
            **self.cache_sampling,
        }
