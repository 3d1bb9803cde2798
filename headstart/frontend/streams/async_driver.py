"""What the readers of asyncio ask of whoever drives the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from headstart.engine.driver import Receiver
    from headstart.engine.request import RequestGroup
    from headstart.errors import EngineError

__all__ = ["AsyncDriver"]

Answer = TypeVar("Answer")


class AsyncDriver(Protocol):
    """What `AsyncLLM` and its streams ask of a driver: as of `Driver`, or of many replicas."""

    def require_request(self, given: object) -> None: ...

    def awaited(self) -> AbstractContextManager[None]: ...

    def submit(
        self, group: RequestGroup, receive: Receiver, *, every_step: bool = True
    ) -> None: ...

    def cancel(self, groups: Sequence[RequestGroup], *, wait: bool = True) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def call(self, function: Callable[[], Answer]) -> Answer: ...

    async def call_async(self, function: Callable[[], Answer]) -> Answer: ...

    def explain_silence(self, groups: Sequence[RequestGroup]) -> EngineError | None: ...

    def close(self) -> None: ...
