"""Checks the counts in a GGUF file's metadata, before other code believes them.

The package `gguf`, and so transformers, reads an array of 2^60 numbers on past the end of the file,
one at a time, until memory is full. ggml's docs/gguf.md has the layout.
"""

import mmap
import struct
from pathlib import Path

__all__ = ["CUT_OFF", "check_header"]

CUT_OFF = "; was it downloaded or copied only in part?"

# Bytes of a number, by the number of its type.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)  # the first one has counts of 32 bits
_MOST_ELEMENTS = 1 << 22  # of an array: 16 times as many as the largest vocabularies have


def check_header(file: Path) -> None:
    """Raise `ValueError` for what is no GGUF file, is big-endian, or ends within its metadata."""
    with file.open("rb") as opened:
        magic = opened.read(4)
    if not magic:
        raise ValueError("it is empty")
    if magic != b"GGUF":
        raise ValueError(f"it is no GGUF file: it begins with {magic!r}")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        try:
            _magic, version, _tensors, keys = cursor.read("<IIQQ")
            if not version & 0xFFFF:
                raise ValueError("its numbers are big-endian, which is not supported")
            if version not in _VERSIONS:
                raise ValueError(f"it has version {version} of the format, which is not supported")
            for _ in range(keys):
                cursor.skip_value(_STRING)
                cursor.skip_value(*cursor.read("<I"))
        except struct.error as error:
            raise ValueError(f"it ends within its metadata{CUT_OFF}") from error
        except RecursionError as error:
            raise ValueError("its arrays lie too deep in one another") from error


class _Cursor:
    """Goes through a file's metadata; raises `struct.error` at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def read(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def skip_value(self, kind: int) -> None:
        """Skip a value of this type."""
        if kind == _STRING:
            self._skip(*self.read("<Q"))
        elif kind == _ARRAY:
            inner, count = self.read("<IQ")
            if count > _MOST_ELEMENTS:
                raise ValueError(f"an array has {count} elements, more than {_MOST_ELEMENTS}")
            if inner in _SIZES:
                self._skip(count * _SIZES[inner])
            else:
                for _ in range(count):
                    self.skip_value(inner)
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"a value has the type {kind}, which is unknown")

    def _skip(self, size: int) -> None:
        left = len(self._data) - self._at
        if size > left:
            raise ValueError(f"a value of {size} bytes stands {left} bytes before its end")
        self._at += size
