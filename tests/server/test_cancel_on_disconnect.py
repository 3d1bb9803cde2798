"""Work that ends when its client disconnects: the ending that is reported."""

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

GONE: Message = {"type": "http.disconnect"}
MORE: Message = {"type": "http.request", "body": b"", "more_body": False}


class Client:
    """A client's messages: the rest of its request, then those that a test sends."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self._said.put_nowait(MORE)

    def say(self, what: Message | Exception) -> None:
        self._said.put_nowait(what)

    async def receive(self) -> Message:
        said = await self._said.get()
        if isinstance(said, Exception):
            raise said
        return said


async def for_ever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


def run(what: Callable[[Client, list[str]], Awaitable[None]]) -> list[str]:
    """Run with a client; return the ending, and asyncio's reports of unretrieved errors."""
    ended: list[str] = []

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: ended.append(context["message"]))
        await what(Client(), ended)
        gc.collect()  # a task whose error was never asked for says so when it goes

    asyncio.run(watched())
    gc.collect()
    return ended


def test_the_client_goes() -> None:
    async def go(client: Client, ended: list[str]) -> None:
        client.say(GONE)
        with pytest.raises(ClientDisconnected):
            await cancel_on_disconnect(client.receive, for_ever(ended))

    assert run(go) == ["work"]


def test_the_work_is_done_first() -> None:
    """Also where the watcher fails in the same turn of the loop."""

    async def finish(client: Client, ended: list[str]) -> None:
        async def work() -> int:
            client.say(ValueError("nobody wants to know"))
            return 5

        assert await cancel_on_disconnect(client.receive, work()) == 5
        for _ in range(5):
            await asyncio.sleep(0)

    assert run(finish) == []


def test_an_error_of_what_is_received_is_raised() -> None:
    """It was lost, and the client's disconnection was no longer noticed."""

    async def fail(client: Client, ended: list[str]) -> None:
        client.say(ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            await cancel_on_disconnect(client.receive, for_ever(ended))

    assert run(fail) == ["work"]


@pytest.mark.parametrize("said", [GONE, ValueError("broken")], ids=["gone", "broken"])
def test_who_is_cancelled_is_cancelled(said: Message | Exception) -> None:
    """A client that went away in the same turn of the loop hid that its caller was cancelled."""

    async def cancel(client: Client, ended: list[str]) -> None:
        caller = asyncio.ensure_future(cancel_on_disconnect(client.receive, for_ever(ended)))
        for _ in range(5):
            await asyncio.sleep(0)
        client.say(said)
        await asyncio.sleep(0)  # the watcher has ended now, and has not cancelled the work yet
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller

    assert run(cancel) == ["work"]


def test_a_call_whose_time_is_over_is_told_so_though_its_client_is_gone() -> None:
    async def end(client: Client, ended: list[str]) -> None:
        calls = Calls(1, 1, seconds=0.0)
        late = ApiError(504, "too late")

        async def work() -> None:
            client.say(GONE)
            await for_ever(ended)

        with calls.call(EVERYBODY) as call, pytest.raises(ApiError) as raised:
            async with time_limit(call, 0.0, lambda: late):
                await cancel_on_disconnect(client.receive, work())
        assert raised.value is late

    assert run(end) == ["work"]


def test_streams_that_are_left_are_all_closed() -> None:
    """One waits for its item, and the item of the other was just taken."""
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


def test_the_time_of_work_that_ended_passes_without_effect() -> None:
    """Nothing is left of a call until its deadline, and nothing fails then."""
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
