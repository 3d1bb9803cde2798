"""Gets the pages of K/V memory from the system before anything is written there.

The system clears each page of new memory at its first use, and in a virtual machine the host may
have to find one as well. `POPULATE_WRITE` does so for a whole range and changes no byte, so another
thread may write there meanwhile.
"""

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from headstart.native.pages import POPULATE_WRITE, advise_pages

__all__ = ["prefault"]


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
    for tensor in tensors:
        if not advise_pages(tensor.data_ptr(), tensor.nbytes, POPULATE_WRITE):
            return
