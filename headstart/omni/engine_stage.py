"""Autoregressive stage: an `EngineCore` with a separate KV cache, whose rows other stages take.

The engine runs as usual; only `EngineHooks` differ. A request waits while its inputs are still
coming, its hits are limited to blocks with rows, and after each pass its rows are passed on.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.cache import ComputedBlocks
from headstart.engine.config import EngineConfig
from headstart.engine.engine import EngineCore
from headstart.engine.request import Request, RequestGroup
from headstart.engine.step import Batch, StepResult, engine_error
from headstart.errors import ConfigError, EngineError, HeadstartError
from headstart.frontend.frontend import make_frontend
from headstart.omni.feeds import Feed, Feeder
from headstart.omni.output_cache import OutputCache
from headstart.omni.rows import Part, StageRows, TierRows
from headstart.omni.stage import (
    TOKENS,
    Chunk,
    Event,
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

_LOG = logging.getLogger("headstart.omni")


@dataclass(slots=True)
class _State:
    """One request in the stage: its inputs and, once its prompt is complete, its group."""

    request: OmniRequest
    feed: Feed
    metrics: StageMetrics = field(default_factory=StageMetrics)
    group: RequestGroup | None = None
    num_sent: int = 0

    @property
    def is_ready(self) -> bool:
        """True if the inputs of all known tokens have arrived."""
        if self.group is None:
            return False
        return self.feed.is_ready(len(self.group.requests[0].sequence.token_ids))


class TokenEvent(NamedTuple):
    """A request's new token, and the request's inputs."""

    feed: Feed
    token: int


class EngineStage(Stage):
    """Runs a decoder over prompts that its feeder makes, and passes on rows and tokens.

    cache: the store of its rows, unused without `spec.enable_prefix_caching`. Raises ConfigError
    for options that a stage cannot have, OutOfMemoryError if no K/V fit. `engine` and `rows` are
    public for benchmarks.
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
        if config.partial_hits or config.enable_prefix_caching != caching:
            raise ConfigError(
                f"stage {spec.name!r}: rows are kept by whole blocks, so partial_hits must be off, "
                "and enable_prefix_caching as the stage says"
            )
        self._decoder = decoder
        self._feeder = feeder
        self._deterministic = config.deterministic
        used = cache if caching else None
        place = used.place(spec.name) if used is not None else spec.name
        self.rows = StageRows(
            place, config.block_size, spec.gives, used, find_outputs=spec.find_outputs
        )
        self.kept_rows: TierRows | None = None
        self._is_named = caching
        if config.enable_prefix_caching and (config.kept_folder or config.remote_cache):
            if used is None or spec.find_outputs:
                _LOG.warning(
                    "stage %r keeps nothing on disk: its outputs are not declared", spec.name
                )
                config = replace(config, cache_dir=None, remote_cache=None)
                self._is_named = False
            else:
                like = decoder.outputs_of_one()
                self.kept_rows = TierRows(spec, config.block_size, like, used, place)
        self._states: dict[str, _State] = {}
        self._events: list[Event] = []
        self.engine = EngineCore.of_model(decoder, tokenizer, config, self)
        self.frontend = make_frontend(self.engine, tokenizer)
        # Names without a model's fingerprint mean nothing in other processes.
        self._name_prefix = b"" if self.engine.tiers is not None else os.urandom(8)

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
        ran = {request_id for request_id, state in self._states.items() if state.is_ready}
        if ran:
            results = self.engine.step()
            for group, error in results:
                self._deliver(group, error)
            self._complete_tokens(results)
        self._decoder.take_passes()  # those of a step that failed
        seconds = time.perf_counter() - start
        events, self._events = self._events, []
        for request_id in ran & self._states.keys():
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
        """Return `stop` once the inputs of all the request's known tokens have arrived."""
        return stop if self._states[request.group.request_id].is_ready else None

    def enter(self, request: Request, start: int, stop: int) -> None:
        pass

    def leave(self, request: Request) -> None:
        pass

    def usable_blocks(self, request: Request, found: ComputedBlocks) -> int:
        return self.rows.usable(request.sequence, found)

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        self.rows.admitted(request.sequence, num_cached_tokens)

    def computed(self, batch: Batch) -> None:
        parts = [Part(part.request.sequence, part.start, part.stop) for part in batch.scheduled]
        names = {part.request.sequence: part.request.group.request_id for part in batch.scheduled}
        outputs = self._join(parts, self._decoder.take_passes())
        self.ran(batch, outputs)
        for sequence, chunk in self.rows.computed(parts, outputs):
            self.give(names[sequence], chunk)

    # For stages that do more

    def ran(self, batch: Batch, outputs: Mapping[str, Tensor]) -> None:
        """Take a step's outputs `[tokens of the step, ...]`, declared or not."""

    def complete(self, tokens: Mapping[str, TokenEvent]) -> None:
        """Take the new tokens of requests that continue; an exception ends them."""

    def give(self, request_id: str, chunk: Chunk) -> None:
        """Pass rows of an output on."""
        self._events.append(OutputEvent(request_id, chunk))

    # Inside

    def _complete_tokens(self, results: Sequence[StepResult]) -> None:
        """Process new tokens before the next step."""
        tokens = {}
        for group, _ in results:
            state = self._states.get(group.request_id)
            if state is not None:
                token = group.requests[0].sampling.output_token_ids[-1]
                tokens[group.request_id] = TokenEvent(state.feed, token)
        try:
            if tokens:
                self.complete(tokens)
        except Exception as error:  # a model's exception ends only these requests
            for request_id in tokens:
                reason = EngineError(f"{type(error).__name__}: {error}")
                reason.__cause__ = error
                self.engine.abort(request_id)
                self._fail(request_id, reason)

    def _update_feed(self, request_id: str, update: Callable[[Feed], None]) -> None:
        """Update a request's feed, and begin the request if its prompt is complete."""
        state = self._states.get(request_id)
        if state is None:
            return
        try:
            update(state.feed)
            if state.group is None:
                self._try_to_begin(state)
        except Exception as error:  # a feed's exception ends only its request
            self.engine.abort(request_id)
            if not isinstance(error, HeadstartError):
                error = engine_error("its feed failed", error)
            self._fail(request_id, error)

    def _try_to_begin(self, state: _State) -> None:
        """Submit a request to the engine if its prompt is complete."""
        prompt, request_id = state.feed.prompt(), state.request.request_id
        if prompt is None:
            return
        group = self.frontend.prepare(
            prompt.prompt, prompt.params, request_id=request_id, salt=prompt.salt
        )
        self.engine.submit(group)
        state.group = group
        sequence = group.requests[0].sequence
        state.feed.begin(sequence)
        self.rows.open(sequence)
        manager = self.engine.manager
        hashes = manager.block_hashes(sequence) if self._is_named else []
        names = [self._name_prefix + name for name in hashes]
        length = len(sequence.token_ids)
        self._events.append(StageStarted(request_id, length, manager.block_size, names))

    def _join(self, parts: list[Part], passes: list[HostCopy]) -> Mapping[str, Tensor]:
        """Concatenate a step's outputs to one tensor each, on the host.

        In deterministic mode a step has many passes, each a whole block of one sequence; only the
        rows of the pass's part are used.
        """
        if not self._deterministic:
            return passes[0].wait()
        size = self.engine.manager.block_size
        pieces: dict[str, list[Tensor]] = {}
        remaining = iter(passes)
        for part in parts:
            for start in range(part.start // size * size, part.stop, size):
                first = max(part.start - start, 0)
                stop = min(part.stop - start, size)
                for name, rows in next(remaining).wait().items():
                    ratio = len(rows) // size
                    pieces.setdefault(name, []).append(rows[first * ratio : stop * ratio])
        return {name: torch.cat(rows) for name, rows in pieces.items()}

    def _deliver(self, group: RequestGroup, error: EngineError | None) -> None:
        """Pass on a request's new tokens, and its end."""
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
