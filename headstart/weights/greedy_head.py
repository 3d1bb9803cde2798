"""The greedy token of rows of hidden states, without computing all logits.

A request without sampling, penalties or log-probabilities needs only one token id per row. Reading
the whole bfloat16 LM head for this is a quarter of the memory traffic of a decode step in
Qwen2.5-0.5B. An int8 copy, half as large, gives bounds of each logit. Only logits whose upper bound
reaches the best lower bound are computed exactly. The result is the argmax of all logits, ties
included. `native/greedy_head.cpp` derives the bounds.
"""

import ctypes
import functools
import math

import numpy as np
import torch
from torch import Tensor

from headstart.native import library
from headstart.native.bindings import Screen
from headstart.native.pages import request_huge_pages
from headstart.weights.bf16 import PackedWeight

MAX_INPUTS = 32_768
"""Maximum number of inputs of a `GreedyHead`: sums of this many 8-bit products fit in 32 bits."""
_LONGEST_PAUSE = 255  # steps
_FEW = 32  # few: at most 1 / 32 of the bytes of a mask
# For each byte of a mask, eight bounds: NaN where the bit is set, else minus infinity. `fmin` of a
# logit and NaN is the logit.
_BOUNDS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(np.nan),
    np.float32(-np.inf),
)


def greedy_tokens(logits: Tensor) -> list[int]:
    """Return the argmax (the first of equals) of each row of `logits` float32 `[rows, vocab]`.

    The result is -1 for a row with NaN or +inf, or with only -inf. On a CPU, numpy computes the
    argmax, 12 times as fast as torch.
    """
    rows = logits.numpy() if logits.device.type == "cpu" else logits
    tokens: list[int] = rows.argmax(-1).tolist()  # the index of the first NaN, if any
    largest: list[float] = rows[range(len(tokens)), tokens].tolist()
    pairs = zip(tokens, largest, strict=True)
    return [token if math.isfinite(logit) else -1 for token, logit in pairs]


@functools.lru_cache(maxsize=8)
def every_token(size: int) -> np.ndarray:
    """Return a mask uint8 `[bytes]` with the bits of `size` tokens set, the lowest bit first.

    Its length is a multiple of 32 bits; bits beyond the last token are clear.
    """
    bits = np.zeros((size + 31) // 32 * 32, dtype=np.uint8)
    bits[:size] = 1
    packed = np.packbits(bits, bitorder="little")
    packed.flags.writeable = False
    return packed


@torch.inference_mode()  # the mode in which the logits were computed
def mask_logits(logits: Tensor, allowed: np.ndarray) -> None:
    """Set logits float32 `[rows, vocab]` to minus infinity, in place, where a mask's bit is 0.

    `allowed` uint8 `[rows, bytes]` has a mask for each row, in the form of `every_token`. Rows with
    few banned or few allowed tokens are fast.
    """
    size = logits.shape[1]
    if logits.device.type != "cpu":
        table = torch.from_numpy(_BOUNDS).to(logits.device)
        for row, mask in zip(logits, allowed, strict=True):
            bounds = table[torch.from_numpy(mask).to(logits.device).int()].reshape(-1)
            torch.fmin(row, bounds[:size], out=row)
        return
    every = every_token(size)
    buffer = np.empty((len(every), 8), dtype=np.float32)  # shared by rows: new memory is slow
    for row, mask in zip(logits.numpy(), allowed, strict=True):
        if len(indices := np.flatnonzero(mask != every)) * _FEW <= len(mask):
            row[_tokens_of(indices, every[indices] & ~mask[indices])] = -np.inf
        elif len(indices := np.flatnonzero(mask)) * _FEW <= len(mask):
            tokens = _tokens_of(indices, mask[indices])
            logits_of_tokens = row[tokens]
            row[:] = -np.inf
            row[tokens] = logits_of_tokens
        else:  # numpy's `take` is faster than torch's
            np.take(_BOUNDS, mask, axis=0, out=buffer, mode="clip")
            np.fmin(row, buffer.reshape(-1)[:size], out=row)


def _tokens_of(indices: np.ndarray, selected: np.ndarray) -> np.ndarray:
    """Return the tokens of the set bits in some bytes of a mask.

    indices: the indices of these bytes in the mask. selected: the bytes.
    """
    row, bit = np.nonzero(np.unpackbits(selected[:, None], axis=1, bitorder="little"))
    return np.asarray(indices[row] * 8 + bit)


class GreedyHead:
    """An LM head without bias that returns greedy tokens instead of logits.

    It uses half as much memory as `weight`, which must stay alive as long as this object.

    Outliers in a row or in the weights make the bounds too wide, and all logits of the row are
    computed. If the bounds are too wide for most rows of a step, they are not used for a pause of 1
    step. If they are still too wide after each pause, the pauses last 3, 7, ... up to 255 steps.
    """

    def __init__(self, weight: PackedWeight) -> None:
        kernels = library()
        outputs, inputs = weight.outputs, weight.inputs
        assert kernels is not None and weight.bias is None and inputs <= MAX_INPUTS
        self._choose = kernels.headstart_greedy_tokens
        self.weight = weight
        """The LM head's weight."""
        # Bytes of the panels that `native/screen.h` describes.
        size = -(-outputs // 32) * 32 * (-(-inputs // 4) * 4 + 3 * 4)
        self._panels = torch.empty(size, dtype=torch.uint8)  # torch aligns it to 64 bytes
        start = self._panels.data_ptr()
        self._struct = Screen(panels=start, inputs=inputs, outputs=outputs)
        self._screen = ctypes.addressof(self._struct)
        self._exact = ctypes.addressof(weight.product.struct)
        kernels.headstart_screen(self._exact, self._screen, torch.get_num_threads())
        request_huge_pages(start, size)
        self._pause = 0  # length of the latest pause, in steps; 0 once the bounds suffice
        self._waiting = 0  # steps left of the current pause

    def choose(self, hidden: Tensor, allowed: np.ndarray | None = None) -> list[int]:
        """Return the greedy token of each row of `hidden` bfloat16 `[rows, inputs]`.

        The result equals `greedy_tokens` of `weight.multiply(hidden)`, including -1 for rows that
        are not finite. allowed: masks of the tokens to choose from, as in `mask_logits`; logits of
        other tokens are ignored, even NaN.
        """
        self.weight.product.check_rows(hidden)
        if not len(hidden):
            return []
        if self._waiting:
            self._waiting -= 1
            return self._compute_all(hidden, allowed)
        hidden = hidden.contiguous()
        masks = None if allowed is None else np.ascontiguousarray(allowed)
        width = (self.weight.outputs + 31) // 32 * 4
        assert masks is None or masks.shape == (len(hidden), width), "masks have another size"
        tokens_tensor = torch.empty(len(hidden), dtype=torch.int64)
        self._choose(
            self._screen,
            self._exact,
            hidden.data_ptr(),
            len(hidden),
            masks.ctypes.data if masks is not None else None,
            tokens_tensor.data_ptr(),
            torch.get_num_threads(),
        )
        tokens: list[int] = tokens_tensor.tolist()
        unresolved = [row for row, token in enumerate(tokens) if token < 0]
        is_majority = 2 * len(unresolved) > len(tokens)
        self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE) if is_majority else 0
        self._waiting = self._pause
        if unresolved:
            computed_tokens = self._compute_all(
                hidden[unresolved], None if allowed is None else allowed[unresolved]
            )
            for row, token in zip(unresolved, computed_tokens, strict=True):
                tokens[row] = token
        return tokens

    def _compute_all(self, hidden: Tensor, allowed: np.ndarray | None) -> list[int]:
        logits = self.weight.multiply(hidden).float()
        if allowed is not None:
            mask_logits(logits, allowed)
        return greedy_tokens(logits)
