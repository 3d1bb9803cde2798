"""Routers of other engines, to compare with on a trace.

    python bench/cluster/rivals.py TRACE [flags of `headstart replay`]

It is `headstart replay` with two more routers, `dynamo` and `sglang`, written from their published
descriptions with the weights published there. `--router all` compares all. What limits it: the
replay's cache managers, in one thread.
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
"""Blocks that the tree remembers of each replica; the least recently sent are forgotten."""


@dataclass(eq=False, slots=True)
class _Books:
    """Counts of one replica. active: blocks of unfinished requests. queued: blocks to prefill."""

    active: Counter[PrefixKey] = field(default_factory=Counter)
    queued: int = 0


@dataclass(slots=True)
class _Sent:
    """The counts that a request was added to, and its blocks to prefill."""

    books: _Books
    new: int


class Dynamo(RoutingPolicy):
    """The KV router of Dynamo: the replica with the least cost.

        cost = s * max(0, P - C) + D + a * R

    P: blocks to prefill there, the new request's included. C: credit for blocks it has,
    c / (1 + k * (its active blocks - the least) / blocks of the request) * blocks held. D: blocks
    decoding there with the new request, shared ones once. R: requests active there. The smallest
    cost wins (its softmax at temperature 0); among equals the first, where Dynamo draws one: on the
    traces of docs/replay.md that is better for it. Weights as it sets them: s = c = 1, k = a = 0.
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
        self._books: defaultdict[int, _Books] = defaultdict(_Books)  # by replica
        self._sent: dict[str, _Sent] = {}  # by request
        self._choice: dict[int, int] = {}  # blocks to prefill, as of the last choice

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return the replica with the least cost; the first among equals."""
        assert choice.match is not None
        request, held = choice.request, choice.match.cached
        blocks = -(-request.num_tokens // request.block_size)
        resident = {load.replica: len(self._books[load.replica].active) for load in choice.alive}
        least = min(resident.values())
        costs = {}
        for load in choice.alive:
            at = load.replica
            crowd = 1 + self.crowding * (resident[at] - least) / blocks
            to_prefill = self._books[at].queued + blocks - self.credit / crowd * held[at]
            decoding = resident[at] + self._not_resident(request, at, blocks)
            costs[at] = self.prefill * max(0.0, to_prefill) + decoding + self.active * load.active
        best = min(choice.alive, key=lambda load: costs[load.replica])
        self._choice[best.replica] = max(blocks - held[best.replica], 0)
        return best

    def _not_resident(self, request: RouteRequest, replica: int, blocks: int) -> int:
        """Return the blocks that the request would add to those of unfinished requests there.

        Blocks of a prefix are there up to some depth, which bisection finds.
        """
        resident = self._books[replica].active
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
        """Count its blocks as active there, and those not held as to be prefilled."""
        books, new = self._books[replica], self._choice.pop(replica, 0)
        books.active.update(request.keys)
        books.queued += new
        self._sent[request.request_id] = _Sent(books, new)

    def prompt_done(self, request: RouteRequest, replica: int) -> None:
        """Count none of its blocks as to be prefilled."""
        sent = self._sent[request.request_id]
        sent.books.queued -= sent.new
        sent.new = 0

    def done(self, request: RouteRequest, replica: int) -> None:
        """Count its blocks as no longer active."""
        self.prompt_done(request, replica)
        resident = self._sent.pop(request.request_id).books.active
        for key in request.keys:
            if resident[key] > 1:
                resident[key] -= 1
            else:
                del resident[key]

    def forget(self, replica: int) -> None:
        """Forget the counts of the replica that had this number."""
        self._books.pop(replica, None)
        self._choice.pop(replica, None)


class CacheAware(RoutingPolicy):
    """The `cache_aware` policy of SGLang's gateway.

    If the loads are out of balance (the most active replica has more than the absolute bound above
    the least active, and more than the relative bound times it), the least active one. Otherwise
    the replica that matches best in an approximate tree, made of what was sent to each and not of
    events, if it matches more than half of the prompt; else the one with the most room in its tree.
    The bounds are those it was published with: 32 requests, 1.0001 times, half of the prompt.
    """

    needs_prefixes = False  # it keeps its own

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
        """Add its blocks to the replica's tree."""
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
