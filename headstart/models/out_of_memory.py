"""Tells an error for want of memory from any other."""

import errno
import os

import torch

__all__ = ["is_out_of_memory"]

# On a CPU torch raises a RuntimeError with one of these texts; the second is also an OSError's.
_SAID = ("DefaultCPUAllocator: can't allocate", os.strerror(errno.ENOMEM))


def is_out_of_memory(error: Exception) -> bool:
    """True if memory ran out, or no more can be mapped."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or any(said in str(error) for said in _SAID)
