"""The protocol of what changes logits, and where a step applies it.

    call         when                                              where
    (made)       a request is prepared, for each of its answers    the caller's thread
    change       before a token is sampled                         the step
    accept       after the answer took a token and goes on         the step

A step that is interrupted while it samples ends its requests, and one that is interrupted before
has neither changed nor accepted anything: so nothing is ever taken back, and a request that is
preempted keeps its processors as they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headstart.errors import EngineError

__all__ = ["LogitsProcessor", "Rows", "change_logits"]

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


@torch.inference_mode()  # in which the logits were made
def change_logits(logits: Tensor, processors: Sequence[Sequence[LogitsProcessor]]) -> Failures:
    """Apply the processors of each row of `logits` float32 `[rows, vocab]`, in place."""
    kinds: dict[type[LogitsProcessor], list[tuple[int, LogitsProcessor]]] = {}
    for row, own in enumerate(processors):
        for processor in own:
            kinds.setdefault(type(processor), []).append((row, processor))
    failed: Failures = {}
    for kind in sorted(kinds, key=lambda kind: kind.rank):
        failed |= kind.change(logits, kinds[kind])
    return failed
