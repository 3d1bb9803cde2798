"""Processors that need no state: a bias on some tokens, or some tokens and no others."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from headstart.engine.logits.protocol import Failures, LogitsProcessor, Rows, TokenMask

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
        numbers = np.repeat([row for row, _ in rows], [len(one.token_ids) for _, one in rows])
        columns = np.concatenate([one.token_ids for _, one in rows])
        values = np.concatenate([one.values for _, one in rows])
        at, to, by = (torch.from_numpy(one).to(logits.device) for one in (numbers, columns, values))
        logits.index_put_((at, to), by, accumulate=True)
        return {}


class AllowedTokens(TokenMask):
    """Bans all tokens but some."""

    rank = 0

    def __init__(self, token_ids: Iterable[int]) -> None:
        self.token_ids = np.array(sorted(set(token_ids)), dtype=np.int64)
        self._mask = np.empty(0, dtype=np.uint8)

    @classmethod
    def ban(cls, allowed: np.ndarray, rows: Rows) -> Failures:
        """Keep the bits of each row's tokens alone."""
        for row, one in rows:
            if len(one._mask) != allowed.shape[1]:  # made in the first step
                bits = np.zeros(allowed.shape[1] * 8, dtype=np.uint8)
                bits[one.token_ids] = 1
                one._mask = np.packbits(bits, bitorder="little")
            allowed[row] &= one._mask
        return {}
