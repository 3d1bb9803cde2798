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


def test_jobs_of_tenants_are_interleaved() -> None:
    """Regression: one tenant's eighty bodies delayed another's question by seven seconds."""
    done: list[str] = []

    async def submit_jobs() -> None:
        has_started, may_continue = threading.Event(), threading.Event()

        def hold() -> None:
            has_started.set()
            assert may_continue.wait(SECONDS)

        calls, threads = Calls(100, 100, SECONDS), TenantQueue("test", 1)
        threads.submit(hold)
        assert has_started.wait(SECONDS)

        def submit(name: str, count: int) -> list[Future[None]]:
            with calls.call(Tenant(name, "key", None)):
                return [threads.submit(done.append, f"{name}{i}") for i in range(count)]

        jobs = submit("a", 4)
        submit("b", 2)
        threads.submit(done.append, "of no call")
        assert jobs[1].cancel()  # its caller stopped waiting
        may_continue.set()
        threads.shutdown()

    asyncio.run(submit_jobs())
    assert done == ["a0", "b0", "of no call", "b1", "a2", "a3"]


def test_one_tenant_does_not_occupy_all_threads() -> None:
    """Regression: one tenant's bodies occupied all threads, so another's question waited."""
    may_continue, started = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        started.release()
        assert may_continue.wait(SECONDS)

    async def run_jobs() -> int:
        loop, calls = asyncio.get_running_loop(), Calls(100, 100, SECONDS)
        loop.set_default_executor(TenantQueue("test", 4))
        with calls.call(Tenant("a", "key", None)):
            held = [loop.run_in_executor(None, hold) for _ in range(8)]
        assert started.acquire(timeout=SECONDS) and started.acquire(timeout=SECONDS)
        with calls.call(Tenant("b", "key", None)):
            answer = await asyncio.wait_for(loop.run_in_executor(None, lambda: 7), SECONDS)
        assert not started.acquire(blocking=False) and not any(job.done() for job in held)
        may_continue.set()
        await asyncio.gather(*held)
        return answer

    assert asyncio.run(run_jobs()) == 7


def test_one_tenants_grammars_do_not_occupy_all_threads() -> None:
    """Regression: slow grammars of one tenant delayed those of all others."""
    may_continue = threading.Event()

    async def run_jobs() -> None:
        calls, threads = Calls(100, 100, SECONDS), TenantQueue("test", 2)
        try:
            with calls.call(Tenant("a", "key", None)):
                held = [threads.submit(lambda: may_continue.wait(SECONDS)) for _ in range(4)]
            with calls.call(Tenant("b", "key", None)):
                job = threads.submit(lambda: 7)
            assert job.result(SECONDS) == 7 and not any(future.done() for future in held)
            may_continue.set()
            assert all(future.result(SECONDS) for future in held)
        finally:
            may_continue.set()
            threads.shutdown()

    asyncio.run(run_jobs())


@pytest.mark.parametrize("make", [ThreadPoolExecutor, lambda count: TenantQueue("test", count)])
def test_shutdown_can_cancel_waiting_jobs(make: Callable[[int], ThreadPoolExecutor]) -> None:
    """Regression: a thread ran cancelled jobs after its current one."""
    has_started, may_continue = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold() -> int:
        has_started.set()
        assert may_continue.wait(SECONDS)
        return 7

    with make(1) as threads:
        held = threads.submit(hold)
        assert has_started.wait(SECONDS)
        waiting = [threads.submit(ran.append, i) for i in range(3)]
        threads.shutdown(wait=False, cancel_futures=True)
        assert all(job.cancelled() for job in waiting) and held.running()
        may_continue.set()
        assert held.result(SECONDS) == 7
    assert not ran


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_an_error_is_raised_to_its_caller(error: BaseException) -> None:
    def fail(*args: int, more: int) -> None:
        assert (args, more) == ((1,), 2)
        raise error

    with TenantQueue("test", 1) as threads:
        job: Future[None] = threads.submit(fail, 1, more=2)
        assert job.exception(SECONDS) is error
        assert threads.submit(lambda: 7).result(SECONDS) == 7
    answer: Callable[[], int] = lambda: 8  # noqa: E731
    with pytest.raises(RuntimeError):
        threads.submit(answer)


def test_arguments_of_a_failed_job_are_freed_at_once() -> None:
    """Regression: a refused body stayed in memory until the next garbage collection."""

    class Argument:
        pass

    def fail(argument: Argument) -> None:
        raise ValueError

    argument = Argument()
    reference = weakref.ref(argument)
    gc.disable()
    try:
        with TenantQueue("test", 1) as threads:
            job: Future[None] = threads.submit(fail, argument)
            assert isinstance(job.exception(SECONDS), ValueError)
            del job, argument
        assert reference() is None
    finally:
        gc.enable()


def test_a_job_refused_after_shutdown_does_not_run() -> None:
    """Regression: a thread ran a job whose submission had raised."""
    may_continue = threading.Event()
    ran: list[int] = []
    with TenantQueue("test", 1) as threads:
        threads.submit(may_continue.wait, SECONDS)
        threads.shutdown(wait=False)
        with pytest.raises(RuntimeError):
            threads.submit(ran.append, 7)
        may_continue.set()
    assert not ran


def test_an_abandoned_queue_ends_every_job_with_the_error() -> None:
    """A running job cannot be stopped, but its future fails at once."""
    has_started, may_continue = threading.Event(), threading.Event()
    ran: list[int] = []

    def hold() -> None:
        has_started.set()
        assert may_continue.wait(SECONDS)

    threads = TenantQueue("test", 1)
    jobs = [threads.submit(hold), threads.submit(ran.append, 7)]
    assert has_started.wait(SECONDS)
    threads.abandon(EngineError("closed"))
    assert all(isinstance(job.exception(SECONDS), EngineError) for job in jobs)
    with pytest.raises(EngineError):
        threads.submit(ran.append, 8)
    may_continue.set()
    threads.shutdown()
    assert not ran
