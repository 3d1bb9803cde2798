"""`POST /v1/messages`: the next message of a conversation; and how long its prompt is."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.answers.formats import CallFormat
from headstart.server.answers.parts import Call, Content, Reasoning, gather
from headstart.server.anthropic.breakpoints import read_breakpoints
from headstart.server.anthropic.conversation import (
    count_blocks,
    read_messages,
    read_sampling,
    read_template,
    read_tools,
)
from headstart.server.anthropic.events import MessageEvents, stop_of
from headstart.server.anthropic.schema import CountTokensRequest, MessagesRequest
from headstart.server.anthropic.usage import Usage, apply_breakpoints
from headstart.server.bodies import read_retention, read_salt
from headstart.server.chats import ChatCall, PreparedChat, prepare_chat, read_many
from headstart.server.errors import JsonResponse, telling_form_as
from headstart.server.hosted import leave_out_hosted
from headstart.server.long_answers import tell_whole
from headstart.server.service import Service, service_of, unless_gone
from headstart.server.sse import EventStream

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput

__all__ = ["router"]

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
    """The tokens of a prompt; nothing is computed."""
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
