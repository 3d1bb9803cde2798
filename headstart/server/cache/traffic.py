"""The prompts that came lately, so that a miss can be explained by the prompt that came closest.

Prompts of one namespace stand in byte order. Of all prompts, the one with the longest common
beginning is a neighbour of the place where a new one would stand, so a search compares a few.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.cache import MissExplanation, MissReason, Namespace

__all__ = ["Closest", "Seen", "Times", "Traffic", "Traffics", "count_common", "sort_key"]

Tokens = NDArray[np.int32]
_FAR = 2048  # tokens that may stand in the place of what differs, and be more than that
_SPAN = 8  # tokens: as many in a row are found again elsewhere in another prompt, or none


class Times(NamedTuple):
    """When a prompt came, was looked up in the cache, and had all its K/V, in seconds.

    On the clock of `Traffic`, or ago.
    """

    came: float = 0.0
    looked_up: float = 0.0
    computed: float = 0.0


_NOW = Times()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Seen:
    """A prompt that was answered.

    num_again: tokens that were computed although the closest earlier prompt has them too, behind
    the first difference: moving what differs to the end would have saved them. num_computed: tokens
    of prompt and answer with K/V. ended: on the clock of `times`.
    """

    request_id: str
    namespace: Namespace
    tokens: Tokens
    times: Times
    num_cached: int
    missed: MissExplanation | None
    closest: Closest | None
    num_again: int
    num_computed: int
    ended: float

    @property
    def num_lost(self) -> int:
        """See `Closest.num_lost`."""
        if self.closest is None:
            return 0
        return self.closest.num_lost(self.num_cached, self.missed, self.times.looked_up)


@dataclass(frozen=True, slots=True, eq=False)
class Closest:
    """An earlier prompt, and how many tokens from the first on it has in common with another."""

    seen: Seen
    num_common: int

    def num_lost(self, num_cached: int, missed: MissExplanation | None, looked_up: float) -> int:
        """Tokens that are common, but of which only `num_cached` were found: the rest was evicted.

        The cache itself remembers few evictions. Where it tells of none, tokens may also have been
        looked up before the earlier prompt was computed: these are not counted.
        """
        if missed is None or missed.reason not in _LOST:
            return 0
        if missed.reason is not MissReason.EVICTED and self.seen.times.computed > looked_up:
            return 0
        return max(0, self.num_common - num_cached)


@dataclass(slots=True)
class _Prompts:
    """The prompts of one namespace in byte order."""

    keys: list[bytes] = field(default_factory=list)
    seen: dict[bytes, _Known] = field(default_factory=dict)  # the latest of each


class _Known(NamedTuple):
    """A prompt and its key: the one object that is in all places, so that it is hashed once."""

    key: bytes
    seen: Seen


class Traffic:
    """The last prompts: at most `max_prompts`, of `max_tokens` tokens together.

    Not for several threads. `clock` tells seconds.
    """

    def __init__(
        self,
        max_prompts: int = 1024,
        max_tokens: int = 2**22,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_prompts = max_prompts
        self._max_tokens = max_tokens
        self._clock = clock
        self._recent: deque[_Known] = deque()
        self._num_tokens = 0
        self._prompts: dict[Namespace, _Prompts] = {}
        self.forgotten = -inf  # when the last prompt ended that is not known any more

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def recent(self) -> list[Seen]:
        """All prompts that are known, oldest first."""
        return [known.seen for known in self._recent]

    def now(self) -> float:
        """Seconds, on the clock of `Seen.times`."""
        return self._clock()

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
        """Remember a prompt that was answered just now; `ago` has its times, in seconds ago.

        Takes time with its length, not with the others': 0.1 ms for a thousand tokens.
        """
        now, tokens = self.now(), np.asarray(token_ids, np.int32)
        closest = self.closest(namespace, tokens)
        again = 0
        if closest is not None:
            # Without history, so that a prompt keeps no chain of earlier ones alive.
            closest = Closest(replace(closest.seen, closest=None), closest.num_common)
            if missed is not None and missed.reason in _DIFFERENT:
                mine = tokens[max(closest.num_common, num_cached) :]
                far = closest.num_common + len(mine) + _FAR
                again = count_again(mine, closest.seen.tokens[closest.num_common : far])
        seen = Seen(
            request_id,
            namespace,
            tokens,
            Times(*(now - seconds for seconds in ago)),
            num_cached,
            missed,
            closest,
            again,
            len(tokens) + num_generated - 1,  # the last token's K/V are not computed
            now,
        )
        self._forget(len(tokens))
        if len(tokens) <= self._max_tokens:
            self._remember(seen)
        else:
            self.forgotten = now
        return seen

    def closest(self, namespace: Namespace, tokens: Tokens) -> Closest | None:
        """Return the known prompt of the namespace with the longest common prefix."""
        prompts = self._prompts.get(namespace)
        if prompts is None:
            return None
        key = sort_key(tokens)
        at = bisect_left(prompts.keys, key)
        near = [prompts.seen[key].seen for key in prompts.keys[max(0, at - 1) : at + 1]]
        found = [Closest(seen, count_common(tokens, seen.tokens)) for seen in near]
        return max(found, key=lambda one: (one.num_common, one.seen.times.came), default=None)

    def clear(self) -> None:
        """Forget every prompt."""
        self._recent.clear()
        self._prompts.clear()
        self._num_tokens = 0

    def _remember(self, seen: Seen) -> None:
        prompts = self._prompts.setdefault(seen.namespace, _Prompts())
        key = sort_key(seen.tokens)
        if key in prompts.seen:
            key = prompts.seen[key].key
        else:
            insort(prompts.keys, key)
        known = prompts.seen[key] = _Known(key, seen)
        self._recent.append(known)
        self._num_tokens += len(seen.tokens)

    def _forget(self, num_new: int) -> None:
        """Make room for a prompt of so many tokens: the oldest go."""
        while self._recent and (
            len(self._recent) >= self._max_prompts or self._num_tokens + num_new > self._max_tokens
        ):
            known = self._recent.popleft()
            self.forgotten = known.seen.ended
            self._num_tokens -= len(known.seen.tokens)
            prompts = self._prompts[known.seen.namespace]
            if prompts.seen.get(known.key) is known:  # and not a later one of the same tokens
                del prompts.seen[known.key]
                del prompts.keys[bisect_left(prompts.keys, known.key)]
                if not prompts.keys:
                    del self._prompts[known.seen.namespace]


class Traffics:
    """The last prompts of each tenant, in a `Traffic` of its own.

    If all had one together, prompts of one tenant would have those of another forgotten, and who
    asks for advice would learn from the number of its own how many others there were. Beyond
    `MAX_TENANTS` the prompts go of the tenant that has asked nothing for longest. As `Traffic`, not
    for several threads.
    """

    MAX_TOKENS = 2**22
    MAX_TOKENS_OF_TENANT = 2**19
    MAX_TENANTS = 32

    def __init__(self, *, by_tenant: bool) -> None:
        """by_tenant: False for a server without keys, which has one tenant."""
        self._by_tenant = by_tenant
        self._max_tokens = self.MAX_TOKENS_OF_TENANT if by_tenant else self.MAX_TOKENS
        self._traffic: dict[str, Traffic] = {}
        self._forgotten = -inf

    def of(self, salt: str | None) -> Traffic:
        """The prompts of the tenant whose salt, as it is or narrowed, this is."""
        tenant = (salt or "").partition("/")[0] if self._by_tenant else ""
        found = self._traffic.pop(tenant, None)
        if found is None:
            found = Traffic(max_tokens=self._max_tokens)
        self._traffic[tenant] = found  # last: of late
        if len(self._traffic) > self.MAX_TENANTS:
            dropped = self._traffic.pop(next(iter(self._traffic)))
            ends = [seen.ended for seen in dropped.recent]
            self._forgotten = max(self._forgotten, dropped.forgotten, *ends)
        return found

    @property
    def forgotten(self) -> float:
        """When the last prompt of any tenant ended that is not known any more."""
        return max([self._forgotten, *(one.forgotten for one in self._traffic.values())])

    @property
    def recent(self) -> list[list[Seen]]:
        """The prompts that are known of each tenant, oldest first."""
        return [traffic.recent for traffic in self._traffic.values()]

    def clear(self) -> None:
        """Forget every prompt."""
        self._traffic.clear()


_LOST = (MissReason.EVICTED, MissReason.UNSEEN, MissReason.TOKEN)
_WEIGHTS: NDArray[np.int64] = np.array([31**n for n in range(_SPAN)], np.int64)
_ONES: NDArray[np.int64] = np.ones(_SPAN, np.int64)
_DIFFERENT = (MissReason.TOKEN, MissReason.ITEM, MissReason.UNSEEN)


def sort_key(tokens: Tokens) -> bytes:
    """Return bytes in the order of the tokens."""
    return tokens.astype(">u4").tobytes()


def count_common(left: Tokens, right: Tokens) -> int:
    """Return the number of tokens that two prompts share from the first on."""
    shorter = min(len(left), len(right))
    different = np.flatnonzero(left[:shorter] != right[:shorter])
    return int(different[0]) if len(different) else shorter


def count_again(tokens: Tokens, earlier: Tokens) -> int:
    """Return how many of `tokens` are in `earlier` too, in runs of at least eight.

    >>> count_again(np.arange(20, dtype=np.int32), np.arange(10, 40, dtype=np.int32))
    10
    """
    if len(tokens) < _SPAN or len(earlier) < _SPAN:
        return 0
    # Each run of `_SPAN` tokens as a number; `np.isin` takes ten times as long for a short prompt.
    mine, theirs = (np.convolve(t.astype(np.int64), _WEIGHTS, "valid") for t in (tokens, earlier))
    theirs.sort()
    places = theirs.searchsorted(mine)
    found = theirs.take(places, mode="clip") == mine
    return int(np.count_nonzero(np.convolve(found, _ONES))) if found.any() else 0
