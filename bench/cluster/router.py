"""Time that the router adds to a request, and the cost of its prefix index, without engines.

    python bench/cluster/router.py [--replicas 64] [--requests 2000] [--blocks 20000]
                                   [--store none|each|shared]

Each replica holds `--blocks` blocks of 16 tokens, of which a third is shared by many replicas.
Requests of 8,192 tokens arrive at random, 100 per second. Each replica sends a batch of events
every 50 ms; together they send 10,000 events per second. With a store (one per replica, or one that
all share) a replica holds as many blocks again in the store, and half of the events are about it.
One thread handles requests and events in the order of their arrival. The work is done and timed;
arrival times are simulated. A request's latency is its own time (hashes, lookup, policy, counts)
and the time of unfinished work before it. Making prompts and events is not counted, except the
garbage collections that it causes. busy_ms is the whole time of a request in the thread, including
the records that are made after it was sent. Limiting resource: SHA-256 over the blocks of a prompt
that are not cached. Ends in one JSON line.
"""

import argparse
import gc
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from headstart.cache import BlockHash, BlockHasher, TokenSequence
from headstart.cluster import EventBatch, ReplicaIndex, Router, make_policy
from headstart.cluster.events import DISK, POOL
from headstart.cluster.index import PromptKeys, prefix_keys
from headstart.cluster.router import RouteRequest

TOKENS, BLOCK = 8192, 16
REQUESTS_A_SECOND, EVENTS_A_SECOND, BATCH_SECONDS = 100.0, 10_000, 0.05
LIMITS = {"match_us": 100.0, "match_full_us": 100.0, "added_ms": 1.0, "bytes": 100.0}
NAMES = BlockHasher(BLOCK, "bench")
Figures = dict[str, float]


class _Arrival(NamedTuple):
    time: float
    replica: int  # -1 for a request


def shared_prompts(rng: random.Random) -> list[list[int]]:
    """Return the system prompts and documents with which requests begin."""
    return [[rng.randrange(150_000) for _ in range(TOKENS // 2)] for _ in range(50)]


def names_of(tokens: list[int]) -> list[BlockHash]:
    """Return the hashes of a prompt's full blocks."""
    sequence = TokenSequence("one", tokens)
    return NAMES.of_keys(sequence.root, sequence.cut(BLOCK))


def fill(router: Router, tiers: Sequence[str], blocks: int, rng: random.Random) -> list[list[int]]:
    """Fill the index with the blocks of every replica; return the prefixes of requests."""
    prompts = shared_prompts(rng)
    named = [b"".join(names_of(prompt)) for prompt in prompts]
    for replica in range(len(router.loads)):
        for tier in tiers:
            held = b"".join(rng.sample(named, len(named) // 2))
            held += rng.randbytes(max(32 * blocks - len(held), 0))
            router.index.apply(EventBatch(replica, 0, 0, stored=held, tier=tier))
    return prompts


def arrivals(replicas: int, requests: int, rng: random.Random) -> list[_Arrival]:
    """Return requests and batches in the order of their arrival."""
    found, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(REQUESTS_A_SECOND)
        found.append(_Arrival(now, -1))
    for replica in range(replicas):
        at = rng.uniform(0, BATCH_SECONDS)
        while at < now:
            found.append(_Arrival(at, replica))
            at += BATCH_SECONDS
    return sorted(found)


class Feed:
    """Events of a full cache in one tier of a replica: as many blocks stored as evicted."""

    def __init__(self, replica: int, tier: str, size: int, rng: random.Random) -> None:
        self.replica, self.tier, self.size, self.rng = replica, tier, size, rng
        self.number = 0
        self.before = b""

    def batch(self) -> EventBatch:
        """Return the next batch."""
        self.number += 1
        removed, self.before = self.before, self.rng.randbytes(32 * self.size)
        return EventBatch(self.replica, 0, self.number, self.before, removed, tier=self.tier)


def time_stalls(replicas: int, blocks: int, rng: random.Random) -> Figures:
    """Return the longest time that one change of the index makes requests wait.

    The changes are batches of 128 events, until half of the blocks are replaced, and the removal
    of a replica.
    """
    index = ReplicaIndex(replicas)
    feeds = [Feed(replica, POOL, 64, rng) for replica in range(replicas)]
    for feed in feeds:
        index.apply(EventBatch(feed.replica, 0, 0, stored=rng.randbytes(32 * blocks)))
    longest = 0.0
    for _ in range(max(blocks // 128, 1)):
        for feed in feeds:
            batch = feed.batch()
            start = time.thread_time()
            index.apply(batch)
            longest = max(longest, time.thread_time() - start)
    start = time.thread_time()
    index.remove(0)
    return {"longest_batch_ms": 1e3 * longest, "remove_ms": 1e3 * (time.thread_time() - start)}


def serve(
    router: Router,
    tiers: Sequence[str],
    prompts: list[list[int]],
    requests: int,
    rng: random.Random,
) -> Figures:
    """Handle all arrivals in one thread; return figures in CPU time of that thread."""
    replicas = len(router.loads)
    size = max(round(EVENTS_A_SECOND * BATCH_SECONDS / replicas / 2 / len(tiers)), 1)
    feeds = [[Feed(replica, tier, size, rng) for tier in tiers] for replica in range(replicas)]
    free_at, running = 0.0, list[str]()
    added, own, applying = list[float](), list[float](), list[float]()
    busy = list[float]()
    for number, arrival in enumerate(arrivals(replicas, requests, rng)):
        if arrival.replica >= 0:
            batches = [feed.batch() for feed in feeds[arrival.replica]]
            start = time.thread_time()
            for batch in batches:
                assert router.index.apply(batch)
            spent = time.thread_time() - start
            applying.append(spent / (2 * size * len(tiers)))
        else:
            tokens = rng.choice(prompts) + [rng.randrange(150_000) for _ in range(TOKENS // 2)]
            start = time.thread_time()
            keys = PromptKeys(NAMES, TokenSequence("one", tokens))
            router.route(RouteRequest(str(number), keys, TOKENS, BLOCK), arrival.time)
            spent = time.thread_time() - start
            own.append(spent)
            added.append(max(free_at - arrival.time, 0.0) + spent)
            router.catch_up()
            spent = time.thread_time() - start
            busy.append(spent)
            running.append(str(number))
            if len(running) > 2 * replicas:
                router.first_token(running[-replicas], arrival.time)
                router.finish(running.pop(0))
        free_at = max(free_at, arrival.time) + spent
    return {
        "added_ms": 1e3 * percentile(added, 99),
        "added_p50_ms": 1e3 * percentile(added, 50),
        "route_ms": 1e3 * statistics.median(own),
        "busy_ms": 1e3 * statistics.median(busy),
        "event_us": 1e6 * statistics.mean(applying),
    }


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile."""
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def time_match(router: Router, prompts: list[list[int]], rng: random.Random) -> float:
    """Return the median microseconds to look up a prompt of 8,192 tokens, half of it cached."""
    times = []
    for _ in range(200):
        tail = [rng.randrange(150_000) for _ in range(TOKENS // 2)]
        keys = prefix_keys(names_of(rng.choice(prompts) + tail))
        start = time.thread_time()
        router.index.match(keys)
        times.append(time.thread_time() - start)
    return 1e6 * statistics.median(times)


def time_full_match(index: ReplicaIndex, tiers: Sequence[str], rng: random.Random) -> float:
    """Time the lookup of a prompt that every replica holds, each to another depth."""
    names = names_of([rng.randrange(150_000) for _ in range(TOKENS)])
    for replica in range(index.num_replicas):
        for at, tier in enumerate(tiers):
            depth = len(names) - (replica + 17 * at) % 64
            index.apply(EventBatch(replica, 0, 0, stored=b"".join(names[:depth]), tier=tier))
    keys, times = prefix_keys(names), []
    for _ in range(200):
        start = time.thread_time()
        index.match(keys)
        times.append(time.thread_time() - start)
    return 1e6 * statistics.median(times)


def measure_memory(replicas: int, tiers: Sequence[str]) -> float:
    """Return bytes per block of one replica in the worst case, after the dictionary has grown.

    A block in the pool and in a store counts twice.
    """
    blocks = 2**18 * 2 // 3 + 10
    held = {tier: random.Random(0).randbytes(32 * blocks) for tier in tiers}
    gc.collect()
    tracemalloc.start()
    index = ReplicaIndex(replicas)
    for tier, names in held.items():
        index.apply(EventBatch(0, 0, 0, stored=names, tier=tier))
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / (blocks * len(tiers))


def measure(options: argparse.Namespace) -> Figures:
    """Return all figures."""
    rng = random.Random(0)
    tiers = (POOL,) if options.store == "none" else (POOL, DISK)
    shares = options.store == "shared"
    router = Router(options.replicas, make_policy("expected"), shares_store=shares)
    prompts = fill(router, tiers, options.blocks, rng)
    index = ReplicaIndex(options.replicas, shares_store=shares)
    figures = {
        "match_us": time_match(router, prompts, rng),
        "match_full_us": time_full_match(index, tiers, rng),
    }
    figures |= serve(router, tiers, prompts, options.requests, rng)
    figures |= time_stalls(options.replicas, options.blocks, rng)
    return figures | {"bytes": measure_memory(options.replicas, tiers)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=20_000, help="blocks that each replica holds")
    parser.add_argument("--store", choices=["none", "each", "shared"], default="none")
    options = parser.parse_args()
    figures = measure(options)
    table = Table("", "measured", "limit", "share of it")
    for name, figure in figures.items():
        limit = LIMITS.get(name)
        share = f"{figure / limit:.2f}" if limit else ""
        table.add_row(name, f"{figure:.3g}", f"{limit:g}" if limit else "", share)
    Console().print(table)
    print(json.dumps({name: round(figure, 3) for name, figure in figures.items()}))


if __name__ == "__main__":
    main()
