"""The most recent prompts, to explain a miss by the closest earlier prompt.

Prompts of one namespace are sorted by their tokens. The prompt with the longest common prefix is
next to the position at which a new prompt would be inserted, so a search compares two prompts.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.cache import MissExplanation, MissReason, Namespace

Tokens = NDArray[np.int32]
_LOST = (MissReason.EVICTED, MissReason.UNSEEN, MissReason.TOKEN)
_DIFFERENT = (MissReason.TOKEN, MissReason.ITEM, MissReason.UNSEEN)
_FAR = 2048  # tokens after a difference in which moved text is searched
_SPAN = 8  # tokens; shorter runs are not recognized at another position
_WEIGHTS: NDArray[np.int64] = np.array([31**n for n in range(_SPAN)], np.int64)
_ONES: NDArray[np.int64] = np.ones(_SPAN, np.int64)
_BY_KEY = attrgetter("key")


class Times(NamedTuple):
    """The times in seconds when a prompt arrived, was looked up, and had all its K/V."""

    came: float = 0.0
    looked_up: float = 0.0
    computed: float = 0.0


_NOW = Times()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Seen:
    """A prompt that was answered.

    key: bytes that sort like its tokens. num_again: computed tokens after the first difference
    that the closest earlier prompt also contains. num_computed: tokens of prompt and answer with
    K/V. ended: the end of the request, on the clock of `times`.
    """

    request_id: str
    namespace: Namespace
    tokens: Tokens
    key: bytes
    times: Times
    num_cached: int
    missed: MissExplanation | None
    closest: Closest | None
    num_again: int
    num_computed: int
    ended: float

    @property
    def num_lost(self) -> int:
        """Return how many tokens in common with the closest prompt were evicted since."""
        if self.closest is None:
            return 0
        return self.closest.num_lost(self.num_cached, self.missed, self.times.looked_up)


class Closest(NamedTuple):
    """An earlier prompt, and the length of its common prefix with another."""

    seen: Seen
    num_common: int

    def num_lost(self, num_cached: int, missed: MissExplanation | None, looked_up: float) -> int:
        """Return how many of the common tokens were evicted: all but `num_cached`.

        The cache remembers only some evictions. If it reports none, the tokens count as evicted
        only if the earlier prompt was computed before the lookup.
        """
        if missed is None or missed.reason not in _LOST:
            return 0
        if missed.reason is not MissReason.EVICTED and self.seen.times.computed > looked_up:
            return 0
        return max(0, self.num_common - num_cached)


class Traffic:
    """The most recent prompts: at most `max_prompts`, with at most `max_tokens` tokens in all.

    Not thread-safe. `clock` returns seconds.
    """

    def __init__(
        self,
        max_prompts: int = 1024,
        max_tokens: int = 2**22,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self.now = clock
        self._recent: deque[Seen] = deque()
        self._num_tokens = 0
        self._sorted: dict[Namespace, list[Seen]] = {}  # the latest of equal prompts, by key
        self.forgotten = -inf  # when the last prompt that is no longer stored ended

    @property
    def recent(self) -> list[Seen]:
        """All stored prompts, oldest first."""
        return list(self._recent)

    def add(
        self,
        request_id: str,
        namespace: Namespace,
        token_ids: list[int],
        num_cached: int,
        missed: MissExplanation | None,
        ago: Times = _NOW,
        num_generated: int = 1,
    ) -> Seen:
        """Store a prompt that was answered just now; `ago` has its times, in seconds ago.

        The time is proportional to the prompt's length.
        """
        now, tokens = self.now(), np.asarray(token_ids, np.int32)
        closest = self.closest(namespace, tokens)
        num_again = 0
        if closest is not None:
            # Drop the closest prompt's own closest prompt. Otherwise all earlier prompts would stay
            # in memory as a chain.
            closest = closest._replace(seen=replace(closest.seen, closest=None, key=b""))
            if missed is not None and missed.reason in _DIFFERENT:
                new_tokens = tokens[max(closest.num_common, num_cached) :]
                stop = closest.num_common + len(new_tokens) + _FAR
                num_again = count_again(new_tokens, closest.seen.tokens[closest.num_common : stop])
        seen = Seen(
            request_id,
            namespace,
            tokens,
            sort_key(tokens),
            Times(*(now - seconds for seconds in ago)),
            num_cached,
            missed,
            closest,
            num_again,
            len(tokens) + num_generated - 1,  # the K/V of the last token are not computed
            now,
        )
        while self._recent and (
            len(self._recent) >= self._max_prompts
            or self._num_tokens + len(tokens) > self._max_tokens
        ):
            self._forget_oldest()
        if len(tokens) <= self._max_tokens:
            prompts = self._sorted.setdefault(namespace, [])
            place = bisect_left(prompts, seen.key, key=_BY_KEY)
            is_repeated = place < len(prompts) and prompts[place].key == seen.key
            prompts[place : place + is_repeated] = [seen]
            self._recent.append(seen)
            self._num_tokens += len(tokens)
        else:
            self.forgotten = now
        return seen

    def closest(self, namespace: Namespace, tokens: Tokens) -> Closest | None:
        """Return the stored prompt of the namespace with the longest common prefix."""
        prompts = self._sorted.get(namespace, [])
        place = bisect_left(prompts, sort_key(tokens), key=_BY_KEY)
        neighbors = prompts[max(0, place - 1) : place + 1]
        matches = [Closest(seen, count_common(tokens, seen.tokens)) for seen in neighbors]
        return max(matches, key=lambda m: (m.num_common, m.seen.times.came), default=None)

    def clear(self) -> None:
        """Forget every prompt."""
        self._recent.clear()
        self._sorted.clear()
        self._num_tokens = 0

    def _forget_oldest(self) -> None:
        seen = self._recent.popleft()
        self.forgotten = seen.ended
        self._num_tokens -= len(seen.tokens)
        prompts = self._sorted[seen.namespace]
        place = bisect_left(prompts, seen.key, key=_BY_KEY)
        if prompts[place] is seen:  # otherwise a later prompt has the same tokens
            del prompts[place]
        if not prompts:
            del self._sorted[seen.namespace]


class Traffics:
    """The most recent prompts of each tenant, in separate `Traffic` objects. Not thread-safe.

    With shared storage, one tenant's prompts would displace another's, and the advice would show
    a tenant how many prompts the others sent. Beyond `MAX_TENANTS`, the prompts of the least
    recently active tenant are dropped.
    """

    MAX_TOKENS = 2**22
    MAX_TOKENS_OF_TENANT = 2**19
    MAX_TENANTS = 32

    def __init__(self, *, by_tenant: bool) -> None:
        """Store prompts by tenant; `by_tenant` is False for a server without keys."""
        self._by_tenant = by_tenant
        self._traffic: dict[str, Traffic] = {}  # by tenant, the most recently active last
        self._forgotten = -inf

    def of(self, salt: str | None) -> Traffic:
        """Return the prompts of the tenant with this salt, narrowed or not."""
        tenant = (salt or "").partition("/")[0] if self._by_tenant else ""
        traffic = self._traffic.pop(tenant, None)
        if traffic is None:
            most = self.MAX_TOKENS_OF_TENANT if self._by_tenant else self.MAX_TOKENS
            traffic = Traffic(max_tokens=most)
        self._traffic[tenant] = traffic
        if len(self._traffic) > self.MAX_TENANTS:
            dropped = self._traffic.pop(next(iter(self._traffic)))
            ends = [seen.ended for seen in dropped.recent]
            self._forgotten = max(self._forgotten, dropped.forgotten, *ends)
        return traffic

    @property
    def forgotten(self) -> float:
        """The time when the last of the prompts that are no longer stored ended."""
        return max([self._forgotten, *(traffic.forgotten for traffic in self._traffic.values())])

    @property
    def recent(self) -> list[list[Seen]]:
        """The stored prompts of each tenant, oldest first."""
        return [traffic.recent for traffic in self._traffic.values()]

    def clear(self) -> None:
        """Forget every prompt."""
        self._traffic.clear()


def sort_key(tokens: Tokens) -> bytes:
    """Return bytes that sort like the tokens."""
    return tokens.astype(">u4").tobytes()


def count_common(first: Tokens, second: Tokens) -> int:
    """Return the length of the common prefix of two prompts."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if len(different) else shorter


def count_again(tokens: Tokens, earlier: Tokens) -> int:
    """Return how many of `tokens` are in `earlier` too, in runs of at least eight.

    >>> count_again(np.arange(20, dtype=np.int32), np.arange(10, 40, dtype=np.int32))
    10
    """
    if len(tokens) < _SPAN or len(earlier) < _SPAN:
        return 0
    # Hash each run of `_SPAN` tokens to a number. `np.isin` is slower for short prompts.
    mine, theirs = (np.convolve(t.astype(np.int64), _WEIGHTS, "valid") for t in (tokens, earlier))
    theirs.sort()
    is_common = theirs.take(theirs.searchsorted(mine), mode="clip") == mine
    return int(np.count_nonzero(np.convolve(is_common, _ONES))) if is_common.any() else 0
