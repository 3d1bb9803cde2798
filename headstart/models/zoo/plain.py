"""A decoder of only embeddings, layers, a norm and an LM head, called part by part.

transformers' code around these parts (masks, caches, output objects) takes a millisecond per step.
It also computes more than needed: logits where the greedy token would do, and the last layer for
rows that have no logits. `headstart.models.zoo.simplify` finds the models that have only these
parts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headstart.models.fused import Angles, FusedLayer, FusedLayers
from headstart.models.greedy_head import GreedyHead

__all__ = ["Call", "OtherKind", "PlainDecoder", "Stack", "find_stack"]

_FIRST_ANGLES = 1024  # positions


class OtherKind(Exception):
    """Raised for a model that is not a plain decoder; the text says what it has or does instead."""


class Call(NamedTuple):
    """A recorded call of a module: its inputs by name, and its output."""

    inputs: dict[str, Any]
    output: Any


class AngleTable:
    """Cosines and sines of positions, from a table that grows with the largest position.

    At most `limit` positions, since some modules change their frequencies beyond it. `module` is
    transformers' rotary embedding, see `independent`. `like` has the dtype of the result.
    """

    def __init__(self, module: nn.Module, limit: int, like: Tensor) -> None:
        self._module, self._limit, self._like = module, limit, like
        self._table: Angles = (like.new_empty((0, 0)), like.new_empty((0, 0)))

    def independent(self) -> bool:
        """True if a position's angles are independent of the other positions in the batch."""
        some = torch.tensor([0, 1, self._limit // 2, self._limit - 1])
        alone = [self._angles(position.unsqueeze(0)) for position in some]
        return all(
            torch.equal(torch.cat([one[part] for one in alone], dim=1), together)
            for part, together in enumerate(self._angles(some))
        )

    def __call__(self, positions: Tensor) -> Angles:
        """Two tensors `[1, rows, head_dim]` for positions int64 `[rows]`, at least one."""
        needed = int(positions.max()) + 1
        if needed > self._limit:
            return self._angles(positions)
        if needed > len(self._table[0]):
            size = max(_FIRST_ANGLES, 1 << (needed - 1).bit_length())
            cos, sin = self._angles(torch.arange(min(self._limit, size)))
            self._table = (cos[0], sin[0])
        cos, sin = (part.index_select(0, positions).unsqueeze(0) for part in self._table)
        return cos, sin

    def _angles(self, positions: Tensor) -> Angles:
        cos, sin = self._module(self._like, positions.unsqueeze(0))
        return cos, sin


class Stack(NamedTuple):
    """The parts of a text model of the Llama kind, every layer fused."""

    embed: nn.Module
    angles: AngleTable
    layers: FusedLayers
    norm: nn.Module

    def __call__(self, token_ids: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        """Rows `[rows, hidden]` after the norm, of all tokens if `rows` is None."""
        hidden = self.embed(token_ids.unsqueeze(0))
        hidden = self.layers(hidden, self.angles(positions), rows)
        normed: Tensor = self.norm(hidden)
        return normed[0]


class PlainDecoder:
    """A decoder's hidden rows, and their logits or greedy tokens from its LM head."""

    def __init__(self, decoder: nn.Module, stack: Stack | None, head: GreedyHead) -> None:
        self._decoder: Any = decoder
        self._stack = stack
        self._head = head

    def hidden(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """`[rows, hidden]` after the last norm, of one flat batch; all int64, `rows` ascending."""
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
        """The greedy token of each hidden row, the first of equals; -1 if it is not finite."""
        with torch.inference_mode():
            return self._head.choose(hidden)


def find_stack(decoder: nn.Module, limit: int, calls: list[Call]) -> Stack:
    """The parts of a text model by their names, if all its layers are fused.

    `limit` is the number of positions that it supports; `calls` are the calls of its rotary
    embedding in one step. Raises `OtherKind`.
    """
    children = dict(decoder.named_children())
    if children.keys() != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        raise OtherKind(f"its parts are {', '.join(children)}")
    modules = list(children["layers"].children())
    forwards = (getattr(module, "forward", None) for module in modules)
    fused = [forward for forward in forwards if isinstance(forward, FusedLayer)]
    if not fused or len(fused) != len(modules):
        raise OtherKind(f"{len(fused)} of its {len(modules)} layers are fused")
    _check_angles(calls, fused)
    like = torch.empty(1, 1, fused[0].hidden_size, dtype=torch.bfloat16)
    angles = AngleTable(children["rotary_emb"], limit, like)
    if not angles.independent():
        raise OtherKind("its angles for a position depend on the other positions in the batch")
    return Stack(children["embed_tokens"], angles, FusedLayers(fused), children["norm"])


def _check_angles(calls: list[Call], layers: list[FusedLayer]) -> None:
    """Raise `OtherKind` unless the step's angles were computed as `AngleTable` computes them."""
    if len(calls) != 1:
        raise OtherKind(f"its angles are computed {len(calls)} times in a step")
    [(inputs, output)] = calls
    given = list(inputs.values())
    if len(given) != 2 or not all(isinstance(value, Tensor) for value in given):
        raise OtherKind(f"its angles are computed from {', '.join(inputs)}")
    pair = isinstance(output, tuple) and len(output) == 2
    shapes = {(1, given[1].shape[-1], layer.head_dim) for layer in layers}
    if not pair or {tuple(part.shape) for part in output} != shapes:
        raise OtherKind("its angles are not a cosine and a sine for each place in a head")
