"""Advice to the system about pages of memory that Python's own `mmap.madvise` does not reach.

That takes only memory that a `mmap` of Python's holds; this takes an address. On Linux alone.
"""

import ctypes
import mmap
import sys

__all__ = ["POPULATE_READ", "POPULATE_WRITE", "advise_pages", "request_huge_pages"]

# Python has no names for them.
POPULATE_READ = 22
"""MADV_POPULATE_READ (Linux 5.14): map all pages at once, as if each were read."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): the same, as if each were written."""
_HUGE_PAGE = 1 << 21


def advise_pages(start: int, size: int, advice: int) -> bool:
    """Give advice for all pages with some of the `size` bytes at address `start`.

    True if the system takes it. The call releases the GIL.
    """
    if sys.platform != "linux":  # another has other numbers of advice
        return False
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # a C library without it
        return False
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    taken: bool = advise(first, start + size - first, advice) == 0
    return taken


def request_huge_pages(start: int, size: int) -> None:
    """Ask for pages of 2 MiB, which mean fewer TLB misses, where they fit into these bytes."""
    first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
    last = (start + size) // _HUGE_PAGE * _HUGE_PAGE
    if sys.platform == "linux" and first < last:
        advise_pages(first, last - first, mmap.MADV_HUGEPAGE)
