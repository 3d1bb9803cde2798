"""Dynamo's KV router, from its published description, to compare with.

    cost = s * max(0, P - C) + D + a * R

P: blocks to prefill there, the new request's included. C: credit for blocks it has,
c / (1 + k * (its active blocks - the least) / blocks of the request) * blocks held. D: blocks
decoding there with the new request, shared ones once. R: requests active there. The smallest
cost wins (its softmax at temperature 0); among equals the first, where Dynamo draws one: on the
traces of docs/replay.md that is better for it. Weights as it sets them: s = c = 1, k = a = 0.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from headstart.cluster.holders import PrefixKey
from headstart.cluster.load import Choice, ReplicaLoad, RouteRequest
from headstart.cluster.policies.base import RoutingPolicy


@dataclass(eq=False, slots=True)
class _Books:
    """Of one replica. active: blocks of unfinished requests. queued: those to be prefilled."""

    active: Counter[PrefixKey] = field(default_factory=Counter)
    queued: int = 0


@dataclass(slots=True)
class _Sent:
    """Where a request is noted, whoever has the replica's number by now, and its new blocks."""

    books: _Books
    new: int


class Dynamo(RoutingPolicy):
    """The least of Dynamo's cost."""

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
        """The least cost; the first among equals."""
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
        """Blocks that the request would add to those of unfinished requests there.

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
        """Its blocks are active there, and those not held are to be prefilled."""
        books, new = self._books[replica], self._choice.pop(replica, 0)
        books.active.update(request.keys)
        books.queued += new
        self._sent[request.request_id] = _Sent(books, new)

    def prompt_done(self, request: RouteRequest, replica: int) -> None:
        """Nothing of it is to be prefilled any more."""
        sent = self._sent[request.request_id]
        sent.books.queued -= sent.new
        sent.new = 0

    def done(self, request: RouteRequest, replica: int) -> None:
        """Its blocks are active no more."""
        self.prompt_done(request, replica)
        resident = self._sent.pop(request.request_id).books.active
        for key in request.keys:
            if resident[key] > 1:
                resident[key] -= 1
            else:
                del resident[key]

    def forget(self, replica: int) -> None:
        """Nothing is active where the next replica of this number runs."""
        self._books.pop(replica, None)
        self._choice.pop(replica, None)
