"""Calls in progress: their number, their tenants, and how long they may take.

    arrives ──place──▶ body read, prompts prepared, queued, computed, sent ──▶ place given back

A call has its place from before its body is read until its answer is sent or its client is gone,
so all that holds memory for it is counted. A call of several prompts has a place for each.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from headstart.engine.tenant_queue import TENANT
from headstart.server.errors import ApiError
from headstart.server.tenants import EVERYBODY, Tenant

_RETRY_AFTER = 1  # seconds; places come free one by one
_CALL: ContextVar[Call | None] = ContextVar("call", default=None)


class Outputs(Protocol):
    """The outputs of a request, whatever its model."""

    def fail(self, error: Exception) -> None:
        """Cancel the request if it is unfinished; its reader gets this error."""


@dataclass(eq=False, slots=True)
class Call:
    """One call: its tenant, its places, and its deadline in the event loop's time.

    trace: the headers with the trace that it is part of. read: the outputs that are read for its
    answer.
    """

    tenant: Tenant
    deadline: float
    num_places: int = 1
    num_prompts: int = 0
    trace: Mapping[str, str] = field(default_factory=dict)
    read: set[Outputs] = field(default_factory=set)


@asynccontextmanager
async def time_limit(
    call: Call, grace: float, error: Callable[[], ApiError]
) -> AsyncIterator[None]:
    """End the work inside when a call's time is over.

        body read, prompts prepared ──deadline──▶ cancelled
        outputs read                ──deadline──▶ they fail ──grace──▶ cancelled

    grace: seconds in which a late answer can report the error. error: makes the error that readers
    of outputs get, and that is raised by the work that was cancelled.
    """

    def end() -> None:
        limit.reschedule(call.deadline + grace if call.read else call.deadline)
        for outputs in list(call.read):
            outputs.fail(error())

    timer = asyncio.get_running_loop().call_at(call.deadline, end)
    limit = asyncio.timeout(None)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise error() from None
    finally:
        timer.cancel()


class Calls:
    """All calls in progress, of one event loop.

    most: places in all. most_of_tenant: places of one tenant; None for no such limit. seconds:
    the time of a call.
    """

    def __init__(self, most: int, most_of_tenant: int | None, seconds: float) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._seconds = seconds
        self._places: Counter[str] = Counter()  # by tenant

    @property
    def num_places(self) -> int:
        """Return the places that are taken."""
        return self._places.total()

    @contextmanager
    def call(self, tenant: Tenant) -> Iterator[Call]:
        """Hold a place for the work inside. Raises ApiError (429) if there is none."""
        self._take(tenant)
        call = Call(tenant, asyncio.get_running_loop().time() + self._seconds)
        token, before = _CALL.set(call), TENANT.set(tenant.key)
        try:
            yield call
        finally:
            _CALL.reset(token)
            TENANT.reset(before)
            self._places[tenant.key] -= call.num_places
            self._places += Counter()  # drops tenants without any

    def count_prompt(self) -> None:
        """Count a prompt of the current call; all but the first need one more place.

        Raises ApiError (429) if there is none. Does nothing outside calls.
        """
        call = _CALL.get()
        if call is None:
            return
        if call.num_prompts:
            self._take(call.tenant)
            call.num_places += 1
        call.num_prompts += 1

    def _take(self, tenant: Tenant) -> None:
        taken = self.num_places
        if taken >= self._most:
            raise _full(f"{taken} requests are under way; allowed: {self._most}")
        own, most = self._places[tenant.key], self._most_of_tenant
        if most is not None and tenant is not EVERYBODY and own >= most:
            raise _full(f"{own} requests of {tenant.name!r} are under way; allowed: {most}")
        self._places[tenant.key] += 1


def current_call() -> Call | None:
    """Return the current call; None outside calls."""
    return _CALL.get()


def new_name() -> str:
    """Return a name that cannot be guessed: 32 hexadecimal digits.

    Each system call releases the interpreter's lock, so one draws random bytes for many names.
    """
    try:
        return _NAMES.pop()
    except IndexError:  # also where another thread took the last one
        fresh = os.urandom(16 * 64).hex()
        _NAMES.extend(fresh[start : start + 32] for start in range(32, len(fresh), 32))
        return fresh[:32]


_NAMES: deque[str] = deque()


def _full(text: str) -> ApiError:
    return ApiError(429, text, code="rate_limit_exceeded", retry_after=_RETRY_AFTER)
