"""Decoders whose passes also return rows for the next stage.

Rows are copied to host memory asynchronously:

    compute stream    layers ......... | head ............ | next pass ...
    copy stream                        | rows -> pinned memory | event
    host                                                       waits for the copy, reads rows
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.attention.backend import LayerLayout
from headstart.errors import UnsupportedModelError
from headstart.models.decoder import EmbeddingOverlay
from headstart.models.files import FileStamp
from headstart.models.transformers_backend.decoder import TransformersDecoder, fingerprint_memory
from headstart.models.transformers_backend.probe import check_config
from headstart.models.transformers_backend.recurrent import has_recurrent_layers


@dataclass(slots=True)
class HostCopy:
    """A copy of named rows to host memory, which is complete after `wait`.

    source: the rows on the device, whose memory must not be freed during the copy.
    """

    host: Mapping[str, Tensor]
    event: torch.cuda.Event | None = None
    source: Mapping[str, Tensor] | None = None

    def wait(self) -> Mapping[str, Tensor]:
        """Wait for the copy and return the rows."""
        if self.event is not None:
            self.event.synchronize()
        self.event = self.source = None
        return self.host


class StreamCopies:
    """Starts copies to pinned host memory on a separate stream.

    cuda: `torch.cuda`, or an object with the same functions for streams. empty: allocates pinned
    host memory with the shape and dtype of a tensor.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        empty: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._device = device
        self._cuda = cuda
        self._empty = empty or (
            lambda like: torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        )
        self._stream = cuda.Stream(device)

    def __call__(self, rows: Mapping[str, Tensor]) -> HostCopy:
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            host = {
                name: self._empty(tensor).copy_(tensor, non_blocking=True)
                for name, tensor in rows.items()
            }
            event = self._stream.record_event()
        return HostCopy(host, event, rows)


def host_copies(device: torch.device) -> Callable[[Mapping[str, Tensor]], HostCopy]:
    """Return the function that copies rows from this device to the host."""
    if device.type == "cuda":
        return StreamCopies(device)
    return lambda rows: HostCopy({name: tensor.cpu() for name, tensor in rows.items()})


class PassTensors(NamedTuple):
    """The tensors of one pass, one row per token.

    embedded: `[tokens, width]`, the inputs. is_token: bool `[tokens]`, true if the input is the
    embedding of a token id, false for audio, images and rows of earlier stages. layers:
    transformers' `hidden_states` (the inputs of the first layer, then each layer's outputs); empty
    unless needed. hidden: `[tokens, hidden]`, after the final norm.
    """

    embedded: Tensor
    is_token: Tensor
    layers: Sequence[Tensor]
    hidden: Tensor


class StageCheckpoint(NamedTuple):
    """A model's folder, and the stamps of its files, made before the files were read."""

    folder: Path
    files: tuple[FileStamp, ...]


@dataclass(frozen=True, kw_only=True)
class StageParts:
    """The parts of a stage's decoder.

    text_model: the layers and token embeddings. head: maps hidden rows to logits. give: returns the
    outputs of a pass, `[tokens, ...]` by name. project: maps embeddings to the text model's width.
    needs_layers: `give` reads `layers`. suppressed_ids: tokens that are never sampled. num_deep:
    number of first layers after which DeepStack (https://arxiv.org/abs/2406.04334) adds another row
    of the image to the hidden state. An image token's input row is its embedding, followed by these
    rows. checkpoint: the checkpoint of the whole model; None for a model in memory.
    """

    text_model: PreTrainedModel
    head: nn.Module
    give: Callable[[PassTensors], Mapping[str, Tensor]]
    eos_token_ids: frozenset[int] = frozenset()
    project: nn.Module | None = None
    needs_layers: bool = False
    suppressed_ids: tuple[int, ...] = ()
    num_deep: int = 0
    checkpoint: StageCheckpoint | None = None


class StageDecoder(TransformersDecoder):
    """A `TransformersDecoder` whose passes also return rows for the next stage.

    Raises UnsupportedModelError for a text model with recurrent layers.
    """

    def __init__(self, parts: StageParts) -> None:
        check_config(parts.text_model.config)
        if has_recurrent_layers(parts.text_model.config.get_text_config()):
            name = type(parts.text_model).__name__
            raise UnsupportedModelError(
                f"{name} has recurrent layers; allowed in a stage: only attention layers"
            )
        source = parts.checkpoint
        folder = source.folder if source is not None else None
        config = parts.text_model.config.get_text_config()
        heads = config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        layout = LayerLayout(config.num_key_value_heads, width, width)
        super().__init__(parts.text_model, (layout,) * int(config.num_hidden_layers), folder)
        self.files = source.files if source is not None else None
        self._parts, self.eos_token_ids = parts, parts.eos_token_ids
        self._passes: list[HostCopy] = []
        self._begin_copy = host_copies(self.device)
        self._suppressed_ids = torch.tensor(
            parts.suppressed_ids, dtype=torch.int64, device=self.device
        )

    def take_passes(self) -> list[HostCopy]:
        """Return the outputs of each pass since the last call."""
        passes, self._passes = self._passes, []
        return passes

    def outputs_of_one(self) -> Mapping[str, Tensor]:
        """Return the outputs for one row of zeros, to find their dtypes and shapes."""
        width = self.embed(torch.zeros(1, dtype=torch.int64, device=self.device)).shape[1]
        embedded, hidden = (
            torch.zeros(1, count, dtype=self.dtype, device=self.device)
            for count in (width, self.config.get_text_config().hidden_size)
        )
        layers = [hidden] * (len(self.layouts) + 1) if self._parts.needs_layers else []
        is_token = torch.ones(1, dtype=torch.bool, device=self.device)
        with torch.inference_mode():
            return self._parts.give(PassTensors(embedded, is_token, layers, hidden))

    def _compute_fingerprint(self) -> str:
        """Return the digest of the checkpoint.

        For a model in memory, return a digest of all weights that affect K/V.
        """
        weights_fingerprint = super()._compute_fingerprint()
        if self._parts.checkpoint is not None or self._parts.project is None:
            return weights_fingerprint
        return hashlib.sha256(
            f"{weights_fingerprint} {fingerprint_memory(self._parts.project)}".encode()
        ).hexdigest()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return embeddings `[tokens, width]` of token ids."""
        with torch.inference_mode():
            rows: Tensor = self.module.get_input_embeddings()(token_ids.to(self.device))
        return rows

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        parts = self._parts
        with torch.inference_mode():
            embedded: Tensor = self.module.get_input_embeddings()(token_ids)
            is_token = torch.ones_like(token_ids, dtype=torch.bool)
            if embeddings is not None:
                is_token[embeddings.rows] = False
                rows = embeddings.values.to(embedded)[:, : embedded.shape[1]]
                embedded = embedded.index_copy(0, embeddings.rows, rows)
            inputs = embedded if parts.project is None else parts.project(embedded)
            output: Any = self.module(
                inputs_embeds=inputs.unsqueeze(0),
                position_ids=positions.unsqueeze(-2),
                use_cache=False,
                output_hidden_states=parts.needs_layers,
                **self._deep_rows(embeddings, is_token),
            )
            hidden: Tensor = output.last_hidden_state[0]
            layers = [rows[0] for rows in output.hidden_states] if parts.needs_layers else []
            outputs = parts.give(PassTensors(embedded, is_token, layers, hidden))
            self._passes.append(self._begin_copy(outputs))  # overlaps with the head
            logits: Tensor = parts.head(hidden.index_select(0, logit_rows)).float()
            if parts.suppressed_ids:
                logits.index_fill_(1, self._suppressed_ids, -torch.inf)
        return logits

    def _deep_rows(self, embeddings: EmbeddingOverlay | None, is_token: Tensor) -> dict[str, Any]:
        if embeddings is None or not self._parts.num_deep:
            return {}
        width = embeddings.values.shape[1] // (1 + self._parts.num_deep)
        values = embeddings.values[embeddings.rows.argsort()]
        return {
            "visual_pos_masks": ~is_token[None],
            "deepstack_visual_embeds": list(torch.split(values[:, width:], width, dim=1)),
        }
