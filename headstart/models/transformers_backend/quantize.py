"""Replaces the linear layers of a loaded transformers model by quantised ones."""

from torch import nn
from transformers import PreTrainedModel

from headstart.models.transformers_backend.decoder import text_part
from headstart.models.transformers_backend.pack import leave_file
from headstart.weights.format import Embedding, Linear, WeightKind
from headstart.weights.memory import has_memory
from headstart.weights.quantize import kind_of_layer, quantize

__all__ = ["quantize_linears"]

# They choose among experts: small, and a near tie decided the other way is another expert.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


def quantize_linears(model: PreTrainedModel, kind: WeightKind) -> None:
    """Round the weights of the text part's linear layers, and of the LM head.

    One at a time, so that at most one weight is in memory twice. Each layer has its
    `kind_of_layer`; the LM head is int8 whatever the kind, and so are embeddings that share its
    weight. Other embeddings, norms, routers, a vision tower and what is no plain `nn.Linear` (the
    stacked weights of experts) stay as they are.
    """
    head, replaced_bytes = model.get_output_embeddings(), 0
    if isinstance(head, nn.Linear) and _can_replace(head):
        replaced_bytes += head.weight.nbytes
        _replace_head(model, head)
    for parent in list(text_part(model).modules()):
        for child_name, child in list(parent.named_children()):
            if child_name not in _ROUTERS and child is not head and _can_replace(child):
                assert isinstance(child, nn.Linear)
                own = kind_of_layer(child_name, kind, child.in_features, child.out_features)
                matrix = quantize(child.weight, child.bias, own, child.weight.dtype)
                replaced_bytes += child.weight.nbytes
                setattr(parent, child_name, Linear(matrix))
    leave_file(model.parameters(), replaced_bytes)


def _can_replace(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)  # a layer of compressed-tensors has other tensors
    return (
        type(module) is nn.Linear
        and weight is not None
        and has_memory(weight)
        and weight.is_floating_point()
        and weight.numel() > 0
    )


def _replace_head(model: PreTrainedModel, head: nn.Linear) -> None:
    dtype, embedding = head.weight.dtype, model.get_input_embeddings()
    tied = type(embedding) is nn.Embedding and embedding.weight is head.weight
    matrix = quantize(head.weight, head.bias, "int8", dtype, table=tied)
    places: dict[int, nn.Module] = {id(head): Linear(matrix)}
    if tied:
        places[id(embedding)] = Embedding(matrix, dtype)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in places:
                setattr(parent, name, places[id(child)])
