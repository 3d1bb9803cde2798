"""The bytes of an image file, from a path, a `data:` URL or memory, no more than a limit."""

import base64
import os
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from headstart.errors import RequestError
from headstart.validation import describe, shorten

__all__ = ["ImageSource", "decode_base64", "is_data_url", "read_data_url", "read_source"]

ImageSource = Any
"""A Pillow image, a path, the bytes of an image file, or a `data:` URL."""

_SPACES = " \t\r\n\f\v"
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")

# Without it, opening a named pipe waits for somebody who writes to it. Windows has no such pipes.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def read_source(source: ImageSource, limit: int) -> bytes:
    """The bytes of an image file, at most `limit`. Raises RequestError, and OSError for a path."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        _check_size(memoryview(source).nbytes, limit)
        return bytes(source)
    if isinstance(source, Path):
        return _read_file(source, limit)
    if isinstance(source, str):
        if is_data_url(source):
            return read_data_url(source, limit)
        if source.startswith(("http:", "https:")):
            raise RequestError(
                "images are not fetched from the network: hand over the bytes or a data: URL"
            )
        return _read_file(Path(source), limit)
    raise RequestError(
        f"an image is a Pillow image, a path, bytes or a data: URL, not {type(source).__name__}"
    )


def is_data_url(text: str) -> bool:
    """Return True if a text begins with the scheme of a `data:` URL, in any case."""
    return text[:5].lower() == "data:"


def read_data_url(url: str, limit: int) -> bytes:
    """Return the bytes of a `data:` URL in base64, at most `limit`. Raises RequestError."""
    comma = url.find(",")
    head = url[: max(comma, 0)]
    if not is_data_url(head) or not head.lower().endswith(";base64"):
        raise RequestError(f"an image's URL is {describe(url)}; allowed: data:image/...;base64,...")
    if (len(url) - comma - 1) // 4 * 3 > limit:
        extra = sum(url.count(space, comma) for space in _SPACES) + 2 * url.count("%", comma)
        padding = url.endswith("=") + url.endswith("==")
        _check_size((len(url) - comma - 1 - extra) // 4 * 3 - padding, limit)
    try:
        data = decode_base64(url[comma + 1 :])
    except ValueError as error:
        raise RequestError(
            f"the base64 of an image's data: URL is broken: {shorten(str(error))}"
        ) from error
    _check_size(len(data), limit)
    return data


def decode_base64(text: str) -> bytes:
    """Return the bytes of a text in base64. Raises ValueError.

    Both alphabets are read, and texts with line breaks, with `%3D` for `=`, or without padding.
    """
    if "%" in text:
        text = unquote(text)
    digits = text.encode("ascii").translate(_TO_STANDARD, _SPACES.encode()).rstrip(b"=")
    return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)


def _read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file; a device or a pipe, which may have no end, is refused."""
    with open(path, "rb", opener=_open, buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise RequestError(f"an image's path {describe(str(path))} is not a regular file")
        _check_size(status.st_size, limit)
        # Files of /proc say that they have no bytes, and any file may grow.
        parts: list[bytes] = []
        left = limit + 1
        while left and (part := file.read(min(left, 2**20))):
            parts.append(part)
            left -= len(part)
    data = b"".join(parts)
    _check_size(len(data), limit)
    return data


def _open(path: str, _: int) -> int:
    return os.open(path, _OPEN_FLAGS)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise RequestError(
            f"an image's file has {size:,} bytes; allowed: {limit:,} at most, 4 for each of "
            "max_image_pixels and 1 MiB"
        )
