"""The speed limits of this machine, and the least time of a load (roofline).

A pass of the model multiplies its rows by every weight, and reads every weight and every K and V
once. The longer of the two times is the floor of the pass (Williams, Waterman, Patterson 2009).
Rows without logits need only K and V in the last layer. For a greedy token, 8 bits of most weights
of the LM head are enough.

As a program it measures and prints the limits: see `measure_limits`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

from headstart.machine import multiplies_bfloat16

Clock = Callable[[], float]

_BF16 = 2  # bytes
_HEAD = 1
_REPEATS = 7


class Limits(NamedTuple):
    """GEMM in GFLOP/s, in the dtype of "auto" on this machine, and memory reads in GB/s."""

    gemm: float
    memory: float


class Floor(NamedTuple):
    """The least possible seconds of some work, and the resource that limits it."""

    seconds: float
    limit: str


def measure_limits(threads: int, clock: Clock = time.perf_counter) -> Limits:
    """Measure the fastest of several products of square matrices, and of sums over 256 MB.

    Runs in a separate process that binds each thread to a core; otherwise two of torch's threads
    may share a core for seconds.
    """
    command = [sys.executable, __file__, str(threads), clock.__name__]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return Limits(*json.loads(done.stdout))


def _measure_here(clock: Clock) -> Limits:
    dtype = torch.float32 if multiplies_bfloat16() is False else torch.bfloat16
    square = [torch.ones(size, size, dtype=dtype) for size in (1024, 2048)]
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
    """One pass of a model: it computes `rows` tokens, and logits for `logit_rows` of them.

    attended: pairs of a row and a token that it attends to. context: tokens whose K and V are read;
    a token that several rows share counts once.
    """

    rows: int
    logit_rows: int
    attended: int
    context: int


def prefill(cached: int, new: int) -> Pass:
    """Return the pass of one request that computes `new` tokens after `cached` tokens."""
    return Pass(new, 1, new * cached + new * (new + 1) // 2, cached + new)


def floor(passes: list[tuple[int, Pass]], config: PreTrainedConfig, limits: Limits) -> Floor:
    """Return the floor of passes in sequence, each repeated `count` times."""
    seconds = {"GEMM": 0.0, "memory": 0.0}
    for count, one in passes:
        gemm = _flops(one, config) / limits.gemm / 1e9
        memory = _bytes(one, config) / limits.memory / 1e9
        seconds["GEMM" if gemm > memory else "memory"] += count * max(gemm, memory)
    return Floor(sum(seconds.values()), max(seconds, key=lambda name: seconds[name]))


def _flops(one: Pass, config: PreTrainedConfig) -> float:
    layers, kv_heads, heads, dim = _attention(config)
    whole, keys = _layer_weights(config), 2 * int(config.hidden_size) * kv_heads * dim
    products = one.rows * (whole * (layers - 1) + keys)
    products += one.logit_rows * (whole - keys + _head_weights(config))
    attended = one.attended * (layers - 1 + one.logit_rows / one.rows)
    return 2 * products + 4 * attended * heads * dim


def _bytes(one: Pass, config: PreTrainedConfig) -> int:
    layers, kv_heads, _, dim = _attention(config)
    head = _HEAD * _head_weights(config) if one.logit_rows else 0
    return (
        _BF16 * (_layer_weights(config) * layers + 2 * one.context * layers * kv_heads * dim) + head
    )


def _attention(config: PreTrainedConfig) -> tuple[int, int, int, int]:
    heads = config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, heads, config.hidden_size // heads


def _layer_weights(config: PreTrainedConfig) -> int:
    _, kv_heads, heads, dim = _attention(config)
    width = int(config.hidden_size)
    return width * dim * (2 * heads + 2 * kv_heads) + 3 * width * int(config.intermediate_size)


def _head_weights(config: PreTrainedConfig) -> int:
    return int(config.vocab_size) * int(config.hidden_size)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps(_measure_here(getattr(time, sys.argv[2]))))
