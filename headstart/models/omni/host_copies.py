"""Rows on their way from a device to host memory, while the device goes on.

    compute stream    layers ......... | head ............ | next pass ...
    copy stream                        | rows -> pinned memory | event
    host                                                       waits here, and not before

A copy is begun when its rows are queued on the device, and waited for when somebody is to see
them. What lies in host memory already is not copied and costs nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["BeginCopy", "HostCopy", "StreamCopies", "host_copies"]


class Event(Protocol):
    """A place in a stream's work."""

    def synchronize(self) -> None:
        """Return once the device is through with everything before it."""
        ...


class HostCopy:
    """Named rows, in host memory once `wait` has returned."""

    def __init__(
        self,
        host: Mapping[str, Tensor],
        event: Event | None = None,
        source: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._host = host
        self._event = event
        self._source = source  # until the copy is done, nobody else may get its memory

    def wait(self) -> Mapping[str, Tensor]:
        """The rows, complete."""
        if self._event is not None:
            self._event.synchronize()
        self._event = self._source = None
        return self._host


BeginCopy = Callable[[Mapping[str, Tensor]], HostCopy]
"""Begins to copy rows that the device may still be computing."""


class StreamCopies:
    """Copies on a stream of their own, into pinned memory.

    `cuda` is what of torch's module of that name is needed, `empty` makes pinned memory: shape
    and dtype of a tensor, in host memory.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        empty: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._device = device
        self._cuda = cuda
        self._empty = empty or _empty_pinned
        self._stream = cuda.Stream(device)

    def __call__(self, rows: Mapping[str, Tensor]) -> HostCopy:
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            host = {
                name: self._empty(tensor).copy_(tensor, non_blocking=True)
                for name, tensor in rows.items()
            }
            event = self._stream.record_event()
        return HostCopy(host, event, rows)


def host_copies(device: torch.device) -> BeginCopy:
    """How rows leave this device."""
    if device.type == "cuda":
        return StreamCopies(device)
    return _copy_at_once


def _copy_at_once(rows: Mapping[str, Tensor]) -> HostCopy:
    """On a CPU these are the rows themselves."""
    return HostCopy({name: tensor.cpu() for name, tensor in rows.items()})


def _empty_pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
