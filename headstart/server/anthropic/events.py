"""A streamed message as Anthropic's clients read it.

    message_start
      content_block_start  content_block_delta ...  content_block_stop     for each block
    message_delta  message_stop

A block is text, thinking or the use of a tool. `ping` may come anywhere.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from headstart.server.answers.parser import AnswerParser
from headstart.server.answers.parts import CallArguments, CallBegin, Content, Part, Reasoning
from headstart.server.anthropic.usage import Usage
from headstart.server.chats import PreparedChat
from headstart.server.errors import as_api_error, body_of
from headstart.server.long_answers import read_whole
from headstart.server.service import Service
from headstart.server.sse import frame

if TYPE_CHECKING:
    from headstart.engine.outputs import CompletionOutput, RequestOutput

__all__ = ["MessageEvents", "stop_of"]


def stop_of(answer: CompletionOutput, *, has_call: bool, is_full: bool) -> dict[str, Any]:
    """Why an answer ended; `is_full`: there was no room for more, whatever it asked for."""
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
        """The stream, up to its last event or the one that says why it failed.

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
        """The events of what is new in the answer."""
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
