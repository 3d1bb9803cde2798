"""The names of `vllm.v1.metrics.reader`."""

from headstart.engine.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
