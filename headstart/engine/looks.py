"""How an image looks, in few bytes, so that images that look alike can be found.

The perceptual hash of the `imagehash` library (16 × 16 frequencies of the brightness) says which
images may be near. It is blind to colours and to small things, so a second look is taken: the two
are made small, 32 × 32, and no pixel may differ by much in any colour. What that takes for the
same, and what not, is measured by `bench/similar_images.py`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.errors import RequestError
from headstart.models.vision import INSTALL

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Look", "look_of"]

HASH_SIZE = 16
MAX_BITS = 12  # of 256 that may differ
THUMBNAIL = 32
MAX_STEP = 16  # of 255, in any colour of any pixel of the thumbnail


class Look(NamedTuple):
    """How an image looks: bits of its frequencies, and its thumbnail `[32, 32, 3]`."""

    frequencies: NDArray[np.bool_]
    thumbnail: NDArray[np.int16]

    def is_near(self, other: "Look") -> bool:
        """Whether the two would be taken for the same."""
        bits = int(np.count_nonzero(self.frequencies != other.frequencies))
        return bits <= MAX_BITS and int(np.abs(self.thumbnail - other.thumbnail).max()) <= MAX_STEP


def look_of(image: "Image") -> Look:
    """The look of an RGB image, in a few milliseconds.

    Raises RequestError when `imagehash` is not installed.
    """
    try:
        import imagehash
    except ImportError as error:
        raise RequestError(f"similar_images needs imagehash: {INSTALL} ({error})") from error
    frequencies: Any = imagehash.phash(image, hash_size=HASH_SIZE)
    small = np.asarray(image.resize((THUMBNAIL, THUMBNAIL)), dtype=np.int16)
    return Look(frequencies.hash.flatten(), small)
