"""Images that look alike: an opt-in by which a prompt may show an image that is there already.

A request with `similar_images=True` is compared with the images of earlier requests of the same
tenant (salt) that asked for it too. If one of them is the same picture and its embeddings are in
the encoder cache, it takes the new image's place whole, before anything is hashed; the reply says
so. So nothing is ever half one image and half another, and no request that did not ask for it is
touched.

Thumbnails propose the few earlier images that are compared pixel by pixel. Their pixels are kept
without loss, `capacity` bytes of them at the most; the images used longest ago go first. They are
compared without a lock, so that a slow comparison holds up no other prompt.

A new image is compared with its own tenant's alone. An image whose embeddings have left the
encoder cache is forgotten when a new image of its tenant comes. One that is not encoded yet stays:
its request may still wait, or be prepared together with others before any of them runs.

An image for which the user gave an id of their own takes no other's place, and none takes its.
"""

import threading
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, replace

from headstart.engine.images.encoder_cache import EncoderKey
from headstart.frontend.images.perceptual_hash import Look, PackedLook
from headstart.frontend.images.reading import LoadedImage

__all__ = ["SimilarImages"]

CAPACITY = 1 << 28  # bytes: hundreds of screenshots, or 12 photographs of 4K
MAX_KNOWN = 4096  # images of all tenants: a new one walks through them in about a millisecond
ENTRY_BYTES = 2048  # Python's objects of an entry: 1.7 to 2.0 kB, besides pixels and thumbnail
MAX_COMPARED = 3  # earlier images, those with the nearest thumbnails


@dataclass(eq=False)
class _Known:
    """An image that may stand for others; its pixels are in `look` alone.

    is_encoded: whether its embeddings were found in the encoder cache since a prompt showed it.
    """

    loaded: LoadedImage
    look: PackedLook
    is_encoded: bool = False

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.look.pixels) + self.look.thumbnail.nbytes


_Images = OrderedDict[EncoderKey, _Known]
"""The one used last at the end."""


class SimilarImages:
    """Images that may stand for others, `capacity` bytes and `max_known` of them at the most.

    May be used from several threads.
    """

    def __init__(
        self,
        cache: Container[EncoderKey],
        capacity: int = CAPACITY,
        max_known: int = MAX_KNOWN,
    ) -> None:
        """`cache` has the images whose embeddings are there."""
        self._cache = cache
        self._capacity = capacity
        self._max_known = max_known
        self._known: _Images = OrderedDict()  # of all tenants
        self._tenants: dict[str | None, _Images] = {}  # the same ones by salt; none is empty
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all images that are kept, with what Python takes to keep them."""
        return self._num_bytes

    def __len__(self) -> int:
        """Images that are kept."""
        return len(self._known)

    def clear(self) -> None:
        """Forget every image."""
        with self._lock:
            self._known.clear()
            self._tenants.clear()
            self._num_bytes = 0

    def settle(self, loaded: LoadedImage, salt: str | None) -> LoadedImage:
        """The image that takes this one's place, or this one.

        If it is this one, it may take others' places from now on.
        """
        look = loaded.look
        if look is None:
            return loaded
        own = EncoderKey(salt, loaded.digest)
        if not self._use(own):
            for key, known in self._proposed(look, salt):
                picture = known.look.unpacked()
                if look.is_same(picture) and self._use(key):
                    image = replace(known.loaded.image, pixels=picture)
                    return replace(known.loaded, image=image, is_similar=True)
            self._remember(own, loaded, look)
        return loaded

    def _proposed(self, look: Look, salt: str | None) -> list[tuple[EncoderKey, _Known]]:
        """The images that could be the same, with embeddings, the most likely first."""
        with self._lock:
            several = self._encoded(salt)
        near = [(known.look.distance(look), key, known) for key, known in several]
        found = [(distance, key, known) for distance, key, known in near if distance is not None]
        found.sort(key=lambda one: one[0])
        return [(key, known) for _, key, known in found[:MAX_COMPARED]]

    def _encoded(self, salt: str | None) -> list[tuple[EncoderKey, _Known]]:
        """The tenant's images with embeddings, the one used last first.

        Forgets those that had some. The lock is held.
        """
        encoded: list[tuple[EncoderKey, _Known]] = []
        gone: list[EncoderKey] = []
        for key, known in reversed(self._tenants.get(salt, _Images()).items()):
            if key in self._cache:
                known.is_encoded = True
                encoded.append((key, known))
            elif known.is_encoded:
                gone.append(key)
        for key in gone:
            self._forget(key)
        return encoded

    def _use(self, key: EncoderKey) -> bool:
        """Make this image the one used last: a prompt shows it. False if it is not known."""
        with self._lock:
            known = self._known.get(key)
            if known is None:
                return False
            known.is_encoded = False  # if need be the prompt has it encoded again
            self._known.move_to_end(key)
            self._tenants[key.salt].move_to_end(key)
            return True

    def _remember(self, key: EncoderKey, loaded: LoadedImage, look: Look) -> None:
        bare = replace(loaded, image=replace(loaded.image, inputs=None, pixels=None), look=None)
        known = _Known(bare, look.packed())
        with self._lock:
            if key in self._known or known.num_bytes > self._capacity:
                return
            self._known[key] = known
            self._tenants.setdefault(key.salt, _Images())[key] = known
            self._num_bytes += known.num_bytes
            while self._num_bytes > self._capacity or len(self._known) > self._max_known:
                self._forget(next(iter(self._known)))

    def _forget(self, key: EncoderKey) -> None:
        self._num_bytes -= self._known.pop(key).num_bytes
        tenant = self._tenants[key.salt]
        del tenant[key]
        if not tenant:
            del self._tenants[key.salt]
