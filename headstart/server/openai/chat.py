"""`POST /v1/chat/completions`: answers to a conversation, whole or as they come."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headstart.server.errors import JsonResponse, as_api_error, body_of
from headstart.server.openai.reading import read_chat_sampling, read_salt
from headstart.server.openai.schema import ChatRequest
from headstart.server.openai.usage import TokenCount, chat_logprobs, usage_of
from headstart.server.service import Service, service_of, unless_gone
from headstart.server.sse import EventStream, frame

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, RequestOutput
    from headstart.engine.request import RequestGroup

__all__ = ["router"]

router = APIRouter()
_TEMPLATE = ("chat_template", "chat_template_kwargs", "tools")
_SWITCHES = ("add_generation_prompt", "continue_final_message")


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    prepared = await _prepare(service, body, request)
    if body.stream:
        return EventStream(_Chunks(body, prepared).events(service))
    output = await unless_gone(request, service.answer(prepared))
    return JsonResponse(_whole(body, output))


async def _prepare(service: Service, body: ChatRequest, request: Request) -> RequestGroup:
    params = service.params(read_chat_sampling(body), stream=bool(body.stream))
    options = {key: value for key in _TEMPLATE if (value := getattr(body, key)) is not None}
    switches = {key: value for key in _SWITCHES if (value := getattr(body, key)) is not None}
    if switches.get("continue_final_message"):
        switches.setdefault("add_generation_prompt", False)
    return await service.prepare_chat(
        body.messages,
        params,
        service.new_id("chatcmpl"),
        adapter=service.adapter(body.model),
        cache_salt=service.salt(request, read_salt(body)),
        priority=body.priority,
        **options,
        **switches,
    )


def _head(body: ChatRequest, name: str, kind: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": created, "model": body.model}


def _whole(body: ChatRequest, output: RequestOutput) -> dict[str, Any]:
    count = TokenCount()
    count.add(output)
    choices = [
        {
            "index": answer.index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": chat_logprobs(answer, body.top_logprobs or 0),
            "finish_reason": answer.finish_reason,
        }
        for answer in output.outputs
    ]
    head = _head(body, output.request_id, "chat.completion", int(time.time()))
    return head | {"choices": choices, "usage": usage_of([count])}


class _Chunks:
    """The events of one streamed answer."""

    def __init__(self, body: ChatRequest, request: RequestGroup) -> None:
        self._body = body
        self._request = request
        self._head = _head(body, request.request_id, "chat.completion.chunk", int(time.time()))
        self._wants_usage = body.stream_options is not None and body.stream_options.include_usage
        self._begun: set[int] = set()

    async def events(self, service: Service) -> AsyncGenerator[bytes]:
        """The stream, up to the line that says that it is done, or why it is not."""
        count = TokenCount()
        try:
            async for output in service.run(self._request):
                count.add(output)
                for answer in output.outputs:
                    yield frame(self._chunk([self._choice(answer)]))
        except Exception as error:
            yield frame(body_of(as_api_error(error)))
            return
        if self._wants_usage:
            yield frame(self._chunk([], usage_of([count])))
        yield frame("[DONE]")

    def _chunk(self, choices: list[Any], usage: dict[str, Any] | None = None) -> dict[str, Any]:
        told = self._head | {"choices": choices}
        return told | {"usage": usage} if self._wants_usage else told

    def _choice(self, answer: CompletionOutput) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": answer.text}
        if answer.index not in self._begun:
            self._begun.add(answer.index)
            delta = {"role": "assistant", **delta}
        return {
            "index": answer.index,
            "delta": delta,
            "logprobs": chat_logprobs(answer, self._body.top_logprobs or 0),
            "finish_reason": answer.finish_reason,
        }
