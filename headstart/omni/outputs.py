"""A stage's outputs, and the alignment of their rows with its tokens.

    token          one row per token of the stage's sequence: cached block by block
    frames(ratio)  `ratio` rows per token, a vocoder's samples for instance: cached likewise
    request        one value per request, made when the request ends
    global         the same for all requests

`AlignmentDetector` detects undeclared alignments from shapes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from headstart.errors import ConfigError, EngineError
from headstart.validation import check_name

__all__ = ["Alignment", "AlignmentDetector", "Kind", "Output", "parse_alignment"]

_FRAMES = re.compile(r"frames\((\d+)\)")


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
    """One output of a stage: its name, its alignment and its dtype.

    dtype: torch's name of the tensors' dtype ("float32"); None allows any. required: a request that
    skips a prefix must still get the prefix's rows; otherwise these rows may be missing downstream.
    Raises ConfigError.
    """

    name: str
    alignment: Alignment = Alignment(Kind.TOKEN)
    dtype: str | None = None
    required: bool = True

    def __post_init__(self) -> None:
        check_name("an output's name", self.name, ConfigError, required=True)
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ConfigError(f"output {self.name!r}: {self.dtype!r} is no dtype of torch's")

    def check(self, tensor: Tensor, num_tokens: int) -> None:
        """Raise EngineError if a tensor of a pass of `num_tokens` differs from its declaration."""
        if self.dtype is not None and tensor.dtype is not getattr(torch, self.dtype):
            raise EngineError(f"output {self.name!r} is {tensor.dtype}, declared {self.dtype}")
        rows = num_tokens * self.alignment.ratio
        if self.alignment.is_by_token and (tensor.ndim < 1 or tensor.shape[0] != rows):
            raise EngineError(
                f"output {self.name!r} is {list(tensor.shape)}; declared {self.alignment}, it has "
                f"{rows} rows for {num_tokens} tokens"
            )


class AlignmentDetector:
    """Detects the outputs of a stage with one row per token, from shapes, never from names.

    An output is a candidate if its first axis is as long as the pass has tokens, as in the
    reference. A single pass proves little: 12 rows for 12 tokens may be chance, and so may one row
    per request while every request decodes one token. So a candidate is trusted after matching
    passes of two different lengths, one of them with more tokens than requests. A pass that does
    not match rules it out for good. Declared alignments are not checked here.
    """

    def __init__(self, declared: Mapping[str, Alignment]) -> None:
        self._declared = dict(declared)
        self._lengths: dict[str, set[int]] = {}
        self._dense: set[str] = set()  # matched a pass with more tokens than requests
        self._refuted: set[str] = set()

    def refutes(self, outputs: Mapping[str, Tensor], num_tokens: int) -> list[str]:
        """Return the candidates that a pass over `num_tokens` rules out.

        The caller must drop their cached rows. Changes nothing.
        """
        return [
            name
            for name, tensor in outputs.items()
            if name in self._lengths
            and name not in self._refuted
            and not _has_rows(tensor, num_tokens)
        ]

    def observe(self, outputs: Mapping[str, Tensor], num_tokens: int, num_requests: int) -> None:
        """Record the output shapes of one pass over `num_tokens` of `num_requests`."""
        for name, tensor in outputs.items():
            if name in self._declared or name in self._refuted:
                continue
            if not _has_rows(tensor, num_tokens):
                self._refuted.add(name)
                continue
            self._lengths.setdefault(name, set()).add(num_tokens)
            if num_tokens > num_requests:
                self._dense.add(name)

    def is_by_token(self, name: str) -> bool:
        """True if the output's rows belong to tokens, by declaration or by two passes."""
        if name in self._declared:
            return self._declared[name].is_by_token
        return name in self._dense and name not in self._refuted and len(self._lengths[name]) > 1

    def is_undecided(self, name: str) -> bool:
        """True if the output needs another pass; until then no request may rely on its rows."""
        return (
            name not in self._declared and name not in self._refuted and not self.is_by_token(name)
        )

    def is_settled_by(self, num_tokens: float) -> bool:
        """Return True if a pass of one request over so few tokens leaves no candidate undecided."""
        return all(
            name in self._dense and num_tokens < min(lengths)
            for name, lengths in self._lengths.items()
            if self.is_undecided(name)
        )

    def ratio(self, name: str) -> int:
        """Rows per token."""
        found = self._declared.get(name)
        return found.ratio if found is not None else 1


def _has_rows(tensor: Tensor, count: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == count
