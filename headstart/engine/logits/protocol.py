"""The protocol of what changes logits, and where a step applies it.

    call         when                                              where
    (made)       a request is prepared, for each of its answers    the caller's thread
    change       before a token is sampled                         the step
    accept       after the answer took a token and goes on         the step

A step that fails while it samples ends its requests, so nothing is ever taken back, and a request
that is preempted keeps its processors as they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headstart.errors import EngineError, NoTokenError
from headstart.weights.greedy_head import every_token, mask_logits

__all__ = ["ALL_BANNED", "LogitsProcessor", "Rows", "TokenMask", "allowed_tokens", "change_logits"]

ALL_BANNED = "every token is banned, or a penalty overflows"

Rows = Sequence[tuple[int, Any]]
"""Rows of a step's logits, each with the processor of that answer."""

Failures = dict[int, EngineError]
"""Rows without a token to choose, and why; the others are as they would be without them."""


class LogitsProcessor(ABC):
    """Changes one answer's logits before each token.

    Kinds are applied in the order of `rank`, each to all of its rows of the step at once: a
    processor never reads or writes a row of another answer.
    """

    rank: int
    complete = False
    """True once nothing but the end may follow: the answer stops, whatever `min_tokens` says."""

    @classmethod
    @abstractmethod
    def change(cls, logits: Tensor, rows: Rows) -> Failures:
        """Change these rows of `logits` float32 `[rows, vocab]` in place.

        `rows` has processors of this class. A processor that fails ends its own request alone.
        """

    def accept(self, token_id: int) -> None:  # noqa: B027 (most have no state)
        """The answer has this token now, and may go on."""


Processor = TypeVar("Processor", bound=LogitsProcessor)


class TokenMask(LogitsProcessor):
    """A processor that bans tokens and leaves the logits of all others as they are.

    So the argmax can be taken among the others, where a model finds it without all logits.
    """

    @classmethod
    @abstractmethod
    def ban(cls, allowed: np.ndarray, rows: Rows) -> Failures:
        """Clear the bits of banned tokens, in these rows of `allowed` uint8 `[rows, bytes]`.

        A bit for each token, the lowest first, as in `every_token`.
        """

    @classmethod
    def change(cls, logits: Tensor, rows: Rows) -> Failures:
        """Set the logits of banned tokens to minus infinity."""
        allowed = _all_allowed(*logits.shape)
        failed = cls.ban(allowed, rows)
        mask_logits(logits, allowed)
        return failed


def allowed_tokens(
    processors: Sequence[Sequence[TokenMask]], size: int
) -> tuple[np.ndarray | None, Failures]:
    """The masks of rows uint8 `[rows, bytes]` over a vocabulary of `size`; None if none has one."""
    if not any(processors):
        return None, {}
    allowed = _all_allowed(len(processors), size)
    failed: Failures = {}
    for kind, rows in _by_kind(processors):
        failed |= kind.ban(allowed, rows)
    empty = {row: NoTokenError(ALL_BANNED) for row in np.flatnonzero(~allowed.any(axis=1)).tolist()}
    return allowed, empty | failed


def _all_allowed(rows: int, size: int) -> np.ndarray:
    return np.tile(every_token(size), (rows, 1))


@torch.inference_mode()  # in which the logits were made
def change_logits(logits: Tensor, processors: Sequence[Sequence[LogitsProcessor]]) -> Failures:
    """Apply the processors of each row of `logits` float32 `[rows, vocab]`, in place."""
    failed: Failures = {}
    for kind, rows in _by_kind(processors):
        failed |= kind.change(logits, rows)
    return failed


def _by_kind(
    processors: Sequence[Sequence[Processor]],
) -> Iterator[tuple[type[Processor], list[tuple[int, Processor]]]]:
    """Each kind and its rows, in the order of rank."""
    kinds: dict[type[Processor], list[tuple[int, Processor]]] = {}
    for row, own in enumerate(processors):
        for processor in own:
            kinds.setdefault(type(processor), []).append((row, processor))
    for kind in sorted(kinds, key=lambda kind: kind.rank):
        yield kind, kinds[kind]
