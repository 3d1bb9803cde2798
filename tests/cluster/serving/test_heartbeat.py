"""Heartbeats of servers and replicas, and the effect of missing ones. Without Ray."""

import asyncio
import queue
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing

import pytest

from headstart.cluster.serving.heartbeat import HEARTBEAT, with_heartbeats
from headstart.cluster.serving.messages import AnswerRequest, Report
from headstart.engine.metrics import Gauge, Metric
from headstart.errors import ReplicaLostError
from tests.cluster.serving.ray_processes import wait_until
from tests.cluster.serving.scripted import LIMIT, Receiver, Server, Stream, part


def test_a_server_sends_heartbeats_under_the_name_in_its_requests() -> None:
    """Without heartbeats, replicas end its requests after two minutes."""
    beats: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    class Call:
        async def results_async(self, return_exceptions: bool) -> list[object]:
            return []

    def broadcast(method: str, name: str) -> Call:
        beats.put((method, name))
        return Call()

    server = Server(silence=0.01)
    server.handle.broadcast = broadcast  # type: ignore[attr-defined]
    server.stream().put(part(0, 8, finished=True))
    try:
        server.driver.submit(server.request("a"), Receiver())
        name = server.next_request().server
        for _ in range(2):
            assert beats.get(timeout=LIMIT) == ("beat", name)
    finally:
        server.driver.close()


def test_a_request_that_a_replica_ended_without_heartbeats_is_answered() -> None:
    """The replica closes the stream without a message, as it considers the server dead."""

    class Ended(Stream):
        async def __aiter__(self) -> AsyncIterator[object]:
            for none in ():
                yield none

    server = Server()
    server.handle.answers.put(Ended())
    receiver = Receiver()
    server.driver.submit(server.request("a"), receiver)
    assert str(receiver.next()) == "a replica ended the request, as this server sent no heartbeats"
    server.driver.close()


class Replicas:
    """A server and its replicas by name, with a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.server = Server(clock=lambda: self.now)
        self.feeds: dict[str, Stream] = {}
        self.sent: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self._answer = self.server.handle.answer.remote
        self.server.handle.answer.remote = self._send
        self.server.handle.follow.remote = lambda call: self.feeds[call.replica]

    def run(self, *names: str) -> None:
        """Set the running replicas."""
        for name in names:
            self.feeds.setdefault(name, Stream())
        self.server.dispatcher.set_replicas(names)
        for name in names:
            self.beat(name)

    def beat(self, name: str) -> None:
        """Send a replica's report, and wait until the server has it."""
        metrics: list[Metric] = [Gauge(name="beats", labels={}, value=self.now)]
        self.feeds[name].put(Report(metrics=metrics))
        wait_until(lambda: self.server.dispatcher.metrics.get(name) is metrics, LIMIT)

    def look_at(self, now: float) -> None:
        """Advance the clock to `now`; the server checks for silent replicas every few seconds."""
        is_done = queue.SimpleQueue[None]()
        while self.now < now:
            self.now = min(now, self.now + 5)
            self.server.driver._call_soon(self.server.driver._feeds.check_silence)
            self.server.driver._call_soon(lambda: is_done.put(None))
            is_done.get(timeout=LIMIT)

    def _send(self, request: AnswerRequest) -> Stream:
        self.sent.put((request.request_id, self.server.dispatcher.choose(request.request_id)))
        return self._answer(request)


@pytest.fixture
def replicas() -> Iterator[Replicas]:
    replicas = Replicas()
    yield replicas
    replicas.server.driver.close()


def test_requests_of_a_replica_that_hangs_are_moved(replicas: Replicas) -> None:
    """Regression: its requests waited for their whole timeout, and it counted as running."""
    server = replicas.server
    replicas.run("a")
    begun, waiting = Receiver(), Receiver()
    first = server.stream().put(part(0, 8))
    server.driver.submit(server.request("begun"), begun)
    assert begun.tokens() == [8]
    second = server.stream()
    server.driver.submit(server.request("waiting"), waiting)
    assert [replicas.sent.get(timeout=LIMIT) for _ in range(2)] == [
        ("begun", "a"),
        ("waiting", "a"),
    ]
    replicas.run("a", "b")
    replicas.look_at(2 * HEARTBEAT - 1)
    replicas.beat("b")
    assert set(server.dispatcher.live_replicas) == {"a", "b"}
    server.stream().put(part(0, 9, finished=True))
    replicas.look_at(2 * HEARTBEAT + 1)
    assert server.dispatcher.live_replicas == ["b"]
    error = begun.next()
    assert isinstance(error, ReplicaLostError) and "stopped answering" in str(error)
    assert replicas.sent.get(timeout=LIMIT) == ("waiting", "b")
    assert waiting.tokens() == [9]
    assert first.cancelled.wait(LIMIT) and second.cancelled.wait(LIMIT)
    replicas.beat("a")
    assert set(server.dispatcher.live_replicas) == {"a", "b"}


def test_a_request_waits_while_no_replica_answers(replicas: Replicas) -> None:
    replicas.run("a")
    replicas.look_at(2 * HEARTBEAT + 1)
    assert not replicas.server.dispatcher.live_replicas
    replicas.server.stream().put(part(0, 9, finished=True))
    replicas.server.driver.submit(replicas.server.request("r"), Receiver())
    assert replicas.sent.get(timeout=LIMIT) == ("r", None)


def test_a_server_that_was_stopped_does_not_count_replicas_as_silent(replicas: Replicas) -> None:
    replicas.run("a")
    replicas.now = 1000.0
    replicas.look_at(1000.0 + HEARTBEAT)
    assert replicas.server.dispatcher.live_replicas == ["a"]


def test_an_idle_replica_sends_heartbeats() -> None:
    async def follow() -> None:
        is_over, is_closed = asyncio.Event(), asyncio.Event()

        async def reports() -> AsyncGenerator[Report]:
            try:
                await is_over.wait()
                yield Report(process="1")
                await asyncio.Event().wait()
            finally:
                is_closed.set()

        async with aclosing(with_heartbeats(reports(), 0.001)) as messages:
            assert [await anext(messages) for _ in range(2)] == [Report(), Report()]
            is_over.set()
            while (report := await anext(messages)) == Report():
                pass
            assert report.process == "1"
            assert await anext(messages) == Report()
        assert is_closed.is_set()

    asyncio.run(follow())
