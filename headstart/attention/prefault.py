"""Gets the pages of K/V memory from the system before anything is written there.

The system clears each page of new memory at its first use, and in a virtual machine the host may
have to find one as well. `MADV_POPULATE_WRITE` (Linux 5.14) does so for a whole range and changes
no byte, so another thread may write there meanwhile.
"""

import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

__all__ = ["prefault"]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python has no name for


def prefault(tensors: Sequence[Tensor]) -> threading.Thread | None:
    """Get the pages of these tensors of a CPU in a thread of its own.

    Returns the thread; None where the system has no such call, or no more threads. Does nothing
    where the kernel is older.
    """
    if sys.platform != "linux":
        return None
    thread = threading.Thread(
        target=_prefault, args=(tensors,), name="headstart-pages", daemon=True
    )
    with suppress(RuntimeError):
        thread.start()
        return thread
    return None


def _prefault(tensors: Sequence[Tensor]) -> None:
    """The tensors are held meanwhile, and with them the memory."""
    with suppress(OSError, AttributeError):  # a C library without it
        advise = ctypes.CDLL(None).madvise  # which releases the GIL
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for tensor in tensors:
            start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            if advise(start, tensor.data_ptr() + tensor.nbytes - start, _POPULATE_WRITE):
                return
