"""Stages that are functions, such as vocoders, encoders and diffusion.

    WholeStage    runs once per request, when all inputs are complete. The cache key of the result
                  is a digest of the inputs.
    FramesStage   causal: runs block by block as codes arrive. The cache key of a block's frames is
                  the content of all codes up to the block's end.

The results are bit-identical with and without the cache. A `FramesStage` therefore runs block by
block even without the cache.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from headstart.cache import BlockKey, Namespace
from headstart.errors import ConfigError, EngineError, engine_error
from headstart.omni.output_cache import BlockPath, OutputCache, content_bytes
from headstart.omni.stage import (
    Chunk,
    Event,
    Input,
    Kind,
    OmniRequest,
    OutputEvent,
    Stage,
    StageFailed,
    StageFinished,
    StageMetrics,
    StageSpec,
    StageStarted,
)


class StageCall(NamedTuple):
    """A function's arguments: the request, and each input's rows in order."""

    request: OmniRequest
    inputs: Mapping[Input, Tensor]


@dataclass(slots=True)
class _State:
    """One request in a stage.

    rows: the rows of each input that have arrived. open_sources: the earlier stages that may send
    more rows. In a `FramesStage`, num_done: number of codes whose frames were passed on. keys: the
    cache keys of the whole blocks so far.
    """

    request: OmniRequest
    rows: dict[Input, list[Tensor]] = field(default_factory=dict)
    open_sources: set[str] = field(default_factory=set)
    metrics: StageMetrics = field(default_factory=StageMetrics)
    keys: list[BlockKey] = field(default_factory=list)
    num_done: int = 0

    def joined(self, source: Input) -> Tensor:
        parts = self.rows[source]
        if len(parts) != 1:
            self.rows[source] = parts = [torch.cat(parts) if parts else torch.empty(0)]
        return parts[0]


class _FunctionStage(Stage):
    """Base class of stages that are functions. Collects inputs; an error ends only its request."""

    def __init__(self, spec: StageSpec, cache: OutputCache | None) -> None:
        if spec.autoregressive:
            raise ConfigError(
                f"stage {spec.name!r} is a function, but autoregressive is true; allowed: false"
            )
        self.spec = spec
        self._cache = cache if spec.enable_prefix_caching else None
        self._store_name = (
            self._cache.reserve_name(spec.name) if self._cache is not None else spec.name
        )
        self._states: dict[str, _State] = {}

    def open(self, request: OmniRequest) -> None:
        rows: dict[Input, list[Tensor]] = {source: [] for source in self.spec.takes}
        sources = {source.stage for source in self.spec.takes}
        self._states[request.request_id] = _State(request, rows, sources)

    def feed(self, source: str, event: OutputEvent | StageStarted) -> None:
        state = self._states.get(event.request_id)
        if state is not None and isinstance(event, OutputEvent):
            entry = Input(source, event.chunk.output)
            if entry in state.rows:
                state.rows[entry].append(event.chunk.rows)

    def end_input(self, source: str, request_id: str) -> None:
        if request_id in self._states:
            self._states[request_id].open_sources.discard(source)

    def abort(self, request_id: str) -> None:
        self._states.pop(request_id, None)

    def close(self) -> None:
        self._states.clear()

    @property
    def has_work(self) -> bool:
        return any(map(self._can_run, self._states.values()))

    def step(self) -> list[Event]:
        """Run the function once for each request with enough inputs."""
        events: list[Event] = []
        for request_id, state in list(self._states.items()):
            if not self._can_run(state):
                continue
            start = time.perf_counter()
            try:
                with torch.inference_mode():
                    new = self._run(state)
            except Exception as error:  # a function's exception ends only its request
                failure = engine_error(f"stage {self.spec.name!r}", error)
                new = [StageFailed(request_id, failure)]
            state.metrics.seconds += time.perf_counter() - start
            if any(isinstance(event, StageFinished | StageFailed) for event in new):
                del self._states[request_id]
            events += new
        return events

    def _can_run(self, state: _State) -> bool:
        raise NotImplementedError

    def _run(self, state: _State) -> list[Event]:
        raise NotImplementedError

    def _checked(self, outputs: Mapping[str, Tensor], num_tokens: int) -> dict[str, Tensor]:
        """Check the declared outputs and return them in host memory. Raises EngineError."""
        checked = {}
        for output in self.spec.gives:
            if output.name in outputs:
                checked[output.name] = outputs[output.name].cpu()
                output.check(checked[output.name], num_tokens)
            elif output.required:
                raise EngineError(
                    f"the function did not return {output.name!r}, which the stage declares"
                )
        return checked


class WholeStage(_FunctionStage):
    """Runs `function` when all inputs are complete.

    identity: returns a digest of everything on which the result depends, or None if the result must
    not be reused. Without `identity` no result is reused.
    """

    def __init__(
        self,
        spec: StageSpec,
        function: Callable[[StageCall], Mapping[str, Tensor]],
        identity: Callable[[StageCall], bytes | None] | None = None,
        cache: OutputCache | None = None,
    ) -> None:
        super().__init__(spec, cache)
        self._function = function
        self._identity = identity

    def _can_run(self, state: _State) -> bool:
        return not state.open_sources

    def _run(self, state: _State) -> list[Event]:
        request, cache = state.request, self._cache
        call = StageCall(request, {source: state.joined(source) for source in state.rows})
        num_tokens = max((len(rows) for rows in call.inputs.values()), default=0)
        outputs, path = None, None
        digest = self._identity(call) if self._identity and cache is not None else None
        if digest is not None and cache is not None:
            path = BlockPath(self._store_name, Namespace(None, request.salt), [BlockKey(digest)])
            outputs = next(iter(cache.find(path)), None)
        if outputs is not None:
            state.metrics.cached_tokens = num_tokens
            state.metrics.hit_rows.update(dict.fromkeys(outputs, num_tokens))
        else:
            outputs = self._checked(self._function(call), num_tokens)
        if path is not None and cache is not None:
            cache.put(path, 0, outputs)
        state.metrics.tokens = state.metrics.prompt_tokens = num_tokens
        events: list[Event] = []
        for output, rows in outputs.items():
            ratio = max(1, len(rows) // max(1, num_tokens))
            events.append(OutputEvent(request.request_id, Chunk(output, 0, rows, ratio)))
        return [*events, StageFinished(request.request_id, state.metrics)]


@dataclass(frozen=True, kw_only=True)
class FramesPlan:
    """The options of a `FramesStage`.

    A code's frames depend on the earlier codes of its segment and on `context` codes before the
    segment.

    function: takes `(request, codes [n, ...], num_skipped)`, and returns the frames of all codes
    after the first `num_skipped`. block: codes whose frames a call returns. segment: codes per
    segment, a multiple of `block`; None makes each block a segment. identity: returns a digest of
    everything that a request's frames depend on, except the codes. Raises ConfigError if the
    segment is not a multiple of the block.
    """

    function: Callable[[OmniRequest, Tensor, int], Tensor]
    block: int
    context: int
    segment: int | None = None
    identity: Callable[[OmniRequest], bytes] = lambda request: b""

    def __post_init__(self) -> None:
        if self.segment is not None and (self.segment < 1 or self.segment % self.block):
            raise ConfigError(
                f"segment is {self.segment}; allowed: a multiple of the block, {self.block}"
            )


class FramesStage(_FunctionStage):
    """Makes frames for blocks of codes as they arrive. Has one input and one output."""

    def __init__(self, spec: StageSpec, plan: FramesPlan, cache: OutputCache | None = None) -> None:
        super().__init__(spec, cache)
        if len(spec.takes) != 1 or len(spec.gives) != 1:
            raise ConfigError(f"stage {spec.name!r} needs one input and one output to make frames")
        [self._codes], [self._output] = spec.takes, spec.gives
        if self._output.alignment.kind is not Kind.FRAMES:
            raise ConfigError(
                f"stage {spec.name!r} gives {self._output.name!r} as {self._output.alignment}, "
                "not as frames(n)"
            )
        self._plan = plan

    def _can_run(self, state: _State) -> bool:
        waiting = sum(map(len, state.rows[self._codes])) - state.num_done
        return waiting >= self._plan.block or not state.open_sources

    def _run(self, state: _State) -> list[Event]:
        codes = state.joined(self._codes)
        name = state.request.request_id
        stop = min(state.num_done + self._plan.block, len(codes))
        events: list[Event] = []
        if stop > state.num_done:
            rows = self._frames(state, codes, stop)
            ratio = self._output.alignment.ratio
            events.append(OutputEvent(name, Chunk(self._output.name, state.num_done, rows, ratio)))
            state.num_done = stop
            if self._cache is not None:
                self._cache.touch(self._path(state))
        if stop == len(codes) and not state.open_sources:
            state.metrics.tokens = state.metrics.prompt_tokens = stop
            events.append(StageFinished(name, state.metrics))
        return events

    def _frames(self, state: _State, codes: Tensor, stop: int) -> Tensor:
        """Return the frames of codes `num_done` to `stop - 1`; cache them if they fill a block."""
        is_whole = stop - state.num_done == self._plan.block
        index = len(state.keys)
        if is_whole and self._cache is not None:
            state.keys.append(BlockKey(content_bytes(codes[state.num_done : stop])))
            blocks = self._cache.find(self._path(state), index)
            if blocks:
                state.metrics.cached_tokens += self._plan.block
                state.metrics.hit_rows[self._output.name] += self._plan.block
                return blocks[0][self._output.name]
        segment = self._plan.segment or self._plan.block
        first = max(0, state.num_done // segment * segment - self._plan.context)
        rows = self._plan.function(state.request, codes[first:stop], state.num_done - first)
        [rows] = self._checked({self._output.name: rows}, stop - state.num_done).values()
        if is_whole and self._cache is not None:
            self._cache.put(self._path(state), index, {self._output.name: rows})
        return rows

    def _path(self, state: _State) -> BlockPath:
        request = state.request
        namespace = Namespace(self._plan.identity(request).hex(), request.salt)
        return BlockPath(self._store_name, namespace, state.keys)
