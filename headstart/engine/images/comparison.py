"""Comparison of two pictures at every place, at full resolution: are they the same?

`recoding.py` retraces how one became a copy of the other: how it was scaled, and as what it was
saved. A copy so remade equals the real copy but for rounding, so the difference is held to a few
levels of 255 in every window of 1, 2, 4 and 8 pixels, in brightness and in both colours. Larger
windows have lower limits: they find what is faint and wide.

A codec loses details of its own, as strong as a light grey digit. So no limit is widened for what
a codec might have done: a copy that cannot be retraced is another picture. So is one from which
saving would have erased a faint detail: whether it was ever there, nobody can tell.

Pictures are compared in bands, so that the memory for it is bounded.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headstart.engine.images.recoding import find_recoding

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["are_same", "sizes_agree"]

MAX_SCALE = 1.025
BAND = 512  # rows compared at once, an even number
REACH = 8  # rows of the next band that windows of this one reach into
BRIGHTNESS = {1: 4.0, 2: 2.0, 4: 1.0, 8: 0.75}
"""By the side of a window in pixels: how far its means may differ, of 255."""
COLOURS = {1: 3.5, 2: 2.0, 4: 1.5}
"""The same for planes of half the width and height."""
CELL = 8  # pixels
FAINT = 12  # of 255: how far means over 2 pixels range in a cell that has a detail
KEPT = 3  # a detail is erased where they range this many times less in the copy

Levels = NDArray[np.int16]


def sizes_agree(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """True if the sizes are equal, or one is the other scaled by up to 2.5 %."""
    return all(max(a, b) <= min(a, b) * MAX_SCALE for a, b in zip(one, other, strict=True))


def are_same(one: "Image", other: "Image") -> bool:
    """True if two RGB pictures differ by no more than one scaling and one saving."""
    if not sizes_agree(one.size, other.size):
        return False
    if one.tobytes() == other.tobytes():
        return one.size == other.size
    found = find_recoding(one, other)
    if found.remade is one or found.remade is other:
        return False  # nothing was scaled or saved, and yet they differ
    for box in _bands(found.copy.size):
        source, remade, copy = (picture.crop(box) for picture in found)
        if not _agree(remade, copy) or (found.remade is not found.source and _erased(source, copy)):
            return False
    return True


def _bands(size: tuple[int, int]) -> Iterator[tuple[int, int, int, int]]:
    width, height = size
    for top in range(0, height, BAND):
        yield 0, top, width, min(height, top + BAND + REACH)


def _agree(one: "Image", other: "Image") -> bool:
    """True if no window of two pictures of the same size differs by more than its limit."""
    limits = (BRIGHTNESS, COLOURS, COLOURS)
    planes = zip(_planes(one), _planes(other), limits, strict=True)
    return all(_within(left - right, limit) for left, right, limit in planes)


def _planes(image: "Image") -> list[Levels]:
    """Brightness, and both colours at half the size, as codecs keep them."""
    bright, *colours = image.convert("YCbCr").split()
    planes = [bright, *(colour.reduce(2) for colour in colours)]
    return [np.asarray(plane).astype(np.int16) for plane in planes]


def _within(sums: Levels, limits: dict[int, float]) -> bool:
    """True if the sums of all windows are within the limits for means; sums are of one pixel."""
    for side, limit in limits.items():
        if side > 1:
            sums = _doubled(sums, side // 2)
        if max(int(sums.max()), -int(sums.min())) > limit * side**2:
            return False
    return True


def _doubled(sums: Levels, side: int) -> Levels:
    """Sums over windows of twice the side, at every place; beyond the border there is nothing."""
    sums = np.pad(sums, side)
    sums = sums[:, :-side] + sums[:, side:]
    return sums[:-side] + sums[side:]


def _erased(source: "Image", copy: "Image") -> bool:
    """True if a detail of one picture is missing in the other, which has the same size."""
    for before, after in zip(_planes(source), _planes(copy), strict=True):
        ranges = _ranges(before)
        if ((ranges >= FAINT) & (_ranges(after) * KEPT < ranges)).any():
            return True
    return False


def _ranges(plane: Levels) -> NDArray[np.float32]:
    """How far means over 2 pixels range in every cell."""
    tall, wide = (1 + -side % CELL for side in plane.shape)
    plane = np.pad(plane, ((0, tall), (0, wide)), mode="edge")
    sums = plane[:, :-1] + plane[:, 1:]
    means = (sums[:-1] + sums[1:]) / np.float32(4)
    means = means.reshape(means.shape[0] // CELL, CELL, -1, CELL)
    ranges: NDArray[np.float32] = means.max((1, 3)) - means.min((1, 3))
    return ranges
