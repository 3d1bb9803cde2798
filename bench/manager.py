"""What the cache manager costs, in microseconds, with no model and no tensor.

    python bench/manager.py [--blocks 100000] [--repeats 30]

A request of 8,192 tokens, half of which is cached, meets a full pool of blocks of 16, so that
every new block evicts a cached one: naming, lookup, allocation, free. Then 256 requests decode
a token a step: `append` and `append_slots`. Medians over the repeats, one thread. What limits it
is the interpreter: a block costs an object made, one unlinked, and a handful of attribute stores.

The limits it is held against are a quarter and a tenth of what vLLM 0.33's manager takes on a
machine like the one this was written on: 1,214 us a request, 3.9 us a request and decode step;
2.3 s for a pool of a million blocks. Ends in one JSON line.
"""

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc

from rich.console import Console
from rich.table import Table

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence

TOKENS, BLOCK, RUNNING = 8192, 16, 256
LIMITS = {"request_us": 1214 / 4, "decode_us": 3.9 / 10, "pool_init_s": 2.3, "bytes_per_block": 400}
MICRO = 1e6


def random_tokens(rng: random.Random, count: int) -> list[int]:
    """Token ids of a large vocabulary."""
    return [rng.randrange(150_000) for _ in range(count)]


def run(manager: KVCacheManager, name: str, tokens: list[int]) -> TokenSequence:
    """Admit and compute a whole prompt in one step."""
    sequence = TokenSequence(name, tokens)
    found = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, len(tokens) - found.num_tokens, found) is not None
    manager.commit_step()
    return sequence


def fill(manager: KVCacheManager, rng: random.Random) -> None:
    """Cache something in every block."""
    for at in range(manager.config.num_blocks // (TOKENS // BLOCK) + 1):
        manager.free(run(manager, f"fill {at}", random_tokens(rng, TOKENS)))


def time_requests(manager: KVCacheManager, rng: random.Random, repeats: int) -> dict[str, float]:
    """Median microseconds of each part of a request's life."""
    parts: dict[str, list[float]] = {p: [] for p in ("naming", "lookup", "allocation", "free")}
    for at in range(repeats):
        head = random_tokens(rng, TOKENS // 2)
        manager.free(run(manager, "head", head))
        tokens = head + random_tokens(rng, TOKENS // 2)
        marks = [time.thread_time()]
        sequence = TokenSequence(f"request {at}", tokens)
        sequence.cut(BLOCK)
        marks.append(time.thread_time())
        found = manager.get_computed_blocks(sequence)
        marks.append(time.thread_time())
        manager.allocate_slots(sequence, TOKENS - found.num_tokens, found)
        manager.commit_step()
        marks.append(time.thread_time())
        manager.free(sequence)
        marks.append(time.thread_time())
        assert found.num_tokens == TOKENS // 2
        for part, start, end in zip(parts, marks, marks[1:], strict=False):
            parts[part].append((end - start) * MICRO)
    return {part: statistics.median(times) for part, times in parts.items()}


def time_decode(manager: KVCacheManager, rng: random.Random, repeats: int) -> float:
    """Median over runs of 16 steps, so that each request fills a block once in each run."""
    running = [
        run(manager, f"decode {i}", random_tokens(rng, 512 + i % BLOCK)) for i in range(RUNNING)
    ]
    token = iter(random_tokens(rng, RUNNING * BLOCK * repeats))
    times = []
    for _ in range(repeats):
        spent = 0.0
        for _ in range(BLOCK):
            tokens = [next(token) for _ in running]
            start = time.thread_time()
            for sequence, generated in zip(running, tokens, strict=True):
                sequence.append(generated)
                manager.append_slots(sequence)
            manager.commit_step()
            spent += time.thread_time() - start
        times.append(spent / BLOCK / RUNNING * MICRO)
    return statistics.median(times)


def measure_memory() -> tuple[float, float]:
    """Seconds to make a pool of a million blocks; bytes a cached block costs, all told."""
    start = time.thread_time()
    manager = KVCacheManager(CacheConfig(num_blocks=1_000_000))
    init = time.thread_time() - start
    del manager
    gc.collect()
    tracemalloc.start()
    blocks = 20_000
    manager = KVCacheManager(CacheConfig(num_blocks=blocks))
    rng = random.Random(0)
    for _ in range(3):
        fill(manager, rng)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] / blocks
    tracemalloc.stop()
    assert all(block.node is not None for block in manager.pool.blocks)
    return init, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    rng = random.Random(0)
    manager = KVCacheManager(CacheConfig(num_blocks=options.blocks))
    console = Console()
    with console.status(f"filling {options.blocks:,} blocks"):
        fill(manager, rng)
    parts = time_requests(manager, rng, options.repeats)
    decode = time_decode(manager, rng, options.repeats)
    manager.check()
    del manager
    init, used = measure_memory()
    figures = {
        "request_us": round(sum(parts.values()), 1),
        "decode_us": round(decode, 3),
        "pool_init_s": round(init, 3),
        "bytes_per_block": round(used),
    }
    table = Table("", "measured", "limit", "of limit")
    for part, value in parts.items():
        table.add_row(f"{part}, us", f"{value:.0f}")
    for name, figure in figures.items():
        table.add_row(name, f"{figure:g}", f"{LIMITS[name]:g}", f"{figure / LIMITS[name]:.2f}")
    console.print(table)
    print(json.dumps(figures | {f"{p}_us": round(v, 1) for p, v in parts.items()}))


if __name__ == "__main__":
    main()
