"""The interface of a pipeline's stages.

    open ──▶ feed, end_input ──▶ step ──▶ StageStarted, OutputEvent ... ──▶ StageFinished
                                   └────▶ StageFailed

`abort` may come at any time between steps.

A stage declares its inputs, their source stages, and its outputs. The pipeline carries outputs to
the stages that take them; stages know nothing of one another.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, HeadstartError
from headstart.omni.outputs import Output
from headstart.omni.rows import Chunk
from headstart.validation import check_name

__all__ = [
    "TOKENS",
    "StageStarted",
    "StageFinished",
    "Event",
    "StageFailed",
    "StageMetrics",
    "OutputEvent",
    "Input",
    "OmniRequest",
    "Stage",
    "StageSpec",
]

TOKENS = "tokens"
"""Every autoregressive stage gives its own tokens, int64 `[n]`, counted from its first one."""


class Input(NamedTuple):
    """One output of one stage."""

    stage: str
    output: str


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A stage's declaration. Raises ConfigError.

    find_outputs: the stage may have undeclared outputs, whose alignment is then detected.
    """

    name: str
    takes: tuple[Input, ...] = ()
    gives: tuple[Output, ...] = ()
    find_outputs: bool = False
    autoregressive: bool = True
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_name("a stage's name", self.name, ConfigError, required=True)
        names = [output.name for output in self.gives]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"stage {self.name!r} gives {sorted(twice)} twice")

    def takes_from(self, stage: str) -> bool:
        """True if an input comes from this stage."""
        return any(taken.stage == stage for taken in self.takes)

    def offers(self, output: str) -> bool:
        """True if another stage may take this output."""
        declared = {known.name for known in self.gives}
        return output in declared or self.find_outputs or (self.autoregressive and output == TOKENS)


@dataclass(frozen=True, kw_only=True)
class OmniRequest:
    """A user's request to a pipeline: a prompt, and parameters for each stage.

    prompt: the input of the first stage's feeder. params: of autoregressive stages, by name.
    options: of any stage, by name, such as a speaker or a seed. salt: requests of different salts
    share nothing in any stage. stages: names of the stages that take part; None is all.
    """

    request_id: str
    prompt: Any
    params: Mapping[str, SamplingParams] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    salt: str | None = None
    stages: frozenset[str] | None = None


@dataclass(slots=True)
class StageMetrics:
    """The metrics of one request in one stage.

    seconds: time of the steps that it was in. first_output, total: seconds from its arrival in the
    pipeline. tokens: of prompt and answer; cached_tokens: not computed; loaded_tokens:
    of these, from disk or another machine. hit_rows: tokens whose rows came from the store, by
    output.
    """

    seconds: float = 0.0
    first_output: float | None = None
    total: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    hit_rows: Counter[str] = field(default_factory=Counter)


class OutputEvent(NamedTuple):
    """The next rows of one output of a request."""

    request_id: str
    chunk: Chunk


class StageStarted(NamedTuple):
    """A request's prompt in the stage is complete; comes before any of the request's rows.

    prompt_tokens: its length. names: the identities of its whole blocks of `block_size` tokens;
    empty if the stage has no cache.
    """

    request_id: str
    prompt_tokens: int
    block_size: int
    names: Sequence[bytes] = ()


class StageFinished(NamedTuple):
    """The stage has given all of a request. `result`: its result for the user besides rows."""

    request_id: str
    metrics: StageMetrics
    result: object = None


class StageFailed(NamedTuple):
    """The request failed in the stage, which holds nothing of it any more."""

    request_id: str
    error: HeadstartError


Event = OutputEvent | StageStarted | StageFinished | StageFailed


class Stage(Protocol):
    """One running stage, which serves many requests. Not thread-safe."""

    @property
    def spec(self) -> StageSpec: ...

    @property
    def has_work(self) -> bool:
        """True if a step could do work with the inputs that have arrived."""
        ...

    def limit_to(self, outputs: Set[str]) -> None:
        """Limit outputs to these, the only ones taken; called before any request."""
        ...

    def check(self, request: OmniRequest) -> None:
        """Raise RequestError if the stage cannot serve the request; changes nothing."""
        ...

    def open(self, request: OmniRequest) -> None:
        """Begin a request."""
        ...

    def feed(self, source: str, event: OutputEvent | StageStarted) -> None:
        """Take an event of stage `source`."""
        ...

    def end_input(self, source: str, request_id: str) -> None:
        """Note that stage `source` has given all of a request."""
        ...

    def step(self) -> list[Event]:
        """Do some work; a request that fails ends with `StageFailed`, the others continue."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request in any state; ignores an unknown request."""
        ...

    def peek(self, request_id: str) -> object:
        """A running request's result so far besides rows, None if there is none."""
        ...

    def reset_cache(self) -> None:
        """Drop the stage's cache. Not while a request runs."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...
