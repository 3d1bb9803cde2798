"""Puts packed and fused parts into a loaded model, each checked against the original part.

1. Every plain `nn.Linear` becomes a `PackedLinear`, and an `nn.Embedding` that shares the LM head's
   weight a `PackedEmbedding`. Weights are packed one at a time: at most one is in memory twice.
2. Norms, MLPs and whole decoder layers with the same children as Llama's get a fused forward.

Names and children select candidates; a few rows through both parts confirm them. A part that
differs by more than rounding (a scaled residual, `1 + weight`, another pairing of rotated halves)
is left as it was. A model that does not run with packed weights, since other code reads them, gets
all of them back.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.attention.backend import AttentionOptions, RowShapes
from headstart.attention.register import AttentionCall, read_options, register, unregister
from headstart.models.fused import FusedLayer, FusedMLP, FusedNorm, FusionSwitch
from headstart.models.packed import (
    Arena,
    PackedEmbedding,
    PackedLinear,
    PackedWeight,
    can_pack,
    has_memory,
    map_pages,
)
from headstart.models.prefetch import ReadyMemory
from headstart.models.zoo.decoder import forward_rows, text_part
from headstart.native import library

__all__ = ["accelerate"]

_ROWS = 3
_PROMPT = 5
# Two correct results in bfloat16 differ by less than this part of their norm, wrong ones by more.
_NEAR = 0.03


def accelerate(model: PreTrainedModel, ready_memory: ReadyMemory | None = None) -> FusionSwitch:
    """Pack weights and fuse modules where possible; returns the model's fusion switch.

    Packed weights lie in `ready_memory` if it is given and large enough. Does nothing without the
    compiled kernels, on a device other than the CPU or in a dtype other than bfloat16.
    """
    switch = FusionSwitch()
    if library() is None or model.dtype != torch.bfloat16 or model.device.type != "cpu":
        return switch
    with torch.inference_mode():
        map_pages(model.parameters())
        expected = _logits(model)
        if expected is None:
            return switch
        packed_bytes = _pack(model, ready_memory)
        if not _runs_alike(_logits(model), expected):
            _unpack(model)
            return switch
        _leave_file(model, packed_bytes)
        _fuse(model, switch)
    return switch


def _logits(model: PreTrainedModel) -> Tensor | None:
    """Logits of a few tokens; None if the model does not run."""
    tokens = torch.arange(_PROMPT) % model.config.get_text_config().vocab_size
    try:
        return forward_rows(model, tokens, torch.arange(_PROMPT), torch.arange(_PROMPT))
    # The model misses a weight, works only with nn.Linear, or is one that the probe refuses later
    # with its reason.
    except Exception:
        return None


def _runs_alike(found: Tensor | None, expected: Tensor) -> bool:
    if found is None:
        return False
    # Rounding error grows with depth, and a near tie of experts may be decided the other way.
    return float(_apart(found, expected).median()) < 10 * _NEAR


def _apart(found: Tensor, expected: Tensor) -> Tensor:
    """Per row, the norm of the difference divided by the norm of `expected`."""
    size = expected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    apart: Tensor = (found.float() - expected.float()).norm(dim=-1) / size
    return apart


def _near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((_apart(found, expected) < _NEAR).all())


def _pack(model: PreTrainedModel, ready_memory: ReadyMemory | None) -> int:
    """Pack plain linear layers and embeddings that share their weight; returns the weights' bytes.

    Packs one weight at a time, so that at most one is in memory twice.
    """
    users: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    weights: dict[int, Tensor] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            for weight in child.parameters(recurse=False):
                if weight.dim() == 2:
                    users[id(weight)].append((parent, name))
                    weights[id(weight)] = weight
    wanted = [key for key, places in users.items() if _can_swap(weights[key], places)]
    arena = Arena((weights[key].shape for key in wanted), ready_memory)
    size = sum(weights[key].nbytes for key in wanted)
    for key in wanted:
        _swap_weight(weights.pop(key), users.pop(key), arena)
    arena.close()
    return size


def _can_swap(weight: Tensor, places: list[tuple[nn.Module, str]]) -> bool:
    children = [parent.get_submodule(name) for parent, name in places]
    return (
        can_pack(weight)
        and all(has_memory(own) for child in children for own in child.parameters(recurse=False))
        and any(type(child) is nn.Linear for child in children)
        and all(type(child) in (nn.Linear, nn.Embedding) for child in children)
        and all(child.weight is weight for child in children)
        and all(not child.sparse for child in children if isinstance(child, nn.Embedding))
    )


def _swap_weight(weight: Tensor, places: list[tuple[nn.Module, str]], arena: Arena) -> None:
    children = [(parent, name, parent.get_submodule(name)) for parent, name in places]
    packed = PackedWeight(weight, arena=arena)
    for parent, name, child in children:
        if isinstance(child, nn.Linear):
            own = packed if child.bias is None else packed.with_bias(child.bias)
            rows = _noise(_ROWS, child.in_features)
            if not _near(own.multiply(rows), child(rows)):
                return
            setattr(parent, name, PackedLinear(own))
        else:
            setattr(parent, name, PackedEmbedding(packed))


def _unpack(model: PreTrainedModel) -> None:
    """Restore plain modules; modules of one packed weight share one parameter."""
    made: dict[int, nn.Parameter] = {}

    def weight(packed: PackedWeight) -> nn.Parameter:
        if packed.panels_address not in made:
            made[packed.panels_address] = nn.Parameter(packed.unpack(), requires_grad=False)
        return made[packed.panels_address]

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear):
                bias = child.packed.bias
                plain = nn.Linear(child.in_features, child.out_features, bias is not None, "meta")
                plain.weight = weight(child.packed)
                if bias is not None:
                    plain.bias = nn.Parameter(bias, requires_grad=False)
                setattr(parent, name, plain)
            elif isinstance(child, PackedEmbedding):
                table = nn.Embedding(child.num_embeddings, child.embedding_dim, device="meta")
                table.weight = weight(child.packed)
                setattr(parent, name, table)


def _leave_file(model: PreTrainedModel, packed_bytes: int) -> None:
    """Copy unpacked weights out of their mapped file, since any view keeps the whole file mapped.

    If more bytes are left than were packed (experts of a mixture), they stay in the file.
    Subclasses of `Tensor` are not copied.
    """
    left = list(filter(has_memory, (*model.parameters(), *model.buffers())))
    if sum(tensor.nbytes for tensor in left) < packed_bytes:
        with torch.inference_mode(False):
            for tensor in left:
                tensor.data = tensor.data.clone()


def _fuse(model: PreTrainedModel, switch: FusionSwitch) -> None:
    # From the outside in: modules inside a fused layer are not called.
    with _plain_attention(model) as asked:
        for module in model.modules():
            for fuse in (_fuse_layer, _fuse_mlp, _fuse_norm):
                try:
                    fused = fuse(module, switch, asked)
                except (LookupError, AttributeError):  # it has other children
                    continue
                if fused is not None:
                    module.forward = fused
                    break


_Asked = list[AttentionOptions]


def _fuse_norm(module: nn.Module, _: FusionSwitch, __: _Asked) -> Callable[..., Any] | None:
    fused = FusedNorm(module)
    width = next(module.parameters()).shape[0]
    rows = _noise(_ROWS, width) + 1  # a mean, which some norms subtract
    rows *= torch.tensor([[1.0], [1e-3], [1e3]], dtype=rows.dtype)  # so that epsilon shows
    expected = _call(module, rows)
    return fused if expected is not None and _near(fused(rows), expected) else None


def _fuse_mlp(module: nn.Module, switch: FusionSwitch, _: _Asked) -> Callable[..., Any] | None:
    fused = FusedMLP(module, switch)
    gate = module.get_submodule("gate_proj")
    assert isinstance(gate, PackedLinear)
    rows = _noise(_ROWS, gate.in_features)
    expected = _call(module, rows)
    return fused if expected is not None and _near(fused(rows), expected) else None


def _fuse_layer(module: nn.Module, switch: FusionSwitch, asked: _Asked) -> FusedLayer | None:
    test = FusionSwitch(backend=_PlainBackend())
    first = FusedLayer(module, test, AttentionOptions(1.0))  # raises where it cannot fit
    rows = _noise(_PROMPT, first.hidden_size).unsqueeze(0)
    # Small compared with the layer's update, so that the update dominates the comparison.
    rows *= 2.0**-6
    angles = torch.rand(_PROMPT, first.head_dim // 2, generator=_generator()) * 6
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(0)
    place = (angles.cos().to(rows.dtype), angles.sin().to(rows.dtype))
    call: dict[str, Any] = {"position_embeddings": place, "attention_mask": None}
    asked.clear()
    expected = _call(module, rows, **call)
    if len(asked) != 1 or expected is None:
        return None
    [options] = asked
    found = FusedLayer(module, test, options)(rows, **call)
    if not _near(found - rows, expected - rows):
        return None
    return FusedLayer(module, switch, options)


def _call(module: nn.Module, *inputs: Tensor, **more: Any) -> Tensor | None:
    """A module's output; None if it is not one tensor, or if the call fails."""
    try:
        found = module(*inputs, **more)
    except Exception:  # a module that lacks an input may raise anything
        return None
    return found if isinstance(found, Tensor) else None


class _PlainBackend:
    """Causal attention over one short prompt, for the fused and the original layer."""

    def begin_step(self, plan: object) -> None: ...

    def end_step(self) -> None: ...

    def nonfinite_rows(self) -> list[int]:
        return []

    def compiled(self, layer_idx: int, rows: RowShapes, options: AttentionOptions) -> None: ...

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1).float() for x in (query, key, value))
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=options.scaling, enable_gqa=True
        )
        return out.transpose(0, 1).to(query.dtype).contiguous()


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Iterator[_Asked]:
    """A context in which `_PlainBackend` is the model's attention; yields its layers' options."""
    asked: _Asked = []

    def function(call: AttentionCall) -> Tensor:
        asked.append(read_options(call))
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        out = _PlainBackend().attend(call.layer.layer_idx, q, k, v, asked[-1])
        return out.unsqueeze(0)

    name = register(function)
    text = text_part(model)
    before = text.config._attn_implementation
    text.set_attn_implementation(name)
    try:
        yield asked
    finally:
        text.set_attn_implementation(before)
        unregister(name)


def _noise(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=_generator()).to(torch.bfloat16)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
