"""Packing and quantization of the linear layers of a loaded transformers model.

To pack weights for the compiled kernels, every plain `nn.Linear` is replaced by a `Linear` over a
`PackedWeight`, and an `nn.Embedding` that shares the LM head's weight by an `Embedding`. Each
replacement is compared with the original on a few rows. The model's own code may also read a weight
that was replaced. So all replacements are undone if the model no longer runs, or its logits change.
Weights are replaced one at a time, so at most one is in memory twice.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headstart.models.transformers_backend.decoder import (
    forward_rows,
    relative_errors,
    takes_positions,
    text_part,
)
from headstart.native.pages import ReadyMemory
from headstart.weights.bf16 import PackedWeight, can_pack, packed_bytes
from headstart.weights.format import Embedding, Linear, WeightFormat, WeightKind
from headstart.weights.memory import Arena, has_memory, map_pages
from headstart.weights.products import choose_product
from headstart.weights.quantize import kind_of_layer, quantize

_ROWS = 3
_PROMPT = 5
# Correct results in bfloat16 differ by less than this part of their norm, wrong results by more.
_NEAR = 0.03


def pack_linears(model: PreTrainedModel, ready_memory: ReadyMemory | None = None) -> None:
    """Pack weights where possible, in `ready_memory` if that is large enough.

    Does nothing unless weights are bfloat16 on the CPU, and the compiled kernels are usable.
    """
    if choose_product("bfloat16", model.dtype, model.device) != "bfloat16":
        return
    with torch.inference_mode():
        map_pages(model.parameters())
        expected = _logits(model)
        if expected is None:
            return
        num_bytes, logits = _pack(model, ready_memory), _logits(model)
        # Rounding errors grow with depth, and may decide a near tie of two experts differently.
        if logits is None or not float(relative_errors(logits, expected).median()) < 10 * _NEAR:
            _unpack(model)
        else:
            detach_from_file((*model.parameters(), *model.buffers()), num_bytes)


def _logits(model: PreTrainedModel) -> Tensor | None:
    """Return logits of a few tokens; None if the model does not run."""
    tokens = torch.arange(_PROMPT) % model.config.get_text_config().vocab_size
    try:
        rows = torch.arange(_PROMPT)
        return forward_rows(model, tokens, rows if takes_positions(model) else None, rows)
    # A model whose code needs nn.Linear fails only with packed layers, which `pack_linears` then
    # unpacks. The probe reports any other error.
    except Exception:
        return None


def _pack(model: PreTrainedModel, ready_memory: ReadyMemory | None) -> int:
    """Pack plain linear layers, and embeddings that share a weight with them.

    Returns the bytes of the replaced weights.
    """
    users: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    weights: dict[int, Tensor] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            for weight in child.parameters(recurse=False):
                if weight.dim() == 2:
                    users[id(weight)].append((parent, name))
                    weights[id(weight)] = weight
    fixed = _find_fixed(model)
    keys = [
        key
        for key, uses in users.items()
        if _can_swap(weights[key], uses)
        and fixed.isdisjoint(parent.get_submodule(name) for parent, name in uses)
    ]
    arena = Arena((packed_bytes(*weights[key].shape) for key in keys), ready_memory)
    size = sum(weights[key].nbytes for key in keys)
    for key in keys:
        _swap_weight(weights.pop(key), users.pop(key), arena)
    arena.close()
    return size


def _find_fixed(model: PreTrainedModel) -> set[nn.Module]:
    """Return the linear layers that are not replaced, since other code reads their `weight`.

    Mamba's code multiplies by the weight of `dt_proj`. Models without attention read the dtype of
    the LM head's weight.
    """
    fixed = {part for name, part in model.named_modules() if name.endswith(".dt_proj")}
    head = model.get_output_embeddings()
    return fixed if takes_positions(model) else {*fixed, head}


def _can_swap(weight: Tensor, uses: list[tuple[nn.Module, str]]) -> bool:
    children = [parent.get_submodule(name) for parent, name in uses]
    return (
        can_pack(weight)
        and all(
            has_memory(parameter)
            for child in children
            for parameter in child.parameters(recurse=False)
        )
        and any(type(child) is nn.Linear for child in children)
        and all(type(child) in (nn.Linear, nn.Embedding) for child in children)
        and all(child.weight is weight for child in children)
    )


def _swap_weight(weight: Tensor, uses: list[tuple[nn.Module, str]], arena: Arena) -> None:
    packed = PackedWeight(weight, arena=arena)
    for parent, name in uses:
        child = parent.get_submodule(name)
        if not isinstance(child, nn.Linear):
            setattr(parent, name, Embedding(packed, weight.dtype))
            continue
        matrix = packed if child.bias is None else PackedWeight(packed, child.bias)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(_ROWS, child.in_features, generator=generator).to(torch.bfloat16)
        actual, expected = matrix.multiply(rows), child(rows)
        if actual.shape != expected.shape or not (relative_errors(actual, expected) < _NEAR).all():
            return
        setattr(parent, name, Linear(matrix))


def _unpack(model: PreTrainedModel) -> None:
    """Restore plain modules; modules of one packed weight share one parameter."""
    parameters: dict[int, nn.Parameter] = {}

    def weight(packed: WeightFormat) -> nn.Parameter:
        address = packed.tensors[0].data_ptr()
        if address not in parameters:
            parameters[address] = nn.Parameter(packed.unpack(), requires_grad=False)
        return parameters[address]

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                bias = child.bias
                plain = nn.Linear(child.in_features, child.out_features, bias is not None, "meta")
                plain.weight = weight(child.matrix)
                if bias is not None:
                    plain.bias = nn.Parameter(bias, requires_grad=False)
                setattr(parent, name, plain)
            elif isinstance(child, Embedding):
                table = nn.Embedding(child.num_embeddings, child.embedding_dim, device="meta")
                table.weight = weight(child.matrix)
                setattr(parent, name, table)


def detach_from_file(tensors: Iterable[Tensor], replaced_bytes: int) -> None:
    """Copy the weights that were not replaced, so that their file can be unmapped.

    A single view of a mapped file keeps the whole file mapped. Nothing is copied if these weights
    have more bytes than the replaced weights, as in a mixture of experts.
    """
    remaining = list(filter(has_memory, tensors))
    if sum(tensor.nbytes for tensor in remaining) < replaced_bytes:
        with torch.inference_mode(False):
            for tensor in remaining:
                tensor.data = tensor.data.clone()


# Layers that choose experts. They are small, and rounding could make them choose other experts.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


def quantize_linears(model: PreTrainedModel, kind: WeightKind) -> None:
    """Round the weights of the text part's linear layers, and of the LM head.

    `kind_of_layer` gives the format of each layer. The LM head, and an embedding that shares its
    weight, are always int8. Other embeddings, norms, routers, a vision tower and modules that are
    not plain `nn.Linear` (the stacked weights of experts) do not change.
    """
    head, replaced_bytes = model.get_output_embeddings(), 0
    fixed = _find_fixed(model)
    if isinstance(head, nn.Linear) and head not in fixed and _can_replace(head):
        replaced_bytes += head.weight.nbytes
        dtype, embedding = head.weight.dtype, model.get_input_embeddings()
        tied = type(embedding) is nn.Embedding and embedding.weight is head.weight
        matrix = quantize(head.weight, head.bias, "int8", dtype, table=tied)
        new: dict[nn.Module, nn.Module] = {head: Linear(matrix)}
        if tied:
            new[embedding] = Embedding(matrix, dtype)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child in new:
                    setattr(parent, name, new[child])
    for parent in list(text_part(model).modules()):
        for child_name, child in list(parent.named_children()):
            if child_name in _ROUTERS or child is head or child in fixed:
                continue
            if _can_replace(child):
                assert isinstance(child, nn.Linear)
                child_kind = kind_of_layer(child_name, kind, child.in_features, child.out_features)
                matrix = quantize(child.weight, child.bias, child_kind, child.weight.dtype)
                replaced_bytes += child.weight.nbytes
                setattr(parent, child_name, Linear(matrix))
    detach_from_file(model.parameters(), replaced_bytes)


def _can_replace(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)  # a layer of compressed-tensors has other tensors
    return (
        type(module) is nn.Linear
        and weight is not None
        and has_memory(weight)
        and weight.is_floating_point()
        and weight.numel() > 0
    )
