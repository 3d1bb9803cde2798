"""Images that look alike: an opt-in by which an earlier image takes the place of a copy of it.

A request with `similar_images=True` is compared with images of earlier requests of the same tenant
(salt) that set it too. If one of them is the same picture and its embeddings are in the encoder
cache, it replaces the new image as a whole, before anything is hashed, and the output says so. No
request without the option is affected.

A perceptual hash (a thumbnail) proposes up to three earlier images. The decision retraces how one
picture became a copy of the other: scaled by one of Pillow's filters, then saved as JPEG or WebP.
The copy remade in this way must equal the real copy in every pixel.

A codec may erase a detail, and then a picture with the detail and one without it have the same
copy. So a copy is also refused where saving erased something of its original:

- a range of brightness or colour in a cell of 8 x 8 pixels that is mostly gone in the copy;
- a point that stands out from its surroundings and leaves no trace: the picture with the point
  painted over has the same copy there. A picture full of such points has grain, and is accepted.

Pixels are stored without loss, up to `capacity` bytes of them; the least recently used images are
dropped first. Pictures are compared without holding the lock. An image whose embeddings have left
the encoder cache is dropped when a new image of its tenant arrives. An image for which the user
gave an id neither replaces another nor is replaced.
"""

import io
import threading
import zlib
from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.engine.images.encoder_cache import EncoderKey
from headstart.models.image_encoder import ProcessedImage

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["LoadedImage", "Look", "SimilarImages", "are_same", "look_of"]

CAPACITY = 1 << 28  # bytes: hundreds of screenshots, or 12 photographs of 4K
MAX_IMAGES = 4096  # of all tenants
ENTRY_BYTES = 2048  # of an entry's Python objects, without pixels and thumbnail
MAX_COMPARED = 3  # earlier images, those with the nearest thumbnails

THUMBNAIL = 16  # pixels on each side
MAX_STEP = 32  # of 255, in any colour of any pixel of the thumbnail
ZLIB_LEVEL = 1

MAX_SCALE = 1.025
FILTERS = ("BICUBIC", "LANCZOS", "BILINEAR", "HAMMING", "BOX", "NEAREST")
SAMPLE = 5  # cells on each side of the part on which JPEG's qualities are tried
MACROBLOCK = 16  # pixels
BORDER = 4  # pixels of the sample that depend on the pixels around it
WHOLE_TRIALS = 4  # JPEG qualities that fit the sample are tried on the whole picture
WEBP_PIXELS = 2**22  # encoded as WebP in one comparison, or one picture

BAND = 512  # rows examined at once, a multiple of CELL, to bound the memory
REACH = 8  # rows of the next band that are examined with this one
CELL = 8  # pixels
FAINT = 12  # of 255: how far means over 2 x 2 pixels range in a cell that has a detail
SHRINK = 3  # a detail may be erased where levels range this many times less in the copy
POINT = 12  # of 255: how far a point is beyond all levels of the ring around it
RING_RATIO = 2  # times as far beyond the ring as the levels of the ring range
TRACE = 1  # of 255: a point leaves a trace where its copy without it differs by more
FEW_POINTS = 27  # windows: of 3 points
GRAIN = 1 / 3000  # of all windows: a picture with more untraced points has grain

WINDOW = [(y, x) for y in range(-1, 2) for x in range(-1, 2)]
"""Offsets of the 3 x 3 pixels in which a point lies."""
RING = [(y, x) for y in range(-2, 3) for x in range(-2, 3) if (y, x) not in WINDOW]
"""Offsets of the pixels around it."""

Levels = NDArray[np.int16]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class LoadedImage:
    """An image that is ready to be placed in a prompt, of the tenant with this salt.

    digest: identifies its embeddings. look: set if the request accepts images that look alike.
    is_similar: it replaces the image of the request, of which that is a copy.
    """

    digest: bytes
    image: ProcessedImage
    salt: str | None = None
    look: "Look | None" = None
    is_similar: bool = False


class SimilarImages:
    """Images that may replace copies of them. May be used from several threads."""

    def __init__(
        self,
        cache: Container[EncoderKey],
        capacity: int = CAPACITY,
        max_images: int = MAX_IMAGES,
    ) -> None:
        """`cache` contains the images whose embeddings exist; `capacity` is in bytes."""
        self._cache = cache
        self._capacity = capacity
        self._max_images = max_images
        self._entries: _Entries = OrderedDict()  # of all tenants
        self._tenants: dict[str | None, _Entries] = {}  # the same entries by salt; none is empty
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that all entries take."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Drop every image."""
        with self._lock:
            self._entries.clear()
            self._tenants.clear()
            self._num_bytes = 0

    def settle(self, loaded: LoadedImage, salt: str | None) -> LoadedImage:
        """Return the image that replaces this one, or this one, which may then replace others."""
        look = loaded.look
        if look is None:
            return loaded
        key = EncoderKey(salt, loaded.digest)
        if self._use(key):
            return loaded
        for earlier, entry in self._propose(look, salt):
            picture = entry.look.unpacked()
            if are_same(picture, look.unpacked()) and self._use(earlier):
                image = replace(entry.loaded.image, pixels=picture)
                return replace(entry.loaded, image=image, is_similar=True)
        self._store(key, loaded, look)
        return loaded

    def _propose(self, look: "Look", salt: str | None) -> list[tuple[EncoderKey, "_Entry"]]:
        """Return the images with embeddings that could be the same, the most likely first.

        Drop those whose embeddings are gone.
        """
        encoded: list[tuple[EncoderKey, _Entry]] = []
        with self._lock:
            for key, entry in list(reversed(self._tenants.get(salt, _Entries()).items())):
                if key in self._cache:
                    entry.is_encoded = True
                    encoded.append((key, entry))
                elif entry.is_encoded:
                    self._drop(key)
        distances = [(entry.look.distance(look), key, entry) for key, entry in encoded]
        near = [each for each in distances if each[0] is not None]
        near.sort(key=lambda each: each[0] or 0)
        return [(key, entry) for _, key, entry in near[:MAX_COMPARED]]

    def _use(self, key: EncoderKey) -> bool:
        """Make this image the most recently used. Return False if it is not stored."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            entry.is_encoded = False  # its embeddings may be evicted before the prompt runs
            self._entries.move_to_end(key)
            self._tenants[key.salt].move_to_end(key)
            return True

    def _store(self, key: EncoderKey, loaded: LoadedImage, look: "Look") -> None:
        bare = replace(loaded, image=replace(loaded.image, inputs=None, pixels=None), look=None)
        entry = _Entry(bare, look.packed())
        with self._lock:
            if key in self._entries or entry.num_bytes > self._capacity:
                return
            self._entries[key] = entry
            self._tenants.setdefault(key.salt, _Entries())[key] = entry
            self._num_bytes += entry.num_bytes
            while self._num_bytes > self._capacity or len(self._entries) > self._max_images:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: EncoderKey) -> None:
        self._num_bytes -= self._entries.pop(key).num_bytes
        tenant = self._tenants[key.salt]
        del tenant[key]
        if not tenant:
            del self._tenants[key.salt]


class Look(NamedTuple):
    """How an RGB picture looks: its perceptual hash, a thumbnail int16 `[16, 16, 3]`, and pixels.

    pixels: those of `picture` compressed, for one that is stored.
    """

    thumbnail: Levels
    size: tuple[int, int]
    picture: "Image | None" = None
    pixels: bytes = b""

    def packed(self) -> "Look":
        """Return this look with its pixels compressed."""
        assert self.picture is not None
        pixels = zlib.compress(self.picture.tobytes(), ZLIB_LEVEL)
        return self._replace(picture=None, pixels=pixels)

    def unpacked(self) -> "Image":
        """Return the RGB picture."""
        from PIL import Image

        if self.picture is not None:
            return self.picture
        return Image.frombytes("RGB", self.size, zlib.decompress(self.pixels))

    def distance(self, other: "Look") -> int | None:
        """Return how far the thumbnails are apart; None if the pictures cannot be the same."""
        if not _sizes_agree(self.size, other.size):
            return None
        steps = np.abs(self.thumbnail - other.thumbnail)
        return None if steps.max() > MAX_STEP else int(steps.sum())


@dataclass(eq=False)
class _Entry:
    """An image that may replace others; its pixels are in `look` alone.

    is_encoded: its embeddings were in the encoder cache at some time since a prompt showed it.
    """

    loaded: LoadedImage
    look: Look
    is_encoded: bool = False

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.look.pixels) + self.look.thumbnail.nbytes


_Entries = OrderedDict[EncoderKey, _Entry]
"""The most recently used entry is the last."""


def look_of(image: "Image") -> Look:
    """Return the look of an RGB image."""
    from PIL.Image import Resampling

    small = image.resize((THUMBNAIL, THUMBNAIL), Resampling.BOX)
    return Look(np.asarray(small).astype(np.int16), image.size, image)


def are_same(first: "Image", second: "Image") -> bool:
    """Return True if two RGB pictures differ by no more than one scaling and one saving."""
    if not _sizes_agree(first.size, second.size):
        return False
    if first.size == second.size and first.tobytes() == second.tobytes():
        return True
    for original, copy in ((first, second), (second, first)):
        match = _retrace(original, copy)
        if match is not None:
            codec, source = match
            return codec is None or not (
                _erased(source, copy) or _has_untraced(source, copy, codec)
            )
    return False


def _sizes_agree(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return all(max(a, b) <= min(a, b) * MAX_SCALE for a, b in zip(first, second, strict=True))


class _Codec(NamedTuple):
    """A lossy format as Pillow writes it; `subsampling` is JPEG's: 2 for 4:2:0, 0 for 4:4:4."""

    format: str
    quality: int
    subsampling: int = 0

    def apply(self, image: "Image") -> "Image":
        """Return the RGB picture as it is read from a file of this codec."""
        from PIL import Image

        stream = io.BytesIO()
        options = {"subsampling": self.subsampling} if self.format == "jpeg" else {}
        image.save(stream, self.format, quality=self.quality, **options)
        saved = Image.open(stream, formats=(self.format,))
        saved.load()
        return saved


JPEG_CODECS = [_Codec("jpeg", quality, share) for share in (2, 0) for quality in range(75, 101)]
WEBP_CODECS = [_Codec("webp", 80), _Codec("webp", 75)]  # the defaults of Pillow and of cwebp


def _retrace(original: "Image", copy: "Image") -> tuple[_Codec | None, "Image"] | None:
    """Return the codec by which the original became the copy, and the original scaled to its size.

    None if no way of those tried leads to the copy exactly.
    """
    wanted = copy.tobytes()
    box = _lively_box(copy)
    sources = _scaled(original, copy, box)
    for source in sources:
        if source.tobytes() == wanted:
            return None, source
    # JPEG codes each macroblock by itself, so a quality that fits the whole fits a sample.
    inner = _inner(copy.crop(box), copy.size)
    fits = (
        (codec, source)
        for source in sources
        for sample in [source.crop(box)]
        for codec in JPEG_CODECS
        if np.array_equal(_inner(codec.apply(sample), copy.size), inner)
    )
    # WebP spreads its bits over the whole picture, so a sample shows nothing.
    num_webps = max(1, WEBP_PIXELS // (copy.width * copy.height))
    webps = product(WEBP_CODECS, sources)
    for codec, source in (*islice(fits, WHOLE_TRIALS), *islice(webps, num_webps)):
        if codec.apply(source).tobytes() == wanted:
            return codec, source
    return None


def _scaled(original: "Image", copy: "Image", box: tuple[int, int, int, int]) -> list["Image"]:
    """Return the original scaled to the copy's size, by the most likely filter first.

    NEAREST leaves out rows and columns of a picture that becomes smaller, so it is not tried there.
    """
    from PIL.Image import Resampling

    if original.size == copy.size:
        return [original]
    grows = original.width <= copy.width and original.height <= copy.height
    filters = FILTERS if grows else FILTERS[:-1]
    wanted = np.asarray(copy.crop(box)).astype(np.int16)
    scaled = [original.resize(copy.size, Resampling[name]) for name in filters]
    return sorted(scaled, key=lambda each: int(np.abs(np.asarray(each.crop(box)) - wanted).sum()))


def _lively_box(image: "Image") -> tuple[int, int, int, int]:
    """Return the box of whole macroblocks, up to SAMPLE on each side, with the most contrast."""
    width, height = image.size
    columns, rows = -(-width // MACROBLOCK), -(-height // MACROBLOCK)
    levels = np.asarray(image.convert("L")).astype(np.int16)
    tall, wide = rows * MACROBLOCK - height, columns * MACROBLOCK - width
    blocks = np.pad(levels, ((0, tall), (0, wide)), mode="edge").reshape(
        rows, MACROBLOCK, columns, MACROBLOCK
    )
    contrast = blocks.max((1, 3)) - blocks.min((1, 3))
    sums = np.pad(contrast.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    side_y, side_x = min(SAMPLE, rows), min(SAMPLE, columns)
    totals = (
        sums[side_y:, side_x:]
        - sums[:-side_y, side_x:]
        - sums[side_y:, :-side_x]
        + sums[:-side_y, :-side_x]
    )
    top, left = (int(i) * MACROBLOCK for i in np.unravel_index(totals.argmax(), totals.shape))
    right = min(width, left + side_x * MACROBLOCK)
    return left, top, right, min(height, top + side_y * MACROBLOCK)


def _inner(sample: "Image", whole: tuple[int, int]) -> Pixels:
    """Return the pixels of a sample that do not depend on the picture around it."""
    pixels = np.asarray(sample)
    return pixels if sample.size == whole else pixels[BORDER:-BORDER, BORDER:-BORDER]


def _bands(height: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last row of each band, with REACH rows of the next one."""
    for top in range(0, height, BAND):
        yield top, min(height, top + BAND + REACH)


def _erased(source: "Image", copy: "Image") -> bool:
    """Return True if a detail of the source is missing in its copy."""
    for top, bottom in _bands(copy.height):
        box = (0, top, copy.width, bottom)
        planes = zip(_planes(source.crop(box)), _planes(copy.crop(box)), strict=True)
        for before, after in planes:
            ranges = _ranges(before)
            if ((ranges >= 4 * FAINT) & (_ranges(after) * SHRINK < ranges)).any():
                return True
    return False


def _planes(image: "Image") -> list[Levels]:
    """Return brightness, and both colours at half the size, as codecs store them."""
    bright, *colours = image.convert("YCbCr").split()
    planes = [bright, *(colour.reduce(2) for colour in colours)]
    return [np.asarray(plane).astype(np.int16) for plane in planes]


def _ranges(plane: Levels) -> Levels:
    """Return how far sums of 2 x 2 pixels range in every cell."""
    tall, wide = (1 + -side % CELL for side in plane.shape)
    plane = np.pad(plane, ((0, tall), (0, wide)), mode="edge")
    sums = plane[:, :-1] + plane[:, 1:]
    sums = sums[:-1] + sums[1:]
    cells = sums.reshape(len(sums) // CELL, CELL, -1, CELL)
    ranges: Levels = cells.max((1, 3)) - cells.min((1, 3))
    return ranges


def _has_untraced(source: "Image", copy: "Image", codec: _Codec) -> bool:
    """Return True if the source has a point without which its copy would be the same there."""
    from PIL import Image

    pixels, saved = np.asarray(source), np.asarray(copy)
    weak = [
        np.argwhere(_is_weak_point(pixels[top:bottom], saved[top:bottom])) + np.array([top + 2, 2])
        for top, bottom in _bands(len(pixels))
        if min(bottom - top, source.width) > 4
    ]
    rows, columns = np.unique(np.concatenate([*weak, np.empty((0, 2), np.intp)]), axis=0).T
    if not rows.size:
        return False
    painted = pixels.copy()
    paint = pixels[rows - 2, columns - 2]
    for y, x in WINDOW:
        painted[rows + y, columns + x] = paint
    without = np.asarray(codec.apply(Image.fromarray(painted))).astype(np.int16)
    steps = np.abs(without - saved)
    traces = np.max([steps[rows + y, columns + x].max(1) for y, x in WINDOW], 0)
    untraced = int((traces <= TRACE).sum())
    return 0 < untraced <= max(FEW_POINTS, int(GRAIN * source.width * source.height))


def _is_weak_point(source: Pixels, copy: Pixels) -> NDArray[Any]:
    """Return for each 3 x 3 window whether it has a point that is weak or missing in the copy."""
    before, ring = _stand_out(source)
    after, _ = _stand_out(copy)
    is_point = (before >= POINT) & (before >= RING_RATIO * ring)
    weak: NDArray[Any] = np.any(is_point & (after * SHRINK < before), axis=2)
    return weak


def _stand_out(picture: Pixels) -> tuple[Levels, Levels]:
    """Return how far each window is beyond all levels of its ring, and how far those range."""
    height, width = picture.shape[:2]

    def pick(offsets: list[tuple[int, int]], function: np.ufunc) -> Levels:
        views = (picture[2 + y : height - 2 + y, 2 + x : width - 2 + x] for y, x in offsets)
        picked: Levels = reduce(function, views).astype(np.int16)
        return picked

    high, low = pick(RING, np.maximum), pick(RING, np.minimum)
    above: Levels = pick(WINDOW, np.maximum) - high
    below: Levels = low - pick(WINDOW, np.minimum)
    return np.maximum(np.maximum(above, below), 0), high - low
