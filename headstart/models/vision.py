"""Images for a model that sees: from a picture to the embeddings that its placeholders take.

transformers does the work: its image processors (on Pillow) make pixel values, the model's own
vision tower and projection make embeddings of them. What is ours is how many placeholders an
image has and which tokens stand around them, for the families that we serve:

    llava                  all images are cropped to one size: one row a patch
    qwen2_vl, qwen2_5_vl   a grid of patches that follows the image's size, merged 2 × 2;
                           M-RoPE gives each token a place in time, height and width
    idefics3, smolvlm      the image in tiles, each with tokens that say its row and column,
                           and a small copy of the whole
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from headstart.errors import DamagedModelError, HeadstartError, UnsupportedModelError
from headstart.models.decoder import DecoderModel
from headstart.models.silence_transformers import silence_transformers

__all__ = ["VISION_MODELS", "PlacedImage", "ProcessedImage", "VisionModel", "load_vision"]

INSTALL = "pip install 'headstart[vision]'"


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image as the vision tower takes it.

    inputs: by the tower's argument names, None if they are made of `pixels` when it is encoded.
    shape: the grid of its patches or tiles; images of equal shape have equal placeholders.
    num_rows: its embeddings.
    """

    inputs: Mapping[str, Tensor] | None
    shape: tuple[int, ...]
    num_rows: int
    pixels: Any = None


class PlacedImage(NamedTuple):
    """An image of this shape has its first placeholder at `offset`."""

    offset: int
    shape: tuple[int, ...]


class _Family(Protocol):
    """What differs between the models."""

    def arguments(self, image: Any) -> dict[str, Any]:
        """What the image processor is called with."""

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """The image's shape, from what the processor gave."""

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        """The tokens that take the place of one placeholder."""

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        """Position ids int64 `[axes, tokens]` of a prompt, None where they are 0, 1, 2, ..."""


class _Fixed:
    """LLaVA: every image has the processor's crop size."""

    def __init__(self, model: PreTrainedModel, _: PreTrainedTokenizerBase | None) -> None:
        self._token = int(model.config.image_token_id)
        self._patch = int(model.config.vision_config.patch_size)
        self.extra_rows = 0  # a class token kept, or a first patch cut; found out at load

    def arguments(self, image: Any) -> dict[str, Any]:
        return {"images": [image]}

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        height, width = inputs["pixel_values"].shape[-2:]
        return (height // self._patch, width // self._patch)

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        return [self._token] * (shape[0] * shape[1] + self.extra_rows)

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        return None


class _Grid:
    """Qwen2-VL and Qwen2.5-VL: as many patches as the image has room for, and M-RoPE."""

    def __init__(self, model: PreTrainedModel, _: PreTrainedTokenizerBase | None) -> None:
        self._model: Any = model.base_model
        self._token = int(model.config.image_token_id)
        self._merge = int(model.config.vision_config.spatial_merge_size)

    def arguments(self, image: Any) -> dict[str, Any]:
        return {"images": [image]}

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(inputs["image_grid_thw"][0].tolist())

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        return [self._token] * self._rows(shape)

    def _rows(self, shape: tuple[int, ...]) -> int:
        return int(np.prod(shape)) // self._merge**2

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        """Text counts on all axes alike; an image counts its frames, rows and columns from where
        the text before it ended, and the text after it goes on behind the longest of them.

        As the model's `get_rope_index`, which cannot tell two images apart that touch.
        """
        parts: list[Tensor] = []
        at = place = 0
        for offset, shape in images:
            parts.append(torch.arange(place, place + offset - at).expand(3, -1))
            place += offset - at
            grid = torch.tensor(shape)
            parts.append(self._model.get_vision_position_ids(place, grid, 1, self._merge))
            place += max(shape[1], shape[2]) // self._merge
            at = offset + self._rows(shape)
        parts.append(torch.arange(place, place + num_tokens - at).expand(3, -1))
        table: NDArray[np.int64] = torch.cat(parts, dim=1).numpy()
        return table


class _Tiles:
    """Idefics3 and SmolVLM: rows and columns of tiles, then the whole image small."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} came without a tokenizer, which spells what stands "
                "around an image"
            )
        config = model.config
        self._tokenizer = tokenizer
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
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        return None


_FAMILIES: dict[str, type[_Fixed] | type[_Grid] | type[_Tiles]] = {
    "llava": _Fixed,
    "qwen2_vl": _Grid,
    "qwen2_5_vl": _Grid,
    "idefics3": _Tiles,
    "smolvlm": _Tiles,
}

VISION_MODELS = frozenset(_FAMILIES)
"""transformers' model types that take images."""


class VisionModel:
    """The part of a model that sees. Everything but `fingerprint` is stateless."""

    def __init__(
        self, decoder: DecoderModel, folder: Path, tokenizer: PreTrainedTokenizerBase | None
    ) -> None:
        """Load the image processor and try it on a blank image.

        Raises `DamagedModelError` or `UnsupportedModelError`.
        """
        model = decoder.module
        self._decoder = decoder
        self._model: Any = model
        self._processor = _load_processor(folder)
        self._fingerprint: bytes | None = None
        self.image_token_id = int(model.config.image_token_id)
        self._family: _Family = _FAMILIES[model.config.model_type](model, tokenizer)
        self.bytes_per_row = self._try()
        """Memory of one embedding."""

    def process(self, image: Any) -> ProcessedImage:
        """An image (Pillow, RGB) made ready. Raises ValueError where the processor does."""
        found = self._processor(**self._family.arguments(image), return_tensors="pt")
        shape = self._family.shape(found)
        inputs = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        return ProcessedImage(inputs, shape, self.expand(shape).count(self.image_token_id))

    def recall(self, image: Any, shape: tuple[int, ...]) -> ProcessedImage:
        """An image whose shape is known: it is processed if it is encoded, and not before."""
        return ProcessedImage(None, shape, self.expand(shape).count(self.image_token_id), image)

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        """The token ids that take the place of the placeholder of an image of this shape."""
        return self._family.expand(shape)

    def encode(self, image: ProcessedImage) -> Tensor:
        """The embeddings of its placeholders `[rows, hidden]`, in the dtype of the weights.

        One image at a time, so that its embeddings do not depend on what else is encoded.
        """
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

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        """Position ids int64 `[axes, tokens]` of a prompt with images in it, in their order.

        None for a model that counts 0, 1, 2, ... whatever the tokens are. A generated token at
        place p has the position p + `table.max()` + 1 - `num_tokens`.
        """
        return self._family.positions(num_tokens, images)

    def fingerprint(self) -> bytes:
        """SHA-256 over all that shapes an embedding but the image: weights, configuration, dtype,
        processor, version of transformers. Reads all weights on the first call.
        """
        if self._fingerprint is None:
            # Weights from their files: those in memory may be packed, or cast, or both.
            parts = [transformers.__version__, str(self._model.dtype), self._decoder.fingerprint()]
            parts.append(type(self._processor).__name__)
            settings = _without_places(self._processor.to_dict())
            parts.append(json.dumps(settings, sort_keys=True, default=str))
            digest = hashlib.sha256()
            for part in map(str.encode, parts):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
            self._fingerprint = digest.digest()
        return self._fingerprint

    def _try(self) -> int:
        """Bytes of one embedding of a blank image, once it is clear that there are any."""
        blank = np.zeros((64, 64, 3), dtype=np.uint8) + 99
        name = type(self._model).__name__
        try:
            with silence_transformers():
                image = self.process(blank)
                rows = self.encode(image)
                if isinstance(self._family, _Fixed):
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
) -> VisionModel | None:
    """The seeing part of a model that was loaded from a folder, None if it has none.

    Raises `DamagedModelError` or `UnsupportedModelError`.
    """
    if decoder.config.model_type not in VISION_MODELS or decoder.folder is None:
        return None
    return VisionModel(decoder, decoder.folder, tokenizer)


def _without_places(settings: Any) -> Any:
    """Settings without the name of the folder that they were read from."""
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
        raise UnsupportedModelError(f"images need Pillow: {INSTALL} ({error})") from error
    # OSError, ValueError, KeyError: whatever a settings file can lack.
    except Exception as error:
        raise DamagedModelError(
            f"the image processor in {folder} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
