"""The threads in which requests are read and prepared: tenants have them in turns.

A body of many objects takes a thread 0.1 s. First come, first served, one tenant's eighty had
another's question wait for seven seconds, before the scheduler, which is fair, knew of either.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
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
        else:
            self.future.set_result(result)


class FairThreads(ThreadPoolExecutor):
    """An event loop's default executor: a thread that is free takes the next tenant's first job.

    A job is of the call that it is submitted in; all that are of no call are one tenant's.
    """

    def __init__(self, max_workers: int | None = None) -> None:
        super().__init__(max_workers, thread_name_prefix="headstart-server")
        self._jobs: OrderedDict[str | None, deque[_Job]] = OrderedDict()  # by tenant, next first
        self._choosing = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As the executor's. Raises RuntimeError after its end."""
        call = current_call()
        job = _Job(Future(), partial(fn, *args, **kwargs))
        with self._choosing:
            of_tenant = call.tenant.key if call is not None else None
            self._jobs.setdefault(of_tenant, deque()).append(job)
        super().submit(self._run_next)
        return job.future

    def _run_next(self) -> None:
        """Called once for each job, whichever is next then."""
        with self._choosing:
            tenant, jobs = self._jobs.popitem(last=False)
            job = jobs.popleft()
            if jobs:
                self._jobs[tenant] = jobs  # behind all others
        job.run()
