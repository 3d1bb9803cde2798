"""The default policy: the replica with the least expected time to the first token.

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

from headstart.cluster.load import Choice, ReplicaLoad
from headstart.cluster.policies.base import RoutingPolicy

COMPUTE_WEIGHT = 4.0
DECODE_TOKENS = 512
"""Tokens to compute that a request which decodes counts for."""
SLACK, SLACK_SECONDS = 0.05, 0.01
"""How much more than the least still counts as equal: rates are not measured to the percent."""
LOAD_RATE = 100_000.0
"""Tokens a second that come back from a slower tier: 13 GB/s for 128 KB a token."""


class Expected(RoutingPolicy):
    """Least expected time to the first token."""

    def __init__(self, weight: float = COMPUTE_WEIGHT, load_rate: float = LOAD_RATE) -> None:
        self.weight = weight
        self.load_rate = load_rate

    def choose(self, choice: Choice) -> ReplicaLoad:
        """The one with the least expected time; of those close to it, the least used."""
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
