"""Images that look alike: an opt-in by which a prompt may show an image that is there already.

A request with `similar_images=True` is compared with the images of earlier requests of the same
tenant (salt) that asked for it too. If one of them is the same picture and its embeddings are in
the encoder cache, it takes the new image's place whole, before anything is hashed; the reply says
so. So nothing is ever half one image and half another, and no request that did not ask for it is
touched.

Thumbnails propose the few earlier images that are compared pixel by pixel. Their pixels are kept
without loss, `capacity` bytes of them at the most; the images used longest ago go first. They are
compared without a lock, so that a slow comparison holds up no other prompt.

An image for which the user gave an id of their own takes no other's place, and none takes its.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import NamedTuple

from headstart.engine.encoder_cache import EncoderCache, EncoderKey
from headstart.engine.images import LoadedImage
from headstart.engine.looks import Look, PackedLook

__all__ = ["SimilarImages"]

CAPACITY = 1 << 28  # bytes: hundreds of screenshots, or 12 photographs of 4K
MAX_COMPARED = 3  # earlier images, those with the nearest thumbnails


class _Key(NamedTuple):
    """An image of one tenant."""

    salt: str | None
    digest: bytes


@dataclass(frozen=True, eq=False)
class _Known:
    """An image that may stand for others; its pixels are in `look` alone."""

    loaded: LoadedImage
    look: PackedLook

    @property
    def num_bytes(self) -> int:
        return len(self.look.pixels) + self.look.thumbnail.nbytes


class SimilarImages:
    """Images that may stand for others, `capacity` bytes of them at the most.

    May be used from several threads.
    """

    def __init__(self, cache: EncoderCache, capacity: int = CAPACITY) -> None:
        self._cache = cache
        self._capacity = capacity
        self._known: OrderedDict[_Key, _Known] = OrderedDict()  # the one used last at the end
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all looks that are kept."""
        return self._num_bytes

    def settle(self, loaded: LoadedImage, salt: str | None) -> LoadedImage:
        """The image that takes this one's place, or this one.

        If it is this one, it may take others' places from now on.
        """
        look = loaded.look
        if look is None:
            return loaded
        own = _Key(salt, loaded.digest)
        if not self._use(own):
            for key, known in self._proposed(look, salt):
                picture = known.look.unpacked()
                if look.is_same(picture) and self._use(key):
                    image = replace(known.loaded.image, pixels=picture)
                    return replace(known.loaded, image=image, is_similar=True)
            self._remember(own, loaded, look)
        return loaded

    def _proposed(self, look: Look, salt: str | None) -> list[tuple[_Key, _Known]]:
        """The images that could be the same, with embeddings, the most likely first."""
        with self._lock:
            several = [
                (key, known)
                for key, known in reversed(self._known.items())
                if key.salt == salt and EncoderKey(salt, key.digest) in self._cache
            ]
        near = [(known.look.distance(look), key, known) for key, known in several]
        found = [(distance, key, known) for distance, key, known in near if distance is not None]
        found.sort(key=lambda one: one[0])
        return [(key, known) for _, key, known in found[:MAX_COMPARED]]

    def _use(self, key: _Key) -> bool:
        """Make this image the one used last. False if it is not known."""
        with self._lock:
            known = key in self._known
            if known:
                self._known.move_to_end(key)
            return known

    def _remember(self, key: _Key, loaded: LoadedImage, look: Look) -> None:
        bare = replace(loaded, image=replace(loaded.image, inputs=None, pixels=None), look=None)
        known = _Known(bare, look.packed())
        with self._lock:
            if key in self._known or known.num_bytes > self._capacity:
                return
            self._known[key] = known
            self._num_bytes += known.num_bytes
            while self._num_bytes > self._capacity:
                _, oldest = self._known.popitem(last=False)
                self._num_bytes -= oldest.num_bytes
