"""Autoregressive stages. Each runs an `EngineCore` with a separate KV cache.

The engine calls the stage as its `EngineHooks`. A request waits until its inputs have arrived. Its
prefix hit contains only blocks with stored rows. After each pass, the stage passes the request's
new rows to later stages.

The first stage has a request's prompt when the request arrives. A later stage receives rows: its
prompt is complete when enough rows have arrived, and each further token waits for its row. Token
ids do not determine these rows (a talker's prompt is one repeated mask token). So the identity of a
block also contains the identity of the thinker block with the same rows, or a digest of the rows.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.cache import ComputedBlocks, MultiModalItem, TokenSequence
from headstart.engine.config import EngineConfig
from headstart.engine.engine import EngineCore
from headstart.engine.params import SamplingParams
from headstart.engine.request import (
    PlacedRows,
    PreparedPrompt,
    PromptExtras,
    Request,
    RequestGroup,
    RotaryPositions,
)
from headstart.engine.step import Batch, StepResult
from headstart.errors import EngineError, HeadstartError, engine_error
from headstart.frontend.frontend import make_frontend
from headstart.omni.output_cache import OutputCache, raw_bytes
from headstart.omni.rows import ScheduledRows, StageRows, TierRows
from headstart.omni.stage import (
    TOKENS,
    Chunk,
    Event,
    Input,
    OmniRequest,
    OutputEvent,
    Stage,
    StageFailed,
    StageFinished,
    StageMetrics,
    StageSpec,
    StageStarted,
)
from headstart.omni.stage_decoder import HostCopy, StageDecoder


@dataclass(frozen=True, slots=True)
class StagePrompt:
    """The engine's input for one request: prompt, sampling parameters, and salt."""

    prompt: PreparedPrompt | Sequence[int] | str
    params: SamplingParams
    salt: str | None


class Feed:
    """One request's inputs to one stage. By default all inputs are present from the start."""

    def take(self, source: str, event: OutputEvent | StageStarted) -> None:
        """Take rows, or the identities of blocks, from an earlier stage."""

    def end(self, source: str) -> None:
        """Note that `source` will send no more rows."""

    def prompt(self) -> StagePrompt | None:
        """Return the prompt; None until it is complete. Raises RequestError."""
        raise NotImplementedError

    def begin(self, sequence: TokenSequence) -> None:
        """Take the sequence that was made from the prompt."""

    def is_ready(self, num_tokens: int) -> bool:
        """Return True if the inputs of the sequence's first `num_tokens` tokens have arrived."""
        return True


Feeder = Callable[[OmniRequest], Feed]
"""Makes a request's feed. Raises RequestError for a request that the stage cannot serve."""


class PromptFeed(Feed):
    """The feed of a first stage. Its only input is the prompt."""

    def __init__(self, prompt: StagePrompt) -> None:
        self._prompt = prompt

    def prompt(self) -> StagePrompt:
        return self._prompt


@dataclass(kw_only=True, eq=False)
class TalkerFeed(Feed):
    """A talker's feed: makes the prompt and one row per position from the thinker's rows.

    It is the `EmbeddingSource` of the talker's sequence, and `_combine` computes the embeddings. A
    block whose rows are exactly those of one thinker block gets that block's identity. Any other
    block is identified by a digest of its rows.

    rows: the thinker's output to read. bos, eos, pad: constant rows `[width]`. They mark the
    beginning and the end of the thinker's answer, and fill the positions after it. voice: requests
    with different voices share no block. positions: rotary positions; None for 0, 1, 2, ...
    anonymous: give the blocks a random identity, so that no other request hits them.
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
        self._prompt_tokens: int | None = None  # length of the thinker's prompt
        self._num_rows = 0  # rows received from the thinker
        self._random_identity = os.urandom(16) if self.anonymous else None
        self._buffer: Tensor | None = None  # its size doubles when it is full
        self._num_buffered = 0  # rows in the buffer; later rows are `pad`
        self._items: list[MultiModalItem] = []  # the identities of all whole blocks so far
        self._aligned_blocks: Sequence[bytes] = ()  # see `_aligned`
        self._sequence: TokenSequence | None = None
        self._tokens: Sequence[int] = ()  # token ids of the prompt, then of the sequence
        self._num_positions = 0  # positions with a row, including `pad`

    def take(self, source: str, event: OutputEvent | StageStarted) -> None:
        if source != self.rows.stage:
            return
        if isinstance(event, StageStarted):
            self._prompt_tokens = event.prompt_tokens
            if event.block_size == self.block_size:
                self._aligned_blocks = self._aligned(event.block_identities)
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
        return num_tokens <= self._num_positions

    def between(self, start: int, stop: int) -> Iterable[PlacedRows]:
        """Yield the embeddings of positions `start` to `stop - 1`."""
        yield PlacedRows(
            start, self._combine(start, self._tokens[start:stop], self._rows_of(start, stop))
        )

    def _add(self, rows: Tensor) -> None:
        buffer, end = self._buffer, self._num_positions + len(rows)
        if buffer is None or end > len(buffer):
            larger = rows.new_empty((max(64, 2 * end), *rows.shape[1:]))
            if buffer is not None:
                larger[: self._num_positions] = buffer[: self._num_positions]
            self._buffer = buffer = larger
        buffer[self._num_positions : end] = rows
        self._num_positions = self._num_buffered = end
        self._identify(end)

    def _close(self, limit: int) -> None:
        """Add the row `eos`, and `pad` for every later position below `limit`."""
        self._add(self.eos[None])
        size = self.block_size
        block_end = -(-self._num_positions // size) * size
        self._num_positions = max(limit, self._num_positions)
        self._identify(min(block_end, self._num_positions))
        pad_identity = self._random_identity or b"rows" + _rows_digest(self.pad.expand(size, -1))
        self._identify(self._num_positions, pad_identity)

    def _rows_of(self, start: int, stop: int) -> Tensor:
        assert self._buffer is not None and stop <= self._num_positions
        rows = self._buffer[start : min(stop, self._num_buffered)]
        missing = stop - max(start, self._num_buffered)
        return rows if missing <= 0 else torch.cat([rows, self.pad.expand(missing, -1)])

    def _identify(self, stop: int, pad_identity: bytes | None = None) -> None:
        """Give an identity to each whole block before `stop` that has none yet.

        pad_identity: the identity of these blocks if all their rows are `pad`, otherwise None.
        """
        size = self.block_size
        while (block := len(self._items)) * size + size <= stop:
            identity = self._random_identity or pad_identity
            if identity is None and block < len(self._aligned_blocks):
                identity = b"block" + self._aligned_blocks[block]
            if identity is None:
                identity = b"rows" + _rows_digest(self._rows_of(block * size, block * size + size))
            item = MultiModalItem(identity, block * size, size)
            self._items.append(item)
            if self._sequence is not None:
                self._sequence.add_item(item, size)

    # Overridden by each family

    def _aligned(self, identities: Sequence[bytes]) -> Sequence[bytes]:
        """Return the thinker's block identities that apply to the talker's first blocks."""
        return identities

    def _take_rows(self, rows: Tensor) -> None:
        """Take the thinker's next rows."""
        raise NotImplementedError

    def _end_rows(self) -> None:
        """Note that the thinker will send no more rows."""
        raise NotImplementedError

    def _token_ids(self) -> list[int] | None:
        """Return the prompt's token ids; None until its rows have arrived."""
        raise NotImplementedError

    def _combine(self, position: int, token_ids: Sequence[int], rows: Tensor) -> Tensor:
        """Return the embeddings of tokens from `position` on, made from tokens and rows."""
        raise NotImplementedError


def _rows_digest(rows: Tensor) -> bytes:
    header = f"{rows.dtype}{list(rows.shape)}".encode()
    return hashlib.sha256(header + raw_bytes(rows)).digest()


_LOG = logging.getLogger("headstart.omni")


@dataclass(slots=True)
class _State:
    """One request in the stage. group: the engine's request, once the prompt is complete."""

    request: OmniRequest
    feed: Feed
    metrics: StageMetrics = field(default_factory=StageMetrics)
    group: RequestGroup | None = None
    num_sent: int = 0

    @property
    def is_ready(self) -> bool:
        """True if the inputs of the prompt and of all tokens generated so far have arrived."""
        if self.group is None:
            return False
        return self.feed.is_ready(len(self.group.requests[0].sequence.token_ids))


class EngineStage(Stage):
    """Runs a decoder over the prompts of its feeds, and passes on rows and tokens.

    cache: the stage-output store; unused without `spec.enable_prefix_caching`. Raises
    OutOfMemoryError if the KV cache does not fit into memory.
    """

    def __init__(
        self,
        spec: StageSpec,
        decoder: StageDecoder,
        feeder: Feeder,
        config: EngineConfig,
        cache: OutputCache | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.spec = spec
        caching = spec.enable_prefix_caching and config.enable_prefix_caching
        # Rows are cached in whole blocks.
        config = replace(config, partial_hits=False, enable_prefix_caching=caching)
        self._decoder = decoder
        self._feeder = feeder
        self._deterministic = config.deterministic
        store = cache if caching else None
        store_name = store.reserve_name(spec.name) if store is not None else spec.name
        self.rows = StageRows(
            store_name, config.block_size, spec.gives, store, find_outputs=spec.find_outputs
        )
        self.stored_rows: TierRows | None = None
        self._passes_block_hashes = caching
        if caching and (config.disk_folder or config.remote_cache):
            if store is None or spec.find_outputs:
                _LOG.warning(
                    "stage %r stores nothing on disk, as its outputs are not declared", spec.name
                )
                config = replace(config, cache_dir=None, remote_cache=None)
                self._passes_block_hashes = False
            else:
                outputs = decoder.outputs_of_one()
                self.stored_rows = TierRows(spec, config.block_size, outputs, store, store_name)
        self._states: dict[str, _State] = {}
        self._events: list[Event] = []
        self.engine = EngineCore(decoder, tokenizer, config, self)
        self.frontend = make_frontend(self.engine, tokenizer)
        # Without tiers, block hashes do not cover the model's fingerprint. A random prefix makes
        # them unique to this stage.
        self._hash_prefix = b"" if self.engine.tiers is not None else os.urandom(8)

    # Stage

    @property
    def has_work(self) -> bool:
        return bool(self._events) or any(state.is_ready for state in self._states.values())

    def limit_to(self, outputs: Set[str]) -> None:
        self.rows.limit_to(outputs)

    def check(self, request: OmniRequest) -> None:
        prompt = self._feeder(request).prompt()
        if prompt is not None:
            self.frontend.prepare(prompt.prompt, prompt.params, salt=prompt.salt)

    def open(self, request: OmniRequest) -> None:
        self._states[request.request_id] = _State(request, self._feeder(request))
        self._update_feed(request.request_id, lambda feed: None)

    def feed(self, source: str, event: OutputEvent | StageStarted) -> None:
        self._update_feed(event.request_id, lambda feed: feed.take(source, event))

    def end_input(self, source: str, request_id: str) -> None:
        self._update_feed(request_id, lambda feed: feed.end(source))

    def step(self) -> list[Event]:
        start = time.perf_counter()
        ready_ids = {request_id for request_id, state in self._states.items() if state.is_ready}
        if ready_ids:
            results = self.engine.step()
            for group, error in results:
                self._deliver(group, error)
            self._complete_tokens(results)
        self._decoder.take_passes()  # drops the passes of a failed step
        seconds = time.perf_counter() - start
        events, self._events = self._events, []
        for request_id in ready_ids & self._states.keys():
            self._states[request_id].metrics.seconds += seconds
        for event in events:
            if isinstance(event, StageFinished):
                event.metrics.seconds += seconds
        return events

    def abort(self, request_id: str) -> None:
        if request_id in self._states:
            self.engine.abort(request_id)
            self._forget(request_id)

    def peek(self, request_id: str) -> object:
        """Return a running request's result so far, without rows; None if it has none."""
        state = self._states.get(request_id)
        return state.group.output() if state is not None and state.group is not None else None

    def reset_cache(self) -> None:
        self.engine.manager.reset_prefix_cache()

    def close(self) -> None:
        self.engine.close()

    # EngineHooks

    def applies(self, request: Request) -> bool:
        return True

    def reach(self, request: Request, start: int, stop: int) -> int | None:
        """Return `stop` if the inputs of all the request's tokens have arrived; otherwise None."""
        return stop if self._states[request.group.request_id].is_ready else None

    def enter(self, request: Request, start: int, stop: int) -> None:
        pass

    def leave(self, request: Request) -> None:
        pass

    def usable_blocks(self, request: Request, computed: ComputedBlocks) -> int:
        return self.rows.usable(request.sequence, computed)

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        self.rows.admitted(request.sequence, num_cached_tokens)

    def computed(self, batch: Batch) -> None:
        parts = [
            ScheduledRows(part.request.sequence, part.start, part.stop) for part in batch.scheduled
        ]
        request_ids = {
            part.request.sequence: part.request.group.request_id for part in batch.scheduled
        }
        outputs = self._join(parts, self._decoder.take_passes())
        self.ran(batch, outputs)
        for sequence, chunk in self.rows.computed(parts, outputs):
            self.give(request_ids[sequence], chunk)

    # Overridden by stages with more work per step

    def ran(self, batch: Batch, outputs: Mapping[str, Tensor]) -> None:
        """Receive a step's outputs `[tokens of the step, ...]`, including undeclared outputs."""

    def complete(self, tokens: Mapping[str, tuple[Feed, int]]) -> None:
        """Receive the feed and the new token of each request that continues.

        An exception ends these requests.
        """

    def give(self, request_id: str, chunk: Chunk) -> None:
        """Pass rows of an output to later stages."""
        self._events.append(OutputEvent(request_id, chunk))

    # Internal

    def _complete_tokens(self, results: Sequence[StepResult]) -> None:
        tokens = {}
        for group, _ in results:
            state = self._states.get(group.request_id)
            if state is not None:
                token = group.requests[0].sampling.output_token_ids[-1]
                tokens[group.request_id] = state.feed, token
        try:
            if tokens:
                self.complete(tokens)
        except Exception as error:  # a model's exception ends only these requests
            for request_id in tokens:
                self.engine.abort(request_id)
                self._fail(request_id, engine_error(f"stage {self.spec.name!r}", error))

    def _update_feed(self, request_id: str, update: Callable[[Feed], None]) -> None:
        state = self._states.get(request_id)
        if state is None:
            return
        try:
            update(state.feed)
            prompt = state.feed.prompt() if state.group is None else None
            if prompt is not None:
                self._begin(state, prompt)
        except Exception as error:  # a feed's exception ends only its request
            self.engine.abort(request_id)
            if not isinstance(error, HeadstartError):
                error = engine_error("its feed failed", error)
            self._fail(request_id, error)

    def _begin(self, state: _State, prompt: StagePrompt) -> None:
        request_id = state.request.request_id
        group = self.frontend.prepare(
            prompt.prompt, prompt.params, request_id=request_id, salt=prompt.salt
        )
        self.engine.submit(group)
        state.group = group
        sequence = group.requests[0].sequence
        state.feed.begin(sequence)
        self.rows.open(sequence)
        manager = self.engine.manager
        hashes = manager.block_hashes(sequence) if self._passes_block_hashes else []
        identities = [self._hash_prefix + block_hash for block_hash in hashes]
        length = len(sequence.token_ids)
        self._events.append(StageStarted(request_id, length, manager.block_size, identities))

    def _join(self, parts: list[ScheduledRows], passes: list[HostCopy]) -> Mapping[str, Tensor]:
        """Wait for the outputs of a step's passes, and concatenate them.

        In deterministic mode a step has many passes, and each computes a whole block of one
        sequence. Only the rows of scheduled tokens are used.
        """
        if not self._deterministic:
            return passes[0].wait()
        size = self.engine.manager.block_size
        columns: dict[str, list[Tensor]] = {}
        remaining = iter(passes)
        for part in parts:
            for start in range(part.start // size * size, part.stop, size):
                first = max(part.start - start, 0)
                stop = min(part.stop - start, size)
                for name, rows in next(remaining).wait().items():
                    ratio = len(rows) // size
                    columns.setdefault(name, []).append(rows[first * ratio : stop * ratio])
        return {name: torch.cat(rows) for name, rows in columns.items()}

    def _deliver(self, group: RequestGroup, error: EngineError | None) -> None:
        request_id = group.request_id
        if error is not None:
            self._fail(request_id, error)
            return
        state = self._states[request_id]
        request = group.requests[0]
        tokens = request.sampling.output_token_ids[state.num_sent :]
        if tokens:
            self.give(request_id, Chunk(TOKENS, state.num_sent, torch.tensor(tokens)))
            state.num_sent += len(tokens)
        if not group.finished:
            return
        output = group.output()
        metrics = state.metrics
        metrics.prompt_tokens = len(output.prompt_token_ids)
        metrics.tokens = len(request.sequence.token_ids)
        metrics.cached_tokens = output.num_cached_tokens
        metrics.loaded_tokens = output.num_loaded_tokens
        metrics.hit_rows = self.rows.close(request.sequence)
        self._events.append(StageFinished(request_id, metrics, output))
        del self._states[request_id]

    def _fail(self, request_id: str, error: HeadstartError) -> None:
        self._forget(request_id)
        self._events.append(StageFailed(request_id, error))

    def _forget(self, request_id: str) -> None:
        state = self._states.pop(request_id)
        self._events = [event for event in self._events if event.request_id != request_id]
        if state.group is not None:
            self.rows.close(state.group.requests[0].sequence)
