"""Weights in pages of 2 MiB: a decode reads all of them, and else looks up an address each 4 KB.

Many systems give such pages only to memory for which they are asked, and then slowly. Asked for
before weights are written, each first write would wait until 2 MiB are found and cleared. So they
are made once the model is loaded, by a thread of its own.
"""

import threading
from collections.abc import Iterator

from torch import Tensor, nn

from headstart.native.pages import make_huge_pages
from headstart.weights.half_weight import HalfEmbedding, HalfLinear
from headstart.weights.packed import PackedWeight

__all__ = ["move_to_huge_pages"]

_FEWEST = 32 << 20  # bytes of weights for which it is worth a thread
_APART = 1 << 21  # tensors nearer to one another share pages


def move_to_huge_pages(module: nn.Module) -> threading.Thread | None:
    """Start a thread that moves the weights of a module on the CPU; None if they are few.

    The weights must not lie in files. It takes their addresses alone, so they may be freed.
    """
    spans = _merged({tensor.data_ptr(): tensor.nbytes for tensor in _weights(module)})
    if sum(end - start for start, end in spans) < _FEWEST:
        return None

    def move() -> None:
        for start, end in spans:
            make_huge_pages(start, end - start)

    thread = threading.Thread(target=move, name="headstart-huge-pages", daemon=True)
    thread.start()
    return thread


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for part in module.modules():
        if isinstance(part, HalfLinear | HalfEmbedding):
            yield part.matrix.weight
        packed = getattr(part, "packed", None)
        if isinstance(packed, PackedWeight):
            yield packed.panels
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if tensor.device.type == "cpu":
                yield tensor


def _merged(sizes: dict[int, int]) -> list[tuple[int, int]]:
    """Where the memory at these addresses begins and ends, neighbours together."""
    found: list[tuple[int, int]] = []
    for start, size in sorted(sizes.items()):
        if found and start - found[-1][1] < _APART:
            found[-1] = (found[-1][0], max(found[-1][1], start + size))
        else:
            found.append((start, start + size))
    return found
