"""`/v1/responses`: answers as items, whole or as they come, and those that were kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.chats import ChatCall, are_many, prepare_chat, read_many
from headstart.server.errors import ApiError, JsonResponse, telling_form_as
from headstart.server.hosted import leave_out_hosted
from headstart.server.responses.answer import ResponseAnswer
from headstart.server.responses.items import Item, ItemReference, as_items
from headstart.server.responses.schema import InputTokensRequest, ResponsesRequest, extend
from headstart.server.service import Service, service_of, unless_gone
from headstart.server.sse import EventStream, read_whole
from headstart.server.stores import ResponseStore, StoredResponse
from headstart.validation import describe, shorten

__all__ = ["router"]

router = APIRouter(prefix="/v1/responses")
_FIELDS = {"max_tokens": "max_output_tokens"}
_HALF_AN_HOUR = 1800.0  # seconds
_QUERY = {
    "stream": ("false",),
    "include": ("reasoning.encrypted_content",),
    "include_obfuscation": ("false", "true"),
}
"""Query parameters of a stored response, which change nothing here."""
_Messages = tuple[list[dict[str, Any]], list[str]]  # and the field that each came from


@router.post("")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, which may continue an earlier response."""
    service = service_of(request)
    messages, places = await _read_messages(body, request)
    with telling_form_as("text.format"):
        call = _make_call(service, body, request, (messages, places))
    if body.prompt_cache_options is not None and body.prompt_cache_options.ttl is not None:
        call = replace(call, retention=max(call.retention, _HALF_AN_HOUR))
    name = service.new_id("resp")
    with telling_form_as("tools" if call.tools.is_forced else "text.format", _FIELDS):
        prepared = await prepare_chat(service, call, name, stream=bool(body.stream))
    store, tenant = _store(request), _tenant(request)

    def keep(response: bytes, items: list[dict[str, Any]]) -> None:
        if body.store is not False and not body.no_store:
            after, _ = extend(messages, as_items(items))
            store.add(name, response, after, tenant)

    make = partial(ResponseAnswer, service, body, prepared, keep)
    answer = await asyncio.to_thread(make) if body.tools or body.text else make()
    if body.stream:
        return EventStream(answer.stream(service.run(prepared.request)))
    output = await unless_gone(request.receive, service.answer(prepared.request))
    whole = partial(answer.whole, output)
    is_long = answer.is_long or are_many(len(messages))
    response = await (asyncio.to_thread(whole) if is_long else read_whole([output], whole))
    return Response(response, media_type=JsonResponse.media_type)


async def _read_messages(body: InputTokensRequest, request: Request) -> _Messages:
    """Return the conversation without its instructions. Raises ApiError."""
    leave_out_hosted(body.tools, request, "function")
    earlier = body.previous_response_id
    before = _find(request, earlier, "previous_response_id").messages if earlier else ()
    items = body.input if isinstance(body.input, list) else []
    if any(isinstance(item, ItemReference) for item in items):
        items = await asyncio.to_thread(_resolve, items, _store(request), _tenant(request))
        body = body.model_copy(update={"input": items})
    return await read_many(len(items), partial(body.read_messages, before))


def _resolve(items: list[Item], store: ResponseStore, tenant: str | None) -> list[Item]:
    """Return the items with those that references name in their places. Raises ApiError."""
    ids = {item.id for item in items if isinstance(item, ItemReference)}
    stored = store.find_items(ids, tenant)
    resolved = []
    for place, item in enumerate(items):
        if isinstance(item, ItemReference):
            found = stored.get(item.id)
            if found is None:
                param = f"input[{place}].id"
                told = f"{param}: the item {describe(item.id)} is not stored here, or not any more"
                raise ApiError(404, told, param=param)
            [item] = as_items([found])
        resolved.append(item)
    return resolved


def _make_call(
    service: Service,
    body: InputTokensRequest,
    request: Request,
    conversation: _Messages,
) -> ChatCall:
    messages, places = conversation
    if body.instructions:
        messages = [{"role": "system", "content": body.instructions}, *messages]
        places = ["instructions", *places]
    return ChatCall(
        model=body.model,
        messages=messages,
        places=places,
        sampling=body.read_sampling(),
        salt=service.salt(request, body.salt),
        retention=body.retention,
        priority=body.priority,
        tools=body.read_tools(),
        template=body.read_template(),
    )


@router.post("/input_tokens")
async def count_input_tokens(body: InputTokensRequest, request: Request) -> Response:
    """Count the tokens of a prompt; nothing is computed."""
    service = service_of(request)
    messages = await _read_messages(body, request)
    call = _make_call(service, body, request, messages)
    prepared = await prepare_chat(service, call, service.new_id("count"), stream=False)
    count = len(prepared.request.prompt_token_ids)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


@router.post("/compact", include_in_schema=False)
async def compact_response(request: Request) -> Response:
    """Refuse: conversations are not compacted. Clients would send a 501 again."""
    raise ApiError(404, "conversations are not compacted here; send a shorter input")


@router.get("/{name}")
async def show_response(name: str, request: Request) -> Response:
    """Show a stored response."""
    _check_query(request)
    return Response(_find(request, name, None).response, media_type=JsonResponse.media_type)


@router.delete("/{name}")
async def delete_response(name: str, request: Request) -> Response:
    """Forget a response."""
    if not _store(request).remove(name, _tenant(request)):
        raise _unknown(name, None)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


def _check_query(request: Request) -> None:
    """Raise ApiError for what would change how a response is told."""
    for given, value in request.query_params.multi_items():
        name = given.removesuffix("[]")  # as OpenAI's clients write lists
        if value not in _QUERY.get(name, ()):
            told = "a response that was kept is told whole, with all that is known of it"
            if name in _QUERY:
                told += f"; allowed as {name}: {', '.join(_QUERY[name])}"
            raise ApiError(
                400, f"{shorten(name)} is {shorten(repr(value))}: {told}", param=shorten(name)
            )


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def _tenant(request: Request) -> str | None:
    """Return the salt that owns the responses: that of bodies without one."""
    return service_of(request).salt(request, None)


def _find(request: Request, name: str, param: str | None) -> StoredResponse:
    found = _store(request).get(name, _tenant(request))
    if found is None:
        raise _unknown(name, param)
    return found


def _unknown(name: str, param: str | None) -> ApiError:
    return ApiError(
        404,
        f"the response {name!r} is not kept here, or not any more",
        param=param,
        code="previous_response_not_found" if param else None,
    )
