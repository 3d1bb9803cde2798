"""The starting weights of `headstart-tiny`: heads that look things up roughly, from step 0.

Left to itself a small model takes tens of millions of tokens to find out that a cell belongs to
the name at the head of its row. So the first weights say so, and training refines them. The
architecture stays stock; only where training begins is chosen.

    layer 0   head h copies the token h + 1 places back (a constant in every embedding's first
              coordinate makes rotary position alone decide: the score peaks at that distance);
              the last head marks what stands soon after the start of a row or after "of"
    layer 1   first key group: the latest column labels ("age"); second: the latest parts of
              names, so that a cell knows its row and a stem whom it is about
    layer 2   first key group: induction (Olsson et al. 2022), the same two tokens before, in the
    and on    same row; second: the cell of the same row whose column the label asks for

Matches use the slow rotary pairs, where distance hardly counts. Readings and writings go through
random orthonormal projections, so that the parts keep out of each other's way. Which tokens are
parts of names, cells of a column or its label is counted in generated records.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import tiny_data as data
import torch
from tokenizers import Tokenizer
from torch import Tensor

CONSTANT, NAME, LABEL, START, STARTED = range(5)
CELL_OF, LABEL_OF = 5, 5 + len(data.COLUMNS)


@dataclass(frozen=True)
class Match:
    """What a head compares: its queries read `query`, its keys `key`, `[rows, width]`."""

    query: Tensor
    key: Tensor
    rows: int
    gain: float


def token_features(tokenizer: Tokenizer, people: int = 3000) -> Tensor:
    """`[vocab, 5 + 2 * columns]`: what each token is, from -1 to 3, as counted in records."""
    world = data.World(random.Random(0))
    columns = len(data.COLUMNS)
    vocab = tokenizer.get_vocab_size()
    seen = torch.full((vocab, columns + 1), 0.05)
    features = torch.zeros(vocab, LABEL_OF + columns)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    for record in world.records(people):
        for place, column in enumerate(data.COLUMNS):
            for token in ids(record[column]):
                seen[token, place] += 1
    for token in ids(" | " + data.PREFACE + " ,. - |\n @example.com? Your answer: The is of the"):
        seen[token, columns] += 10 * people
    for place, column in enumerate(data.COLUMNS):
        for token in ids(data.LABELS[column] + " "):
            if tokenizer.id_to_token(token) != "Ġ":
                seen[token, columns] += 10 * people
                features[token, LABEL] = features[token, LABEL_OF + place] = 3.0
    share = seen / seen.sum(1, keepdim=True)
    features[:, CONSTANT] = 3.0
    for text in (" |\n| ", "of "):
        features[ids(text), START] = 3.0
    named = share[:, data.COLUMNS.index("Name")] + share[:, data.COLUMNS.index("Email")]
    features[:, NAME] = (4 * named - 1).clamp(max=1.5)
    features[:, CELL_OF:LABEL_OF] = 3 * share[:, :columns]
    return features


class Wiring:
    """Sets the weights of a fresh Llama; `install` does it all."""

    def __init__(self, model: Any, features: Tensor) -> None:
        config = model.config
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.size, self.width = config.head_dim, config.hidden_size
        self.layers = [layer.self_attn for layer in model.model.layers]
        half = self.size // 2
        base = config.rope_parameters["rope_theta"]
        self.angles = base ** (-torch.arange(half) / half)
        self.slow = (torch.cat([self.angles, self.angles]) < 5e-4).nonzero()[:, 0]
        self.named = features.shape[1]
        free = self.width - self.named
        basis = torch.linalg.qr(torch.randn(free, free)).Q.T
        self.reads = [self.beside(basis[self.rows(group)]) for group in range(self.groups)]
        model.model.embed_tokens.weight[:, : features.shape[1]] = features

    def rows(self, head: int) -> slice:
        return slice(head * self.size, (head + 1) * self.size)

    def projection(self) -> Tensor:
        """A random orthonormal `[head_dim, width]` that leaves the features alone."""
        return self.beside(torch.linalg.qr(torch.randn(self.width - self.named, self.size)).Q.T)

    def beside(self, rows: Tensor) -> Tensor:
        """`rows` over the coordinates beside the features, widened to all coordinates."""
        return torch.cat([torch.zeros(len(rows), self.named), rows], dim=1)

    def feature(self, first: int, count: int) -> Tensor:
        """Reads `count` coordinates of the embedding as they are: `[count, width]`."""
        return torch.eye(self.width)[first : first + count]

    def look_back(self, layer: int, head: int, distance: float, band: Tensor, gain: float) -> None:
        """Point a query head `distance` tokens back, by the rotary pairs in `band`."""
        turn = distance * self.angles
        weight = self.layers[layer].q_proj.weight
        weight[self.rows(head)] *= 0.1
        direction = torch.cat([band * turn.cos(), -band * turn.sin()])
        weight[self.rows(head), CONSTANT] = gain * direction

    def anchor(
        self, layer: int, group: int, band: Tensor, gain: float, what: tuple[int, ...]
    ) -> None:
        """Which tokens the `look_back` heads of this key group look for: features by index."""
        weight = self.layers[layer].k_proj.weight
        weight[self.rows(group)] *= 0.1
        for index in what:
            weight[self.rows(group), index] = gain * torch.cat([band, 0 * band])

    def match(self, layer: int, head: int, group: int, matches: list[Match]) -> None:
        """Score by how well all `matches` agree, each in its own slow coordinates."""
        query = torch.cat([m.gain * m.query[: m.rows] for m in matches])
        key = torch.cat([m.gain * m.key[: m.rows] for m in matches])
        slots = self.slow[: len(query)]
        for name, index, source in (("q_proj", head, query), ("k_proj", group, key)):
            weight = getattr(self.layers[layer], name).weight
            weight[self.rows(index)] *= 0.2
            weight[slots + index * self.size] = source[: len(slots)]

    def copy(self, layer: int, head: int, group: int, write: Tensor, gain: float = 1.0) -> None:
        """Write what a head's values read of the embedding through `write`."""
        self.layers[layer].v_proj.weight[self.rows(group)] = self.reads[group]
        self.layers[layer].o_proj.weight[:, self.rows(head)] = gain * write.T

    def install(self) -> None:
        """Wire every layer as the table at the top of this file says."""
        per_group = self.heads // self.groups
        near = (self.angles > 0.03).float()
        middle = ((self.angles > 0.015) & (self.angles < 0.15)).float()
        row_long = ((self.angles > 0.005) & (self.angles < 0.04)).float()
        before = [self.projection() for _ in range(self.heads)]
        names, labels = self.projection(), self.projection()
        columns = len(data.COLUMNS)
        same_token = Match(self.reads[0], before[0], 12, 1.6)
        same_column = Match(labels, self.feature(CELL_OF, columns), columns, 4.0)
        same_row = Match(names, names, 24, 2.4)
        for head in range(self.heads):
            group, place = divmod(head, per_group)
            self.look_back(0, head, head + 1, near, 2.2)
            self.anchor(0, group, near, 2.2, (CONSTANT,))
            self.copy(0, head, group, before[head])
            if group:
                self.look_back(1, head, 0.0, row_long, 1.7)
                self.anchor(1, group, row_long, 1.7, (NAME, STARTED))
                self.copy(1, head, group, names, 2.0)
            else:
                self.look_back(1, head, 6.0 + 12 * place, middle, 1.5)
                self.anchor(1, group, middle, 1.5, (LABEL,))
                self.copy(1, head, group, labels, 2.0)
            for layer in range(2, len(self.layers)):
                self.match(layer, head, group, [same_row, same_column if group else same_token])
                self.copy(layer, head, group, self.reads[group])
        self.layers[1].v_proj.weight[:columns] = self.feature(LABEL_OF, columns)
        self.mark_starts(middle)

    def mark_starts(self, band: Tensor) -> None:
        """Make the last head of layer 0 write the coordinate `STARTED`."""
        first, last = self.layers[0], self.heads * self.size - 1
        group = self.groups - 1
        self.look_back(0, self.heads - 1, 5.0, band, 2.0)
        key = first.k_proj.weight[self.rows(group)]
        key[:, START] += 2.0 * torch.cat([band, 0 * band])
        first.v_proj.weight[self.groups * self.size - 1] = self.feature(START, 1)[0]
        first.o_proj.weight[:, self.rows(self.heads - 1)] = 0.0
        first.o_proj.weight[:, last - self.size] = 0.0
        first.o_proj.weight[STARTED, last] = 1.0
