"""The router: sends each request to one of many replicas, and keeps the books for that.

    route         choose a replica; its blocks are expected there for the next request
    catch_up      note these blocks, once the request is on its way
    first_token   the prompt is computed: the replica's rate is measured
    finish        the reply is whole, or the request is given up
    index.apply   what the replicas' caches hold, as they say in events

A request need not wait for its own blocks to be noted: they are before anything else happens here,
if nobody asks for it earlier. One thread calls all of this. Times come from the caller, so that a
simulator may have its own clock.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headstart.cluster.holders import PrefixKey
from headstart.cluster.index import ReplicaIndex
from headstart.cluster.load import Choice, MeasuredRate, ReplicaLoad, RouteRequest
from headstart.cluster.policies import RoutingPolicy
from headstart.errors import RequestError

FIRST_RATE = 15_000.0
"""Tokens of prompts a second that replicas are thought to compute before any was measured."""


@dataclass(slots=True)
class _Sent:
    request: RouteRequest
    load: ReplicaLoad
    num_tokens: int
    held: int | None  # blocks that are there or expected; None if prefixes are not looked at
    expected: Sequence[PrefixKey] = ()

    @property
    def replica(self) -> int:
        return self.load.replica


class Router:
    """Routes requests over replicas 0 to `num_replicas` - 1.

    shares_store: as of the index. Raises ConfigError for fewer than one replica.
    """

    def __init__(
        self,
        num_replicas: int,
        policy: RoutingPolicy,
        first_rate: float = FIRST_RATE,
        *,
        shares_store: bool = False,
    ) -> None:
        self.index = ReplicaIndex(num_replicas, shares_store=shares_store)
        self.policy = policy
        self._rate = MeasuredRate(first_rate, seconds=1.0)
        self.loads = [ReplicaLoad(replica, self._rate) for replica in range(num_replicas)]
        self._alive = list(self.loads)
        self._waiting: dict[str, _Sent] = {}
        self._running: dict[str, _Sent] = {}
        self._last: _Sent | None = None  # whose blocks are not noted yet

    def set_alive(self, replica: int, is_alive: bool) -> None:
        """Send requests to this replica, or no longer. What it holds is forgotten when it dies.

        The number may then stand for a new replica. Requests that the old one still ends are
        counted in the old one's load, which they keep.
        """
        self.catch_up()
        if is_alive and not self.loads[replica].is_alive:
            self.loads[replica] = self._new_load(replica)
        self.loads[replica].is_alive = is_alive
        self._alive = [load for load in self.loads if load.is_alive]
        if not is_alive:
            self.index.remove(replica)
            self.policy.forget(replica)
            for sent in self._waiting.values():
                if sent.replica == replica:  # nothing is expected there: nothing to take back
                    sent.expected = ()

    def _new_load(self, replica: int) -> ReplicaLoad:
        """The load of a new replica.

        It begins with as many routed tokens as the replica with the fewest: with none it would get
        every new prefix until it has caught up with months of the others'.
        """
        fewest = min((load.routed_tokens for load in self._alive), default=0)
        return ReplicaLoad(replica, self._rate, routed_tokens=fewest)

    def route(self, request: RouteRequest, now: float, avoid: Collection[int] = ()) -> int:
        """The replica to send the request to; one of `avoid` only if no other is alive.

        Raises RequestError if none is alive.
        """
        if not self._alive:
            raise RequestError(f"none of {len(self.loads)} replicas is alive; start one")
        self.catch_up()
        alive = self._alive
        if avoid:
            alive = [load for load in alive if load.replica not in avoid] or alive
        match = self.index.match(request.keys) if self.policy.needs_prefixes else None
        load = self.policy.choose(Choice(request, match, self.loads, alive, now))
        held = None if match is None else match.expected[load.replica]
        num_tokens = request.num_tokens - request.tokens(held or 0)
        load.add(num_tokens, now)
        self._last = _Sent(request, load, num_tokens, held)
        self._waiting[request.request_id] = self._last
        return load.replica

    def requests_at(self, replica: int) -> set[str]:
        """Return the ids of the requests that were sent to a replica and are not finished."""
        sent = {**self._waiting, **self._running}
        return {name for name, one in sent.items() if one.load is self.loads[replica]}

    def catch_up(self) -> None:
        """Note what the last request will compute where it was sent."""
        sent, self._last = self._last, None
        if sent is not None:
            if sent.held is not None:
                sent.expected = self.index.expect(sent.replica, sent.request.keys[sent.held :])
            self.policy.sent(sent.request, sent.replica)

    def first_token(self, request_id: str, now: float) -> None:
        """The request's prompt is computed. Unknown requests are none of the router's."""
        self.catch_up()
        sent = self._waiting.pop(request_id, None)
        if sent is None:
            return
        self.index.unexpect(sent.replica, sent.expected)
        sent.load.finish_prompt(sent.num_tokens, now)
        self.policy.prompt_done(sent.request, sent.replica)
        self._running[request_id] = sent

    def finish(self, request_id: str) -> None:
        """The request is finished, or given up at any time before."""
        self.catch_up()
        sent = self._running.pop(request_id, None)
        if sent is not None:
            sent.load.finish()
        else:
            sent = self._waiting.pop(request_id, None)
            if sent is None:
                return
            self.index.unexpect(sent.replica, sent.expected)
            sent.load.give_up(sent.num_tokens)
        self.policy.done(sent.request, sent.replica)
