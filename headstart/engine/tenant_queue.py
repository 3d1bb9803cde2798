"""A queue of jobs that shares a few threads fairly between tenants.

Parsing a large request body takes long, and compiling a grammar may take seconds. If jobs ran in
the order of arrival, many such jobs of one tenant would delay all other tenants.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The tenant of jobs submitted in this context; "" for jobs without a tenant."""


class _Job(NamedTuple):
    future: Future[Any]
    call: Callable[[], Any]

    def run(self) -> None:
        with suppress(InvalidStateError):  # the queue was abandoned meanwhile
            try:
                result = self.call()
            except BaseException as error:  # the caller handles it
                self.future.set_exception(error)
                del self  # breaks the reference cycle of error and job, so that arguments are freed
            else:
                self.future.set_result(result)


class TenantQueue(ThreadPoolExecutor):
    """An executor that serves tenants in rotation.

    per_tenant: threads that one tenant may use at a time, by default half, so that other tenants
    find a free thread. Threads start when they are needed. They are daemons, unlike those of
    `concurrent.futures`, so a job that cannot be stopped does not delay the exit of the process.
    The base class is `ThreadPoolExecutor` because event loops accept no other default executor.
    """

    def __init__(
        self, name: str, num_threads: int | None = None, per_tenant: int | None = None
    ) -> None:
        super().__init__(num_threads)
        self._name = name
        self._per_tenant = per_tenant or max(1, self._max_workers // 2)
        self._waiting: OrderedDict[str, deque[_Job]] = OrderedDict()  # by tenant, next first
        self._running: Counter[str] = Counter()  # jobs by tenant
        self._futures: set[Future[Any]] = set()  # of jobs that wait or run
        self._workers: list[threading.Thread] = []
        self._closed: Exception | None = None  # raised by `submit` once the queue is closed
        self._changed = threading.Condition()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue a call for the current tenant. Raises RuntimeError once the queue is closed."""
        job = _Job(Future(), partial(fn, *args, **kwargs))
        with self._changed:
            if self._closed is not None:
                raise self._closed
            if len(self._workers) < self._max_workers:
                name = f"{self._name}_{len(self._workers)}"
                worker = threading.Thread(target=self._work, name=name, daemon=True)
                worker.start()
                self._workers.append(worker)
            self._waiting.setdefault(TENANT.get(), deque()).append(job)
            self._futures.add(job.future)
            self._changed.notify()
        job.future.add_done_callback(self._futures.discard)
        return job.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more jobs, and wait for the accepted jobs or cancel them."""
        self._close(RuntimeError("the queue is closed"), drop=cancel_futures)
        for future in list(self._futures) if cancel_futures else ():
            future.cancel()  # has no effect on a job that runs
        for worker in self._workers if wait else ():
            worker.join()

    def abandon(self, error: Exception) -> None:
        """Close the queue: every job, even if it runs, and every later call fails with `error`."""
        self._close(error, drop=True)
        for future in list(self._futures):
            with suppress(InvalidStateError):  # the job has just ended
                future.set_exception(error)

    def _close(self, error: Exception, *, drop: bool) -> None:
        """Accept no more jobs; with `drop`, also remove the waiting jobs."""
        with self._changed:
            self._closed = self._closed or error
            if drop:
                self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        """Run jobs in a thread of the queue until it is closed and no job waits."""
        while (entry := self._take()) is not None:
            tenant, job = entry
            job.run()
            del job, entry  # so that the arguments are freed before the next job
            with self._changed:
                self._running[tenant] -= 1
                self._running += Counter()  # removes counts of 0
                self._changed.notify_all()

    def _take(self) -> tuple[str, _Job] | None:
        """Wait for a job that may run; return its tenant and the job.

        The tenant that was served longest ago goes first. Return None once the queue is closed and
        no job waits.
        """
        with self._changed:
            while self._waiting or self._closed is None:
                may_run = (t for t in self._waiting if self._running[t] < self._per_tenant)
                if (tenant := next(may_run, None)) is None:
                    self._changed.wait()
                    continue
                job = self._waiting[tenant].popleft()
                self._waiting.move_to_end(tenant)
                if not self._waiting[tenant]:
                    del self._waiting[tenant]
                if job.future.set_running_or_notify_cancel():
                    self._running[tenant] += 1
                    return tenant, job
        return None
