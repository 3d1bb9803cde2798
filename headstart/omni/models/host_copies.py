"""Asynchronous copies of rows from a device to host memory.

    compute stream    layers ......... | head ............ | next pass ...
    copy stream                        | rows -> pinned memory | event
    host                                                       waits here, and not before

A copy begins when its rows are queued on the device. The host waits for it only before it reads
the rows. Rows that are in host memory already are not copied.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["BeginCopy", "HostCopy", "StreamCopies", "host_copies"]


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work before this event."""
        ...


class HostCopy:
    """Named rows on their way to host memory; complete once `wait` has returned."""

    def __init__(
        self,
        host: Mapping[str, Tensor],
        event: Event | None = None,
        source: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._host = host
        self._event = event
        self._source = source  # keeps the memory allocated until the copy is done

    def wait(self) -> Mapping[str, Tensor]:
        """Wait for the copy; returns the rows."""
        if self._event is not None:
            self._event.synchronize()
        self._event = self._source = None
        return self._host


BeginCopy = Callable[[Mapping[str, Tensor]], HostCopy]
"""Begins a copy of rows that the device may still be computing."""


class StreamCopies:
    """Copies on a separate stream into pinned memory.

    `cuda` is the needed part of `torch.cuda`; `empty` allocates pinned host memory with the shape
    and dtype of a tensor.
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
    """The function that copies rows from this device to the host."""
    if device.type == "cuda":
        return StreamCopies(device)
    return _copy_at_once


def _copy_at_once(rows: Mapping[str, Tensor]) -> HostCopy:
    """The rows themselves, which a CPU need not copy."""
    return HostCopy({name: tensor.cpu() for name, tensor in rows.items()})


def _empty_pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
