"""The bound of any router: one engine that sees every request, and computes in no time."""

from collections.abc import Callable
from dataclasses import dataclass

from headstart.cache import KVCacheManager, TokenSequence
from headstart.cache.identity import BlockKey
from headstart.errors import ConfigError
from headstart.replay.simulator import Fleet
from headstart.replay.trace import Trace, private_units


@dataclass(frozen=True, slots=True)
class Optimum:
    """Token hit rates of one engine: with the memory of all replicas, and without limit."""

    same_memory: float
    unlimited: float


def best_hit_rate(
    trace: Trace, fleet: Fleet, progress: Callable[[int, int], None] | None = None
) -> Optimum:
    """Return both hit rates. Raises ConfigError for a request that exceeds the memory."""
    return Optimum(
        _with_memory(trace, fleet, progress or (lambda done, total: None)), _unlimited(trace, fleet)
    )


def _with_memory(trace: Trace, fleet: Fleet, progress: Callable[[int, int], None]) -> float:
    """Look up each prompt in a real manager, compute it with its reply, and free it."""
    manager = KVCacheManager(fleet.cache_config(trace.grain, fleet.replicas))
    fresh, hit, grain = private_units(), 0, trace.grain
    for number, request in enumerate(trace.requests):
        units = request.units()
        if request.num_tokens % grain:
            units.append(next(fresh))
        sequence = TokenSequence(str(number), units)
        found = manager.get_computed_blocks(sequence)
        reply = -(-(request.num_tokens + request.num_output) // grain) - len(units)
        if manager.allocate_slots(sequence, len(units) - found.num_tokens, found) is None:
            raise ConfigError(f"request {number} does not fit in the KV memory of all replicas")
        for _ in range(reply):
            sequence.append(next(fresh))
        if reply and not manager.append_slots(sequence, reply):
            raise ConfigError(f"request {number} does not fit in the KV memory of all replicas")
        manager.commit_step()
        manager.free(sequence)
        hit += min(found.num_tokens * grain, request.num_tokens)
        progress(number + 1, len(trace.requests))
    return hit / trace.num_tokens


def _unlimited(trace: Trace, fleet: Fleet) -> float:
    """Look up each prompt in a trie of blocks without evictions; hits end at block borders."""
    size = fleet.cache_config(trace.grain).block_size
    nodes: dict[tuple[int, BlockKey], int] = {}
    hit = 0
    for number, request in enumerate(trace.requests):
        units = request.units()
        last = (request.num_tokens - 1) // trace.grain  # one token at least is computed
        node, depth, is_hit = 0, 0, True
        for depth, key in enumerate(TokenSequence(str(number), units or [0]).cut(size)):
            before = nodes.get((node, key))
            is_hit = is_hit and before is not None
            hit += size * trace.grain if is_hit and (depth + 1) * size <= last else 0
            node = nodes.setdefault((node, key), len(nodes) + 1)
    return hit / trace.num_tokens
