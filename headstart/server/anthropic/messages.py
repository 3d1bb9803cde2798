"""`POST /v1/messages` and `/v1/messages/count_tokens`.

A streamed message:

    message_start
      content_block_start  content_block_delta ...  content_block_stop     for each block
    message_delta  message_stop

A content block is text, thinking or the use of a tool. `ping` may come anywhere.

Every full block of every prompt is cached, with or without breakpoints. Until the time to live of a
breakpoint expires, the cached blocks before the breakpoint are evicted after all other blocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress, count, islice
from operator import ne
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.errors import RequestError
from headstart.server.answers import Part, join
from headstart.server.anthropic.schema import (
    Block,
    CountTokensRequest,
    Marked,
    MessageParam,
    MessagesRequest,
    ToolDefinition,
    ToolResultBlock,
    count_blocks,
)
from headstart.server.chats import ChatCall, PreparedChat, prepare_chat, read_many
from headstart.server.errors import ApiError, JsonResponse, body_of
from headstart.server.service import Service, cancel_on_disconnect, service_of
from headstart.server.sse import AnswerEvents, EventStream, Usage, frame, read_whole
from headstart.server.tools import report_hosted

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, RequestOutput


MAX_BREAKPOINTS = 4
_SECONDS = {"5m": 300.0, "1h": 3600.0}


class Breakpoint(NamedTuple):
    """The end of a prefix to retain for `ttl`.

    messages: the messages up to the breakpoint; None for the whole conversation.
    """

    ttl: str
    messages: list[MessageParam] | None


def read_breakpoints(body: CountTokensRequest) -> list[Breakpoint]:
    """Return the breakpoints in order; the last may be the request's field `cache_control`.

    Raises ApiError for more than four, or for a longer time to live after a shorter one.
    """
    points = list(islice(_read_marks(body), MAX_BREAKPOINTS + 1))
    ttls = [point.ttl for point in points]
    if len(points) > MAX_BREAKPOINTS:
        text = f"more than {MAX_BREAKPOINTS} blocks have cache_control; allowed: {MAX_BREAKPOINTS}"
        raise ApiError(400, text, param="cache_control")
    if ttls != sorted(ttls):  # "1h" before "5m"
        text = 'a cache_control with ttl "1h" comes after one with "5m"; allowed: "1h" before "5m"'
        raise ApiError(400, text, param="cache_control")
    return points


def _read_marks(body: CountTokensRequest) -> Iterator[Breakpoint]:
    system = [] if isinstance(body.system, str) else body.system or []
    tools = [tool for tool in body.tools or () if isinstance(tool, ToolDefinition)]
    for marked in (*tools, *system):
        if marked.cache_control is not None:
            # Chat templates need a message, so an empty message follows the tools and system text.
            yield Breakpoint(marked.cache_control.ttl, [MessageParam(role="user", content="")])
    for index, message in enumerate(body.messages):
        content = message.content if isinstance(message.content, list) else []
        for end, block in enumerate(content, 1):
            parts = block.content if isinstance(block, ToolResultBlock) else None
            blocks: list[Block | Marked] = [*(parts if isinstance(parts, list) else ()), block]
            for candidate in blocks:
                if isinstance(candidate, Marked) and candidate.cache_control is not None:
                    last = MessageParam.model_construct(role=message.role, content=content[:end])
                    before = [*body.messages[:index], last]
                    is_end = len(before) == len(body.messages) and end == len(content)
                    yield Breakpoint(candidate.cache_control.ttl, None if is_end else before)
    if body.cache_control is not None:
        yield Breakpoint(body.cache_control.ttl, None)


def created_tokens(lengths: Mapping[str, int], usage: Usage) -> dict[str, int]:
    """Return how many tokens before breakpoints were computed and cached, by time to live.

    lengths: the number of prompt tokens up to the last breakpoint with each time to live.

    >>> created_tokens({"1h": 100, "5m": 160}, Usage(prompts={"a": (200, 64)}))
    {'1h': 36, '5m': 60}
    """
    # The last token of a prompt is always computed, even if its block is cached.
    is_whole = 0 < usage.cached == usage.prompt - 1
    stored = usage.prompt if is_whole else usage.cached
    long_tokens = max(0, lengths.get("1h", 0) - stored)
    return {"1h": long_tokens, "5m": max(0, lengths.get("5m", 0) - stored - long_tokens)}


async def apply_breakpoints(
    service: Service, body: CountTokensRequest, call: ChatCall, prepared: PreparedChat
) -> dict[str, int]:
    """Retain a prompt's blocks up to each breakpoint, for the breakpoint's time to live.

    Return, by time to live, the number of tokens up to the last breakpoint; tokens after the last
    full block are not counted. To find the position of a breakpoint in the prompt, tokenize the
    messages up to the breakpoint separately, and count the common tokens.
    """
    lengths: dict[str, int] = {}
    if not prepared.request.params.is_stored:
        return lengths
    read = partial(read_breakpoints, body)
    points = await read_many(count_blocks(body.messages), read)
    token_ids = prepared.request.prompt_token_ids
    full = len(token_ids) - len(token_ids) % service.llm.block_size
    for ttl, before in dict(points).items():  # the last breakpoint of each time to live
        length = full
        if before is not None:
            shortened = body.model_copy(update={"messages": before})
            messages = await read_many(count_blocks(before), shortened.read_messages)
            unfinished = {"add_generation_prompt": False, "continue_final_message": False}
            template = {**call.template, **unfinished}
            prefix_call = replace(call, messages=messages, template=template)
            length = min(full, await _count_common(service, prefix_call, token_ids))
        lengths[ttl] = length
        prepared.request.retain(length, _SECONDS[ttl])
    return lengths


async def _count_common(service: Service, call: ChatCall, token_ids: Sequence[int]) -> int:
    """Return the length of the common prefix of a call's prompt and `token_ids`.

    Return 0 if the chat template refuses the call.
    """
    try:
        prefix_id = service.new_id("part")
        prepared = await prepare_chat(service, call, prefix_id, stream=False, will_run=False)
    except RequestError:
        return 0
    prefix = prepared.request.prompt_token_ids
    # A prompt may have a hundred thousand tokens, so the comparison runs in C.
    differ = compress(count(), map(ne, prefix, token_ids))
    return next(differ, min(len(prefix), len(token_ids)))


router = APIRouter()


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    call = await _read_call(service, body, request)
    prepared = await prepare_chat(service, call, service.new_id("msg"), stream=body.stream)
    lengths = await apply_breakpoints(service, body, call, prepared)
    message = _Message(body, prepared, lengths, request.state.request_id)
    if body.stream:
        return EventStream(message.stream(service.run(prepared.request)))
    output = await cancel_on_disconnect(request.receive, service.answer(prepared.request))
    return await read_whole([output], lambda: JsonResponse(message.whole(output)))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Count the tokens of a prompt without running the model."""
    service = service_of(request)
    call = await _read_call(service, body, request)
    prepared = await prepare_chat(service, call, service.new_id("count"), stream=False)
    return JsonResponse({"input_tokens": len(prepared.request.prompt_token_ids)})


async def _read_call(service: Service, body: CountTokensRequest, request: Request) -> ChatCall:
    def read() -> list[dict[str, Any]]:
        report_hosted(body.tools, request, "custom")
        read_breakpoints(body)  # refuse wrong breakpoints before any work
        return body.read_messages()

    messages = await read_many(count_blocks(body.messages), read)
    return body.as_call(messages, service.salt(request, body.salt))


_BLOCKS: dict[str, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Empty content blocks by the kind of their parts."""
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of a delta and the field with its text, by the kind of part."""


class _Message(AnswerEvents):
    """One message, whole or as events."""

    def __init__(
        self,
        body: MessagesRequest,
        prepared: PreparedChat,
        lengths: Mapping[str, int],
        request_id: str,
    ) -> None:
        """Begin a message. lengths: see `created_tokens`. request_id: for errors."""
        self._prepared = prepared
        self._parser = prepared.dialect.parser()
        self._usage = Usage()
        self._lengths = lengths
        self._request_id = request_id
        message_id = prepared.request.request_id
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": body.model}
        self._max_tokens = body.max_tokens
        self._index = -1  # index of the last content block
        self._open: str | None = None  # kind of the parts of the open content block

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        self._usage.add(output)
        [answer] = output.outputs
        parts = join(self._parser.feed(answer.text, is_last=True), whole_calls=True)
        blocks = []
        for part in parts:
            block = self._block(part)
            if part.kind == "call":
                block["input"] = _read_input(part.text)
            else:
                block[_DELTAS[part.kind][1]] = part.text
            blocks.append(block)
        return self._head | {"content": blocks, **self._stop(answer), "usage": self._count()}

    def _block(self, part: Part) -> dict[str, Any]:
        if part.kind != "call":
            return dict(_BLOCKS[part.kind])
        call_id = self._prepared.dialect.calls.new_id("toolu_")
        return {"type": "tool_use", "id": call_id, "name": part.name, "input": {}}

    def _count(self) -> dict[str, Any]:
        """Return the usage. `input_tokens` are computed tokens after the last breakpoint."""
        usage = self._usage
        created = created_tokens(self._lengths, usage)
        total = sum(created.values())
        return {
            "input_tokens": usage.prompt - usage.cached - total,
            "cache_read_input_tokens": usage.cached,
            "cache_creation_input_tokens": total,
            "cache_creation": {
                "ephemeral_5m_input_tokens": created["5m"],
                "ephemeral_1h_input_tokens": created["1h"],
            },
            "output_tokens": usage.completion,
            "service_tier": "standard",
        }

    def _stop(self, answer: CompletionOutput) -> dict[str, Any]:
        text = answer.stop_reason if isinstance(answer.stop_reason, str) else None
        if answer.finish_reason == "length":
            is_full = self._usage.completion < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif text is not None:
            reason = "stop_sequence"
        else:
            reason = "tool_use" if self._parser.has_call else "end_turn"
        return {"stop_reason": reason, "stop_sequence": text}

    def read(self, output: RequestOutput) -> Iterator[bytes]:
        is_first = not self._usage.prompts
        self._usage.add(output)
        if is_first:
            usage = self._count() | {"output_tokens": 0}
            unset = {"stop_reason": None, "stop_sequence": None}
            message: dict[str, Any] = self._head | {"content": [], **unset, "usage": usage}
            yield _event("message_start", message=message)
            yield _event("ping")
        for answer in output.outputs:
            is_last = answer.finish_reason is not None
            for part in self._parser.feed(answer.text, is_last=is_last):
                if part.name or part.kind != self._open:
                    yield from self._close()
                    self._index += 1
                    self._open = part.kind
                    block = self._block(part)
                    yield _event("content_block_start", index=self._index, content_block=block)
                if part.text:
                    kind, field = _DELTAS[part.kind]
                    yield self._delta({"type": kind, field: part.text})
            if is_last:
                yield from self._close()
                yield _event("message_delta", delta=self._stop(answer), usage=self._count())
                yield _event("message_stop")

    def _close(self) -> Iterator[bytes]:
        if self._open == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    async def end(self) -> bytes:
        return b""

    async def fail(self, error: ApiError) -> bytes:
        return frame(body_of(error, "/v1/messages", self._request_id), "error")


def _event(kind: str, **data: Any) -> bytes:
    return frame({"type": kind, **data}, kind)


def _read_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; an empty object if they are incomplete or not an object."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
