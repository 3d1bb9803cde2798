"""Advice to the system about pages of memory, and memory whose pages are allocated in advance.

Python's `mmap.madvise` only works on Python's own `mmap` objects; these functions take an address.
Advice works on Linux only.
"""

import ctypes
import mmap
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

# Constants that Python's `mmap` lacks.
POPULATE_READ = 22
"""MADV_POPULATE_READ (Linux 5.14): map all pages at once, as if each were read."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): map all pages at once, as if each were written."""
_COLLAPSE = 25  # MADV_COLLAPSE (Linux 6.1)
_HUGE_PAGE = 1 << 21
_PIECE = 16 << 20  # bytes to allocate before the thread checks again for `take`
# Bytes allocated beyond `size`, in addition to 1/32 of it: packed weights are aligned to pages and
# padded to whole panels.
_SLACK = 1 << 20


def advise_pages(start: int, size: int, advice: int) -> bool:
    """Give advice about all pages that overlap the `size` bytes at address `start`.

    Return True if the system accepts the advice. The call releases the GIL.
    """
    if sys.platform != "linux":  # other systems have other numbers for advice
        return False
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    is_accepted: bool = advise(first, start + size - first, advice) == 0
    return is_accepted


def drop_pages(start: int, size: int) -> None:
    """Release pages of a mapped file that is only read; reading a page maps it again."""
    if sys.platform == "linux":
        advise_pages(start, size, mmap.MADV_DONTNEED)


def request_huge_pages(start: int, size: int) -> None:
    """Request pages of 2 MiB for these bytes, for fewer TLB misses.

    The system makes them in the background, about one per second.
    """
    first, last = _huge_page_range(start, size)
    if sys.platform == "linux" and first < last:
        advise_pages(first, last - first, mmap.MADV_HUGEPAGE)


def make_huge_pages(start: int, size: int) -> None:
    """Move these bytes to pages of 2 MiB now, as far as the system has memory for such pages.

    The system copies 2 MiB at a time, at up to 4 GB/s. Other threads may use the bytes meanwhile.
    """
    first, last = _huge_page_range(start, size)
    for page in range(first, last, _HUGE_PAGE):
        advise_pages(page, _HUGE_PAGE, _COLLAPSE)


def _huge_page_range(start: int, size: int) -> tuple[int, int]:
    """Return the first and the last boundary of huge pages in these bytes."""
    return -(-start // _HUGE_PAGE) * _HUGE_PAGE, (start + size) // _HUGE_PAGE * _HUGE_PAGE


class ReadyMemory:
    """Memory whose first `size` bytes a thread allocates in advance, until `take` is called."""

    def __init__(self, size: int, files: list[Path]) -> None:
        """Start the thread. It first asks the system to read `files` into the page cache."""
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, size + size // 32 + _SLACK, flags=private)
        self.size = size
        self._files = files
        self._taken = False
        self._thread = threading.Thread(target=self._touch, name="headstart-memory", daemon=True)
        self._thread.start()

    def take(self, size: int) -> mmap.mmap | None:
        """Return at least `size` bytes of zeros; None if the memory is smaller or already taken.

        Allocated pages beyond `size` are returned to the system.
        """
        if self._taken or size > len(self._memory):
            return None
        self._taken = True
        self._thread.join()
        end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if end < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, end)
        return self._memory

    def _touch(self) -> None:
        for file in self._files:
            # Loading the model reports a missing file later.
            with suppress(OSError), file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for offset in range(0, self.size, _PIECE):
            if self._taken:
                break
            size = min(_PIECE, self.size - offset)
            with suppress(OSError, AttributeError):  # the system may have no pages of 2 MiB
                self._memory.madvise(mmap.MADV_HUGEPAGE, offset, size)
            ctypes.memset(start + offset, 0, size)  # releases the GIL
