"""A dense decoder in headstart's own modules."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headstart.attention.backend import AttentionBackend, LayerLayout
from headstart.models.decoder import DecoderModel, EmbeddingOverlay
from headstart.models.dense.compiled import compile_layers
from headstart.models.dense.modules import AngleTable, DecoderLayer, Frequencies, LayerStep, RMSNorm
from headstart.models.families import DecoderShape
from headstart.models.files import fingerprint_files
from headstart.models.lora.files import Widths
from headstart.weights.bf16 import PackedWeight
from headstart.weights.format import Linear
from headstart.weights.greedy_head import MOST_INPUTS, GreedyHead
from headstart.weights.reader import Reader

__all__ = ["DenseDecoder", "DenseModules", "Description"]


class Description(NamedTuple):
    """A decoder without its weights: where it is from, and what its configuration says.

    frequencies: of the rotary positions, by kind of layer. max_model_len: in tokens.
    """

    folder: Path
    shape: DecoderShape
    frequencies: Mapping[str, Frequencies]
    max_model_len: int
    eos_token_ids: frozenset[int]


class _Body(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: DecoderShape, read: Reader) -> None:
        super().__init__()
        self.embed_tokens = read.embedding(
            "model.embed_tokens", shape.vocab_size, shape.hidden_size
        )
        read.release()
        layers = []
        for index in range(len(shape.layers)):
            layers.append(DecoderLayer(shape, index, f"model.layers.{index}", read))
            read.release()
        self.layers = nn.ModuleList(layers)
        weight = read.vector("model.norm", shape.hidden_size)
        self.norm = RMSNorm(weight, shape.epsilon, shape.norm)


class DenseModules(nn.Module):
    """All modules with weights, with transformers' names."""

    def __init__(self, shape: DecoderShape, read: Reader) -> None:
        super().__init__()
        self.model = _Body(shape, read)
        tied = self.model.embed_tokens if shape.tied else None
        self.lm_head = read.head(tied, "lm_head", shape.vocab_size, shape.hidden_size)
        read.release()


class DenseDecoder(DecoderModel):
    """A dense decoder in headstart's own modules.

    With the compiled kernels, layers of Llama's and Qwen's kind run as one call (`compiled`), in
    float32 for few rows; every other layer, and every step whose layers have adapters, runs module
    by module.
    """

    def __init__(self, about: Description, modules: DenseModules, dtype: torch.dtype) -> None:
        shape = about.shape
        layout = LayerLayout(shape.kv_heads, shape.head_dim, shape.head_dim)
        super().__init__((layout,) * len(shape.layers), about.folder)
        self._about, self._modules, self._dtype = about, modules, dtype
        self._backend: AttentionBackend | None = None
        self._device = modules.model.norm.weight.device
        like = torch.empty(0, dtype=dtype, device=self._device)
        exact = like.float() if shape.exact_angles else like
        self._angles = {kind: AngleTable(own, exact) for kind, own in about.frequencies.items()}
        layers: list[Any] = list(modules.model.layers)
        self._compiled = compile_layers(layers, shape, dtype)
        self._head = self._greedy_head()

    @property
    def module(self) -> nn.Module:
        return self._modules

    @property
    def vocab_size(self) -> int:
        return self._about.shape.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._about.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._about.eos_token_ids

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def output_layer(self) -> str | None:
        return "lm_head"

    def linear_widths(self) -> dict[str, Widths]:
        return {
            name: Widths(module.in_features, module.out_features)
            for name, module in self._modules.named_modules()
            if isinstance(module, nn.Linear | Linear)
        }

    def _compute_fingerprint(self) -> str:
        return fingerprint_files(self._about.folder)

    def attach(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def detach(self) -> None:
        self._backend = None

    def prepare(self, num_positions: int) -> None:
        for table in self._angles.values():
            table.cover(num_positions)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        with torch.inference_mode():
            return self._logits(self._hidden(token_ids, positions, logit_rows, embeddings))

    def choose(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
        allowed: np.ndarray | None = None,
    ) -> list[int]:
        if self._head is None or self.calls_each_layer:
            return super().choose(token_ids, positions, logit_rows, embeddings, allowed)
        with torch.inference_mode():
            hidden = self._hidden(token_ids, positions, logit_rows, embeddings)
            return self._head.choose(hidden, allowed)

    def _hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None,
    ) -> Tensor:
        """Rows `[rows, hidden]` after the last norm, of `logit_rows`."""
        backend = self._backend
        assert backend is not None, "attach() comes first"
        body = self._modules.model
        x: Tensor = body.embed_tokens(token_ids)
        scale = self._about.shape.embedding_scale
        if scale is not None:
            rounded = self._about.shape.rounded_embedding_scale
            x = x * (x.new_tensor(scale) if rounded else scale)
        if embeddings is not None:
            x = x.index_copy(0, embeddings.rows, embeddings.values.to(x))
        angles = {kind: table(positions) for kind, table in self._angles.items()}
        # An adapter's update of a layer needs all of the layer's rows.
        kept = None
        if len(logit_rows) < len(token_ids) and not self.calls_each_layer:
            kept = logit_rows
        out = None
        if self._compiled is not None and not self.calls_each_layer:
            out = self._compiled(x, angles[""], backend, kept)
        if out is None:
            step = LayerStep(backend, angles, hooked=self.calls_each_layer)
            for layer in body.layers[:-1]:
                x = layer(x, step)
            out = body.layers[-1](x, step, kept)
        hidden: Tensor = body.norm(out)
        return hidden if len(hidden) == len(logit_rows) else hidden.index_select(0, logit_rows)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Float32 `[rows, vocab]`."""
        logits: Tensor = self._modules.lm_head(hidden)
        shape = self._about.shape
        if shape.logit_divisor is not None:
            logits = logits / shape.logit_divisor
        if shape.logit_softcap is not None:
            logits = torch.tanh(logits / shape.logit_softcap) * shape.logit_softcap
        return logits.float()

    def _greedy_head(self) -> GreedyHead | None:
        head, shape = self._modules.lm_head, self._about.shape
        changed = shape.logit_divisor is not None or shape.logit_softcap is not None
        matrix = head.matrix if isinstance(head, Linear) else None
        if changed or not isinstance(matrix, PackedWeight) or matrix.inputs > MOST_INPUTS:
            return None
        return GreedyHead(matrix)
