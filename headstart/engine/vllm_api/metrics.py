"""`LLM.get_metrics`: the engine's counts under the names that vLLM gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.engine.engine import Engine

__all__ = ["Counter", "Gauge", "Metric", "read_metrics"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name and labels."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A count since the start."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A value of now."""

    value: float


def read_metrics(engine: Engine) -> list[Metric]:
    """Counts since the start, and values of now. For the engine's thread."""
    manager = engine.manager
    stats, num_blocks = manager.stats, manager.config.num_blocks
    running, waiting = engine.num_requests
    counters = {
        "prefix_cache_queries": stats.queried_tokens,
        "prefix_cache_hits": stats.hit_tokens,
        "num_preemptions": engine.num_preemptions,
    }
    gauges = {
        "num_requests_running": running,
        "num_requests_waiting": waiting,
        "kv_cache_usage_perc": 1 - manager.num_free_blocks / num_blocks,
    }
    return [
        *(Counter(f"vllm:{name}", {}, value) for name, value in counters.items()),
        *(Gauge(f"vllm:{name}", {}, value) for name, value in gauges.items()),
    ]
