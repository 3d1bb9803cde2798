"""How a copy of a picture came about: which scaling and which codec turn one into the other.

A copy is the picture, scaled to the copy's size, then saved by a codec. `find_recoding` tries the
filters of Pillow and the qualities of JPEG and WebP on a sample of lively windows and applies
those that leave the least difference to the whole picture. For a copy that Pillow, libjpeg or
libwebp made in one go, nothing is left then, and a difference is a change of content.

Either picture may be the copy, so each trial is done in both directions. Between pictures of one
size most JPEG qualities are ruled out by one lively cell of each window.
"""

import io
from collections.abc import Iterable, Iterator
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Codec", "Recoding", "find_recoding", "is_scaled", "save_as"]

FILTERS = ("BICUBIC", "LANCZOS", "BILINEAR", "HAMMING", "BOX", "NEAREST")
"""Pillow's; the last one leaves out rows and columns of a picture that becomes smaller."""
WEBP_PIXELS = 2**22  # encoded as WebP in a search, or one picture: it costs 0.1 s per million
TRIED_SCALINGS = 4  # the best with a rough codec are tried with all
EXACT_MEDIAN = 0.0005  # of 255: next to nothing is left on most of a sample
EXACT_MEAN = 0.02  # of 255, where a filter rounds a few pixels otherwise in a window
WINDOW = 64  # pixels, a multiple of the 16 of a JPEG macroblock
WINDOWS = 5
CELL = 16  # pixels, a JPEG macroblock
BORDER = 4  # pixels of a window or a cell that are not compared
MARGIN = 8  # pixels around a window, so that its border is scaled as in the whole picture

Box = tuple[int, int, int, int]


class Codec(NamedTuple):
    """A lossy format as Pillow writes it; `subsampling` is JPEG's: 2 for 4:2:0, 0 for 4:4:4."""

    format: str
    quality: int
    subsampling: int = 0


_QUALITIES = sorted(range(75, 101), key=lambda quality: quality % 5 != 0)  # round ones first
JPEG_CODECS = [Codec("jpeg", quality, share) for share in (2, 0) for quality in _QUALITIES]
ROUGH_CODECS = [Codec("webp", 80), *(Codec("jpeg", quality, 2) for quality in (75, 85, 95))]
WEBP_CODECS = [Codec("webp", 80), Codec("webp", 75)]  # the defaults of Pillow and of cwebp


class Recoding(NamedTuple):
    """A copy retraced: `remade` is the other picture, scaled and saved as `copy` was.

    source: the other picture, scaled and not yet saved. codec: None if nothing was lost in saving.
    """

    source: "Image"
    remade: "Image"
    copy: "Image"
    codec: Codec | None


class _Left(NamedTuple):
    """Mean difference that a trial leaves on the sample, of 255: of the median window, of all.

    An edit within one window does not change the first.
    """

    median: float
    mean: float

    @property
    def is_nothing(self) -> bool:
        """True if the trial retraced the copy."""
        return self.median <= EXACT_MEDIAN and self.mean <= EXACT_MEAN


class _Trial(NamedTuple):
    """One way from a picture to its copy, and what it leaves."""

    left: _Left
    original: "Image"
    copy: "Image"
    boxes: list[Box]
    filter: str | None
    codec: Codec | None = None


def find_recoding(one: "Image", other: "Image") -> Recoding:
    """The way from one RGB picture to the other, or back, that leaves the least difference.

    Only the least of those tried, if all leave something between two pictures of one size.
    """
    scalings = list(_scalings(one, other))
    best = _least(scalings)
    if not best.left.is_nothing:
        # A codec's errors hide how a picture was scaled: find out both together.
        scalings.sort(key=lambda scaling: _least(_tried(scaling, ROUGH_CODECS)).left)
        scalings = scalings[:TRIED_SCALINGS]
        tried = chain(*(_tried(scaling, _possible_jpegs(scaling)) for scaling in scalings))
        best = _least(chain([best], tried))
    if best.left.median <= EXACT_MEDIAN:
        return _retraced(best)
    tried = chain(*(_tried(scaling, WEBP_CODECS) for scaling in scalings[:TRIED_SCALINGS]))
    return _best_webp(best, sorted(tried, key=lambda trial: trial.left))


def is_scaled(one: "Image", other: "Image") -> bool:
    """True if one RGB picture is the other, scaled by one of the filters and nothing else.

    For what a search in a sample misses: of even pictures every filter leaves next to nothing.
    """
    return any(
        _resized(original, copy.size, name).tobytes() == copy.tobytes()
        for original, copy in ((one, other), (other, one))
        for name in _filters(original.size, copy.size)
        if name is not None
    )


def _least(trials: Iterable[_Trial]) -> _Trial:
    """The trial that leaves the least; the first that leaves next to nothing ends the search."""
    best: _Trial | None = None
    for trial in trials:
        if best is None or trial.left < best.left:
            best = trial
        if best.left.is_nothing:
            break
    assert best is not None
    return best


def _best_webp(best: _Trial, webps: list[_Trial]) -> Recoding:
    """The best of a trial and several with WebP, each of which encodes the whole picture.

    WebP spreads its bits over the whole picture, so a sample only hints at what it leaves.
    """
    found, left = _retraced(best), best.left
    for trial in webps[: max(1, WEBP_PIXELS // (best.copy.width * best.copy.height))]:
        retraced = _retraced(trial)
        remade, copy = (_windows(image, trial.boxes) for image in (retraced.remade, trial.copy))
        whole = _difference(remade, copy, len(trial.boxes))
        if whole < left:
            found, left = retraced, whole
        if left.is_nothing:
            break
    return found


def _retraced(trial: _Trial) -> Recoding:
    source = trial.original
    if trial.filter is not None:
        source = _resized(source, trial.copy.size, trial.filter)
    remade = source if trial.codec is None else save_as(source, trial.codec)
    return Recoding(source, remade, trial.copy, trial.codec)


def _resized(image: "Image", size: tuple[int, int], name: str) -> "Image":
    from PIL.Image import Resampling

    return image.resize(size, Resampling[name])


def save_as(image: "Image", codec: Codec) -> "Image":
    """The RGB picture as it is read from a file of this codec."""
    from PIL import Image

    stream = io.BytesIO()
    more = {"subsampling": codec.subsampling} if codec.format == "jpeg" else {}
    image.save(stream, codec.format, quality=codec.quality, **more)
    saved = Image.open(stream, formats=(codec.format,))
    saved.load()
    return saved


def _scalings(one: "Image", other: "Image") -> Iterator[_Trial]:
    corners = _lively(one)
    for original, copy in ((one, other), (other, one)):
        filters = _filters(original.size, copy.size)
        boxes = _boxes(copy.size, corners, (one.width / copy.width, one.height / copy.height))
        wanted = _windows(copy, boxes)
        for name in filters:
            left = _difference(_sample(original, copy.size, boxes, name), wanted, len(boxes))
            yield _Trial(left, original, copy, boxes, name)


def _filters(size: tuple[int, int], scaled: tuple[int, int]) -> tuple[str | None, ...]:
    """Filters that leave no row or column out."""
    if size == scaled:
        return (None,)
    grows = all(before <= after for before, after in zip(size, scaled, strict=True))
    return FILTERS if grows else FILTERS[:-1]


def _tried(trial: _Trial, codecs: Iterable[Codec]) -> Iterator[_Trial]:
    wanted = _windows(trial.copy, trial.boxes)
    sample = _sample(trial.original, trial.copy.size, trial.boxes, trial.filter)
    for codec in codecs:
        left = _difference(save_as(sample, codec), wanted, len(trial.boxes))
        yield trial._replace(left=left, codec=codec)


def _possible_jpegs(trial: _Trial) -> Iterator[Codec]:
    """JPEG codecs, without those that are certain to leave more than EXACT_MEDIAN.

    JPEG codes each macroblock by itself: a cell that a codec leaves unlike the copy is unlike it
    in the sample as well, and in the whole picture, and costs a quarter of the sample. If the
    picture was scaled, its sample may differ from the whole by rounding, so all are tried.
    """
    if trial.filter is not None or min(trial.copy.size) < CELL:
        yield from JPEG_CODECS
        return
    original, copy, boxes = trial.original, trial.copy, trial.boxes
    window_values = _steps(_windows(original, boxes), _windows(copy, boxes), len(boxes)).shape[1]
    cells: list[Box] = []
    owners: list[int] = []
    for owner, box in enumerate(boxes):
        for corner in _lively(original.crop(box), CELL)[: WINDOWS // len(boxes)]:
            x, y = box[0] + corner[0], box[1] + corner[1]
            cells.append((x, y, x + CELL, y + CELL))
            owners.append(owner)
    sample, wanted = _windows(original, cells), _windows(copy, cells)
    for codec in JPEG_CODECS:
        sums = _steps(save_as(sample, codec), wanted, len(cells)).sum(1, dtype=np.int64)
        least = np.bincount(owners, sums, len(boxes)) / window_values
        if median(least.tolist()) <= EXACT_MEDIAN:
            yield codec


def _boxes(
    size: tuple[int, int], corners: list[tuple[int, int]], scale: tuple[float, float]
) -> list[Box]:
    """Windows of equal size in a picture of this size, at multiples of 16 pixels.

    corners: upper left ones in a picture `scale` times as large. A picture of up to WINDOW pixels
    has one window.
    """
    if min(size) <= WINDOW:
        return [(0, 0, min(size[0], 4 * WINDOW), min(size[1], 4 * WINDOW))]
    boxes = []
    for corner in corners:
        x, y = (
            min(round(at / by), side - WINDOW) // 16 * 16
            for at, by, side in zip(corner, scale, size, strict=True)
        )
        boxes.append((x, y, x + WINDOW, y + WINDOW))
    return boxes


def _lively(image: "Image", side: int = WINDOW) -> list[tuple[int, int]]:
    """Upper left corners of the windows in which neighbours differ the most."""
    if min(image.size) < side:
        return [(0, 0)]
    width, height = image.size
    small = np.asarray(image.convert("L")).astype(np.int16)
    rows, columns = height // 16, width // 16
    steps = np.abs(np.diff(small, axis=1, append=0))[: rows * 16, : columns * 16]
    blocks = np.minimum(steps, WINDOW).reshape(rows, 16, -1).sum(1, dtype=np.int32)
    blocks = blocks.reshape(rows, columns, 16).sum(2)
    reach = side // 16
    table = np.pad(blocks.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    liveliness = table[reach:, reach:] - table[:-reach, reach:]
    liveliness = liveliness - table[reach:, :-reach] + table[:-reach, :-reach]
    corners: list[tuple[int, int]] = []
    for _ in range(WINDOWS):
        y, x = divmod(int(liveliness.argmax()), liveliness.shape[1])
        if corners and liveliness[y, x] <= 0:
            break
        corners.append((x * 16, y * 16))
        near = (slice(max(0, at - reach + 1), at + reach) for at in (y, x))
        liveliness[tuple(near)] = -1
    return corners


def _windows(image: "Image", boxes: list[Box]) -> "Image":
    return _stacked([image.crop(box) for box in boxes])


def _sample(image: "Image", size: tuple[int, int], boxes: list[Box], name: str | None) -> "Image":
    """The windows of the picture scaled to `size`, one below the other."""
    if name == "NEAREST":  # picks other pixels when it begins elsewhere
        image, name = _resized(image, size, name), None
    if name is None:
        return _windows(image, boxes)
    return _stacked([_scaled_window(image, size, box, name) for box in boxes])


def _scaled_window(image: "Image", size: tuple[int, int], box: Box, name: str) -> "Image":
    from PIL.Image import Resampling

    left, top = max(0, box[0] - MARGIN), max(0, box[1] - MARGIN)
    right, bottom = min(size[0], box[2] + MARGIN), min(size[1], box[3] + MARGIN)
    x, y = image.width / size[0], image.height / size[1]
    source = (left * x, top * y, min(right * x, image.width), min(bottom * y, image.height))
    scaled = image.resize((right - left, bottom - top), Resampling[name], source)
    return scaled.crop((box[0] - left, box[1] - top, box[2] - left, box[3] - top))


def _stacked(windows: list["Image"]) -> "Image":
    from PIL import Image

    width, height = windows[0].size
    stack = Image.new("RGB", (width, height * len(windows)))
    for place, window in enumerate(windows):
        stack.paste(window, (0, place * height))
    return stack


def _difference(one: "Image", other: "Image", windows: int) -> _Left:
    """Of two stacks of windows."""
    steps = _steps(one, other, windows)
    means = steps.sum(1, dtype=np.int64) / steps.shape[1]
    return _Left(median(means.tolist()), float(means.mean()))


def _steps(one: "Image", other: "Image", windows: int) -> NDArray[np.uint8]:
    """Differences of two stacks, [window, value], but on borders: there a codec mixes windows."""
    from PIL import ImageChops

    steps = np.asarray(ImageChops.difference(one, other))
    steps = steps.reshape(windows, -1, *steps.shape[1:])
    border = min(BORDER, *(side // 3 for side in steps.shape[1:3]))
    inner = slice(border, -border or None)
    # Sums of whole numbers over one stretch of memory: NumPy's mean of a view takes twice as long.
    return np.ascontiguousarray(steps[:, inner, inner]).reshape(windows, -1)
