"""Items and tools of OpenAI's Responses, and their conversion to chat messages and functions.

tool         a model sees                        an answer has
function     a function                          function_call
custom       a function of one string, `input`   custom_tool_call
local_shell  a function of a command             local_shell_call
namespace    its tools, as `namespace.name`      the item of the tool's type, with the namespace
"""

from __future__ import annotations

import base64
import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from headstart.server.bodies import Body, Caller, ClientTool, Flag, Label, Many, Whole, refusals
from headstart.server.chats import chat_content
from headstart.server.errors import ApiError
from headstart.server.tools import HostedTool, Tool, tag_tool

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


class InputText(Body):
    """Text in a message of any role; `parsed` is a copy that OpenAI's client makes."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputImage(Body):
    """An image as a data: URL; nothing is fetched."""

    refused = refusals({"send the image itself, as a data: URL": "file_id"})
    type: Literal["input_image"]
    image_url: str
    detail: str | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class InputFile(Body):
    """A file. The model sees only its name."""

    type: Literal["input_file"]
    filename: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    file_id: Label | None = None
    detail: Label | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """Return the text that the model sees in place of the file."""
        name = self.filename or self.file_url or "a file"
        return f"[not shown: {name} cannot be read by this model]"


class Refusal(Body):
    """The assistant's refusal to answer."""

    type: Literal["refusal"]
    text: Annotated[str, Field(alias="refusal")]


Content = (
    str | Many[Annotated[InputText | InputImage | InputFile | Refusal, Field(discriminator="type")]]
)


def _chat_content(content: Content) -> Any:
    """Return the content in the form of a chat: a string or parts."""
    if isinstance(content, str):
        return content
    return chat_content(
        [
            {"type": "image_url", "image_url": {"url": part.image_url}}
            if isinstance(part, InputImage)
            else {"type": "text", "text": part.text}
            for part in content
        ]
    )


def qualified_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model sees a tool."""
    return f"{namespace}.{name}" if namespace else name


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call as a chat message."""
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(call_id: str, content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


class ItemFields(Body):
    """The base of all input items. Items of earlier answers have an id and a status."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the item as a message of a chat. Raises ApiError."""
        raise NotImplementedError


class Message(ItemFields):
    """A message; an assistant's message may be an item of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: str | None = None

    def as_message(self) -> dict[str, Any]:
        """Return the item as a chat message.

        Raises ApiError if a message of the assistant has an image.
        """
        content = _chat_content(self.content)
        if self.role == "assistant" and not isinstance(content, str):
            if any(part["type"] != "text" for part in content):
                text = "a message of the assistant has an image; allowed: text"
                raise ApiError(400, text, param="input")
            content = "".join(part["text"] for part in content)
        return {"role": self.role, "content": content}


class CallFields(ItemFields):
    """Fields that tool calls and their outputs have in common."""

    call_id: str
    caller: Caller | None = None
    namespace: Label | None = None


class FunctionCall(CallFields):
    """A call that the model made; `parsed_arguments` is a copy that OpenAI's client makes."""

    type: Literal["function_call"]
    name: str
    arguments: str
    parsed_arguments: Any = None

    def as_message(self) -> dict[str, Any]:
        return _call(self.call_id, qualified_name(self.name, self.namespace), self.arguments)


class CustomCall(CallFields):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    name: str
    input: str

    def as_message(self) -> dict[str, Any]:
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        return _call(self.call_id, qualified_name(self.name, self.namespace), arguments)


class FunctionOutput(CallFields):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    output: Content
    name: Label | None = None

    def as_message(self) -> dict[str, Any]:
        return _result(self.call_id, _chat_content(self.output))


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

    def as_message(self) -> dict[str, Any]:
        action = self.action.model_dump(exclude_none=True, exclude={"type"})
        arguments = {name: value for name, value in action.items() if value != {}}
        return _call(self.call_id, "local_shell", json.dumps(arguments, ensure_ascii=False))


class ShellOutput(ItemFields):
    """The result of a call of the client's shell; `id` is the call's id."""

    type: Literal["local_shell_call_output"]
    id: str
    output: str

    def as_message(self) -> dict[str, Any]:
        return _result(self.id, self.output)


class ItemReference(ItemFields):
    """A reference to an item of an earlier answer. The stored item with this id replaces it."""

    type: Literal["item_reference"] = "item_reference"
    id: str


class ReasoningText(Body):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(ItemFields):
    """Reasoning of an earlier answer. Another server's encrypted reasoning is left out."""

    type: Literal["reasoning"]
    summary: Many[ReasoningText] = Field(default_factory=list)
    content: Many[ReasoningText] | None = None
    encrypted_content: str | None = None

    def as_message(self) -> dict[str, Any]:
        text = "\n".join(part.text for part in self.content or self.summary)
        text = text or decode_reasoning(self.encrypted_content or "")
        return {"role": "assistant", "content": "", "reasoning_content": text}


_PREFIX = "headstart:"


def encode_reasoning(text: str) -> str:
    """Return reasoning as an item's `encrypted_content`: encoded only, not encrypted."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def decode_reasoning(content: str) -> str:
    """Return the reasoning in an item's `encrypted_content`; empty if it is from another server."""
    if not content.startswith(_PREFIX):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_PREFIX), validate=True).decode()
    except ValueError:
        return ""


def _add_type(item: Any) -> Any:
    """Add the type to an item without a type.

    An item with an id and no role is a reference. Any other item is a message.
    """
    if isinstance(item, dict) and not item.get("type"):
        kind = "message" if "role" in item or "id" not in item else "item_reference"
        return {**item, "type": kind}
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


def as_items(items: list[dict[str, Any]]) -> list[Item]:
    """Return items of an answer as items of an input."""
    return _ITEMS.validate_python(items)


class CallKind(NamedTuple):
    """The type, name and namespace of the items that are calls of a tool."""

    type: str
    name: str
    namespace: str | None = None


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

    def read(self, namespace: str | None = None) -> tuple[CallKind, Tool]:
        tool = Tool(qualified_name(self.name, namespace), self.description, self.parameters)
        return CallKind("function_call", self.name, namespace), tool


class CustomFormat(Body):
    """The format of a custom tool's input. The model sees a grammar; it is not enforced."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool of the client that takes a string."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: CustomFormat | None = None
    allowed_callers: Many[str] | None = None
    defer_loading: Flag | None = None

    def read(self, namespace: str | None = None) -> tuple[CallKind, Tool]:
        texts = [self.description] if self.description else []
        if self.format is not None and self.format.definition:
            syntax = f"{self.format.syntax} " if self.format.syntax else ""
            texts.append(f"The input follows this {syntax}grammar:\n{self.format.definition}")
        name = qualified_name(self.name, namespace)
        kind = CallKind("custom_tool_call", self.name, namespace)
        return kind, Tool(name, "\n\n".join(texts) or None, _INPUT)


class ShellTool(Body):
    """The shell of the client."""

    type: Literal["local_shell"]

    def read(self) -> tuple[CallKind, Tool]:
        tool = Tool("local_shell", "Run a command in the user's shell.", _COMMAND)
        return CallKind("local_shell_call", "local_shell"), tool


class NamespaceTool(Body):
    """Tools of the client that the model sees under the names `namespace.name`."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Many[Annotated[ResponseFunctionTool | CustomTool, Field(discriminator="type")]]


_TAGS = {"custom": "CustomTool", "local_shell": "ShellTool", "namespace": "NamespaceTool"}


AnyTool = Annotated[
    Annotated[ResponseFunctionTool, Tag("OwnTool")]
    | Annotated[CustomTool, Tag("CustomTool")]
    | Annotated[ShellTool, Tag("ShellTool")]
    | Annotated[NamespaceTool, Tag("NamespaceTool")]
    | Annotated[HostedTool, Tag("HostedTool")],
    Discriminator(lambda tool: tag_tool(tool, _TAGS)),
]
