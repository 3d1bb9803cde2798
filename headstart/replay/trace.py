"""A trace: requests with the time they came and the identity of their prompts.

Traces name prompts by blocks, not by tokens, and a simulation needs no more. So one *unit* stands
for `grain` tokens: the cache manager gets a token id for each unit, and `block_size / grain`
units make a block. Equal unit ids at the head of two prompts are equal tokens. What a prompt has
beyond its last full unit, and every reply, is like nothing else in the trace: such units get ids
of their own, and fill memory without being hit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from headstart.cache.identity import MAX_TOKEN_ID
from headstart.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    time: seconds since the trace began. parts: the ids of the prompt's full units, in pieces
    that are ranges where ids are consecutive. num_tokens, num_output: of the prompt and the
    reply. session: equal for the requests of one conversation. first_unit: added to each id.
    """

    time: float
    parts: Sequence[Sequence[int]] = field(repr=False)
    num_tokens: int
    num_output: int
    session: str
    first_unit: int = 0

    def units(self) -> list[int]:
        """The ids of the prompt's full units."""
        if not self.first_unit:
            return list(chain.from_iterable(self.parts))
        return [self.first_unit + unit for part in self.parts for unit in part]


@dataclass(frozen=True)
class Trace:
    """Requests in the order they came; `num_units` is above all their unit ids."""

    name: str
    grain: int
    num_units: int
    requests: Sequence[TraceRequest] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def seconds(self) -> float:
        """From the first request to the last."""
        return self.requests[-1].time - self.requests[0].time if self.requests else 0.0

    def head(self, count: int) -> "Trace":
        """The first `count` requests."""
        return replace(self, requests=self.requests[:count])

    def copied(self, copies: int, gap: float = 1.0) -> "Trace":
        """So many times the users: copies that share no prefix, each `gap` seconds later.

        Raises ConfigError for more units than there are token ids.
        """
        if copies < 1:
            raise ConfigError(f"copies is {copies}; allowed: at least 1")
        if copies * self.num_units > MAX_TOKEN_ID // 2:
            raise ConfigError(
                f"copies is {copies}; allowed: up to {MAX_TOKEN_ID // 2 // self.num_units} of "
                f"a trace with {self.num_units:,} units"
            )
        requests = [
            replace(
                request,
                time=request.time + copy * gap,
                session=f"{request.session}/{copy}",
                first_unit=copy * self.num_units,
            )
            for copy in range(copies)
            for request in self.requests
        ]
        requests.sort(key=lambda request: request.time)
        return replace(self, num_units=copies * self.num_units, requests=requests)

    def faster(self, speed: float) -> "Trace":
        """Sessions begin `speed` times as often, and keep their pace inside.

        Raises ConfigError for a speed that is not above 0.
        """
        if not speed > 0:
            raise ConfigError(f"speed is {speed}; allowed: above 0")
        starts: dict[str, float] = {}
        requests = []
        for request in self.requests:
            start = starts.setdefault(request.session, request.time)
            requests.append(replace(request, time=start / speed + request.time - start))
        requests.sort(key=lambda request: request.time)
        return replace(self, requests=requests)


def private_units() -> Iterator[int]:
    """Unit ids that no trace uses, each of them once."""
    return iter(range(MAX_TOKEN_ID, MAX_TOKEN_ID // 2, -1))
