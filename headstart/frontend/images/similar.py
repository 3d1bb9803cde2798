"""Similar images: an opt-in that replaces a copy of an earlier image by that image.

An image of a request with `similar_images=True` is compared with images of earlier requests of its
tenant that set this option too. An earlier image replaces the new image if it shows the same
picture and its embeddings are in the encoder cache. The prompt then has the digest of the earlier
image, and the output reports the replacement.

Up to three earlier images are examined, those with the nearest thumbnails. The new image may be
the copy or the original. A copy is the original scaled by one of Pillow's filters, then saved as
JPEG or WebP; both changes are optional. To find the filter and the codec, a small window with many
edges is scaled and saved in several ways, and compared with the other image. Then the whole
original is scaled and saved, and the result must equal the other image in every pixel.

A codec erases faint details, so two different pictures may have the same copy. To detect this,
details up to 4 pixels wide are painted over in the original, and the result is saved again. If
painting over a detail does not change the copy, the codec erased this detail, and the earlier image
does not replace the new image. If very many details are erased, they are grain, and are ignored.
"""

import io
import threading
import zlib
from collections import OrderedDict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageFilter

from headstart.engine.image_cache import EncoderKey
from headstart.frontend.images.prompt import LoadedImage

CAPACITY = 1 << 28  # bytes: hundreds of screenshots, or 12 photographs in 4K
MAX_IMAGES = 4096  # images of all tenants; comparing this many thumbnails takes about a millisecond
ENTRY_BYTES = 2048  # Python objects of an entry (1.7 to 2.0 kB) without pixels and thumbnail
MAX_COMPARED = 3  # earlier images to examine
THUMBNAIL = 16  # pixels on each side
MAX_DIFFERENCE = 32  # of 255, between two thumbnails, in each color of each pixel
ZLIB_LEVEL = 1  # the fastest
MAX_SCALE = 1.025
WINDOW = 128  # pixels, a multiple of the side of a JPEG macroblock, 16
BORDER = 8  # pixels at a window's edge that are not compared, because pixels outside affect them
FILTERS = ("BICUBIC", "LANCZOS", "BILINEAR", "HAMMING", "BOX", "NEAREST")
TRIED_SCALINGS = 4  # scalings to try with all codecs, chosen with `ROUGH_CODECS`
TRIED_JPEGS = 3  # JPEG codecs with which the whole picture is saved
WEBP_PIXELS = 2**22  # pixels to save as WebP in a search; a million pixels take 0.1 s
# Allowed mean difference in a window, of 255. Pixels of a window that is scaled separately differ
# slightly from those of the whole scaled picture.
NEAR = 0.2
BAND = 512  # rows in which details are searched at once
DETAIL = 12  # of 255; minimum difference between a detail and the pixels around it
FAINT = 3  # a detail is faint in a copy that retains at most 1 / FAINT of its contrast
TRACE = 1  # of 255; a detail leaves a trace if painting over it changes the copy by more than this
GRAIN = 1 / 3000  # of all pixels; a picture with more erased pixels has grain
FEW = 27  # this many erased pixels or fewer are never grain, even in a small picture

Picture = Image.Image
Pixels = NDArray[np.uint8]
Thumbnail = NDArray[np.int16]  # [16, 16, 3]
Box = tuple[int, int, int, int]
Codec = dict[str, Any]  # arguments of Pillow's `save` for a lossy format
JPEG_CODECS: list[Codec] = [
    {"format": "jpeg", "quality": quality, "subsampling": subsampling}
    for subsampling in (2, 0)  # 4:2:0 and 4:4:4
    for quality in range(75, 101)
]
WEBP_CODECS: list[Codec] = [{"format": "webp", "quality": quality} for quality in (80, 75)]
ROUGH_CODECS = [None, WEBP_CODECS[0], *JPEG_CODECS[:26:10]]


def thumbnail_of(picture: Picture) -> Thumbnail:
    """Return the thumbnail of an RGB picture."""
    small = picture.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return np.asarray(small).astype(np.int16)


def distance(first: Thumbnail, second: Thumbnail) -> int | None:
    """Return the sum of differences of two thumbnails; None if any exceeds `MAX_DIFFERENCE`."""
    differences = np.abs(first - second)
    return None if differences.max() > MAX_DIFFERENCE else int(differences.sum())


@dataclass(eq=False)
class _Entry:
    """An image that may replace others. pixels: compressed without loss.

    is_encoded: True if a search has found its embeddings in the encoder cache after the image's
    last use. If the embeddings are missing later, they were evicted.
    """

    loaded: LoadedImage
    thumbnail: Thumbnail
    size: tuple[int, int]
    pixels: bytes
    is_encoded: bool = False

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.pixels) + self.thumbnail.nbytes


class SimilarImages:
    """Images that may replace others, within `capacity` bytes and `max_images`. Thread-safe.

    cache: the encoder cache. When a new image of a tenant arrives, the tenant's images whose
    embeddings were evicted are removed. An image that is not encoded yet stays, because its request
    may still wait.
    """

    def __init__(
        self, cache: Container[EncoderKey], capacity: int = CAPACITY, max_images: int = MAX_IMAGES
    ) -> None:
        self._cache = cache
        self._capacity = capacity
        self._max_images = max_images
        self._images: OrderedDict[EncoderKey, _Entry] = OrderedDict()  # least recently used first
        # The same images by salt, so that a search does not read other tenants' images.
        self._tenants: dict[str | None, OrderedDict[EncoderKey, _Entry]] = {}
        self.num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._images)

    def clear(self) -> None:
        """Remove every image."""
        with self._lock:
            self._images.clear()
            self._tenants.clear()
            self.num_bytes = 0

    def find_or_add(self, loaded: LoadedImage, salt: str | None) -> LoadedImage:
        """Return the earlier image that replaces `loaded`; otherwise store and return `loaded`."""
        picture = loaded.picture
        key = EncoderKey(salt, loaded.digest)
        if picture is None or self._use(key):
            return loaded
        thumbnail = thumbnail_of(picture)
        for other, entry in self._candidates(thumbnail, picture.size, salt):
            earlier = Image.frombytes("RGB", entry.size, zlib.decompress(entry.pixels))
            if are_same(picture, earlier) and self._use(other):
                image = replace(entry.loaded.image, pixels=earlier)
                return replace(entry.loaded, image=image, is_similar=True)
        bare = replace(loaded, image=replace(loaded.image, inputs=None, pixels=None), picture=None)
        pixels = zlib.compress(picture.tobytes(), ZLIB_LEVEL)
        self._add(key, _Entry(bare, thumbnail, picture.size, pixels))
        return loaded

    def _candidates(
        self, thumbnail: Thumbnail, size: tuple[int, int], salt: str | None
    ) -> list[tuple[EncoderKey, _Entry]]:
        """Return the encoded images with the nearest thumbnails, the nearest first."""
        candidates = []
        with self._lock:
            for key, entry in reversed(list(self._tenants.get(salt, {}).items())):
                if key in self._cache:
                    entry.is_encoded = True
                    if _sizes_agree(size, entry.size):
                        candidates.append((key, entry))
                elif entry.is_encoded:
                    self._remove(key)
        distances = [distance(thumbnail, entry.thumbnail) for _, entry in candidates]
        order = sorted((d, index) for index, d in enumerate(distances) if d is not None)
        return [candidates[index] for _, index in order[:MAX_COMPARED]]

    def _use(self, key: EncoderKey) -> bool:
        """Make an image the most recently used. Return False if it is unknown."""
        with self._lock:
            if key not in self._images:
                return False
            self._images[key].is_encoded = False  # the request encodes it again if necessary
            self._images.move_to_end(key)
            self._tenants[key.salt].move_to_end(key)
            return True

    def _add(self, key: EncoderKey, entry: _Entry) -> None:
        with self._lock:
            if key in self._images or entry.num_bytes > self._capacity:
                return
            self._images[key] = entry
            self._tenants.setdefault(key.salt, OrderedDict())[key] = entry
            self.num_bytes += entry.num_bytes
            while self.num_bytes > self._capacity or len(self._images) > self._max_images:
                self._remove(next(iter(self._images)))

    def _remove(self, key: EncoderKey) -> None:
        self.num_bytes -= self._images.pop(key).num_bytes
        del self._tenants[key.salt][key]
        if not self._tenants[key.salt]:
            del self._tenants[key.salt]


def are_same(first: Picture, second: Picture) -> bool:
    """Return True if one RGB picture is a copy of the other, scaled and saved at most once."""
    if not _sizes_agree(first.size, second.size):
        return False
    if first.tobytes() == second.tobytes():
        return first.size == second.size
    for (original, copy, name, _, _), codec in _likely_transforms(first, second):
        source = _resize(original, copy.size, name)
        if _save(source, codec).tobytes() == copy.tobytes():
            return codec is None or not _loses_detail(source, copy, codec)
    return False


def _sizes_agree(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Return True if the sizes are equal, or one is the other scaled by up to 2.5 %."""
    return all(max(a, b) <= min(a, b) * MAX_SCALE for a, b in zip(first, second, strict=True))


class _Scaling(NamedTuple):
    """The scaling of a picture to a copy's size.

    filter: None if the sizes are equal. window: a part of the scaled picture. target: the same part
    of the copy.
    """

    original: Picture
    copy: Picture
    filter: str | None
    window: Picture
    target: Picture

    def difference(self, codec: Codec | None) -> float:
        """Return the mean difference, of 255, between the target and the window after saving."""
        pixels = np.asarray(ImageChops.difference(_save(self.window, codec), self.target))
        border = min(BORDER, *(side // 3 for side in pixels.shape[:2]))
        inner = slice(border, -border or None)
        return float(pixels[inner, inner].mean())


_Transform = tuple[_Scaling, Codec | None]


def _likely_transforms(first: Picture, second: Picture) -> Iterator[_Transform]:
    """Yield the transforms of one picture that almost reproduce a window of the other."""
    scalings = [*_scalings(first, second), *_scalings(second, first)]
    yield from _ranked(scalings, [None], NEAR)
    if len(scalings) > TRIED_SCALINGS:
        scalings.sort(key=lambda scaling: min(map(scaling.difference, ROUGH_CODECS)))
    yield from _ranked(scalings[:TRIED_SCALINGS], JPEG_CODECS, NEAR)[:TRIED_JPEGS]
    # WebP distributes its bits over the whole picture, so the difference in a window is inexact.
    count = max(1, WEBP_PIXELS // (first.width * first.height))
    yield from _ranked(scalings[:TRIED_SCALINGS], WEBP_CODECS, inf)[:count]


def _ranked(
    scalings: list[_Scaling], codecs: Sequence[Codec | None], limit: float
) -> list[_Transform]:
    """Return the transforms whose difference in the window is at most `limit`, smallest first."""
    ranked = [(s.difference(codec), s, codec) for s in scalings for codec in codecs]
    ranked.sort(key=lambda entry: entry[0])
    return [(scaling, codec) for difference, scaling, codec in ranked if difference <= limit]


def _scalings(original: Picture, copy: Picture) -> Iterator[_Scaling]:
    box = _busiest_window(copy)
    target = copy.crop(box)
    if original.size == copy.size:
        yield _Scaling(original, copy, None, original.crop(box), target)
        return
    grows = all(a <= b for a, b in zip(original.size, copy.size, strict=True))
    for name in FILTERS if grows else FILTERS[:-1]:  # shrinking by NEAREST drops rows and columns
        yield _Scaling(original, copy, name, _scaled_window(original, copy.size, box, name), target)


def _busiest_window(image: Picture) -> Box:
    """Return the window with the most edges; its position is a multiple of 16 pixels."""
    width, height = image.size
    if width < WINDOW or height < WINDOW:
        return 0, 0, min(width, 2 * WINDOW), min(height, 2 * WINDOW)
    edges = image.filter(ImageFilter.FIND_EDGES).convert("L")
    cells = np.asarray(edges.crop((0, 0, width // 16 * 16, height // 16 * 16)).reduce(16))
    sums = np.lib.stride_tricks.sliding_window_view(cells, (WINDOW // 16, WINDOW // 16)).sum((2, 3))
    y, x = (int(cell) * 16 for cell in np.unravel_index(sums.argmax(), sums.shape))
    return x, y, x + WINDOW, y + WINDOW


def _scaled_window(image: Picture, size: tuple[int, int], box: Box, name: str) -> Picture:
    """Return the part `box` of the picture scaled to `size`."""
    if name == "NEAREST":  # scaling only the window would give other pixels
        return _resize(image, size, name).crop(box)
    # Scale a larger part, because the filter reads the pixels around each pixel.
    left, top = max(0, box[0] - BORDER), max(0, box[1] - BORDER)
    right, bottom = min(size[0], box[2] + BORDER), min(size[1], box[3] + BORDER)
    x, y = image.width / size[0], image.height / size[1]
    source = (left * x, top * y, min(right * x, image.width), min(bottom * y, image.height))
    scaled = _resize(image, (right - left, bottom - top), name, source)
    return scaled.crop((box[0] - left, box[1] - top, box[2] - left, box[3] - top))


def _resize(image: Picture, size: tuple[int, int], name: str | None, box: Any = None) -> Picture:
    return image if name is None else image.resize(size, Image.Resampling[name], box)


def _save(image: Picture, codec: Codec | None) -> Picture:
    """Return the RGB picture after saving it with a codec and reading it again."""
    if codec is None:
        return image
    stream = io.BytesIO()
    image.save(stream, **codec)
    return Image.open(stream, formats=(codec["format"],)).convert("RGB")


def _loses_detail(source: Picture, copy: Picture, codec: Codec) -> bool:
    """Return True if a detail of the source leaves no trace in the copy; False for grain."""
    pixels = np.asarray(source)
    padded = np.pad(pixels, ((4, 4), (4, 4), (0, 0)), mode="edge")
    bands = range(0, len(pixels), BAND)
    painted = np.concatenate([_paint_over_details(padded[top : top + BAND + 8]) for top in bands])
    copied = np.asarray(copy)
    details, remaining = _differences(pixels, painted), _differences(copied, painted)
    repainted = np.asarray(_save(Image.fromarray(painted), codec))
    traces = _extreme(np.pad(_differences(repainted, copied), 2), np.maximum)
    erased = int(((details >= DETAIL) & (remaining <= details // FAINT) & (traces <= TRACE)).sum())
    return 0 < erased <= max(FEW, int(GRAIN * details.size))


def _differences(first: Pixels, second: Pixels) -> Any:
    """Return the largest difference of each pixel among its three color channels."""
    return (np.maximum(first, second) - np.minimum(first, second)).max(2)


def _paint_over_details(padded: Pixels) -> Pixels:
    """Return a padded picture without its details and without the 4 pixels of padding.

    A morphological opening removes bright details, and a closing removes dark details.
    """
    painted = pixels = padded[4:-4, 4:-4]
    for first, last in ((np.minimum, np.maximum), (np.maximum, np.minimum)):
        level = _extreme(_extreme(padded, first), last)
        differences = np.maximum(pixels, level) - np.minimum(pixels, level)
        painted = np.where(differences >= DETAIL, level, painted)
    return painted


def _extreme(levels: Any, pick: np.ufunc) -> Any:
    """Return the minimum or maximum (`pick`) of every window of 5 x 5 pixels."""
    for _ in range(2):
        two = pick(levels[:-1], levels[1:])
        levels = pick(pick(two[:-3], two[2:-1]), levels[4:]).swapaxes(0, 1)
    return levels
