"""A device that delays work: operations wait in streams until a synchronization."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class LateEvent:
    def __init__(self, stream: "LateStream", place: int) -> None:
        self._stream, self._place = stream, place

    def synchronize(self) -> None:
        self._stream.run(self._place)


class LateStream:
    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def run(self, until: int | None = None) -> None:
        """Run the queued work up to `until`."""
        with torch.inference_mode():
            while self.done < (len(self.work) if until is None else until):
                self.done += 1
                self.work[self.done - 1]()

    def wait_stream(self, other: "LateStream") -> None:
        place = len(other.work)
        self.work.append(lambda: other.run(place))

    def record_event(self) -> LateEvent:
        return LateEvent(self, len(self.work))


class LateDevice:
    """The functions of `torch.cuda` that copies use."""

    def __init__(self) -> None:
        self.compute = LateStream()
        self.copies: list[LateStream] = []
        self._current = self.compute

    def Stream(self, device: torch.device) -> LateStream:
        self.copies.append(LateStream())
        return self.copies[-1]

    def current_stream(self, device: torch.device) -> LateStream:
        return self._current

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        self._current, before = stream, self._current
        yield
        self._current = before

    def empty(self, like: Tensor) -> Tensor:
        """Return uninitialized host memory."""
        host = torch.full(like.shape, -77, dtype=like.dtype).as_subclass(_LateTensor)
        host.device_of_copies = self
        return host

    def queue(self, work: Callable[[], object]) -> None:
        """Queue work in the current stream."""
        self._current.work.append(work)


class _LateTensor(Tensor):
    """A tensor that is written when its stream runs the copy."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device_of_copies: LateDevice

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        self.device_of_copies.queue(lambda: super(_LateTensor, self).copy_(source))
        return self
