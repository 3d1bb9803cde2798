"""Counterpart of `vllm.v1.metrics.reader`, for programs written for vLLM."""

from headstart.engine.metrics import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
