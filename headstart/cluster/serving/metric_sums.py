"""Metrics of several replicas as one's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from headstart.engine.metrics import Counter, Gauge, Histogram, Metric

__all__ = ["add_up"]

_USAGE = "vllm:kv_cache_usage_perc"


def add_up(told: Iterable[Metric]) -> list[Metric]:
    """One metric of each name and labels: a sum, and of shares the mean."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], list[Metric]] = defaultdict(list)
    for metric in told:
        found[metric.name, tuple(metric.labels.items())].append(metric)
    return [_add(same) for same in found.values()]


def _add(same: list[Metric]) -> Metric:
    """One metric of what several replicas say of it."""
    name, labels = same[0].name, same[0].labels
    counters = [one.value for one in same if isinstance(one, Counter)]
    if counters:
        return Counter(name, labels, sum(counters))
    gauges = [one.value for one in same if isinstance(one, Gauge)]
    if gauges:
        return Gauge(name, labels, sum(gauges) / (len(gauges) if name == _USAGE else 1))
    histograms = [one for one in same if isinstance(one, Histogram)]
    buckets = {
        bound: sum(one.buckets[bound] for one in histograms) for bound in histograms[0].buckets
    }
    count, total = sum(one.count for one in histograms), sum(one.sum for one in histograms)
    return Histogram(name, labels, count, total, buckets)
