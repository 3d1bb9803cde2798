"""Embeddings of images and sounds that outlive the encoder cache and the process.

A request that shows an image is scheduled once it is known what the tiers have of it; the lookup
runs in a thread, and other requests run meanwhile. What a request asked for is forgotten when it
leaves; another request that waits for the same image then asks again.
"""

import json
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from headstart.engine.image_cache import EncoderKey
from headstart.engine.tenant_queue import TenantQueue
from headstart.tiers import ObjectStore

__all__ = ["ImageLoads", "KeptRows"]

_MOST = 16  # images that are looked up, or found and not taken; more are loaded within a step
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class KeptRows:
    """Rows `[rows, hidden]` by salt and digest; the digest covers all that they depend on."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def load(self, key: EncoderKey) -> Tensor | None:
        """Return the rows on the CPU, as they were saved; None if they are not there."""
        data = self._objects.load(_name(key))
        if data is None:
            return None
        head, _, values = bytes(data).partition(b"\n")
        dtype, shape = json.loads(head)
        rows = torch.from_numpy(np.frombuffer(values, dtype=np.uint8).copy())
        return rows.view(_DTYPES[dtype]).view(shape)

    def save(self, key: EncoderKey, rows: Tensor, seconds: float) -> None:
        """Save rows that took so long to compute, unless one is not finite."""
        if str(rows.dtype) in _DTYPES and bool(torch.isfinite(rows).all()):
            head = json.dumps([str(rows.dtype), list(rows.shape)]).encode()
            flat = rows.detach().cpu().contiguous().view(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
            self._objects.save(_name(key), head + b"\n" + data, seconds)


def _name(key: EncoderKey) -> bytes:
    return b"image rows " + json.dumps([key.salt, key.digest.hex()]).encode()


class ImageLoads:
    """Rows of a store that is asked ahead; an `AskedStore` for one engine's thread."""

    def __init__(self, rows: KeptRows) -> None:
        self._rows = rows
        self._thread = TenantQueue("headstart-images", 1)
        self._asked: dict[EncoderKey, Future[Tensor | None]] = {}
        self._running: set[Future[Tensor | None]] = set()  # also of images that were forgotten

    @property
    def are_under_way(self) -> bool:
        """True while an image is looked up."""
        return not all(found.done() for found in self._asked.values())

    def is_coming(self, key: EncoderKey) -> bool:
        """True while it is not known what the store has of this image; asks at the first call."""
        if key not in self._asked:
            if len(self._asked) >= _MOST:
                return False
            try:
                found = self._thread.submit(self._rows.load, key)
            except RuntimeError:  # it is closed, or the machine has no more threads
                return False
            self._asked[key] = found
            self._running.add(found)
            found.add_done_callback(self._running.discard)
        return not self._asked[key].done()

    def load(self, key: EncoderKey) -> Tensor | None:
        """Return the embeddings `[rows, hidden]`; an image that was not asked for is waited for."""
        if (found := self._asked.pop(key, None)) is None:
            return self._rows.load(key)
        with suppress(Exception):  # a damaged object: the image is encoded
            return found.result()
        return None

    def save(self, key: EncoderKey, rows: Tensor, seconds: float) -> None:
        """Save embeddings that took so long to compute."""
        self._rows.save(key, rows, seconds)

    def forget(self, key: EncoderKey) -> None:
        """Forget an image: a request that asked for it has left."""
        if (found := self._asked.pop(key, None)) is not None:
            found.cancel()

    def forget_all(self, timeout: float) -> bool:
        """Forget all images, and wait for what is being loaded; False if that takes longer.

        An image of a farther tier is saved in all tiers: that is over then, too.
        """
        for key in list(self._asked):
            self.forget(key)
        return not futures.wait(self._running.copy(), timeout).not_done

    def wait(self, timeout: float) -> None:
        """Wait until one more image is looked up."""
        pending = [found for found in self._asked.values() if not found.done()]
        futures.wait(pending, timeout, futures.FIRST_COMPLETED)

    def close(self, timeout: float) -> None:
        """Look up no more images. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.forget_all(timeout)
