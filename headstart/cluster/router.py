"""Router: sends each request to one of many replicas, by a policy, and tracks their loads.

    route         choose a replica for a request
    catch_up      record in the index that the chosen replica will have the request's blocks
    first_token   the prompt is computed: measure the replica's rate
    finish        the reply is complete, or the request is given up
    index.apply   apply events of the replicas' caches

The next call after `route` records the request's blocks, so that the request is sent sooner. Not
thread-safe. The caller passes the time, so a simulator can use its own clock.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

from headstart.cluster.index import Match, PrefixKey, ReplicaIndex
from headstart.errors import ConfigError, RequestError

FIRST_RATE = 15_000.0
"""Assumed prompt tokens per second of a replica before the first measurement."""
_HALF_LIFE = 20.0
"""Seconds of computing prompts after which a measurement has half its weight."""
_TRUST = 2.0
"""Weight of the mean rate of all replicas in a replica's rate, as seconds of measurement."""

COMPUTE_WEIGHT = 4.0
"""Weight of a token to compute, compared with a queued token."""
DECODE_TOKENS = 512
"""Cost of a decoding request, as a number of queued tokens."""
SLACK, SLACK_SECONDS = 0.05, 0.01
"""Costs up to `lowest * (1 + SLACK) + SLACK_SECONDS` count as equal to the lowest cost."""
LOAD_RATE = 100_000.0
"""Tokens per second loaded from a slower tier: 13 GB/s at 128 KB per token."""


@dataclass(slots=True)
class RouteRequest:
    """A request to route.

    keys: keys of the prompt's full blocks. num_tokens: tokens of the prompt. block_size: tokens in
    a block. session: an id that the requests of one conversation share, or None.
    """

    request_id: str
    keys: Sequence[PrefixKey]
    num_tokens: int
    block_size: int
    session: str | None = None

    def tokens(self, num_blocks: int) -> int:
        """Return how many tokens a hit of `num_blocks` saves; one token is always computed."""
        return min(num_blocks * self.block_size, self.num_tokens - 1)


class MeasuredRate:
    """A mean of tokens per second in which older measurements have less weight."""

    __slots__ = ("mean", "seconds", "tokens")

    def __init__(self, tokens: float = 0.0, seconds: float = 0.0) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self.mean = tokens / seconds if seconds else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        decay: float = 0.5 ** (seconds / _HALF_LIFE)
        self.tokens = decay * self.tokens + tokens
        self.seconds = decay * self.seconds + seconds
        self.mean = self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class ReplicaLoad:
    """The unfinished work of one replica, and its speed.

    all_rate: the mean rate of all replicas. queued_tokens: prompt tokens still to be computed.
    waiting: requests without a first token. running: requests with a first token. routed_tokens:
    tokens to compute, summed over all requests routed to this replica so far.
    """

    replica: int
    all_rate: MeasuredRate = field(repr=False)
    queued_tokens: int = 0
    waiting: int = 0
    running: int = 0
    routed_tokens: int = 0
    is_alive: bool = True
    _own_rate: MeasuredRate = field(default_factory=MeasuredRate, repr=False)
    _since: float = field(default=0.0, repr=False)
    _largest: int = field(default=0, repr=False)  # largest prompt since the queue was empty

    @property
    def active(self) -> int:
        return self.waiting + self.running

    @property
    def rate(self) -> float:
        """Prompt tokens per second while prompts wait, averaged with the mean rate of all replicas.

        A replica that also decodes computes prompts more slowly, so its rate is lower.
        """
        rate = self._own_rate
        return (rate.tokens + _TRUST * self.all_rate.mean) / (rate.seconds + _TRUST)

    def backlog(self, now: float) -> float:
        """Return the queued tokens, less the estimated progress on the current prompt.

        A replica reports a prompt only when all of it is computed. The estimate is at most the
        largest prompt, so that a replica that hangs does not seem idle.
        """
        if not self.waiting:
            return 0.0
        computed = min((now - self._since) * self.rate, self._largest)
        return max(self.queued_tokens - computed, 0.0)

    def add(self, num_tokens: int, now: float) -> None:
        """Add a request with `num_tokens` tokens to compute."""
        if not self.waiting:
            self._since, self._largest = now, 0
        self._largest = max(self._largest, num_tokens)
        self.waiting += 1
        self.queued_tokens += num_tokens
        self.routed_tokens += num_tokens

    def finish_prompt(self, num_tokens: int, now: float) -> None:
        """Record the first token of a request that was added with `num_tokens`."""
        self.waiting -= 1
        self.running += 1
        self.queued_tokens -= num_tokens
        seconds = now - self._since
        self._since = now
        self._own_rate.add(num_tokens, seconds)
        self.all_rate.add(num_tokens, seconds)


@dataclass(slots=True)
class Choice:
    """The input of a policy. `match` is None if the policy does not need prefixes."""

    request: RouteRequest
    match: Match | None
    loads: Sequence[ReplicaLoad]
    alive: Sequence[ReplicaLoad]
    now: float


class RoutingPolicy:
    """Choice of a replica for each request; the router maintains the loads and the index.

    The router calls `choose` once for each request. The other methods notify policies that maintain
    their own counts.
    """

    needs_prefixes = True
    """False if the policy does not read `Choice.match`, which is then None."""

    needs_keys = True
    """False if the policy does not read the keys of requests, which may then be empty."""

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return one of `choice.alive`, which is not empty."""
        raise NotImplementedError

    def sent(self, request: RouteRequest, replica: int) -> None:
        """Record that the request was sent to this replica."""

    def prompt_done(self, request: RouteRequest, replica: int) -> None:
        """Record that the request has its first token."""

    def done(self, request: RouteRequest, replica: int) -> None:
        """Record that the request finished or was given up."""

    def forget(self, replica: int) -> None:
        """Record that the replica and its cache are gone; its number may be used again."""


class Expected(RoutingPolicy):
    """The replica with the shortest expected time to the first token.

        expected = (tokens queued there + w * tokens to compute + d * requests that decode there)
                   / its measured rate
                 + tokens to load from a slower tier / load rate

    w is `weight`, and d is `DECODE_TOKENS`. A block counts as held by a replica as soon as a
    request that computes it is sent there, so a burst of requests with one new prefix goes to one
    replica. A hot prefix spreads to a second replica when the queue of the first one costs more
    than computing the prefix again.

    w > 1, because a computed token also delays later requests and takes memory from cached blocks.
    With d > 0, a replica with many decoding requests costs more, so requests with prompts that are
    cheap to recompute go to other replicas. Among replicas of equal cost, the replica with the
    fewest routed tokens is chosen, so new prefixes fill all pools equally.
    """

    def __init__(self, weight: float = COMPUTE_WEIGHT, load_rate: float = LOAD_RATE) -> None:
        self.weight = weight
        self.load_rate = load_rate

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return the replica with the fewest routed tokens among those near the lowest cost."""
        assert choice.match is not None
        request, now = choice.request, choice.now
        _, expected, stored = choice.match
        total, size, weight = request.num_tokens, request.block_size, self.weight
        costs = []
        for load in choice.alive:
            num_stored = stored[load.replica]
            work = weight * max(total - num_stored * size, 1) + DECODE_TOKENS * load.running
            if load.waiting:
                work += load.backlog(now)
            seconds = work / load.rate
            if num_stored > expected[load.replica]:
                seconds += (num_stored - expected[load.replica]) * size / self.load_rate
            costs.append(seconds)
        limit = min(costs) * (1 + SLACK) + SLACK_SECONDS
        close = [load for load, cost in zip(choice.alive, costs, strict=True) if cost <= limit]
        return min(close, key=lambda load: load.routed_tokens)


class RoundRobin(RoutingPolicy):
    """Round-robin over the replicas."""

    needs_prefixes = needs_keys = False

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, choice: Choice) -> ReplicaLoad:
        return choice.alive[next(self._turns) % len(choice.alive)]


class LeastLoaded(RoutingPolicy):
    """The replica with the fewest unfinished requests; the fewest queued tokens among equals."""

    needs_prefixes = needs_keys = False

    def choose(self, choice: Choice) -> ReplicaLoad:
        return min(choice.alive, key=lambda load: (load.active, load.queued_tokens))


class SessionAffinity(LeastLoaded):
    """The replica that rendezvous hashing assigns to a session.

    A request without a session goes to the least loaded replica. When a replica is removed, only
    the sessions of that replica move.
    """

    def choose(self, choice: Choice) -> ReplicaLoad:
        session = choice.request.session
        if session is None:
            return super().choose(choice)
        return max(
            choice.alive,
            key=lambda load: blake2b(f"{session} {load.replica}".encode(), digest_size=8).digest(),
        )


class PrefixAffinity(RoutingPolicy):
    """The replica with the longest prefix, regardless of load; among equals, the least loaded."""

    def choose(self, choice: Choice) -> ReplicaLoad:
        assert choice.match is not None
        expected = choice.match.expected
        return max(choice.alive, key=lambda load: (expected[load.replica], -load.active))


DEFAULT_POLICY = "expected"
POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "expected": Expected,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "session": SessionAffinity,
    "prefix": PrefixAffinity,
}


def make_policy(name: str) -> RoutingPolicy:
    """Return a new policy of this name. Raises ConfigError for an unknown name."""
    if name not in POLICIES:
        raise ConfigError(f"router is {name!r}; allowed: {', '.join(POLICIES)}")
    return POLICIES[name]()


@dataclass(slots=True)
class _Sent:
    """An unfinished request and the load of its replica.

    num_held: blocks cached or expected there; None if prefixes are not matched.
    """

    request: RouteRequest
    load: ReplicaLoad
    num_tokens: int
    num_held: int | None
    expected: Sequence[PrefixKey] = ()
    is_running: bool = False


class Router:
    """Router of requests over replicas 0 to `num_replicas` - 1.

    shares_store: see `ReplicaIndex`. Raises ConfigError for fewer than one replica.
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
        self._sent: dict[str, _Sent] = {}
        self._last: _Sent | None = None  # the request whose blocks are not recorded yet

    def set_alive(self, replica: int, is_alive: bool) -> None:
        """Start or stop sending requests to a replica. A stopped replica's blocks are forgotten.

        A new replica may then use its number and gets a new load. Unfinished requests of the old
        replica refer to the old load.
        """
        self.catch_up()
        if is_alive and not self.loads[replica].is_alive:
            # With 0 routed tokens, a new replica would get every new prefix for a long time.
            fewest = min((load.routed_tokens for load in self._alive), default=0)
            self.loads[replica] = ReplicaLoad(replica, self._rate, routed_tokens=fewest)
        self.loads[replica].is_alive = is_alive
        self._alive = [load for load in self.loads if load.is_alive]
        if not is_alive:
            self.index.remove(replica)
            self.policy.forget(replica)
            for entry in self._sent.values():
                if entry.load.replica == replica:
                    entry.expected = ()

    def route(self, request: RouteRequest, now: float, avoid: Collection[int] = ()) -> int:
        """Return the replica for a request. Replicas in `avoid` are used only if no other is alive.

        Raises RequestError if no replica is alive.
        """
        if not self._alive:
            raise RequestError(f"0 of {len(self.loads)} replicas are alive; at least one must be")
        self.catch_up()
        alive = self._alive
        if avoid:
            alive = [load for load in alive if load.replica not in avoid] or alive
        match = self.index.match(request.keys) if self.policy.needs_prefixes else None
        load = self.policy.choose(Choice(request, match, self.loads, alive, now))
        num_held = None if match is None else match.expected[load.replica]
        num_tokens = request.num_tokens - request.tokens(num_held or 0)
        load.add(num_tokens, now)
        self._last = self._sent[request.request_id] = _Sent(request, load, num_tokens, num_held)
        return load.replica

    def requests_at(self, replica: int) -> set[str]:
        """Return the ids of the unfinished requests of a replica."""
        return {name for name, entry in self._sent.items() if entry.load is self.loads[replica]}

    def catch_up(self) -> None:
        """Record which blocks the last request's replica will compute."""
        entry, self._last = self._last, None
        if entry is not None:
            replica = entry.load.replica
            if entry.num_held is not None:
                entry.expected = self.index.expect(replica, entry.request.keys[entry.num_held :])
            self.policy.sent(entry.request, replica)

    def first_token(self, request_id: str, now: float) -> None:
        """Record that the request's prompt is computed; ignores unknown requests."""
        self.catch_up()
        entry = self._sent.get(request_id)
        if entry is None or entry.is_running:
            return
        self.index.unexpect(entry.load.replica, entry.expected)
        entry.expected, entry.is_running = (), True
        entry.load.finish_prompt(entry.num_tokens, now)
        self.policy.prompt_done(entry.request, entry.load.replica)

    def finish(self, request_id: str) -> None:
        """Record that the request finished or was given up; ignores unknown requests."""
        self.catch_up()
        entry = self._sent.pop(request_id, None)
        if entry is None:
            return
        if entry.is_running:
            entry.load.running -= 1
        else:
            self.index.unexpect(entry.load.replica, entry.expected)
            entry.load.waiting -= 1
            entry.load.queued_tokens -= entry.num_tokens
        self.policy.done(entry.request, entry.load.replica)
