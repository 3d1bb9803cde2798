"""Statistics of the prefix cache: tokens queried, tokens hit, and the reason of each miss."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from headstart.cache.sequence import TokenSequence

AGE_BOUNDS = (0.1, 1, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)
"""Upper bounds of the buckets of `EvictionAges` in seconds, inclusive."""


class MissReason(Enum):
    """The reason why a request did not hit more tokens."""

    NONE = "every reusable token was hit"
    DISABLED = "prefix caching is off"
    NOT_READ = "the request does not read the cache"
    UNSEEN = "not seen before"
    EVICTED = "seen, but evicted since"
    TOKEN = "differs from the cached tokens"
    ADAPTER = "cached for another adapter"
    SALT = "cached under another salt"
    ITEM = "cached with another image or audio item"
    SHORT = "the rest is shorter than a block"
    IN_PROGRESS = "another request is computing it"
    OUTPUTS = "cached, but without the outputs that the next stage needs"
    STATE = "cached, but no checkpoint to resume from"
    WINDOW = "cached, but not in sliding-window layers"

    __hash__ = object.__hash__  # faster than Enum's, for the count at each admission


@dataclass(frozen=True, slots=True)
class MissExplanation:
    """The reason why a request did not hit more, and the position from which it applies.

    adapter: for ADAPTER, the adapter under which more of the prefix is cached; None for the model
    without adapters. known_tokens: for STATE and WINDOW, the number of tokens with cached K/V.
    """

    reason: MissReason
    position: int
    adapter: str | None = None
    known_tokens: int = 0

    def __str__(self) -> str:
        if self.reason is MissReason.NONE:
            return str(self.reason.value)
        text = str(self.reason.value)
        if self.reason is MissReason.ADAPTER:
            plain = self.adapter is None
            text = "cached without an adapter" if plain else f"{text}, {self.adapter}"
        if self.reason is MissReason.STATE:
            text = f"cached up to token {self.known_tokens}, but no checkpoint to resume from"
        if self.reason is MissReason.WINDOW:
            text = f"cached up to token {self.known_tokens}, but not in sliding-window layers"
        return f"from token {self.position} on: {text}"


class EvictionAges:
    """A histogram of the seconds that blocks were free before their eviction."""

    def __init__(self) -> None:
        self.counts = [0] * (len(AGE_BOUNDS) + 1)
        self.seconds = 0.0

    def note(self, age: float) -> None:
        """Count a block that had been free for this many seconds."""
        self.counts[bisect_left(AGE_BOUNDS, age)] += 1
        self.seconds += age


class Admission(NamedTuple):
    """An admission to count. resumed: True after a preemption."""

    sequence: TokenSequence
    queried_tokens: int
    hit_tokens: int
    missed: MissExplanation
    resumed: bool


@dataclass
class PrefixCacheStats:
    """Counts since the start. An admission counts when its step is committed.

    Requests that are admitted again after a preemption are counted only in the `resumed_` fields.

    queried_tokens: tokens that were looked up. hit_tokens: tokens that were hit. recomputed_tokens:
    tokens with cached K/V that were computed again because a checkpoint or a window was missing.
    missed: requests by the reason that ended their hit.
    """

    requests: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    recomputed_tokens: int = 0
    resumed_requests: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0
    missed: Counter[MissReason] = field(default_factory=Counter)
    eviction_ages: EvictionAges = field(default_factory=EvictionAges)
    _admitted: list[Admission] = field(default_factory=list)  # in the step under way

    @property
    def hit_rate(self) -> float:
        """`hit_tokens` per queried token; 0 if no token was queried."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0

    def admit(self, sequence: TokenSequence, hit_tokens: int, missed: MissExplanation) -> None:
        """Note that the step under way admits a sequence. Call it before the sequence has slots."""
        resumed = sequence.step >= 0
        self._admitted.append(
            Admission(sequence, len(sequence.token_ids), hit_tokens, missed, resumed)
        )

    def commit(self) -> None:
        """Count the admissions of a committed step."""
        for admission in self._admitted:
            if admission.resumed:
                self.resumed_requests += 1
                self.resumed_queried_tokens += admission.queried_tokens
                self.resumed_hit_tokens += admission.hit_tokens
            else:
                self.requests += 1
                self.queried_tokens += admission.queried_tokens
                self.hit_tokens += admission.hit_tokens
                self.missed[admission.missed.reason] += 1
                # 0 unless a checkpoint or a window was missing.
                known_tokens = admission.missed.known_tokens
                self.recomputed_tokens += max(0, known_tokens - admission.hit_tokens)
        self._admitted.clear()

    def roll_back(self) -> None:
        """Forget the admissions of a failed step."""
        for admission in self._admitted:
            if not admission.resumed:
                admission.sequence.step = -1
        self._admitted.clear()
