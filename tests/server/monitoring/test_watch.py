"""Notes of answered requests are taken after their clients have their answers."""

from __future__ import annotations

import threading
from queue import Queue
from typing import Any

import httpx
import pytest

from headstart.engine.outputs import RequestOutput
from headstart.engine.request import RequestGroup
from headstart.server.monitoring import watch as module
from headstart.server.service import Call, current_call
from tests.server.monitoring.test_metrics import ask, read
from tests.server.running import Running, running

SECONDS = 30


def notes_of(server: Running, monkeypatch: pytest.MonkeyPatch) -> Queue[int]:
    """Return a queue of the token counts of the answers that the server notes, in order."""
    counts: Queue[int] = Queue()
    metrics = server.service.watch.metrics
    finished = metrics.finished

    def note(request: RequestGroup, output: RequestOutput, *more: Any) -> None:
        finished(request, output, *more)
        counts.put(len(output.outputs[0].token_ids))

    monkeypatch.setattr(metrics, "finished", note)
    return counts


def test_notes_are_taken_without_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        noted = notes_of(server, monkeypatch)
        ask(server, 2)
        assert noted.get(timeout=SECONDS) == 2


def test_notes_do_not_queue_as_a_tenants_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: they waited behind the work of the tenant whose request had ended first."""
    calls: Queue[Call | None] = Queue()
    with running() as server:
        watch = server.service.watch
        flush = watch._flush_in_thread

        def take() -> None:
            calls.put(current_call())
            flush()

        monkeypatch.setattr(watch, "_flush_in_thread", take)
        ask(server, 2)
        assert calls.get(timeout=SECONDS) is None


def test_few_wait_for_their_notes_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY", 10 * SECONDS)
    monkeypatch.setattr(module, "_MOST_ENDED", 2)
    with running() as server:
        noted = notes_of(server, monkeypatch)
        for tokens in range(1, 6):
            ask(server, tokens)
        assert noted.qsize() == 3
        assert read(server)["vllm:generation_tokens_total"] == sum(range(1, 6))
        assert [noted.get_nowait() for _ in range(5)] == [1, 2, 3, 4, 5]


def test_a_prompt_is_known_as_soon_as_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY", 10 * SECONDS)
    with running() as server:
        url = f"{server.url}/cache/explain"
        prompt = "one two three four five six seven eight nine ten " * 5
        assert httpx.post(url, json={"prompt": prompt}).json()["closest"] is None
        ask(server, 1, prompt=prompt)
        assert httpx.post(url, json={"prompt": prompt}).json()["closest"] is not None


def test_a_query_waits_for_notes_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the counts of `/metrics` lacked the last request."""
    has_started, may_continue = threading.Event(), threading.Event()
    with running() as server:
        watch, noted = server.service.watch, notes_of(server, monkeypatch)
        finished = watch.metrics.finished

        def note(*args: Any) -> None:
            has_started.set()
            assert may_continue.wait(SECONDS)
            finished(*args)

        monkeypatch.setattr(watch.metrics, "finished", note)
        ask(server, 3)
        assert has_started.wait(SECONDS)
        lock, has_flushed, has_reached = watch._lock, threading.Event(), threading.Event()

        class Seen:
            """A lock that signals when a thread reaches it."""

            def __enter__(self) -> None:
                has_reached.set()
                lock.acquire()

            def __exit__(self, *error: object) -> None:
                lock.release()

        def flush() -> None:
            watch.flush()
            has_flushed.set()
            has_reached.set()

        watch._lock = Seen()  # type: ignore[assignment]
        asking = threading.Thread(target=flush)
        asking.start()
        assert has_reached.wait(SECONDS) and not has_flushed.is_set()
        may_continue.set()
        asking.join(SECONDS)
        assert has_flushed.is_set() and noted.get_nowait() == 3
