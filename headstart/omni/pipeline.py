"""A pipeline: stages in an acyclic graph, which carries each output to the stages that take it.

A step of the pipeline is a step of each stage that has work, in topological order; its outputs go
to their takers at once. So requests of several users are in several stages at the same time, and a
talker speaks while its thinker still generates. Synchronous, one thread.

A request that fails in one stage ends in all stages and holds no memory; other requests continue.

An interrupted call (Ctrl-C, out of memory) may leave stages half changed. A mark, which only a
completed call removes, shows this. The next call then first ends all requests in all stages with an
EngineError that names the cause. Cached rows stay.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from headstart.errors import ConfigError, EngineError, HeadstartError, RequestError
from headstart.omni.rows import Chunk
from headstart.omni.stage import (
    Ended,
    Event,
    Failed,
    Given,
    Input,
    OmniRequest,
    Stage,
    StageMetrics,
)

__all__ = ["Pipeline", "Progress"]


@dataclass(slots=True, eq=False)
class Progress:
    """One request in the pipeline.

    chunks: the rows of the outputs that the pipeline collects, in order; the caller may remove
    them. results: the result of each stage that has ended. metrics: the metrics of each stage that
    has ended. finish_reason: "done", "abort" or "error", None while it runs.
    """

    request: OmniRequest
    arrival_time: float
    open_stages: set[str]
    chunks: dict[Input, list[Chunk]] = field(default_factory=lambda: defaultdict(list))
    results: dict[str, object] = field(default_factory=dict)
    metrics: dict[str, StageMetrics] = field(default_factory=dict)
    first_output: dict[str, float] = field(default_factory=dict)
    finish_reason: str | None = None
    error: HeadstartError | None = None


class Pipeline:
    """Runs stages. `collects`: the outputs for the user; others only go to other stages.

    Raises ConfigError for two stages of one name, an input that no stage gives, and a cycle.
    """

    def __init__(self, stages: Sequence[Stage], collects: Sequence[Input] = ()) -> None:
        self.stages = {stage.spec.name: stage for stage in stages}
        if len(self.stages) < len(stages):
            raise ConfigError(f"two stages have one name: {[s.spec.name for s in stages]}")
        for stage in stages:
            for taken in stage.spec.takes:
                self._check_given(taken, f"stage {stage.spec.name!r} takes")
        for taken in collects:
            self._check_given(taken, "the pipeline collects")
        self._order = _in_order(stages)
        used = {*collects, *(taken for stage in stages for taken in stage.spec.takes)}
        for name, stage in self.stages.items():
            stage.limit_to({known.output for known in used if known.stage == name})
        self._collects = frozenset(collects)
        self._requests: dict[str, Progress] = {}
        self._left: deque[str] = deque()
        self._changing = False
        self._interruption: BaseException | None = None
        self._closed = False

    def _check_given(self, taken: Input, who: str) -> None:
        source = self.stages.get(taken.stage)
        if source is None or not source.spec.offers(taken.output):
            raise ConfigError(f"{who} {taken.output!r} of {taken.stage!r}, which does not give it")

    @property
    def has_unfinished(self) -> bool:
        """True if there are unfinished requests."""
        return bool(self._requests)

    def submit(self, request: OmniRequest) -> Progress:
        """Add a request. Raises RequestError; the pipeline is then unchanged."""
        self.require_open()
        self._recover()
        self.abort_left()
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use")
        unknown = sorted(
            {*request.params, *request.options, *(request.stages or ())} - self.stages.keys()
        )
        if unknown:
            raise RequestError(f"there is no stage {unknown[0]!r}; there are {[*self.stages]}")
        taking_part = self._taking_part(request)
        for stage in taking_part:
            stage.check(request)
        names = {stage.spec.name for stage in taking_part}
        progress = Progress(request, time.perf_counter(), names)
        with self._change():
            self._requests[request.request_id] = progress
            for stage in taking_part:
                stage.open(request)
        return progress

    def _taking_part(self, request: OmniRequest) -> list[Stage]:
        """The request's stages. Raises RequestError if the source of a stage's input is missing."""
        chosen = self.stages.keys() if request.stages is None else request.stages
        stages = [stage for stage in self._order if stage.spec.name in chosen]
        for stage in stages:
            for taken in stage.spec.takes:
                if taken.stage not in chosen:
                    raise RequestError(f"stage {stage.spec.name!r} cannot go without {taken.stage}")
        return stages

    def abort(self, request_id: str) -> Progress | None:
        """Abort a request in every stage; returns its progress, or None if it is unknown."""
        self._recover()
        progress = self._requests.get(request_id)
        if progress is not None:
            with self._change():
                self._end(progress, "abort")
        return progress

    def leave(self, request_id: str) -> None:
        """Mark a request, so that the next call aborts it.

        For the garbage collector, which may run in any thread and in the middle of a call.
        """
        self._left.append(request_id)

    def abort_left(self) -> None:
        """Abort all requests that `leave` has marked."""
        while self._left:
            self.abort(self._left[0])
            self._left.popleft()

    def step(self) -> list[Progress]:
        """Run a step of each stage that has work; returns the requests that progressed.

        Raises EngineError after `close`, and if requests wait for inputs that will never come.
        Passes on interruptions such as KeyboardInterrupt.
        """
        self.require_open()
        self._recover()
        self.abort_left()
        moved: dict[Progress, None] = {}
        busy = False
        with self._change():
            for stage in self._order:
                if not stage.has_work:
                    continue
                busy = True
                for event in stage.step():
                    progress = self._requests.get(event.request_id)
                    if progress is not None:
                        moved[progress] = None
                        self._handle(stage.spec.name, progress, event)
        if self._requests and not busy:
            raise EngineError(f"{len(self._requests)} requests wait, and no stage has work")
        return list(moved)

    def close(self) -> None:
        """End every request with an EngineError and close all stages. May be called again."""
        if not self._closed:
            self._changing = True
            with suppress(EngineError):  # a stage that cannot be made whole is closed all the same
                self._recover_stages()
            self._end_all("the pipeline is closed")
            for stage in self._order:
                stage.close()
            self._closed = True

    def require_open(self) -> None:
        """Raise EngineError after `close`."""
        if self._closed:
            raise EngineError("the pipeline is closed")

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A context in which stages change; records any exception as an interruption."""
        try:
            self._changing = True
            yield
            self._changing = False
        except BaseException as error:
            self._interruption = error
            raise

    def _recover(self) -> None:
        """End all requests if a call was interrupted. May be interrupted itself.

        Raises EngineError if a stage cannot end them; the next call then tries it again.
        """
        if self._changing:
            self._recover_stages()
            self._end_all(_why(self._interruption))

    def _recover_stages(self) -> None:
        for stage in self._order:
            stage.recover()

    def _end_all(self, reason: str) -> None:
        for progress in self._requests.values():
            if progress.error is None:
                error = EngineError(reason)
                error.__cause__ = self._interruption
                progress.error = error
            progress.finish_reason = "error"
        self._requests.clear()
        self._interruption = None
        self._changing = False

    def _handle(self, source: str, progress: Progress, event: Event) -> None:
        now = time.perf_counter() - progress.arrival_time
        if isinstance(event, Failed):
            progress.error = _of_stage(source, event.error)
            self._end(progress, "error")
        elif isinstance(event, Ended):
            event.metrics.first_output = progress.first_output.get(source)
            event.metrics.total = now
            progress.metrics[source] = event.metrics
            progress.results[source] = event.result
            progress.open_stages.remove(source)
            for stage in self._order:
                if stage.spec.takes_from(source):
                    stage.end_input(source, event.request_id)
            if not progress.open_stages:
                self._end(progress, "done")
        else:
            if isinstance(event, Given):
                progress.first_output.setdefault(source, now)
                taken = Input(source, event.chunk.output)
                if taken in self._collects:
                    progress.chunks[taken].append(event.chunk)
            for stage in self._order:
                if stage.spec.takes_from(source):
                    stage.feed(source, event)

    def _end(self, progress: Progress, reason: str) -> None:
        request_id = progress.request.request_id
        del self._requests[request_id]
        progress.finish_reason = reason
        for stage in self._order:
            stage.abort(request_id)


def _why(interruption: BaseException | None) -> str:
    """The error text for requests; `None` stands for an interruption outside `_change`."""
    text = "a call of the pipeline was interrupted"
    if interruption is None:
        return text
    return f"{text}: {type(interruption).__name__}: {interruption}".removesuffix(": ")


def _of_stage(name: str, error: HeadstartError) -> HeadstartError:
    """The error with the stage's name in its text."""
    if isinstance(error, EngineError) and f"stage {name!r}" not in str(error):
        located = EngineError(f"stage {name!r}: {error}")
        located.__cause__ = error
        return located
    return error


def _in_order(stages: Sequence[Stage]) -> list[Stage]:
    """The stages in topological order. Raises ConfigError for a cycle."""
    ordered: list[Stage] = []
    names: set[str] = set()
    left = list(stages)
    while left:
        free = [s for s in left if {taken.stage for taken in s.spec.takes} <= names]
        if not free:
            raise ConfigError(f"stages take from one another: {[s.spec.name for s in left]}")
        ordered += free
        names |= {stage.spec.name for stage in free}
        left = [stage for stage in left if stage not in free]
    return ordered
