"""What users put into a message besides words: documents and images, from files."""

from __future__ import annotations

import base64
import mimetypes
import stat
from collections.abc import Sequence
from errno import ENODEV
from pathlib import Path
from typing import Any

from headstart.errors import RequestError
from headstart.frontend.images.decoding import decode_image, file_limit
from headstart.frontend.images.files import read_source
from headstart.validation import describe

__all__ = ["Content", "join_content", "read_document", "read_image", "read_text"]

Content = str | list[dict[str, Any]]
"""A text, or OpenAI's parts where a message has images."""

_SEPARATOR = "\n\n"


def join_content(documents: Sequence[str], images: Sequence[dict[str, Any]], text: str) -> Content:
    """A message: images first, then documents, then the text, with an empty line between texts."""
    texts = [*(document.rstrip("\n") for document in documents), text]
    whole = _SEPARATOR.join(filter(None, texts))
    return [*images, {"type": "text", "text": whole}] if images else whole


def read_document(path: Path) -> str:
    """The text of a file. Raises RequestError."""
    text = read_text(path)
    if not text.strip():
        raise RequestError(f"{path} is empty")
    return text


def read_image(path: Path, max_pixels: int) -> dict[str, Any]:
    """A file as OpenAI's part of a message. Raises RequestError if it is no image."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    try:
        data = read_source(path, file_limit(max_pixels))
        decode_image(data, max_pixels)
    except OSError as error:
        raise _unreadable(path, error) from error
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from error
    content = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{content}"}}


def read_text(path: Path) -> str:
    """What a file of UTF-8 holds. Raises RequestError, for a device that never ends as well."""
    try:
        if stat.S_ISCHR(path.stat().st_mode):
            raise OSError(ENODEV, "it is a device; allowed: a file, or a pipe")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error.reason}") from error
    except ValueError as error:  # a name that no file can have
        raise RequestError(f"cannot read {describe(str(path))}: {error}") from error


def _unreadable(path: Path, error: OSError) -> RequestError:
    return RequestError(f"cannot read {path}: {error.strerror}")
