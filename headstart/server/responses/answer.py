"""One response as it grows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from headstart.server.chats import PreparedChat
from headstart.server.counting import TokenCount
from headstart.server.errors import ApiError, JsonResponse, as_api_error
from headstart.server.long_answers import read_whole, spell
from headstart.server.responses.items import Event, OutputItems
from headstart.server.responses.schema import ResponsesRequest
from headstart.server.responses.tools import call_kinds
from headstart.server.service import Service
from headstart.server.sse import frame

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput

__all__ = ["ResponseAnswer"]

_AS_ASKED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
_LONG = 1 << 16  # bytes
_TOLD = {*_AS_ASKED, "reasoning", "text", "tool_choice", "tools"}  # of a request by its response


class ResponseAnswer:
    """Reads a request's outputs into items, and tells the response at any time.

    What it tells of its request may be megabytes of tools and a form: it is spelled once.
    """

    def __init__(self, service: Service, body: ResponsesRequest, prepared: PreparedChat) -> None:
        """Not for the event loop if there are tools or a form, which may take long to spell.

        Raises ApiError for those that cannot be told again.
        """
        encodes = "reasoning.encrypted_content" in (body.include or ())
        self.built = OutputItems(prepared.calls, call_kinds(body), encodes_reasoning=encodes)
        self._service = service
        self._prepared = prepared
        self._parser = prepared.parser()
        self._count = TokenCount()
        self._status = "in_progress"
        self._error: dict[str, str] | None = None
        params = prepared.request.params
        asked = _as_asked(body)
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
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": [_tool(tool) for tool in asked.get("tools", [])],
            "text": {"format": {"type": "text"}, **asked.get("text", {})},
            "reasoning": {"effort": None, "summary": None, **asked.get("reasoning", {})},
            "truncation": "disabled",
            "service_tier": "default",
            "metadata": body.metadata or {},
            "store": body.store is not False and not body.no_store,
            **{name: asked.get(name) for name in _AS_ASKED},
        }
        self._head = b"".join(spell(head))[:-1] + b","  # `asked` is a copy, which `spell` may empty

    @property
    def is_long(self) -> bool:
        """Whether to tell it is not for the event loop."""
        return len(self._head) > _LONG

    def read(self, output: RequestOutput) -> list[Event]:
        """The events of the request's next output."""
        self._count.add(output)
        events: list[Event] = []
        for answer in output.outputs:
            parts = self._parser.feed(answer.text)
            if answer.finish_reason is not None:
                parts += self._parser.finish()
                self._status = "incomplete" if answer.finish_reason == "length" else "completed"
            for part in parts:
                events += self.built.add(part)
            if answer.finish_reason is not None:
                events += self.built.close(self._status)
        return events

    def told(self) -> bytes:
        """The response by now, as JSON."""
        is_over = self._status != "in_progress"
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        more = {
            "status": self._status,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "error": self._error,
            "incomplete_details": reason,
            "output": self.built.items,
            "usage": self._usage() if is_over else None,
        }
        return self._head + bytes(JsonResponse(more).body)[1:]

    def _usage(self) -> dict[str, Any]:
        count = self._count
        is_stored = self._prepared.request.params.is_stored
        full = count.prompt - count.prompt % self._service.llm.engine.config.block_size
        return {
            "input_tokens": count.prompt,
            "input_tokens_details": {
                "cached_tokens": count.cached,
                "cache_write_tokens": max(0, full - count.cached) if is_stored else 0,
            },
            "output_tokens": count.completion,
            "output_tokens_details": {"reasoning_tokens": self._count_reasoning()},
            "total_tokens": count.prompt + count.completion,
        }

    def _count_reasoning(self) -> int:
        """Its tokens as the tokenizer spells them, which may not be those that were sampled."""
        texts = [
            part["text"]
            for item in self.built.items
            if item["type"] == "reasoning"
            for part in item["content"]
        ]
        tokenizer = self._service.llm.tokenizer
        assert tokenizer is not None
        counts = [len(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        return min(sum(counts), self._count.completion)

    async def events(self, keep: Callable[[bytes], None]) -> AsyncGenerator[bytes]:
        """The stream, numbered; the whole response is handed to `keep` before its last event, in
        a thread."""
        number = 0
        for step in ("created", "in_progress"):
            yield _response_frame(step, self.told(), number)
            number += 1
        try:
            async with aclosing(self._service.run(self._prepared.request)) as outputs:
                async for output in outputs:
                    for event in await read_whole([output], partial(self.read, output)):
                        yield frame({**event, "sequence_number": number}, event["type"])
                        number += 1
        except Exception as error:
            self._status = "failed"
            self._error = {"code": "server_error", "message": str(as_api_error(error))}

        def end() -> bytes:  # spells reasoning once more
            told = self.told()
            if self._status in ("completed", "incomplete"):
                keep(told)
            return _response_frame(self._status, told, number)

        yield await asyncio.to_thread(end)


def _response_frame(step: str, told: bytes, number: int) -> bytes:
    """An event that has the whole response."""
    kind = f"response.{step}"
    begin = f'event: {kind}\ndata: {{"type":"{kind}","response":'
    return b"".join((begin.encode(), told, f',"sequence_number":{number}}}\n\n'.encode()))


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": None, "parameters": None, **tool} if tool["type"] == "function" else tool


def _as_asked(body: ResponsesRequest) -> dict[str, Any]:
    """What a response tells of its request."""
    try:
        return body.model_dump(mode="json", by_alias=True, exclude_none=True, include=_TOLD)
    except ValueError as error:  # pydantic writes what is nested 255 deep, and no half characters
        raise ApiError(
            400,
            "tools or text.format cannot be told in a response; allowed: JSON that is nested less "
            "than 200 deep, with names that UTF-8 can encode",
        ) from error
