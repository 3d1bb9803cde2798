"""Conversion of images to RGB. Apart from decoding, which `headstart --help` loads, for numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.errors import RequestError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

__all__ = ["to_rgb"]


def to_rgb(image: Image) -> Image:
    """Convert an image of any mode to RGB, over a white ground where it is transparent."""
    from PIL import Image

    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _scale_grey(image)
    colour = image.info.get("transparency")
    if image.mode == "RGB" and isinstance(colour, tuple) and max(colour) > 255:
        # Of 16 bits, of which Pillow's pixels have the upper 8.
        image.info["transparency"] = tuple(level >> 8 for level in colour)
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    coloured = image.convert("RGBA")
    ground = Image.new("RGB", image.size, "white")
    ground.paste(coloured, mask=coloured.getchannel("A"))
    return ground


def _scale_grey(image: Image) -> Image:
    """Convert grey of 16 or 32 bits, or of floats, to 8 bits. Pillow would clip it at 255.

    16 bits lose the lower 8, as they do in Pillow's RGB. The range of 32 bits and of floats is the
    first of 0 .. 1 (floats alone), 0 .. 255, 0 .. 65,535 that has all levels, else from the
    lowest level to the highest.
    """
    from PIL import Image

    levels: NDArray[Any] = np.asarray(image)
    low, high = float(levels.min()), float(levels.max())
    if not np.isfinite([low, high]).all():
        raise RequestError("an image has levels that are not finite; allowed: finite ones")
    scaled: NDArray[Any] = levels
    if levels.dtype.itemsize == 2:
        scaled = levels >> 8
    elif low < 0 or high > 65_535:
        scaled = (levels - np.float64(low)) * (255 / (high - low or 1))
    elif high > 255:
        scaled = levels / 256
    elif high <= 1 and levels.dtype.kind == "f":
        scaled = levels * 255
    grey = Image.fromarray(scaled.astype(np.uint8))
    if "transparency" in image.info:
        grey.putalpha(Image.fromarray(levels != image.info["transparency"]).convert("L"))
    return grey
