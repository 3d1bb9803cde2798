"""Inputs of autoregressive stages: a prompt, and rows that may still be coming.

A first stage has its prompt when a request arrives. A later stage is fed rows: its prompt is
complete when enough rows have arrived, and each further token waits for its row. Token ids do not
determine these rows (a talker's prompt is one repeated mask token), so the rows are part of its
blocks' identity: by the names of their upstream blocks, or else by a digest of their bytes.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.cache import MultiModalItem, TokenSequence
from headstart.engine.params import SamplingParams
from headstart.engine.prompt import PlacedRows, PreparedPrompt, PromptExtras, RotaryPositions
from headstart.errors import EngineError
from headstart.omni.stage import Input, OmniRequest, OutputEvent, StageStarted


@dataclass(frozen=True, slots=True)
class StagePrompt:
    """The engine's input for one request: prompt, sampling parameters, and salt."""

    prompt: PreparedPrompt | Sequence[int] | str
    params: SamplingParams
    salt: str | None


class Feed:
    """One request's inputs to one stage; by default all are there from the beginning."""

    def take(self, source: str, event: OutputEvent | StageStarted) -> None:
        """Take rows or block names from an earlier stage."""

    def end(self, source: str) -> None:
        """Note that `source` has no more rows."""

    def prompt(self) -> StagePrompt | None:
        """Return the prompt, None until it is complete. Raises RequestError."""
        raise NotImplementedError

    def begin(self, sequence: TokenSequence) -> None:
        """Take the sequence that the engine made from the prompt."""

    def is_ready(self, num_tokens: int) -> bool:
        """Return True if the inputs of the sequence's first `num_tokens` tokens have arrived."""
        return True


Feeder = Callable[[OmniRequest], Feed]
"""Begins a request's feed. Raises RequestError for a request that the stage cannot serve."""


class PromptFeed(Feed):
    """A first stage's feed: a prompt."""

    def __init__(self, prompt: StagePrompt) -> None:
        self._prompt = prompt

    def prompt(self) -> StagePrompt:
        return self._prompt


@dataclass(kw_only=True, eq=False)
class TalkerFeed(Feed):
    """A talker's feed: makes its prompt and its rows, one per position, of the thinker's rows.

    An `EmbeddingSource`: `_combine` makes the embeddings of tokens from their rows. Blocks that
    align with the thinker's are identified by the names of those, others by a digest of their rows.

    rows: the thinker's output that feeds it. bos, eos, pad: rows `[width]`, the only rows besides
    the thinker's. voice: part of the identity; talkers of different voices share no block.
    positions: None for 0, 1, 2, ... anonymous: rows have no identity, and the request shares no
    block with any other; for a stage without caching.
    """

    request: OmniRequest
    rows: Input
    block_size: int
    bos: Tensor
    eos: Tensor
    pad: Tensor
    params: SamplingParams
    voice: str
    positions: RotaryPositions | None = None
    anonymous: bool = False

    def __post_init__(self) -> None:
        self._prompt_tokens: int | None = None  # of the thinker
        self._num_rows = 0  # of the thinker
        self._private = os.urandom(16) if self.anonymous else None
        self._buffer: Tensor | None = None  # doubled when full
        self._num_given = 0
        self._padding: Tensor | None = None
        self._items: list[MultiModalItem] = []  # the identities of all whole blocks so far
        self._names: Sequence[bytes] = ()
        self._sequence: TokenSequence | None = None
        self._tokens: Sequence[int] = ()  # of the prompt, then of the sequence
        self._count = 0  # positions whose rows have arrived

    def take(self, source: str, event: OutputEvent | StageStarted) -> None:
        if source != self.rows.stage:
            return
        if isinstance(event, StageStarted):
            self._prompt_tokens = event.prompt_tokens
            if event.block_size == self.block_size:
                self._names = self._aligned(event.names)
        elif event.chunk.output == self.rows.output:
            self._take_rows(event.chunk.rows)

    def end(self, source: str) -> None:
        if source != self.rows.stage:
            return
        count = self._prompt_tokens
        if count is None or self._num_rows < count:
            raise EngineError(
                f"{source!r} ended with {self._num_rows} rows of {self.rows.output!r} "
                f"for a prompt of {count} tokens"
            )
        self._end_rows()

    def prompt(self) -> StagePrompt | None:
        token_ids = self._token_ids()
        if token_ids is None:
            return None
        self._tokens = token_ids
        items = tuple(self._items[: len(token_ids) // self.block_size])
        extras = PromptExtras(items, self, self.positions)
        salt = json.dumps([self.request.salt, self.voice])
        return StagePrompt(PreparedPrompt(token_ids, extras=extras), self.params, salt)

    def begin(self, sequence: TokenSequence) -> None:
        self._sequence = sequence
        self._tokens = sequence.token_ids
        for item in self._items[len(sequence.items) :]:
            sequence.add_item(item, self.block_size)

    def is_ready(self, num_tokens: int) -> bool:
        return num_tokens <= self._count

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        """Yield the embeddings of positions `start` to `stop - 1`."""
        yield PlacedRows(
            start, self._combine(start, self._tokens[start:stop], self._rows_of(start, stop))
        )

    def _add(self, rows: Tensor) -> None:
        """Add the rows `[n, ...]` of the next positions."""
        buffer, end = self._buffer, self._count + len(rows)
        if buffer is None or end > len(buffer):
            larger = rows.new_empty((max(64, 2 * end), *rows.shape[1:]))
            if buffer is not None:
                larger[: self._count] = buffer[: self._count]
            self._buffer = buffer = larger
        buffer[self._count : end] = rows
        self._count = self._num_given = end
        self._identify(end)

    def _close(self, limit: int) -> None:
        """Add the row `eos`, and `pad` for every later position below `limit`."""
        self._add(self.eos[None])
        self._padding = self.pad
        size = self.block_size
        border = -(-self._count // size) * size
        self._count = max(limit, self._count)
        self._identify(min(border, self._count))
        pads = self._private or b"rows" + _rows_digest(self.pad.expand(size, *self.pad.shape))
        self._identify(self._count, pads)

    def _rows_of(self, start: int, stop: int) -> Tensor:
        """Return the rows of positions `start` to `stop - 1`, which must have arrived."""
        assert self._buffer is not None and stop <= self._count
        rows = self._buffer[start : min(stop, self._num_given)]
        missing = stop - max(start, self._num_given)
        if missing <= 0:
            return rows
        assert self._padding is not None
        return torch.cat([rows, self._padding.expand(missing, *self._padding.shape)])

    def _identify(self, stop: int, digest: bytes | None = None) -> None:
        """Add the identities of the blocks up to position `stop`."""
        size = self.block_size
        while (block := len(self._items)) * size + size <= stop:
            identity = self._private or digest
            if identity is None and block < len(self._names):
                identity = b"block" + self._names[block]
            if identity is None:
                identity = b"rows" + _rows_digest(self._rows_of(block * size, block * size + size))
            item = MultiModalItem(identity, block * size, size)
            self._items.append(item)
            if self._sequence is not None:
                self._sequence.add_item(item, size)

    # For each family

    def _aligned(self, names: Sequence[bytes]) -> Sequence[bytes]:
        """Return the names of the thinker's blocks that align with the talker's."""
        return names

    def _take_rows(self, rows: Tensor) -> None:
        """Take the thinker's next rows."""
        raise NotImplementedError

    def _end_rows(self) -> None:
        """Note that the thinker has no more rows."""
        raise NotImplementedError

    def _token_ids(self) -> list[int] | None:
        """Return the prompt's token ids, None until its rows have arrived."""
        raise NotImplementedError

    def _combine(self, position: int, token_ids: Sequence[int], rows: Tensor) -> Tensor:
        """Return the embeddings of tokens from `position` on, with these rows."""
        raise NotImplementedError


def _rows_digest(rows: Tensor) -> bytes:
    digest = hashlib.sha256(f"{rows.dtype}{list(rows.shape)}".encode())
    digest.update(rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()
