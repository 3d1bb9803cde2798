"""One response as it grows: its items, and the events of each step.

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
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from headstart.server.answers.formats import CallFormat
from headstart.server.answers.parser import CallArguments, CallBegin, Content, Part, Reasoning
from headstart.server.chats import PreparedChat, TokenCount
from headstart.server.encoding import encode
from headstart.server.errors import ApiError, JsonResponse, as_api_error
from headstart.server.responses.conversation import (
    CallKind,
    call_kinds,
    encode_reasoning,
    read_partial,
)
from headstart.server.responses.schema import ResponsesRequest
from headstart.server.service import Service
from headstart.server.sse import frame, read_whole

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput

__all__ = ["ResponseAnswer"]

Event = dict[str, Any]
"""An event without its number."""


class OutputItems:
    """The items so far; at most the last is open.

    kinds: of calls, by the names of tools. encodes_reasoning: True if reasoning comes as
    `encrypted_content` too.
    """

    def __init__(
        self, calls: CallFormat, kinds: Mapping[str, CallKind], *, encodes_reasoning: bool = False
    ) -> None:
        self._kinds = kinds
        self._encodes_reasoning = encodes_reasoning
        self.items: list[dict[str, Any]] = []
        self._calls = calls
        self._open: type[Part] | None = None
        self._text: list[str] = []  # of the open item

    def add(self, part: Part) -> Iterator[Event]:
        """Take a part, and yield its events."""
        if isinstance(part, CallBegin):
            yield from self._begin(CallArguments, self._call(part))
            return
        if self._open is not type(part):
            assert not isinstance(part, CallArguments)
            yield from self._begin(type(part), _texts(part))
        self._text.append(part.text)
        kind = self.items[-1]["type"]
        if kind == "custom_tool_call":
            yield from self._input()
        elif kind != "local_shell_call":
            yield self._told("delta", delta=part.text)

    def _input(self) -> Iterator[Event]:
        """Return the event of what is new in a custom tool's input."""
        item = self.items[-1]
        read = read_partial("".join(self._text)).get("input")
        if isinstance(read, str) and len(read) > len(item["input"]):
            new, item["input"] = read[len(item["input"]) :], read
            yield self._event("response.custom_tool_call_input.delta", delta=new)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item, and yield its events."""
        if self._open is None:
            return
        item, text = self.items[-1], "".join(self._text)
        item["status"] = status
        if item["type"] == "custom_tool_call":
            yield self._event("response.custom_tool_call_input.done", input=item["input"])
        elif item["type"] == "local_shell_call":
            item["action"] |= _action(text)
        elif self._open is CallArguments:
            item["arguments"] = text
            yield self._told("done", name=item["name"], arguments=text)
        else:
            item["content"] = [_part(self._open, text)]
            if self._open is Reasoning and self._encodes_reasoning:
                item["encrypted_content"] = encode_reasoning(text)
            yield self._told("done", text=text)
            yield self._part_event("done", text)
        yield {"type": "response.output_item.done", "output_index": self._index, "item": item}
        self._open = None

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _begin(self, kind: type[Part], item: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._open, self._text = kind, []
        self.items.append(item)
        told = dict(item)
        yield {"type": "response.output_item.added", "output_index": self._index, "item": told}
        if kind is not CallArguments:
            yield self._part_event("added", "")

    def _part_event(self, step: str, text: str) -> Event:
        assert self._open is not None
        part = _part(self._open, text)
        return self._event(f"response.content_part.{step}", content_index=0, part=part)

    def _told(self, step: str, **data: Any) -> Event:
        if self._open is CallArguments:
            return self._event(f"response.function_call_arguments.{step}", **data)
        if self._open is Content:
            data["logprobs"] = []
        name = "output_text" if self._open is Content else "reasoning_text"
        return self._event(f"response.{name}.{step}", content_index=0, **data)

    def _event(self, kind: str, **data: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": self._index}
        return {"type": kind, **place, **data}

    def _call(self, part: CallBegin) -> dict[str, Any]:
        kind = self._kinds.get(part.name) or CallKind("function_call", part.name)
        common = {
            "type": kind.type,
            "status": "in_progress",
            "call_id": self._calls.new_id("call_"),
        }
        if kind.type == "local_shell_call":
            return {"id": _new_id("lsh"), **common, "action": _action("")}
        common |= {"name": kind.name}
        if kind.namespace is not None:
            common |= {"namespace": kind.namespace}
        if kind.type == "custom_tool_call":
            return {"id": _new_id("ctc"), **common, "input": ""}
        return {"id": _new_id("fc"), **common, "arguments": ""}


def _action(arguments: str) -> dict[str, Any]:
    """Return the action of a call of the shell; what is no such value in its arguments is not."""
    read = read_partial(arguments)
    command, folder, timeout = (
        read.get(name) for name in ("command", "working_directory", "timeout_ms")
    )
    words = command if isinstance(command, list) else [] if command is None else [command]
    action: dict[str, Any] = {"type": "exec", "command": [str(word) for word in words], "env": {}}
    if isinstance(folder, str):
        action["working_directory"] = folder
    if isinstance(timeout, int) and not isinstance(timeout, bool):
        action["timeout_ms"] = timeout
    return action


def _texts(part: Content | Reasoning) -> dict[str, Any]:
    common: dict[str, Any] = {"status": "in_progress", "content": []}
    if isinstance(part, Content):
        return {"id": _new_id("msg"), "type": "message", "role": "assistant", **common}
    return {"id": _new_id("rs"), "type": "reasoning", "summary": [], **common}


def _part(kind: type[Part], text: str) -> dict[str, Any]:
    if kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


_AS_ASKED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
_LONG = 1 << 16  # bytes
_TOLD = {*_AS_ASKED, "reasoning", "text", "tool_choice", "tools"}  # of a request by its response


class ResponseAnswer:
    """The items of a request's outputs so far, and the response as JSON at any time.

    The repeated request may have megabytes of tools and a form, so it is spelled once.
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
        self._head = encode(head)[:-1] + b","  # `asked` is a copy

    @property
    def is_long(self) -> bool:
        """True if spelling it takes too long for the event loop."""
        return len(self._head) > _LONG

    def read(self, output: RequestOutput) -> list[Event]:
        """Return the events of the request's next output."""
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
        """Return the response so far, as JSON."""
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
        full = count.prompt - count.prompt % self._service.llm.block_size
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
    """Return an event that has the whole response."""
    kind = f"response.{step}"
    begin = f'event: {kind}\ndata: {{"type":"{kind}","response":'
    return b"".join((begin.encode(), told, f',"sequence_number":{number}}}\n\n'.encode()))


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"strict": None, "parameters": None, **tool} if tool["type"] == "function" else tool


def _as_asked(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a request that its response repeats."""
    try:
        return body.model_dump(mode="json", by_alias=True, exclude_none=True, include=_TOLD)
    except ValueError as error:  # pydantic writes what is nested 255 deep, and no half characters
        raise ApiError(
            400,
            "tools or text.format cannot be told in a response; allowed: JSON that is nested less "
            "than 200 deep, with names that UTF-8 can encode",
        ) from error
