"""The memory of weights: one block for many weights, in huge pages of 2 MiB.

Decoding reads all weights, and needs an address translation for each page. Many systems use huge
pages only on request. The first write to a huge page waits until the system has found and cleared
2 MiB. So huge pages are requested after the weights are written, or a separate thread makes them
once the model is loaded.
"""

import threading
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headstart.native import library
from headstart.native.pages import (
    POPULATE_READ,
    ReadyMemory,
    advise_pages,
    make_huge_pages,
    request_huge_pages,
)

_ALIGNMENT = 4096
_MIN_BYTES = 32 << 20  # minimum bytes of weights for which a thread is started
_APART = 1 << 21  # tensors closer than this may share a huge page


def has_memory(tensor: Tensor) -> bool:
    """Return True if a tensor's memory has the layout that its dtype and strides describe.

    A subclass of `Tensor` may have another layout: torchao's quantized weights report bfloat16, but
    consist of integers and scales, which only their own operations can read.
    """
    return type(tensor) in (Tensor, nn.Parameter)


class Arena:
    """One block of memory for many weights, so that the system can use huge pages.

    sizes: bytes of each weight. The block is in `ready_memory` if that is large enough.
    """

    def __init__(self, sizes: Iterable[int], ready_memory: ReadyMemory | None = None) -> None:
        total = sum(size + _ALIGNMENT for size in sizes)
        ready = ready_memory.take(total) if ready_memory is not None else None
        if ready is None:
            self._memory = torch.empty(total, dtype=torch.uint8)
        else:
            self._memory = torch.frombuffer(ready, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """Return the next `size` bytes, aligned to a page."""
        start = self._used + -(self._memory.data_ptr() + self._used) % _ALIGNMENT
        self._used = start + size
        assert self._used <= len(self._memory), "the arena was made for fewer weights"
        return self._memory[start : self._used]

    def close(self) -> None:
        """Request huge pages. Call when all weights are written."""
        request_huge_pages(self._memory.data_ptr(), self._used)


def map_pages(weights: Iterable[Tensor]) -> None:
    """Map all pages of memory-mapped weights at once, four times as fast as by page faults.

    Does nothing for subclasses of `Tensor`, and without the kernels.
    """
    if library() is not None:
        for weight in filter(has_memory, weights):
            advise_pages(weight.data_ptr(), weight.nbytes, POPULATE_READ)


def move_to_huge_pages(module: nn.Module) -> threading.Thread | None:
    """Start a thread that moves a module's weights on the CPU to huge pages.

    Return None if there are few bytes. The weights must not be in mapped files. They may be freed
    while the thread runs, since it only passes their addresses to the system.
    """
    sizes: dict[int, int] = {}
    for part in module.modules():
        matrix = getattr(part, "matrix", None)
        stored = [] if matrix is None else matrix.tensors
        for tensor in (*stored, *part.parameters(recurse=False), *part.buffers(recurse=False)):
            if tensor.device.type == "cpu":
                sizes[tensor.data_ptr()] = tensor.nbytes
    spans: list[tuple[int, int]] = []  # ranges of addresses; tensors nearby share a range
    for start, size in sorted(sizes.items()):
        if spans and start - spans[-1][1] < _APART:
            spans[-1] = (spans[-1][0], max(spans[-1][1], start + size))
        else:
            spans.append((start, start + size))
    if sum(end - start for start, end in spans) < _MIN_BYTES:
        return None

    def move() -> None:
        for start, end in spans:
            make_huge_pages(start, end - start)

    thread = threading.Thread(target=move, name="headstart-huge-pages", daemon=True)
    thread.start()
    return thread
