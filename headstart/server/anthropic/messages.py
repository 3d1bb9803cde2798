"""`POST /v1/messages`: the next message of a conversation; and the length of its prompt.

A streamed message:

    message_start
      content_block_start  content_block_delta ...  content_block_stop     for each block
    message_delta  message_stop

A block is text, thinking or the use of a tool. `ping` may come anywhere.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.answers.formats import CallFormat
from headstart.server.answers.parser import (
    AnswerParser,
    Call,
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    gather,
)
from headstart.server.anthropic.conversation import (
    count_blocks,
    read_messages,
    read_sampling,
    read_template,
    read_tools,
)
from headstart.server.anthropic.schema import CountTokensRequest, MessagesRequest
from headstart.server.anthropic.usage import Usage, apply_breakpoints, read_breakpoints
from headstart.server.bodies import read_retention, read_salt
from headstart.server.chats import ChatCall, PreparedChat, prepare_chat, read_many
from headstart.server.errors import JsonResponse, as_api_error, body_of, telling_form_as
from headstart.server.hosted import leave_out_hosted
from headstart.server.service import Service, service_of, unless_gone
from headstart.server.sse import EventStream, frame, read_whole, tell_whole

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, RequestOutput

__all__ = ["MessageEvents", "router", "stop_of"]

router = APIRouter()
_FIELDS = {"stop": "stop_sequences"}


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    with telling_form_as("output_config.format"):
        call = await _read_call(service, body, request, read_sampling(body), body.priority)
    with telling_form_as("tools" if call.tools.is_forced else "output_config.format", _FIELDS):
        prepared = await prepare_chat(service, call, service.new_id("msg"), stream=body.stream)
    usage = await apply_breakpoints(service, body, call, prepared)
    name = prepared.request.request_id
    head = {"id": name, "type": "message", "role": "assistant", "model": body.model}
    if body.stream:
        events = MessageEvents(prepared, usage, head, body.max_tokens)
        return EventStream(events.events(service, request.state.request_id))
    output = await unless_gone(request.receive, service.answer(prepared.request))
    return await tell_whole([output], lambda: head | _whole(body, prepared, output, usage))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensRequest, request: Request) -> Response:
    """Count the tokens of a prompt; nothing is computed."""
    service = service_of(request)
    call = await _read_call(service, body, request, {"max_tokens": None})
    prepared = await prepare_chat(service, call, service.new_id("count"), stream=False)
    return JsonResponse({"input_tokens": len(prepared.request.prompt_token_ids)})


async def _read_call(
    service: Service,
    body: CountTokensRequest,
    request: Request,
    sampling: dict[str, Any],
    priority: int = 0,
) -> ChatCall:
    def read() -> list[dict[str, Any]]:
        leave_out_hosted(body.tools, request, "custom")
        read_breakpoints(body)  # which are refused before any work
        return read_messages(body)

    return ChatCall(
        model=body.model,
        messages=await read_many(count_blocks(body.messages), read),
        sampling=sampling,
        salt=service.salt(request, read_salt(body)),
        retention=read_retention(body),
        priority=priority,
        tools=read_tools(body),
        template=read_template(body),
    )


def _whole(
    body: MessagesRequest, prepared: PreparedChat, output: RequestOutput, usage: Usage
) -> dict[str, Any]:
    usage.count.add(output)
    [answer] = output.outputs
    parser = prepared.parser()
    parts = gather([*parser.feed(answer.text), *parser.finish()])
    has_call = any(isinstance(part, Call) for part in parts)
    is_full = usage.count.completion < body.max_tokens
    told = stop_of(answer, has_call=has_call, is_full=is_full)
    return {"content": _blocks(prepared.calls, parts), **told, "usage": usage.told()}


def _blocks(form: CallFormat, parts: Iterable[Content | Reasoning | Call]) -> list[Any]:
    blocks: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Content):
            blocks.append({"type": "text", "text": part.text})
        elif isinstance(part, Reasoning):
            blocks.append({"type": "thinking", "thinking": part.text, "signature": ""})
        else:
            name = form.new_id("toolu_")
            given = _read_input(part.arguments)
            blocks.append({"type": "tool_use", "id": name, "name": part.name, "input": given})
    return blocks


def _read_input(arguments: str) -> dict[str, Any]:
    """Return arguments as an object; a call that breaks off, or was not JSON, has none."""
    try:
        given = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}


def stop_of(answer: CompletionOutput, *, has_call: bool, is_full: bool) -> dict[str, Any]:
    """Return the reason why an answer ended; `is_full`: the context had no room for more."""
    text = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    if answer.finish_reason == "length":
        reason = "model_context_window_exceeded" if is_full else "max_tokens"
    elif text is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if has_call else "end_turn"
    return {"stop_reason": reason, "stop_sequence": text}


class MessageEvents:
    """The events of one message. `head` is the message without its content, stop and usage."""

    def __init__(
        self, prepared: PreparedChat, usage: Usage, head: dict[str, Any], max_tokens: int
    ) -> None:
        self._prepared = prepared
        self._usage = usage
        self._head = head
        self._max_tokens = max_tokens
        self._index = -1  # of the block that was begun last
        self._open: type[Part] | None = None  # what the open block is made of
        self._has_call = False

    async def events(self, service: Service, request_id: str) -> AsyncGenerator[bytes]:
        """Yield the events, up to the last or an error.

        request_id: as the answer's headers and the log have it.
        """
        parser = self._prepared.parser()
        is_first = True
        try:
            async with aclosing(service.run(self._prepared.request)) as outputs:
                async for output in outputs:
                    self._usage.count.add(output)
                    if is_first:
                        yield self._start()
                        yield _event("ping")
                        is_first = False
                    for event in await read_whole([output], partial(self._read, output, parser)):
                        yield event
        except Exception as error:
            told = body_of(as_api_error(error), "/v1/messages", request_id)
            yield frame(told, "error")

    def _read(self, output: RequestOutput, parser: AnswerParser) -> list[bytes]:
        """Return the events of an output."""
        return [event for answer in output.outputs for event in self._told(answer, parser)]

    def _told(self, answer: CompletionOutput, parser: AnswerParser) -> Iterator[bytes]:
        parts = parser.feed(answer.text)
        if answer.finish_reason is not None:
            parts += parser.finish()
        for part in parts:
            yield from self._tell(part)
        if answer.finish_reason is not None:
            yield from self._finish(answer)

    def _start(self) -> bytes:
        usage = self._usage.told() | {"output_tokens": 0}
        unset: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event("message_start", message={**self._head, **unset})

    def _finish(self, answer: CompletionOutput) -> Iterator[bytes]:
        yield from self._close()
        usage = self._usage.told()
        is_full = self._usage.count.completion < self._max_tokens
        delta = stop_of(answer, has_call=self._has_call, is_full=is_full)
        yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")

    def _tell(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, CallBegin):
            self._has_call = True
            name = self._prepared.calls.new_id("toolu_")
            block = {"type": "tool_use", "id": name, "name": part.name, "input": {}}
            yield from self._begin(CallArguments, block)
        elif isinstance(part, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Content):
            if self._open is not Content:
                yield from self._begin(Content, {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": part.text})
        else:
            if self._open is not Reasoning:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                yield from self._begin(Reasoning, block)
            yield self._delta({"type": "thinking_delta", "thinking": part.text})

    def _begin(self, kind: type[Part], block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        self._index += 1
        self._open = kind
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open is Reasoning:
            yield self._delta({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
        self._open = None

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **data: Any) -> bytes:
    return frame({"type": kind, **data}, kind)
