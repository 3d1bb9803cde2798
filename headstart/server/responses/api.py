"""`/v1/responses`: answers as items, whole or streamed, and stored responses.

Events of a streamed response:

output_item.added
  message, reasoning   content_part.added  (output_text|reasoning_text).delta ... .done
                       content_part.done
  function_call        function_call_arguments.delta ... .done
  custom_tool_call     custom_tool_call_input.delta ... .done
  local_shell_call
output_item.done
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.answers import Part
from headstart.server.bodies import encode
from headstart.server.chats import ChatCall, PreparedChat, are_many, prepare_chat, read_many
from headstart.server.errors import ApiError, JsonResponse
from headstart.server.responses.items import (
    CallKind,
    Item,
    ItemReference,
    as_items,
    encode_reasoning,
)
from headstart.server.responses.schema import InputTokensRequest, ResponsesRequest, extend
from headstart.server.service import Service, cancel_on_disconnect, service_of
from headstart.server.sse import AnswerEvents, EventStream, Usage, frame, read_whole
from headstart.server.stores import ResponseStore, StoredResponse
from headstart.server.tools import report_hosted
from headstart.validation import describe, shorten

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput


Event = dict[str, Any]
"""An event without its sequence number."""

_ITEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "message": ("msg", {"role": "assistant", "content": []}),
    "reasoning": ("rs", {"summary": [], "content": []}),
    "function_call": ("fc", {"arguments": ""}),
    "custom_tool_call": ("ctc", {"input": ""}),
    "local_shell_call": ("lsh", {}),
}
"""The prefix of an item's id, and its initial fields, by the item's type."""
_TEXTS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""The name of an item's text in the types of events, by the item's type."""


def read_partial(arguments: str) -> Mapping[str, Any]:
    """Return a call's arguments, which may be incomplete; empty if they are not an object.

    >>> read_partial('{"input": "a')
    {'input': 'a'}
    """
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _action(arguments: str) -> dict[str, Any]:
    """Return the action of a shell call, without arguments of a wrong type."""
    read = read_partial(arguments)
    command, folder, timeout = map(read.get, ("command", "working_directory", "timeout_ms"))
    words = command if isinstance(command, list) else [] if command is None else [command]
    action: dict[str, Any] = {"type": "exec", "command": [str(word) for word in words], "env": {}}
    if isinstance(folder, str):
        action["working_directory"] = folder
    if isinstance(timeout, int) and not isinstance(timeout, bool):
        action["timeout_ms"] = timeout
    return action


_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
"""Fields of a request that its response repeats unchanged; null if the request lacks them."""
_LONG = 1 << 16  # bytes


class ResponseAnswer(AnswerEvents):
    """The items of one answer, and the response that contains them, as events and as JSON.

    The response repeats fields of the request. Their size may be megabytes, so they are encoded
    only once.
    """

    def __init__(
        self,
        service: Service,
        body: ResponsesRequest,
        prepared: PreparedChat,
        store: Callable[[bytes, list[dict[str, Any]]], None],
    ) -> None:
        """Begin a response. Raises ApiError for fields that cannot be repeated in it.

        With tools or a text format this may take long, so call it in a thread. store: called with a
        complete response and its items, before the response is sent.
        """
        self._items: list[dict[str, Any]] = []  # only the last item may be open
        self._calls = prepared.dialect.calls
        self._kinds = body.call_kinds()
        self._encodes_reasoning = "reasoning.encrypted_content" in (body.include or ())
        self._open: str | None = None  # kind of the parts of the open item
        self._texts: list[str] = []  # pieces of the open item's text
        self._service = service
        self._request = prepared.request
        self._store = store
        self._parser = prepared.dialect.parser()
        self._usage = Usage()
        self._status = "in_progress"
        self._error: dict[str, str] | None = None
        self._number = 0  # sequence number of the next event
        params = prepared.request.params
        repeated = _repeat(body)
        head = {
            "id": prepared.request.request_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            "background": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": 0,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": repeated.get("tool_choice", "auto"),
            "tools": [
                {"strict": None, "parameters": None, **tool} if tool["type"] == "function" else tool
                for tool in repeated.get("tools", [])
            ],
            "text": {"format": {"type": "text"}, **repeated.get("text", {})},
            "reasoning": {"effort": None, "summary": None, **repeated.get("reasoning", {})},
            "truncation": "disabled",
            "service_tier": "default",
            "metadata": body.metadata or {},
            "store": body.store is not False and not body.no_store,
            **{name: repeated.get(name) for name in _REPEATED},
        }
        self._head = encode(head)[:-1] + b","

    @property
    def is_long(self) -> bool:
        """True if encoding the response takes too long for the event loop."""
        return len(self._head) > _LONG

    def whole(self, output: RequestOutput) -> bytes:
        """Return the whole response for a finished output, as JSON."""
        for _ in self._read(output):
            pass
        return self._finish()

    def begin(self) -> bytes:
        return self._frame_response("created") + self._frame_response("in_progress")

    def read(self, output: RequestOutput) -> Iterator[bytes]:
        for event in self._read(output):
            yield frame({**event, "sequence_number": self._number}, event["type"])
            self._number += 1

    async def end(self) -> bytes:
        # In a thread, since it tokenizes the reasoning.
        return await asyncio.to_thread(lambda: self._frame_response(self._status))

    async def fail(self, error: ApiError) -> bytes:
        self._status = "failed"
        self._error = {"code": "server_error", "message": str(error)}
        return await self.end()

    def _read(self, output: RequestOutput) -> Iterator[Event]:
        self._usage.add(output)
        for answer in output.outputs:
            is_last = answer.finish_reason is not None
            for part in self._parser.feed(answer.text, is_last=is_last):
                yield from self._add(part)
            if is_last:
                self._status = "incomplete" if answer.finish_reason == "length" else "completed"
                yield from self._close(self._status)

    def _add(self, part: Part) -> Iterator[Event]:
        if part.name or self._open != part.kind:
            yield from self._begin(part)
        if not part.text:
            return
        self._texts.append(part.text)
        item, delta = self._items[-1], part.text
        if item["type"] == "custom_tool_call":
            text = read_partial("".join(self._texts)).get("input")
            delta = text[len(item["input"]) :] if isinstance(text, str) else ""
            item["input"] += delta
        if delta and item["type"] != "local_shell_call":
            yield self._event("delta", delta=delta)

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, and yield its events."""
        if self._open is None:
            return
        item, text = self._items[-1], "".join(self._texts)
        item["status"] = status
        match item["type"]:
            case "function_call":
                item["arguments"] = text
                yield self._event("done", name=item["name"], arguments=text)
            case "custom_tool_call":
                yield self._event("done", input=item["input"])
            case "local_shell_call":
                item["action"] |= _action(text)
            case _:
                item["content"] = [self._content(text)]
                if self._open == "reasoning" and self._encodes_reasoning:
                    item["encrypted_content"] = encode_reasoning(text)
                yield self._event("done", text=text)
                yield self._content_event("done", text)
        yield self._item_event("done")
        self._open = None

    def _begin(self, part: Part) -> Iterator[Event]:
        yield from self._close()
        self._open, self._texts = part.kind, []
        fields: dict[str, Any] = {}
        kind = "message" if part.kind == "content" else "reasoning"
        if part.kind == "call":
            call = self._kinds.get(part.name) or CallKind("function_call", part.name)
            kind = call.type
            fields["call_id"] = self._calls.new_id("call_")
            if kind == "local_shell_call":
                fields["action"] = _action("")
            else:
                fields["name"] = call.name
            if call.namespace is not None:
                fields["namespace"] = call.namespace
        prefix, more = _ITEMS[kind]
        item_id = f"{prefix}_{uuid.uuid4().hex}"
        self._items.append({"id": item_id, "type": kind, "status": "in_progress", **fields, **more})
        yield self._item_event("added")
        if part.kind != "call":
            yield self._content_event("added", "")

    def _content(self, text: str) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if self._open == "content":
            extra = {"annotations": [], "logprobs": []}
        return {"type": _TEXTS[self._items[-1]["type"]], "text": text, **extra}

    def _item_event(self, step: str) -> Event:
        index, item = len(self._items) - 1, dict(self._items[-1])
        return {"type": f"response.output_item.{step}", "output_index": index, "item": item}

    def _content_event(self, step: str, text: str) -> Event:
        return self._event(step, "content_part", part=self._content(text), content_index=0)

    def _event(self, step: str, name: str = "", **data: Any) -> Event:
        """Return an event of the last item, of the type `response.{name}.{step}`.

        name: by default the item's entry in `_TEXTS`.
        """
        item = self._items[-1]
        if not name and self._open != "call":
            data |= {"content_index": 0} | ({"logprobs": []} if self._open == "content" else {})
        kind = f"response.{name or _TEXTS[item['type']]}.{step}"
        position = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return {"type": kind, **position, **data}

    def _finish(self) -> bytes:
        """Return the response so far as JSON. If the answer is complete, store the response."""
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        extra = {
            "status": self._status,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "error": self._error,
            "incomplete_details": reason,
            "output": self._items,
            "usage": self._count() if self._status != "in_progress" else None,
        }
        response = self._head + bytes(JsonResponse(extra).body)[1:]
        if self._status in ("completed", "incomplete"):
            self._store(response, self._items)
        return response

    def _count(self) -> dict[str, Any]:
        """Return the usage.

        Reasoning tokens are counted by tokenizing the reasoning again. So their number may differ
        a little from the number of tokens that the model generated.
        """
        usage = self._usage
        full = usage.prompt - usage.prompt % self._service.llm.block_size
        written = max(0, full - usage.cached) if self._request.params.is_stored else 0
        tokenizer = self._service.llm.tokenizer
        assert tokenizer is not None
        reasoning = sum(
            len(tokenizer.encode(part["text"], add_special_tokens=False))
            for item in self._items
            if item["type"] == "reasoning"
            for part in item["content"]
        )
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": written},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": min(reasoning, usage.completion)},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _frame_response(self, step: str) -> bytes:
        kind = f"response.{step}"
        begin = f'event: {kind}\ndata: {{"type":"{kind}","response":'.encode()
        end = f',"sequence_number":{self._number}}}\n\n'.encode()
        self._number += 1
        return b"".join((begin, self._finish(), end))


def _repeat(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a request that its response repeats."""
    names = {*_REPEATED, "reasoning", "text", "tool_choice", "tools"}
    try:
        return body.model_dump(mode="json", by_alias=True, exclude_none=True, include=names)
    except ValueError as error:  # nested more than 255 levels deep, or a lone surrogate
        raise ApiError(
            400,
            "tools or text.format cannot be repeated in a response; allowed: JSON that is nested "
            "less than 200 levels deep, with names that UTF-8 can encode",
        ) from error


router = APIRouter(prefix="/v1/responses")
_QUERY = {
    "stream": ("false",),
    "include": ("reasoning.encrypted_content",),
    "include_obfuscation": ("false", "true"),
}
"""Query parameters of a stored response, with their only allowed values."""


@router.post("")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, which may continue an earlier response."""
    service = service_of(request)
    call, messages = await _read_call(service, body, request)
    response_id = service.new_id("resp")
    prepared = await prepare_chat(service, call, response_id, stream=bool(body.stream))
    store, tenant = _store_of(request)

    def add(response: bytes, items: list[dict[str, Any]]) -> None:
        if body.store is not False and not body.no_store:
            after, _ = extend(messages, as_items(items))
            store.add(response_id, response, after, tenant)

    make = partial(ResponseAnswer, service, body, prepared, add)
    answer = await asyncio.to_thread(make) if body.tools or body.text else make()
    if body.stream:
        return EventStream(answer.stream(service.run(prepared.request)))
    output = await cancel_on_disconnect(request.receive, service.answer(prepared.request))
    complete = partial(answer.whole, output)
    is_long = answer.is_long or are_many(len(messages))
    response = await (asyncio.to_thread(complete) if is_long else read_whole([output], complete))
    return Response(response, media_type=JsonResponse.media_type)


async def _read_call(
    service: Service, body: InputTokensRequest, request: Request
) -> tuple[ChatCall, list[dict[str, Any]]]:
    """Return the call for a conversation, and its messages without the instructions."""
    report_hosted(body.tools, request, "function")
    previous_id = body.previous_response_id
    earlier = _find(request, previous_id, "previous_response_id").messages if previous_id else ()
    items = body.input if isinstance(body.input, list) else []
    if any(isinstance(item, ItemReference) for item in items):
        items = await asyncio.to_thread(_resolve, items, *_store_of(request))
        body = body.model_copy(update={"input": items})
    messages, paths = await read_many(len(items), partial(body.read_messages, earlier))
    chat = messages
    if body.instructions:
        chat = [{"role": "system", "content": body.instructions}, *messages]
        paths = ["instructions", *paths]
    return body.as_call(chat, service.salt(request, body.salt), paths), messages


def _resolve(items: list[Item], store: ResponseStore, tenant: str | None) -> list[Item]:
    """Return the items with references replaced by the stored items. Raises ApiError."""
    ids = {item.id for item in items if isinstance(item, ItemReference)}
    stored = store.find_items(ids, tenant)
    resolved = []
    for index, item in enumerate(items):
        if isinstance(item, ItemReference):
            if item.id not in stored:
                param = f"input[{index}].id"
                text = f"{param}: the item {describe(item.id)} is not stored"
                raise ApiError(404, text, param=param)
            [item] = as_items([stored[item.id]])
        resolved.append(item)
    return resolved


@router.post("/input_tokens")
async def count_input_tokens(body: InputTokensRequest, request: Request) -> Response:
    """Count the tokens of a prompt without running the model."""
    service = service_of(request)
    call, _ = await _read_call(service, body, request)
    prepared = await prepare_chat(service, call, service.new_id("count"), stream=False)
    count = len(prepared.request.prompt_token_ids)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


@router.post("/compact", include_in_schema=False)
async def compact_response(request: Request) -> Response:
    """Refuse to compact a conversation, with 404: clients would retry after a 501."""
    raise ApiError(404, "conversations are not compacted here; send a shorter input")


@router.get("/{name}")
async def show_response(name: str, request: Request) -> Response:
    """Show a stored response. A query that selects parts of it is refused."""
    for parameter, value in request.query_params.multi_items():
        parameter = parameter.removesuffix("[]")  # as OpenAI's clients write lists
        if value not in _QUERY.get(parameter, ()):
            text = (
                f"{shorten(parameter)} is {shorten(repr(value))}; stored responses are sent whole"
            )
            if parameter in _QUERY:
                text += f"; allowed: {', '.join(_QUERY[parameter])}"
            raise ApiError(400, text, param=shorten(parameter))
    return Response(_find(request, name).response, media_type=JsonResponse.media_type)


@router.delete("/{name}")
async def delete_response(name: str, request: Request) -> Response:
    """Delete a response."""
    _find(request, name)
    store, tenant = _store_of(request)
    store.remove(name, tenant)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


def _store_of(request: Request) -> tuple[ResponseStore, str | None]:
    """Return the store, and the tenant's salt, which identifies the owner of a response."""
    return request.app.state.responses, service_of(request).salt(request, None)


def _find(request: Request, name: str, param: str | None = None) -> StoredResponse:
    store, tenant = _store_of(request)
    response = store.get(name, tenant)
    if response is None:
        text = f"the response {name!r} is not stored"
        code = "previous_response_not_found" if param else None
        raise ApiError(404, text, param=param, code=code)
    return response
