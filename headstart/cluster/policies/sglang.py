"""The `cache_aware` policy of SGLang's gateway, from its published description, to compare with.

If the loads are out of balance (the most active replica has more than the absolute bound above
the least active, and more than the relative bound times it), the least active one. Otherwise
the replica that matches best in an approximate tree, made of what was sent to each and not of
events, if it matches more than half of the prompt; else the one with the most room in its tree.
The bounds are those it was published with: 32 requests, 1.0001 times, half of the prompt.
"""

from collections import OrderedDict

from headstart.cluster.holders import PrefixKey
from headstart.cluster.index import ReplicaIndex
from headstart.cluster.load import Choice, ReplicaLoad, RouteRequest
from headstart.cluster.policies.base import RoutingPolicy

ABSOLUTE, RELATIVE, LEAST_MATCH = 32, 1.0001, 0.5
MAX_BLOCKS = 1 << 16
"""Blocks that the tree remembers of each replica; the least recently sent are forgotten."""


class CacheAware(RoutingPolicy):
    """SGLang's `cache_aware`."""

    needs_prefixes = False  # it keeps its own

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self._tree: ReplicaIndex | None = None
        self._sent: dict[int, OrderedDict[PrefixKey, None]] = {}

    def choose(self, choice: Choice) -> ReplicaLoad:
        """By load if that is out of balance, else by the tree."""
        if self._tree is None:
            self._tree = ReplicaIndex(len(choice.loads))
        least = min(choice.alive, key=lambda load: load.active)
        most = max(load.active for load in choice.alive)
        if most - least.active > ABSOLUTE and most > RELATIVE * least.active:
            return least
        request = choice.request
        held = self._tree.match(request.keys).expected
        best = max(choice.alive, key=lambda load: held[load.replica])
        if held[best.replica] * request.block_size > LEAST_MATCH * request.num_tokens:
            return best
        return min(choice.alive, key=lambda load: len(self._sent.get(load.replica, ())))

    def sent(self, request: RouteRequest, replica: int) -> None:
        """Its blocks are in the replica's tree now."""
        assert self._tree is not None
        known = self._sent.setdefault(replica, OrderedDict())
        self._tree.expect(replica, request.keys)
        for key in reversed(request.keys):  # the end of a prefix is forgotten first
            known[key] = None
            known.move_to_end(key)
        while len(known) > self.max_blocks:
            self._tree.unexpect(replica, [known.popitem(last=False)[0]])
        self._tree.sweep()  # no event ever comes to this index, which would do it

    def forget(self, replica: int) -> None:
        """Nothing was sent to the next replica of this number."""
        if self._tree is not None:
            self._tree.remove(replica)
            self._sent.pop(replica, None)
