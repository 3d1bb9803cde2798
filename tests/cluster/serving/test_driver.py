"""Every request that is submitted is answered once, and none disturbs another. Without Ray."""

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
from tests.cluster.serving.scripted import LIMIT, REPLICA, Server, Stream, Told, part


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.driver.close()


def run_soon(server: Server, work: Callable[[], object]) -> None:
    """Run work in the driver's loop."""
    server.driver._soon(work)


def match_feeds(server: Server) -> None:
    server.driver._feeds.follow_running()


def fail(update: Update) -> None:
    raise RuntimeError("Event loop is closed")


def test_tokens_are_told_as_they_come_and_the_last_ends_it(server: Server) -> None:
    server.dispatcher.set_replicas([REPLICA])
    stream, told = server.stream().put(part(0, 8)), Told()
    server.driver.submit(server.request("a"), told)
    assert told.tokens() == [8]
    server.report(a=part(1, 9, 10))
    assert told.tokens() == [8, 9, 10]
    stream.put(part(1, 9, 10, 11, finished=True))
    assert told.tokens() == [8, 9, 10, 11]
    assert not stream.cancelled.is_set()


def test_a_request_that_is_aborted_before_its_task_begins_is_answered(server: Server) -> None:
    """A task that is cancelled before its first step runs no line, not even its `finally`."""
    server.handle.may_follow.clear()
    server.dispatcher.set_replicas([REPLICA])
    assert server.handle.is_asked_to_follow.wait(LIMIT)  # this holds up the driver's thread
    told = Told()
    server.driver.submit(server.request("a"), told)
    server.driver.abort("a")
    server.handle.may_follow.set()
    update = told.next()
    assert not isinstance(update, BaseException)
    assert update.outputs[0].finish_reason == "abort"


def test_a_request_that_is_submitted_while_the_driver_closes_is_answered(server: Server) -> None:
    told, request = Told(), server.request("a")
    server.frontend.require_open = server.driver.close
    server.driver.submit(request, told)
    assert str(told.next()) == "the engine is closed"
    server.driver.close()


def test_close_ends_what_runs_and_what_has_not_begun(server: Server) -> None:
    server.stream().put(part(0, 8))
    running, told = Told(), Told()
    server.driver.submit(server.request("a"), running)
    assert running.tokens() == [8]
    server.driver.submit(server.request("b"), told)
    server.driver.close()
    assert isinstance(running.next(), EngineError) and isinstance(told.next(), EngineError)
    assert server.driver._loop.is_closed()


def test_a_request_that_cannot_be_described_is_answered(server: Server) -> None:
    request, told = server.request("a"), Told()
    server.frontend.facts = None  # type: ignore[assignment]
    server.driver.submit(request, told)
    assert isinstance(told.next(), EngineError)


def test_a_receiver_that_raises_ends_its_own_request_alone(server: Server) -> None:
    """Both requests have tokens in one report; the feed continues."""
    server.dispatcher.set_replicas([REPLICA])
    first, second, told = server.stream(), server.stream(), Told()
    begun = Told()
    receive = iter([begun, fail])
    server.driver.submit(server.request("a"), lambda update: next(receive, fail)(update))
    server.asked()
    server.driver.submit(server.request("b"), told)
    server.asked()
    first.put(part(0, 8))
    second.put(part(0, 8))
    assert begun.tokens() == told.tokens() == [8]
    server.report(a=part(1, 9), b=part(1, 9))
    assert told.tokens() == [8, 9]
    assert first.cancelled.wait(LIMIT), "a replica computes on for nobody"
    server.report(b=part(2, 10))
    assert told.tokens() == [8, 9, 10]
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


def test_two_requests_under_way_cannot_have_one_id(server: Server) -> None:
    stream, told, refused = server.stream().put(part(0, 8)), Told(), Told()
    server.driver.submit(server.request("a"), told)
    assert told.tokens() == [8]
    other = server.request("a")
    server.driver.submit(other, refused)
    error = refused.next()
    assert isinstance(error, RequestError) and str(error) == "request id 'a' is in use"
    server.driver.cancel([other])
    stream.put(part(1, 9, finished=True))
    assert told.tokens() == [8, 9]


def test_an_id_is_free_when_the_last_update_is_told(server: Server) -> None:
    server.stream().put(part(0, 8, finished=True))
    server.stream().put(part(0, 9, finished=True))
    told, again = Told(), server.request("a")

    def receive(update: Update) -> None:
        told(update)
        server.driver.submit(again, told)

    server.driver.submit(server.request("a"), receive)
    assert (told.tokens(), told.tokens()) == ([8], [9])


def test_a_cancelled_request_is_told_nothing_and_its_stream_is_cancelled(server: Server) -> None:
    stream, told = server.stream().put(part(0, 8)), Told()
    request = server.request("a")
    server.driver.submit(request, told)
    assert told.tokens() == [8]
    server.driver.cancel([request])
    assert stream.cancelled.wait(LIMIT)
    server.driver.close()
    assert told.updates.empty()


def test_the_id_of_a_cancelled_request_is_free_at_once(server: Server) -> None:
    """Also while its task, and the replica, have not heard of it: as with one engine."""
    server.dispatcher.set_replicas([REPLICA])
    first, told, again = server.stream().put(part(0, 8)), Told(), Told()
    request = server.request("a")
    server.driver.submit(request, told)
    assert told.tokens() == [8]
    server.stream().put(part(0, 9, finished=True))
    held_up = threading.Event()
    run_soon(server, lambda: held_up.wait(LIMIT))
    server.driver.cancel([request])
    server.driver.submit(server.request("a"), again)
    held_up.set()
    assert again.tokens() == [9]
    assert first.cancelled.wait(LIMIT)
    names = [server.asked().request_id for _ in range(2)]
    assert len(set(names)) == 2, "a replica takes the second for the first"
    assert told.updates.empty()


def test_a_request_that_ray_cancels_is_answered(server: Server) -> None:
    server.stream().put(asyncio.CancelledError())
    told = Told()
    server.driver.submit(server.request("a"), told)
    assert isinstance(told.next(), EngineError)


def test_each_attempt_has_an_id_of_its_own_in_the_replica(server: Server) -> None:
    """A replica that only could not be reached may still run the attempt before."""
    lost = server.stream().put(ReplicaLostError("The actor is temporarily unavailable"))
    server.stream().put(part(0, 8, finished=True))
    told = Told()
    server.driver.submit(server.request("a"), told)
    assert told.tokens() == [8]
    assert [server.asked().engine_id for _ in range(2)] == ["a", "a-1"]
    assert lost.cancelled.is_set()


def test_a_request_ends_after_so_many_lost_replicas(server: Server) -> None:
    for _ in range(MAX_LOST):
        server.stream().put(ReplicaLostError("it died"))
    told = Told()
    server.driver.submit(server.request("a"), told)
    assert str(told.next()) == f"{MAX_LOST} replicas died while they computed this request"


def test_a_replica_that_is_back_before_its_feed_has_ended_is_followed(server: Server) -> None:
    """The ended feed was notified last, so the replica was never followed again."""
    server.dispatcher.set_replicas([REPLICA])
    assert server.handle.is_asked_to_follow.wait(LIMIT)
    server.handle.is_asked_to_follow.clear()

    def go_and_come() -> None:
        for names in ([], [REPLICA]):
            server.dispatcher.set_replicas(names)
            match_feeds(server)

    run_soon(server, go_and_come)
    assert server.handle.is_asked_to_follow.wait(LIMIT)


def test_the_log_tells_which_replicas_come_and_go(server: Server) -> None:
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


def test_a_feed_that_ray_cancels_begins_again(server: Server) -> None:
    calls = threading.Semaphore(0)

    def follow(who: Follow) -> Stream:
        calls.release()
        return server.handle.feed

    server.handle.follow.remote = follow
    server.handle.feed.put(asyncio.CancelledError())
    server.dispatcher.set_replicas([REPLICA])
    for _ in range(2):
        assert calls.acquire(timeout=LIMIT)


def test_close_ends_a_call_of_all_replicas(server: Server) -> None:
    """Its thread waited for ever, and with it the end of the process."""
    is_asked = threading.Event()

    class Call:
        async def results_async(self, return_exceptions: bool) -> list[object]:
            is_asked.set()
            await asyncio.Event().wait()
            return []

    server.handle.broadcast = lambda *given: Call()  # type: ignore[attr-defined]
    ended: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            server.driver.call_all("reset", False, False)
        except Exception as error:
            ended.put(error)

    threading.Thread(target=ask, daemon=True).start()
    assert is_asked.wait(LIMIT)
    server.driver.close()
    error = ended.get(timeout=LIMIT)
    assert isinstance(error, EngineError) and str(error) == "the engine is closed"


@pytest.mark.parametrize("end", ["leaves", "is aborted"])
def test_images_are_given_up_when_a_client(server: Server, end: str) -> None:
    """At once: the garbage collector, which would find them too, comes by seldom."""
    images: Any = SimpleNamespace(take=lambda group: b"pixels", note_encoded=lambda group: None)
    server.frontend.images = images
    server.dispatcher.set_replicas([REPLICA])
    stream, told = server.stream().put(part(0, 8)), Told()
    group = server.request("a")
    gc.disable()
    try:
        server.driver.submit(group, told)
        in_store = weakref.ref(server.asked().images)
        assert told.tokens() == [8]
        server.driver.cancel([group]) if end == "leaves" else server.driver.abort("a")
        assert stream.cancelled.wait(LIMIT)
        wait_until(lambda: in_store() is None, LIMIT)
    finally:
        gc.enable()


def test_a_replica_that_dies_in_the_middle_of_a_stream_ends_it(server: Server) -> None:
    server.stream().put(part(0, 8), ReplicaLostError("it died"))
    told = Told()
    server.driver.submit(server.request("a"), told)
    assert told.tokens() == [8]
    assert isinstance(told.next(), ReplicaLostError)


def test_a_request_is_answered_whatever_is_wrong_with_the_books(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.dispatcher.set_replicas([REPLICA])
    server.stream().put(part(0, 8, finished=True))
    monkeypatch.delattr(server.dispatcher, "_router")
    told = Told()
    server.driver.submit(server.request("a"), told)
    told.next()


def test_a_replica_whose_snapshots_are_of_no_use_is_asked_for_few(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for one after the other, as fast as it could make them."""
    pauses: queue.SimpleQueue[float] = queue.SimpleQueue()

    class Clock:
        """`asyncio`, to this module alone."""

        __getattr__ = staticmethod(partial(getattr, asyncio))

        async def sleep(self, seconds: float) -> None:
            """Note the pause of a feed; looks and heartbeats sleep as ever."""
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
