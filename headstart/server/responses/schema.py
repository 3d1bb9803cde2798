"""The bodies of OpenAI's Responses.

A field that is not here is an error, and so is what OpenAI runs itself: its tools, prompts, stored
conversations, background work. Fields that mean nothing to a server of one model are taken.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter
from pydantic_core import PydanticCustomError

from headstart.engine.vllm_api.rows import refused
from headstart.server.bodies import Body, CacheFields, ClientTool, Flag, Label, Many, Real, Whole

__all__ = [
    "FunctionCall",
    "FunctionOutput",
    "InputImage",
    "Item",
    "JsonFormat",
    "Message",
    "NamedChoice",
    "ReasoningItem",
    "ResponseRequest",
    "as_items",
]

Status = Literal["in_progress", "completed", "incomplete"] | None


class InputText(Body):
    """A text, of whoever speaks."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(Body):
    """An image as a data: URL; nothing is fetched."""

    type: Literal["input_image"]
    image_url: str
    detail: str | None = None


class Refusal(Body):
    """Text by which an assistant refused to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Return the refusal as any other text."""
        return self.refusal


Content = str | Many[Annotated[InputText | InputImage | Refusal, Field(discriminator="type")]]


class Message(Body):
    """A message; one of the assistant may be an item of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: Status = None
    phase: str | None = None


class FunctionCall(Body):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status = None


class FunctionOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: Status = None


class ReasoningText(Body):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier answer; what is encrypted only its writer can read."""

    type: Literal["reasoning"]
    summary: Many[ReasoningText] = Field(default_factory=list)
    content: Many[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status = None


def _kind(item: Any) -> Any:
    """An item without a type is a message."""
    if isinstance(item, dict):
        return item.get("type", "message")
    return getattr(item, "type", None)


Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def as_items(told: list[dict[str, Any]]) -> list[Item]:
    """Items of an answer as those of an input, which they may become."""
    return _ITEMS.validate_python(told)


class FunctionTool(ClientTool):
    """A function of the client."""

    types = ("function",)
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None
    output_schema: dict[str, Any] | None = None


class NamedChoice(Body):
    """The answer must call this function."""

    type: Literal["function"]
    name: str


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


class StreamOptions(Body):
    """Nothing is obfuscated here."""

    include_obfuscation: Flag | None = None


_MOST_NOTES = 16


def _check_count(given: Any) -> Any:
    """Refuse too many before each of them is looked at."""
    if isinstance(given, dict) and len(given) > _MOST_NOTES:
        raise PydanticCustomError(
            "refused_field",
            "metadata has {count} entries; allowed: {most} at most",
            {"count": len(given), "most": _MOST_NOTES},
        )
    return given


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=_MOST_NOTES),
    BeforeValidator(_check_count),
]
"""What a client notes of a response, which tells it again; as much as OpenAI takes."""


class ResponseRequest(CacheFields):
    """`POST /v1/responses`."""

    rows = refused(
        {
            "the name is `max_output_tokens`": {"max_tokens": (), "max_completion_tokens": ()},
            "the name is `input`": {"messages": (), "prompt": ()},
            'give `text`: {"format": ...}': {"response_format": ()},
            'give `reasoning`: {"effort": ...}': {"reasoning_effort": ()},
        }
    )
    model: str
    input: str | Many[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: Flag | None = True
    stream: Flag | None = False
    max_output_tokens: Whole | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    tools: Many[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: Flag | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None
    priority: Whole = 0
    include: Many[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    stream_options: StreamOptions | None = None
    max_tool_calls: Whole | None = None
    top_logprobs: Literal[0] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: Label | None = None
    service_tier: Label | None = None
    user: Label | None = None
