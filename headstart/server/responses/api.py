"""`/v1/responses`: answers as items, whole or as they come, and those that were kept."""

from __future__ import annotations

import asyncio
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.bodies import read_retention, read_salt
from headstart.server.chats import ChatCall, are_many, prepare_chat, read_many
from headstart.server.errors import ApiError, JsonResponse, telling_form_as
from headstart.server.long_answers import read_whole
from headstart.server.responses.answer import ResponseAnswer
from headstart.server.responses.conversation import (
    extend,
    read_input,
    read_sampling,
    read_template,
    read_tools,
)
from headstart.server.responses.schema import ResponseRequest, as_items
from headstart.server.responses.store import ResponseStore, StoredResponse
from headstart.server.service import service_of, unless_gone
from headstart.server.sse import EventStream
from headstart.validation import shorten

__all__ = ["router"]

router = APIRouter(prefix="/v1/responses")
_FIELDS = {"max_tokens": "max_output_tokens"}
_QUERY = {
    "stream": ("false",),
    "include": ("reasoning.encrypted_content",),
    "include_obfuscation": ("false", "true"),
}
"""What may be asked of a response that was kept: what changes nothing here."""


@router.post("")
async def create_response(body: ResponseRequest, request: Request) -> Response:
    """Answer a conversation, which may go on from an earlier response."""
    service = service_of(request)
    earlier = body.previous_response_id
    before = _find(request, earlier, "previous_response_id").messages if earlier else ()
    given = body.input if isinstance(body.input, list) else ()
    messages = await read_many(len(given), partial(read_input, body, before))
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    with telling_form_as("text.format"):
        sampling = read_sampling(body)
    call = ChatCall(
        model=body.model,
        messages=[*system, *messages],
        sampling=sampling,
        salt=service.salt(request, read_salt(body)),
        retention=read_retention(body),
        priority=body.priority,
        tools=read_tools(body),
        template=read_template(body),
    )
    with telling_form_as("tools" if call.tools.is_forced else "text.format", _FIELDS):
        name = service.new_id("resp")
        prepared = await prepare_chat(service, call, name, stream=bool(body.stream))
    make = partial(ResponseAnswer, service, body, prepared)
    answer = await asyncio.to_thread(make) if body.tools or body.text else make()
    store, tenant = _store(request), _tenant(request)

    def keep(told: bytes) -> None:
        if body.store is not False and not body.no_store:
            after = extend(messages, as_items(answer.built.items))
            store.add(name, told, after, tenant)

    if body.stream:
        return EventStream(answer.events(keep))
    output = await unless_gone(request.receive, service.answer(prepared.request))

    def tell() -> bytes:
        answer.read(output)
        told = answer.told()
        keep(told)
        return told

    is_long = answer.is_long or are_many(len(messages))
    told = await (asyncio.to_thread(tell) if is_long else read_whole([output], tell))
    return Response(told, media_type=JsonResponse.media_type)


@router.get("/{name}")
async def show_response(name: str, request: Request) -> Response:
    """A response that was kept, whole."""
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
    """Whose responses these are: what the salt is when the body asks for none."""
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
