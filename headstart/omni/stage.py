"""Stages, their outputs, and the alignment of an output's rows with the stage's tokens.

    token          one row per token of the stage's sequence: cached block by block
    frames(ratio)  `ratio` rows per token (a vocoder's samples): cached block by block
    request        belongs to the request as a whole: not cached by an `EngineStage`
    global         the same for all requests: not cached by an `EngineStage`

A `WholeStage` caches its result as a whole, with any alignment.
`AlignmentDetector` detects undeclared alignments from shapes.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.engine.params import SamplingParams
from headstart.errors import ConfigError, EngineError, HeadstartError
from headstart.validation import check_fields, check_name


class Kind(Enum):
    """The unit to which the rows of an output belong."""

    TOKEN = "token"
    FRAMES = "frames"
    REQUEST = "request"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Alignment:
    """The kind of an output. ratio: number of rows per token."""

    kind: Kind
    ratio: int = 1

    @property
    def is_by_token(self) -> bool:
        """True if rows belong to tokens and so can be cached block by block."""
        return self.kind in (Kind.TOKEN, Kind.FRAMES)

    def __str__(self) -> str:
        return f"frames({self.ratio})" if self.kind is Kind.FRAMES else self.kind.value


def parse_alignment(text: str) -> Alignment:
    """Parse `token`, `request`, `global` or `frames(4)`. Raises ConfigError.

    >>> parse_alignment("frames(4)").ratio
    4
    """
    if text in ("token", "request", "global"):
        return Alignment(Kind(text))
    match = re.fullmatch(r"frames\((\d+)\)", text)
    if match is None or int(match[1]) < 1:
        raise ConfigError(
            f"alignment is {text!r}; allowed: token, request, global, frames(n) with n above 0"
        )
    return Alignment(Kind.FRAMES, int(match[1]))


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a stage.

    dtype: the tensors' dtype, as torch names it ("float32"); None allows any. required: if True,
    a request skips a prefix only if the prefix's rows of this output are stored. If False, the
    prefix may be skipped without them, and later stages do not receive them. Raises ConfigError.
    """

    name: str
    alignment: Alignment = Alignment(Kind.TOKEN)
    dtype: str | None = None
    required: bool = True

    def __post_init__(self) -> None:
        check_name("an output's name", self.name, ConfigError, required=True)
        check_fields(self, ConfigError, f"{self.name}.")
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ConfigError(f"output {self.name!r}: {self.dtype!r} is not a dtype of torch")

    def check(self, tensor: Tensor, num_tokens: int) -> None:
        """Raise EngineError if an output of `num_tokens` tokens differs from its declaration."""
        if self.dtype is not None and tensor.dtype is not getattr(torch, self.dtype):
            raise EngineError(f"output {self.name!r} is {tensor.dtype}, declared {self.dtype}")
        rows = num_tokens * self.alignment.ratio
        if self.alignment.is_by_token and (tensor.ndim < 1 or tensor.shape[0] != rows):
            raise EngineError(
                f"output {self.name!r} has the shape {list(tensor.shape)}; declared as "
                f"{self.alignment}, it needs {rows} rows for {num_tokens} tokens"
            )


class AlignmentDetector:
    """Detects from shapes which undeclared outputs of a stage have one row per token.

    An output is a candidate if the length of its first axis equals the number of tokens in the
    pass. One match may be a coincidence, so a candidate is accepted only after passes with two
    different numbers of tokens, one of them greater than the number of requests. A pass without a
    match excludes the candidate.
    """

    def __init__(self, declared: Mapping[str, Alignment]) -> None:
        self._declared = dict(declared)
        self._lengths: dict[str, set[int]] = {}
        self._dense: set[str] = set()  # matched a pass with more tokens than requests
        self._excluded: set[str] = set()

    def observe(
        self, outputs: Mapping[str, Tensor], num_tokens: int, num_requests: int
    ) -> list[str]:
        """Record the output shapes of one pass; return the candidates that it excludes.

        The caller must drop the cached rows of these outputs.
        """
        excluded = []
        for name, tensor in outputs.items():
            if name in self._declared or name in self._excluded:
                continue
            if tensor.ndim == 0 or tensor.shape[0] != num_tokens:
                self._excluded.add(name)
                if name in self._lengths:
                    excluded.append(name)
                continue
            self._lengths.setdefault(name, set()).add(num_tokens)
            if num_tokens > num_requests:
                self._dense.add(name)
        return excluded

    def is_by_token(self, name: str) -> bool:
        """Return True if the output's rows belong to tokens, as declared or as detected."""
        if name in self._declared:
            return self._declared[name].is_by_token
        return name in self._dense and name not in self._excluded and len(self._lengths[name]) > 1

    def is_undecided(self, name: str) -> bool:
        """Return True if the output is a candidate that is not yet accepted or excluded."""
        is_known = name in self._declared or name in self._excluded
        return not is_known and not self.is_by_token(name)

    def is_decided_by(self, num_tokens: float) -> bool:
        """Return True if a pass of one request with up to `num_tokens` tokens decides all outputs.

        A candidate is decided if it matched only passes with more than `num_tokens` tokens, and one
        of these passes had more tokens than requests.
        """
        return all(
            name in self._dense and num_tokens < min(lengths)
            for name, lengths in self._lengths.items()
            if self.is_undecided(name)
        )

    def ratio(self, name: str) -> int:
        """Return the number of rows per token."""
        return self._declared[name].ratio if name in self._declared else 1


TOKENS = "tokens"
"""The output with the generated tokens, int64 `[n]`, of every autoregressive stage."""


class Input(NamedTuple):
    """An output of one stage that another stage or the user takes."""

    stage: str
    output: str


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A stage's declaration. Raises ConfigError.

    find_outputs: use undeclared outputs too, and detect their alignment.
    """

    name: str
    takes: tuple[Input, ...] = ()
    gives: tuple[Output, ...] = ()
    find_outputs: bool = False
    autoregressive: bool = True
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_name("a stage's name", self.name, ConfigError, required=True)
        check_fields(self, ConfigError, f"{self.name}.")
        names = [output.name for output in self.gives]
        duplicates = {name for name in names if names.count(name) > 1}
        if duplicates:
            raise ConfigError(f"stage {self.name!r} declares {sorted(duplicates)} twice")

    def takes_from(self, stage: str) -> bool:
        """Return True if an input comes from this stage."""
        return any(entry.stage == stage for entry in self.takes)

    def offers(self, output: str) -> bool:
        """Return True if another stage may take this output."""
        if self.find_outputs or (self.autoregressive and output == TOKENS):
            return True
        return any(declared.name == output for declared in self.gives)


@dataclass(frozen=True, kw_only=True)
class OmniRequest:
    """A user's request to a pipeline.

    prompt: the input of the first stage's feeder. params: the sampling parameters of autoregressive
    stages, by stage name. options: other options, for example a voice or a seed, by stage name.
    salt: requests with different salts share nothing. stages: names of the stages that run; None
    runs all.
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

    seconds: duration of the steps that computed the request. first_output: seconds from the
    request's arrival in the pipeline until the stage's first output for it. total: seconds from its
    arrival until the stage finished it. tokens: number of tokens of prompt and answer.
    cached_tokens: number of tokens that were not computed. loaded_tokens: number of cached tokens
    that were loaded from disk or another machine. hit_rows: by output, the number of tokens whose
    rows were read from the stage-output store.
    """

    seconds: float = 0.0
    first_output: float | None = None
    total: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    hit_rows: Counter[str] = field(default_factory=Counter)


class Chunk(NamedTuple):
    """Rows `[tokens * ratio, ...]` of one output for consecutive tokens from `start` on."""

    output: str
    start: int
    rows: Tensor
    ratio: int = 1

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.rows) // self.ratio


class OutputEvent(NamedTuple):
    """The next rows of one output of a request."""

    request_id: str
    chunk: Chunk


class StageStarted(NamedTuple):
    """A request's prompt in the stage is complete. This event precedes all rows of the request.

    prompt_tokens: the length of the prompt. block_identities: the identities of the prompt's whole
    blocks of `block_size` tokens; empty if the stage has no cache.
    """

    request_id: str
    prompt_tokens: int
    block_size: int
    block_identities: Sequence[bytes] = ()


class StageFinished(NamedTuple):
    """A request is finished in the stage. result: the user's result, without rows."""

    request_id: str
    metrics: StageMetrics
    result: object = None


class StageFailed(NamedTuple):
    """A request failed in the stage. The stage has freed the request's memory."""

    request_id: str
    error: HeadstartError


Event = OutputEvent | StageStarted | StageFinished | StageFailed


class Stage:
    """One running stage, which serves many requests. Not thread-safe."""

    spec: StageSpec

    @property
    def has_work(self) -> bool:
        """True if the inputs that have arrived allow a step."""
        raise NotImplementedError

    def limit_to(self, outputs: Set[str]) -> None:
        """Pass on and cache only these outputs; called before any request."""

    def check(self, request: OmniRequest) -> None:
        """Raise RequestError if the stage cannot serve the request. Changes nothing."""

    def open(self, request: OmniRequest) -> None:
        """Begin a request."""
        raise NotImplementedError

    def feed(self, source: str, event: OutputEvent | StageStarted) -> None:
        """Take an event of stage `source`."""
        raise NotImplementedError

    def end_input(self, source: str, request_id: str) -> None:
        """Note that stage `source` will send nothing more for a request."""
        raise NotImplementedError

    def step(self) -> list[Event]:
        """Do some work and return its events; a failed request ends with `StageFailed`."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Forget a request in any state. Ignores an unknown request."""
        raise NotImplementedError

    def reset_cache(self) -> None:
        """Drop the stage's cache. Call only while no request runs."""

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError
