"""Every submitted request is answered once, and none disturbs another. Without Ray."""

import asyncio
import gc
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from headstart.cluster.events import EventBatch
from headstart.cluster.serving import heartbeat
from headstart.cluster.serving.driver import MAX_LOST
from headstart.cluster.serving.messages import Follow, Report
from headstart.engine.driver import Update
from headstart.errors import EngineError, ReplicaLostError, RequestError
from tests.cluster.serving.ray_processes import wait_until
from tests.cluster.serving.scripted import LIMIT, REPLICA, Receiver, Server, Stream, part


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.driver.close()


def run_soon(server: Server, work: Callable[[], object]) -> None:
    """Run work in the driver's loop."""
    server.driver._call_soon(work)


def match_feeds(server: Server) -> None:
    server.driver._feeds.follow_running()


def fail(update: Update) -> None:
    raise RuntimeError("Event loop is closed")


def test_tokens_are_streamed_and_the_last_part_ends_the_request(server: Server) -> None:
    server.dispatcher.set_replicas([REPLICA])
    stream, receiver = server.stream().put(part(0, 8)), Receiver()
    server.driver.submit(server.request("a"), receiver)
    assert receiver.tokens() == [8]
    server.report(a=part(1, 9, 10))
    assert receiver.tokens() == [8, 9, 10]
    stream.put(part(1, 9, 10, 11, finished=True))
    assert receiver.tokens() == [8, 9, 10, 11]
    assert not stream.cancelled.is_set()


def test_a_request_aborted_before_its_task_starts_is_answered(server: Server) -> None:
    """A task that is cancelled before its first step runs no line, not even its `finally`."""
    server.handle.may_follow.clear()
    server.dispatcher.set_replicas([REPLICA])
    assert server.handle.follow_called.wait(LIMIT)  # this blocks the driver's thread
    receiver = Receiver()
    server.driver.submit(server.request("a"), receiver)
    server.driver.abort("a")
    server.handle.may_follow.set()
    update = receiver.next()
    assert not isinstance(update, BaseException)
    assert update.outputs[0].finish_reason == "abort"


def test_a_request_submitted_during_close_is_answered(server: Server) -> None:
    receiver, request = Receiver(), server.request("a")
    server.frontend.require_open = server.driver.close
    server.driver.submit(request, receiver)
    assert str(receiver.next()) == "the engine is closed"
    server.driver.close()


def test_close_ends_running_and_waiting_requests(server: Server) -> None:
    server.stream().put(part(0, 8))
    running, waiting = Receiver(), Receiver()
    server.driver.submit(server.request("a"), running)
    assert running.tokens() == [8]
    server.driver.submit(server.request("b"), waiting)
    server.driver.close()
    assert isinstance(running.next(), EngineError) and isinstance(waiting.next(), EngineError)
    assert server.driver._loop.is_closed()


def test_a_request_that_cannot_be_described_is_answered(server: Server) -> None:
    request, receiver = server.request("a"), Receiver()
    server.frontend.facts = None  # type: ignore[assignment]
    server.driver.submit(request, receiver)
    assert isinstance(receiver.next(), EngineError)


def test_a_receiver_that_raises_ends_only_its_request(server: Server) -> None:
    """Both requests have tokens in one report; the feed continues."""
    server.dispatcher.set_replicas([REPLICA])
    first, second, receiver = server.stream(), server.stream(), Receiver()
    begun = Receiver()
    receive = iter([begun, fail])
    server.driver.submit(server.request("a"), lambda update: next(receive, fail)(update))
    server.next_request()
    server.driver.submit(server.request("b"), receiver)
    server.next_request()
    first.put(part(0, 8))
    second.put(part(0, 8))
    assert begun.tokens() == receiver.tokens() == [8]
    server.report(a=part(1, 9), b=part(1, 9))
    assert receiver.tokens() == [8, 9]
    assert first.cancelled.wait(LIMIT), "the replica still computes the ended request"
    server.report(b=part(2, 10))
    assert receiver.tokens() == [8, 9, 10]
    assert not server.handle.feed.cancelled.is_set()
    assert not second.cancelled.is_set()


def test_a_receiver_that_raises_at_the_first_token_has_its_stream_cancelled(
    server: Server,
) -> None:
    stream = server.stream().put(part(0, 8))
    updates: queue.SimpleQueue[Update] = queue.SimpleQueue()

    def receive(update: Update) -> None:
        updates.put(update)
        raise RuntimeError("Event loop is closed")

    server.driver.submit(server.request("a"), receive)
    assert stream.cancelled.wait(LIMIT)
    assert not isinstance(updates.get(timeout=LIMIT), BaseException)
    last = updates.get(timeout=LIMIT)
    assert str(last) == "the answer cannot be sent: RuntimeError: Event loop is closed"


def test_a_second_request_with_a_running_id_is_refused(server: Server) -> None:
    stream, receiver, refused = server.stream().put(part(0, 8)), Receiver(), Receiver()
    server.driver.submit(server.request("a"), receiver)
    assert receiver.tokens() == [8]
    other = server.request("a")
    server.driver.submit(other, refused)
    error = refused.next()
    assert isinstance(error, RequestError) and str(error) == "request id 'a' is in use"
    server.driver.cancel([other])
    stream.put(part(1, 9, finished=True))
    assert receiver.tokens() == [8, 9]


def test_an_id_is_free_once_the_last_update_arrives(server: Server) -> None:
    server.stream().put(part(0, 8, finished=True))
    server.stream().put(part(0, 9, finished=True))
    receiver, again = Receiver(), server.request("a")

    def receive(update: Update) -> None:
        receiver(update)
        server.driver.submit(again, receiver)

    server.driver.submit(server.request("a"), receive)
    assert (receiver.tokens(), receiver.tokens()) == ([8], [9])


def test_a_cancelled_request_gets_no_updates_and_its_stream_is_cancelled(server: Server) -> None:
    stream, receiver = server.stream().put(part(0, 8)), Receiver()
    request = server.request("a")
    server.driver.submit(request, receiver)
    assert receiver.tokens() == [8]
    server.driver.cancel([request])
    assert stream.cancelled.wait(LIMIT)
    server.driver.close()
    assert receiver.updates.empty()


def test_the_id_of_a_cancelled_request_is_free_at_once(server: Server) -> None:
    """It is free even before its task and the replica learn of it, as with one engine."""
    server.dispatcher.set_replicas([REPLICA])
    first, receiver, again = server.stream().put(part(0, 8)), Receiver(), Receiver()
    request = server.request("a")
    server.driver.submit(request, receiver)
    assert receiver.tokens() == [8]
    server.stream().put(part(0, 9, finished=True))
    held_up = threading.Event()
    run_soon(server, lambda: held_up.wait(LIMIT))
    server.driver.cancel([request])
    server.driver.submit(server.request("a"), again)
    held_up.set()
    assert again.tokens() == [9]
    assert first.cancelled.wait(LIMIT)
    names = [server.next_request().request_id for _ in range(2)]
    assert len(set(names)) == 2, "a replica takes the second for the first"
    assert receiver.updates.empty()


def test_a_request_that_ray_cancels_is_answered(server: Server) -> None:
    server.stream().put(asyncio.CancelledError())
    receiver = Receiver()
    server.driver.submit(server.request("a"), receiver)
    assert isinstance(receiver.next(), EngineError)


def test_each_attempt_has_a_separate_id_in_the_replica(server: Server) -> None:
    """A replica that was only unreachable may still run the previous attempt."""
    lost = server.stream().put(ReplicaLostError("The actor is temporarily unavailable"))
    server.stream().put(part(0, 8, finished=True))
    receiver = Receiver()
    server.driver.submit(server.request("a"), receiver)
    assert receiver.tokens() == [8]
    assert [server.next_request().engine_id for _ in range(2)] == ["a", "a-1"]
    assert lost.cancelled.is_set()


def test_a_request_ends_after_max_lost_replicas(server: Server) -> None:
    for _ in range(MAX_LOST):
        server.stream().put(ReplicaLostError("it died"))
    receiver = Receiver()
    server.driver.submit(server.request("a"), receiver)
    assert str(receiver.next()) == f"{MAX_LOST} replicas died while they computed this request"


def test_a_replica_that_returns_before_its_feed_ends_is_followed(server: Server) -> None:
    """Regression: the ended feed was handled last, so the replica was never followed again."""
    server.dispatcher.set_replicas([REPLICA])
    assert server.handle.follow_called.wait(LIMIT)
    server.handle.follow_called.clear()

    def go_and_come() -> None:
        for names in ([], [REPLICA]):
            server.dispatcher.set_replicas(names)
            match_feeds(server)

    run_soon(server, go_and_come)
    assert server.handle.follow_called.wait(LIMIT)


def test_replicas_that_come_and_go_are_logged(server: Server) -> None:
    done = threading.Event()
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log = logging.getLogger("headstart.server")
    handler, before = Lines(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)

    def come_and_go() -> None:
        for names in ([REPLICA], [REPLICA], [], [REPLICA]):
            server.dispatcher.set_replicas(names)
            match_feeds(server)
        done.set()

    try:
        run_soon(server, come_and_go)
        assert done.wait(LIMIT)
    finally:
        log.setLevel(before)
        log.removeHandler(handler)
    assert lines == [
        f"replica {REPLICA} runs; running: 1",
        f"replica {REPLICA} was removed; running: 0",
        f"replica {REPLICA} runs; running: 1",
    ]


def test_a_feed_that_ray_cancels_is_restarted(server: Server) -> None:
    calls = threading.Semaphore(0)

    def follow(call: Follow) -> Stream:
        calls.release()
        return server.handle.feed

    server.handle.follow.remote = follow
    server.handle.feed.put(asyncio.CancelledError())
    server.dispatcher.set_replicas([REPLICA])
    for _ in range(2):
        assert calls.acquire(timeout=LIMIT)


def test_close_ends_a_call_of_all_replicas(server: Server) -> None:
    """Regression: its thread waited forever, and so did the exit of the process."""
    has_started = threading.Event()

    class Call:
        async def results_async(self, return_exceptions: bool) -> list[object]:
            has_started.set()
            await asyncio.Event().wait()
            return []

    server.handle.broadcast = lambda *args: Call()  # type: ignore[attr-defined]
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def call_all() -> None:
        try:
            server.driver.call_all("reset", False, False)
        except Exception as error:
            errors.put(error)

    threading.Thread(target=call_all, daemon=True).start()
    assert has_started.wait(LIMIT)
    server.driver.close()
    error = errors.get(timeout=LIMIT)
    assert isinstance(error, EngineError) and str(error) == "the engine is closed"


@pytest.mark.parametrize("end", ["leaves", "is aborted"])
def test_images_are_freed_when_a_client(server: Server, end: str) -> None:
    """They are freed at once, not at the next garbage collection."""
    images: Any = SimpleNamespace(take=lambda group: b"pixels", note_encoded=lambda group: None)
    server.frontend.images = images
    server.dispatcher.set_replicas([REPLICA])
    stream, receiver = server.stream().put(part(0, 8)), Receiver()
    group = server.request("a")
    gc.disable()
    try:
        server.driver.submit(group, receiver)
        in_store = weakref.ref(server.next_request().images)
        assert receiver.tokens() == [8]
        server.driver.cancel([group]) if end == "leaves" else server.driver.abort("a")
        assert stream.cancelled.wait(LIMIT)
        wait_until(lambda: in_store() is None, LIMIT)
    finally:
        gc.enable()


def test_a_replica_that_dies_in_the_middle_of_a_stream_ends_it(server: Server) -> None:
    server.stream().put(part(0, 8), ReplicaLostError("it died"))
    receiver = Receiver()
    server.driver.submit(server.request("a"), receiver)
    assert receiver.tokens() == [8]
    assert isinstance(receiver.next(), ReplicaLostError)


def test_a_request_is_answered_when_routing_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.dispatcher.set_replicas([REPLICA])
    server.stream().put(part(0, 8, finished=True))
    monkeypatch.delattr(server.dispatcher, "_router")
    receiver = Receiver()
    server.driver.submit(server.request("a"), receiver)
    receiver.next()


def test_useless_snapshots_are_requested_with_pauses(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the server requested snapshots without a pause."""
    pauses: queue.SimpleQueue[float] = queue.SimpleQueue()

    class Clock:
        """`asyncio` with another `sleep`, for one module."""

        __getattr__ = staticmethod(partial(getattr, asyncio))

        async def sleep(self, seconds: float) -> None:
            """Record the pause of a feed; other sleeps are unchanged."""
            if seconds > 3000:
                pauses.put(seconds)
            else:
                await asyncio.sleep(seconds)

    monkeypatch.setattr(server.dispatcher, "apply", lambda replica, batch: False)
    monkeypatch.setattr(heartbeat, "asyncio", Clock())
    monkeypatch.setattr(heartbeat, "_RESTART_PAUSE", 3600.0)
    for _ in range(2):
        server.handle.feed.put(Report(EventBatch(0, 0, 0)))
    server.dispatcher.set_replicas([REPLICA])
    for _ in range(2):
        assert pauses.get(timeout=LIMIT) > 3000
