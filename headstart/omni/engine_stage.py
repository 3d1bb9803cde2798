"""An autoregressive stage: an `EngineCore` with its own KV cache, whose rows other stages take.

The engine runs as usual; only `EngineHooks` differ. A request waits while its inputs are still
coming, its hits are limited to blocks with rows, and after each pass its rows are handed on.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from headstart.cache import ComputedBlocks, TokenSequence
from headstart.engine.config import EngineConfig
from headstart.engine.engine import EngineCore
from headstart.engine.request import Request, RequestGroup
from headstart.engine.step import Batch, StepResult, engine_error
from headstart.errors import ConfigError, EngineError, HeadstartError
from headstart.frontend.frontend import make_frontend
from headstart.omni.feeds import Feed, Feeder
from headstart.omni.output_cache import OutputCache
from headstart.omni.rows import Part, StageRows, TierRows, has_store, without_store
from headstart.omni.stage import (
    TOKENS,
    Chunk,
    Event,
    OmniRequest,
    OutputEvent,
    StageFailed,
    StageFinished,
    StageMetrics,
    StageSpec,
    StageStarted,
)
from headstart.omni.stage_decoder import HostCopy, StageDecoder

__all__ = ["EngineStage", "TokenEvent"]

_LOG = logging.getLogger("headstart.omni")


@dataclass(slots=True)
class _State:
    """One request in the stage: its inputs and, once its prompt is complete, its sequence."""

    request: OmniRequest
    feed: Feed
    metrics: StageMetrics = field(default_factory=StageMetrics)
    group: RequestGroup | None = None
    num_sent: int = 0

    @property
    def sequence(self) -> TokenSequence | None:
        return self.group.requests[0].sequence if self.group is not None else None


class TokenEvent(NamedTuple):
    """A request's new token, and the request's inputs."""

    feed: Feed
    token: int


class EngineStage:
    """Runs a decoder over prompts that its feeder makes, and hands on rows and tokens.

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
        if has_store(config) and (used is None or spec.find_outputs):
            _LOG.warning("stage %r keeps nothing on disk: its outputs are not declared", spec.name)
            config, self._is_named = without_store(config), False
        elif has_store(config) and used is not None:
            like = decoder.outputs_of_one()
            self.kept_rows = TierRows(spec, config.block_size, like, used, place)
        self._states: dict[str, _State] = {}
        self._unprompted: dict[str, _State] = {}
        self._events: list[Event] = []
        self.engine = EngineCore.of_model(decoder, tokenizer, config, self)
        self.frontend = make_frontend(self.engine, tokenizer)
        self._name_prefix = b"" if self.engine.tiers is not None else os.urandom(8)
        """Before names without a model's fingerprint: to other processes they mean nothing."""

    # Stage

    @property
    def has_work(self) -> bool:
        return bool(self._events) or any(map(self._is_ready, self._states.values()))

    def limit_to(self, outputs: Set[str]) -> None:
        self.rows.limit_to(outputs)

    def check(self, request: OmniRequest) -> None:
        prompt = self._feeder(request).prompt()
        if prompt is not None:
            self.frontend.prepare(prompt.prompt, prompt.params, salt=prompt.salt)

    def open(self, request: OmniRequest) -> None:
        state = _State(request, self._feeder(request))
        self._states[request.request_id] = state
        self._unprompted[request.request_id] = state
        self._tell(request.request_id, lambda: None)

    def feed(self, source: str, event: OutputEvent | StageStarted) -> None:
        state = self._states.get(event.request_id)
        if state is not None:
            self._tell(event.request_id, lambda: state.feed.take(source, event))

    def end_input(self, source: str, request_id: str) -> None:
        state = self._states.get(request_id)
        if state is not None:
            self._tell(request_id, lambda: state.feed.end(source))

    def step(self) -> list[Event]:
        start = time.perf_counter()
        ran = {request_id for request_id, state in self._states.items() if self._is_ready(state)}
        if ran:
            results = self.engine.step()
            for group, error in results:
                self._deliver(group, error)
            self._follow(results)
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
        self._unprompted.pop(request_id, None)
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
        """`stop` once the inputs of all the request's known tokens have arrived, else None."""
        feed = self._states[request.group.request_id].feed
        return stop if feed.is_ready(len(request.sequence.token_ids)) else None

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
            self._events.append(OutputEvent(names[sequence], chunk))

    # For stages that do more

    def ran(self, batch: Batch, outputs: Mapping[str, Tensor]) -> None:
        """Called with a step's outputs `[tokens of the step, ...]`, declared or not."""

    def spoke(self, said: Mapping[str, TokenEvent]) -> None:
        """Called with the requests that continue and their new tokens; an exception ends them."""

    def give(self, name: str, chunk: Chunk) -> None:
        """Hand on an output other than rows of the request's tokens."""
        self._events.append(OutputEvent(name, chunk))

    # Inside

    def _follow(self, results: Sequence[StepResult]) -> None:
        """Process new tokens before the next step."""
        said = {
            group.request_id: TokenEvent(
                self._states[group.request_id].feed,
                group.requests[0].sampling.output_token_ids[-1],
            )
            for group, _ in results
            if group.request_id in self._states
        }
        try:
            if said:
                self.spoke(said)
        except Exception as error:  # a model's exception ends only these requests
            for name in said:
                self.engine.abort(name)
                reason = EngineError(f"{type(error).__name__}: {error}")
                reason.__cause__ = error
                self._fail(name, reason)

    def _is_ready(self, state: _State) -> bool:
        sequence = state.sequence
        return sequence is not None and state.feed.is_ready(len(sequence.token_ids))

    def _tell(self, request_id: str, news: Callable[[], None]) -> None:
        """Pass an event to a request's feed, and begin the request if its prompt is complete."""
        try:
            news()
            self._try_to_begin(request_id)
        except Exception as error:  # a feed is somebody's code: what it raises ends its request
            self.engine.abort(request_id)
            if not isinstance(error, HeadstartError):
                error = engine_error("its feed failed", error)
            self._fail(request_id, error)

    def _try_to_begin(self, request_id: str) -> None:
        """Submit a request to the engine as soon as its prompt is complete."""
        state = self._unprompted.get(request_id)
        prompt = state.feed.prompt() if state is not None else None
        if state is None or prompt is None:
            return
        group = self.frontend.prepare(
            prompt.prompt, prompt.params, request_id=request_id, salt=prompt.salt
        )
        self.engine.submit(group)
        del self._unprompted[request_id]
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
        """A step's outputs, concatenated to one tensor each, on the host.

        In deterministic mode a step has many passes, each a whole block of one sequence; only the
        rows of the pass's part are used.
        """
        if not self._deterministic:
            return passes[0].wait()
        size = self.engine.manager.block_size
        pieces: dict[str, list[Tensor]] = {}
        given = iter(passes)
        for part in parts:
            for start in range(part.start // size * size, part.stop, size):
                first = max(part.start - start, 0)
                for name, rows in next(given).wait().items():
                    ratio = len(rows) // size
                    stop = min(part.stop - start, size)
                    pieces.setdefault(name, []).append(rows[first * ratio : stop * ratio])
        return {name: torch.cat(rows) for name, rows in pieces.items()}

    def _deliver(self, group: RequestGroup, error: EngineError | None) -> None:
        """Hand on a request's new tokens, and its end."""
        name = group.request_id
        if error is not None:
            self._fail(name, error)
            return
        state = self._states[name]
        request = group.requests[0]
        tokens = request.sampling.output_token_ids[state.num_sent :]
        if tokens:
            self._events.append(
                OutputEvent(name, Chunk(TOKENS, state.num_sent, torch.tensor(tokens)))
            )
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
        self._events.append(StageFinished(name, metrics, output))
        del self._states[name]

    def _fail(self, request_id: str, error: HeadstartError) -> None:
        self._unprompted.pop(request_id, None)
        self._forget(request_id)
        self._events.append(StageFailed(request_id, error))

    def _forget(self, request_id: str) -> None:
        state = self._states.pop(request_id)
        self._events = [event for event in self._events if event.request_id != request_id]
        if state.sequence is not None:
            self.rows.close(state.sequence)
