"""Images that one process reads and another one encodes: what is sent between them.

The one that reads an image checks it, names it and knows its placeholders. It sends the pixels, and
not what the image processor makes of them: that is 8 times as much for Qwen2-VL, and 53 MB for an
icon for SmolVLM. The other one has the processor run again, for an image that is new to it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.engine.images.encoder_cache import PromptImages
from headstart.engine.prompt import PromptExtras

__all__ = ["SentImage", "SentImages", "send_images"]


class SentImage(NamedTuple):
    """An image in a prompt.

    digest: names its embeddings. places: of its placeholders, int64 `[rows]`. pixels: in RGB,
    uint8 `[height, width, 3]`.
    """

    digest: bytes
    places: NDArray[np.int64]
    pixels: NDArray[np.uint8]


class SentImages(NamedTuple):
    """A prompt's images, in order, named for the vision model that has this fingerprint."""

    fingerprint: bytes
    images: tuple[SentImage, ...]


def send_images(fingerprint: bytes, extras: PromptExtras | None) -> SentImages | None:
    """The images of a prompt that was made here, with their pixels; None if it has none."""
    if extras is None or not isinstance(extras.embeddings, PromptImages):
        return None
    return SentImages(
        fingerprint,
        tuple(
            SentImage(one.item.digest, one.places.numpy(), np.asarray(one.image.pixels))
            for one in extras.embeddings.images
        ),
    )
