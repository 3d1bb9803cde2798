"""The threads in which requests are read and prepared: tenants have them in turns.

A body of many objects takes a thread 0.1 s. First come, first served, one tenant's eighty had
another's question wait for seven seconds, before the scheduler, which is fair, knew of either.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from headstart.engine.turns import Turns

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
    tenant whose call it is submitted in; all that are of no call are one tenant's.
    """

    def __init__(self, max_workers: int | None = None) -> None:
        super().__init__(max_workers, thread_name_prefix="headstart-server")
        self._turns: Turns[_Job] = Turns(max(1, self._max_workers // 2))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As the executor's. Raises RuntimeError after its end."""
        job = _Job(Future(), partial(fn, *args, **kwargs))
        call_thread = super().submit
        self._turns.add(job, lambda: call_thread(self._run))
        return job.future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As the executor's."""
        super().shutdown(wait=False, cancel_futures=cancel_futures)  # nothing comes any more
        for job in self._turns.clear() if cancel_futures else ():
            job.future.cancel()
        super().shutdown(wait=wait)

    def _run(self) -> None:
        while (found := self._turns.next()) is not None:
            tenant, job = found
            job.run()
            del job, found  # which nobody may hold while the next one runs
            self._turns.ended(tenant)
