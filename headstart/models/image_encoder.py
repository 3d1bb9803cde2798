"""Images for a vision model: what the engine sees of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["PlacedImage", "ProcessedImage", "VisionFacts", "VisionModel"]


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image, ready for the vision tower.

    inputs: the tower's arguments by name; None if encoding makes them from `pixels`.
    shape: the grid of its patches or tiles; images of equal shape have equal placeholders.
    num_rows: its embeddings.
    """

    inputs: Mapping[str, Tensor] | None
    shape: tuple[int, ...]
    num_rows: int
    pixels: Any = None


class PlacedImage(NamedTuple):
    """The place of an image in a prompt: its shape, and the offset of its first placeholder."""

    offset: int
    shape: tuple[int, ...]


class VisionFacts(NamedTuple):
    """The facts of a vision model that a process without its weights needs to make prompts.

    fingerprint, bytes_per_row: of `VisionModel`. extra_rows: embeddings of an image beyond those
    that its shape tells, which only encoding one shows.
    """

    fingerprint: bytes
    bytes_per_row: int
    extra_rows: int


class VisionModel(Protocol):
    """The vision part of a model. Everything but `fingerprint` is stateless."""

    image_token_id: int
    bytes_per_row: int
    """Bytes of one embedding."""

    def process(self, image: Any) -> ProcessedImage:
        """Process an image (Pillow, RGB). Raises ValueError if the image processor does."""
        ...

    def recall(self, image: Any, shape: tuple[int, ...]) -> ProcessedImage:
        """An image of known shape; it is processed only if it is encoded."""
        ...

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        """The token ids that replace the placeholder of an image of this shape."""
        ...

    def encode(self, image: ProcessedImage) -> Tensor:
        """The embeddings of its placeholders `[rows, hidden]`, in the dtype of the weights.

        Takes one image at a time, so that embeddings do not depend on other images.
        """
        ...

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        """Position ids int64 `[axes, tokens]` of a prompt with `images`, which are in order.

        None for a model whose positions are always 0, 1, 2, ... A generated token at index p has
        the position p + `table.max()` + 1 - `num_tokens`.
        """
        ...

    def fingerprint(self) -> bytes:
        """SHA-256 over all that determines embeddings except the image: weights, configuration,
        dtype, processor, version of transformers. Reads all weights on the first call.
        """
        ...

    def facts(self) -> VisionFacts:
        """Return the facts for other processes. Reads all weights on the first call."""
        ...
