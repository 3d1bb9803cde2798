"""The interfaces of a loaded model: its decoder and its optional vision part."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headstart.attention.backend import AttentionBackend, LayerLayout, StateLayout
from headstart.attention.memory import StateMemory
from headstart.errors import ModelError
from headstart.models.files import FileStamp, fingerprint_files, stamp_files
from headstart.native import INTERFACE, level
from headstart.weights.format import Embedding, Linear
from headstart.weights.greedy_head import greedy_tokens, mask_logits
from headstart.weights.quantize import is_quantized_from


@dataclass(frozen=True, eq=False)
class ProcessedImage:
    """An image, ready for the vision tower.

    inputs: the tower's arguments by name; None if `encode` makes them from `pixels`.
    shape: the grid of patches or tiles. Images of equal shape have equal placeholders.
    num_rows: the number of the image's embeddings.
    """

    inputs: Mapping[str, Tensor] | None
    shape: tuple[int, ...]
    num_rows: int
    pixels: Any = None


class PlacedImage(NamedTuple):
    """An image in a prompt: the offset of its first placeholder, and the image's shape."""

    offset: int
    shape: tuple[int, ...]


class VisionFacts(NamedTuple):
    """The properties of a vision model that a process without its weights needs to make prompts.

    fingerprint, bytes_per_row: as in `VisionModel`. extra_rows: an image's number of embeddings
    minus the number that follows from its shape, measured by encoding an image.
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

    def recall(self, image: Any, shape: tuple[int, ...]) -> ProcessedImage:
        """Return an image of known shape, which is processed only when it is encoded."""

    def expand(self, shape: tuple[int, ...]) -> list[int]:
        """Return the token ids that replace the placeholder of an image of this shape."""

    def encode(self, image: ProcessedImage) -> Tensor:
        """Return an image's embeddings `[rows, hidden]`, in the dtype of the weights.

        Takes one image at a time, so that embeddings do not depend on other images.
        """

    def positions(self, num_tokens: int, images: Sequence[PlacedImage]) -> NDArray[np.int64] | None:
        """Return position ids int64 `[axes, tokens]` of a prompt.

        images: in the order of their placeholders in the prompt. Returns None for a model whose
        positions are always 0, 1, 2, ... A generated token at index p has the position
        p - `num_tokens` + 1 + the largest position of the prompt.
        """

    def fingerprint(self) -> bytes:
        """Return the SHA-256 of weights, configuration, dtype, processor and transformers' version.

        Reads all weights on the first call.
        """

    def facts(self) -> VisionFacts:
        """Return the properties for other processes. Reads all weights on the first call."""


class Widths(NamedTuple):
    """The input and output width of a linear layer."""

    inputs: int
    outputs: int


class EmbeddingOverlay(NamedTuple):
    """Embeddings that replace the embeddings of some tokens.

    rows: row numbers in the flat batch, int64 `[replaced]`. values: `[replaced, hidden]`.
    """

    rows: Tensor
    values: Tensor


class DecoderModel(ABC):
    """A causal language model that runs over paged K/V.

    The rows of all sequences in a step form one flat batch. The attached backend's plan says which
    rows belong to which sequence. A model has one backend at a time.
    """

    module: nn.Module
    """All layers and weights."""
    vocab_size: int
    """Width of the logits; token ids lie in `0 .. vocab_size - 1`."""
    max_model_len: int
    """Length in tokens of the longest sequence that the model supports."""
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence; may be empty."""
    dtype: torch.dtype
    """The dtype of the rows between layers, and so of K and V."""
    device: torch.device
    """The device of the weights."""
    output_layer: str | None
    """The dotted name of the layer whose outputs are the logits; None without an LM head."""
    takes_images = False
    """True if the model has a vision part."""
    state_layouts: tuple[StateLayout, ...] = ()
    """The states of one sequence, per recurrent layer; empty for a model without such layers."""
    without_adapters: tuple[str, ...] = ()
    """Name prefixes of layers that take no adapters: recurrent mixers that do not compute the rows
    of all sequences in one call."""

    def __init__(self, layouts: tuple[LayerLayout, ...], folder: Path | None = None) -> None:
        self.folder = folder
        """The folder of the model's files; None for a model built in memory."""
        self.files: tuple[FileStamp, ...] | None = None
        """The versions of the files that the weights were read from; None if unknown."""
        self._fingerprint: str | None = None
        self.layouts = layouts
        """K and V of one token, per layer with attention."""
        self.calls_each_layer = False
        """True in steps in which layers have hooks, so each layer must be called as a module."""
        self.fallback_reason: str | None = None
        """The reason why headstart's own modules do not run the model; None if they do."""

    def layer(self, name: str) -> nn.Module:
        """Return the module of this dotted name."""
        return self.module.get_submodule(name)

    @abstractmethod
    def linear_widths(self) -> dict[str, Widths]:
        """Return the widths of the linear layers that all rows pass through, by dotted name."""

    def weight(self, name: str) -> Tensor | None:
        """Return the weight of the layer of this dotted name; None if it has no weight."""
        module = dict(self.module.named_modules()).get(name)
        if isinstance(module, Linear | Embedding):
            return module.matrix.unpack()
        weight = getattr(module, "weight", None)
        return weight.detach() if isinstance(weight, Tensor) else None

    def holds(self, name: str, weight: Tensor) -> bool:
        """Return True if the layer of this dotted name was made from this weight."""
        module = dict(self.module.named_modules()).get(name)
        weight = weight.to(self.device)
        # The matrix may have been quantized from the stored weight, or from the stored weight
        # converted to `dtype`.
        if isinstance(module, Linear | Embedding) and module.matrix.kind is not None:
            return any(is_quantized_from(module.matrix, w) for w in (weight, weight.to(self.dtype)))
        own = self.weight(name)
        return own is not None and torch.equal(weight.to(own.dtype), own)

    def fingerprint(self) -> str:
        """Return the SHA-256 of configuration and weights in hex. The first call reads all weights.

        If the files changed since the model was loaded, the digest is random.
        """
        if self._fingerprint is None:
            digest = self._compute_fingerprint()
            self._fingerprint = digest if self.has_original_files else secrets.token_hex(32)
        return self._fingerprint

    @property
    def has_original_files(self) -> bool:
        """False if the files changed since the weights were read."""
        if self.folder is None or self.files is None:
            return True
        try:
            return stamp_files(self.folder) == self.files
        except (OSError, ModelError):
            return False

    def _compute_fingerprint(self) -> str:
        assert self.folder is not None
        return fingerprint_files(self.folder)

    def products(self) -> str:
        """Return a description of the modules and kernels in use. They determine rounding."""
        modules = self.module.modules()
        kinds = {getattr(module, "name_in_identity", type(module).__name__) for module in modules}
        return f"{' '.join(sorted(kinds))}, kernels {INTERFACE} of level {level()}"

    def recall_fingerprint(self, fingerprint: str) -> None:
        """Set the fingerprint that was computed earlier from the same files."""
        self._fingerprint = fingerprint

    @abstractmethod
    def attach(self, backend: AttentionBackend, states: StateMemory | None = None) -> None:
        """Use `backend` for all attention from now on, instead of an earlier backend.

        Recurrent layers read and write `states`, in the slots of `states.recurrence`.
        """

    @abstractmethod
    def detach(self) -> None:
        """Release the backend and its memory; safe to call twice."""

    def fix_rows(self) -> None:  # noqa: B027 (most models need nothing)
        """Prepare for deterministic mode, in which each pass computes one KV block of one request.

        Until `detach`, the bits of a row's results do not depend on later rows in its block. The
        current backend is detached. Raises `UnsupportedModelError` if this is not possible.
        """

    def prepare(self, num_positions: int) -> None:  # noqa: B027 (most models need nothing)
        """Compute the rotary angles of these positions in advance. Results do not change."""

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        """Return logits float32 `[rows, vocab]` of the rows in `logit_rows` int64 `[rows]`.

        `token_ids` is int64 `[tokens]`. `positions` is int64 `[tokens]`, or `[axes, tokens]` for
        M-RoPE. The attached backend's step must have begun, with slots for exactly these tokens.
        """

    def choose(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
        allowed: np.ndarray | None = None,
    ) -> list[int]:
        """Return the greedy token of each row: argmax of `forward`'s logits, often in less time.

        Ties go to the lowest id. The result is -1 for a row with NaN or +inf, or with only -inf.
        allowed: uint8 `[rows, bytes]` with the bits of the tokens to choose from; see
        `mask_logits`.
        """
        logits = self.forward(token_ids, positions, logit_rows, embeddings)
        if allowed is not None:
            mask_logits(logits, allowed)
        return greedy_tokens(logits)
