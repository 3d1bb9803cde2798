"""Embeddings of images and sounds that outlive the encoder cache and the process."""

import json

import numpy as np
import torch
from torch import Tensor

from headstart.engine.images.encoder_cache import EncoderKey
from headstart.tiers.objects import ObjectStore

__all__ = ["KeptRows"]

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


class KeptRows:
    """Rows `[rows, hidden]` by salt and digest; the digest says all that they depend on."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def load(self, key: EncoderKey) -> Tensor | None:
        """The rows on the CPU, as they were saved; None if they are not there."""
        found = self._objects.load(_name(key))
        if found is None:
            return None
        head, _, data = bytes(found).partition(b"\n")
        dtype, shape = json.loads(head)
        rows = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        return rows.view(_DTYPES[dtype]).view(shape)

    def save(self, key: EncoderKey, rows: Tensor, seconds: float) -> None:
        """Keep rows that took so long to compute, unless one is not finite."""
        if str(rows.dtype) in _DTYPES and bool(torch.isfinite(rows).all()):
            head = json.dumps([str(rows.dtype), list(rows.shape)]).encode()
            flat = rows.detach().cpu().contiguous().view(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
            self._objects.save(_name(key), head + b"\n" + data, seconds)


def _name(key: EncoderKey) -> bytes:
    return b"image rows " + json.dumps([key.salt, key.digest.hex()]).encode()
