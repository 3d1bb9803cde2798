"""Work that ends when its client disconnects, and the error that it raises."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
from starlette.types import Message

from headstart.server.errors import ApiError
from headstart.server.openai.api import merge
from headstart.server.service import Calls, ClientDisconnected, cancel_on_disconnect, time_limit
from headstart.server.tenants import EVERYBODY

DISCONNECT: Message = {"type": "http.disconnect"}
MORE: Message = {"type": "http.request", "body": b"", "more_body": False}


class Client:
    """A client's messages: the rest of its request, then those that a test adds."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self._messages.put_nowait(MORE)

    def send(self, message: Message | Exception) -> None:
        self._messages.put_nowait(message)

    async def receive(self) -> Message:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message


async def wait_forever(events: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        events.append("work")


def run(what: Callable[[Client, list[str]], Awaitable[None]]) -> list[str]:
    """Run with a client; return the events, including asyncio's unretrieved errors."""
    events: list[str] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: events.append(context["message"]))
        await what(Client(), events)
        gc.collect()  # a task with an unretrieved error reports it when it is deleted

    asyncio.run(watched())
    gc.collect()
    return events


def test_a_disconnected_client_ends_the_work() -> None:
    async def go(client: Client, events: list[str]) -> None:
        client.send(DISCONNECT)
        with pytest.raises(ClientDisconnected):
            await cancel_on_disconnect(client.receive, wait_forever(events))

    assert run(go) == ["work"]


def test_finished_work_is_returned() -> None:
    """The result is returned even if the watcher fails in the same iteration of the loop."""

    async def finish(client: Client, events: list[str]) -> None:
        async def work() -> int:
            client.send(ValueError("ignored"))
            return 5

        assert await cancel_on_disconnect(client.receive, work()) == 5
        for _ in range(5):
            await asyncio.sleep(0)

    assert run(finish) == []


def test_an_error_of_receive_is_raised() -> None:
    """Regression: the error was lost, and disconnections were no longer noticed."""

    async def fail(client: Client, events: list[str]) -> None:
        client.send(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            await cancel_on_disconnect(client.receive, wait_forever(events))

    assert run(fail) == ["work"]


@pytest.mark.parametrize("message", [DISCONNECT, ValueError("broken")], ids=["gone", "broken"])
def test_a_cancelled_caller_raises_cancelled_error(message: Message | Exception) -> None:
    """Regression: a client that disconnected in the same iteration hid the cancellation."""

    async def cancel(client: Client, events: list[str]) -> None:
        caller = asyncio.ensure_future(cancel_on_disconnect(client.receive, wait_forever(events)))
        for _ in range(5):
            await asyncio.sleep(0)
        client.send(message)
        await asyncio.sleep(0)  # the watcher has ended now, and has not cancelled the work yet
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller

    assert run(cancel) == ["work"]


def test_a_timeout_is_raised_even_if_the_client_disconnected() -> None:
    async def end(client: Client, events: list[str]) -> None:
        calls = Calls(1, 1, seconds=0.0)
        late = ApiError(504, "too late")

        async def work() -> None:
            client.send(DISCONNECT)
            await wait_forever(events)

        with calls.call(EVERYBODY) as call, pytest.raises(ApiError) as raised:
            async with time_limit(call, 0.0, lambda: late):
                await cancel_on_disconnect(client.receive, work())
        assert raised.value is late

    assert run(end) == ["work"]


def test_closing_merged_streams_closes_each() -> None:
    """One stream waits for its item; the other's item was just received."""
    closed: list[str] = []

    async def stream(name: str, *, waits: bool) -> AsyncGenerator[str]:
        try:
            if waits:
                await asyncio.Event().wait()
            yield name
        finally:
            closed.append(name)

    async def leave() -> None:
        streams = [stream("ready", waits=False), stream("waiting", waits=True)]
        merged = merge(streams)
        assert await anext(merged) == "ready"
        await merged.aclose()
        assert sorted(closed) == ["ready", "waiting"]

    asyncio.run(leave())


def test_the_deadline_of_finished_work_has_no_effect() -> None:
    """No timer remains until the deadline, and nothing fails then."""
    failures: list[dict[str, object]] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        with Calls(1, 1, 0.01).call(EVERYBODY) as call:
            async with time_limit(call, 0.0, lambda: ApiError(504, "late")):
                pass
        passed = loop.create_future()
        loop.call_at(call.deadline + 0.01, passed.set_result, None)
        await passed

    asyncio.run(work())
    assert failures == []
