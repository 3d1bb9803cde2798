"""Memory to read into, used again and again.

The system clears each page of new memory at its first use, which for pages of 4 KiB takes longer
than reading a file that it has in memory.
"""

import ctypes
import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress

__all__ = ["ReadBuffers"]


class ReadBuffers:
    """Buffers of one size, each used again once nobody has a view of it. For any thread.

    most: how many are kept that nobody uses; more than those go back to the system. Fewer bytes
    than a quarter of a buffer have memory of their own, so that a part of one keeps little else.
    """

    def __init__(self, nbytes: int, most: int) -> None:
        self._nbytes = nbytes
        self._most = most
        self._free: deque[mmap.mmap] = deque(maxlen=most)

    def fill(self) -> threading.Thread | None:
        """Have all buffers that are kept, with their pages, before the first one is asked for.

        Returns the thread that does so; None where the machine has no more threads.
        """
        thread = threading.Thread(target=self._fill, name="headstart-buffers", daemon=True)
        with suppress(RuntimeError):
            thread.start()
            return thread
        return None

    def _fill(self) -> None:
        while len(self._free) < self._most:
            memory = _allocate(self._nbytes)
            place = (ctypes.c_char * self._nbytes).from_buffer(memory)
            ctypes.memset(place, 0, self._nbytes)  # releases the GIL
            del place
            self._free.append(memory)

    def take(self, nbytes: int) -> memoryview:
        """Memory for so many bytes, of any content."""
        if not self._nbytes // 4 <= nbytes <= self._nbytes:
            return memoryview(bytearray(nbytes))
        try:
            memory = self._free.pop()
        except IndexError:
            memory = _allocate(self._nbytes)
        lent = (ctypes.c_char * self._nbytes).from_buffer(memory)  # which every view keeps alive
        weakref.finalize(lent, self._free.append, memory).atexit = False
        return memoryview(lent).cast("B")[:nbytes]


def _allocate(nbytes: int) -> mmap.mmap:
    """Memory of its own, in huge pages where the system has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
