"""The likeliest token of rows of hidden states, without all of their logits.

A request without sampling, penalties or log-probabilities wants one token id of each row, for
which an LM head in bfloat16 reads its whole weight: a seventh of what a lone decoding step of
Qwen2.5-0.5B reads. A copy of it in 8 bits, half as large, says of every logit between which bounds
it lies; only those that can be the largest are then computed from the weight itself. The answer is
that of all logits, ties included: see `native/greedy_head.cpp` for the bounds and why.
"""

import ctypes
import math

import torch
from torch import Tensor

from headstart.models.packed import PackedWeight
from headstart.native import library
from headstart.native.bindings import Screen

__all__ = ["GreedyHead", "greedy_tokens"]

_ALIGNMENT = 64
_MOST_INPUTS = 32_768  # whose sums of 8-bit products fit in 32 bits
_LONGEST_PAUSE = 255  # steps


def greedy_tokens(logits: Tensor) -> list[int]:
    """The first of the largest of each row of `logits` float32 `[rows, vocab]`.

    -1 for a row whose largest logit is not finite: one with NaN or +inf, or with nothing but -inf.
    On a CPU by numpy, which looks at 16 numbers at a time; torch's own takes 12 times as long.
    """
    rows = logits.numpy() if logits.device.type == "cpu" else logits
    found: list[int] = rows.argmax(-1).tolist()  # the first NaN, if there is one
    largest: list[float] = rows[range(len(found)), found].tolist()
    return [
        token if math.isfinite(logit) else -1 for token, logit in zip(found, largest, strict=True)
    ]


class GreedyHead:
    """An LM head, without bias, whose logits nobody sees.

    It takes half as much memory as `weight`, which must be there as long as it.

    Where the bounds are too wide (rows or weights with few numbers that are much larger than the
    others) all logits are computed after all. After a step in which that was so for most rows, one
    step does not try, then three, seven, up to 255; a step that needs it for fewer starts anew.
    """

    def __init__(self, weight: PackedWeight) -> None:
        found = library()
        assert found is not None and weight.bias is None and weight.inputs <= _MOST_INPUTS
        self._choose = found.headstart_greedy_tokens
        self.weight = weight
        """What the logits are the products with."""
        size = found.headstart_screen_bytes(weight.outputs, weight.inputs)
        self._panels = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        start = self._panels.data_ptr() + -self._panels.data_ptr() % _ALIGNMENT
        self._struct = Screen(panels=start, inputs=weight.inputs, outputs=weight.outputs)
        self._screen = ctypes.addressof(self._struct)
        self._exact = ctypes.addressof(weight.struct)
        found.headstart_screen(self._exact, self._screen, torch.get_num_threads())
        found.headstart_huge_pages(start, size)
        self._pause = 0  # steps after the next that most rows need all logits in
        self._waiting = 0  # steps until the next try

    def choose(self, hidden: Tensor) -> list[int]:
        """The first of the largest logits of each row of `hidden` bfloat16 `[rows, inputs]`.

        As `greedy_tokens` of `weight.multiply(hidden)`, -1 for a row whose largest logit is not
        finite included.
        """
        self.weight.check_rows(hidden)
        if not len(hidden):
            return []
        if self._waiting:
            self._waiting -= 1
            return greedy_tokens(self.weight.multiply(hidden).float())
        hidden = hidden.contiguous()
        chosen = torch.empty(len(hidden), dtype=torch.int64)
        self._choose(
            self._screen,
            self._exact,
            hidden.data_ptr(),
            len(hidden),
            chosen.data_ptr(),
            torch.get_num_threads(),
        )
        found: list[int] = chosen.tolist()
        left = [row for row, token in enumerate(found) if token < 0]
        self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE) if 2 * len(left) > len(found) else 0
        self._waiting = self._pause
        if left:
            logits = self.weight.multiply(hidden[left]).float()
            for row, token in zip(left, greedy_tokens(logits), strict=True):
                found[row] = token
        return found
