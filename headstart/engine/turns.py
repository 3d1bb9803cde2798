"""Jobs of many tenants that share a few threads, in turns.

First come, first served, one tenant's many jobs would hold up those of all others.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Generic, TypeVar

__all__ = ["TENANT", "Turns"]

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""Whose jobs are those that are added now; all that are of no tenant are one's."""

Job = TypeVar("Job")


class Turns(Generic[Job]):
    """Jobs that wait, by tenant: of the one that has waited longest for a turn its first is next.

    most: jobs of one tenant that run at the same time. May be used from several threads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # by tenant, next first
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, job: Job, call_thread: Callable[[], object]) -> None:
        """Have a job wait, and a thread called that runs what `next` has until there is none.

        If `call_thread` raises, the job does not wait.
        """
        with self._lock:
            call_thread()
            self._waiting.setdefault(TENANT.get(), deque()).append(job)

    def next(self) -> tuple[str, Job] | None:
        """The job that may run now, and whose it is, for `ended`; None if there is none.

        One that may not run yet is left to the thread that ends another of its tenant.
        """
        with self._lock:
            may_run = (one for one in self._waiting if self._running[one] < self._most)
            tenant = next(may_run, None)
            if tenant is None:
                return None
            jobs = self._waiting[tenant]
            job = jobs.popleft()
            self._running[tenant] += 1
            self._waiting.move_to_end(tenant)
            if not jobs:
                del self._waiting[tenant]
            return tenant, job

    def ended(self, tenant: str) -> None:
        """A job of this tenant ran to its end."""
        with self._lock:
            self._running[tenant] -= 1
            self._running += Counter()  # drops tenants without any

    def clear(self) -> list[Job]:
        """Forget all that wait, and tell them."""
        with self._lock:
            jobs = [job for waiting in self._waiting.values() for job in waiting]
            self._waiting.clear()
        return jobs
