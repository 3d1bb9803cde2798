"""`/v1/responses`: answers as items, whole or as they come, and stored ones."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.chats import ChatCall, are_many, prepare_chat, read_many
from headstart.server.errors import ApiError, JsonResponse, naming_form
from headstart.server.responses.answer import ResponseAnswer
from headstart.server.responses.items import Item, ItemReference, as_items
from headstart.server.responses.schema import InputTokensRequest, ResponsesRequest, extend
from headstart.server.service import Service, service_of, unless_gone
from headstart.server.sse import EventStream, read_whole
from headstart.server.stores import ResponseStore, StoredResponse
from headstart.server.tools import leave_out_hosted
from headstart.validation import describe, shorten

router = APIRouter(prefix="/v1/responses")
_QUERY = {
    "stream": ("false",),
    "include": ("reasoning.encrypted_content",),
    "include_obfuscation": ("false", "true"),
}
"""Query parameters of a stored response, which change nothing here."""


@router.post("")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, which may continue an earlier response."""
    service = service_of(request)
    call, messages = await _read_call(service, body, request)
    name = service.new_id("resp")
    field = "tools" if call.tools.is_forced else "text.format"
    with naming_form(field, {"max_tokens": "max_output_tokens"}):
        prepared = await prepare_chat(service, call, name, stream=bool(body.stream))
    store, tenant = _store_of(request)

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


async def _read_call(
    service: Service, body: InputTokensRequest, request: Request
) -> tuple[ChatCall, list[dict[str, Any]]]:
    """Return a conversation, and its messages without the instructions. Raises ApiError."""
    leave_out_hosted(body.tools, request, "function")
    earlier = body.previous_response_id
    before = _find(request, earlier, "previous_response_id").messages if earlier else ()
    items = body.input if isinstance(body.input, list) else []
    if any(isinstance(item, ItemReference) for item in items):
        items = await asyncio.to_thread(_resolve, items, *_store_of(request))
        body = body.model_copy(update={"input": items})
    messages, places = await read_many(len(items), partial(body.read_messages, before))
    shown = messages
    if body.instructions:
        shown = [{"role": "system", "content": body.instructions}, *messages]
        places = ["instructions", *places]
    with naming_form("text.format"):
        sampling = body.read_sampling()
    call = ChatCall(
        model=body.model,
        messages=shown,
        places=places,
        sampling=sampling,
        salt=service.salt(request, body.salt),
        retention=body.retention,
        priority=body.priority,
        tools=body.read_tools(),
        template=body.read_template(),
    )
    return call, messages


def _resolve(items: list[Item], store: ResponseStore, tenant: str | None) -> list[Item]:
    """Return the items with those that references name in their places. Raises ApiError."""
    ids = {item.id for item in items if isinstance(item, ItemReference)}
    stored = store.find_items(ids, tenant)
    resolved = []
    for place, item in enumerate(items):
        if isinstance(item, ItemReference):
            if item.id not in stored:
                param = f"input[{place}].id"
                text = f"{param}: the item {describe(item.id)} is not stored here, or not any more"
                raise ApiError(404, text, param=param)
            [item] = as_items([stored[item.id]])
        resolved.append(item)
    return resolved


@router.post("/input_tokens")
async def count_input_tokens(body: InputTokensRequest, request: Request) -> Response:
    """Count the tokens of a prompt; nothing is computed."""
    service = service_of(request)
    call, _ = await _read_call(service, body, request)
    prepared = await prepare_chat(service, call, service.new_id("count"), stream=False)
    count = len(prepared.request.prompt_token_ids)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


@router.post("/compact", include_in_schema=False)
async def compact_response(request: Request) -> Response:
    """Refuse: conversations are not compacted. Clients would send a 501 again."""
    raise ApiError(404, "conversations are not compacted here; send a shorter input")


@router.get("/{name}")
async def show_response(name: str, request: Request) -> Response:
    """Show a stored response. Raises ApiError for a query that would change it."""
    for parameter, value in request.query_params.multi_items():
        parameter = parameter.removesuffix("[]")  # as OpenAI's clients write lists
        if value not in _QUERY.get(parameter, ()):
            text = (
                f"{shorten(parameter)} is {shorten(repr(value))}; stored responses are sent whole"
            )
            if parameter in _QUERY:
                text += f"; allowed as {parameter}: {', '.join(_QUERY[parameter])}"
            raise ApiError(400, text, param=shorten(parameter))
    return Response(_find(request, name).response, media_type=JsonResponse.media_type)


@router.delete("/{name}")
async def delete_response(name: str, request: Request) -> Response:
    """Forget a response."""
    _find(request, name)
    store, tenant = _store_of(request)
    store.remove(name, tenant)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


def _store_of(request: Request) -> tuple[ResponseStore, str | None]:
    """Return the store, and the salt that owns a tenant's responses: that of bodies without one."""
    return request.app.state.responses, service_of(request).salt(request, None)


def _find(request: Request, name: str, param: str | None = None) -> StoredResponse:
    store, tenant = _store_of(request)
    response = store.get(name, tenant)
    if response is None:
        text = f"the response {name!r} is not stored here, or not any more"
        code = "previous_response_not_found" if param else None
        raise ApiError(404, text, param=param, code=code)
    return response
