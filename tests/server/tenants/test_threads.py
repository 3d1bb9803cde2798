"""Tenants alternate in the threads that prepare requests, in any order of arrival."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from headstart.engine.tenant_queue import TenantQueue
from headstart.errors import EngineError
from headstart.server.service import Calls
from headstart.server.tenants import Tenant

SECONDS = 30


def test_tenants_take_turns() -> None:
    """One tenant's eighty bodies had another's question wait for seven seconds."""
    done: list[str] = []

    async def ask() -> None:
        began, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            began.set()
            assert goes_on.wait(SECONDS)

        calls, threads = Calls(100, 100, SECONDS), TenantQueue("test", 1)
        threads.submit(hold)
        assert began.wait(SECONDS)

        def submit(name: str, count: int) -> list[Future[None]]:
            with calls.call(Tenant(name, "key", None)):
                return [threads.submit(done.append, f"{name}{at}") for at in range(count)]

        asked = submit("a", 4)
        submit("b", 2)
        threads.submit(done.append, "of no call")
        assert asked[1].cancel()  # nobody waits for it any more
        goes_on.set()
        threads.shutdown()

    asyncio.run(ask())
    assert done == ["a0", "b0", "of no call", "b1", "a2", "a3"]


def test_a_tenant_leaves_threads_to_others() -> None:
    """Bodies that were being read took all threads: a question waited for the first to end."""
    goes_on, begun = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        begun.release()
        assert goes_on.wait(SECONDS)

    async def ask() -> int:
        loop, calls = asyncio.get_running_loop(), Calls(100, 100, SECONDS)
        loop.set_default_executor(TenantQueue("test", 4))
        with calls.call(Tenant("a", "key", None)):
            held = [loop.run_in_executor(None, hold) for _ in range(8)]
        assert begun.acquire(timeout=SECONDS) and begun.acquire(timeout=SECONDS)
        with calls.call(Tenant("b", "key", None)):
            answer = await asyncio.wait_for(loop.run_in_executor(None, lambda: 7), SECONDS)
        assert not begun.acquire(blocking=False) and not any(one.done() for one in held)
        goes_on.set()
        await asyncio.gather(*held)
        return answer

    assert asyncio.run(ask()) == 7


def test_a_tenants_forms_leave_a_thread_to_others() -> None:
    """Forms that took long to compile had those of all other tenants wait for them."""
    goes_on = threading.Event()

    async def ask() -> None:
        calls, threads = Calls(100, 100, SECONDS), TenantQueue("test", 2)
        try:
            with calls.call(Tenant("a", "key", None)):
                held = [threads.submit(lambda: goes_on.wait(SECONDS)) for _ in range(4)]
            with calls.call(Tenant("b", "key", None)):
                asked = threads.submit(lambda: 7)
            assert asked.result(SECONDS) == 7 and not any(one.done() for one in held)
            goes_on.set()
            assert all(one.result(SECONDS) for one in held)
        finally:
            goes_on.set()
            threads.shutdown()

    asyncio.run(ask())


@pytest.mark.parametrize("make", [ThreadPoolExecutor, lambda count: TenantQueue("test", count)])
def test_at_the_end_what_waits_may_be_cancelled(make: Callable[[int], ThreadPoolExecutor]) -> None:
    """It ran all the same, in a thread that ended what it had begun before."""
    began, goes_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold() -> int:
        began.set()
        assert goes_on.wait(SECONDS)
        return 7

    with make(1) as threads:
        held = threads.submit(hold)
        assert began.wait(SECONDS)
        waiting = [threads.submit(ran.append, at) for at in range(3)]
        threads.shutdown(wait=False, cancel_futures=True)
        assert all(one.cancelled() for one in waiting) and held.running()
        goes_on.set()
        assert held.result(SECONDS) == 7
    assert not ran


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_is_its_callers(error: BaseException) -> None:
    def fail(*given: int, more: int) -> None:
        assert (given, more) == ((1,), 2)
        raise error

    with TenantQueue("test", 1) as threads:
        asked: Future[None] = threads.submit(fail, 1, more=2)
        assert asked.exception(SECONDS) is error
        assert threads.submit(lambda: 7).result(SECONDS) == 7
    answer: Callable[[], int] = lambda: 8  # noqa: E731
    with pytest.raises(RuntimeError):
        threads.submit(answer)


def test_what_failed_is_let_go_of_at_once() -> None:
    """A refused body stayed until the next garbage collection, however long it was."""

    class Given:
        pass

    def fail(given: Given) -> None:
        raise ValueError

    given = Given()
    seen = weakref.ref(given)
    gc.disable()
    try:
        with TenantQueue("test", 1) as threads:
            asked: Future[None] = threads.submit(fail, given)
            assert isinstance(asked.exception(SECONDS), ValueError)
            del asked, given
        assert seen() is None
    finally:
        gc.enable()


def test_what_is_refused_at_the_end_does_not_run() -> None:
    """A thread ran work whose submission had been refused."""
    goes_on = threading.Event()
    ran: list[int] = []
    with TenantQueue("test", 1) as threads:
        threads.submit(goes_on.wait, SECONDS)
        threads.shutdown(wait=False)
        with pytest.raises(RuntimeError):
            threads.submit(ran.append, 7)
        goes_on.set()
    assert not ran


def test_an_abandoned_queue_ends_every_job_with_the_error() -> None:
    """A grammar that compiles cannot be stopped, and nothing waits for it."""
    began, goes_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold() -> None:
        began.set()
        assert goes_on.wait(SECONDS)

    threads = TenantQueue("test", 1)
    jobs = [threads.submit(hold), threads.submit(ran.append, 7)]
    assert began.wait(SECONDS)
    threads.abandon(EngineError("closed"))
    assert all(isinstance(job.exception(SECONDS), EngineError) for job in jobs)
    with pytest.raises(EngineError):
        threads.submit(ran.append, 8)
    goes_on.set()
    threads.shutdown()
    assert not ran
