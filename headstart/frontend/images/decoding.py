"""From what users hand over to pixels: checked for what would cost too much. Needs no torch."""

from __future__ import annotations

import io
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from headstart.errors import RequestError
from headstart.frontend.images.files import ImageSource, read_source
from headstart.imports import install, load_module
from headstart.validation import shorten

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["FORMATS", "decode_image", "file_limit"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that are read, in Pillow's names: none of them starts another program or reads a file."""

MAX_ASPECT = 200
"""The longer side over the shorter one, at most: the limit of Qwen2-VL's processor. Others scale
the shorter side to a fixed length, which would make gigabytes of a strip of 1 × 30,000,000."""

MAX_BYTES_PER_PIXEL = 4
HEADER_BYTES = 2**20

_own_pictures = threading.Lock()

_GREY_STEPS = {"L;2": 85, "L;4": 17}
"""Between two levels of a PNG with 2 or 4 bits, in Pillow's 8 bits. Pillow scales the pixels, and
not the level that the file declares transparent."""


def file_limit(max_pixels: int) -> int:
    """Bytes that a file may have: 4 for each of `max_pixels`, and 1 MiB for what else it holds."""
    return MAX_BYTES_PER_PIXEL * max_pixels + HEADER_BYTES


def decode_image(source: ImageSource, max_pixels: int) -> Image:
    """Return the image in RGB, upright, on white where it is transparent. Raises RequestError.

    An opaque picture of 8 bits is what transformers' and vLLM's loaders make of it.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise RequestError(f"images need Pillow: {install('vision')}") from error
    try:
        if isinstance(source, Image.Image):
            opened = source
        else:
            data = read_source(source, file_limit(max_pixels))
            opened = Image.open(io.BytesIO(data), formats=FORMATS)
            _scale_transparent_level(opened)
        _check_size(*opened.size, max_pixels)
        # A user's own picture, which may be in several prompts, is not decoded twice at once.
        with _own_pictures if opened is source else nullcontext():
            upright = ImageOps.exif_transpose(opened)
        rgb: Image.Image = load_module("headstart.frontend.images.colours").to_rgb(upright)
        return rgb
    except RequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(
            f"an image has too many pixels; allowed: 1 to {max_pixels:,} (max_image_pixels)"
        ) from error
    except UnidentifiedImageError as error:
        raise RequestError(
            f"an image cannot be read: it is in no known format, or damaged; allowed: "
            f"{', '.join(FORMATS)}"
        ) from error
    # Pillow raises OSError, SyntaxError, ValueError, struct.error, EOFError: by the format.
    except Exception as error:
        raise RequestError(
            f"an image cannot be read: {type(error).__name__}: {shorten(str(error))}"
        ) from error


def _check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse a size that costs too much to decode or to scale. Raises RequestError."""
    if width * height > max_pixels or not width * height:
        raise RequestError(
            f"an image has {width} × {height} pixels; allowed: 1 to {max_pixels:,} "
            "(max_image_pixels)"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise RequestError(
            f"an image has {width} × {height} pixels; allowed: the longer side up to "
            f"{MAX_ASPECT} times the shorter"
        )


def _scale_transparent_level(image: Any) -> None:
    """Bring the transparent level of a PNG of 2 or 4 bits to the 8 bits of its pixels.

    `image` is not decoded yet: then it still has the mode of its file.
    """
    level = image.info.get("transparency")
    if image.mode == "L" and isinstance(level, int) and image.tile:
        image.info["transparency"] = level * _GREY_STEPS.get(image.tile[0][3], 1)
