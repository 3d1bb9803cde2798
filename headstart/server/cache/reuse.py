"""The pool size that would have kept evicted prefixes until they were used again.

A prefix stays in a pool that evicts the least recently used block first if the pool holds it and
every other block that is used until its next use. That number is its reuse distance in blocks. It
is counted over the answered prompts: those of one window, in byte order, share with each other
what neighbours have in common. The order is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.server.cache.traffic import Seen, count_common, sort_key

__all__ = ["PoolSize", "advise_memory"]

_MOST_WINDOWS = 256  # of more evicted prompts, evenly spaced samples
_SHARE = 0.9  # of the tokens computed again that the advised size saves
_Numbers = NDArray[np.int64]


class PoolSize(NamedTuple):
    """Blocks of the pool, their tokens, and the bytes of each."""

    num_blocks: int
    block_size: int
    bytes_per_block: int


class _History:
    """Prompts by rank in byte order, and the tokens that each shares with the one before it."""

    def __init__(self, prompts: Sequence[Seen], block_size: int) -> None:
        self._block_size = block_size
        keys = [(repr(seen.namespace), sort_key(seen.tokens)) for seen in prompts]
        order = sorted(range(len(prompts)), key=keys.__getitem__)
        ranked = [prompts[at] for at in order]
        self._common: _Numbers = np.zeros(len(ranked) + 1, np.int64)  # and the end
        for at in range(1, len(ranked)):
            left, right = ranked[at - 1], ranked[at]
            if left.namespace == right.namespace:
                self._common[at] = count_common(left.tokens, right.tokens)
        self._lengths = np.array([len(seen.tokens) for seen in ranked], np.int64)
        self._blocks = np.array([-(-seen.num_computed // block_size) for seen in ranked], np.int64)
        self._ended = np.array([seen.ended for seen in ranked])
        self._looked_up = np.array([seen.times.looked_up for seen in ranked])
        self._computed = np.array([seen.times.computed for seen in ranked])
        self._ranks = {id(seen): rank for rank, seen in enumerate(ranked)}

    def reuse_distance(self, seen: Seen, forgotten: float) -> int | None:
        """Return the blocks that had to stay for what the prompt shares with the closest one.

        None where nothing is known of its last use before, or of all since.
        """
        assert seen.closest is not None
        rank = self._ranks[id(seen)]
        before = self._looked_up < seen.times.looked_up
        uses = before & (self._share(rank) >= seen.closest.num_common)
        last = self._ended[uses & (self._computed <= seen.times.looked_up)].max(initial=-np.inf)
        if last <= forgotten:
            return None
        others = before & (self._ended > last)
        others[rank] = True  # stands for the prefix alone: its other blocks come after the lookup
        ranks = np.flatnonzero(others)
        size = self._block_size
        lengths, blocks = self._lengths[ranks], self._blocks[ranks]
        own = int(np.searchsorted(ranks, rank))
        lengths[own] = seen.closest.num_common
        blocks[own] = seen.closest.num_common // size
        # Between neighbours of a window: the least that any two on the way have in common.
        common = np.minimum.reduceat(self._common, ranks + 1)[:-1]
        common = np.minimum(common, np.minimum(lengths[:-1], lengths[1:]))
        shared = common // size
        goes_on = common == lengths[:-1]  # then the next prompt may have the earlier answer in it
        tails = np.minimum(blocks[:-1], blocks[1:]) - shared
        shared += np.where(goes_on, np.maximum(tails, 0), 0)
        return int(blocks.sum() - shared.sum())

    def _share(self, rank: int) -> _Numbers:
        """Tokens that each prompt shares with the one of this rank from the first on."""
        below = np.minimum.accumulate(self._common[rank:0:-1])[::-1]
        above = np.minimum.accumulate(self._common[rank + 1 : -1])
        return np.concatenate([below, self._lengths[rank : rank + 1], above])


def advise_memory(prompts: Sequence[Seen], forgotten: float, pool: PoolSize) -> dict[str, Any]:
    """Return how many more blocks would have saved most of the tokens that were evicted.

    prompts: of all tenants. forgotten: when the last prompt ended that is not among them. Values
    are None where no reuse distance is known: the earlier use is older than that, or the prompts
    account for fewer blocks than the pool has, as when requests that left no trace took the rest.
    """
    evicted = [seen for seen in prompts if seen.num_lost >= pool.block_size]
    samples = evicted[:: -(-len(evicted) // _MOST_WINDOWS) or 1]
    distances = []
    history = _History(prompts, pool.block_size) if samples else None
    for seen in samples:
        assert history is not None
        distance = history.reuse_distance(seen, forgotten)
        if distance is not None and distance > pool.num_blocks:
            distances.append((distance, seen.num_lost))
    more = saved = None
    if distances:
        distances.sort()
        sums = np.cumsum([lost for _, lost in distances])
        at = int(np.searchsorted(sums, _SHARE * sums[-1]))
        more = distances[at][0] - pool.num_blocks
        saved = int(sums[at]) * len(evicted) // len(samples)
    return {
        "evicted_prompts": len(evicted),
        "tokens_computed_again": sum(seen.num_lost for seen in evicted),
        "more_blocks": more,
        "more_bytes": more * pool.bytes_per_block if more is not None else None,
        "tokens_saved": saved,
    }
