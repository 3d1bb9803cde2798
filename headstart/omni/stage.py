"""What every stage of a pipeline is, whatever runs inside.

    open ──▶ feed, end_input ──▶ step ──▶ Given ... Given ──▶ Ended
                                   └────▶ Failed                    abort at any time between steps

A stage declares what it takes from which stages and what it gives. The pipeline carries what is
given to whoever takes it; stages know nothing of one another.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, HeadstartError
from headstart.omni.outputs import Output
from headstart.omni.rows import Chunk

__all__ = [
    "TOKENS",
    "Began",
    "Ended",
    "Event",
    "Failed",
    "Figures",
    "Given",
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
    """A stage as it is declared. Raises ConfigError.

    find_outputs: it may give more than it declares, and what lies beside tokens is found out.
    """

    name: str
    takes: tuple[Input, ...] = ()
    gives: tuple[Output, ...] = ()
    find_outputs: bool = False
    autoregressive: bool = True
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a stage needs a name")
        names = [output.name for output in self.gives]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ConfigError(f"stage {self.name!r} gives {sorted(twice)} twice")

    def takes_from(self, stage: str) -> bool:
        """Whether anything of this stage is taken."""
        return any(taken.stage == stage for taken in self.takes)

    def offers(self, output: str) -> bool:
        """Whether another stage may take this output."""
        declared = {known.name for known in self.gives}
        return output in declared or self.find_outputs or (self.autoregressive and output == TOKENS)


@dataclass(frozen=True, kw_only=True)
class OmniRequest:
    """What a user asked of a pipeline: a prompt, and how each stage is to do its part.

    prompt: whatever the first stage's feeder understands. params: for autoregressive stages, by
    name. options: for any stage, by name: a speaker, a seed. salt: requests of different salts
    share nothing in any stage. stages: those that take part; None is all.
    """

    request_id: str
    prompt: Any
    params: Mapping[str, SamplingParams] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    salt: str | None = None
    stages: frozenset[str] | None = None


@dataclass(slots=True)
class Figures:
    """What one request cost in one stage.

    seconds: of the steps it took part in. first_output, total: seconds from its arrival in the
    pipeline. tokens: of prompt and answer; cached_tokens: not computed. hit_rows: rows that came
    out of the store, in tokens, by output.
    """

    seconds: float = 0.0
    first_output: float | None = None
    total: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    hit_rows: Counter[str] = field(default_factory=Counter)


class Given(NamedTuple):
    """The next rows of one output of a request."""

    request_id: str
    chunk: Chunk


class Began(NamedTuple):
    """A request's prompt in the stage is complete, before any of its rows is given.

    prompt_tokens: its length. names: the identities of its whole blocks of `block_size` tokens
    each; none if the stage keeps no blocks.
    """

    request_id: str
    prompt_tokens: int
    block_size: int
    names: Sequence[bytes] = ()


class Ended(NamedTuple):
    """The stage has given all of a request. `result`: what beside rows a user may want of it."""

    request_id: str
    figures: Figures
    result: object = None


class Failed(NamedTuple):
    """The stage cannot go on with a request; it holds nothing of it any more."""

    request_id: str
    error: HeadstartError


Event = Given | Began | Ended | Failed


class Stage(Protocol):
    """One stage at work for many requests. Not thread-safe."""

    @property
    def spec(self) -> StageSpec: ...

    @property
    def has_work(self) -> bool:
        """Whether a step would do something with what has come so far."""
        ...

    def limit_to(self, outputs: Set[str]) -> None:
        """Somebody takes these outputs, and no others: a pipeline says so before any request."""
        ...

    def check(self, request: OmniRequest) -> None:
        """Raise RequestError if the stage could not serve the request; nothing is kept of it."""
        ...

    def open(self, request: OmniRequest) -> None:
        """A request begins."""
        ...

    def feed(self, source: str, event: Given | Began) -> None:
        """What stage `source` gave of something that is taken from it."""
        ...

    def end_input(self, source: str, request_id: str) -> None:
        """Stage `source` has given all of a request."""
        ...

    def step(self) -> list[Event]:
        """Do some work; a request whose part fails ends with `Failed`, the others go on."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request, whatever its state; one that is unknown is left alone."""
        ...

    def peek(self, request_id: str) -> object:
        """What beside rows a user may want of a request that runs, None if there is nothing."""
        ...

    def recover(self) -> None:
        """Forget every request, however far an interrupted call came. May be called again."""
        ...

    def reset_cache(self) -> None:
        """Forget what is kept of requests that are gone. Not while one runs."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...
