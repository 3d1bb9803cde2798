"""`POST /v1/messages`: the next message of a conversation; and the length of its prompt.

A streamed message:

    message_start
      content_block_start  content_block_delta ...  content_block_stop     for each block
    message_delta  message_stop

A block is text, thinking or the use of a tool. `ping` may come anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.answers import Part, join
from headstart.server.anthropic.breakpoints import (
    apply_breakpoints,
    created_tokens,
    read_breakpoints,
)
from headstart.server.anthropic.schema import CountTokensRequest, MessagesRequest, count_blocks
from headstart.server.chats import ChatCall, PreparedChat, prepare_chat, read_many
from headstart.server.errors import ApiError, JsonResponse, body_of, telling_form_as
from headstart.server.hosted import leave_out_hosted
from headstart.server.service import Service, service_of, unless_gone
from headstart.server.sse import AnswerEvents, EventStream, frame, send_whole
from headstart.server.usage import Usage

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, RequestOutput

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    with telling_form_as("output_config.format"):
        call = await _read_call(service, body, request)
    form = "tools" if call.tools.is_forced else "output_config.format"
    with telling_form_as(form, {"stop": "stop_sequences"}):
        prepared = await prepare_chat(service, call, service.new_id("msg"), stream=body.stream)
    marked = await apply_breakpoints(service, body, call, prepared)
    message = _Message(body, prepared, marked, request.state.request_id)
    if body.stream:
        return EventStream(message.stream(service.run(prepared.request)))
    output = await unless_gone(request.receive, service.answer(prepared.request))
    return await send_whole([output], lambda: message.whole(output))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Count the tokens of a prompt; nothing is computed."""
    service = service_of(request)
    call = await _read_call(service, body, request)
    prepared = await prepare_chat(service, call, service.new_id("count"), stream=False)
    return JsonResponse({"input_tokens": len(prepared.request.prompt_token_ids)})


async def _read_call(service: Service, body: CountTokensRequest, request: Request) -> ChatCall:
    def read() -> list[dict[str, Any]]:
        leave_out_hosted(body.tools, request, "custom")
        read_breakpoints(body)  # refuses wrong ones before any work
        return body.read_messages()

    return ChatCall(
        model=body.model,
        messages=await read_many(count_blocks(body.messages), read),
        sampling=body.read_sampling(),
        salt=service.salt(request, body.salt),
        retention=body.retention,
        priority=body.priority,
        tools=body.read_tools(),
        template=body.read_template(),
    )


_BLOCKS: dict[str, dict[str, Any]] = {
    "content": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
"""Empty blocks, by the kind of part that they have."""
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of the delta with a part, and the field of its text."""


class _Message(AnswerEvents):
    """One message, whole or as events."""

    def __init__(
        self,
        body: MessagesRequest,
        prepared: PreparedChat,
        marked: Mapping[str, int],
        request_id: str,
    ) -> None:
        """Begin a message. marked: see `created_tokens`. request_id: of the headers and the log."""
        self._prepared = prepared
        self._parser = prepared.parser()
        self._usage = Usage()
        self._marked = marked
        self._request_id = request_id
        name = prepared.request.request_id
        self._head = {"id": name, "type": "message", "role": "assistant", "model": body.model}
        self._max_tokens = body.max_tokens
        self._index = -1  # of the block that was begun last
        self._open: str | None = None  # the kind of parts in the open block

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """Return the message at once."""
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
        """Return the empty block that a part begins."""
        if part.kind != "call":
            return dict(_BLOCKS[part.kind])
        name = self._prepared.calls.new_id("toolu_")
        return {"type": "tool_use", "id": name, "name": part.name, "input": {}}

    def _count(self) -> dict[str, Any]:
        return self._usage.for_messages(created_tokens(self._marked, self._usage))

    def _stop(self, answer: CompletionOutput) -> dict[str, Any]:
        """Return the reason why the answer ended."""
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
    """Return arguments as an object; a call that breaks off, or was not JSON, has none."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
