"""A dense decoder in headstart's own modules."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from headstart.attention.backend import AttentionBackend, LayerLayout
from headstart.attention.memory import StateMemory
from headstart.models.decoder import DecoderModel, EmbeddingOverlay, Widths
from headstart.models.dense.compiled import compile_layers
from headstart.models.dense.layer import DecoderLayer
from headstart.models.dense.modules import (
    AngleTable,
    FamilyModule,
    Frequencies,
    LayerStep,
    RMSNorm,
)
from headstart.models.shapes import DecoderShape
from headstart.weights.bf16 import PackedWeight
from headstart.weights.format import Linear
from headstart.weights.greedy_head import MAX_INPUTS, GreedyHead
from headstart.weights.reader import Reader


class Description(NamedTuple):
    """A decoder without its weights: its folder and its configuration.

    frequencies: the rotary frequencies for each name in `LayerShape.angles`. max_model_len: length
    of the longest sequence in tokens.
    """

    folder: Path
    shape: DecoderShape
    frequencies: Mapping[str, Frequencies]
    max_model_len: int
    eos_token_ids: frozenset[int]


class _Body(FamilyModule):
    """The embedding, the layers, the last norm, and the modules of `DecoderShape.layer_inputs`."""

    def __init__(self, shape: DecoderShape, read: Reader) -> None:
        super().__init__(shape)
        width = shape.hidden_size
        self.embed_tokens = read.embedding("model.embed_tokens", shape.vocab_size, width)
        read.release()
        if (inputs := shape.layer_inputs) is not None:
            all_layers, name = len(shape.layers) * inputs.width, "model.embed_tokens_per_layer"
            self.embed_tokens_per_layer = read.embedding(name, inputs.vocab_size, all_layers)
            read.release()
            name = "model.per_layer_model_projection"
            self.per_layer_model_projection = read.linear(name, width, all_layers, bias=False)
            weight = read.vector("model.per_layer_projection_norm", inputs.width)
            self.per_layer_projection_norm = RMSNorm(weight, shape.epsilon, shape.norm)
        layers = []
        for index in range(len(shape.layers)):
            layers.append(DecoderLayer(shape, index, f"model.layers.{index}", read))
            read.release()
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(read.vector("model.norm", width), shape.epsilon, shape.norm)
        self._layer_inputs = shape.layer_inputs

    def layer_inputs(self, token_ids: Tensor, embeddings: Tensor) -> Tensor | None:
        """Return `LayerStep.inputs`; None if `DecoderShape.layer_inputs` is None."""
        if self._layer_inputs is None:
            return None
        by_layer = (len(token_ids), len(self.layers), self._layer_inputs.width)
        mixed = self.per_layer_model_projection(embeddings) * embeddings.shape[1] ** -0.5
        mixed = self.per_layer_projection_norm(mixed.view(by_layer))
        looked_up: Tensor = self.embed_tokens_per_layer(token_ids)
        looked_up = looked_up * looked_up.new_tensor(self._layer_inputs.width**0.5)
        inputs: Tensor = (mixed + looked_up.view(by_layer)) * 2.0**-0.5
        return inputs


class DenseModules(nn.Module):
    """All modules that have weights, under transformers' names.

    The class names of modules are part of a model's identity; see `DecoderModel.products`.
    """

    body: _Body
    """The embedding, layers and last norm."""

    def __init__(self, shape: DecoderShape, read: Reader) -> None:
        super().__init__()
        body = _Body(shape, read)
        self.__dict__["body"] = body  # registered only below `model`
        _, *inner = shape.path("model").split(".")
        self.model = nn.ModuleDict({inner[0]: body}) if inner else body
        tied = body.embed_tokens if shape.tied else None
        self.lm_head = read.head(tied, "lm_head", shape.vocab_size, shape.hidden_size)
        read.release()


class DenseDecoder(DecoderModel):
    """A dense decoder in headstart's own modules.

    Layers like those of Llama, Qwen and Gemma 3 run as one compiled call if the kernels support
    them (`CompiledLayers`). Other layers run module by module, and so do all layers in steps with
    adapters.
    """

    module: DenseModules

    def __init__(self, description: Description, modules: DenseModules, dtype: torch.dtype) -> None:
        shape = self._shape = description.shape
        layers: list[Any] = list(modules.body.layers)
        recurrent = [layer.mixer for layer in layers if layer.is_recurrent]
        # A layer that reads another layer's K and V has no K/V memory.
        owners = [index for index, layer in enumerate(shape.layers) if layer.source is None]
        self._first_reader = 1 + owners[-1]  # layers from here on read K and V of earlier layers
        layouts = [_layout(shape, index) for index in owners if shape.layers[index].mixer is None]
        super().__init__(tuple(layouts), description.folder)
        self.state_layouts = tuple(mixer.state for mixer in recurrent)
        self.module, self.dtype, self.output_layer = modules, dtype, "lm_head"
        self.device = modules.body.norm.weight.device
        self.vocab_size, self.max_model_len = shape.vocab_size, description.max_model_len
        self.eos_token_ids = description.eos_token_ids
        self._backend: AttentionBackend | None = None
        self._states: StateMemory | None = None
        like = torch.empty(0, dtype=dtype, device=self.device)
        exact = like.float() if shape.exact_angles else like
        self._angles = {
            kind: AngleTable(frequencies, exact)
            for kind, frequencies in description.frequencies.items()
        }
        self._compiled = compile_layers(layers, shape, dtype)
        self._head: GreedyHead | None = None
        matrix = modules.lm_head.matrix if isinstance(modules.lm_head, Linear) else None
        changed = shape.logit_divisor is not None or shape.logit_softcap is not None
        if isinstance(matrix, PackedWeight) and matrix.inputs <= MAX_INPUTS and not changed:
            self._head = GreedyHead(matrix)

    def linear_widths(self) -> dict[str, Widths]:
        return {
            name: Widths(module.in_features, module.out_features)
            for name, module in self.module.named_modules()
            if isinstance(module, nn.Linear | Linear)
        }

    def attach(self, backend: AttentionBackend, states: StateMemory | None = None) -> None:
        self._backend, self._states = backend, states

    def detach(self) -> None:
        self._backend = self._states = None

    def prepare(self, num_positions: int) -> None:
        for table in self._angles.values():
            table.extend(num_positions)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        embeddings: EmbeddingOverlay | None = None,
    ) -> Tensor:
        with torch.inference_mode():
            hidden = self._hidden(token_ids, positions, logit_rows, embeddings)
            logits: Tensor = self.module.lm_head(hidden)
            shape = self._shape
            if shape.logit_divisor is not None:
                logits = logits / shape.logit_divisor
            if shape.logit_softcap is not None:
                logits = torch.tanh(logits / shape.logit_softcap) * shape.logit_softcap
            return logits.float()

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
        """Return the hidden states `[rows, hidden]` of `logit_rows` after the last norm."""
        backend = self._backend
        assert backend is not None, "attach() comes first"
        body = self.module.body
        x: Tensor = body.embed_tokens(token_ids)
        shape = self._shape
        if (scale := shape.embedding_scale) is not None:
            x = x * (x.new_tensor(scale) if shape.rounded_embedding_scale else scale)
        if embeddings is not None:
            x = x.index_copy(0, embeddings.rows, embeddings.values.to(x))
        angles = {kind: table(positions) for kind, table in self._angles.items()}
        # An adapter's update of a layer needs all of the layer's rows.
        hooked = self.calls_each_layer
        rows = logit_rows if len(logit_rows) < len(token_ids) and not hooked else None
        out = None
        if self._compiled is not None and not hooked:
            out = self._compiled(x, angles, backend, rows)
        if out is None:
            inputs = body.layer_inputs(token_ids, x)
            step = LayerStep(backend, angles, hooked, self._states, inputs)
            out = self._run_layers(x, step, rows)
        hidden: Tensor = body.norm(out)
        return hidden if len(hidden) == len(logit_rows) else hidden.index_select(0, logit_rows)

    def _run_layers(self, x: Tensor, step: LayerStep, rows: Tensor | None) -> Tensor:
        """Return the last layer's output for `rows`, or for all rows if `rows` is None.

        All rows are needed up to the last layer that writes K/V or states. The layers after it
        compute only `rows`.
        """
        layers, count = self.module.body.layers, self._first_reader
        for layer in layers[: count - 1]:
            x = layer(x, step)
        x = layers[count - 1](x, step, rows)
        if rows is not None and count < len(layers):
            step = step.select_rows(rows)
        for layer in layers[count:] if len(x) else []:
            x = layer(x, step)
        return x


def _layout(shape: DecoderShape, index: int) -> LayerLayout:
    """Return the K and V of one token in a layer."""
    kv_heads, head_dim = shape.kv_widths(index)
    return LayerLayout(kv_heads, head_dim, head_dim, shape.layers[index].window)
