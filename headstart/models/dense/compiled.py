"""All layers of a decoder as one compiled call.

The call includes attention if the backend has compiled attention for every layer
(`AttentionBackend.compiled`). Steps in which layers have hooks run the modules instead.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headstart.attention.backend import AttentionBackend
from headstart.models.dense.layer import DecoderLayer
from headstart.models.dense.modules import Angles, RMSNorm
from headstart.models.shapes import DecoderShape, LayerShape
from headstart.native import avx2_library, library
from headstart.native.bindings import GELU_TANH, SILU, Layer, LayerRun, Norm, Weight
from headstart.weights.bf16 import MANY_ROWS
from headstart.weights.format import Linear

_ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}


def compile_layers(
    layers: Sequence[DecoderLayer], shape: DecoderShape, dtype: torch.dtype
) -> "CompiledLayers | None":
    """Return the compiled form of these layers; None if the kernels do not support them.

    dtype: the dtype of the rows between layers.
    """
    plain = (
        (shape.norm != "olmo" and shape.norms != "after" and shape.head_norms != "row")
        and shape.activation in _ACTIVATIONS
        and shape.residual_scale is None
        and not (shape.fused or shape.fused_mlp or shape.gated)
        and not (shape.partial_rotary or shape.exact_angles)
        and not (shape.value_norm or shape.layer_scalars or shape.layer_inputs)
        and all(
            layer == LayerShape(layer.window, layer.angles) and layer.angles is not None
            for layer in shape.layers
        )
    )
    linears = [
        module
        for layer in layers
        for module in layer.modules()
        if isinstance(module, nn.Linear | Linear)
    ]
    # Without AMX, products with integer weights take float32 rows, so bfloat16 rows are converted.
    in_float32 = dtype == torch.bfloat16 and all(
        isinstance(module, Linear) and module.matrix.computes_float32 for module in linears
    )
    product_dtype = torch.float32 if in_float32 else dtype
    if not plain or any(_struct(module, product_dtype) is None for module in linears):
        return None
    return CompiledLayers(layers, shape, dtype, product_dtype)


class CompiledLayers:
    """All layers of a decoder, as one compiled call.

    dtype: the dtype of the rows between layers. product_dtype: the dtype in which linear layers
    multiply rows. Products in float32 need AVX2, products in bfloat16 need AVX-512.

    If `dtype` is float32, the modules compute a step of `MANY_ROWS` rows or more. They run 40 torch
    operations per layer, but with so many rows the products take most of the time.

    If the attention of any layer is not compiled, steps with float32 products run the modules. With
    bfloat16 products, every layer then runs as two compiled calls, before and after attention. So
    does the last layer if only some rows are needed after it, since it writes K and V of all rows.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        shape: DecoderShape,
        dtype: torch.dtype,
        product_dtype: torch.dtype,
    ) -> None:
        self._layers, self._shape = layers, shape
        self._dtype, self._product_dtype = dtype, product_dtype
        self._in_float32 = product_dtype == torch.float32
        self._row_limit = MANY_ROWS if dtype == torch.float32 else math.inf
        kernels = avx2_library() if self._in_float32 else library()
        assert kernels is not None
        self._kernels = kernels
        self._run = kernels.headstart_layers
        if self._in_float32:
            self._run = kernels.headstart_float_layers
            if dtype == torch.bfloat16:
                self._run = kernels.headstart_half_layers
        self._kinds = [layer.angles or "" for layer in shape.layers]
        self._norms: list[Tensor] = []  # the norms' weights, to which the structs point
        self._structs = [self._layer_struct(layer) for layer in layers]
        self._runs = (LayerRun * len(layers))()
        for run, struct in zip(self._runs, self._structs, strict=True):
            run.layer = ctypes.addressof(struct)

    def __call__(
        self,
        hidden: Tensor,
        angles: Mapping[str, Angles],
        backend: AttentionBackend,
        output_rows: Tensor | None,
    ) -> Tensor | None:
        """Return rows `[rows, hidden]` after the last layer; None if modules must compute them.

        angles: the angles of the rows, by `LayerShape.angles`. output_rows: int64 numbers of the
        rows to return; None for all.
        """
        rows = len(hidden)
        if self._in_float32 and not 0 < rows < self._row_limit:
            return None
        count = len(self._layers) - (output_rows is not None and not self._in_float32)
        if self._in_float32:
            angles = {kind: (cos.float(), sin.float()) for kind, (cos, sin) in angles.items()}
        if self._prepare(count, rows, angles, backend):
            hidden = hidden.to(
                self._product_dtype, copy=True, memory_format=torch.contiguous_format
            )
            self._run(
                ctypes.addressof(self._runs),
                count,
                hidden.data_ptr(),
                rows,
                torch.get_num_threads(),
            )
        elif self._in_float32:
            return None
        else:
            for index in range(count):
                hidden = self._layer(index, hidden, angles, backend, None)
        if self._in_float32:
            hidden = hidden.to(self._dtype)
            return hidden if output_rows is None else hidden.index_select(0, output_rows)
        for index in range(count, len(self._layers)):
            hidden = self._layer(index, hidden, angles, backend, output_rows)
        return hidden

    def _prepare(
        self, count: int, tokens: int, angles: Mapping[str, Angles], backend: AttentionBackend
    ) -> bool:
        """Fill the structs of `count` layers; return False if their attention is not compiled."""
        rows = (tokens, self._shape.heads)
        addresses = {kind: (cos.data_ptr(), sin.data_ptr()) for kind, (cos, sin) in angles.items()}
        for run, layer, kind in zip(self._runs, self._layers[:count], self._kinds, strict=False):
            attention = layer.self_attn
            call = backend.compiled(attention.layer_idx, rows, attention.options, self._dtype)
            if call is None:
                return False
            run.step, run.call = call
            run.cos, run.sin = addresses[kind]
        return True

    def _layer(
        self,
        index: int,
        hidden: Tensor,
        angles: Mapping[str, Angles],
        backend: AttentionBackend,
        output_rows: Tensor | None,
    ) -> Tensor:
        shape, address = self._shape, ctypes.addressof(self._structs[index])
        hidden, threads = hidden.contiguous(), torch.get_num_threads()
        query = hidden.new_empty((len(hidden), shape.heads, shape.head_dim))
        key = hidden.new_empty((len(hidden), shape.kv_heads, shape.head_dim))
        value = torch.empty_like(key)
        parts = (part.data_ptr() for part in (*angles[self._kinds[index]], query, key, value))
        self._kernels.headstart_before_attention(
            address, hidden.data_ptr(), len(hidden), *parts, threads
        )
        attention = self._layers[index].self_attn
        attended = backend.attend(attention.layer_idx, query, key, value, attention.options)
        if output_rows is not None:
            attended = attended.index_select(0, output_rows)
            hidden = hidden.index_select(0, output_rows)
        out = torch.empty_like(hidden)
        rows = (attended.data_ptr(), hidden.data_ptr(), len(hidden), out.data_ptr())
        self._kernels.headstart_after_attention(address, *rows, threads)
        return out

    def _layer_struct(self, layer: DecoderLayer) -> Layer:
        shape = self._shape
        activation = _ACTIVATIONS[shape.activation]
        attention, struct = layer.self_attn, Layer(head_dim=shape.head_dim, activation=activation)
        linears = {name: attention.get_submodule(f"{name}_proj") for name in "qkvo"}
        linears |= {
            name: layer.mlp.get_submodule(f"{name}_proj") for name in ("gate", "up", "down")
        }
        for name, module in linears.items():
            setattr(struct, name, _struct(module, self._product_dtype))
        norms = {"before": layer.input_layernorm, "after": layer.post_attention_layernorm}
        if shape.norms == "around":
            norms["attention_update"] = layer.post_attention_layernorm
            norms["after"] = layer.pre_feedforward_layernorm
            norms["mlp_update"] = layer.post_feedforward_layernorm
        for name in "qk":
            norm = getattr(attention, f"{name}_norm", None)
            if isinstance(norm, RMSNorm):
                norms[f"{name}_heads"] = norm
        for name, norm in norms.items():
            weight = norm.weight.to(self._product_dtype)
            assert norm.weight.dtype == self._dtype and weight.is_contiguous()
            self._norms.append(weight)
            address, epsilon = weight.data_ptr(), norm.variance_epsilon
            setattr(struct, name, Norm(address, epsilon, shape.norm == "gemma"))
        return struct


def _struct(module: nn.Module, dtype: torch.dtype) -> Weight | None:
    """Return the struct of a linear layer's weight for rows in `dtype`; None without a kernel."""
    return module.matrix.struct(dtype) if isinstance(module, Linear) else None
