"""Prefaults memory for a model while torch is imported; needs neither torch nor transformers.

Importing them keeps one core busy for two seconds and more. Meanwhile a thread asks the system to
read the weights' files ahead, and touches the memory for their copy. The system clears each page at
its first touch, which takes 2 us per page of 4 KB, or 10 us in a virtual machine whose host had
reclaimed the page. It is asked for pages of 2 MiB, which are fewer.
"""

import ctypes
import mmap
import os
import threading
from contextlib import suppress
from pathlib import Path

from headstart.machine import multiplies_bfloat16
from headstart.models.families import FAMILIES
from headstart.models.files import check_files, find_folder, read_json, weight_files
from headstart.native import is_usable, level

__all__ = ["ReadyMemory", "read_ahead"]

_PIECE = 16 << 20  # bytes touched between two checks of whether to stop
_SLACK = 1 << 20  # plus 1/32: packed weights are aligned to pages and padded to whole panels
# Mixtures of experts leave most weights in the file, and larger models wait for the disk.
_MOST = 4  # at most this fraction (1 / 4) of the machine's memory is prefaulted


class ReadyMemory:
    """Memory whose pages a thread prefaults until `take` is called."""

    def __init__(self, size: int, files: list[Path]) -> None:
        """Reads the files first, then touches `size` bytes; some more, untouched, are allocated."""
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, size + size // 32 + _SLACK, flags=private)
        self._size = size
        self._files = files
        self._taken = False
        self._thread = threading.Thread(target=self._touch, name="headstart-memory", daemon=True)
        self._thread.start()

    def take(self, size: int) -> mmap.mmap | None:
        """Memory of at least `size` bytes, all zeros; None if it is smaller or already taken.

        Touched pages beyond `size` (for weights that stay in the file) return to the system.
        """
        if self._taken or size > len(self._memory):
            return None
        self._taken = True
        self._thread.join()
        rest = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if rest < len(self._memory):
            self._memory.madvise(mmap.MADV_DONTNEED, rest)
        return self._memory

    def _touch(self) -> None:
        for file in self._files:
            # Loading the model reports a missing file later.
            with suppress(OSError), file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for at in range(0, self._size, _PIECE):
            if self._taken:
                break
            size = min(_PIECE, self._size - at)
            with suppress(OSError, AttributeError):  # a system without pages of 2 MiB
                self._memory.madvise(mmap.MADV_HUGEPAGE, at, size)
            ctypes.memset(start + at, 0, size)  # releases the GIL


def read_ahead(
    model: str | Path, dtype: str, device: str, weights: str = "auto"
) -> ReadyMemory | None:
    """Memory for the model of this path or hub name, sized by its config; None for a large one.

    Checks the model's files as `load_model` does, before anything is imported. Raises
    `ModelNotFoundError`, `DamagedModelError`.
    """
    folder = find_folder(model)
    check_files(folder)
    found = read_json(folder / "config.json")
    kept = found.get("dtype", found.get("torch_dtype"))
    # Packed for products of bfloat16, or copied to stay bfloat16 under float32.
    packed = is_usable() and dtype in ("auto", kept)
    halves = dtype == "auto" and multiplies_bfloat16() is False and level() > 0
    copied = packed or (halves and found.get("model_type") in FAMILIES)
    files = weight_files(folder)
    floats = "quantization_config" not in found and files[0].suffix != ".gguf"
    # What is quantised has memory of its own.
    copied = copied and (device, kept, weights) == ("cpu", "bfloat16", "auto") and floats
    size = sum(file.stat().st_size for file in files)
    if not hasattr(os, "posix_fadvise") or size > _memory() // _MOST:
        return None
    return ReadyMemory(size if copied else 0, files)


def _memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
