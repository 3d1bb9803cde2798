"""Pipelines: stages in an acyclic graph; each output goes to the stages that take it.

A step of the pipeline runs one step of each stage that has work, in topological order. Outputs
reach later stages immediately, so a talker generates codes while its thinker generates text. Stages
work on different requests at the same time. A driver's thread runs the steps. A request that fails
in one stage ends in all stages and frees its memory; other requests continue.

docs/omni.md shows a graph in TOML. A stage's `kind` names its factory, by default the stage's name.
`options` are the arguments of the factory.
"""

from __future__ import annotations

import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from headstart.engine.config import EngineConfig, make_config
from headstart.engine.params import RequestOutputKind
from headstart.errors import ConfigError, EngineError, HeadstartError, RequestError, engine_error
from headstart.omni.stage import (
    Chunk,
    Event,
    Input,
    OmniRequest,
    Output,
    OutputEvent,
    Stage,
    StageFailed,
    StageFinished,
    StageMetrics,
    StageSpec,
    parse_alignment,
)
from headstart.validation import describe


@dataclass(frozen=True, slots=True)
class StageNode:
    """One stage of a graph: its declaration, its factory's name, and the factory's options."""

    spec: StageSpec
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)


Factory = Callable[[StageNode], Stage]


@dataclass(frozen=True, slots=True)
class Graph:
    """A pipeline before it is built. collects: the outputs that the user receives."""

    nodes: tuple[StageNode, ...]
    collects: tuple[Input, ...] = ()

    def with_options(self, options: Mapping[str, Any]) -> Graph:
        """Return this graph with `options` as defaults of all autoregressive stages.

        `enable_prefix_caching=False` disables caching in all stages; with True a single stage may
        still disable it.
        """
        defaults = dict(options)
        caching = defaults.pop("enable_prefix_caching", True)
        nodes = []
        for node in self.nodes:
            is_on = node.spec.enable_prefix_caching and caching
            spec = replace(node.spec, enable_prefix_caching=is_on)
            merged = {**defaults, **node.options} if spec.autoregressive else node.options
            nodes.append(replace(node, spec=spec, options=merged))
        return replace(self, nodes=tuple(nodes))

    def build(self, factories: Mapping[str, Factory]) -> Pipeline:
        """Build the pipeline. On an error, close the stages built so far. Raises ConfigError."""
        unknown = sorted({node.kind for node in self.nodes} - factories.keys())
        if unknown:
            raise ConfigError(f"the stage kind is {unknown[0]!r}; allowed: {sorted(factories)}")
        sources = {*self.collects, *(source for node in self.nodes for source in node.spec.takes)}
        stages: list[Stage] = []
        try:
            for node in self.nodes:
                spec = node.spec
                if spec.autoregressive:  # do not store rows that no stage takes
                    gives = tuple(
                        output
                        for output in spec.gives
                        if not output.alignment.is_by_token
                        or Input(spec.name, output.name) in sources
                    )
                    node = replace(node, spec=replace(spec, gives=gives))
                stages.append(factories[node.kind](node))
            return Pipeline(stages, self.collects)
        except BaseException:
            for stage in stages:
                stage.close()
            raise


def read_graph(text: str) -> Graph:
    """Read a graph from TOML. Raises ConfigError, which names the invalid entry."""
    if not isinstance(text, str):
        raise ConfigError(f"the pipeline is {describe(text)}; allowed: a string in TOML")
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the pipeline is not TOML: {error}") from error
    _check_keys(content, {"collects", "stages"}, "a pipeline")
    stages = content.get("stages")
    if not isinstance(stages, dict) or not stages:
        raise ConfigError("the pipeline has no stages; allowed: a table [stages.NAME] for each")
    nodes = tuple(_node(name, table) for name, table in stages.items())
    return Graph(nodes, _inputs(content.get("collects", []), "the pipeline"))


def _node(name: str, table: Mapping[str, Any]) -> StageNode:
    _check_keys(table, {"kind", "takes", "gives", "options", *_FLAGS}, f"stage {name!r}")
    spec = StageSpec(
        name=name,
        takes=_inputs(table.get("takes", []), f"stage {name!r}"),
        gives=tuple(_output(key, value) for key, value in table.get("gives", {}).items()),
        **{key: table[key] for key in table.keys() & _FLAGS},
    )
    options = table.get("options", {})
    _refuse(options, _ONLY_FOR_ALL_STAGES)
    return StageNode(spec, str(table.get("kind", name)), options)


def _output(name: str, value: str | Mapping[str, Any]) -> Output:
    table = {"alignment": value} if isinstance(value, str) else dict(value)
    _check_keys(table, {"alignment", "dtype", "required"}, f"output {name!r}")
    return Output(name, parse_alignment(table.pop("alignment", "token")), **table)


def _inputs(names: list[str], taker: str) -> tuple[Input, ...]:
    inputs = []
    for name in names:
        stage, dot, output = str(name).partition(".")
        if not (stage and dot and output):
            raise ConfigError(f"{taker} takes {name!r}; allowed: stage.output")
        inputs.append(Input(stage, output))
    return tuple(inputs)


def _check_keys(table: Mapping[str, Any], allowed: set[str], owner: str) -> None:
    unknown = sorted(set(table) - allowed)
    if unknown:
        raise ConfigError(
            f"{owner} has the key {unknown[0]!r}; allowed: {', '.join(sorted(allowed))}"
        )


_FLAGS = {"find_outputs", "autoregressive", "enable_prefix_caching"}
_REFUSED = {
    "dtype": "it applies to the whole model: Omni(model, dtype=...)",
    "device": "it applies to the whole model: Omni(model, device=...)",
    "weights": "an omni model uses the checkpoint's weights unchanged",
    "encoder_cache_rows": "encoded audio and images are cached within cache_bytes",
    "max_images": "an omni model reads images by its own processor",
    "max_image_pixels": "an omni model reads images by its own processor",
    "enable_lora": "an omni model takes no adapters",
    "max_loras": "an omni model takes no adapters",
    "max_lora_rank": "an omni model takes no adapters",
}
_NOT_IN_STAGES = {
    "enable_prefix_caching": "set it as a key of the stage, or for all stages",
    "num_threads": "it applies to the process: set it in the options for all stages",
}
_ONLY_FOR_ALL_STAGES = dict.fromkeys(
    ("cache_dir", "cache_dir_bytes", "cache_words", "remote_cache"),
    "either all stages store their blocks or none: set it in the options for all stages",
)


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options for all stages. Raises ConfigError for an option without effect."""
    _refuse(options, _REFUSED)
    # Rows are cached in whole blocks.
    if make_config({"partial_hits": False, **options}).partial_hits:
        raise ConfigError("partial_hits is True; allowed in a stage: False")


def stage_config(node: StageNode) -> EngineConfig:
    """Return the options of a stage's engine. Raises ConfigError."""
    _refuse(node.options, _NOT_IN_STAGES)
    check_options(node.options)
    caching = node.spec.enable_prefix_caching
    options = {"partial_hits": False, **node.options, "enable_prefix_caching": caching}
    return make_config(options)


def no_options(node: StageNode) -> None:
    """Raise ConfigError if a node has options; for factories that take none."""
    if node.options:
        raise ConfigError(
            f"stage {node.spec.name!r} has the option {sorted(node.options)[0]!r}; allowed: none"
        )


def _refuse(options: Mapping[str, Any], reasons: Mapping[str, str]) -> None:
    for name in options:
        if name in reasons:
            raise ConfigError(f"{name} is not an option of a stage: {reasons[name]}")


@dataclass(slots=True, eq=False)
class Progress:
    """One request in the pipeline.

    open_stages: names of the stages that have not ended. chunks: the rows of the outputs that the
    pipeline collects, in order; the caller may remove them. results, metrics: result and metrics of
    each ended stage. finish_reason: "done", "abort" or "error"; None while the request runs.
    render: makes the user's output from this object.
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
    render: Callable[[Progress], Any] | None = None

    output_kind = RequestOutputKind.CUMULATIVE

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def output(self) -> Any:
        """Return the user's output so far."""
        assert self.render is not None
        return self.render(self)


class Pipeline:
    """Runs stages for a driver. collects: the outputs that the user receives.

    Raises ConfigError if two stages have the same name, a stage takes an output that does not
    exist, or the stages form a cycle.
    """

    def __init__(self, stages: Sequence[Stage], collects: Sequence[Input] = ()) -> None:
        self.stages = {stage.spec.name: stage for stage in stages}
        if len(self.stages) < len(stages):
            raise ConfigError(f"two stages have the same name: {[s.spec.name for s in stages]}")
        for stage in stages:
            for entry in stage.spec.takes:
                self._check_exists(entry, f"stage {stage.spec.name!r} takes")
        for entry in collects:
            self._check_exists(entry, "the pipeline collects")
        sorter = TopologicalSorter(
            {stage.spec.name: {entry.stage for entry in stage.spec.takes} for stage in stages}
        )
        try:
            self._order = [self.stages[name] for name in sorter.static_order()]
        except CycleError as error:
            raise ConfigError(f"stages depend on one another: {error.args[1]}") from error
        used = {*collects, *(entry for stage in stages for entry in stage.spec.takes)}
        for name, stage in self.stages.items():
            stage.limit_to({entry.output for entry in used if entry.stage == name})
        self._collects = frozenset(collects)
        self._requests: dict[str, Progress] = {}
        self._closed: str | None = None  # the reason

    def _check_exists(self, entry: Input, subject: str) -> None:
        source = self.stages.get(entry.stage)
        if source is None or not source.spec.offers(entry.output):
            raise ConfigError(
                f"{subject} {entry.output!r} of {entry.stage!r}, which has no such output"
            )

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def require_open(self) -> None:
        """Raise EngineError after `close`."""
        if self._closed is not None:
            raise EngineError(self._closed)

    def prepare(
        self, request: OmniRequest, render: Callable[[Progress], Any] | None = None
    ) -> Progress:
        """Check a request and return its progress. Changes nothing. Raises RequestError."""
        self.require_open()
        unknown = sorted(
            {*request.params, *request.options, *(request.stages or ())} - self.stages.keys()
        )
        if unknown:
            raise RequestError(f"there is no stage {unknown[0]!r}; allowed: {[*self.stages]}")
        names = self.stages.keys() if request.stages is None else request.stages
        stages = [stage for stage in self._order if stage.spec.name in names]
        for stage in stages:
            for entry in stage.spec.takes:
                if entry.stage not in names:
                    name = stage.spec.name
                    raise RequestError(
                        f"stage {name!r} needs stage {entry.stage!r}, which the request leaves out"
                    )
        for stage in stages:
            stage.check(request)
        return Progress(request, time.perf_counter(), set(names), render=render)

    def submit(self, progress: Progress) -> None:
        """Begin a prepared request. Raises RequestError if its id is in use."""
        self.require_open()
        if progress.request_id in self._requests:
            raise RequestError(f"request id {progress.request_id!r} is in use")
        self._requests[progress.request_id] = progress
        for stage in self._order:
            if stage.spec.name in progress.open_stages:
                stage.open(progress.request)

    def step(self) -> list[tuple[Progress, HeadstartError | None]]:
        """Run a step of each stage that has work.

        Return the requests with events, each with the error that ended it, if any. Raises
        EngineError if requests wait for inputs that will never arrive.
        """
        self.require_open()
        changed: dict[Progress, None] = {}
        busy = False
        for stage in self._order:
            if not stage.has_work:
                continue
            busy = True
            for event in stage.step():
                progress = self._requests.get(event.request_id)
                if progress is not None:
                    changed[progress] = None
                    self._handle(stage.spec.name, progress, event)
        if self._requests and not busy:
            raise EngineError(f"{len(self._requests)} requests wait, and no stage has work")
        return [(progress, progress.error) for progress in changed]

    def abort(self, request_id: str) -> Progress | None:
        """Abort a request in every stage; return its progress, or None if it is unknown."""
        progress = self._requests.get(request_id)
        if progress is not None:
            self._end(progress, "abort")
        return progress

    def reset(self, cause: BaseException) -> list[tuple[Progress, HeadstartError | None]]:
        """End all requests after an unexpected exception; return them with their errors."""
        progresses = list(self._requests.values())
        for progress in progresses:
            progress.error = engine_error("the pipeline broke", cause)
            self._end(progress, "error")
        return [(progress, progress.error) for progress in progresses]

    def reset_cache(self) -> bool:
        """Drop the stages' caches; do nothing and return False while a request runs."""
        self.require_open()
        if self._requests:
            return False
        for stage in self._order:
            stage.reset_cache()
        return True

    def close(self, reason: str = "the pipeline is closed") -> None:
        """Release everything; later calls raise EngineError with this reason. Idempotent."""
        if self._closed is None:
            self._closed = reason
            self._requests.clear()
            for stage in self._order:
                stage.close()

    def _handle(self, source: str, progress: Progress, event: Event) -> None:
        now = time.perf_counter() - progress.arrival_time
        if isinstance(event, StageFailed):
            progress.error = event.error
            if isinstance(event.error, EngineError) and f"stage {source!r}" not in str(event.error):
                progress.error = EngineError(f"stage {source!r}: {event.error}")
                progress.error.__cause__ = event.error
            self._end(progress, "error")
        elif isinstance(event, StageFinished):
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
            if isinstance(event, OutputEvent):
                progress.first_output.setdefault(source, now)
                entry = Input(source, event.chunk.output)
                if entry in self._collects:
                    progress.chunks[entry].append(event.chunk)
            for stage in self._order:
                if stage.spec.takes_from(source):
                    stage.feed(source, event)

    def _end(self, progress: Progress, reason: str) -> None:
        del self._requests[progress.request_id]
        progress.finish_reason = reason
        for stage in self._order:
            stage.abort(progress.request_id)
