"""Whole answers, and streams of server-sent events.

Long answers are parsed and encoded in a thread, so that other streams do not wait for them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from headstart.server.bodies import encode
from headstart.server.errors import ApiError, as_api_error
from headstart.server.service import ClientDisconnected, cancel_on_disconnect

if TYPE_CHECKING:
    from headstart.engine.outputs import RequestOutput


@dataclass(slots=True)
class Usage:
    """Tokens of one call with one or several prompts, counted as outputs arrive."""

    completion: int = 0
    prompts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens and cached tokens of each prompt, by request id."""
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Numbers of accepted and of rejected drafted tokens, by request id."""

    @property
    def prompt(self) -> int:
        return sum(count for count, _ in self.prompts.values())

    @property
    def cached(self) -> int:
        return sum(cached for _, cached in self.prompts.values())

    def add(self, output: RequestOutput) -> None:
        """Count a request's next output."""
        counts = len(output.prompt_token_ids), output.num_cached_tokens
        self.prompts[output.request_id] = counts
        self.completion += sum(len(answer.token_ids) for answer in output.outputs)
        if (metrics := output.metrics) is not None and metrics.num_drafted_tokens:
            accepted = metrics.num_accepted_tokens
            self.drafts[output.request_id] = accepted, metrics.num_drafted_tokens - accepted

    def for_completions(self) -> dict[str, Any]:
        """Return the usage of a completion or a chat."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(accepted for accepted, _ in self.drafts.values()),
                "rejected_prediction_tokens": sum(rejected for _, rejected in self.drafts.values()),
            },
        }


Answer = TypeVar("Answer")
_LONG = 4096  # characters; a log-probability counts as one


def frame(data: Any, event: str | None = None) -> bytes:
    """Return an event; `data` is encoded as JSON unless it is a string."""
    body = data.encode() if isinstance(data, str) else encode(data)
    name = b"" if event is None else b"event: %s\n" % event.encode()
    return b"%sdata: %s\n\n" % (name, body)


async def read_whole(outputs: Sequence[RequestOutput], make: Callable[[], Answer]) -> Answer:
    """Return `make()`, which parses `outputs`. Run it in a thread if the outputs are long."""
    size = 0
    for output in outputs:
        size += sum(len(entry or ()) for entry in output.prompt_logprobs or ())
        for answer in output.outputs:
            size += len(answer.text) + sum(map(len, answer.logprobs or ()))
    return make() if size <= _LONG else await asyncio.to_thread(make)


class AnswerEvents(ABC):
    """The events of one streamed answer, in the format of an API."""

    def begin(self) -> bytes:
        """Return the events before the first output."""
        return b""

    @abstractmethod
    def read(self, output: RequestOutput) -> Iterable[bytes]:
        """Return the events of the next output. Runs in a thread if the output is long."""

    @abstractmethod
    async def end(self) -> bytes:
        """Return the events after the last output."""

    @abstractmethod
    async def fail(self, error: ApiError) -> bytes:
        """Return the events that report an error."""

    async def read_all(self, output: Any) -> list[bytes]:
        """Return the events of the next output. Run `read` in a thread if the output is long."""
        return await read_whole([output], lambda: list(self.read(output)))

    async def stream(self, outputs: AsyncGenerator[Any]) -> AsyncGenerator[bytes]:
        """Yield the events of all outputs, until an error. An output of type bytes is an event."""
        try:
            if begin := self.begin():
                yield begin
            async with aclosing(outputs):
                async for output in outputs:
                    if isinstance(output, bytes):
                        yield output
                        continue
                    for event in await self.read_all(output):
                        yield event
        except Exception as error:
            last = await self.fail(as_api_error(error))
        else:
            last = await self.end()
        if last:
            yield last


class EventStream(StreamingResponse):
    """A response of events, with headers that tell proxies not to buffer them.

    When the client disconnects, the generator is closed at once, even while it waits for an event.
    """

    body_iterator: AsyncGenerator[bytes]
    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            # Sending an event may raise either error.
            with suppress(ClientDisconnected, OSError):
                await cancel_on_disconnect(receive, self.stream_response(send))
