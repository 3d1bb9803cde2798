"""Images to what a vision tower takes, by transformers' processor; needs no weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import AutoImageProcessor

from headstart.errors import DamagedModelError, UnsupportedModelError
from headstart.imports import install
from headstart.models.image_encoder import PlacedImage, ProcessedImage
from headstart.models.silence_transformers import silence_transformers
from headstart.models.transformers_backend.image_families import make_family

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

__all__ = ["ImageProcessor"]


class ImageProcessor:
    """The part of a `VisionModel` that has no weights: all but `encode` and `fingerprint`."""

    def __init__(
        self, config: PreTrainedConfig, folder: Path, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        """Load the image processor of a model. Raises DamagedModelError, UnsupportedModelError."""
        self._processor = _load_processor(folder)
        self.image_token_id = int(config.image_token_id)
        self._family = make_family(config, tokenizer)

    def process(self, image: Any) -> ProcessedImage:
        found = self._processor(**self._family.arguments(image), return_tensors="pt")
        shape = self._family.shape(found)
        inputs = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        return ProcessedImage(inputs, shape, self.expand(shape).count(self.image_token_id))

    def recall(self, image: Any, shape: tuple[int, ...]) -> ProcessedImage:
        return ProcessedImage(None, shape, self.expand(shape).count(self.image_token_id), image)

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        return self._family.expand(shape)

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        return self._family.positions(num_tokens, images)

    def settings(self) -> list[str]:
        """The processor's class and its settings in JSON."""
        settings = _without_places(self._processor.to_dict())
        return [type(self._processor).__name__, json.dumps(settings, sort_keys=True, default=str)]


def _without_places(settings: Any) -> Any:
    """Settings without the path of the folder that they were read from."""
    if not isinstance(settings, dict):
        return settings
    return {
        name: _without_places(value) for name, value in settings.items() if name != "_name_or_path"
    }


def _load_processor(folder: Path) -> Any:
    try:
        with silence_transformers():
            return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except ImportError as error:
        raise UnsupportedModelError(f"images need Pillow: {install('vision')} ({error})") from error
    # A damaged settings file raises OSError, ValueError, KeyError and more.
    except Exception as error:
        raise DamagedModelError(
            f"the image processor in {folder} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
