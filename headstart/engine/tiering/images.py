"""Embeddings of images and sounds that outlive the encoder cache and the process.

A request that shows an image is scheduled once the tiers have answered whether they have it; the
lookup runs in a thread, and other requests run meanwhile. A lookup is forgotten when its request
leaves; another request that waits for the same image then starts a new one.
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
        """Save rows that took so long to compute, unless a value is not finite."""
        if str(rows.dtype) in _DTYPES and bool(torch.isfinite(rows).all()):
            head = json.dumps([str(rows.dtype), list(rows.shape)]).encode()
            flat = rows.detach().cpu().contiguous().view(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
            self._objects.save(_name(key), head + b"\n" + data, seconds)


def _name(key: EncoderKey) -> bytes:
    return b"image rows " + json.dumps([key.salt, key.digest.hex()]).encode()


class ImageLoads(KeptRows):
    """Rows of a store that is queried ahead; an `AskedStore` for one engine's thread."""

    def __init__(self, objects: ObjectStore) -> None:
        super().__init__(objects)
        self._thread = TenantQueue("headstart-images", 1)
        self._asked: dict[EncoderKey, Future[Tensor | None]] = {}
        self._running: set[Future[Tensor | None]] = set()  # also of images that were forgotten

    @property
    def are_under_way(self) -> bool:
        """True while an image is looked up."""
        return not all(lookup.done() for lookup in self._asked.values())

    def is_coming(self, key: EncoderKey) -> bool:
        if key not in self._asked:
            if len(self._asked) >= _MOST:
                return False
            try:
                lookup = self._thread.submit(super().load, key)
            except RuntimeError:  # it is closed, or the machine has no more threads
                return False
            self._asked[key] = lookup
            self._running.add(lookup)
            lookup.add_done_callback(self._running.discard)
        return not self._asked[key].done()

    def load(self, key: EncoderKey) -> Tensor | None:
        """Return the embeddings `[rows, hidden]`; without an earlier lookup, wait for them."""
        if (lookup := self._asked.pop(key, None)) is None:
            return super().load(key)
        with suppress(Exception):  # a damaged object: the image is encoded
            return lookup.result()
        return None

    def forget(self, key: EncoderKey) -> None:
        if (lookup := self._asked.pop(key, None)) is not None:
            lookup.cancel()

    def forget_all(self, timeout: float) -> bool:
        """Drop all lookups, and wait for current loads; return False if that takes longer.

        An image of a farther tier is saved in all tiers: that has then ended, too.
        """
        for key in list(self._asked):
            self.forget(key)
        return not futures.wait(self._running.copy(), timeout).not_done

    def wait(self, timeout: float) -> None:
        """Wait until another lookup has ended."""
        pending = [lookup for lookup in self._asked.values() if not lookup.done()]
        futures.wait(pending, timeout, futures.FIRST_COMPLETED)

    def close(self, timeout: float) -> None:
        """Accept no more lookups. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.forget_all(timeout)
