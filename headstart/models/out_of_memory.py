"""Tells an error for want of memory from any other."""

import torch

__all__ = ["is_out_of_memory"]


def is_out_of_memory(error: Exception) -> bool:
    """True if memory ran out; on a CPU torch raises a RuntimeError with this text only."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator: can't allocate" in str(error)
