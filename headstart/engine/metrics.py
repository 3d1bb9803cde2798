"""The engine's metrics, under vLLM's names where vLLM has them.

`LLM.get_metrics` returns them, and the server's `/metrics` formats them for Prometheus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from headstart.cache import AGE_BOUNDS, MissReason

if TYPE_CHECKING:
    from headstart.engine.drafts.drafting import Drafting
    from headstart.engine.engine import EngineCore


_MISSES = "headstart:prefix_cache_misses"
_LOADED = "headstart:loaded_tokens"
_UNSAVED = "headstart:unsaved_blocks"
_FAULTS = "headstart:tier_faults"
_SLOTS = "headstart:state_slots"
_WINDOWS = "headstart:window_blocks"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
_IDLE = "vllm:kv_block_idle_before_evict_seconds"

MEANINGS: Mapping[str, str] = {
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the cache",
    "vllm:prefix_cache_hits": "Prompt tokens found cached",
    "vllm:num_preemptions": "Times that a running request was preempted",
    "vllm:spec_decode_num_drafts": "Drafts that were verified",
    "vllm:spec_decode_num_draft_tokens": "Drafted tokens that were verified",
    "vllm:spec_decode_num_accepted_tokens": "Drafted tokens that were accepted",
    _BY_POSITION: "Accepted tokens by their position in the draft",
    "vllm:num_requests_running": "Answers being computed",
    "vllm:num_requests_waiting": "Answers waiting to be computed",
    "vllm:kv_cache_usage_perc": "Share of the KV blocks that requests hold",
    "headstart:blocks_evicted": "Cached blocks reused for other content",
    _IDLE: "Seconds that cached blocks had been free when they were reused",
    _SLOTS: "Slots for states of recurrent layers, by use",
    "headstart:checkpoints_dropped": "Checkpoints of recurrent layers dropped to free a slot",
    _WINDOWS: "Blocks of the layers with a sliding window, by use",
    "headstart:window_blocks_evicted": "Cached window blocks reused for other content",
    "headstart:recomputed_tokens": "Cached prompt tokens recomputed for a missing state or window",
    _LOADED: "Tokens of prompts loaded from disk or another machine",
    "headstart:declined_tokens": "Stored tokens that were faster to compute than to load",
    "headstart:stored_blocks": "Blocks written to disk or another machine",
    "headstart:stored_states": "States of recurrent layers written to disk or another machine",
    "headstart:dropped_blocks": "Blocks reused before they could be stored",
    "headstart:late_answers": "Times that a tier timed out or took longer than computing",
    _UNSAVED: "Blocks that a tier did not save, because it failed or was paused",
    _FAULTS: "Failures of tiers, by kind",
    _MISSES: "Requests by the reason for not hitting more tokens",
}
"""The meaning of each name."""


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
    """A current value."""

    value: float


@dataclass(slots=True)
class Vector(Metric):
    """A list of counts since the start."""

    values: list[int]


@dataclass(slots=True)
class Histogram(Metric):
    """A histogram since the start. buckets: number of values up to each bound, "+Inf" last."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(engine: EngineCore) -> list[Metric]:
    """Return all metrics. Call in the engine's thread."""
    manager = engine.manager
    stats, num_blocks = manager.stats, manager.config.num_blocks
    running, waiting = map(len, engine.requests)
    ages = stats.eviction_ages
    bounds = [*(str(float(bound)) for bound in AGE_BOUNDS), "+Inf"]
    buckets = dict(zip(bounds, accumulate(ages.counts), strict=True))
    metrics: list[Metric] = [
        Counter("vllm:prefix_cache_queries", {}, stats.queried_tokens),
        Counter("vllm:prefix_cache_hits", {}, stats.hit_tokens),
        Counter("vllm:num_preemptions", {}, engine.num_preemptions),
        Counter("headstart:blocks_evicted", {}, manager.num_evictions),
        Gauge("vllm:num_requests_running", {}, running),
        Gauge("vllm:num_requests_waiting", {}, waiting),
        Gauge("vllm:kv_cache_usage_perc", {}, 1 - manager.num_free_blocks / num_blocks),
        Histogram(_IDLE, {}, sum(ages.counts), ages.seconds, buckets),
    ]
    if engine.drafting is not None:
        metrics += _read_drafts(engine.drafting)
    if (states := manager.states) is not None:
        uses = {"running": states.num_working, "free": states.num_free}
        uses["checkpoint"] = states.num_slots - sum(uses.values())
        metrics += [
            *(Gauge(_SLOTS, {"use": use}, count) for use, count in uses.items()),
            Counter("headstart:checkpoints_dropped", {}, states.num_dropped),
        ]
    if (windows := manager.windows) is not None:
        uses = {"empty": windows.num_empty, "cached": windows.num_free - windows.num_empty}
        uses["held"] = windows.num_blocks - windows.num_free
        metrics += [
            *(Gauge(_WINDOWS, {"use": use}, count) for use, count in uses.items()),
            Counter("headstart:window_blocks_evicted", {}, windows.num_dropped),
        ]
    if states is not None or windows is not None:
        metrics.append(Counter("headstart:recomputed_tokens", {}, stats.recomputed_tokens))
    if engine.tiers is not None:
        tiers = engine.tiers.stats
        faults = tiers.faults.items()
        metrics += [
            *(Counter(_LOADED, {"tier": tier}, n) for tier, n in tiers.loaded_tokens.items()),
            Counter("headstart:declined_tokens", {}, tiers.declined_tokens),
            Counter("headstart:stored_blocks", {}, tiers.saved_blocks),
            Counter("headstart:stored_states", {}, tiers.saved_states),
            Counter("headstart:dropped_blocks", {}, tiers.dropped_blocks),
            Counter("headstart:late_answers", {}, tiers.late_answers),
            *(Counter(_UNSAVED, {"tier": tier}, n) for tier, n in tiers.unsaved_blocks.items()),
            *(Counter(_FAULTS, {"tier": t, "fault": kind}, n) for (t, kind), n in faults),
        ]
    return metrics + [
        Counter(_MISSES, {"reason": reason.name.lower()}, stats.missed[reason])
        for reason in MissReason
        if reason is not MissReason.NONE
    ]


def _read_drafts(drafting: Drafting) -> list[Metric]:
    accepted = enumerate(drafting.accepted_by_position)
    return [
        Counter("vllm:spec_decode_num_drafts", {}, drafting.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", {}, drafting.num_drafted),
        Counter("vllm:spec_decode_num_accepted_tokens", {}, drafting.num_accepted),
        *(Counter(_BY_POSITION, {"position": str(position)}, n) for position, n in accepted),
    ]


def join_positions(metrics: list[Metric]) -> list[Metric]:
    """Return metrics with the counts by position as one `Vector`, as in vLLM."""
    counts = [m.value for m in metrics if m.name == _BY_POSITION and isinstance(m, Counter)]
    others = [metric for metric in metrics if metric.name != _BY_POSITION]
    return [*others, Vector(_BY_POSITION, {}, counts)] if counts else others
