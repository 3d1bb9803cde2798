"""Clients that do not read what they asked for: what waits for them is bounded, in bytes and time,
and nobody else waits."""

from __future__ import annotations

import json
import queue
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
import uvicorn

from headstart.server.http.protocol import BoundedProtocol
from tests.server.running import running
from tests.server.scripted import scripted
from tests.server.test_overload import SECONDS, Steps, Watch, ask, body, connect, send


def test_a_slow_reader_holds_up_nobody() -> None:
    """More is answered than buffers take, to a client that does not read."""
    with running(send_buffer=4096) as server, connect(server, small=True) as slow:
        watch = Watch(server)
        many = {"max_tokens": 100, "n": 16, "logprobs": 20, "ignore_eos": True, "stream": True}
        expected = ask(server, max_tokens=8).json()["choices"]
        assert watch.until(0)
        send(slow, body(**many))
        assert watch.until(1)
        others = 0
        while others < 3 or server.llm._driver.call(lambda: server.llm.engine.has_unfinished):
            assert ask(server, max_tokens=8).json()["choices"] == expected
            others += 1
        assert watch.until(1) and server.service.calls.num_places == 1, "nobody read the answer"
        slow.close()
        assert watch.all_free()


class Connections:
    """The server's ends of the connections that were made since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[BoundedProtocol] = []
        self.left: queue.SimpleQueue[BoundedProtocol] = queue.SimpleQueue()
        begin = BoundedProtocol.connection_made

        def note(protocol: BoundedProtocol, transport: Any) -> None:
            begin(protocol, transport)
            self.made.append(protocol)

        monkeypatch.setattr(BoundedProtocol, "connection_made", note)

        lost = BoundedProtocol.connection_lost

        def note_lost(protocol: BoundedProtocol, error: Exception | None) -> None:
            lost(protocol, error)
            self.left.put(protocol)

        monkeypatch.setattr(BoundedProtocol, "connection_lost", note_lost)

    def is_answered(self, place: int) -> bool:
        """Whether all of an answer went to the transport of this connection."""
        answered = self.made[place]._answered if place < len(self.made) else None
        return answered is not None and answered.response_complete

    def unread(self) -> list[int]:
        """Bytes that wait in this process for each whose client does not read."""
        stuck = [one for one in self.made if one.flow is not None and one.flow.write_paused]
        return [one.transport.get_write_buffer_size() for one in stuck]


def test_what_slow_readers_do_not_read_is_bounded_and_goes_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three read nothing of long answers that go on, while others are answered."""
    slow_ones, at_most = 3, 2 << 16  # asyncio's bound of 64 KiB, and an event
    connections = Connections(monkeypatch)
    with running(send_buffer=4096, num_blocks=512) as server, ExitStack() as stack:
        expected = ask(server, max_tokens=8).json()["choices"]
        steps, watch = Steps(server, monkeypatch), Watch(server)
        long = body(max_tokens=2000, logprobs=20, ignore_eos=True, stream=True)
        clients = [stack.enter_context(connect(server, small=True)) for _ in range(slow_ones)]
        for client in clients:
            send(client, long)

        def slow() -> list[Any]:
            found: list[Any] = list(server.service._read)
            groups = [(one, one._group) for one in found if one._group is not None]
            return [one for one, group in groups if group.params.max_tokens == 2000]

        def lengths() -> list[int]:
            return sorted(len(one._group.requests[0].sampling.output_token_ids) for one in slow())

        while len(connections.unread()) < slow_ones:
            assert ask(server, max_tokens=8).json()["choices"] == expected
        unread, goal = connections.unread(), lengths()[-1] + 100
        while lengths()[0] < goal:
            assert ask(server, max_tokens=8).json()["choices"] == expected
        assert connections.unread() == unread and max(unread) <= at_most
        waiting = [len(one._updates._updates) for one in slow()]
        assert len(waiting) == slow_ones and max(waiting) <= 1, "outputs pile up"
        assert server.llm._driver.call(lambda: len(server.llm.engine.requests[0])) == slow_ones
        for left, client in enumerate(reversed(clients)):
            client.close()
            assert steps.gone.wait(SECONDS)
            steps.gone.clear()
            assert steps.gone_at - steps.cancelled_at <= 1, left
        assert watch.all_free()


LONG = "A long answer that nobody reads. " * 32_768


def test_a_whole_answer_that_is_not_read_has_its_place_until_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A megabyte went to the connection at once, and its place to the next who read nothing."""
    connections = Connections(monkeypatch)
    with running(send_buffer=4096) as server, scripted(server, [LONG]), ExitStack() as stack:
        watch = Watch(server)
        clients = [stack.enter_context(connect(server, small=True)) for _ in range(2)]
        for client in clients:
            send(client, body())
        while len(connections.unread()) < len(clients):
            assert httpx.get(server.url + "/health").status_code == 200
        assert max(connections.unread()) <= 2 << 16
        assert watch.until(2) and server.service.calls.num_places == 2
        late, gone = clients
        gone.close()
        assert watch.until(1)
        told = b""
        while not told.endswith(b"}"):
            told += late.recv(1 << 20)
        assert json.loads(told.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == LONG
        assert watch.all_free()


@pytest.mark.parametrize(
    ("said", "stream", "header"),
    [
        ([LONG], False, ""),
        ([LONG[:200_000]] * 2, True, ""),
        ([LONG[:60_000]], False, "Connection: close\r\n"),
    ],
    ids=["whole", "stream", "all is sent"],
)
def test_what_is_not_read_is_dropped_when_its_time_is_over(
    said: list[str], stream: bool, header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed in memory until the client closed the connection, and so did the connection."""
    monkeypatch.setattr("headstart.server.middleware._GRACE", 0.0)
    connections = Connections(monkeypatch)
    with running(send_buffer=4096, request_timeout=0.3) as server, scripted(server, said):
        watch = Watch(server)
        with connect(server, small=True) as client:
            send(client, body(stream=stream), header=header)
            assert connections.left.get(timeout=SECONDS) and watch.all_free()
            told = b""
            while part := client.recv(1 << 20):
                told += part
            assert len(told) < len(said[0]), "what the system had taken, and nothing after it"


@pytest.mark.parametrize("behind", [b"G", b"GET / HTTP/1.1\r\n\r\n"], ids=["a part", "no host"])
def test_what_is_not_read_is_dropped_though_more_is_sent(
    behind: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte behind a request kept its connection for ever, with an answer that was not read."""
    short = partial(uvicorn.Config, timeout_keep_alive=1)
    monkeypatch.setattr(uvicorn, "Config", short)
    connections = Connections(monkeypatch)
    said = [LONG[:60_000]]  # more than the system takes, and less than the transport bears
    with (
        running(send_buffer=4096, request_timeout=0.3) as server,
        scripted(server, said),
        connect(server, small=True) as client,
    ):
        send(client, body())
        while not connections.is_answered(0):
            assert httpx.get(server.url + "/health").status_code == 200
        client.sendall(behind)
        while connections.left.get(timeout=SECONDS) is not connections.made[0]:
            pass
