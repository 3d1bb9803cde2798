"""A decoder that is nothing but embeddings, layers, a norm and an LM head, called part by part.

What transformers does around these parts (masks, caches, outputs of all kinds) takes a millisecond
a step, and answers more than is asked: logits where the likeliest token would do, and the last
layer's rows where only some have logits. `headstart.models.simplify` says of which models this is
all there is.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headstart.models.fused import Angles, FusedLayer, FusedLayers
from headstart.models.greedy_head import GreedyHead

__all__ = ["Call", "OtherKind", "PlainDecoder", "Stack", "find_stack"]

_FIRST_ANGLES = 1024  # positions


class OtherKind(Exception):
    """A model is not of the kind that is asked for; the text says what it has or does instead."""


class Call(NamedTuple):
    """A module's inputs by name, and what it gave."""

    inputs: dict[str, Any]
    output: Any


class AngleTable:
    """Cosines and sines of positions, from a table that grows with the positions asked for.

    Up to `limit` positions, as some modules change their frequencies behind it; `module` is
    transformers', see `independent`. `like` is of the dtype that is wanted.
    """

    def __init__(self, module: nn.Module, limit: int, like: Tensor) -> None:
        self._module, self._limit, self._like = module, limit, like
        self._table: Angles = (like.new_empty((0, 0)), like.new_empty((0, 0)))

    def independent(self) -> bool:
        """Whether the module's result for a position does not hang on those beside it."""
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
        """Rows `[rows, hidden]` behind the norm, of all tokens if `rows` is None."""
        hidden = self.embed(token_ids.unsqueeze(0))
        hidden = self.layers(hidden, self.angles(positions), rows)
        normed: Tensor = self.norm(hidden)
        return normed[0]


class PlainDecoder:
    """Hidden rows of a decoder, and what its LM head says of them."""

    def __init__(self, decoder: nn.Module, stack: Stack | None, head: GreedyHead) -> None:
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
        """The likeliest token of each hidden row, the first of equals; -1 if none is finite."""
        with torch.inference_mode():
            return self._head.choose(hidden)


def find_stack(decoder: nn.Module, limit: int, calls: list[Call]) -> Stack:
    """The parts of a text model by their names, if all of its layers are fused.

    Positions up to `limit` are what it was made for; `calls` are those of its rotary angles in a
    step. Raises `OtherKind`.
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
        raise OtherKind("its angles for a position hang on those beside it")
    return Stack(children["embed_tokens"], angles, FusedLayers(fused), children["norm"])


def _check_angles(calls: list[Call], layers: list[FusedLayer]) -> None:
    """Raise `OtherKind` unless the step's angles came about as `AngleTable` makes them."""
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
