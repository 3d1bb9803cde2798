"""Images as users hand them over: read, checked, and named by their content, before any work.

An image's digest is SHA-256 over everything that shapes its embeddings: the fingerprint of the
vision tower and its processor, the pixels as the processor gets them, and the user's own id for
the image if there is one, each framed by its length. The id can only part what is equal, never
join what differs.
"""

import hashlib
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.engine.images.encoder_cache import EncoderKey
from headstart.engine.images.transfer import SentImage
from headstart.errors import RequestError
from headstart.frontend.images.decoding import ImageSource, decode_image
from headstart.models.image_encoder import ProcessedImage, VisionModel
from headstart.validation import shorten

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["NOBODY", "ImageReader", "ImageSource", "LoadedImage", "Tenant", "check_sources"]

_SHAPES = 4096  # images whose shape is remembered


class Tenant(NamedTuple):
    """The owner of images: one cache salt, or none.

    similar: whether an image of the same tenant may stand for one that looks like it.
    """

    salt: str | None
    similar: bool = False


NOBODY = Tenant(None)
"""The owner of images without a salt."""


@dataclass(frozen=True, eq=False)
class LoadedImage:
    """An image that is ready to be placed, of the tenant with this salt.

    digest: identifies its embeddings. picture: its pixels, if the request accepts images that look
    alike. is_similar: it replaces the image of the request, which is a copy of it.
    """

    digest: bytes
    image: ProcessedImage
    salt: str | None = None
    picture: "Image | None" = None
    is_similar: bool = False


class ImageReader:
    """Reads images for one model; may be used from several threads."""

    def __init__(self, vision: VisionModel, max_pixels: int) -> None:
        self._vision = vision
        self._max_pixels = max_pixels
        # Of images that were processed, by salt and digest; the one seen last at the end.
        self._shapes: dict[EncoderKey, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def read(
        self, source: ImageSource, own_id: str | None = None, tenant: Tenant = NOBODY
    ) -> LoadedImage:
        """Read, check and process a tenant's image. Raises RequestError."""
        image = decode_image(source, self._max_pixels)
        digest = self._digest(image, own_id)
        picture = image if tenant.similar and own_id is None else None
        processed = self._process(image, EncoderKey(tenant.salt, digest))
        return LoadedImage(digest, processed, tenant.salt, picture)

    def receive(self, sent: SentImage, salt: str | None) -> LoadedImage:
        """A tenant's image that another process has read. Raises RequestError."""
        from PIL import Image

        image = Image.fromarray(sent.pixels)
        processed = self._process(image, EncoderKey(salt, sent.digest))
        return LoadedImage(sent.digest, processed, salt)

    def _process(self, image: "Image", key: EncoderKey) -> ProcessedImage:
        """The image made ready; one that its tenant showed before waits until it is encoded again.

        Processing is most of what an image costs that hits: 55 ms of 62 for a photograph of
        1024 × 768 and Qwen2.5-VL's processor.
        """
        with self._lock:
            shape = self._shapes.pop(key, None)
            if shape is not None:
                self._shapes[key] = shape
                return self._vision.recall(image, shape)
        try:
            processed = self._vision.process(image)
        # Processors raise ValueError for what they refuse, and OverflowError, IndexError,
        # MemoryError and others for what they do not expect.
        except Exception as error:
            raise RequestError(
                f"the image processor refuses an image of {image.width} × {image.height} pixels: "
                f"{type(error).__name__}: {shorten(str(error))}"
            ) from error
        with self._lock:
            self._shapes[key] = processed.shape
            while len(self._shapes) > _SHAPES:
                self._shapes.pop(next(iter(self._shapes)))
        return processed

    def _digest(self, image: "Image", own_id: str | None) -> bytes:
        digest = hashlib.sha256(b"headstart-image/1")
        size = struct.pack("<II", *image.size)
        name = b"" if own_id is None else b"\x01" + own_id.encode("utf-8", "surrogatepass")
        for part in (self._vision.fingerprint(), size, image.tobytes(), name):
            digest.update(struct.pack("<Q", len(part)))
            digest.update(part)
        return digest.digest()


def check_sources(sources: Any, limit: int) -> Sequence[ImageSource]:
    """One image or several, as a list. Raises RequestError when there are more than `limit`."""
    several = list(sources) if isinstance(sources, (list, tuple)) else [sources]
    if len(several) > limit:
        raise RequestError(
            f"the prompt has {len(several)} images; allowed: up to {limit} (max_images)"
        )
    return several
