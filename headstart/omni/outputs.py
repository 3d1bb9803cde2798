"""What a stage gives, and how it lies beside the tokens.

    token          one row a token of the stage's sequence: cached block by block
    frames(ratio)  `ratio` rows a token, a vocoder's samples for instance: cached likewise
    request        one value a request, made when the request ends
    global         the same for all requests

An output whose alignment nobody declared is looked at instead: `AlignmentDetector`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from headstart.errors import ConfigError, EngineError

__all__ = ["Alignment", "AlignmentDetector", "Kind", "Output", "parse_alignment"]

_FRAMES = re.compile(r"frames\((\d+)\)")


class Kind(Enum):
    """What the first axis of an output counts."""

    TOKEN = "token"
    FRAMES = "frames"
    REQUEST = "request"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Alignment:
    """`kind`, and for frames how many rows there are to a token."""

    kind: Kind
    ratio: int = 1

    @property
    def is_by_token(self) -> bool:
        """Whether rows belong to tokens, so that blocks of them can be kept."""
        return self.kind in (Kind.TOKEN, Kind.FRAMES)

    def __str__(self) -> str:
        return f"frames({self.ratio})" if self.kind is Kind.FRAMES else self.kind.value


def parse_alignment(text: str) -> Alignment:
    """`token`, `request`, `global` or `frames(4)`. Raises ConfigError.

    >>> parse_alignment("frames(4)").ratio
    4
    """
    found = _FRAMES.fullmatch(text)
    if found and int(found[1]) > 0:
        return Alignment(Kind.FRAMES, int(found[1]))
    try:
        kind = Kind(text)
    except ValueError:
        kind = Kind.FRAMES
    if kind is Kind.FRAMES:
        raise ConfigError(
            f"alignment is {text!r}; allowed: token, request, global, frames(n) with n above 0"
        )
    return Alignment(kind)


@dataclass(frozen=True, slots=True)
class Output:
    """One thing that a stage gives: what the next stages call it, and how it lies.

    dtype: what its tensors must be, as torch names it ("float32"); None takes what comes.
    required: a request that skips a prefix must get these rows of it all the same; otherwise
    the rows of a skipped prefix may be missing downstream. Raises ConfigError.
    """

    name: str
    alignment: Alignment = Alignment(Kind.TOKEN)
    dtype: str | None = None
    required: bool = True

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("an output needs a name")
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ConfigError(f"output {self.name!r}: {self.dtype!r} is no dtype of torch's")

    def check(self, tensor: Tensor, num_tokens: int) -> None:
        """Raise EngineError if this is not what was declared, for a pass of `num_tokens`."""
        if self.dtype is not None and tensor.dtype is not getattr(torch, self.dtype):
            raise EngineError(f"output {self.name!r} is {tensor.dtype}, declared {self.dtype}")
        rows = num_tokens * self.alignment.ratio
        if self.alignment.is_by_token and (tensor.ndim < 1 or tensor.shape[0] != rows):
            raise EngineError(
                f"output {self.name!r} is {list(tensor.shape)}; declared {self.alignment}, it has "
                f"{rows} rows for {num_tokens} tokens"
            )


class AlignmentDetector:
    """Which outputs of a stage have one row a token: found by looking, never by their names.

    A first axis as long as the pass has tokens makes a candidate, as in the reference. A single
    look proves little: a tensor of 12 rows beside 12 tokens, or one row a request while every
    request decodes one token. So a candidate is trusted once it had as many rows as there were
    tokens in passes of two different lengths, in which there were more tokens than requests; and
    a pass in which the two differ refutes it for good. Declared alignments are not looked at.
    """

    def __init__(self, declared: Mapping[str, Alignment]) -> None:
        self._declared = dict(declared)
        self._lengths: dict[str, set[int]] = {}
        self._refuted: set[str] = set()

    def refutes(self, outputs: Mapping[str, Tensor], num_tokens: int) -> list[str]:
        """The outputs that are trusted, and that a pass over `num_tokens` refutes.

        What was kept of them is of no use. Changes nothing.
        """
        return [
            name
            for name, tensor in outputs.items()
            if name not in self._declared
            and self.is_by_token(name)
            and not _has_rows(tensor, num_tokens)
        ]

    def observe(self, outputs: Mapping[str, Tensor], num_tokens: int, num_requests: int) -> None:
        """Look at what one pass over `num_tokens` of `num_requests` gave."""
        for name, tensor in outputs.items():
            if name in self._declared or name in self._refuted:
                continue
            if not _has_rows(tensor, num_tokens):
                self._refuted.add(name)
            elif num_tokens > num_requests:
                self._lengths.setdefault(name, set()).add(num_tokens)

    def is_by_token(self, name: str) -> bool:
        """Whether the output's rows belong to tokens, by declaration or by two lengths."""
        if name in self._declared:
            return self._declared[name].is_by_token
        return name not in self._refuted and len(self._lengths.get(name, ())) > 1

    def is_undecided(self, name: str) -> bool:
        """Whether one more length could settle it; until then nothing is kept of the output."""
        if name in self._declared or name in self._refuted:
            return False
        return len(self._lengths.get(name, ())) < 2

    def ratio(self, name: str) -> int:
        """Rows a token."""
        found = self._declared.get(name)
        return found.ratio if found is not None else 1


def _has_rows(tensor: Tensor, count: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == count
