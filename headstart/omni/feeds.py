"""Inputs of autoregressive stages: a prompt, and rows that may still be coming.

A first stage has its prompt when a request arrives. A later stage is fed rows: its prompt is
complete when enough rows have arrived, and each further token waits for its row. Token ids do not
determine these rows (a talker's prompt is one repeated mask token), so the rows are part of its
blocks' identity: by the names of their upstream blocks, or else by a digest of their bytes.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headstart.cache import MultiModalItem, TokenSequence
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PlacedRows, PreparedPrompt
from headstart.omni.stage import OmniRequest, OutputEvent, StageStarted

__all__ = ["Conditions", "Feed", "Feeder", "PromptFeed", "StagePrompt"]


@dataclass(frozen=True, slots=True)
class StagePrompt:
    """The engine's input for one request: prompt, sampling parameters, and salt."""

    prompt: PreparedPrompt | Sequence[int] | str
    params: SamplingParams
    salt: str | None


class Feed(Protocol):
    """One request's inputs to one stage."""

    def take(self, source: str, event: OutputEvent | StageStarted) -> None:
        """Take rows or block names from an earlier stage."""
        ...

    def end(self, source: str) -> None:
        """Note that `source` has no more rows."""
        ...

    def prompt(self) -> StagePrompt | None:
        """The prompt once it is complete, None until then. Raises RequestError."""
        ...

    def begin(self, sequence: TokenSequence) -> None:
        """Called with the sequence that the engine made from the prompt."""
        ...

    def is_ready(self, num_tokens: int) -> bool:
        """True if the inputs of the sequence's first `num_tokens` tokens have arrived."""
        ...


Feeder = Callable[[OmniRequest], Feed]
"""Begins a request's feed. Raises RequestError for a request that the stage cannot serve."""


class PromptFeed:
    """A first stage's feed: all inputs are there from the beginning."""

    def __init__(self, prompt: StagePrompt) -> None:
        self._prompt = prompt

    def take(self, source: str, event: OutputEvent | StageStarted) -> None:
        """Does nothing: no stage comes before a first stage."""

    def end(self, source: str) -> None:
        """Does nothing, as `take`."""

    def prompt(self) -> StagePrompt | None:
        return self._prompt

    def begin(self, sequence: TokenSequence) -> None:
        """Does nothing: all inputs are in the prompt."""

    def is_ready(self, num_tokens: int) -> bool:
        return True


class Conditions:
    """Rows that a stage's tokens are conditioned on, one per position, as they arrive.

    An `EmbeddingSource`: `combine(position, token_ids, rows)` makes the embeddings of tokens from
    their rows. `names` are identities of upstream blocks that align with this stage's blocks; rows
    of other blocks are hashed. With `anonymous` rows are neither named nor hashed, and the request
    shares no block with any other. A stage without caching uses it.
    """

    def __init__(
        self,
        block_size: int,
        combine: Callable[[int, Sequence[int], Tensor], Tensor],
        *,
        anonymous: bool = False,
    ) -> None:
        self._block_size = block_size
        self._combine = combine
        self._private = os.urandom(16) if anonymous else None
        self._buffer: Tensor | None = None  # doubled when full
        self._num_given = 0
        self._pad: Tensor | None = None
        self._items: list[MultiModalItem] = []
        self._names: Sequence[bytes] = ()
        self._sequence: TokenSequence | None = None
        self._token_ids: Sequence[int] = ()
        self.count = 0
        """Number of positions whose rows have arrived."""

    @property
    def items(self) -> tuple[MultiModalItem, ...]:
        """The identities of all whole blocks so far."""
        return tuple(self._items)

    def name(self, names: Sequence[bytes]) -> None:
        """Set the names of the first blocks, before any row is added."""
        self._names = names

    def add(self, rows: Tensor) -> None:
        """Add the rows `[n, ...]` of the next positions."""
        held, end = self._buffer, self.count + len(rows)
        if held is None or end > len(held):
            self._buffer = rows.new_empty((max(64, 2 * end), *rows.shape[1:]))
            if held is not None:
                self._buffer[: self.count] = held[: self.count]
        assert self._buffer is not None
        self._buffer[self.count : end] = rows
        self.count = self._num_given = end
        self._identify(self.count)

    def close(self, rows: Tensor, pad: Tensor, limit: int) -> None:
        """Add the last rows `[n, ...]`; `pad` is the row of every later position below `limit`."""
        self.add(rows)
        self._pad = pad
        size = self._block_size
        border = -(-self.count // size) * size
        self.count = max(limit, self.count)
        self._identify(min(border, self.count))
        digest = self._private or b"rows" + _rows_digest(pad.expand(size, *pad.shape))
        while (len(self._items) + 1) * size <= self.count:
            self._append_item(digest)

    def attach(self, token_ids: Sequence[int]) -> None:
        """Set the prompt's token ids, before there is a sequence."""
        self._token_ids = token_ids

    def begin(self, sequence: TokenSequence) -> None:
        """Take tokens from this sequence from now on, and add further block identities to it."""
        self._sequence = sequence
        self._token_ids = sequence.token_ids
        for item in self._items[len(sequence.items) :]:
            sequence.add_item(item, self._block_size)

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        """Embeddings of positions `start` to `stop - 1`."""
        ids = self._token_ids[start:stop]
        yield PlacedRows(start, self._combine(start, ids, self.rows(start, stop)))

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows of positions `start` to `stop - 1`, which must have arrived."""
        assert self._buffer is not None and stop <= self.count
        there = self._buffer[start : min(stop, self._num_given)]
        missing = stop - max(start, self._num_given)
        if missing <= 0:
            return there
        assert self._pad is not None
        return torch.cat([there, self._pad.expand(missing, *self._pad.shape)])

    def _identify(self, stop: int) -> None:
        """Add the identities of the blocks up to position `stop`."""
        while (len(self._items) + 1) * self._block_size <= stop:
            self._append_item(self._digest(len(self._items)))

    def _append_item(self, digest: bytes) -> None:
        item = MultiModalItem(digest, len(self._items) * self._block_size, self._block_size)
        self._items.append(item)
        if self._sequence is not None:
            self._sequence.add_item(item, self._block_size)

    def _digest(self, block: int) -> bytes:
        if self._private is not None:
            return self._private
        if block < len(self._names):
            return b"block" + self._names[block]
        size = self._block_size
        return b"rows" + _rows_digest(self.rows(block * size, block * size + size))


def _rows_digest(rows: Tensor) -> bytes:
    digest = hashlib.sha256(f"{rows.dtype}{list(rows.shape)}".encode())
    digest.update(rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
