"""What this machine can do at the most, and how long a load must take by that.

A pass of the model must multiply its rows by every weight, and read every weight and every K and
V once: the longer of the two is its floor (the roofline: Williams, Waterman, Patterson 2009).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

Clock = Callable[[], float]

_BF16 = 2  # bytes
_REPEATS = 7


class Limits(NamedTuple):
    """bfloat16 GEMM in GFLOP/s and reading of memory in GB/s, with torch's present threads."""

    gemm: float
    memory: float


class Floor(NamedTuple):
    """The least a piece of work can take, in seconds, and what that is due to."""

    seconds: float
    limit: str


def measure_limits(clock: Clock = time.perf_counter) -> Limits:
    """The best of a few products of square matrices, and of a few sums over 256 MB."""
    square = [torch.ones(size, size, dtype=torch.bfloat16) for size in (1024, 2048)]
    gemm = max(2 * len(m) ** 3 / _best(lambda m=m: m @ m, clock) for m in square)  # type: ignore[misc]
    data = torch.ones(2**26)
    return Limits(gemm / 1e9, data.nbytes / _best(data.sum, clock) / 1e9)


def _best(call: Callable[[], object], clock: Clock) -> float:
    seconds = []
    for _ in range(_REPEATS):
        start = clock()
        call()
        seconds.append(clock() - start)
    return min(seconds)


@dataclass(frozen=True)
class Pass:
    """One pass of a model: `rows` tokens are computed, `logit_rows` of them up to their logits.

    `attended`: pairs of a row and a token that it attends to. `context`: tokens whose K and V
    are read, each once however many rows share them.
    """

    rows: int
    logit_rows: int
    attended: int
    context: int


def prefill(cached: int, new: int) -> Pass:
    """One request computes `new` tokens after `cached` ones and samples."""
    return Pass(new, 1, new * cached + new * (new + 1) // 2, cached + new)


def floor(passes: list[tuple[int, Pass]], config: PreTrainedConfig, limits: Limits) -> Floor:
    """The least that some passes, each `count` times, can take one after another."""
    seconds = {"GEMM": 0.0, "memory": 0.0}
    for count, one in passes:
        gemm = _flops(one, config) / limits.gemm / 1e9
        memory = _bytes(one, config) / limits.memory / 1e9
        seconds["GEMM" if gemm > memory else "memory"] += count * max(gemm, memory)
    return Floor(sum(seconds.values()), max(seconds, key=lambda name: seconds[name]))


def _flops(one: Pass, config: PreTrainedConfig) -> int:
    layers, _, heads, dim = _attention(config)
    products = one.rows * _layer_weights(config) * layers + one.logit_rows * _head_weights(config)
    return 2 * products + 4 * one.attended * layers * heads * dim


def _bytes(one: Pass, config: PreTrainedConfig) -> int:
    layers, kv_heads, _, dim = _attention(config)
    head = _head_weights(config) if one.logit_rows else 0
    weights = _layer_weights(config) * layers + head
    return _BF16 * (weights + 2 * one.context * layers * kv_heads * dim)


def _attention(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    heads = config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, heads, config.hidden_size // heads


def _layer_weights(config: PreTrainedConfig) -> int:
    _, kv_heads, heads, dim = _attention(config)
    width = int(config.hidden_size)
    return width * dim * (2 * heads + 2 * kv_heads) + 3 * width * int(config.intermediate_size)


def _head_weights(config: PreTrainedConfig) -> int:
    return int(config.vocab_size) * int(config.hidden_size)
