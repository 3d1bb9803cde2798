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
from typing import Generic, TypeVar

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
        self.items: list[MultiModalItem] = []
        """The identities of all whole blocks so far."""
        self._names: Sequence[bytes] = ()
        self._sequence: TokenSequence | None = None
        self.token_ids: Sequence[int] = ()
        """The prompt's tokens, set before there is a sequence, then those of the sequence."""
        self.count = 0
        """Number of positions whose rows have arrived."""

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
        while (len(self.items) + 1) * size <= self.count:
            self._append_item(digest)

    def begin(self, sequence: TokenSequence) -> None:
        """Take tokens from this sequence from now on, and add further block identities to it."""
        self._sequence = sequence
        self.token_ids = sequence.token_ids
        for item in self.items[len(sequence.items) :]:
            sequence.add_item(item, self._block_size)

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        """Embeddings of positions `start` to `stop - 1`."""
        ids = self.token_ids[start:stop]
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
        size = self._block_size
        while (block := len(self.items)) * size + size <= stop:
            if self._private is not None:
                digest = self._private
            elif block < len(self._names):
                digest = b"block" + self._names[block]
            else:
                digest = b"rows" + _rows_digest(self.rows(block * size, block * size + size))
            self._append_item(digest)

    def _append_item(self, digest: bytes) -> None:
        item = MultiModalItem(digest, len(self.items) * self._block_size, self._block_size)
        self.items.append(item)
        if self._sequence is not None:
            self._sequence.add_item(item, self._block_size)


def _rows_digest(rows: Tensor) -> bytes:
    digest = hashlib.sha256(f"{rows.dtype}{list(rows.shape)}".encode())
    digest.update(rows.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


@dataclass(frozen=True, kw_only=True)
class TalkerPlan:
    """The parts of one request's talker prompt.

    rows: the thinker's output that feeds it. bos, eos, pad: rows `[width]`, the only rows besides
    the thinker's. voice: part of the identity; talkers of different voices share no block.
    positions: None for 0, 1, 2, ...
    """

    rows: Input
    block_size: int
    bos: Tensor
    eos: Tensor
    pad: Tensor
    params: SamplingParams
    voice: str
    positions: RotaryPositions | None = None
    anonymous: bool = False


Plan = TypeVar("Plan", bound=TalkerPlan)


class TalkerFeed(Feed, Generic[Plan]):
    """A talker's feed: makes its prompt and its rows of the thinker's rows, as they arrive."""

    def __init__(self, request: OmniRequest, plan: Plan) -> None:
        self._request = request
        self._plan = plan
        self._prompt_tokens: int | None = None  # of the thinker
        self._num_rows = 0
        self._conditions = Conditions(plan.block_size, self._combine, anonymous=plan.anonymous)

    def take(self, source: str, event: OutputEvent | StageStarted) -> None:
        rows = self._plan.rows
        if source != rows.stage:
            return
        if isinstance(event, StageStarted):
            self._prompt_tokens = event.prompt_tokens
            if event.block_size == self._plan.block_size:
                self._name(event.names)
        elif event.chunk.output == rows.output:
            self._add(event.chunk.rows)

    def end(self, source: str) -> None:
        rows, count = self._plan.rows, self._prompt_tokens
        if source != rows.stage:
            return
        if count is None or self._num_rows < count:
            raise EngineError(
                f"{source!r} ended with {self._num_rows} rows of {rows.output!r} "
                f"for a prompt of {count} tokens"
            )
        self._end_rows()

    def prompt(self) -> StagePrompt | None:
        token_ids = self._token_ids()
        if token_ids is None:
            return None
        plan, conditions = self._plan, self._conditions
        conditions.token_ids = token_ids
        items = tuple(conditions.items[: len(token_ids) // plan.block_size])
        extras = PromptExtras(items, conditions, plan.positions)
        salt = json.dumps([self._request.salt, plan.voice])
        return StagePrompt(PreparedPrompt(token_ids, extras=extras), plan.params, salt)

    def begin(self, sequence: TokenSequence) -> None:
        self._conditions.begin(sequence)

    def is_ready(self, num_tokens: int) -> bool:
        return num_tokens <= self._conditions.count

    # For each family

    def _name(self, names: Sequence[bytes]) -> None:
        """Take the names of the thinker's blocks, which have the size of the talker's."""
        self._conditions.name(names)

    def _add(self, rows: Tensor) -> None:
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
