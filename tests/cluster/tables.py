"""Contents of a `ReplicaIndex`, read from its tables: the one place that knows their layout."""

from collections import ChainMap
from collections.abc import Callable

from headstart.cluster.events import POOL
from headstart.cluster.index import Holders, PrefixKey, ReplicaIndex


def holders(index: ReplicaIndex, tier: str = POOL) -> dict[PrefixKey, int]:
    """Return the replicas that hold each block in a tier, one bit for each."""
    return dict(ChainMap(*index._holders[tier]))


def expectations(index: ReplicaIndex) -> dict[PrefixKey, int]:
    """Return the replicas that are expected to hold each block."""
    return dict(ChainMap(*index._expected))


def wrap_pool(
    index: ReplicaIndex, wrap: Callable[[dict[PrefixKey, int]], dict[PrefixKey, int]]
) -> Holders:
    """Replace each dictionary of the pool; return those before."""
    before = index._holders[POOL]
    index._holders[POOL] = [wrap(part) for part in before]
    return before
