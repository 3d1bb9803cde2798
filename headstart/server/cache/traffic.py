"""The most recent prompts, used to explain misses and for advice.

The prompts of a namespace are sorted by their tokens. The prompt with the longest common prefix is
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
"""Reasons that the cache may report for an evicted prefix."""
_DIFFERENT = (MissReason.TOKEN, MissReason.ITEM, MissReason.UNSEEN)
"""Reasons that the cache may report for a prompt that differs from all cached prompts."""
_FAR = 2048  # tokens of the earlier prompt to search beyond the length of the new tokens
_SPAN = 8  # minimum length of a run of repeated tokens
_WEIGHTS: NDArray[np.int64] = np.array([31**n for n in range(_SPAN)], np.int64)
_ONES: NDArray[np.int64] = np.ones(_SPAN, np.int64)
_BY_KEY = attrgetter("key")


class Times(NamedTuple):
    """The times in seconds when a prompt arrived, was looked up, and had all its K/V."""

    arrived: float = 0.0
    looked_up: float = 0.0
    computed: float = 0.0


_NOW = Times()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PastPrompt:
    """A prompt that was answered.

    key: see `sort_key`. closest: the earlier prompt with the longest common prefix.
    num_repeated: computed tokens after the first difference that occur in `closest` too.
    num_computed: tokens of prompt and answer with K/V. ended: the end of the request, on the clock
    of `times`.
    """

    request_id: str
    namespace: Namespace
    tokens: Tokens
    key: bytes
    times: Times
    num_cached: int
    missed: MissExplanation | None
    closest: ClosestPrompt | None
    num_repeated: int
    num_computed: int
    ended: float

    @property
    def num_evicted_tokens(self) -> int:
        """Return how many of the tokens shared with the closest prompt were evicted."""
        if self.closest is None:
            return 0
        return self.closest.num_evicted_tokens(self.num_cached, self.missed, self.times.looked_up)


class ClosestPrompt(NamedTuple):
    """An earlier prompt, and the length of its common prefix with another prompt."""

    prompt: PastPrompt
    num_common: int

    def num_evicted_tokens(
        self, num_cached: int, missed: MissExplanation | None, looked_up: float
    ) -> int:
        """Return how many of the common tokens were evicted: all beyond `num_cached`, or none.

        The cache remembers only some evictions. For other evicted prefixes it reports another
        reason in `_LOST`. With such a reason, the tokens count as evicted if the earlier prompt was
        computed before the lookup.
        """
        if missed is None or missed.reason not in _LOST:
            return 0
        if missed.reason is not MissReason.EVICTED and self.prompt.times.computed > looked_up:
            return 0
        return max(0, self.num_common - num_cached)


class Traffic:
    """The most recent prompts: at most `max_prompts`, with at most `max_tokens` tokens in all.

    Not thread-safe. clock: returns seconds. last_dropped: the time at which the last of the dropped
    prompts ended, or -inf.
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
        self._recent: deque[PastPrompt] = deque()
        self._num_tokens = 0
        self._sorted: dict[Namespace, list[PastPrompt]] = {}  # the latest of equal prompts, by key
        self.last_dropped = -inf

    @property
    def recent(self) -> list[PastPrompt]:
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
    ) -> PastPrompt:
        """Store a prompt that was answered just now. ago: its times in seconds before now."""
        now, tokens = self.now(), np.asarray(token_ids, np.int32)
        closest = self.closest(namespace, tokens)
        num_repeated = 0
        if closest is not None:
            # Remove the `closest` of `closest`, or all earlier prompts would stay in memory.
            closest = closest._replace(prompt=replace(closest.prompt, closest=None, key=b""))
            if missed is not None and missed.reason in _DIFFERENT:
                new_tokens = tokens[max(closest.num_common, num_cached) :]
                stop = closest.num_common + len(new_tokens) + _FAR
                earlier = closest.prompt.tokens[closest.num_common : stop]
                num_repeated = count_repeated(new_tokens, earlier)
        prompt = PastPrompt(
            request_id,
            namespace,
            tokens,
            sort_key(tokens),
            Times(*(now - seconds for seconds in ago)),
            num_cached,
            missed,
            closest,
            num_repeated,
            len(tokens) + num_generated - 1,  # the K/V of the last token are not computed
            now,
        )
        while self._recent and (
            len(self._recent) >= self._max_prompts
            or self._num_tokens + len(tokens) > self._max_tokens
        ):
            self._drop_oldest()
        if len(tokens) <= self._max_tokens:
            prompts = self._sorted.setdefault(namespace, [])
            index = bisect_left(prompts, prompt.key, key=_BY_KEY)
            is_repeated = index < len(prompts) and prompts[index].key == prompt.key
            prompts[index : index + is_repeated] = [prompt]
            self._recent.append(prompt)
            self._num_tokens += len(tokens)
        else:
            self.last_dropped = now
        return prompt

    def closest(self, namespace: Namespace, tokens: Tokens) -> ClosestPrompt | None:
        """Return the stored prompt of the namespace with the longest common prefix."""
        prompts = self._sorted.get(namespace, [])
        index = bisect_left(prompts, sort_key(tokens), key=_BY_KEY)
        neighbors = prompts[max(0, index - 1) : index + 1]
        matches = [
            ClosestPrompt(prompt, count_common(tokens, prompt.tokens)) for prompt in neighbors
        ]
        return max(matches, key=lambda m: (m.num_common, m.prompt.times.arrived), default=None)

    def clear(self) -> None:
        """Remove every prompt."""
        self._recent.clear()
        self._sorted.clear()
        self._num_tokens = 0

    def _drop_oldest(self) -> None:
        prompt = self._recent.popleft()
        self.last_dropped = prompt.ended
        self._num_tokens -= len(prompt.tokens)
        prompts = self._sorted[prompt.namespace]
        index = bisect_left(prompts, prompt.key, key=_BY_KEY)
        if prompts[index] is prompt:  # otherwise a later prompt has the same tokens
            del prompts[index]
        if not prompts:
            del self._sorted[prompt.namespace]


class TenantTraffic:
    """The most recent prompts of each tenant, in separate `Traffic` objects. Not thread-safe.

    In a shared `Traffic`, one tenant's prompts would displace another's, and the advice would show
    a tenant how many prompts other tenants sent. Beyond `MAX_TENANTS`, the prompts of the least
    recently active tenant are dropped.
    """

    MAX_TOKENS = 2**22
    MAX_TOKENS_OF_TENANT = 2**19
    MAX_TENANTS = 32

    def __init__(self, *, by_tenant: bool) -> None:
        """Store prompts by tenant; `by_tenant` is False for a server without keys."""
        self._by_tenant = by_tenant
        self._traffic: dict[str, Traffic] = {}  # by tenant, the most recently active last
        self._last_dropped = -inf

    def of(self, salt: str | None) -> Traffic:
        """Return the prompts of a tenant.

        salt: the tenant's salt. A slash and the salt of a request may follow it.
        """
        tenant = (salt or "").partition("/")[0] if self._by_tenant else ""
        traffic = self._traffic.pop(tenant, None)
        if traffic is None:
            most = self.MAX_TOKENS_OF_TENANT if self._by_tenant else self.MAX_TOKENS
            traffic = Traffic(max_tokens=most)
        self._traffic[tenant] = traffic
        if len(self._traffic) > self.MAX_TENANTS:
            dropped = self._traffic.pop(next(iter(self._traffic)))
            ends = [prompt.ended for prompt in dropped.recent]
            self._last_dropped = max(self._last_dropped, dropped.last_dropped, *ends)
        return traffic

    @property
    def last_dropped(self) -> float:
        """The time at which the last of the dropped prompts ended, or -inf."""
        ends = [traffic.last_dropped for traffic in self._traffic.values()]
        return max([self._last_dropped, *ends])

    @property
    def recent(self) -> list[list[PastPrompt]]:
        """The stored prompts of each tenant, oldest first."""
        return [traffic.recent for traffic in self._traffic.values()]

    def clear(self) -> None:
        """Remove every prompt."""
        self._traffic.clear()


def sort_key(tokens: Tokens) -> bytes:
    """Return bytes that sort like the tokens."""
    return tokens.astype(">u4").tobytes()


def count_common(first: Tokens, second: Tokens) -> int:
    """Return the length of the common prefix of two prompts."""
    shorter = min(len(first), len(second))
    different = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(different[0]) if len(different) else shorter


def count_repeated(tokens: Tokens, earlier: Tokens) -> int:
    """Return how many of `tokens` are in `earlier`, in runs of at least eight tokens.

    >>> count_repeated(np.arange(20, dtype=np.int32), np.arange(10, 40, dtype=np.int32))
    10
    """
    if len(tokens) < _SPAN or len(earlier) < _SPAN:
        return 0
    # Hash each run of `_SPAN` tokens to a number. `np.isin` is slower for short prompts.
    mine, theirs = (np.convolve(t.astype(np.int64), _WEIGHTS, "valid") for t in (tokens, earlier))
    theirs.sort()
    is_common = theirs.take(theirs.searchsorted(mine), mode="clip") == mine
    return int(np.count_nonzero(np.convolve(is_common, _ONES))) if is_common.any() else 0
