"""Routers of other engines, to compare with on a trace.

    python bench/cluster/rivals.py TRACE [flags of `headstart replay`]

This is `headstart replay` with two more routers, `dynamo` and `sglang`, written from their
published descriptions, with the weights given there. `--router all` compares all routers. Limiting
resource: one thread, in which the replay's cache managers run.
"""

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module

from headstart.cluster.index import PrefixKey, ReplicaIndex
from headstart.cluster.router import POLICIES, Choice, ReplicaLoad, RouteRequest, RoutingPolicy

ABSOLUTE, RELATIVE, LEAST_MATCH = 32, 1.0001, 0.5
MAX_BLOCKS = 1 << 16
"""Maximum blocks per replica in the tree; the least recently sent are forgotten first."""


@dataclass(eq=False, slots=True)
class _Counts:
    """Counts of one replica. active: blocks of unfinished requests. queued: blocks to prefill."""

    active: Counter[PrefixKey] = field(default_factory=Counter)
    queued: int = 0


@dataclass(slots=True)
class _Sent:
    """The counts that a request was added to, and its blocks to prefill."""

    counts: _Counts
    new: int


class Dynamo(RoutingPolicy):
    """The KV router of Dynamo: the replica with the least cost.

        cost = s * max(0, P - C) + D + a * R

    P: blocks to prefill on the replica, including the new request. C: credit for blocks it has,
    c / (1 + k * (its active blocks - the least) / blocks of the request) * blocks held. D: blocks
    that decode there with the new request; shared blocks count once. R: active requests. The least
    cost is chosen (softmax at temperature 0). Among equal costs this router takes the first replica
    and Dynamo a random one; on the traces of docs/replay.md the first is better. The weights are
    Dynamo's defaults: s = c = 1, k = a = 0.
    """

    def __init__(
        self,
        prefill: float = 1.0,
        credit: float = 1.0,
        crowding: float = 0.0,
        active: float = 0.0,
    ) -> None:
        self.prefill = prefill
        self.credit = credit
        self.crowding = crowding
        self.active = active
        self._counts: defaultdict[int, _Counts] = defaultdict(_Counts)  # by replica
        self._sent: dict[str, _Sent] = {}  # by request
        self._choice: dict[int, int] = {}  # blocks to prefill by replica, at the last choice

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return the replica with the least cost; the first among equals."""
        assert choice.match is not None
        request, held = choice.request, choice.match.cached
        blocks = -(-request.num_tokens // request.block_size)
        resident = {load.replica: len(self._counts[load.replica].active) for load in choice.alive}
        least = min(resident.values())
        costs = {}
        for load in choice.alive:
            at = load.replica
            crowd = 1 + self.crowding * (resident[at] - least) / blocks
            to_prefill = self._counts[at].queued + blocks - self.credit / crowd * held[at]
            decoding = resident[at] + self._not_resident(request, at, blocks)
            costs[at] = self.prefill * max(0.0, to_prefill) + decoding + self.active * load.active
        best = min(choice.alive, key=lambda load: costs[load.replica])
        self._choice[best.replica] = max(blocks - held[best.replica], 0)
        return best

    def _not_resident(self, request: RouteRequest, replica: int, blocks: int) -> int:
        """Return how many blocks the request would add to the replica's active blocks.

        A bisection finds the depth up to which a prefix is active there.
        """
        resident = self._counts[replica].active
        if not resident:
            return blocks
        low, high = 0, len(request.keys)
        while low < high:
            middle = (low + high) // 2
            if request.keys[middle] in resident:
                low = middle + 1
            else:
                high = middle
        return blocks - low

    def sent(self, request: RouteRequest, replica: int) -> None:
        """Count the request's blocks as active, and its missing blocks as to be prefilled."""
        counts, new = self._counts[replica], self._choice.pop(replica, 0)
        counts.active.update(request.keys)
        counts.queued += new
        self._sent[request.request_id] = _Sent(counts, new)

    def prompt_done(self, request: RouteRequest, replica: int) -> None:
        """Stop counting the request's blocks as to be prefilled."""
        sent = self._sent[request.request_id]
        sent.counts.queued -= sent.new
        sent.new = 0

    def done(self, request: RouteRequest, replica: int) -> None:
        """Stop counting the request's blocks as active."""
        self.prompt_done(request, replica)
        resident = self._sent.pop(request.request_id).counts.active
        for key in request.keys:
            if resident[key] > 1:
                resident[key] -= 1
            else:
                del resident[key]

    def forget(self, replica: int) -> None:
        """Forget the counts of the replica that had this number."""
        self._counts.pop(replica, None)
        self._choice.pop(replica, None)


class CacheAware(RoutingPolicy):
    """The `cache_aware` policy of SGLang's gateway.

    If the loads are out of balance, choose the least active replica. Loads are out of balance if
    the largest exceeds the least by more than 32 requests and by more than a factor of 1.0001.
    Otherwise choose the replica with the longest match in an approximate tree, if it matches more
    than half of the prompt; else the replica with the most space in its tree. The tree contains
    what was sent to each replica; it uses no events. The limits are the published ones.
    """

    needs_prefixes = False  # it maintains its own tree

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self._tree: ReplicaIndex | None = None
        self._sent: dict[int, OrderedDict[PrefixKey, None]] = {}

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Choose by load if that is out of balance, else by the tree."""
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
        """Add the request's blocks to the replica's tree."""
        assert self._tree is not None
        known = self._sent.setdefault(replica, OrderedDict())
        self._tree.expect(replica, request.keys)
        for key in reversed(request.keys):  # the end of a prefix is forgotten first
            known[key] = None
            known.move_to_end(key)
        while len(known) > self.max_blocks:
            self._tree.unexpect(replica, [known.popitem(last=False)[0]])
        self._tree.sweep()  # this index gets no events, which would sweep it

    def forget(self, replica: int) -> None:
        """Forget what was sent to the replica that had this number."""
        if self._tree is not None:
            self._tree.remove(replica)
            self._sent.pop(replica, None)


RIVALS: dict[str, Callable[[], RoutingPolicy]] = {"dynamo": Dynamo, "sglang": CacheAware}


def main() -> None:
    POLICIES.update(RIVALS)
    command = import_module("headstart.cli.main")  # reads the names of the policies
    command.main(["replay", *sys.argv[1:]], prog_name="headstart")


if __name__ == "__main__":
    main()
