"""The server's metrics for Prometheus, under vLLM's names where the meaning is the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headstart.engine import metrics as engine_metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup
    from headstart.frontend.async_llm import AsyncLLM
    from headstart.omni.params import OmniOutput

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_COUNTERS = {
    "prompt": ("vllm:prompt_tokens", "Prompt tokens of ended requests"),
    "cached": ("headstart:cached_prompt_tokens", "Prompt tokens of ended requests, found cached"),
    "regretted": ("headstart:regretted_tokens", "Prompt tokens computed again after eviction"),
    "generated": ("vllm:generation_tokens", "Generated tokens of ended requests"),
}
_SECONDS_OF = {
    "gap": ("vllm:inter_token_latency_seconds", "Time from a token to the next"),
    "queue": ("vllm:request_queue_time_seconds", "Time that a request waited"),
    "first": ("vllm:time_to_first_token_seconds", "Time to the first token"),
    "warm": ("headstart:warm_time_to_first_token_seconds", "The same, half of the prompt cached"),
    "token": ("vllm:request_time_per_output_token_seconds", "Mean time between tokens"),
    "total": ("vllm:e2e_request_latency_seconds", "Time to the last token"),
    "age": ("headstart:prefix_age_at_hit_seconds", "Age of the prompt that a request hits"),
}
_TOKENS_OF = {
    "prompt": ("vllm:request_prompt_tokens", "Prompt tokens of a request"),
    "answer": ("vllm:request_generation_tokens", "Generated tokens of an answer"),
}
_STAGES = {
    "tokens": ("headstart:stage_tokens", "Tokens of prompts and answers"),
    "cached_tokens": ("headstart:stage_cached_tokens", "Tokens not computed"),
    "loaded_tokens": ("headstart:stage_loaded_tokens", "Tokens from disk or another machine"),
    "seconds": ("headstart:stage_seconds", "Time of a stage's steps"),
}
"""Metrics of a stage of a speaking model, by the field of `StageMetrics`."""


_FAMILIES: Mapping[type, Any] = {
    engine_metrics.Counter: CounterMetricFamily,
    engine_metrics.Gauge: GaugeMetricFamily,
    engine_metrics.Histogram: HistogramMetricFamily,
}


class _Registry:
    """Metrics with the model's name as their first label. Thread-safe."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model

    def make(self, kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
        """Return a metric without further labels, or else one that `count` counts."""
        metric = kind(name, text, ["model_name", *labels], registry=self.registry, **options)
        return metric if labels else metric.labels(self._model)

    def count(self, metric: Any, label: str, value: float = 1) -> None:
        """Add to a counter that has one label more."""
        metric.labels(self._model, label).inc(value)


class _EngineCounts(Collector):
    """The engine's own metrics, read for each scrape in the engine's thread."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._llm = llm
        self._model = model

    def collect(self) -> Iterable[Family]:
        families: dict[str, Any] = {}
        for metric in self._llm.read_metrics():
            meaning = engine_metrics.MEANINGS[metric.name]
            names, labels = ["model_name", *metric.labels], [self._model, *metric.labels.values()]
            kind = _FAMILIES[type(metric)]
            family = families.setdefault(metric.name, kind(metric.name, meaning, labels=names))
            if isinstance(metric, engine_metrics.Histogram):
                family.add_metric(labels, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, engine_metrics.Counter | engine_metrics.Gauge):
                family.add_metric(labels, metric.value)
        return families.values()


class Metrics(_Registry):
    """Counts of a text model's requests since the start, and the engine's own metrics."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        super().__init__(model)
        self.registry.register(_EngineCounts(llm, model))
        self._counters = {key: self.make(Counter, *of) for key, of in _COUNTERS.items()}
        self._seconds = {
            key: self.make(Histogram, *of, buckets=_SECONDS) for key, of in _SECONDS_OF.items()
        }
        self._tokens = {
            key: self.make(Histogram, *of, buckets=_TOKENS) for key, of in _TOKENS_OF.items()
        }
        text = "Answers by the reason why they ended"
        self._ends = self.make(Counter, "vllm:request_success", text, "finished_reason")
        for reason in ("stop", "length", "abort", "error"):
            self.count(self._ends, reason, 0)

    def finished(
        self, request: RequestGroup, output: RequestOutput, age: float | None, num_regretted: int
    ) -> None:
        """Count an answered request; `age` in seconds of the prompt that it hit, if it hit one.

        num_regretted: tokens that were computed although they had been cached once.
        """
        self._count(request)
        self._counters["regretted"].inc(num_regretted)
        self._tokens["prompt"].observe(len(output.prompt_token_ids))
        for answer in output.outputs:
            self.count(self._ends, str(answer.finish_reason))
            self._tokens["answer"].observe(len(answer.token_ids))
        metrics = output.metrics
        is_warm = 2 * output.num_cached_tokens >= len(output.prompt_token_ids)
        for name, value in {
            "queue": metrics.queue,
            "first": metrics.time_to_first_token,
            "warm": metrics.time_to_first_token if is_warm else None,
            "token": metrics.time_per_token,
            "total": metrics.total,
            "age": age,
        }.items():
            if value is not None:
                self._seconds[name].observe(value)

    def cut_off(self, request: RequestGroup, reason: str) -> None:
        """Count a request that ended without an answer: reason "abort", or "error"."""
        self._count(request)
        for answer in request.requests:
            self.count(self._ends, answer.finish_reason or reason)

    def _count(self, request: RequestGroup) -> None:
        if request.start_time is not None:
            self._counters["prompt"].inc(len(request.prompt_token_ids))
            self._counters["cached"].inc(request.requests[0].num_cached_tokens)
        for answer in request.requests:
            self._counters["generated"].inc(len(answer.sampling.output_token_ids))
            for gap in answer.token_gaps:
                self._seconds["gap"].observe(gap)

    def read(self) -> bytes:
        """Return the text of `/metrics`. For the engine's thread."""
        return generate_latest(self.registry)


class SpeechMetrics(_Registry):
    """Counts of a speaking model's requests and of the work of its stages."""

    def __init__(self, model: str) -> None:
        super().__init__(model)
        self._ends = self.make(
            Counter, "vllm:request_success", "Requests that ended", "finished_reason"
        )
        self._under_way = self.make(
            Gauge, "headstart:requests_in_pipeline", "Requests in the pipeline, computed or waiting"
        )
        self._stages = {key: self.make(Counter, *of, "stage") for key, of in _STAGES.items()}
        self._spoken = self.make(Counter, "headstart:speech_seconds", "Seconds of speech made")
        self._first = self.make(
            Histogram, "vllm:time_to_first_token_seconds", "Time to the first token of a text"
        )

    def end(self, reason: str) -> None:
        """Count a request that ended."""
        self.count(self._ends, reason)

    def add(self, output: OmniOutput) -> None:
        """Count a finished answer."""
        for stage, metrics in output.metrics.items():
            for field, counter in self._stages.items():
                self.count(counter, stage, getattr(metrics, field))
        self._spoken.inc(output.seconds)
        first = output.metrics["thinker"].first_output
        if first is not None:
            self._first.observe(first)

    def read(self, under_way: int) -> bytes:
        """Return the text of `/metrics`, with this many requests in the pipeline."""
        self._under_way.set(under_way)
        return generate_latest(self.registry)
