"""Processors that need no state: a bias on some tokens, or some tokens and no others."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from headstart.engine.logits.protocol import Failures, LogitsProcessor, Rows

__all__ = ["AllowedTokens", "LogitBias"]


class LogitBias(LogitsProcessor):
    """Adds a number to the logits of some tokens: one scatter for all rows of a step."""

    rank = 1

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.token_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.values = np.fromiter(bias.values(), np.float32, len(bias))

    @classmethod
    def change(cls, logits: Tensor, rows: Rows) -> Failures:
        """Add each row's bias."""
        values = torch.from_numpy(np.concatenate([one.values for _, one in rows]))
        logits.index_put_(places(logits, rows), values.to(logits.device), accumulate=True)
        return {}


class AllowedTokens(LogitsProcessor):
    """Bans all tokens but some: one scatter for all rows of a step."""

    rank = 0

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = np.array(sorted(set(token_ids)), dtype=np.int64)

    @classmethod
    def change(cls, logits: Tensor, rows: Rows) -> Failures:
        """Fill each row with minus infinity, but for its allowed tokens."""
        at = places(logits, rows)
        kept = logits[at]
        for row, _ in rows:
            logits[row] = float("-inf")
        logits[at] = kept
        return {}


def places(logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Row and column indices of all `token_ids` of the rows' processors."""
    numbers = np.repeat([row for row, _ in rows], [len(one.token_ids) for _, one in rows])
    columns = np.concatenate([one.token_ids for _, one in rows])
    return (
        torch.from_numpy(numbers.astype(np.int64)).to(logits.device),
        torch.from_numpy(columns).to(logits.device),
    )
