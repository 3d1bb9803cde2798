"""Routing policies by name: each chooses a replica for a request."""

from collections.abc import Callable
from hashlib import blake2b
from itertools import count

from headstart.cluster.load import Choice, ReplicaLoad, RouteRequest
from headstart.errors import ConfigError

__all__ = ["DEFAULT_POLICY", "POLICIES", "RoutingPolicy", "make_policy"]

COMPUTE_WEIGHT = 4.0
DECODE_TOKENS = 512
"""Tokens to compute that a request which decodes counts for."""
SLACK, SLACK_SECONDS = 0.05, 0.01
"""A cost counts as equal to the least one if it is larger by no more than this share and time."""
LOAD_RATE = 100_000.0
"""Tokens a second that come back from a slower tier: 13 GB/s for 128 KB a token."""


class RoutingPolicy:
    """Chooses a replica for each request; the router keeps the loads and the index.

    `choose` is called once a request and changes none of its arguments. The other methods notify a
    policy that keeps counts of its own; they do nothing by default.
    """

    needs_prefixes = True
    """False for a policy that does not look at `Choice.match`; none is then made."""

    needs_keys = True
    """False for a policy that does not look at a request's keys; they may be left out."""

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return one of `choice.alive`, which is not empty."""
        raise NotImplementedError

    def sent(self, request: RouteRequest, replica: int) -> None:
        """Note that the request was sent to this replica."""

    def prompt_done(self, request: RouteRequest, replica: int) -> None:
        """Note that the request has its first token."""

    def done(self, request: RouteRequest, replica: int) -> None:
        """Note that the request finished or was given up."""

    def forget(self, replica: int) -> None:
        """Note that the replica is gone with its cache; its number may be used again."""


class Expected(RoutingPolicy):
    """The replica with the least expected time to the first token.

        expected = (tokens queued there + w * tokens to compute + d * requests that decode there)
                   / its measured rate
                 + tokens to load from a slower tier / load rate

    Blocks count as held where a request was sent that computes them, so a burst of one new prefix
    follows its first request. A hot prefix spreads: once the queue of the replica that holds it
    costs more than computing it anew elsewhere, the next request computes it there.

    w > 1, because a token computed delays those who come after as well, and takes memory from what
    is cached, while a token queued is waited for once. d spreads what costs little to compute anew,
    such as a short system prompt, before one replica decodes for all. Among equals the replica that
    was given least to compute so far wins: new prefixes then fill all pools alike.
    """

    def __init__(self, weight: float = COMPUTE_WEIGHT, load_rate: float = LOAD_RATE) -> None:
        self.weight = weight
        self.load_rate = load_rate

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return the least used of the replicas close to the least expected time."""
        seconds = self._seconds(choice)
        limit = min(seconds) * (1 + SLACK) + SLACK_SECONDS
        close = [load for load, at in zip(choice.alive, seconds, strict=True) if at <= limit]
        return min(close, key=lambda load: load.routed_tokens)

    def _seconds(self, choice: Choice) -> list[float]:
        assert choice.match is not None
        request, now = choice.request, choice.now
        _, expected, stored = choice.match
        total, size, weight = request.num_tokens, request.block_size, self.weight
        found = []
        for load in choice.alive:
            at = load.replica
            held = stored[at]
            work = weight * max(total - held * size, 1) + DECODE_TOKENS * load.running
            if load.waiting:
                work += load.backlog(now)
            seconds = work / load.rate
            if held > expected[at]:
                seconds += (held - expected[at]) * size / self.load_rate
            found.append(seconds)
        return found


class RoundRobin(RoutingPolicy):
    """Each replica in turn."""

    needs_prefixes = needs_keys = False

    def __init__(self) -> None:
        self._turns = count()

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return the next replica."""
        return choice.alive[next(self._turns) % len(choice.alive)]


class LeastLoaded(RoutingPolicy):
    """The replica with the fewest unfinished requests; the fewest queued tokens among equals."""

    needs_prefixes = needs_keys = False

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return the least loaded replica."""
        return min(choice.alive, key=lambda load: (load.active, load.queued_tokens))


class SessionAffinity(RoutingPolicy):
    """The replica that rendezvous hashing gives a session; least loaded without a session.

    A replica that leaves takes along its own sessions only.
    """

    needs_prefixes = needs_keys = False

    def __init__(self) -> None:
        self._without = LeastLoaded()

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return the session's replica."""
        session = choice.request.session
        if session is None:
            return self._without.choose(choice)
        return max(choice.alive, key=lambda load: _draw(session, load.replica))


def _draw(session: str, replica: int) -> bytes:
    """Return a pseudorandom number that depends on the session and the replica alone."""
    return blake2b(f"{session} {replica}".encode(), digest_size=8).digest()


class PrefixAffinity(RoutingPolicy):
    """The replica with the longest prefix, however loaded; the least loaded one among equals."""

    def choose(self, choice: Choice) -> ReplicaLoad:
        """Return the replica with the longest match."""
        assert choice.match is not None
        held = choice.match.expected
        return max(choice.alive, key=lambda load: (held[load.replica], -load.active))


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
