"""Images that look alike: an opt-in by which a prompt may show an image that is there already.

A request with `similar_images=True` is compared with the images of earlier requests of the same
tenant (salt) that asked for it too. If one of them looks the same, has the same grid, and its
embeddings are in the encoder cache, it takes the new image's place whole, before anything is
hashed; the reply says so. So nothing is ever half one image and half another, and no request
that did not ask for it is touched.

An image for which the user gave an id of their own takes no other's place, and none takes its.
"""

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import NamedTuple

from headstart.engine.encoder_cache import EncoderCache, EncoderKey
from headstart.engine.images import LoadedImage
from headstart.engine.looks import Look

__all__ = ["SimilarImages"]


class _Place(NamedTuple):
    """Where an image may be replaced: in one tenant, by one of the same grid."""

    salt: str | None
    shape: tuple[int, ...]


class SimilarImages:
    """Images that may stand for others, with embeddings for as many rows as the encoder cache.

    May be used from several threads.
    """

    def __init__(self, cache: EncoderCache) -> None:
        self._cache = cache
        self._known: OrderedDict[tuple[_Place, bytes], tuple[Look, LoadedImage]] = OrderedDict()
        self._num_rows = 0
        self._lock = threading.Lock()

    def settle(self, loaded: LoadedImage, salt: str | None) -> LoadedImage:
        """The image that takes this one's place, of several the one used last; or this one.

        If it is this one, it may take others' places from now on.
        """
        if loaded.look is None:
            return loaded
        place = _Place(salt, loaded.image.shape)
        with self._lock:
            if (place, loaded.digest) not in self._known:
                for key, (other, image) in reversed(self._known.items()):
                    if (
                        key[0] == place
                        and EncoderKey(salt, key[1]) in self._cache
                        and loaded.look.is_near(other)
                    ):
                        self._known.move_to_end(key)
                        return replace(image, is_similar=True)
            self._remember((place, loaded.digest), loaded.look, loaded)
            return loaded

    def _remember(self, key: tuple[_Place, bytes], look: Look, loaded: LoadedImage) -> None:
        if key not in self._known:
            self._known[key] = (look, loaded)
            self._num_rows += loaded.image.num_rows
        self._known.move_to_end(key)
        while self._num_rows > self._cache.capacity:
            _, (_, oldest) = self._known.popitem(last=False)
            self._num_rows -= oldest.image.num_rows
