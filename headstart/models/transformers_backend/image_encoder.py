"""Images for a vision model: from a picture to the embeddings of its placeholders.

transformers does the work: its image processors (on Pillow) make pixel values, the model's own
vision tower and projection make embeddings. headstart decides how many placeholders an image has
and which tokens stand around them: see `image_families`.
"""

import hashlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.errors import DamagedModelError, HeadstartError, UnsupportedModelError
from headstart.models.decoder import DecoderModel
from headstart.models.image_encoder import ProcessedImage, VisionFacts
from headstart.models.silence_transformers import silence_transformers
from headstart.models.transformers_backend.decoder import TransformersDecoder
from headstart.models.transformers_backend.image_families import Fixed
from headstart.models.transformers_backend.image_processor import ImageProcessor

__all__ = ["TransformersVision", "load_vision"]


class TransformersVision(ImageProcessor):
    """A `VisionModel` by transformers' image processor and the model's own vision tower."""

    def __init__(
        self, decoder: TransformersDecoder, folder: Path, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        """Load the image processor and try it on a blank image.

        Raises `DamagedModelError` or `UnsupportedModelError`.
        """
        super().__init__(decoder.config, folder, tokenizer)
        self._decoder = decoder
        self._model: Any = decoder.module
        self._fingerprint: bytes | None = None
        self._fingerprinting = threading.Lock()
        self.bytes_per_row = self._try()
        """Bytes of one embedding."""

    def encode(self, image: ProcessedImage) -> Tensor:
        device, dtype = self._model.device, self._model.dtype
        made = image.inputs if image.inputs is not None else self.process(image.pixels).inputs
        assert made is not None
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in made.items()
        }
        with torch.inference_mode():
            output = self._model.get_image_features(**inputs, return_dict=True)
            rows: Tensor = output.pooler_output[0].to(dtype)
        return rows

    def fingerprint(self) -> bytes:
        with self._fingerprinting:  # or many first images would each read all weights
            if self._fingerprint is None:
                self._fingerprint = self._compute_fingerprint()
            return self._fingerprint

    def _compute_fingerprint(self) -> bytes:
        # From the weights' files: weights in memory may be packed, cast, or both.
        parts = [transformers.__version__, str(self._model.dtype), self._decoder.fingerprint()]
        parts += self.settings()
        digest = hashlib.sha256()
        for part in map(str.encode, parts):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    def facts(self) -> VisionFacts:
        return VisionFacts(self.fingerprint(), self.bytes_per_row, self._family.extra_rows)

    def _try(self) -> int:
        """Encode a blank image; returns the bytes of one embedding."""
        blank = np.zeros((64, 64, 3), dtype=np.uint8) + 99
        name = type(self._model).__name__
        try:
            with silence_transformers():
                image = self.process(blank)
                rows = self.encode(image)
                if isinstance(self._family, Fixed):
                    self._family.extra_rows = len(rows) - image.num_rows
                    image = self.process(blank)
        except HeadstartError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{name} fails over a blank image: {type(error).__name__}: {error}"
            ) from error
        if len(rows) != image.num_rows:
            raise DamagedModelError(
                f"{name} has {len(rows)} embeddings for an image of {image.num_rows} "
                "placeholders: its config.json and its image processor do not fit"
            )
        return rows[0].nbytes


def load_vision(
    decoder: DecoderModel, tokenizer: PreTrainedTokenizerBase | None
) -> TransformersVision | None:
    """The vision part of a model that was loaded from a folder, None if it has none.

    Raises `DamagedModelError` or `UnsupportedModelError`.
    """
    if not decoder.takes_images or decoder.folder is None:
        return None
    assert isinstance(decoder, TransformersDecoder), "our own modules take no images"
    return TransformersVision(decoder, decoder.folder, tokenizer)
