"""A cache keyed by the content of inputs, for results without token blocks.

It holds embeddings of a sound, an image or a speaker, and whole results of functions.
"""

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headstart.cache import BlockKey, Namespace
from headstart.engine.images.encoder_cache import EmbeddingStore, EncoderKey
from headstart.omni.output_cache import BlockPath, OutputCache

__all__ = ["ContentCache", "content_bytes", "content_digest"]


class ContentCache:
    """Tensors by digest, in a namespace of their own in an `OutputCache`."""

    def __init__(self, cache: OutputCache, name: str) -> None:
        self._cache, self._name = cache, name
        self._place = cache.place(name)
        self._kept: EmbeddingStore | None = None
        self._model = ""

    def keep(self, store: EmbeddingStore, model: str) -> None:
        """Keep what is made from now on in a store that outlives the process, too.

        model: the fingerprint of all that a tensor depends on besides its digest.
        """
        self._kept, self._model = store, model

    def recall(self, digest: bytes, make: Callable[[], Tensor], salt: str | None = None) -> Tensor:
        """The cached tensor for this digest and salt, or the result of `make`, which is then kept.

        The tensor is on the host. Raises the exceptions of `make`.
        """
        path = BlockPath(self._place, Namespace(None, salt), [BlockKey(digest)])
        known = self._cache.find(path)
        if known:
            self._cache.touch(path)
            return known[0]["made"]
        made = self._load_or_make(digest, make, salt)
        self._cache.put(path, 0, {"made": made})
        return made

    def _load_or_make(self, digest: bytes, make: Callable[[], Tensor], salt: str | None) -> Tensor:
        if self._kept is None:
            return make().cpu()
        key = EncoderKey(salt, content_digest(self._name, self._model, digest.hex()))
        found = self._kept.load(key)
        if found is None:
            began = time.perf_counter()
            found = make().cpu()
            self._kept.save(key, found, time.perf_counter() - began)
        return found


def content_digest(*parts: Any) -> bytes:
    """SHA-256 over tensors by content and JSON values; each part has its length in front."""
    digest = hashlib.sha256()
    for part in parts:
        data = content_bytes(part) if isinstance(part, Tensor) else json.dumps(part).encode()
        digest.update(bytes([isinstance(part, Tensor)]) + len(data).to_bytes(8, "little") + data)
    return digest.digest()


def content_bytes(tensor: Tensor) -> bytes:
    """A tensor's dtype, shape and bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    head = json.dumps([str(tensor.dtype), list(tensor.shape)]).encode()
    return len(head).to_bytes(4, "little") + head + flat.view(torch.uint8).numpy().tobytes()
