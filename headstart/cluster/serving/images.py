"""Images in the server's process.

The server reads, checks and identifies images like an engine, so a prompt has the same tokens and
block hashes as in an engine. A replica gets the pixels and computes the embeddings.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.engine.image_cache import (
    EncoderBudget,
    EncoderCache,
    EncoderKey,
    SentImages,
    send_images,
)
from headstart.frontend.images.prompt import ImagePrompts
from headstart.frontend.images.similar import SimilarImages
from headstart.models.decoder import ProcessedImage, VisionFacts
from headstart.models.files import find_folder
from headstart.models.transformers_backend.image_encoder import ImageProcessor
from headstart.models.transformers_backend.loader import load_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from headstart.engine.config import EngineConfig
    from headstart.engine.request import RequestGroup


class ServerImages(ImagePrompts):
    """Prompts with images that replicas encode. Thread-safe."""

    def __init__(
        self,
        model: str | Path,
        facts: VisionFacts,
        tokenizer: PreTrainedTokenizerBase | None,
        config: EngineConfig,
    ) -> None:
        """Make prompts for replicas with `facts` and `config`. Raises ModelError."""
        vision = _WeightlessVision(model, facts, tokenizer)
        budget = EncoderBudget(EncoderCache(vision, config.encoder_cache_rows), None)
        super().__init__(vision, tokenizer, config, budget)
        self._fingerprint = facts.fingerprint
        self._encoded = _Encoded(config.encoder_cache_rows)
        self._similar = SimilarImages(self._encoded)

    def take(self, group: RequestGroup) -> SentImages | None:
        """Move a request's images to a message for a replica; return None without images.

        The request then no longer refers to the pixels.
        """
        extras, group.extras = group.extras, None
        return send_images(self._fingerprint, extras)

    def note_encoded(self, group: RequestGroup) -> None:
        """Record that a replica has the embeddings of a request's images."""
        for image in group.images if group.params.is_stored else ():
            key = EncoderKey(group.namespace.salt, bytes.fromhex(image.digest))
            self._encoded.add(key, image.num_tokens)

    def clear(self) -> None:
        super().clear()
        self._encoded.clear()


class _WeightlessVision(ImageProcessor):
    """A `VisionModel` without weights: it returns pixels and shapes, and no embeddings."""

    def __init__(
        self, model: str | Path, facts: VisionFacts, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        folder = find_folder(model)
        super().__init__(load_config(folder), folder, tokenizer)
        self._family.extra_rows = facts.extra_rows
        self._facts = facts
        self.bytes_per_row = facts.bytes_per_row

    def process(self, image: Any) -> ProcessedImage:
        return self.recall(image, super().process(image).shape)

    def recall(self, image: Any, shape: tuple[int, ...]) -> ProcessedImage:
        # Ray passes an array to a replica on the same machine without a copy.
        return super().recall(np.asarray(image), shape)

    def encode(self, image: ProcessedImage) -> Tensor:
        raise AssertionError("replicas encode images")

    def fingerprint(self) -> bytes:
        return self._facts.fingerprint

    def facts(self) -> VisionFacts:
        return self._facts


class _Encoded(Container[EncoderKey]):
    """The images that replicas encoded last, as many as fit into one replica's cache.

    `SimilarImages` needs only this estimate of the replicas' caches: if the embeddings of an image
    were evicted after all, the replica encodes the image again.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rows: OrderedDict[EncoderKey, int] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def add(self, key: EncoderKey, rows: int) -> None:
        with self._lock:
            self._used += rows - self._rows.pop(key, 0)
            self._rows[key] = rows
            while self._used > self._capacity:
                self._used -= self._rows.popitem(last=False)[1]

    def clear(self) -> None:
        with self._lock:
            self._rows.clear()
            self._used = 0
