"""The package `gguf`, which is an optional dependency, and the name of a tensor in its files."""

from pathlib import Path
from typing import Any

from headstart.errors import UnsupportedModelError
from headstart.imports import install

__all__ = ["ROPE_FACTORS", "import_gguf"]

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor with a factor for each pair of elements that are rotated together."""


def import_gguf(file: Path) -> Any:
    """The package; raises `UnsupportedModelError` where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedModelError(
            f"{file} is a GGUF file, and the package that reads it is missing: " + install("gguf")
        ) from error
    return gguf
