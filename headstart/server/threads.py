"""The threads in which requests are read and prepared: tenants have them in turns.

A body of many objects takes a thread 0.1 s. First come, first served, one tenant's eighty had
another's question wait for seven seconds, before the scheduler, which is fair, knew of either.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from headstart.server.calls import current_call

__all__ = ["FairThreads"]


class _Job(NamedTuple):
    """Work that waits for a thread, and who waits for it."""

    future: Future[Any]
    work: Callable[[], Any]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work()
        except BaseException as error:  # the caller's to handle
            self.future.set_exception(error)
            del self  # or error and job would hold each other, with all that the work was given
        else:
            self.future.set_result(result)


class FairThreads(ThreadPoolExecutor):
    """An event loop's default executor: a thread that is free takes the next tenant's first job.

    A tenant has half of the threads at the most: for who comes next there is one. A job is of the
    call that it is submitted in; all that are of no call are one tenant's.
    """

    def __init__(self, max_workers: int | None = None) -> None:
        super().__init__(max_workers, thread_name_prefix="headstart-server")
        self._jobs: OrderedDict[str, deque[_Job]] = OrderedDict()  # by tenant, next first
        self._most = max(1, self._max_workers // 2)  # of one tenant
        self._running: Counter[str] = Counter()
        self._choosing = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As the executor's. Raises RuntimeError after its end."""
        call = current_call()
        job = _Job(Future(), partial(fn, *args, **kwargs))
        with self._choosing:
            of_tenant = call.tenant.key if call is not None else ""
            super().submit(self._run)  # which finds the job below; a refused one is not to run
            self._jobs.setdefault(of_tenant, deque()).append(job)
        return job.future

    def _run(self) -> None:
        """Run what may run now. Called once for each job: one that may not is left to a thread
        that ends another of its tenant."""
        while (found := self._next()) is not None:
            tenant, job = found
            job.run()
            del job, found  # which nobody may hold while the next one runs
            with self._choosing:
                self._running[tenant] -= 1
                self._running += Counter()  # drops tenants without any

    def _next(self) -> tuple[str, _Job] | None:
        """The first job of the tenant whose turn it is, of those that may have one more thread."""
        with self._choosing:
            may_run = (one for one in self._jobs if self._running[one] < self._most)
            tenant = next(may_run, None)
            if tenant is None:
                return None
            jobs = self._jobs[tenant]
            job = jobs.popleft()
            self._running[tenant] += 1
            self._jobs.move_to_end(tenant)
            if not jobs:
                del self._jobs[tenant]
            return tenant, job
