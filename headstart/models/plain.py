"""A decoder that is nothing but embeddings, layers, a norm and an LM head, called part by part.

What transformers does around these parts (masks, caches, outputs of all kinds) takes a millisecond
a step, and answers more than is asked: logits where the likeliest token would do, and the last
layer's rows where only some have logits. `headstart.models.simplify` says of which models this is
all there is.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headstart.models.fused import FusedLayer, FusedLayers
from headstart.models.likeliest import LikeliestHead

__all__ = ["PlainDecoder", "Stack", "find_stack"]


class Stack(NamedTuple):
    """The parts of a text model of the Llama kind, every layer fused."""

    embed: nn.Module
    angles: nn.Module
    layers: FusedLayers
    norm: nn.Module

    def __call__(self, token_ids: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """Rows `[rows, hidden]` behind the norm, of all tokens if `rows` is None."""
        hidden = self.embed(token_ids).unsqueeze(0)
        angles = self.angles(hidden, positions.unsqueeze(0))
        hidden = self.layers(hidden, angles, rows)
        normed: Tensor = self.norm(hidden[0])
        return normed


class PlainDecoder:
    """Hidden rows of a decoder, and what its LM head says of them."""

    def __init__(self, decoder: nn.Module, stack: Stack | None, head: LikeliestHead) -> None:
        self._decoder: Any = decoder
        self._stack = stack
        self._head = head

    def hidden(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """`[rows, hidden]` behind the last norm, of one flat batch; all int64, `rows` in order."""
        kept = None if len(rows) == len(token_ids) else rows
        with torch.inference_mode():
            if self._stack is not None:
                return self._stack(token_ids, positions, kept)
            output = self._decoder(
                input_ids=token_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
            )
            hidden: Tensor = output.last_hidden_state[0]
            return hidden if kept is None else hidden.index_select(0, kept)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 `[rows, vocab]` of hidden rows."""
        with torch.inference_mode():
            return self._head.weight.multiply(hidden).float()

    def choose(self, hidden: Tensor) -> list[int]:
        """The likeliest token of each hidden row, the first of equals."""
        with torch.inference_mode():
            return self._head.choose(hidden)


def find_stack(decoder: nn.Module) -> Stack | None:
    """The parts of a text model by their names, if all of its layers are fused."""
    children = dict(decoder.named_children())
    if children.keys() != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return None
    modules = list(decoder.get_submodule("layers").children())
    forwards = (getattr(module, "forward", None) for module in modules)
    fused = [forward for forward in forwards if isinstance(forward, FusedLayer)]
    if not fused or len(fused) != len(modules):
        return None
    layers = FusedLayers(fused)
    return Stack(children["embed_tokens"], children["rotary_emb"], layers, children["norm"])
