"""The choice of attention backend for a K/V memory on this machine."""

from headstart import native
from headstart.attention.backend import AttentionBackend
from headstart.attention.memory import PagedKVMemory
from headstart.attention.native import NativeAttention
from headstart.attention.torch_ops import TorchAttention

__all__ = ["make_backend", "name_backend"]


def make_backend(memory: PagedKVMemory, *, share: bool = True) -> AttentionBackend:
    """The fastest backend for `memory`: compiled kernels if they support it, else torch's.

    With `share`, decoding rows attend once to the prefix that their sequences share.
    """
    if NativeAttention.serves(memory):
        library = NativeAttention.library(memory)
        if library is not None:
            return NativeAttention(memory, library, share=share)
        native.advise()
    return TorchAttention(memory, share=share)


def name_backend(memory: PagedKVMemory) -> str:
    """Which backend `make_backend` gives for `memory`."""
    is_native = NativeAttention.serves(memory) and NativeAttention.library(memory) is not None
    return (NativeAttention if is_native else TorchAttention).__name__
