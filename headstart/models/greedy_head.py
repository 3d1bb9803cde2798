"""The greedy token of rows of hidden states, without computing all logits.

A request without sampling, penalties or log-probabilities needs one token id per row. For it an LM
head in bfloat16 would read its whole weight: a seventh of the memory that a decoding step of one
request reads in Qwen2.5-0.5B. An int8 copy, half as large, gives an interval for each logit; only
candidates whose interval reaches the best lower bound are computed exactly. The result is the
argmax of all logits, ties included; `native/greedy_head.cpp` derives the bounds.
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
_MOST_INPUTS = 32_768  # sums of this many 8-bit products fit in 32 bits
_LONGEST_PAUSE = 255  # steps


def greedy_tokens(logits: Tensor) -> list[int]:
    """The argmax (the first of equals) of each row of `logits` float32 `[rows, vocab]`.

    -1 for a row whose largest logit is not finite: one with NaN or +inf, or with only -inf. Uses
    numpy on a CPU: its argmax is vectorised, torch's takes 12 times as long.
    """
    rows = logits.numpy() if logits.device.type == "cpu" else logits
    found: list[int] = rows.argmax(-1).tolist()  # the first NaN, if there is one
    largest: list[float] = rows[range(len(found)), found].tolist()
    return [
        token if math.isfinite(logit) else -1 for token, logit in zip(found, largest, strict=True)
    ]


class GreedyHead:
    """An LM head without bias that returns greedy tokens instead of logits.

    It takes half as much memory as `weight`, which must stay alive as long as this object.

    If the bounds are too wide (rows or weights with a few much larger elements), it computes all
    logits. After a step in which most rows needed all logits, the next step skips the bounds; each
    further such step lengthens the pause to 3, 7, up to 255 steps. A step in which fewer rows need
    all logits resets it.
    """

    def __init__(self, weight: PackedWeight) -> None:
        found = library()
        assert found is not None and weight.bias is None and weight.inputs <= _MOST_INPUTS
        self._choose = found.headstart_greedy_tokens
        self.weight = weight
        """The LM head's weight."""
        size = found.headstart_screen_bytes(weight.outputs, weight.inputs)
        self._panels = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        start = self._panels.data_ptr() + -self._panels.data_ptr() % _ALIGNMENT
        self._struct = Screen(panels=start, inputs=weight.inputs, outputs=weight.outputs)
        self._screen = ctypes.addressof(self._struct)
        self._exact = ctypes.addressof(weight.struct)
        found.headstart_screen(self._exact, self._screen, torch.get_num_threads())
        found.headstart_huge_pages(start, size)
        self._pause = 0  # length of the next pause, in steps
        self._waiting = 0  # steps left of the current pause

    def choose(self, hidden: Tensor) -> list[int]:
        """The greedy token of each row of `hidden` bfloat16 `[rows, inputs]`.

        Equal to `greedy_tokens` of `weight.multiply(hidden)`, including -1 for a row whose largest
        logit is not finite.
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
