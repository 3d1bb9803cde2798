"""Parts of a decoder as one compiled call each, in place of its modules.

A fused part replaces the `forward` of one module object and uses the packed weights of its
children. The children stay in place and can still be called. The module's own forward, which calls
them one by one, runs if fusion is switched off or the call is not a step over paged K/V.
`headstart.models.zoo.swap` decides which of transformers' modules get a fused part;
`headstart.models.dense.decoder` runs all layers of its own modules as one call.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headstart.attention.backend import (
    AttentionBackend,
    AttentionOptions,
    CompiledCall,
    RowShapes,
)
from headstart.models.linear import QuantizedLinear
from headstart.models.packed import PackedLinear, PackedWeight, has_memory
from headstart.native import library
from headstart.native.bindings import Layer, LayerRun, Norm

__all__ = ["Angles", "FusedLayer", "FusedLayers", "FusedMLP", "FusedNorm", "FusionSwitch"]


@dataclass
class FusionSwitch:
    """A model's switch for fused parts, and the backend of their attention.

    If it is off, every child module is called, so that it can be wrapped or replaced for a step.
    """

    enabled: bool = True
    backend: AttentionBackend | None = None


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each `[1, rows, head_dim]`."""


class FusedNorm:
    """`weight * x / sqrt(mean(x ** 2) + epsilon)`, as Llama's RMSNorm rounds it."""

    def __init__(self, module: nn.Module) -> None:
        weight, epsilon = _norm_parts(module)
        found = library()
        assert found is not None
        self._function = found.headstart_rms_norm
        self._module, self._weight, self._epsilon = module, weight, epsilon
        self._address = weight.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        width = len(self._weight)
        if x.dtype != torch.bfloat16 or x.shape[-1] != width:
            plain: Tensor = type(self._module).forward(self._module, x)
            return plain
        x = x.contiguous()
        out = torch.empty_like(x)
        self._function(
            self._address,
            self._epsilon,
            x.data_ptr(),
            x.numel() // width,
            width,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


class FusedMLP:
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, module: nn.Module, switch: FusionSwitch) -> None:
        found = library()
        assert found is not None
        self._function = found.headstart_after_attention
        self._module, self._switch = module, switch
        self._struct, self._kept = Layer(), _mlp_parts(module)
        _fill(self._struct, self._kept)
        self._address = ctypes.addressof(self._struct)

    def __call__(self, x: Tensor) -> Tensor:
        width = self._kept["gate"].inputs
        if not self._switch.enabled or x.dtype != torch.bfloat16 or x.shape[-1] != width:
            plain: Tensor = type(self._module).forward(self._module, x)
            return plain
        x = x.contiguous()
        out = torch.empty_like(x)
        self._function(
            self._address,
            None,
            x.data_ptr(),
            x.numel() // width,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


class FusedLayer:
    """A whole decoder layer of the Llama and Qwen kind: two compiled calls around attention.

    `options` are the options of the layer's own attention. With `kept_rows` int64 `[kept]` it
    returns only these rows `[1, kept, hidden]`; it still writes K and V of all rows. Raises
    `LookupError` if the layer's children are not of this kind.
    """

    def __init__(self, layer: nn.Module, switch: FusionSwitch, options: AttentionOptions) -> None:
        found = library()
        assert found is not None
        self._before = found.headstart_before_attention
        self._after = found.headstart_after_attention
        self._layer, self._switch, self._options = layer, switch, options
        _expect(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
        attention = layer.get_submodule("self_attn")
        named = {name for name, child in attention.named_children() if _has_weights(child)}
        _expect(attention, {"q_proj", "k_proj", "v_proj", "o_proj"} | named & {"q_norm", "k_norm"})
        self._layer_idx = _integer(attention, "layer_idx")
        self.head_dim = _integer(attention, "head_dim")
        weights = {name[0]: _packed(attention, name) for name in _PROJECTIONS}
        norms = {
            "before": _norm_parts(layer.get_submodule("input_layernorm")),
            "after": _norm_parts(layer.get_submodule("post_attention_layernorm")),
        }
        for name in sorted(named & {"q_norm", "k_norm"}):
            norms[f"{name[0]}_heads"] = _norm_parts(attention.get_submodule(name))
        self.hidden_size = weights["q"].inputs
        self.widths = [weights[name].outputs for name in "qkv"]
        weights |= _mlp_parts(layer.get_submodule("mlp"))
        self.inner = weights["gate"].outputs
        self._check_shapes(weights, {name: norm[0] for name, norm in norms.items()})
        self._struct = Layer(head_dim=self.head_dim)
        _fill(self._struct, weights)
        for name, (weight, epsilon) in norms.items():
            setattr(self._struct, name, Norm(weight=weight.data_ptr(), epsilon=epsilon))
        self._kept = (weights, norms)
        self.address = ctypes.addressof(self._struct)

    def _check_shapes(self, weights: dict[str, PackedWeight], norms: dict[str, Tensor]) -> None:
        fits = (
            self.head_dim % 2 == 0
            and all(weights[name].inputs == self.hidden_size for name in ("k", "v", "gate"))
            and all(width % self.head_dim == 0 for width in self.widths)
            and self.widths[1] == self.widths[2]
            and weights["o"].inputs == self.widths[0]
            and weights["o"].outputs == self.hidden_size
            and all(len(norms[name]) == self.hidden_size for name in ("before", "after"))
            and all(
                len(norms.get(f"{name}_heads", range(self.head_dim))) == self.head_dim
                for name in "qk"
            )
        )
        if not fits:
            raise LookupError("the widths of the layer's parts do not fit together")

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        backend = self._switch.backend
        kept_rows: Tensor | None = kwargs.pop("kept_rows", None)
        if backend is None or not self.fits(hidden_states, kwargs):
            plain: Tensor = type(self._layer).forward(self._layer, hidden_states, *args, **kwargs)
            return plain if kept_rows is None else plain.index_select(1, kept_rows)
        cos, sin = kwargs["position_embeddings"]
        hidden, threads = hidden_states.contiguous(), torch.get_num_threads()
        rows, (q_width, kv_width, _) = hidden.shape[1], self.widths
        q = hidden.new_empty((rows, q_width // self.head_dim, self.head_dim))
        k = hidden.new_empty((rows, kv_width // self.head_dim, self.head_dim))
        v = torch.empty_like(k)
        self._before(
            self.address,
            hidden.data_ptr(),
            rows,
            cos.data_ptr(),
            sin.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            threads,
        )
        attended = backend.attend(self._layer_idx, q, k, v, self._options)
        if kept_rows is not None:
            rows = len(kept_rows)
            attended, hidden = attended.index_select(0, kept_rows), hidden[:, kept_rows]
        out = torch.empty_like(hidden)
        self._after(
            self.address, attended.data_ptr(), hidden.data_ptr(), rows, out.data_ptr(), threads
        )
        return out

    def compiled(self, tokens: int) -> CompiledCall | None:
        """Structs for compiled code to run the layer's attention; None if it must call `attend`."""
        backend, dim = self._switch.backend, self.head_dim
        if backend is None:
            return None
        rows = RowShapes(tokens, self.widths[0] // dim, self.widths[1] // dim, dim, dim)
        return backend.compiled(self._layer_idx, rows, self._options)

    def fits(self, hidden: Tensor, kwargs: dict[str, Any]) -> bool:
        """True for a step over paged K/V with one angle per row and head dim."""
        if self._switch.backend is None or not self._switch.enabled:
            return False
        if kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
            return False
        cos, sin = kwargs["position_embeddings"]
        return (
            cos.shape == sin.shape == (1, hidden.shape[1], self.head_dim)
            and cos.dtype == sin.dtype == hidden.dtype == torch.bfloat16
            and cos.is_contiguous()
            and sin.is_contiguous()
            and hidden.shape == (1, hidden.shape[1], self.hidden_size)
        )


class FusedLayers:
    """All layers of one model with their attention as one compiled call.

    Layers run one by one if their widths differ, since they share the memory of one call, or if
    compiled code cannot run their attention.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        found = library()
        assert found is not None
        self._function = found.headstart_layers
        self._layers = tuple(layers)
        self._alike = (
            len({(one.head_dim, one.hidden_size, one.inner, *one.widths) for one in layers}) == 1
        )
        self._runs = (LayerRun * len(layers))()
        for run, layer in zip(self._runs, layers, strict=True):
            run.layer = layer.address

    def __call__(self, hidden: Tensor, angles: Angles, kept_rows: Tensor | None = None) -> Tensor:
        """Output `[1, rows, hidden]` of the last layer; only of `kept_rows`, if given."""
        count = len(self._layers) - (kept_rows is not None)
        if self._alike and self._prepare(count, hidden, angles):
            hidden = hidden.clone(memory_format=torch.contiguous_format)
            self._function(
                ctypes.addressof(self._runs),
                count,
                hidden.data_ptr(),
                hidden.shape[1],
                *(part.data_ptr() for part in angles),
                torch.get_num_threads(),
            )
        else:
            for layer in self._layers[:count]:
                hidden = layer(hidden, position_embeddings=angles)
        for layer in self._layers[count:]:
            hidden = layer(hidden, position_embeddings=angles, kept_rows=kept_rows)
        return hidden

    def _prepare(self, count: int, hidden: Tensor, angles: Angles) -> bool:
        """True if `count` layers can run as one call now; fills in the call's addresses."""
        if not self._layers[0].fits(hidden, {"position_embeddings": angles}):
            return False
        for run, layer in zip(self._runs, self._layers[:count], strict=False):
            call = layer.compiled(hidden.shape[1])
            if call is None:
                return False
            run.step, run.call = call
        return True


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def _norm_parts(module: nn.Module) -> tuple[Tensor, float]:
    """Weight and epsilon of a norm; raises `LookupError` if it has other parameters."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = tensors.pop("weight", None)
    if weight is None or tensors or not isinstance(epsilon, float):
        raise LookupError(f"{type(module).__name__} is not a weight and an epsilon")
    fits = has_memory(weight) and weight.dtype == torch.bfloat16
    if not fits or weight.dim() != 1 or not weight.is_contiguous():
        raise LookupError(f"the weight of {type(module).__name__} is no row in bfloat16")
    return weight.detach(), epsilon


def _mlp_parts(module: nn.Module) -> dict[str, PackedWeight]:
    """The three projections of a gated MLP; raises `LookupError` if it has other parts."""
    _expect(module, {"gate_proj", "up_proj", "down_proj"})
    gate, up, down = (_packed(module, f"{name}_proj") for name in ("gate", "up", "down"))
    if not (
        (gate.inputs, gate.outputs) == (up.inputs, up.outputs)
        and (down.outputs, down.inputs) == (gate.inputs, gate.outputs)
    ):
        raise LookupError(f"the widths of {type(module).__name__} do not fit together")
    return {"gate": gate, "up": up, "down": down}


def _fill(struct: Layer, weights: dict[str, PackedWeight]) -> None:
    for name, weight in weights.items():
        setattr(struct, name, weight.struct)


def _has_weights(module: nn.Module) -> bool:
    return (
        isinstance(module, PackedLinear | QuantizedLinear)
        or next(module.parameters(), None) is not None
    )


def _expect(module: nn.Module, names: set[str]) -> None:
    """Raise `LookupError` unless these are all children with weights; others are ignored."""
    found = {
        name
        for name, child in module.named_children()
        if name in names or any(_has_weights(inner) for inner in child.modules())
    }
    if found != names or next(module.parameters(recurse=False), None) is not None:
        raise LookupError(f"{type(module).__name__} has {sorted(found)}, and not {sorted(names)}")


def _packed(module: nn.Module, name: str) -> PackedWeight:
    found = module.get_submodule(name)
    packed = found.packed if isinstance(found, PackedLinear | QuantizedLinear) else None
    if packed is None:
        raise LookupError(f"{name} of {type(module).__name__} is not packed")
    return packed


def _integer(module: nn.Module, name: str) -> int:
    found = getattr(module, name, None)
    if not isinstance(found, int):
        raise LookupError(f"{name} of {type(module).__name__} is {found!r}")
    return found
