"""Stages, their outputs, and the alignment of their rows with a stage's tokens.

    token          one row per token of the stage's sequence: cached block by block
    frames(ratio)  `ratio` rows per token (a vocoder's samples): cached block by block
    request        one value per request, made when the request ends
    global         the same for all requests

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
from headstart.validation import check_name


class Kind(Enum):
    """The unit of an output's first axis."""

    TOKEN = "token"
    FRAMES = "frames"
    REQUEST = "request"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Alignment:
    """An output's `kind`, and for frames the number of rows per token."""

    kind: Kind
    ratio: int = 1

    @property
    def is_by_token(self) -> bool:
        """True if rows belong to tokens, so that they can be cached by blocks."""
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
    """One output of a stage: its name, its alignment and its dtype.

    dtype: torch's name of the tensors' dtype ("float32"); None allows any. required: a prefix is
    skipped only if its rows are stored; rows of other outputs may be missing downstream. Raises
    ConfigError.
    """

    name: str
    alignment: Alignment = Alignment(Kind.TOKEN)
    dtype: str | None = None
    required: bool = True

    def __post_init__(self) -> None:
        check_name("an output's name", self.name, ConfigError, required=True)
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ConfigError(f"output {self.name!r}: {self.dtype!r} is not a dtype of torch")

    def check(self, tensor: Tensor, num_tokens: int) -> None:
        """Raise EngineError if the output of `num_tokens` tokens differs from its declaration."""
        if self.dtype is not None and tensor.dtype is not getattr(torch, self.dtype):
            raise EngineError(f"output {self.name!r} is {tensor.dtype}, declared {self.dtype}")
        rows = num_tokens * self.alignment.ratio
        if self.alignment.is_by_token and (tensor.ndim < 1 or tensor.shape[0] != rows):
            raise EngineError(
                f"output {self.name!r} is {list(tensor.shape)}; declared {self.alignment}, it has "
                f"{rows} rows for {num_tokens} tokens"
            )


class AlignmentDetector:
    """Detects from shapes which outputs of a stage have one row per token.

    An output is a candidate if the length of its first axis is the number of tokens of the pass.
    One match may be chance, so a candidate is accepted only after passes of two different lengths,
    one of them with more tokens than requests. A pass in which the lengths differ excludes the
    candidate. Declared alignments are not checked here.
    """

    def __init__(self, declared: Mapping[str, Alignment]) -> None:
        self._declared = dict(declared)
        self._lengths: dict[str, set[int]] = {}
        self._dense: set[str] = set()  # matched a pass with more tokens than requests
        self._refuted: set[str] = set()

    def observe(
        self, outputs: Mapping[str, Tensor], num_tokens: int, num_requests: int
    ) -> list[str]:
        """Record the output shapes of one pass; return the candidates that it rules out.

        The caller must drop their cached rows.
        """
        refuted = []
        for name, tensor in outputs.items():
            if name in self._declared or name in self._refuted:
                continue
            if tensor.ndim == 0 or tensor.shape[0] != num_tokens:
                self._refuted.add(name)
                if name in self._lengths:
                    refuted.append(name)
                continue
            self._lengths.setdefault(name, set()).add(num_tokens)
            if num_tokens > num_requests:
                self._dense.add(name)
        return refuted

    def is_by_token(self, name: str) -> bool:
        """Return True if the output's rows belong to tokens, by declaration or by two passes."""
        if name in self._declared:
            return self._declared[name].is_by_token
        return name in self._dense and name not in self._refuted and len(self._lengths[name]) > 1

    def is_undecided(self, name: str) -> bool:
        """Return True if the output needs another pass before requests may rely on its rows."""
        is_known = name in self._declared or name in self._refuted
        return not is_known and not self.is_by_token(name)

    def is_settled_by(self, num_tokens: float) -> bool:
        """Return True if one request's pass over `num_tokens` tokens will decide all candidates."""
        return all(
            name in self._dense and num_tokens < min(lengths)
            for name, lengths in self._lengths.items()
            if self.is_undecided(name)
        )

    def ratio(self, name: str) -> int:
        """Return the number of rows per token."""
        return self._declared[name].ratio if name in self._declared else 1


TOKENS = "tokens"
"""The output of every autoregressive stage with its generated tokens, int64 `[n]`."""


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
    stages, by stage name. options: by stage name, for example a voice or a seed. salt: requests of
    different salts share nothing. stages: names of the stages that run; None is all.
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

    seconds: time of the steps that computed it. first_output, total: seconds since its arrival in
    the pipeline. tokens: number of tokens of prompt and answer. cached_tokens: number of tokens
    that were not computed. loaded_tokens: number of cached tokens that were loaded from disk or
    another machine. hit_rows: by output, the number of tokens whose rows were read from the store.
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
    """Rows of one output for the tokens from `start` on: `[tokens * ratio, ...]`."""

    output: str
    start: int
    rows: Tensor
    ratio: int = 1

    @property
    def stop(self) -> int:
        """The token after the last."""
        return self.start + len(self.rows) // self.ratio


class OutputEvent(NamedTuple):
    """The next rows of one output of a request."""

    request_id: str
    chunk: Chunk


class StageStarted(NamedTuple):
    """A request's prompt in the stage is complete; comes before any of the request's rows.

    prompt_tokens: the length of the prompt. names: the identities of its whole blocks of
    `block_size` tokens; empty if the stage has no cache.
    """

    request_id: str
    prompt_tokens: int
    block_size: int
    names: Sequence[bytes] = ()


class StageFinished(NamedTuple):
    """A request is finished in the stage. `result`: its result for the user besides rows."""

    request_id: str
    metrics: StageMetrics
    result: object = None


class StageFailed(NamedTuple):
    """A request failed in the stage, which has freed its memory."""

    request_id: str
    error: HeadstartError


Event = OutputEvent | StageStarted | StageFinished | StageFailed


class Stage:
    """One running stage, which serves many requests. Not thread-safe."""

    spec: StageSpec

    @property
    def has_work(self) -> bool:
        """True if a step could do work with the inputs that have arrived."""
        raise NotImplementedError

    def limit_to(self, outputs: Set[str]) -> None:
        """Limit the outputs to the outputs that other stages take; called before any request."""

    def check(self, request: OmniRequest) -> None:
        """Raise RequestError if the stage cannot serve the request; changes nothing."""

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
        """Do some work; a request that fails ends with `StageFailed`, the others continue."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Forget a request in any state; ignores an unknown request."""
        raise NotImplementedError

    def peek(self, request_id: str) -> object:
        """Return a running request's result so far, without rows; None if there is none."""
        return None

    def reset_cache(self) -> None:
        """Drop the stage's own cache. Not while a request runs."""

    def close(self) -> None:
        """Release all resources."""
        raise NotImplementedError
