"""The engine's counts and values of now, under the names that vLLM gives them; the only table.

`LLM.get_metrics` hands them out as they are, the server's `/metrics` in the format of Prometheus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

from headstart.cache import AGE_BOUNDS, EvictionAges, MissReason

if TYPE_CHECKING:
    from headstart.engine.engine import EngineCore


_REASONS = [reason for reason in MissReason if reason is not MissReason.NONE]
_MISSES = "headstart:prefix_cache_misses"
_LOADED = "headstart:loaded_tokens"
_UNSAVED = "headstart:unsaved_blocks"
_FAULTS = "headstart:tier_faults"
_IDLE = "vllm:kv_block_idle_before_evict_seconds"

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "vllm:prefix_cache_queries": "Prompt tokens looked up in the cache",
        "vllm:prefix_cache_hits": "Prompt tokens found cached",
        "vllm:num_preemptions": "Times that a running request gave its blocks to another",
        "vllm:num_requests_running": "Answers being computed",
        "vllm:num_requests_waiting": "Answers waiting to be computed",
        "vllm:kv_cache_usage_perc": "Share of the KV blocks that requests hold",
        "headstart:blocks_evicted": "Cached blocks reused for other content",
        _IDLE: "How long cached blocks had been free when they were reused",
        _LOADED: "Tokens of prompts loaded from disk or another machine",
        "headstart:declined_tokens": "Tokens that were stored, and sooner computed than loaded",
        "headstart:stored_blocks": "Blocks written to disk or another machine",
        "headstart:dropped_blocks": "Blocks reused before they could be stored",
        "headstart:late_answers": "Times that a tier was silent or slower than computing",
        _UNSAVED: "Blocks that a tier was not given: it failed, or was left alone",
        _FAULTS: "What went wrong with tiers, by kind",
        _MISSES: "Requests by the reason why they hit no more of the cache",
    }
)
"""What each name means."""


@dataclass(slots=True)
class Metric:
    """A metric's name and labels."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """A count since the start."""

    value: int


@dataclass(slots=True)
class Gauge(Metric):
    """A value of now."""

    value: float


@dataclass(slots=True)
class Vector(Metric):
    """A list of counts. No metric is one here: programs ask `isinstance` of each."""

    values: list[int]


@dataclass(slots=True)
class Histogram(Metric):
    """Values since the start: how many up to each bound, of which the last is "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(engine: EngineCore) -> list[Metric]:
    """Counts since the start, and values of now. For the engine's thread."""
    manager = engine.manager
    stats, num_blocks = manager.stats, manager.config.num_blocks
    running, waiting = map(len, engine.requests)
    counters = {
        "vllm:prefix_cache_queries": stats.queried_tokens,
        "vllm:prefix_cache_hits": stats.hit_tokens,
        "vllm:num_preemptions": engine.num_preemptions,
        "headstart:blocks_evicted": manager.num_evictions,
    }
    gauges = {
        "vllm:num_requests_running": running,
        "vllm:num_requests_waiting": waiting,
        "vllm:kv_cache_usage_perc": 1 - manager.num_free_blocks / num_blocks,
    }
    return [
        *(Counter(name, {}, value) for name, value in counters.items()),
        *(Gauge(name, {}, value) for name, value in gauges.items()),
        _read_ages(stats.eviction_ages),
        *_read_tiers(engine),
        *(Counter(_MISSES, {"reason": r.name.lower()}, stats.missed[r]) for r in _REASONS),
    ]


def _read_ages(ages: EvictionAges) -> Histogram:
    bounds = [*(str(float(bound)) for bound in AGE_BOUNDS), "+Inf"]
    buckets = dict(zip(bounds, accumulate(ages.counts), strict=True))
    return Histogram(_IDLE, {}, sum(ages.counts), ages.seconds, buckets)


def _read_tiers(engine: EngineCore) -> list[Metric]:
    """What came from tiers and went there; nothing where there are none."""
    if engine.tiers is None:
        return []
    stats = engine.tiers.stats
    faults = stats.faults.items()
    return [
        *(Counter(_LOADED, {"tier": tier}, n) for tier, n in stats.loaded_tokens.items()),
        Counter("headstart:declined_tokens", {}, stats.declined_tokens),
        Counter("headstart:stored_blocks", {}, stats.saved_blocks),
        Counter("headstart:dropped_blocks", {}, stats.dropped_blocks),
        Counter("headstart:late_answers", {}, stats.late_answers),
        *(Counter(_UNSAVED, {"tier": tier}, n) for tier, n in stats.unsaved_blocks.items()),
        *(Counter(_FAULTS, {"tier": t, "fault": kind}, n) for (t, kind), n in faults),
    ]
