"""Time of attention alone: compiled, compiled over K/V in 8 bits, and in torch operations.

    python bench/kernels/attention.py [--threads 1] [--only decode]

The shape is Qwen2.5-0.5B's: 24 layers, 14 query heads, 2 KV heads of 64, in float32, blocks of 16.
All variants are interleaved, so that other load on the machine affects them alike. With one thread,
CPU time of the process is measured. Prints a table with the ratios to compiled attention in
float32, and one JSON line.
"""

import argparse
import json
import statistics
import time

import headstart  # noqa: F401 - before torch, whose threads read how long to spin when loaded

# isort: split
import torch

from headstart.attention import (
    AttentionBackend,
    AttentionOptions,
    LayerLayout,
    PagedKVMemory,
    Span,
    StepPlan,
    TorchAttention,
    make_backend,
)

LAYERS, HEADS, LAYOUT, BLOCK = 24, 14, LayerLayout(2, 64, 64), 16
NUM_BLOCKS = 2100
OPTIONS = AttentionOptions(scaling=LAYOUT.key_dim**-0.5)
ROUNDS = 7


def alone(requests: int, context: int, rows: int = 1) -> tuple[Span, ...]:
    """Return requests without shared blocks, each with its last `rows` tokens in the step."""
    blocks = -(-context // BLOCK)
    return tuple(
        Span(at * rows, rows, context, range(at * blocks, (at + 1) * blocks))
        for at in range(requests)
    )


def sharing(requests: int, context: int) -> tuple[Span, ...]:
    """Return decoding requests that share `context` tokens and have 20 own tokens."""
    shared = context // BLOCK
    return tuple(
        Span(at, 1, context + 20, [*range(shared), shared + 2 * at, shared + 2 * at + 1])
        for at in range(requests)
    )


CASES = {
    "decode 1 behind 3,000": alone(1, 3000),
    "decode 8 behind 400": alone(8, 400),
    "decode 16 behind 2,000": alone(16, 2000),
    "decode 16 behind 2,000 shared": sharing(16, 2000),
    "prefill 40 behind 3,000": alone(1, 3040, 40),
    "prefill 256": alone(1, 256, 256),
    "prefill 8 of 256": alone(8, 256, 256),
    "prefill 2,048": alone(1, 2048, 2048),
    "prefill 992 behind 2,048": alone(1, 3040, 992),
}


def make_memory(dtype: torch.dtype) -> PagedKVMemory:
    """Return a KV memory filled with random numbers."""
    memory = PagedKVMemory([LAYOUT] * LAYERS, NUM_BLOCKS, BLOCK, dtype, "cpu")
    slots = torch.arange(memory.scratch_slot)
    for layer in range(LAYERS):
        memory.write(layer, slots, *torch.randn(2, len(slots), LAYOUT.kv_heads, LAYOUT.key_dim))
    return memory


def milliseconds(backend: AttentionBackend, spans: tuple[Span, ...]) -> float:
    """Return the time of a step of all layers."""
    slots = [
        span.block_ids[position // BLOCK] * BLOCK + position % BLOCK
        for span in spans
        for position in range(span.context - span.num_rows, span.context)
    ]
    query = torch.randn(len(slots), HEADS, LAYOUT.key_dim)
    key, value = torch.randn(2, len(slots), LAYOUT.kv_heads, LAYOUT.key_dim)
    plan = StepPlan(torch.tensor(slots), spans)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    backend.begin_step(plan)
    for layer in range(LAYERS):
        backend.attend(layer, query, key, value, OPTIONS)
    backend.end_step()
    return 1e3 * (clock() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    memory, narrow = make_memory(torch.float32), make_memory(torch.int8)
    backends = {
        "compiled": make_backend(memory),
        "int8": make_backend(narrow),
        "torch": TorchAttention(memory),
        "torch int8": TorchAttention(narrow),
    }
    found = {}
    for name, spans in CASES.items():
        if given.only not in name:
            continue
        runs: dict[str, list[float]] = {kind: [] for kind in backends}
        for turn in range(ROUNDS + 1):
            for kind, backend in backends.items():
                taken = milliseconds(backend, spans)
                if turn:  # the first one warms up
                    runs[kind].append(taken)
        found[name] = {kind: statistics.median(times) for kind, times in runs.items()}
        values = "   ".join(
            f"{kind} {taken:8.1f} ({taken / found[name]['compiled']:.2f})"
            for kind, taken in found[name].items()
        )
        print(f"{name:32} {values}", flush=True)
    print(json.dumps({"threads": given.threads, "ms": found}))


if __name__ == "__main__":
    main()
