"""Comparison of two pictures in every pixel: are they the same?

`recoding.py` retraces how one became a copy of the other: how it was scaled, and as what it was
saved. A copy so remade equals the real copy in every pixel, or it is another picture. No
difference is accepted as the work of a codec.

A codec loses details of its own, as strong as a light grey digit. A picture with such a detail,
and one without it, may have one and the same copy; then nobody can tell which of them it shows. So
a copy is refused where saving may have erased something of its picture:

- a range of brightness or colour in a cell of 8 x 8 pixels, most of which is gone in the copy;
- a point that stands out from its surroundings and leaves no trace: the picture without the point
  has the same copy there. This is tried: such points are painted over, and the picture is saved
  again. A picture that is full of such points has grain, and may be taken for one without it.

Pictures are searched in bands, so that the memory for it is bounded.
"""

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headstart.frontend.images.recoding import Codec, Recoding, find_recoding, is_scaled, save_as

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["are_same", "sizes_agree"]

MAX_SCALE = 1.025
BAND = 512  # rows searched at once, a multiple of CELL
REACH = 8  # rows of the next band that are searched with this one
CELL = 8  # pixels
FAINT = 12  # of 255: how far means over 2 pixels range in a cell that has a detail
KEPT = 3  # a detail may be erased where levels range this many times less in the copy
POINT = 12  # of 255: how far a point is beyond all levels of the ring around its window
POINT_SIDE = 3  # pixels: of the window in which a point lies; the ring is around it
RING = 2  # times as far beyond the ring as the levels of the ring range
TRACE = 1  # of 255: a point leaves a trace where its copy without it differs by more
FEW = 27  # windows: of 3 points
GRAIN = 1 / 3000  # of all windows: a picture with more untraced ones has grain, not points

Levels = NDArray[np.int16]
Pixels = NDArray[np.uint8]
Places = NDArray[np.intp]


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
    if found.remade.tobytes() != found.copy.tobytes():
        return found.codec is None and is_scaled(one, other)
    return found.codec is None or not (_erased(found) or _has_untraced(found, found.codec))


def _bands(height: int) -> Iterator[tuple[int, int]]:
    """First and last row; each band but the last has REACH rows of the next one."""
    for top in range(0, height, BAND):
        yield top, min(height, top + BAND + REACH)


def _erased(found: Recoding) -> bool:
    """True if a detail of the source is missing in its copy."""
    for top, bottom in _bands(found.copy.height):
        box = (0, top, found.copy.width, bottom)
        planes = zip(_planes(found.source.crop(box)), _planes(found.copy.crop(box)), strict=True)
        for before, after in planes:
            ranges = _ranges(before)
            if ((ranges >= 4 * FAINT) & (_ranges(after) * KEPT < ranges)).any():
                return True
    return False


def _planes(image: "Image") -> list[Levels]:
    """Brightness, and both colours at half the size, as codecs keep them."""
    bright, *colours = image.convert("YCbCr").split()
    planes = [bright, *(colour.reduce(2) for colour in colours)]
    return [np.asarray(plane).astype(np.int16) for plane in planes]


def _ranges(plane: Levels) -> Levels:
    """How far sums of 2 x 2 pixels range in every cell."""
    tall, wide = (1 + -side % CELL for side in plane.shape)
    plane = np.pad(plane, ((0, tall), (0, wide)), mode="edge")
    sums = plane[:, :-1] + plane[:, 1:]
    sums = (sums[:-1] + sums[1:]).reshape(-1, CELL, plane.shape[1] - 1)
    high, low = (pick.reduce(sums, 1) for pick in (np.maximum, np.minimum))
    shape = len(sums), -1, CELL
    ranges: Levels = high.reshape(shape).max(2) - low.reshape(shape).min(2)
    return ranges


def _has_untraced(found: Recoding, codec: Codec) -> bool:
    """True if the source has a point without which its copy would be the same there."""
    from PIL import Image, ImageChops

    source, copy = np.asarray(found.source), np.asarray(found.copy)
    rows, columns = _weak_points(source, copy, POINT_SIDE)
    if not rows.size:
        return False
    painted = source.copy()
    edge = POINT_SIDE // 2 + 1  # from the middle to the ring
    paint = source[rows - edge, columns - edge]
    for y, x in _window(POINT_SIDE):
        painted[rows + y, columns + x] = paint
    without = save_as(Image.fromarray(painted), codec)
    steps = np.asarray(ImageChops.difference(without, found.copy))
    traces = [steps[rows + y, columns + x].max(1) for y, x in _window(POINT_SIDE)]
    untraced = int((np.max(traces, 0) <= TRACE).sum())
    return 0 < untraced <= max(FEW, int(GRAIN * found.source.width * found.source.height))


def _weak_points(source: Pixels, copy: Pixels, side: int) -> tuple[Places, Places]:
    """Rows and columns of windows with a point that is weak or missing in the copy."""
    edge = side // 2 + 1  # from the middle of a window to the ring
    found: list[Places] = [np.empty((2, 0), np.intp)]
    for top, bottom in _bands(len(source)):
        if min(bottom - top, source.shape[1]) <= 2 * edge:
            continue
        beyond, steps = _beyond(source[top:bottom], side)
        places = np.flatnonzero(beyond >= POINT)
        sizes = beyond.ravel()[places].astype(np.int16)
        stand_out = sizes >= RING * steps.ravel()[places].astype(np.int16)
        if not stand_out.any():
            continue
        places, sizes = places[stand_out], sizes[stand_out]
        left = _beyond(copy[top:bottom], side)[0].ravel()[places].astype(np.int16)
        weak = np.unique(places[left * KEPT < sizes] // beyond.shape[2])  # in any colour
        rows, columns = np.unravel_index(weak, beyond.shape[:2])
        found.append(np.stack((rows + top + edge, columns + edge)))
    rows, columns = np.concatenate(found, axis=1)
    return rows, columns


def _window(side: int) -> Iterator[tuple[int, int]]:
    """Offsets from the middle of a window."""
    reach = range(-(side // 2), side // 2 + 1)
    return product(reach, reach)


def _beyond(picture: Pixels, side: int) -> tuple[Pixels, Pixels]:
    """How far windows of this side are beyond the levels of their ring; how far those range."""
    high, low = (_ring(picture, side + 2, pick) for pick in (np.maximum, np.minimum))
    above = np.maximum(_inner(picture, side, np.maximum), high) - high
    below = low - np.minimum(_inner(picture, side, np.minimum), low)
    return np.maximum(above, below), high - low


def _inner(picture: Pixels, side: int, pick: np.ufunc) -> Pixels:
    """The picked level of every window of this side that has a ring around it."""
    return _slide(_slide(picture[1:-1, 1:-1], side, 0, pick), side, 1, pick)


def _ring(picture: Pixels, side: int, pick: np.ufunc) -> Pixels:
    """The picked level of the border of every window of this side."""
    rows, columns = _slide(picture, side, 1, pick), _slide(picture, side, 0, pick)
    ends: Pixels = pick(rows[: 1 - side], rows[side - 1 :])
    sides: Pixels = pick(columns[:, : 1 - side], columns[:, side - 1 :])
    picked: Pixels = pick(ends, sides)
    return picked


def _slide(levels: Pixels, length: int, axis: int, pick: np.ufunc) -> Pixels:
    """The picked level of every run of this length along an axis."""
    run = 1
    while run < length:
        step = min(run, length - run)
        first, last = (slice(None, -step), slice(step, None))
        if axis == 0:
            levels = pick(levels[first], levels[last])
        else:
            levels = pick(levels[:, first], levels[:, last])
        run += step
    return levels
