"""An engine's counts for Ray's own metrics, and so for its dashboard and its Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headstart.engine.metrics import (
    MEANINGS,
    Counter,
    Gauge,
    Histogram,
    Metric,
)

try:
    from ray.util import metrics
except ModuleNotFoundError:  # a replica without Ray has nobody to tell
    metrics = None

if TYPE_CHECKING:
    from headstart.frontend.async_llm import AsyncLLM

__all__ = ["RayGauges"]


class RayGauges:
    """`vllm:...` and `headstart:...` as `ray_vllm_...` and `ray_headstart_...`, by replica.

    Ray Serve tags them with the replica. Counts are gauges here: Ray's counters can only be added
    to, and the engine counts itself. Of a histogram they have its count and its sum.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._gauges: dict[str, Any] = {}

    async def update(self) -> None:
        """Tell Ray the values of now."""
        for metric in await self._llm.call(self._llm.read_metrics):
            if isinstance(metric, Counter):
                self._set(metric, "_total", metric.value)
            elif isinstance(metric, Gauge):
                self._set(metric, "", metric.value)
            elif isinstance(metric, Histogram):
                self._set(metric, "_count", metric.count)
                self._set(metric, "_sum", metric.sum)

    def _set(self, metric: Metric, ending: str, value: float) -> None:
        name = metric.name.replace(":", "_") + ending
        if name not in self._gauges:
            self._gauges[name] = metrics.Gauge(
                name, MEANINGS[metric.name], tag_keys=tuple(metric.labels)
            )
        self._gauges[name].set(value, tags=metric.labels)
