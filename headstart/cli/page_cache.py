"""How much of a model's files is in memory already: what is left is read from the disk."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["CachedShare"]

_SAMPLES = 256  # pages of each file: asking for one takes a microsecond


class CachedShare:
    """The share of files that the system has cached, from a sample of their pages."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises OSError where the system does not say."""
        try:
            self._mincore = ctypes.CDLL(None, use_errno=True).mincore
        except (AttributeError, TypeError) as error:  # Windows
            raise OSError("the system does not tell which pages are cached") from error
        self._maps = [np.memmap(file, np.uint8, mode="r") for file in files]

    def read(self) -> float:
        """From 0 to 1. Raises OSError."""
        held = sum(self._share(each) * each.size for each in self._maps)
        return held / sum(each.size for each in self._maps)

    def _share(self, content: np.memmap[tuple[int], np.dtype[np.uint8]]) -> float:
        pages = -(-content.size // mmap.PAGESIZE)
        places = np.linspace(0, pages - 1, min(pages, _SAMPLES), dtype=np.int64)
        return sum(self._is_cached(content.ctypes.data, int(at)) for at in places) / len(places)

    def _is_cached(self, start: int, page: int) -> bool:
        found = (ctypes.c_ubyte * 1)()
        address = ctypes.c_void_p(start + page * mmap.PAGESIZE)
        if self._mincore(address, ctypes.c_size_t(1), found):
            raise OSError(ctypes.get_errno(), "mincore failed")
        return bool(found[0] & 1)
