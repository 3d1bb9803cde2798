"""What the cache manager costs, in microseconds, with no model and no tensor.

    python bench/manager.py [--blocks 100000] [--repeats 30] [--beside build/peers/vllm --rounds 5]

A request of 8,192 tokens, half of which is cached, meets a full pool of blocks of 16, so that
every new block evicts a cached one: naming, lookup, allocation, free. Then 256 requests decode
a token a step: `append` and `append_slots`. Medians over the repeats, one thread. What limits it
is the interpreter: a block costs an object made, one unlinked, and a handful of attribute stores.

`--beside` names a virtual environment that has vLLM (`peers.py` says how to make one). Its own
manager then meets the same load in turns with this one, each in a process of its own, and the
limits are its figures of the same run: a fifth a request, a tenth a decode step. Ends in one
JSON line.
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headstart.cache import CacheConfig, KVCacheManager, TokenSequence

TOKENS, BLOCK, RUNNING = 8192, 16, 256
LIMITS = {"request_us": 1 / 5, "decode_us": 1 / 10, "pool_init_s": 1.0}  # of vLLM's in one run
MAX_BYTES = 302  # a cached block
MICRO = 1e6
Figures = dict[str, float]


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


def measure(blocks: int, repeats: int) -> Figures:
    """All figures of this manager."""
    rng = random.Random(0)
    manager = KVCacheManager(CacheConfig(num_blocks=blocks))
    fill(manager, rng)
    parts = time_requests(manager, rng, repeats)
    decode = time_decode(manager, rng, repeats)
    manager.check()
    del manager
    init, used = measure_memory()
    return {f"{part}_us": round(value, 1) for part, value in parts.items()} | {
        "request_us": round(sum(parts.values()), 1),
        "decode_us": round(decode, 3),
        "pool_init_s": round(init, 3),
        "bytes_per_block": round(used),
    }


def ask(python: str, script: str, options: argparse.Namespace) -> Figures:
    """The figures that a script prints as its last line, in a process of its own."""
    path = str(Path(__file__).with_name(script))
    command = [python, path, "--blocks", str(options.blocks), "--repeats", str(options.repeats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure_in_turns(options: argparse.Namespace) -> tuple[Figures, Figures]:
    """Medians over rounds: this manager's figures, and the figures of vLLM's as a share of them.

    A share is the median of the rounds' shares, so that what slows a round slows both.
    """
    ours: list[Figures] = []
    theirs: list[Figures] = []
    peer = str(options.beside / "bin" / "python")
    with Progress(console=Console(stderr=True)) as progress:
        for _ in progress.track(range(options.rounds), description="in turns"):
            ours.append(ask(sys.executable, "manager.py", options))
            theirs.append(ask(peer, "manager_vllm.py", options))
    pairs = list(zip(ours, theirs, strict=True))
    return (
        {name: statistics.median(one[name] for one in ours) for name in ours[0]},
        {name: statistics.median(a[name] / b[name] for a, b in pairs) for name in ours[0]},
    )


def show(figures: Figures, shares: Figures) -> None:
    """The table a person reads."""
    table = Table("", "measured", "of vLLM's", "limit")
    for name, figure in figures.items():
        share = f"{shares[name]:.3f}" if name in shares else ""
        limit = f"{LIMITS[name]:g} of vLLM's" if name in LIMITS else ""
        if name == "bytes_per_block":
            limit = f"{MAX_BYTES}"
        table.add_row(name, f"{figure:g}", share, limit)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--beside", type=Path, help="a virtual environment that has vLLM")
    parser.add_argument("--rounds", type=int, default=5, help="with --beside")
    options = parser.parse_args()
    shares: Figures = {}
    if options.beside is None:
        with Console(stderr=True).status(f"a full pool of {options.blocks:,} blocks"):
            figures = measure(options.blocks, options.repeats)
    else:
        figures, shares = measure_in_turns(options)
    show(figures, shares)
    print(json.dumps(figures | {f"{name}_of_vllm": round(v, 3) for name, v in shares.items()}))


if __name__ == "__main__":
    main()
