"""The default policy: the replica with the least expected time to the first token.

    expected = (tokens queued there + w * tokens to compute) / its measured rate
             + tokens to load from a slower tier / load rate

Blocks count as held where a request was sent that computes them, so a burst of one new prefix
follows its first request. A hot prefix spreads: once the queue of the replica that holds it
costs more than computing it anew elsewhere, the next request computes it there.

w > 1, because a token computed delays those who come after as well, while a token queued is
waited for once. Among equals the replica that was given least to compute so far wins: new
prefixes then fill all pools alike.
"""

from headstart.cluster.load import Choice, ReplicaLoad
from headstart.cluster.policies.base import RoutingPolicy

COMPUTE_WEIGHT = 2.0
LOAD_RATE = 100_000.0
"""Tokens a second that come back from a slower tier: 13 GB/s for 128 KB a token."""


class Expected(RoutingPolicy):
    """Least expected time to the first token."""

    def __init__(self, weight: float = COMPUTE_WEIGHT, load_rate: float = LOAD_RATE) -> None:
        self.weight = weight
        self.load_rate = load_rate

    def choose(self, choice: Choice) -> ReplicaLoad:
        """The one with the least expected time."""
        assert choice.match is not None
        request = choice.request
        _, expected, stored = choice.match
        total, size, weight = request.num_tokens, request.block_size, self.weight
        best, least = choice.alive[0], (float("inf"), 0)
        for load in choice.alive:
            held = stored[load.replica]
            to_compute = max(total - held * size, 1)
            seconds = (load.queued_tokens + weight * to_compute) / load.rate
            if held > expected[load.replica]:
                seconds += (held - expected[load.replica]) * size / self.load_rate
            if (seconds, load.routed_tokens) < least:
                best, least = load, (seconds, load.routed_tokens)
        return best
