"""From Anthropic's messages to the ones that chat templates know, which are OpenAI's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headstart.engine.structured_outputs import StructuredOutputsParams
from headstart.server.anthropic.schema import (
    Block,
    CountTokensRequest,
    DocumentBlock,
    DocumentContent,
    DocumentFile,
    DocumentText,
    DocumentUrl,
    ImageBlock,
    MessagesRequest,
    RedactedThinkingBlock,
    SearchResultBlock,
    Shown,
    TextBlock,
    ThinkingBlock,
    ToolDefinition,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from headstart.server.errors import ApiError
from headstart.server.messages import chat_content
from headstart.server.tools import Tool, ToolUse, make_tools

__all__ = ["count_blocks", "read_messages", "read_sampling", "read_template", "read_tools"]


def count_blocks(turns: Sequence[Turn]) -> int:
    """Return the number of messages and their blocks."""
    blocks = (len(turn.content) for turn in turns if isinstance(turn.content, list))
    return len(turns) + sum(blocks)


def read_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the conversation, its system text first. Raises ApiError."""
    system = [body.system] if isinstance(body.system, str) else body.system or []
    texts = [block if isinstance(block, str) else block.text for block in system]
    shown = [_text(text) for text in texts if text]
    messages = [{"role": "system", "content": chat_content(shown)}] if shown else []
    for turn in body.messages:
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages.append(_read_assistant(turn.content))
        else:
            messages += _read_user(turn.role, turn.content)
    return messages


def _read_user(role: str, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """Yield a user's messages; results of tools are separate messages, in their places."""
    parts: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock) and role == "user":
            if parts:
                yield {"role": role, "content": chat_content(parts)}
                parts = []
            content = block.content or ""
            if not isinstance(content, str):
                content = chat_content([part for shown in content for part in _parts(shown)])
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            yield result | {"is_error": True} if block.is_error else result
        elif isinstance(block, TextBlock | ImageBlock | DocumentBlock | SearchResultBlock):
            parts += _parts(block)
        else:
            raise _misplaced(role, block)
    if parts:
        yield {"role": role, "content": chat_content(parts)}


def _read_assistant(blocks: Iterable[Block]) -> dict[str, Any]:
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
            raise _misplaced("assistant", block)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | {"tool_calls": calls} if calls else message


def _misplaced(role: str, block: Block) -> ApiError:
    return ApiError(400, f"a message of role {role!r} has a block of type {block.type!r}")


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _parts(block: Shown) -> list[dict[str, Any]]:
    """Return a block as parts of a chat's message."""
    if isinstance(block, DocumentBlock):
        return _document(block)
    if isinstance(block, ImageBlock):
        url = f"data:{block.source.media_type};base64,{block.source.data}"
        return [{"type": "image_url", "image_url": {"url": url}}]
    if isinstance(block, ToolReferenceBlock):
        return [_text(f"The tool {block.tool_name} is available.")]
    if isinstance(block, SearchResultBlock):
        texts = "\n".join(text.text for text in block.content)
        return [_text(f"Search result: {block.title} ({block.source})\n{texts}")]
    return [_text(block.text)]


def _document(block: DocumentBlock) -> list[dict[str, Any]]:
    source = block.source
    head = f"Document: {block.title or 'untitled'}"
    head = f"{head}\n{block.context}" if block.context else head
    if isinstance(source, DocumentText):
        return [_text(f"{head}\n{source.data}")]
    if isinstance(source, DocumentContent):
        if isinstance(source.content, str):
            return [_text(f"{head}\n{source.content}")]
        return [_text(head), *(part for shown in source.content for part in _parts(shown))]
    where = "a file"
    if isinstance(source, DocumentUrl):
        where = source.url
    elif isinstance(source, DocumentFile):
        where = source.media_type or where
    return [_text(f"{head}\n[not shown: {where} cannot be read by this model]")]


def read_tools(body: CountTokensRequest) -> ToolUse:
    """Return the tools of a message. Raises RequestError or ApiError."""
    own = [tool for tool in body.tools or () if isinstance(tool, ToolDefinition)]
    tools = make_tools(own, lambda tool: Tool(tool.name, tool.description, tool.input_schema))
    choice = body.tool_choice
    if choice is None:
        return ToolUse(tools)
    if (choice.type == "tool") != (choice.name is not None):
        raise ApiError(400, 'tool_choice: type "tool", and no other, has a name')
    parallel = not choice.disable_parallel_tool_use
    if choice.type in ("any", "tool"):
        return ToolUse(tools, "required", choice.name, parallel)
    return ToolUse(tools, "none" if choice.type == "none" else "auto", None, parallel)


def read_template(body: CountTokensRequest) -> dict[str, Any]:
    """Return the template options; an answer that the conversation begins is continued."""
    more: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        more["enable_thinking"] = body.thinking.type == "enabled"
    if body.output_config is not None and body.output_config.effort is not None:
        more["reasoning_effort"] = body.output_config.effort
    options: dict[str, Any] = {"chat_template_kwargs": more} if more else {}
    if body.messages and body.messages[-1].role == "assistant":
        options |= {"continue_final_message": True, "add_generation_prompt": False}
    return options


def read_sampling(body: MessagesRequest) -> dict[str, Any]:
    """Return the sampling of an answer. Raises RequestError."""
    form = body.output_config.format if body.output_config is not None else None
    return {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "structured_outputs": form
        and StructuredOutputsParams(json=form.schema_, disable_any_whitespace=True),
        **body.cache_sampling,
    }
