"""Image processing and encoding for vision models.

transformers' image processors (with Pillow) make pixel values. The model's vision tower and
projection make embeddings from them. The number of an image's placeholders, and the tokens around
them, are known before the image is encoded:

    llava                  all images are cropped to one size; one embedding per patch
    qwen2_vl, qwen2_5_vl   the image's size determines a grid of patches, merged 2 x 2;
                           M-RoPE positions in time, height and width
    idefics3, smolvlm      the image in tiles, each after tokens for its row and column,
                           and a small copy of the whole image
"""

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedTokenizerBase

from headstart.errors import DamagedModelError, HeadstartError, UnsupportedModelError
from headstart.imports import install
from headstart.models.decoder import PlacedImage, ProcessedImage, VisionFacts
from headstart.models.transformers_backend.decoder import TransformersDecoder
from headstart.models.transformers_tools import silence_transformers


class ImageFamily(ABC):
    """The placeholders and positions of images in a family of vision models.

    extra_rows: an image's number of embeddings minus its number of patches, set at load. It differs
    from 0 only in LLaVA: a class token adds 1, and a dropped first patch subtracts 1.
    """

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._token = int(config.image_token_id)
        self.extra_rows = 0

    def arguments(self, image: Any) -> dict[str, Any]:
        """Return the image processor's arguments."""
        return {"images": [image]}

    @abstractmethod
    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the image's shape, from the processor's output."""

    @abstractmethod
    def expand(self, shape: tuple[int, ...]) -> list[int]:
        """Return the tokens that replace one placeholder."""

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        """Return int64 position ids `[axes, tokens]` of a prompt; None if they are 0, 1, 2, ..."""
        return None


class Fixed(ImageFamily):
    """LLaVA: every image has the crop size of the image processor."""

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        height, width = inputs["pixel_values"].shape[-2:]
        patch = int(self._config.vision_config.patch_size)
        return (height // patch, width // patch)

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        return [self._token] * (shape[0] * shape[1] + self.extra_rows)


class Grid(ImageFamily):
    """Qwen2-VL and Qwen2.5-VL: the number of patches follows from the image's size; M-RoPE."""

    @property
    def _merge(self) -> int:
        return int(self._config.vision_config.spatial_merge_size)

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(inputs["image_grid_thw"][0].tolist())

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        return [self._token] * (int(np.prod(shape)) // self._merge**2)

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        """Return M-RoPE positions.

        Text positions are equal on all axes. Image positions are frame, row and column, counted
        from the end of the preceding text. The following text begins after the largest position in
        the image. transformers' `get_rope_index` returns the same, except for adjacent images,
        which it cannot separate.
        """
        parts: list[NDArray[np.int64]] = []
        end = position = 0
        for offset, (frames, rows, columns) in images:
            parts.append(np.tile(np.arange(position, position + offset - end), (3, 1)))
            position += offset - end
            grid = (frames, rows // self._merge, columns // self._merge)
            parts.append(np.indices(grid, dtype=np.int64).reshape(3, -1) + position)
            position += max(grid[1:])
            end = offset + int(np.prod(grid))
        parts.append(np.tile(np.arange(position, position + num_tokens - end), (3, 1)))
        return np.concatenate(parts, axis=1)


class Tiles(ImageFamily):
    """Idefics3 and SmolVLM: rows and columns of tiles, then a small copy of the whole image."""

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise UnsupportedModelError(
                f"the {config.model_type} model has no tokenizer, which is needed for the tokens "
                "around an image"
            )
        super().__init__(config, tokenizer)
        side = int(config.vision_config.image_size) // int(config.vision_config.patch_size)
        self._rows = side * side // int(config.scale_factor) ** 2
        self._image = tokenizer.convert_ids_to_tokens(int(config.image_token_id))
        self._fake = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
        self._global = getattr(tokenizer, "global_image_token", "<global-img>")

    def arguments(self, image: Any) -> dict[str, Any]:
        return {"images": [[image]], "return_row_col_info": True}

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        return (int(inputs["rows"][0][0]), int(inputs["cols"][0][0]))

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        rows, columns = shape
        tile = f"{self._image}" * self._rows
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += f"{self._fake}<row_{row}_col_{column}>{tile}"
            text += "\n"
        text += "\n" if rows else ""
        text += f"{self._fake}{self._global}{tile}{self._fake}"
        assert self._tokenizer is not None
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids


_FAMILIES: dict[str, type[ImageFamily]] = {
    "llava": Fixed,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), Grid),
    **dict.fromkeys(("idefics3", "smolvlm"), Tiles),
}

VISION_MODELS = frozenset(_FAMILIES)
"""transformers' model types that take images."""


class ImageProcessor:
    """The part of a `VisionModel` without weights: everything except `encode` and `fingerprint`."""

    def __init__(
        self, config: PreTrainedConfig, folder: Path, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        """Load the image processor of a model. Raises DamagedModelError, UnsupportedModelError."""
        try:
            with silence_transformers():
                self._processor: Any = AutoImageProcessor.from_pretrained(
                    folder, backend="pil", local_files_only=True
                )
        except ImportError as error:
            needs = f"images need Pillow: {install('vision')} ({error})"
            raise UnsupportedModelError(needs) from error
        # A damaged settings file raises OSError, ValueError, KeyError and more.
        except Exception as error:
            raise DamagedModelError(
                f"the image processor in {folder} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        self.image_token_id = int(config.image_token_id)
        self._family = _FAMILIES[config.model_type](config, tokenizer)

    def process(self, image: Any) -> ProcessedImage:
        output = self._processor(**self._family.arguments(image), return_tensors="pt")
        shape = self._family.shape(output)
        inputs = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        return ProcessedImage(inputs, shape, self.expand(shape).count(self.image_token_id))

    def recall(self, image: Any, shape: tuple[int, ...]) -> ProcessedImage:
        return ProcessedImage(None, shape, self.expand(shape).count(self.image_token_id), image)

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        return self._family.expand(shape)

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        return self._family.positions(num_tokens, images)

    def settings(self) -> list[str]:
        """Return the processor's class and its settings in JSON."""
        settings = self._processor.to_dict()
        return [type(self._processor).__name__, json.dumps(settings, sort_keys=True, default=str)]


class TransformersVision(ImageProcessor):
    """A `VisionModel` made of transformers' image processor and the model's own vision tower."""

    def __init__(
        self, decoder: TransformersDecoder, folder: Path, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        """Load the image processor, and encode a blank image.

        Raises `DamagedModelError` or `UnsupportedModelError`.
        """
        super().__init__(decoder.config, folder, tokenizer)
        self._decoder = decoder
        self._model: Any = decoder.module
        self._fingerprint: bytes | None = None
        self._fingerprinting = threading.Lock()
        self.bytes_per_row = self._encode_blank()
        """Bytes of one embedding."""

    def encode(self, image: ProcessedImage) -> Tensor:
        device, dtype = self._model.device, self._model.dtype
        processed = image if image.inputs is not None else self.process(image.pixels)
        assert processed.inputs is not None
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in processed.inputs.items()
        }
        with torch.inference_mode():
            output = self._model.get_image_features(**inputs, return_dict=True)
            rows: Tensor = output.pooler_output[0].to(dtype)
        return rows

    def fingerprint(self) -> bytes:
        with self._fingerprinting:  # so that only one thread reads all weights
            if self._fingerprint is None:
                # Fingerprint the files, since weights in memory may be packed or cast.
                weights = self._decoder.fingerprint()
                parts = [transformers.__version__, str(self._model.dtype), weights]
                digest = hashlib.sha256()
                for part in map(str.encode, [*parts, *self.settings()]):
                    digest.update(len(part).to_bytes(8, "little"))
                    digest.update(part)
                self._fingerprint = digest.digest()
            return self._fingerprint

    def facts(self) -> VisionFacts:
        return VisionFacts(self.fingerprint(), self.bytes_per_row, self._family.extra_rows)

    def _encode_blank(self) -> int:
        """Encode a blank image; return the bytes of one embedding."""
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
                f"{name} cannot encode a blank image: {type(error).__name__}: {error}"
            ) from error
        if len(rows) != image.num_rows:
            raise DamagedModelError(
                f"{name} has {len(rows)} embeddings for an image of {image.num_rows} "
                "placeholders: its config.json does not fit its image processor"
            )
        return rows[0].nbytes
