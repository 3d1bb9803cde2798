"""Prompts with images: from placeholders in text to items, embeddings and positions.

A placeholder is a token (`<image>`, `<|image_pad|>`) that stands for an image. It is repeated once
for each embedding of the image. While a prompt is built, the tokens of images have the id
`IMAGE_MARK` instead of the placeholder's id. So a placeholder that a user's text contains or the
model generates stays text.

An image's digest is SHA-256 over everything that determines its embeddings: the fingerprint of the
vision tower and its processor, the size and the RGB pixels, and the user's uuid of the image, if
any. Each field is preceded by its length. Equal images with different uuids have different digests;
different images never have the same digest.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headstart.cache import MultiModalItem
from headstart.cache.identity import MAX_TOKEN_ID
from headstart.engine.config import EngineConfig
from headstart.engine.image_cache import (
    EncoderBudget,
    EncoderKey,
    PromptImage,
    PromptImages,
    SentImage,
    SentImages,
)
from headstart.engine.outputs import ImageUse
from headstart.engine.request import PreparedPrompt, PromptExtras, RotaryPositions
from headstart.errors import EngineError, RequestError
from headstart.frontend.images.decoding import ImageSource, decode_image
from headstart.frontend.text import encode_text
from headstart.imports import load_module
from headstart.models.decoder import PlacedImage, ProcessedImage, VisionModel
from headstart.validation import describe, shorten

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

IMAGE_MARK = MAX_TOKEN_ID
"""The id of image tokens while a prompt is built."""

_SHAPES = 4096  # images whose shape is cached


@dataclass(frozen=True, eq=False)
class LoadedImage:
    """An image that is ready for a prompt, and the salt of its tenant.

    picture: the RGB image, if the request accepts similar images. is_similar: True for an earlier
    image that replaces the request's image.
    """

    digest: bytes
    image: ProcessedImage
    salt: str | None = None
    picture: Image | None = None
    is_similar: bool = False


class ImageReader:
    """Reader of images for one model. Thread-safe."""

    def __init__(self, vision: VisionModel, max_pixels: int) -> None:
        self._vision = vision
        self._max_pixels = max_pixels
        # Shapes of processed images, the least recently used first.
        self._shapes: dict[EncoderKey, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def read(
        self,
        source: ImageSource,
        uuid: str | None = None,
        salt: str | None = None,
        similar: bool = False,
    ) -> LoadedImage:
        """Read, check and process an image of the tenant with this salt. Raises RequestError."""
        image = decode_image(source, self._max_pixels)
        hasher = hashlib.sha256(b"headstart-image/1")
        size = struct.pack("<II", *image.size)
        name = b"" if uuid is None else b"\x01" + uuid.encode("utf-8", "surrogatepass")
        for part in (self._vision.fingerprint(), size, image.tobytes(), name):
            hasher.update(struct.pack("<Q", len(part)))
            hasher.update(part)
        digest = hasher.digest()
        picture = image if similar and uuid is None else None
        return LoadedImage(digest, self._process(image, EncoderKey(salt, digest)), salt, picture)

    def receive(self, sent: SentImage, salt: str | None) -> LoadedImage:
        """Process an image that another process has read. Raises RequestError."""
        from PIL import Image

        key = EncoderKey(salt, sent.digest)
        return LoadedImage(sent.digest, self._process(Image.fromarray(sent.pixels), key), salt)

    def _process(self, image: Image, key: EncoderKey) -> ProcessedImage:
        """Return the image as input of the vision tower. Raises RequestError.

        If the shape is known from an earlier request, the image processor runs only when the image
        is encoded. So it does not run for an image whose embeddings are cached.
        """
        with self._lock:
            shape = self._shapes.pop(key, None)
            if shape is not None:
                self._shapes[key] = shape
                return self._vision.recall(image, shape)
        try:
            processed = self._vision.process(image)
        except Exception as error:  # a processor may raise anything for unexpected pixels
            raise RequestError(
                f"the image processor refuses an image of {image.width} × {image.height} pixels: "
                f"{type(error).__name__}: {shorten(str(error))}"
            ) from error
        with self._lock:
            self._shapes[key] = processed.shape
            while len(self._shapes) > _SHAPES:
                self._shapes.pop(next(iter(self._shapes)))
        return processed


class ImagePrompts:
    """Maker of prompts with images. Thread-safe."""

    def __init__(
        self,
        vision: VisionModel,
        tokenizer: PreTrainedTokenizerBase | None,
        config: EngineConfig,
        budget: EncoderBudget,
    ) -> None:
        self.budget, self.cache = budget, budget.cache
        # Imported here, because it imports Pillow, which only models with vision need.
        similar = load_module("headstart.frontend.images.similar")
        self._similar = similar.SimilarImages(self.cache)
        self.vision = vision
        self._tokenizer = tokenizer
        self._reader = ImageReader(vision, config.max_image_pixels)
        self._limit = config.max_images
        self.token_id = vision.image_token_id
        self.placeholder = ""
        self.placeholder_text_ids: list[int] = []
        if tokenizer is not None:
            self.placeholder = str(tokenizer.convert_ids_to_tokens(self.token_id))
            self.placeholder_text_ids = tokenizer.encode(
                self.placeholder, add_special_tokens=False, split_special_tokens=True
            )

    def clear(self) -> None:
        """Remove every image that no request uses. Must run in the engine's thread."""
        self.cache.clear()
        self._similar.clear()

    def _as_list(self, sources: Any) -> list[Any]:
        """Return one image or several as a list. Raises RequestError for more than `max_images`."""
        images = list(sources) if isinstance(sources, (list, tuple)) else [sources]
        if len(images) > self._limit:
            raise RequestError(
                f"the prompt has {len(images)} images; allowed: up to {self._limit} (max_images)"
            )
        return images

    def check_placeholders(self, token_ids: Sequence[int], sources: Any) -> None:
        """Raise RequestError unless a prompt has one placeholder for each image."""
        images = len(self._as_list(sources))
        placeholders = sum(token_id == self.token_id for token_id in token_ids)
        if placeholders != images:
            raise RequestError(
                f"the prompt has {placeholders} placeholders {self.placeholder!r} and "
                f"{images} images; allowed: one for each image"
            )

    def read(
        self, sources: Any, uuids: Any, salt: str | None, *, similar: bool
    ) -> list[LoadedImage]:
        """Read and check images. similar: earlier images may replace them. Raises RequestError."""
        images = self._as_list(sources)
        ids = [None] * len(images) if uuids is None else self._as_list(uuids)
        if len(ids) != len(images) or not all(isinstance(uuid, str | None) for uuid in ids):
            raise RequestError(
                f"the uuids of {len(images)} images are {describe(ids)}; allowed: a string or None "
                "for each image"
            )
        loaded = [
            self._reader.read(image, uuid, salt, similar)
            for image, uuid in zip(images, ids, strict=True)
        ]
        return [self._similar.find_or_add(image, salt) for image in loaded] if similar else loaded

    def prepare(
        self, text: str | None, token_ids: Sequence[int], loaded: Sequence[LoadedImage]
    ) -> PreparedPrompt:
        """Return the prompt with these token ids, whose placeholders stand for the images."""
        images = iter(loaded)
        marked: list[int] = []
        for token_id in token_ids:
            if token_id == self.token_id:
                marked += self.marked_expansion(next(images).image.shape)
            else:
                marked.append(token_id)
        return self.build(text, marked, loaded)

    def marked_expansion(self, shape: tuple[int, ...]) -> list[int]:
        """Return the ids that replace one placeholder, with image tokens marked."""
        expansion = self.vision.expand(shape)
        return [IMAGE_MARK if token_id == self.token_id else token_id for token_id in expansion]

    def receive(
        self, token_ids: Sequence[int], sent: SentImages, salt: str | None
    ) -> PreparedPrompt:
        """Return a prompt whose images another process has read, for the tenant with this salt.

        The first call reads all weights, to compute the fingerprint. Raises EngineError if the
        other process has another vision model, and RequestError if the processor refuses an image.
        """
        if sent.fingerprint != self.vision.fingerprint():
            raise EngineError(
                "this process and the process that read the images have different models or "
                "versions of transformers"
            )
        loaded = [self._reader.receive(image, salt) for image in sent.images]
        marked = np.array(token_ids, dtype=np.int64)
        for image in sent.images:
            marked[image.positions] = IMAGE_MARK
        return self.build(None, marked.tolist(), loaded)

    def build(
        self, text: str | None, marked: Sequence[int], loaded: Sequence[LoadedImage]
    ) -> PreparedPrompt:
        """Return the prompt of marked ids, ready for the engine. Raises RequestError."""
        if not loaded:
            return PreparedPrompt(marked, text)
        token_ids = np.array(marked, dtype=np.int64)
        placeholders = np.flatnonzero(token_ids == IMAGE_MARK)
        token_ids[placeholders] = self.token_id
        images, uses = [], []
        ends = np.cumsum([image.image.num_rows for image in loaded])
        for image, part in zip(loaded, np.split(placeholders, ends), strict=False):
            first, last = int(part[0]), int(part[-1])
            item = MultiModalItem(image.digest, first, last - first + 1)
            placed = PromptImage(item, image.image, torch.from_numpy(part), image.salt)
            images.append(placed)
            num_rows = image.image.num_rows
            uses.append(ImageUse(item.digest.hex(), placed.start, num_rows, image.is_similar))
        self.budget.check(tuple(images))
        table = self.vision.positions(
            len(token_ids), [PlacedImage(image.start, image.image.shape) for image in images]
        )
        positions = None
        if table is not None:
            positions = RotaryPositions(table, int(table.max()) + 1 - len(token_ids))
        extras = PromptExtras(
            tuple(image.item for image in images),
            PromptImages(tuple(images), self.cache),
            positions,
        )
        return PreparedPrompt(token_ids.tolist(), text, extras, tuple(uses))

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of text in which a placeholder is ordinary text."""
        assert self._tokenizer is not None
        first, *others = text.split(self.placeholder) if self.placeholder else [text]
        token_ids = encode_text(self._tokenizer, first) if first else []
        for other in others:
            token_ids += [*self.placeholder_text_ids, *self.tokenize_after(other)]
        return token_ids

    def tokenize_after(self, text: str) -> list[int]:
        """Return the ids of text in the middle of a prompt.

        The text is tokenized after a special token, because some tokenizers add a space at the
        beginning of text.
        """
        assert self._tokenizer is not None
        if not text:
            return []
        anchored = encode_text(
            self._tokenizer, f"{self.placeholder}{text}", add_special_tokens=False
        )
        if anchored[:1] == [self.token_id]:
            return anchored[1:]
        return encode_text(self._tokenizer, text, add_special_tokens=False)
