"""What a router knows of a request and of each replica when it chooses."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.cluster.holders import PrefixKey
from headstart.cluster.index import Match

_HALF_LIFE = 20.0
"""Busy seconds after which what was measured counts for half."""
_TRUST = 2.0
"""Busy seconds that the rate of all counts for in the rate of one."""


@dataclass(slots=True)
class RouteRequest:
    """A request to send somewhere.

    keys: of the prompt's full blocks. num_tokens: of the whole prompt. block_size: tokens in a
    block. session: equal for the requests of one conversation, or None.
    """

    request_id: str
    keys: Sequence[PrefixKey]
    num_tokens: int
    block_size: int
    session: str | None = None

    def tokens(self, num_blocks: int) -> int:
        """Tokens of the prompt's first blocks that need no computing: all but one at the most."""
        return min(num_blocks * self.block_size, self.num_tokens - 1)


class MeasuredRate:
    """Tokens a second, of late: `tokens` in `seconds`, of which the older count for less.

    mean: the one over the other, 0 before anything was measured.
    """

    __slots__ = ("mean", "seconds", "tokens")

    def __init__(self, tokens: float = 0.0, seconds: float = 0.0) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self.mean = tokens / seconds if seconds else 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        keep: float = 0.5 ** (seconds / _HALF_LIFE)
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds
        self.mean = self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class ReplicaLoad:
    """The work that was sent to one replica and is not done, and how fast it does it.

    queued_tokens: tokens of prompts that are still to be computed. waiting: requests without a
    first token yet. running: requests with one. routed_tokens: tokens to compute, of all
    requests so far. rate: tokens a second while prompts were waiting, as measured here: the
    time that decoding takes is in it. `all_rate` is that of all replicas together, which stands
    in for what was not measured here.
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
    _largest: int = field(default=0, repr=False)  # prompt since nothing waited

    @property
    def active(self) -> int:
        """Requests that are not finished."""
        return self.waiting + self.running

    @property
    def rate(self) -> float:
        """Tokens of prompts computed a second."""
        own = self._own_rate
        return (own.tokens + _TRUST * self.all_rate.mean) / (own.seconds + _TRUST)

    def backlog(self, now: float) -> float:
        """Queued tokens less those that were computed, at the measured rate, since a prompt ended.

        What a prompt under way has behind it is not reported. It is not more than the largest
        prompt has, whose end would be: else a replica that hangs would soon seem to be idle.
        """
        if not self.waiting:
            return 0.0
        computed = min((now - self._since) * self.rate, self._largest)
        return max(self.queued_tokens - computed, 0.0)

    def add(self, num_tokens: int, now: float) -> None:
        """A request with so many tokens to compute is sent here."""
        if not self.waiting:
            self._since, self._largest = now, 0
        self._largest = max(self._largest, num_tokens)
        self.waiting += 1
        self.queued_tokens += num_tokens
        self.routed_tokens += num_tokens

    def finish_prompt(self, num_tokens: int, now: float) -> None:
        """A request that was added with so many tokens has its first token."""
        self.waiting -= 1
        self.running += 1
        self.queued_tokens -= num_tokens
        seconds = now - self._since
        self._since = now
        self._own_rate.add(num_tokens, seconds)
        self.all_rate.add(num_tokens, seconds)

    def finish(self) -> None:
        """A request with a first token is done."""
        self.running -= 1

    def give_up(self, num_tokens: int) -> None:
        """A request without a first token will get none here."""
        self.waiting -= 1
        self.queued_tokens -= num_tokens


@dataclass(slots=True)
class Choice:
    """What a policy chooses from. `match` is None where the policy asks for no prefixes."""

    request: RouteRequest
    match: Match | None
    loads: Sequence[ReplicaLoad]
    alive: Sequence[ReplicaLoad]
    now: float
