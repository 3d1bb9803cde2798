"""The server's metrics for Prometheus, under vLLM's names where the meaning is the same."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from headstart.engine.vllm_api import metrics as engine_metrics

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from headstart.engine.async_llm import AsyncLLM
    from headstart.engine.outputs import RequestOutput
    from headstart.engine.request import RequestGroup

__all__ = ["Metrics"]

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class _EngineCounts(Collector):
    """What the engine counts itself, read when it is asked for. For the engine's thread."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._llm = llm
        self._model = model

    def collect(self) -> Iterable[Family]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        histograms: list[Family] = []
        for metric in self._llm.read_metrics():
            meaning = engine_metrics.MEANINGS[metric.name]
            names, labels = ["model_name", *metric.labels], [self._model, *metric.labels.values()]
            if isinstance(metric, engine_metrics.Histogram):
                told = HistogramMetricFamily(metric.name, meaning, labels=names)
                told.add_metric(labels, list(metric.buckets.items()), metric.sum)
                histograms.append(told)
                continue
            assert isinstance(metric, (engine_metrics.Counter, engine_metrics.Gauge))
            is_count = isinstance(metric, engine_metrics.Counter)
            kind = CounterMetricFamily if is_count else GaugeMetricFamily
            family = families.setdefault(metric.name, kind(metric.name, meaning, labels=names))
            family.add_metric(labels, metric.value)
        return [*families.values(), *histograms]


class _Gaps(Collector):
    """A histogram of seconds between tokens, to which those of a whole answer are added at once."""

    def __init__(self, name: str, text: str, model: str) -> None:
        self._name, self._text, self._model = name, text, model
        self._counts: NDArray[np.int64] = np.zeros(len(_SECONDS) + 1, np.int64)
        self._sum = 0.0
        self._lock = threading.Lock()

    def add(self, gaps: Sequence[float]) -> None:
        """Seconds from each token to the next."""
        places = np.searchsorted(_SECONDS, gaps)  # a gap as long as a bound is within it
        with self._lock:
            self._counts += np.bincount(places, minlength=len(self._counts))
            self._sum += sum(gaps)

    def collect(self) -> Iterable[Family]:
        told = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        bounds = [*(str(float(bound)) for bound in _SECONDS), "+Inf"]
        with self._lock:
            upto, total = self._counts.cumsum().tolist(), self._sum
        told.add_metric([self._model], list(zip(bounds, upto, strict=True)), total)
        return [told]


class Metrics:
    """Counts since the start. Requests that end are told; the engine's own are read when asked.

    May be told from several threads.
    """

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._gaps = _Gaps("vllm:inter_token_latency_seconds", "From a token to the next", model)
        self.registry.register(_EngineCounts(llm, model))
        self.registry.register(self._gaps)
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that ended")
        self._cached = self._counter("headstart:cached_prompt_tokens", "Those that were cached")
        self._regretted = self._counter(
            "headstart:regretted_tokens", "Prompt tokens computed again that were evicted before"
        )
        self._generated = self._counter("vllm:generation_tokens", "Tokens of answers")
        self._success = Counter(
            "vllm:request_success",
            "Answers by their end",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(model, reason)
        self._times = {
            "queue": self._histogram("vllm:request_queue_time_seconds", "Until it runs"),
            "first": self._histogram("vllm:time_to_first_token_seconds", "Until its first token"),
            "warm": self._histogram(
                "headstart:warm_time_to_first_token_seconds",
                "Until the first token, where at least half of the prompt was cached",
            ),
            "token": self._histogram(
                "vllm:request_time_per_output_token_seconds",
                "Mean time from a token to the next in a request",
            ),
            "total": self._histogram("vllm:e2e_request_latency_seconds", "Until its last token"),
            "age": self._histogram(
                "headstart:prefix_age_at_hit_seconds", "Since the prompt that it hits came"
            ),
        }
        self._sizes = {
            "prompt": self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt", _TOKENS),
            "answer": self._histogram(
                "vllm:request_generation_tokens", "Tokens of an answer", _TOKENS
            ),
        }

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        told = Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return told.labels(self._model)

    def finished(
        self, request: RequestGroup, output: RequestOutput, age: float | None, num_regretted: int
    ) -> None:
        """An answered request; `age` in seconds of the prompt that it hit, if it hit one.

        num_regretted: tokens that were computed although they had been cached once.
        """
        self._count(request)
        self._regretted.inc(num_regretted)
        self._sizes["prompt"].observe(len(output.prompt_token_ids))
        for answer in output.outputs:
            self._success.labels(self._model, answer.finish_reason).inc()
            self._sizes["answer"].observe(len(answer.token_ids))
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
                self._times[name].observe(value)

    def cut_off(self, request: RequestGroup, reason: str) -> None:
        """A request that ended without an answer: reason "abort", or "error"."""
        self._count(request)
        for answer in request.requests:
            self._success.labels(self._model, answer.finish_reason or reason).inc()

    def _count(self, request: RequestGroup) -> None:
        if request.start_time is not None:
            self._prompt.inc(len(request.prompt_token_ids))
            self._cached.inc(request.requests[0].num_cached_tokens)
        for answer in request.requests:
            self._generated.inc(len(answer.sampling.output_token_ids))
            if answer.token_gaps:
                self._gaps.add(list(answer.token_gaps))

    def read(self) -> bytes:
        """All of it as text. For the engine's thread."""
        return generate_latest(self.registry)
