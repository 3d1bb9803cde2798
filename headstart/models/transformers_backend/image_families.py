"""What model families do with images: how many placeholders one has, and what stands around them.

    llava                  all images are cropped to one size: one row per patch
    qwen2_vl, qwen2_5_vl   a grid of patches that follows the image's size, merged 2 × 2;
                           M-RoPE gives each token a place in time, height and width
    idefics3, smolvlm      the image in tiles, each with tokens that say its row and column,
                           and a small copy of the whole

All of it follows from a model's configuration and tokenizer, without its weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from headstart.errors import UnsupportedModelError
from headstart.models.image_encoder import PlacedImage

__all__ = ["VISION_MODELS", "Fixed", "ImageFamily", "make_family"]


class ImageFamily(Protocol):
    """The differences between model families; made of a configuration and a tokenizer.

    extra_rows: embeddings of an image beyond one a patch. Set at load; 0 but for LLaVA, where it is
    +1 for a kept class token and -1 for a cut first patch.
    """

    extra_rows: int

    def arguments(self, image: Any) -> dict[str, Any]:
        """The image processor's arguments."""

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """The image's shape, from the processor's output."""

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        """The tokens that replace one placeholder."""

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        """Position ids int64 `[axes, tokens]` of a prompt, None if they are 0, 1, 2, ..."""


class Fixed:
    """LLaVA: every image has the processor's crop size."""

    def __init__(self, config: PreTrainedConfig, _: PreTrainedTokenizerBase | None) -> None:
        self._token = int(config.image_token_id)
        self._patch = int(config.vision_config.patch_size)
        self.extra_rows = 0

    def arguments(self, image: Any) -> dict[str, Any]:
        return {"images": [image]}

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        height, width = inputs["pixel_values"].shape[-2:]
        return (height // self._patch, width // self._patch)

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        return [self._token] * (shape[0] * shape[1] + self.extra_rows)

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        return None


class Grid:
    """Qwen2-VL and Qwen2.5-VL: as many patches as the image has room for, and M-RoPE."""

    def __init__(self, config: PreTrainedConfig, _: PreTrainedTokenizerBase | None) -> None:
        self._token = int(config.image_token_id)
        self._merge = int(config.vision_config.spatial_merge_size)
        self.extra_rows = 0

    def arguments(self, image: Any) -> dict[str, Any]:
        return {"images": [image]}

    def shape(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        return tuple(inputs["image_grid_thw"][0].tolist())

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        return [self._token] * (int(np.prod(shape)) // self._merge**2)

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        """Text counts on all axes alike. An image counts its frames, rows and columns from the end
        of the text before it; the text after it continues after the longest of these axes.

        Equal to the model's `get_rope_index`, which cannot separate two adjacent images.
        """
        parts: list[NDArray[np.int64]] = []
        at = place = 0
        for offset, (frames, rows, columns) in images:
            parts.append(np.tile(np.arange(place, place + offset - at), (3, 1)))
            place += offset - at
            grid = (frames, rows // self._merge, columns // self._merge)
            parts.append(np.indices(grid, dtype=np.int64).reshape(3, -1) + place)
            place += max(grid[1:])
            at = offset + int(np.prod(grid))
        parts.append(np.tile(np.arange(place, place + num_tokens - at), (3, 1)))
        return np.concatenate(parts, axis=1)


class Tiles:
    """Idefics3 and SmolVLM: rows and columns of tiles, then a small copy of the whole image."""

    def __init__(self, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
        if tokenizer is None:
            raise UnsupportedModelError(
                f"the {config.model_type} model came without a tokenizer, which spells what stands "
                "around an image"
            )
        self._tokenizer = tokenizer
        self.extra_rows = 0
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


_FAMILIES: dict[str, type[Fixed] | type[Grid] | type[Tiles]] = {
    "llava": Fixed,
    "qwen2_vl": Grid,
    "qwen2_5_vl": Grid,
    "idefics3": Tiles,
    "smolvlm": Tiles,
}

VISION_MODELS = frozenset(_FAMILIES)
"""transformers' model types that take images."""


def make_family(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None) -> ImageFamily:
    """The family of a configuration. Raises UnsupportedModelError."""
    return _FAMILIES[config.model_type](config, tokenizer)
