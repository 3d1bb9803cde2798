"""Decoding of images to pixels, with limits on size and cost. Needs no torch."""

from __future__ import annotations

import base64
import io
import os
import stat
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from headstart.errors import RequestError
from headstart.imports import install, load_module
from headstart.validation import describe, shorten

if TYPE_CHECKING:
    from PIL.Image import Image

ImageSource = Any
"""A Pillow image, a path, the bytes of an image file, or a `data:` URL."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Accepted formats, named as in Pillow. Their decoders run no programs and read no other files."""

MAX_ASPECT = 200
"""Largest ratio of the sides, as in Qwen2-VL's processor. Other processors scale the shorter side
to a fixed length, so an image of 1 × 30,000,000 pixels would need gigabytes."""

MAX_BYTES_PER_PIXEL = 4
HEADER_BYTES = 2**20

_decoding = threading.Lock()

_GRAY_FACTORS = {"L;2": 85, "L;4": 17}
"""Factors that convert the transparent gray level of a PNG with 2 or 4 bits to 8 bits. Pillow
converts only the pixels."""

_SPACES = " \t\r\n\f\v"
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")

# Without O_NONBLOCK, opening a named pipe waits for its writer. Windows does not have this flag.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def file_limit(max_pixels: int) -> int:
    """Return the largest file size in bytes: 4 for each of `max_pixels`, and 1 MiB for metadata."""
    return MAX_BYTES_PER_PIXEL * max_pixels + HEADER_BYTES


def decode_image(source: ImageSource, max_pixels: int) -> Image:
    """Return the image in RGB, upright, on white where it is transparent. Raises RequestError.

    The pixels of an opaque image of 8 bits are the same as in transformers and vLLM.
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
            level = opened.info.get("transparency")
            tile: Any = opened.tile
            if opened.mode == "L" and isinstance(level, int) and tile:  # not decoded yet
                opened.info["transparency"] = level * _GRAY_FACTORS.get(tile[0][3], 1)
        _check_size(*opened.size, max_pixels)
        # A user's Pillow image may be in several prompts, and Pillow decodes it on first use.
        with _decoding if opened is source else nullcontext():
            upright = ImageOps.exif_transpose(opened)
        return to_rgb(upright)
    except RequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(
            f"an image has too many pixels; allowed: 1 to {max_pixels:,} (max_image_pixels)"
        ) from error
    except UnidentifiedImageError as error:
        raise RequestError(
            f"an image cannot be read: it has an unknown format or is damaged; allowed: "
            f"{', '.join(FORMATS)}"
        ) from error
    except Exception as error:  # depends on the format: OSError, SyntaxError, struct.error, ...
        raise RequestError(
            f"an image cannot be read: {type(error).__name__}: {shorten(str(error))}"
        ) from error


def _check_size(width: int, height: int, max_pixels: int) -> None:
    """Raise RequestError for a size that costs too much to decode or to scale."""
    if width * height > max_pixels or not width * height:
        raise RequestError(
            f"an image has {width} × {height} pixels; allowed: 1 to {max_pixels:,} "
            "(max_image_pixels)"
        )
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise RequestError(
            f"an image has {width} × {height} pixels; allowed: the longer side up to "
            f"{MAX_ASPECT} times the shorter side"
        )


def to_rgb(image: Image) -> Image:
    """Convert an image of any mode to RGB, on white where it is transparent."""
    from PIL import Image

    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _scale_gray(image)
    level = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(level, tuple) and max(level) > 255:
        # The transparent level has 16 bits, but Pillow's pixels have only the upper 8 of them.
        image.info["transparency"] = tuple(channel >> 8 for channel in level)
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    colored = image.convert("RGBA")
    background = Image.new("RGB", image.size, "white")
    background.paste(colored, mask=colored.getchannel("A"))
    return background


def _scale_gray(image: Image) -> Image:
    """Convert gray of 16 or 32 bits, or of floats, to 8 bits. Pillow would clip it at 255.

    Levels of 16 bits lose their lower 8 bits, as in Pillow's RGB. Levels of 32 bits and floats are
    scaled from a range to 0 .. 255. The range is the smallest of 0 .. 1 (only floats), 0 .. 255 and
    0 .. 65,535 that contains all levels. If none does, it is from the lowest level to the highest.
    """
    from PIL import Image

    np = load_module("numpy")  # imported here, because `headstart --help` must not load it
    levels = np.asarray(image)
    low, high = float(levels.min()), float(levels.max())
    if not np.isfinite([low, high]).all():
        raise RequestError("an image has values that are not finite; allowed: finite values")
    scaled = levels
    if levels.dtype.itemsize == 2:
        scaled = levels >> 8
    elif low < 0 or high > 65_535:
        scaled = (levels - np.float64(low)) * (255 / (high - low or 1))
    elif high > 255:
        scaled = levels / 256
    elif high <= 1 and levels.dtype.kind == "f":
        scaled = levels * 255
    gray = Image.fromarray(scaled.astype(np.uint8))
    if "transparency" in image.info:
        gray.putalpha(Image.fromarray(levels != image.info["transparency"]).convert("L"))
    return gray


def read_source(source: ImageSource, limit: int) -> bytes:
    """Return the bytes of an image file.

    Raises RequestError, also for more than `limit` bytes, and OSError if a path cannot be read.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        _check_bytes(memoryview(source).nbytes, limit)
        return bytes(source)
    if isinstance(source, str) and is_data_url(source):
        return read_data_url(source, limit)
    if isinstance(source, str) and source.startswith(("http:", "https:")):
        raise RequestError("images are not fetched from the network; pass the bytes or a data: URL")
    if not isinstance(source, (str, Path)):
        raise RequestError(
            f"an image is a {type(source).__name__}; allowed: a Pillow image, a path, bytes or a "
            "data: URL"
        )
    with open(source, "rb", opener=lambda path, _: os.open(path, _OPEN_FLAGS)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):  # a device or a pipe may be endless
            raise RequestError(f"an image's path {describe(str(source))} is not a regular file")
        _check_bytes(status.st_size, limit)
        data = file.read(limit + 1)  # the file may grow, and files in /proc have size 0
    _check_bytes(len(data), limit)
    return data


def is_data_url(text: str) -> bool:
    """Return True if a string begins with `data:`, in upper or lower case."""
    return text[:5].lower() == "data:"


def read_data_url(url: str, limit: int) -> bytes:
    """Return the bytes of a `data:` URL in base64.

    Raises RequestError, also for more than `limit` bytes.
    """
    comma = url.find(",")
    head = url[: max(comma, 0)]
    if not is_data_url(head) or not head.lower().endswith(";base64"):
        raise RequestError(f"an image's URL is {describe(url)}; allowed: data:image/...;base64,...")
    ignored = sum(url.count(mark, comma) for mark in f"{_SPACES}=") + 3 * url.count("%", comma)
    _check_bytes((len(url) - comma - 1 - ignored) * 3 // 4, limit)  # before the text is copied
    try:
        data = decode_base64(url[comma + 1 :])
    except ValueError as error:
        raise RequestError(
            f"the base64 of an image's data: URL is broken: {shorten(str(error))}"
        ) from error
    _check_bytes(len(data), limit)
    return data


def decode_base64(text: str) -> bytes:
    """Return the bytes of a string in base64. Raises ValueError.

    Accepts both alphabets, line breaks, `%3D` for `=`, and missing padding.
    """
    if "%" in text:
        text = unquote(text)
    digits = text.encode("ascii").translate(_TO_STANDARD, _SPACES.encode()).rstrip(b"=")
    return base64.b64decode(digits + b"=" * (-len(digits) % 4), validate=True)


def _check_bytes(size: int, limit: int) -> None:
    if size > limit:
        raise RequestError(
            f"an image's file has {size:,} bytes; allowed: {limit:,} at most (1 MiB plus "
            "4 * max_image_pixels)"
        )
